"""Prompt lookup against a plain rescan of the whole text."""

from typing import Literal
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftforge.errors import InputError
from draftforge.specdec.models import States
from draftforge.specdec.proposers.base import UNRANKED, Ask, Texts
from draftforge.specdec.proposers.prompt_lookup import PromptLookup, copies
from draftforge.specdec.replay.packing import Pack, Text
from draftforge.specdec.sampling_settings import SamplingSettings

GREEDY = SamplingSettings()
STATES = States(torch.zeros(1, 1, 1), None)
texts = st.lists(st.integers(1, 3), min_size=1, max_size=24)
ngrams = st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted)
Occurrence = Literal["last", "first"]
occurrences = st.sampled_from(["last", "first"])


def rescan(ids: list[int], count: int, min_ngram: int, max_ngram: int, occurrence: Occurrence) -> list[int]:
    """The draft by its definition: look for ever shorter suffixes, place by place from one end, and copy."""
    for n in range(min(max_ngram, len(ids)), min_ngram - 1, -1):
        places = range(len(ids) - n)
        for place in places if occurrence == "first" else reversed(places):
            if ids[place : place + n] == ids[-n:]:
                if occurrence == "first":
                    return ids[place + n :][:count]
                text = list(ids)
                for source in range(place + n, place + n + count):
                    text.append(text[source])
                return text[len(ids) :]
    return []


def started(lookup: PromptLookup, *rows: list[int]) -> PromptLookup:
    lookup.reserve(len(rows), 160, 8)
    lookup.begin(torch.arange(len(rows)), Texts.of(rows), STATES)
    return lookup


def proposed(lookup: PromptLookup, *limits: int) -> list[list[int]]:
    draft = lookup.propose(Ask(torch.tensor(limits), max(limits), [GREEDY] * len(limits), None, None))
    tree = draft.tree
    counts = tree.candidate_BN.sum(1).tolist()
    assert draft.q_BNV is None and draft.chain and tree.drawn == "deterministic"
    assert tree.tokens_BN.dtype == torch.int64
    assert tree.tokens_BN.shape == (len(limits), max(counts)) and tree.depth == max(counts)
    assert all(not row[count:].any() for row, count in zip(tree.tokens_BN, counts))
    return [row[:count].tolist() for row, count in zip(tree.tokens_BN, counts)]


@given(prompt=texts, rounds=st.lists(texts, max_size=4), limit=st.integers(0, 5), ngram=ngrams, occurrence=occurrences)
def test_drafts_what_a_rescan_finds(
    prompt: list[int], rounds: list[list[int]], limit: int, ngram: list[int], occurrence: Occurrence
) -> None:
    lookup = started(PromptLookup(ngram[1], ngram[0], occurrence), prompt)
    known = list(prompt)
    for emitted in [*rounds, []]:
        assert proposed(lookup, limit) == [rescan(known, limit, ngram[0], ngram[1], occurrence)]
        lookup.observe(Texts.of([emitted]), STATES)
        known += emitted


@given(ids=texts, start=st.integers(1, 24), count=st.integers(1, 5), ngram=ngrams, occurrence=occurrences)
def test_trace_tells_what_each_round_would_have_drafted(
    ids: list[int], start: int, count: int, ngram: list[int], occurrence: Occurrence
) -> None:
    start = min(start, len(ids))
    other = Text(ids[::-1], 1)
    pack = Pack([other, Text(ids, start), other], torch.device("cpu"))
    trace = PromptLookup(ngram[1], ngram[0], occurrence).trace(pack, count, GREEDY, STATES)
    own = slice(other.rounds, other.rounds + len(ids) - start)
    assert trace.rank_RK.shape == trace.q_RK.shape == (pack.rounds, count)
    hit_TK = trace.rank_RK[own] == 0
    assert torch.equal(trace.q_RK[own], hit_TK.float()) and bool((trace.rank_RK[own][~hit_TK] == UNRANKED).all())
    assert trace.offered_R is not None
    for row, known in enumerate(range(start, len(ids))):
        draft = rescan(ids[:known], count, ngram[0], ngram[1], occurrence)
        answer = ids[known : known + count]
        agrees = 0
        while agrees < min(len(draft), len(answer)) and draft[agrees] == answer[agrees]:
            agrees += 1
        assert int(trace.offered_R[own][row]) == len(draft)
        assert hit_TK[row, :agrees].all()
        assert not hit_TK[row, agrees : agrees + 1].any()
        assert not hit_TK[row, len(answer) :].any()


