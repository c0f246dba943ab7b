"""Speed-up from tau, and the break-even tau, with times in units of plain decoding.

Plain decoding of an answer takes 1. Speculative decoding takes `fixed` for the part that does not depend on tau (the
prompt, read by both models) and `rounds` / tau for its rounds. At batch 1 without a prompt that is Leviathan et al.
2023 (arXiv 2211.17192, theorem 3.8) with measured times: a speed-up of tau x plain / round.
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
    """Relative time of an answer as a function of tau, fixed + rounds / tau; plain decoding takes 1."""

    fixed: float
    rounds: float

    def speedup(self, tau: Taus) -> Taus:
        """Speed-up at a tau: plain time over speculative time. It grows with tau, up to 1 / fixed."""
        return tau / (self.fixed * tau + self.rounds)

    def estimate(self, tau: Estimate) -> Estimate:
        """Speed-up with an interval that comes from tau's; times count as exact."""
        slope = self.rounds / (self.fixed * tau.value + self.rounds) ** 2  # of the speed-up at this tau
        ends = {name: self.speedup(getattr(tau, name)) for name in ("value", "low", "high")}
        return tau._replace(**ends, error=tau.error * slope)

    @property
    def break_even_tau(self) -> float:
        """Break-even tau, at which the speed-up is 1; infinite where no tau is enough."""
        return self.rounds / (1 - self.fixed) if self.fixed < 1 else math.inf


def pooled(gains: Sequence[Gain], shares: Sequence[float]) -> Gain:
    """Pooled gain of several parts of the work. `shares`: of plain decoding's time in each part.

    Times add up, so speed-ups pool harmonically.
    """
    total = sum(shares)
    return Gain(*(sum(share * part for share, part in zip(shares, parts)) / total for parts in zip(*gains)))


def chain_tau(alpha: float, K: int) -> float:
    """Expected tau of a chain of K tokens, each accepted with probability alpha: 1 + alpha + ... + alpha^K.

    Leviathan et al. 2023 (arXiv 2211.17192), equation 1.
    """
    return sum(alpha**k for k in range(K + 1))


def chain_alpha(tau: float, K: int) -> float:
    """Acceptance per token at which a chain of K yields tau, by bisection of `chain_tau`.

    It is 0 where tau is at most 1, and NaN where no acceptance is enough.
    """
    if not tau <= K + 1:
        return math.nan
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if chain_tau(middle, K) < tau else (low, middle)
    return high if tau > 1 else 0.0
