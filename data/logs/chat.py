"""Log entries, and what the readers of all chat logs share: request bodies, encoded fields, labels."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from ...errors import InputError
from ..read_limits import json_within
from .parsing import Rendered, flag, literal, number

Reason = Literal[
    "other log line",
    "joined with another line",
    "no chat request",
    "health check",
    "failed request",
    "request that the engine refuses",
    "answer without its request",
    "no text logged",
    "raw prompt",
    "prompt in an unread markup",
    "text cut by the log",
    "text redacted by the log",
    "message part that is not text",
    "message rewritten by the gateway",
    "messages in an unread form",
    "objects in columns of a table",
    "reasoning effort in an unread form",
    "tools without their definitions",
    "settings beside the request",
    "another request beside it",
    "system prompt that the log may lack",
    "earlier messages that the log may lack",
    "answer at the end of its messages",
    "logged twice",
    "several requests of one id at once",
    "Messages API of SGLang",
    "chat template of its own",
    "reserved template argument",
    "prompt given as tokens",
    "prompt cut to a number of tokens",
    "special tokens added to the prompt",
    "answered by an adapter",
    "prompt continued from another request",
    "tools that are not functions",
    "tools that the engine rewrites",
    "tools inside a message",
    "tool call without its id",
    "no token asked for",
    "no turn to answer",
]
"""Reasons why a log line gives no conversation. Such lines are counted and are no error."""


SYSTEM_UNKNOWN, HISTORY_UNKNOWN, TOOLS_UNKNOWN = "system_prompt_unknown", "history_unknown", "tools_unknown"
PARTS_UNKNOWN, ARGUMENTS_UNKNOWN, ADDED_UNKNOWN = "parts_unknown", "arguments_unknown", "added_unknown"
"""Fields of a line whose request may have had a system prompt, earlier messages, tools, anything, template arguments,
or what a gateway adds, that are not logged."""
UNSET_AS_ONE = "unset_as_one"
"""Field of a line: a tuple of the sampling settings that are logged as 1 where a request had none."""
RESPONSES = ("response", "response_body", "responseBody")
"""Names under which proxies log a response."""


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
    pieces: Sequence[str] | None = None
    """The markup around the contents of its messages, where they come from a rendered prompt."""
    others: Sequence[Mapping[str, Any]] = ()
    """What else the line's request may be, where nothing in it tells how a server took it."""
    shown: str | None = None
    """Text of its prompt, where its line shows that beside the request."""
    served: tuple[bytes, bool] | None = None
    """Hash of the prompt that a line shows as served for a request that another line holds, and whether it was
    answered."""


class JoinedLines(Protocol):
    """A request whose lines are joined, and not yet taken apart: any process can do that."""

    where: str

    def entry(self) -> Entry:
        """The request. Raises InputError starting with its place."""
        ...


class LogReader(Protocol):
    """Reads one source's log in the order it was written."""

    def feed(self, value: Any, where: str, server: str) -> Iterable[Entry | JoinedLines]:
        """Take one line, value or row; `server` is whose file it stands in. Raises InputError starting with `where`."""
        ...

    def finish(self) -> Iterable[Entry | JoinedLines]:
        """Requests that still wait when the log ends."""
        ...


class ObjectReader:
    """Reader of a log in which each JSON object is complete in itself."""

    def __init__(
        self, entries: Callable[[dict[str, Any], str, str | None], Iterable[Entry]], engine: str | None
    ) -> None:
        """`engine`: which one served the requests; None: vLLM, or one that makes prompts as it does."""
        self._entries, self._engine = entries, engine

    def feed(self, value: Any, where: str, server: str) -> Iterable[Entry]:
        if not isinstance(value, dict):
            raise InputError(f"{where}: is not a JSON object")
        return self._entries(value, where, self._engine)

    def finish(self) -> Iterable[Entry]:
        return ()


_MOST_ENCODINGS, _EXTRA = 3, "extra_body"
_REQUEST_FIELDS = (
    *("tools", "tool_choice", "documents", "chat_template", "chat_template_kwargs", "reasoning", "reasoning_effort"),
    *("add_generation_prompt", "continue_final_message", "truncate_prompt_tokens", "messages", "request"),
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("max_tokens", "max_completion_tokens", "max_new_tokens"),
)
"""Names that mean something in a request; a label around it that has one is none of its fields."""


