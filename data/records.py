"""Log records: one line of a log, a dataset or a prompt list, validated and brought to one shape.

Every error names the line (`file:line`) and the broken rule, and quotes no text of the conversation.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, get_args

from .. import fingerprint
from ..errors import InputError
from ..specdec.sampling_settings import SamplingSettings
from ..storage import utf8
from .conversation import (
    NO_HISTORY,
    NO_SYSTEM_PROMPT,
    NO_TOOLS,
    OTHER_READINGS,
    ROLES,
    Conversation,
    Engine,
    Message,
    PromptEnd,
    as_printed,
    calls_as_printed,
    turn_ends,
)
from .domain_rules import domain_by_rule
from .logs.anthropic import BILLING_HEADER
from .logs.chat import (
    HISTORY_UNKNOWN,
    MOST_TOKENS,
    SYSTEM_UNKNOWN,
    TOOLS_UNKNOWN,
    LeftOut,
    Timing,
    arguments_beside,
    body_of,
    decoded,
    is_system_prompt,
    read_otherwise,
)
from .logs.parsing import seconds
from .served_request import (
    SAMPLING_FIELDS,
    Lookup,
    draws_of,
    from_table,
    json_type,
    lacks_call_ids,
    message_of_sglang,
    prompt_of,
    quoted,
    refuse_what_cannot_be_made_again,
    shown_tools,
    template_args,
    unfollowed,
    validated,
)
from .settings import LABEL, DatasetSource, FileSource, Shape, TargetSource
from .sharegpt import SHAREGPT_ROLES, refuse_media, refuse_what_stands_beside, sharegpt_messages

_ID_DIGITS = 24
_LACKING = {HISTORY_UNKNOWN: NO_HISTORY, SYSTEM_UNKNOWN: NO_SYSTEM_PROMPT, TOOLS_UNKNOWN: NO_TOOLS}
_USUAL: dict[str, Any] = {"turn_by_turn": False, "prompt_end": "opened", "engine": "vllm"}
_OTHER_ROLES = frozenset((*SHAREGPT_ROLES, "ai", "bot"))
"""Names in small letters of the usual roles, where they are none of `ROLES` as it is written."""
DEFAULT_COLUMNS: dict[Shape, str] = {
    "messages": "messages",
    "sharegpt": "conversations",
    "turns": "turns",
    "prompts": "prompt",
}
_TEXT_PARTS = dict.fromkeys(("text", "input_text", "output_text"), "text") | {
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Types of a content's parts that vLLM shows as text, and where it stands in them. SGLang takes the first alone."""
_SGLANG_THOUGHTS = ("thinking", "reasoning")
_NO_TEXT = ("type", "id", "name", "uuid")
"""Fields of a part whose texts are none of the message's."""
_PART_FIELDS = frozenset(
    (
        *("type", "text", "refusal", "thinking", "closed", "name", "uuid", "data", "prompt_cache_breakpoint"),
        *("file", "image_url", "image_pil", "image_embeds", "input_audio", "audio_url", "audio_embeds"),
        *("video_url", "video_embeds", "prompt_embeds"),
    )
)
"""Fields of a part that vLLM knows, of which a template is shown type and text alone; it is shown all others."""


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
    server_sampling: tuple[str, ...] = ()
    """Sampling settings that the request left to its server; no part of `id` and `key`."""
    max_new_tokens: int | None = None
    group: str | None = None
    source: int = 0
    """Index of its source in the recipe."""
    started: float | None = None
    """Unix seconds when it was asked; like the next five fields no part of `id` and `key`."""
    ended: float | None = None
    replica: str | None = None
    """Name of the engine's copy that answered."""
    prompt_tokens: int | None = None
    """Prompt tokens as logged, counted by the logged model's tokenizer; likewise `answer_tokens`."""
    answer_tokens: int | None = None
    counter: str | None = None
    """Who counted `prompt_tokens`: the kind of log, the model that was asked, and whether the answer was streamed, in
    which case gateways may count themselves; None: they are not logged."""
    unfollowed: tuple[str, ...] = ()
    """Names of the request's fields that shaped its logged answer, and that a capture does not follow."""
    pieces: tuple[str, ...] | None = field(default=None, compare=False)
    """The markup around the contents of the first messages, where these were taken out of a rendered prompt."""
    shown: bytes | None = field(default=None, compare=False)
    """Hash of its prompt, where its line shows that beside the request; of no use once something in it is redacted."""
    where: str = field(default="", compare=False)
    """File and line (`file:line`), item or row that it was read from; no part of `id`, `key` and equality."""

    @cached_property
    def id(self) -> str:
        """Hash of what the target is shown (messages, tools, template arguments), so exact copies share it."""
        messages = [message.record() for message in self.messages]
        for message in messages:
            if message.get("tool_calls"):
                message["tool_calls"] = calls_as_printed(message["tool_calls"])
        arguments = {name: as_printed(value) for name, value in (self.template_args or {}).items()}
        shown = [messages, as_printed(self.tools), arguments]
        # What is not as in most conversations counts too.
        engine = self.engine if _matters(self.messages, self.prompt_end) else "vllm"
        form = {"turn_by_turn": self.turn_by_turn, "prompt_end": self.prompt_end, "engine": engine}
        unusual = {name: value for name, value in form.items() if value != _USUAL[name]}
        return _digest([*shown, unusual] if unusual else shown)

    @cached_property
    def key(self) -> str:
        """Hash of all but times, source and place: orders records independently of their position."""
        sampling = self.sampling.model_dump() if self.sampling else None
        return _digest([self.id, self.domain, sampling, self.max_new_tokens, self.group])

    @property
    def user_text(self) -> str:
        """User messages, one a line: the text by which near-copies are judged. Where they hold none, all messages but
        the assistant's."""
        said = "\n".join(message.text for message in self.messages if message.role == "user")
        if said.strip():
            return said
        return "\n".join(message.text for message in self.messages if message.role != "assistant")

    def conversation(self, **placed: Any) -> Conversation:
        """The conversation of a mix that this record becomes; `placed`: its cluster, split, and what else differs."""
        names = ("id", "domain", "tools", "turn_by_turn", "prompt_end", "engine", "sampling", "max_new_tokens", "where")
        own = {name: getattr(self, name) for name in names}
        own |= {"messages": list(self.messages), "template_args": dict(self.template_args or {})}
        return Conversation(**{**own, **placed})


