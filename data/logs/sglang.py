"""SGLang's request log, `--log-requests --log-requests-level 3`, in its text and its JSON form.

    [2026-11-28 10:00:00] Receive OpenAI: obj={'model': '...', 'messages': [...], ...}
    [2026-11-28 10:00:04] Finish: obj=GenerateReqInput(rid='...', text='...', ...), out={'text': '...', ...}
    [2026-11-28 10:00:04] {"timestamp": "...", "event": "request.finished", "rid": "...", "obj": {...}, "out": {...}}

A `Finish` line holds the rendered prompt (the text of its ids) and the answer. SGLang from the middle of 2026 also logs
the request as the client sent it, without the id that would join both lines. If a log has such lines, conversations are
taken from them, and from the `Finish` lines times, token counts and a hash of each served prompt. Whatever the order of
the lines, a received request was served with the prompt that the target's template makes of it if that is among these.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import InputError
from ..read_limits import json_within
from .chat import Entry, JoinedLines, LeftOut, Reason, Timing, count, line_of
from .containers import ContainerLines
from .parsing import arguments, fields, is_cut, literal, number, prompt_digest, seconds, unread_reason, unrender

_TEXT = re.compile(
    r"(?:\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[^\]]*\] )?(Receive OpenAI|Receive|Finish): (obj=.*)", re.DOTALL
)
_STAMP = re.compile(r'\[[^\]]*\] (?=\{"timestamp": ")')  # stands before the JSON form since its lines go to files
_HEALTH = "HEALTH_CHECK"
_RESPONSES = "resp_"  # begins the ids of `/v1/responses`
_WITH_TEXT = "return_text_in_logprobs"
_CUT_AT = 1024  # level 2 keeps so many characters of both ends, with dots between them
_SETTINGS = ("input_embeds", "lora_path", "session_params", "custom_logit_processor")
_REQUEST, _REQUEST_EVENT = "Receive OpenAI", "request.received.openai"
_EVENTS = {_REQUEST_EVENT: _REQUEST, "request.received": "Receive", "request.finished": "Finish"}
_KEPT = ("rid", "text", "sampling_params", "received_time", _WITH_TEXT, *_SETTINGS)
_MEDIA = ("image_data", "video_data", "audio_data")
_LEAST_FAILURE = 400


class SglangReader:
    """Reader that takes conversations from received requests where a log has them, and times from finished ones."""

    def __init__(self) -> None:
        self._lines = ContainerLines()
        self._with_requests: set[str] = set()
        """Servers whose logs have requests as the client sent them."""

    def feed(self, value: str, where: str, server: str) -> Iterable[JoinedLines]:
        line = self._lines.whole(value, where, server)
        if line is None:
            return
        if line.is_cut:
            raise LeftOut(line.where, "text cut by the log")
        if server not in self._with_requests and _is_request(line.text):
            self._with_requests.add(server)
        yield _Line(line.where, server, line.text, server in self._with_requests)

    def finish(self) -> Iterator[Entry]:
        yield from (Entry(where, left_out="text cut by the log") for where in self._lines.unfinished())


@dataclass
class _Line:
    """A whole line of a server, whose log has requests as the client sent them, or not."""

    where: str
    server: str
    text: str
    has_requests: bool

    def entry(self) -> Entry:
        event, when, obj, out = _event(self.text, self.where)
        if event == _REQUEST:
            return _received(obj, self.where, when)
        if event == "Finish":
            return _finished(obj, out, self.where, when, self.server, self.has_requests)
        return Entry(self.where, left_out="joined with another line" if event else "other log line")


def _is_request(text: str) -> bool:
    """Whether a line is a request as the client sent it; most lines tell without being taken apart."""
    if _REQUEST not in text and _REQUEST_EVENT not in text:
        return False
    try:
        return _event(text, "")[0] == _REQUEST
    except InputError:
        return False


def _event(value: str, where: str) -> tuple[str | None, float | None, Any, Any]:
    """Parse a line into its kind (None: another line), time, `obj` and `out`. Raises InputError."""
    # The JSON form.
    stamp = _STAMP.match(value)
    value = value[stamp.end() :] if stamp else value
    if value.lstrip().startswith("{"):
        try:
            line = json_within(value)
        except ValueError:
            raise InputError(f"{where}: not valid JSON") from None
        event = line.get("event") if isinstance(line, dict) else None
        if not isinstance(event, str) or event not in _EVENTS:
            return None, None, None, None
        return _EVENTS[event], seconds(line.get("timestamp")), line.get("obj"), line.get("out")
    # The text form: `obj` is the repr of a dict, or of a request object in `Finish` lines.
    found = _TEXT.search(value)
    if not found:
        return None, None, None, None
    parts = fields(found[3])
    if found[2] == "Finish":
        request = arguments(parts.get("obj", ""))
        kept = {name: _value(request[name]) for name in _KEPT if name in request}
        kept |= {name: True for name in _MEDIA if request.get(name, "None") != "None"}
        return "Finish", seconds(found[1]), kept, _value(parts.get("out"))
    return found[2], seconds(found[1]), _value(parts.get("obj")), None


class _Cut(str):
    """A text or list whose middle the log left out."""


def _value(part: str | None) -> Any:
    value = literal(part)
    return _Cut() if value is None and part and is_cut(part) else value


def _received(obj: Any, where: str, when: float | None) -> Entry:
    # Level 2 cuts texts, of tools too; a cut conversation is of no use.
    if isinstance(obj, _Cut) or _shortened(obj):
        return Entry(where, left_out="text cut by the log")
    if not isinstance(obj, Mapping):
        raise InputError(f"{where}: obj is not an object; must be the request")
    # A call of `/tokenize` may hold messages; it alone says whether special tokens are added.
    if "messages" not in obj or "add_special_tokens" in obj:
        return Entry(where, left_out="raw prompt" if "prompt" in obj else "no chat request")
    line = {"request": {**obj}, "messages": obj["messages"]}
    return Entry(where, line, None, Timing(started=when), in_flight=False)  # the finished one counts


def _finished(obj: Any, out: Any, where: str, when: float | None, replica: str, has_requests: bool) -> Entry:
    if not isinstance(obj, Mapping):
        raise InputError(f"{where}: obj is not an object; must be the request")

    # 1) What is no conversation, or is taken from its received line.
    timing = _timing(obj, out, when, replica)
    if str(obj.get("rid", "")).startswith(_HEALTH):
        return Entry(where, left_out="health check")
    text = obj.get("text")
    cut = isinstance(text, _Cut) or _shortened(text)
    reason: Reason | None = None
    if isinstance(out, Mapping) and "embedding" in out:
        reason = "no chat request"
    elif _failed(out):
        reason = "failed request"
    elif has_requests and _is_logged_as_sent(obj):
        reason = "logged twice"
    elif cut:
        reason = "text cut by the log"
    elif not isinstance(text, str):
        reason = "no text logged"
    elif any(obj.get(name) for name in _MEDIA):
        reason = "message part that is not text"

    # 2) The served prompt, whether or not this file holds the received request, too.
    shown = isinstance(text, str) and not cut and reason != "no chat request" and _is_logged_as_sent(obj)
    served = (bytes.fromhex(prompt_digest(str(text))), not _failed(out)) if shown else None

    # 3) The messages from the rendered prompt.
    rendered = unrender(text) if reason is None and isinstance(text, str) else None
    if rendered is None:
        return Entry(where, {}, reason or unread_reason(str(text)), timing, served=served)

    # 4) The answer and the settings, as far as they are logged.
    answer = out.get("text") if isinstance(out, Mapping) else None
    params = obj.get("sampling_params")
    settings = {name: obj.get(name) for name in _SETTINGS} | (dict(params) if isinstance(params, Mapping) else {})
    line = line_of(rendered, None if isinstance(answer, _Cut) else answer, settings)
    return Entry(where, line, None, timing, pieces=rendered.pieces, served=served)


def _is_logged_as_sent(obj: Mapping[str, Any]) -> bool:
    """Whether a finished request came by an endpoint that logs what the client sent: these alone set the flag, and
    `/v1/responses` does where it is asked for logprobs."""
    return obj.get(_WITH_TEXT) is not False and not str(obj.get("rid", "")).startswith(_RESPONSES)


def _failed(out: Any) -> bool:
    """Whether the engine refused a request or gave it up by an error; a client that left is none."""
    meta = out.get("meta_info") if isinstance(out, Mapping) else None
    reason = meta.get("finish_reason") if isinstance(meta, Mapping) else None
    status = number(reason.get("status_code")) if isinstance(reason, Mapping) else None
    return status is not None and status >= _LEAST_FAILURE


def _timing(obj: Mapping[str, Any], out: Any, when: float | None, replica: str) -> Timing:
    # SGLang's own measurements win over the time of the line.
    meta = out.get("meta_info") if isinstance(out, Mapping) else None
    info: Mapping[str, Any] = meta if isinstance(meta, Mapping) else {}
    took = number(info.get("e2e_latency"))
    started = seconds(info.get("request_received_ts")) or seconds(obj.get("received_time"))
    ended = when
    if took is not None:
        # The time of the line has whole seconds in text form: the length is taken as it was measured.
        started = started if started is not None else (None if when is None else when - took)
        ended = None if started is None else started + took
    return Timing(started, ended, replica, count(info, "prompt_tokens"), count(info, "completion_tokens"))


def _shortened(value: Any) -> bool:
    """Whether a value holds a text or a list with the length and the dots that SGLang gives to a cut one."""
    if isinstance(value, str):
        return len(value) == 2 * _CUT_AT + 3 and value[_CUT_AT:-_CUT_AT] == "..."
    if isinstance(value, Mapping):
        return any(_shortened(item) for item in value.values())
    if not isinstance(value, list):
        return False
    return (len(value) == 2 * _CUT_AT + 1 and value[_CUT_AT] == "...") or any(_shortened(item) for item in value)
