"""Manifest of a capture: header, shard records and totals; checks of whose folder it is; joining the parts of several
machines."""

import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from ... import __version__, fingerprint, storage
from ...errors import CorruptDataError, InputError, MissingFileError, OwnershipError, StaleInputError
from ...progress import track
from ...specdec.sampling_settings import SamplingSettings
from ...specdec.targets import Target
from ..conversation import Conversation
from ..settings import BudgetSettings, CaptureSettings
from ..store import (
    FORMAT,
    HEADER,
    MANIFEST,
    SHARDS,
    check_fields,
    check_shard,
    read_manifest,
    read_record,
    shard_path,
    write_shard,
)
from .plan import PLAN_VERSION, ShardPlan, plan_shards, settings_record
from .reuse import answers_digest
from .scheduler import ShardAnswers

Json = dict[str, Any]

PART = "part"


class _PartHeader(BaseModel):
    """What a join reads of a part's header."""

    model_config = ConfigDict(strict=True)

    tokenizer: str
    template: str
    vocab_size: int
    stop_ids: list[int]
    special_ids: list[int]
    settings: dict[str, Any]


class _PartManifest(_PartHeader):
    """What a join reads of a part's manifest."""

    versions: dict[str, str]


def inputs_record(
    target_fingerprint: str,
    dtype: str,
    conversations: Sequence[Conversation],
    settings: CaptureSettings,
    scored: Sequence[SamplingSettings],
) -> Json:
    """Inputs of a capture (target, mix, settings) as its header records them; needs no loaded target."""
    return {
        "format": FORMAT,
        "plan": PLAN_VERSION,
        "target": target_fingerprint,
        "mix": fingerprint.of_json([conversation.model_dump() for conversation in conversations]),
        "dtype": dtype.removeprefix("torch."),
        "settings": settings_record(settings, scored),
        **({} if settings.answers is None else {"answers": answers_digest(settings.answers)}),
        **({"tail": "truncated"} if settings.engine is not None and settings.engine.signals == "engine" else {}),
    }


def header_of(target: Target, inputs: Json, shards: int, part: str | None) -> Json:
    """Build a capture's header. `part`: such as 2/5, for a folder that holds only this part."""
    tokenizer = target.tokenizer
    own = getattr(tokenizer, "processor_template", None)
    return {
        **inputs,
        "tokenizer": target.tokenizer_digest,
        "template": fingerprint.of_json(tokenizer.chat_template if own is None else [tokenizer.chat_template, own]),
        "vocab_size": target.vocab_size,
        "stop_ids": sorted(target.stop_ids),
        "special_ids": sorted(set(tokenizer.all_special_ids)),
        "shard_count": shards,
    } | ({} if part is None else {PART: part})


def check_claim(folder: Path, header: Json) -> bool:
    """Whether the folder was begun by a run like this one. Raises StaleInputError, OwnershipError for any other."""
    # No folder, or an empty one, is free to take; dot files are locks.
    if not folder.is_dir():
        if folder.exists():
            raise OwnershipError(f"{folder}: a file, must be a capture folder or not exist")
        return False
    if not (folder / HEADER).is_file():
        foreign = [path.name for path in folder.iterdir() if not path.name.startswith(".")]
        if foreign:
            raise OwnershipError(f"{folder}: holds {foreign[0]} and no {HEADER}; not a capture, give another folder")
        return False
    # A folder with a header must have been begun from the same inputs.
    differing = differences(storage.read_object(folder / HEADER), header)
    if differing:
        raise StaleInputError(
            f"{folder}: captured with another {', '.join(differing)}; delete it or give another folder"
        )
    return True


def differences(found: Json, header: Json) -> list[str]:
    """Differences from the header of an earlier run or another machine, such as `setting top_k (64, now 32)`.

    Tokenizer and template are part of the target, so a change of theirs is named instead of the target. Where `header`
    lacks them, the target alone is compared.
    """

    def compare(name: str, old: Any, new: Any) -> list[str]:
        return [] if old == new else [f"{name} ({_brief(old)}, now {_brief(new)})"]

    # The target: by the part of it that differs, where the header names parts.
    parts = [key for key in ("tokenizer", "template") if key in header]
    target = [line for key in parts for line in compare(key, found.get(key), header[key])]
    target = target or compare("target", found.get("target"), header["target"])
    # All other inputs, then every setting on its own.
    keys = ("mix", "dtype", "format", "plan", "answers")
    inputs = [line for key in keys for line in compare(key, found.get(key), header.get(key))]
    old, new = found.get("settings", {}), header["settings"]
    settings = [line for key in {**old, **new} for line in compare(f"setting {key}", old.get(key), new.get(key))]
    return target + inputs + settings


def _brief(value: Any) -> str:
    return fingerprint.short(value) if isinstance(value, str) and len(value) == 64 else str(value)


