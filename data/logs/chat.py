"""Log entries, and readers of what all chat logs share: request bodies, answers (whole or streamed), token usage."""

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
    "chat template of its own",
    "prompt given as tokens",
    "prompt cut to a number of tokens",
    "special tokens added to the prompt",
    "answered by an adapter",
    "tools that are not functions",
    "no turn to answer",
]
"""Reasons why a log line gives no conversation. Such lines are counted and are no error."""


class LeftOut(InputError):  # noqa: N818  no mistake of anyone's
    """A request whose prompt cannot be made again as it was served, or that is none: counted, and no broken rule."""

    def __init__(self, where: str, reason: Reason) -> None:
        super().__init__(f"{where}: left out: {reason}")
        self.reason: Reason = reason


MOST_TOKENS = (1 << 31) - 1
"""Largest plausible token count; a larger number is not taken for a count."""


class Timing(NamedTuple):
    """Times, replica and token counts of a request; None: not logged."""

    started: float | None = None
    """Unix seconds."""
    ended: float | None = None
    replica: str | None = None
    """Name of the engine's copy that answered."""
    prompt_tokens: int | None = None
    answer_tokens: int | None = None


@dataclass(frozen=True)
class Entry:
    """One request of a log, or a line that holds none."""

    where: str
    line: Mapping[str, Any] = field(default_factory=dict)
    """The line for `records.parse`: messages, tools, sampling fields, labels."""
    left_out: Reason | None = None
    """Why `line` holds no conversation; None: it holds one."""
    timing: Timing = field(default_factory=Timing)
    in_flight: bool = True
    """Whether this line shows a request that an engine was busy with; False where another line of the log shows it."""
    dated: bool = True
    """Whether the year of the times is known; if not, only their differences mean something."""


class LogReader(Protocol):
    """Reads one source's log in the order it was written."""

    def feed(self, value: Any, where: str, server: str) -> Iterable[Entry]:
        """Take one line, value or row; `server` is whose file it stands in. Raises InputError starting with `where`."""
        ...

    def finish(self) -> Iterable[Entry]:
        """Entries of requests that still wait when the log ends."""
        ...


class ObjectReader:
    """Reader of a log in which each JSON object is complete in itself."""

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
    """Decode a text that holds a JSON object or array; return everything else as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def body_of(request: Mapping[str, Any]) -> dict[str, Any]:
    """Request body with the fields of `extra_body` moved up beside its own, which win."""
    extra = request.get("extra_body")
    return {**(extra if isinstance(extra, dict) else {}), **request}


def refusal(messages: Any) -> Reason | None:
    """Reason why messages are not plain text; None: they are, or they break a rule that `records` will name."""
    if not isinstance(messages, list):
        return None
    for message in messages:
        # Text is a string or a list of text parts; images, audio and files are parts of other types.
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list):
            continue
        if any(isinstance(part, dict) and part.get("type") != "text" for part in content):
            return "message part that is not text"
    return None


def line_of(rendered: Rendered, answer: Any, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Build the line for `records.parse` from an unrendered prompt; `answer` is left out unless it is text."""
    message = {"role": "assistant", "content": answer} if isinstance(answer, str) and answer.strip() else None
    messages = with_answer(rendered.messages, message)
    return {**sampling, "messages": messages, "chat_template_kwargs": rendered.template_args}


def with_answer(messages: list[Any], answer: Mapping[str, Any] | None) -> list[Any]:
    """Messages with the logged answer at the end (None: no answer); the target will answer that turn again."""
    return messages if answer is None else [*messages, answer]


def answer_of(response: Any) -> dict[str, Any] | None:
    """Message of the first choice of a chat-completions response, whole or streamed.

    None: it holds neither text nor tool calls, such as an answer that was cut while it was thinking.
    """
    # A stream as it went over the wire, JSON text, or decoded chunks.
    if isinstance(response, str):
        response = _events(response) or decoded(response)
    if isinstance(response, list):
        return _message_with_content(_merged(response))
    # A whole response: the choice with index 0.
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
    """Prompt and answer tokens of a response's `usage`; None: not given."""
    if isinstance(response, str):
        response = _events(response) or decoded(response)
    # In a stream the last chunk with a usage has the totals.
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
    """Read a field as a token count, a whole number of at least 0; None: it is none."""
    found = number(values.get(name)) if isinstance(values, Mapping) else None
    return int(found) if found is not None and 0 <= found <= MOST_TOKENS and found.is_integer() else None


def labels(*sources: Any) -> dict[str, Any]:
    """Collect the text and whole-number fields of some objects, from which a recipe may read a domain, a group or a
    replica. Of equal names the last object's wins."""
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
    """Chunks of a server-sent-events stream that was logged as text; empty: the text is no stream."""
    lines = [line[5:].strip() for line in text.splitlines() if line.startswith("data:")]
    return [decoded(line) for line in lines if line != _SSE_DONE]


def _merged(chunks: Iterable[Any]) -> dict[str, Any]:
    """Merge the chunks of a stream's first choice into one message."""
    texts: list[str] = []
    calls: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        # A chunk without choices (such as the usage at the end) adds nothing.
        choices = chunk.get("choices") if isinstance(chunk, dict) else None
        for choice in choices if isinstance(choices, list) else []:
            delta = choice.get("delta") if isinstance(choice, dict) else None
            if not isinstance(delta, dict) or choice.get("index"):
                continue
            # Text comes in pieces; tool calls too, each piece under the index of its call.
            if isinstance(delta.get("content"), str):
                texts.append(delta["content"])
            parts = delta.get("tool_calls")
            for part in parts if isinstance(parts, list) else []:
                _extend(calls, part)
    return {"content": "".join(texts), "tool_calls": [calls[index] for index in sorted(calls)]}


def _extend(calls: dict[int, dict[str, Any]], part: Any) -> None:
    """Add a streamed piece of a tool call to its call; the id and name come once, the arguments in pieces."""
    if not isinstance(part, dict) or not isinstance(part.get("function"), dict):
        return
    index = part["index"] if isinstance(part.get("index"), int) else 0
    call = calls.setdefault(index, {"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
    call["id"] = part.get("id") or call["id"]
    for name in ("name", "arguments"):
        piece = part["function"].get(name)
        call["function"][name] += piece if isinstance(piece, str) else ""
