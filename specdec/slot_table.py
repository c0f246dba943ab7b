"""Slot table of a decoder: what the device knows of the requests answered side by side, and how prompts enter.

Both ways of decoding stand on it: rounds of draft and verification (`decoder.py`), and plain decoding at speed
(`continuous_batching.py`), which is the round with nothing drafted, but for when the host learns of it.

Shapes: S slots, B rows of a step (the first B slots), R rows of any slots, X numbers of a slot, T tokens of the longest
prompt, H hidden size, V vocabulary, C random numbers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .cuda_graphs import send
from .kv_cache import KVCache
from .models import CausalModel, States
from .proposers.base import Texts
from .requests import Request
from .sampling import Purpose, categorical, penalised, probabilities, uniforms
from .sampling_settings import SamplingSettings

RowsOfSetting = tuple[SamplingSettings, Tensor | None]
"""A sampling setting and the rows that it draws; None: all of them."""


class SlotTable:
    """Slot table: last token, counts, seeds and repetition marks of every slot, on the device.

    A request's random numbers depend on its seed and on the tokens that it has emitted, so that its answer depends
    neither on its slot nor on its neighbours.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self.numbers_XS = torch.zeros(5, slots, dtype=torch.long, device=device)
        self.last_S, self.emitted_S, self.budget_S, self.seed_S, self.listener_seed_S = self.numbers_XS.unbind()
        self._seen_SV: Tensor | None = None

    def admit(
        self,
        slots_R: Tensor,
        requests: Sequence[Request],
        prompts: Texts,
        vocab_size: int,
        listener_seeds: Sequence[int] = (),
    ) -> None:
        """Put requests into slots; rows past the requests are padding."""
        # Last token and count start at 0; padding rows get a budget of 0, which marks a free slot.
        seeds = listener_seeds or [0] * len(requests)
        numbers = [[0, 0, request.max_new_tokens, request.seed, seed] for request, seed in zip(requests, seeds)]
        numbers += [[0] * 5] * (len(slots_R) - len(requests))
        self.numbers_XS[:, slots_R] = send(torch.tensor(numbers), slots_R.device).T
        # Marks are made when the first request has a use for them: without a penalty nothing reads them.
        if self._seen_SV is None and any(request.sampling.repetition_penalty != 1.0 for request in requests):
            shape = (self.numbers_XS.shape[1], vocab_size)
            self._seen_SV = torch.zeros(shape, dtype=torch.bool, device=slots_R.device)
        if self._seen_SV is not None:
            # Marks start afresh from the prompt's own tokens.
            seen_RV = self._seen_SV.new_zeros(len(slots_R), vocab_size)
            self._seen_SV[slots_R] = seen_RV.scatter_(1, _without_padding(prompts), True)

    def emit(self, slots_R: Tensor, tokens_R: Tensor) -> None:
        """Note the next token of some slots."""
        self.last_S[slots_R] = tokens_R
        self.emitted_S.index_add_(0, slots_R, torch.ones_like(tokens_R))
        if self._seen_SV is not None:
            self._seen_SV[slots_R, tokens_R] = torch.ones_like(tokens_R, dtype=torch.bool)

    def advance(self, new: Texts, last_B: Tensor) -> None:
        """Note the tokens that each of the first slots emitted in a round, and the last of them."""
        rows = len(new.counts_B)
        self.last_S[:rows] = last_B
        self.emitted_S[:rows].add_(new.counts_B)
        if self._seen_SV is not None:
            self._seen_SV[:rows].scatter_(1, _without_padding(new), True)

    def limits(self, rows: int, levels: int) -> Tensor:
        """Draft limits [B]: levels that may be drafted, so that the target's own token still fits the answer."""
        return (self.budget_S[:rows] - self.emitted_S[:rows] - 1).clamp(0, levels)

    def live(self, rows: int) -> Tensor:
        """Marks [B] of the slots that hold a request whose answer may go on."""
        return self.budget_S[:rows] > self.emitted_S[:rows]

    def seen(self, slots: Tensor | slice) -> Tensor | None:
        """Marks [., V] of the tokens of prompt and answer in some slots; None where no request has a penalty."""
        return None if self._seen_SV is None else self._seen_SV[slots]

    def uniforms(self, slots: Tensor | slice, purpose: Purpose, count: int, ahead: int = 0) -> Tensor:
        """Random numbers [., C] of a round that starts `ahead` tokens later than this one."""
        return uniforms(self.seed_S[slots], self.emitted_S[slots] + ahead, purpose, count)

    def move(self, source: int | Tensor, destination: int | Tensor) -> None:
        """Copy a slot onto another, or several onto others."""
        self.numbers_XS[:, destination] = self.numbers_XS[:, source]
        if self._seen_SV is not None:
            self._seen_SV[destination] = self._seen_SV[source]

    def free(self, slots_R: Tensor) -> None:
        """Leave no request in these slots."""
        self.budget_S.index_fill_(0, slots_R, 0)


def _without_padding(texts: Texts) -> Tensor:
    """Token ids [B, T] with each row's padding replaced by its first token, so that marking them all adds nothing."""
    inside_BT = torch.arange(texts.ids_BT.shape[1], device=texts.ids_BT.device) < texts.counts_B[:, None]
    return torch.where(inside_BT, texts.ids_BT, texts.ids_BT[:, :1])


def read_prompts(
    target: CausalModel, cache: KVCache, aux_layers: Sequence[int], slots_R: Tensor, ids_RT: Tensor, counts_R: Tensor
) -> tuple[States, Tensor]:
    """Prefill: read prompts into fresh slots in one pass; returns states [R, T, H] and the logits [R, V] after each."""
    states = target.states(ids_RT, cache.prefill(slots_R, counts_R), aux_layers)
    # Logits are wanted after a prompt's last token only.
    rows_R = torch.arange(len(slots_R), device=slots_R.device)
    return states, target.logits(states.hidden_BTH[rows_R, counts_R - 1])


def rows_by_setting(sampling: Sequence[SamplingSettings], device: torch.device) -> list[RowsOfSetting]:
    """Rows that each sampling setting draws: [(setting, rows)]; rows None where one setting draws all."""
    found: dict[SamplingSettings, list[int]] = {}
    for row, setting in enumerate(sampling):
        found.setdefault(setting, []).append(row)
    if len(found) == 1:
        return [(sampling[0], None)]
    return [(setting, send(torch.tensor(rows), device)) for setting, rows in found.items()]


def draw(logits_RV: Tensor, settings: Sequence[RowsOfSetting], seen_RV: Tensor | None, u_R: Tensor) -> Tensor:
    """Draw the next token [R] of each row, through the processors of its sampling setting."""
    tokens_R = torch.zeros_like(u_R, dtype=torch.long)
    for setting, rows in settings:
        # Rows of this setting; marks are copied only where it has a penalty.
        some_RV, some_seen_RV, some_u_R = logits_RV, seen_RV, u_R
        if rows is not None:
            some_RV, some_u_R = logits_RV[rows], u_R[rows]
            some_seen_RV = None if seen_RV is None or setting.repetition_penalty == 1.0 else seen_RV[rows]
        # The likeliest token needs no distribution.
        if setting.greedy:
            drawn = penalised(some_RV, setting, some_seen_RV).argmax(-1)
        else:
            drawn = categorical(probabilities(some_RV, setting, some_seen_RV), some_u_R)
        # A lone setting has drawn all rows.
        if rows is None:
            return drawn
        tokens_R[rows] = drawn
    return tokens_R
