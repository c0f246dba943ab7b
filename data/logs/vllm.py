"""vLLM's request log, as `vllm serve --enable-log-requests --enable-log-outputs` writes it.

    INFO 11-28 10:00:00 [logger.py:40] Received request chatcmpl-1: params: SamplingParams(...), lora_request: None.
    DEBUG 11-28 10:00:00 [logger.py:30] Request chatcmpl-1 details: prompt: '...', prompt_token_ids: [...], ...
    INFO 11-28 10:00:04 [logger.py:60] Generated response chatcmpl-1: output: '...', output_token_ids: [...], ...

Older versions write the prompt in the first line, newer ones the output's ids in a line of their own. Lines may stand
in JSON (`--logging-config.formatter json`, a formatter of python-json-logger, Docker's own), and behind the prefixes of
Docker and Kubernetes. A text line has no year: it comes from the source's `year`, or from the prefix.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from ..read_limits import LONGEST_LINE_BYTES, json_within
from .chat import Entry, JoinedLines, Reason, Timing, line_of
from .containers import ContainerLines, LogLine
from .parsing import Rendered, arguments, fields, literal, seconds, unread_reason, unrender

_LINE = re.compile(
    r"(Received request|Request|Generated response|Finished request) (\S+?)"
    r"(?: (details|failed|aborted|\(streaming \w+\)(?: details)?))?(?:: |\.$|(?<=failed) )"
)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_ISO = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?")
_MONTH_DAY = re.compile(r"(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)(?:[.,](\d+))?")
_NO_TEXT = re.compile(r"\[tool_calls: .*\]|<streaming_complete: \d+ tokens>", re.DOTALL)
"""What is logged in place of an answer's text."""
_LIMITS = re.compile(r"(?:, )?\b(?:max_tokens|seed)=[^,)]*")
_PROCESS = re.compile(r"\(\w+ pid=\d+\) ")
_MOST_WAITING = 4096  # a log without outputs never shows that a request ended
_MOST_WAITING_BYTES = 16 * LONGEST_LINE_BYTES
_MOST_OF_ONE_ID = 256  # each of them is looked at with every line of the id, which a client may choose
_MOST_PARTED = 4  # requests of one id between whose two lines others may stand
_MOST_BETWEEN = 5.0  # seconds between the two lines of a request, whose times may be whole seconds
_LEAP_YEAR = 2000
_HALF_A_YEAR, _A_YEAR = 183 * 86400.0, 360 * 86400.0


