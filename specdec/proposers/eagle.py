"""EAGLE drafters: heads that read the target's states at true positions, and their own states at drafted ones.

Shapes: B active slots, K drafted tokens, F nodes read at once, E on the level above, N pairs read, H hidden size,
A features, V vocabulary.
"""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ..drafts.eagle import EagleDraft
from ..drafts.eagle3 import Eagle3Draft
from ..kernels.document_mask import QueryMask
from ..kv_cache import CacheStep, KVCache
from ..models import CausalModel, States
from ..replay.packing import Pack
from ..sampling_settings import SamplingSettings
from .base import Texts, Trace
from .dynamic_tree import Branches
from .logits import MOST_PAIRS, Head, gather_rows, last_of, over_vocabulary, own_vocabulary, trace_levels
from .tree_shape import ROOT

D = TypeVar("D", bound=EagleDraft | Eagle3Draft)


class FeatureDrafter(ABC, Generic[D]):
    """Base of EAGLE drafters. The KV cache holds true states: a round's drafted keys are dropped, then rebuilt from the
    target's states.

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
        """Target states [B, N, H] or captured features [B, N, A] that the head reads, in the head's dtype."""

    @abstractmethod
    def _true_states(self, states: States) -> Tensor:
        """The head's input states [B, N, H] at true positions."""

    @abstractmethod
    def _logits(self, state: Tensor) -> Tensor:
        """The head's states [..., H] -> logits over the target's vocabulary."""

    def _ranked(self) -> tuple[Head, Tensor | None]:
        """The head that traces read, and the target ids of its logits; None: all of them."""
        return self._logits, None

    def reserve(self, slots: int, tokens: int, nodes: int, levels: int) -> None:
        draft = self._draft
        self._cache = KVCache(slots, tokens + max(nodes, levels + 1), draft.device)
        self._state_SH = torch.zeros(slots, draft.config.hidden_size, device=draft.device, dtype=draft.dtype)

    def begin(self, slots_R: Tensor, known: Texts, states: States) -> None:
        # Pair t is (target's state of t, token t + 1), so embeddings begin with the second token.
        pairs = Texts(known.ids_BT[:, 1:], known.counts_B - 1)
        self._state_SH[slots_R] = self._read_pairs(pairs, states, self._cache.prefill(slots_R, pairs.counts_B))

    def open(self, batch: int, chain: bool) -> Tensor:
        self._branches, self._chain = Branches(self._cache, chain), chain
        # States of the last level that was read, and the place of its first node: the root's.
        self._above_BEH, self._first = self._state_SH[:batch, None], ROOT
        return self._logits(self._state_SH[:batch])

    def expand(self, tokens_BF: Tensor, parents_BF: Tensor, depth: int) -> Tensor:
        # Each node reads its parent's state.
        above_BFH = self._above_BEH if self._chain else gather_rows(self._above_BEH, parents_BF, self._first)
        step = self._branches.grow(parents_BF, depth)
        state_BFH = self._draft.decode(self._embed(tokens_BF), above_BFH, step)

        # The next level's parents stand on this one.
        self._first += self._above_BEH.shape[1]
        self._above_BEH = state_BFH
        return self._logits(state_BFH)

    def observe(self, new: Texts, states: States) -> None:
        # Accepted tokens are read again, from the target's states instead of the draft's.
        new = new.cut()
        batch = len(new.counts_B)
        self._state_SH[:batch] = self._read_pairs(new, states, self._cache.extend(*new.ids_BT.shape))
        self._cache.keep(new.counts_B)

    def move(self, source: int, destination: int) -> None:
        self._cache.move(source, destination)
        self._state_SH[destination] = self._state_SH[source]

    def trace(self, pack: Pack, count: int, sampling: SamplingSettings, states: States | None) -> Trace:
        """Trace by the training-time test over the answer: level k is step k of the pair before each round start."""
        # The pair before a round start ends with its last known token, and drafts the round's first.
        if states is None:
            raise ValueError("EAGLE heads need the target's states; ask for proposer.needs_hidden_states")
        embeds_BTH, read_BTA, at_BM = self._embed(pack.ids_BT), self._read(states), pack.places(-2)

        # Few rows at a time: attention holds a score for each pair of query and key.
        parts = [
            self._unrolled(embeds_BTH[some], read_BTA[some], QueryMask(pack.documents(some), at_BM[some]), count)
            for some in pack.groups(at_BM.shape[1] * embeds_BTH.shape[1], MOST_PAIRS)
        ]

        # One tensor of states a level, with a row for each round start.
        head, ids_R = self._ranked()
        levels = ((pack.unplaced(torch.cat(level)), head) for level in zip(*parts))
        return trace_levels(pack, count, levels, self._draft.vocab_size, sampling, ids_R)

    def _unrolled(self, embeds_BTH: Tensor, read_BTA: Tensor, starts: QueryMask, count: int) -> list[Tensor]:
        """States [B, M, H] of `count` steps at the pairs before round starts."""
        states: list[Tensor] = self._draft(embeds_BTH, read_BTA, starts, count)
        return states

    def _read_pairs(self, after: Texts, states: States, step: CacheStep) -> Tensor:
        """Read pairs (true state, token after it) into the cache. Returns each row's last state [B, H], from which the
        next tree starts."""
        true_BNH = self._true_states(states)[:, : after.ids_BT.shape[1]]
        return last_of(self._draft.decode(self._embed(after.ids_BT), true_BNH, step), after.counts_B)


class EagleDrafter(FeatureDrafter[EagleDraft]):
    """EAGLE-1 drafter: reads the target's post-norm states, and the target's lm_head reads the drafter's."""

    def __init__(self, draft: EagleDraft, target: CausalModel) -> None:
        super().__init__(draft, target, target.vocab_size)
        self._head = target.logits

    def _read(self, states: States) -> Tensor:
        return states.hidden_BTH.to(self._draft.dtype)

    def _true_states(self, states: States) -> Tensor:
        return self._read(states)

    def _logits(self, state: Tensor) -> Tensor:
        return self._head(state)


class Eagle3Drafter(FeatureDrafter[Eagle3Draft]):
    """EAGLE-3 drafter: reads features of several layers. Its own lm_head may have a reduced vocabulary."""

    def __init__(self, draft: Eagle3Draft, target: CausalModel) -> None:
        super().__init__(draft, target, draft.config.draft_vocab_size)
        self._reduced = draft.config.draft_vocab_size < draft.config.vocab_size
        self.aux_layers = draft.config.aux_layers

    def _read(self, states: States) -> Tensor:
        features = states.aux_BTA if self.aux_layers else states.hidden_BTH
        if features is None:
            raise ValueError("EAGLE-3 needs the target's captured layers; ask for proposer.aux_layers")
        return features.to(self._draft.dtype)

    def _true_states(self, states: States) -> Tensor:
        fused: Tensor = self._draft.fc(self._read(states))
        return fused

    def _logits(self, state: Tensor) -> Tensor:
        """Logits [..., V] of states [..., H]: -inf outside the draft's vocabulary, nothing renormalised."""
        logits = self._draft.logits(state)
        return over_vocabulary(logits, self._draft.draft_ids, self._draft.vocab_size) if self._reduced else logits

    def _ranked(self) -> tuple[Head, Tensor | None]:
        ids_R = self._draft.draft_ids if self._reduced else None
        return own_vocabulary(self._draft.logits, ids_R)
