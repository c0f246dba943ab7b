"""Drafting a chain with an EAGLE-3 head.

Shapes: B active slots, K drafted tokens, N pairs fed, H hidden size, A features, V vocabulary, Vd draft vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..cache import KVCache, Step
from ..drafts.eagle3 import Eagle3Draft
from ..models import CausalModel, States
from ..sampling import SamplingSettings
from .base import Draft, Trace
from .chain import draft_token, fill_rows, trace_from_logits


class Eagle3Proposer:
    """Keeps the draft's cache on true features: a round's own keys are dropped, then rebuilt from the target's."""

    replayable = True
    deterministic = False

    def __init__(self, draft: Eagle3Draft, target: CausalModel) -> None:
        self._draft = draft
        self._embed = draft.embed_tokens if draft.embed_tokens is not None else target.embed
        self._reduced = draft.config.draft_vocab_size < draft.config.vocab_size
        self.aux_layers: tuple[int, ...] = draft.config.aux_layers

    def reserve(self, slots: int, capacity: int) -> None:
        weight = self._draft.lm_head.weight
        self._cache = KVCache(slots, capacity, weight.device)
        self._state_SH = weight.new_zeros(slots, self._draft.config.hidden_size)

    def begin(self, slots: Sequence[int], ids: Sequence[list[int]], states: States) -> None:
        step = self._cache.prefill(slots, [len(row) - 1 for row in ids])
        self._read_features([row[1:] for row in ids], states, step, torch.tensor(slots))

    def propose(self, limits: Sequence[int], sampling: Sequence[SamplingSettings], uniforms_BK: Tensor | None) -> Draft:
        batch, count = len(limits), max(limits)
        state_BH = self._state_SH[:batch]
        tokens: list[Tensor] = []
        drawn_from: list[Tensor] = []
        for k in range(count):
            token_B, q_BV = draft_token(self._logits(state_BH), sampling, uniforms_BK, k)
            tokens.append(token_B)
            if q_BV is not None:
                drawn_from.append(q_BV)
            if k + 1 < count:
                step = self._cache.extend(batch, 1)
                state_BH = self._draft.decode(self._embed(token_B[:, None]), state_BH[:, None], step)[:, 0]
                self._cache.keep([1] * batch)
        self._cache.keep([-max(count - 1, 0)] * batch)
        tokens_BK = torch.stack(tokens, 1) if tokens else torch.zeros(batch, 0, dtype=torch.long)
        return Draft(
            tokens_BK.to(self._state_SH.device), list(limits), torch.stack(drawn_from, 1) if drawn_from else None
        )

    def observe(self, tokens: Sequence[list[int]], states: States) -> None:
        batch = len(tokens)
        step = self._cache.extend(batch, max(len(row) for row in tokens))
        self._read_features(tokens, states, step, torch.arange(batch))
        self._cache.keep([len(row) for row in tokens])

    def move(self, source: int, destination: int) -> None:
        self._cache.move(source, destination)
        self._state_SH[destination] = self._state_SH[source]

    def trace(self, ids: list[int], start: int, count: int, sampling: SamplingSettings, states: States | None) -> Trace:
        """The training-time test over the answer: step k of the pair before each round start."""
        if states is None:
            raise ValueError("EAGLE-3 needs the target's captured layers; ask for proposer.aux_layers")
        rows, device = len(ids) - start, states.hidden_BTH.device
        embeds_1TH = self._embed(torch.tensor([ids], device=device))
        aux_1TA = _pad_one(self._features(states), embeds_1TH.shape[1])
        first = torch.tensor([start - 2], device=device)
        answer_T = torch.tensor(ids[start:], device=device)
        hits, qs = [], []
        for k, state in enumerate(self._draft(embeds_1TH, aux_1TA, first, rows, count)):
            inside = max(rows - k, 0)
            hit_T, q_T = trace_from_logits(self._logits(state[0, :inside]), answer_T[k:], sampling)
            hits.append(torch.cat([hit_T, hit_T.new_zeros(rows - inside)]))
            qs.append(torch.cat([q_T, q_T.new_zeros(rows - inside)]))
        return Trace(torch.stack(hits, 1), torch.stack(qs, 1))

    def _read_features(self, next_tokens: Sequence[Sequence[int]], states: States, step: Step, slots: Tensor) -> None:
        """Feed pairs (feature, next token); remember each row's last state, from which the next chain starts."""
        width = max(len(row) for row in next_tokens)
        fused_BNH = self._draft.fc(self._features(states)[:, :width])
        embeds_BNH = self._embed(fill_rows(next_tokens, fused_BNH.device))
        state_BNH = self._draft.decode(embeds_BNH, fused_BNH, step)
        last_B = torch.tensor([len(row) - 1 for row in next_tokens], device=fused_BNH.device)
        self._state_SH[slots] = state_BNH[torch.arange(len(last_B)), last_B]

    def _features(self, states: States) -> Tensor:
        if states.aux_BTA is None:
            raise ValueError("EAGLE-3 needs the target's captured layers; ask for proposer.aux_layers")
        return states.aux_BTA.to(self._draft.fc.weight.dtype)

    def _logits(self, state: Tensor) -> Tensor:
        """Draft logits over the target's vocabulary: -inf outside the draft's, nothing renormalised."""
        logits = self._draft.logits(state)
        if not self._reduced:
            return logits
        full = logits.new_full((*logits.shape[:-1], self._draft.vocab_size), float("-inf"))
        full[..., self._draft.draft_ids] = logits
        return full


def _pad_one(x_BTA: Tensor, tokens: int) -> Tensor:
    """Repeat the last position until there are `tokens` of them (the last token has no feature yet)."""
    missing = tokens - x_BTA.shape[1]
    return torch.cat([x_BTA, x_BTA[:, -1:].expand(-1, missing, -1)], dim=1)
