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
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa
from sqlalchemy.engine import make_url

from .. import fingerprint, storage
from ..data.store import Capture
from ..errors import HookError, InputError, one_line
from ..eval import counts
from ..eval.leaderboard import Row
from ..eval.settings import HOLDOUT_SPLIT
from ..eval.summary import decision_summary
from ..eval.table import interval
from ..masking import masked
from ..progress import say
from ..recipe import PromotionSettings, Recipe
from ..registry import champion_alias
from ..registry.artifacts import pickles, run_files, run_names, run_place
from ..registry.champion_alias import ALREADY, UNMET, history, last_decision, promote, record_decision
from ..registry.connect import Tracking, mlflow_errors
from ..registry.gate import Decision, decide, decide_alone
from ..registry.lineage import Lineage, Version, ancestors, git_commit
from ..registry.trackers import check_trackers
from ..registry.versions import PREVIOUS, by_alias, champion, register_version, resolve_models_uri
from ..specdec.formats import read_meta
from ..specdec.proposers.tree_settings import MergedTree
from ..specdec.serving_plan import stored_plan, write_plan
from .draft_scorer import Scorer
from .export import export_draft, is_copy
from .holdout_evaluation import Measured, evidence, measure_holdout, show_holdout
from .scoring import SCORES_FILE, Scored, check_drafts, check_score
from .stages import Stages, check_capture, check_training
from .workspace import Workspace

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


class _CommandResult(NamedTuple):
    """Result of the operator's command: its output, and what went wrong in a few words (empty: nothing)."""

    output: str
    problem: str


def check_promotion(space: Workspace, what: str = "a promotion") -> None:
    """Refuse what keeps the recipe's drafts from being scored and promoted, before any work. `what` asks for it.

    Neither mix nor target is needed for it.
    """
    check_command(space.recipe.promotion)
    check_gate(space.recipe)
    check_score(space, space.recipe.drafts, what)
    check_trackers(space.recipe.registry)
    if space.first_rank:
        _ = space.tracking  # a server that does not answer is found out before the work, not after it
    # The other drafts of a merged tree go into the version, which holds no pickle.
    for name, tree in space.recipe.score.trees.items():
        for part in tree.places if isinstance(tree, MergedTree) else ():
            files = sorted(path.name for path in part.iterdir() if path.is_file()) if part.is_dir() else [part.name]
            if found := pickles(part if part.is_dir() else part.parent, files):
                raise InputError(f"score.trees.{name}: {part / found[0]}: is a pickle; a version holds none")


def check_command(settings: PromotionSettings) -> None:
    """Raise InputError where the command to run after a promotion names no program."""
    if settings.command and shutil.which(settings.command[0]) is None:
        raise InputError(f"promotion.command {settings.command[0]}: no such program, or not executable")


def check_gate(recipe: Recipe) -> None:
    """Raise InputError for settings of score and gate that no candidate could pass with."""
    score, gate = recipe.score, recipe.gate
    if gate.min_speedup > 0 and score.confidence < gate.confidence:
        raise InputError(
            f"score.confidence = {score.confidence:g}: gate.confidence asks for intervals that cover "
            f"{gate.confidence:g}, so that every draft would be refused"
        )
    if 0 < score.max_conversations < gate.min_clusters:
        raise InputError(
            f"score.max_conversations = {score.max_conversations}: so many conversations cannot be the "
            f"{gate.min_clusters} clusters of gate.min_clusters, so that every draft would be refused"
        )


def check_stages(stages: Stages, names: Collection[str] | None = None) -> None:
    """Check before the mix is built that capture, these trainings and the score can be done here.

    `names`: drafts whose start is known; None: all of the recipe.
    """
    check_capture(stages)
    check_training(stages, stages.space.drafts if names is None else names)
    if stages.space.first_rank:
        check_drafts(stages.space)


