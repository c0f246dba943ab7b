"""Serving engines' acceptance counters (vLLM, SGLang, llama.cpp), and a test of served against expected acceptance.

| engine | read from | counting convention |
|---|---|---|
| vLLM | `/metrics`: `vllm:spec_decode_num_*_total` | unclipped |
| llama.cpp | `/metrics`: `llamacpp:spec_decode_num_*_total` | drafts |
| SGLang | `/metrics`: `sglang:generation_tokens_total`, `num_requests_total`, `spec_verify_calls_total` | rounds |

The expected tau is put into the convention. unclipped: 1 + sum over k of alpha_1 ... alpha_k (`unclipped_tau`); drafts:
1 + accepted / rounds that drafted anything; rounds: tokens a round, as here.

SGLang's gauge `sglang:spec_accept_length` is of its last few steps only and has no counts behind it: it is not used.
Responses of single requests are read in `request_metrics.py`.

`compare` tests whether the served tau differs from the one that the holdout's counts make expected in the engine's
convention, by more than a margin: an interval of the difference, whose served part has the variance of what a round
accepts, times the design effect of conversations. That effect and the holdout's own error come from the holdout's
clusters, so Student's t has their degrees of freedom (`acceptance.estimate`).
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Literal

import numpy as np
import pyarrow as pa
from prometheus_client.parser import text_string_to_metric_families

from ..errors import InputError, one_line
from .acceptance import (
    Estimate,
    acceptance,
    alphas,
    cluster_sums,
    ratio,
    student,
    tau,
    tau_bounds,
    unclipped_tau,
)
from .counts import values

Convention = Literal["rounds", "drafts", "unclipped"]
"""Counting convention of an engine: what it counts as a round. `rounds`: every pass after the first token, as
draftforge does. `drafts`: passes with a draft, an answer's last draft clipped to the tokens that it still needs.
`unclipped`: passes with a draft, none of them clipped."""
_NUM = "spec_decode_num_"
_MOST_LINES, _LONGEST_LINE, _MOST_CHARACTERS = 200_000, 16_384, 16 << 20  # of metrics, the lines in characters
MOST_COUNT = 1e18
"""No engine counts so far; beyond it, a sum of squares is no number."""


@dataclass(frozen=True)
class Counters:
    """Speculative decoding counts of an engine since its start, or between two scrapes."""

    engine: str
    convention: Convention
    rounds: float
    accepted: float
    drafted: float | None = None
    accepted_at: tuple[float, ...] = ()
    """Rounds that accepted at least 1, 2, ... tokens; empty where the engine does not say."""
    restarted: bool = False
    """A counter went backwards: these are the counts since then."""
    requests: float = 0.0
    """Requests behind the counts, where they were read from responses."""
    uncounted: float = 0.0
    """Responses that tell no counts."""
    domains: Mapping[str, "Counters"] = field(default_factory=dict)
    """Counts by domain of the request, "" where none is known; empty: they were not read from responses."""

    @property
    def tau(self) -> float:
        """Tokens a round, in the engine's convention; NaN without a round."""
        return 1.0 + self.accepted / self.rounds if self.rounds > 0 else math.nan

    def since(self, before: "Counters") -> "Counters":
        """Counts after `before`. A counter that went backwards began again at 0 (its engine restarted)."""
        # A smaller count than before means that the engine restarted: its counts are then all new.
        pairs = ((self.rounds, before.rounds), (self.accepted, before.accepted), (self.drafted, before.drafted))
        if any((now or 0) < (then or 0) for now, then in pairs):
            self._check_same_engine(before)
            return replace(self, restarted=True)
        return self._sum(before, -1)

    def plus(self, other: "Counters") -> "Counters":
        """Sum of the counts of two replicas."""
        return replace(self._sum(other, 1), restarted=self.restarted or other.restarted)

    def _sum(self, other: "Counters", sign: int) -> "Counters":
        self._check_same_engine(other)
        # `drafted` stays unknown unless both sides know it; position lists may differ in length.
        known = self.drafted is not None and other.drafted is not None
        positions = zip_longest(self.accepted_at, other.accepted_at, fillvalue=0.0)
        return replace(
            self,
            rounds=self.rounds + sign * other.rounds,
            accepted=self.accepted + sign * other.accepted,
            drafted=(self.drafted or 0) + sign * (other.drafted or 0) if known else None,
            accepted_at=tuple(mine + sign * theirs for mine, theirs in positions),
            requests=self.requests + sign * other.requests,
            uncounted=self.uncounted + sign * other.uncounted,
            domains={
                name: self._domain(name)._sum(other._domain(name), sign)
                for name in dict.fromkeys([*self.domains, *other.domains])
            },
        )

    def _domain(self, name: str) -> "Counters":
        """Counts of a domain; none where it had no request."""
        return self.domains.get(name) or Counters(self.engine, self.convention, 0.0, 0.0, 0.0)

    def _check_same_engine(self, other: "Counters") -> None:
        if (self.engine, self.convention) != (other.engine, other.convention):
            raise InputError(
                f"counts of {self.engine} ({self.convention}) and {other.engine} ({other.convention}): "
                "only one engine's can be put together"
            )


