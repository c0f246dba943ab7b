"""From the chosen checkpoint to the registry: register it, meet the champion on the holdout, decide."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from .. import fingerprint, storage
from ..data.store import Capture
from ..errors import HookError, InputError, LostFilesError
from ..eval import counts
from ..eval.draft_configs import DraftConfig
from ..eval.figures import Estimate, tau, tau_difference
from ..eval.leaderboard import Row, Times, at_config, domain_rows, leaderboard, plain_row, serving, speedup_difference
from ..eval.report.page import holdout_record
from ..eval.score import Identity
from ..eval.settings import HOLDOUT_SPLIT, ScoreSettings
from ..eval.table import show_domains, show_leaderboard
from ..progress import say
from ..recipe import PromotionSettings, Recipe
from ..registry import promotion as registry_promotion
from ..registry.artifacts import download, stored_files
from ..registry.connect import Tracking, mlflow_errors, redacted
from ..registry.gate import Decision, DomainFigures, Evidence, Figures, Interval, decide
from ..registry.lineage import Lineage, Version, ancestors, git_commit, holdout_overlap
from ..registry.promotion import ALREADY, history, last_decision, promote
from ..registry.versions import champion, register_version, resolve_models_uri
from ..specdec.formats import read_meta
from ..specdec.proposers.training_free import LOOKUP
from .export import export_draft, is_copy
from .scoring import Scored, Scorer, check_score
from .stages import Stages
from .workspace import Workspace

Event = Literal["promote", "rollback"]
HOOK_TAG = "draftforge.hook"
_NOUN: dict[Event, str] = {"promote": "promotion", "rollback": "rollback"}
_DONE = "done"
_KEPT_CHARACTERS = 20_000
_DRAIN_SECONDS = 5.0


class _Ended(NamedTuple):
    """How a command ended: `problem` empty, or what went wrong in a few words."""

    output: str
    problem: str


def check_promotion(space: Workspace, what: str = "a promotion") -> None:
    """Refuse what keeps the recipe's drafts from being scored and promoted, before any work. `what` asks for it."""
    check_command(space.recipe.promotion)
    check_score(space, space.recipe.drafts, what)


def check_command(settings: PromotionSettings) -> None:
    """Raise InputError where the command to run after a promotion names no program."""
    if settings.command and shutil.which(settings.command[0]) is None:
        raise InputError(f"promotion.command {settings.command[0]}: no such program, or not executable")


def follow_champion(space: Workspace) -> None:
    """Run the command for the target's champion, unless it was run for the move that made it so. Raises HookError.

    Whoever comes by, a retraining with nothing else to do too, catches up what failed or was killed before.
    """
    if not space.recipe.promotion.command:
        return
    now = champion(space.tracking, space.target_fingerprint)
    if now is None:
        return
    move = _last_move(space, now)
    event: Event = "rollback" if move.get("event") == "rollback" else "promote"
    with mlflow_errors(space.tracking.uri):
        tags = space.tracking.client.get_model_version(now.name, str(now.number)).tags or {}
    if tags.get(HOOK_TAG) != _noted(event, move, _DONE):
        _follow(space, event, now, move)


def rollback(recipe: Recipe) -> None:
    """Make the previous champion of the recipe's target the champion again."""
    space = Workspace(recipe)
    version = registry_promotion.rollback(space.tracking, space.target_fingerprint, "asked for on the command line")
    say(f"{version.reference}: champion again")
    follow_champion(space)


def _last_move(space: Workspace, version: Version) -> dict[str, object]:
    moves = [move for move in history(space.tracking, version.name) if move.get("to") == version.number]
    return moves[-1] if moves else {}


def _noted(event: Event, move: dict[str, object], how: str) -> str:
    """The tag's words: the same version may be promoted, left and promoted again."""
    return f"{event} {move.get('at', '')}: {how}"


def _follow(space: Workspace, event: Event, version: Version, move: dict[str, object]) -> None:
    settings = space.recipe.promotion
    say(f"{version.reference}: running {settings.command[0]} after the {_NOUN[event]}")
    ended = run_command(settings, environment(space, event, version, move))
    output = _without_secrets(ended.output, space.tracking.uri)
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")
    note = _noted(event, move, ended.problem or _DONE)
    with mlflow_errors(space.tracking.uri):
        client = space.tracking.client
        client.log_text(version.run_id, output, f"hooks/{version.name}-v{version.number}-{stamp}.txt")
        client.set_model_version_tag(version.name, str(version.number), HOOK_TAG, note)
    if ended.problem:
        last = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "it said nothing")
        raise HookError(
            f"promotion.command {settings.command[0]}: {ended.problem}: {last[:300]} "
            f"({version.reference} stays champion)"
        )


def environment(space: Workspace, event: Event, version: Version, move: dict[str, object]) -> dict[str, str]:
    """What the command is told, beside the environment of this process."""
    decision = last_decision(space.tracking, version)
    path = space.root / "hooks" / f"{version.name}-v{version.number}-{event}.json"
    told = {
        "event": event,
        "version": version.reference,
        "target": version.lineage.target_fingerprint,
        "move": move,
        "decision": None if decision is None else decision.model_dump(mode="json"),
    }
    storage.write_json(path, told)
    return {
        "DRAFTFORGE_EVENT": event,
        "DRAFTFORGE_VERSION": version.reference,
        "DRAFTFORGE_URI": version.uri,
        "DRAFTFORGE_TARGET": version.lineage.target_fingerprint,
        "DRAFTFORGE_DECISION": str(path),
        "DRAFTFORGE_DRAFT": str(resolve_models_uri(space.tracking, version.uri, space.root / "models")),
        "MLFLOW_TRACKING_URI": space.tracking.uri,
    }


