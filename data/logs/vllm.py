"""vLLM's request log, as `vllm serve --enable-log-requests --enable-log-outputs` writes it.

    INFO 11-28 10:00:00 [logger.py:40] Received request chatcmpl-1: params: SamplingParams(...), lora_request: None.
    DEBUG 11-28 10:00:00 [logger.py:30] Request chatcmpl-1 details: prompt: '...', prompt_token_ids: [...], ...
    INFO 11-28 10:00:04 [logger.py:60] Generated response chatcmpl-1: output: '...', output_token_ids: [...], ...

Older versions write the prompt in the first line. Lines may stand in JSON (`--logging-config.formatter json`, a
formatter of python-json-logger, Docker's own), and behind the prefixes of Docker and Kubernetes. A text line has no
year: it comes from the source's `year`, or from the prefix.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from .chat import Entry, Reason, Timing, line_of
from .parsing import Rendered, arguments, fields, literal, seconds, unread_reason, unrender

_LINE = re.compile(
    r"(Received request|Request|Generated response|Finished request) (\S+?)(?: (details|\(streaming \w+\)))?(?:: |\.$)"
)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_ISO = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?")
_MONTH_DAY = re.compile(r"(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)(?:[.,](\d+))?")
_MOST_WAITING = 4096  # a log without outputs never shows that a request ended
_LEAP_YEAR = 2000
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")


@dataclass
class _Request:
    """A request whose answer has not been logged yet."""

    where: str
    server: str
    started: float | None
    dated: bool
    params: str | None = None
    prompt: str | None = None
    prompt_ids: str | None = None


class VllmReader:
    """Reader that joins the lines of each request by its id."""

    def __init__(self, year: int | None) -> None:
        self._year, self._month, self._dated = year or _LEAP_YEAR, 0, year is not None
        self._waiting: dict[tuple[str, str], _Request] = {}

    def feed(self, value: str, where: str, server: str) -> Iterable[Entry]:
        # Lines that are of no request, then the parts of one: start, details, and the answer.
        text, stamp = _message(value)
        found = _LINE.search(text)
        if not found:
            yield Entry(where, left_out="other log line")
            return
        kind, name = found[1], found[2]
        if kind == "Request" and found[3] != "details":
            yield Entry(where, left_out="other log line")
            return
        when, dated = self._when(text[: found.start()], stamp)
        rest = text[found.end() :]
        if kind in ("Received request", "Request"):
            yield from self._received(where, server, name, rest, when, dated)
        elif found[3] != "(streaming delta)":
            yield from self._answered(where, server, name, rest, when, dated)

    def finish(self) -> Iterator[Entry]:
        for request in self._waiting.values():
            yield _entry(request, None, {})
        self._waiting.clear()

    def _received(
        self, where: str, server: str, name: str, rest: str, when: float | None, dated: bool
    ) -> Iterator[Entry]:
        # The prompt may stand in the first line or in the details; both are the same request.
        request = self._waiting.setdefault((server, name), _Request(where, server, when, dated))
        parts = fields(rest)
        request.params = parts.get("params") or parts.get("sampling_params") or request.params
        request.prompt_ids = parts.get("prompt_token_ids") or request.prompt_ids
        if parts.get("prompt", "None") != "None":
            request.prompt = parts["prompt"]
        # The oldest one is given up, without an end.
        if len(self._waiting) > _MOST_WAITING:
            yield _entry(self._waiting.pop(next(iter(self._waiting))), None, {})

    def _answered(
        self, where: str, server: str, name: str, rest: str, when: float | None, dated: bool
    ) -> Iterator[Entry]:
        # A completion's first prompt is logged as its id with a number behind it, its answer without one.
        names = (name, f"{name}-0", f"{name}_0")
        key = next(((server, known) for known in names if (server, known) in self._waiting), None)
        if key is None:
            yield Entry(where, left_out="answer without its request")
            return
        request = self._waiting.pop(key)
        # A date of an unknown year and one of a known year make no length.
        yield _entry(request, when if dated == request.dated else None, fields(rest))

    def _when(self, before: str, stamp: Any) -> tuple[float | None, bool]:
        """Unix seconds of a line (None: no time), and whether their year is known."""
        # A full date, of a prefix or beside the line, wins over vLLM's own month and day.
        iso = _ISO.search(before)
        when = seconds(iso[0] if iso else stamp)
        if when is not None:
            return when, True
        found = _MONTH_DAY.search(before) or (_MONTH_DAY.search(stamp) if isinstance(stamp, str) else None)
        if not found:
            return None, False
        # The year is counted on from the source's: a fall by more than six months is a new year.
        month, day, hour, minute, second = (int(found[i]) for i in range(1, 6))
        if month < self._month - 6:  # the log goes on into the next year
            self._year += 1
        self._month = month
        try:
            date = datetime(self._year, month, day, hour, minute, second, tzinfo=UTC)
        except ValueError:
            return None, False
        return date.timestamp() + float(f"0.{found[6] or 0}"), self._dated


def _message(value: str) -> tuple[str, Any]:
    """Text of a log line, and the time field beside it if the line is JSON (None: it is plain text)."""
    if value.lstrip().startswith("{"):
        try:
            line = json.loads(value)
        except (ValueError, RecursionError):
            line = None
        if isinstance(line, dict):
            text = line.get("message", line.get("log", line.get("msg")))
            stamp = line.get("asctime") or line.get("timestamp") or line.get("time")
            return (text.rstrip() if isinstance(text, str) else ""), stamp
    return _COLOURS.sub("", value), None


def _entry(request: _Request, ended: float | None, answered: dict[str, str]) -> Entry:
    answer_ids = _count_ids(answered.get("output_token_ids"))
    # The conversation needs a prompt that can be taken apart; times count without one too.
    timing = Timing(request.started, ended, request.server, _count_ids(request.prompt_ids), answer_ids)
    rendered = _rendered(request)
    if not isinstance(rendered, Rendered):
        return Entry(request.where, {}, rendered, timing, dated=request.dated)
    # Sampling settings from the printed SamplingParams, the answer from its own line.
    params = arguments(request.params or "")
    sampling = {name: value for name in _SAMPLING if (value := literal(params.get(name))) is not None}
    line = line_of(rendered, literal(answered.get("output")), sampling)
    return Entry(request.where, line, None, timing, dated=request.dated)


def _rendered(request: _Request) -> Rendered | Reason:
    if request.params is not None and not request.params.startswith(("SamplingParams(", "BeamSearchParams(")):
        return "no chat request"
    prompt = literal(request.prompt)
    if not isinstance(prompt, str):
        return "no text logged"
    return unrender(prompt) or unread_reason(prompt)


def _count_ids(part: str | None) -> int | None:
    """Number of token ids in a printed list; None where they are not logged."""
    if part is None or not part.startswith("["):
        return None
    inner = part.strip("[]").strip()
    return inner.count(",") + 1 if inner else None
