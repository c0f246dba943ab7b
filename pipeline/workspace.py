"""Work folder of one recipe: who owns it, where each stage's folder lies, and what is loaded once and shared.

owner.json            the recipe that this folder belongs to
digests.json          remembered hashes of large files
targets.json          fingerprints that the recipe's targets had
ancestors.json        by target: mixes of the champions that its drafts started from
mix-<12 hex>/  capture-<12 hex>/  train-<draft>-<12 hex>/  score-<12 hex>/   one folder a fingerprint
probe-<12 hex>/       answers that the last look at the champion took
skip-<12 hex>/        what sets of skipped layers were worth on some answers; skip-layers*.json: the best ones
bench-<12 hex>/       a benchmark on prompts of one's own
exports/              drafts as they are registered
staleness.json        the last look at the champion
estimates.json        what the last of each long stage took, for the estimates of the next ones
costs/                measured times, shared by all checkpoints of a shape
models/               what came from the registry
hooks/                what the operator's command was told after promotions and rollbacks
mlflow.db, mlflow-artifacts/   the registry, unless the recipe or the environment names a server
tensorboard/, wandb/  figures for the trackers of registry.log_with
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from .. import fingerprint, storage
from ..distributed import ALONE, ranks
from ..errors import CorruptDataError, InputError, LockedError, MissingFileError, OwnershipError, named
from ..eval.cost_table import CostTable, read_tables
from ..progress import say
from ..recipe import Recipe
from ..registry.connect import Tracking, open_tracking, quick_requests
from ..registry.store_address import store_exists
from ..registry.tracking import TrackedRun, start_run
from ..registry.versions import is_models_uri, resolve_models_uri
from ..specdec.target_settings import TargetSettings
from ..specdec.targets import Target, prompts_in_doubt, target_files, target_fingerprint
from ..train.checkpoints import flatten
from ..train.settings import Settings

OWNER_FILE, TARGETS_FILE, ANCESTORS_FILE = "owner.json", "targets.json", "ancestors.json"
HALF_WRITTEN = (
    ".mix-*",
    "probe-*/.*",
    "probe-*/shards/.*",
    "train-*/.*",
    "train-*/checkpoints/.*",
    "score-*/.*",
    "score-*/parts/.*",
    "exports/.*",
    ".skip-*",
    "skip-*/.*",
)
"""Globs of the half-written files that a killed run may leave; only runs that hold the lock of `alone` write there."""
STAGE_TAG = "draftforge.failed_stage"
_STAGE, _RECORDED = "in stage: ", "recorded in MLflow"
_PATIENCE_SECONDS = 5


@contextmanager
def in_stage(stage: str) -> Iterator[None]:
    """Add a note with the stage's name to an error that leaves the body; the innermost stage wins."""
    try:
        yield
    except BaseException as error:
        if not stage_of(error):
            error.add_note(_STAGE + stage)
        raise


def stage_of(error: BaseException) -> str:
    """Stage that `in_stage` noted on an error; empty: none."""
    notes: list[str] = getattr(error, "__notes__", [])
    return next((note.removeprefix(_STAGE) for note in notes if note.startswith(_STAGE)), "")


@contextmanager
def tag_failed_stage(run: TrackedRun) -> Iterator[None]:
    """Tag an open MLflow run with the stage of an error that leaves the body and is about to end the run as FAILED."""
    # A resumed run still has the tag of the attempt that failed.
    if run.resumed:
        run.set_tags({STAGE_TAG: ""})
    try:
        yield
    except BaseException as error:
        # A store that is down must neither delay nor hide the error.
        with suppress(Exception), quick_requests(_PATIENCE_SECONDS):
            run.set_tags({STAGE_TAG: stage_of(error)})
            error.add_note(_RECORDED)
        raise


