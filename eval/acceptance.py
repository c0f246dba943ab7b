"""Acceptance figures from counts: tau, acceptance rate and alpha per position, each with a bootstrap interval.

Intervals are percentile bootstraps over conversation clusters: turns, near-duplicates and sampling settings of one
cluster move together. A figure that cannot be computed is NaN with a reason, never 0.
Shape letters: C clusters, B bootstrap samples, F summed columns, K drafted positions.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ..errors import InputError
from .counts import values

Floats = NDArray[np.float64]
_SUMMED = ("rounds", "tokens", "drafted", "accepted")
_CHUNK_NUMBERS = 1 << 24


class Bootstrap(NamedTuple):
    """Bootstrap settings: number of resamples, coverage of the interval, and seed."""

    samples: int = 1000
    confidence: float = 0.95
    seed: int = 0


class Estimate(NamedTuple):
    """A figure and its interval. NaN says "not known", and `reason` says why."""

    value: float
    low: float = math.nan
    high: float = math.nan
    clusters: int = 0
    reason: str = ""

    def scaled(self, factor: float) -> "Estimate":
        """Estimate times a factor > 0, such as a change of unit."""
        return self._replace(value=self.value * factor, low=self.low * factor, high=self.high * factor)


class ClusterSums(NamedTuple):
    """Counts summed by cluster: columns rounds, tokens, drafted, accepted, then reached and accepted per position."""

    clusters: list[str]
    sums_CF: Floats

    def column(self, name: str) -> Floats:
        """Sums of one column by cluster, [C]: rounds, tokens, drafted or accepted."""
        column: Floats = self.sums_CF[:, _SUMMED.index(name)]
        return column

    def position(self, name: str, place: int) -> Floats:
        """Sums of `reached` or `accepted_at` at a position (from 0) by cluster, [C]."""
        K = (self.sums_CF.shape[1] - len(_SUMMED)) // 2
        column: Floats = self.sums_CF[:, len(_SUMMED) + K * ("reached", "accepted_at").index(name) + place]
        return column


def tau(table: pa.Table, bootstrap: Bootstrap) -> Estimate:
    """Block efficiency tau: tokens emitted per round, pooled over all rounds."""
    sums = cluster_sums(table)
    return ratio(sums.column("tokens"), sums.column("rounds"), bootstrap, "rounds")


def acceptance(table: pa.Table, bootstrap: Bootstrap) -> Estimate:
    """Acceptance rate: accepted over drafted tokens, pooled over all rounds."""
    sums = cluster_sums(table)
    return ratio(sums.column("accepted"), sums.column("drafted"), bootstrap, "drafted tokens")


def alphas(table: pa.Table, bootstrap: Bootstrap) -> list[Estimate]:
    """Conditional acceptance per position: rounds that accept position k over rounds that reach it.

    Raises InputError unless all rows share one K or tree.
    """
    # Positions of different drafts do not compare, so one K or tree is required.
    depths, trees = values(table, "draft_tokens"), values(table, "tree")
    if len(depths) > 1 or len(trees) > 1:
        raise InputError(f"draft_tokens {depths}, trees {trees}: alpha per position needs rows of one K or tree")
    K = int(depths[0]) if depths else 0
    sums = cluster_sums(table, K).sums_CF[:, len(_SUMMED) :]
    return [ratio(sums[:, K + k], sums[:, k], bootstrap, f"rounds that reach position {k + 1}") for k in range(K)]


def unclipped_tau(table: pa.Table, bootstrap: Bootstrap) -> Estimate:
    """tau of full drafts: 1 + sum over k of alpha_1 ... alpha_k.

    It is the tau if every round drafted and no draft were clipped at an answer's end. The rows must share one K or
    tree.
    """
    # 1) Sums of `reached` (first K columns) and `accepted_at` (last K) by cluster.
    K = int(values(table, "draft_tokens")[0])
    columns = cluster_sums(table, K).sums_CF[:, len(_SUMMED) :]
    if not columns[:, :K].sum(axis=0).all():
        return Estimate(math.nan, clusters=len(columns), reason=f"no round reaches all {K} positions")

    # 2) tau as a function of the sums, for the value and for each resample.
    def from_sums(sums_BF: Floats) -> Floats:
        with np.errstate(divide="ignore", invalid="ignore"):
            alphas_BK = sums_BF[:, K:] / sums_BF[:, :K]
        return np.asarray(1.0 + np.cumprod(alphas_BK, axis=1).sum(axis=1))

    # 3) The value from all clusters, the interval from resampled ones.
    value = float(from_sums(columns.sum(axis=0, keepdims=True))[0])
    draws = [from_sums(sums_BF) for sums_BF in _resampled(columns, bootstrap)]
    return _estimate(value, draws, len(columns), bootstrap)


def tau_difference(
    first: pa.Table,
    second: pa.Table,
    bootstrap: Bootstrap,
    of_first: Callable[[Floats], Floats] = lambda taus: taus,
    of_second: Callable[[Floats], Floats] = lambda taus: taus,
) -> Estimate:
    """Paired difference of_first(tau of the first) - of_second(tau of the second), over the turns that both have.

    Both sides are resampled together, by cluster. With `Gain.speedup` as both functions it is the paired difference of
    expected speed-ups.
    """
    # 1) Only turns that both sides have are compared. Both sides then have the same clusters, in the same order.
    shared = set(_turns(first)) & set(_turns(second))
    if not shared:
        return Estimate(math.nan, reason="no conversation in common")
    one, two = (cluster_sums(table.filter(pa.array([t in shared for t in _turns(table)]))) for table in (first, second))
    # 2) Tokens and rounds of both sides beside each other, so that one resample draws both: the difference is paired.
    columns = np.stack([sums.column(name) for sums in (one, two) for name in ("tokens", "rounds")], axis=1)
    if (columns.sum(axis=0)[[1, 3]] == 0).any():
        return Estimate(math.nan, clusters=len(columns), reason="no rounds")

    # 3) The difference as a function of the sums: its value from all clusters, its interval from resampled ones.
    def difference(sums_BF: Floats) -> Floats:
        with np.errstate(divide="ignore", invalid="ignore"):
            one_B, two_B = sums_BF[:, 0] / sums_BF[:, 1], sums_BF[:, 2] / sums_BF[:, 3]
            return np.asarray(of_first(one_B) - of_second(two_B))

    value = float(difference(columns.sum(axis=0, keepdims=True))[0])
    draws = [difference(sums_BF) for sums_BF in _resampled(columns, bootstrap)]
    return _estimate(value, draws, len(columns), bootstrap)


def ratio(numerator_C: Floats, denominator_C: Floats, bootstrap: Bootstrap, what: str = "counts") -> Estimate:
    """Ratio of sums with a bootstrap interval, clusters resampled with replacement. `what`: the denominator's name."""
    # A ratio without a denominator is not known.
    clusters = len(denominator_C)
    below = float(denominator_C.sum())
    if below <= 0:
        return Estimate(math.nan, clusters=clusters, reason=f"no {what}")
    # Numerator and denominator are resampled together.
    draws = []
    for sums_BF in _resampled(np.stack([numerator_C, denominator_C], axis=1), bootstrap):
        with np.errstate(divide="ignore", invalid="ignore"):
            draws.append(sums_BF[:, 0] / sums_BF[:, 1])
    return _estimate(float(numerator_C.sum()) / below, draws, clusters, bootstrap)


