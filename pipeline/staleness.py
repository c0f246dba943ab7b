"""Staleness of a champion: its causes with numbers, the two statistical tests behind them, and the target's revision.

Both tests (a fall of tau, a drift of the mix) ask whether a change exceeds a margin of the recipe, not whether there is
any: with enough conversations every change is significant, and few are worth a training. tau is tokens per pass of the
target.

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
from ..eval.acceptance import Estimate, cluster_sums, estimate, independent_error, student, tau_bounds, tau_difference
from ..eval.counts import values
from ..progress import say
from ..recipe import Recipe
from ..registry.lineage import Version
from ..registry.versions import is_models_uri
from ..specdec.sampling_settings import SamplingSettings

Floats = NDArray[np.float64]
STALENESS_FILE = "staleness.json"
"""Record of the last check, in the work folder, for monitoring."""
Kind = Literal["first", "target", "files", "gate", "acceptance", "drift"]
Verdict = Literal["stale", "held", "unknown"]
_SIMULATIONS = 2000
_HUB_SECONDS = 10.0
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PAIRED_SHARE = 0.5  # of the answers now: from here on the same ones are compared, below it all of both sides


@dataclass(frozen=True)
class Cause:
    """Cause of staleness that was examined: the verdict, and what was found, in words and numbers."""

    kind: Kind
    verdict: Verdict
    text: str
    numbers: Mapping[str, float | int | str]

    def record(self) -> dict[str, Any]:
        """JSON-able form; an unknown number (NaN or infinite) is null."""
        known = {name: None if _is_nan(value) else value for name, value in self.numbers.items()}
        return {"kind": self.kind, "verdict": self.verdict, "text": self.text, "numbers": known}


@dataclass(frozen=True)
class Staleness:
    """Verdict about a champion, with every cause that was examined."""

    champion: Version | None
    """Version that was judged, and that training may start from; None: no target has a champion."""
    causes: tuple[Cause, ...]

    @property
    def stale(self) -> bool:
        """Whether a new draft is due."""
        return any(cause.verdict == "stale" for cause in self.causes)

    @property
    def lost(self) -> str:
        """What is wrong with the files of `champion`, so that nothing can start from it; empty: nothing."""
        return next((cause.text for cause in self.causes if cause.kind == "files" and cause.verdict == "unknown"), "")

    def record(self) -> dict[str, Any]:
        """JSON-able form, without the time of the check."""
        champion = None if self.champion is None else self.champion.reference
        return {"champion": champion, "stale": self.stale, "causes": [cause.record() for cause in self.causes]}


class Change(NamedTuple):
    """Ratio of tau now to tau then, with one-sided bounds."""

    before: float
    now: float
    ratio: float
    lower: float
    upper: float
    clusters_before: int
    clusters_now: int
    paired: bool

    def verdict(self, margin: float) -> Verdict:
        """Stale where the upper bound lies below 1 - margin, held where the lower one lies above; else unknown."""
        if self.upper < 1 - margin:
            return "stale"
        return "held" if self.lower >= 1 - margin else "unknown"


def tau_change(before: pa.Table, now: pa.Table, confidence: float) -> Change:
    """Change of tau from counts `before` to counts `now`, at the sampling settings that both have.

    Where at least half the answers of `now` are to turns that `before` has too, those are compared pairwise. Bounds are
    one-sided, each at `confidence`: Student's t on log tau, with the error of `acceptance.estimate`, of both samples
    together where they are not paired. NaN bounds where a side has too few clusters for an interval.
    """
    # 1) The same settings on both sides, and the same turns where most of them are there.
    before, now = _common(before, now, "setting"), _common(now, before, "setting")
    turns_before, turns_now = set(_turns(before)), _turns(now)
    shared = turns_before & set(turns_now)
    paired = bool(shared) and len(shared) >= _PAIRED_SHARE * len(set(turns_now))
    if paired:
        before, now = (table.filter(pa.array([turn in shared for turn in _turns(table)])) for table in (before, now))
    # 2) The change of log tau, and its error.
    then, here = (_log_tau(table, confidence) for table in (before, now))
    log_ratio = here.value - then.value
    if paired:
        difference = tau_difference(now, before, confidence, np.log, np.log)
        error, freedom = difference.error, difference.freedom
    else:
        error, freedom = independent_error([then, here])
    # 3) The ratio and its bounds.
    reach = student(confidence, freedom) * error
    with np.errstate(over="ignore"):
        bounds = (float(np.exp(log_ratio - reach)), float(np.exp(log_ratio + reach)))
    taus = math.exp(then.value), math.exp(here.value)
    return Change(*taus, math.exp(log_ratio), *bounds, then.clusters, here.clusters, paired)


def _log_tau(table: pa.Table, confidence: float) -> Estimate:
    """Log of tau, pooled over all rounds; NaN without a round."""
    sums = cluster_sums(table)
    tokens_C, rounds_C = sums.column("tokens"), sums.column("rounds")
    if not (tokens_C.sum() > 0 and rounds_C.sum() > 0):
        return Estimate(math.nan)
    columns_C2 = np.stack([tokens_C, rounds_C], axis=1)
    least, most = map(math.log, tau_bounds(table))
    return estimate(
        lambda sums_B2: np.log(sums_B2[:, 0] / sums_B2[:, 1]), columns_C2, rounds_C, confidence, (least, most)
    )


def _common(table: pa.Table, other: pa.Table, column: str) -> pa.Table:
    """Rows of a table whose value in a column occurs in the other table too."""
    theirs = set(values(other, column))
    return table.filter(pa.array([value in theirs for value in table[column].to_pylist()], pa.bool_()))


def _turns(table: pa.Table) -> list[tuple[Any, ...]]:
    """Identity of each row's answer: cluster, conversation, turn and sampling setting."""
    return list(zip(*(table[name].to_pylist() for name in ("cluster", "conversation", "turn", "setting"))))


