"""Times of a pass as a sum of parts that can only add: non-negative least squares over batch, levels and context.

A pass costs something by itself (launches, reading the weights), for every sequence, for every level of the draft, for
every cached token that it reads; and its arithmetic costs nothing until there are enough tokens to keep the machine
busy, after which each costs the same: hinges at powers of two let the data say where. One more part is paid from the
second sequence on, since kernels for one sequence are others. No weight is negative, so a time never falls as batch,
levels or context grow, which an interpolation of noisy points does not promise.

Shapes: P points, F parts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from scipy.optimize import nnls

Floats = NDArray[np.float64]
_NAMES = ("1", "levels", "batch", "batch*levels", "batch*context", "batch*levels*context", "batch>1")


class Where(NamedTuple):
    """A round of `batch` sequences of `context` cached tokens: `levels` of draft, then `tokens` new ones of each."""

    batch: float
    levels: float
    tokens: float
    context: float


class Surface(BaseModel):
    """Seconds by where; all weights are at least 0."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    weights: dict[str, float]
    """Seconds a unit of each part; parts that weigh nothing are left out."""
    knots: list[int] = Field(default=[])
    """Tokens of a pass (batch x tokens) from which each one more costs; the weights `tokens>N` are theirs."""

    @classmethod
    def fit(cls, places: Sequence[Where], seconds: Sequence[float], scale: Sequence[float]) -> "Surface":
        """The best in the least squares of (error / scale). `scale`: what an error is measured against, such as the
        whole round's time."""
        knots = _knots(places)
        parts_PF, below_P = _parts(places, knots), np.asarray(scale, dtype=np.float64)
        size_F = np.maximum(parts_PF.max(axis=0), 1e-12)  # columns of one size: context runs to thousands
        weights_F, _ = nnls(parts_PF / size_F / below_P[:, None], np.asarray(seconds, dtype=np.float64) / below_P)
        names = [*_NAMES, *(f"tokens>{knot}" for knot in knots)]
        found = {name: float(weight) for name, weight in zip(names, weights_F / size_F) if weight > 0}
        return cls(weights=found, knots=knots)

    def __call__(self, where: Where) -> float:
        """Seconds there."""
        names = [*_NAMES, *(f"tokens>{knot}" for knot in self.knots)]
        weights_F = np.array([self.weights.get(name, 0.0) for name in names])
        return float(_parts([where], self.knots)[0] @ weights_F)


def _knots(places: Sequence[Where]) -> list[int]:
    """Powers of two inside the range of tokens of a pass."""
    totals = [where.batch * where.tokens for where in places]
    return [1 << n for n in range(1, 21) if min(totals) < 1 << n < max(totals)]


def _parts(places: Sequence[Where], knots: Sequence[int]) -> Floats:
    """[P, F]: what each weight is multiplied by."""
    B, L, N, C = (np.array(column, dtype=np.float64) for column in zip(*places))
    columns = [np.ones_like(B), L, B, B * L, B * C, B * L * C, (B > 1).astype(np.float64)]
    found: Floats = np.stack([*columns, *(np.maximum(B * N - knot, 0.0) for knot in knots)], axis=1)
    return found
