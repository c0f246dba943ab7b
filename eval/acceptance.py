"""Acceptance figures from counts: tau, acceptance rate and alpha per position, and the interval of every figure.

Turns, near-duplicates and sampling settings of one conversation cluster move together, so intervals are of clusters:
`estimate` is the one function that makes them. A figure that cannot be computed is NaN with a reason, never 0.

1. The standard error is the jackknife's, each cluster left out once: error^2 = sum over c of (figure without c -
   figure)^2. That is CR3 of Bell and McCaffrey (Survey Methodology 28(2), 2002), which MacKinnon, Nielsen and Webb
   (2023, arXiv 2301.04527) recommend where clusters are few or of unlike size.
2. The interval is figure -+ t x error, t being a quantile of Student's with the degrees of freedom that clusters of
   such sizes give (`_freedom`): where one cluster holds half the rounds they are few, however many clusters there are.
3. A figure between bounds, as tau between 1 and K + 1, has that interval on the log-odds scale (delta method): it stays
   between them, and is longer on the side where there is room.
4. Where every cluster lies on a bound, as those of a draft of which nothing was ever accepted, leaving one out changes
   nothing, and an error of 0 would be no evidence. If a share p of the traffic's clusters lay off the bound, G drawn
   ones would all lie on it with probability (1 - p)^G, and those off it move the figure by the whole span at most. So
   the interval reaches span x (1 - ((1 - confidence) / 2)^(1 / G)) from the bound: 3.7 / G of the span at 95 %, as the
   rule of three is 3 / G on one side (Hanley and Lippman-Hand, JAMA 249(13), 1983). Unlike clusters count as G =
   degrees of freedom + 1.

docs/experiments.md shows by simulation that it covers. Fewer than FEWEST_CLUSTERS clusters have no interval.

Shape letters: C clusters, B sets of sums, F summed columns, K drafted positions.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ..errors import InputError
from .counts import values
from .settings import FEWEST_CLUSTERS

Floats = NDArray[np.float64]
Figure = Callable[[Floats], Floats]
"""Figure as a function of column sums: [B, F] to [B]."""
_SUMMED = ("rounds", "tokens", "drafted", "accepted")


class Estimate(NamedTuple):
    """A figure and its interval. NaN says "not known", and `reason` says why."""

    value: float
    low: float = math.nan
    high: float = math.nan
    clusters: int = 0
    reason: str = ""
    error: float = math.nan
    """Standard error of the value."""
    freedom: float = math.nan
    """Degrees of freedom of that error."""

    def scaled(self, factor: float) -> "Estimate":
        """Estimate times a factor > 0, such as a change of unit."""
        scaled = {name: getattr(self, name) * factor for name in ("value", "low", "high", "error")}
        return self._replace(**scaled)

    def record(self) -> dict[str, Any]:
        """JSON-able mapping for reports; a number that is not finite is null."""
        shown = {name: getattr(self, name) for name in ("value", "low", "high", "clusters", "reason")}
        return {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in shown.items()}


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


def tau(table: pa.Table, confidence: float) -> Estimate:
    """Block efficiency tau: tokens emitted per round, pooled over all rounds."""
    sums = cluster_sums(table)
    return ratio(sums.column("tokens"), sums.column("rounds"), confidence, "rounds", tau_bounds(table))


def tau_bounds(table: pa.Table) -> tuple[float, float]:
    """Bounds of tau: a round emits at least one token, and at most as many as are drafted in it and one more."""
    return 1.0, 1.0 + max(values(table, "draft_tokens"), default=0)


def acceptance(table: pa.Table, confidence: float) -> Estimate:
    """Acceptance rate: accepted over drafted tokens, pooled over all rounds."""
    sums = cluster_sums(table)
    return ratio(sums.column("accepted"), sums.column("drafted"), confidence, "drafted tokens", (0.0, 1.0))


def alphas(table: pa.Table, confidence: float) -> list[Estimate]:
    """Conditional acceptance per position: rounds that accept position k over rounds that reach it.

    Raises InputError unless all rows share one K or tree.
    """
    # Positions of different drafts do not compare, so one K or tree is required.
    depths, trees = values(table, "draft_tokens"), values(table, "tree")
    if len(depths) > 1 or len(trees) > 1:
        raise InputError(f"draft_tokens {depths}, trees {trees}: alpha per position needs rows of one K or tree")
    K = int(depths[0]) if depths else 0
    sums = cluster_sums(table, K).sums_CF[:, len(_SUMMED) :]
    return [
        ratio(sums[:, K + k], sums[:, k], confidence, f"rounds that reach position {k + 1}", (0.0, 1.0))
        for k in range(K)
    ]


def unclipped_tau(table: pa.Table, confidence: float) -> Estimate:
    """tau of full drafts: 1 + sum over k of alpha_1 ... alpha_k.

    It is the tau if every round drafted and no draft were clipped at an answer's end. The rows must share one K or
    tree.
    """
    # Sums of `reached` (first K columns) and `accepted_at` (last K) by cluster.
    K = int(values(table, "draft_tokens")[0])
    columns_CF = cluster_sums(table, K).sums_CF[:, len(_SUMMED) :]
    if not columns_CF[:, :K].sum(axis=0).all():
        return Estimate(math.nan, clusters=len(columns_CF), reason=f"no round reaches all {K} positions")

    def from_sums(sums_BF: Floats) -> Floats:
        return np.asarray(1.0 + np.cumprod(sums_BF[:, K:] / sums_BF[:, :K], axis=1).sum(axis=1))

    return estimate(from_sums, columns_CF, columns_CF[:, 0], confidence, tau_bounds(table))


def tau_difference(
    first: pa.Table,
    second: pa.Table,
    confidence: float,
    of_first: Callable[[Floats], Floats] = lambda taus: taus,
    of_second: Callable[[Floats], Floats] = lambda taus: taus,
) -> Estimate:
    """Paired difference of_first(tau of the first) - of_second(tau of the second), over the turns that both have.

    Both sides lose the same cluster at a time. With `Gain.speedup` as both functions it is the paired difference of
    expected speed-ups.
    """
    # 1) Only turns that both sides have are compared. Both sides then have the same clusters, in the same order.
    shared = set(_turns(first)) & set(_turns(second))
    if not shared:
        return Estimate(math.nan, reason="no conversation in common")
    one, two = (cluster_sums(table.filter(pa.array([t in shared for t in _turns(table)]))) for table in (first, second))
    # 2) Tokens and rounds of both sides beside each other: a cluster is left out of both at once.
    columns_CF = np.stack([sums.column(name) for sums in (one, two) for name in ("tokens", "rounds")], axis=1)
    rounds_C2 = columns_CF[:, [1, 3]]
    if (rounds_C2.sum(axis=0) == 0).any():
        return Estimate(math.nan, clusters=len(columns_CF), reason="no rounds")

    def difference(sums_BF: Floats) -> Floats:
        return np.asarray(of_first(sums_BF[:, 0] / sums_BF[:, 1]) - of_second(sums_BF[:, 2] / sums_BF[:, 3]))

    # 3) A cluster weighs as much as its share of the rounds, on average over both sides.
    return estimate(difference, columns_CF, (rounds_C2 / rounds_C2.sum(axis=0)).sum(axis=1), confidence)


def ratio(
    numerator_C: Floats,
    denominator_C: Floats,
    confidence: float,
    what: str = "counts",
    bounds: tuple[float, float] | None = None,
) -> Estimate:
    """Ratio of sums with its interval. `what`: the denominator's name. `bounds`: least and largest possible value."""
    if float(denominator_C.sum()) <= 0:  # a ratio without a denominator is not known
        return Estimate(math.nan, reason=f"no {what}")
    sums_C2 = np.stack([numerator_C, denominator_C], axis=1)
    return estimate(lambda sums_B2: sums_B2[:, 0] / sums_B2[:, 1], sums_C2, denominator_C, confidence, bounds)