def decoded(value: Any) -> Any:
    """Decode a text that holds an object or array, as JSON (that may be encoded again) or as Python prints it; return
    everything else as it is."""
    found = value
    for _ in range(_MOST_ENCODINGS):
        if not isinstance(found, str) or found.lstrip()[:1] not in ("{", "[", '"'):
            break
        try:
            found = json_within(found)
        except ValueError:
            found = _printed(found)
            break
    return found if isinstance(found, dict | list) else value


def system_prompt(value: Any) -> Any:
    """Decode a system prompt that was logged as text: an object it is only as a list of blocks, and else that text."""
    blocks = decoded(value)
    is_list = isinstance(blocks, list) and bool(blocks)
    return blocks if is_list and all(isinstance(block, dict) and "type" in block for block in blocks) else value


def _printed(text: str) -> Any:
    """Value of an object or array as Python prints it; None: the text is none, or holds what JSON cannot."""
    return literal(text) if text.rstrip()[-1:] in ("}", "]") else None


def body_of(request: Mapping[str, Any]) -> dict[str, Any]:
    """Request body with the fields of `extra_body` in place of its own, as OpenAI's client sends them; an `extra_body`
    among these is a field that no server knows."""
    extra = request.get(_EXTRA)
    return as_it_stands({**request, **extra} if isinstance(extra, dict) else request)


def as_it_stands(request: Mapping[str, Any]) -> dict[str, Any]:
    """Request body as a server takes it that was sent an `extra_body`, a field that it does not know."""
    return {name: value for name, value in request.items() if name != _EXTRA}


def read_otherwise(request: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Request body as it stands, where its `extra_body` makes another one of it; None: there is one way to read it."""
    there = request is not None and isinstance(request.get(_EXTRA), dict)
    return as_it_stands(request) if request is not None and there else None


def settings_beside(request: Mapping[str, Any], body: Any, *around: Any) -> bool:
    """Whether tools, template arguments or a system prompt stand beside a request that names none of its own, so that
    nothing tells whether its prompt was made with them.

    `body`: the request as it was logged. Engines take its tools and arguments, so only what they pass over is searched:
    a system prompt in a field, and what lies inside other fields. `around`: objects in which the request was logged;
    all of them is searched.
    """
    inside = {name: value for name, value in body.items() if name not in _SHAPING} if isinstance(body, Mapping) else {}
    messages = request.get("messages")
    said = [str(one.get("role")) for one in messages if isinstance(one, Mapping)] if isinstance(messages, list) else []
    named = _named(request)
    spoken = bool({"system", "developer"}.intersection(said))
    named |= {_SYSTEM} if spoken else set()
    # One that is read as of the Messages API has its own among the messages by now.
    lacking = bool(request.get(_SYSTEM)) and not spoken
    return lacking or any(_beside(named, each, _DEPTH) for each in (inside, *around))


def arguments_beside(request: Mapping[str, Any], around: Mapping[str, Any]) -> bool:
    """Whether tools or template arguments that a request does not name stand in an object around it."""
    return _beside({*_named(request), _SYSTEM}, around, _DEPTH)


def _named(request: Mapping[str, Any]) -> set[str]:
    """Names of a request's fields and template arguments that have a value."""
    arguments = request.get("chat_template_kwargs")
    given = {**(arguments if isinstance(arguments, Mapping) else {}), **request}
    return {name for name, value in given.items() if value not in (None, "", [], {})}


def _beside(named: Collection[str], around: Any, depth: int) -> bool:
    """Whether an object, or one inside it down to `depth`, holds something that shapes a prompt and is not `named`."""
    for path, found in around.items() if isinstance(around, Mapping) else ():
        if path in _TAKEN or not isinstance(path, str):  # a table's maps have keys of any type
            continue
        # Attributes of spans have a path in the place of a name.
        value, name = decoded(found), path.rpartition(".")[2]
        if name not in named and name in _SHAPING and _SHAPING[name](value):
            return True
        if "tools" not in named and _tells_of_tools(path, value):
            return True
        # Instructions that stand deeper may be anyone's.
        system = is_system_prompt(name) or (path == "instructions" and depth == _DEPTH)
        if system and _SYSTEM not in named and value and isinstance(value, str | list | dict):
            return True
        if depth and _beside(named, value, depth - 1):
            return True
    return False


def is_system_prompt(name: str) -> bool:
    """Whether a field's name says that it holds a system prompt, in any spelling; `system` alone may be any system."""
    return name.lower().replace("_", "").removesuffix("s") in ("systemprompt", "systemmessage", "systeminstruction")


def conflicting_request(
    request: Mapping[str, Any],
    read: Callable[[dict[str, Any]], Mapping[str, Any]],
    *around: Any,
    own: Any = None,
    depth: int = 3,
) -> bool:
    """Whether an object in which a request was logged holds another body of one, with other messages, system prompt or
    settings that shape a prompt, so that nothing tells which was served.

    `read`: makes a chat-completions request of a body, as its reader does of the logged one; `own`: the list of
    messages in the logged body, which is passed over.
    """
    for name, found in (item for one in around if isinstance(one, Mapping) for item in one.items()):
        value = None if name in _TAKEN or name == "chat_template_kwargs" else decoded(found)  # arguments are no body
        if not isinstance(value, Mapping):
            continue
        messages = decoded(value.get("messages"))
        another = messages is not own and _are_messages(messages)
        if another and _asked(read({**value, "messages": messages})) != _asked(request):
            return True
        if depth and conflicting_request(request, read, value, own=own, depth=depth - 1):
            return True
    return False


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, Mapping) and "role" in one for one in value)