def test_the_longest_then_the_most_recent_occurrence_wins() -> None:
    assert proposed(started(PromptLookup(), [1, 2, 3, 9, 2, 3, 8, 1, 2, 3]), 1) == [[9]]
    assert proposed(started(PromptLookup(max_ngram=2), [1, 2, 3, 9, 2, 3, 8, 1, 2, 3]), 1) == [[8]]


def test_the_first_occurrence_is_copied_up_to_the_end_of_the_text() -> None:
    text = [1, 2, 3, 9, 2, 3, 8, 1, 2, 3]
    assert proposed(started(PromptLookup(max_ngram=2, occurrence="first"), text), 3) == [[9, 2, 3]]
    assert proposed(started(PromptLookup(occurrence="first"), [5, 7, 7]), 4) == [[7]]


def test_a_loop_is_drafted_as_a_loop() -> None:
    assert proposed(started(PromptLookup(), [5, 7, 7]), 4) == [[7, 7, 7, 7]]
    assert proposed(started(PromptLookup(), [1, 2, 1, 2]), 5) == [[1, 2, 1, 2, 1]]


def test_slots_are_apart_padded_and_movable() -> None:
    lookup = started(PromptLookup(), [1, 2, 3], [4, 5, 4], [6, 6])
    assert proposed(lookup, 3, 2, 1) == [[], [5, 4], [6]]
    lookup.move(2, 0)
    lookup.observe(Texts.of([[8, 6], [5]]), STATES)
    assert proposed(lookup, 3, 2) == [[8, 6, 8], [4, 5]]
    lookup.begin(torch.tensor([0]), Texts.of([[1, 2]]), STATES)
    assert proposed(lookup, 3, 0) == [[], []]


def test_a_reused_proposer_forgets_the_last_run() -> None:
    lookup = started(PromptLookup(), [4, 5, 4])
    assert proposed(started(lookup, [9, 4]), 2) == [[]]


@pytest.mark.parametrize(("min_ngram", "max_ngram"), [(0, 3), (4, 3), (-1, -1)])
def test_refuses_ngrams_out_of_order(min_ngram: int, max_ngram: int) -> None:
    with pytest.raises(InputError, match=f"min_ngram {min_ngram}: must be from 1 to max_ngram, {max_ngram}"):
        PromptLookup(max_ngram=max_ngram, min_ngram=min_ngram)


@given(
    rows=st.lists(texts, min_size=1, max_size=3),
    limit=st.integers(0, 5),
    ngram=ngrams,
    occurrence=occurrences,
)
@settings(max_examples=25, deadline=None)
def test_the_kernel_finds_the_same(rows: list[list[int]], limit: int, ngram: list[int], occurrence: Occurrence) -> None:
    """In Triton's interpreter where there is no GPU."""
    matching = pytest.importorskip("draftforge.specdec.kernels.ngram_match")
    lookup = started(PromptLookup(ngram[1], ngram[0], occurrence), *rows)
    limits_B = torch.tensor([limit, 2, 0][: len(rows)])
    given = lookup._ids_SL, lookup._counts_S, limits_B, lookup._ngrams, occurrence == "first", 5
    expected = copies(*given)
    with patch.object(matching, "_BLOCK", 8):
        found = matching.copy_after_suffix(*given)
    assert all(map(torch.equal, found, expected))