@contextmanager
def recorded(tracking: Tracking, name: str) -> Iterator[None]:
    """Leave a FAILED run of this name, with reason and stage, for an error that no run has recorded.

    A lock that somebody else holds is no failure. A store that does not answer records nothing, and hides no error.
    """
    try:
        yield
    except LockedError:
        raise
    except BaseException as error:
        # The error is raised once more inside a run of its own, which ends that run as FAILED with the reason.
        if _RECORDED not in getattr(error, "__notes__", []):
            with (
                suppress(BaseException),
                quick_requests(_PATIENCE_SECONDS),
                start_run(tracking, name) as run,
                tag_failed_stage(run),
            ):
                raise error
        raise


def require_whole(recipe: Recipe, what: str) -> None:
    """Raise InputError where the target is sharded over ranks (`target.shard`): only a training can run it then."""
    if recipe.target.shard:
        raise InputError(
            f"target.shard = true: {what} needs the target whole, which only trains drafts this way; score the draft "
            "without shard on a machine that holds the target, or serve it and count (docs/large-targets.md)"
        )


def open_workspace(recipe: Recipe, **options: str | None) -> "Workspace":
    """Open the recipe's work folder once every rank of this launch is seen to have the same recipe and options."""
    check_same_recipe(recipe, **options)
    return Workspace(recipe)


def check_same_recipe(recipe: Recipe, **options: str | None) -> None:
    """Raise InputError where a rank of this launch has another recipe, or another value of an option, than the first.

    Paths and addresses may differ between machines, and are left out: fingerprints compare the content.
    """
    # Paths are dropped by their type; these fields are text that may name a place on one machine.
    own = {"target.model", "target.adapter", "capture.backend.url", "registry.tracking_uri"}
    fields = flatten(_without_paths(recipe.model_dump()))
    shared = {name: value for name, value in fields.items() if name not in own}
    ranks().check_same_config(shared | {f"--{name}": value for name, value in options.items()})


