"""Prompt lookup (n-gram matching): drafts what followed an earlier occurrence of the text's last tokens.

Training-free and deterministic.

Shapes: S slots of L places, B active slots, K drafted tokens, E tokens that a round emits, T places of the longest
text, or round starts of one text, R of all.
"""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import InputError
from ..cuda_graphs import send
from ..kv_cache import runs_triton
from ..models import States
from ..replay.packing import Pack
from ..sampling_settings import SamplingSettings
from .base import UNRANKED, Ask, Draft, Texts, Trace
from .text_table import TextTable
from .tree_shape import Drawn, TreeShape


class PromptLookup(TextTable):
    """Prompt-lookup proposer: copies what follows an earlier occurrence of the longest repeated suffix, of max_ngram
    tokens or fewer. It looks on the device, where the texts are, so that a round waits for nothing.

    `occurrence` "last": the most recent one, and a copy that reaches the end of the text goes on with itself, so a
    text in a loop is drafted as a loop. "first": the first one, and the copy ends where the text does; that is what
    vLLM's `ngram` drafts with max_ngram as prompt_lookup_max and min_ngram as prompt_lookup_min. Without a repeated
    suffix of at least min_ngram tokens nothing is drafted.
    """

    replayable = True
    nested = True
    drawn: Drawn = "deterministic"
    chain = True

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1, occurrence: Literal["last", "first"] = "last") -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise InputError(f"prompt lookup: min_ngram {min_ngram}: must be from 1 to max_ngram, {max_ngram}")
        self._ngrams = range(min_ngram, max_ngram + 1)
        self._first = occurrence == "first"
        super().__init__()

    def most_nodes(self, levels: int) -> int:
        return levels

    def shape(self, levels: int) -> TreeShape:
        return TreeShape.chain(levels)

    def propose(self, ask: Ask) -> Draft:
        counts_B = self._counts_S[: len(ask.limits_B)]
        found = copies(self._ids_SL, counts_B, ask.limits_B, self._ngrams, self._first, ask.levels)
        copied = Texts(*found).cut()
        return Draft.of_chains(copied.ids_BT, copied.counts_B, self.drawn)

    def trace(self, pack: Pack, count: int, sampling: SamplingSettings, states: States | None) -> Trace:
        """Trace from one walk over each text, on the host."""
        hits, offers = zip(*(self._trace(*text, count) for text in pack.texts))
        hit_RK, offered_R = (send(torch.cat(part), pack.ids_BT.device) for part in (hits, offers))
        return Trace(torch.where(hit_RK, 0, UNRANKED), hit_RK.float(), offered_R)

    def _trace(self, ids: list[int], start: int, count: int) -> tuple[Tensor, Tensor]:
        """Hits [T, K], drafted tokens that equal the text's, and the number of drafted tokens [T], at each round start.

        Where all earlier drafted tokens equal the text's, a copy that goes on with itself copies the text, so every
        depth compares two places of `ids`.
        """
        # Rows are round starts, columns levels of the draft.
        source_T1 = torch.tensor(self._sources(ids, start), dtype=torch.long)[:, None]
        known_T1, depth_K = torch.arange(start, max(start, len(ids)))[:, None], torch.arange(count)
        answer_TK = known_T1 + depth_K

        # A "first" copy ends where the known text does; a "last" one goes on with itself.
        offered_TK = (source_T1 >= 0).expand_as(answer_TK)
        if self._first:
            offered_TK = offered_TK & (source_T1 + depth_K < known_T1)

        # Zeros pad the text so that every place can be read; those past its end are no hits.
        text = torch.tensor([*ids, *[0] * count])
        hit_TK = (text[source_T1.clamp(min=0) + depth_K] == text[answer_TK]) & (answer_TK < len(ids)) & offered_TK
        return hit_TK, offered_TK.sum(1)

    def _sources(self, ids: list[int], start: int) -> list[int]:
        """Positions that the rounds with start..len(ids)-1 known tokens copy from; -1: nothing is drafted."""
        text = _Text(self._ngrams, self._first)
        text.extend(ids[:start])
        sources: list[int] = []
        for token in ids[start:]:
            source = text.source()
            sources.append(-1 if source is None else source)
            text.extend([token])
        return sources


def copies(
    ids_SL: Tensor, counts_B: Tensor, limits_B: Tensor, ngrams: range, first: bool, count: int
) -> tuple[Tensor, Tensor]:
    """What `PromptLookup` drafts after texts: tokens [B, K], zeros past their counts [B]; K is `count`."""
    if runs_triton(counts_B.device):
        from ..kernels.ngram_match import copy_after_suffix

        return copy_after_suffix(ids_SL, counts_B, limits_B, ngrams, first, count)
    # 1) Length of the suffix that ends at each place, too: one token more of it a step, from the last backwards.
    known = Texts(ids_SL[: len(counts_B)], counts_B).cut()
    ids_BT, end_B1 = known.ids_BT, counts_B[:, None] - 1
    place_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
    same_BT = place_T < end_B1
    run_BT = torch.zeros_like(ids_BT)
    for back in range(ngrams.stop - 1):
        mine_B1 = ids_BT.gather(1, (end_B1 - back).clamp(min=0))
        same_BT = same_BT & (F.pad(ids_BT, (back, 0))[:, : len(place_T)] == mine_B1)
        same_BT = same_BT & (place_T >= back) & (end_B1 >= back)
        run_BT = run_BT + same_BT
    # 2) The longest; of equals the last place, or the first.
    preferred_T = place_T.flip(0) if first else place_T
    run_BT = torch.where(run_BT >= ngrams.start, run_BT, 0)
    best_B1 = (run_BT * len(place_T) + preferred_T).argmax(1, keepdim=True)
    found_B = run_BT.gather(1, best_B1)[:, 0] > 0
    # 3) What followed there: to the text's end, or on with itself.
    source_B1, step_K = best_B1 + 1, torch.arange(count, device=ids_BT.device)
    left_B1 = (counts_B[:, None] - source_B1).clamp(min=1)
    drafted_B = torch.minimum(limits_B, left_B1[:, 0]) if first else limits_B
    drafted_B = drafted_B * found_B
    at_BK = source_B1 + step_K % left_B1
    tokens_BK = ids_BT.gather(1, at_BK.clamp(max=len(place_T) - 1))
    return torch.where(step_K < drafted_B[:, None], tokens_BK, 0), drafted_B


class _Text:
    """N-gram index of one slot's known tokens, built as they come: a round is a few look-ups, whatever the length."""

    def __init__(self, ngrams: range, first: bool) -> None:
        self._ngrams, self._first = ngrams, first
        self._ids: list[int] = []
        # n-gram -> position that followed the occurrence to copy from
        self._after: dict[tuple[int, ...], int] = {}

    def extend(self, ids: Sequence[int]) -> None:
        # A suffix is indexed when the token after it comes, so that a text's end never finds itself.
        for token in ids:
            for suffix in self._suffixes():
                if not (self._first and suffix in self._after):
                    self._after[suffix] = len(self._ids)
            self._ids.append(token)

    def source(self) -> int | None:
        """The position to copy from: after an earlier occurrence of the longest suffix that has one."""
        return next((self._after[suffix] for suffix in self._suffixes() if suffix in self._after), None)

    def _suffixes(self) -> list[tuple[int, ...]]:
        """The n-grams that the text ends with, longest first."""
        return [tuple(self._ids[-n:]) for n in reversed(self._ngrams) if n <= len(self._ids)]
