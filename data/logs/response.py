"""Responses of chat APIs, whole or streamed: whether they failed, what they answered, how many tokens they took."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from . import anthropic
from .chat import count, decoded

T = TypeVar("T")

_SSE_DONE = "[DONE]"
_SSE_EVENT = re.compile(r"\r?\n\r?\n")
_ERRORS = frozenset(("error", "errors", "exception", "error_message", "error_code"))
_STATUSES = frozenset(
    (
        *("status", "status_code", "statusCode", "http_status", "http_status_code", "http_code", "response_status"),
        *("response_code", "response_status_code", "responseStatus", "state", "outcome", "level"),
    )
)
_NO_ERRORS = frozenset(
    ("", "0", "200", "-", "none", "null", "nil", "n/a", "false", "ok", "success", "no error", "not failed")
)
"""What logs write in the place of an error where there was none."""
_LEAST_FAILURE, _ABOVE_STATUSES = 400, 1000
_STATUS_LINE = re.compile(r"\s*(?:HTTP/\S+\s+)?(\d{3})(?!\d)")
_FAILURE = re.compile(
    r"(?<![a-z])(?<!no )(?<!not )(?:error(?:ed)?|fail(?:s|ed|ure)?|exception|timed?[ _-]?out|refused|rejected|denied"
    r"|unavailable|overloaded|crashed|bad[ _-]?(?:request|gateway)|unauthori[sz]ed|forbidden|not[ _-]found"
    r"|too[ _-]many)(?![a-z])",
    re.IGNORECASE,
)
_ERROR_PAGE = re.compile(
    r"\s*(?:<!doctype\s+html|<html\b|[45]\d\d(?!\d)|error\b|internal server error|bad (?:request|gateway)"
    r"|too many requests|service unavailable|gateway time-?out|upstream |no healthy upstream|unauthorized|forbidden)",
    re.IGNORECASE,
)


def response_of(value: Any) -> Any:
    """Decode a logged response: an object, or the list of a stream's chunks; anything else as it is."""
    if isinstance(value, str):
        return _events(value) or decoded(value)
    if isinstance(value, list):
        return [
            chunk for item in value for chunk in (_events(item) if isinstance(item, str) else ()) or [decoded(item)]
        ]
    return value


def _events(text: str) -> list[Any]:
    """Chunks of a server-sent-events stream that was logged as text; empty: the text is no stream."""
    found: list[Any] = []
    for event in _SSE_EVENT.split(text):
        # Data of several lines is one value, unless the blank lines between events were lost.
        lines = [line[5:].strip(" \r") for line in event.split("\n") if line.startswith("data:")]
        whole = decoded("\n".join(lines))
        found += [decoded(line) for line in lines] if isinstance(whole, str) else [whole]
    return [chunk for chunk in found if chunk != _SSE_DONE]


def failed(response: Any) -> bool:
    """Whether a response, whole or streamed, is an error or holds one: nothing, or not all, was answered."""
    if isinstance(response, str):
        return _ERROR_PAGE.match(response) is not None
    if isinstance(response, list):
        return any(failed(chunk) for chunk in response if isinstance(chunk, Mapping))
    if not isinstance(response, Mapping):
        return False
    if tells_failure(response) or response.get("object") == "error" or response.get("type") == "error":
        return True
    # An answer may have a field `detail` or `code` too; what has none and names one is an error of a web framework.
    choices = response.get("choices")
    if not isinstance(choices, list):
        return "content" not in response and ("detail" in response or _is_failure(response.get("code")))
    first = [choice for choice in choices if isinstance(choice, Mapping) and not choice.get("index")]
    return any(is_error(choice.get("error")) or choice.get("finish_reason") == "error" for choice in first)


def is_of_messages_api(response: Any) -> bool | None:
    """Whether a response, whole or streamed, is one of the Messages API, or else of chat completions; None: neither."""
    for chunk in response if isinstance(response, list) else [response]:
        if isinstance(chunk, Mapping) and ("choices" in chunk or chunk.get("type") in ("message", "message_start")):
            return "choices" not in chunk
    return None


def answers_no_chat(response: Any) -> bool:
    """Whether a response is one to messages that were only counted, turned into token ids, or embedded, or one of the
    Responses API, whole or streamed."""
    if isinstance(response, list):
        return any(isinstance(chunk, Mapping) and str(chunk.get("type")).startswith("response.") for chunk in response)
    if not isinstance(response, Mapping) or not response:
        return False
    if response.get("object") == "response":
        return True
    counted = response.keys() <= {"input_tokens", "context_management"}
    tokenized = "count" in response and isinstance(response.get("tokens"), list)
    return counted or tokenized or (response.get("object") == "list" and "data" in response)


def tells_failure(holder: Mapping[str, Any]) -> bool:
    """Whether an object around a response tells that the request failed, by an error or a status."""
    if holder.get("success") is False or any(is_error(holder[name]) for name in _ERRORS.intersection(holder)):
        return True
    return any(_is_failure(holder[name]) for name in _STATUSES.intersection(holder))


def is_error(value: Any) -> bool:
    """Whether the value of an error's field tells of one; an object does if any of its values does."""
    if isinstance(value, Mapping):
        return any(map(is_error, value.values()))
    return value.strip().lower() not in _NO_ERRORS if isinstance(value, str) else value not in (0, 200) and bool(value)


