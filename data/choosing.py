"""Which conversations a mix keeps, so that its shares are the log's, or those that the recipe asks for.

N conversations, S strata (what has all labels alike), V values of one label.

Every conversation has a weight: 1, halved for each half-life of its age, then raked so that the labels that the recipe
names have its shares. Raking (Deming and Stephan, 1940) changes the other labels no more than it must: how they go
together stays as in the log. From the weights follow counts and choices, both by hash:

- A stratum's share is its part of the weight. Shares become whole numbers by one cut through their running sum, shifted
  by the salt. Strata are nested, so the count of every stratum, and of everything that shares its first labels (a
  domain; a domain at a sampling setting; …), lies less than one conversation from its share. Over salts it is right on
  average, so a label that only small strata have does not vanish.
- In a stratum, the conversations with the smallest exponential keys stay (Efraimidis and Spirakis, 2006): the next one
  taken is always any of the rest with a chance in proportion to its weight.

Nothing is doubled: at most as many are kept as leaves the heaviest conversation whole.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from .split import unit
from .strata import Column

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_MOST_ROUNDS, _CLOSE = 2000, 1e-9
_DIGITS = 9  # of running sums: what lies this near a whole number is one
_SECONDS_PER_DAY = 86400.0


class Margin(NamedTuple):
    """Shares that one label must have."""

    key: str
    """As the recipe names it, such as `weights.domain`."""
    column: Column
    shares: Mapping[str, float]
    """In any unit."""


def half_lives(started_N: Floats, half_life_days: float) -> Floats:
    """Weights that halve each so many days before the newest; 1 where the time is not known (nan)."""
    if np.isnan(started_N).all():
        return np.ones(len(started_N))
    age_N = (np.nanmax(started_N) - started_N) / _SECONDS_PER_DAY
    weight_N: Floats = np.where(np.isnan(age_N), 1.0, np.exp2(-age_N / half_life_days))
    return weight_N


def raked(weight_N: Floats, margins: Sequence[Margin]) -> Floats:
    """The weights, changed as little as the margins allow. Raises InputError where no weights meet them all."""
    weight_N = weight_N / weight_N.sum()
    wanted = [_shares(margin, weight_N) for margin in margins]
    for _ in range(_MOST_ROUNDS):
        worst = 0.0
        for margin, share_V in zip(margins, wanted):
            mass_V = np.bincount(margin.column.codes_N, weight_N, len(share_V))
            factor_V = np.divide(share_V, mass_V, out=np.ones_like(share_V), where=mass_V > 0)
            worst = max(worst, float(np.abs(factor_V - 1).max()))
            weight_N = weight_N * factor_V[margin.column.codes_N]
        if worst < _CLOSE:
            return weight_N
    keys = " and ".join(f"mix.{margin.key}" for margin in margins)
    raise InputError(f"{keys}: no weights of conversations give all these shares; they contradict each other")


def _shares(margin: Margin, weight_N: Floats) -> Floats:
    names, codes_N = margin.column
    mass_V = np.bincount(codes_N, weight_N, len(names))
    there = {name for name, mass in zip(names, mass_V) if mass > 0}
    for name in names:
        if name in there and name not in margin.shares:
            listed = ", ".join(margin.shares)
            raise InputError(f"mix.{margin.key}: {name!r} has no weight; weights name {listed}")
    for name, share in margin.shares.items():
        if name not in there:
            raise InputError(f"mix.{margin.key}.{name}: weight {share}, but no conversation is left for it")
    share_V = np.array([margin.shares.get(name, 0.0) for name in names])
    found: Floats = share_V / share_V.sum()
    return found


def largest_size(weight_N: Floats) -> int:
    """The most conversations that can have these weights without one being kept twice."""
    return math.floor(weight_N.sum() / weight_N.max() * (1 + _CLOSE) + _CLOSE) if len(weight_N) else 0


def allotted(mass_S: Floats, total: int, start: float) -> Ints:
    """Whole numbers that add up to `total`, in proportion to the masses: every run of neighbours within one of its
    share, and right on average where `start` is even in [0, 1)."""
    edges = np.concatenate([[0.0], np.cumsum(mass_S) / mass_S.sum() * total])
    edges[-1] = total
    edges = np.round(edges, _DIGITS)
    whole = np.floor(edges)
    counts: Ints = np.diff(whole + (edges - whole + start >= 1)).astype(np.int64)
    return counts


def exponential_keys(ids: Sequence[str], weight_N: Floats, salt: str) -> Floats:
    """Keys whose order is a draw without replacement, each time in proportion to the weights."""
    waiting_N = -np.log1p(-np.array([unit("share", salt, id) for id in ids]))
    key_N: Floats = np.divide(waiting_N, weight_N, out=np.full(len(ids), np.inf), where=weight_N > 0)
    return key_N


def keep(ids: Sequence[str], weight_N: Floats, nested: Sequence[Column], total: int, salt: str) -> NDArray[np.bool_]:
    """Which of N conversations (their ids sorted) stay: `total` of them, which is at most `largest_size(weight_N)`."""
    kept_N = np.zeros(len(ids), dtype=np.bool_)
    if total >= len(ids):
        return ~kept_N
    key_N = exponential_keys(ids, weight_N, salt)
    order_N = np.lexsort((key_N, *(column.codes_N for column in reversed(nested))))
    changes_N = np.zeros(len(ids), dtype=np.bool_)
    changes_N[0] = True
    for column in nested:
        changes_N[1:] |= np.diff(column.codes_N[order_N]) != 0
    first_S = np.flatnonzero(changes_N)
    stratum_N = np.cumsum(changes_N) - 1
    count_S = allotted(np.add.reduceat(weight_N[order_N], first_S), total, unit("strata", salt))
    rank_N = np.arange(len(ids)) - first_S[stratum_N]
    kept_N[order_N] = rank_N < count_S[stratum_N]
    return kept_N