def parse(text: str, source: str) -> Counters:
    """Read a scrape. `source` names it in errors. Raises InputError."""
    found = _parsed(text, source)
    counts = (found.rounds, found.accepted, found.drafted or 0.0, *found.accepted_at)
    if not all(0 <= count < MOST_COUNT for count in counts):
        wrong = next(count for count in counts if not 0 <= count < MOST_COUNT)
        raise InputError(f"{source}: a count of {wrong:g}; must be a number from 0 and below {MOST_COUNT:g}")
    return found


def _parsed(text: str, source: str) -> Counters:
    # 1) The engine by the prefix of its metrics' names.
    found = samples_by_name(text, source)
    for engine, prefix, convention in (("vllm", "vllm:", "unclipped"), ("llama.cpp", "llamacpp:", "drafts")):
        if f"{prefix}{_NUM}drafts_total" in found:
            return _by_drafts(found, engine, prefix, convention, source)  # type: ignore[arg-type]
    if "sglang:spec_verify_calls_total" in found:
        return _sglang(found, source)
    # 2) Nothing was found: say what is missing.
    if any(name.startswith("sglang:") for name in found):
        raise InputError(
            f"{source}: SGLang without sglang:spec_verify_calls_total: it has verified no draft yet, or is a version "
            "that does not count them"
        )
    raise InputError(
        f"{source}: holds no counts of speculative decoding; known are vLLM's, SGLang's and llama.cpp's metrics, and "
        "responses of vLLM and llama.cpp"
    )


Samples = Mapping[str, Sequence[tuple[Mapping[str, str], float]]]
"""Labels and value of each sample, by the metric's name."""


def samples_by_name(text: str, source: str) -> Samples:
    """Samples of a Prometheus text. Raises InputError, naming `source`, for any other."""
    # The parser looks at each character, takes time quadratic in a line, and keeps an object of hundreds of bytes for
    # each: 64 MB of labels would take it minutes.
    lines = text.split("\n")
    if len(lines) > _MOST_LINES or max(map(len, lines)) > _LONGEST_LINE or len(text) > _MOST_CHARACTERS:
        raise InputError(
            f"{source}: must have {_MOST_LINES:,} lines of {_LONGEST_LINE:,} characters at most, and "
            f"{_MOST_CHARACTERS:,} in all"
        )
    found: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, float(sample.value)))
    except (ValueError, IndexError, OverflowError) as error:
        raise InputError(f"{source}: not Prometheus text ({one_line(error, 120)})") from None
    return found


def total(found: Samples, name: str) -> float:
    """Sum of a metric over all labels: models and processes of one engine."""
    return sum(value for _, value in found.get(name, ()))