class Drift(NamedTuple):
    """Drift of a mix: distance of two mixes, and the p-value of seeing it if they lay only the margin apart."""

    distance: float
    p_value: float
    conversations_before: int
    conversations_now: int
    moved: str
    """Cell whose share changed most, in words: domain, sampling setting, share before and now."""

    def verdict(self, margin: float, confidence: float) -> Verdict:
        """Stale where the distance is shown to exceed the margin, held where it does not exceed it; else unknown."""
        if not self.distance > margin:
            return "held"
        return "stale" if self.p_value <= 1 - confidence else "unknown"


def mix_drift(
    before: Sequence[Conversation], now: Sequence[Conversation], usual: SamplingSettings, margin: float, seed: int = 0
) -> Drift:
    """Total variation distance of two mixes over domain x sampling setting, and a test of "at most `margin`".

    The test is a cluster bootstrap under the null hypothesis: the pair of mixes exactly `margin` apart on the line
    between the two observed ones (margin 0: both are the pooled mix). Each simulation draws as many whole clusters as
    each side has; the p-value is the share of simulations whose two sides lie at least as far apart as the observed
    ones. On few conversations the distance is biased upwards, in the simulations as much as in the observation.
    `usual`: the sampling setting of conversations whose log names none.
    """
    # 1) Conversations of each cluster, of both mixes in turn, by cell.
    cells: dict[str, int] = {}
    counts = [_cluster_cells(side, usual, cells) for side in (before, now)]
    units_UC = np.zeros((sum(map(len, counts)), len(cells)))
    for row, found in enumerate(found for side in counts for found in side.values()):
        for cell, number in found.items():
            units_UC[row, cells[cell]] = number
    # 2) Shares of the cells, their distance, and its p-value.
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
    """Number of conversations of each cluster by cell; `cells` gets a column for each new cell."""
    found: dict[str, Counter[str]] = {}
    for conversation in side:
        cell = f"{conversation.domain} {(conversation.sampling or usual).key}"
        cells.setdefault(cell, len(cells))
        found.setdefault(conversation.cluster, Counter())[cell] += 1
    return found


