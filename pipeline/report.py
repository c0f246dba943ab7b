"""HTML report of a score and a promotion: gathers their records from disk, and draws one page. Loads no model."""

import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .. import __version__, fingerprint, storage
from ..data.mix import MANIFEST as MIX_MANIFEST
from ..data.store import MANIFEST as CAPTURE_MANIFEST
from ..errors import CorruptDataError, DraftforgeError, MissingFileError
from ..eval.held_loss import loss_words
from ..eval.report.page import Link, ReportRecords, report_page
from ..eval.summary import decision_summary, run_description
from ..progress import say
from ..recipe import Recipe
from ..registry.lineage import git_commit
from ..registry.tracking import TrackedRun
from ..specdec.formats import meta_file, read_meta
from ..specdec.formats.checkpoint import HELD_LOSS, OWN_TARGET
from .export import fetch_command
from .promotion import PROMOTION_FILE, decision_record
from .scoring import SCORES_FILE
from .stages import Stages
from .workspace import Workspace

REPORT_FILE = "report.html"
RESULT_STEPS = {"plain": 0, "selection": 1, "holdout": 2}
"""Step of a run's figures `result/…` by what they are of: plain decoding before any score, then the draft of the
decision on one split and on the other."""


def report(recipe: Recipe, out: Path | None) -> None:
    """Draw the report of the recipe's newest score again, from what is on disk."""
    space = Workspace(recipe, read_only=True)
    storage.require_file_place(out, "--out")
    write_report(space, find_scored(space), out)


def write_report(space: Workspace, scored: Path, out: Path | None = None) -> Path:
    """Draw the report of a score folder, in that folder or at `out`, and say where it is.

    Raises CorruptDataError for records that this version of draftforge cannot read.
    """
    path = out or scored / REPORT_FILE
    # Records have no schema of their own: whatever drawing trips over means that another version wrote them.
    try:
        page = report_page(_records(space, scored)).encode()
    except (DraftforgeError, MemoryError, OSError):
        raise
    except Exception as error:
        raise CorruptDataError(
            f"{scored / SCORES_FILE}: not the record of a score of draftforge {__version__} "
            f"({type(error).__name__}: {error}); run `draftforge score` again"
        ) from error
    storage.write_bytes(path, page)
    say(f"report: {path}")
    return path


def log_report(space: Workspace, scored: Path, run: TrackedRun) -> None:
    """Draw the report, and log it as an artifact of the run. A report that cannot be drawn undoes no promotion."""
    try:
        path = write_report(space, scored)
    except CorruptDataError as error:
        say(f"no report: {error}")
    else:
        run.log_file(path)


def log_result(stages: Stages, run: TrackedRun, scored: Path | None = None) -> None:
    """Log tau, speed-up and K of a run, and its description in words. `scored`: its score folder, once there is one."""
    # 1) What is known of it so far; before a score, what is served is plain decoding.
    space, head, name = stages.space, None, "plain"
    result: tuple[float | None, float | None, int] = 1.0, 1.0, 0
    if scored is not None:
        head = decision_summary(storage.read_object(scored / SCORES_FILE), decision_record(scored))
        if head.row is not None:
            name, row = head.split, head.row
            result = row["tau"]["value"], row["speedup"]["value"], row["draft_tokens"]
    # 2) Figures, then words. An unknown number has no figure.
    tau, speedup, draft_tokens = result
    if tau is not None and speedup is not None:
        run.log_result(RESULT_STEPS[name], tau, speedup, draft_tokens)
    drafts = {name: f"{draft.family}, {draft.steps} steps" for name, draft in space.recipe.drafts.items()}
    mix = _optional(stages.mix.folder / MIX_MANIFEST)
    run.describe(run_description(space.recipe.name, space.target_name, drafts, mix, head))


def find_scored(space: Workspace) -> Path:
    """Score folder of the recipe; else the newest one of the work folder, which a line says.

    A retraining scores under a changed recipe, so the recipe's own folder may not exist. Raises MissingFileError where
    there is no score at all.
    """
    # 1) The folder that the recipe as it is would score into.
    try:
        stages = Stages(space)
        drafts = {name: stages.training(name).fingerprint for name in space.recipe.drafts}
        own: Path | None = stages.score(drafts).folder
    except DraftforgeError as error:  # its sources or its target are gone
        say(f"the recipe's own score is not known ({error})")
        own = None
    if own is not None and (own / SCORES_FILE).is_file():
        return own
    # 2) The newest of all.
    found = newest_score(space.root)
    say(f"this recipe has no score of its own: reporting on the newest one, {found.name}")
    return found


