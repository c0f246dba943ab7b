"""Comparison of two readings of a draft: small gains are told from chance, and chance is no gain."""

import numpy as np
import pytest
from numpy.typing import NDArray
from trained import Trained, sentences

from draftforge.eval.acceptance import Estimate
from draftforge.eval.diagnosis import FALSE_ALARM, GREEDY, Acceptance, ReplayBench, paired_gain
from draftforge.specdec.diagnosis.reading import Reading
from draftforge.specdec.proposers.factory import make_proposer
from draftforge.specdec.replay.replay import replay
from draftforge.specdec.replay.target_trace import RecordedAnswer, trace_target

ANSWERS, TOKENS, K = 96, 64, 4
CHANGES = 50
CONFIDENCE = 1 - 2 * FALSE_ALARM / CHANGES


def accepted(right_RK: NDArray[np.bool_]) -> Acceptance:
    """What is accepted of a draft, from the levels at which its token is the answer's."""
    run_R = np.logical_and.accumulate(right_RK, 1).sum(1)
    return Acceptance([], Estimate(1 + run_R.mean()), Estimate(right_RK[:, 0].mean()), np.split(run_R, ANSWERS))


def changed(right_RK: NDArray[np.bool_], draw: np.random.Generator, lost: float, won: float) -> NDArray[np.bool_]:
    """A draft that loses a share of what is right, and wins one of what is wrong."""
    chance_RK = draw.random(right_RK.shape)
    result: NDArray[np.bool_] = np.where(right_RK, chance_RK >= lost, chance_RK < won)
    return result


@pytest.fixture(scope="module")
def right() -> NDArray[np.bool_]:
    """Levels at which a draft is right: as many of each answer as its own difficulty lets it."""
    draw = np.random.default_rng(3)
    ease_A = draw.beta(4, 3, ANSWERS)
    return draw.random((ANSWERS * TOKENS, K)) < np.repeat(ease_A, TOKENS)[:, None]


def test_a_gain_of_two_percent_is_told_from_chance(right: NDArray[np.bool_]) -> None:
    """Paired by token it is found in nearly all of 20 draws."""
    draw, before = np.random.default_rng(4), accepted(right)
    after = [accepted(changed(right, draw, lost=0.05, won=0.12)) for _ in range(20)]
    gain = float(np.mean([one.tau.value for one in after])) / before.tau.value - 1
    found = sum(paired_gain(one, before, CONFIDENCE).low > 0 for one in after)
    assert 0.02 < gain < 0.03 and found >= 18, (gain, found)


def test_changes_that_are_no_better_raise_no_alarm(right: NDArray[np.bool_]) -> None:
    """Of 300 pairs of drafts that are equally good, 0.06 are expected to raise one."""
    draw = np.random.default_rng(5)

    def one() -> Acceptance:
        return accepted(changed(right, draw, lost=0.05, won=0.05))

    assert sum(paired_gain(one(), one(), CONFIDENCE).low > 0 for _ in range(300)) <= 2


@pytest.mark.parametrize("name", ["eagle3-reduced", "eagle", "medusa", "small"])
def test_a_bench_counts_as_replay_does(name: str, trained_drafts: Trained) -> None:
    target, draft = trained_drafts.target(), trained_drafts.draft(name)
    texts = [target.tokenizer(line).input_ids for line in sentences(3, 7).splitlines()]
    answers = [RecordedAnswer(ids[:9], ids[9 : 9 + size], 30) for ids, size in zip(texts, (22, 2, 1))]
    bench = ReplayBench(target, answers, 3, range(1, target.num_layers + 1))
    bench.capture(lambda *_: None)
    proposer = make_proposer(draft, target)
    traced = trace_target(target, answers, GREEDY, tuple(draft.target_layers), True)
    found = bench.measure(Reading(draft))
    assert found.counts == [one[0].counts for one in replay(proposer, traced, ["greedy"], [3])]
    assert [len(run_R) for run_R in found.runs] == [21, 1, 0] and found.tau.value > 1.3
