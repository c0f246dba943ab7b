"""Profile of a mix against its log: shares of every label, distances between shares, lengths, what was left out.

A side is a set of the log's records: all of them, those without copies, the mix, or one of its three splits.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from .conversation import SPLITS
from .mix import COPIES, LEFT_OUT, load_log, load_manifest
from .settings import Key
from .stratify import DAY, KEYS, Column

LOG, DISTINCT, MIX = "log", "distinct", "mix"
SIDES = (LOG, DISTINCT, MIX, *SPLITS)
JOINT = "all together"
QUANTILES = (0.1, 0.5, 0.9, 0.95, 0.99)
_FEWEST_EXPECTED = 5.0  # of a cell in a chi-square test; smaller ones are pooled
_SYSTEMS = 64
Counts = NDArray[np.int64]


class Distance(NamedTuple):
    """Distance between the shares of a label on two sides."""

    of: str
    against: str
    variation: float
    """Total variation: the part of a side that would need another label; 0: equal shares; nan: a side is empty."""
    by_chance: float
    """Mean total variation of a random sample of this side's size."""
    p: float
    """P-value of a chi-square test that this side is a random sample of the other; nan: too few to test."""


class Shares(NamedTuple):
    """Counts of one label on all sides, and distances between them."""

    key: str
    labels: list[str]
    counts: Mapping[str, Counts]
    """Number of conversations with each of `labels`, by side."""
    distances: list[Distance]


class Profile(NamedTuple):
    """The figures that `inspect-mix` shows."""

    sizes: Mapping[str, int]
    """Conversations by side."""
    shares: list[Shares]
    """Shares of each label, then of all labels together."""
    lengths: Mapping[str, Mapping[str, list[float]]]
    """Tokens of `prompt` and `answer` at QUANTILES, by side."""
    tokens: Mapping[str, Mapping[str, Counts]]
    """Tokens of `prompt` and `answer` of every conversation, for the log and the mix."""
    counted: float
    """Share of the log's records with logged token counts; the others' are estimated."""
    manifest: Mapping[str, Any]


def profile(folder: Path) -> Profile:
    """Compute the profile of a mix folder."""
    # Shares: label by label, then of the cells that all labels together make.
    table = load_log(folder)
    sides = _sides(table)
    columns = {key: _column(table, key) for key in (*KEYS, DAY)}
    shares = [_shares(key, column, sides) for key, column in columns.items()]
    shares.append(_shares(JOINT, _joint([columns[key] for key in KEYS]), sides))
    # Lengths: a request without an answer has none.
    values = {"prompt": table.column("prompt_tokens").to_numpy(), "answer": table.column("answer_tokens").to_numpy()}
    return Profile(
        sizes={side: int(rows.sum()) for side, rows in sides.items()},
        shares=shares,
        lengths={
            name: {side: _quantiles(_known(some[rows])) for side, rows in sides.items()}
            for name, some in values.items()
        },
        tokens={name: {side: _known(some[sides[side]]) for side in (LOG, MIX)} for name, some in values.items()},
        counted=float(table.column("counted").to_numpy().mean()),
        manifest=load_manifest(folder),
    )


def variation(left: Counts, right: Counts) -> float:
    """Total variation distance of two sides' shares; nan where one is empty."""
    if not left.sum() or not right.sum():
        return math.nan
    return float(np.abs(left / left.sum() - right / right.sum()).sum() / 2)


def variation_by_chance(size: int, of: Counts) -> float:
    """About the mean total variation between a log and `size` records drawn from it at random.

    A cell of share p is off by sqrt(2 p (1 - p) / (pi size)) on average where it is large, and by no more than 2 p.
    """
    if not size or not of.sum():
        return math.nan
    p = of / of.sum()
    return float(np.minimum(np.sqrt(2 * p * (1 - p) / (math.pi * size)), 2 * p).sum() / 2)


def chi_square_p(found: Counts, of: Counts) -> float:
    """P-value of the hypothesis that `found` is a random sample with the shares of `of`; small cells are pooled."""
    from scipy.stats import chisquare

    if not found.sum() or not of.sum():
        return math.nan
    # Cells too small for the test are pooled into one, or left out where even that is too small.
    expected = of / of.sum() * found.sum()
    small = expected < _FEWEST_EXPECTED
    if found[expected == 0].any():
        return 0.0
    cells = [(found[~small], expected[~small])]
    if expected[small].sum() >= _FEWEST_EXPECTED:
        cells.append((found[small].sum(keepdims=True), expected[small].sum(keepdims=True)))
    seen, wanted = (np.concatenate(part) for part in zip(*cells))
    if len(seen) < 2:
        return math.nan
    # Expected counts are scaled to the cells that are left, as the test wants equal sums.
    return float(chisquare(seen, wanted * seen.sum() / wanted.sum()).pvalue)


def _sides(table: pa.Table) -> dict[str, NDArray[np.bool_]]:
    # A record's fate is its split, or why it was left out.
    fate = np.array(table.column("fate").to_pylist())
    splits: dict[str, NDArray[np.bool_]] = {split: fate == split for split in SPLITS}
    copies = np.isin(fate, COPIES)
    return {LOG: np.ones(len(fate), dtype=np.bool_), DISTINCT: ~copies, MIX: ~np.isin(fate, LEFT_OUT), **splits}


def _column(table: pa.Table, key: Key | str) -> Column:
    column = table.column(key).combine_chunks()
    return Column(column.dictionary.to_pylist(), column.indices.to_numpy().astype(np.int64))


def _joint(columns: Sequence[Column]) -> Column:
    # Each distinct combination of labels is a cell; rare system prompts count as one.
    codes = np.stack([column.lumped(_SYSTEMS).codes_N for column in columns])
    cells, code_N = np.unique(codes, axis=1, return_inverse=True)
    return Column([str(cell) for cell in range(cells.shape[1])], code_N.reshape(-1))


def _shares(key: str, column: Column, sides: Mapping[str, NDArray[np.bool_]]) -> Shares:
    # Number of records of each label on each side, then the distances that `inspect-mix` shows.
    counts = {
        side: np.bincount(column.codes_N[rows], minlength=len(column.names)).astype(np.int64)
        for side, rows in sides.items()
    }
    pairs = [(MIX, LOG), (MIX, DISTINCT), *((split, MIX) for split in SPLITS)]
    return Shares(key, column.names, counts, [_distance(counts, of, against) for of, against in pairs])


def _distance(counts: Mapping[str, Counts], of: str, against: str) -> Distance:
    found, whole = counts[of], counts[against]
    size = int(found.sum())
    return Distance(of, against, variation(found, whole), variation_by_chance(size, whole), chi_square_p(found, whole))


def _known(values: Counts) -> Counts:
    return values[values >= 0]


def _quantiles(values: Counts) -> list[float]:
    if not len(values):
        return [math.nan] * len(QUANTILES)
    found: list[float] = np.quantile(values, QUANTILES).tolist()
    return found
