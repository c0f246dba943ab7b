"""Cost model: times of rounds and prompts fitted over batch, levels and context, from a measured cost table.

Other load on the machine may slow a whole place of the grid, plain rounds and drafted ones alike. So plain rounds are
fitted first. A drafted round enters the fit as its measured ratio to the plain one beside it, times the fitted plain
one. Speed-ups thus rest on paired ratios, and the noise of a place affects only absolute figures such as goodput. Plain
and drafted rounds of an engine run minutes apart, in servers of their own: their seconds are fitted as they are.

Closed-loop traffic of an engine tells what a prompt costs there: B requests in flight take T_B seconds from one answer
to the next, and n rounds an answer. What rounds of that mean context do not explain, E = T_B - n round, is of B
prompts. A step that reads prompts beside a round is another kind of pass, and takes longer by some m however many it
reads; as prompts come at random, n (1 - e^(-B/n)) steps read some. So E = m n (1 - e^(-B/n)) + c B, with m and c at
least 0, fitted over the batch sizes of a K: the first part grows with the rounds, and another acceptance makes others
of them. E is as measured at the measured n, and follows the fit's slope in n from there.

Shapes: P measured points, F parts of a surface.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from scipy.optimize import nnls

from ..errors import InputError, refused_value
from .cost_table import PLAIN_WAY, ClosedLoop, CostTable, MeasuredPrompt, MeasuredRound, RoundCost, way_of
from .draft_configs import DraftConfig

Floats = NDArray[np.float64]
_NAMES = ("1", "levels", "batch", "batch*levels", "batch*context", "batch*levels*context", "batch>1")


class GridPoint(NamedTuple):
    """A round of `batch` sequences of `context` cached tokens: `levels` of draft, then `tokens` new ones of each."""

    batch: float
    levels: float
    tokens: float
    context: float


@dataclass(frozen=True)
class CostSurface:
    """Seconds of one part of a round as a function of the grid point; all weights are at least 0.

    w1 + w2 L + w3 B + w4 B L + w5 B C + w6 B L C + w7 [B > 1] + sum over powers of two t of w_t max(B N - t, 0), with B
    the batch, L levels, N tokens of a sequence that the target sees, C context. So a time never falls as work grows.
    """

    weights: dict[str, float]
    """Seconds a unit by name of the regressor; regressors of weight 0 are left out."""
    knots: list[int] = field(default_factory=list)
    """Hinges, in tokens of a pass (batch x tokens): each token beyond one costs its weight `tokens>N`."""

    @classmethod
    def fit(cls, points: Sequence[GridPoint], seconds: Sequence[float], scale: Sequence[float]) -> "CostSurface":
        """Non-negative least squares fit of (error / scale), one row a point.

        `scale`: seconds that an error is measured against, such as the whole round's.
        """
        # Hinges model the step from memory-bound to compute-bound passes, wherever on this machine it lies.
        knots = _knots(points)
        parts_PF, below_P = _parts(points, knots), np.asarray(scale, dtype=np.float64)
        # Scale rows by the error's scale and columns to one size, fit, and undo the columns' scale.
        size_F = np.maximum(parts_PF.max(axis=0), 1e-12)  # columns of one size: context runs to thousands
        weights_F, _ = nnls(parts_PF / size_F / below_P[:, None], np.asarray(seconds, dtype=np.float64) / below_P)
        names = [*_NAMES, *(f"tokens>{knot}" for knot in knots)]
        found = {name: float(weight) for name, weight in zip(names, weights_F / size_F) if weight > 0}
        return cls(weights=found, knots=knots)

    def __call__(self, where: GridPoint) -> float:
        """Seconds at a grid point."""
        names = [*_NAMES, *(f"tokens>{knot}" for knot in self.knots)]
        weights_F = np.array([self.weights.get(name, 0.0) for name in names])
        return float(_parts([where], self.knots)[0] @ weights_F)


def _knots(points: Sequence[GridPoint]) -> list[int]:
    """Powers of two inside the range of tokens of a pass."""
    totals = [where.batch * where.tokens for where in points]
    return [1 << n for n in range(1, 21) if min(totals) < 1 << n < max(totals)]


def _parts(points: Sequence[GridPoint], knots: Sequence[int]) -> Floats:
    """Regressor matrix [P, F]: the factor of each weight at each point."""
    B, L, N, C = (np.array(column, dtype=np.float64) for column in zip(*points))
    columns = [np.ones_like(B), L, B, B * L, B * C, B * L * C, (B > 1).astype(np.float64)]
    found: Floats = np.stack([*columns, *(np.maximum(B * N - knot, 0.0) for knot in knots)], axis=1)
    return found


@dataclass(frozen=True)
class RoundFit:
    """Fitted round times of one way of drafting: plain, chains, or one tree."""

    draft: CostSurface
    verify: CostSurface
    rest: CostSurface
    levels: tuple[int, int]
    """Fewest and most levels that were measured."""
    error: float
    """Median distance of a whole round's fitted time from its measured one, as a share of that. Of drafted rounds both
    are ratios to plain ones."""
    worst_error: float
    left_out_error: float
    """Leave-one-out error: the median error, each point compared with a fit that had not seen it."""
    tokens_per_level: dict[int, int]
    """Tokens that the target sees of a sequence, by levels, as measured."""

    @classmethod
    def fit(cls, points: Sequence[MeasuredRound]) -> "RoundFit":
        """Fit draft, verify and rest. All points are of one way of drafting."""
        # Errors on the points themselves, and on each point left out of its own fit.
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
        """Cost of a round at these levels, batch size and context. Unmeasured levels count as a chain of that K."""
        where = GridPoint(batch_size, levels, self.tokens_per_level.get(levels, levels + 1), context)
        parts = {"draft_seconds": self.draft, "verify_seconds": self.verify, "rest_seconds": self.rest}
        try:
            return RoundCost.model_validate({name: part(where) for name, part in parts.items()})
        except ValidationError as error:
            raise refused_value(error, f"times of rounds, fitted at batch {batch_size}: ") from None


@dataclass(frozen=True)
class PromptFit:
    """Seconds of reading a prompt of Q tokens: a + b Q + c Q^2, none of them negative."""

    plain: tuple[float, float, float]
    draft: tuple[float, float, float]
    """Weights of the seconds that the draft adds."""

    @classmethod
    def fit(cls, points: Sequence[MeasuredPrompt]) -> "PromptFit":
        # The draft's part is fitted as its measured ratio to the plain prompt, times the fitted plain prompt.
        lengths = [point.tokens for point in points]
        plain = _fit_quadratic(lengths, [point.plain_seconds for point in points])
        shares = [point.draft_seconds / point.plain_seconds for point in points]
        draft = _fit_quadratic(lengths, [share * _quadratic(plain, tokens) for share, tokens in zip(shares, lengths)])
        return cls(plain=plain, draft=draft)


class PromptSeconds(NamedTuple):
    """What prompts of as many requests as the batch size take beside rounds."""

    seconds: float
    """Of all of them, by themselves."""
    a_round: float
    """In each round of an answer."""


@dataclass(frozen=True)
class CostFit:
    """Fitted times of a cost table over a grid, and where they hold."""

    table: CostTable

    @cached_property
    def rounds(self) -> dict[str, RoundFit]:
        """Fits by way of drafting: plain, chain, "tree NAME"."""
        by_way: dict[str, list[MeasuredRound]] = {}
        for point in self.table.points:
            by_way.setdefault(point.way, []).append(point)
        # 1) plain rounds
        plain_points = by_way.pop(PLAIN_WAY)
        plain = RoundFit.fit(plain_points)
        # 2) drafted rounds, each in units of the plain one that ran beside it, if one did
        factors = {one.place: plain.at(0, *one.place).seconds / one.seconds for one in plain_points}
        factors = dict.fromkeys(factors, 1.0) if self.table.key.engine else factors
        drafted = {way: RoundFit.fit([one.scaled(factors[one.place]) for one in some]) for way, some in by_way.items()}
        return {PLAIN_WAY: plain, **drafted}

    @cached_property
    def prompts(self) -> PromptFit:
        return PromptFit.fit(self.table.prompt_points)

    @property
    def batch_sizes(self) -> list[int]:
        """Measured batch sizes; times hold between the least and the largest."""
        return sorted({point.batch_size for point in self.table.points})

    @property
    def error(self) -> float:
        """Median leave-one-out error of fitted drafted rounds (ratios to plain ones, but an engine's), a share; the
        worst way of drafting counts."""
        return max((fit.left_out_error for way, fit in self.rounds.items() if way != PLAIN_WAY), default=0.0)

    @property
    def plain_error(self) -> float:
        """Median leave-one-out error of fitted plain rounds, a share."""
        return self.rounds[PLAIN_WAY].left_out_error

    @property
    def hardware(self) -> str:
        """Whose times these are, in words: hardware and precision, after the engine where one was measured."""
        return self.table.whose

    def outside(self, batch_size: int, context: int, prompt: int) -> str | None:
        """Reason why the times do not hold at a batch size, context and prompt length; None: they hold."""
        for name, value, known in (
            ("batch", batch_size, self.batch_sizes),
            ("context", context, [point.context_tokens for point in self.table.points]),
            ("prompt", prompt, self._prompt_lengths),
        ):
            if not min(known) <= value <= max(known):
                return f"{name} {value} is not within the measured range of {min(known):g} to {max(known):g}"
        return None

    def plain(self, batch_size: int, context: int) -> float:
        """Seconds of a round without a draft."""
        return self.rounds[PLAIN_WAY].at(0, batch_size, context).seconds

    def round(self, config: DraftConfig, batch_size: int, context: int) -> RoundCost:
        """Cost of a round of this K or tree. Raises InputError for a way of drafting, or levels, not measured."""
        # Chains may be asked for at any K within the measured range; trees only as they were measured.
        fit = self.rounds.get(way_of(config))
        if fit is None or not fit.levels[0] <= config.levels <= fit.levels[1]:
            known = ", ".join(f"{way} ({fit.levels[0]} to {fit.levels[1]} levels)" for way, fit in self.rounds.items())
            raise InputError(f"{config} ({config.levels} levels): no times measured; there are times for {known}")
        return fit.at(config.levels, batch_size, context)

    def mean_round(self, config: DraftConfig, batch_size: int, context: int, drafted_share: float = 1.0) -> float:
        """Mean seconds of a round. `drafted_share`: share of a request's rounds that draft at all; a round in which
        none does costs a plain one, or as much (`idle_as_full`), and requests draft independently of one another."""
        plain = self.plain(batch_size, context)
        if not config.levels:
            return plain
        idle = 0.0 if self.table.idle_as_full else (1 - min(drafted_share, 1.0)) ** batch_size
        full = self.round(config, batch_size, context).seconds * self._deviation(config, batch_size, context)
        return (1 - idle) * full + idle * plain

    def _deviation(self, config: DraftConfig, batch_size: int, context: float) -> float:
        """Measured over fitted seconds of a drafted round: a step that the smooth fit levels out, such as a batch that
        is padded, counts where it was measured. Linear between measured batch sizes, then between measured K; 1 at a
        context that was not measured, and of an engine, whose closed loops hold what its rounds differ by."""
        known = {} if self.table.closed_loops else self._deviations.get((way_of(config), context), {})
        at_size = [float(np.interp(batch_size, list(some), list(some.values()))) for some in known.values()]
        return float(np.interp(config.levels, list(known), at_size)) if known else 1.0

    @cached_property
    def _deviations(self) -> dict[tuple[str, float], dict[int, dict[int, float]]]:
        """Measured over fitted seconds of drafted rounds, in units of plain ones, by way of drafting and context, then
        by levels and batch size, both ascending."""
        fit = self.rounds[PLAIN_WAY]
        beside = [one for one in self.table.points if one.way == PLAIN_WAY]
        plain = {one.place: fit.at(0, *one.place).seconds / one.seconds for one in beside}
        found: dict[tuple[str, float], dict[int, dict[int, float]]] = {}
        for one in sorted(self.table.points, key=lambda point: (point.levels, point.batch_size)):
            if one.way != PLAIN_WAY and one.place in plain:
                fitted = self.rounds[one.way].at(one.levels, *one.place).seconds
                by_size = found.setdefault((one.way, one.context_tokens), {}).setdefault(one.levels, {})
                by_size[one.batch_size] = plain[one.place] * one.seconds / fitted
        return found

    def prompt(self, config: DraftConfig, batch_size: int, tokens: int) -> float:
        """Seconds by which each prompt of `tokens`, read by target and draft, delays every one of so many requests.

        Of an engine it is what does not grow with the rounds; linear between measured batch sizes, in all prompts
        together, and between measured K. It may come to less than 0, where rounds were slower when they were timed by
        themselves too.
        """
        if not self.table.closed_loops:
            draft = _quadratic(self.prompts.draft, tokens) if config.levels else 0.0
            return _quadratic(self.prompts.plain, tokens) + draft
        return self._between(self._prompt_seconds, config, batch_size).seconds / batch_size

    def prompts_in_round(self, config: DraftConfig, batch_size: int) -> float:
        """Seconds by which prompts make each round of so many requests longer; 0 but for an engine's drafted rounds."""
        return self._between(self._prompt_seconds, config, batch_size).a_round if self.table.closed_loops else 0.0

    @staticmethod
    def _between(
        known: Mapping[int, Mapping[int, "PromptSeconds"]], config: DraftConfig, batch_size: int
    ) -> "PromptSeconds":
        """Between measured batch sizes at every measured K, then between those K."""
        levels = [K for K in sorted(known) if bool(K) == bool(config.levels)]
        sizes = [sorted(known[K]) for K in levels]

        def one(part: int) -> float:
            at_size = [np.interp(batch_size, of, [known[K][size][part] for size in of]) for K, of in zip(levels, sizes)]
            return float(np.interp(config.levels, levels, at_size))

        return PromptSeconds(one(0), one(1))

    @cached_property
    def _prompt_seconds(self) -> dict[int, dict[int, PromptSeconds]]:
        """What closed loops take beside their rounds, by levels and batch size."""
        by_K: dict[int, list[ClosedLoop]] = {}
        for loop in self.table.closed_loops:
            by_K.setdefault(loop.levels, []).append(loop)
        return {K: {loop.batch_size: found for loop, found in self._split(loops)} for K, loops in by_K.items()}

    def _split(self, loops: Sequence[ClosedLoop]) -> Iterator[tuple[ClosedLoop, PromptSeconds]]:
        """Loops of one K, with what their prompts take by themselves and in each round."""
        beside = list[float]()
        for loop in loops:
            context = loop.prompt_tokens + loop.answer_tokens // 2
            a_round = self.mean_round(DraftConfig(loop.levels), loop.batch_size, context, loop.drafted_share)
            beside.append(loop.seconds - loop.rounds * a_round)
        # Steps that read prompts, and prompts; errors count as shares of the whole time. Plain rounds are as many
        # whatever is served.
        n, B, T = (np.array([getattr(one, name) for one in loops]) for name in ("rounds", "batch_size", "seconds"))
        parts = np.stack([n * -np.expm1(-B / n), B], axis=1)
        (mixed, _), _ = nnls(parts / T[:, None], np.array(beside) / T)
        mixed = mixed if loops[0].levels and len(loops) > 1 else 0.0
        for loop, seconds in zip(loops, beside):
            at = loop.batch_size / loop.rounds
            slope = float(mixed * (1 - (1 + at) * math.exp(-at)))
            yield loop, PromptSeconds(seconds - slope * loop.rounds, slope)

    @property
    def _prompt_lengths(self) -> list[int]:
        loops = {loop.prompt_tokens for loop in self.table.closed_loops}
        return sorted(loops or {point.tokens for point in self.table.prompt_points})


def _surfaces(points: Sequence[MeasuredRound]) -> tuple[CostSurface, CostSurface, CostSurface]:
    """Fitted surfaces of draft, verify and rest. Errors of each count as shares of the whole round."""
    places, whole = [_grid_point(point) for point in points], [point.seconds for point in points]

    def part(of: Callable[[MeasuredRound], float]) -> CostSurface:
        return CostSurface.fit(places, [of(point) for point in points], whole)

    verify = part(lambda point: point.verify_seconds)
    return part(lambda point: point.draft_seconds), verify, part(lambda point: point.rest_seconds)


def _grid_point(point: MeasuredRound) -> GridPoint:
    return GridPoint(point.batch_size, point.levels, point.tokens, point.context_tokens)


def _error(fitted: Sequence[CostSurface], point: MeasuredRound) -> float:
    return abs(sum(surface(_grid_point(point)) for surface in fitted) / point.seconds - 1)


def _quadratic(weights: tuple[float, float, float], tokens: int) -> float:
    constant, each, square = weights
    return constant + each * tokens + square * tokens**2


def _fit_quadratic(lengths: Sequence[int], seconds: Sequence[float]) -> tuple[float, float, float]:
    # Columns are scaled to one size and rows to relative errors; weights below 0 are not allowed.
    Q = np.array(lengths, dtype=np.float64)
    columns, y = np.stack([np.ones_like(Q), Q, Q**2], axis=1), np.array(seconds, dtype=np.float64)
    size, below = columns.max(axis=0), np.maximum(y, 1e-9)
    weights, _ = nnls(columns / size / below[:, None], y / below)
    a, b, c = (float(weight) for weight in weights / size)
    return a, b, c
