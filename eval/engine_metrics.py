"""What a serving engine counts for itself, as it says it: rounds, drafted and accepted tokens.

| engine | read from | booking |
|---|---|---|
| vLLM | `/metrics`: `vllm:spec_decode_num_*_total` | unclipped |
| llama.cpp | `/metrics`: `llamacpp:spec_decode_num_*_total` | drafts |
| llama.cpp | its responses, JSON with `timings.draft_n`, `draft_n_accepted`, `predicted_n` | rounds |
| SGLang | `/metrics`: `sglang:generation_tokens_total`, `num_requests_total`, `spec_verify_calls_total` | rounds |

SGLang's gauge `sglang:spec_accept_length` is of its last few steps only and has no counts behind it: it is not used.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from prometheus_client.parser import text_string_to_metric_families

from ..errors import InputError
from .counts import values
from .figures import Bootstrap, Estimate, acceptance, alphas, cluster_sums, ratio, tau, unclipped_tau

Booking = Literal["rounds", "drafts", "unclipped"]
"""What counts as a round. `rounds`: every pass after the first token, as draftforge does. `drafts`: those with a draft,
an answer's last one clipped to what it still needs. `unclipped`: the same, no draft clipped."""
_NUM = "spec_decode_num_"


@dataclass(frozen=True)
class Counters:
    """Counts since the engine started, or between two looks at it."""

    engine: str
    booking: Booking
    rounds: float
    accepted: float
    drafted: float | None = None
    accepted_at: tuple[float, ...] = ()
    """Rounds that accepted at least 1, 2, ... tokens; empty where the engine does not say."""
    restarted: bool = False
    """A counter went backwards: these are the counts since then."""

    @property
    def tau(self) -> float:
        """Tokens a round, in the engine's booking; NaN without a round."""
        return 1.0 + self.accepted / self.rounds if self.rounds > 0 else math.nan

    def since(self, before: "Counters") -> "Counters":
        """What was counted after `before`; a counter that went backwards began again at 0."""
        self._check(before)
        if (
            self.rounds < before.rounds
            or self.accepted < before.accepted
            or (self.drafted or 0) < (before.drafted or 0)
        ):
            return replace(self, restarted=True)
        return self._combined(before, -1)

    def plus(self, other: "Counters") -> "Counters":
        """Both replicas together."""
        self._check(other)
        return replace(self._combined(other, 1), restarted=self.restarted or other.restarted)

    def _combined(self, other: "Counters", sign: int) -> "Counters":
        known = self.drafted is not None and other.drafted is not None
        depth = max(len(self.accepted_at), len(other.accepted_at))
        pairs = zip(_padded(self.accepted_at, depth), _padded(other.accepted_at, depth))
        return replace(
            self,
            rounds=self.rounds + sign * other.rounds,
            accepted=self.accepted + sign * other.accepted,
            drafted=(self.drafted or 0) + sign * (other.drafted or 0) if known else None,
            accepted_at=tuple(mine + sign * theirs for mine, theirs in pairs),
        )

    def _check(self, other: "Counters") -> None:
        if (self.engine, self.booking) != (other.engine, other.booking):
            raise InputError(
                f"counts of {self.engine} ({self.booking}) and {other.engine} ({other.booking}): "
                "only one engine's can be put together"
            )


def parse(text: str, source: str) -> Counters:
    """Read a scrape or llama.cpp's responses. `source` names it in errors. Raises InputError."""
    if text.lstrip().startswith(("{", "[")):
        return _timings(_responses(text, source), source)
    found = _samples(text, source)
    for engine, prefix, booking in (("vllm", "vllm:", "unclipped"), ("llama.cpp", "llamacpp:", "drafts")):
        if f"{prefix}{_NUM}drafts_total" in found:
            return _by_drafts(found, engine, prefix, booking)  # type: ignore[arg-type]
    if "sglang:spec_verify_calls_total" in found:
        return _sglang(found, source)
    if any(name.startswith("sglang:") for name in found):
        raise InputError(
            f"{source}: SGLang without sglang:spec_verify_calls_total: it has verified no draft yet, or is a version "
            "that does not count them"
        )
    raise InputError(
        f"{source}: holds no counts of speculative decoding; known are vLLM's, SGLang's and llama.cpp's metrics and "
        "llama.cpp's responses with timings"
    )


Found = Mapping[str, Sequence[tuple[Mapping[str, str], float]]]


def _samples(text: str, source: str) -> Found:
    """Samples by name, of every label together."""
    found: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, float(sample.value)))
    except (ValueError, IndexError) as error:
        raise InputError(f"{source}: not Prometheus text ({str(error).splitlines()[0][:120]})") from None
    return found


def _total(found: Found, name: str) -> float:
    return sum(value for _, value in found.get(name, ()))


