"""Prometheus metrics of a champion and of what is served: pure, from what is known to families with help texts.

Times are Unix seconds. What is not known has no sample, so that an alert on absence sees it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from ..eval.figures import Estimate
from ..eval.parting import Parting
from ..eval.served import Counters


@dataclass(frozen=True)
class Standing:
    """What the registry and the work folder say of a target's champion."""

    target: str
    target_name: str
    model: str
    version: int | None = None
    family: str = ""
    step: int = 0
    draft_tokens: int = 0
    tree: str = ""
    created_at: float | None = None
    promoted_at: float | None = None
    tau: Estimate | None = None
    speedup: float | None = None
    acceptance: Estimate | None = None
    alphas: Sequence[Estimate] = ()
    stale: bool | None = None
    stale_causes: Sequence[str] = ()
    checked_at: float | None = None
    decision: str | None = None
    """promote or refuse, of the newest version that a gate judged."""
    decided_version: int | None = None
    decided_at: float | None = None
    run_ended_at: float | None = None
    """When the last run of the recipe ended."""
    run_succeeded: bool | None = None


def champion_families(standing: Standing, now: float) -> Iterator[Metric]:
    """The champion: who, how good, how old, stale or not; the last decision and the last run."""
    labels = {"target": standing.target[:12], "model": standing.model}
    about = labels | {
        "target_name": standing.target_name,
        "version": "" if standing.version is None else str(standing.version),
        "family": standing.family,
        "step": str(standing.step),
        "draft_tokens": str(standing.draft_tokens),
        "tree": standing.tree,
    }
    there = standing.version is not None
    yield _one("champion_exists", "Whether the target has a champion.", labels, float(there))
    if there:
        yield _one("champion_info", "The champion of the target; always 1.", about, 1.0)
        yield from _quality(standing, labels)
        yield from _ages(standing, labels, now)
    yield from _staleness(standing, labels)
    if standing.decision is not None:
        told = labels | {"decision": standing.decision, "version": str(standing.decided_version)}
        yield _one("last_decision", "The gate's last decision, promote or refuse; always 1.", told, 1.0)
    yield from _known("last_decision_timestamp_seconds", "When it was taken.", labels, standing.decided_at)
    yield from _known("last_retrain_timestamp_seconds", "When the last run ended.", labels, standing.run_ended_at)
    succeeded = None if standing.run_succeeded is None else float(standing.run_succeeded)
    yield from _known("last_retrain_success", "Whether the last run ended well.", labels, succeeded)


def served_families(counters: Counters | None, parting: Parting | None) -> Iterator[Metric]:
    """What an engine counts, beside what was promised. No counters: the engine did not answer."""
    yield _one("served_up", "Whether the engine's counters could be read.", {}, float(counters is not None))
    if counters is None:
        return
    labels = {"engine": counters.engine}
    yield _one("served_rounds", "Rounds in the window that is compared.", labels, counters.rounds)
    yield from _known("served_tau", "Tokens a round, as the engine counts them.", labels, counters.tau)
    if parting is None:
        return
    yield from _estimate("promised_tau", "Holdout tau in the engine's counting.", labels, parting.promised)
    yield from _estimate("served_difference", "Served minus promised tau.", labels, parting.difference, value=False)
    parts = None if parting.parts is None else float(parting.parts)
    yield from _known("served_parts", "1: served tau parts from the promised one; absent: not known.", labels, parts)


def _quality(standing: Standing, labels: Mapping[str, str]) -> Iterator[Metric]:
    if standing.tau is not None:
        yield from _estimate("champion_tau", "Tokens per pass of the target, on the holdout.", labels, standing.tau)
    yield from _known(
        "champion_expected_speedup", "Over plain decoding at the recipe's load.", labels, standing.speedup
    )
    if standing.acceptance is not None:
        overall = standing.acceptance.value
        yield from _known("champion_drafted_accepted", "Share of drafted tokens accepted.", labels, overall)
    positions = _gauge(
        "champion_acceptance", "Accepted at a position of the draft, of rounds that reach it.", labels, "position"
    )
    for place, alpha in enumerate(standing.alphas, 1):
        if math.isfinite(alpha.value):
            positions.add_metric([*labels.values(), str(place)], alpha.value)
    yield positions


def _ages(standing: Standing, labels: Mapping[str, str], now: float) -> Iterator[Metric]:
    created, promoted = standing.created_at, standing.promoted_at
    yield from _known("champion_created_timestamp_seconds", "When the version was registered.", labels, created)
    yield from _known("champion_promoted_timestamp_seconds", "When it became champion.", labels, promoted)
    since = promoted if promoted is not None else created
    age = None if since is None else max(now - since, 0.0)
    yield from _known("champion_age_seconds", "Since it became champion.", labels, age)


def _staleness(standing: Standing, labels: Mapping[str, str]) -> Iterator[Metric]:
    stale = None if standing.stale is None else float(standing.stale)
    yield from _known("champion_stale", "Whether the last check found a new draft due.", labels, stale)
    causes = _gauge("champion_stale_cause", "Why; always 1.", labels, "cause")
    for cause in standing.stale_causes:
        causes.add_metric([*labels.values(), cause], 1.0)
    yield causes
    yield from _known("staleness_checked_timestamp_seconds", "When that was.", labels, standing.checked_at)


def _estimate(
    name: str, text: str, labels: Mapping[str, str], estimate: Estimate, value: bool = True
) -> Iterator[Metric]:
    """The figure and its interval's ends, as three metrics."""
    if value:
        yield from _known(name, text, labels, estimate.value)
    yield from _known(f"{name}_low", f"Lower end of the interval. {text}", labels, estimate.low)
    yield from _known(f"{name}_high", f"Upper end of the interval. {text}", labels, estimate.high)


def _known(name: str, text: str, labels: Mapping[str, str], value: float | None) -> Iterator[Metric]:
    if value is not None and math.isfinite(value):
        yield _one(name, text, labels, value)


def _one(name: str, text: str, labels: Mapping[str, str], value: float) -> Metric:
    family = _gauge(name, text, labels)
    family.add_metric(list(labels.values()), value)
    return family


def _gauge(name: str, text: str, labels: Mapping[str, str], *more: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"draftforge_{name}", text, labels=[*labels, *more])
