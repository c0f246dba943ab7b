"""LiteLLM's StandardLoggingPayload: one JSON object a call, as its S3, GCS and generic loggers write it."""

import json
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from ...errors import InputError
from . import anthropic
from .chat import (
    ARGUMENTS_UNKNOWN,
    SYSTEM_UNKNOWN,
    Entry,
    Reason,
    Timing,
    as_sent,
    body_of,
    conflicting_request,
    continued,
    count,
    decoded,
    labels,
    settings_beside,
    with_answer,
)
from .parsing import seconds
from .response import answer_of, failed, is_error, prompt_of, response_of, tells_failure

_CHAT_CALLS = ("completion", "acompletion", "anthropic_messages")
_RAW_CALLS = ("text_completion", "atext_completion")
_RAW_PROVIDERS = "text-completion-"  # chats too it sends to `/v1/completions`
_REDACTED, _CUT = "redacted-by-litellm", "litellm_truncated"
_NOT_LOGGED = "default-message-value"  # what a pass-through endpoint writes in place of the messages
_REWRITTEN: Reason = "message rewritten by the gateway"
_LONGEST_NAME = 64  # of a tool, which LiteLLM cuts


def entries(value: dict[str, Any], where: str, engine: str | None = None) -> Iterable[Entry]:
    """Entry of one payload, which is one call. Raises InputError for an object that is no payload."""
    payload = value.get("standard_logging_object", value)
    if not isinstance(payload, dict) or "call_type" not in payload:
        raise InputError(f"{where}: has no call_type; must be a StandardLoggingPayload of LiteLLM")

    # Texts may be JSON of messages and responses. The request is the parameters with the messages.
    messages, response = decoded(payload.get("messages")), response_of(payload.get("response"))
    parameters = decoded(payload.get("model_parameters"))
    request = body_of(parameters if isinstance(parameters, dict) else {}) | {"messages": messages}
    if payload.get("stream") is True:  # tells who counted the tokens
        request["stream"] = True
    reason, lacking = _reason(payload, request, response), False
    if reason is None:
        lacking = _may_lack_system(payload, request)
        request, reason = _chat_request(payload, request, engine)
    if reason is None and settings_beside(request, parameters, payload):
        reason = "settings beside the request"

    def read(other: dict[str, Any]) -> dict[str, Any]:
        return _chat_request(payload, body_of(other), engine)[0]

    if reason is None and conflicting_request(request, read, payload, parameters):
        reason = "another request beside it"

    # Labels; a trace is a thread.
    line = labels(payload.get("metadata"), payload)
    if payload.get("trace_id"):
        line.setdefault("group", payload["trace_id"])

    # A system prompt that was sent as blocks leaves no trace but the number of tokens, as do template arguments.
    timing = _timing(payload)
    line[SYSTEM_UNKNOWN if lacking else ARGUMENTS_UNKNOWN] = True
    if reason is None and lacking and not timing.prompt_tokens:
        reason = "system prompt that the log may lack"

    # The request and its answer, unless the answer alone was redacted.
    others = list[dict[str, Any]]()
    if reason is None:
        answer = None if _holds(response, _REDACTED) else answer_of(response)
        request, *others = as_sent([request], answer)
        if payload["call_type"] != "anthropic_messages":
            others += continued([request, *others])
        line |= {"request": request, "messages": with_answer(request["messages"], answer)}
    cached = payload.get("cache_hit") in (True, "True")  # no engine saw it
    yield Entry(where, line, reason, timing, in_flight=not cached, others=others, shown=prompt_of(response))


def _reason(payload: Mapping[str, Any], request: Mapping[str, Any], response: Any) -> Reason | None:
    # Kinds of calls first, then marks that LiteLLM leaves where it did not keep a text.
    call, messages = payload["call_type"], request["messages"]
    if _failed(payload) or failed(response):
        return "failed request"
    if call in _RAW_CALLS or str(payload.get("custom_llm_provider")).startswith(_RAW_PROVIDERS):
        return "raw prompt"
    if call not in _CHAT_CALLS:
        return "no chat request"
    if not messages or _holds(messages, _NOT_LOGGED):
        return "no text logged"
    shown = [messages, *(request.get(name) for name in ("system", "tools"))]
    if _holds(shown, _REDACTED):
        return "text redacted by the log"
    if _holds(shown, _CUT):
        return "text cut by the log"
    return None if isinstance(messages, list) else "raw prompt"


def _failed(payload: Mapping[str, Any]) -> bool:
    """Whether the call failed, by status or error; the `error_information` of one that succeeded is empty."""
    status, error = payload.get("status_fields"), payload.get("error_information")
    told = status.get("llm_api_status") if isinstance(status, Mapping) else None
    named = isinstance(error, Mapping) and any(is_error(error.get(name)) for name in ("error_code", "error_class"))
    return named or is_error(payload.get("error_str")) or tells_failure({**payload, "status_code": told})


