"""Chat-completions logs: request and response pairs of proxies, batch files, bare request bodies.

    {"request": {...}, "response": {...}, "started": ..., "ended": ...}
    {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    {"model": ..., "messages": [...], ...}

A body may stand as an object, as its JSON text, or inside an HTTP envelope (`method`, `path`, `headers`, `body`); a
response also as the chunks of a stream, in a list or as they went over the wire. Requests of Anthropic's Messages API
are turned into chat completions.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import anthropic
from .chat import (
    ADDED_UNKNOWN,
    RESPONSES,
    Entry,
    Reason,
    Timing,
    as_it_stands,
    as_sent,
    body_of,
    conflicting_request,
    decoded,
    labels,
    read_otherwise,
    settings_beside,
    system_prompt,
    with_answer,
)
from .parsing import number, seconds
from .response import (
    answer_of,
    answers_no_chat,
    failed,
    is_of_messages_api,
    prompt_of,
    response_of,
    tells_failure,
    usage_of,
)

_REQUESTS = ("request", "request_body", "requestBody", "body")
_ENCODED = frozenset(
    (
        *(*_REQUESTS, "messages", "tools", "tool_choice", "extra_body", "chat_template_kwargs", "documents"),
        *("thinking", "output_config", "stop", "stop_sequences", "response_format"),
    )
)
_STARTED = ("started", "start_time", "startTime", "timestamp", "time")
_DATED = ("created_at", "createdAt", "@timestamp", "ts")  # perhaps when the line was written
_ENDED = ("ended", "end_time", "endTime")
_DURATIONS = (("duration", 1.0), ("latency", 1.0), ("duration_ms", 1e-3), ("latency_ms", 1e-3))
_MESSAGES = "/v1/messages"
_PATHS = ("url", "path", "endpoint", "uri")
_HEADERS = ("headers", "request_headers", "requestHeaders")
_ADDING = ("prompt_id", "files", "tool_ids", "data_sources", "plugins", "transforms")
"""Fields by which a gateway (LiteLLM, Helicone, Open WebUI, Azure, OpenRouter) makes another prompt."""
_LONGEST_PATH, _MOST_WORDS = 2000, 3  # of a request line: method, path, version


def entries(value: dict[str, Any], where: str, engine: str | None = None) -> Iterable[Entry]:
    """Entry of one logged object, which holds one request."""
    # Take the object apart, its outermost fields decoded; a reason, or a missing body, ends it here with its times.
    value = _opened(value)
    envelope, logged = _request(value)
    logged = None if logged is None else _opened(logged)
    wrapper, response = _response(value)
    timing = _timing((value, envelope), response)
    path = _path(next((envelope[name] for name in _PATHS if isinstance(envelope.get(name), str)), ""))
    # The path of the Messages API tells how a body is served, whatever the field is called.
    path = path or _messages_path(envelope or value)
    # A client's call has the fields of an `extra_body` in its body; one with headers, or of a batch, is what was sent.
    sent = "custom_id" in envelope or any(isinstance(envelope.get(name), Mapping) for name in _HEADERS)
    body = None if logged is None else as_it_stands(logged) if sent else body_of(logged)
    stands = None if sent else read_otherwise(logged)
    reason = _reason((value, wrapper), response, path, body)
    request, others = body or {}, list[dict[str, Any]]()
    answered, served = is_of_messages_api(response), path.endswith("/messages") if path else None
    if reason is None:
        bodies = [request] if stands is None else [request, stands]
        request, reason, others = anthropic.chat_requests(bodies, answered, engine, served)
    around = {name: item for name, item in envelope.items() if name not in _REQUESTS}
    if reason is None and settings_beside(request, body, around):
        reason = "settings beside the request"

    def read(other: dict[str, Any]) -> dict[str, Any]:
        body = as_it_stands(_opened(other)) if sent else body_of(_opened(other))
        return anthropic.chat_requests([body], answered, engine, served)[0]

    if reason is None and logged is not None and conflicting_request(request, read, value, own=logged.get("messages")):
        reason = "another request beside it"
    if body is None or reason is not None:
        yield Entry(where, labels(value), reason or "answer without its request", timing)
        return
    # The conversation with its answer; labels come from what stands around the body.
    answer = answer_of(response)
    request, *others = as_sent([request, *others], answer)
    messages = request.get("messages")
    if isinstance(messages, list):
        messages = with_answer(messages, answer)
    own = {name: item for name, item in value.items() if name not in (*_REQUESTS, *RESPONSES)} if envelope else {}
    line = {**labels(own), "request": request, "messages": messages}
    line |= {ADDED_UNKNOWN: True} if any(body.get(name) for name in _ADDING) else {}
    yield Entry(where, line, timing=timing, others=others, shown=prompt_of(response))


def _opened(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of a line, a table's row or a request, without the encoding that a log adds to them; what lies inside of
    them was encoded by the client, and stays."""
    found = {name: decoded(item) if name in _ENCODED else item for name, item in fields.items()}
    if "system" in found:
        found["system"] = system_prompt(found["system"])
    return found


