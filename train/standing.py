"""How scored steps compare: which drafts are kept, and whether training on still pays."""

from collections.abc import Sequence
from typing import NamedTuple


class Standing(NamedTuple):
    """Acceptance of one step's draft on the conversations that are scored while training."""

    step: int
    tau: float
    low: float
    high: float
    """The interval of tau."""


def best(scores: Sequence[Standing], count: int) -> set[int]:
    """Steps of the `count` highest tau; of equals the earlier."""
    return {one.step for one in sorted(scores, key=lambda one: (-one.tau, one.step))[:count]}


def stalled(scores: Sequence[Standing], patience: int) -> bool:
    """Whether the last `patience` scores brought no rise.

    A rise lies above the interval of the last rise, at first of the first score: small steps up add up to one.
    """
    last, since = None, 0
    for one in scores:
        if last is None or one.tau > last.high:
            last, since = one, 0
        else:
            since += 1
    return since >= patience
