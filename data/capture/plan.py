"""Plan of a capture: which answers are drawn, under which seeds, in which shards; and their rendered prompts.

Ids, seeds and shards follow from the mix and the settings alone. They do not depend on what was answered before, or on
the engine, machine or rank that answers.
"""

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...errors import ContextLengthError, InputError
from ...progress import track
from ...specdec.sampling import SamplingSettings
from ...specdec.targets import Target
from ..chat_template import require_chat_template, turn_ids
from ..conversation import Conversation, Split, Turn, turns
from ..settings import CaptureSettings
from ..split import seed_of

PLAN_VERSION = 2
"""Version of how answers are dealt into shards."""
_ORDER: tuple[Split, ...] = ("selection", "holdout", "train")
_RECORD_BYTES = 512


class TurnRequest(NamedTuple):
    """One answer to be drawn: a turn of a conversation at a sampling setting."""

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
    """Answers of one split that are drawn together and stored in one file."""

    name: str
    split: Split
    answers: list[TurnRequest]


def plan_shards(
    conversations: Sequence[Conversation], settings: CaptureSettings, scored: Sequence[SamplingSettings]
) -> list[ShardPlan]:
    """Deal every answer of the mix into shards of about `shard_samples`, in the order in which they are answered.

    Train conversations are answered once, at their own sampling setting; selection and holdout ones once for each
    scored setting. Raises InputError for an empty mix, or for ids or settings that occur twice.
    """
    if not conversations:
        raise InputError("mix: 0 conversations, must be at least 1")
    _check_distinct("conversation ids of the mix", [conversation.id for conversation in conversations])
    _check_distinct("scored sampling settings", [setting.key for setting in scored])
    shards: list[ShardPlan] = []
    for split in _ORDER:
        # Train conversations in the order of a hash, so that wherever a budget ends, the rest is an even sample.
        own = [conversation for conversation in conversations if conversation.split == split]
        if split == "train":
            own.sort(key=lambda conversation: seed_of(settings.seed, f"{conversation.id}/order"))
        # Turns of one conversation at one setting stay in one shard, as later ones wait for earlier ones.
        parts: list[list[TurnRequest]] = [[]]
        for conversation in own:
            for sampling in [conversation.sampling or settings.sampling] if split == "train" else scored:
                chain = _turn_requests(conversation, sampling, settings)
                if parts[-1] and len(parts[-1]) + len(chain) > settings.shard_samples:
                    parts.append([])
                parts[-1] += chain
        shards += [ShardPlan(f"{number:05d}-{split}", split, part) for number, part in enumerate(parts) if part]
    return shards


def _check_distinct(what: str, names: Sequence[str]) -> None:
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise InputError(f"{what}: {twice} occurs more than once; they must differ")


def _turn_requests(
    conversation: Conversation, sampling: SamplingSettings, settings: CaptureSettings
) -> list[TurnRequest]:
    def name(turn: int) -> str:
        return f"{conversation.id}/{turn}/{sampling.key}"

    # A conversation's own token limit may only be smaller than the recipe's.
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


def tail_seed_of(seed: int, name: str) -> int:
    """Seed of an answer's tail draws, apart from the seed that draws its tokens."""
    return seed_of(seed, f"{name}/tail")


def answer_bytes(split: Split, prompt: int, answer: int, settings: CaptureSettings) -> int:
    """Estimate the bytes on disk of an answer of `answer` tokens after a prompt of `prompt` tokens."""
    # An answer token: its int32 id, and 4 bytes of log p; in train also the tail's mass, and an id and a log-prob for
    # each top-k token and tail draw.
    number = 4 if settings.store_dtype == "float32" else 2
    draws = 0 if settings.engine is not None and settings.engine.signals == "engine" else settings.tail_samples
    signals = 8 + (settings.top_k + draws) * (4 + number) if split == "train" and settings.top_k else 4
    return answer * (4 + signals) + prompt * 4 + _RECORD_BYTES


class Prompts:
    """Prompt ids of planned turns. Prompts that wait for no other answer are rendered and checked at the start."""

    def __init__(self, target: Target, shards: Sequence[ShardPlan], settings: CaptureSettings) -> None:
        require_chat_template(target.tokenizer)
        self._target, self._skips = target, settings.too_long == "skip"
        self._ready: dict[tuple[str, int], array[int]] = {}
        # Several sampling settings ask the same turn, so each is rendered once and kept as 4 bytes a token.
        independent = [turn for shard in shards for turn in shard.answers if turn.waits_for is None]
        for turn in track(independent, "Rendering prompts", unit="prompts"):
            key = (turn.conversation.id, turn.turn.index)
            if key not in self._ready:
                prompt = self._render(turn)
                self._check_fits(turn, len(prompt))
                self._ready[key] = array("i", prompt)

    def ids(self, turn: TurnRequest, earlier: Sequence[str] = ()) -> list[int]:
        """The prompt of a turn, given the text of the conversation's earlier answers where it waits for them."""
        if turn.waits_for is None:
            return self._ready[turn.conversation.id, turn.turn.index].tolist()
        return self._render(turn, earlier)

    def known_tokens(self, turn: TurnRequest) -> int:
        """Length of a turn's prompt in tokens, as known at the start: 0 where it waits for an answer."""
        ready = self._ready.get((turn.conversation.id, turn.turn.index))
        return 0 if ready is None else len(ready)

    def most_tokens(self, turn: TurnRequest) -> int:
        """Likely upper bound of a prompt's tokens: the earlier answers that it waits for count at their limits."""
        if turn.waits_for is None:
            return self.known_tokens(turn)
        # Rendered with empty answers, plus the most that each of them may take.
        before = turn.turn.index
        bare = self._render(turn, [""] * before)
        return len(bare) + before * turn.max_new_tokens

    def room(self, turn: TurnRequest, prompt: Sequence[int]) -> int:
        """Token limit of the answer: its own, or what the prompt leaves of the context; 0 where that is full."""
        return max(0, min(turn.max_new_tokens, self._target.max_positions - len(prompt)))

    def _render(self, turn: TurnRequest, earlier: Sequence[str] = ()) -> list[int]:
        conversation = turn.conversation
        try:
            return turn_ids(self._target.tokenizer, conversation, turn.turn, earlier)
        except InputError as error:
            raise InputError(f"conversation {conversation.id}: {error}") from None

    def _check_fits(self, turn: TurnRequest, length: int) -> None:
        if length >= self._target.max_positions and not self._skips:
            raise ContextLengthError(
                f"conversation {turn.conversation.id}, turn {turn.turn.index}: the prompt has {length} tokens, the "
                f"target's context {self._target.max_positions}; shorten it or set capture.too_long to skip"
            )


def settings_record(settings: CaptureSettings, scored: Sequence[SamplingSettings]) -> dict[str, Any]:
    """The settings that decide the content of a capture, beside the target and the mix."""
    return {**settings.identity(), "scored": [setting.model_dump() for setting in scored]}
