"""`draftforge retrain`: judge the champion, and distil a new draft if it is stale; or a dry run that only plans it.

A retraining is idempotent: a second one finds the champion fresh, a stopped one goes on from its finished stages. One
runs at a time, and one that fails leaves the champion as it was.
"""

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflow.tracking import MlflowClient
from sqlalchemy.engine import make_url

from .. import storage
from ..data.capture.reuse import drop_damaged
from ..data.store import MANIFEST as CAPTURE_MANIFEST
from ..distributed import ranks
from ..errors import CorruptDataError, InputError, TrackingError
from ..progress import say
from ..recipe import Recipe
from ..registry.connect import mlflow_errors, quick_requests
from ..registry.lineage import Version
from ..registry.store_address import resolve_uri
from ..registry.versions import champion, resolve_models_uri
from ..specdec.drafts.base import DraftModule
from ..specdec.formats import DraftMeta, load_draft, meta_file, read_meta
from ..specdec.target_settings import TargetSettings
from ..train.checkpoints import is_finished
from ..train.families import family_of
from .distill import Outcome, distill
from .promotion import REFUSED, check_command, check_promotion, check_stages, follow_champion
from .stages import Stage, Stages, Start, blended_mix, mix_stage
from .staleness import STALENESS_FILE, Staleness, pin_revision
from .staleness_evidence import judge
from .workspace import Workspace, check_same_recipe, in_stage, recorded, require_whole

_PLAN = "the plan of a retraining"


@dataclass(frozen=True)
class Retrained:
    """Result of a retraining: the verdict about the champion, and the outcome of the distillation.

    `outcome` None: no distillation was due, or this is not the first rank.
    """

    staleness: Staleness
    outcome: Outcome | None = None

    @property
    def refused(self) -> bool:
        """Whether a draft was trained and not promoted."""
        return self.outcome is not None and not self.outcome.decision.promote


@dataclass(frozen=True)
class RetrainPlan:
    """Plan of a retraining: the mix, and a workspace whose drafts start from the champion where they can."""

    space: Workspace
    mix: Stage
    start: Start | None
    """The champion that training starts from; None: a cold start."""


def retrain(recipe: Recipe) -> int:
    """Retrain if the champion is stale; the exit code: 0, or `REFUSED` where the gate refused the new draft."""
    check_same_recipe(recipe)
    space = Workspace(pin_revision(recipe) if ranks().first else recipe)
    return REFUSED if retrain_champion(space).refused else 0


def retrain_champion(space: Workspace) -> Retrained:
    """Distil for the recipe's target if its champion is stale. Raises LockedError where another retraining runs.

    Training starts from the champion, or from another target's newest one, where tokenizer, family and shapes allow;
    where they do not, it starts cold and says so. What fails leaves a FAILED run and the champion as it was. The
    first rank judges and plans; the others take part in the distillation, and return an empty verdict.
    """
    require_whole(space.recipe, "a retraining")
    check_command(space.recipe.promotion)
    if not space.first_rank:
        _distil_as_planned(space, space.ranks.broadcast(_PLAN))
        return Retrained(Staleness(None, ()))
    timeout = space.recipe.retrain.lock_timeout_seconds
    with (
        storage.lock(space.root / ".retrain.lock", timeout, "another retraining"),
        recorded(space.tracking, f"{space.recipe.name}: retrain"),
    ):
        check_promotion(space, "a retraining")
        with space.alone():
            # 1) Judge the champion.
            alone = space.for_one_rank()
            found = judge(alone)
            say_causes(found)
            _write_staleness(space, found.record())
            # 2) Nothing is due: only catch up with an operator's command that failed before.
            if not found.stale:
                follow_champion(space)
                space.ranks.broadcast(_PLAN, {})
                return Retrained(found)
            # 3) Plan, and tell the other ranks.
            work = plan(alone, found)
            work.space.ranks = space.ranks
        space.ranks.broadcast(_PLAN, _record(work))
        # 4) Distil, gate and promote; the note for monitoring follows whatever is champion then.
        try:
            return Retrained(found, _distil_and_repair(work, found))
        finally:
            _write_fresh_champion(space)


def _record(work: RetrainPlan) -> dict[str, Any]:
    """JSON-able form of a plan, with what other ranks need for the same distillation."""
    return {
        "mix": [str(work.mix.folder), work.mix.fingerprint],
        "target": work.space.target_settings.model_dump(mode="json"),  # what an alias or a branch names now
        "drafts": {name: draft.model_dump(mode="json") for name, draft in work.space.recipe.drafts.items()},
    }


def _distil_as_planned(space: Workspace, record: dict[str, Any]) -> None:
    """Part of a rank other than the first: the distillation of the first rank's plan, or nothing (empty `record`)."""
    if not record:
        return
    target, recipe = TargetSettings.model_validate(record["target"]), space.recipe
    drafts = {name: type(recipe.drafts[name]).model_validate(draft) for name, draft in record["drafts"].items()}
    folder, fingerprint = record["mix"]
    same = Workspace(recipe.model_copy(update={"target": target, "drafts": drafts}))
    distill(same, made_mix=Stage(Path(folder), fingerprint))


