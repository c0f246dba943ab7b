"""Reading EAGLE heads: they draft from the target's states, and from their own where the target has not been yet.

Shapes: B active slots, K drafted tokens, F nodes read at once, N pairs read, H hidden size, A features, V vocabulary.
"""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cache import KVCache, Step
from ..documents import Documents, Sight
from ..drafts.eagle import EagleDraft
from ..drafts.eagle3 import Eagle3Draft
from ..models import CausalModel, States
from ..sampling import SamplingSettings
from ..tree import ROOT
from .base import UNRANKED, Texts, Trace
from .branches import Branches
from .rows import gather_rows, last_of, over_vocabulary, trace_from_logits

D = TypeVar("D", bound=EagleDraft | Eagle3Draft)


class FeatureDrafter(ABC, Generic[D]):
    """Keeps the draft's cache on true states: a round's own keys are dropped, then rebuilt from the target's.

    Position t of the cache is the pair (target's state of t, token t + 1). Subclasses say which state that is and
    what reads the head's own.
    """

    aux_layers: tuple[int, ...] = ()
    reads_states = True
    nested = True
    waits = False
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
        self._branches = Branches(self._cache, batch, chain)
        self._known_BEH = self._state_SH[:batch, None]  # the root's state, then those of the nodes read
        return self._logits(self._state_SH[:batch])

    def expand(self, tokens_BF: Tensor, parents_BF: Tensor, depth: int) -> Tensor:
        above_BFH = gather_rows(self._known_BEH, parents_BF - ROOT)
        step = self._branches.grow(parents_BF, depth)
        state_BFH = self._draft.decode(self._embed(tokens_BF), above_BFH, step)
        self._known_BEH = torch.cat([self._known_BEH, state_BFH], 1)
        return self._logits(state_BFH)

    def observe(self, new: Texts, states: States) -> None:
        new = new.cut()
        batch = len(new.counts_B)
        self._state_SH[:batch] = self._read_pairs(new, states, self._cache.extend(*new.ids_BT.shape))
        self._cache.keep(new.counts_B)

    def move(self, source: int, destination: int) -> None:
        self._cache.move(source, destination)
        self._state_SH[destination] = self._state_SH[source]

    def trace(self, ids: list[int], start: int, count: int, sampling: SamplingSettings, states: States | None) -> Trace:
        """The training-time test over the answer: step k of the pair before each round start."""
        if states is None:
            raise ValueError("EAGLE heads need the target's states; ask for proposer.reads_states")
        rows, device = len(ids) - start, states.hidden_BTH.device
        ids_1T = torch.tensor([ids], device=device)
        embeds_1TH = self._embed(ids_1T)
        ranks, qs = [], []
        read_1TA = _pad_one(self._read(states), len(ids))
        starts = Sight(Documents.rows(ids_1T), torch.arange(start - 2, len(ids) - 2, device=device)[None])
        for k, state in enumerate(self._draft(embeds_1TH, read_1TA, starts, count)):
            inside = max(rows - k, 0)
            rank_T, q_T = trace_from_logits(self._logits(state[0, :inside]), ids, start + k, sampling)
            ranks.append(F.pad(rank_T, (0, rows - inside), value=UNRANKED))
            qs.append(F.pad(q_T, (0, rows - inside)))
        return Trace(torch.stack(ranks, 1), torch.stack(qs, 1))

    def _read_pairs(self, after: Texts, states: States, step: Step) -> Tensor:
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


def _pad_one(x_BTA: Tensor, tokens: int) -> Tensor:
    """Repeat the last position until there are `tokens` of them (the last token has no state yet)."""
    missing = tokens - x_BTA.shape[1]
    return torch.cat([x_BTA, x_BTA[:, -1:].expand(-1, missing, -1)], dim=1)