def _is_failure(status: Any) -> bool:
    """Whether a status is one of 400 and above, as a number or in words."""
    if isinstance(status, Mapping):
        return any(_is_failure(status.get(name)) for name in ("code", "status_code", "message"))
    if isinstance(status, str):
        number = _STATUS_LINE.match(status)
        return int(number[1]) >= _LEAST_FAILURE if number else _FAILURE.search(status) is not None
    return isinstance(status, int) and _LEAST_FAILURE <= status < _ABOVE_STATUSES


def answer_of(response: Any) -> dict[str, Any] | None:
    """Message of the first choice of a response, whole or streamed, in the shape of OpenAI's API.

    None: it holds neither text nor tool calls, such as an answer that was cut while it was thinking.
    """
    response = response_of(response)
    if isinstance(response, list):
        chunks = [chunk for chunk in response if isinstance(chunk, dict)]
        streamed = anthropic.streamed_blocks(chunks)
        return _with_content(anthropic.answer_of(streamed) if streamed else _merged(chunks))
    if not isinstance(response, dict):
        return None
    # A whole response: the choice with index 0, or Anthropic's content blocks.
    choices, blocks = response.get("choices"), response.get("content")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict) and isinstance(choice.get("message"), dict) and not choice.get("index"):
            return _with_content(choice["message"])
    return _with_content(anthropic.answer_of(blocks)) if choices is None and isinstance(blocks, list) else None


def _with_content(message: Mapping[str, Any]) -> dict[str, Any] | None:
    content, calls = message.get("content"), message.get("tool_calls") or None
    if not calls and not (content.strip() if isinstance(content, str) else content):
        return None
    reasoning = next((message[name] for name in ("reasoning", "reasoning_content") if message.get(name)), None)
    return {"role": "assistant", "content": content, "reasoning": reasoning, "tool_calls": calls}


def _merged(chunks: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the chunks of a stream's first choice into one message."""
    texts: dict[str, list[str]] = {"content": [], "reasoning": [], "reasoning_content": []}
    calls: list[tuple[int, dict[str, Any]]] = []
    for chunk in chunks:
        # A chunk without choices (such as the usage at the end) adds nothing.
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            delta = choice.get("delta") if isinstance(choice, dict) else None
            if not isinstance(delta, dict) or choice.get("index"):
                continue
            # Text and reasoning come in pieces; tool calls too, each piece under the index of its call.
            for name, pieces in texts.items():
                if isinstance(delta.get(name), str):
                    pieces.append(delta[name])
            parts = delta.get("tool_calls")
            for part in parts if isinstance(parts, list) else ():
                _extend(calls, part)
    # Calls in the order of their indexes; of those that share one, in the order in which they began.
    ordered = [call for _, call in sorted(calls, key=lambda item: item[0])]
    return {name: "".join(pieces) for name, pieces in texts.items()} | {"tool_calls": ordered}


def _extend(calls: list[tuple[int, dict[str, Any]]], part: Any) -> None:
    """Add a streamed piece of a tool call to its call: the last one of its index, or a new one if it has another id and
    a name. The id and name come once, the arguments in pieces."""
    if not isinstance(part, dict) or not isinstance(part.get("function"), dict):
        return
    function, last = part["function"], calls[-1][0] if calls else 0
    index = part["index"] if isinstance(part.get("index"), int) else last
    call = next((call for known, call in reversed(calls) if known == index), None)
    if call is None or (part.get("id") and call["id"] and part["id"] != call["id"] and function.get("name")):
        call = {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
        calls.append((index, call))
    call["id"] = part.get("id") or call["id"]
    for name in ("name", "arguments"):
        piece = function.get(name)
        call["function"][name] += piece if isinstance(piece, str) else ""


def usage_of(response: Any) -> tuple[int | None, int | None]:
    """Prompt and answer tokens of a response's `usage`, or of the ids of its prompt; None: not given."""
    # In a stream the last counts are the totals; Anthropic's begins with the prompt's, in a message.
    response, usage = response_of(response), dict[str, Any]()
    ids = _told_of_prompt(response, "prompt_token_ids", list)
    for chunk in response if isinstance(response, list) else [response]:
        message = chunk.get("message") if isinstance(chunk, dict) else None
        for holder in (message, chunk):
            found = holder.get("usage") if isinstance(holder, dict) else None
            usage |= (
                {name: value for name, value in found.items() if value is not None} if isinstance(found, dict) else {}
            )

    # Anthropic counts what came from its cache apart.
    prompt, answer = count(usage, "prompt_tokens"), count(usage, "completion_tokens")
    if prompt is None and (prompt := count(usage, "input_tokens")) is not None:
        prompt += sum(count(usage, f"cache_{name}_input_tokens") or 0 for name in ("read", "creation"))
    prompt = len(ids) if prompt is None and ids else prompt
    return prompt, count(usage, "output_tokens") if answer is None else answer


def prompt_of(response: Any) -> str | None:
    """Text of the prompt that vLLM shows in a response, or in the first chunk of one, where it was asked to."""
    return _told_of_prompt(response_of(response), "prompt_text", str)


def _told_of_prompt(response: Any, name: str, kind: type[T]) -> T | None:
    """What a response, whole or streamed, tells of its prompt; None: nothing."""
    chunks = response if isinstance(response, list) else [response]
    told = (chunk.get(name) for chunk in chunks if isinstance(chunk, dict))
    return next((value for value in told if isinstance(value, kind)), None)