def promote_stage(stages: Stages, run_id: str, scored: Scored) -> tuple[Version, Decision]:
    """Register the chosen checkpoint, compare it with the champion on the holdout, and move the alias or say why not.

    After a retraining it is compared with its start too. An heir that is not shown to beat that gives way to it: the
    start is promoted for this target, if it passes the gate itself.
    """
    # 1) Register it as candidate.
    space, scorer = stages.space, Scorer(stages.space, stages.captured, HOLDOUT_SPLIT)
    version = _register(stages, run_id, scored, scorer, scored.chosen)
    current = champion(space.tracking, space.target_fingerprint)
    record = scored.stage.folder / PROMOTION_FILE
    # 2) The champion has nothing to prove; chosen after a retraining, it is the start that no heir comes up to.
    if current is not None and current.reference == version.reference:
        known = decision_record(scored.stage.folder) or {}
        shown = known["holdout"] if known.get("version") == version.reference else {"rows": []}
        if scored.chosen.start:
            decision, shown = _no_heir(scored, version), {"rows": []}
        else:
            decision, shown = _judge_champion(space, scorer, scored, version, shown)
        _say_decision(version, decision)
        if not (decision.promote and known.get("decision", {}).get("promote")):  # the reasons that it came by are kept
            _write_record(space, record, version, decision, shown)
        return version, decision
    # 3) Measure all from the registry's copies, decide, and carry the decision out.
    measured = measure_holdout(space, scorer, scored, version, current)
    keep_counts(space.tracking, version, measured.candidate.table)
    holdout = show_holdout(scorer, measured)
    heir_of = None if scored.start is None or scored.chosen.start else scored.start.version.reference
    found = decide(evidence(space, scorer, measured, version, current, heir_of), space.recipe.gate)
    decision = promote(space.tracking, found, version)
    _say_decision(version, decision)
    # 4) An heir that is no better than its start gives way to it, where this target has another champion or none.
    if decision.beats_start is False and measured.start is not None:
        instead = _promote_start(stages, run_id, scored, scorer, measured.start_instead, current)
        if instead is not None:
            version, decision, holdout = instead
    # 5) Keep what the report shows.
    _write_record(space, record, version, decision, holdout)
    return version, decision


def decision_record(scored: Path) -> dict[str, Any] | None:
    """Record of the last decision in a score's folder; None: there is none, or it is damaged, which a line says."""
    path = scored / PROMOTION_FILE
    if not path.exists():
        return None
    # It has no schema of its own: whatever its words trip over means that another version wrote it, or a hand.
    try:
        record = storage.read_object(path)
        decision_summary(storage.read_object(scored / SCORES_FILE), record)
        record["lineage"].keys(), list(record["ancestors"]), datetime.fromtimestamp(record["at"], UTC)
    except (MemoryError, OSError):
        raise
    except Exception as error:
        say(f"{path}: not the record of a decision ({one_line(error, 100)}); the next one takes its place")
        return None
    return record


def _promote_start(
    stages: Stages, run_id: str, scored: Scored, scorer: Scorer, measured: Measured, current: Version | None
) -> tuple[Version, Decision, dict[str, Any]] | None:
    """Promote the start of a retraining for this target, if it passes the gate; None, and a line with the reasons,
    where it does not.

    It was measured beside its heir; only what passes is registered.
    """
    # 1) Decide.
    space, start, row = stages.space, scored.start, scored.start_row
    assert start is not None and row is not None
    decision = decide(evidence(space, scorer, measured, start.version, current, None), space.recipe.gate)
    if not decision.promote:
        why = "; ".join(decision.reasons)
        say(f"its start, {start.version.reference}, is not promoted for this target either: {why}")
        return None
    # 2) Register it under this target, and move the alias.
    say(f"its start, {start.version.reference}, serves this target as well: it is promoted as it is")
    version = _register(stages, run_id, scored, scorer, row)
    keep_counts(space.tracking, version, measured.candidate.table)
    reasons = [f"{start.version.reference} as it is: no heir is shown to be better", *decision.reasons]
    decision = promote(space.tracking, decision.model_copy(update={"reasons": reasons}), version)
    _say_decision(version, decision)
    return version, decision, show_holdout(scorer, measured)


