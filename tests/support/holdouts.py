"""Simulated holdouts, as unbalanced as real mixes: few clusters of unlike size, domains of unlike acceptance.

A cluster of near-duplicates holds one conversation or many, and lies in a domain with tau 1.3, 1.8 or 3.0 (40, 40 and
20 % of the clusters); its own tau varies around that by a beta distribution. `TAU` is the tau of all traffic.

- equal: a conversation each, of lengths that vary log-normally.
- unequal: P(a cluster has more than n conversations) = n^-1.5.
- lumped: one cluster in six has ten conversations.

Shape letters: C clusters.
"""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy.special import betaincinv

K = 4
CLUSTERS = (3, 5, 8, 20, 48)
Mix = Literal["equal", "unequal", "lumped"]
MIXES: tuple[Mix, ...] = ("equal", "unequal", "lumped")
Floats = np.ndarray[Any, np.dtype[np.float64]]
_ACCEPTED, _SHARES, _KAPPA = (np.array([1.3, 1.8, 3.0]) - 1) / K, np.array([0.4, 0.4, 0.2]), 12.0
_QUANTILES = (np.arange(10_000) + 0.5) / 10_000
_ROUNDS = np.array([np.mean(1 / (1 + K * betaincinv(p * _KAPPA, (1 - p) * _KAPPA, _QUANTILES))) for p in _ACCEPTED])
"""Expected rounds a token in each domain."""
TAU = float(1 / (_SHARES @ _ROUNDS))


class Holdout(NamedTuple):
    """Answers of a holdout by cluster, [C]: their tokens, and the rounds that two drafts take for them."""

    tokens_C: Floats
    rounds_C: Floats
    other_C: Floats
    """Rounds of another draft, whose tau over all traffic is TAU / (1 + gain)."""


def holdouts(
    mix: Mix, clusters: int, count: int, gain: float = 0.0, by_domain: tuple[float, ...] = (0, 0, 0), seed: int = 0
) -> Iterator[Holdout]:
    """Draw `count` holdouts. The first draft is faster than the other by `gain` over all traffic, with 12 % of noise in
    a cluster; `by_domain`: how much better than that it is in each domain, of which the average is taken off."""
    rng, shape = np.random.default_rng(seed), (count, clusters)
    # 1) Sizes.
    size = np.ones(shape)
    if mix == "unequal":
        size = np.floor(rng.random(shape) ** (-1 / 1.5))
    elif mix == "lumped":
        size[:, : max(clusters // 6, 1)] = 10
    tokens = 60 * size * np.exp(0.6 * rng.standard_normal(shape))
    # 2) Rounds of both drafts. The expected value of the ratio of their rounds is 1 + gain.
    domain = rng.choice(3, p=_SHARES, size=shape)
    p = _ACCEPTED[domain]
    rounds = tokens / (1 + K * rng.beta(p * _KAPPA, (1 - p) * _KAPPA))
    slower = 1.0 + np.array(by_domain)
    slower *= (1 + gain) * (_SHARES @ _ROUNDS) / (_SHARES @ (_ROUNDS * slower))
    other = rounds * slower[domain] * np.exp(0.12 * rng.standard_normal(shape) - 0.12**2 / 2)
    yield from map(Holdout, tokens, rounds, other)