def cluster_sums(table: pa.Table, K: int = 0) -> ClusterSums:
    """Sum the counts by cluster, sorted by name; K > 0 adds the positions' columns (all rows must have that K)."""
    # One number a cluster, by sorted name.
    clusters, index_N = np.unique(np.array(table["cluster"].to_pylist(), dtype=object), return_inverse=True)
    columns = [np.asarray(table[name].to_numpy(), dtype=np.float64) for name in _SUMMED]
    # Lists of the positions become K columns each.
    if K:
        for name in ("reached", "accepted_at"):
            by_position = np.array(table[name].to_pylist(), dtype=np.float64).reshape(len(table), K)
            columns.extend(by_position.T)
    # Sum every column by cluster.
    summed = [np.bincount(index_N, weights=column, minlength=len(clusters)) for column in columns]
    return ClusterSums([str(name) for name in clusters], np.stack(summed, axis=1))


def _resampled(sums_CF: Floats, bootstrap: Bootstrap) -> Iterator[Floats]:
    """Bootstrap resamples: column sums of resampled clusters as [B, F], in pieces that fit in memory.

    The same seed gives the same draws.
    """
    # Drawing C clusters with replacement is a multinomial draw of their multiplicities; one product sums every column.
    clusters = len(sums_CF)
    rng = np.random.default_rng(bootstrap.seed)
    chunk = max(1, _CHUNK_NUMBERS // max(clusters, 1))
    for start in range(0, bootstrap.samples if clusters > 1 else 0, chunk):
        size = min(chunk, bootstrap.samples - start)
        drawn_BC = rng.multinomial(clusters, np.full(clusters, 1 / clusters), size=size)
        yield np.asarray(drawn_BC @ sums_CF)


def _estimate(value: float, draws: list[Floats], clusters: int, bootstrap: Bootstrap) -> Estimate:
    # No interval without two clusters, or without a resample that has a denominator.
    if clusters < 2:
        return Estimate(value, clusters=clusters, reason="fewer than 2 conversation clusters: no interval")
    drawn = np.concatenate(draws) if draws else np.empty(0)
    drawn = drawn[np.isfinite(drawn)]  # a resample without a denominator says nothing
    if not len(drawn):
        return Estimate(value, clusters=clusters, reason="no bootstrap sample: no interval")
    # Percentile interval, equal tails.
    tail = (1 - bootstrap.confidence) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return Estimate(value, float(low), float(high), clusters)


def _turns(table: pa.Table) -> list[tuple[Any, ...]]:
    """Keys of the answers, one a row: conversation, turn, sampling setting."""
    return list(zip(*(table[column].to_pylist() for column in ("conversation", "turn", "setting"))))
