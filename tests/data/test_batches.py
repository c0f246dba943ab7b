"""Batching: the same steps for every split over ranks, exact resumption, and tensors that line up with signals."""

import itertools
import json
import random
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftforge.data.batches import BatchPlan, OptimizerStep, Position, buckets, collate, pack
from draftforge.data.teacher_logprobs import Signals
from draftforge.errors import InputError
from draftforge.specdec.kernels.document_mask import PADDING


@dataclass
class Tokens:
    """A sample as batching sees it."""

    prompt_ids: list[int]
    answer_ids: list[int]


def make_samples(lengths: list[tuple[int, int]]) -> list[Tokens]:
    return [
        Tokens(list(range(1, prompt + 1)), [100 * number + i for i in range(answer)])
        for number, (prompt, answer) in enumerate(lengths, start=1)
    ]


def take(plan: BatchPlan, count: int, start: Position = Position()) -> list[OptimizerStep]:  # noqa: B008 - immutable
    return list(itertools.islice(plan.steps(start), count))


LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 60)), min_size=1, max_size=60)


@given(LENGTHS, st.integers(1, 400), st.integers(0, 3), st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=80)
def test_the_step_is_the_same_for_every_split(
    lengths: list[tuple[int, int]], tokens: int, seed: int, world_size: int, accumulation: int
) -> None:
    samples = make_samples(lengths)
    alone = take(BatchPlan(samples, tokens, seed), 12)
    plans = [BatchPlan(samples, tokens, seed, world_size, rank, accumulation) for rank in range(world_size)]
    for whole, *parts in zip(alone, *(take(plan, 12) for plan in plans), strict=True):
        assert all(part._replace(micro_batches=[]) == whole._replace(micro_batches=[]) for part in parts)
        assert all(len(part.micro_batches) == accumulation for part in parts)
        dealt = [index for part in parts for micro in part.micro_batches for index in micro]
        assert Counter(dealt) == Counter(whole.samples)
        assert whole.supervised == sum(len(samples[index].answer_ids) for index in whole.samples)


@given(LENGTHS, st.integers(1, 400), st.integers(0, 3))
@settings(max_examples=80)
def test_every_epoch_visits_each_sample_once(lengths: list[tuple[int, int]], tokens: int, seed: int) -> None:
    samples = make_samples(lengths)
    plan = BatchPlan(samples, tokens, seed)
    steps = take(plan, plan.steps_per_epoch(0) + plan.steps_per_epoch(1))
    first, second = steps[: plan.steps_per_epoch(0)], steps[plan.steps_per_epoch(0) :]
    for epoch in (first, second):
        assert all(step.samples for step in epoch)
        assert sorted(index for step in epoch for index in step.samples) == list(range(len(samples)))


@given(LENGTHS, st.integers(1, 400), st.integers(0, 30))
@settings(max_examples=80)
def test_resumes_exactly_from_a_position_kept_as_json(lengths: list[tuple[int, int]], tokens: int, stop: int) -> None:
    samples = make_samples(lengths)
    steps = take(BatchPlan(samples, tokens, 7), stop + 10)
    start = Position() if stop == 0 else Position(*json.loads(json.dumps(steps[stop - 1].after)))
    assert take(BatchPlan(samples, tokens, 7), 10, start) == steps[stop:]


def test_steps_are_near_the_size_asked_for_and_mostly_text() -> None:
    rng = torch.Generator().manual_seed(0)
    lengths = [(int(p), int(a)) for p, a in torch.randint(5, 300, (800, 2), generator=rng)]
    plan = BatchPlan(make_samples(lengths), 4000, seed=0, world_size=2, rank=1, accumulation=2)
    sizes = torch.tensor([float(step.tokens) for step in take(plan, plan.steps_per_epoch())])
    assert abs(sizes.mean() - 4000) < 200
    assert sizes.std() < 400
    assert plan.padding_share() < 0.05
    long_rows = BatchPlan(make_samples(lengths), 4000, 0, 2, 1, 2, row_tokens=500)
    assert long_rows.padding_share() < 0.05
    assert [step.samples for step in take(long_rows, 5)] == [step.samples for step in take(plan, 5)]


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_get_alike_of_tokens_and_of_supervised_ones(world_size: int) -> None:
    """Where answers are anything from a tenth to all of a sample: the mean over steps of the fullest rank's share."""
    rng = torch.Generator().manual_seed(0)
    lengths = [(int(p), int(a)) for p, a in torch.randint(5, 300, (800, 2), generator=rng)]
    samples = make_samples(lengths)
    plans = [BatchPlan(samples, 8000 * world_size, 0, world_size, rank, 2) for rank in range(world_size)]
    for sizes in ([prompt + answer for prompt, answer in lengths], [answer for _, answer in lengths]):
        shares = []
        for parts in zip(*(take(plan, 20) for plan in plans), strict=True):
            loads = [sum(sizes[index] for micro in part.micro_batches for index in micro) for part in parts]
            shares.append(max(loads) * world_size / sum(loads))
        assert sum(shares) / len(shares) < 1.03


