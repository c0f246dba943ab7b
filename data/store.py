"""Capture store: safetensors shards of flat, concatenated tensors, and a manifest that is written last.

    header.json                      inputs of the capture: target, tokenizer, template, settings, mix
    shards/00000-train.safetensors   ids, offsets, signals; the samples' records as JSON in the metadata
    shards/00000-train.json          size, sha256 and counts of that shard; a shard without it does not count
    manifest.json                    header + all shards + totals; present once everything is

Train shards carry signals; selection and holdout carry ids and logp.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .. import fingerprint, storage
from ..errors import CorruptDataError, InputError, MissingFileError, StaleInputError
from ..progress import track
from ..specdec.replay.target_trace import RecordedAnswer
from ..specdec.sampling_settings import SamplingSettings
from ..specdec.targets import Target
from .conversation import Split
from .teacher_logprobs import Signals

FORMAT = 1
HEADER, MANIFEST, SHARDS = "header.json", "manifest.json", "shards"

_OPEN_FILES = 64
_WHOLE = (torch.uint16, torch.int32, torch.int64)


class _Listed(BaseModel):
    """What a manifest lists of a shard."""

    model_config = ConfigDict(strict=True)

    name: str
    split: Split
    bytes: int
    sha256: str


class _Counts(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    samples: int
    prompt_tokens: int
    tokens: int


class _ShardRecord(_Listed):
    """What is read of a shard's record."""

    samples: int
    tokens: int
    seconds: float
    domains: dict[str, _Counts]
    skipped: list[dict[str, str]]


class _Cut(BaseModel):
    ended_by: str
    limits: dict[str, float]

    @model_validator(mode="after")
    def _ended_by_a_limit(self) -> "_Cut":
        if self.ended_by not in self.limits:
            raise ValueError("ended_by: must be one of limits")
        return self


class _Manifest(BaseModel):
    """What is read of a manifest; only those of parts have all of it for certain."""

    model_config = ConfigDict(strict=True)

    format: Literal[1]
    shards: list[_Listed]
    target: str = ""
    tokenizer: str = ""
    vocab_size: int = 0
    stop_ids: list[int] = []
    special_ids: list[int] = []
    settings: dict[str, Any] = {}
    budget: _Cut | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(RecordedAnswer):
    """One answered assistant turn, in the form that is stored, trained on and replayed."""

    id: str
    """conversation/turn/sampling key"""
    conversation: str
    turn: int
    """0, 1, … among the answered turns of the conversation."""
    cluster: str
    domain: str
    split: Split
    sampling: SamplingSettings
    finish: Literal["stop", "length"]
    counts: bool = True
    """Whether drafts are trained and scored on this answer; if not, it is stored for the turns that waited for it."""


class _Rows(NamedTuple):
    """Range of rows in a shard's columns that belong to one sample."""

    path: Path
    start: int
    end: int


def write_shard(folder: Path, name: str, samples: Sequence[Sample], columns: Mapping[str, Tensor]) -> Path:
    """Write one shard atomically. `columns`: signals of all answer tokens in order, named as in Signals."""
    tensors = dict(columns)
    # Ids of all samples end to end, with offsets; every column has a row for each answer token.
    for key in ("prompt", "answer"):
        ids = [getattr(sample, f"{key}_ids") for sample in samples]
        tensors[f"{key}_ids"] = torch.tensor([token for row in ids for token in row], dtype=torch.int32)
        tensors[f"{key}_offsets"] = torch.tensor([0, *map(len, ids)]).cumsum(0)
    # Every column must fit, or all later answers would get the signals of others.
    if any(len(column) != len(tensors["answer_ids"]) for column in columns.values()):
        raise ValueError(f"{name}: signals of another number of tokens than {len(tensors['answer_ids'])}")
    metadata = {"records": json.dumps([_record(sample) for sample in samples])}  # two keys would come in random order
    path = shard_path(folder, name)
    storage.write_bytes(path, safetensors.torch.save(tensors, metadata))
    return path


def shard_path(folder: Path, name: str) -> Path:
    """Path of a shard's tensors."""
    return storage.inside(folder, f"{SHARDS}/{name}.safetensors")


