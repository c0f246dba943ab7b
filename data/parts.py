"""One capture by several machines: each answers a part of the shards, and the parts are joined by copying.

The plan of shards follows from mix and settings, so part i of n takes every n-th shard, from the i-th on: parts are
disjoint, and each is as even a sample as the whole. What is joined equals a capture by one machine, file by file.
"""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .. import storage
from ..errors import CorruptDataError, InputError, MissingFileError, StaleInputError
from ..progress import track
from ..specdec.sampling import SamplingSettings
from .capture_folder import PART, claimed, differences, finished_records, inputs_record, manifest_of
from .capture_settings import CaptureSettings
from .conversation import Conversation
from .requests import ShardPlan, plan_shards
from .store import HEADER, MANIFEST, SHARDS, check_shard, read_record, shard_path

Json = dict[str, Any]


class Part(NamedTuple):
    """Part `number` (from 1) of `total`."""

    number: int
    total: int

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"

    @property
    def suffix(self) -> str:
        """What its folder's name ends with."""
        return f".part-{self.number}-of-{self.total}"

    def of(self, shards: Sequence[ShardPlan]) -> list[ShardPlan]:
        """Its shards."""
        return list(shards[self.number - 1 :: self.total])

    def share(self, settings: CaptureSettings) -> CaptureSettings:
        """The settings with its share of the budget."""
        budget = settings.budget and settings.budget.share(self.total)
        return settings.model_copy(update={"budget": budget})


def parse_part(text: str) -> Part:
    """`2/5`. Raises InputError for anything else."""
    found = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text)
    part = Part(int(found[1]), int(found[2])) if found else Part(0, 0)
    if not 1 <= part.number <= part.total:
        raise InputError(f"--part {text}: must be NUMBER/COUNT such as 2/5, the number between 1 and the count")
    return part


def check_part(
    part: Part, conversations: Sequence[Conversation], settings: CaptureSettings, scored: Sequence[SamplingSettings]
) -> None:
    """Raise InputError for a division into more parts than there are shards: some would have nothing to answer."""
    count = len(plan_shards(conversations, settings, scored))
    if part.total > count:
        raise InputError(
            f"--part {part}: there are {count} shards (of about capture.shard_samples {settings.shard_samples}); "
            "at most so many parts have something to answer"
        )


def join(
    folders: Sequence[Path],
    target_fingerprint: str,
    dtype: str,
    conversations: Sequence[Conversation],
    settings: CaptureSettings,
    scored: Sequence[SamplingSettings],
    folder: Path,
) -> None:
    """Make the capture `folder` of the part folders of every machine. The target need not be loaded.

    Raises MissingFileError for a part that is missing or not finished, StaleInputError for one of other inputs or
    versions, CorruptDataError, InputError. A stopped join goes on where it was.
    """
    inputs = inputs_record(target_fingerprint, dtype, conversations, settings, scored)
    manifests = _all_parts(folders, inputs)
    first = manifests[0][1]
    header = {key: first[key] for key in storage.read_object(manifests[0][0] / HEADER) if key != PART}
    shards = plan_shards(conversations, settings, scored)
    with storage.lock(folder / ".lock", what="another capture into this folder"):
        if not claimed(folder, header):
            storage.write_json(folder / HEADER, header)
        records: dict[str, Json] = finished_records(folder, shards, content=True)
        copies = [(part, record) for part, manifest in manifests for record in manifest["shards"]]
        for part, listed in track(copies, "Joining", unit="shards"):
            record = read_record(part, listed["name"])
            if record["sha256"] != listed["sha256"]:
                raise CorruptDataError(f"{part}: {record['name']}: its record is not the one in {MANIFEST}")
            if records.get(record["name"], record)["sha256"] != record["sha256"]:
                raise StaleInputError(f"{folder}: holds another {record['name']} than {part}; delete one of them")
            _copy(part, folder, record)
            records[record["name"]] = record
        cuts = [manifest["budget"] for _, manifest in manifests if "budget" in manifest]
        ended_by, limits = (cuts[0]["ended_by"], cuts[0]["limits"]) if cuts else (None, {})
        storage.write_json(folder / MANIFEST, manifest_of(header, shards, records, ended_by, limits))


def _all_parts(folders: Sequence[Path], inputs: Json) -> list[tuple[Path, Json]]:
    """The parts in order, with their manifests."""
    found: dict[Part, tuple[Path, Json]] = {}
    for folder in folders:
        part, manifest = _read_part(folder, inputs)
        if part in found:
            raise InputError(f"--join: {found[part][0]} and {folder} are both part {part}; give one of them")
        found[part] = (folder, manifest)
    totals = sorted({part.total for part in found})
    if len(totals) != 1:
        raise InputError(f"--join: parts of {' and of '.join(map(str, totals))}; all must be of one division")
    missing = [str(part) for i in range(totals[0]) if (part := Part(i + 1, totals[0])) not in found]
    if missing:
        raise MissingFileError(f"--join: {', '.join(missing)} missing; give the folder of every part")
    parts = [found[part] for part in sorted(found)]
    for folder, manifest in parts[1:]:
        for name, value in manifest["versions"].items():
            if parts[0][1]["versions"].get(name) != value:
                theirs = parts[0][1]["versions"].get(name)
                raise StaleInputError(f"{folder}: made with {name} {value}, {parts[0][0]} with {theirs}; must be equal")
    return parts


def _read_part(folder: Path, inputs: Json) -> tuple[Part, Json]:
    if not (folder / HEADER).is_file():
        raise MissingFileError(f"--join {folder}: not the folder of a part (no {HEADER})")
    header = storage.read_object(folder / HEADER)
    if PART not in header:
        raise InputError(f"--join {folder}: a whole capture, not a part of one")
    differing = differences(header, inputs)
    if differing:
        raise StaleInputError(f"{folder}: captured with another {', '.join(differing)}")
    part = parse_part(str(header[PART]))
    if not (folder / MANIFEST).is_file():
        raise MissingFileError(f"{folder}: part {part} is not finished; run it again with --part {part}")
    manifest = storage.read_object(folder / MANIFEST)
    for record in manifest["shards"]:
        check_shard(folder, record)
    return part, manifest


def _copy(part: Path, folder: Path, record: Json) -> None:
    """One shard, its record last."""
    place = shard_path(folder, record["name"])
    place.parent.mkdir(parents=True, exist_ok=True)
    with storage.new_file(place) as new:
        shutil.copyfile(shard_path(part, record["name"]), new)
    storage.write_json(folder / SHARDS / f"{record['name']}.json", record)
