"""Promotion: the chosen checkpoint is registered, compared with the champion on the holdout, and promoted or refused.

After a promotion or rollback the operator's command (`promotion.command`) runs for the champion. A tag of the version
says how it ended; a command that failed or was killed is run again by the next call of `follow_champion`.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from .. import fingerprint, storage
from ..data.store import Capture
from ..errors import HookError, InputError, LostFilesError
from ..eval import counts
from ..eval.acceptance import Estimate, tau, tau_difference
from ..eval.draft_configs import DraftConfig, ProposerSpec
from ..eval.leaderboard import Row, Times, at_config, domain_rows, leaderboard, plain_row, serving, speedup_difference
from ..eval.report.page import holdout_record
from ..eval.score import Identity
from ..eval.settings import HOLDOUT_SPLIT, ScoreSettings
from ..eval.table import show_domains, show_leaderboard
from ..progress import say
from ..recipe import PromotionSettings, Recipe
from ..registry import promotion as registry_promotion
from ..registry.artifacts import pickles, run_files
from ..registry.connect import Tracking, mlflow_errors, redacted
from ..registry.gate import Baseline, Decision, DomainFigures, Evidence, Figures, Interval, decide
from ..registry.lineage import Lineage, Version, ancestors, git_commit, holdout_overlap
from ..registry.promotion import ALREADY, history, last_decision, promote
from ..registry.versions import champion, register_version, resolve_models_uri
from ..specdec.formats import read_meta
from ..specdec.proposers.training_free import LOOKUP
from ..specdec.proposers.tree_settings import MergedTree, tree_identity
from ..specdec.serving_plan import stored_plan, write_plan
from .export import export_draft, is_copy
from .scoring import Scored, Scorer, check_score
from .stages import Stages
from .workspace import Workspace

CANDIDATE, CHAMPION = "candidate", "champion"
PROMOTION_FILE = "promotion.json"
KEPT_COUNTS = "holdout.parquet"
HOOK_TAG = "draftforge.hook"
REFUSED = 5
"""Exit code of `distill`, `promote` and `retrain` where the gate refused the draft: nothing broke, and the champion is
what it was."""
Event = Literal["promote", "rollback"]
_NOUN: dict[Event, str] = {"promote": "promotion", "rollback": "rollback"}
_DONE = "done"
_KEPT_CHARACTERS = 20_000  # of a command's output, its end
_DRAIN_SECONDS = 5.0


@dataclass(frozen=True)
class _HoldoutScore:
    """Score of one draft on the holdout, at the K or tree that it was chosen at on the selection split."""

    row: Row
    table: pa.Table
    times: Times
    lossless: bool | None


class _CommandResult(NamedTuple):
    """Result of the operator's command: its output, and what went wrong in a few words (empty: nothing)."""

    output: str
    problem: str


def check_promotion(space: Workspace, what: str = "a promotion") -> None:
    """Refuse what keeps the recipe's drafts from being scored and promoted, before any work. `what` asks for it."""
    check_command(space.recipe.promotion)
    check_score(space, space.recipe.drafts, what)
    # The other drafts of a merged tree go into the version, which holds no pickle.
    for name, tree in space.recipe.score.trees.items():
        for part in tree.drafts if isinstance(tree, MergedTree) else ():
            files = sorted(path.name for path in part.iterdir() if path.is_file()) if part.is_dir() else [part.name]
            if found := pickles(part if part.is_dir() else part.parent, files):
                raise InputError(f"score.trees.{name}: {part / found[0]}: is a pickle; a version holds none")


def check_command(settings: PromotionSettings) -> None:
    """Raise InputError where the command to run after a promotion names no program."""
    if settings.command and shutil.which(settings.command[0]) is None:
        raise InputError(f"promotion.command {settings.command[0]}: no such program, or not executable")


