"""The reduced draft vocabulary: what it always holds, what else it picks, and how far it can go."""

import pytest
import torch
from torch import Tensor

from draftforge.data.store import Capture
from draftforge.errors import InputError
from draftforge.eval.speedup import Gain
from draftforge.specdec.drafts.base import DraftModule
from draftforge.specdec.drafts.eagle3 import Eagle3Draft
from draftforge.specdec.targets import Target
from draftforge.train import vocabulary
from draftforge.train.families.eagle3 import Eagle3Family
from draftforge.train.settings import Eagle3Settings
from draftforge.train.vocabulary import Tried, choose, count_tokens, coverage, fastest, reduced, try_sizes


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


def test_a_reduced_vocabulary_says_how_far_it_can_take_a_draft(target: Target, tiny_capture: Capture) -> None:
    def never(draft_ids: Tensor | None) -> DraftModule:
        raise AssertionError("a size that is named is not measured")

    assert reduced(None, tiny_capture, 3, never, target) == (None, {})
    counts = count_tokens(tiny_capture)
    ids, lineage = reduced(40, tiny_capture, 3, never, target)
    assert ids is not None and torch.equal(ids, choose(counts, 40, tiny_capture.special_ids | tiny_capture.stop_ids))
    assert lineage == {"coverage": coverage(counts, ids)}


def zipf(size: int) -> Tensor:
    """Counts of tokens as texts have them: the n-th most frequent one 1 / n as often as the first."""
    return (1e6 / torch.arange(1, size + 1, dtype=torch.float64)).floor()


def test_halves_are_tried_down_to_a_thousand_tokens() -> None:
    counts, asked = zipf(10_001), list[int | None]()

    def gain(draft_ids: Tensor | None) -> Gain:
        asked.append(None if draft_ids is None else len(draft_ids))
        return Gain(0.0, 1.0 + 1e-4 * (asked[-1] or 10_001))

    judged = counts.flip(0)  # other answers, in which the tokens that train counted least are the most frequent
    tried = try_sizes(counts, judged, {7}, 3, gain)
    assert asked == [None, 5001, 2501, 1251]
    assert [one.size for one in tried] == [10_001, 5001, 2501, 1251]
    for one in tried:
        covered = float(judged[: one.size].sum() / judged.sum())
        alpha = 0.75 * covered
        tau = 1 + alpha + alpha**2 + alpha**3
        assert one.coverage == pytest.approx(covered)
        assert one.speedup == pytest.approx(tau / (1 + 1e-4 * one.size))
    assert [one.size for one in try_sizes(zipf(300), zipf(300), {7}, 3, gain)] == [300]  # a small one is tried whole


def test_the_largest_of_equally_fast_sizes_is_taken() -> None:
    tried = [Tried(8000, 1.0, 1.50), Tried(4000, 0.99, 1.58), Tried(2000, 0.98, 1.59), Tried(1000, 0.9, 1.4)]
    assert fastest(tried).size == 4000
    assert fastest(tried[:1]).size == 8000


def test_rounds_of_an_untrained_draft_are_measured(
    target: Target, tiny_capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the tiny target, whose whole vocabulary is below a thousand tokens, and with halves allowed."""
    settings = Eagle3Settings(draft_vocabulary="auto", draft_tokens=2)
    whole = Eagle3Family.start(settings, 1, tiny_capture, lambda: target)
    assert isinstance(whole.draft, Eagle3Draft) and not whole.draft.config.draft_vocab_size < target.vocab_size
    assert [one["size"] for one in whole.extra["tried_vocabularies"]] == [target.vocab_size]

    monkeypatch.setattr(vocabulary, "_SMALLEST", 100)
    monkeypatch.setattr(vocabulary, "fastest", lambda tried: tried[-1])
    half = Eagle3Family.start(settings, 1, tiny_capture, lambda: target)
    tried = half.extra["tried_vocabularies"]
    assert [one["size"] for one in tried] == [300, 150] and all(one["speedup"] > 0 for one in tried)
    always = tiny_capture.special_ids | tiny_capture.stop_ids
    assert isinstance(half.draft, Eagle3Draft)
    assert torch.equal(half.draft.draft_ids, choose(count_tokens(tiny_capture), 150, always))
    named = settings.model_copy(update={"draft_vocabulary": 150})
    plain = Eagle3Family.start(named, 1, tiny_capture, lambda: target)
    for ours, theirs in zip(half.draft.state_dict().values(), plain.draft.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
