"""Whose a training folder is: the settings and inputs that decide its content, written down before anything else."""

from pathlib import Path
from typing import Any

from .. import fingerprint
from ..data.store import Capture
from ..errors import OwnershipError
from ..storage import read_object, write_json
from .settings import Settings

OWNER_FILE = "train.json"


def claim(folder: Path, settings: Settings, seed: int, capture: Capture) -> None:
    """Mark the folder as this run's. Raises OwnershipError if it is another's."""
    start = None if settings.init_from is None else draft_digest(settings.init_from)
    ours = {
        "draft": settings.identity(),
        "seed": seed,
        "capture": capture.digest,
        "init_from": start,
    }
    if not (folder / OWNER_FILE).is_file():
        if folder.is_dir() and any(folder.iterdir()):
            raise OwnershipError(f"{folder}: is not empty and was not made by training; choose another folder")
        write_json(folder / OWNER_FILE, ours)
        return
    theirs = flatten(read_object(folder / OWNER_FILE))
    for name, value in flatten(ours).items():
        if theirs.get(name) != value:
            raise OwnershipError(f"{folder}: belongs to another run, whose {name} is {theirs.get(name)}, not {value}")


def draft_digest(folder: Path) -> str:
    """Content of a draft folder."""
    return fingerprint.of_files(folder, [path.name for path in folder.iterdir() if path.is_file()])


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, keys joined by dots."""
    if not isinstance(value, dict):
        return {prefix: value}
    parts = [flatten(inner, f"{prefix}.{key}" if prefix else key) for key, inner in value.items()]
    return {name: inner for part in parts for name, inner in part.items()}
