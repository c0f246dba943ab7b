"""Hash-based choices, independent of position: splits, sampling settings, seeds.

With the same salt and shares, a cluster gets the same split whatever else a log holds.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

from .. import fingerprint
from ..errors import InputError
from .conversation import SPLITS, Split
from .settings import MixSettings

T = TypeVar("T")
_UNIT_BITS = 53


def unit(*parts: str) -> float:
    """Hash some texts to a number in [0, 1), uniform over texts."""
    digest = hashlib.sha256("\0".join(parts).encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> (64 - _UNIT_BITS)) / (1 << _UNIT_BITS)


def seed_of(seed: int, name: str) -> int:
    """Seed of a sample: 63 bits of a hash of its name, independent of order and of other samples."""
    return int(fingerprint.of_json([seed, name])[:16], 16) >> 1


def split_of(cluster: str, settings: MixSettings) -> Split:
    """Split of a cluster by its salted hash."""
    u = unit("split", settings.salt, cluster)
    if u < settings.holdout_share:
        return "holdout"
    if u < settings.holdout_share + settings.selection_share:
        return "selection"
    return "train"


def weighted_choice(options: Sequence[T], weights: Sequence[float], *parts: str) -> T:
    """Choose one option by the hash of the parts, with a probability in proportion to its weight."""
    # Inverse CDF; rounding may leave a rest after the last option.
    rest = unit(*parts) * sum(weights)
    for option, weight in zip(options, weights, strict=True):
        rest -= weight
        if rest < 0:
            return option
    return options[-1]


def require_every_split(splits: Sequence[Split], clusters: Sequence[str], settings: MixSettings) -> None:
    """Raise InputError, with what to change, if train, selection or holdout is empty."""
    counts = Counter(splits)
    for split in SPLITS:
        if counts[split]:
            continue
        shares = f"selection_share {settings.selection_share}, holdout_share {settings.holdout_share}"
        raise InputError(
            f"mix: {split} is empty: {len(splits)} conversations in {len(set(clusters))} clusters, {shares}, "
            f"salt {settings.salt!r}; add conversations, change the shares or the salt"
        )
