"""From the chosen checkpoint to the registry: register it, meet the champion on the holdout, decide."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from .. import fingerprint
from ..data.store import Capture
from ..eval import counts
from ..eval.costs import CostTable
from ..eval.figures import Estimate, tau, tau_difference
from ..eval.score import Identity
from ..eval.select import Row, leaderboard, serving
from ..eval.settings import HOLDOUT_SPLIT, ScoreSettings
from ..progress import say
from ..registry.gate import Decision, DomainFigures, Evidence, Figures, Interval, decide, promote
from ..registry.lineage import Lineage, Version, git_commit, holdout_overlap
from ..registry.models import champion, register_version
from ..registry.resolve import resolve_models_uri
from ..specdec.formats import read_meta
from .exporting import export_draft, is_copy
from .scoring import Scored, Scorer
from .stages import Stage
from .workspace import Workspace

CANDIDATE, CHAMPION = "candidate", "champion"


@dataclass(frozen=True)
class _Measured:
    """One draft on the holdout, at the K that it was chosen at."""

    row: Row
    table: pa.Table
    lossless: bool


def register(
    space: Workspace, run_id: str, mix: Stage, captured: Stage, scored: Scored, parent: str | None = None
) -> Version:
    """Export the chosen checkpoint and register it under its target as `candidate`. The same draft once only.

    `parent`: the version (`name/number`) that its training started from.
    """
    chosen, recipe = scored.chosen, space.recipe
    exported = (
        space.root / "exports" / f"{chosen.draft}-{chosen.step:06d}-{fingerprint.short(scored.stage.fingerprint)}"
    )
    if not is_copy(exported, scored.chosen_folder):  # not there yet, or damaged since
        shutil.rmtree(exported, ignore_errors=True)
        export_draft(Scorer(space, captured, HOLDOUT_SPLIT), scored.chosen_folder, exported)
    meta = read_meta(exported)
    lineage = Lineage(
        target_fingerprint=space.target_fingerprint,
        target_name=Path(recipe.target.model).name,
        tokenizer_digest=meta.tokenizer_digest,
        mix_fingerprint=mix.fingerprint,
        capture_fingerprint=captured.fingerprint,
        counts_digest=fingerprint.of_file(scored.counts_file),
        recipe_fingerprint=fingerprint.of_json(recipe.resolved()),
        family=meta.family,
        step=chosen.step,
        draft_tokens=chosen.draft_tokens,
        parent=parent,
        git_commit=git_commit(),
    )
    trained_on = {sample.cluster for sample in Capture.open(captured.folder, verify=False).samples("train")}
    return register_version(space.tracking, run_id, exported, lineage, trained_on)


def promote_stage(space: Workspace, captured: Stage, version: Version) -> Decision:
    """Compare the version with the champion for this target on the holdout, and move the alias or say why not."""
    now = champion(space.tracking, space.target_fingerprint)
    if now is not None and now.reference == version.reference:
        decision = Decision(promote=True, reasons=["is the champion already"], numbers={}, compared=None)
        return _told(version, decision)
    decision = decide(_evidence(space, captured, version, now), space.recipe.gate)
    return _told(version, promote(space.tracking, decision, version))


def _told(version: Version, decision: Decision) -> Decision:
    verdict = "promoted to champion" if decision.promote else "not promoted"
    say(f"{version.reference}: {verdict}: {'; '.join(decision.reasons)}")
    return decision


def _evidence(space: Workspace, captured: Stage, version: Version, now: Version | None) -> Evidence:
    scorer, settings = Scorer(space, captured, HOLDOUT_SPLIT), space.recipe.score
    candidate = _measure(space, scorer, version, CANDIDATE)
    clusters = {sample.cluster for sample in scorer.samples}
    common = Evidence(
        candidate=_figures(candidate.row),
        conversations=len(counts.values(candidate.table, "conversation")),  # those scored, not those there are
        confidence=settings.confidence,
        lossless=candidate.lossless,
        export_reads_back=True,  # what was measured is the registered copy, downloaded and checked by its digests
        holdout_overlap=holdout_overlap(space.tracking, version, clusters),
    )
    if now is None:
        return common
    rival = _measure(space, scorer, now, CHAMPION)
    one, two = serving(candidate.table, settings), serving(rival.table, settings)
    return common.model_copy(
        update={
            "compared": now.reference,
            "champion": _figures(rival.row),
            "difference": _interval(tau_difference(one, two, settings.bootstrap)),
            "domains": _by_domain(one, two, settings),
        }
    )


def _measure(space: Workspace, scorer: Scorer, version: Version, name: str) -> _Measured:
    """Score a registered version, at its own K where that is among the recipe's."""
    folder = resolve_models_uri(space.tracking, version.uri, space.root / "models")
    proposer, draft = scorer.proposer(folder)
    table, lossless = scorer.counts(proposer, Identity(name, version.lineage.step))
    costs: dict[str, CostTable] = {name: scorer.costs(proposer, draft)}
    K = version.lineage.draft_tokens
    if K in scorer.settings.draft_tokens:
        table = counts.where(table, draft_tokens=K)
    (row,) = leaderboard([table], costs, scorer.settings)
    return _Measured(row, counts.where(table, draft_tokens=row.draft_tokens), lossless)


def _by_domain(one: pa.Table, two: pa.Table, settings: ScoreSettings) -> dict[str, DomainFigures]:
    found: dict[str, DomainFigures] = {}
    for domain in sorted(counts.values(one, "domain")):
        mine, theirs = counts.where(one, domain=domain), counts.where(two, domain=domain)
        found[domain] = DomainFigures(
            conversations=len(counts.values(mine, "conversation")),
            champion_tau=tau(theirs, settings.bootstrap).value,
            difference=_interval(tau_difference(mine, theirs, settings.bootstrap)),
        )
    return found


def _figures(row: Row) -> Figures:
    return Figures(tau=row.tau.value, speedup=row.speedup.value)


def _interval(estimate: Estimate) -> Interval:
    return Interval(value=estimate.value, low=estimate.low, high=estimate.high)
