"""What the command line's verbs do. A verb runs the stages that it needs and that are not on disk yet."""

import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from .. import fingerprint
from ..data.recorded import save_answers
from ..data.store import Capture
from ..errors import InputError, MissingFileError
from ..eval.settings import HOLDOUT_SPLIT
from ..progress import say
from ..recipe import Recipe
from ..registry import champions, models
from ..registry.connect import DATABASE_NAME, open_tracking
from ..registry.settings import RegistrySettings
from ..registry.tracking import find_run, start_run
from ..specdec.formats import check_family, known_format, needs_verifier, read_meta
from ..specdec.formats.skipped import is_skip_file
from ..specdec.settings import TargetSettings
from ..specdec.targets import target_fingerprint
from ..train.metrics import NoSink
from . import bench as benchmark
from . import distill as flow
from . import retrain as again
from . import skipping, talk, webhook
from . import watch as watching
from .bench_settings import BenchSettings, numbers_of
from .changes import pinned
from .exporting import export_draft, verifier_of
from .promotion import promote_stage
from .rehearsal import rehearse
from .scoring import Scorer, score_foreign, score_stage
from .stages import Stage, capture_stage, mix_stage, prepare_drafts, train_stage
from .workspace import Workspace

REFUSED = 5
"""Exit code of a retraining whose draft the gate refused: nothing broke, and the champion is still stale."""


def distill(recipe: Recipe) -> None:
    """Everything, up to the promotion."""
    flow.distill(Workspace(recipe))


def mix(recipe: Recipe) -> None:
    """The conversations."""
    space = Workspace(recipe)
    with space.alone():
        stage = mix_stage(space)
    say(f"{stage.folder}")


def capture(recipe: Recipe, answers_to: Path | None = None) -> None:
    """The answers, and the initial drafts that are made of the target. `answers_to`: where answers are kept alone."""
    if answers_to is not None and answers_to.exists():
        raise InputError(f"--answers-to {answers_to}: exists; give a new folder")
    space = Workspace(recipe)
    with space.alone():
        captured = capture_stage(space, mix_stage(space))
        prepare_drafts(space, captured)
    say(f"{captured.folder}")
    if answers_to is not None:
        tokens = save_answers(Capture.open(captured.folder, verify=False), answers_to)
        say(f"{answers_to}: {tokens:,} answer tokens")


def train(recipe: Recipe, draft: str | None) -> None:
    """The checkpoints of one draft, or of all."""
    space = Workspace(recipe)
    _check_name(recipe, draft)
    with space.alone():
        _train(space, capture_stage(space, mix_stage(space)), draft)


def score(recipe: Recipe, draft: str | None) -> None:
    """The leaderboard: of the recipe's drafts, of one of them, or of a draft folder of anybody's making."""
    space = Workspace(recipe)
    folder = None if draft is None or draft in recipe.drafts else Path(draft)
    if folder is not None and not (draft and folder.exists()):
        raise MissingFileError(f"--draft {draft}: is neither a draft of the recipe ({_names(recipe)}) nor a folder")
    with space.alone():
        captured = capture_stage(space, mix_stage(space))
        if folder is not None:
            if space.first_rank:
                score_foreign(space, captured, folder)
            return
        stages = _train(space, captured, draft)
        if space.first_rank:
            score_stage(space, captured, stages)


def skip_layers(
    recipe: Recipe,
    domain: str | None,
    draft_tokens: int | None,
    tries: int,
    conversations: int,
    seed: int,
    out: Path | None,
) -> None:
    """The layers of the target that a draft can do without."""
    space = Workspace(recipe)
    with space.alone():
        skipping.skip_layers(space, domain, draft_tokens, tries, conversations, seed, out)


def promote(recipe: Recipe) -> None:
    """Register the chosen draft and let it meet the champion."""
    space = Workspace(recipe)
    with space.alone():
        _promote(space)


def _promote(space: Workspace) -> None:
    conversations = mix_stage(space)
    captured = capture_stage(space, conversations)
    stages = _train(space, captured, None)
    if not space.first_rank:
        return
    scored = score_stage(space, captured, stages)
    identity = flow.run_fingerprint(space, conversations)
    with start_run(space.tracking, space.recipe.name, identity, run_id=find_run(space.tracking, identity)) as run:
        promote_stage(space, run.id, conversations, captured, scored)


def rollback(recipe: Recipe) -> None:
    """The previous champion of this target again."""
    space = Workspace(recipe)
    version = champions.rollback(space.tracking, space.target_fingerprint, "asked for on the command line")
    say(f"{version.reference}: champion again")