def _by_drafts(found: Samples, engine: str, prefix: str, convention: Convention, source: str) -> Counters:
    # Counts by position, summed over the other labels.
    by_position: dict[int, float] = defaultdict(float)
    for labels, value in found.get(f"{prefix}{_NUM}accepted_tokens_per_pos_total", ()):
        position = labels.get("position", "0")
        if not position.isdecimal() or len(position) > 4:  # a list is made up to the largest one
            raise InputError(f"{source}: position {position[:40]!r} of a draft: must be a number below 10000")
        by_position[int(position)] += value
    return Counters(
        engine,
        convention,
        rounds=total(found, f"{prefix}{_NUM}drafts_total"),
        accepted=total(found, f"{prefix}{_NUM}accepted_tokens_total"),
        drafted=total(found, f"{prefix}{_NUM}draft_tokens_total"),
        accepted_at=tuple(by_position[k] for k in range(max(by_position, default=-1) + 1)),
    )


def _sglang(found: Samples, source: str) -> Counters:
    """Counters of SGLang. All three metrics are counted when a request ends.

    A request's first token comes from the prompt, without a round, so accepted = tokens - requests - rounds.
    """
    # All three are needed: with one of them missing the rounds would be wrong.
    needed = ("sglang:generation_tokens_total", "sglang:num_requests_total", "sglang:spec_verify_calls_total")
    missing = next((name for name in needed if name not in found), None)
    if missing:
        raise InputError(f"{source}: {missing}: is missing beside sglang:spec_verify_calls_total")
    tokens, requests, rounds = (total(found, name) for name in needed)
    return Counters("sglang", "rounds", rounds, max(tokens - requests - rounds, 0.0))


FEWEST_ROUNDS = 200
"""Least number of served rounds for a verdict: with fewer their mean is not near normal."""
_DEPTH_SLACK = 0.02  # of K: drafts that engines count in flight when they are looked at


@dataclass(frozen=True)
class ExpectedAcceptance:
    """Acceptance of a draft on the holdout, at the K or tree that it was chosen at."""

    draft_tokens: int
    tree: str
    taus: dict[Convention, Estimate]
    acceptance: Estimate
    alphas: tuple[Estimate, ...]
    rounds: float
    """Number of rounds in which anything was drafted."""
    confidence: float

    @property
    def variance(self) -> float:
        """Variance of the tokens that one full round accepts."""
        return round_variance(np.cumprod([alpha.value for alpha in self.alphas]).tolist())

    @property
    def design_effect(self) -> float:
        """Variance of tau over that of independent rounds, since rounds of one conversation are alike; at least 1."""
        # Ratio of the variance between clusters to that of independent rounds.
        error = self.taus["unclipped"].error
        independent = self.variance / self.rounds if self.rounds else math.nan
        return max(1.0, error**2 / independent) if independent > 0 and math.isfinite(error) else 1.0


@dataclass(frozen=True)
class AcceptanceMismatch:
    """Served tau beside the expected one; `summary.describe_mismatch` puts it in words."""

    engine: str
    rounds: float
    served: Estimate
    expected: Estimate
    difference: Estimate
    """Served minus expected, with a two-sided interval."""
    mismatch: bool | None
    """Whether the whole interval lies beyond the margin; None: not known."""
    as_expected: bool
    """Whether the whole interval lies within the margin."""
    more_rounds: float
    """Further served rounds after which the interval, at this difference, would lie on one side of the margin;
    infinite: no number would do, as the holdout's own interval is too wide for that."""
    unknown: str
    """Reason why the test gives no verdict; empty where it gives one."""


