"""Times of rounds and prompts, fitted over batch, levels and context: a JSON record that another machine can read.

What a machine does besides may slow a whole place of the grid, plain rounds and drafted ones alike. So plain rounds are
fitted first, and what is fitted of a drafted round is its measured ratio to the plain one beside it, times the fitted
plain one: speed-ups rest on paired ratios, and the noise of a place is left to absolute figures such as goodput.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from scipy.optimize import nnls

from ..errors import CorruptDataError, InputError
from ..storage import read_object, write_json
from .costs import CostKey, RoundCost
from .draft_configs import DraftConfig

Floats = NDArray[np.float64]
_NAMES = ("1", "levels", "batch", "batch*levels", "batch*context", "batch*levels*context", "batch>1")


class GridPoint(NamedTuple):
    """A round of `batch` sequences of `context` cached tokens: `levels` of draft, then `tokens` new ones of each."""

    batch: float
    levels: float
    tokens: float
    context: float


class CostSurface(BaseModel):
    """Seconds by where; all weights are at least 0."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    weights: dict[str, float]
    """Seconds a unit of each part; parts that weigh nothing are left out."""
    knots: list[int] = Field(default=[])
    """Tokens of a pass (batch x tokens) from which each one more costs; the weights `tokens>N` are theirs."""

    @classmethod
    def fit(cls, places: Sequence[GridPoint], seconds: Sequence[float], scale: Sequence[float]) -> "CostSurface":
        """The best in the least squares of (error / scale). `scale`: what an error is measured against, such as the
        whole round's time."""
        knots = _knots(places)
        parts_PF, below_P = _parts(places, knots), np.asarray(scale, dtype=np.float64)
        size_F = np.maximum(parts_PF.max(axis=0), 1e-12)  # columns of one size: context runs to thousands
        weights_F, _ = nnls(parts_PF / size_F / below_P[:, None], np.asarray(seconds, dtype=np.float64) / below_P)
        names = [*_NAMES, *(f"tokens>{knot}" for knot in knots)]
        found = {name: float(weight) for name, weight in zip(names, weights_F / size_F) if weight > 0}
        return cls(weights=found, knots=knots)

    def __call__(self, where: GridPoint) -> float:
        """Seconds there."""
        names = [*_NAMES, *(f"tokens>{knot}" for knot in self.knots)]
        weights_F = np.array([self.weights.get(name, 0.0) for name in names])
        return float(_parts([where], self.knots)[0] @ weights_F)


def _knots(places: Sequence[GridPoint]) -> list[int]:
    """Powers of two inside the range of tokens of a pass."""
    totals = [where.batch * where.tokens for where in places]
    return [1 << n for n in range(1, 21) if min(totals) < 1 << n < max(totals)]


def _parts(places: Sequence[GridPoint], knots: Sequence[int]) -> Floats:
    """[P, F]: what each weight is multiplied by."""
    B, L, N, C = (np.array(column, dtype=np.float64) for column in zip(*places))
    columns = [np.ones_like(B), L, B, B * L, B * C, B * L * C, (B > 1).astype(np.float64)]
    found: Floats = np.stack([*columns, *(np.maximum(B * N - knot, 0.0) for knot in knots)], axis=1)
    return found


FIT_VERSION: Final = 1
PLAIN_WAY, CHAIN_WAY = "plain", "chain"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Point(_Record):
    """A measured round."""

    way: str
    """plain, chain, or "tree NAME"."""
    batch_size: int = Field(ge=1)
    levels: int = Field(ge=0)
    tokens: int = Field(ge=1)
    """That the target sees of each sequence: drafted nodes and one."""
    context_tokens: int = Field(ge=1)
    draft_seconds: float = Field(ge=0)
    verify_seconds: float = Field(gt=0)
    rest_seconds: float = Field(ge=0)
    rounds: int = Field(ge=1)

    @property
    def where(self) -> GridPoint:
        return GridPoint(self.batch_size, self.levels, self.tokens, self.context_tokens)

    @property
    def seconds(self) -> float:
        return self.draft_seconds + self.verify_seconds + self.rest_seconds

    @property
    def place(self) -> tuple[int, int]:
        """Where in the grid it was measured, by turns with the plain round there."""
        return self.batch_size, self.context_tokens

    def scaled(self, factor: float) -> "Point":
        names = ("draft_seconds", "verify_seconds", "rest_seconds")
        return self.model_copy(update={name: factor * getattr(self, name) for name in names})


class PromptPoint(_Record):
    """A measured prompt, read alone."""

    tokens: int = Field(ge=1)
    plain_seconds: float = Field(gt=0)
    draft_seconds: float = Field(ge=0)
    """What the draft adds."""