@dataclass
class _Request:
    """A request: what is printed in its lines, in their order."""

    where: str
    server: str
    started: float | None
    dated: bool
    process: str
    received: list[str] = field(default_factory=list)
    """Of the lines that show it: `Received request`, and the one with its prompt."""
    has_params: bool = False
    """Whether the first of them was read; `has_details`: the other one."""
    has_details: bool = False
    parted: bool = False
    """Whether its lines came while another request of its id waited for one of its own, which may be one of these."""
    mixed: bool = False
    """Whether those have other settings."""
    settings: int = 0
    """Hash of the line that shows them, without the limit, which is what the prompt left where there was none."""
    answered: list[str] = field(default_factory=list)
    """Of the lines that show its answer."""
    prompt: tuple[int, int] = (0, 0)
    """Number of the lines above when the prompt in them was last looked for, and its hash."""
    ended: float | None = None
    left_out: Reason | None = None

    @property
    def size(self) -> int:
        """Bytes of its lines, in memory."""
        return sum(map(sys.getsizeof, (*self.received, *self.answered)))

    @property
    def prompt_hash(self) -> int:
        """Hash of the prompt that its lines show."""
        if self.prompt[0] != len(self.received):
            self.prompt = len(self.received), hash(self.shown().get("prompt"))
        return self.prompt[1]

    @property
    def whole(self) -> bool:
        """Whether all lines that show it were read."""
        return self.has_params and self.has_details

    def entry(self) -> Entry:
        # 1) The answer, in the last of its lines, and its ids, in any.
        answers = [_parts(line) for line in self.answered]
        counts = [count for parts in reversed(answers) if (count := _count_ids(parts.get("output_token_ids")))]
        shown = self.shown()
        prompt_ids = _count_ids(shown.get("prompt_token_ids"))
        timing = Timing(self.started, self.ended, self.server, prompt_ids, counts[0] if counts else None)

        # 2) The conversation needs a prompt that can be taken apart; times count without one too.
        rendered = self.left_out or ("text cut by the log" if self._is_cut() else _rendered(shown))
        if self.mixed and isinstance(rendered, Rendered):
            rendered = "several requests of one id at once"
        if not isinstance(rendered, Rendered):
            return Entry(self.where, {}, rendered, timing, dated=self.dated)
        answer = literal(answers[-1].get("output")) if answers else None
        text = None if isinstance(answer, str) and _NO_TEXT.fullmatch(answer) else answer
        line = line_of(rendered, text, _settings(shown))
        return Entry(self.where, line, None, timing, dated=self.dated, pieces=rendered.pieces)

    def _is_cut(self) -> bool:
        """Whether the line of its settings is missing, or one does not end as vLLM ends it: an adapter may be there."""
        return not self.has_params or any(not line.rstrip().endswith(".") for line in self.received)

    def shown(self) -> dict[str, str]:
        """What its lines show of it by name; of the parts that tell nothing the earlier ones stay."""
        found: dict[str, str] = {}
        for line in self.received:
            parts = _parts(line)
            parts["params"] = parts.get("params") or parts.get("sampling_params") or ""
            found |= {name: part for name, part in parts.items() if part and (name != "prompt" or part != "None")}
        return found