def _chat_request(
    payload: Mapping[str, Any], request: dict[str, Any], engine: str | None
) -> tuple[dict[str, Any], Reason | None]:
    """The chat-completions request of a call, or why its prompt cannot be told."""
    provider = payload.get("custom_llm_provider")
    # A system prompt stands beside the messages; as text it is logged among them too.
    if payload["call_type"] == "anthropic_messages":
        messages, system = request["messages"], payload.get("system_prompt") or request.get("system")
        first = messages[0] if isinstance(messages[0], Mapping) else {}
        logged = first.get("role") == "system" and (
            anthropic.system_text(first.get("content")) == anthropic.system_text(system)
        )
        body = request | {"system": None if logged else system}
        text, native = first.get("content"), provider in (None, "", "anthropic")
        if native and first.get("role") == "system" and isinstance(text, str) and system in (None, text):
            body |= {"system": text, "messages": messages[1:]}
        # It is sent on for models alone of which LiteLLM knows that they have one.
        if request.get("output_config"):
            return request, "reasoning effort in an unread form"
        if not native and not _same_either_way(body):
            return request, _REWRITTEN
        return anthropic.request_of(body, engine)
    # LiteLLM makes an effort of a budget for thinking.
    if request.get("thinking") is not None:
        return request, "reasoning effort in an unread form"
    # Some versions of LiteLLM send thoughts on inside the content, others do not; and join an assistant's parts.
    messages = [message for message in request["messages"] if isinstance(message, Mapping)]
    joined = [one for one in messages if one.get("role") == "assistant" and len(_blocks(one.get("content"))) > 1]
    if any(message.get("thinking_blocks") for message in messages) or (joined and provider == "hosted_vllm"):
        return request, _REWRITTEN
    found = request | {"messages": [_as_sent(message, provider) for message in request["messages"]]}
    # The log has the tools as they came.
    if provider == "hosted_vllm" and isinstance(tools := decoded(request.get("tools")), list):
        found["tools"] = _without_strictness(tools)
    return found, None


def _may_lack_system(payload: Mapping[str, Any], request: Mapping[str, Any]) -> bool:
    """Whether a call of the Messages API may have had a system prompt that is not logged: LiteLLM (1.110) logs texts
    alone, in front of the messages, and no blocks."""
    if payload["call_type"] != "anthropic_messages":
        return False
    first = request["messages"][0]
    logged = payload.get("system_prompt") is not None or request.get("system") is not None
    return not logged and not (isinstance(first, Mapping) and first.get("role") == "system")


def _same_either_way(body: Mapping[str, Any]) -> bool:
    """Whether LiteLLM, which makes a chat completion of a Messages API's body for all providers but `anthropic`, gives
    the prompt that vLLM's endpoint gives."""
    # LiteLLM makes an effort of thinking, parts of a system prompt's blocks, and takes some fields out of tools.
    if any(body.get(name) for name in ("thinking", "output_config", "reasoning_effort")) or body.get("tools") == []:
        return False
    system = body.get("system")
    if not (system is None or isinstance(system, str) or (len(_blocks(system)) == 1 and _is_text(system[0]))):
        return False
    # Tools that are no list break a rule, which `records` names.
    tools = body.get("tools") if isinstance(body.get("tools"), Iterable) else ()
    return all(map(_is_plain_tool, tools or ())) and all(map(_is_plain, body["messages"]))


def _is_plain_tool(tool: Any) -> bool:
    schema = tool.get("input_schema") if isinstance(tool, Mapping) else None
    if not isinstance(schema, Mapping) or "type" not in schema or len(str(tool.get("name"))) > _LONGEST_NAME:
        return False
    known = tool.keys() <= {"name", "description", "input_schema", "type", "cache_control"}
    return known and not any(f'"{name}"' in json.dumps(schema) for name in ("additionalProperties", "strict"))


def _is_plain(message: Any) -> bool:
    """Whether a message is of blocks that are translated alike: an assistant's texts are joined otherwise."""
    role, content = (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None, None)
    blocks = _blocks(content)
    if isinstance(content, str) or not blocks:
        return role in ("user", "assistant") and bool(content)
    if role == "user":
        return all(_is_text(block) or _is_result(block) for block in blocks)
    calls = [block for block in blocks if _kind(block) == "tool_use"]
    plain = all(
        isinstance(call.get("input"), Mapping) and len(str(call.get("name"))) <= _LONGEST_NAME for call in calls
    )
    others = [block for block in blocks if _kind(block) != "tool_use"]
    return role == "assistant" and plain and len(others) <= 1 and all(map(_is_text, others))


def _is_result(block: Any) -> bool:
    content = block.get("content") if _kind(block) == "tool_result" else None
    return isinstance(content, str) or (bool(content) and all(map(_is_text, _blocks(content) or [None])))


def _is_text(block: Any) -> bool:
    text = block.get("text") if _kind(block) == "text" else None
    return isinstance(text, str) and text != "" and not text.startswith(anthropic.BILLING_HEADER)


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, Mapping) else None


def _blocks(content: Any) -> list[Any]:
    return content if isinstance(content, list) else []


def _as_sent(message: Any, provider: Any) -> Any:
    """A message as LiteLLM sends it on: without the marks of what to cache, the system's in place of a developer's, and
    for vLLM the one text of an assistant's part."""
    if not isinstance(message, Mapping):
        return message
    if message.get("role") == "developer":
        message = {"role": "system", "content": message.get("content")}
    if not isinstance(message.get("content"), list):
        return message
    parts = [
        {name: value for name, value in part.items() if name != "cache_control"} if isinstance(part, Mapping) else part
        for part in message["content"]
    ]
    if (
        provider == "hosted_vllm"
        and message.get("role") == "assistant"
        and all(_kind(part) == "text" for part in parts)
    ):
        return {**message, "content": "\n".join(str(part.get("text", "")) for part in parts)}
    return {**message, "content": parts}


def _without_strictness(value: Any) -> Any:
    """Tools as LiteLLM sends them to vLLM: without `strict`, and without `additionalProperties` that forbid others."""
    if isinstance(value, list):
        return [_without_strictness(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {
        name: _without_strictness(item)
        for name, item in value.items()
        if name != "strict" and not (name == "additionalProperties" and item is False)
    }


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
