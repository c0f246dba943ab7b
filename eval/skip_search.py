"""Which parts to leave out, when every set that is tried costs a measurement: a search over the subsets of n parts.

1. Each part alone, in a random order.
2. The parts in the order of what leaving them out alone is worth, best first: the first m of them, for m on a grid that
   halves around the best one. Few tries find a set of about the right size.
3. From the best set so far: its neighbours in a random order, first those with one part more or less, then those with
   one part for another. The first better one is gone on from; where none is better the search ends.

Draft & Verify (Zhang et al. 2023, arXiv 2309.08168) finds its sets by Bayesian optimisation and SWIFT (Xia et al. 2024,
arXiv 2410.06916) by random sets and a Gaussian process; neither begins with what the parts are worth one by one.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

P = TypeVar("P")


class Found(NamedTuple, Generic[P]):
    """The best set that was tried."""

    parts: frozenset[P]
    value: float
    tries: int
    """Sets that were tried."""


def search(
    parts: Sequence[P],
    value: Callable[[frozenset[P]], float],
    tries: int,
    seed: int,
    start: Iterable[frozenset[P]] = (),
) -> Found[P]:
    """The set of the highest value among at most `tries` different ones; of equal ones the one that was tried first.

    The sets of `start` are tried first of all. The same arguments give the same sets in the same order.
    """
    looked = _Looked(value, tries)
    try:
        for known in start:
            looked.at(known)
        order = _by_worth(parts, looked, random.Random(seed))
        _nested(order, looked)
        _climb(parts, looked, random.Random(seed))
    except _SpentError:
        pass
    return Found(looked.best, looked.values[looked.best], len(looked.values))


class _SpentError(Exception):
    """All tries are used up."""


class _Looked(Generic[P]):
    """Values of the sets that were tried, the best of them, and how many more may be."""

    def __init__(self, value: Callable[[frozenset[P]], float], tries: int) -> None:
        self._value, self._tries = value, tries
        self.values: dict[frozenset[P], float] = {}
        self.best: frozenset[P] = frozenset()

    def at(self, parts: frozenset[P]) -> float:
        if parts not in self.values:
            if len(self.values) >= self._tries:
                raise _SpentError
            self.values[parts] = self._value(parts)
            if len(self.values) == 1 or self.values[parts] > self.values[self.best]:
                self.best = parts
        return self.values[parts]


def _by_worth(parts: Sequence[P], looked: _Looked[P], chance: random.Random) -> list[P]:
    """Parts by the value of leaving each out alone, the best first."""
    worth = {place: looked.at(frozenset([parts[place]])) for place in chance.sample(range(len(parts)), len(parts))}
    return [parts[place] for place in sorted(worth, key=lambda place: (-worth[place], place))]


def _nested(order: Sequence[P], looked: _Looked[P]) -> None:
    """The first m parts, for m on a grid of an eighth of them, then on ever finer ones beside the best m."""

    def value(count: int) -> float:
        return looked.at(frozenset(order[:count]))

    step = max(1, len(order) // 8)
    best = max(range(0, len(order) + 1, step), key=value)
    while step > 1:
        step = (step + 1) // 2
        best = max((m for m in (best, best - step, best + step) if 0 <= m <= len(order)), key=value)


def _climb(parts: Sequence[P], looked: _Looked[P], chance: random.Random) -> None:
    """Go to a better neighbour while there is one."""
    while True:
        here = looked.best
        inside = [part for part in parts if part in here]
        outside = [part for part in parts if part not in here]
        one_off = [here ^ {part} for part in parts]
        swapped = [here ^ {one, other} for one in inside for other in outside]
        around = [*chance.sample(one_off, len(one_off)), *chance.sample(swapped, len(swapped))]
        if not any(looked.at(near) > looked.values[here] for near in around):
            return
