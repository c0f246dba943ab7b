"""Prompt lookup (n-gram matching): drafts what followed an earlier occurrence of the text's last tokens.

Training-free and deterministic.

Shapes: B active slots, K drafted tokens, T round starts of one text, R of all.
"""

from collections import ChainMap
from collections.abc import MutableMapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from ...errors import InputError
from ..cuda_graphs import send
from ..models import States
from ..replay.packing import Pack
from ..sampling_settings import SamplingSettings
from .base import UNRANKED, Ask, Draft, Texts, Trace
from .tree_shape import Drawn, TreeShape


class PromptLookup:
    """Prompt-lookup proposer: copies what follows an earlier occurrence of the longest repeated suffix, of max_ngram
    tokens or fewer.

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
    needs_host_sync = True

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1, occurrence: Literal["last", "first"] = "last") -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise InputError(f"prompt lookup: min_ngram {min_ngram}: must be from 1 to max_ngram, {max_ngram}")
        self._ngrams = range(min_ngram, max_ngram + 1)
        self._first = occurrence == "first"
        self._texts: list[_Text] = []
        self._device = torch.device("cpu")

    def reserve(self, slots: int, tokens: int, levels: int) -> None:
        self._texts = [_Text(self._ngrams, self._first) for _ in range(slots)]

    def most_nodes(self, levels: int) -> int:
        return levels

    def shape(self, levels: int) -> TreeShape:
        return TreeShape.chain(levels)

    def begin(self, slots_R: Tensor, known: Texts, states: States) -> None:
        self._device = slots_R.device
        for slot, row in zip(slots_R.tolist(), known.rows):
            self._texts[slot] = _Text(self._ngrams, self._first)
            self._texts[slot].extend(row)

    def propose(self, ask: Ask) -> Draft:
        copies = [text.copy(limit) for text, limit in zip(self._texts, ask.limits_B.tolist())]
        copied = Texts.of(copies, self._device)
        return Draft.of_chains(copied.ids_BT, copied.counts_B, self.drawn)

    def guess(self, drafted: Sequence[list[int]], counts: Sequence[int], choose: object) -> list[list[int]]:
        """Guesses as a cascade's helper (cascade.py): copies after each text and what was drafted past it."""
        return [text.copy_after(row, count) for text, row, count in zip(self._texts, drafted, counts)]

    def observe(self, new: Texts, states: States) -> None:
        for text, emitted in zip(self._texts, new.rows):
            text.extend(emitted)

    def move(self, source: int, destination: int) -> None:
        self._texts[destination] = self._texts[source]

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
