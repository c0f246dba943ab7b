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
        """Number of round starts of the text."""
        return max(len(self.ids) - self.start, 0)


class Pack:
    """Batch of texts as right-padded rows on a device, with all their round starts. Making it waits for nothing.

    For each round start, `text_R` is its text, `nth_R` its place among that text's starts, `known_R` the number of
    tokens known there, and `left_R` the number of tokens that follow.
    """

    def __init__(self, texts: Sequence[Text], device: torch.device) -> None:
        self.texts = tuple(texts)
        self.ids_BT = send(pad_sequence([torch.tensor(text.ids) for text in texts], batch_first=True), device)
        # Round starts are flattened text by text; their columns go to the device in one transfer.
        rounds_B = torch.tensor([text.rounds for text in texts])
        text_R = torch.repeat_interleave(rounds_B)
        nth_R = torch.arange(len(text_R)) - (rounds_B.cumsum(0) - rounds_B)[text_R]
        known_R = torch.tensor([text.start for text in texts])[text_R] + nth_R
        left_R = rounds_B[text_R] - nth_R
        self.text_R, self.nth_R, self.known_R, self.left_R = send(torch.stack([text_R, nth_R, known_R, left_R]), device)

    @property
    def rounds(self) -> int:
        """Number R of round starts of all texts."""
        return len(self.text_R)

    def pick(self, x_BTX: Tensor, offset: int) -> Tensor:
        """Rows [R, ...] of x at `offset` positions after the first token that is not known."""
        return x_BTX[self.text_R, self.known_R + offset]

    def next_tokens(self, ahead: int) -> tuple[Tensor, Tensor]:
        """Tokens [R] that follow the known ones and `ahead` more, and whether the text has such; else any token."""
        at_R = (self.known_R + ahead).clamp(max=self.ids_BT.shape[1] - 1)
        return self.ids_BT[self.text_R, at_R], self.left_R > ahead

    def ahead(self, x_R: Tensor, count: int, filler: float) -> Tensor:
        """Values [R, K] of each start and of the starts after it; the filler where the text has no more."""
        # A sliding window over all starts would run into the next text; `inside` masks that.
        padded = torch.cat([x_R, x_R.new_full((count,), filler)])
        inside_RK = self.left_R[:, None] > torch.arange(count, device=x_R.device)
        return torch.where(inside_RK, padded.unfold(0, count, 1)[: len(x_R)], filler)

    def places(self, offset: int) -> Tensor:
        """Indexes [B, M] into rows of the positions that `pick` takes, M >= 1; any where a text has fewer than M."""
        # Texts with fewer starts repeat places past their own, which `unplaced` drops.
        most = max(1, *(text.rounds for text in self.texts))
        first_B = torch.tensor([text.start + offset for text in self.texts])
        places_BM = (first_B[:, None] + torch.arange(most)).clamp(max=self.ids_BT.shape[1] - 1)
        return send(places_BM, self.ids_BT.device)

    def unplaced(self, x_BMX: Tensor) -> Tensor:
        """Rows [R, ...] of values that were computed at `places`."""
        return x_BMX[self.text_R, self.nth_R]

    def groups(self, pairs: int, most: int) -> list[slice]:
        """Slices of the texts, each with at most `most` pairs of query and key at `pairs` a text; at least one text."""
        step = max(1, most // max(pairs, 1))
        return [slice(start, start + step) for start in range(0, len(self.texts), step)]

    def first_places(self, vocab_size: int) -> Tensor:
        """First place of each token in each row, int32 [B, V]; T where it does not occur.

        Padding counts too: it lies behind everything that is known, so `seen` never marks it.
        """
        device, (batch, longest) = self.ids_BT.device, self.ids_BT.shape
        at_BT = torch.arange(longest, dtype=torch.int32, device=device).expand(batch, -1)
        first_BV = torch.full((batch, vocab_size), longest, dtype=torch.int32, device=device)
        return first_BV.scatter_reduce_(1, self.ids_BT, at_BT, "amin")

    def seen(self, first_BV: Tensor, rows: slice, ahead: int) -> Tensor:
        """Marks [N, V] of the tokens that occur in the known ones and `ahead` more, at some round starts."""
        seen_NV: Tensor = first_BV[self.text_R[rows]] < (self.known_R[rows] + ahead)[:, None]
        return seen_NV

    def documents(self, some: slice) -> Documents:
        """Document layout of some texts, one document a row."""
        return Documents.rows(self.ids_BT[some])