def _write_fresh_champion(space: Workspace) -> None:
    """Write that the champion is fresh, where it is another one than the last check judged.

    So that monitoring knows of a promotion even where something after it failed.
    """
    now = None
    # A store that is down neither hides nor delays another error.
    with suppress(TrackingError), quick_requests(space.recipe.registry.connect_seconds):
        now = champion(space.tracking, space.target_fingerprint)
    if now is not None and storage.read_object(space.root / STALENESS_FILE).get("champion") != now.reference:
        _write_staleness(space, {"champion": now.reference, "stale": False, "causes": []})


def _write_staleness(space: Workspace, record: dict[str, Any]) -> None:
    """Write `staleness.json`, which monitoring reads."""
    storage.write_json(space.root / STALENESS_FILE, {"checked_at": time.time(), **record})


def _distil_and_repair(work: RetrainPlan, found: Staleness) -> Outcome | None:
    """Distil; damaged answers on disk are dropped and captured again, once.

    With several ranks the damage is dropped too, but the error is raised: the next start captures again.
    """
    try:
        return distill(work.space, work.start, work.mix, found.record())
    except CorruptDataError as error:
        # Trainings that began on damaged answers go with them.
        stages = Stages(work.space, work.mix)
        with work.space.alone():
            damaged = drop_damaged(stages.capture.folder)
            for name in work.space.drafts if damaged else ():  # begun on answers that are no longer there
                shutil.rmtree(stages.training(name).folder, ignore_errors=True)
        if not damaged or work.space.ranks.world_size > 1:
            raise
        say(f"{error}; answering again: {', '.join(damaged)}")
    return distill(work.space, work.start, work.mix, found.record())


def say_causes(found: Staleness) -> None:
    """Say every examined cause, a line each, and whether the champion is up to date."""
    for cause in found.causes:
        say(cause.text)
    if not found.stale:
        say("up to date: this target has its champion")


def plan(space: Workspace, found: Staleness) -> RetrainPlan:
    """Plan a retraining: its mix, with a share of old conversations, and drafts that start warm where they can."""
    # 1) The mix; the old conversations of the champion's mix guard against forgetting.
    stale, stages = found.champion, Stages(space)
    if stale is None:
        check_stages(stages)
    with in_stage("mix"):
        mix = mix_stage(stages)
        if stale is None:
            return RetrainPlan(space, mix, None)
        mix = blended_mix(stages, stale.lineage.mix_fingerprint)
    # 2) The start of the drafts. Lost files of the champion make it cold.
    with in_stage("start"):
        if found.lost:
            say(f"cold start, not from {found.lost}")
        warm = _warm_start(space, stale) if space.recipe.retrain.warm_start and not found.lost else None
    if warm is None:
        return RetrainPlan(space, mix, None)
    return RetrainPlan(space.with_recipe(_initialised_from(space.recipe, warm)), mix, warm)


def _warm_start(space: Workspace, stale: Version) -> Start | None:
    """Start of the drafts of the champion's family from its weights; None, and a line that says why, where none can."""
    # 1) Which drafts of the recipe have its family, and of these, which have another shape?
    folder = resolve_models_uri(space.tracking, stale.uri, space.root / "models")
    meta = read_meta(folder)
    draft = load_draft(folder, space.target.device, space.target.dtype).draft
    drafts = {name: settings for name, settings in space.recipe.drafts.items() if settings.draft_family == meta.family}
    unfit = {
        name: why
        for name, settings in drafts.items()
        if (why := family_of(settings).incompatibility(settings, draft, stale.reference))
    }
    # 2) Does anything keep all of them from starting there?
    why = _obstacle(space, draft, meta)
    if why is None and len(unfit) == len(drafts):
        why = next(f"drafts.{name}.{field}" for name, field in unfit.items())
    if why is not None:
        say(f"cold start, not from {stale.reference}: {why}")
        return None
    # 3) The others start from it.
    for name, field in unfit.items():
        say(f"drafts.{name} starts cold: drafts.{name}.{field}")
    return Start(stale, folder, tuple(name for name in drafts if name not in unfit))


def _obstacle(space: Workspace, draft: DraftModule, meta: DraftMeta) -> str | None:
    """Reason why no draft of the recipe can start from this draft, whatever shape they have; None: there is none."""
    if not any(draft.draft_family == meta.family for draft in space.recipe.drafts.values()):
        return f"the recipe trains no draft of its family, {meta.family}"
    if meta.tokenizer_digest != space.target.tokenizer_digest:
        return "the new target has another tokenizer"
    try:
        draft.check_fits(space.target, "the draft")
    except InputError as error:
        return str(error)
    return None


