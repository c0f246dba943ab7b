"""What the target is asked: messages, conversations, and the assistant turns in them that it must answer."""

import json
import operator
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from jinja2 import TemplateError
from pydantic import BaseModel, ConfigDict, Field

from .. import fingerprint
from ..errors import ContextLengthError, InputError
from ..progress import track
from ..specdec.sampling import SamplingSettings
from ..specdec.targets import Target
from .settings import CaptureSettings

Role = Literal["system", "user", "assistant", "tool"]
Split = Literal["train", "selection", "holdout"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")
SPLITS: tuple[Split, ...] = ("train", "selection", "holdout")


class Message(BaseModel):
    """One message in the shape that chat templates read."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Role
    content: str
    tool_calls: list[dict[str, Any]] | None = None
    name: str | None = None
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The dict a chat template gets. Tool arguments logged as JSON text become objects, as servers do it."""
        message = self.model_dump(exclude_none=True)
        for call in message.get("tool_calls", []):
            function = call.get("function", call)
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                function["arguments"] = _object_or_text(function["arguments"])
        return message


class Conversation(BaseModel):
    """One entry of a mix."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    """Hash of the redacted content (messages, tools, template arguments), never of a position."""
    domain: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    template_args: dict[str, Any] = {}
    """Extra arguments of the chat template, e.g. `enable_thinking`."""
    sampling: SamplingSettings | None = None
    """How the target is sampled here; None: the capture's default."""
    max_new_tokens: int | None = None
    cluster: str
    """Stable id of its near-duplicate cluster; whole clusters fall in one split."""
    split: Split
    asked_elsewhere: list[int] = Field(default=[], exclude_if=operator.not_)
    """Turns (0, 1, …) whose very context another conversation asks that stands before this one: they do not count."""


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
    """Whether drafts are trained and scored on it; otherwise it is answered only because later turns wait for it."""

    def context(self, answers: Sequence[str] = ()) -> list[Message]:
        """The complete context: `answers` of turns 0 … index-1 are put after their user messages."""
        if self.waits_for is None:
            return self.messages
        if len(answers) < self.index:
            raise InputError(f"turn {self.index}: {len(answers)} earlier answers given, {self.index} needed")
        filled: list[Message] = []
        pending = iter(answers[: self.index])
        for message in self.messages:
            filled.append(message)
            answer = next(pending, None) if message.role == "user" else None
            if answer is not None:
                filled.append(Message(role="assistant", content=answer))
        return filled


def turns(conversation: Conversation) -> list[Turn]:
    """The assistant turns to answer, in order.

    User messages alone are answered one after the other, each in the context of the target's own earlier answers. A
    logged conversation keeps its assistant messages: each that follows a user or tool message is answered again in its
    logged context, and so is a last user or tool message that has no answer yet. What is asked elsewhere is left out,
    unless a later turn waits for it.
    """
    messages = conversation.messages
    ends, waiting = turn_ends(messages)
    counting = set(range(len(ends))) - set(conversation.asked_elsewhere)
    last = max(counting, default=-1)
    return [
        Turn(messages[:end], i, i - 1 if waiting and i else None, i in counting)
        for i, end in enumerate(ends)
        if i in counting or (waiting and i < last)
    ]


def turn_ends(messages: Sequence[Message]) -> tuple[list[int], bool]:
    """How many messages stand before each answer, and whether later answers wait for the target's own earlier ones."""
    if all(message.role in ("system", "user") for message in messages):
        return [i + 1 for i, message in enumerate(messages) if message.role == "user"], True
    closing = [*messages[1:], None]
    ends = [
        i + 1
        for i, (message, following) in enumerate(zip(messages, closing))
        if message.role in ("user", "tool") and (following is None or following.role == "assistant")
    ]
    return ends, False


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: list[dict[str, Any]] | None = None,
    template_args: dict[str, Any] | None = None,
) -> list[int]:
    """Prompt ids by the tokenizer's chat template, generation prompt included.

    Raises InputError for a tokenizer without chat template and for messages that its template refuses.
    """
    require_chat_template(tokenizer)
    try:
        text = tokenizer.apply_chat_template(
            [message.for_template() for message in messages],
            tools=tools,
            add_generation_prompt=True,
            tokenize=False,
            **(template_args or {}),
        )
    except (TemplateError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{tokenizer.name_or_path}: its chat template refuses the messages ({reason})") from None
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def require_chat_template(tokenizer: Any) -> None:
    """Raise InputError unless the tokenizer has a chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(f"{tokenizer.name_or_path}: the tokenizer has no chat template; conversations need one")


def _object_or_text(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


PLAN = 2
"""Version of how answers are dealt into shards."""
_ORDER: tuple[Split, ...] = ("selection", "holdout", "train")
_RECORD_BYTES = 512


class TurnRequest(NamedTuple):
    """One answer to be drawn."""

    id: str
    """conversation/turn/sampling key"""
    conversation: Conversation
    turn: Turn
    sampling: SamplingSettings
    max_new_tokens: int
    waits_for: str | None
    """Id of the answer that must be known first; always in the same shard."""
    seed: int


class ShardPlan(NamedTuple):
    """Answers that are drawn together and stored in one file; all of one split."""

    name: str
    split: Split
    answers: list[TurnRequest]


def plan_shards(
    conversations: Sequence[Conversation], settings: CaptureSettings, scored: Sequence[SamplingSettings]
) -> list[ShardPlan]:
    """Every answer of the mix, in shards of about `shard_samples`, in the order in which they are answered.

    Train conversations are answered once, at their own sampling setting; the others once per scored setting.
    """
    if not conversations:
        raise InputError("mix: 0 conversations, must be at least 1")
    _check_distinct("conversation ids of the mix", [conversation.id for conversation in conversations])
    _check_distinct("scored sampling settings", [setting.key for setting in scored])
    shards: list[ShardPlan] = []
    for split in _ORDER:
        current: list[TurnRequest] = []
        own = [conversation for conversation in conversations if conversation.split == split]
        if split == "train":
            own.sort(key=lambda conversation: seed_of(settings.seed, f"{conversation.id}/order"))
        before = len(shards)
        for conversation in own:
            for sampling in [conversation.sampling or settings.sampling] if split == "train" else scored:
                chain = _plan_turns(conversation, sampling, settings)
                if current and len(current) + len(chain) > settings.shard_samples:
                    shards.append(_shard(len(shards) - before, split, current))
                    current = []
                current += chain
        if current:
            shards.append(_shard(len(shards) - before, split, current))
    return shards


def _check_distinct(what: str, names: Sequence[str]) -> None:
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise InputError(f"{what}: {twice} occurs more than once; they must differ")


def _shard(index: int, split: Split, answers: list[TurnRequest]) -> ShardPlan:
    return ShardPlan(f"{index:05d}-{split}", split, answers)


def _plan_turns(conversation: Conversation, sampling: SamplingSettings, settings: CaptureSettings) -> list[TurnRequest]:
    def name(turn: int) -> str:
        return f"{conversation.id}/{turn}/{sampling.key}"

    return [
        TurnRequest(
            id=name(turn.index),
            conversation=conversation,
            turn=turn,
            sampling=sampling,
            max_new_tokens=min(conversation.max_new_tokens or settings.max_new_tokens, settings.max_new_tokens),
            waits_for=None if turn.waits_for is None else name(turn.waits_for),
            seed=seed_of(settings.seed, name(turn.index)),
        )
        for turn in turns(conversation)
    ]


def seed_of(seed: int, name: str) -> int:
    """A seed that is a sample's own: 63 bits of a hash, free of order and of other samples."""
    return int(fingerprint.of_json([seed, name])[:16], 16) >> 1


def tail_seed_of(seed: int, name: str) -> int:
    """The seed of an answer's tail draws."""
    return seed_of(seed, f"{name}/tail")


def answer_bytes(split: Split, prompt: int, answer: int, settings: CaptureSettings) -> int:
    """What an answer of so many tokens takes on disk."""
    number = 4 if settings.store_dtype == "float32" else 2
    draws = 0 if settings.engine is not None and settings.engine.signals == "engine" else settings.tail_samples
    signals = 8 + (settings.top_k + draws) * (4 + number) if split == "train" and settings.top_k else 4
    return answer * (4 + signals) + prompt * 4 + _RECORD_BYTES


class Prompts:
    """Prompt ids of planned answers. Those that wait for no other answer are rendered, and checked, at the start."""

    def __init__(self, target: Target, shards: Sequence[ShardPlan], settings: CaptureSettings) -> None:
        require_chat_template(target.tokenizer)
        self._target, self._skips = target, settings.too_long == "skip"
        self._ready: dict[tuple[str, int], array[int]] = {}
        independent = [answer for shard in shards for answer in shard.answers if answer.waits_for is None]
        for answer in track(independent, "Rendering prompts", unit="prompts"):
            key = (answer.conversation.id, answer.turn.index)
            if key not in self._ready:
                prompt = self._render(answer, answer.turn.context())
                self._check_fits(answer, len(prompt))
                self._ready[key] = array("i", prompt)

    def of(self, answer: TurnRequest, earlier: Sequence[str] = ()) -> list[int]:
        """The prompt of an answer, given the text of the conversation's earlier answers where it waits for them."""
        if answer.waits_for is None:
            return self._ready[answer.conversation.id, answer.turn.index].tolist()
        return self._render(answer, answer.turn.context(earlier))

    def length(self, answer: TurnRequest) -> int:
        """Tokens of its prompt, as far as they are known at the start."""
        ready = self._ready.get((answer.conversation.id, answer.turn.index))
        return 0 if ready is None else len(ready)

    def most(self, answer: TurnRequest) -> int:
        """Tokens that its prompt will hardly exceed: earlier answers that it waits for count at their limits."""
        if answer.waits_for is None:
            return self.length(answer)
        before = answer.turn.index
        bare = self._render(answer, answer.turn.context([""] * before))
        return len(bare) + before * answer.max_new_tokens

    def room(self, answer: TurnRequest, prompt: Sequence[int]) -> int:
        """Tokens that the answer may have: its limit, or what the context leaves of it; 0 where the prompt fills it."""
        return max(0, min(answer.max_new_tokens, self._target.max_positions - len(prompt)))

    def _render(self, answer: TurnRequest, messages: Sequence[Message]) -> list[int]:
        conversation = answer.conversation
        try:
            return render(self._target.tokenizer, messages, conversation.tools, conversation.template_args)
        except InputError as error:
            raise InputError(f"conversation {conversation.id}: {error}") from None

    def _check_fits(self, answer: TurnRequest, length: int) -> None:
        if length >= self._target.max_positions and not self._skips:
            raise ContextLengthError(
                f"conversation {answer.conversation.id}, turn {answer.turn.index}: the prompt has {length} tokens, the "
                f"target's context {self._target.max_positions}; shorten it or set capture.too_long to skip"
            )


def settings_record(settings: CaptureSettings, scored: Sequence[SamplingSettings]) -> dict[str, Any]:
    """What decides the content of a capture, beside the target and the mix."""
    return {**settings.identity(), "scored": [setting.model_dump() for setting in scored]}
