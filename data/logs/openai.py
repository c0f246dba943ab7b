"""Chat-completions logs: request and response pairs of proxies, batch files, bare request bodies.

    {"request": {...}, "response": {...}, "started": ..., "ended": ...}
    {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    {"model": ..., "messages": [...], ...}

A body may stand as an object, as its JSON text, or inside an HTTP envelope (`method`, `path`, `headers`, `body`); a
response also as the chunks of a stream, in a list or as they went over the wire.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from .chat import Entry, Reason, Timing, answer_of, body_of, decoded, labels, refusal, usage_of, with_answer
from .parsing import number, seconds

_REQUESTS, _RESPONSES = ("request", "request_body", "body"), ("response", "response_body")
_STARTED = ("started", "start_time", "startTime", "timestamp", "time")
_ENDED = ("ended", "end_time", "endTime")
_DURATIONS = (("duration", 1.0), ("latency", 1.0), ("duration_ms", 1e-3), ("latency_ms", 1e-3))
_PATHS = ("url", "path", "endpoint", "uri")
_STATUSES = ("status", "status_code")
_FAILED = 400


def entries(value: dict[str, Any], where: str) -> Iterable[Entry]:
    """Entry of one logged object, which holds one request."""
    # Take the object apart; a reason, or a missing body, ends it here with its times.
    envelope, body = _request(value)
    response = _response(value)
    timing = _timing(value, response)
    reason = _reason(value, envelope, body, response)
    if body is None or reason is not None:
        yield Entry(where, labels(value), reason or "answer without its request", timing)
        return
    # The conversation with its answer; labels come from what stands around the body.
    messages = body.get("messages")
    if isinstance(messages, list):
        messages = with_answer(messages, answer_of(response))
    own = {name: item for name, item in value.items() if name not in (*_REQUESTS, *_RESPONSES)} if envelope else {}
    yield Entry(where, {**labels(own), "request": body, "messages": messages}, timing=timing)


def _request(value: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any] | None]:
    """Split a logged object into the body's envelope (empty: none) and the body (None: only an answer was logged)."""
    # A bare body.
    if "messages" in value:
        return {}, body_of(value)
    # A body under one of the known names, itself perhaps in an HTTP envelope.
    for name in _REQUESTS:
        inner = decoded(value.get(name))
        if not isinstance(inner, dict):
            continue
        if name == "body" or "messages" in inner:
            return value, body_of(inner)
        body = decoded(inner.get("body", inner))
        return {**value, **inner}, body_of(body) if isinstance(body, dict) else {}
    # A response alone; anything else is taken for a body, and `records` names what it lacks.
    if any(name in value for name in _RESPONSES) or "choices" in value:
        return value, None
    return {}, body_of(value)


def _response(value: Mapping[str, Any]) -> Any:
    inner = next((decoded(value[name]) for name in _RESPONSES if value.get(name) is not None), None)
    return decoded(inner["body"]) if isinstance(inner, dict) and "body" in inner else inner


def _reason(
    value: Mapping[str, Any], envelope: Mapping[str, Any], body: Mapping[str, Any] | None, response: Any
) -> Reason | None:
    # By the outcome, then by the path of the request, then by the fields of its body.
    if _failed(value, response):
        return "failed request"
    path = next((envelope[name] for name in _PATHS if isinstance(envelope.get(name), str)), "").partition("?")[0]
    if path.endswith(("/health", "/ping", "/metrics")):
        return "health check"
    if body is None:
        return None
    if path.endswith("/completions") and not path.endswith("/chat/completions"):
        return "raw prompt"
    if path and not path.endswith("/chat/completions"):
        return "no chat request"
    # Other APIs are told by their fields where no path is logged.
    if "messages" not in body:
        if "prompt" in body:
            return "raw prompt"
        if "input" in body:
            return "no chat request"
    return refusal(body.get("messages"))


def _failed(value: Mapping[str, Any], response: Any) -> bool:
    # An error or a status of 400 and above, in the object, in the response's envelope or in its body.
    wrapped = next((decoded(value[name]) for name in _RESPONSES if value.get(name) is not None), None)
    for holder in (value, wrapped, response):
        if not isinstance(holder, Mapping):
            continue
        if holder.get("error"):
            return True
        for name in _STATUSES:
            status = holder.get(name)
            if isinstance(status, int | str) and str(status).isdigit() and int(status) >= _FAILED:
                return True
    return False


def _timing(value: Mapping[str, Any], response: Any) -> Timing:
    # Times under the first name that holds one, and the duration in seconds.
    started = next((seconds(value[name]) for name in _STARTED if seconds(value.get(name)) is not None), None)
    ended = next((seconds(value[name]) for name in _ENDED if seconds(value.get(name)) is not None), None)
    took = next((amount * scale for name, scale in _DURATIONS if (amount := number(value.get(name))) is not None), None)
    # Without any time, the response's own; a duration gives the missing end or start.
    if started is None and ended is None and isinstance(response, dict):
        started = seconds(response.get("created"))
    if took is not None and started is not None and ended is None:
        ended = started + took
    elif took is not None and ended is not None and started is None:
        started = ended - took
    prompt_tokens, answer_tokens = usage_of(response)
    return Timing(started, ended, None, prompt_tokens, answer_tokens)
