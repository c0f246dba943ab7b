"""From tau to a speed-up, and back: what a round and what no draft shortens cost, in times of plain decoding.

Plain decoding of an answer takes 1. A draft takes `fixed` for what does not depend on tau (the prompt, read by both
models) and `rounds` / tau for its rounds. At batch 1 without a prompt that is Leviathan et al. 2023 (arXiv 2211.17192,
theorem 3.8) with measured times: a speed-up of tau x plain / round.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from .acceptance import Estimate

Taus = TypeVar("Taus", float, NDArray[np.float64])
_BISECTIONS = 60


class Gain(NamedTuple):
    """Time of an answer over plain decoding's, as a function of tau: fixed + rounds / tau."""

    fixed: float
    rounds: float

    def speedup(self, tau: Taus) -> Taus:
        """Plain time over the draft's; grows with tau, up to 1 / fixed."""
        return tau / (self.fixed * tau + self.rounds)

    def estimate(self, tau: Estimate) -> Estimate:
        """The speed-up with tau's interval; times are taken as they are."""
        return tau._replace(value=self.speedup(tau.value), low=self.speedup(tau.low), high=self.speedup(tau.high))

    @property
    def break_even_tau(self) -> float:
        """The tau at which both take as long; infinite where no tau is enough."""
        return self.rounds / (1 - self.fixed) if self.fixed < 1 else math.inf


def pooled(gains: Sequence[Gain], shares: Sequence[float]) -> Gain:
    """Of work that takes plain decoding so large shares of its time: times add up, so speed-ups pool harmonically."""
    total = sum(shares)
    return Gain(*(sum(share * part for share, part in zip(shares, parts)) / total for parts in zip(*gains)))


def chain_tau(alpha: float, K: int) -> float:
    """Tokens a round of a chain of K, each accepted with probability alpha: 1 + alpha + ... + alpha^K."""
    return sum(alpha**k for k in range(K + 1))


def chain_alpha(tau: float, K: int) -> float:
    """The acceptance a token at which a chain of K yields tau: 0 where less would do, NaN where none is enough."""
    if not tau <= K + 1:
        return math.nan
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if chain_tau(middle, K) < tau else (low, middle)
    return high if tau > 1 else 0.0
