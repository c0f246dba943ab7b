"""Recorded answers of the target, reused: their ids are stored, and one pass over them gives the signals again.

    answers.json                 whose answers they are; files with their sha256
    answers-00000.safetensors    ids of all answers in a row, offsets; the answers' records as JSON in the metadata

An answer is used where the same target is asked the same prompt at the same sampling setting.

Shapes: N answer tokens, C of them at a time, M tail draws.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ... import fingerprint, storage
from ...errors import CorruptDataError, MissingFileError, StaleInputError
from ...specdec.continuous_batching import DecodedAnswer
from ...specdec.targets import Target
from ..batches import collate
from ..conversation import SPLITS
from ..settings import CaptureSettings
from ..store import MANIFEST, SHARDS, Capture, Sample, check_shard, read_record, shard_path, spans
from ..teacher_logprobs import emitted_logp, stored_signals
from .plan import TurnRequest, tail_seed_of

FORMAT = 1
INDEX = "answers.json"
FILE_TOKENS = 7_000_000
"""Most tokens in a file: below 16 MB for vocabularies that fit 16 bits."""
_CHUNK_BYTES = 1 << 28
_ROW_TOKENS = 8192
_CUDA_TOKENS, _CPU_TOKENS = 1 << 16, 1 << 12  # of one pass


class _Kept(NamedTuple):
    """One recorded answer."""

    prompt: str
    """Digest of the prompt's ids."""
    finish: Literal["stop", "length"]
    ids: Tensor


def answers_digest(folder: Path) -> str:
    """Digest (64 hex digits) of a folder of recorded answers. Raises MissingFileError or CorruptDataError."""
    index = storage.read_object(folder / INDEX)
    try:
        return fingerprint.of_json(index)
    except ValueError as error:
        raise CorruptDataError(f"{folder / INDEX}: holds a number or text that has no JSON ({error})") from None


def save_answers(capture: Capture, folder: Path) -> int:
    """Write a capture's answers of all splits into a new folder, without signals. Returns their number of tokens."""
    # Ids take two bytes where the vocabulary allows.
    small = capture.vocab_size <= 1 << 16
    samples = [sample for split in SPLITS for sample in capture.answers(split)]
    with storage.new_folder(folder) as new:
        files = {}
        for number, part in enumerate(_groups(samples, lambda sample: len(sample.answer_ids), FILE_TOKENS)):
            # One file: ids end to end with offsets, and for each answer its turn, its prompt's digest and how it ended.
            name = f"answers-{number:05d}.safetensors"
            ids = torch.tensor([token for sample in part for token in sample.answer_ids], dtype=torch.int64)
            tensors = {
                "ids": ids.to(torch.uint16 if small else torch.int32),
                "offsets": torch.tensor([0, *(len(sample.answer_ids) for sample in part)]).cumsum(0),
            }
            records = json.dumps([[sample.id, _digest(sample.prompt_ids), sample.finish] for sample in part])
            storage.write_bytes(new / name, safetensors.torch.save(tensors, {"records": records}))
            files[name] = fingerprint.of_file(new / name)
        # The index names the target and the files, and comes last.
        index = {"format": FORMAT, "target": capture.target_fingerprint, "files": files}
        storage.write_json(new / INDEX, index)
    return sum(len(sample.answer_ids) for sample in samples)


class ReusableAnswers:
    """The answers of one folder, by the id of their turn."""

    def __init__(self, folder: Path, target_fingerprint: str, vocab_size: int) -> None:
        """Read `folder`, of a target with so many tokens.

        Raises MissingFileError, CorruptDataError, or StaleInputError for another target's.
        """
        # 1) The index must be of this format and of this target.
        index = storage.read_object(folder / INDEX)
        if index.get("format") != FORMAT or not isinstance(index.get("files"), dict):
            raise CorruptDataError(f"{folder / INDEX}: not an index of recorded answers of format {FORMAT}")
        if index.get("target") != target_fingerprint:
            raise StaleInputError(
                f"capture.answers: {folder}: of target {fingerprint.short(str(index.get('target')))}, the target is "
                f"{fingerprint.short(target_fingerprint)}"
            )
        # 2) Every file it names, compared with its digest.
        self._kept: dict[str, _Kept] = {}
        for name, digest in index["files"].items():
            path = storage.inside(folder, name)
            if not path.is_file():
                raise MissingFileError(f"{path}: no such file, {INDEX} names it")
            if fingerprint.of_file(path) != digest:
                raise CorruptDataError(f"{path}: sha256 is not the one in {INDEX}")
            self._kept.update(_read(path, vocab_size))

    def find(self, turn: TurnRequest, prompt_ids: Sequence[int], room: int) -> DecodedAnswer | None:
        """Find the recorded answer to a prompt, cut to `room` tokens; None: there is none, or it is too short."""
        kept = self._kept.get(turn.id)
        if kept is None or kept.prompt != _digest(prompt_ids):
            return None
        # An answer that stopped by itself serves any limit; one that was cut serves if `room` cuts it no later.
        tokens: list[int] = kept.ids[:room].tolist()
        if len(kept.ids) > room or (kept.finish == "length" and len(tokens) == room):
            return DecodedAnswer(turn.id, tokens, "length", {})
        return DecodedAnswer(turn.id, tokens, "stop", {}) if kept.finish == "stop" else None


