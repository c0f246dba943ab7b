"""Log records: one line of a log, a dataset or a prompt list, validated and brought to one shape.

Every error names the line (`file:line`) and the broken rule, and quotes no text of the conversation.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from .. import fingerprint
from ..errors import InputError
from ..specdec.sampling_settings import SamplingSettings
from .conversation import ROLES, Engine, Message, PromptEnd
from .logs.chat import MOST_TOKENS, Timing
from .logs.parsing import seconds
from .settings import LABEL, DatasetSource, DomainRule, FileSource, Shape, TargetSource

_ID_DIGITS = 24
_USUAL: dict[str, Any] = {"turn_by_turn": False, "prompt_end": "opened", "engine": "vllm"}
_SAMPLING_FIELDS = tuple(SamplingSettings.model_fields)
_LIMIT_FIELDS = ("max_new_tokens", "max_completion_tokens", "max_tokens")
_SHAREGPT_ROLES: dict[str, str] = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "observation": "tool",
    **dict(zip(ROLES, ROLES)),
}
DEFAULT_COLUMNS: dict[Shape, str] = {
    "messages": "messages",
    "sharegpt": "conversations",
    "turns": "turns",
    "prompts": "prompt",
}
M = TypeVar("M", bound=BaseModel)
Lookup = Callable[[str], Any]
"""Looks up a field by name in the line, then in its `request` object; None: neither has it."""


@dataclass(frozen=True)
class Record:
    """A conversation before it has a cluster and a split."""

    domain: str
    """Name of its domain; empty: nothing names one, and `mix.domains.clusters` will."""
    messages: tuple[Message, ...]
    tools: list[dict[str, Any]] | None = None
    template_args: Mapping[str, Any] | None = None
    turn_by_turn: bool = False
    """Like `prompt_end` and `engine`, as in `Conversation`."""
    prompt_end: PromptEnd = "opened"
    engine: Engine = "vllm"
    sampling: SamplingSettings | None = None
    max_new_tokens: int | None = None
    group: str | None = None
    source: int = 0
    """Index of its source in the recipe."""
    started: float | None = None
    """Unix seconds when it was asked; like the next four fields no part of `id` and `key`."""
    ended: float | None = None
    replica: str | None = None
    """Name of the engine's copy that answered."""
    prompt_tokens: int | None = None
    """Prompt tokens as logged, counted by the logged model's tokenizer; likewise `answer_tokens`."""
    answer_tokens: int | None = None
    where: str = field(default="", compare=False)
    """File and line (`file:line`), item or row that it was read from; no part of `id`, `key` and equality."""

    @cached_property
    def id(self) -> str:
        """Hash of what the target is shown (messages, tools, template arguments), so exact copies share it."""
        shown = [[message.record() for message in self.messages], self.tools, dict(self.template_args or {})]
        # What is not as in most conversations counts too.
        form = {"turn_by_turn": self.turn_by_turn, "prompt_end": self.prompt_end, "engine": self.engine}
        unusual = {name: value for name, value in form.items() if value != _USUAL[name]}
        return _digest([*shown, unusual] if unusual else shown)

    @cached_property
    def key(self) -> str:
        """Hash of all but times, source and place: orders records independently of their position."""
        sampling = self.sampling.model_dump() if self.sampling else None
        return _digest([self.id, self.domain, sampling, self.max_new_tokens, self.group])

    @property
    def user_text(self) -> str:
        """User messages, one a line: the text by which near-copies are judged."""
        return "\n".join(message.text for message in self.messages if message.role == "user")


def parse(
    line: Any,
    shape: Shape,
    source: FileSource | DatasetSource | TargetSource,
    where: str,
    index: int = 0,
    timing: Timing | None = None,
) -> Record:
    """Validate one decoded line of a given shape and make a record of it. Raises InputError starting with `where`.

    `timing`: times, replica and token counts from a log reader; None: they are read from the line's own fields.
    """
    # 1) The line, and the request that it may wrap.
    if not isinstance(line, dict):
        raise InputError(f"{where}: is a JSON {_json_type(line)}; must be an object")
    request = line.get("request")
    inner = request if isinstance(request, dict) else {}

    def lookup(name: str) -> Any:
        return line[name] if line.get(name) is not None else inner.get(name)

    # 2) Messages, then all other fields, each checked by itself.
    messages = tuple(_PARSERS[shape](lookup, where))
    if not any(message.role == "user" for message in messages):
        raise InputError(f"{where}: has no user message; the target has nothing to answer")
    record = Record(
        domain=_domain(source, lookup, where, messages),
        messages=messages,
        tools=_tools(lookup, where),
        template_args={**source.template_args, **_template_args(lookup, where)},
        sampling=_sampling(lookup, where),
        max_new_tokens=_max_new_tokens(lookup, where),
        group=_group(source, lookup, where),
        source=index,
        where=where,
        **(timing or timing_of(line, where))._asdict(),
    )
    # 3) Text that no file can hold shows when the record is hashed; here its line is known.
    try:
        record.key  # noqa: B018
    except RecursionError:
        raise InputError(f"{where}: nested too deeply for JSON") from None
    except (UnicodeEncodeError, ValueError):
        raise InputError(f"{where}: holds text that is not valid Unicode, or a number that is not finite") from None
    return record


