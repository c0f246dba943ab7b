"""Verbs of the stages: mix, capture, train, score, promote, and distill, which runs all of them.

Each verb first runs the stages that it needs; a stage whose folder is on disk is skipped. Every rank of a launch calls
the same verb.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data.capture.manifest import Part, check_part, parse_part
from ..data.capture.reuse import save_answers
from ..data.mix import load_mix
from ..data.store import Capture
from ..errors import InputError, MissingFileError
from ..progress import say
from ..recipe import Recipe
from ..registry.connect import how_to_look
from ..registry.gate import Decision
from ..registry.lineage import Version
from ..registry.tracking import TrackedRun, find_run, start_run
from ..registry.versions import TARGET_NAME_TAG, TARGET_TAG
from ..storage import restrict
from ..train.loop import figures_on_disk
from ..train.throughput import NoSink
from .export import show_serving
from .promotion import REFUSED, check_promotion, check_stages, follow_champion, promote_stage
from .report import log_report, log_result, write_report
from .scoring import Scored, check_drafts, check_score, score_foreign, score_stage
from .stages import (
    Stage,
    Stages,
    Start,
    capture_stage,
    check_capture,
    check_training,
    checkpoints_of,
    join_stage,
    mix_stage,
    prepare_drafts,
    train_stage,
)
from .workspace import Workspace, in_stage, open_workspace, tag_failed_stage


def mix(recipe: Recipe) -> None:
    """Make the mix: the conversations that the target will answer."""
    space = open_workspace(recipe)
    with space.alone():
        stage = mix_stage(Stages(space))
    say(f"{stage.folder}")


def capture(
    recipe: Recipe, answers_to: Path | None = None, part: str | None = None, parts: Sequence[Path] = ()
) -> None:
    """Capture the target's answers, and make the initial drafts that need the target.

    `answers_to`: a new folder that keeps the answers alone. `part`: such as 2/5, only that part, in a folder of its
    own. `parts`: the folders of all parts, which are joined. Raises InputError for options that exclude each other.
    """
    # 1) Options. A part is answered alone: another machine joins it.
    if part is not None:
        if answers_to is not None or parts:
            raise InputError(f"--part {part}: answers a part alone; leave out --answers-to and --join")
        _capture_part(recipe, parse_part(part))
        return
    if answers_to is not None and answers_to.exists():
        raise InputError(f"--answers-to {answers_to}: exists; give a new folder")
    # 2) Answer what the joined parts, if any, lack; initial drafts while the target is loaded.
    space = open_workspace(recipe)
    stages = Stages(space)
    with space.alone():
        check_capture(stages)
        check_training(stages, space.drafts, begun_only=True)
        mix_stage(stages)
        if parts and space.first_rank:
            join_stage(stages, parts)
        captured = capture_stage(stages)
        prepare_drafts(stages)
    say(f"{captured.folder}")
    # 3) The answers alone, without signals.
    if answers_to is not None and space.first_rank:
        tokens = save_answers(Capture.open(captured.folder, verify=False), answers_to)
        restrict(answers_to, recipe.workdir_access)
        say(f"{answers_to}: {tokens:,} answer tokens")


def _capture_part(recipe: Recipe, part: Part) -> None:
    """Capture one part of the answers, in a folder of its own, for another machine to join."""
    space = open_workspace(recipe, part=str(part))
    stages = Stages(space)
    with space.alone():
        check_capture(stages)
        conversations = load_mix(mix_stage(stages).folder)
        check_part(part, conversations, recipe.capture, recipe.score.sampling)
        captured = capture_stage(stages, part)
    say(f"{captured.folder}")


def train(recipe: Recipe, draft: str | None = None) -> None:
    """Train one draft of the recipe, or all."""
    space = open_workspace(recipe, draft=draft)
    if draft is not None and draft not in recipe.drafts:
        raise InputError(f"--draft {draft}: must be one of the recipe's drafts ({', '.join(recipe.drafts)})")
    stages, names = Stages(space), list(recipe.drafts) if draft is None else [draft]
    with space.alone():
        check_capture(stages)
        check_training(stages, names)
        run_to_training(stages, names)


def score(recipe: Recipe, draft: str | None = None) -> None:
    """Score the recipe's drafts, one of them, or a draft that was made elsewhere; and write the report.

    `draft`: a name of the recipe, or a path. Raises MissingFileError where it is neither.
    """
    space = open_workspace(recipe, draft=draft)
    # 1) Whose draft? A name of the recipe goes before a path.
    foreign = None if draft is None or draft in recipe.drafts else Path(draft)
    if foreign is not None and not (draft and foreign.exists()):
        known = ", ".join(recipe.drafts)
        raise MissingFileError(f"--draft {draft}: is neither a draft of the recipe ({known}) nor a folder")
    names = [] if foreign is not None else list(recipe.drafts) if draft is None else [draft]
    needed = [*names, *recipe.score.drafts_beside(names)]
    # 2) Run what the score needs: for a foreign draft, mix and capture alone.
    check_score(space, needed, trees=foreign is None)
    stages = Stages(space)
    with space.alone():
        check_capture(stages)
        check_training(stages, needed)
        if space.first_rank:
            check_drafts(space, foreign)
        run_to_training(stages, needed)
        scored = score_stage(stages, names) if foreign is None else score_foreign(stages, foreign)
        if scored is not None:
            write_report(space, scored.stage.folder)


@dataclass(frozen=True)
class Outcome:
    """Outcome of a distillation: the score, the registered version, and the gate's decision."""

    scored: Scored
    version: Version
    decision: Decision


def exit_code(outcome: Outcome | None) -> int:
    """Exit code of `distill` and `promote`: `REFUSED` where the gate refused; 0 where a draft was promoted, or nothing
    had to be. None: of a rank that is not the first."""
    return 0 if outcome is None or outcome.decision.promote else REFUSED


