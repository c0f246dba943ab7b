"""Damaged shards of a capture taken out, so that the next capture answers these again and no others."""

from pathlib import Path

from ..errors import CorruptDataError, MissingFileError
from .store import MANIFEST, SHARDS, check_shard, read_record, shard_path


def mend(folder: Path) -> list[str]:
    """Remove every shard whose content is not as recorded, and the manifest with it. Names of the shards removed."""
    damaged = []
    for record in sorted((folder / SHARDS).glob("*.json")):
        try:
            check_shard(folder, read_record(folder, record.stem))
        except (CorruptDataError, MissingFileError):
            damaged.append(record.stem)
    for name in damaged:
        (folder / MANIFEST).unlink(missing_ok=True)  # first: a capture without a shard must not look finished
        shard_path(folder, name).unlink(missing_ok=True)
        (folder / SHARDS / f"{name}.json").unlink(missing_ok=True)
    return damaged
