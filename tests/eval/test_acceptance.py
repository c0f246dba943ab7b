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
from draftforge.eval.acceptance import Bootstrap
from draftforge.eval.counts import CountRow, to_table
from draftforge.specdec.replay.expected_rounds import RoundCounts

FEW = Bootstrap(samples=200, confidence=0.95, seed=1)
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
    tau = acceptance.tau(table, FEW)
    assert tau.value == pytest.approx(1 + sum(lengths) / len(lengths))
    assert acceptance.acceptance(table, FEW).value == pytest.approx(sum(lengths) / (3 * len(lengths)))
    assert tau.clusters == len({cluster for cluster, _ in case})
    alphas = acceptance.alphas(table, FEW)
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
    if tau.clusters >= 2:
        assert tau.low <= tau.high
    else:
        assert math.isnan(tau.low) and math.isnan(tau.high) and "fewer than 2" in tau.reason


def test_no_rounds_is_not_zero() -> None:
    empty = to_table([])
    assert math.isnan(acceptance.tau(empty, FEW).value) and acceptance.tau(empty, FEW).reason == "no rounds"
    assert math.isnan(acceptance.acceptance(empty, FEW).value)
    assert acceptance.alphas(empty, FEW) == []
    one = table_of([("u", [])])
    assert math.isnan(acceptance.tau(one, FEW).value) and acceptance.tau(one, FEW).clusters == 1


def test_the_same_seed_gives_the_same_interval() -> None:
    table = table_of([(f"k{i}", [i % 4, (i * 7) % 4]) for i in range(20)])
    assert acceptance.tau(table, FEW) == acceptance.tau(table, FEW)
    assert acceptance.tau(table, FEW) != acceptance.tau(table, FEW._replace(seed=2))
    wide, narrow = (acceptance.tau(table, FEW._replace(confidence=c)) for c in (0.99, 0.6))
    assert wide.low < narrow.low < narrow.value < narrow.high < wide.high


def test_chunked_resampling_is_seeded_and_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    table = table_of([(f"k{i}", [i % 4]) for i in range(30)])
    monkeypatch.setattr(acceptance, "_CHUNK_NUMBERS", 30 * 64)
    pieces = list(acceptance._resampled(acceptance.cluster_sums(table).sums_CF, FEW))
    assert [len(piece) for piece in pieces] == [64, 64, 64, 8]
    assert acceptance.tau(table, FEW) == acceptance.tau(table, FEW)


def test_intervals_are_clustered() -> None:
    """Twenty copies of two clusters say no more than two conversations do."""
    clustered = table_of([("low", [0] * 5)] * 20 + [("high", [3] * 5)] * 20)
    single = table_of([(f"k{i}", [0 if i % 2 else 3] * 5) for i in range(40)])
    wide, narrow = acceptance.tau(clustered, FEW), acceptance.tau(single, FEW)
    assert wide.value == narrow.value == 2.5
    assert wide.high - wide.low == pytest.approx(3.0)
    assert narrow.high - narrow.low < 1.5


def test_intervals_cover_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    bootstrap = Bootstrap(300, 0.9, 0)
    truth, hits = 1 + 1.5, 0
    for _ in range(150):
        data = [(f"k{i}", rng.integers(0, 4, rng.integers(3, 9)).tolist()) for i in range(40)]
        estimate = acceptance.tau(table_of(data), bootstrap)
        hits += estimate.low <= truth <= estimate.high
    assert 0.80 <= hits / 150 <= 0.97


def test_a_paired_difference_is_narrower_than_two_intervals() -> None:
    rng = np.random.default_rng(3)
    base = [(f"k{i}", [int(rng.integers(0, 3))] * 6) for i in range(40)]
    better = [(name, [n + 1 for n in lengths]) for name, lengths in base]
    first, second = table_of(better), table_of(base, draft="b")
    difference = acceptance.tau_difference(first, second, FEW)
    assert [difference.value, difference.low, difference.high] == pytest.approx([1.0, 1.0, 1.0])
    scaled = acceptance.tau_difference(first, second, FEW, lambda taus: 0.5 * taus)
    expected = 0.5 * acceptance.tau(first, FEW).value - acceptance.tau(second, FEW).value
    assert scaled.value == pytest.approx(expected)
    assert scaled.low < scaled.value < scaled.high


def test_a_difference_takes_only_shared_turns() -> None:
    first = table_of([("u", [3]), ("v", [1]), ("w", [3])])
    second = table_of([("u", [1]), ("v", [1])])
    difference = acceptance.tau_difference(first, second, FEW)
    assert difference.value == pytest.approx(3.0 - 2.0) and difference.clusters == 2
    assert acceptance.tau_difference(first, to_table([]), FEW).reason == "no conversation in common"


def test_alphas_refuse_mixed_depths() -> None:
    mixed = pa.concat_tables([table_of([("u", [1])], K=2), table_of([("u", [1])], K=3)])
    with pytest.raises(InputError, match=r"draft_tokens \[2, 3\]"):
        acceptance.alphas(mixed, FEW)


def test_scaling_keeps_the_unknown_unknown() -> None:
    estimate = acceptance.Estimate(2.0, 1.0, math.nan, 3).scaled(0.5)
    assert estimate.value == 1.0 and estimate.low == 0.5 and math.isnan(estimate.high)