def expected_acceptance(table: pa.Table, confidence: float) -> ExpectedAcceptance:
    """Expected acceptance from the counts that decide (`leaderboard.serving`), all of one K or tree."""
    # tau in each engine's convention, so that only like is compared with like.
    K = int(values(table, "draft_tokens")[0])
    sums = cluster_sums(table, K)
    drafting_C = sums.position("reached", 0)  # rounds in which anything was drafted
    accepted_C, bounds = sums.column("accepted"), tau_bounds(table)
    drafts = ratio(drafting_C + accepted_C, drafting_C, confidence, "rounds with a draft", bounds)
    return ExpectedAcceptance(
        draft_tokens=K,
        tree=str(values(table, "tree")[0]),
        taus={"rounds": tau(table, confidence), "drafts": drafts, "unclipped": unclipped_tau(table, confidence)},
        acceptance=acceptance(table, confidence),
        alphas=tuple(alphas(table, confidence)),
        rounds=float(drafting_C.sum()),
        confidence=confidence,
    )


def compare(served: Counters, expected: ExpectedAcceptance, margin: float) -> AcceptanceMismatch:
    """Test served against expected acceptance: a mismatch is a difference whose whole interval lies further than
    `margin` x the expected tau from 0."""
    tau_expected, rounds = expected.taus[served.convention], served.rounds
    # The served tau's error: per-round variance, from the engine's own positions where it counts them.
    variance = expected.variance
    if served.accepted_at and rounds > 0:
        variance = round_variance([count / rounds for count in served.accepted_at])
    error = math.sqrt(variance * expected.design_effect / rounds) if rounds > 0 else math.nan
    # Both errors together, and how many standard errors an interval reaches.
    both = math.hypot(error, tau_expected.error)
    reach = student((1 + expected.confidence) / 2, tau_expected.freedom)
    difference = _within(served.tau - tau_expected.value, reach * both)
    # A verdict needs the whole interval beyond the margin, on either side.
    unknown, allowed = _why_unknown(served, expected, tau_expected), margin * tau_expected.value
    mismatch = None if unknown else difference.low > allowed or difference.high < -allowed
    within = not unknown and -allowed <= difference.low and difference.high <= allowed
    # The largest error that would tell, and the rounds whose error is what the holdout's leaves of it.
    largest = abs(allowed - abs(difference.value)) / reach
    left = largest**2 - tau_expected.error**2
    more = max(variance * expected.design_effect / left - rounds, 0.0) if left > 0 else math.inf
    here = _within(served.tau, reach * error)
    return AcceptanceMismatch(served.engine, rounds, here, tau_expected, difference, mismatch, within, more, unknown)


def round_variance(at_least_K: Sequence[float]) -> float:
    """Variance of what a round accepts, from P(it accepts at least 1), P(at least 2), ...: E[n^2] - E[n]^2."""
    mean = sum(at_least_K)
    square = sum((2 * k + 1) * share for k, share in enumerate(at_least_K))
    return max(square - mean**2, 0.0)


def _why_unknown(served: Counters, expected: ExpectedAcceptance, tau_expected: Estimate) -> str:
    """Reason why served and expected acceptance cannot be compared; empty: they can."""
    # Too few rounds; another depth than was scored; or no interval on the holdout's side.
    if served.rounds < FEWEST_ROUNDS:
        return f"{served.rounds:,.0f} rounds, at least {FEWEST_ROUNDS} are needed"
    K, deepest = expected.draft_tokens, len(served.accepted_at)
    if deepest > K:
        return f"it drafts {deepest} positions, the holdout was scored at K = {K}"
    each = None if served.drafted is None else served.drafted / served.rounds
    if served.convention == "unclipped" and not expected.tree and each is not None and abs(each - K) > _DEPTH_SLACK * K:
        return f"it drafts {each:.2f} tokens a round, the holdout was scored at K = {K}"
    if not math.isfinite(tau_expected.error):
        return f"the holdout's tau has no interval ({tau_expected.reason})"
    return ""


def _within(value: float, reach: float) -> Estimate:
    return Estimate(value, value - reach, value + reach)
