"""Prompt lookup (n-gram matching): drafts what followed an earlier occurrence of the text's last tokens.

Training-free and deterministic.

Shapes: S slots of L places, B active slots, K drafted tokens, E tokens that a round emits, T places of the longest
text, or round starts of one text, R of all.
"""

from collections import ChainMap
from collections.abc import MutableMapping, Sequence
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
from .tree_shape import Drawn, TreeShape


class PromptLookup:
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
    aux_layers: tuple[int, ...] = ()
    needs_hidden_states = False
    needs_host_sync = False

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1, occurrence: Literal["last", "first"] = "last") -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise InputError(f"prompt lookup: min_ngram {min_ngram}: must be from 1 to max_ngram, {max_ngram}")
        self._ngrams = range(min_ngram, max_ngram + 1)
        self._first = occurrence == "first"
        self._size = (0, 0)
        self._ids_SL = self._counts_S = torch.zeros(0, dtype=torch.long)

    def reserve(self, slots: int, tokens: int, levels: int) -> None:
        # Behind a text there is room for all that a round may emit. Texts are made where the first prompts are.
        self._size = (slots, tokens + levels + 1)
        self._ids_SL = self._counts_S = torch.zeros(0, dtype=torch.long)

    def most_nodes(self, levels: int) -> int:
        return levels

    def shape(self, levels: int) -> TreeShape:
        return TreeShape.chain(levels)

    def begin(self, slots_R: Tensor, known: Texts, states: States) -> None:
        if not len(self._counts_S):
            self._ids_SL = torch.zeros(self._size, dtype=torch.long, device=slots_R.device)
            self._counts_S = torch.zeros(self._size[0], dtype=torch.long, device=slots_R.device)
        self._ids_SL[slots_R, : known.ids_BT.shape[1]] = known.ids_BT
        self._counts_S[slots_R] = known.counts_B

    def propose(self, ask: Ask) -> Draft:
        counts_B = self._counts_S[: len(ask.limits_B)]
        if runs_triton(counts_B.device):
            from ..kernels.ngram_match import copy_after_suffix

            found = copy_after_suffix(self._ids_SL, counts_B, ask.limits_B, self._ngrams, self._first, ask.levels)
        else:
            found = self._copies(counts_B, ask)
        copied = Texts(*found).cut()
        return Draft.of_chains(copied.ids_BT, copied.counts_B, self.drawn)

    def _copies(self, counts_B: Tensor, ask: Ask) -> tuple[Tensor, Tensor]:
        """Drafted tokens [B, K], zeros past their counts [B]."""
        # 1) Length of the suffix that ends at each place, too: one token more of it a step, from the last backwards.
        known = Texts(self._ids_SL[: len(counts_B)], counts_B).cut()
        ids_BT, end_B1 = known.ids_BT, counts_B[:, None] - 1
        place_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        same_BT = place_T < end_B1
        run_BT = torch.zeros_like(ids_BT)
        for back in range(self._ngrams.stop - 1):
            mine_B1 = ids_BT.gather(1, (end_B1 - back).clamp(min=0))
            same_BT = same_BT & (F.pad(ids_BT, (back, 0))[:, : len(place_T)] == mine_B1)
            same_BT = same_BT & (place_T >= back) & (end_B1 >= back)
            run_BT = run_BT + same_BT
        # 2) The longest; of equals the last place, or the first.
        preferred_T = place_T.flip(0) if self._first else place_T
        run_BT = torch.where(run_BT >= self._ngrams.start, run_BT, 0)
        best_B1 = (run_BT * len(place_T) + preferred_T).argmax(1, keepdim=True)
        found_B = run_BT.gather(1, best_B1)[:, 0] > 0
        # 3) What followed there: to the text's end, or on with itself.
        source_B1, step_K = best_B1 + 1, torch.arange(ask.levels, device=ids_BT.device)
        left_B1 = (counts_B[:, None] - source_B1).clamp(min=1)
        drafted_B = torch.minimum(ask.limits_B, left_B1[:, 0]) if self._first else ask.limits_B
        drafted_B = drafted_B * found_B
        at_BK = source_B1 + step_K % left_B1
        tokens_BK = ids_BT.gather(1, at_BK.clamp(max=len(place_T) - 1))
        return torch.where(step_K < drafted_B[:, None], tokens_BK, 0), drafted_B

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


class LookupHelper:
    """Prompt lookup as a cascade's helper (cascade.py), on the host, where a cascade reads what it drafts."""

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        self._ngrams = range(min_ngram, max_ngram + 1)
        self._texts: list[_Text] = []

    def reserve(self, slots: int, tokens: int, levels: int) -> None:
        self._texts = [_Text(self._ngrams, first=False) for _ in range(slots)]

    def begin(self, slots_R: Tensor, known: Texts, states: States) -> None:
        for slot, row in zip(slots_R.tolist(), known.rows):
            self._texts[slot] = _Text(self._ngrams, first=False)
            self._texts[slot].extend(row)

    def observe(self, new: Texts, states: States) -> None:
        for text, emitted in zip(self._texts, new.rows):
            text.extend(emitted)

    def move(self, source: int, destination: int) -> None:
        self._texts[destination] = self._texts[source]

    def guess(self, drafted: Sequence[list[int]], counts: Sequence[int], choose: object) -> list[list[int]]:
        """Copies after each text and what was drafted past it."""
        return [text.copy_after(row, count) for text, row, count in zip(self._texts, drafted, counts)]


class _Text:
    """N-gram index of one slot's known tokens, built as they come: a round is a few look-ups, whatever the length."""

    def __init__(self, ngrams: range, first: bool) -> None:
        self._ngrams, self._first = ngrams, first
        self._ids: list[int] = []
        # n-gram -> position that followed the occurrence to copy from
        self._after: MutableMapping[tuple[int, ...], int] = {}

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

    def copy(self, count: int) -> list[int]:
        """Draft of up to `count` tokens after the text."""
        # Without a repeated suffix nothing is drafted.
        source = self.source()
        if source is None:
            return []

        # "first": what is there, to the end of the text.
        if self._first:
            return self._ids[source : source + count]

        # "last": the copy repeats what stands between source and end.
        period = len(self._ids) - source
        return [self._ids[source + place % period] for place in range(count)]

    def copy_after(self, ahead: Sequence[int], count: int) -> list[int]:
        """Draft of up to `count` tokens, were the text to go on with `ahead`; the text itself stays as it is."""
        # New index entries go to a layer of their own, which is then thrown away with the tokens.
        known, length = self._after, len(self._ids)
        self._after = ChainMap({}, known)
        self.extend(ahead)
        found = self.copy(count)
        self._after = known
        del self._ids[length:]
        return found

    def _suffixes(self) -> list[tuple[int, ...]]:
        """The n-grams that the text ends with, longest first."""
        return [tuple(self._ids[-n:]) for n in reversed(self._ngrams) if n <= len(self._ids)]