def _chance(units_UC: Floats, split: int, seen: float, apart: float, rng: np.random.Generator) -> float:
    """p-value: how often two samples, of mixes `apart` times as far apart as observed, lie at least `seen` apart.

    `units_UC`: conversations of each cluster by cell; the first `split` clusters are of the first mix.
    """
    sizes = split, len(units_UC) - split
    # Where the two mixes of the null hypothesis lie on the line from the first (0) to the second (1): `apart` from each
    # other, with the pooled mix in between.
    start = sizes[1] / sum(sizes) * (1 - apart)
    draws = [
        _drawn_shares(units_UC, split, position, size, rng)
        for position, size in zip((start, start + apart), sizes, strict=True)
    ]
    # With one added above and below, the p-value is valid for any number of simulations (Davison and Hinkley 1997).
    distances_S = np.abs(draws[0] - draws[1]).sum(1) / 2
    return float((1 + (distances_S >= seen - 1e-12).sum()) / (1 + _SIMULATIONS))


def _drawn_shares(units_UC: Floats, split: int, position: float, clusters: int, rng: np.random.Generator) -> Floats:
    """Cell shares [S, C] of simulated samples of `clusters` clusters each, drawn with replacement from both mixes.

    `position`: expected share of conversations that come from the second mix.
    """
    # Clusters are drawn, but `position` is a share of conversations: weigh by conversations a cluster.
    means = units_UC[:split].sum() / split, units_UC[split:].sum() / (len(units_UC) - split)
    weights = (1 - position) / means[0], position / means[1]  # clusters of the two mixes may differ in size
    second = weights[1] / sum(weights)
    # Each cluster of a side is equally likely; a multinomial counts how often each one is drawn.
    chance_U = np.where(np.arange(len(units_UC)) < split, (1 - second) / split, second / (len(units_UC) - split))
    drawn_SC = rng.multinomial(clusters, chance_U / chance_U.sum(), size=_SIMULATIONS) @ units_UC
    return np.asarray(drawn_SC / drawn_SC.sum(1, keepdims=True))


def _variation(first_C: Floats, second_C: Floats) -> float:
    """Total variation distance of two distributions over cells: half their L1 distance."""
    return float(np.abs(first_C - second_C).sum() / 2)


def _largest_move(names: Sequence[str], first_C: Floats, second_C: Floats) -> str:
    """Cell with the largest change of its share, and both shares, in words."""
    cell = int(np.abs(first_C - second_C).argmax())
    return f"{names[cell]} from {first_C[cell]:.0%} to {second_C[cell]:.0%}"


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def pin_revision(recipe: Recipe) -> Recipe:
    """Pin a hub target to the commit that its branch or tag names at this moment; other recipes are returned unchanged.

    Raises HubError where the hub cannot be asked: whether the target changed is then unknown, and nothing is done.
    """
    target = recipe.target
    # Local targets are compared by content, and a full commit cannot move.
    if not is_hub_id(target.model) or (target.revision and _COMMIT.fullmatch(target.revision)):
        return recipe
    commit = hub_commit(target.model, target.revision)
    say(f"target.model {target.model}: {target.revision or 'its default branch'} is at {commit[:12]}")
    return recipe.model_copy(update={"target": target.model_copy(update={"revision": commit})})


def is_hub_id(model: str) -> bool:
    """Whether a model is named by a hub repository (owner/name): no local path, no GGUF file, no MLflow address."""
    local = model.startswith(("/", ".", "~")) or Path(model).exists() or Path(model).suffix == ".gguf"
    return not local and not is_models_uri(model) and model.count("/") == 1


def hub_commit(model: str, revision: str | None) -> str:
    """Commit (40 hex digits) of a branch or tag of a hub repository; `revision` None: of its default branch.

    Raises MissingFileError where the hub knows no such repository or revision, HubError where it cannot be asked.
    """
    cure = "pin target.revision to a commit to work without it"
    where = f"target.model {model}"
    # An unknown repository or revision is a mistake of the recipe; a hub that does not answer may be temporary.
    try:
        commit = HfApi().model_info(model, revision=revision, timeout=_HUB_SECONDS).sha
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