def parse(
    line: Any,
    shape: Shape,
    source: FileSource | DatasetSource | TargetSource,
    where: str,
    index: int = 0,
    timing: Timing | None = None,
    others: Sequence[Mapping[str, Any]] = (),
) -> Record:
    """Validate one decoded line of a given shape and make a record of it. Raises InputError starting with `where`.

    `timing`: times, replica and token counts from a log reader; None: they are read from the line's own fields.
    `others`: what else the line's request may be, beside what an `extra_body` in it makes of it.
    """
    if not isinstance(line, dict):
        raise InputError(f"{where}: is a JSON {json_type(line)}; must be an object")
    line = from_table(line)
    record = _record(line, shape, source, where, index, timing)
    readings: list[dict[str, Any]] = []
    for other in _otherwise(line, others):
        try:
            reading = _other_reading(record, _record(other, shape, source, where, index, timing))
        except InputError as error:  # what no server takes was not sent
            if isinstance(error, LeftOut) and error.reason != "request that the engine refuses":
                raise
            continue
        if reading is not None and reading not in readings:
            readings.append(reading)
    return (
        replace(record, template_args={**(record.template_args or {}), OTHER_READINGS: readings})
        if readings
        else record
    )


def messages_of(prompt: Any, where: str) -> list[Message]:
    """Messages of a prompt: of a text, which is one user message, or of a list of messages as of OpenAI's chat
    completions, which are read as those of logged requests are.

    `where`: what holds the prompt, for errors. Raises InputError for anything else.
    """
    if isinstance(prompt, str) and prompt.strip():
        return [Message(role="user", content=prompt)]
    listed = isinstance(prompt, Sequence) or hasattr(prompt, "tolist")  # a table keeps lists as arrays
    if not listed or isinstance(prompt, str) or not len(prompt):
        raise InputError(f"{where}: must be a prompt, or a list of messages with role and content")
    return [_message(_plain(raw), "vllm", f"{where}: messages[{i}]") for i, raw in enumerate(prompt)]