class VllmReader:
    """Reader that joins the lines of each request by its id, under which a client may send several."""

    def __init__(self, year: int | None) -> None:
        self._year = year
        self._lines = ContainerLines()
        self._last: dict[str, datetime] = {}
        """Latest date of each server's lines that name no year."""
        self._read: dict[str, tuple[str, Any, float | None, bool]] = {}
        """What stood before each server's last line, and the time that it gave: many lines share a second."""
        self._waiting: dict[tuple[str, str], list[_Request]] = {}
        self._count = self._bytes = 0

    def feed(self, value: str, where: str, server: str) -> Iterable[Entry | JoinedLines]:
        # Lines that are of no request, then the parts of one: its start and details, its failure or end, the answer.
        line = self._lines.whole(value, where, server)
        if line is None:
            return
        where = line.where
        text, stamp = _message(line)
        found = _LINE.search(text)
        # Inside of a text that another line quotes, such as a request's body, these are a client's words.
        found = None if found is None or _opens(text[: found.start()]) else found
        kind, name, form = found.groups() if found else (None, "", None)
        if found is None or (kind == "Request" and form not in ("details", "failed", "aborted")):
            yield Entry(where, left_out="text cut by the log" if line.is_cut else "other log line")
            return
        before = text[: found.start()]
        read = self._read.get(server)
        if read is None or read[:2] != (before, stamp):
            read = self._read[server] = (before, stamp, *self._when(before, stamp, server))
        when, dated = read[2:]
        rest = text[found.end() :]
        if kind == "Request" and form != "details":
            yield from self._ended(where, server, name, form == "failed")
        elif kind in ("Received request", "Request"):
            # Of several API servers in one log, each writes both lines of its requests.
            process = prefix[0] if (prefix := _PROCESS.search(before)) else ""
            yield from self._received(_Request(where, server, when, dated, process), name, kind, rest)
        elif form is None or "delta" not in form:
            yield from self._answered(where, server, name, rest, when, dated, "details" in (form or ""))

    def finish(self) -> Iterator[Entry | JoinedLines]:
        yield from (Entry(where, left_out="text cut by the log") for where in self._lines.unfinished())
        yield from [request for requests in self._waiting.values() for request in requests]
        self._waiting.clear()

    def _received(self, new: _Request, name: str, kind: str, rest: str) -> Iterator[JoinedLines]:
        """Add a line to the request of its id that lacks it, or begin a `new` one with it."""
        # 1) A request has each of two lines once: another one of the same kind and id begins another request.
        waiting = self._waiting.setdefault((new.server, name), [])
        has = "has_params" if kind == "Received request" else "has_details"
        here = [one for one in waiting if one.process == new.process]
        request = next((one for one in here[-_MOST_PARTED:] if not getattr(one, has) and _at_once(one, new)), None)
        if request is None:
            request = new
            waiting.append(request)
            here.append(request)
            self._count += 1
        setattr(request, has, True)
        request.received.append(rest)
        self._bytes += sys.getsizeof(rest)
        if has == "has_params":
            request.settings = hash(_LIMITS.sub("", rest))
            request.has_details |= rest.startswith("prompt: ")  # older versions write one line

        # 2) Of several that wait for their second line nothing tells whose it is, unless all have the same settings.
        halves = [one for one in here[-_MOST_PARTED:] if one is request or (not one.whole and _at_once(one, new))]
        joined = {id(one) for one in halves} if len(halves) > 1 else set()
        parted = [one for one in here if one.parted or id(one) in joined]
        mixed = len({one.settings for one in parted if one.has_params}) > 1
        for one in parted:
            one.parted, one.mixed = True, mixed

        # 3) The oldest ones are given up, without an end.
        if len(waiting) > _MOST_OF_ONE_ID:
            yield self._take((new.server, name), 0)
        while self._count > _MOST_WAITING or (self._bytes > _MOST_WAITING_BYTES and self._count > 1):
            yield self._take(next(iter(self._waiting)), 0)

    def _ended(self, where: str, server: str, name: str, failed: bool) -> Iterator[Entry | JoinedLines]:
        """End a request without an answer: the newest of those that failed, the oldest of those that were given up."""
        if (server, name) not in self._waiting:
            yield Entry(where, left_out="other log line")
            return
        request = self._take((server, name), -1 if failed else 0)
        request.left_out = "failed request" if failed else None
        yield request

    def _answered(
        self,
        where: str,
        server: str,
        name: str,
        rest: str,
        when: float | None,
        dated: bool,
        only_ids: bool,
    ) -> Iterator[Entry | JoinedLines]:
        # A completion's first prompt is logged as its id with a number behind it, its answer without one.
        names = (name, f"{name}-0", f"{name}_0")
        key = next(((server, known) for known in names if (server, known) in self._waiting), None)
        if key is None:
            yield Entry(where, left_out="joined with another line" if only_ids else "answer without its request")
            return

        # Of requests with one id and several prompts nothing tells which was answered: all wait for no answer, under
        # names of their own, which no id has.
        waiting = self._waiting[key]
        if only_ids:
            waiting[-1].answered.append(rest)
            self._bytes += sys.getsizeof(rest)
            return
        if len({one.prompt_hash for one in waiting} if len(waiting) > 1 else ()) > 1:
            for one in self._waiting.pop(key):
                self._waiting[server, f"{name} {len(self._waiting)} {where}"] = [one]
            yield Entry(where, left_out="answer without its request")
            return
        request = self._take(key, -1)
        request.answered.append(rest)
        # A date of an unknown year and one of a known year make no length.
        request.ended = when if dated == request.dated else None
        yield request

    def _take(self, key: tuple[str, str], index: int) -> _Request:
        """Remove one of the requests that wait under an id."""
        waiting = self._waiting[key]
        request = waiting.pop(index)
        self._count, self._bytes = self._count - 1, self._bytes - request.size
        if not waiting:
            del self._waiting[key]
        return request

    def _when(self, before: str, stamp: Any, server: str) -> tuple[float | None, bool]:
        """Unix seconds of a line (None: no time), and whether their year is known."""
        # A full date, of a prefix or beside the line, wins over vLLM's own month and day.
        iso = _ISO.search(before)
        when = seconds(iso[0] if iso else stamp)
        if when is not None:
            return when, True
        found = _MONTH_DAY.search(before) or (_MONTH_DAY.search(stamp) if isinstance(stamp, str) else None)
        date = self._dated([int(found[i]) for i in range(1, 6)], server) if found else None
        if found is None or date is None:
            return None, False
        return date.timestamp() + float(f"0.{found[6] or 0}"), self._year is not None

    def _dated(self, numbers: list[int], server: str) -> datetime | None:
        """Date of a line by its month, day and time, in a year that is counted on from the source's; None: no date."""
        # A fall by half a year is a new year. Lines of several processes may be out of order: a rise by nearly a year
        # is a line of the old one.
        last = self._last.get(server)
        date = _date(last.year if last else self._year or _LEAP_YEAR, numbers)
        if last and date:
            gap = (date - last).total_seconds()
            date = _date(last.year + (gap < -_HALF_A_YEAR) - (gap > _A_YEAR), numbers)
        if date and (last is None or date > last):
            self._last[server] = date
        return date