def _path(text: str) -> str:
    """Path of a URL or of a request line, without its query."""
    words = [word for word in text.split() if "/" in word and not word.startswith("HTTP/")]
    return words[0].partition("?")[0].rstrip("/") if words else ""


def _messages_path(around: Mapping[str, Any]) -> str:
    """Path of the Messages API, or of its counter, that stands beside a body or inside of it, or that its header tells;
    empty: none."""
    known = (_MESSAGES, f"{_MESSAGES}/count_tokens")
    for name, text in around.items():
        if name in (*_REQUESTS, *RESPONSES) or not isinstance(text, str) or len(text) > _LONGEST_PATH:
            continue
        if len(text.split()) <= _MOST_WORDS and _path(text).endswith(known):
            return _path(text)
    headers: Mapping[str, Any] = next((around[name] for name in _HEADERS if isinstance(around.get(name), Mapping)), {})
    return _MESSAGES if any(str(name).lower() == "anthropic-version" for name in headers) else ""


def _request(value: dict[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any] | None]:
    """Split a logged object into the body's envelope (empty: none) and the body (None: only an answer was logged)."""
    # A bare body.
    if "messages" in value:
        return {}, value
    # A body under one of the known names, itself perhaps in an HTTP envelope.
    for name in _REQUESTS:
        inner = decoded(value.get(name))
        if not isinstance(inner, dict):
            continue
        if name == "body" or "messages" in inner:
            return value, inner
        body = decoded(inner.get("body", inner))
        return {**value, **inner}, body if isinstance(body, dict) else {}
    # A response alone; anything else is taken for a body, and `records` names what it lacks.
    if any(name in value for name in RESPONSES) or "choices" in value:
        return value, None
    return {}, value


def _response(value: Mapping[str, Any]) -> tuple[Mapping[str, Any], Any]:
    """Split a logged response into its envelope (empty: none) and what was answered."""
    inner = next((response_of(value[name]) for name in RESPONSES if value.get(name) is not None), None)
    return (inner, response_of(inner["body"])) if isinstance(inner, dict) and "body" in inner else ({}, inner)


def _reason(
    envelopes: Iterable[Mapping[str, Any]], response: Any, path: str, body: Mapping[str, Any] | None
) -> Reason | None:
    # By the outcome, which the object, the response's envelope or the response tells.
    if failed(response) or any(map(tells_failure, envelopes)):
        return "failed request"
    # By the path of the request.
    if path.endswith(("/health", "/ping", "/metrics")):
        return "health check"
    if body is None:
        return None
    if answers_no_chat(response):
        return "no chat request"
    if path.endswith("/completions") and not path.endswith("/chat/completions"):
        return "raw prompt"
    if path and not path.endswith(("/chat/completions", "/messages")):
        return "no chat request"
    # Other APIs are told by their fields where no path is logged.
    if "messages" not in body:
        if "prompt" in body:
            return "raw prompt"
        if "input" in body:
            return "no chat request"
    return None


def _time(names: Iterable[str], holders: Sequence[Mapping[str, Any]]) -> float | None:
    return next((time for one in holders for name in names if (time := seconds(one.get(name))) is not None), None)


def _timing(holders: Sequence[Mapping[str, Any]], response: Any) -> Timing:
    # Times under the first name that holds one, of the line before its envelope, and the duration in seconds.
    started, ended = _time(_STARTED, holders), _time(_ENDED, holders)
    lasted = ((number(holders[0].get(name)), scale) for name, scale in _DURATIONS)
    took = next((amount * scale for amount, scale in lasted if amount is not None), None)
    # Without any time, that of the line, or the response's own; a duration gives the missing end or start.
    if started is None and ended is None:
        chunks = response if isinstance(response, list) else [response]
        started = _time(_DATED, holders) or _time(("created",), [one for one in chunks if isinstance(one, dict)])
    if took is not None and started is not None and ended is None:
        ended = started + took
    elif took is not None and ended is not None and started is None:
        started = ended - took
    prompt_tokens, answer_tokens = usage_of(response)
    return Timing(started, ended, None, prompt_tokens, answer_tokens)
