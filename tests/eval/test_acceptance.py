"""Figures against plain arithmetic, and intervals against what they promise."""

import math
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftforge.errors import InputError
from draftforge.eval import acceptance
from draftforge.eval.counts import CountRow, to_table
from draftforge.specdec.replay.expected_rounds import RoundCounts

Rounds = tuple[str, list[int]]


def table_of(answers: Sequence[Rounds], K: int = 3, draft: str = "a") -> pa.Table:
    """One row an answer: its cluster and the accepted length of each of its rounds (nothing clipped)."""
    rows = []
    for number, (cluster, lengths) in enumerate(answers):
        accepted = [float(sum(n > k for n in lengths)) for k in range(K)]
        reached = [float(sum(n >= k for n in lengths)) for k in range(K)]
        n = float(len(lengths))
        counts = RoundCounts(n, n + sum(lengths), n * K, float(sum(lengths)), tuple(reached), tuple(accepted))
        where = ("d", "selection", "128", "t0", "greedy")
        row = CountRow(draft, 1, f"c{number}", 0, cluster, *where, K, "", "replay", counts)
        rows.append(row)
    return to_table(rows)


answers = st.lists(
    st.tuples(st.sampled_from("uvwxyz"), st.lists(st.integers(0, 3), min_size=1, max_size=8)), min_size=1, max_size=12
)


@settings(max_examples=50)
@given(answers)
def test_figures_pool_over_rounds(case: list[Rounds]) -> None:
    table = table_of(case)
    lengths = [n for _, rounds in case for n in rounds]
    tau = acceptance.tau(table, 0.95)
    assert tau.value == pytest.approx(1 + sum(lengths) / len(lengths))
    assert acceptance.acceptance(table, 0.95).value == pytest.approx(sum(lengths) / (3 * len(lengths)))
    assert tau.clusters == len({cluster for cluster, _ in case})
    alphas = acceptance.alphas(table, 0.95)
    product, total = 1.0, 1.0
    for k, alpha in enumerate(alphas):
        reached = [n for n in lengths if n >= k]
        if not reached:
            assert math.isnan(alpha.value) and alpha.reason == f"no rounds that reach position {k + 1}"
            break
        assert alpha.value == pytest.approx(sum(n > k for n in reached) / len(reached))
        product *= alpha.value
        total += product
    assert tau.value == pytest.approx(total)  # tau = 1 + sum_k prod alpha: nothing is clipped here
    if tau.clusters >= acceptance.FEWEST_CLUSTERS:
        assert 1 <= tau.low <= tau.value + 1e-9 and tau.value <= tau.high + 1e-9 <= 4 + 1e-6
    else:
        assert math.isnan(tau.low) and math.isnan(tau.high)
        assert tau.reason == f"too few clusters to tell: {3 - tau.clusters} more needed"


def test_no_rounds_is_not_zero() -> None:
    empty = to_table([])
    assert math.isnan(acceptance.tau(empty, 0.95).value) and acceptance.tau(empty, 0.95).reason == "no rounds"
    assert math.isnan(acceptance.acceptance(empty, 0.95).value)
    assert acceptance.alphas(empty, 0.95) == []
    one = table_of([("u", [])])
    assert math.isnan(acceptance.tau(one, 0.95).value) and acceptance.tau(one, 0.95).reason == "no rounds"


def test_a_wider_coverage_takes_a_longer_interval() -> None:
    table = table_of([(f"k{i}", [i % 4, (i * 7) % 4]) for i in range(20)])
    wide, narrow = (acceptance.tau(table, confidence) for confidence in (0.99, 0.6))
    assert wide.low < narrow.low < narrow.value < narrow.high < wide.high


def test_intervals_are_clustered() -> None:
    """Twenty copies of four clusters say no more than four conversations do."""
    clusters = [("low", [0] * 5), ("some", [1] * 5), ("more", [2] * 5), ("high", [3] * 5)]
    copied, alone = table_of(clusters * 20), table_of(clusters)
    apart = table_of([(f"{name}{i}", rounds) for name, rounds in clusters for i in range(20)])
    wide, same, narrow = (acceptance.tau(table, 0.95) for table in (copied, alone, apart))
    assert wide == same and wide.clusters == 4 and narrow.clusters == 80
    assert wide.value == narrow.value == 2.5 and narrow.high - narrow.low < 0.6 < 2 < wide.high - wide.low


def test_a_cluster_of_half_the_rounds_leaves_few_degrees_of_freedom() -> None:
    """However many others there are: their number alone would promise a certainty that is not there."""
    rng = np.random.default_rng(0)
    alike = [(f"k{i}", rng.integers(0, 4, 10).tolist()) for i in range(20)]
    lumped = [*alike[1:], ("k0", rng.integers(0, 4, 190).tolist())]
    assert acceptance.tau(table_of(alike), 0.95).freedom == pytest.approx(19)
    assert 1 <= acceptance.tau(table_of(lumped), 0.95).freedom < 2