@torch.no_grad()
def forced_signals(target: Target, samples: Sequence[Sample], settings: CaptureSettings) -> dict[str, Tensor]:
    """Teacher-forced signals: a shard's columns from one pass of the target over given prompts and answers.

    Train answers get all columns, others `logp_n` alone. Where the settings ask for no pass (`top_k` 0), `logp_n` is
    NaN. An answer's tail draws use the same random numbers as when the target decodes it.
    """
    if not settings.reads_given:
        return {"logp_n": torch.full((sum(len(sample.answer_ids) for sample in samples),), torch.nan)}
    parts: list[dict[str, Tensor]] = []
    on_cuda = target.device.type == "cuda"
    for batch_samples in _groups(samples, _tokens, _CUDA_TOKENS if on_cuda else _CPU_TOKENS):
        # 1) One pass of the target over prompts and answers, packed into rows.
        batch = collate(batch_samples, row_tokens=_ROW_TOKENS if on_cuda else 0).to(target.device)
        states = target.states(batch.ids_BT, documents=batch.documents)
        hidden_NH = states.hidden_BTH.flatten(0, 1)[batch.positions_N]
        tokens_N = batch.ids_BT.flatten()[batch.positions_N + 1]

        # 2) The random numbers of each token's tail draws.
        tails = [tail_seed_of(settings.seed, sample.id) for sample in batch_samples]
        counts = torch.tensor([len(sample.answer_ids) for sample in batch_samples])
        seed_N = torch.repeat_interleave(torch.tensor(tails), counts).to(target.device)
        emitted_N = torch.cat([torch.arange(count) for count in counts.tolist()]).to(target.device)

        # 3) Logits and signals, so many tokens at a time as the memory for logits allows.
        chunk = max(1, _CHUNK_BYTES // (4 * target.vocab_size))
        for at in (slice(start, start + chunk) for start in range(0, len(tokens_N), chunk)):
            logits_CV = target.logits(hidden_NH[at])
            if samples[0].split != "train" or not settings.top_k:
                parts.append({"logp_n": emitted_logp(logits_CV, tokens_N[at]).cpu()})
                continue
            columns = stored_signals(logits_CV, tokens_N[at], seed_N[at], emitted_N[at], settings)
            parts.append({name: column.cpu() for name, column in columns.items()})
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts else {}


def _groups(samples: Iterable[Sample], size: Callable[[Sample], int], limit: int) -> Iterator[list[Sample]]:
    """Group consecutive samples: as many at a time as have at most `limit` together by `size`, and at least one."""
    current: list[Sample] = []
    total = 0
    for sample in samples:
        if current and total + size(sample) > limit:
            yield current
            current, total = [], 0
        current.append(sample)
        total += size(sample)
    if current:
        yield current


def _tokens(sample: Sample) -> int:
    return len(sample.prompt_ids) + len(sample.answer_ids)


def _read(path: Path, vocab_size: int) -> Iterator[tuple[str, _Kept]]:
    try:
        # Answers are views into one tensor of ids.
        with safe_open(path, framework="pt") as file:
            records: list[list[Any]] = storage.parse_json(file.metadata()["records"])
            ids, offsets = file.get_tensor("ids"), file.get_tensor("offsets")
        ends, largest = spans(ids, offsets), int(ids.long().max()) if len(ids) else 0
        if largest >= vocab_size:
            raise ValueError(f"token {largest}: the target has {vocab_size}")
        ids = ids.int()
        for (name, prompt, finish), (start, end) in zip(records, ends, strict=True):
            if finish not in ("stop", "length"):
                raise ValueError(f"an answer's end must be stop or length, not {str(finish)[:40]!r}")
            yield str(name), _Kept(str(prompt), finish, ids[start:end])
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CorruptDataError(f"{path}: unreadable ({error})") from None


def _digest(prompt_ids: Sequence[int]) -> str:
    return fingerprint.of_json(list(prompt_ids))[:16]


def drop_damaged(folder: Path) -> list[str]:
    """Remove every shard whose content is not as recorded, and the manifest with it. Returns the shards' names."""
    # Find them all before anything is removed.
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
