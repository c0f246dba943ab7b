"""What a retraining would do, and why, in a copy of the work folder that is thrown away: `retrain --dry-run`."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlflow.tracking import MlflowClient
from sqlalchemy.engine import make_url

from ..data.store import MANIFEST as CAPTURE_MANIFEST
from ..progress import say
from ..recipe import Recipe
from ..registry.connect import mlflow_errors, quick_requests, resolve_uri
from ..specdec.formats import meta_file
from ..train.checkpoints import is_finished
from .judging import judge
from .retrain import Plan, plan, tell
from .stages import capture_place, trained
from .staleness import Staleness
from .workspace import Workspace, require_whole


def rehearse(recipe: Recipe) -> Staleness:
    """Judge, and say what `retrain` would do. Changes nothing in the work folder or in MLflow."""
    with rehearsing(recipe) as space:
        require_whole(space.recipe, "a retraining")
        found = judge(space)
        tell(found)
        if not found.stale:
            say("would do nothing")
            return found
        for line in _steps(recipe, plan(space, found), found):
            say(line)
    return found


@contextmanager
def rehearsing(recipe: Recipe) -> Iterator[Workspace]:
    """The recipe's work folder as it looks, in a temporary one: notes are copied; finished mixes, probes, and targets
    that came from the registry, are linked."""
    real = recipe.workdir.resolve()
    with tempfile.TemporaryDirectory(prefix="draftforge-rehearsal-") as folder:
        root = Path(folder) / real.name
        root.mkdir()
        for path in real.iterdir() if real.is_dir() else ():
            if path.is_file() and path.suffix == ".json":
                shutil.copy2(path, root / path.name)
            elif path.name.startswith("mix-") or (path / CAPTURE_MANIFEST).is_file():
                (root / path.name).symlink_to(path)
        registry = recipe.registry.model_copy(update={"tracking_uri": _store(recipe, real, root)})
        space = Workspace(recipe.model_copy(update={"workdir": root, "registry": registry}))
        (root / "models").mkdir()
        for path in (real / "models").glob("[!.]*"):
            if not meta_file(path).is_file():  # drafts are fetched anew: what the registry itself holds counts
                (root / "models" / path.name).symlink_to(path)
        yield space


def _store(recipe: Recipe, real: Path, root: Path) -> str:
    """The recipe's store; where that is none yet, or has nothing of ours, an empty one in `root`: opening makes it."""
    uri = resolve_uri(recipe.registry, real)
    if uri.startswith("sqlite"):
        there = Path(str(make_url(uri).database)).is_file()
    else:
        with mlflow_errors(uri), quick_requests(recipe.registry.connect_seconds):
            client = MlflowClient(tracking_uri=uri, registry_uri=uri)
            there = client.get_experiment_by_name(recipe.registry.experiment) is not None
    return uri if there else f"sqlite:///{root / 'none.db'}"


def _steps(recipe: Recipe, work: Plan, found: Staleness) -> list[str]:
    """What would be run, in order; what is on disk already is said to be done."""
    space, real = work.space, recipe.workdir.resolve()

    def state(folder: Path, done: bool) -> str:
        return f"done ({folder.name})" if done else f"to do ({folder.name})"

    captured = capture_place(space, work.mix)
    mix, answers = real / work.mix.folder.name, real / captured.folder.name
    lines = [f"would make mix: {state(mix, mix.is_dir())}"]
    lines.append(f"would capture: {state(answers, (answers / CAPTURE_MANIFEST).is_file())}")
    for name, settings in space.drafts.items():
        folder = real / trained(space, name, captured).folder.name
        start = "cold" if settings.init_from is None or work.parent is None else f"warm, from {work.parent}"
        lines.append(
            f"would train {name}: {settings.steps} steps, {start}: {state(folder, is_finished(folder, settings.steps))}"
        )
    rival = found.champion
    mine = rival is not None and rival.lineage.target_fingerprint == space.target_fingerprint
    against = (
        f"against champion {rival.reference}" if rival is not None and mine else "with no champion to compare with"
    )
    return [*lines, f"would score, register, and meet the gate {against}"]