class RoundFit(_Record):
    """Rounds of one way of drafting."""

    draft: CostSurface
    verify: CostSurface
    rest: CostSurface
    levels: tuple[int, int]
    """Fewest and most that were measured."""
    error: float = Field(ge=0)
    """Median distance of a whole round's fitted time from its measured one, as a share of that. Of drafted rounds both
    are ratios to plain ones."""
    worst_error: float = Field(ge=0)
    left_out_error: float = Field(ge=0)
    """The median again, each point compared with a fit that had not seen it."""
    tokens_per_level: dict[int, int]
    """Tokens that the target sees of a sequence, by levels, as measured."""

    @classmethod
    def of(cls, points: Sequence[Point]) -> "RoundFit":
        """Fit all three parts. The points are of one way."""
        fitted = _surfaces(points)
        errors = [_error(fitted, point) for point in points]
        others = [[other for other in points if other is not point] for point in points]
        left_out = [_error(_surfaces(rest), point) for rest, point in zip(others, points) if rest]
        draft, verify, rest = fitted
        return cls(
            draft=draft,
            verify=verify,
            rest=rest,
            levels=(min(point.levels for point in points), max(point.levels for point in points)),
            error=statistics.median(errors),
            worst_error=max(errors),
            left_out_error=statistics.median(left_out or errors),
            tokens_per_level={point.levels: point.tokens for point in points},
        )

    def at(self, levels: int, batch_size: int, context: float) -> RoundCost:
        """A round's parts there. Between measured levels of a chain, so many tokens and one."""
        where = GridPoint(batch_size, levels, self.tokens_per_level.get(levels, levels + 1), context)
        return RoundCost(
            draft_seconds=self.draft(where), verify_seconds=self.verify(where), rest_seconds=self.rest(where), rounds=1
        )


class PromptFit(_Record):
    """Seconds of reading a prompt of Q tokens: a + b Q + c Q^2, none of them negative."""

    plain: tuple[float, float, float]
    draft: tuple[float, float, float]
    """What the draft adds."""

    @classmethod
    def of(cls, points: Sequence[PromptPoint]) -> "PromptFit":
        lengths = [point.tokens for point in points]
        plain = _growth(lengths, [point.plain_seconds for point in points])
        shares = [point.draft_seconds / point.plain_seconds for point in points]
        draft = _growth(lengths, [share * _grown(plain, tokens) for share, tokens in zip(shares, lengths)])
        return cls(plain=plain, draft=draft)


class CostFit(_Record):
    """Times of one target and draft shape on one machine, and where they hold."""

    version: int = FIT_VERSION
    key: CostKey
    """Hardware, software, precision and shapes."""
    batch_sizes: list[int] = Field(min_length=1)
    """Measured ones; times hold between the least and the largest."""
    contexts: list[int] = Field(min_length=1)
    """The same of context lengths."""
    draft_bytes: int = Field(ge=0)
    """Weights that the draft does not share with the target."""
    cache_bytes_per_token: float = Field(ge=0)
    """What the draft keeps of each token of each sequence: keys, values and buffers."""
    rounds: dict[str, RoundFit]
    """By way."""
    prompts: PromptFit
    prompt_tokens: list[int] = Field(min_length=1)
    """Measured prompts' lengths; times hold between the least and the largest."""
    points: list[Point]
    prompt_points: list[PromptPoint]

    @classmethod
    def of(
        cls,
        key: CostKey,
        points: Sequence[Point],
        prompt_points: Sequence[PromptPoint],
        draft_bytes: int,
        cache_bytes_per_token: float,
    ) -> "CostFit":
        """Fit what was measured."""
        ways = {point.way: [other for other in points if other.way == point.way] for point in points}
        plain = RoundFit.of(ways.pop(PLAIN_WAY))
        beside = {one.place: plain.at(0, *one.place).seconds / one.seconds for one in points if one.way == PLAIN_WAY}
        drafted = {way: RoundFit.of([one.scaled(beside[one.place]) for one in some]) for way, some in ways.items()}
        return cls(
            key=key,
            batch_sizes=sorted({point.batch_size for point in points}),
            contexts=sorted({point.context_tokens for point in points}),
            draft_bytes=draft_bytes,
            cache_bytes_per_token=cache_bytes_per_token,
            rounds={PLAIN_WAY: plain, **drafted},
            prompts=PromptFit.of(prompt_points),
            prompt_tokens=sorted({point.tokens for point in prompt_points}),
            points=list(points),
            prompt_points=list(prompt_points),
        )

    @property
    def error(self) -> float:
        """How far fitted ratios to plain rounds are off, at the median, on points that the fit had not seen."""
        return max((fit.left_out_error for way, fit in self.rounds.items() if way != PLAIN_WAY), default=0.0)

    @property
    def place(self) -> str:
        """The hardware and precision, in words."""
        return f"{self.key.hardware}, {self.key.dtype}"

    def outside(self, batch_size: int, context: int, prompt: int) -> str | None:
        """Why the times do not hold there, if they do not."""
        for name, value, known in (
            ("batch", batch_size, self.batch_sizes),
            ("context", context, self.contexts),
            ("prompt", prompt, self.prompt_tokens),
        ):
            if not min(known) <= value <= max(known):
                return f"{name} {value} is not within the measured range of {min(known)} to {max(known)}"
        return None

    def plain(self, batch_size: int, context: int) -> float:
        """Seconds of a round without a draft."""
        return self.rounds[PLAIN_WAY].at(0, batch_size, context).seconds

    def round(self, config: DraftConfig, batch_size: int, context: int) -> RoundCost:
        """A round that drafts so. Raises InputError for a way, or levels, that were not measured."""
        fit = self.rounds.get(way_of(config))
        if fit is None or not fit.levels[0] <= config.levels <= fit.levels[1]:
            known = ", ".join(f"{way} ({fit.levels[0]} to {fit.levels[1]} levels)" for way, fit in self.rounds.items())
            raise InputError(f"{config} ({config.levels} levels): no times measured; there are times for {known}")
        return fit.at(config.levels, batch_size, context)

    def prompt(self, tokens: int) -> tuple[float, float]:
        """Seconds in which the target reads a prompt, and what the draft adds to them."""
        return _grown(self.prompts.plain, tokens), _grown(self.prompts.draft, tokens)


