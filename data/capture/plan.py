"""Plan of a capture: which answers are drawn, under which seeds, in which shards; and their rendered prompts.

Ids, seeds and shards follow from the mix and the settings alone. They do not depend on what was answered before, or on
the engine, machine or rank that answers.
"""

from array import array
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from ...errors import ContextLengthError, InputError
from ...progress import track
from ...specdec.sampling_settings import SamplingSettings
from ...specdec.targets import Target
from ..chat_template import require_chat_template
from ..conversation import Conversation, Split, Turn, turns
from ..logged_prompts import PromptCheck, place
from ..settings import CaptureSettings
from ..split import seed_of

PLAN_VERSION = 2
"""Version of how answers are dealt into shards."""
_ORDER: tuple[Split, ...] = ("selection", "holdout", "train")
_RECORD_BYTES = 512
_STAND_IN = "x"  # for an answer that is still to come; some templates refuse an empty one


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
    """Prompt ids of planned turns. All are rendered and checked before anything is answered; of a turn that waits for
    other answers, the prompt with a word for each of them."""

    def __init__(
        self,
        target: Target,
        shards: Sequence[ShardPlan],
        settings: CaptureSettings,
        conversations: Sequence[Conversation] | None = None,
    ) -> None:
        """`conversations`: those of the whole mix, where `shards` are a part of its plan."""
        require_chat_template(target.tokenizer)
        self._target, self._skips = target, settings.too_long == "skip"
        self._ready: dict[tuple[str, int], array[int]] = {}
        self._bare: dict[tuple[str, int], int] = {}
        self.refused: dict[tuple[str, int], str] = {}
        """Why a turn is not asked, by conversation and turn: the target takes no prompt of it, and its source allows to
        skip it; or the prompt would not be the one that was logged."""
        if conversations is None:
            conversations = list(
                {turn.conversation.id: turn.conversation for s in shards for turn in s.answers}.values()
            )
        self.check = PromptCheck(
            target.tokenizer, conversations, target.prompts_in_doubt is not None, settings.ask_unproven
        )
        # Several sampling settings ask the same turn, so each is rendered once and kept as 4 bytes a token.
        turns = {(turn.conversation.id, turn.turn.index): turn for shard in shards for turn in shard.answers}
        for key, turn in track(turns.items(), "Rendering prompts", unit="prompts"):
            prompt = self._render(turn, [_STAND_IN] * turn.turn.index)
            if isinstance(prompt, str):
                self.refused[key] = prompt
            elif turn.waits_for is not None:
                self._bare[key] = len(prompt)
            else:
                self._check_fits(turn, len(prompt))
                self._ready[key] = array("i", prompt)

    def ids(self, turn: TurnRequest, earlier: Sequence[str] = ()) -> list[int] | str:
        """The prompt of a turn, given the text of the conversation's earlier answers where it waits for them; or why
        the turn is skipped."""
        key = (turn.conversation.id, turn.turn.index)
        if key in self.refused:
            return self.refused[key]
        return self._ready[key].tolist() if turn.waits_for is None else self._render(turn, earlier)

    def known_tokens(self, turn: TurnRequest) -> int:
        """Length of a turn's prompt in tokens, as known at the start: 0 where it waits for an answer."""
        ready = self._ready.get((turn.conversation.id, turn.turn.index))
        return 0 if ready is None else len(ready)

    def most_tokens(self, turn: TurnRequest) -> int:
        """Likely upper bound of a prompt's tokens: the earlier answers that it waits for count at their limits."""
        if turn.waits_for is None:
            return self.known_tokens(turn)
        # With a word for each, plus the most that each of them may take.
        before = turn.turn.index
        return self._bare.get((turn.conversation.id, before), 0) + before * turn.max_new_tokens

    def room(self, turn: TurnRequest, prompt: Sequence[int]) -> int:
        """Token limit of the answer: its own, or what the prompt leaves of the context; 0 where that is full."""
        return max(0, min(turn.max_new_tokens, self._target.max_positions - len(prompt)))

    def may_be_answered(self, turn: TurnRequest) -> bool:
        """Whether a turn can be asked, as far as is known before others are answered."""
        return turn.waits_for is not None or 0 < self.known_tokens(turn) < self._target.max_positions

    def _render(self, turn: TurnRequest, earlier: Sequence[str]) -> list[int] | str:
        """Prompt ids; or why the turn is not asked."""
        conversation = turn.conversation
        try:
            refusal = self.check.refusal(conversation, turn.turn.index)
            if refusal is not None:
                return refusal
            ids = self.check.ids(conversation, turn.turn, earlier)
            self._target.check_ids(ids)
        except InputError as error:
            if conversation.skip_invalid:
                return str(error)
            hint = "; `skip_invalid` of its source leaves it out" if conversation.where else ""
            raise InputError(f"{place_of(turn)}: {error}{hint}") from None
        return ids

    def _check_fits(self, turn: TurnRequest, length: int) -> None:
        if length >= self._target.max_positions and not self._skips:
            raise ContextLengthError(
                f"{place_of(turn)}: the prompt has {length} tokens, the target's context {self._target.max_positions}; "
                "shorten it or set capture.too_long to skip"
            )


def place_of(turn: TurnRequest) -> str:
    """Where a turn was logged, for messages: file and line where they are known."""
    return place(turn.conversation, turn.turn.index)


def check_domains(shards: Sequence[ShardPlan], prompts: Prompts, may_be_unanswered: Collection[str]) -> None:
    """Raise InputError where a domain ends without an answered turn, and the recipe does not allow it."""
    answered: dict[str, bool] = {}
    for turn in (turn for shard in shards for turn in shard.answers):
        domain = turn.conversation.domain
        answered[domain] = answered.get(domain, False) or prompts.may_be_answered(turn)
    lost = sorted(name for name, found in answered.items() if not found and name not in may_be_unanswered)
    if lost:
        raise InputError(
            f"capture: no turn of {', '.join(map(repr, lost))} can be asked: the target's chat template refuses them, "
            "or makes other prompts than the logged ones, or its context is too short, or no log shows that they were "
            "served so (capture.ask_unproven asks these); a domain that may end so must stand in mix.may_be_unanswered"
        )


def settings_record(settings: CaptureSettings, scored: Sequence[SamplingSettings]) -> dict[str, Any]:
    """The settings that decide the content of a capture, beside the target and the mix."""
    return {**settings.identity(), "scored": [setting.model_dump() for setting in scored]}
