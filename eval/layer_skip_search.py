"""Layer-skip search: self-speculative drafts that skip a set of the target's sublayers, by expected speed-up.

Shapes in names: K drafted tokens.

Expected speed-up is tau x plain / (draft + verify + rest), at the best K. tau comes from replay of recorded answers,
one pass of the skipping draft over each. Times are measured for three drafts, not for every set: with nothing skipped,
without attention, and without MLPs. From them a drafted token's time is linear: a constant, plus an equal part for
every attention that is kept, plus an equal part for every MLP that is kept.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from pydantic import TypeAdapter, ValidationError

from ..data.store import Sample
from ..errors import CorruptDataError, MissingFileError
from ..progress import say
from ..specdec.accept_rules import choose_rule
from ..specdec.drafts.layer_skip import SkippedDraft, SkippedLayers
from ..specdec.models import CausalModel
from ..specdec.proposers.factory import make_proposer
from ..specdec.replay.replay import replay
from ..storage import read_json, write_json
from .cost_table import CostTable
from .draft_configs import DraftConfig
from .settings import ScoreSettings
from .target_pass_cache import TargetPassCache

Sublayer = tuple[str, int]
"""Sublayer of the target: a field of SkippedLayers (attention or mlp), and the layer's index."""
Counts = dict[int, tuple[float, float]]
"""Tokens and rounds by K."""
_Stored = TypeAdapter(dict[str, dict[str, Counts]])


class RoundTimes(NamedTuple):
    """Linear time model of a round at one K, in units of a plain token's time."""

    fixed: float
    """Time of the target's pass, of the rest, and of a draft without any sublayer."""
    attention: float
    """Time of the attention of one layer that keeps it; `mlp` likewise."""
    mlp: float

    @classmethod
    def fit(cls, K: int, layers: int, whole: CostTable, no_attention: CostTable, no_mlp: CostTable) -> "RoundTimes":
        """Fit the model from measured drafts that skip nothing, every attention, and every MLP."""
        # Draft times, and the times of everything else, in units of each table's own plain token.
        tables = (whole, no_attention, no_mlp)
        costs = [table.cost(DraftConfig(K)) for table in tables]
        draft = [cost.draft_seconds / table.plain_seconds for cost, table in zip(costs, tables)]
        others = [(c.verify_seconds + c.rest_seconds) / table.plain_seconds for c, table in zip(costs, tables)]
        # What a skipped kind saves, spread over the layers; noise may make a saving negative, which counts as 0.
        attention, mlp = (max(0.0, (draft[0] - one) / layers) for one in draft[1:])
        bare = max(0.0, draft[0] - layers * (attention + mlp))
        return cls(sum(others) / len(others) + bare, attention, mlp)

    def of(self, layers: int, skipped: SkippedLayers) -> float:
        """Time of a round of a draft that skips these sublayers of a target of `layers` layers."""
        attention, mlp = layers - len(skipped.attention), layers - len(skipped.mlp)
        return self.fixed + attention * self.attention + mlp * self.mlp


class SkipScore(NamedTuple):
    """Expected speed-up of one set, at its best K."""

    speedup: float
    tau: float
    K: int