def _without_paths(value: Any) -> Any:
    """Dumped recipe, or a part of it, with None for each path and any other value that is not plain JSON."""
    if isinstance(value, dict):
        return {key: _without_paths(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_paths(inner) for inner in value]
    return value if value is None or isinstance(value, bool | int | float | str) else None


class Workspace:
    """Work folder of one recipe. Opening it claims it for the recipe; registry and target are opened at first use."""

    def __init__(self, recipe: Recipe, read_only: bool = False) -> None:
        """`read_only`: only look at what is there; neither a work folder nor a registry is made.

        Raises OwnershipError where the folder is a file, another recipe's, or was not made by draftforge.
        """
        self.recipe = recipe
        self.root = recipe.workdir.resolve()
        self.ranks = ranks()
        self._read_only = read_only
        self._empty: tempfile.TemporaryDirectory[str] | None = None
        self._claim()

    def _claim(self) -> None:
        """Claim the folder by writing `owner.json`; a folder with other content is never taken over."""
        owner = self.root / OWNER_FILE
        if not self.first_rank:  # the first one claims
            return
        if self.root.exists() and not self.root.is_dir():
            raise OwnershipError(f"workdir {self.root}: is a file, must be a folder or not exist")
        # Claimed already, by this recipe or by another one; else it must be empty, hidden files aside.
        if owner.is_file():
            name = storage.read_object(owner).get("recipe")
            if name != self.recipe.name:
                raise OwnershipError(f"workdir {self.root}: belongs to recipe {name!r}, not {self.recipe.name!r}")
        elif self.root.is_dir() and any(not path.name.startswith(".") for path in self.root.iterdir()):
            raise OwnershipError(f"workdir {self.root}: is not empty and was not made by draftforge")
        elif not self._read_only:
            # It is closed while it is still empty.
            self.root.mkdir(parents=True, exist_ok=True)
            self._restrict()
            storage.write_json(owner, {"recipe": self.recipe.name})

    def _restrict(self) -> None:
        """Let nobody but those of `workdir_access` into the folder; says what stays as it is."""
        left = storage.restrict(self.root, self.recipe.workdir_access)
        if left:
            say(f"{left[0]}: its mode cannot be changed ({len(left)} such); workdir_access = umask leaves modes alone")

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the folder against every other run of stages, and clear what a killed one left half-written.

        Raises LockedError where another process holds it. Ranks other than the first rely on the first one's lock.
        """
        if not self.first_rank:
            yield
            return
        with storage.lock(self.root / ".distill.lock", what=f"another run of recipe {self.recipe.name}"):
            # Only names that `storage` gives to its temporary files: other hidden files are somebody's own.
            for place in HALF_WRITTEN:
                for path in self.root.glob(place):
                    storage.clear_leftover(path)
            # Libraries write files with modes of their own, and so did a run that was killed.
            self._restrict()
            try:
                yield
            finally:
                self._restrict()

    @property
    def first_rank(self) -> bool:
        """Whether this process writes files and talks to people."""
        return self.ranks.first

    def folder(self, stage: str, stage_fingerprint: str) -> Path:
        """Folder of the stage with this fingerprint, whether it exists or not."""
        return self.root / f"{stage}-{fingerprint.short(stage_fingerprint)}"

    @property
    def ancestors(self) -> list[str]:
        """Fingerprints of the ancestors' mixes that `inherit` noted for this target."""
        noted = self._noted_ancestors()
        return noted.get(self.target_fingerprint, []) if noted else []  # most recipes never need the target for this

    def inherit(self, mix_fingerprint: str) -> None:
        """Note a mix as ancestor: no later mix for this target holds out what it placed in train or selection."""
        noted = sorted({*self.ancestors, mix_fingerprint})
        storage.write_json(self.root / ANCESTORS_FILE, {**self._noted_ancestors(), self.target_fingerprint: noted})

    def _noted_ancestors(self) -> dict[str, list[str]]:
        """Content of `ancestors.json`: fingerprints of mixes by target. Raises CorruptDataError."""
        path = self.root / ANCESTORS_FILE
        known: dict[str, list[str]] = storage.read_object(path) if path.is_file() else {}
        # A damaged note must not silently shrink what a holdout keeps out.
        for target, mixes in known.items():
            if not isinstance(mixes, list) or not all(map(fingerprint.is_fingerprint, mixes)):
                raise CorruptDataError(f"{path}: {target}: must be a list of fingerprints, 64 hex digits each")
        return known

    def _known_targets(self) -> dict[str, str]:
        """Content of `targets.json`: the fingerprint by digest of the target's settings. Raises CorruptDataError."""
        path = self.root / TARGETS_FILE
        known: dict[str, str] = storage.read_object(path) if path.is_file() else {}
        for settings, found in known.items():
            if not fingerprint.is_fingerprint(found):
                raise CorruptDataError(f"{path}: {settings}: must be a fingerprint, 64 hex digits; delete the file")
        return known

    @cached_property
    def digests(self) -> fingerprint.FileDigests:
        """Cache of file digests, kept in the folder unless that would have to be made."""
        return fingerprint.FileDigests(self.root / "digests.json" if self._keeps_notes else None)

    @property
    def _keeps_notes(self) -> bool:
        """Whether notes may be written: a read-only look does not make the folder for them."""
        return not self._read_only or self.root.is_dir()

    @cached_property
    def tracking(self) -> Tracking:
        """MLflow store, opened at the first use; an empty temporary one for a read-only look where there is none.

        Raises TrackingError, in one line, when it does not answer.
        """
        # MLflow creates a store when it opens one: a read-only look must not do that in the work folder.
        if self._read_only and not store_exists(self.recipe.registry, self.root):
            self._empty = tempfile.TemporaryDirectory(prefix="draftforge-nothing-")
            return open_tracking(self.recipe.registry, Path(self._empty.name))
        return open_tracking(self.recipe.registry, self.root)

    def reopened(self) -> "Workspace":
        """Workspace for the next read-only look: a new one where a registry has appeared since this one was opened."""
        appeared = self._empty is not None and store_exists(self.recipe.registry, self.root)
        return Workspace(self.recipe, read_only=True) if appeared else self

    @cached_property
    def target_settings(self) -> TargetSettings:
        """Settings of the recipe's target, with a `models:/` address resolved to a local folder, and absolute paths."""
        settings = self.recipe.target
        if not is_models_uri(settings.model):
            return settings.absolute()
        # Resolved once: an alias that moves during the run must not change the target under it.
        local = resolve_models_uri(self.tracking, settings.model, self.root / "models")
        return settings.model_copy(update={"model": str(local)}).absolute()

    @cached_property
    def given_times(self) -> list[CostTable]:
        """Cost tables of the file `score.costs.fit`. Raises an error that names the field."""
        path = self.recipe.score.costs.fit
        assert path is not None
        with named("score.costs.fit"):
            return read_tables(path)

    @cached_property
    def drafts(self) -> dict[str, Settings]:
        """Settings of the recipe's drafts, with `models:/` addresses of `init_from` resolved to local folders."""
        return {name: self._local_start(settings) for name, settings in self.recipe.drafts.items()}

    def _local_start(self, settings: Settings) -> Settings:
        if settings.init_from is None or not is_models_uri(str(settings.init_from)):
            return settings
        local = resolve_models_uri(self.tracking, str(settings.init_from), self.root / "models")
        return settings.model_copy(update={"init_from": local})

    @cached_property
    def target_fingerprint(self) -> str:
        """Fingerprint of the target; for a target that is gone, the one noted here (`small` drafts train without it).

        Raises MissingFileError where the target is gone and none was noted.
        """
        known = self._known_targets()
        # Sharding changes how the target runs, not what it is.
        key = fingerprint.of_json(self.recipe.target.model_dump(mode="json", exclude={"shard"}))
        try:
            found = target_fingerprint(self.target_settings, self.digests)
        except MissingFileError:
            if key not in known:
                raise
            say(f"target {self.recipe.target.model}: is gone; going on with what it left here")
            return known[key]
        # Noted, so that work without the target can go on when it is gone.
        if self.first_rank and self._keeps_notes and known.get(key) != found:
            storage.write_json(self.root / TARGETS_FILE, {**known, key: found})
        return found

    @property
    def target_name(self) -> str:
        """Name of the target, for people: the last part of the recipe's path or address."""
        return Path(self.recipe.target.model).name

    @cached_property
    def target_files(self) -> dict[str, str]:
        """Digests of the files that make up the target, by name; empty: the target is gone."""
        try:
            return target_files(self.target_settings, self.digests)
        except MissingFileError:
            return {}

    @cached_property
    def asks_proven_alone(self) -> bool:
        """Whether a capture leaves out prompts that are in doubt as vLLM makes the target's by code of its own.

        Nothing tells so of a target that is gone.
        """
        try:
            return not self.recipe.capture.ask_unproven and prompts_in_doubt(self.target_settings) is not None
        except MissingFileError:
            return False

    @cached_property
    def target(self) -> Target:
        """Target model, loaded at the first use, then shared by every stage of this process."""
        return Target.load(self.target_settings, self.digests)

    def for_one_rank(self) -> "Workspace":
        """Workspace with the same folder, target and registry, for work that no other rank takes part in."""
        other = self.with_recipe(self.recipe)
        other.ranks = ALONE
        return other

    def with_recipe(self, recipe: Recipe) -> "Workspace":
        """Workspace with the same folder, target and registry under a changed recipe of the same target."""
        other = Workspace(recipe)
        # Cached properties live in `__dict__`: whatever follows from the recipe alone is left to the new one.
        own = ("recipe", "root", "drafts", "given_times")
        other.__dict__ |= {name: value for name, value in self.__dict__.items() if name not in own}
        return other
