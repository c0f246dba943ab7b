"""Address of the MLflow store, and whether there is one. MLflow itself is not imported: that takes seconds."""

import os
import re
import urllib.parse
from pathlib import Path

from ..errors import InputError, TrackingError
from ..masking import masked
from .settings import RegistrySettings

DATABASE_NAME = "mlflow.db"


def resolve_uri(settings: RegistrySettings, home: Path) -> str:
    """Address of the store: the recipe's, else MLFLOW_TRACKING_URI, else a SQLite file in `home`.

    Paths of SQLite files become absolute. Raises InputError for what is no address, TrackingError for a plain
    folder, which MLflow would accept.
    """
    uri = settings.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or ""
    if not uri:
        return _sqlite_uri(home / DATABASE_NAME)
    try:
        scheme = urllib.parse.urlsplit(uri).scheme
    except ValueError as error:
        raise InputError(f"registry.tracking_uri: {masked(uri)}: is no address ({error})") from None
    if scheme in ("", "file"):
        raise TrackingError(
            f"registry.tracking_uri: {masked(uri)}: must be a server (http…) or a database (sqlite:///FILE)"
        )
    database = sqlite_file(uri)
    return uri if database is None else _sqlite_uri(database)


def store_exists(settings: RegistrySettings, home: Path) -> bool:
    """Whether a store is named by settings or environment, or the default one exists in the work folder `home`."""
    named = settings.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    return bool(named) or (home / DATABASE_NAME).is_file()


def sqlite_file(uri: str) -> Path | None:
    """File of a SQLite store; None: the store is another database, or a server."""
    from sqlalchemy.engine import make_url

    if urllib.parse.urlsplit(uri).scheme.split("+")[0] != "sqlite":
        return None
    database = make_url(uri).database
    if not database or database == ":memory:":
        raise TrackingError(f"registry.tracking_uri: {masked(uri)}: must name a file, for example sqlite:///mlflow.db")
    return Path(database).absolute()


def _sqlite_uri(database: Path) -> str:
    path = str(database.absolute())
    if re.search(r"[%?#]", path):
        raise InputError(f"{path}: the path of MLflow's SQLite file may not contain %, ? or #")
    return f"sqlite:///{path}"