def _judge_champion(
    space: Workspace, scorer: Scorer, scored: Scored, version: Version, shown: dict[str, Any]
) -> tuple[Decision, dict[str, Any]]:
    """Judge the champion, which was chosen once more, by the gate as it is set today; nothing moves.

    By the figures of its last decision; where there are none, or they hold at another load, or the report has no tables
    of them (`shown`), by new ones of the holdout. Returns its tables too. A new verdict is recorded beside the version.
    """
    # 1) Its figures.
    last, times = last_decision(space.tracking, version), scored.times[scored.chosen.draft, scored.chosen.step]
    known = None if last is None or version.lineage.measured != times.description else last.numbers.evidence
    found = known
    if found is None or not shown["rows"]:
        measured = measure_holdout(space, scorer, scored, version, None)
        shown, found = show_holdout(scorer, measured), evidence(space, scorer, measured, version, None, None)
    # 2) The verdict, and where it is against it what to do.
    decision = decide_alone(found, space.recipe.gate)
    reasons = [ALREADY, *filter(None, [decision.by_choice])]
    if not decision.promote:
        older = by_alias(space.tracking, space.target_fingerprint, PREVIOUS)
        back = "" if older is None else f"; `draftforge rollback` makes {older.reference} champion again"
        reasons = [f"{ALREADY} and {UNMET}", *decision.reasons]
        reasons.append(f"`draftforge retrain` trains a draft from it, which must meet the gate{back}")
    decision = decision.model_copy(update={"reasons": reasons, "compared": version.reference})
    if known is None or last is None or last.promote != decision.promote:
        record_decision(space.tracking, decision, version)
    return decision, shown


def _no_heir(scored: Scored, champion: Version) -> Decision:
    """Decision where the champion that a retraining started from does better than every heir on the selection split."""
    heirs = [row for row in scored.rows if not (row.baseline or row.start or row.dropped) and row.speedup.value > 0]
    best = max(heirs, key=lambda row: row.speedup.value, default=None)
    found = interval(scored.chosen.speedup, "x")
    if best is not None:
        found += f", at best {interval(best.speedup, 'x')} by {best.draft} step {best.step} at {best.config}"
    reason = f"no heir is better than its start, {champion.reference}, which stays champion"
    return Decision(
        promote=False,
        reasons=[f"{reason}: on the selection split {found}"],
        compared=champion.reference,
        beats_start=False,
    )


def rollback(recipe: Recipe, undo: bool = False, why: str = "") -> None:
    """Make the previous champion of the recipe's target the champion again; `undo`: the one that a rollback left."""
    space, move = Workspace(recipe), champion_alias.undo_rollback if undo else champion_alias.rollback
    version = move(space.tracking, space.target_fingerprint, why or "asked for on the command line")
    say(f"{version.reference}: champion again")
    follow_champion(space)


def _register(stages: Stages, run_id: str, scored: Scored, scorer: Scorer, row: Row) -> Version:
    """Export a scored checkpoint and register it under its target as `candidate`. The same draft once only.

    `row`: its own, which may be that of a retraining's start.
    """
    space, recipe, start = stages.space, stages.recipe, scored.start
    # 1) Export it, read back and scored equal.
    folder, plan = scored.folders[row.draft, row.step], scored.plan(row, recipe.score)
    exported = space.root / "exports" / f"{row.draft}-{row.step:06d}-{fingerprint.short(scored.stage.fingerprint)}"
    if not is_copy(exported, folder, plan):  # not there yet, or damaged since
        shutil.rmtree(exported, ignore_errors=True)
        export_draft(scorer, folder, exported, lambda folder: write_plan(folder, plan))
    # 2) Its lineage: everything that it was made of, by fingerprint.
    meta, times = read_meta(exported), scored.times[row.draft, row.step]
    parent = start.version if start is not None and row.draft in start.drafts else None
    lineage = Lineage(
        target_fingerprint=space.target_fingerprint,
        target_name=space.target_name,
        target_files={name: fingerprint.short(digest) for name, digest in space.target_files.items()},
        tokenizer_digest=meta.tokenizer_digest,
        mix_fingerprint=stages.mix.fingerprint,
        capture_fingerprint=stages.captured.fingerprint,
        counts_digest=fingerprint.of_file(scored.counts_file),
        recipe_fingerprint=fingerprint.of_json(recipe.resolved()),
        family=meta.family,
        step=parent.lineage.step if parent is not None and row.start else row.step,
        plan=stored_plan(exported),
        measured=times.description,
        parent=None if parent is None else parent.reference,
        git_commit=git_commit(),
    )
    # 3) Clusters of its training conversations go along: later gates check that no holdout overlaps with them. A start
    #    has learnt from those of its parent alone.
    answers = [] if row.start else Capture.open(stages.captured.folder, verify=False).samples("train")
    trained_on = {sample.cluster for sample in answers}
    return register_version(space.tracking, run_id, exported, lineage, trained_on, space.target_settings)


