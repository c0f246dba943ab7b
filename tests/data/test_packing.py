"""Samples side by side: every one has a place, rows are full, and nothing is longer than it must be."""

import random
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftforge.data.batches import buckets, pack


@given(st.lists(st.integers(1, 200), min_size=1, max_size=40), st.integers(0, 500))
@settings(max_examples=150)
def test_every_sample_has_one_place_and_fits(lengths: list[int], row_tokens: int) -> None:
    rows, tokens = pack(lengths, row_tokens)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert max(sum(lengths[index] for index in row) for row in rows) == tokens
    assert sum(lengths) >= 0.95 * len(rows) * tokens
    assert pack(lengths, row_tokens) == (rows, tokens)


def test_padding_is_rare() -> None:
    source = random.Random(0)
    lengths = [source.randint(20, 550) for _ in range(230)]
    for row_tokens in (0, 2048, 8192):
        rows, tokens = pack(lengths, row_tokens)
        assert 1 - sum(lengths) / (len(rows) * tokens) < 0.05
        assert tokens >= 0.9 * row_tokens


def test_like_lengths_keep_a_row_each() -> None:
    assert pack([30, 31, 29]) == ([[0], [1], [2]], 31)
    assert pack([30, 10, 20]) == ([[0], [1, 2]], 30)


def test_nothing_to_pack() -> None:
    with pytest.raises(ValueError, match="no samples"):
        pack([])


def test_many_short_samples_are_packed_in_no_time() -> None:
    """Lengths of which no two fit a row of the longest: the hardest to fill up."""
    source = random.Random(0)
    lengths = [source.randint(51, 100) for _ in range(2000)]
    begun = time.process_time()
    rows, tokens = pack(lengths)
    assert time.process_time() - begun < 5.0  # by trying each row in turn: 18
    assert sum(lengths) >= 0.95 * len(rows) * tokens


@given(st.lists(st.integers(1, 90), max_size=40), st.integers(1, 400))
def test_buckets_hold_samples_of_about_one_length(lengths: list[int], tokens: int) -> None:
    groups = buckets(lengths, tokens)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    ordered = [lengths[index] for group in groups for index in group]
    assert ordered == sorted(lengths, reverse=True)
    for group, following in pairwise(groups):
        longest = lengths[group[0]]
        assert len(group) == 1 or len(group) * longest <= tokens
        assert (len(group) + 1) * longest > tokens and following  # no room for the next
