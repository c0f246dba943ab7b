"""Why a champion no longer fits: causes with numbers, and the two tests that decide them.

Both tests ask whether a change is larger than what the recipe lets pass, not whether there is any: with enough
conversations every change is significant, and few are worth a training.

Shape letters: U clusters of conversations, C cells (domain x sampling setting), S simulations.
"""

import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
from numpy.typing import NDArray

from ..data.conversation import Conversation
from ..errors import HubError, MissingFileError, one_line
from ..eval.counts import values
from ..eval.figures import ClusterSums, cluster_sums
from ..progress import say
from ..recipe import Recipe
from ..registry.lineage import Version
from ..registry.versions import is_models_uri
from ..specdec.sampling import SamplingSettings

Floats = NDArray[np.float64]
STALENESS_FILE = "staleness.json"
"""In the work folder: the last check, for monitoring."""
Kind = Literal["first", "target", "files", "acceptance", "drift"]
Verdict = Literal["stale", "held", "unknown"]
_SIMULATIONS = 2000
_PAIRED_SHARE = 0.5  # of the answers now: from here on the same ones are compared, below it all of both sides


@dataclass(frozen=True)
class Cause:
    """One thing that was looked at: what was found, in words and numbers."""

    kind: Kind
    verdict: Verdict
    text: str
    numbers: Mapping[str, float | int | str]

    def record(self) -> dict[str, Any]:
        """JSON-able: an unknown number is null."""
        known = {name: None if _is_nan(value) else value for name, value in self.numbers.items()}
        return {"kind": self.kind, "verdict": self.verdict, "text": self.text, "numbers": known}


@dataclass(frozen=True)
class Staleness:
    """What a look at the champion came to."""

    champion: Version | None
    """The version that was judged, and that training may start from; None: there is none of any target."""
    causes: tuple[Cause, ...]

    @property
    def stale(self) -> bool:
        """Whether a new draft is due."""
        return any(cause.verdict == "stale" for cause in self.causes)

    @property
    def lost(self) -> str:
        """What is wrong with the files of `champion`, so that nothing can start from it; empty: nothing."""
        return next((cause.text for cause in self.causes if cause.kind == "files" and cause.verdict == "unknown"), "")

    @property
    def why(self) -> str:
        """The causes that make it stale, in one line."""
        return "; ".join(cause.text for cause in self.causes if cause.verdict == "stale")

    def record(self) -> dict[str, Any]:
        """JSON-able."""
        champion = None if self.champion is None else self.champion.reference
        return {"champion": champion, "stale": self.stale, "causes": [cause.record() for cause in self.causes]}


class Change(NamedTuple):
    """tau now over tau then, and one-sided bounds of it."""

    before: float
    now: float
    ratio: float
    lower: float
    upper: float
    clusters_before: int
    clusters_now: int
    paired: bool

    def verdict(self, margin: float) -> Verdict:
        """Fallen only where the upper bound lies below 1 - margin; held where the lower one does not."""
        if self.upper < 1 - margin:
            return "stale"
        return "held" if self.lower >= 1 - margin else "unknown"


def tau_change(before: pa.Table, now: pa.Table, confidence: float) -> Change:
    """tau of `now` relative to `before`, at the sampling settings that both have.

    Where most answers of `now` are to turns that `before` has too, those are compared pairwise. Bounds are one-sided,
    each at `confidence`: Student's t on log tau, its variance linearised and summed by cluster, with Welch's degrees of
    freedom. NaN bounds where a side has fewer than 2 clusters.
    """
    before, now = _common(before, now, "setting"), _common(now, before, "setting")
    turns_before, turns_now = set(_turns(before)), _turns(now)
    shared = turns_before & set(turns_now)
    paired = bool(shared) and len(shared) >= _PAIRED_SHARE * len(set(turns_now))
    if paired:
        before, now = (table.filter(pa.array([turn in shared for turn in _turns(table)])) for table in (before, now))
    one, two = cluster_sums(before), cluster_sums(now)
    sides = [_linearised(sums) for sums in (one, two)]
    (tau_before, residuals_before), (tau_now, residuals_now) = sides
    if paired:
        index = {name: place for place, name in enumerate(one.clusters)}
        order = [index[name] for name in two.clusters]
        groups = [residuals_now - residuals_before[order]]
    else:
        groups = [residuals_before, residuals_now]
    error, freedom = _error(groups)
    ratio = tau_now / tau_before if tau_before > 0 else math.nan
    reach = math.nan if math.isnan(error) else _student(confidence, freedom) * error
    bounds = (ratio * math.exp(-reach), ratio * math.exp(reach))
    return Change(tau_before, tau_now, ratio, *bounds, len(one.clusters), len(two.clusters), paired)