def timing_of(line: Mapping[str, Any], where: str) -> Timing:
    """Read a line's fields `started`, `ended`, `replica`, `prompt_tokens`, `answer_tokens`. Raises InputError."""
    # Times: unix seconds or dates.
    times = {name: seconds(line.get(name)) for name in ("started", "ended")}
    for name, time in times.items():
        if time is None and line.get(name) is not None:
            raise InputError(f"{where}: {name} is no time; must be unix seconds or a date in ISO 8601")

    # Token counts: whole numbers, neither floats nor booleans.
    counts = {name: line.get(name) for name in ("prompt_tokens", "answer_tokens")}
    for name, count in counts.items():
        if count is None:
            continue
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= MOST_TOKENS:
            raise InputError(f"{where}: {name} {_quoted(count)}; must be a whole number from 0 to {MOST_TOKENS}")

    # The replica, by name or number.
    replica = line.get("replica")
    if replica is not None and not isinstance(replica, str | int):
        raise InputError(f"{where}: replica is a JSON {_json_type(replica)}; must be text or a number")
    return Timing(
        started=times["started"],
        ended=times["ended"],
        replica=None if replica is None else str(replica),
        prompt_tokens=counts["prompt_tokens"],
        answer_tokens=counts["answer_tokens"],
    )


def _messages(lookup: Lookup, where: str) -> list[Message]:
    return [_message(raw, f"{where}: messages[{i}]") for i, raw in enumerate(_items(lookup, "messages", where))]


def _message(raw: Any, where: str) -> Message:
    if not isinstance(raw, dict):
        raise InputError(f"{where}: is a JSON {_json_type(raw)}; must be an object with role and content")
    # A developer message is a system message under the name that newer APIs use.
    role = "system" if raw.get("role") == "developer" else raw.get("role")
    if role not in ROLES:
        raise InputError(f"{where}: unknown role {_quoted(role)}; must be one of {', '.join(ROLES)}")
    # Only a tool's result, and an assistant message that calls tools, may be without text.
    content = _content(raw.get("content"), where)
    tool_calls = raw.get("tool_calls") or None
    if not content.strip() and not (role == "tool" or (role == "assistant" and tool_calls)):
        raise InputError(f"{where}: content of the {role} message is empty; must hold text")
    fields = {"name": raw.get("name"), "tool_call_id": raw.get("tool_call_id"), "tool_calls": tool_calls}
    return _validated(Message, {"role": role, "content": content, **fields}, where)