def read_record(folder: Path, name: str) -> dict[str, Any]:
    """Read the record of a finished shard. Raises MissingFileError for an unfinished one, CorruptDataError."""
    path = folder / SHARDS / f"{name}.json"
    record = storage.read_object(path)
    what, cure = f"not the record of shard {name}", "; delete it and run the capture again"
    check_fields(_ShardRecord, record, path, what, cure)
    if record["name"] != name:
        raise CorruptDataError(f"{path}: {what}{cure}")
    return record


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a finished capture. Raises MissingFileError, CorruptDataError."""
    path = folder / MANIFEST
    manifest = storage.read_object(path)
    what = f"not a capture manifest of format {FORMAT}"
    check_fields(_Manifest, manifest, path, what, "; delete it and run the capture again")
    return manifest


def check_fields(
    model: type[BaseModel], value: dict[str, Any], path: Path, what: str = "odd values", cure: str = ""
) -> None:
    """Raise CorruptDataError for JSON that is none of the model's, naming file, field and cure."""
    try:
        model.model_validate(value)
        fingerprint.of_json(value)
    except ValidationError as error:
        problem = error.errors()[0]
        raise CorruptDataError(
            f"{path}: {what} ({'.'.join(map(str, problem['loc']))}: {problem['msg']}){cure}"
        ) from None
    except ValueError as error:
        raise CorruptDataError(f"{path}: {what} (a number or text that has no JSON: {error}){cure}") from None


def check_shard(folder: Path, record: dict[str, Any], content: bool = True) -> None:
    """Compare a shard's size, and its sha256 if `content`, with its record.

    Raises CorruptDataError or MissingFileError, naming the file and the cure.
    """
    path = shard_path(folder, record["name"])
    cure = f"delete it and {MANIFEST}, and run the capture again"
    if not path.is_file():
        raise MissingFileError(f"{path}: no such file; delete {MANIFEST} and run the capture again")
    # The size costs nothing to compare; the content costs a read of the file.
    if path.stat().st_size != record["bytes"]:
        raise CorruptDataError(f"{path}: {path.stat().st_size} bytes, {record['bytes']} recorded; {cure}")
    if content and fingerprint.of_file(path) != record["sha256"]:
        raise CorruptDataError(f"{path}: sha256 is not the recorded {fingerprint.short(record['sha256'])}; {cure}")


def _record(sample: Sample) -> dict[str, Any]:
    names = ("id", "conversation", "turn", "cluster", "domain", "split", "max_new_tokens", "finish", "counts")
    return {**{name: getattr(sample, name) for name in names}, "sampling": sample.sampling.model_dump()}