def estimate(
    figure: Figure, sums_CF: Floats, weight_C: Floats, confidence: float, bounds: tuple[float, float] | None = None
) -> Estimate:
    """Figure of all clusters, with the interval that covers the truth in a share `confidence` of samples.

    `sums_CF`: the columns' sums by cluster, of which `figure` is a function. `weight_C`: how much a cluster counts in
    it, such as its rounds; those without weight are no evidence. `bounds`: least and largest possible value.
    """
    # 1) Too few clusters say nothing of how clusters differ.
    value, known_CF = float(figure(sums_CF.sum(axis=0, keepdims=True))[0]), sums_CF[weight_C > 0]
    clusters = len(known_CF)
    if clusters < FEWEST_CLUSTERS:
        return Estimate(value, clusters=clusters, reason=too_few_clusters(clusters))
    # 2) The figure without each cluster.
    with np.errstate(divide="ignore", invalid="ignore"):
        without_C = figure(known_CF.sum(axis=0) - known_CF)
    if not np.isfinite(without_C).all():
        return Estimate(value, clusters=clusters, reason="rests on one conversation cluster: no interval")
    error = math.sqrt(float(((without_C - value) ** 2).sum()))
    # 3) The interval, on the log-odds scale between bounds. On a bound its length tells the error, not the other way.
    freedom = _freedom(weight_C[weight_C > 0])
    quantile = student((1 + confidence) / 2, freedom)
    if bounds is not None and not bounds[0] < value < bounds[1]:
        reach = (bounds[1] - bounds[0]) * (1 - ((1 - confidence) / 2) ** (1 / (freedom + 1)))
        low, high = (value, value + reach) if value <= bounds[0] else (value - reach, value)
        return Estimate(value, low, high, clusters, error=reach / quantile, freedom=freedom)
    low, high = _ends(value, quantile * error, bounds)
    return Estimate(value, low, high, clusters, error=error, freedom=freedom)


