"""Reading EAGLE heads: they draft from the target's states, and from their own where the target has not been yet.

Shapes: B active slots, K drafted tokens, F nodes read at once, N pairs read, H hidden size, A features, V vocabulary.
"""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ..cache import CacheStep, KVCache
from ..drafts.eagle import EagleDraft
from ..drafts.eagle3 import Eagle3Draft
from ..kernels.document_mask import QueryMask
from ..models import CausalModel, States
from ..replay.packing import Pack
from ..sampling import SamplingSettings
from ..tree import ROOT
from .base import Texts, Trace
from .dynamic_tree import Branches
from .logits import MOST_PAIRS, gather_rows, last_of, over_vocabulary, trace_levels

D = TypeVar("D", bound=EagleDraft | Eagle3Draft)


class FeatureDrafter(ABC, Generic[D]):
    """Keeps the draft's cache on true states: a round's own keys are dropped, then rebuilt from the target's.

    Position t of the cache is the pair (target's state of t, token t + 1). Subclasses say which state that is and
    what reads the head's own.
    """

    aux_layers: tuple[int, ...] = ()
    needs_hidden_states = True
    nested = True
    needs_host_sync = False
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
        self._cache = KVCache(slots, tokens + max(nodes, levels + 1), weight.device)
        self._state_SH = weight.new_zeros(slots, self._draft.config.hidden_size)

    def begin(self, slots_R: Tensor, known: Texts, states: States) -> None:
        pairs = Texts(known.ids_BT[:, 1:], known.counts_B - 1)
        self._state_SH[slots_R] = self._read_pairs(pairs, states, self._cache.prefill(slots_R, pairs.counts_B))

    def open(self, batch: int, chain: bool) -> Tensor:
        self._branches, self._chain = Branches(self._cache, batch, chain), chain
        self._known_BEH = self._state_SH[
            :batch, None
        ]  # the root's state, then those of the nodes read; of chains the last
        return self._logits(self._state_SH[:batch])

    def expand(self, tokens_BF: Tensor, parents_BF: Tensor, depth: int) -> Tensor:
        above_BFH = self._known_BEH if self._chain else gather_rows(self._known_BEH, parents_BF - ROOT)
        step = self._branches.grow(parents_BF, depth)
        state_BFH = self._draft.decode(self._embed(tokens_BF), above_BFH, step)
        self._known_BEH = state_BFH if self._chain else torch.cat([self._known_BEH, state_BFH], 1)
        return self._logits(state_BFH)

    def observe(self, new: Texts, states: States) -> None:
        new = new.cut()
        batch = len(new.counts_B)
        self._state_SH[:batch] = self._read_pairs(new, states, self._cache.extend(*new.ids_BT.shape))
        self._cache.keep(new.counts_B)

    def move(self, source: int, destination: int) -> None:
        self._cache.move(source, destination)
        self._state_SH[destination] = self._state_SH[source]

    def trace(self, pack: Pack, count: int, sampling: SamplingSettings, states: States | None) -> Trace:
        """The training-time test over the answer: step k of the pair before each round start."""
        if states is None:
            raise ValueError("EAGLE heads need the target's states; ask for proposer.needs_hidden_states")
        embeds_BTH, read_BTA, at_BM = self._embed(pack.ids_BT), self._read(states), pack.places(-2)
        parts = [
            self._draft(embeds_BTH[some], read_BTA[some], QueryMask(pack.documents(some), at_BM[some]), count)
            for some in pack.groups(at_BM.shape[1] * embeds_BTH.shape[1], MOST_PAIRS)
        ]
        levels = ((pack.unplaced(torch.cat(level)), self._logits) for level in zip(*parts))
        return trace_levels(pack, count, levels, self._draft.vocab_size, sampling)

    def _read_pairs(self, after: Texts, states: States, step: CacheStep) -> Tensor:
        """Feed pairs (state, token after it); each row's last state [B, H], from which the next tree starts."""
        true_BNH = self._true_states(states)[:, : after.ids_BT.shape[1]]
        return last_of(self._draft.decode(self._embed(after.ids_BT), true_BNH, step), after.counts_B)


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