def newest_score(root: Path) -> Path:
    """Newest score folder of a work folder. Raises MissingFileError where there is none."""
    found = sorted(root.glob(f"score-*/{SCORES_FILE}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise MissingFileError(f"{root}: holds no score to report on; run `draftforge score` or `distill` first")
    return found[-1].parent


def _records(space: Workspace, scored: Path) -> ReportRecords:
    """Records that the page is drawn from; those of a promotion are absent before one."""
    scores = storage.read_object(scored / SCORES_FILE)
    promotion = _optional(scored / PROMOTION_FILE)
    # Of a promoted draft, the lineage names mix and version; before that, the recipe does.
    lineage: Mapping[str, Any] = (promotion or {}).get("lineage", {})
    mix = _optional(_mix_folder(space, lineage) / MIX_MANIFEST)
    # The time of the figures, not of the drawing: the same records give the same page.
    made = (promotion or {}).get("at") or scores.get("at") or time.time()
    return ReportRecords(
        name=space.recipe.name,
        target=space.target_name,
        scores=scores,
        promotion=promotion,
        mix=mix,
        lineage=list(_chain(space, scores, promotion, mix)),
        recipe=space.recipe.public(),
        commands=_commands(space, lineage, bool((promotion or {}).get("decision", {}).get("promote"))),
        made_at=datetime.fromtimestamp(made, UTC),
        version=lineage.get("draftforge_version", __version__),
    )


def _mix_folder(space: Workspace, lineage: Mapping[str, Any]) -> Path:
    """Mix folder of a version or, before a promotion, of the recipe; if neither is known, one that does not exist."""
    if "mix_fingerprint" in lineage:
        return space.folder("mix", lineage["mix_fingerprint"])
    try:
        return Stages(space).mix.folder
    except DraftforgeError:  # sources that are gone
        return space.root / "mix"


def _optional(path: Path) -> dict[str, Any] | None:
    return storage.read_object(path) if path.is_file() else None


def _chain(
    space: Workspace, scores: Mapping[str, Any], promotion: Mapping[str, Any] | None, mix: Mapping[str, Any] | None
) -> Iterator[Link]:
    """Lineage from the target to the version: each step with its fingerprint and what is known of it."""
    # What every score has: target, mix and capture.
    recorded: Mapping[str, Any] = (promotion or {}).get("lineage", {})
    target = recorded.get("target_fingerprint") or scores["target"]
    notes = [str(space.recipe.target.model), f"fingerprint {target}", *_held_loss(space.recipe, target)]
    yield Link("Target", fingerprint.short(target), notes)
    if mix is not None:
        sizes = [f"{split}: {sum(counts.values()):,}" for split, counts in mix["conversations"].items()]
        name = recorded.get("mix_fingerprint")
        yield Link("Mix", fingerprint.short(name) if name else "of this recipe", ["conversations: " + ", ".join(sizes)])
    captured = _optional(space.folder("capture", scores["capture"]) / CAPTURE_MANIFEST)
    told = [] if captured is None else [f"{captured['tokens']:,} answer tokens, kept in {captured['dtype']} passes"]
    yield Link("Capture", fingerprint.short(scores["capture"]), told)
    # What a promotion adds: the versions that it descends from, oldest first, and the version itself.
    if promotion is None:
        return
    for ancestor in reversed(promotion["ancestors"]):
        yield Link("Ancestor", ancestor["version"], [_made(ancestor["lineage"])])
    notes = [_made(recorded)]
    notes.append(f"started from {recorded['parent']}" if recorded["parent"] else "started fresh")
    if recorded["git_commit"]:
        notes.append(f"made by draftforge {recorded['draftforge_version']}, commit {recorded['git_commit']}")
    yield Link("Version", promotion["version"], notes)


def _held_loss(recipe: Recipe, target: str) -> Iterator[str]:
    """Words on the loss of a target that was trained together with a draft, from that draft's folder."""
    model = Path(recipe.target.model)
    if model.name == OWN_TARGET and meta_file(model.parent).is_file():
        meta = read_meta(model.parent)
        if meta.target_fingerprint == target and HELD_LOSS in meta.extra:
            yield loss_words(meta.extra[HELD_LOSS])


def _made(lineage: Mapping[str, Any]) -> str:
    plan = lineage["plan"] or {}
    how = f"tree {plan['tree_name']}" if plan.get("tree_name") else f"K = {plan.get('draft_tokens', 'unknown')}"
    return f"{lineage['family']}, step {lineage['step']}, {how}"


def _commands(space: Workspace, lineage: Mapping[str, Any], promoted: bool) -> list[str]:
    """Commands that make the run again, and that fetch its draft, `promoted` or a candidate."""
    commit = lineage.get("git_commit") or git_commit()
    commands = [f"git checkout {commit}"] if commit else []
    commands.append(f"draftforge distill {space.recipe.name}.yaml    # the recipe below, saved under that name")
    if lineage:
        alias = [] if promoted else ["--alias", "candidate"]
        commands.append(fetch_command(space, "served-draft", lineage["target_fingerprint"], alias))
    return commands