def promote_stage(stages: Stages, run_id: str, scored: Scored, parent: str | None = None) -> tuple[Version, Decision]:
    """Register the chosen checkpoint, compare it with the champion on the holdout, and move the alias or say why not.

    `parent`: the version (`name/number`) that its training started from.
    """
    # 1) Register it as candidate; a draft that is the champion already has nothing to prove.
    space, scorer = stages.space, Scorer(stages.space, stages.captured, HOLDOUT_SPLIT)
    lookup = next(row.config for row in scored.rows if row.draft == LOOKUP)
    version = _register(stages, run_id, scored, scorer, parent)
    current = champion(space.tracking, space.target_fingerprint)
    if current is not None and current.reference == version.reference:
        decision = Decision(promote=True, reasons=[ALREADY])
        _say_decision(version, decision)
        return version, decision
    # 2) Measure both from the registry's copies, decide, and carry the decision out.
    evidence, holdout = _evidence(space, scorer, version, current, lookup)
    decision = promote(space.tracking, decide(evidence, space.recipe.gate), version)
    _say_decision(version, decision)
    # 3) Keep what the report shows.
    _write_record(space, scored.stage.folder / PROMOTION_FILE, version, decision, holdout)
    return version, decision


def rollback(recipe: Recipe, undo: bool = False, why: str = "") -> None:
    """Make the previous champion of the recipe's target the champion again; `undo`: the one that a rollback left."""
    space, move = Workspace(recipe), registry_promotion.undo_rollback if undo else registry_promotion.rollback
    version = move(space.tracking, space.target_fingerprint, why or "asked for on the command line")
    say(f"{version.reference}: champion again")
    follow_champion(space)


def exit_code(decision: Decision | None) -> int:
    """Exit code of a verb by the gate's decision: 0 where a draft was promoted, or nothing had to be (None)."""
    return 0 if decision is None or decision.promote else REFUSED


def _register(stages: Stages, run_id: str, scored: Scored, scorer: Scorer, parent: str | None) -> Version:
    """Export the chosen checkpoint and register it under its target as `candidate`. The same draft once only."""
    space, recipe, chosen = stages.space, stages.recipe, scored.chosen
    # 1) Export it, read back and scored equal.
    name = f"{chosen.draft}-{chosen.step:06d}-{fingerprint.short(scored.stage.fingerprint)}"
    exported, plan = space.root / "exports" / name, scored.plan(recipe.score)
    if not is_copy(exported, scored.chosen_folder, plan):  # not there yet, or damaged since
        shutil.rmtree(exported, ignore_errors=True)
        export_draft(scorer, scored.chosen_folder, exported, lambda folder: write_plan(folder, plan))
    # 2) Its lineage: everything that it was made of, by fingerprint.
    meta, times = read_meta(exported), scored.times[chosen.draft, chosen.step]
    lineage = Lineage(
        target_fingerprint=space.target_fingerprint,
        target_name=Path(recipe.target.model).name,
        target_files={name: fingerprint.short(digest) for name, digest in space.target_files.items()},
        tokenizer_digest=meta.tokenizer_digest,
        mix_fingerprint=stages.mix.fingerprint,
        capture_fingerprint=stages.captured.fingerprint,
        counts_digest=fingerprint.of_file(scored.counts_file),
        recipe_fingerprint=fingerprint.of_json(recipe.resolved()),
        family=meta.family,
        step=chosen.step,
        plan=stored_plan(exported),
        measured=times.description,
        parent=parent,
        git_commit=git_commit(),
    )
    # 3) Clusters of its training conversations go along: later gates check that no holdout overlaps with them.
    trained_on = {sample.cluster for sample in Capture.open(stages.captured.folder, verify=False).samples("train")}
    return register_version(space.tracking, run_id, exported, lineage, trained_on, space.target_settings)


def _say_decision(version: Version, decision: Decision) -> None:
    verdict = "promoted to champion" if decision.promote else "not promoted"
    say(f"{version.reference}: {verdict}: {'; '.join(decision.reasons)}")