def _at_once(one: _Request, other: _Request) -> bool:
    """Whether lines may be of one request by their times: a process writes both at once. A line that was lost leaves a
    half, which the next request of its id would complete."""
    return one.started is None or other.started is None or abs(one.started - other.started) <= _MOST_BETWEEN


def _date(year: int, numbers: list[int]) -> datetime | None:
    month, day, hour, minute, second = numbers
    try:
        return datetime(year, month, day, hour, minute, second, tzinfo=UTC)
    except ValueError:
        return None


def _opens(before: str) -> bool:
    """Whether a text opens an object or a string that it does not close."""
    return before.count("{") > before.count("}") or before.count('"') % 2 == 1 or before.count("'") % 2 == 1


def _message(line: LogLine) -> tuple[str, Any]:
    """Text of a log line, and the time beside it: of a field if the line is JSON, else of the container's runtime."""
    if line.text.lstrip().startswith("{"):
        try:
            values = json_within(line.text)
        except ValueError:
            values = None
        if isinstance(values, dict):
            text = values.get("message", values.get("log", values.get("msg")))
            stamp = values.get("asctime") or values.get("timestamp") or values.get("time")
            return (text.rstrip() if isinstance(text, str) else ""), stamp or line.stamp
    return _COLOURS.sub("", line.text) if "\x1b" in line.text else line.text, line.stamp


def _parts(rest: str) -> dict[str, str]:
    """Named parts of a line, behind the request's id."""
    return fields(rest.rstrip().removesuffix("."))


def _settings(shown: dict[str, str]) -> dict[str, Any]:
    """Settings from the printed SamplingParams; what is no literal stays as it is printed."""
    params = shown.get("params", "")
    printed = {
        **arguments(params),
        "lora_request": shown.get("lora_request"),
        "prompt_embeds": shown.get("prompt_embeds shape"),
    }
    settings = {
        name: part if (value := literal(part)) is None else value
        for name, part in printed.items()
        if part not in (None, "None")
    }
    return settings | ({"use_beam_search": True} if params.startswith("BeamSearchParams(") else {})


def _rendered(shown: dict[str, str]) -> Rendered | Reason:
    params = shown.get("params")
    if params and not params.endswith(")"):
        return "text cut by the log"
    if params is not None and not params.startswith(("SamplingParams(", "BeamSearchParams(")):
        return "no chat request"
    prompt = literal(shown.get("prompt"))
    if not isinstance(prompt, str):
        return "no text logged" if shown.get("prompt") in (None, "None") else "text cut by the log"
    return unrender(prompt) or unread_reason(prompt)


def _count_ids(part: str | None) -> int | None:
    """Number of token ids in a printed list; None where they are not logged."""
    if part is None or not part.startswith("["):
        return None
    inner = part.strip("[]").strip()
    return inner.count(",") + 1 if inner else None