def test_epochs_and_seeds_differ() -> None:
    samples = make_samples([(3, i % 17 + 1) for i in range(50)])
    one, two = BatchPlan(samples, 60, seed=1), BatchPlan(samples, 60, seed=2)
    assert take(one, 5) == take(BatchPlan(samples, 60, seed=1), 5)
    assert [s.samples for s in take(one, 5)] != [s.samples for s in take(two, 5)]
    assert [s.samples for s in take(one, 5)] != [s.samples for s in take(one, 5, Position(1, 0))]


def test_no_samples_is_an_input_error() -> None:
    with pytest.raises(InputError, match="training samples: 0"):
        BatchPlan([], 100, seed=0)


def make_signals(sample: Tokens, number: int) -> Signals:
    n = len(sample.answer_ids)
    logp = torch.arange(n) + 1000.0 * number
    ids = torch.tensor(sample.answer_ids, dtype=torch.int32)[:, None]
    return Signals(logp, ids.expand(n, 3), torch.zeros(n, 3), torch.zeros(n), ids.expand(n, 2), torch.zeros(n, 2))


@given(LENGTHS.map(lambda lengths: lengths[:6]), st.integers(0, 200))
@settings(max_examples=80)
def test_rows_predict_the_answer_tokens_that_their_signals_belong_to(
    lengths: list[tuple[int, int]], row_tokens: int
) -> None:
    samples = make_samples(lengths)
    batch = collate(samples, [make_signals(sample, number) for number, sample in enumerate(samples)], row_tokens)
    assert batch.signals is not None
    width = batch.ids_BT.shape[1]
    predicted = batch.ids_BT.flatten()[batch.positions_N + 1]
    assert torch.equal(predicted, batch.signals.topk_ids_nk[:, 0].long())
    assert batch.supervised == len(batch.positions_N) == sum(len(sample.answer_ids) for sample in samples)
    text = torch.zeros_like(batch.ids_BT, dtype=torch.bool)
    for number, (sample, place) in enumerate(zip(samples, batch.spans, strict=True)):
        start, end = batch.offsets[number], batch.offsets[number + 1]
        first = place.row * width + place.start + len(sample.prompt_ids) - 1
        at = slice(place.start, place.start + place.length)
        assert batch.positions_N[start:end].tolist() == list(range(first, first + end - start))
        assert batch.signals.logp_n[start:end].tolist() == [1000.0 * number + i for i in range(end - start)]
        assert batch.ids_BT[place.row, at].tolist() == sample.prompt_ids + sample.answer_ids
        assert batch.documents.positions_BT[place.row, at].tolist() == list(range(place.length))
        assert not text[place.row, at].any() and len(set(batch.documents.document_BT[place.row, at].tolist())) == 1
        text[place.row, at] = True
    assert (batch.ids_BT[~text] == 0).all() and (batch.documents.document_BT[~text] == PADDING).all()
    assert batch.documents.packed == (len(batch.ids_BT) < len(samples))
    assert batch.padding_share == pytest.approx(1 - sum(map(sum, lengths)) / batch.ids_BT.numel())


def test_an_empty_micro_batch_has_one_unsupervised_row() -> None:
    batch = collate([])
    assert batch.empty
    assert batch.supervised == 0 == len(batch.positions_N)
    assert batch.ids_BT.shape[0] == 1 == len(batch.spans)
    assert batch.to("cpu").empty


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


def test_many_short_samples_are_packed() -> None:
    """Lengths of which no two fit a row of the longest: the hardest to fill up."""
    source = random.Random(0)
    lengths = [source.randint(51, 100) for _ in range(2000)]
    rows, tokens = pack(lengths)
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
