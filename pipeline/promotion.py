"""From the chosen checkpoint to the registry: register it, meet the champion on the holdout, decide."""

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from .. import fingerprint, storage
from ..data.store import Capture
from ..errors import LostFilesError
from ..eval import counts
from ..eval.figures import Estimate, tau, tau_difference
from ..eval.plans import Plan
from ..eval.report.record import holdout_record
from ..eval.score import Identity
from ..eval.select import Row, Times, at_plan, domain_rows, leaderboard, plain_row, serving, speedup_difference
from ..eval.settings import HOLDOUT_SPLIT, ScoreSettings
from ..eval.table import show_domains, show_leaderboard
from ..progress import say
from ..registry.gate import decide
from ..registry.lineage import Lineage, Version, ancestors, git_commit, holdout_overlap
from ..registry.models import champion, register_version
from ..registry.promoting import ALREADY, promote
from ..registry.records import Decision, DomainFigures, Evidence, Figures, Interval
from ..registry.resolve import resolve_models_uri
from ..specdec.formats import read_meta
from ..specdec.proposers.free import LOOKUP
from .exporting import export_draft, is_copy
from .kept_counts import keep_counts
from .scoring import Scored, Scorer
from .stages import Stage
from .workspace import Workspace

CANDIDATE, CHAMPION = "candidate", "champion"
PROMOTION_FILE = "promotion.json"


@dataclass(frozen=True)
class _Measured:
    """One draft on the holdout, at the K or tree that it was chosen at."""

    row: Row
    table: pa.Table
    times: Times
    lossless: bool | None


def promote_stage(
    space: Workspace, run_id: str, mix: Stage, captured: Stage, scored: Scored, parent: str | None = None
) -> tuple[Version, Decision]:
    """Register the chosen checkpoint, let it meet the champion on the holdout, and move the alias or say why not.

    `parent`: the version (`name/number`) that its training started from.
    """
    scorer = Scorer(space, captured, HOLDOUT_SPLIT)
    version = _register(space, run_id, mix, captured, scored, scorer, parent)
    now = champion(space.tracking, space.target_fingerprint)
    if now is not None and now.reference == version.reference:
        decision = Decision(promote=True, reasons=[ALREADY])
        return version, _told(version, decision)
    evidence, holdout = _evidence(space, scorer, version, now)
    decision = _told(version, promote(space.tracking, decide(evidence, space.recipe.gate), version))
    _keep(space, scored.stage.folder / PROMOTION_FILE, version, decision, holdout)
    return version, decision


def _keep(space: Workspace, path: Path, version: Version, decision: Decision, holdout: Mapping[str, Any]) -> None:
    """The decision, what was seen on the holdout, and where the version comes from: for the report."""
    line = [{"version": one.reference, "lineage": _told_of(one)} for one in ancestors(space.tracking, version)]
    record = {"version": version.reference, "at": time.time(), "lineage": _told_of(version), "ancestors": line}
    storage.write_json(path, {**record, "decision": decision.model_dump(mode="json"), "holdout": holdout})


def _told_of(version: Version) -> dict[str, Any]:
    return version.lineage.model_dump(mode="json", exclude={"files", "tree"})


def _register(
    space: Workspace, run_id: str, mix: Stage, captured: Stage, scored: Scored, scorer: Scorer, parent: str | None
) -> Version:
    """Export the chosen checkpoint and register it under its target as `candidate`. The same draft once only."""
    chosen, recipe = scored.chosen, space.recipe
    exported = (
        space.root / "exports" / f"{chosen.draft}-{chosen.step:06d}-{fingerprint.short(scored.stage.fingerprint)}"
    )
    if not is_copy(exported, scored.chosen_folder):  # not there yet, or damaged since
        shutil.rmtree(exported, ignore_errors=True)
        export_draft(scorer, scored.chosen_folder, exported)
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
        draft_tokens=chosen.plan.levels,
        tree_name=chosen.plan.tree or None,
        tree=scored.trees[chosen.draft, chosen.step].get(chosen.plan.tree),
        parent=parent,
        git_commit=git_commit(),
    )
    trained_on = {sample.cluster for sample in Capture.open(captured.folder, verify=False).samples("train")}
    return register_version(space.tracking, run_id, exported, lineage, trained_on, space.target_settings)


def _told(version: Version, decision: Decision) -> Decision:
    verdict = "promoted to champion" if decision.promote else "not promoted"
    say(f"{version.reference}: {verdict}: {'; '.join(decision.reasons)}")
    return decision