def _linearised(sums: ClusterSums) -> tuple[float, Floats]:
    """tau, and each cluster's part in the error of log tau (they sum to 0)."""
    tokens_U, rounds_U = sums.column("tokens"), sums.column("rounds")
    tokens, rounds = float(tokens_U.sum()), float(rounds_U.sum())
    if not (tokens > 0 and rounds > 0):
        return math.nan, np.empty(0)
    return tokens / rounds, tokens_U / tokens - rounds_U / rounds


def _error(groups: Sequence[Floats]) -> tuple[float, float]:
    """Standard error of a sum of independent groups' totals, and its degrees of freedom (Welch, Satterthwaite)."""
    if any(len(group) < 2 for group in groups):
        return math.nan, math.nan
    variances = [len(group) / (len(group) - 1) * float((group**2).sum()) for group in groups]
    total = sum(variances)
    if total == 0:
        return 0.0, math.inf
    return math.sqrt(total), total**2 / sum(part**2 / (len(group) - 1) for part, group in zip(variances, groups))


def _student(confidence: float, freedom: float) -> float:
    from scipy import stats  # slow to import

    return float(stats.t.ppf(confidence, freedom) if math.isfinite(freedom) else stats.norm.ppf(confidence))


def _common(table: pa.Table, other: pa.Table, column: str) -> pa.Table:
    """The rows whose value in a column the other table has as well."""
    theirs = set(values(other, column))
    return table.filter(pa.array([value in theirs for value in table[column].to_pylist()], pa.bool_()))


def _turns(table: pa.Table) -> list[tuple[Any, ...]]:
    return list(zip(*(table[name].to_pylist() for name in ("cluster", "conversation", "turn", "setting"))))


class Drift(NamedTuple):
    """How far two mixes lie apart, and the chance of seeing that where they lie only the margin apart."""

    distance: float
    p_value: float
    conversations_before: int
    conversations_now: int
    moved: str
    """The cell whose share changed most, in words."""

    def verdict(self, margin: float, confidence: float) -> Verdict:
        """Drifted only where the distance is shown to exceed the margin."""
        if not self.distance > margin:
            return "held"
        return "stale" if self.p_value <= 1 - confidence else "unknown"


def mix_drift(
    before: Sequence[Conversation], now: Sequence[Conversation], usual: SamplingSettings, margin: float, seed: int = 0
) -> Drift:
    """Total variation distance over domain x sampling setting, and a test of "at most `margin`".

    The null hypothesis is the pair of mixes exactly `margin` apart that lies on the line between the two observed ones
    (margin 0: both are the pooled one). Whole clusters are drawn from it, as often as there are, and the share of draws
    that lie at least as far apart as what was seen is the p-value: the distance's bias on few conversations, which is
    upwards, is in both. `usual`: the sampling setting of conversations whose log names none.
    """
    cells: dict[str, int] = {}
    counts = [_cluster_cells(side, usual, cells) for side in (before, now)]
    units_UC = np.zeros((sum(map(len, counts)), len(cells)))
    for row, found in enumerate(found for side in counts for found in side.values()):
        for cell, number in found.items():
            units_UC[row, cells[cell]] = number
    split = len(counts[0])
    first_C, second_C = units_UC[:split].sum(0), units_UC[split:].sum(0)
    shares = first_C / first_C.sum(), second_C / second_C.sum()
    distance = _variation(*shares)
    moved = _largest_move(list(cells), *shares)
    p_value = 1.0
    if distance > margin:
        p_value = _chance(units_UC, split, distance, margin / distance, np.random.default_rng(seed))
    return Drift(distance, p_value, int(first_C.sum()), int(second_C.sum()), moved)


