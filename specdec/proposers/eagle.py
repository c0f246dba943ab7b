"""Reading EAGLE heads: they draft from the target's states, and from their own where the target has not been yet.

Shapes: B active slots, K drafted tokens, F nodes read at once, N pairs read, H hidden size, A features, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ..cache import KVCache, Step
from ..documents import Sight
from ..drafts.eagle import EagleDraft
from ..drafts.eagle3 import Eagle3Draft
from ..models import CausalModel, States
from ..sampling import SamplingSettings
from ..texts import Texts
from ..tree import ROOT
from .base import Trace
from .branches import Branches
from .rows import MOST_PAIRS, fill_rows, gather_rows, last_of, over_vocabulary, trace_levels

D = TypeVar("D", bound=EagleDraft | Eagle3Draft)


class FeatureDrafter(ABC, Generic[D]):
    """Keeps the draft's cache on true states: a round's own keys are dropped, then rebuilt from the target's.

    Position t of the cache is the pair (target's state of t, token t + 1). Subclasses say which state that is and
    what reads the head's own.
    """

    aux_layers: tuple[int, ...] = ()
    reads_states = True
    nested = True
    levels: int | None = None

    def __init__(self, draft: D, target: CausalModel, width: int) -> None:
        self._draft, self.width = draft, width
        self._embed = draft.embed_tokens if draft.embed_tokens is not None else target.embed

    @abstractmethod
    def _read(self, states: States) -> Tensor:
        """What the head reads of the target, [B, N, H or A]."""

    @abstractmethod
    def _true_states(self, states: States) -> Tensor:
        """The head's states [B, N, H] at true positions."""

    @abstractmethod
    def _logits(self, state: Tensor) -> Tensor:
        """The head's states [..., H] -> logits over the target's vocabulary."""

    def reserve(self, slots: int, tokens: int, nodes: int, levels: int) -> None:
        weight = self._draft.fc.weight
        self._cache = KVCache(slots, tokens + nodes, weight.device)
        self._state_SH = weight.new_zeros(slots, self._draft.config.hidden_size)

    def begin(self, slots: Sequence[int], ids: Sequence[list[int]], states: States) -> None:
        step = self._cache.prefill(slots, [len(row) - 1 for row in ids])
        self._read_pairs([row[1:] for row in ids], states, step, torch.tensor(slots))

    def open(self, batch: int) -> Tensor:
        self._branches = Branches(self._cache, batch)
        self._known_BEH = self._state_SH[:batch, None]  # the root's state, then those of the nodes read
        return self._logits(self._state_SH[:batch])

    def expand(self, tokens_BF: Tensor, parents_BF: Tensor, depth: int) -> Tensor:
        above_BFH = gather_rows(self._known_BEH, parents_BF - ROOT)
        step = self._branches.grow(parents_BF, depth)
        state_BFH = self._draft.decode(self._embed(tokens_BF), above_BFH, step)
        self._known_BEH = torch.cat([self._known_BEH, state_BFH], 1)
        return self._logits(state_BFH)

    def observe(self, tokens: Sequence[list[int]], states: States) -> None:
        batch = len(tokens)
        step = self._cache.extend(batch, max(len(row) for row in tokens))
        self._read_pairs(tokens, states, step, torch.arange(batch))
        self._cache.keep([len(row) for row in tokens])

    def move(self, source: int, destination: int) -> None:
        self._cache.move(source, destination)
        self._state_SH[destination] = self._state_SH[source]

    def trace(self, texts: Texts, count: int, sampling: SamplingSettings, states: States | None) -> Trace:
        """The training-time test over the answer: step k of the pair before each round start."""
        if states is None:
            raise ValueError("EAGLE heads need the target's states; ask for proposer.reads_states")
        embeds_BTH, read_BTA, at_BM = self._embed(texts.ids_BT), self._read(states), texts.places(-2)
        parts = [
            self._draft(embeds_BTH[some], read_BTA[some], Sight(texts.documents(some), at_BM[some]), count)
            for some in texts.groups(at_BM.shape[1] * embeds_BTH.shape[1], MOST_PAIRS)
        ]
        levels = ((texts.unplaced(torch.cat(level)), self._logits) for level in zip(*parts))
        return trace_levels(texts, count, levels, self._draft.vocab_size, sampling)

    def _read_pairs(self, next_tokens: Sequence[Sequence[int]], states: States, step: Step, slots: Tensor) -> None:
        """Feed pairs (state, next token); remember each row's last state, from which the next tree starts."""
        counts = [len(row) for row in next_tokens]
        true_BNH = self._true_states(states)[:, : max(counts)]
        embeds_BNH = self._embed(fill_rows(next_tokens, true_BNH.device))
        self._state_SH[slots] = last_of(self._draft.decode(embeds_BNH, true_BNH, step), counts)


class EagleDrafter(FeatureDrafter[EagleDraft]):
    """EAGLE-1: reads the target's last state, and the target's own head reads what it makes of it."""

    def __init__(self, draft: EagleDraft, target: CausalModel) -> None:
        super().__init__(draft, target, target.vocab_size)
        self._head = target.logits

    def _read(self, states: States) -> Tensor:
        return states.hidden_BTH.to(self._draft.fc.weight.dtype)

    def _true_states(self, states: States) -> Tensor:
        return self._read(states)

    def _logits(self, state: Tensor) -> Tensor:
        return self._head(state)


class Eagle3Drafter(FeatureDrafter[Eagle3Draft]):
    """EAGLE-3: reads features of three layers, and has a head of its own, maybe over fewer tokens."""

    def __init__(self, draft: Eagle3Draft, target: CausalModel) -> None:
        super().__init__(draft, target, draft.config.draft_vocab_size)
        self._reduced = draft.config.draft_vocab_size < draft.config.vocab_size
        self.aux_layers = draft.config.aux_layers

    def _read(self, states: States) -> Tensor:
        if states.aux_BTA is None:
            raise ValueError("EAGLE-3 needs the target's captured layers; ask for proposer.aux_layers")
        return states.aux_BTA.to(self._draft.fc.weight.dtype)

    def _true_states(self, states: States) -> Tensor:
        fused: Tensor = self._draft.fc(self._read(states))
        return fused

    def _logits(self, state: Tensor) -> Tensor:
        """-inf outside the draft's vocabulary, nothing renormalised."""
        logits = self._draft.logits(state)
        return over_vocabulary(logits, self._draft.draft_ids, self._draft.vocab_size) if self._reduced else logits