class SkipCounts:
    """Cache file of the counts of every tried set, by domain, so that a later search replays none of them again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = _read(path)

    def get(self, skipped: SkippedLayers, domain: str) -> Counts | None:
        return self._known.get(_key(skipped), {}).get(domain)

    def add(self, skipped: SkippedLayers, counts: Mapping[str, Counts]) -> None:
        self._known[_key(skipped)] = {**self._known.get(_key(skipped), {}), **counts}
        write_json(self._path, _Stored.dump_python(self._known, mode="json"))


class SkipScorer:
    """Scorer of skip sets: replays the skipping drafts of one target on recorded answers."""

    def __init__(
        self,
        target: CausalModel,
        samples: Mapping[str, Sequence[Sample]],
        times: Mapping[int, RoundTimes],
        settings: ScoreSettings,
        counts: SkipCounts,
    ) -> None:
        """`samples`: recorded answers by domain. `times`: round times by K; these K are compared."""
        self._target, self._samples, self._times = target, samples, times
        self._settings, self._known_counts = settings, counts
        self._traces = TargetPassCache(target, settings.trace_bytes, settings.replay_tokens)

    def score(self, skipped: SkippedLayers, domains: Sequence[str]) -> SkipScore:
        """Expected speed-up of a set over some domains pooled, at its best K; of equally good K the smaller one."""
        # Pool tokens and rounds over the domains, then divide tau by the round's time.
        counts = self._counts(skipped, domains)

        def at(K: int) -> SkipScore:
            tokens, rounds = (sum(column) for column in zip(*(counts[domain][K] for domain in domains)))
            tau = tokens / rounds if rounds else 1.0
            return SkipScore(tau / self._times[K].of(self._target.num_layers, skipped), tau, K)

        return max(map(at, sorted(self._times)), key=lambda score: score.speedup)

    def _counts(self, skipped: SkippedLayers, domains: Sequence[str]) -> dict[str, Counts]:
        # Replay only the domains that the file does not have yet.
        known = {domain: self._known_counts.get(skipped, domain) for domain in domains}
        found = {domain: counts for domain, counts in known.items() if counts is not None}
        missing = [domain for domain in domains if domain not in found]
        if missing:
            fresh = {domain: self._replay(skipped, self._samples[domain]) for domain in missing}
            self._known_counts.add(skipped, fresh)
            found |= fresh
        return found

    def _replay(self, skipped: SkippedLayers, samples: Sequence[Sample]) -> Counts:
        """Pooled tokens and rounds by K, each answer under the rule that decides at its sampling setting."""
        # One pass of the target serves every set, as far as the memory for its states reaches.
        proposer = make_proposer(SkippedDraft(self._target, skipped), self._target)
        depths, totals = sorted(self._times), dict.fromkeys(self._times, (0.0, 0.0))
        # Sum the counts by K over all answers.
        for traced in self._traces.traces(samples, proposer):
            rule = choose_rule(traced.sampling, proposer, self._settings.sampled_rules)
            for counted in replay(proposer, traced, [rule], depths):
                for one in counted:
                    tokens, rounds = totals[one.draft_tokens]
                    totals[one.draft_tokens] = tokens + one.counts.tokens, rounds + one.counts.rounds
        return totals


def sublayers(layers: int) -> list[Sublayer]:
    """All sublayers that can be skipped."""
    return [(kind, layer) for layer in range(layers) for kind in SkippedLayers.model_fields]


def skipped_layers(parts: frozenset[Sublayer]) -> SkippedLayers:
    """Draft settings that skip a set of sublayers."""
    return SkippedLayers(**{kind: tuple(n for one, n in parts if one == kind) for kind in SkippedLayers.model_fields})


def _key(skipped: SkippedLayers) -> str:
    return skipped.model_dump_json()


def _read(path: Path) -> dict[str, dict[str, Counts]]:
    try:
        return _Stored.validate_python(read_json(path))
    except MissingFileError:
        return {}
    except (CorruptDataError, ValidationError):
        say(f"{path}: not a readable list of tries; trying again")
        return {}


P = TypeVar("P")


class SearchResult(NamedTuple, Generic[P]):
    """Result of a search: the best set of parts that was tried."""

    parts: frozenset[P]
    value: float
    tries: int
    """Number of sets that were tried."""


def search(
    parts: Sequence[P],
    value: Callable[[frozenset[P]], float],
    tries: int,
    seed: int,
    start: Iterable[frozenset[P]] = (),
) -> SearchResult[P]:
    """Search for the set of the highest value with at most `tries` evaluations; of equal sets the first one wins.

    The sets of `start` are tried first of all. The same arguments give the same sets in the same order.
    """
    trials = _Trials(value, tries)
    try:
        # 1) sets that are given
        for known in start:
            trials.at(known)
        # 2) each part alone; then the best m parts together, for ever finer m
        order = _by_single_value(parts, trials, random.Random(seed))
        _nested(order, trials)
        # 3) from the best set on, one part more, less or another, while that is better
        _climb(parts, trials, random.Random(seed))
    except _NoTriesLeftError:
        pass
    return SearchResult(trials.best, trials.values[trials.best], len(trials.values))


class _NoTriesLeftError(Exception):
    """All tries are used up."""


class _Trials(Generic[P]):
    """Memo of the values of tried sets, with the best one. Raises _NoTriesLeftError when the budget is spent."""

    def __init__(self, value: Callable[[frozenset[P]], float], tries: int) -> None:
        self._value, self._tries = value, tries
        self.values: dict[frozenset[P], float] = {}
        self.best: frozenset[P] = frozenset()

    def at(self, parts: frozenset[P]) -> float:
        # A known set costs no try. A strict comparison lets the first of equal sets stay the best.
        if parts not in self.values:
            if len(self.values) >= self._tries:
                raise _NoTriesLeftError
            self.values[parts] = self._value(parts)
            if len(self.values) == 1 or self.values[parts] > self.values[self.best]:
                self.best = parts
        return self.values[parts]


def _by_single_value(parts: Sequence[P], trials: _Trials[P], chance: random.Random) -> list[P]:
    """Parts ordered by the value of skipping each alone, the best first. `chance` fixes the order of evaluation."""
    alone = {place: trials.at(frozenset([parts[place]])) for place in chance.sample(range(len(parts)), len(parts))}
    return [parts[place] for place in sorted(alone, key=lambda place: (-alone[place], place))]


def _nested(order: Sequence[P], trials: _Trials[P]) -> None:
    """Nested search: try the first m parts, for m in steps of an eighth, then in halved steps around the best m."""

    def value(count: int) -> float:
        return trials.at(frozenset(order[:count]))

    # Coarse grid first.
    step = max(1, len(order) // 8)
    best = max(range(0, len(order) + 1, step), key=value)
    # Then the neighbours of the best m, at half the step each time.
    while step > 1:
        step = (step + 1) // 2
        best = max((m for m in (best, best - step, best + step) if 0 <= m <= len(order)), key=value)


def _climb(parts: Sequence[P], trials: _Trials[P], chance: random.Random) -> None:
    """Hill climbing: move to the first better neighbour (one part more, less or swapped) until there is none."""
    while True:
        # All neighbours in random order, cheap changes of one part before swaps.
        here = trials.best
        inside = [part for part in parts if part in here]
        outside = [part for part in parts if part not in here]
        one_off = [here ^ {part} for part in parts]
        swapped = [here ^ {one, other} for one in inside for other in outside]
        around = [*chance.sample(one_off, len(one_off)), *chance.sample(swapped, len(swapped))]
        # `any` stops at the first better one, which is then `trials.best`.
        if not any(trials.at(near) > trials.values[here] for near in around):
            return
