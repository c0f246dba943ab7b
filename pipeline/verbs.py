"""What the command line's verbs do. A verb runs the stages that it needs and that are not on disk yet."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import storage
from ..data.capture.manifest import Part, check_part, parse_part
from ..data.capture.reuse import save_answers
from ..data.mix import load_mix
from ..data.store import Capture
from ..distributed.shared_work import crew
from ..errors import InputError, MissingFileError
from ..eval.settings import HOLDOUT_SPLIT
from ..progress import say
from ..recipe import Recipe
from ..registry import promotion
from ..registry.tracking import find_run, start_run
from ..specdec.formats import check_family, known_format, needs_verifier, read_meta
from ..specdec.formats.layer_skip import is_skip_file
from ..train.checkpoints import flatten
from ..train.throughput import NoSink
from . import bench as benchmark
from . import distill as flow
from . import generate as answering
from . import layer_skip, mix_report, monitoring
from . import retrain as again
from . import watch as watching
from .bench import BenchSettings, numbers_of
from .export import export_draft, verifier_of
from .promotion import check_promotion, follow_champion, promote_stage
from .registry_commands import fetch as fetch
from .registry_commands import registry as registry
from .report import find_scored, log_report, write_report
from .scoring import Scorer, check_score, help_score, help_score_foreign, score_foreign, score_stage
from .stages import (
    Stages,
    capture_stage,
    captured_stages,
    check_capture,
    join_stage,
    mix_stage,
    prepare_drafts,
    train_stage,
)
from .staleness import pinned
from .workspace import Workspace, require_whole

REFUSED = 5
"""Exit code of a retraining whose draft the gate refused: nothing broke, and the champion is still stale."""


def distill(recipe: Recipe) -> None:
    """Everything, up to the promotion."""
    flow.distill(_together(recipe))


def mix(recipe: Recipe) -> None:
    """The conversations."""
    space = _together(recipe)
    with space.alone():
        stage = mix_stage(Stages(space))
    say(f"{stage.folder}")


def inspect_mix(recipe: Recipe, out: Path | None) -> None:
    """The mix beside its log."""
    space = Workspace(recipe)
    with space.alone():
        mix_report.inspect_mix(space, out)


def capture(
    recipe: Recipe, answers_to: Path | None = None, part: str | None = None, parts: Sequence[Path] = ()
) -> None:
    """The answers, and the initial drafts that are made of the target. `answers_to`: where answers are kept alone.

    `part`: such as 2/5, no more than that, in a folder of its own; `parts`: the folders of all parts, to be joined.
    """
    if part is not None:
        if answers_to is not None or parts:
            raise InputError(f"--part {part}: answers a part alone; leave out --answers-to and --join")
        _capture_part(recipe, parse_part(part))
        return
    if answers_to is not None and answers_to.exists():
        raise InputError(f"--answers-to {answers_to}: exists; give a new folder")
    space = _together(recipe)
    stages = Stages(space)
    check_capture(stages)
    with space.alone():
        mix_stage(stages)
        if parts and space.first_rank:
            join_stage(stages, parts)
        captured = capture_stage(stages)
        prepare_drafts(stages)
    say(f"{captured.folder}")
    if answers_to is not None and space.first_rank:
        tokens = save_answers(Capture.open(captured.folder, verify=False), answers_to)
        say(f"{answers_to}: {tokens:,} answer tokens")


def _capture_part(recipe: Recipe, part: Part) -> None:
    space = _together(recipe, part=str(part))
    stages = Stages(space)
    check_capture(stages)
    with space.alone():
        conversations = load_mix(mix_stage(stages).folder)
        check_part(part, conversations, recipe.capture, recipe.score.sampling)
        captured = capture_stage(stages, part)
    say(f"{captured.folder}")


def train(recipe: Recipe, draft: str | None) -> None:
    """The checkpoints of one draft, or of all."""
    space = _together(recipe, draft=draft)
    _check_name(recipe, draft)
    stages = Stages(space)
    check_capture(stages)
    with space.alone():
        _train(stages, draft)


def score(recipe: Recipe, draft: str | None) -> None:
    """The leaderboard: of the recipe's drafts, of one of them, or of a draft folder of anybody's making."""
    space = _together(recipe, draft=draft)
    folder = None if draft is None or draft in recipe.drafts else Path(draft)
    if folder is not None and not (draft and folder.exists()):
        raise MissingFileError(f"--draft {draft}: is neither a draft of the recipe ({_names(recipe)}) nor a folder")
    names = [] if folder is not None else _chosen(recipe, draft)
    check_score(space, names, trees=folder is None)
    stages = Stages(space)
    with space.alone():
        if folder is not None:
            mix_stage(stages)
            capture_stage(stages)
            if not space.first_rank:
                help_score_foreign(stages, folder)
                return
            write_report(space, score_foreign(stages, folder).stage.folder)
            return
        _train(stages, draft)
        if not space.first_rank:
            help_score(stages, names)
            return
        write_report(space, score_stage(stages, names).stage.folder)


def report(recipe: Recipe, out: Path | None) -> None:
    """The report, drawn again from what is on disk."""
    space = Workspace(recipe, reads=True)
    storage.require_file_place(out, "--out")
    write_report(space, find_scored(space), out)


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
    require_whole(recipe, "a search of layers")
    space = _together(recipe)
    with space.alone():
        layer_skip.skip_layers(space, domain, draft_tokens, tries, conversations, seed, out)


def promote(recipe: Recipe) -> None:
    """Register the chosen draft and let it meet the champion."""
    space = _together(recipe)
    with space.alone():
        _promote(space)


def _promote(space: Workspace) -> None:
    check_promotion(space)
    stages = Stages(space)
    _train(stages, None)
    if not space.first_rank:
        help_score(stages, space.recipe.drafts)
        return
    scored = score_stage(stages, space.recipe.drafts)
    identity = stages.run_fingerprint
    with start_run(space.tracking, space.recipe.name, identity, run_id=find_run(space.tracking, identity)) as run:
        promote_stage(stages, run.id, scored)
        log_report(space, scored.stage.folder, run)
    follow_champion(space)


def metrics(
    recipe: Recipe,
    out: Path | None,
    listen: str | None,
    served: list[str],
    since: list[str],
    interval_seconds: float,
    margin: float,
    fail: bool,
) -> None:
    """What monitoring should know of the champion, and whether what is served is what was promised."""
    asked = monitoring.Served(served, since, interval_seconds, margin, fail)
    text = monitoring.metrics(Workspace(recipe, reads=True), out, listen, asked)
    if text is not None:
        print(text, end="")


def rollback(recipe: Recipe) -> None:
    """The previous champion of this target again."""
    space = Workspace(recipe)
    version = promotion.rollback(space.tracking, space.target_fingerprint, "asked for on the command line")
    say(f"{version.reference}: champion again")
    follow_champion(space)


def retrain(recipe: Recipe, dry_run: bool) -> int:
    """Train again if the champion is stale; the exit code. `dry_run`: only say whether, why and how."""
    if not dry_run:
        crew().agree(_settings_of(recipe))
    if not crew().first:
        if not dry_run:
            again.help_retrain(Workspace(recipe))
        return 0
    recipe = pinned(recipe)
    if dry_run:
        again.dry_run(recipe)
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
    start = watching.retrain_command(path, overrides)
    every_seconds = watching.seconds_of(every, "--every")
    jitter_seconds = 0.0 if jitter is None else watching.seconds_of(jitter, "--jitter")
    if once and port is not None:
        raise InputError(f"--webhook {port}: cannot be heard with --once; leave one of them out")
    if once:
        return watching.run_once(start)
    schedule = watching.RetrainScheduler(start, every_seconds, jitter_seconds)
    say(f"watching {recipe.name}: a retraining now, then every {every}")
    if port is None:
        schedule.serve()
        return 0
    name, alias = watching.watched_alias(recipe.target.model)
    receiver = watching.Receiver(watching.secret_of(), lambda event: watching.matches(event, name, alias), schedule.ask)
    with watching.listening(receiver, address, port) as found:
        say(f"listening for webhooks of {name}@{alias} on {address}:{found}")
        schedule.serve()
    return 0


def export(recipe: Recipe, out: Path, draft: str | None, layout: str | None, target_id: str | None) -> None:
    """Copy a draft out, or write it in another format; score what was written."""
    chosen = None if layout is None else known_format(layout)
    require_whole(recipe, "an export")
    answering.require_champion(recipe, draft)
    space = Workspace(recipe)
    folder = answering.find_draft(space, draft)
    if is_skip_file(folder):
        raise InputError(f"--draft {folder}: names layers of the target; it has no weights to export")
    verifier = None
    if chosen is not None:
        check_family(chosen, read_meta(folder).family)
        verifier = verifier_of(space, target_id) if needs_verifier(chosen) else None
    scorer = Scorer(space, captured_stages(space).captured, HOLDOUT_SPLIT)
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
    require_whole(recipe, "an answer")
    answering.require_champion(recipe, draft)
    space = Workspace(recipe)
    spoken = answering.answer_prompt(
        space, prompt, draft, rule, draft_tokens, tree, helped_by, max_new_tokens, temperature, seed
    )
    answering.show(space.target, spoken)


def bench(
    recipe: Recipe,
    prompts: list[Path],
    drafts: list[str],
    trees: list[str],
    helped_by: str | None,
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
        helped_by,
        numbers_of("--draft-tokens", draft_tokens),
        numbers_of("--batch-size", batch_sizes),
        max_new_tokens,
        max_prompts,
        temperature,
        rule,
        repeats,
        seed,
    )
    require_whole(recipe, "a benchmark")
    benchmark.bench(Workspace(recipe), settings, out, fresh)


def _together(recipe: Recipe, **options: str | None) -> Workspace:
    """The work folder, where every rank of this launch has the same recipe and options."""
    crew().agree(_settings_of(recipe) | {f"--{name}": value for name, value in options.items()})
    return Workspace(recipe)


def _settings_of(recipe: Recipe) -> dict[str, Any]:
    """What ranks must have in common, field by field. A machine may have files and servers at places of its own: what
    lies there is compared by its content."""
    own = {"target.model", "target.adapter", "capture.backend.url", "registry.tracking_uri"}
    fields = flatten(_pathless(recipe.model_dump()))
    return {name: value for name, value in fields.items() if name not in own}


def _pathless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _pathless(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_pathless(inner) for inner in value]
    return value if value is None or isinstance(value, bool | int | float | str) else None


def _check_name(recipe: Recipe, draft: str | None) -> None:
    if draft is not None and draft not in recipe.drafts:
        raise InputError(f"--draft {draft}: must be one of the recipe's drafts ({_names(recipe)})")


def _names(recipe: Recipe) -> str:
    return ", ".join(recipe.drafts)


def _train(stages: Stages, draft: str | None) -> None:
    mix_stage(stages)
    capture_stage(stages)
    for name in _chosen(stages.recipe, draft):
        train_stage(stages, name, NoSink())


def _chosen(recipe: Recipe, draft: str | None) -> list[str]:
    return list(recipe.drafts) if draft is None else [draft]
