"""Recorded texts side by side, and the rounds that may start along them.

Shapes: B texts, T tokens of the longest, R round starts of all texts, text by text, N some of these, M round starts of
the text that has most, K levels of a draft, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..cuda_graphs import send
from ..kernels.document_mask import Documents


class Text(NamedTuple):
    """A recorded text: rounds may start with `start` to len(ids) - 1 of its tokens known."""

    ids: list[int]
    start: int

    @property
    def rounds(self) -> int:
        """How many round starts it has."""
        return max(len(self.ids) - self.start, 0)


class Pack:
    """Texts as right-padded rows on a device. Making them does not wait for it.

    `text_R`, `nth_R`, `known_R`, `left_R`: of each round start the text, the place among that text's starts, the tokens
    known, and the tokens that follow.
    """

    def __init__(self, texts: Sequence[Text], device: torch.device) -> None:
        self.texts = tuple(texts)
        self.ids_BT = send(pad_sequence([torch.tensor(text.ids) for text in texts], batch_first=True), device)
        rounds_B = torch.tensor([text.rounds for text in texts])
        text_R = torch.repeat_interleave(rounds_B)
        nth_R = torch.arange(len(text_R)) - (rounds_B.cumsum(0) - rounds_B)[text_R]
        known_R = torch.tensor([text.start for text in texts])[text_R] + nth_R
        left_R = rounds_B[text_R] - nth_R
        self.text_R, self.nth_R, self.known_R, self.left_R = send(torch.stack([text_R, nth_R, known_R, left_R]), device)

    @property
    def rounds(self) -> int:
        """How many round starts R all texts have."""
        return len(self.text_R)

    def pick(self, x_BTX: Tensor, offset: int) -> Tensor:
        """[R, ...]: rows of x at `offset` positions after the first token that is not known."""
        return x_BTX[self.text_R, self.known_R + offset]

    def next_tokens(self, ahead: int) -> tuple[Tensor, Tensor]:
        """Tokens [R] that follow the known ones and `ahead` more, and whether there are such; any where there are
        not."""
        at_R = (self.known_R + ahead).clamp(max=self.ids_BT.shape[1] - 1)
        return self.ids_BT[self.text_R, at_R], self.left_R > ahead

    def ahead(self, x_R: Tensor, count: int, filler: float) -> Tensor:
        """[R, K]: each start's value and those of the starts after it; the filler where the text has no more."""
        padded = torch.cat([x_R, x_R.new_full((count,), filler)])
        inside_RK = self.left_R[:, None] > torch.arange(count, device=x_R.device)
        return torch.where(inside_RK, padded.unfold(0, count, 1)[: len(x_R)], filler)

    def places(self, offset: int) -> Tensor:
        """The positions that `pick` takes, as indexes [B, M] into rows, M >= 1; any where a text has fewer than M."""
        most = max(1, *(text.rounds for text in self.texts))
        first_B = torch.tensor([text.start + offset for text in self.texts])
        places_BM = (first_B[:, None] + torch.arange(most)).clamp(max=self.ids_BT.shape[1] - 1)
        return send(places_BM, self.ids_BT.device)

    def unplaced(self, x_BMX: Tensor) -> Tensor:
        """[R, ...]: rows of what was computed at `places`."""
        return x_BMX[self.text_R, self.nth_R]

    def groups(self, pairs: int, most: int) -> list[slice]:
        """Some texts at a time, so that at `pairs` of query and key a text they have no more than `most` together."""
        step = max(1, most // max(pairs, 1))
        return [slice(start, start + step) for start in range(0, len(self.texts), step)]

    def first_places(self, vocab_size: int) -> Tensor:
        """int32 [B, V]: where each token stands first in each row, padding included, which is behind all that
        is known; T where it does not."""
        device, (batch, longest) = self.ids_BT.device, self.ids_BT.shape
        at_BT = torch.arange(longest, dtype=torch.int32, device=device).expand(batch, -1)
        first_BV = torch.full((batch, vocab_size), longest, dtype=torch.int32, device=device)
        return first_BV.scatter_reduce_(1, self.ids_BT, at_BT, "amin")

    def seen(self, first_BV: Tensor, rows: slice, ahead: int) -> Tensor:
        """Marks [N, V], at some round starts, of the tokens known and of `ahead` more."""
        seen_NV: Tensor = first_BV[self.text_R[rows]] < (self.known_R[rows] + ahead)[:, None]
        return seen_NV

    def documents(self, some: slice) -> Documents:
        """The documents of some texts, a row each."""
        return Documents.rows(self.ids_BT[some])
