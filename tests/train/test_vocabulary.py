"""The reduced draft vocabulary: what it always holds, what else it picks, and how far it can go."""

import pytest
import torch

from draftforge.data.store import Capture
from draftforge.errors import InputError
from draftforge.train.vocabulary import choose, count_tokens, coverage, reduced


def test_counts_are_those_of_supervised_tokens(tiny_capture: Capture) -> None:
    counts = count_tokens(tiny_capture)
    answers = [token for sample in tiny_capture.samples("train") for token in sample.answer_ids]
    assert counts.floor().tolist() == torch.bincount(torch.tensor(answers), minlength=300).tolist()


def test_tokens_never_seen_are_ranked_by_the_teachers_mass(tiny_capture: Capture) -> None:
    counts = count_tokens(tiny_capture)
    never = (counts < 1).nonzero()[:, 0]
    assert len(never) > 0 and float(counts[never].max()) > 0


def test_special_and_stop_tokens_are_always_kept() -> None:
    counts = torch.tensor([5.0, 0.0, 9.0, 5.0, 7.0, 0.0])
    assert choose(counts, 4, {1, 5}).tolist() == [1, 2, 4, 5]
    assert choose(counts, 5, {1}).tolist() == [0, 1, 2, 3, 4]
    assert choose(counts, 3, set()).tolist() == [0, 2, 4]  # the lower id wins a tie
    assert choose(counts, 6, {1}).tolist() == list(range(6))


def test_coverage_is_the_share_of_supervised_tokens() -> None:
    counts = torch.tensor([5.0, 0.5, 3.0, 2.0])
    assert coverage(counts, torch.tensor([0, 2])) == pytest.approx(0.8)
    assert coverage(counts, torch.arange(4)) == 1.0
    assert coverage(torch.zeros(3), torch.tensor([0])) == 0.0


def test_sizes_that_cannot_be() -> None:
    with pytest.raises(InputError, match="draft_vocabulary 9: must not exceed the target's vocabulary of 4"):
        choose(torch.zeros(4), 9, set())
    with pytest.raises(InputError, match="draft_vocabulary 1: must hold the 2 special and stop tokens"):
        choose(torch.zeros(4), 1, {0, 3})


def test_a_reduced_vocabulary_says_how_far_it_can_take_a_draft(tiny_capture: Capture) -> None:
    assert reduced(None, tiny_capture) == (None, {})
    counts = count_tokens(tiny_capture)
    ids, lineage = reduced(40, tiny_capture)
    assert ids is not None and torch.equal(ids, choose(counts, 40, tiny_capture.special_ids | tiny_capture.stop_ids))
    assert lineage == {"coverage": coverage(counts, ids)}
