"""Texts of all slots on the device, for proposers that look there for what was said before.

Shapes: S slots of L places, B active slots, R fresh slots, E tokens that a round emits.
"""

import torch
from torch import Tensor

from ..models import States
from .base import Texts


class TextTable:
    """Text table: the tokens of every slot, prompt and answer, at places that stay. Nothing here waits for the device.

    The reader half of a proposer that needs no more than texts.
    """

    aux_layers: tuple[int, ...] = ()
    needs_hidden_states = False
    needs_host_sync = False

    def __init__(self) -> None:
        self._size = (0, 0)
        self._ids_SL = self._counts_S = torch.zeros(0, dtype=torch.long)

    def reserve(self, slots: int, tokens: int, levels: int) -> None:
        # Behind a text there is room for all that a round may emit. Texts are made where the first prompts are.
        self._size = (slots, tokens + levels + 1)
        self._ids_SL = self._counts_S = torch.zeros(0, dtype=torch.long)

    def begin(self, slots_R: Tensor, known: Texts, states: States) -> None:
        if not len(self._counts_S):
            self._ids_SL = torch.zeros(self._size, dtype=torch.long, device=slots_R.device)
            self._counts_S = torch.zeros(self._size[0], dtype=torch.long, device=slots_R.device)
        self._ids_SL[slots_R, : known.ids_BT.shape[1]] = known.ids_BT
        self._counts_S[slots_R] = known.counts_B

    def observe(self, new: Texts, states: States) -> None:
        # What stands past a slot's count is overwritten by what it emits next.
        batch, width = new.ids_BT.shape
        counts_B = self._counts_S[:batch]
        at_BE = counts_B[:, None] + torch.arange(width, device=counts_B.device)
        self._ids_SL[:batch].scatter_(1, at_BE, new.ids_BT)
        counts_B.add_(new.counts_B)

    def move(self, source: int, destination: int) -> None:
        self._ids_SL[destination] = self._ids_SL[source]
        self._counts_S[destination] = self._counts_S[source]
