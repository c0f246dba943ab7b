"""The registry of verbs that need no recipe, or only its `registry` section. Looking at one never makes one."""

import os
from pathlib import Path

from pydantic import ValidationError

from ..errors import InputError, MissingFileError
from ..recipe import Recipe
from ..registry.connect import DATABASE_NAME, Tracking, open_tracking
from ..registry.settings import RegistrySettings


def open_store(model: str | None, tracking_uri: str | None, workdir: Path | None) -> Tracking:
    """The store at `tracking_uri`, else the environment's, else the one in a work folder (None: `runs`).

    Raises InputError for an unfit `model` (first part of registered names), MissingFileError where there is none.
    """
    try:
        named = {} if model is None else {"model": model}
        settings = RegistrySettings.model_validate({"tracking_uri": tracking_uri, **named})
    except ValidationError as error:
        raise InputError(f"--model {model}: {error.errors()[0]['msg']}") from None
    home = workdir or Path("runs")
    return _open(settings, home, f"--workdir {home}")


def store_of(recipe: Recipe) -> Tracking:
    """The recipe's store."""
    return _open(recipe.registry, recipe.workdir, f"workdir {recipe.workdir}")


def is_there(settings: RegistrySettings, home: Path) -> bool:
    """Whether a store is named, or the default one was made in the work folder `home`."""
    named = settings.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    return bool(named) or (home / DATABASE_NAME).is_file()


def _open(settings: RegistrySettings, workdir: Path, where: str) -> Tracking:
    home = workdir.resolve()
    if not is_there(settings, home):
        raise MissingFileError(f"{where}: holds no {DATABASE_NAME}; name the recipe's work folder or a store")
    return open_tracking(settings, home)