def promote(recipe: Recipe) -> Outcome | None:
    """Register the chosen draft and compare it with the champion on the holdout; None on ranks other than the first."""
    space = open_workspace(recipe)
    with space.alone():
        check_promotion(space)
        stages = Stages(space)
        check_stages(stages)
        run_to_training(stages, recipe.drafts)
        scored = score_stage(stages, recipe.drafts)
        if scored is None:
            return None
        identity = stages.run_fingerprint
        with start_run(space.tracking, recipe.name, identity, run_id=find_run(space.tracking, identity)) as run:
            version, decision = promote_stage(stages, run.id, scored)
            log_report(space, scored.stage.folder, run)
            log_result(stages, run, scored.stage.folder)
        follow_champion(space)
        show_serving(space, decision.numbers.evidence)
    return Outcome(scored, version, decision)


def run_to_training(stages: Stages, drafts: Iterable[str]) -> None:
    """Run mix and capture, and train these drafts, without a record in MLflow."""
    mix_stage(stages)
    capture_stage(stages)
    for name in drafts:
        train_stage(stages, name, NoSink())


def distill(
    space: Workspace,
    start: Start | None = None,
    made_mix: Stage | None = None,
    notes: Mapping[str, Any] | None = None,
) -> Outcome | None:
    """Run every stage; None on ranks other than the first, whose part ends with the scoring.

    `start`: the champion that training starts from. `made_mix`: a finished mix to use instead of the recipe's.
    `notes`: why this is done, kept in the run.
    """
    # 1) Refuse first. Other ranks help up to the scoring, and leave no record.
    started = time.monotonic()
    check_promotion(space, "a distillation")
    stages = Stages(space, made_mix)
    if not space.first_rank:
        check_stages(stages)
        run_to_training(stages, space.recipe.drafts)
        score_stage(stages, space.recipe.drafts)
        return None
    # 2) The mix comes before the run: its fingerprint is part of what the run is found by.
    tracking = space.tracking
    with space.alone():
        check_stages(stages)
        with in_stage("mix"):
            mix_stage(stages)
        identity = stages.run_fingerprint
        with (
            start_run(
                tracking, space.recipe.name, identity, run_id=find_run(tracking, identity), trackers_folder=space.root
            ) as run,
            tag_failed_stage(run),
        ):
            if notes is not None:
                run.log_json(dict(notes), "staleness.json")
            outcome = _tracked(stages, run, start)
        follow_champion(space)
    # 3) Say how long it took, and where its figures are.
    seconds = time.monotonic() - started
    say(f"distilled in {seconds:.0f} s; to look at it: {how_to_look(tracking, run.id)}")
    show_serving(space, outcome.decision.numbers.evidence)
    return outcome


def _tracked(stages: Stages, run: TrackedRun, start: Start | None) -> Outcome:
    """Run the stages after the mix inside an MLflow run, which logs parameters, inputs, losses, scores and files."""
    space, drafts = stages.space, stages.recipe.drafts
    # What is known before the work: an interrupted run shows it too. Figures that people look for first are first.
    log_result(stages, run)
    run.log_params(space.recipe.public())
    run.log_json(space.recipe.public(), "recipe.json")
    run.set_tags({TARGET_NAME_TAG: space.target_name, TARGET_TAG: space.target_fingerprint})
    # The stages; an error carries the name of the one that it passes through.
    with in_stage("capture"):
        captured = capture_stage(stages)
        run.log_input("mix", stages.mix.folder, stages.mix.fingerprint)
        run.log_input("capture", captured.folder, captured.fingerprint)
    with in_stage("train"):
        prepare_drafts(stages)
        trained = {name: _train(stages, name, run) for name in drafts}
    with in_stage("score"):
        scored = score_stage(stages, drafts, start)
        assert scored is not None
        _log_scores(run, scored, trained)
        log_result(stages, run, scored.stage.folder)
    with in_stage("promote"):
        version, decision = promote_stage(stages, run.id, scored)
        log_report(space, scored.stage.folder, run)
        log_result(stages, run, scored.stage.folder)
    run.set_tags({"draftforge.version": version.reference, "draftforge.promoted": str(decision.promote).lower()})
    return Outcome(scored, version, decision)


def _train(stages: Stages, name: str, run: TrackedRun) -> Stage:
    """Train one draft; its figures go to the run, those of earlier attempts too."""
    # What is on disk already may have missed the run: it was killed before it was sent, the server was away, or the
    # training belongs to no run (`draftforge train`).
    sink = run.sink(f"train/{name}")
    sink.log_rows(figures_on_disk(stages.training(name).folder))
    return train_stage(stages, name, sink)


def _log_scores(run: TrackedRun, scored: Scored, trained: dict[str, Stage]) -> None:
    """Log the figures of every checkpoint at its step, the counts they come from, and the checkpoints themselves."""
    # Figures by step draw curves in MLflow; the records hold them with intervals.
    for row in scored.rows:
        run.sink(f"score/{row.draft}").log(row.step, row.metrics())
    run.flush()
    run.log_file(scored.counts_file)
    run.log_json([row.record() for row in scored.rows], "leaderboard.json")
    run.log_json([row.record() for row in scored.domains], "domains.json")
    run.log_json(scored.advice, "advice.json")
    if scored.chosen.load is not None:
        run.log_file(scored.times_file)
    # Every checkpoint is kept, not only the chosen one.
    for name, stage in trained.items():
        for step, folder in checkpoints_of(stage).items():
            for path in sorted(folder.iterdir()):
                if path.is_file():
                    run.log_file(path, f"checkpoints/{name}/step-{step:06d}")
