"""Skipped layers as a draft on disk: one JSON file that names them, and the one target whose layers they are."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from ... import fingerprint
from ...errors import InputError, StaleInputError
from ...storage import read_object, require_file_place, write_json
from ..drafts.layer_skip import SkippedDraft, SkippedLayers
from ..targets import Target
from .llama import validated

SUFFIX = ".json"


class SkipFile(BaseModel):
    """Contents of a skip file: which sublayers of which target a draft leaves out."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    family: Literal["skipped"] = "skipped"
    target_fingerprint: str
    skipped: SkippedLayers
    found: dict[str, Any] = {}
    """How the skipped layers were found; for people, nothing reads it."""


def is_skip_file(place: Path) -> bool:
    """Whether a draft's path is a skip file, by its suffix: no other draft is a bare JSON file."""
    return place.suffix == SUFFIX and place.is_file()


def check_writable(path: Path) -> None:
    """Raise InputError for a path without the suffix of skip files, or where another kind of file exists."""
    if path.suffix != SUFFIX:
        raise InputError(f"--out {path}: must end in {SUFFIX}")
    require_file_place(path, "--out")
    if path.exists() and (not path.is_file() or read_object(path).get("family") != "skipped"):
        raise InputError(f"--out {path}: exists and holds no skipped layers; name another file")


def write_skipped(path: Path, file: SkipFile) -> None:
    """Write the skip file atomically; an older one is replaced."""
    write_json(path, file.model_dump(mode="json"))


def read_skipped(path: Path, target: Target) -> SkippedDraft:
    """Load the draft, a view of the target. Raises FormatError, InputError, or StaleInputError for another target."""
    file = validated(SkipFile, path, read_object(path))
    if file.target_fingerprint != target.fingerprint:
        raise StaleInputError(
            f"{path}: skips layers of target {fingerprint.short(file.target_fingerprint)} and drafts for no other; "
            f"this one is {fingerprint.short(target.fingerprint)}"
        )
    try:
        return SkippedDraft(target, file.skipped)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
