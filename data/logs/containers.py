"""Log lines of container runtimes: Docker's JSON files and Kubernetes' text (CRI), both of which cut long lines.

They cut at a number of bytes, so within characters. Kubernetes' pieces hold the bytes as they were; in Docker's the
halves of a character are replaced, and nothing tells which one it was.
"""

import io
import re
from typing import Any, NamedTuple

from ...errors import InputError
from ...storage import size_text
from ..read_limits import LONGEST_LINE_BYTES, json_within

_CRI = re.compile(r"(\d{4}-\d\d-\d\dT\S+) (stdout|stderr) ([PF])(?::\S+)? ")
CRI_LINE = re.compile(_CRI.pattern.encode())
"""The same in bytes, which may not be text before they are joined."""
_LOST = "\ufffd"
_STREAMS = ("stdout", "stderr")


class LogLine(NamedTuple):
    """One line of what runs in a container."""

    where: str
    """Place of its first piece."""
    text: str
    stamp: Any
    """Time that the runtime wrote beside it; None: the line has no envelope."""
    is_cut: bool = False
    """Whether it ends where Docker cut it within a character."""


class _Begun:
    """A line that goes on. Its pieces are put together once: there may be a million."""

    def __init__(self, where: str, stamp: Any) -> None:
        self.where, self._stamp = where, stamp
        self._pieces, self._last = io.StringIO(), ""

    def add(self, text: str) -> None:
        self._pieces.write(text)
        self._last = text
        if self._pieces.tell() > LONGEST_LINE_BYTES:
            raise InputError(f"{self.where}: pieces of one line are longer than {size_text(LONGEST_LINE_BYTES)}")

    @property
    def ends_within_a_character(self) -> bool:
        return self._last.endswith(_LOST)

    def line(self, is_cut: bool) -> LogLine:
        return LogLine(self.where, self._pieces.getvalue(), self._stamp, is_cut)


class ContainerLines:
    """Takes off the envelopes of lines, and joins the pieces of each server's streams."""

    def __init__(self) -> None:
        self._begun: dict[tuple[str, str], _Begun] = {}

    def whole(self, value: str, where: str, server: str) -> LogLine | None:
        """The line that this one ends, without its envelope; None: it goes on.

        Raises InputError for an endless one and for what is no UTF-8.
        """
        # 1) The envelope: the stream, the time, and whether the line ends here.
        stream, text, stamp, ends = "", value, None, True
        if cri := _CRI.match(value):
            stamp, stream, mark = cri.groups()
            text, ends = value[cri.end() :], mark == "F"
        elif value.startswith("{") and '"log"' in value and '"stream"' in value:
            line = _object(value)
            if isinstance(line.get("log"), str) and line.get("stream") in _STREAMS:
                stream, stamp = line["stream"], line.get("time")
                text, ends = line["log"].rstrip("\n"), line["log"].endswith("\n")

        # 2) The pieces before it, up to half a character of Docker's.
        begun = self._begun.pop((server, stream), None) if stream else None
        if begun is None and ends:
            found = LogLine(where, text, stamp)
        else:
            begun = begun or _Begun(where, stamp)
            is_cut = cri is None and begun.ends_within_a_character
            if not is_cut:
                begun.add(text)
            if not ends:
                self._begun[server, stream] = begun
                return None
            found = begun.line(is_cut)
        return found if cri is None else found._replace(text=_unescaped(found))

    def unfinished(self) -> list[str]:
        """Places of lines whose end did not come: their log was cut."""
        return [begun.where for begun in self._begun.values()]


def _unescaped(line: LogLine) -> str:
    """Text of a line whose bytes that were no text alone are escaped."""
    try:
        return line.text.encode(errors="surrogateescape").decode()
    except UnicodeError:
        raise InputError(f"{line.where}: not valid UTF-8") from None


def _object(text: str) -> dict[str, Any]:
    try:
        found = json_within(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
