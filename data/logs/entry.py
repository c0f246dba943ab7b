"""What a reader of a tool's log gives: requests, one at a time, with what is known of when and where they ran."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

Reason = Literal[
    "other log line",
    "joined with another line",
    "no chat request",
    "health check",
    "failed request",
    "answer without its request",
    "no text logged",
    "raw prompt",
    "prompt in an unread markup",
    "text cut by the log",
    "text redacted by the log",
    "message part that is not text",
    "tools without their definitions",
    "logged twice",
]
"""Why a line of a log gives no conversation. Counted, and no error."""


MOST_TOKENS = (1 << 31) - 1
"""No count of tokens is larger: what is, is no count."""


class Timing(NamedTuple):
    """When, where and how long a request ran; None: the log does not tell."""

    started: float | None = None
    """Unix seconds."""
    ended: float | None = None
    replica: str | None = None
    """Which copy of the engine answered."""
    prompt_tokens: int | None = None
    answer_tokens: int | None = None


@dataclass(frozen=True)
class Entry:
    """One request of a log, or a line that holds none."""

    where: str
    line: Mapping[str, Any] = field(default_factory=dict)
    """What `records.parse` reads: messages, tools, sampling fields, labels of the line."""
    left_out: Reason | None = None
    """Why `line` holds no conversation; None: it holds one."""
    timing: Timing = field(default_factory=Timing)
    in_flight: bool = True
    """Whether an engine was busy with it, as far as this line tells; not, where another line of the log counts it."""
    dated: bool = True
    """Whether the times are of a known year; if not, only their differences mean something."""


class LogReader(Protocol):
    """Reads one source's log in the order it was written."""

    def feed(self, value: Any, where: str, server: str) -> Iterable[Entry]:
        """Take one line, value or row; `server` is whose file it stands in. Raises InputError starting with `where`."""
        ...

    def finish(self) -> Iterable[Entry]:
        """What still waits when the log ends."""
        ...


class OneByOne:
    """A reader of a log whose every value stands for itself."""

    def __init__(self, entries: Callable[[Any, str], Iterable[Entry]]) -> None:
        self._entries = entries

    def feed(self, value: Any, where: str, server: str) -> Iterable[Entry]:
        return self._entries(value, where)

    def finish(self) -> Iterable[Entry]:
        return ()