def run_command(settings: PromotionSettings, told: dict[str, str]) -> _Ended:
    """Run the command in a session of its own, so that nothing that it started outlives its time."""
    try:
        process = subprocess.Popen(
            settings.command,
            env=os.environ | told,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return _Ended("", f"cannot be started ({error})")
    problem = ""
    try:
        output, _ = process.communicate(timeout=settings.timeout_seconds)
    except subprocess.TimeoutExpired:
        output, problem = _killed(process), f"not done after {settings.timeout_seconds:g} s (promotion.timeout_seconds)"
    except BaseException:
        _killed(process)
        raise
    if not problem and process.returncode:
        code = process.returncode
        problem = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return _Ended(output.decode(errors="replace")[-_KEPT_CHARACTERS:], problem)


def _killed(process: "subprocess.Popen[bytes]") -> bytes:
    """What the command had said when it, and what it started, was killed."""
    os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.communicate(timeout=_DRAIN_SECONDS)[0]
    except subprocess.TimeoutExpired:  # something left the session and holds the pipe
        return b""


def _without_secrets(text: str, tracking_uri: str) -> str:
    return redacted(text.replace(tracking_uri, redacted(tracking_uri)))


KEPT_COUNTS = "holdout.parquet"


def keep_counts(tracking: Tracking, version: Version, table: pa.Table) -> None:
    """Keep a version's counts on the holdout, at the K or tree that it was judged at."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / KEPT_COUNTS
        counts.write(table, path)
        with mlflow_errors(tracking.uri):
            tracking.client.log_artifact(version.run_id, str(path), version.lineage.folder)


def kept_counts(tracking: Tracking, version: Version) -> pa.Table | None:
    """What `keep_counts` kept; None where nothing was."""
    with mlflow_errors(tracking.uri):
        root = f"{tracking.client.get_run(version.run_id).info.artifact_uri}/{version.lineage.folder}"
    if KEPT_COUNTS not in stored_files(tracking, root):
        return None
    with tempfile.TemporaryDirectory() as folder:
        download(tracking, root, {KEPT_COUNTS: 0}, Path(folder))
        return counts.read(Path(folder) / KEPT_COUNTS)


CANDIDATE, CHAMPION = "candidate", "champion"
PROMOTION_FILE = "promotion.json"


@dataclass(frozen=True)
class _Measured:
    """One draft on the holdout, at the K or tree that it was chosen at."""

    row: Row
    table: pa.Table
    times: Times
    lossless: bool | None


def promote_stage(stages: Stages, run_id: str, scored: Scored, parent: str | None = None) -> tuple[Version, Decision]:
    """Register the chosen checkpoint, let it meet the champion on the holdout, and move the alias or say why not.

    `parent`: the version (`name/number`) that its training started from.
    """
    space, scorer = stages.space, Scorer(stages.space, stages.captured, HOLDOUT_SPLIT)
    version = _register(stages, run_id, scored, scorer, parent)
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


def _register(stages: Stages, run_id: str, scored: Scored, scorer: Scorer, parent: str | None) -> Version:
    """Export the chosen checkpoint and register it under its target as `candidate`. The same draft once only."""
    space, recipe, chosen = stages.space, stages.recipe, scored.chosen
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
        mix_fingerprint=stages.mix.fingerprint,
        capture_fingerprint=stages.captured.fingerprint,
        counts_digest=fingerprint.of_file(scored.counts_file),
        recipe_fingerprint=fingerprint.of_json(recipe.resolved()),
        family=meta.family,
        step=chosen.step,
        draft_tokens=chosen.config.levels,
        tree_name=chosen.config.tree or None,
        tree=scored.trees[chosen.draft, chosen.step].get(chosen.config.tree),
        parent=parent,
        git_commit=git_commit(),
    )
    trained_on = {sample.cluster for sample in Capture.open(stages.captured.folder, verify=False).samples("train")}
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
    settings, prompt_lookup = scorer.settings, scorer.load(None)
    specs = scorer.specs(prompt_lookup)
    costs = scorer.times(prompt_lookup, specs)
    lookup, _ = scorer.counts(specs, Identity(LOOKUP, 0))
    (baseline,) = leaderboard([lookup], {(LOOKUP, 0): costs}, settings, [LOOKUP])
    drafts = [candidate] if rival is None else [candidate, rival]
    rows = [baseline, *(draft.row for draft in drafts)]
    show_leaderboard([plain_row(costs), *rows], settings.confidence, "On the holdout", costs.description)
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
    known = scorer.specs(draft)  # times of all of them may be there already
    mine = next((one for one in known if one.fixed == lineage.tree and one.tree == (lineage.tree_name or "")), None)
    if mine is None:  # a tree of another recipe, or of other answers
        assert lineage.tree is not None
        mine = scorer.tree_spec(draft, str(lineage.tree_name), lineage.tree)
        known = [mine]
    table, lossless = scorer.counts([mine], Identity(name, lineage.step))
    times = scorer.times(draft, known)
    if lineage.tree is None and lineage.draft_tokens in scorer.settings.draft_tokens:
        table = at_config(table, DraftConfig(lineage.draft_tokens))
    (row,) = leaderboard([table], {(name, lineage.step): times}, scorer.settings)
    row = replace(row, chosen=False)  # there was nothing to choose from
    return _Measured(row, at_config(table, row.config), times, lossless)


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