def _asked(request: Mapping[str, Any]) -> dict[str, Any]:
    """What of a request shapes its prompt."""
    shaping: dict[str, Callable[[Any], bool]] = {**_SHAPING, "messages": bool, _SYSTEM: bool, "documents": bool}
    sent = {name: decoded(value) for name, value in request.items() if name in shaping}
    if isinstance(messages := sent.get("messages"), list):
        sent["messages"] = [_shown(one) if isinstance(one, Mapping) else one for one in messages]
    return {name: value for name, value in sent.items() if shaping[name](value)}


def _shown(message: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a message that an engine may show a template."""
    return {name: value for name, value in message.items() if name in _OF_MESSAGES and value is not None}


def _tells_of_tools(path: str, value: Any) -> bool:
    """Whether a field holds definitions of tools, or is an attribute of a span that holds a part of one. `functions`
    alone are those of OpenAI's old API, which engines pass over."""
    if path == "functions" or not _NAMES_TOOLS.search(path) or _NAMES_CALLS.search(path):
        return False
    # Conventions of OpenTelemetry let a definition name its tool alone.
    if _DEFINITIONS.search(path) and isinstance(value, list) and value:
        return True
    return _PART_OF_TOOL.search(path) is not None or _are_tools(value if isinstance(value, list) else [value])


def _are_tools(value: Any) -> bool:
    """Whether a value is a list of definitions of tools, which may be texts; calls of them are none."""
    return isinstance(value, list) and bool(value) and all(_is_tool(decoded(one)) for one in value)


def _is_tool(value: Any) -> bool:
    function = value.get("function", value) if isinstance(value, Mapping) else None
    return isinstance(function, Mapping) and "name" in function and bool(_SCHEMAS & function.keys())


_SHAPING: dict[str, Callable[[Any], bool]] = {
    "tools": _are_tools,
    "chat_template_kwargs": lambda value: isinstance(value, Mapping) and bool(value),
    "reasoning_effort": lambda value: isinstance(value, str | int | float) and value not in ("", False),
    "enable_thinking": lambda value: isinstance(flag(value), bool),
    "chat_template": lambda value: isinstance(value, str) and "{" in value,
    "continue_final_message": lambda value: flag(value) is True,
    "add_generation_prompt": lambda value: flag(value) is False,
}
"""Fields of a request that shape its prompt, and whether a value is one of theirs."""
_NAMES_TOOLS, _NAMES_CALLS = re.compile(r"tool|function", re.I), re.compile(r"(?:tool|function)[._]?calls?", re.I)
_DEFINITIONS = re.compile(r"(?:tool|function)s?[._]?definitions$", re.I)
_PART_OF_TOOL = re.compile(r"\.(?:functions|tools)\.\d+\.")
_SCHEMAS = {"parameters", "input_schema", "inputSchema", "parameters_json_schema"}
"""Where a definition of a tool has its schema: of OpenAI, Anthropic, the AI SDK and Pydantic AI."""
_SYSTEM, _DEPTH = "system", 3
_OF_MESSAGES = (
    *("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content", "tools", "task"),
    *("phase", "prefix"),
)
_TAKEN = ("messages", "input", "output", "model_parameters", "modelParameters", *RESPONSES)
"""What a model read and wrote, and settings that readers take: never searched for others."""


def line_of(rendered: Rendered, answer: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Build the line for `records.parse` from an unrendered prompt and the logged settings; `answer` is left out unless
    it is text."""
    request = {**settings, "messages": rendered.messages, "chat_template_kwargs": rendered.template_args}
    message = {"role": "assistant", "content": answer} if isinstance(answer, str) and answer.strip() else None
    return {"request": request, "messages": with_answer(rendered.messages, message)}


def as_sent(requests: Iterable[Mapping[str, Any]], answer: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """What requests may have been, the likeliest first: one that holds its own answer was perhaps sent without it, and
    without what came after. Clients put answers into the list that they sent, and some loggers write that later."""
    found: list[dict[str, Any]] = []
    for request in requests:
        messages = request.get("messages")
        end = _place_of(answer, messages) if answer is not None and isinstance(messages, list) else 0
        found += [{**request, "messages": messages[:end]}, {**request}] if end and messages else [{**request}]
    return found


def continued(requests: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Those requests that end with an assistant's message, with it as a prefill: what continues it is not logged."""
    return [
        {**one, "continue_final_message": True}
        for one in requests
        if isinstance(last := one["messages"][-1], Mapping) and last.get("role") == "assistant"
    ]


def _place_of(answer: Mapping[str, Any], messages: Sequence[Any]) -> int:
    """Index of an answer among messages: of the same calls anywhere, of the same text at their end; 0: not there."""
    calls, text = _calls_of(answer), answer.get("content")
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or message.get("role") != "assistant":
            continue
        at_end, same_text = place == len(messages) - 1, text is not None and message.get("content") == text
        if (calls and _calls_of(message) == calls) or (at_end and not calls and same_text):
            return place
    return 0


def _calls_of(message: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Id, name and arguments of a message's calls; none where one has no id."""
    given = message.get("tool_calls")
    calls = [call for call in given if isinstance(call, Mapping)] if isinstance(given, list) else []
    functions = [call["function"] if isinstance(call.get("function"), Mapping) else {} for call in calls]
    found = [(call.get("id"), one.get("name"), decoded(one.get("arguments"))) for call, one in zip(calls, functions)]
    return found if all(id for id, *_ in found) else []


def with_answer(messages: list[Any], answer: Mapping[str, Any] | None) -> list[Any]:
    """Messages with the logged answer at the end (None: no answer); the target will answer that turn again."""
    return messages if answer is None else [*messages, answer]


def count(values: Any, name: str) -> int | None:
    """Read a field as a token count, a whole number of at least 0; None: it is none."""
    found = number(values.get(name)) if isinstance(values, Mapping) else None
    return int(found) if found is not None and 0 <= found <= MOST_TOKENS and found.is_integer() else None


def labels(*sources: Any) -> dict[str, Any]:
    """Collect the text and whole-number fields of some objects, from which a recipe may read a domain, a group or a
    replica. Of equal names the last object's wins; names of a request's own fields are left out."""
    found: dict[str, Any] = {}
    for source in sources:
        if isinstance(source, Mapping):
            found |= {
                name: value
                for name, value in source.items()
                if isinstance(value, str | int) and not isinstance(value, bool) and name not in _REQUEST_FIELDS
            }
    return found