def _initialised_from(recipe: Recipe, start: Start) -> Recipe:
    """Recipe whose drafts start from the champion where they can, with the steps of a retraining."""
    drafts = {}
    for name, draft in recipe.drafts.items():
        # Fewer steps than the recipe's own: warm-up and scoring must fit into them. Validated again as one.
        steps = recipe.retrain.steps or draft.steps
        change = {"steps": steps, "warmup_steps": min(draft.warmup_steps, steps), "init_from": start.folder}
        change["score_every"] = min(draft.score_every, steps)
        drafts[name] = draft if name not in start.drafts else type(draft).model_validate(draft.model_dump() | change)
    return recipe.model_copy(update={"drafts": drafts})


def dry_run(recipe: Recipe) -> Staleness:
    """Dry run: judge, and say what `retrain` would do. Changes nothing in the work folder or in MLflow."""
    recipe = pin_revision(recipe)
    with scratch_workspace(recipe) as space:
        require_whole(space.recipe, "a retraining")
        found = judge(space)
        say_causes(found)
        if not found.stale:
            say("would do nothing")
            return found
        for line in _planned_steps(recipe, plan(space, found), found):
            say(line)
    return found


@contextmanager
def scratch_workspace(recipe: Recipe) -> Iterator[Workspace]:
    """A temporary work folder that looks like the recipe's own, for a dry run.

    Notes are copied; finished mixes, probes, and targets that came from the registry are linked. Raises
    CorruptDataError for a note that is too large to be read.
    """
    real = recipe.workdir.resolve()
    with tempfile.TemporaryDirectory(prefix="draftforge-rehearsal-") as folder:
        root = Path(folder) / real.name
        root.mkdir()
        # 1) Notes are copied, as they will be written; large finished stages are linked.
        for path in real.iterdir() if real.is_dir() else ():
            if path.is_file() and path.suffix == ".json":
                if (size := path.stat().st_size) > storage.MOST_JSON_BYTES:
                    most = storage.size_text(storage.MOST_JSON_BYTES)
                    raise CorruptDataError(f"{path}: has {storage.size_text(size)}; notes of up to {most} are read")
                shutil.copy2(path, root / path.name)
            elif path.name.startswith("mix-") or (path / CAPTURE_MANIFEST).is_file():
                (root / path.name).symlink_to(path)
        # 2) The real registry, which is only read, under a workspace in the temporary folder.
        registry = recipe.registry.model_copy(update={"tracking_uri": _store_or_empty(recipe, real, root)})
        space = Workspace(recipe.model_copy(update={"workdir": root, "registry": registry}))
        (root / "models").mkdir()
        for path in (real / "models").glob("[!.]*"):
            if not meta_file(path).is_file():  # drafts are fetched anew: what the registry itself holds counts
                (root / "models" / path.name).symlink_to(path)
        yield space


def _store_or_empty(recipe: Recipe, real: Path, root: Path) -> str:
    """URI of the recipe's MLflow store; of an empty one in `root` where it does not exist, as opening would make it."""
    uri = resolve_uri(recipe.registry, real)
    # A database is a file; on a server, the experiment is what opening would make.
    if uri.startswith("sqlite"):
        exists = Path(str(make_url(uri).database)).is_file()
    else:
        with mlflow_errors(uri), quick_requests(recipe.registry.connect_seconds):
            client = MlflowClient(tracking_uri=uri, registry_uri=uri)
            exists = client.get_experiment_by_name(recipe.registry.experiment) is not None
    return uri if exists else f"sqlite:///{root / 'none.db'}"


def _planned_steps(recipe: Recipe, work: RetrainPlan, found: Staleness) -> list[str]:
    """Lines of a dry run: each stage that would be run, in order, and whether its result is on disk already."""
    space, real = work.space, recipe.workdir.resolve()

    def state(folder: Path, done: bool) -> str:
        return f"done ({folder.name})" if done else f"to do ({folder.name})"

    # Addresses come from the plan; whether they are done is looked up in the real folder.
    stages = Stages(space, work.mix)
    mix, answers = real / stages.mix.folder.name, real / stages.capture.folder.name
    lines = [f"would make mix: {state(mix, mix.is_dir())}"]
    lines.append(f"would capture: {state(answers, (answers / CAPTURE_MANIFEST).is_file())}")
    for name, settings in space.drafts.items():
        folder = real / stages.training(name).folder.name
        warm = work.start is not None and name in work.start.drafts
        start = f"warm, from {work.start.version.reference}" if work.start is not None and warm else "cold"
        lines.append(
            f"would train {name}: {settings.steps} steps, {start}: {state(folder, is_finished(folder, settings.steps))}"
        )
    # The gate compares only with a champion of the same target.
    rival, against = found.champion, "with no champion to compare with"
    if rival is not None and rival.lineage.target_fingerprint == space.target_fingerprint:
        against = f"against champion {rival.reference}"
    if work.start is not None:
        lines.append(f"would score {work.start.version.reference} as it is beside them, as step 0")
    return [*lines, f"would score, register, and meet the gate {against}"]
