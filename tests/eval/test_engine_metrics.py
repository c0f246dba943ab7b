"""Engines' own counters in each format; differences, restarts and replicas; and the test against the holdout."""

import math
import time
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest
from engine_counts import CountedRounds, EngineRound, engine_rounds
from hypothesis import given
from hypothesis import strategies as st

from draftforge.errors import InputError
from draftforge.eval.counts import CountRow, to_table
from draftforge.eval.engine_metrics import (
    FEWEST_ROUNDS,
    Counters,
    ExpectedAcceptance,
    compare,
    expected_acceptance,
    parse,
    round_variance,
)
from draftforge.eval.summary import describe_mismatch
from draftforge.specdec.replay.expected_rounds import count_rounds

K, LENGTH = 4, 30
CONFIDENCE = 0.95

VLLM = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 1000.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 500.0
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 3000.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="m"} 1500.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 1200.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="m"} 600.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 700.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 350.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 350.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="1"} 175.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 150.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="2"} 75.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
"""
SGLANG = """\
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{model_name="m"} 2100.0
# TYPE sglang:num_requests_total counter
sglang:num_requests_total{model_name="m"} 100.0
# TYPE sglang:spec_verify_calls_total counter
sglang:spec_verify_calls_total{model_name="m"} 800.0
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{model_name="m"} 9.9
"""
LLAMA = """\
# TYPE llamacpp:spec_decode_num_drafts_total counter
llamacpp:spec_decode_num_drafts_total 40
llamacpp:spec_decode_num_draft_tokens_total 150
llamacpp:spec_decode_num_accepted_tokens_total 60
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 30
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 20
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="2"} 10
"""


def test_vllm_adds_its_engines() -> None:
    found = parse(VLLM, "v")
    assert found == Counters("vllm", "unclipped", 1500.0, 1800.0, 4500.0, (1050.0, 525.0, 225.0))
    assert found.tau == pytest.approx(1 + 1800 / 1500)
    assert sum(found.accepted_at) == found.accepted


def test_sglang_counts_tokens_after_each_first_one() -> None:
    found = parse(SGLANG, "s")
    assert (found.engine, found.convention, found.rounds) == ("sglang", "rounds", 800.0)
    assert found.tau == pytest.approx((2100 - 100) / 800)  # not the gauge


def test_llama_cpp_metrics() -> None:
    found = parse(LLAMA, "l")
    assert found == Counters("llama.cpp", "drafts", 40.0, 60.0, 150.0, (30.0, 20.0, 10.0))


def test_two_looks_give_what_lies_between() -> None:
    before = Counters("vllm", "unclipped", 100.0, 80.0, 300.0, (60.0, 20.0))
    after = Counters("vllm", "unclipped", 160.0, 100.0, 480.0, (70.0, 27.0, 3.0))
    assert after.since(before) == Counters("vllm", "unclipped", 60.0, 20.0, 180.0, (10.0, 7.0, 3.0))
    fresh = Counters("vllm", "unclipped", 7.0, 5.0, 21.0, (4.0, 1.0))
    assert fresh.since(before) == Counters("vllm", "unclipped", 7.0, 5.0, 21.0, (4.0, 1.0), restarted=True)
    assert before.since(before).rounds == 0 and before.since(before).tau != before.since(before).tau


def test_replicas_add_up_and_engines_do_not_mix() -> None:
    one, two = parse(VLLM, "a"), parse(VLLM, "b")
    both = one.plus(two)
    assert both.rounds == 3000 and both.tau == one.tau and both.accepted_at[0] == 2100
    with pytest.raises(InputError, match=r"counts of vllm \(unclipped\) and sglang \(rounds\): only one engine's"):
        one.plus(parse(SGLANG, "s"))
    with pytest.raises(InputError, match="only one engine's"):
        one.since(parse(LLAMA, "l"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "here: holds no counts of speculative decoding"),
        ("# TYPE x counter\nx_total 1\n", "here: holds no counts of speculative decoding"),
        ("<html>not found</html>", "here: (not Prometheus text|holds no counts)"),
        ('vllm:x{a="1" nonsense', "here: not Prometheus text"),
        ("# TYPE sglang:spec_accept_length gauge\nsglang:spec_accept_length 2.5\n", "without sglang:spec_verify_calls"),
        (
            "# TYPE sglang:spec_verify_calls_total counter\nsglang:spec_verify_calls_total 2\n",
            "generation_tokens_total",
        ),
    ],
)
def test_what_cannot_be_read_is_named(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse(text, "here")


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
    convention = {"vllm": "unclipped", "llamacpp": "drafts"}[name]
    rounds: list[EngineRound] = []
    for one in runs:
        rounds += engine_rounds(name, one, K, LENGTH)  # type: ignore[arg-type]
    drafted, accepted = (float(sum(column)) for column in zip(*rounds))
    at = tuple(float(sum(one.accepted > k for one in rounds)) for k in range(K)) if by_position else ()
    return Counters(name, convention, float(len(rounds)), accepted, drafted, at)  # type: ignore[arg-type]


def test_counting_conventions_are_those_of_the_engines() -> None:
    """On the very same answers: llama.cpp's exactly, vLLM's up to what its longer last drafts say."""
    runs = texts(400, 0.7, seed=1)
    expected = expected_acceptance(counted(runs), CONFIDENCE)
    assert expected.taus["drafts"].value == pytest.approx(engine(runs, "llamacpp").tau, abs=1e-12)
    unclipped = engine(runs, "vllm").tau
    assert expected.taus["unclipped"].value == pytest.approx(unclipped, rel=0.02)
    assert expected.taus["rounds"].value < expected.taus["drafts"].value < unclipped
    assert abs(expected.taus["rounds"].value - unclipped) > 0.1  # what comparing them as they are would be off by
    assert expected.alphas[0].value == pytest.approx(0.7, abs=0.03)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_the_variance_of_a_round_is_its_distributions(shares: list[float]) -> None:
    at_least = sorted(shares, reverse=True)
    exactly = [1 - at_least[0], *(a - b for a, b in zip(at_least, [*at_least[1:], 0.0]))]
    mean = sum(n * p for n, p in enumerate(exactly))
    variance = sum(n * n * p for n, p in enumerate(exactly)) - mean**2
    assert round_variance(at_least) == pytest.approx(max(variance, 0.0), abs=1e-9)


@pytest.mark.slow
def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    """Two samples of one traffic: the interval of their difference leaves 0 out in few more than one case of twenty."""
    cases, outside = 150, {(name, by_position): 0 for name in ("vllm", "llamacpp") for by_position in (True, False)}
    for seed in range(cases):
        expected = expected_acceptance(counted(texts(40, 0.6, seed)), CONFIDENCE)
        served = texts(60, 0.6, 10_000 + seed)
        for name, by_position in outside:
            found = compare(engine(served, name, by_position), expected, margin=0.0)
            outside[name, by_position] += found.difference.low > 0 or found.difference.high < 0
    # About 0.08 of these; without the design effect 0.11 to 0.13.
    assert all(0.005 <= count / cases <= 0.1 for count in outside.values()), outside


def test_rounds_of_one_conversation_are_alike() -> None:
    assert expected_acceptance(counted(texts(200, 0.6, 3, spread=0.2)), CONFIDENCE).design_effect > 1.5
    assert expected_acceptance(counted(texts(200, 0.6, 3, spread=0.0)), CONFIDENCE).design_effect < 1.35


@pytest.fixture(scope="module")
def expected() -> ExpectedAcceptance:
    return expected_acceptance(counted(texts(300, 0.65, 5)), CONFIDENCE)


def test_a_loss_or_a_gain_beyond_the_margin_is_a_mismatch(expected: ExpectedAcceptance) -> None:
    same = compare(engine(texts(400, 0.65, 6), "vllm"), expected, margin=0.2)
    assert same.mismatch is False and "is as expected (margin 20%)" in describe_mismatch(same, 0.2)
    lost = compare(engine(texts(400, 0.45, 7), "vllm"), expected, margin=0.05)
    assert lost.mismatch is True and lost.difference.high < 0 and "is not as expected" in describe_mismatch(lost, 0.05)
    more = compare(engine(texts(400, 0.85, 8), "vllm"), expected, margin=0.05)
    assert more.mismatch is True and more.difference.low > 0  # better than expected: the holdout is not the traffic
    assert compare(engine(texts(400, 0.45, 7), "vllm"), expected, margin=0.9).mismatch is False


def test_an_interval_across_the_margin_is_no_verdict(expected: ExpectedAcceptance) -> None:
    """After the rounds that it asks for, at the same rates, the interval lies within the margin."""
    few = Counters("vllm", "unclipped", 300.0, 300 * (expected.taus["unclipped"].value - 1), 1200.0)
    found = compare(few, expected, 0.1)
    more = found.more_rounds
    assert found.mismatch is False and not found.as_expected and 0 < more < 1e5
    assert f"no mismatch is shown, but the interval is too wide to tell 10%: about {more:,.0f} more rounds would" in (
        describe_mismatch(found, 0.1)
    )
    for factor, enough in ((0.99, False), (1.01, True)):
        share = (300 + factor * more) / 300
        longer = Counters("vllm", "unclipped", 300 * share, few.accepted * share, 1200 * share)
        assert compare(longer, expected, 0.1).as_expected is enough
    # The holdout's own interval is wider than a margin of 0.1 %: no rounds would tell.
    never = compare(few, expected, 0.001)
    assert math.isinf(never.more_rounds) and "more conversations of the holdout would" in describe_mismatch(
        never, 0.001
    )


def test_what_cannot_be_compared_says_why(expected: ExpectedAcceptance) -> None:
    rounds = FEWEST_ROUNDS - 1.0
    few = compare(Counters("vllm", "unclipped", rounds, 100.0, 4 * rounds, (80.0, 20.0)), expected, 0.05)
    assert few.mismatch is None and "at least 200 are needed" in few.unknown
    none = compare(Counters("vllm", "unclipped", 0.0, 0.0, 0.0), expected, 0.05)
    assert none.mismatch is None and "has tau n/a" in describe_mismatch(none, 0.05)
    three = Counters("vllm", "unclipped", 1000.0, 900.0, 3000.0, (600.0, 200.0, 100.0))
    assert "it drafts 3.00 tokens a round, the holdout was scored at K = 4" in compare(three, expected, 0.05).unknown
    five = Counters("llama.cpp", "drafts", 1000.0, 900.0, 4400.0, (600.0, 200.0, 60.0, 30.0, 10.0))
    assert "it drafts 5 positions" in compare(five, expected, 0.05).unknown
    alone = expected_acceptance(counted(texts(1, 0.65, 5)), CONFIDENCE)
    found = compare(engine(texts(400, 0.65, 6), "vllm"), alone, 0.05)
    assert found.mismatch is None and "too few clusters to tell: 2 more needed" in found.unknown


@pytest.mark.parametrize(
    "text",
    [
        "a{" + ",".join(f'a{i}="x"' for i in range(200_000)) + "} 1",
        'a{b="' + '\\"' * 400_000 + '"} 1',
        "a 1\n" * 500_000,
        ("a{" + ",".join(f'a{i}="x"' for i in range(1_500)) + "} 1\n") * 1_400,
    ],
    ids=["labels", "quotes", "lines", "long lines"],
)
def test_metrics_that_would_take_hours_are_refused(text: str) -> None:
    began = time.process_time()
    with pytest.raises(InputError, match="must have 200,000 lines of 16,384 characters at most"):
        parse(text, "scrape")
    assert time.process_time() - began < 1.0
