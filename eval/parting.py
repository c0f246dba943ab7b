"""Whether what an engine accepts is what was promised: the champion's holdout counts beside the engine's own.

Both sides are in the engine's booking (eval/served.py). The promise's error comes from its conversation clusters. The
engine gives totals only: its error is that of independent rounds, whose spread its counts by position tell (or the
promise's, where it has none), times the design effect that clusters have on the holdout: rounds of one conversation
are alike there, too. Shape letters: C clusters, K positions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import pyarrow as pa

from .counts import values
from .figures import Bootstrap, Estimate, acceptance, alphas, cluster_sums, ratio, tau, unclipped_tau
from .served import Booking, Counters

FEWEST_ROUNDS = 200
"""A normal interval of fewer says nothing."""
_DEPTH_SLACK = 0.02  # of K: drafts that engines count in flight when they are looked at


@dataclass(frozen=True)
class Promise:
    """What a draft does on the holdout, at the K or tree that it was chosen at."""

    draft_tokens: int
    tree: str
    taus: dict[Booking, Estimate]
    acceptance: Estimate
    alphas: tuple[Estimate, ...]
    rounds: float
    """In which anything was drafted."""
    confidence: float

    @property
    def spread(self) -> float:
        """Variance of the tokens that one full round accepts."""
        return round_variance(np.cumprod([alpha.value for alpha in self.alphas]).tolist())

    @property
    def design_effect(self) -> float:
        """How many times the variance of independent rounds the clusters' is; at least 1."""
        error = _standard_error(self.taus["unclipped"], self.confidence)
        alone = self.spread / self.rounds if self.rounds else math.nan
        return max(1.0, error**2 / alone) if alone > 0 and math.isfinite(error) else 1.0


@dataclass(frozen=True)
class Parting:
    """Served beside promised."""

    served: Estimate
    promised: Estimate
    difference: Estimate
    """Served minus promised, with a two-sided interval."""
    parts: bool | None
    """Whether the whole interval lies beyond the margin; None: not known."""
    why: str
    """In words, numbers included."""


def promise_of(table: pa.Table, bootstrap: Bootstrap) -> Promise:
    """From the counts that decide (`serving`), all of one K or tree."""
    K = int(values(table, "draft_tokens")[0])
    sums = cluster_sums(table, K)
    drafting_C = sums.sums_CF[:, 4]  # reached position 1: something was drafted
    drafts = ratio(drafting_C + sums.column("accepted"), drafting_C, bootstrap, "rounds with a draft")
    return Promise(
        draft_tokens=K,
        tree=str(values(table, "tree")[0]),
        taus={"rounds": tau(table, bootstrap), "drafts": drafts, "unclipped": unclipped_tau(table, bootstrap)},
        acceptance=acceptance(table, bootstrap),
        alphas=tuple(alphas(table, bootstrap)),
        rounds=float(drafting_C.sum()),
        confidence=bootstrap.confidence,
    )


def compare(served: Counters, promise: Promise, margin: float) -> Parting:
    """Part they do where the whole interval of the difference lies further than `margin` x promised from 0."""
    promised = promise.taus[served.booking]
    spread = _served_spread(served) if served.accepted_at else promise.spread
    error = math.sqrt(spread * promise.design_effect / served.rounds) if served.rounds > 0 else math.nan
    here = _estimate(served.tau, error, promise.confidence)
    both = math.hypot(error, _standard_error(promised, promise.confidence))
    difference = _estimate(served.tau - promised.value, both, promise.confidence)
    unknown = _unknown(served, promise, difference)
    allowed = margin * promised.value
    parts = None if unknown else difference.low > allowed or difference.high < -allowed
    words = (
        f"{served.engine} has tau {_said(here)} over {served.rounds:,.0f} rounds, promised is {_said(promised)} in its "
        f"counting: {_said(difference, '+')}"
    )
    verdict = f"not judged: {unknown}" if unknown else f"{'parts from' if parts else 'keeps'} the promise"
    return Parting(here, promised, difference, parts, f"{words}; {verdict} (margin {margin:.0%})")


def round_variance(at_least_K: Sequence[float]) -> float:
    """Variance of what a round accepts, from P(it accepts at least 1), P(at least 2), ...: E[n^2] - E[n]^2."""
    mean = sum(at_least_K)
    square = sum((2 * k + 1) * share for k, share in enumerate(at_least_K))
    return max(square - mean**2, 0.0)


def _served_spread(served: Counters) -> float:
    return round_variance([count / served.rounds for count in served.accepted_at]) if served.rounds > 0 else math.nan


def _unknown(served: Counters, promise: Promise, difference: Estimate) -> str:
    """Why nothing can be said; empty: something can."""
    if served.rounds < FEWEST_ROUNDS:
        return f"{served.rounds:,.0f} rounds, at least {FEWEST_ROUNDS} are needed"
    K, deepest = promise.draft_tokens, len(served.accepted_at)
    each = None if served.drafted is None else served.drafted / served.rounds
    unlike = (
        served.booking == "unclipped" and not promise.tree and each is not None and abs(each - K) > _DEPTH_SLACK * K
    )
    if deepest > K or unlike:
        drafts = f"{deepest} positions" if deepest > K else f"{each:.2f} tokens a round"
        return f"it drafts {drafts}, the promise is of K = {K}"
    if not (math.isfinite(difference.low) and math.isfinite(difference.high)):
        return "the promise has no interval: fewer than 2 conversation clusters"
    return ""


def _standard_error(estimate: Estimate, confidence: float) -> float:
    """Of an interval taken as a normal one; NaN without."""
    return (estimate.high - estimate.low) / (2 * _normal(confidence))


def _estimate(value: float, error: float, confidence: float) -> Estimate:
    reach = _normal(confidence) * error
    return Estimate(value, value - reach, value + reach)


def _normal(confidence: float) -> float:
    return NormalDist().inv_cdf((1 + confidence) / 2)


def _said(estimate: Estimate, sign: str = "") -> str:
    if math.isnan(estimate.value):
        return "n/a"
    return f"{estimate.value:{sign}.2f} [{estimate.low:{sign}.2f}, {estimate.high:{sign}.2f}]"
