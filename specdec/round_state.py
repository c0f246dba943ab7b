"""What the decoder keeps of its slots on the device, so that a round waits for it only to read the verdict.

Shapes: S slots, R rows admitted, B rows of a round (the first slots), C numbers, V vocabulary.

A slot without a budget is free: a round may cover it, but nothing that it says counts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .passes import send
from .proposers.base import Texts
from .requests import Request
from .sampling import Purpose, uniforms


class RoundState:
    """Last tokens, counts, seeds and repetition marks of every slot."""

    def __init__(self, slots: int, device: torch.device, marked: int = 0) -> None:
        """`marked`: tokens of the vocabulary, where any request has a repetition penalty."""
        self.last_S, self.emitted_S, self.budget_S, self.seed_S = torch.zeros(
            4, slots, dtype=torch.long, device=device
        ).unbind()
        self._seen_SV = torch.zeros(slots, marked, dtype=torch.bool, device=device) if marked else None

    def admit(self, slots_R: Tensor, requests: Sequence[Request], ids_RT: Tensor, counts_R: Tensor) -> None:
        """Put requests into slots; rows past them are padding. `ids`: their prompts."""
        numbers = [[request.max_new_tokens, request.seed] for request in requests]
        numbers += [[0, 0]] * (len(slots_R) - len(requests))
        budget_R, seed_R = send(torch.tensor(numbers), slots_R.device).unbind(1)
        self.budget_S[slots_R], self.seed_S[slots_R], self.emitted_S[slots_R] = budget_R, seed_R, 0
        if self._seen_SV is not None:
            seen_RV = self._seen_SV.new_zeros(len(slots_R), self._seen_SV.shape[1])
            inside_RT = torch.arange(ids_RT.shape[1], device=ids_RT.device) < counts_R[:, None]
            self._seen_SV[slots_R] = seen_RV.scatter_(1, torch.where(inside_RT, ids_RT, ids_RT[:, :1]), True)

    def begin(self, slots_R: Tensor, tokens_R: Tensor) -> None:
        """Each answer's first token."""
        self.last_S[slots_R], self.emitted_S[slots_R] = tokens_R, 1
        if self._seen_SV is not None:
            self._seen_SV[slots_R, tokens_R] = True

    def advance(self, new: Texts) -> None:
        """What each of the first slots emitted."""
        rows = len(new.counts_B)
        self.last_S[:rows] = new.last()
        self.emitted_S[:rows] += new.counts_B
        if self._seen_SV is not None:
            inside_BT = torch.arange(new.ids_BT.shape[1], device=new.ids_BT.device) < new.counts_B[:, None]
            self._seen_SV[:rows].scatter_(1, torch.where(inside_BT, new.ids_BT, new.ids_BT[:, :1]), True)

    def limits(self, rows: int, levels: int) -> Tensor:
        """[B]: levels that may be drafted, so that the target's own token still fits."""
        return (self.budget_S[:rows] - self.emitted_S[:rows] - 1).clamp(0, levels)

    def live(self, rows: int) -> Tensor:
        """[B]: whether a request is there."""
        return self.budget_S[:rows] > 0

    def seen(self, rows: int) -> Tensor | None:
        """Marks [B, V] of the tokens that each slot knows; None where no request has a use for them."""
        return None if self._seen_SV is None else self._seen_SV[:rows]

    def seen_by(self, slots_R: Tensor) -> Tensor | None:
        """The same of some slots."""
        return None if self._seen_SV is None else self._seen_SV[slots_R]

    def uniforms(self, slots: Tensor | slice, purpose: Purpose, count: int, ahead: int = 0) -> Tensor:
        """Numbers [., C] of a round that starts `ahead` tokens later than this one."""
        return uniforms(self.seed_S[slots], self.emitted_S[slots] + ahead, purpose, count)

    def move(self, source: int, destination: int) -> None:
        """Copy a slot onto another."""
        for part in (self.last_S, self.emitted_S, self.budget_S, self.seed_S, self._seen_SV):
            if part is not None:
                part[destination] = part[source]

    def free(self, slot: int) -> None:
        """Nothing is there."""
        self.budget_S[slot] = 0