def _content(content: Any, where: str) -> str:
    """Join the text of a message's content: a string or a list of text parts. Raises InputError for other parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InputError(f"{where}: content is a JSON {_json_type(content)}; must be text or a list of text parts")
    # Parts that are not text (images, audio) cannot be left out without changing the question.
    parts: list[str] = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise InputError(f"{where}: content part of type {_quoted(kind)}; only text is supported")
        parts.append(part["text"])
    return "".join(parts)


def _sharegpt(lookup: Lookup, where: str) -> list[Message]:
    messages: list[Message] = []
    # A system prompt may stand beside the conversation.
    system = lookup("system")
    if isinstance(system, str) and system.strip():
        messages.append(Message(role="system", content=system))
    for i, raw in enumerate(_items(lookup, "conversations", where)):
        item = f"{where}: conversations[{i}]"
        if not isinstance(raw, dict):
            raise InputError(f"{item}: is a JSON {_json_type(raw)}; must be an object with from and value")
        # Roles have other names than in the OpenAI style.
        role = _SHAREGPT_ROLES.get(raw["from"]) if isinstance(raw.get("from"), str) else None
        if role is None:
            names = ", ".join(sorted(_SHAREGPT_ROLES))
            raise InputError(f"{item}: unknown role {_quoted(raw.get('from'))}; must be one of {names}")
        messages.append(_message({"role": role, "content": raw.get("value")}, item))
    return messages


def _turns(lookup: Lookup, where: str) -> list[Message]:
    turns = enumerate(_items(lookup, "turns", where))
    return [_message({"role": "user", "content": turn}, f"{where}: turns[{i}]") for i, turn in turns]


def _prompt(lookup: Lookup, where: str) -> list[Message]:
    return [_message({"role": "user", "content": lookup("prompt")}, f"{where}: prompt")]


_PARSERS: dict[Shape, Callable[[Lookup, str], list[Message]]] = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "turns": _turns,
    "prompts": _prompt,
}
assert set(_PARSERS) == set(get_args(Shape)) == set(DEFAULT_COLUMNS)


def _items(lookup: Lookup, name: str, where: str) -> list[Any]:
    items = lookup(name)
    if not isinstance(items, list) or not items:
        found = "is missing" if items is None else f"is a JSON {_json_type(items)}" if items != [] else "is empty"
        raise InputError(f"{where}: {name} {found}; must be a list of at least one")
    return items


def _domain(
    source: FileSource | DatasetSource | TargetSource, lookup: Lookup, where: str, messages: Sequence[Message]
) -> str:
    # A rule wins over the source's own domain, and that over the line's field.
    for rule in source.domains.rules:
        if re.search(rule.match, _searched_text(rule, lookup, messages)):
            return rule.domain
    if source.domain is not None:
        return source.domain
    # Without any, text clustering will name it, if the recipe asks for that.
    domain = lookup(source.domain_field)
    if domain is None and source.domains.clusters is not None:
        return ""
    if domain is None:
        hint = ", or a rule of mix.domains" if source.domains.rules else ""
        raise InputError(
            f"{where}: has no {source.domain_field}, and its source sets no domain; one of them{hint} must"
        )
    if not isinstance(domain, str) or not re.fullmatch(LABEL, domain):
        raise InputError(f"{where}: {source.domain_field} {_quoted(domain)}; must be a label that matches {LABEL}")
    return domain


def _searched_text(rule: DomainRule, lookup: Lookup, messages: Sequence[Message]) -> str:
    if rule.field is not None:
        value = lookup(rule.field)
        return value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)
    roles = {"system": ("system", "developer"), "user": ("user",), None: ("system", "developer", "user")}[rule.role]
    return "\n".join(message.text for message in messages if message.role in roles)


def _group(source: FileSource | DatasetSource | TargetSource, lookup: Lookup, where: str) -> str | None:
    group = lookup(source.group_field)
    if group is None or (isinstance(group, str | int) and str(group)):
        return None if group is None else str(group)
    raise InputError(f"{where}: {source.group_field} is a JSON {_json_type(group)}; must be text or a number")


def _tools(lookup: Lookup, where: str) -> list[dict[str, Any]] | None:
    tools = lookup("tools")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InputError(f"{where}: tools is not a list of objects")
    return tools


def _template_args(lookup: Lookup, where: str) -> dict[str, Any]:
    arguments = lookup("chat_template_kwargs") or {}
    if not isinstance(arguments, dict):
        raise InputError(f"{where}: chat_template_kwargs is a JSON {_json_type(arguments)}; must be an object")
    return arguments


def _sampling(lookup: Lookup, where: str) -> SamplingSettings | None:
    """Logged sampling settings; None: none are logged. Without a temperature, others were served at 1, the API's
    default."""
    given = {name: lookup(name) for name in _SAMPLING_FIELDS if lookup(name) is not None}
    if given.get("top_k") == -1:  # vLLM's "off"
        given["top_k"] = 0
    return _validated(SamplingSettings, {"temperature": 1.0, **given}, where) if given else None


def _max_new_tokens(lookup: Lookup, where: str) -> int | None:
    for name in _LIMIT_FIELDS:
        limit = lookup(name)
        if limit is None:
            continue
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise InputError(f"{where}: {name} {_quoted(limit)}; must be a whole number of at least 1")
        return limit
    return None


def _validated(model: type[M], values: dict[str, Any], where: str) -> M:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{where}: {field}: {first['msg'][:1].lower()}{first['msg'][1:]}") from None


def _digest(value: Any) -> str:
    return fingerprint.of_json(value)[:_ID_DIGITS]


def _quoted(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _json_type(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null" if value is None else type(value).__name__)