def _write_record(
    space: Workspace, path: Path, version: Version, decision: Decision, holdout: Mapping[str, Any]
) -> None:
    """Keep the decision, the figures on the holdout, and the lineage, for the report."""

    def lineage(one: Version) -> dict[str, Any]:
        return one.lineage.model_dump(mode="json", exclude={"files": True, "plan": {"tree"}})

    line = [{"version": one.reference, "lineage": lineage(one)} for one in ancestors(space.tracking, version)]
    record = {"version": version.reference, "at": time.time(), "lineage": lineage(version), "ancestors": line}
    storage.write_json(path, {**record, "decision": decision.model_dump(mode="json"), "holdout": holdout})


def _evidence(
    space: Workspace, scorer: Scorer, version: Version, current: Version | None, lookup_config: DraftConfig
) -> tuple[Evidence, dict[str, Any]]:
    """Evidence for the gate, and a record: version, champion and prompt lookup are measured on the holdout, and shown.

    `lookup_config`: the K that is best for prompt lookup on the selection split; a choice on the holdout would favour
    it.
    """
    # 1) The candidate, prompt lookup, then the champion.
    settings = space.recipe.score
    candidate = _measure(space, scorer, version, CANDIDATE)
    keep_counts(space.tracking, version, candidate.table)
    lookup = _measure_lookup(scorer, lookup_config)
    rival, lost = (None, None) if current is None else _measure_champion(space, scorer, current)
    holdout = _show_holdout(scorer, lookup, [candidate] if rival is None else [candidate, rival])
    # 2) What is known of the candidate and prompt lookup, then what the comparison with the champion adds.
    evidence = Evidence(
        candidate=_figures(candidate.row),
        conversations=len(counts.values(candidate.table, "conversation")),  # those scored, not those there are
        clusters=len(counts.values(candidate.table, "cluster")),
        confidence=settings.confidence,
        fit_error=max(0.0 if one.row.load is None else one.row.load.fit_error for one in (candidate, lookup)),
        lookup=Baseline(
            draft_tokens=lookup.row.config.levels,
            speedup=Interval.of(lookup.row.speedup),
            difference=Interval.of(_difference(candidate, lookup, settings)),
        ),
        lossless=candidate.lossless,
        export_reads_back=True,  # what was measured is the registered copy, downloaded and checked by its digests
        holdout_overlap=holdout_overlap(space.tracking, version, {sample.cluster for sample in scorer.samples}),
        compared=None if current is None else current.reference,
        champion_lost=lost,
    )
    if rival is None:
        return evidence, holdout
    comparison = {
        "champion": _figures(rival.row),
        "difference": Interval.of(_difference(candidate, rival, settings)),
        "domains": _by_domain(candidate, rival, settings),
    }
    return evidence.model_copy(update=comparison), holdout


def _difference(first: _HoldoutScore, second: _HoldoutScore, settings: ScoreSettings) -> Estimate:
    """Paired difference of two drafts' expected speed-ups."""
    return speedup_difference([first.table, second.table], first.row, second.row, settings)


def _show_holdout(scorer: Scorer, lookup: _HoldoutScore, drafts: Sequence[_HoldoutScore]) -> dict[str, Any]:
    """Show prompt lookup and drafts on the holdout, overall and by domain; returns the tables as a record."""
    # 1) Overall: plain decoding, prompt lookup, drafts.
    settings, scores = scorer.settings, [lookup, *drafts]
    rows, tables = [one.row for one in scores], [one.table for one in scores]
    title, times = "On the holdout", lookup.times
    show_leaderboard([plain_row(times), *rows], settings.confidence, title, times.description)
    # 2) By domain.
    domains = domain_rows(tables, rows, settings, {(one.row.draft, one.row.step): one.times for one in scores})
    show_domains(domains, settings.confidence, title="On the holdout, by domain")
    return holdout_record(tables, rows, settings, domains)


def _measure_champion(space: Workspace, scorer: Scorer, current: Version) -> tuple[_HoldoutScore | None, str | None]:
    """Score the champion; or None and what is wrong with its files, as lost files must not block a better draft."""
    try:
        return _measure(space, scorer, current, CHAMPION), None
    except LostFilesError as error:
        return None, str(error)


