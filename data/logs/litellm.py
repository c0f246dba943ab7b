"""LiteLLM's StandardLoggingPayload: one JSON object a call, as its S3, GCS and generic loggers write it."""

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from ...errors import InputError
from .chat import Entry, Reason, Timing, answer_of, body_of, count, decoded, labels, refusal, with_answer
from .parsing import seconds

_CHAT_CALLS = ("completion", "acompletion", "anthropic_messages")
_RAW_CALLS = ("text_completion", "atext_completion")
_REDACTED, _CUT = "redacted-by-litellm", "litellm_truncated"
_NOT_LOGGED = "default-message-value"  # what a pass-through endpoint writes in place of the messages


def entries(value: dict[str, Any], where: str) -> Iterable[Entry]:
    """Entry of one payload, which is one call. Raises InputError for an object that is no payload."""
    payload = value.get("standard_logging_object", value)
    if not isinstance(payload, dict) or "call_type" not in payload:
        raise InputError(f"{where}: has no call_type; must be a StandardLoggingPayload of LiteLLM")

    # Texts may be JSON of messages and responses.
    messages = decoded(payload.get("messages"))
    response = decoded(payload.get("response"))
    reason = _reason(payload, messages)

    # Labels; a trace is a thread.
    line = labels(payload.get("metadata"), payload)
    if payload.get("trace_id"):
        line.setdefault("group", payload["trace_id"])

    # The request and its answer, unless the answer alone was redacted.
    if reason is None and isinstance(messages, list):
        parameters = payload.get("model_parameters")
        line["request"] = body_of(parameters if isinstance(parameters, dict) else {})
        line["messages"] = with_answer(messages, None if _holds(response, _REDACTED) else answer_of(response))
    cached = payload.get("cache_hit") in (True, "True")  # no engine saw it
    yield Entry(where, line, reason, _timing(payload), in_flight=not cached)


def _reason(payload: Mapping[str, Any], messages: Any) -> Reason | None:
    # Kinds of calls first, then marks that LiteLLM leaves where it did not keep a text.
    call = payload["call_type"]
    if payload.get("status") == "failure":
        return "failed request"
    if call in _RAW_CALLS:
        return "raw prompt"
    if call not in _CHAT_CALLS:
        return "no chat request"
    if not messages or _holds(messages, _NOT_LOGGED):
        return "no text logged"
    if _holds(messages, _REDACTED):
        return "text redacted by the log"
    if _holds(messages, _CUT):
        return "text cut by the log"
    return "raw prompt" if isinstance(messages, str) else refusal(messages)


def _holds(value: Any, mark: str) -> bool:
    """Whether a value holds a mark that LiteLLM writes in place of a text, or (the cut mark) inside it."""
    if isinstance(value, str):
        return value == mark or (mark == _CUT and mark in value)
    if isinstance(value, Mapping):
        return any(_holds(item, mark) for item in value.values())
    return isinstance(value, list) and any(_holds(item, mark) for item in value)


def _timing(payload: Mapping[str, Any]) -> Timing:
    replica = payload.get("model_id") or _host(payload.get("api_base"))
    return Timing(
        seconds(payload.get("startTime")),
        seconds(payload.get("endTime")),
        replica if isinstance(replica, str) else None,
        count(payload, "prompt_tokens"),
        count(payload, "completion_tokens"),
    )


def _host(url: Any) -> str | None:
    """Host and port of a URL, without user, password and path."""
    if not isinstance(url, str):
        return None
    try:
        return urlsplit(url).netloc.rpartition("@")[2] or None
    except ValueError:
        return None