def too_few_clusters(clusters: int, needed: int = FEWEST_CLUSTERS) -> str:
    """Words for a figure that fewer clusters than needed are behind."""
    return f"too few clusters to tell: {needed - clusters} more needed"


def student(probability: float, freedom: float) -> float:
    """Quantile of Student's t; of the normal distribution for infinite degrees of freedom."""
    from scipy.special import ndtri, stdtrit  # not above: who lists decisions computes none

    return float(stdtrit(freedom, probability) if math.isfinite(freedom) else ndtri(probability))


def independent_error(parts: Sequence[Estimate]) -> tuple[float, float]:
    """Standard error of a sum or difference of independent figures, and its degrees of freedom (Welch 1947)."""
    variances = [part.error**2 for part in parts]
    total = sum(variances)
    if total == 0:
        return 0.0, math.inf
    return math.sqrt(total), total**2 / sum(one**2 / part.freedom for one, part in zip(variances, parts))


def _ends(value: float, reach: float, bounds: tuple[float, float] | None) -> tuple[float, float]:
    """Ends of the interval: value -+ reach, or between bounds that in log odds (delta method)."""
    if bounds is None:
        return value - reach, value + reach
    from scipy.special import expit, logit

    least, span = bounds[0], bounds[1] - bounds[0]
    share = (value - least) / span
    odds, reach = float(logit(share)), reach / span / (share * (1 - share))
    return least + span * float(expit(odds - reach)), least + span * float(expit(odds + reach))


def _freedom(weight_C: Floats) -> float:
    """Degrees of freedom of the jackknife's error for clusters of these weights (Bell and McCaffrey 2002).

    A ratio is the mean of the clusters' own ratios r_c by weights w_c that add up to 1, and error^2 is the sum of
    a_c (r_c - mean)^2 with a_c = w_c^2 / (1 - w_c)^2. Were the r_c normal, independent and of equal variance, whatever
    the cluster's size, that would be distributed nearly as chi-square with tr(B)^2 / tr(B^2) degrees of freedom
    (Satterthwaite 1946), where B_cd = sqrt(a_c a_d) (delta_cd - w_c - w_d + sum w^2). G equal clusters give G - 1.
    """
    w_C = weight_C / weight_C.sum()
    a_C, square = (w_C / (1 - w_C)) ** 2, float((w_C**2).sum())
    trace = float((a_C * (1 - 2 * w_C + square)).sum())
    # tr(B^2) is the sum of all B_cd^2: the diagonal, then the rest as products of sums.
    diagonal = float((a_C**2 * ((1 - 2 * w_C + square) ** 2 - (square - 2 * w_C) ** 2)).sum())
    sums = [float((a_C * w_C**power).sum()) for power in range(3)]
    rest = square**2 * sums[0] ** 2 + 2 * sums[0] * sums[2] + 2 * sums[1] ** 2 - 4 * square * sums[0] * sums[1]
    return max(trace**2 / (diagonal + rest), 1.0)  # never below 1, but for rounding


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


def _turns(table: pa.Table) -> list[tuple[Any, ...]]:
    """Keys of the answers, one a row: conversation, turn, sampling setting."""
    return list(zip(*(table[column].to_pylist() for column in ("conversation", "turn", "setting"))))
