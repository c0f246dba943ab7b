"""Log records: one line of a log, a dataset or a prompt list, validated and brought to one shape.

Every error names the line (`file:line`) and the broken rule, and quotes no text of the conversation.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, get_args

from .. import fingerprint
from ..errors import InputError
from ..specdec.sampling_settings import SamplingSettings
from ..storage import utf8
from .conversation import (
    FILLED_IN,
    NO_ARGUMENTS,
    NO_HISTORY,
    NO_SYSTEM_PROMPT,
    NO_TOOLS,
    NOT_ALL,
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
from .logs.chat import (
    ADDED_UNKNOWN,
    ARGUMENTS_UNKNOWN,
    HISTORY_UNKNOWN,
    MOST_TOKENS,
    PARTS_UNKNOWN,
    SYSTEM_UNKNOWN,
    TOOLS_UNKNOWN,
    UNSET_AS_ONE,
    LeftOut,
    Timing,
    arguments_beside,
    body_of,
    decoded,
    is_system_prompt,
    read_otherwise,
)
from .logs.parsing import seconds
from .served_message import message_as_taken
from .served_request import (
    SAMPLING_FIELDS,
    Lookup,
    draws_of,
    from_table,
    json_type,
    lacks_call_ids,
    prompt_of,
    quoted,
    refuse_what_cannot_be_made_again,
    shown_tools,
    template_args,
    unfollowed,
)
from .settings import LABEL, DatasetSource, FileSource, Shape, TargetSource
from .sharegpt import SHAREGPT_ROLES, refuse_media, refuse_what_stands_beside, sharegpt_messages

_ID_DIGITS = 24
_LACKING = {
    **{HISTORY_UNKNOWN: NO_HISTORY, SYSTEM_UNKNOWN: NO_SYSTEM_PROMPT},
    **{TOOLS_UNKNOWN: NO_TOOLS, PARTS_UNKNOWN: NOT_ALL, ARGUMENTS_UNKNOWN: NO_ARGUMENTS},
    ADDED_UNKNOWN: FILLED_IN,
}
_USUAL: dict[str, Any] = {"turn_by_turn": False, "prompt_end": "opened", "engine": "vllm"}
_OTHER_ROLES = frozenset((*SHAREGPT_ROLES, "ai", "bot"))
"""Names in small letters of the usual roles, where they are none of `ROLES` as it is written."""
DEFAULT_COLUMNS: dict[Shape, str] = {
    "messages": "messages",
    "sharegpt": "conversations",
    "turns": "turns",
    "prompts": "prompt",
}


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
    which case gateways may count themselves; None: they are not logged, and need not be."""
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
    return [message_as_taken(_plain(raw), "vllm", f"{where}: messages[{i}]") for i, raw in enumerate(prompt)]


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
        server_sampling=_left_to_server(given, line.get(UNSET_AS_ONE)) if given or timing else (),
        max_new_tokens=limit,
        group=_group(source, lookup, where),
        source=index,
        counter=_counter(source, lookup, bool(timed.prompt_tokens)),
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
    return [message_as_taken(raw, engine, f"{where}: messages[{i}]") for i, raw in items]


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
    message = message_as_taken({"role": "user", "content": "" if content is None else content}, engine, where)
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


def _counter(source: FileSource | DatasetSource | TargetSource, lookup: Lookup, counted: bool) -> str | None:
    """Name of who counted a prompt's tokens, or could have shown by it that the log lacks nothing; None: nobody."""
    model = lookup("model") or lookup("provided_model_name")  # the latter in Langfuse's exports
    streamed = ", streamed" if lookup("stream") is True else ""
    lacking = next((end for name, end in _LACKING.items() if lookup(name) is True), "")
    name = utf8(model) if isinstance(model, str) else ""
    return f"{source.kind}{f', model {name}' if name else ''}{streamed}{lacking}" if counted or lacking else None


def _left_to_server(given: Collection[str], unset_as_one: Any) -> tuple[str, ...]:
    """Names of the sampling settings that a request left to its server, or that nothing tells from these."""
    open_ = unset_as_one if isinstance(unset_as_one, tuple) else ()
    return tuple(name for name in SAMPLING_FIELDS if name not in given or name in open_)


def _digest(value: Any) -> str:
    return fingerprint.of_json(value)[:_ID_DIGITS]