@given(st.lists(st.floats(0.1, 10), min_size=3, max_size=12))
def test_degrees_of_freedom_by_matrices(weights: list[float]) -> None:
    w = np.array(weights) / sum(weights)
    a = (w / (1 - w)) ** 2
    B = np.sqrt(np.outer(a, a)) * (np.eye(len(w)) - w[:, None] - w + (w**2).sum())
    assert acceptance._freedom(np.array(weights)) == pytest.approx(np.trace(B) ** 2 / np.trace(B @ B), rel=1e-6)


def test_an_interval_stays_between_its_bounds() -> None:
    table = table_of([("u", [3] * 9), ("v", [3] * 8 + [2]), ("w", [3] * 9), ("x", [0])])
    found = [acceptance.tau(table, 0.999), acceptance.unclipped_tau(table, 0.999)]
    assert all(1 < one.low < one.value < one.high < 4 for one in found)
    assert all(0 <= one.low <= one.value <= one.high <= 1 for one in acceptance.alphas(table, 0.999))


@pytest.mark.parametrize("accepted", [0, 3])
def test_clusters_that_all_lie_on_a_bound_do_not_tell_all_traffic(accepted: int) -> None:
    """Of a share p of clusters off the bound, G show none with probability (1 - p)^G = 2.5 %."""
    table = table_of([(f"k{i}", [accepted] * 2) for i in range(20)])
    share = 1 - 0.025 ** (1 / 20)
    taus = [acceptance.tau(table, 0.95), *([acceptance.unclipped_tau(table, 0.95)] if accepted else [])]
    for found, least, span in (
        *((one, 1.0, 3.0) for one in taus),
        (acceptance.acceptance(table, 0.95), 0.0, 1.0),
        (acceptance.alphas(table, 0.95)[0], 0.0, 1.0),
    ):
        on, off = (least, least + span * share) if not accepted else (least + span, least + span * (1 - share))
        assert found.value == on and (found.low, found.high) == pytest.approx((min(on, off), max(on, off)))
        assert found.error * acceptance.student(0.975, found.freedom) == pytest.approx(span * share)


def test_what_rests_on_one_cluster_has_no_interval() -> None:
    table = table_of([("u", [3, 0]), ("v", [0, 0]), ("w", [0]), ("x", [0])])
    assert acceptance.tau(table, 0.95).low > 1
    second = acceptance.alphas(table, 0.95)[1]
    assert second.value == 1 and math.isnan(second.low) and second.reason == "too few clusters to tell: 2 more needed"
    assert "rests on one conversation cluster" in acceptance.unclipped_tau(table, 0.95).reason


def test_a_paired_difference_is_narrower_than_two_intervals() -> None:
    rng = np.random.default_rng(3)
    base = [(f"k{i}", [int(rng.integers(0, 3))] * 6) for i in range(40)]
    better = [(name, [n + 1 for n in lengths]) for name, lengths in base]
    first, second = table_of(better), table_of(base, draft="b")
    difference = acceptance.tau_difference(first, second, 0.95)
    assert [difference.value, difference.low, difference.high] == pytest.approx([1.0, 1.0, 1.0])
    scaled = acceptance.tau_difference(first, second, 0.95, lambda taus: 0.5 * taus)
    expected = 0.5 * acceptance.tau(first, 0.95).value - acceptance.tau(second, 0.95).value
    assert scaled.value == pytest.approx(expected)
    assert scaled.low < scaled.value < scaled.high


def test_a_difference_takes_only_shared_turns() -> None:
    first = table_of([("u", [3]), ("v", [1]), ("w", [3])])
    second = table_of([("u", [1]), ("v", [1])])
    difference = acceptance.tau_difference(first, second, 0.95)
    assert difference.value == pytest.approx(3.0 - 2.0) and difference.clusters == 2
    assert acceptance.tau_difference(first, to_table([]), 0.95).reason == "no conversation in common"


def test_alphas_refuse_mixed_depths() -> None:
    mixed = pa.concat_tables([table_of([("u", [1])], K=2), table_of([("u", [1])], K=3)])
    with pytest.raises(InputError, match=r"draft_tokens \[2, 3\]"):
        acceptance.alphas(mixed, 0.95)


def test_scaling_keeps_the_unknown_unknown() -> None:
    estimate = acceptance.Estimate(2.0, 1.0, math.nan, 3).scaled(0.5)
    assert estimate.value == 1.0 and estimate.low == 0.5 and math.isnan(estimate.high)
