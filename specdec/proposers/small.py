"""Drafter of a whole causal LM: an independent small model, or the target without some layers.

Shapes: B active slots, K drafted tokens, F nodes read at once, H hidden size, R round starts of recorded texts.
"""

import torch
from torch import Tensor

from ..drafts.layer_skip import SkippedDraft
from ..drafts.small import SmallDraft
from ..kv_cache import KVCache
from ..memory_fit import probe_pass
from ..models import States
from ..replay.packing import Pack
from ..sampling_settings import SamplingSettings
from .base import UNRANKED, Texts, Trace
from .dynamic_tree import Branches
from .logits import last_of, trace_level


class SmallDrafter:
    """Drafter that runs a causal LM on a KV cache of its own, and keeps the known tokens that it has not read yet."""

    aux_layers: tuple[int, ...] = ()
    needs_hidden_states = False
    nested = True
    levels: int | None = None

    def __init__(self, draft: SmallDraft | SkippedDraft) -> None:
        self._lm = draft.lm
        self.width = draft.vocab_size
        self.needs_host_sync = probe_pass(draft.lm).waits

    def reserve(self, slots: int, tokens: int, nodes: int, levels: int) -> None:
        self._cache = KVCache(slots, tokens + max(nodes, levels + 1), self._lm.device)
        self._unread_SN = torch.zeros(slots, levels + 1, dtype=torch.long, device=self._lm.device)
        self._unread_S = torch.zeros(slots, dtype=torch.long, device=self._lm.device)

    def begin(self, slots_R: Tensor, known: Texts, states: States) -> None:
        # The last known token stays unread: `open` reads it, and gets the first logits from it.
        step = self._cache.prefill(slots_R, known.counts_B - 1)
        self._lm.states(known.ids_BT[:, :-1], step)
        self._unread_SN[slots_R, 0], self._unread_S[slots_R] = known.last(), torch.ones_like(slots_R)

    def open(self, batch: int, chain: bool) -> Tensor:
        # Catch up on the tokens emitted since the last round; they stay in the cache.
        unread = Texts(self._unread_SN[:batch], self._unread_S[:batch]).cut()
        hidden_BNH = self._lm.states(unread.ids_BT, self._cache.extend(*unread.ids_BT.shape)).hidden_BTH
        self._cache.keep(unread.counts_B)

        # Drafted nodes go past them, and are dropped with the round.
        self._branches = Branches(self._cache, chain)
        return self._lm.logits(last_of(hidden_BNH, unread.counts_B))

    def expand(self, tokens_BF: Tensor, parents_BF: Tensor, depth: int) -> Tensor:
        step = self._branches.grow(parents_BF, depth)
        return self._lm.logits(self._lm.states(tokens_BF, step).hidden_BTH)

    def observe(self, new: Texts, states: States) -> None:
        """Drop the nodes that were read, accepted or not: `open` reads all emitted tokens in one pass."""
        batch, width = new.ids_BT.shape
        self._unread_SN[:batch, :width], self._unread_S[:batch] = new.ids_BT, new.counts_B

    def move(self, source: int, destination: int) -> None:
        self._cache.move(source, destination)
        self._unread_SN[destination], self._unread_S[destination] = self._unread_SN[source], self._unread_S[source]

    def trace(self, pack: Pack, count: int, sampling: SamplingSettings, states: States | None) -> Trace:
        """Trace from one teacher-forced pass: given the true prefix, every level sees what decoding would."""
        hidden_RH = pack.pick(self._lm.states(pack.ids_BT).hidden_BTH, -1)
        rank_R, q_R = trace_level(pack, 0, hidden_RH, self._lm.logits, self.width, sampling)
        return Trace(pack.ahead(rank_R, count, UNRANKED), pack.ahead(q_R, count, 0.0))