class Capture:
    """Reader of a complete capture. Reads lazily: shards stay on disk and are memory-mapped."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest
        self._samples: dict[str, list[Sample]] = {}
        self._rows_of: dict[str, _Rows] = {}
        self._files: dict[Path, Any] = {}

    @classmethod
    def open(cls, folder: Path, verify: bool = True) -> "Capture":
        """Open a finished capture. `verify` reads every shard once and compares its sha256; sizes are always compared.

        Raises MissingFileError or CorruptDataError, naming the file.
        """
        if not (folder / MANIFEST).is_file():
            state = "the capture is not finished; run it again" if (folder / HEADER).is_file() else "not a capture"
            raise MissingFileError(f"{folder / MANIFEST}: no such file; {state}")
        # The manifest lists the shards, which must all be there.
        manifest = read_manifest(folder)
        # A progress bar is shown only where contents are read.
        shards: Iterable[dict[str, Any]] = manifest["shards"]
        for record in track(manifest["shards"], "Verifying capture", unit="shards") if verify else shards:
            check_shard(folder, record, content=verify)
        return cls(folder, manifest)

    @property
    def target_fingerprint(self) -> str:
        """Fingerprint of the target that answered."""
        return str(self.manifest["target"])

    @property
    def tokenizer_digest(self) -> str:
        """Digest of the tokenizer that the ids belong to."""
        return str(self.manifest["tokenizer"])

    @property
    def vocab_size(self) -> int:
        """Width of the target's logits."""
        return int(self.manifest["vocab_size"])

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return frozenset(self.manifest["stop_ids"])

    @property
    def special_ids(self) -> frozenset[int]:
        """The tokenizer's special tokens."""
        return frozenset(self.manifest["special_ids"])

    @property
    def digest(self) -> str:
        """Digest (64 hex digits) of the manifest without its budget, whose limits do not change what is stored."""
        return fingerprint.of_json({key: value for key, value in self.manifest.items() if key != "budget"})

    @property
    def truncated(self) -> bool:
        """Whether an engine gave the signals: then the tails' mass is stored, but no draws from them."""
        return self.manifest.get("tail") == "truncated"

    @property
    def bare(self) -> bool:
        """Whether no signals are stored (`top_k` 0): ids and log p of the drawn tokens alone."""
        return bool(self.manifest.get("settings", {}).get("top_k") == 0)

    def check_target(self, target: Target) -> None:
        """Raise StaleInputError unless `target` is the one that answered."""
        if target.fingerprint != self.target_fingerprint:
            raise StaleInputError(
                f"{self.folder}: captured from target {fingerprint.short(self.target_fingerprint)}, "
                f"but the target given is {fingerprint.short(target.fingerprint)}; capture again"
            )

    def samples(self, split: Split) -> list[Sample]:
        """Samples of a split that count, shard by shard, in a fixed order."""
        return [sample for sample in self.answers(split) if sample.counts]

    def answers(self, split: Split) -> list[Sample]:
        """All samples of a split: those that count, and those that are stored for later turns alone."""
        if split not in self._samples:
            shards = [record for record in self.manifest["shards"] if record["split"] == split]
            self._samples[split] = [sample for record in shards for sample in self._read(record["name"])]
        return self._samples[split]

    def logp(self, sample: Sample) -> Tensor:
        """Raw log p of each answer token, fp32; NaN for recorded answers in a capture without signals."""
        return self._slice(sample, ("logp_n",))[0]

    def signals(self, sample: Sample) -> Signals:
        """Teacher signals of a train sample, log-probs in fp32. Raises InputError where none are stored."""
        if sample.split != "train":
            raise InputError(f"{sample.id}: the {sample.split} split stores ids and logp only, no signals")
        if self.bare:
            raise InputError(f"{self.folder}: keeps no signals (capture.top_k 0)")
        return Signals(*self._slice(sample, Signals._fields))

    def _slice(self, sample: Sample, names: Sequence[str]) -> list[Tensor]:
        # The rows of a sample are known once its split has been read.
        if sample.id not in self._rows_of:
            self.answers(sample.split)
        path, start, end = self._rows_of[sample.id]
        with _read_errors(path):
            # Slices read only this sample's rows from the mapped file.
            file = self._file(path)
            parts = [file.get_slice(name)[start:end] for name in names]
        return [part.float() if part.is_floating_point() else part for part in parts]

    def _read(self, name: str) -> list[Sample]:
        path = shard_path(self.folder, name)
        with _read_errors(path):
            file = self._file(path)
            # Records from the metadata, ids from the tensors; signals stay on disk.
            records = storage.parse_json(file.metadata()["records"])
            prompts, answers = _id_lists(file, "prompt"), _id_lists(file, "answer")
            ends = file.get_tensor("answer_offsets").tolist()
            samples = [
                Sample(
                    **{**record, "sampling": SamplingSettings(**record["sampling"])},
                    prompt_ids=prompt,
                    answer_ids=answer,
                )
                for record, prompt, answer in zip(records, prompts, answers, strict=True)
            ]
        # Where each sample's signals lie, for `_slice`.
        self._rows_of |= {s.id: _Rows(path, ends[i], ends[i + 1]) for i, s in enumerate(samples)}
        return samples

    def _file(self, path: Path) -> Any:
        if path not in self._files:
            # A bounded number of open files; all are dropped at once, as reads go shard by shard.
            if len(self._files) >= _OPEN_FILES:
                self._files.clear()
            self._files[path] = safe_open(path, framework="pt")
        return self._files[path]


def _id_lists(file: Any, key: str) -> list[list[int]]:
    ids, offsets = file.get_tensor(f"{key}_ids"), file.get_tensor(f"{key}_offsets")
    ends, numbers = spans(ids, offsets), ids.tolist()
    return [numbers[start:end] for start, end in ends]


def spans(ids: Tensor, offsets: Tensor) -> list[tuple[int, int]]:
    """Start and end of each text among ids that stand end to end. Raises ValueError for what are no ids or no offsets:
    a folder of answers may be another's."""
    if any(one.dim() != 1 or one.dtype not in _WHOLE for one in (ids, offsets)):
        raise ValueError("ids and offsets must be lists of whole numbers")
    ends = offsets.tolist()
    found = list(itertools.pairwise(ends))
    if [*ends[:1], *ends[-1:]] != [0, len(ids)] or any(start > end for start, end in found):
        raise ValueError(f"offsets must rise from 0 to the {len(ids)} ids")
    if len(ids) and int(ids.long().min()) < 0:
        raise ValueError("ids must be at least 0")
    return found


@contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    """Turn the errors of an unreadable shard into MissingFileError or CorruptDataError that name its file."""
    try:
        yield
    except FileNotFoundError:
        raise MissingFileError(f"{path}: no such file; delete {MANIFEST} and run the capture again") from None
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CorruptDataError(
            f"{path}: unreadable ({error}); delete it and {MANIFEST}, and run the capture again"
        ) from None