def _by_drafts(found: Found, engine: str, prefix: str, booking: Booking) -> Counters:
    by_position: dict[int, float] = {}
    for labels, value in found.get(f"{prefix}{_NUM}accepted_tokens_per_pos_total", ()):
        place = int(labels.get("position", 0))
        by_position[place] = by_position.get(place, 0.0) + value
    return Counters(
        engine,
        booking,
        rounds=_total(found, f"{prefix}{_NUM}drafts_total"),
        accepted=_total(found, f"{prefix}{_NUM}accepted_tokens_total"),
        drafted=_total(found, f"{prefix}{_NUM}draft_tokens_total"),
        accepted_at=tuple(by_position.get(place, 0.0) for place in range(max(by_position, default=-1) + 1)),
    )


def _sglang(found: Found, source: str) -> Counters:
    """All three are counted when a request ends. Its first token comes from the prompt, without a round."""
    needed = ("sglang:generation_tokens_total", "sglang:num_requests_total", "sglang:spec_verify_calls_total")
    missing = next((name for name in needed if name not in found), None)
    if missing:
        raise InputError(f"{source}: {missing}: is missing beside sglang:spec_verify_calls_total")
    tokens, requests, rounds = (_total(found, name) for name in needed)
    return Counters("sglang", "rounds", rounds, max(tokens - requests - rounds, 0.0))


def _responses(text: str, source: str) -> Iterator[Mapping[str, Any]]:
    """A response, a list of them, or one a line."""
    try:
        whole = json.loads(text)
        answers = whole if isinstance(whole, list) else [whole]
    except ValueError:
        answers = [_line(line, number, source) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    for number, answer in enumerate(answers, 1):
        timings = answer.get("timings", answer) if isinstance(answer, dict) else None
        if not isinstance(timings, dict) or "predicted_n" not in timings:
            raise InputError(f"{source}: response {number}: has no timings with predicted_n, as llama.cpp's have")
        yield timings


def _line(line: str, number: int, source: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise InputError(f"{source}: line {number}: not valid JSON ({error})") from None


def _timings(responses: Iterator[Mapping[str, Any]], source: str) -> Counters:
    """A response of n tokens, a of them accepted ones of drafts, took n - 1 - a rounds after its first token."""
    rounds = accepted = drafted = 0.0
    for number, timings in enumerate(responses, 1):
        values = [timings.get(name, 0) for name in ("predicted_n", "draft_n", "draft_n_accepted")]
        if not all(isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 for value in values):
            raise InputError(f"{source}: response {number}: predicted_n, draft_n, draft_n_accepted = {values}: counts?")
        tokens, drafts, right = map(float, values)
        rounds, accepted, drafted = rounds + max(tokens - 1 - right, 0.0), accepted + right, drafted + drafts
    return Counters("llama.cpp", "rounds", rounds, accepted, drafted)


def _padded(values: tuple[float, ...], length: int) -> tuple[float, ...]:
    return values + (0.0,) * (length - len(values))


FEWEST_ROUNDS = 200
"""A normal interval of fewer says nothing."""
_DEPTH_SLACK = 0.02  # of K: drafts that engines count in flight when they are looked at


@dataclass(frozen=True)
class ExpectedAcceptance:
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
class AcceptanceMismatch:
    """Served beside promised."""

    served: Estimate
    promised: Estimate
    difference: Estimate
    """Served minus promised, with a two-sided interval."""
    parts: bool | None
    """Whether the whole interval lies beyond the margin; None: not known."""
    why: str
    """In words, numbers included."""


def promise_of(table: pa.Table, bootstrap: Bootstrap) -> ExpectedAcceptance:
    """From the counts that decide (`serving`), all of one K or tree."""
    K = int(values(table, "draft_tokens")[0])
    sums = cluster_sums(table, K)
    drafting_C = sums.sums_CF[:, 4]  # reached position 1: something was drafted
    drafts = ratio(drafting_C + sums.column("accepted"), drafting_C, bootstrap, "rounds with a draft")
    return ExpectedAcceptance(
        draft_tokens=K,
        tree=str(values(table, "tree")[0]),
        taus={"rounds": tau(table, bootstrap), "drafts": drafts, "unclipped": unclipped_tau(table, bootstrap)},
        acceptance=acceptance(table, bootstrap),
        alphas=tuple(alphas(table, bootstrap)),
        rounds=float(drafting_C.sum()),
        confidence=bootstrap.confidence,
    )


def compare(served: Counters, promise: ExpectedAcceptance, margin: float) -> AcceptanceMismatch:
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
    return AcceptanceMismatch(here, promised, difference, parts, f"{words}; {verdict} (margin {margin:.0%})")


def round_variance(at_least_K: Sequence[float]) -> float:
    """Variance of what a round accepts, from P(it accepts at least 1), P(at least 2), ...: E[n^2] - E[n]^2."""
    mean = sum(at_least_K)
    square = sum((2 * k + 1) * share for k, share in enumerate(at_least_K))
    return max(square - mean**2, 0.0)


def _served_spread(served: Counters) -> float:
    return round_variance([count / served.rounds for count in served.accepted_at]) if served.rounds > 0 else math.nan


def _unknown(served: Counters, promise: ExpectedAcceptance, difference: Estimate) -> str:
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