def _cluster_cells(side: Sequence[Conversation], usual: SamplingSettings, cells: dict[str, int]) -> dict[str, Any]:
    """Conversations of each cluster by cell; new cells get a column."""
    found: dict[str, Counter[str]] = {}
    for one in side:
        cell = f"{one.domain} {(one.sampling or usual).key}"
        cells.setdefault(cell, len(cells))
        found.setdefault(one.cluster, Counter())[cell] += 1
    return found


def _chance(units_UC: Floats, split: int, seen: float, apart: float, rng: np.random.Generator) -> float:
    """How often two draws, whose mixes lie `apart` times as far as the observed ones, lie at least as far as `seen`."""
    sizes = split, len(units_UC) - split
    middle = sizes[1] / sum(sizes) * (1 - apart)  # of the line: where the first mix lies; the pooled one in between
    draws = [
        _drawn_shares(units_UC, split, place, size, rng)
        for place, size in zip((middle, middle + apart), sizes, strict=True)
    ]
    distances_S = np.abs(draws[0] - draws[1]).sum(1) / 2
    return float((1 + (distances_S >= seen - 1e-12).sum()) / (1 + _SIMULATIONS))


def _drawn_shares(units_UC: Floats, split: int, place: float, clusters: int, rng: np.random.Generator) -> Floats:
    """Shares [S, C] of `clusters` drawn clusters, conversations of the second mix making up `place` of them."""
    means = units_UC[:split].sum() / split, units_UC[split:].sum() / (len(units_UC) - split)
    weights = (1 - place) / means[0], place / means[1]  # clusters of the two mixes may differ in size
    second = weights[1] / sum(weights)
    chance_U = np.where(np.arange(len(units_UC)) < split, (1 - second) / split, second / (len(units_UC) - split))
    drawn_SC = rng.multinomial(clusters, chance_U / chance_U.sum(), size=_SIMULATIONS) @ units_UC
    return np.asarray(drawn_SC / drawn_SC.sum(1, keepdims=True))


def _variation(first_C: Floats, second_C: Floats) -> float:
    return float(np.abs(first_C - second_C).sum() / 2)


def _largest_move(names: Sequence[str], first_C: Floats, second_C: Floats) -> str:
    place = int(np.abs(first_C - second_C).argmax())
    return f"{names[place]} from {first_C[place]:.0%} to {second_C[place]:.0%}"


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


_ASK_SECONDS = 10.0
_COMMIT = re.compile(r"[0-9a-f]{40}")


def pinned(recipe: Recipe) -> Recipe:
    """The recipe with a hub target pinned to the commit that its revision names now; any other recipe as it is.

    Raises HubError where the hub cannot be asked: whether the target changed is then unknown, and nothing is done.
    """
    target = recipe.target
    if not is_hub_id(target.model) or (target.revision and _COMMIT.fullmatch(target.revision)):
        return recipe
    commit = newest(target.model, target.revision)
    say(f"target.model {target.model}: {target.revision or 'its default branch'} is at {commit[:12]}")
    return recipe.model_copy(update={"target": target.model_copy(update={"revision": commit})})


def is_hub_id(model: str) -> bool:
    """Whether this names a repository on the hub: owner/name, and nothing here or in MLflow."""
    here = model.startswith(("/", ".", "~")) or Path(model).exists() or Path(model).suffix == ".gguf"
    return not here and not is_models_uri(model) and model.count("/") == 1


def newest(model: str, revision: str | None) -> str:
    """The commit that a branch or tag of a hub repository names now. HubError, MissingFileError."""
    cure = "pin target.revision to a commit to work without it"
    where = f"target.model {model}"
    try:
        commit = HfApi().model_info(model, revision=revision, timeout=_ASK_SECONDS).sha
    except RevisionNotFoundError:
        raise MissingFileError(f"target.revision: {revision}: {model} has no such branch, tag or commit") from None
    except (RepositoryNotFoundError, HFValidationError):
        raise MissingFileError(
            f"{where}: no such folder, and no such repository on the hub (or it is private)"
        ) from None
    except Exception as error:  # its transport has changed, and each has errors of its own
        offline = "it is switched off by HF_HUB_OFFLINE" if os.environ.get("HF_HUB_OFFLINE") else one_line(error)
        raise HubError(f"{where}: the hub cannot be asked for its newest revision ({offline}); {cure}") from error
    if commit is None:
        raise HubError(f"{where}: the hub names no commit; {cure}")
    return str(commit)
