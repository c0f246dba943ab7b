"""Drafting with an independent small model: a greedy or sampled chain.

Shapes: B active slots, K drafted tokens, N fed tokens, V vocabulary, T known tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..cache import KVCache
from ..drafts.small import SmallDraft
from ..models import States
from ..sampling import SamplingSettings
from .base import Draft, Trace
from .chain import draft_token, fill_rows, trace_from_logits


class SmallProposer:
    """Runs the draft on a cache of its own. `pending` holds known tokens that it has not read yet (one or two)."""

    replayable = True
    deterministic = False
    aux_layers: tuple[int, ...] = ()

    def __init__(self, draft: SmallDraft) -> None:
        self._lm = draft.lm
        self._pending: list[list[int]] = []

    def reserve(self, slots: int, capacity: int) -> None:
        self._cache = KVCache(slots, capacity, self._lm.device)
        self._pending = [[] for _ in range(slots)]
        self._drafted = 0  # in the round that is under way

    def begin(self, slots: Sequence[int], ids: Sequence[list[int]], states: States) -> None:
        prompts = [row[:-1] for row in ids]
        step = self._cache.prefill(slots, [len(prompt) for prompt in prompts])
        self._lm.states(fill_rows(prompts, self._lm.device), step)
        for slot, row in zip(slots, ids):
            self._pending[slot] = row[-1:]

    def propose(self, limits: Sequence[int], sampling: Sequence[SamplingSettings], uniforms_BK: Tensor | None) -> Draft:
        batch, count = len(limits), max(limits)
        self._drafted = count
        if count == 0:
            return Draft(torch.zeros(batch, 0, dtype=torch.long, device=self._lm.device), list(limits), None)
        fed = self._pending[:batch]
        hidden_BH = self._read(fill_rows(fed, self._lm.device), [len(row) for row in fed])
        tokens: list[Tensor] = []
        drawn_from: list[Tensor] = []
        for k in range(count):
            token_B, q_BV = draft_token(self._lm.logits(hidden_BH), sampling, uniforms_BK, k)
            tokens.append(token_B)
            if q_BV is not None:
                drawn_from.append(q_BV)
            if k + 1 < count:
                hidden_BH = self._read(token_B[:, None], [1] * batch)
        return Draft(torch.stack(tokens, 1), list(limits), torch.stack(drawn_from, 1) if drawn_from else None)

    def observe(self, tokens: Sequence[list[int]], states: States) -> None:
        """Keep what was read of the accepted tokens; the rest of the emitted ones is pending."""
        for slot, emitted in enumerate(tokens):
            accepted = len(emitted) - 1
            read = min(accepted, max(self._drafted - 1, 0))
            self._cache.lengths[slot] -= max(self._drafted - 1, 0) - read
            self._pending[slot] = emitted[read:]

    def move(self, source: int, destination: int) -> None:
        self._cache.move(source, destination)
        self._pending[destination] = self._pending[source]

    def trace(self, ids: list[int], start: int, count: int, sampling: SamplingSettings, states: States | None) -> Trace:
        """One teacher-forced pass: given the true prefix, every depth sees the same context as decoding would."""
        hidden_TH = self._lm.states(torch.tensor([ids[:-1]], device=self._lm.device)).hidden_BTH[0, start - 1 :]
        logits_TV = self._lm.logits(hidden_TH)
        answer_T = torch.tensor(ids[start:], device=self._lm.device)
        hit_T, q_T = trace_from_logits(logits_TV, answer_T, sampling)
        return Trace(_diagonals(hit_T, count), _diagonals(q_T, count))

    def _read(self, ids_BN: Tensor, counts: list[int]) -> Tensor:
        step = self._cache.extend(len(counts), ids_BN.shape[1])
        hidden_BNH = self._lm.states(ids_BN, step).hidden_BTH
        self._cache.keep(counts)
        last_B = torch.tensor(counts, device=self._lm.device) - 1
        return hidden_BNH[torch.arange(len(counts), device=self._lm.device), last_B]


def _diagonals(x_T: Tensor, count: int) -> Tensor:
    """[T] per position -> [T, K] per round start and depth: column j of row r is position r + j (0 past the end)."""
    padded = torch.cat([x_T, x_T.new_zeros(count - 1)])
    return padded.unfold(0, count, 1)
