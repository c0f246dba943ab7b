"""From a mix to what the target is asked: one planned answer for each turn and sampling setting, dealt into shards.

The plan follows from the mix and the settings alone, so that a resumed capture, and every machine that takes a part of
it, finds the same shards. Selection and holdout come first; train conversations follow in the order of a hash, so that
however far a budget reaches, what was answered is an even sample.
"""

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from .. import fingerprint
from ..errors import ContextLengthError, InputError
from ..progress import track
from ..specdec.sampling import SamplingSettings
from ..specdec.targets import Target
from .capture_settings import CaptureSettings
from .conversation import Conversation, Message, Split, Turn, render, require_chat_template, turns

PLAN = 2
"""Version of how answers are dealt into shards."""
_ORDER: tuple[Split, ...] = ("selection", "holdout", "train")
_RECORD_BYTES = 512


class Planned(NamedTuple):
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
    answers: list[Planned]


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
        current: list[Planned] = []
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


def _shard(index: int, split: Split, answers: list[Planned]) -> ShardPlan:
    return ShardPlan(f"{index:05d}-{split}", split, answers)


def _plan_turns(conversation: Conversation, sampling: SamplingSettings, settings: CaptureSettings) -> list[Planned]:
    def name(turn: int) -> str:
        return f"{conversation.id}/{turn}/{sampling.key}"

    return [
        Planned(
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

    def of(self, answer: Planned, earlier: Sequence[str] = ()) -> list[int]:
        """The prompt of an answer, given the text of the conversation's earlier answers where it waits for them."""
        if answer.waits_for is None:
            return self._ready[answer.conversation.id, answer.turn.index].tolist()
        return self._render(answer, answer.turn.context(earlier))

    def length(self, answer: Planned) -> int:
        """Tokens of its prompt, as far as they are known at the start."""
        ready = self._ready.get((answer.conversation.id, answer.turn.index))
        return 0 if ready is None else len(ready)

    def most(self, answer: Planned) -> int:
        """Tokens that its prompt will hardly exceed: earlier answers that it waits for count at their limits."""
        if answer.waits_for is None:
            return self.length(answer)
        before = answer.turn.index
        bare = self._render(answer, answer.turn.context([""] * before))
        return len(bare) + before * answer.max_new_tokens

    def room(self, answer: Planned, prompt: Sequence[int]) -> int:
        """Tokens that the answer may have: its limit, or what the context leaves of it; 0 where the prompt fills it."""
        return max(0, min(answer.max_new_tokens, self._target.max_positions - len(prompt)))

    def _render(self, answer: Planned, messages: Sequence[Message]) -> list[int]:
        conversation = answer.conversation
        try:
            return render(self._target.tokenizer, messages, conversation.tools, conversation.template_args)
        except InputError as error:
            raise InputError(f"conversation {conversation.id}: {error}") from None

    def _check_fits(self, answer: Planned, length: int) -> None:
        if length >= self._target.max_positions and not self._skips:
            raise ContextLengthError(
                f"conversation {answer.conversation.id}, turn {answer.turn.index}: the prompt has {length} tokens, the "
                f"target's context {self._target.max_positions}; shorten it or set capture.too_long to skip"
            )


def settings_record(settings: CaptureSettings, scored: Sequence[SamplingSettings]) -> dict[str, Any]:
    """What decides the content of a capture, beside the target and the mix."""
    return {**settings.identity(), "scored": [setting.model_dump() for setting in scored]}
