"""A causal LM that reads texts whose ends may be taken back, on a cache of its own and wherever it lies.

Shapes: B active slots, N tokens read at once, R rows of logits a slot, H hidden size, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..cache import KVCache, reads_lengths
from ..models import CausalModel
from ..passes import running, send
from .base import Texts
from .rows import gather_rows


class TextReader:
    """One text a slot: a part that is settled, and what stands past it for now.

    Keys stay as far as a text stays the same, so a token is read again only where the tokens before it have changed.
    How many of a text's first tokens have their keys in the cache is known to the host, where the texts are.
    """

    def __init__(self, lm: CausalModel) -> None:
        self._lm = lm
        self._ids: list[list[int]] = []
        self._settled: list[int] = []
        self._read: list[int] = []  # first tokens of each text that have their keys in the cache

    def reserve(self, slots: int, tokens: int) -> None:
        """Room for so many texts of so many tokens; a longer one makes all be read again, into a larger cache."""
        self._cache = KVCache(slots, max(tokens, 1), self._lm.device)
        self._ids, self._settled, self._read = [[] for _ in range(slots)], [0] * slots, [0] * slots

    def begin(self, slots: Sequence[int], rows: Sequence[list[int]]) -> None:
        """Fresh texts, settled and read at once. One may be empty."""
        for slot, row in zip(slots, rows):
            self._ids[slot], self._settled[slot], self._read[slot] = list(row), len(row), 0
        self._fit()
        slots = [slot for slot in slots if self._ids[slot]]
        if not slots:
            return
        with running(self._lm.device):
            texts = Texts.of([self._ids[slot] for slot in slots], self._lm.device)
            self._lm.states(texts.ids_BT, self._cache.prefill(self._numbers(slots), texts.counts_B))
        for slot in slots:
            self._read[slot] = len(self._ids[slot])

    def extend(self, slot: int, tokens: Sequence[int]) -> None:
        """The settled part goes on with these; what stood past it is gone, but for what equals them."""
        self.look_ahead(slot, tokens)
        self._settled[slot] += len(tokens)

    def look_ahead(self, slot: int, tokens: Sequence[int]) -> None:
        """These stand past the settled part from now on."""
        ids, place = self._ids[slot], self._settled[slot]
        for token in tokens:
            if place == len(ids) or ids[place] != token:
                break
            place += 1
        ids[place:] = tokens[place - self._settled[slot] :]
        self._read[slot] = min(self._read[slot], place)

    def shorten(self, slot: int, tokens: int) -> None:
        """Forget all but the last so many tokens; they are read again, as a text of their own."""
        gone = max(len(self._ids[slot]) - tokens, 0)
        if gone:
            del self._ids[slot][:gone]
            self._settled[slot], self._read[slot] = max(self._settled[slot] - gone, 0), 0

    def move(self, source: int, destination: int) -> None:
        with running(self._lm.device):
            self._cache.lengths_S[source] = self._read[source]
            self._cache.move(source, destination)
        self._ids[destination], self._ids[source] = self._ids[source], []
        self._settled[destination], self._settled[source] = self._settled[source], 0
        self._read[destination], self._read[source] = self._read[source], 0

    def length(self, slot: int) -> int:
        """Tokens of a slot's text, with what stands past its settled part."""
        return len(self._ids[slot])

    def last(self, slot: int, tokens: int) -> list[int]:
        """The last tokens of a slot's text, at most so many."""
        return self._ids[slot][-tokens:]

    def logits(self, tails: Sequence[int]) -> Tensor:
        """Logits [B, R, V] of what follows each of the last `tails[b]` tokens of slot b, R the most of them.

        Reads what was not read yet, in one pass. Instead of padding, a shorter row reads tokens again that stand before
        its new ones. Rows past a slot's tail mean nothing.
        """
        self._fit()
        texts, read = self._ids[: len(tails)], self._read
        width = max(1, *(len(ids) - min(read[slot], len(ids) - tails[slot]) for slot, ids in enumerate(texts)))
        if reads_lengths(self._lm.device):  # its kernel is compiled for every width
            width = min(1 << (width - 1).bit_length(), self._cache.capacity)
        starts = [max(len(ids) - width, 0) for ids in texts]
        first = [len(ids) - start - tail for ids, start, tail in zip(texts, starts, tails)]
        rows = Texts.of([[*ids[start:], 0][:width] for ids, start in zip(texts, starts)], self._lm.device)
        read[: len(tails)] = [len(ids) for ids in texts]
        with running(self._lm.device):
            self._cache.lengths_S[: len(tails)] = self._numbers(starts)
            hidden_BNH = self._lm.states(rows.wide(width).ids_BT, self._cache.extend(len(tails), width)).hidden_BTH
            index_BR = self._numbers(first)[:, None] + torch.arange(max(tails), device=self._lm.device)
            return self._lm.logits(gather_rows(hidden_BNH, index_BR.clamp(0, width - 1)))

    def _numbers(self, values: Sequence[int]) -> Tensor:
        return send(torch.tensor(values), self._lm.device)

    def _fit(self) -> None:
        longest = max(map(len, self._ids))
        if longest > self._cache.capacity:
            self._cache = KVCache(len(self._ids), max(longest, 2 * self._cache.capacity), self._lm.device)
            self._read = [0] * len(self._ids)