def _measure_lookup(scorer: Scorer, config: DraftConfig) -> _HoldoutScore:
    """Score prompt lookup on the holdout at one K."""
    draft = scorer.load(None)
    known = scorer.specs(draft)
    table, lossless = scorer.counts(known, Identity(LOOKUP, 0))
    table, times = at_config(table, config), scorer.times(draft, known)
    (row,) = leaderboard([table], {(LOOKUP, 0): times}, scorer.settings, [LOOKUP])
    return _HoldoutScore(row, table, times, lossless)


def _measure(space: Workspace, scorer: Scorer, version: Version, name: str) -> _HoldoutScore:
    """Score a registered version on the holdout, from freshly downloaded files, at the tree or K of its plan.

    That is its own even where the recipe does not score it any more: a choice on the holdout would favour the draft.
    """
    # 1) The registered copy, and the spec of its own tree or K.
    folder = resolve_models_uri(space.tracking, version.uri, space.root / "models", afresh=True)
    draft, step = scorer.load(folder), version.lineage.step
    plan, known = draft.plan, scorer.specs(draft)
    if plan.tree is None:
        own = ProposerSpec(draft.proposer, (plan.draft_tokens,))
    else:
        own = scorer.tree_spec(draft, plan.tree_name, plan.tree)
    # 2) Count it; times of all that the recipe scores may be there already.
    table, lossless = scorer.counts([own], Identity(name, step))
    shape = (own.tree, tree_identity(own.fixed))
    timed = any((one.tree, tree_identity(one.fixed)) == shape and {*own.depths} <= {*one.depths} for one in known)
    times = scorer.times(draft, known if timed else [own])
    (row,) = leaderboard([table], {(name, step): times}, scorer.settings)
    return _HoldoutScore(replace(row, chosen=False), table, times, lossless)  # there was nothing to choose from


def _by_domain(candidate: _HoldoutScore, rival: _HoldoutScore, settings: ScoreSettings) -> dict[str, DomainFigures]:
    """Expected speed-ups of both drafts on each domain: the domain's own tau, at the round times of the whole."""
    tables = [serving(draft.table, settings) for draft in (candidate, rival)]
    speedups = [draft.row.gain.speedup for draft in (candidate, rival)]
    found: dict[str, DomainFigures] = {}
    for domain in sorted(counts.values(tables[0], "domain")):
        own, theirs = (counts.where(table, domain=domain) for table in tables)
        found[domain] = DomainFigures(
            conversations=len(counts.values(own, "conversation")),
            champion_speedup=float(speedups[1](tau(theirs, settings.confidence).value)),
            difference=Interval.of(tau_difference(own, theirs, settings.confidence, *speedups)),
        )
    return found


def _figures(row: Row) -> Figures:
    return Figures(tau=row.tau.value, speedup=Interval.of(row.speedup))


