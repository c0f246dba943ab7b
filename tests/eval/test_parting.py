"""Served beside promised: bookings against the engines' own laws, the interval's coverage, and the verdict."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftforge.eval.counts import CountRow, to_table
from draftforge.eval.engine_metrics import (
    FEWEST_ROUNDS,
    Counters,
    ExpectedAcceptance,
    compare,
    promise_of,
    round_variance,
)
from draftforge.eval.figures import Bootstrap
from draftforge.specdec.counting import CountedRounds, EngineRound, engine_rounds
from draftforge.specdec.replay.expected_rounds import count_rounds

K, LENGTH = 4, 30
BOOTSTRAP = Bootstrap(samples=400)


def texts(conversations: int, alpha: float, seed: int, spread: float = 0.12) -> list[CountedRounds]:
    """What a draft gets right along answers, each conversation with an acceptance of its own."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(conversations):
        own = float(np.clip(alpha + rng.normal(0, spread), 0.02, 0.98))
        right = np.minimum.accumulate(rng.random((LENGTH + K + 1, K)) < own, axis=1).sum(axis=1)
        found.append(CountedRounds(right.tolist(), [K] * len(right)))
    return found


def counted(runs: Sequence[CountedRounds]) -> pa.Table:
    """As a score counts them."""
    rows = []
    for number, one in enumerate(runs):
        rounds, known = [], 1
        for drafted, accepted in engine_rounds("draftforge", one, K, LENGTH):
            emitted = min(accepted + 1, LENGTH - known)
            rounds.append((drafted, accepted, emitted, min(accepted + 1, drafted)))
            known += accepted + 1
        name = f"c{number}"
        counts = count_rounds(rounds, K)
        rows.append(CountRow("d", 1, name, 0, name, "x", "holdout", "00128", "t0", "greedy", K, "", "replay", counts))
    return to_table(rows)


def engine(runs: Sequence[CountedRounds], name: str, by_position: bool = True) -> Counters:
    """As an engine counts the same answers."""
    booking = {"vllm": "unclipped", "llamacpp": "drafts"}[name]
    rounds: list[EngineRound] = []
    for one in runs:
        rounds += engine_rounds(name, one, K, LENGTH)  # type: ignore[arg-type]
    drafted, accepted = (float(sum(column)) for column in zip(*rounds))
    at = tuple(float(sum(one.accepted > k for one in rounds)) for k in range(K)) if by_position else ()
    return Counters(name, booking, float(len(rounds)), accepted, drafted, at)  # type: ignore[arg-type]


def test_bookings_are_those_of_the_engines() -> None:
    """On the very same answers: llama.cpp's exactly, vLLM's up to what its longer last drafts say."""
    runs = texts(400, 0.7, seed=1)
    promise = promise_of(counted(runs), BOOTSTRAP)
    assert promise.taus["drafts"].value == pytest.approx(engine(runs, "llamacpp").tau, abs=1e-12)
    unclipped = engine(runs, "vllm").tau
    assert promise.taus["unclipped"].value == pytest.approx(unclipped, rel=0.02)
    assert promise.taus["rounds"].value < promise.taus["drafts"].value < unclipped
    assert abs(promise.taus["rounds"].value - unclipped) > 0.1  # what comparing them as they are would be off by
    assert promise.alphas[0].value == pytest.approx(0.7, abs=0.03)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_the_variance_of_a_round_is_its_distributions(shares: list[float]) -> None:
    at_least = sorted(shares, reverse=True)
    exactly = [1 - at_least[0], *(a - b for a, b in zip(at_least, [*at_least[1:], 0.0]))]
    mean = sum(n * p for n, p in enumerate(exactly))
    expected = sum(n * n * p for n, p in enumerate(exactly)) - mean**2
    assert round_variance(at_least) == pytest.approx(max(expected, 0.0), abs=1e-9)


@pytest.mark.parametrize("name", ["vllm", "llamacpp"])
@pytest.mark.parametrize("by_position", [True, False])
def test_the_interval_holds_the_truth_as_often_as_it_says(name: str, by_position: bool) -> None:
    """Two samples of one traffic: the interval of their difference leaves 0 out in few more than one case of twenty."""
    cases, outside = 150, 0
    for seed in range(cases):
        promise = promise_of(counted(texts(40, 0.6, seed)), Bootstrap(samples=200))
        found = compare(engine(texts(60, 0.6, 10_000 + seed), name, by_position), promise, margin=0.0)
        outside += found.difference.low > 0 or found.difference.high < 0
    assert 0.005 <= outside / cases <= 0.1  # 0.08 of these; without the design effect 0.11 to 0.13


def test_rounds_of_one_conversation_are_alike() -> None:
    assert promise_of(counted(texts(200, 0.6, 3, spread=0.2)), BOOTSTRAP).design_effect > 1.5
    assert promise_of(counted(texts(200, 0.6, 3, spread=0.0)), BOOTSTRAP).design_effect < 1.35


@pytest.fixture(scope="module")
def promise() -> ExpectedAcceptance:
    return promise_of(counted(texts(300, 0.65, 5)), BOOTSTRAP)


def test_less_than_promised_parts_and_as_much_keeps(promise: ExpectedAcceptance) -> None:
    kept = compare(engine(texts(400, 0.65, 6), "vllm"), promise, margin=0.05)
    assert kept.parts is False and "keeps the promise (margin 5%)" in kept.why
    lost = compare(engine(texts(400, 0.45, 7), "vllm"), promise, margin=0.05)
    assert lost.parts is True and lost.difference.high < 0 and "parts from the promise" in lost.why
    more = compare(engine(texts(400, 0.85, 8), "vllm"), promise, margin=0.05)
    assert more.parts is True and more.difference.low > 0  # better than promised: the holdout is not the traffic
    assert compare(engine(texts(400, 0.45, 7), "vllm"), promise, margin=0.9).parts is False


def test_a_small_fall_within_the_margin_is_let_pass(promise: ExpectedAcceptance) -> None:
    fallen = engine(texts(3000, 0.63, 9), "vllm")
    assert compare(fallen, promise, margin=0.0).difference.value < 0
    assert compare(fallen, promise, margin=0.1).parts is False


def test_what_cannot_be_judged_says_why(promise: ExpectedAcceptance) -> None:
    few = Counters("vllm", "unclipped", FEWEST_ROUNDS - 1.0, 100.0, 4.0 * (FEWEST_ROUNDS - 1), (80.0, 20.0))
    assert compare(few, promise, 0.05).parts is None and "at least 200 are needed" in compare(few, promise, 0.05).why
    none = Counters("vllm", "unclipped", 0.0, 0.0, 0.0)
    assert compare(none, promise, 0.05).parts is None and "n/a" in compare(none, promise, 0.05).why
    three = Counters("vllm", "unclipped", 1000.0, 900.0, 3000.0, (600.0, 200.0, 100.0))
    assert "it drafts 3.00 tokens a round, the promise is of K = 4" in compare(three, promise, 0.05).why
    five = Counters("llama.cpp", "drafts", 1000.0, 900.0, 4400.0, (600.0, 200.0, 60.0, 30.0, 10.0))
    assert "it drafts 5 positions" in compare(five, promise, 0.05).why
    alone = promise_of(counted(texts(1, 0.65, 5)), BOOTSTRAP)
    full = engine(texts(400, 0.65, 6), "vllm")
    assert compare(full, alone, 0.05).parts is None and "fewer than 2" in compare(full, alone, 0.05).why
