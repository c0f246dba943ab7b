"""How often the gate is wrong: simulated candidates against a champion, through the bootstrap that the scores use.

A cluster's tokens and rounds are drawn for both drafts, paired by the conversation's own difficulty.
Shape letters: S simulated promotions, C clusters.
"""

import functools
from statistics import NormalDist
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from draftforge.eval.acceptance import Bootstrap, Estimate, tau, tau_difference
from draftforge.registry.gate import (
    POWER,
    DomainFigures,
    Evidence,
    Figures,
    GateSettings,
    Interval,
    decide,
    more_conversations,
)

pytestmark = pytest.mark.slow
SIMULATED, ROUNDS, TAU = 120, 40.0, 2.0
BOOTSTRAP = Bootstrap(samples=250)
NOISE = 0.12
"""Standard deviation of one conversation's difference between two drafts, as a share of tau."""


def table(tau_C: np.ndarray[Any, np.dtype[np.float64]], domain: str) -> pa.Table:
    names = [f"{domain}{i}" for i in range(len(tau_C))]
    rounds = np.full(len(tau_C), ROUNDS)
    columns = {"conversation": names, "cluster": names, "turn": [0] * len(names), "setting": ["t0"] * len(names)}
    figures = {"rounds": rounds, "tokens": rounds * tau_C, "drafted": rounds, "accepted": rounds}
    return pa.table({**columns, **figures})


def interval(estimate: Estimate) -> Interval:
    return Interval(value=estimate.value, low=estimate.low, high=estimate.high)


def one_candidate(rng: np.random.Generator, gains: dict[str, float], clusters: int) -> Evidence:
    """Evidence about a candidate with these true gains by domain; speed-up is tau, in units of its own."""
    pairs, domains = [], {}
    for name, gain in gains.items():
        theirs_C = TAU * (1 + 0.25 * rng.standard_normal(clusters)).clip(0.4)
        mine_C = theirs_C * (1 + gain) + TAU * NOISE * rng.standard_normal(clusters)
        mine, theirs = table(mine_C, name), table(theirs_C, name)
        pairs.append((mine, theirs))
        difference = interval(tau_difference(mine, theirs, BOOTSTRAP))
        speed = tau(theirs, Bootstrap(samples=10)).value
        domains[name] = DomainFigures(conversations=clusters, champion_speedup=speed, difference=difference)
    mine, theirs = (pa.concat_tables(side) for side in zip(*pairs))
    of_all = tau_difference(mine, theirs, BOOTSTRAP)
    figures = [Figures(tau=one, speedup=one) for one in (tau(side, Bootstrap(10)).value for side in (mine, theirs))]
    return Evidence(
        candidate=figures[0],
        conversations=clusters * len(gains),
        confidence=0.95,
        lossless=True,
        export_reads_back=True,
        holdout_overlap=0,
        compared="m/1",
        champion=figures[1],
        difference=interval(of_all),
        domains=domains if len(gains) > 1 else {},
    )


@functools.cache
def share_promoted(gains: tuple[float, ...], clusters: int = 60, margin: float = 0.02) -> float:
    """Of simulated candidates with these true gains, one for each domain."""
    rng, settings = np.random.default_rng(7), GateSettings(non_inferiority_margin=margin)
    named = {f"d{i}": gain for i, gain in enumerate(gains)}
    return float(np.mean([decide(one_candidate(rng, named, clusters), settings).promote for _ in range(SIMULATED)]))


TWO_ERRORS = 0.025 + 2 * (0.025 * 0.975 / SIMULATED) ** 0.5 + 0.01
"""The nominal 2.5 %, two standard errors of the simulation, and 1 % for percentile intervals of 60 clusters."""


def test_a_draft_slower_by_the_margin_is_hardly_ever_promoted() -> None:
    assert share_promoted((-0.02,)) <= TWO_ERRORS
    assert share_promoted((-0.05,)) == 0.0


def test_with_no_margin_an_equal_draft_is_hardly_ever_promoted() -> None:
    assert 0.0 < share_promoted((0.0,), margin=0.0) <= TWO_ERRORS


def test_within_the_margin_an_equal_draft_may_be() -> None:
    """What the margin buys and costs: no more than half of them, since the candidate must look faster too."""
    assert TWO_ERRORS < share_promoted((0.0,)) <= 0.5


def test_one_domain_that_loses_the_margin_stops_the_rest() -> None:
    """However many domains there are, and though the whole gains: no correction for their number is needed."""
    assert share_promoted((-0.05, 0.15, 0.15)) <= TWO_ERRORS


def test_a_better_draft_is_promoted() -> None:
    assert share_promoted((0.08, 0.08)) > 0.95


def test_the_named_number_of_conversations_gives_the_named_power() -> None:
    """In closed form: with that many the lower end passes with probability POWER, were the gain what it seems."""
    normal, value, floor, confidence, n = NormalDist(), 0.01, -0.02, 0.95, 40
    z = normal.inv_cdf(0.975)
    error = 0.03
    more = more_conversations(value, value - z * error, floor, n, confidence)
    assert more is not None and more > 0
    then = error * (n / (n + more)) ** 0.5
    assert normal.cdf((value - floor) / then - z) == pytest.approx(POWER, abs=0.005)


@pytest.mark.parametrize(
    ("value", "low"), [(-0.02, -0.05), (-0.5, -0.6), (0.1, float("nan")), (float("nan"), 0.0), (0.1, -float("inf"))]
)
def test_no_number_is_named_where_none_would_help(value: float, low: float) -> None:
    assert more_conversations(value, low, -0.02, 40, 0.95) is None


def test_the_named_number_is_about_right_in_simulation() -> None:
    """Candidates with a small true gain: what the gate asks for at 40 clusters is what lets four in five through."""
    rng, settings = np.random.default_rng(3), GateSettings()
    asked = [decide(one_candidate(rng, {"d": 0.02}, 40), settings).numbers.more_conversations for _ in range(50)]
    typical = int(np.median([40 + (more or 0) for more in asked if more]))
    assert share_promoted((0.02,), clusters=typical) > 0.6
