"""Log entries, and what the logs of chat servers and of the proxies before them share: bodies, answers, usage."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from ...errors import InputError
from .parsing import Rendered, number

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
    """Times, replica and token counts of a request; None: not logged."""

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
    """Whether an engine was busy with it, as far as this line shows; False where another line of the log counts it."""
    dated: bool = True
    """Whether the times are of a known year; if not, only their differences mean something."""


class LogReader(Protocol):
    """Reads one source's log in the order it was written."""

    def feed(self, value: Any, where: str, server: str) -> Iterable[Entry]:
        """Take one line, value or row; `server` is whose file it stands in. Raises InputError starting with `where`."""
        ...

    def finish(self) -> Iterable[Entry]:
        """Entries of requests that still wait when the log ends."""
        ...


class ObjectReader:
    """A reader of a log whose every JSON object stands for itself."""

    def __init__(self, entries: Callable[[dict[str, Any], str], Iterable[Entry]]) -> None:
        self._entries = entries

    def feed(self, value: Any, where: str, server: str) -> Iterable[Entry]:
        if not isinstance(value, dict):
            raise InputError(f"{where}: is not a JSON object")
        return self._entries(value, where)

    def finish(self) -> Iterable[Entry]:
        return ()


_SSE_DONE = "[DONE]"
_COUNTS = (("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens"))


def decoded(value: Any) -> Any:
    """The object or array that a text holds, where it holds one; everything else as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def body_of(request: Mapping[str, Any]) -> dict[str, Any]:
    """A request body with what clients nest in `extra_body` beside its other fields."""
    extra = request.get("extra_body")
    return {**(extra if isinstance(extra, dict) else {}), **request}


def refusal(messages: Any) -> Reason | None:
    """Why these messages hold no conversation in text; None: they do, or break a rule that `records` will name."""
    if not isinstance(messages, list):
        return None
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list):
            continue
        if any(isinstance(part, dict) and part.get("type") != "text" for part in content):
            return "message part that is not text"
    return None


def line_of(rendered: Rendered, answer: Any, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The line that `records.parse` reads, of a prompt that was taken apart; `answer` counts if it is text."""
    message = {"role": "assistant", "content": answer} if isinstance(answer, str) and answer.strip() else None
    messages = with_answer(rendered.messages, message)
    return {**sampling, "messages": messages, "chat_template_kwargs": rendered.template_args}


def with_answer(messages: list[Any], answer: Mapping[str, Any] | None) -> list[Any]:
    """The messages and the logged answer, which the target will give again."""
    return messages if answer is None else [*messages, answer]


def answer_of(response: Any) -> dict[str, Any] | None:
    """The first choice's message of a chat-completions response, whole or streamed; None where it holds no text and
    no tool call, as of an answer that was cut while it thought."""
    if isinstance(response, str):
        response = _events(response) or decoded(response)
    if isinstance(response, list):
        return _message_with_content(_merged(response))
    if not isinstance(response, dict) or not isinstance(response.get("choices"), list):
        return None
    for choice in response["choices"]:
        if isinstance(choice, dict) and isinstance(choice.get("message"), dict) and not choice.get("index"):
            return _message_with_content(choice["message"])
    return None


def _message_with_content(message: Mapping[str, Any]) -> dict[str, Any] | None:
    content, calls = message.get("content"), message.get("tool_calls") or None
    if not calls and not (content.strip() if isinstance(content, str) else content):
        return None
    return {"role": "assistant", "content": content, "tool_calls": calls}


def usage_of(response: Any) -> tuple[int | None, int | None]:
    """Prompt and answer tokens of a response's `usage`."""
    if isinstance(response, str):
        response = _events(response) or decoded(response)
    if isinstance(response, list):
        usages = [chunk.get("usage") for chunk in response if isinstance(chunk, dict)]
        usage: Any = next((one for one in reversed(usages) if isinstance(one, dict)), {})
    else:
        usage = response.get("usage") if isinstance(response, dict) else {}
    prompt, answer = (
        next((count(usage, name) for name in names if count(usage, name) is not None), None) for names in _COUNTS
    )
    return prompt, answer


def count(values: Any, name: str) -> int | None:
    """A field that is a whole number of at least 0; None of anything else."""
    found = number(values.get(name)) if isinstance(values, Mapping) else None
    return int(found) if found is not None and 0 <= found <= MOST_TOKENS and found.is_integer() else None


def labels(*sources: Any) -> dict[str, Any]:
    """The texts and whole numbers among the fields of some objects, later ones first: what a recipe may read a domain,
    a group or a replica from."""
    found: dict[str, Any] = {}
    for source in sources:
        if isinstance(source, Mapping):
            found |= {
                name: value
                for name, value in source.items()
                if isinstance(value, str | int) and not isinstance(value, bool)
            }
    return found


def _events(text: str) -> list[Any]:
    """The chunks of a stream that was logged as it went over the wire; empty if this is none."""
    lines = [line[5:].strip() for line in text.splitlines() if line.startswith("data:")]
    return [decoded(line) for line in lines if line != _SSE_DONE]


def _merged(chunks: Iterable[Any]) -> dict[str, Any]:
    """The message that the chunks of the first choice make."""
    texts: list[str] = []
    calls: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        choices = chunk.get("choices") if isinstance(chunk, dict) else None
        for choice in choices if isinstance(choices, list) else []:
            delta = choice.get("delta") if isinstance(choice, dict) else None
            if not isinstance(delta, dict) or choice.get("index"):
                continue
            if isinstance(delta.get("content"), str):
                texts.append(delta["content"])
            parts = delta.get("tool_calls")
            for part in parts if isinstance(parts, list) else []:
                _extend(calls, part)
    return {"content": "".join(texts), "tool_calls": [calls[index] for index in sorted(calls)]}


def _extend(calls: dict[int, dict[str, Any]], part: Any) -> None:
    """Add a piece of a tool call: its id and name come once, its arguments in pieces."""
    if not isinstance(part, dict) or not isinstance(part.get("function"), dict):
        return
    index = part["index"] if isinstance(part.get("index"), int) else 0
    call = calls.setdefault(index, {"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
    call["id"] = part.get("id") or call["id"]
    for name in ("name", "arguments"):
        piece = part["function"].get(name)
        call["function"][name] += piece if isinstance(piece, str) else ""