def request_of(body: Any, where: str) -> Record:
    """Record of one request: a list of messages, or the body of a chat completion (`messages`, `tools`,
    `chat_template_kwargs`, …), read as a logged one is. Raises InputError starting with `where`."""
    body = {"messages": body} if isinstance(body, list) else body
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list) or not body["messages"]:
        raise InputError(f"{where}: must be a list of messages with role and content, or a request that holds them")
    source = FileSource.model_validate({"kind": "openai", "path": where, "domain": "request"})
    return parse({"request": body, "messages": body["messages"]}, "messages", source, where, timing=Timing())


def _plain(raw: Any) -> Any:
    """A value without arrays, which a table keeps lists as, and as plain mappings without absent fields."""
    if isinstance(raw, Mapping):
        return {name: _plain(value) for name, value in raw.items() if value is not None}
    if hasattr(raw, "tolist"):
        raw = raw.tolist()
    return [_plain(value) for value in raw] if isinstance(raw, list | tuple) else raw


def _otherwise(line: dict[str, Any], others: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the line with what else its request may be: also without the fields of an `extra_body`, which a body may
    have been sent with."""
    for other in others:
        messages = [*(other.get("messages") or ()), *line["messages"][len(line["request"]["messages"]) :]]
        yield {**line, "request": {**other}, "messages": messages}
    request = line.get("request")
    stands = read_otherwise(from_table(request) if isinstance(request, dict) else line)
    if stands is not None:
        yield {**line, "request": stands} if isinstance(request, dict) else stands


def _other_reading(record: Record, other: Record) -> dict[str, Any] | None:
    """What another reading of a record has in the place of what shapes its prompt; None: the same."""
    names = ("messages", "tools", "template_args", "prompt_end")
    if all(getattr(record, name) == getattr(other, name) for name in names):
        return None
    reading: dict[str, Any] = {"tools": other.tools, "template_args": dict(other.template_args or {})}
    reading["prompt_end"] = other.prompt_end
    if other.messages != record.messages:
        reading["messages"] = [message.model_dump(exclude_none=True) for message in other.messages]
    return reading


def _record(
    line: dict[str, Any],
    shape: Shape,
    source: FileSource | DatasetSource | TargetSource,
    where: str,
    index: int,
    timing: Timing | None,
) -> Record:
    """Make a record of a line, with the fields of an `extra_body` in the places of its own."""
    # 1) The request that the line may wrap.
    wrapped = isinstance(line.get("request"), dict)
    inner = line["request"] if wrapped else {}
    engine = _engine(source)
    body = _body(inner if wrapped else line, engine, where)
    fields = body | {name: value for name, value in line.items() if value is not None} if wrapped else body

    def lookup(name: str) -> Any:
        return fields.get(name)

    # 2) Messages: the prompt, and the logged answer where the turn before it was opened.
    timed = timing or timing_of(line, where)
    refuse_what_cannot_be_made_again(lookup, body, timed.prompt_tokens, engine, where)
    refuse_media(lookup, shape, where)
    messages = _PARSERS[shape](lookup, engine, where)
    prompt_end: PromptEnd = "opened"
    if shape == "messages":
        size, prompt_end = prompt_of(_items(lookup, "messages", where), lookup, inner, engine, where)
        messages = messages[:size]
    if timing is not None and engine == "vllm" and lacks_call_ids(messages, prompt_end):
        raise LeftOut(where, "tool call without its id")
    if timing is None:
        # A server takes any role; a file of conversations has other names of the usual ones.
        if shape == "messages" and any(
            message.role not in ROLES and message.role.lower() in _OTHER_ROLES for message in messages
        ):
            raise LeftOut(where, "messages in an unread form")
        labels = (source.domain_field, source.group_field)
        beside = {name: line[name] for name in line if name not in (*labels, "request", "extra_body")}
        # A server passes over a flag outside of the template's arguments; who writes one into a file means it.
        if arguments_beside({name: fields[name] for name in fields if name != "enable_thinking"}, beside):
            raise LeftOut(where, "settings beside the request")
        messages = _with_system(messages, beside, inner, where)

    # 3) All other fields, each checked by itself.
    sampling, given, limit = draws_of(lookup, engine, timing is not None, where)
    record = Record(
        domain=_domain(source, lookup, where, messages),
        messages=tuple(messages),
        tools=shown_tools(lookup, engine, where),
        template_args={**source.template_args, **template_args(lookup, engine, where, source.reserved_template_args)},
        turn_by_turn=shape in ("turns", "prompts") and len(messages) > 1,
        prompt_end=prompt_end,
        engine=engine,
        sampling=sampling,
        # What was never a request, and names nothing, was left to no server.
        server_sampling=tuple(name for name in SAMPLING_FIELDS if name not in given) if given or timing else (),
        max_new_tokens=limit,
        group=_group(source, lookup, where),
        source=index,
        counter=_counter(source, lookup) if timed.prompt_tokens else None,
        unfollowed=tuple(unfollowed(body)),
        where=where,
        **timed._asdict(),
    )
    if not turn_ends(record):
        raise LeftOut(where, "no turn to answer")

    # 4) Text that no file can hold shows when the record is hashed; here its line is known.
    try:
        record.key  # noqa: B018
    except RecursionError:
        raise InputError(f"{where}: nested too deeply for JSON") from None
    except (UnicodeEncodeError, ValueError):
        raise InputError(f"{where}: holds text that is not valid Unicode, or a number that is not finite") from None
    except TypeError:  # of a table's column
        raise InputError(
            f"{where}: holds a date or a decimal number among what the target is shown; must be JSON"
        ) from None
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
            raise InputError(f"{where}: {name} {quoted(count)}; must be a whole number from 0 to {MOST_TOKENS}")

    # The replica, by name or number.
    replica = line.get("replica")
    if replica is not None and not isinstance(replica, str | int):
        raise InputError(f"{where}: replica is a JSON {json_type(replica)}; must be text or a number")
    return Timing(
        started=times["started"],
        ended=times["ended"],
        replica=None if replica is None else str(replica),
        prompt_tokens=counts["prompt_tokens"],
        answer_tokens=counts["answer_tokens"],
    )


def _body(request: Mapping[str, Any], engine: Engine, where: str) -> dict[str, Any]:
    """The body of a request as the engine takes it. Raises LeftOut for an effort that is no word."""
    body = body_of(from_table(request))
    # LiteLLM takes an effort with more about it, of which the engine gets the word.
    effort = body.get("reasoning_effort")
    if isinstance(effort, Mapping):
        effort = body["reasoning_effort"] = effort.get("effort")
        if effort is None:
            raise LeftOut(where, "reasoning effort in an unread form")
    # SGLang takes numbers, too.
    known = (str, int, float) if engine == "sglang" else str
    if effort is not None and not isinstance(effort, known):
        raise LeftOut(where, "reasoning effort in an unread form")
    # A prompt that another server has tokenized comes with what it hands over.
    handed = body.get("kv_transfer_params")
    if isinstance(handed, Mapping) and handed.get("prompt_token_ids") is not None:
        body["prompt_token_ids"] = handed["prompt_token_ids"]
    return body


def _engine(source: FileSource | DatasetSource | TargetSource) -> Engine:
    """Engine whose server made prompts of the requests."""
    return source.engine or ("sglang" if source.kind == "sglang" else "vllm")


def _matters(messages: Sequence[Message], prompt_end: PromptEnd) -> bool:
    """Whether engines differ in what they show a template that takes text; one that loops over parts counts not."""
    in_parts = any(isinstance(message.content, list) and message.content for message in messages)
    called = any(message.tool_calls or message.reasoning is not None for message in messages)
    developed = any(message.role == "developer" for message in messages)
    return in_parts or called or developed or prompt_end in ("prefill", "after_answer")


def _messages(lookup: Lookup, engine: Engine, where: str) -> list[Message]:
    items = enumerate(_items(lookup, "messages", where))
    return [_message(raw, engine, f"{where}: messages[{i}]") for i, raw in items]


def _message(raw: Any, engine: Engine, where: str) -> Message:
    if not isinstance(raw, dict):
        raise InputError(f"{where}: is a JSON {json_type(raw)}; must be an object with role and content")
    role = raw.get("role")
    if not isinstance(role, str) or not role:
        found = "is missing" if role is None else "is empty" if role == "" else f"is a JSON {json_type(role)}"
        raise InputError(f"{where}: role {found}; must be text")
    # Text under another name than engines know would be asked as an empty message.
    if any(raw.get(name) for name in ("parts", "text")) and not raw.get("content"):
        raise LeftOut(where, "messages in an unread form")
    # vLLM hands any role to the template.
    if engine == "sglang":
        raw = message_of_sglang(raw, where)
        role = raw["role"]
    # Without any, a template is shown none; an empty list is none to SGLang alone.
    if role == "developer" and (raw.get("tools") if engine == "sglang" else raw.get("tools") is not None):
        raise LeftOut(where, "tools inside a message")
    # vLLM hands DeepSeek's `task` to the template, which no message of ours holds.
    if engine == "vllm" and raw.get("task") is not None:
        raise LeftOut(where, "messages in an unread form")
    # A user's message has a content, and others something.
    said = ("content", "tool_calls", "reasoning", "reasoning_content")
    if raw.get("content") is None if role == "user" else not any(name in raw for name in said):
        raise LeftOut(where, "messages in an unread form")
    # vLLM takes reasoning under either name, SGLang under one.
    names = ("reasoning", "reasoning_content") if engine == "vllm" else ("reasoning_content",)
    reasoning = next((raw[name] for name in names if raw.get(name) is not None), None)
    content, part_fields = _content(raw.get("content"), role, engine, where)
    calls = raw.get("tool_calls")
    fields = {
        "role": role,
        "content": content,
        "part_fields": part_fields if any(part_fields) else None,
        "reasoning": reasoning if role == "assistant" else None,
        "name": raw.get("name"),
        "tool_call_id": raw.get("tool_call_id"),
        "tool_calls": calls if engine == "sglang" else calls or None,
    }
    return validated(Message, fields, where)


def _content(content: Any, role: str, engine: Engine, where: str) -> tuple[str | list[str], list[dict[str, Any]]]:
    """Text of a message's content, or its text parts where there are several; SGLang tells one part from a text. And
    other fields of each part that a template may be shown. Raises LeftOut for other parts."""
    if content is None or isinstance(content, str):
        return [] if content is None else content, []
    if not isinstance(content, list):
        raise InputError(f"{where}: content is a JSON {json_type(content)}; must be text or a list of text parts")
    # Parts that are not text (images, audio) cannot be left out without changing the question.
    if engine == "vllm" and content and not any(isinstance(part, dict) and _is_typed(part) for part in content):
        raise LeftOut(where, "messages in an unread form")
    parts, others = list[str](), list[dict[str, Any]]()
    for part in content:
        fields = part if isinstance(part, dict) else {"type": "text", "text": part}
        kind = str(fields.get("type"))
        text = fields.get(_TEXT_PARTS.get(kind, ""))
        if engine == "sglang" and kind in _SGLANG_THOUGHTS:
            # It takes thoughts of the assistant, and shows them to no template.
            if role != "assistant" or [type(fields.get(name)) for name in ("thinking", "text")].count(str) != 1:
                raise LeftOut(where, "request that the engine refuses")
            continue
        if engine == "sglang" and kind in _TEXT_PARTS and (kind != "text" or part is not fields or text is None):
            raise LeftOut(where, "request that the engine refuses")
        if kind in _TEXT_PARTS and text is None:  # engines pass over it, or show `None` where no schema knows its type
            named = any(isinstance(value, str) and value for name, value in fields.items() if name not in _NO_TEXT)
            if named or kind in ("input_text", "output_text"):  # `named`: a log has its text under another name
                raise LeftOut(where, "messages in an unread form")
            continue
        if not isinstance(text, str):
            raise LeftOut(where, "message part that is not text")
        # vLLM leaves the header of Claude Code out of parts of type text alone.
        if engine == "vllm" and role == "system" and kind != "text" and text.startswith(BILLING_HEADER):
            raise LeftOut(where, "messages in an unread form")
        parts.append(text)
        others.append({name: value for name, value in fields.items() if name not in _PART_FIELDS})
    if engine == "sglang":
        return parts, []
    return (parts[0] if len(parts) == 1 else parts), others


def _is_typed(part: Mapping[str, Any]) -> bool:
    """Whether a part is of a type in vLLM's schema: a content without any such part is shown as if it was empty."""
    kind = str(part.get("type"))
    return kind not in ("None", "input_text", "output_text") and part.get(_TEXT_PARTS.get(kind, "type")) is not None


def _with_system(
    messages: list[Message], beside: Mapping[str, Any], request: Mapping[str, Any], where: str
) -> list[Message]:
    """Messages of a plain conversation with the system prompt that stands `beside` it, under any spelling of its name.
    One that they begin with counts, as for LLaMA-Factory. Raises LeftOut for a prompt that is no text, for several, for
    what may be one (`instructions`), and for one in a `request`, which engines pass over there."""
    if messages[0].role in ("system", "developer"):
        return messages
    found, asked = (
        [of[name] for name in of if (name == "system" or is_system_prompt(name)) and of[name]]
        for of in (beside, request)
    )
    texts = {value.strip() for value in found if isinstance(value, str)}
    if asked and asked != found:
        raise LeftOut(where, "settings beside the request")
    if (
        len(texts) > 1
        or not all(isinstance(value, str) for value in found)
        or (not found and beside.get("instructions"))
    ):
        raise LeftOut(where, "messages in an unread form")
    return [Message(role="system", content=found[0]), *messages] if any(texts) else messages


def _sharegpt(lookup: Lookup, engine: Engine, where: str) -> list[Message]:
    refuse_what_stands_beside(None, lookup, where)
    return sharegpt_messages(_items(lookup, "conversations", where), engine, where)


def _turns(lookup: Lookup, engine: Engine, where: str) -> list[Message]:
    turns = enumerate(_items(lookup, "turns", where))
    return [_user_message(turn, engine, f"{where}: turns[{i}]") for i, turn in turns]


def _prompt(lookup: Lookup, engine: Engine, where: str) -> list[Message]:
    asked = lookup("prompt")
    refuse_what_stands_beside(asked, lookup, where)
    return [_user_message(asked, engine, f"{where}: prompt")]


def _user_message(content: Any, engine: Engine, where: str) -> Message:
    message = _message({"role": "user", "content": "" if content is None else content}, engine, where)
    if not message.text.strip():
        raise InputError(f"{where}: is empty; must hold text")
    return message


_PARSERS: dict[Shape, Callable[[Lookup, Engine, str], list[Message]]] = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "turns": _turns,
    "prompts": _prompt,
}
assert set(_PARSERS) == set(get_args(Shape)) == set(DEFAULT_COLUMNS)


