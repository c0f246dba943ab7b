"""Conversations of a mix: messages, and the assistant turns that the target must answer."""

import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict, Field

from ..errors import InputError
from ..specdec.sampling_settings import API_DEFAULTS, SamplingSettings

Engine = Literal["vllm", "sglang"]
PromptEnd = Literal["opened", "after_answer", "prefill", "bare"]
Split = Literal["train", "selection", "holdout"]
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""The usual roles. vLLM hands messages of others to the template, too."""
SPLITS: tuple[Split, ...] = ("train", "selection", "holdout")
_ASKS_NOTHING = ("system", "developer", "assistant")
NO_SYSTEM_PROMPT, NO_HISTORY = ", without a system prompt", ", of the Responses API"
NO_TOOLS, NOT_ALL = ", without their tools", ", by another instrumentation"
NO_ARGUMENTS, FILLED_IN = ", without template arguments", ", filled in by a gateway"
"""With the four before, ends of the names of counters of requests whose log may lack their system prompt, the messages
that they continue, their tools, anything, template arguments, or what a gateway adds: the number of tokens tells."""
OTHER_READINGS = "other readings"
"""Template argument that no template can name: what a conversation's prompt was made of instead, where its request can
be read in several ways."""


class Message(BaseModel):
    """One message in the shape that chat templates read."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: str
    content: str | list[str]
    """Text, or its parts where it was sent in several; an empty list: the request had no content (null)."""
    part_fields: list[dict[str, Any]] | None = None
    """Other fields of each part (`cache_control`, …), which vLLM shows a template that loops over parts; None: none."""
    reasoning: str | None = None
    """Reasoning that the client sent back beside an answer."""
    tool_calls: list[dict[str, Any]] | None = None
    name: str | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """The content as one text, its parts a line each."""
        return self.content if isinstance(self.content, str) else "\n".join(self.content)

    def record(self) -> dict[str, Any]:
        """JSON-able form without absent fields. A template that loops over parts is shown an absent content as a list
        of none, and an empty one as an empty part."""
        return self.model_dump(exclude_none=True)


class PromptCount(NamedTuple):
    """Number of tokens that a log tells of a prompt."""

    counter: str
    """Who counted: the kind of log and the model that was asked."""
    tokens: int
    """0: not comparable, as something in the prompt was redacted, or nobody counted it."""
    requests: int
    """How many requests had this number."""


class LoggedPrompt(BaseModel):
    """What the log tells of the prompt of one turn, which may have been asked by requests of its own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    turn: int
    """0, 1, … among the turns of the conversation."""
    asked_at: float | None = None
    """Unix seconds of the latest of its requests."""
    counts: list[PromptCount] = []
    digests: list[str] = []
    """Hashes of its text (as redacted) where engines logged that."""
    served: list[str] = Field(default=[], exclude_if=operator.not_)
    """Logs that hold its requests as clients sent them, and apart from these the prompts that they served: keys of the
    mix's table of these."""


ServedPrompts = Mapping[str, Mapping[bytes, bool]]
"""By log, hashes of the prompts that it shows as served, and whether a request with it was answered."""


class Conversation(BaseModel):
    """One conversation of a mix."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    """Hash of the redacted content (messages, tools, template arguments), never of a position."""
    domain: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    template_args: dict[str, Any] = {}
    """Extra arguments of the chat template, e.g. `enable_thinking`, `reasoning_effort`, `documents`."""
    turn_by_turn: bool = Field(default=False, exclude_if=operator.not_)
    """Whether the target answers each user message in turn, in the context of its own answers, instead of all
    messages as one prompt."""
    prompt_end: PromptEnd = Field(default="opened", exclude_if="opened".__eq__)
    """How the last prompt ends. opened: after the last message that is no logged answer, the assistant's turn is
    opened. after_answer: the same after an assistant's message that belongs to the prompt. prefill: the assistant's
    last message is continued. bare: nothing is opened."""
    engine: Engine = Field(default="vllm", exclude_if="vllm".__eq__)
    """Engine whose way of rendering holds, where that matters."""
    sampling: SamplingSettings | None = None
    """Sampling settings of the target's answers; None: the capture's default."""
    server_sampling: list[str] = Field(default=[], exclude_if=operator.not_)
    """Settings of `sampling` that its request left to the server; with `sampling` None: all."""
    max_new_tokens: int | None = None
    cluster: str
    """Stable id of its near-duplicate cluster; whole clusters fall in one split."""
    split: Split
    asked_elsewhere: list[int] = Field(default=[], exclude_if=operator.not_)
    """Turns (0, 1, …) that do not count, as a conversation before this one asks them in the very same context."""
    asked_at: float | None = Field(default=None, exclude_if=lambda time: time is None)
    """Unix seconds when it was asked, which a template may print; where its log has no time, the newest of the mix."""
    logged_prompts: list[LoggedPrompt] = Field(default=[], exclude_if=operator.not_)
    """What its log, and those of the requests that it continues, tell of its turns' prompts."""
    where: str = Field(default="", exclude=True)
    """File and line of the log that it was read from, relative to the recipe; no part of what a capture depends on."""
    skip_invalid: bool = Field(default=False, exclude=True)
    """Whether its source allows to leave out what the target's chat template refuses."""
    served_prompts: Any = Field(default=None, exclude=True, repr=False)
    """The mix's table of served prompts, a `ServedPrompts` that all of its conversations share; None: it has none."""

    def readings(self) -> "list[Conversation]":
        """What its request may have asked, itself first, where nothing but its prompt tells how a server read it."""
        found = [self]
        for other in self.template_args.get(OTHER_READINGS, ()):
            messages = [Message.model_validate(message) for message in other.get("messages", ())] or self.messages
            found.append(self.model_copy(update={**other, "messages": messages}))
        return found

    def time_of(self, turn: int) -> float | None:
        """Unix seconds when a turn was asked: those of its own request, or else of the conversation."""
        return next((one.asked_at for one in self.logged_prompts if one.turn == turn and one.asked_at), self.asked_at)