def fetch(out: Path, target: str, model: str, tracking_uri: str | None, workdir: Path, alias: str) -> None:
    """A registered draft of exactly this target, copied to `out`."""
    try:
        settings = RegistrySettings(model=model, tracking_uri=tracking_uri)
    except ValidationError as error:
        raise InputError(f"--model {model}: {error.errors()[0]['msg']}") from None
    home = workdir.resolve()
    if not (tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or (home / DATABASE_NAME).is_file()):
        raise MissingFileError(
            f"--workdir {workdir}: holds no {DATABASE_NAME}; name the recipe's work folder or a store"
        )
    tracking = open_tracking(settings, home)
    found = target if fingerprint.is_fingerprint(target) else target_fingerprint(TargetSettings(model=target))
    version = models.fetch(tracking, found, out, alias)
    say(f"{version.reference}: {alias} of target {fingerprint.short(found)}, in {out}")


def retrain(recipe: Recipe, dry_run: bool) -> int:
    """Train again if the champion is stale; the exit code. `dry_run`: only say whether, why and how."""
    recipe = pinned(recipe)
    if dry_run:
        rehearse(recipe)
        return 0
    return REFUSED if again.retrain(Workspace(recipe)).refused else 0


def watch(
    recipe: Recipe,
    path: str,
    overrides: Sequence[str],
    every: str,
    jitter: str | None,
    once: bool,
    port: int | None,
    address: str,
) -> int:
    """Retrain now and then, and when a webhook says that the target changed. `path`: the recipe's file."""
    start = watching.child(path, overrides)
    every_seconds = watching.seconds_of(every, "--every")
    jitter_seconds = 0.0 if jitter is None else watching.seconds_of(jitter, "--jitter")
    if once and port is not None:
        raise InputError(f"--webhook {port}: cannot be heard with --once; leave one of them out")
    if once:
        return watching.once(start)
    schedule = watching.Watch(start, every_seconds, jitter_seconds)
    say(f"watching {recipe.name}: a retraining now, then every {every}")
    if port is None:
        schedule.serve()
        return 0
    name, alias = webhook.followed(recipe.target.model)
    receiver = webhook.Receiver(webhook.secret_of(), lambda event: webhook.concerns(event, name, alias), schedule.ask)
    with webhook.listening(receiver, address, port) as found:
        say(f"listening for webhooks of {name}@{alias} on {address}:{found}")
        schedule.serve()
    return 0


def export(recipe: Recipe, out: Path, draft: str | None, layout: str | None, target_id: str | None) -> None:
    """Copy a draft out, or write it in another format; score what was written."""
    chosen = None if layout is None else known_format(layout)
    space = Workspace(recipe)
    folder = talk.find_draft(space, draft)
    if is_skip_file(folder):
        raise InputError(f"--draft {folder}: names layers of the target; it has no weights to export")
    verifier = None
    if chosen is not None:
        check_family(chosen, read_meta(folder).family)
        verifier = verifier_of(space, target_id) if needs_verifier(chosen) else None
    captured = capture_stage(space, mix_stage(space))
    scorer = Scorer(space, captured, HOLDOUT_SPLIT)
    export_draft(scorer, folder, out, chosen, verifier, space.target.tokenizer)
    say(f"{out}: exported from {folder}, read back and scored equal")


def generate(
    recipe: Recipe,
    prompt: str,
    draft: str | None,
    rule: str | None,
    draft_tokens: int | None,
    tree: str | None,
    helped_by: str | None,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> None:
    """Answer a prompt and show what the draft was worth."""
    space = Workspace(recipe)
    spoken = talk.speak(space, prompt, draft, rule, draft_tokens, tree, helped_by, max_new_tokens, temperature, seed)
    talk.show(space.target, spoken)


def bench(
    recipe: Recipe,
    prompts: list[Path],
    drafts: list[str],
    trees: list[str],
    draft_tokens: str,
    batch_sizes: str,
    max_new_tokens: int,
    max_prompts: int | None,
    temperature: float,
    rule: str | None,
    repeats: int,
    seed: int,
    out: Path | None,
    fresh: bool,
) -> None:
    """Every way of drafting on the user's own prompts, and where it loses."""
    settings = BenchSettings(
        prompts,
        drafts,
        trees,
        numbers_of("--draft-tokens", draft_tokens),
        numbers_of("--batch-size", batch_sizes),
        max_new_tokens,
        max_prompts,
        temperature,
        rule,
        repeats,
        seed,
    )
    benchmark.bench(Workspace(recipe), settings, out, fresh)


def _check_name(recipe: Recipe, draft: str | None) -> None:
    if draft is not None and draft not in recipe.drafts:
        raise InputError(f"--draft {draft}: must be one of the recipe's drafts ({_names(recipe)})")


def _names(recipe: Recipe) -> str:
    return ", ".join(recipe.drafts)


def _train(space: Workspace, captured: Stage, draft: str | None) -> dict[str, Stage]:
    names = list(space.recipe.drafts) if draft is None else [draft]
    return {name: train_stage(space, name, captured, NoSink()) for name in names}
