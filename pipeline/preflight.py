"""What would fail only at the end, after hours, found out before any work."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from ..data.capture.capture import check_spread
from ..data.capture.manifest import is_captured
from ..errors import DraftforgeError, InputError, MissingFileError
from ..eval.cost_measurement import Grid, most_context
from ..eval.serving_load import LoadTimes
from ..recipe import Recipe
from ..specdec.formats.checkpoint import OWN_TARGET
from ..specdec.loading import refused
from ..specdec.proposers.trees import MeasuredTree
from ..specdec.requests import TargetSettings
from ..specdec.targets import locate
from ..storage import read_object
from ..train.families import family_of
from .stages import capture_place, mix_place
from .workspace import Workspace

_LONGEST = "max_position_embeddings"


def check_scoring(space: Workspace, names: Collection[str], trees: bool = True) -> None:
    """Refuse what keeps these drafts of the recipe from being scored. `trees`: whether its trees are scored too."""
    check_targets(space.recipe, names)
    check_load(space, trees)


def check_spread_target(space: Workspace) -> None:
    """Refuse a target that is to be spread over ranks where it cannot be, or where nothing could answer for it, unless
    its answers are there already."""
    recipe = space.recipe
    if not recipe.target.shard:
        return
    found = capture_place(space, mix_place(space)).folder
    if not is_captured(found, recipe.capture.budget):
        check_spread(recipe.capture)
        _ = space.target  # the stages would load it next


def check_targets(recipe: Recipe, names: Collection[str]) -> None:
    """Refuse drafts whose training changes the target: their verifier, its answers and its registered model are not
    this recipe's."""
    for name, settings in recipe.drafts.items():
        if name in names and family_of(settings).changes_target(settings):
            raise InputError(
                f"drafts.{name}: its training makes a new target, which this recipe neither scores nor registers; "
                f"`draftforge train` it, then distill a recipe with target.model=<checkpoint>/{OWN_TARGET}, "
                f"drafts.{name}.init_from=<checkpoint> and no backbone"
            )


def check_load(space: Workspace, trees: bool = True) -> None:
    """Raise an error that names score.load or score.costs.fit where the load does not fit the target's context or the
    given times, or these cannot be read."""
    score = space.recipe.score
    if score.load is None or not space.first_rank:
        return
    if score.costs.fit is not None:
        _check_given(space)
        return
    try:
        longest = context_of(space.target_settings)
    except MissingFileError:  # the stages say what they cannot do without it
        return
    if longest is not None:
        # What a measured tree will be is not known yet.
        shapes = [one for one in score.trees.values() if not isinstance(one, MeasuredTree)] if trees else []
        deepest = max([*score.draft_tokens, *(one.levels for one in shapes)])
        Grid.of(score.load, most_context(longest, deepest, score.costs.rounds))


def _check_given(space: Workspace) -> None:
    """Raise InputError where no shape's times hold at the load."""
    load, failed = space.recipe.score.load, list[InputError]()
    assert load is not None
    for fit in space.given_times:
        try:
            LoadTimes(fit, load)
        except InputError as error:
            failed.append(error)
    if len(failed) == len(space.given_times):
        raise failed[0]


def context_of(settings: TargetSettings) -> int | None:
    """The longest sequence that a target takes, by its config alone; None: nothing says. A hub id is downloaded."""
    source = locate(settings)
    told = {} if source.gguf_file is not None else read_object(source.folder / "config.json")
    inner = told.get("text_config")
    longest = (inner if isinstance(inner, dict) else told).get(_LONGEST)
    if longest is None:  # a file of GGUF, or the architecture's default
        options: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code, "gguf_file": source.gguf_file}
        with refused(f"target.model: {settings.model}"):
            config = AutoConfig.from_pretrained(source.folder, **options).get_text_config()
        longest = getattr(config, _LONGEST, None)
    return min((one for one in (longest, settings.context) if isinstance(one, int)), default=None)


def known_context(settings: TargetSettings) -> int | None:
    """The same of a target that lies here, where its config can be read."""
    if not Path(settings.model).expanduser().exists():
        return None
    try:
        return context_of(settings)
    except DraftforgeError:
        return None