def as_served(conversations: Iterable[Conversation], defaults: Mapping[str, float]) -> list[Conversation]:
    """Conversations with the sampling settings that servers take of the model's own (`defaults`, by name) where a
    request names none. Where neither names any, there are none."""
    found = []
    for one in conversations:
        known = {name: defaults[name] for name in one.server_sampling if name in defaults}
        if known:
            own = {} if one.sampling is None else one.sampling.model_dump()
            settings = SamplingSettings.model_validate({**API_DEFAULTS, **own, **known})
            one = one.model_copy(update={"sampling": settings})
        found.append(one)
    return found


class Asked(Protocol):
    """What a target is asked: a conversation, or a record that becomes one."""

    @property
    def messages(self) -> Sequence[Message]: ...
    @property
    def turn_by_turn(self) -> bool: ...
    @property
    def prompt_end(self) -> PromptEnd: ...


@dataclass(frozen=True)
class Turn:
    """One assistant turn that the target answers."""

    messages: list[Message]
    """The context before the answer. Where `waits_for` is set, the earlier answers are still missing."""
    index: int
    """0, 1, … among the answered turns of the conversation."""
    waits_for: int | None
    """The turn whose answer this one's context needs; None: the context is complete."""
    counts: bool
    """Whether drafts are trained and scored on this turn; if not, it is answered only as later turns wait for it."""
    prompt_end: PromptEnd = "opened"
    """How its prompt ends: in a conversation's last turn as the conversation says, else opened."""

    def context(self, answers: Sequence[str] = ()) -> list[Message]:
        """Complete the context: put `answers` of turns 0 … index-1 after their user messages."""
        if self.waits_for is None:
            return self.messages
        if len(answers) < self.index:
            raise InputError(f"turn {self.index}: {len(answers)} earlier answers given, {self.index} needed")
        # Each user message but the last is followed by its answer.
        filled: list[Message] = []
        pending = iter(answers[: self.index])
        for message in self.messages:
            filled.append(message)
            answer = next(pending, None) if message.role == "user" else None
            if answer is not None:
                filled.append(Message(role="assistant", content=answer))
        return filled


def turns(conversation: Conversation) -> list[Turn]:
    """List the assistant turns to answer, in order.

    A conversation that is asked turn by turn is answered in the context of the target's own earlier answers. Of any
    other, each logged answer is given again in its logged context, and the last prompt is answered. Turns asked
    elsewhere are left out, unless a later turn waits for them.
    """
    # A turn that does not count is kept only before a counting one that waits for it.
    messages, waiting = conversation.messages, conversation.turn_by_turn
    ends = turn_ends(conversation)
    counting = set(range(len(ends))) - set(conversation.asked_elsewhere)
    last = max(counting, default=-1)
    return [
        Turn(
            messages=messages[:end],
            index=i,
            waits_for=i - 1 if waiting and i else None,
            counts=i in counting,
            prompt_end=conversation.prompt_end if i == len(ends) - 1 else "opened",
        )
        for i, end in enumerate(ends)
        if i in counting or (waiting and i < last)
    ]


def turn_ends(asked: Asked) -> list[int]:
    """Number of messages before each answer: a turn ends at the last message before the assistant's, whatever its role.

    The last prompt is asked as it was; an empty list: there is none. Before that, an assistant's message counts as an
    answer unless nobody has asked anything yet (a greeting), or it follows another one.
    """
    messages = asked.messages
    # The target writes the whole dialogue.
    if asked.turn_by_turn:
        return [i for i, message in enumerate(messages, start=1) if message.role == "user"]
    # The last prompt: everything, or everything before the logged answer.
    last = len(messages)
    if asked.prompt_end == "opened":
        while last and messages[last - 1].role == "assistant":
            last -= 1
    # The answers before it; a prefill is none.
    history = messages[: last - 1] if asked.prompt_end == "prefill" else messages[:last]
    ends, asked_yet = list[int](), False
    for i, message in enumerate(history):
        if message.role == "assistant" and asked_yet and history[i - 1].role != "assistant":
            ends.append(i)
        asked_yet = asked_yet or message.role not in _ASKS_NOTHING
    return [*ends, last] if last else []


_sorted = json.JSONEncoder(sort_keys=True).encode  # `json.dumps` makes an encoder for each call


def as_printed(value: Any) -> Any:
    """A JSON value for a hash: itself, or its text where keys stand in another order than the alphabet's. Templates
    print tools and arguments in the order in which they were sent. Raises ValueError for numbers without JSON."""
    if not value:
        return value
    text = json.dumps(value, allow_nan=False)
    return value if text == _sorted(value) else text


def calls_as_printed(calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool calls for a hash, with `as_printed` arguments; the engine puts their other fields in order."""
    found = [{**call} for call in calls]
    for call in found:
        if isinstance(call.get("function"), dict):
            call["function"] = {**call["function"]}
        holder = call["function"] if isinstance(call.get("function"), dict) else call
        if isinstance(holder.get("arguments"), dict | list):
            holder["arguments"] = as_printed(holder["arguments"])
    return found