def _items(lookup: Lookup, name: str, where: str) -> list[Any]:
    items = decoded(lookup(name))  # a table may hold JSON
    if not isinstance(items, list) or not items:
        found = "is missing" if items is None else f"is a JSON {json_type(items)}" if items != [] else "is empty"
        raise InputError(f"{where}: {name} {found}; must be a list of at least one")
    return items


def _domain(
    source: FileSource | DatasetSource | TargetSource, lookup: Lookup, where: str, messages: Sequence[Message]
) -> str:
    # A rule wins over the source's own domain, and that over the line's field.
    said = ((message.role, message.text) for message in messages)
    if (named := domain_by_rule(source.domains.rules, lookup, said)) is not None:
        return named
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
        raise InputError(f"{where}: {source.domain_field} {quoted(domain)}; must be a label that matches {LABEL}")
    return domain


def _group(source: FileSource | DatasetSource | TargetSource, lookup: Lookup, where: str) -> str | None:
    group = lookup(source.group_field)
    if group is None or (isinstance(group, str | int) and str(group)):
        return None if group is None else str(group)
    raise InputError(f"{where}: {source.group_field} is a JSON {json_type(group)}; must be text or a number")


def _counter(source: FileSource | DatasetSource | TargetSource, lookup: Lookup) -> str:
    model = lookup("model") or lookup("provided_model_name")  # the latter in Langfuse's exports
    streamed = ", streamed" if lookup("stream") is True else ""
    lacking = next((end for name, end in _LACKING.items() if lookup(name) is True), "")
    name = utf8(model) if isinstance(model, str) else ""
    return f"{source.kind}{f', model {name}' if name else ''}{streamed}{lacking}"


def _digest(value: Any) -> str:
    return fingerprint.of_json(value)[:_ID_DIGITS]