def _evidence(
    space: Workspace, scorer: Scorer, version: Version, now: Version | None
) -> tuple[Evidence, dict[str, Any]]:
    """Measure the version, and the champion beside it, on the holdout; and show it, with prompt lookup to compare.

    Also gives all of that as a record.
    """
    settings = space.recipe.score
    candidate = _measure(space, scorer, version, CANDIDATE)
    keep_counts(space.tracking, version, candidate.table)
    rival, lost = (None, None) if now is None else _rival(space, scorer, now)
    holdout = _show(scorer, candidate, rival)
    evidence = Evidence(
        candidate=_figures(candidate.row),
        conversations=len(counts.values(candidate.table, "conversation")),  # those scored, not those there are
        confidence=settings.confidence,
        lossless=candidate.lossless,
        export_reads_back=True,  # what was measured is the registered copy, downloaded and checked by its digests
        holdout_overlap=holdout_overlap(space.tracking, version, {sample.cluster for sample in scorer.samples}),
    )
    if now is None:
        return evidence, holdout
    if rival is None:
        return evidence.model_copy(update={"compared": now.reference, "champion_lost": lost}), holdout
    difference = speedup_difference([candidate.table, rival.table], candidate.row, rival.row, settings)
    found = evidence.model_copy(
        update={
            "compared": now.reference,
            "champion": _figures(rival.row),
            "difference": _interval(difference),
            "domains": _by_domain(candidate, rival, settings),
        }
    )
    return found, holdout


def _show(scorer: Scorer, candidate: _Measured, rival: _Measured | None) -> dict[str, Any]:
    """Both drafts and prompt lookup on the holdout, then by domain; the same as a record."""
    settings, draftings = scorer.settings, scorer.draftings(None)
    costs = scorer.times(None, draftings)
    lookup, _ = scorer.counts(draftings, Identity(LOOKUP, 0))
    (baseline,) = leaderboard([lookup], {(LOOKUP, 0): costs}, settings, [LOOKUP])
    drafts = [candidate] if rival is None else [candidate, rival]
    rows = [baseline, *(draft.row for draft in drafts)]
    show_leaderboard([plain_row(costs), *rows], settings.confidence, "On the holdout", costs.said)
    tables = [lookup, *(draft.table for draft in drafts)]
    times = {(LOOKUP, 0): costs, **{(draft.row.draft, draft.row.step): draft.times for draft in drafts}}
    domains = domain_rows(tables, rows, settings, times)
    show_domains(domains, settings.confidence, title="On the holdout, by domain")
    return holdout_record(tables, rows, settings, domains)


def _rival(space: Workspace, scorer: Scorer, now: Version) -> tuple[_Measured | None, str | None]:
    """The champion measured, or what is wrong with its files: one that nobody can fetch blocks no better draft."""
    try:
        return _measure(space, scorer, now, CHAMPION), None
    except LostFilesError as error:
        return None, str(error)


def _measure(space: Workspace, scorer: Scorer, version: Version, name: str) -> _Measured:
    """Score a registered version, as the registry has it now, at its own tree, or K where the recipe has that."""
    folder = resolve_models_uri(space.tracking, version.uri, space.root / "models", afresh=True)
    draft, lineage = scorer.load(folder), version.lineage
    known = scorer.draftings(draft)  # times of all of them may be there already
    mine = next((one for one in known if one.fixed == lineage.tree and one.tree == (lineage.tree_name or "")), None)
    if mine is None:  # a tree of another recipe, or of other answers
        assert lineage.tree is not None
        mine = scorer.tree_of(draft, str(lineage.tree_name), lineage.tree)
        known = [mine]
    table, lossless = scorer.counts([mine], Identity(name, lineage.step))
    times = scorer.times(draft, known)
    if lineage.tree is None and lineage.draft_tokens in scorer.settings.draft_tokens:
        table = at_plan(table, Plan(lineage.draft_tokens))
    (row,) = leaderboard([table], {(name, lineage.step): times}, scorer.settings)
    row = replace(row, chosen=False)  # there was nothing to choose from
    return _Measured(row, at_plan(table, row.plan), times, lossless)


def _by_domain(candidate: _Measured, rival: _Measured, settings: ScoreSettings) -> dict[str, DomainFigures]:
    """Both drafts' expected speed-ups on each domain alone: its tokens a round, at the times of the whole."""
    one, two = serving(candidate.table, settings), serving(rival.table, settings)
    mine, theirs = (draft.row.gain.speedup for draft in (candidate, rival))
    found: dict[str, DomainFigures] = {}
    for domain in sorted(counts.values(one, "domain")):
        here, there = counts.where(one, domain=domain), counts.where(two, domain=domain)
        found[domain] = DomainFigures(
            conversations=len(counts.values(here, "conversation")),
            champion_speedup=float(theirs(tau(there, settings.bootstrap).value)),
            difference=_interval(tau_difference(here, there, settings.bootstrap, mine, theirs)),
        )
    return found


def _figures(row: Row) -> Figures:
    return Figures(tau=row.tau.value, speedup=row.speedup.value)


def _interval(estimate: Estimate) -> Interval:
    return Interval(value=estimate.value, low=estimate.low, high=estimate.high)
