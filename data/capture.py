"""The target answers a mix; its answers and teacher signals go to disk shard by shard.

A killed run goes on where it was: a shard counts once its record is written, so only those in flight are lost and none
is done twice. A folder begun with another target, tokenizer, template, setting or mix is refused.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .. import __version__, fingerprint, storage
from ..errors import MissingFileError, OwnershipError, StaleInputError
from ..progress import bar, say
from ..specdec.sampling import SamplingSettings
from ..specdec.targets import Target
from .answering import Answers, answer_shards
from .capture_settings import CaptureSettings
from .conversation import Conversation
from .mix import load_mix
from .recorded import RecordedAnswers, answers_digest
from .requests import Prompts, ShardPlan, plan_shards, settings_record
from .store import FORMAT, HEADER, MANIFEST, SHARDS, check_shard, read_record, write_shard

Json = dict[str, Any]

_RECORD_BYTES = 512


def capture(
    target: Target, mix: Path, settings: CaptureSettings, scored: Sequence[SamplingSettings], folder: Path
) -> None:
    """Answer the mix into `folder`, or finish what a stopped run left there.

    Train conversations are answered at their own sampling setting, selection and holdout once per `scored` setting.
    Raises StaleInputError for a folder of other inputs, ContextLengthError, InputError, DiskFullError.
    """
    capture_conversations(target, load_mix(mix), settings, scored, folder)


def capture_conversations(
    target: Target,
    conversations: Sequence[Conversation],
    settings: CaptureSettings,
    scored: Sequence[SamplingSettings],
    folder: Path,
) -> None:
    """`capture` of conversations that no mix folder holds."""
    shards = plan_shards(conversations, settings, scored)
    recorded = None if settings.answers is None else RecordedAnswers(settings.answers, target.fingerprint)
    header = _header(target, conversations, settings, scored, len(shards))
    resumed = _claimed(folder, header)
    left = _unfinished(shards, _records(folder, shards, content=False))
    if resumed and not left and (folder / MANIFEST).is_file():
        return
    prompts = Prompts(target, shards, settings)
    storage.require_free_space(folder, sum(_bytes_needed(shard, prompts, settings) for shard in left))
    with storage.lock(folder / ".lock", what="another capture into this folder"):
        if not _claimed(folder, header):
            storage.write_json(folder / HEADER, header)
        for leftover in (folder / SHARDS).glob(".*.tmp"):  # of a killed run
            leftover.unlink(missing_ok=True)
        records = _records(folder, shards, content=True)
        _answer_rest(target, shards, prompts, settings, folder, records, recorded)
        storage.write_json(folder / MANIFEST, _manifest(header, [records[shard.name] for shard in shards]))


def _answer_rest(
    target: Target,
    shards: Sequence[ShardPlan],
    prompts: Prompts,
    settings: CaptureSettings,
    folder: Path,
    records: dict[str, Json],
    recorded: RecordedAnswers | None,
) -> None:
    """Answer the shards that have no record yet, and add theirs."""
    left = _unfinished(shards, records)
    if records and left:
        say(f"{folder}: resuming; {len(records)} of {len(shards)} shards are there")
    total = sum(answer.max_new_tokens for shard in left for answer in shard.answers)
    # One shard is written beside the decoder, which goes on meanwhile; the next one waits for it.
    with bar("Capturing", total, "tokens") as tick, ThreadPoolExecutor(1) as writer:
        start, writing = time.monotonic(), list[Future[Json]]()
        for shard, answers in answer_shards(target, left, prompts, settings, _Progress(tick), recorded):
            seconds, start = time.monotonic() - start, time.monotonic()
            _finish(writing, records)
            writing.append(writer.submit(_write, folder, shard, answers, seconds))
        _finish(writing, records)


def _finish(writing: list[Future[Json]], records: dict[str, Json]) -> None:
    """Wait for the shard that is being written, and add its record."""
    while writing:
        record = writing.pop().result()
        records[record["name"]] = record


def _unfinished(shards: Sequence[ShardPlan], records: dict[str, Json]) -> list[ShardPlan]:
    return [shard for shard in shards if shard.name not in records]


def _header(
    target: Target,
    conversations: Sequence[Conversation],
    settings: CaptureSettings,
    scored: Sequence[SamplingSettings],
    shards: int,
) -> Json:
    tokenizer = target.tokenizer
    return {
        "format": FORMAT,
        "target": target.fingerprint,
        "tokenizer": target.tokenizer_digest,
        "template": fingerprint.of_json(tokenizer.chat_template),
        "mix": fingerprint.of_json([conversation.model_dump() for conversation in conversations]),
        "dtype": str(target.dtype).removeprefix("torch."),
        "settings": settings_record(settings, scored),
        "vocab_size": target.vocab_size,
        "stop_ids": sorted(target.stop_ids),
        "special_ids": sorted(set(tokenizer.all_special_ids)),
        "shard_count": shards,
    } | ({} if settings.answers is None else {"answers": answers_digest(settings.answers)})


def _claimed(folder: Path, header: Json) -> bool:
    """Whether the folder was begun by a run like this one. Raises StaleInputError, OwnershipError for any other."""
    if not folder.is_dir():
        if folder.exists():
            raise OwnershipError(f"{folder}: a file, must be a capture folder or not exist")
        return False
    if not (folder / HEADER).is_file():
        foreign = [path.name for path in folder.iterdir() if not path.name.startswith(".")]
        if foreign:
            raise OwnershipError(f"{folder}: holds {foreign[0]} and no {HEADER}; not a capture, give another folder")
        return False
    differing = _differences(storage.read_object(folder / HEADER), header)
    if differing:
        raise StaleInputError(
            f"{folder}: captured with another {', '.join(differing)}; delete it or give another folder"
        )
    return True


def _differences(found: Json, header: Json) -> list[str]:
    """What an earlier run had otherwise: `name (then, now)`. Tokenizer and template are part of the target, so a
    change of theirs is named instead of the target.
    """

    def compare(name: str, old: Any, new: Any) -> list[str]:
        return [] if old == new else [f"{name} ({_brief(old)}, now {_brief(new)})"]

    own = [line for key in ("tokenizer", "template") for line in compare(key, found.get(key), header[key])]
    own = own or compare("target", found.get("target"), header["target"])
    keys = ("mix", "dtype", "format", "answers")
    other = [line for key in keys for line in compare(key, found.get(key), header.get(key))]
    old, new = found.get("settings", {}), header["settings"]
    changed = [line for key in {**old, **new} for line in compare(f"setting {key}", old.get(key), new.get(key))]
    return own + other + changed


def _brief(value: Any) -> str:
    return fingerprint.short(value) if isinstance(value, str) and len(value) == 64 else str(value)


def _records(folder: Path, shards: Sequence[ShardPlan], content: bool) -> dict[str, Json]:
    """Records of the shards that are done, each compared with its file. Raises CorruptDataError naming the file.

    A shard whose file was deleted counts as not done.
    """
    records: dict[str, Json] = {}
    for shard in shards:
        with suppress(MissingFileError):
            record = read_record(folder, shard.name)
            check_shard(folder, record, content)
            records[shard.name] = record
    return records


class _Progress:
    """Tokens on a bar whose total is what the answers may have; budget that is not used counts as done."""

    def __init__(self, tick: Callable[..., None]) -> None:
        self._tick, self._tokens, self._start = tick, 0, time.monotonic()

    def __call__(self, amount: int, tokens: int) -> None:
        self._tokens += tokens
        if amount == 0:
            return
        rate = self._tokens / max(1e-9, time.monotonic() - self._start)
        self._tick(amount, f"{self._tokens} answered, {rate:.0f} tok/s")


def _write(folder: Path, shard: ShardPlan, answers: Answers, seconds: float) -> Json:
    """Write and record one shard. The record comes last: without it the shard does not count.

    `seconds`: since the shard before it was complete, so that those of all shards add up to the run's.
    """
    path = write_shard(folder, shard.name, answers.samples, answers.columns)
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
    }
    storage.write_json(folder / SHARDS / f"{shard.name}.json", record)
    return record


def _count_domains(answers: Answers) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    for sample in answers.samples:
        domain = counts.setdefault(sample.domain, {"samples": 0, "prompt_tokens": 0, "tokens": 0})
        domain["samples"] += 1
        domain["prompt_tokens"] += len(sample.prompt_ids)
        domain["tokens"] += len(sample.answer_ids)
    return counts


def _bytes_needed(shard: ShardPlan, prompts: Prompts, settings: CaptureSettings) -> int:
    """The most that a shard can take: every answer at its limit."""
    logp_bytes = 2 if settings.store_dtype != "float32" else 4
    signals = 8 + (settings.top_k + settings.tail_samples) * (4 + logp_bytes) if shard.split == "train" else 4
    answers = sum(answer.max_new_tokens for answer in shard.answers)
    context = sum(prompts.length(answer) for answer in shard.answers)
    return answers * (4 + signals) + context * 4 + len(shard.answers) * _RECORD_BYTES


def _manifest(header: Json, records: Sequence[Json]) -> Json:
    splits: dict[str, Json] = {}
    for record in records:
        split = splits.setdefault(record["split"], {"samples": 0, "tokens": 0, "domains": {}})
        split["samples"] += record["samples"]
        split["tokens"] += record["tokens"]
        for name, counts in record["domains"].items():
            domain = split["domains"].setdefault(name, dict.fromkeys(counts, 0))
            split["domains"][name] = {key: domain[key] + count for key, count in counts.items()}
    tokens, seconds = (sum(record[key] for record in records) for key in ("tokens", "seconds"))
    return {
        **header,
        "complete": True,
        "versions": {"draftforge": __version__}
        | {name: version(name) for name in ("torch", "transformers", "tokenizers")},
        "splits": splits,
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / max(seconds, 1e-9), 1),
        "skipped": [skipped for record in records for skipped in record["skipped"]],
        "shards": [
            {key: value for key, value in record.items() if key not in ("domains", "skipped")} for record in records
        ],
    }