def finished_records(folder: Path, shards: Iterable[ShardPlan], content: bool) -> dict[str, Json]:
    """Records of the finished shards, by name, each compared with its file (`content`: by sha256, not by size alone).

    A shard whose file was deleted counts as not finished. Raises CorruptDataError naming the file.
    """
    records: dict[str, Json] = {}
    for shard in shards:
        with suppress(MissingFileError):
            record = read_record(folder, shard.name)
            check_shard(folder, record, content)
            records[shard.name] = record
    return records


def is_captured(folder: Path, budget: BudgetSettings | None) -> bool:
    """Whether a capture, or a part of one, is complete, or was ended by a budget limit that `budget` does not raise."""
    path = folder / MANIFEST
    if not path.is_file():
        return False
    # A capture that a budget cut goes on only where that very limit is gone or higher.
    ended = read_manifest(folder).get("budget")
    if not isinstance(ended, dict):
        return True
    limit = None if budget is None else budget.limits.get(ended["ended_by"])
    return limit is not None and limit <= ended["limits"][ended["ended_by"]]


def content_digest(manifest: Json) -> str | None:
    """Digest (64 hex digits) of the shards of a capture that a budget cut; None: it is whole, and its inputs tell."""
    if "budget" not in manifest:
        return None
    return fingerprint.of_json(sorted([record["name"], record["sha256"]] for record in manifest["shards"]))


def versions() -> dict[str, str]:
    """Versions of the packages that decide the content of an answer."""
    return {"draftforge": __version__} | {name: version(name) for name in ("torch", "transformers", "tokenizers")}


def manifest_of(
    header: Json, shards: Sequence[ShardPlan], records: Mapping[str, Json], ended_by: str | None, limits: Json
) -> Json:
    """Build the manifest from the records. `ended_by`: the budget limit that left out the shards without a record."""
    # Samples and tokens of every split and domain.
    done = [records[shard.name] for shard in shards if shard.name in records]
    splits: dict[str, Json] = {}
    for record in done:
        split = splits.setdefault(record["split"], {"samples": 0, "tokens": 0, "domains": {}})
        split["samples"] += record["samples"]
        split["tokens"] += record["tokens"]
        for name, counts in record["domains"].items():
            domain = split["domains"].setdefault(name, dict.fromkeys(counts, 0))
            split["domains"][name] = {key: domain[key] + count for key, count in counts.items()}
    # Totals, the engines that answered, and what a budget left unanswered.
    tokens, seconds = (sum(record[key] for record in done) for key in ("tokens", "seconds"))
    engines = [record["engine"] for record in done if "engine" in record]
    cut = {"budget": {"ended_by": ended_by, "limits": limits, "unanswered": _unanswered(shards, records)}}
    return {
        **header,
        "complete": True,
        "versions": versions(),
        "splits": splits,
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / max(seconds, 1e-9), 1),
        **({"engines": [engine for i, engine in enumerate(engines) if engine not in engines[:i]]} if engines else {}),
        **({} if ended_by is None else cut),
        "skipped": [skipped for record in done for skipped in record["skipped"]],
        # Records of shards lose here what the manifest sums up or lists once.
        "shards": [
            {key: value for key, value in record.items() if key not in ("domains", "skipped", "engine")}
            for record in done
        ],
    }


def _unanswered(shards: Iterable[ShardPlan], records: Mapping[str, Json]) -> dict[str, dict[str, int]]:
    """Conversations without answers, by split and domain."""
    left = {a.conversation.id: a.conversation for s in shards if s.name not in records for a in s.answers}
    counts: dict[str, dict[str, int]] = {}
    for conversation in left.values():
        domains = counts.setdefault(conversation.split, {})
        domains[conversation.domain] = domains.get(conversation.domain, 0) + 1
    return counts


def write_answers(folder: Path, shard: ShardPlan, answers: ShardAnswers, seconds: float, about: Json) -> Json:
    """Write one shard, then its record, without which the shard does not count.

    `about`: the engine that answered. `seconds`: time since the previous shard was complete; over all shards these add
    up to the run's time.
    """
    path = write_shard(folder, shard.name, answers.samples, answers.columns)
    # The digest is of the file as it lies on disk.
    record = {
        "name": shard.name,
        "split": shard.split,
        "bytes": path.stat().st_size,
        "sha256": fingerprint.of_file(path),
        "samples": len(answers.samples),
        "tokens": sum(len(sample.answer_ids) for sample in answers.samples),
        "seconds": round(seconds, 3),
        "domains": _count_domains(answers),
        "skipped": [skipped._asdict() for skipped in answers.skipped],
        **about,
    }
    if answers.logp_difference is not None:
        record["logp_difference"] = round(answers.logp_difference, 6)
    storage.write_json(folder / SHARDS / f"{shard.name}.json", record)
    return record


def _count_domains(answers: ShardAnswers) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    for sample in answers.samples:
        domain = counts.setdefault(sample.domain, {"samples": 0, "prompt_tokens": 0, "tokens": 0})
        domain["samples"] += 1
        domain["prompt_tokens"] += len(sample.prompt_ids)
        domain["tokens"] += len(sample.answer_ids)
    return counts


