"""The whole flow: mix, capture, train, score, register, promote. Each stage that is on disk is skipped."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..progress import say
from ..registry.connect import redacted
from ..registry.gate import Decision
from ..registry.lineage import Version
from ..registry.tracking import TrackedRun, find_run, start_run
from ..train.throughput import NoSink
from .promotion import check_promotion, follow_champion, promote_stage
from .report import log_report
from .scoring import Scored, help_score, score_stage
from .stages import Stage, Stages, capture_stage, checkpoints_of, mix_stage, prepare_drafts, train_stage
from .workspace import Workspace, at, told


@dataclass(frozen=True)
class Outcome:
    """What a distillation ended with."""

    scored: Scored
    version: Version
    decision: Decision


def distill(
    space: Workspace,
    parent: str | None = None,
    mix: Stage | None = None,
    notes: Mapping[str, Any] | None = None,
) -> Outcome | None:
    """Run every stage; None on ranks other than the first, whose part ends with the scoring.

    `parent`: the version that training starts from. `mix`: another one than the recipe's, finished. `notes`: why this
    is done, kept in the run.
    """
    started = time.monotonic()
    check_promotion(space, "a distillation")
    stages = Stages(space, mix)
    if not space.first_rank:
        mix_stage(stages)
        capture_stage(stages)
        for name in space.recipe.drafts:
            train_stage(stages, name, NoSink())
        help_score(stages, space.recipe.drafts)
        return None
    tracking = space.tracking  # a server that does not answer is found out before the work, not after it
    with space.alone():
        with at("mix"):
            mix_stage(stages)
        identity = stages.run_fingerprint
        with start_run(tracking, space.recipe.name, identity, run_id=find_run(tracking, identity)) as run, told(run):
            if notes is not None:
                run.log_json(dict(notes), "staleness.json")
            outcome = _tracked(stages, run, parent)
        follow_champion(space)
    seconds = time.monotonic() - started
    say(f"distilled in {seconds:.0f} s; to look at it: mlflow ui --backend-store-uri {redacted(tracking.uri)}")
    return outcome


def _tracked(stages: Stages, run: TrackedRun, parent: str | None) -> Outcome:
    """The stages after the mix, with what each leaves in the MLflow run."""
    space, drafts = stages.space, stages.recipe.drafts
    run.log_params(space.recipe.public())
    run.log_json(space.recipe.public(), "recipe.json")
    run.set_tags({"draftforge.target": space.target_fingerprint})
    with at("capture"):
        captured = capture_stage(stages)
        run.log_input("mix", stages.mix.folder, stages.mix.fingerprint)
        run.log_input("capture", captured.folder, captured.fingerprint)
    with at("train"):
        prepare_drafts(stages)
        trained = {name: train_stage(stages, name, run.sink(name)) for name in drafts}
    with at("score"):
        scored = score_stage(stages, drafts)
        _log_scores(run, scored, trained)
    with at("promote"):
        version, decision = promote_stage(stages, run.id, scored, parent)
        log_report(space, scored.stage.folder, run)
    run.set_tags({"draftforge.version": version.reference, "draftforge.promoted": str(decision.promote).lower()})
    return Outcome(scored, version, decision)


def _log_scores(run: TrackedRun, scored: Scored, trained: dict[str, Stage]) -> None:
    """Figures of every checkpoint at its step, the counts they come from, and the checkpoints themselves."""
    for row in scored.rows:
        run.sink(f"{row.draft}.score").log(row.step, row.metrics())
    run.log_file(scored.counts_file)
    run.log_json([row.record() for row in scored.rows], "leaderboard.json")
    run.log_json([row.record() for row in scored.domains], "domains.json")
    run.log_json(scored.advice, "advice.json")
    if scored.chosen.load is not None:
        run.log_file(scored.times_file)
    for name, stage in trained.items():
        for step, folder in checkpoints_of(stage).items():
            for path in sorted(folder.iterdir()):
                if path.is_file():
                    run.log_file(path, f"checkpoints/{name}/step-{step:06d}")