def way_of(config: DraftConfig) -> str:
    """Rounds that one fit describes: chains of every K together, each tree by itself."""
    return f"tree {config.tree}" if config.tree else CHAIN_WAY


def write_fits(path: Path, fits: Iterable[CostFit]) -> None:
    """All shapes of one machine in one file, which `score.costs.fit` of another machine may name."""
    write_json(path, {"fits": [fit.model_dump(mode="json") for fit in fits]})


def read_fits(path: Path) -> list[CostFit]:
    """Raises MissingFileError, or CorruptDataError naming the file and what is wrong."""
    found = read_object(path).get("fits")
    if not isinstance(found, list) or not found:
        raise CorruptDataError(f"{path}: fits: must be a list of fitted times")
    try:
        fits = TypeAdapter(list[CostFit]).validate_python(found)
    except ValidationError as error:
        first = error.errors()[0]
        raise CorruptDataError(f"{path}: fits.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if any(fit.version != FIT_VERSION or PLAIN_WAY not in fit.rounds for fit in fits):
        raise CorruptDataError(f"{path}: not fitted times of version {FIT_VERSION} with a plain round in each")
    return fits


def fit_for(key: CostKey, fits: Sequence[CostFit], path: Path) -> CostFit:
    """The fit of this target and draft shape, on whatever hardware. Raises InputError where there is none."""
    why = [incompatibility(key, fit.key) for fit in fits]
    if None not in why:
        raise InputError(f"score.costs.fit {path}: holds no times of this target and draft: {'; '.join(map(str, why))}")
    return fits[why.index(None)]


def incompatibility(asked: CostKey, known: CostKey) -> str | None:
    """Why times of one key are not another's, hardware, software and precision aside."""
    for name in ("target", "draft"):
        one, other = getattr(asked, name), getattr(known, name)
        for field in ("class", "parameters"):
            if one.get(field) != other.get(field):
                return f"{name} {field} {other.get(field)} instead of {one.get(field)}"
        different = _differing(one.get("config") or {}, other.get("config") or {})
        if different:
            return f"{name} {different[0]} differs"
    missing = sorted(label for label, config in asked.plans.items() if not _is_covered(label, config, known.plans))
    return f"no {missing[0]}" if missing else None


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Fields that both have and that differ: versions of libraries add fields of their own."""
    return sorted(name for name in one.keys() & other.keys() if one[name] != other[name])


def _is_covered(label: str, config: Mapping[str, Any], known: Mapping[str, Mapping[str, Any]]) -> bool:
    if config["tree"] is None and label.isdigit():  # a chain
        measured = [other["levels"] for name, other in known.items() if name.isdigit()]
        return bool(measured) and min(measured) <= config["levels"] <= max(measured)
    other = known.get(label)
    return other is not None and (other["levels"], other["tree"]) == (config["levels"], config["tree"])


def _surfaces(points: Sequence[Point]) -> tuple[CostSurface, CostSurface, CostSurface]:
    """Of draft, verify and rest: errors of each count as shares of the whole round."""
    places, whole = [point.where for point in points], [point.seconds for point in points]

    def part(of: Callable[[Point], float]) -> CostSurface:
        return CostSurface.fit(places, [of(point) for point in points], whole)

    verify = part(lambda point: point.verify_seconds)
    return part(lambda point: point.draft_seconds), verify, part(lambda point: point.rest_seconds)


def _error(fitted: Sequence[CostSurface], point: Point) -> float:
    return abs(sum(surface(point.where) for surface in fitted) / point.seconds - 1)


def _grown(weights: tuple[float, float, float], tokens: int) -> float:
    constant, each, square = weights
    return constant + each * tokens + square * tokens**2


def _growth(lengths: Sequence[int], seconds: Sequence[float]) -> tuple[float, float, float]:
    Q = np.array(lengths, dtype=np.float64)
    columns, y = np.stack([np.ones_like(Q), Q, Q**2], axis=1), np.array(seconds, dtype=np.float64)
    size, below = columns.max(axis=0), np.maximum(y, 1e-9)
    weights, _ = nnls(columns / size / below[:, None], y / below)
    a, b, c = (float(weight) for weight in weights / size)
    return a, b, c