def _say_decision(version: Version, decision: Decision) -> None:
    # One line, or one for each reason, as reasons are sentences.
    verdict, reasons = "promoted to champion" if decision.promote else "not promoted", decision.reasons
    if reasons[0].startswith(ALREADY):
        verdict, *reasons = reasons
    elif len(reasons) == 1:
        verdict, reasons = f"{verdict}: {reasons[0]}", []
    for line in (f"{version.reference}: {verdict}", *(f"  {reason}" for reason in reasons)):
        say(line)
    if decision.choice and not decision.reasons[0].startswith(ALREADY):
        say(f"  to promote it all the same, by choice: `draftforge promote RECIPE {decision.choice}`")


def _write_record(
    space: Workspace, path: Path, version: Version, decision: Decision, holdout: Mapping[str, Any]
) -> None:
    """Keep the decision, the figures on the holdout, and the lineage, for the report."""

    def lineage(one: Version) -> dict[str, Any]:
        return one.lineage.model_dump(mode="json", exclude={"files": True, "plan": {"tree"}})

    line = [{"version": one.reference, "lineage": lineage(one)} for one in ancestors(space.tracking, version)]
    record = {"version": version.reference, "at": time.time(), "lineage": lineage(version), "ancestors": line}
    storage.write_json(path, {**record, "decision": decision.model_dump(mode="json"), "holdout": holdout})


def keep_counts(tracking: Tracking, version: Version, table: pa.Table) -> None:
    """Store a version's holdout counts beside it in MLflow, at the K or tree that it was judged at.

    Monitoring and the judgement of staleness compare later acceptance with them. Raises RegistryError where the run's
    artifacts lie outside the store.
    """
    run_place(tracking, version.run_id)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / KEPT_COUNTS
        counts.write(table, path)
        with mlflow_errors(tracking.uri):
            tracking.client.log_artifact(version.run_id, str(path), version.lineage.folder)


def kept_counts(tracking: Tracking, version: Version) -> pa.Table | None:
    """Holdout counts that `keep_counts` stored; None where nothing was."""
    name = f"{version.lineage.folder}/{KEPT_COUNTS}"
    if name not in run_names(tracking, version.run_id, version.lineage.folder):
        return None
    with run_files(tracking, version.run_id, [name]) as folder:
        return counts.read_kept(folder / name)


def follow_champion(space: Workspace) -> None:
    """Finish a move of the target's champion that was cut off, and run the operator's command for it, unless that has
    run for the move that made it champion.

    Raises HookError where the command fails.
    """
    settings = space.recipe.promotion
    champion_alias.settle(space.tracking, space.target_fingerprint)
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
    run_place(space.tracking, current.run_id)
    say(f"{current.reference}: running {settings.command[0]} after the {_NOUN[event]}")
    result = run_command(settings, command_environment(space, event, current, move))
    password = make_url(space.tracking.uri).password
    secrets = os.environ | ({"STORE_PASSWORD": password} if password else {})
    output, problem = masked(result.output, secrets), masked(result.problem, secrets)
    path = f"hooks/{current.name}-v{current.number}-{datetime.now(UTC):%Y%m%dT%H%M%S.%f}.txt"
    with mlflow_errors(space.tracking.uri):
        client.log_text(current.run_id, output, path)
        client.set_model_version_tag(current.name, str(current.number), HOOK_TAG, label + (problem or _DONE))
    # 3) A failure undoes nothing.
    if problem:
        last = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "it said nothing")
        raise HookError(
            f"promotion.command {settings.command[0]}: {problem}: {last[:300]} ({current.reference} stays champion)"
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
