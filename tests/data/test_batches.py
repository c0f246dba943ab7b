"""Batching: the same steps for every split over ranks, exact resumption, and tensors that line up with signals."""

import itertools
import json
import random
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftforge import fingerprint
from draftforge.data.batches import BatchPlan, OptimizerStep, buckets, collate, pack
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


def take(plan: BatchPlan, count: int, position: int = 0) -> list[OptimizerStep]:
    return list(itertools.islice(plan.steps(position), count))


LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 60)), min_size=1, max_size=60)


@pytest.mark.slow
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


def reference_stream(lengths: list[int], tokens: int, seed: int, epochs: int) -> dict[int, list[int]]:
    """The samples of each position that the first epochs have tokens of, counted out token by token."""
    total, found = sum(lengths), dict[int, list[int]]()
    tokens = min(tokens, total)
    for epoch in range(epochs):
        rng = np.random.default_rng(int(fingerprint.of_json(["batches", seed, epoch])[:16], 16))
        parts, reached = dict[int, list[int]](), Fraction(epoch * total)
        for sample in rng.permutation(len(lengths)).tolist():
            parts.setdefault(int((reached + Fraction(lengths[sample], 2)) // tokens), []).append(sample)
            reached += lengths[sample]
        whole = [at for at in range(epochs * total) if epoch * total <= at * tokens <= (epoch + 1) * total - tokens]
        for window in (whole[start : start + 16] for start in range(0, len(whole), 16)):
            inside = [sample for at in window for sample in parts.pop(at, [])]
            size, reached = Fraction(sum(lengths[sample] for sample in inside), len(window)), Fraction(0)
            for sample in sorted(inside, key=lambda sample: lengths[sample]):  # stable
                middle = reached + Fraction(lengths[sample], 2)
                parts.setdefault(window[int(middle // size)], []).append(sample)
                reached += lengths[sample]
        moved = [parts.pop(at, []) for at in whole]
        parts |= {at: moved[source] for at, source in zip(whole, rng.permutation(len(whole)).tolist())}
        for at, samples in parts.items():
            found.setdefault(at, []).extend(samples)
    return found


@given(LENGTHS, st.integers(1, 400), st.integers(0, 3))
@settings(max_examples=80)
def test_steps_are_those_of_a_plain_stream(lengths: list[tuple[int, int]], tokens: int, seed: int) -> None:
    expected = reference_stream([prompt + answer for prompt, answer in lengths], tokens, seed, epochs=3)
    end = 3 * sum(map(sum, lengths)) // min(tokens, sum(map(sum, lengths)))  # the position that a fourth epoch shares
    steps = take(
        BatchPlan(make_samples(lengths), tokens, seed), sum(at < end and bool(expected[at]) for at in expected)
    )
    assert {step.after - 1: step.samples for step in steps} == {
        at: samples for at, samples in expected.items() if at < end and samples
    }


@given(LENGTHS, st.integers(1, 400), st.integers(0, 3))
@settings(max_examples=80)
def test_every_epoch_visits_each_sample_once_and_fills_its_steps(
    lengths: list[tuple[int, int]], tokens: int, seed: int
) -> None:
    """A step takes the rest of an epoch and goes on with the next one."""
    sizes = [prompt + answer for prompt, answer in lengths]
    plan, size = BatchPlan(make_samples(lengths), tokens, seed), min(tokens, sum(sizes))
    steps = list(itertools.takewhile(lambda step: step.after * size <= 4 * sum(sizes), plan.steps()))
    seen = [sample for step in steps for sample in step.samples]
    for start in range(0, 3 * len(sizes), len(sizes)):
        assert sorted(seen[start : start + len(sizes)]) == list(range(len(sizes)))
    assert all(step.samples and abs(step.tokens - size) <= 2 * max(sizes) for step in steps)
    assert [step.epoch for step in steps] == [int((step.after - 0.5) * size // sum(sizes)) for step in steps]
    for epoch in range(3):
        held = list(plan.steps_of_epoch(-(-epoch * sum(sizes) // size)))
        assert {sample for step in held for sample in step.samples} == set(range(len(sizes)))


@given(LENGTHS, st.integers(1, 400), st.integers(0, 30))
@settings(max_examples=80)
def test_resumes_exactly_from_a_position_kept_as_json(lengths: list[tuple[int, int]], tokens: int, stop: int) -> None:
    samples = make_samples(lengths)
    steps = take(BatchPlan(samples, tokens, 7), stop + 10)
    position = 0 if stop == 0 else json.loads(json.dumps(steps[stop - 1].after))
    assert take(BatchPlan(samples, tokens, 7), 10, position) == steps[stop:]


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_steps_of_more_gpus_are_as_full(gpus: int) -> None:
    """Of 13.4 steps an epoch on one GPU, 6.7 on two are not rounded to 7 of fewer tokens."""
    rng = torch.Generator().manual_seed(0)
    lengths = [(int(p), int(a)) for p, a in torch.randint(20, 250, (3281, 2), generator=rng)]
    plan = BatchPlan(make_samples(lengths), 65536 * gpus, seed=0)
    sizes = [step.tokens for step in take(plan, 24)]
    assert sum(sizes) / len(sizes) == pytest.approx(65536 * gpus, rel=0.002)
    assert plan.steps_per_epoch == pytest.approx(sum(map(sum, lengths)) / (65536 * gpus))


def test_steps_are_near_the_size_asked_for_and_mostly_text() -> None:
    rng = torch.Generator().manual_seed(0)
    lengths = [(int(p), int(a)) for p, a in torch.randint(5, 300, (800, 2), generator=rng)]
    plan = BatchPlan(make_samples(lengths), 4000, seed=0, world_size=2, rank=1, accumulation=2)
    sizes = torch.tensor([float(step.tokens) for step in take(plan, round(plan.steps_per_epoch))])
    assert abs(sizes.mean() - 4000) < 200
    assert sizes.std() < 400
    assert plan.padding_share < 0.05
    long_rows = BatchPlan(make_samples(lengths), 4000, 0, 2, 1, 2, row_tokens=500)
    assert long_rows.padding_share < 0.05
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
    assert [s.samples for s in take(one, 5)] != [s.samples for s in take(one, 5, round(one.steps_per_epoch))]


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