def keep_counts(tracking: Tracking, version: Version, table: pa.Table) -> None:
    """Store a version's holdout counts beside it in MLflow, at the K or tree that it was judged at.

    Monitoring and the judgement of staleness compare later acceptance with them.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / KEPT_COUNTS
        counts.write(table, path)
        with mlflow_errors(tracking.uri):
            tracking.client.log_artifact(version.run_id, str(path), version.lineage.folder)


def kept_counts(tracking: Tracking, version: Version) -> pa.Table | None:
    """Holdout counts that `keep_counts` stored; None where nothing was."""
    name = f"{version.lineage.folder}/{KEPT_COUNTS}"
    with mlflow_errors(tracking.uri):
        known = tracking.client.list_artifacts(version.run_id, version.lineage.folder)
    if name not in {artifact.path for artifact in known}:
        return None
    with run_files(tracking, version.run_id, [name]) as folder:
        return counts.read(folder / name)


def follow_champion(space: Workspace) -> None:
    """Run the operator's command for the target's champion, unless it has run for the move that made it so.

    Raises HookError where the command fails.
    """
    settings = space.recipe.promotion
    current = champion(space.tracking, space.target_fingerprint) if settings.command else None
    if current is None:
        return
    # 1) The move that made it champion: a version may be promoted, left and promoted again.
    moves = [move for move in history(space.tracking, current.name) if move.get("to") == current.number]
    move = moves[-1] if moves else {}
    event: Event = "rollback" if move.get("event") == "rollback" else "promote"
    label = f"{event} {move.get('at', '')}: "
    client = space.tracking.client
    with mlflow_errors(space.tracking.uri):
        tags = client.get_model_version(current.name, str(current.number)).tags or {}
    if tags.get(HOOK_TAG) == label + _DONE:
        return
    # 2) Run it, and keep its output beside the version, without secrets.
    say(f"{current.reference}: running {settings.command[0]} after the {_NOUN[event]}")
    result = run_command(settings, command_environment(space, event, current, move))
    output = redacted(result.output.replace(space.tracking.uri, redacted(space.tracking.uri)))
    path = f"hooks/{current.name}-v{current.number}-{datetime.now(UTC):%Y%m%dT%H%M%S.%f}.txt"
    with mlflow_errors(space.tracking.uri):
        client.log_text(current.run_id, output, path)
        client.set_model_version_tag(current.name, str(current.number), HOOK_TAG, label + (result.problem or _DONE))
    # 3) A failure undoes nothing.
    if result.problem:
        last = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "it said nothing")
        raise HookError(
            f"promotion.command {settings.command[0]}: {result.problem}: {last[:300]} "
            f"({current.reference} stays champion)"
        )


def command_environment(space: Workspace, event: Event, version: Version, move: dict[str, object]) -> dict[str, str]:
    """Environment variables that the command gets on top of this process's own; writes the JSON file they name."""
    # The file says what moved and why; it is named by version and event, and so written again each time.
    decision = last_decision(space.tracking, version)
    path = space.root / "hooks" / f"{version.name}-v{version.number}-{event}.json"
    record = {
        "event": event,
        "version": version.reference,
        "target": version.lineage.target_fingerprint,
        "move": move,
        "decision": None if decision is None else decision.model_dump(mode="json"),
    }
    storage.write_json(path, record)
    return {
        "DRAFTFORGE_EVENT": event,
        "DRAFTFORGE_VERSION": version.reference,
        "DRAFTFORGE_URI": version.uri,
        "DRAFTFORGE_TARGET": version.lineage.target_fingerprint,
        "DRAFTFORGE_DECISION": str(path),
        "DRAFTFORGE_DRAFT": str(resolve_models_uri(space.tracking, version.uri, space.root / "models")),
        "MLFLOW_TRACKING_URI": space.tracking.uri,
    }


def run_command(settings: PromotionSettings, variables: dict[str, str]) -> _CommandResult:
    """Run the operator's command, without a shell, for at most `timeout_seconds`; errors are returned, not raised.

    It runs in a session of its own, so that its children can be killed with it.
    """
    # 1) Start it, with standard error among its output.
    try:
        process = subprocess.Popen(
            settings.command,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return _CommandResult("", f"cannot be started ({error})")
    # 2) Wait for its end. Whatever else ends the wait, a signal for instance, kills it too.
    problem = ""
    try:
        output, _ = process.communicate(timeout=settings.timeout_seconds)
    except subprocess.TimeoutExpired:
        output = _kill_session(process)
        problem = f"not done after {settings.timeout_seconds:g} s (promotion.timeout_seconds)"
    except BaseException:
        _kill_session(process)
        raise
    # 3) Say how it ended.
    if not problem and process.returncode:
        code = process.returncode
        problem = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return _CommandResult(output.decode(errors="replace")[-_KEPT_CHARACTERS:], problem)


def _kill_session(process: "subprocess.Popen[bytes]") -> bytes:
    """Kill the command's whole session; returns its output so far."""
    os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.communicate(timeout=_DRAIN_SECONDS)[0]
    except subprocess.TimeoutExpired:  # something left the session and holds the pipe
        return b""