class Part(NamedTuple):
    """One machine's part of a capture: `number` (from 1) of `total`."""

    number: int
    total: int

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"

    @property
    def suffix(self) -> str:
        """Suffix of the folder's name for this part."""
        return f".part-{self.number}-of-{self.total}"

    def shards(self, shards: Sequence[ShardPlan]) -> list[ShardPlan]:
        """The shards of this part: every `total`-th."""
        return list(shards[self.number - 1 :: self.total])

    def settings(self, settings: CaptureSettings) -> CaptureSettings:
        """The settings with this part's share of the budget."""
        budget = settings.budget and settings.budget.share(self.total)
        return settings.model_copy(update={"budget": budget})


def parse_part(text: str) -> Part:
    """Parse a part such as `2/5`. Raises InputError for anything else."""
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
    """Join the part folders of all machines into the capture `folder`. The target need not be loaded.

    Raises MissingFileError for a part that is missing or not finished, StaleInputError for one of other inputs or
    versions, CorruptDataError, InputError. A stopped join resumes.
    """
    # 1) Read and compare all parts.
    inputs = inputs_record(target_fingerprint, dtype, conversations, settings, scored)
    manifests = _all_parts(folders, inputs)
    first = manifests[0][1]
    header = {key: first[key] for key in storage.read_object(manifests[0][0] / HEADER) if key != PART}
    shards = plan_shards(conversations, settings, scored)
    with storage.lock(folder / ".lock", what="another capture into this folder"):
        if not check_claim(folder, header):
            storage.write_json(folder / HEADER, header)

        # 2) Copy their shards, but for those that a stopped join left here.
        records: dict[str, Json] = finished_records(folder, shards, content=True)
        copies = [(part, record) for part, manifest in manifests for record in manifest["shards"]]
        for part, listed in track(copies, "Joining", unit="shards"):
            record = read_record(part, listed["name"])

            # The record must be the one that the part's manifest lists, and agree with a shard that is here already.
            if record["sha256"] != listed["sha256"]:
                raise CorruptDataError(f"{part}: {record['name']}: its record is not the one in {MANIFEST}")
            if records.get(record["name"], record)["sha256"] != record["sha256"]:
                raise StaleInputError(f"{folder}: holds another {record['name']} than {part}; delete one of them")
            _copy(part, folder, record)
            records[record["name"]] = record

        # 3) Write the manifest that one machine would have written.
        cuts = [manifest["budget"] for _, manifest in manifests if manifest.get("budget")]
        ended_by, limits = (cuts[0]["ended_by"], cuts[0]["limits"]) if cuts else (None, {})
        storage.write_json(folder / MANIFEST, manifest_of(header, shards, records, ended_by, limits))


def _all_parts(folders: Sequence[Path], inputs: Json) -> list[tuple[Path, Json]]:
    """Folders and manifests of all parts, in order. Raises where one is missing, given twice or of other inputs."""
    # Each folder, by its part.
    found: dict[Part, tuple[Path, Json]] = {}
    for folder in folders:
        part, manifest = _read_part(folder, inputs)
        if part in found:
            raise InputError(f"--join: {found[part][0]} and {folder} are both part {part}; give one of them")
        found[part] = (folder, manifest)

    # All must be of one division, and none may be missing.
    totals = sorted({part.total for part in found})
    if len(totals) != 1:
        raise InputError(f"--join: parts of {' and of '.join(map(str, totals))}; all must be of one division")
    missing = [str(part) for i in range(totals[0]) if (part := Part(i + 1, totals[0])) not in found]
    if missing:
        raise MissingFileError(f"--join: {', '.join(missing)} missing; give the folder of every part")

    # Equal versions of all packages that decide an answer.
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
    # A part of these inputs.
    header = storage.read_object(folder / HEADER)
    if PART not in header:
        raise InputError(f"--join {folder}: a whole capture, not a part of one")
    check_fields(_PartHeader, header, folder / HEADER)
    differing = differences(header, inputs)
    if differing:
        raise StaleInputError(f"{folder}: captured with another {', '.join(differing)}")
    # It must be finished, and every shard intact.
    part = parse_part(str(header[PART]))
    if not (folder / MANIFEST).is_file():
        raise MissingFileError(f"{folder}: part {part} is not finished; run it again with --part {part}")
    manifest = read_manifest(folder)
    check_fields(_PartManifest, manifest, folder / MANIFEST)
    if any(manifest.get(name) != value for name, value in header.items()):
        raise CorruptDataError(f"{folder / MANIFEST}: not the manifest of a part")
    for record in manifest["shards"]:
        check_shard(folder, record)
    return part, manifest


def _copy(part: Path, folder: Path, record: Json) -> None:
    """Copy one shard, and its record last."""
    path = shard_path(folder, record["name"])
    path.parent.mkdir(parents=True, exist_ok=True)
    with storage.new_file(path) as new:
        shutil.copyfile(shard_path(part, record["name"]), new)
    storage.write_json(folder / SHARDS / f"{record['name']}.json", record)
