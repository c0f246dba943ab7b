"""The target answers a mix; its answers and teacher signals go to disk shard by shard.

A killed run goes on where it was: a shard counts once its record is written, so only those in flight are lost and none
is done twice. A folder begun with another target, tokenizer, template, setting or mix is refused.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from .. import fingerprint, storage
from ..errors import InputError
from ..progress import bar, say
from ..specdec.sampling import SamplingSettings
from ..specdec.targets import Target
from .answering import Answers, answer_shards
from .capture_folder import PART, claimed, finished_records, header_of, inputs_record, is_captured, manifest_of
from .capture_settings import CaptureSettings
from .conversation import Conversation
from .engines import open_engine
from .meter import Meter
from .mix import load_mix
from .parts import Part
from .recorded import RecordedAnswers
from .requests import Prompts, ShardPlan, plan_shards
from .store import HEADER, MANIFEST, SHARDS, write_shard

Json = dict[str, Any]


class _Plan(NamedTuple):
    """What one run has to do."""

    target: Target
    settings: CaptureSettings
    shards: Sequence[ShardPlan]
    header: Json
    folder: Path


def capture(
    target: Target,
    mix: Path,
    settings: CaptureSettings,
    scored: Sequence[SamplingSettings],
    folder: Path,
    part: Part | None = None,
) -> None:
    """Answer the mix into `folder`, or finish what a stopped run left there; `part`: no more than that part of it.

    Train conversations are answered at their own sampling setting, selection and holdout once per `scored` setting.
    Raises StaleInputError for a folder of other inputs, ContextLengthError, InputError, DiskFullError, EngineError.
    """
    capture_conversations(target, load_mix(mix), settings, scored, folder, part)


def capture_conversations(
    target: Target,
    conversations: Sequence[Conversation],
    settings: CaptureSettings,
    scored: Sequence[SamplingSettings],
    folder: Path,
    part: Part | None = None,
) -> None:
    """`capture` of conversations that no mix folder holds."""
    if target.collective:
        _check_spread(settings)
    shards = plan_shards(conversations, settings, scored)
    recorded = None if settings.answers is None else RecordedAnswers(settings.answers, target.fingerprint)
    inputs = inputs_record(target.fingerprint, str(target.dtype), conversations, settings, scored)
    header = header_of(target, inputs, len(shards), part and str(part))
    budget = settings.budget  # of the whole, whatever a part's share is
    if part is not None:
        shards, settings = part.of(shards), part.share(settings)
    plan = _Plan(target, settings, shards, header, folder)
    resumed = claimed(folder, header)
    records = finished_records(folder, shards, content=False)
    left = _unfinished(shards, records)
    if resumed and is_captured(folder, budget) and _promised(folder) <= records.keys():
        return
    prompts = Prompts(target, shards, settings)
    if left:
        Meter(folder, left, [], prompts, settings, None).require_space_for(left[0])
    with storage.lock(folder / ".lock", what="another capture into this folder"):
        if not claimed(folder, header):
            storage.write_json(folder / HEADER, header)
        for leftover in (folder / SHARDS).glob(".*.tmp"):  # of a killed run
            leftover.unlink(missing_ok=True)
        records = finished_records(folder, shards, content=True)
        ended_by = _answer_rest(plan, prompts, records, recorded) if left else None
        limits = {} if budget is None else budget.limits
        storage.write_json(folder / MANIFEST, manifest_of(header, shards, records, ended_by, limits))


def _check_spread(settings: CaptureSettings) -> None:
    """Raise InputError where a target that is spread over the ranks of a training would have to run."""
    why = "needs passes of the target, which target.shard = true spreads over the ranks of a training"
    if settings.engine is not None and settings.engine.signals != "engine":
        raise InputError(f"capture.backend.signals = {settings.engine.signals}: {why}; set engine")
    if settings.engine is None and settings.answers is None:
        raise InputError(
            f"capture.backend = transformers: {why}; set kind vllm with signals engine, or give capture.answers"
        )
    if settings.answers is not None and settings.top_k:
        raise InputError(f"capture.top_k = {settings.top_k}: for signals of recorded answers it {why}; set 0")


def _promised(folder: Path) -> set[str]:
    """Shards that a manifest lists."""
    return {record["name"] for record in storage.read_object(folder / MANIFEST)["shards"]}


def _answer_rest(
    plan: _Plan, prompts: Prompts, records: dict[str, Json], recorded: RecordedAnswers | None
) -> str | None:
    """Answer the shards that have no record yet, and add theirs. Returns the limit that ended it, if one did."""
    left = _unfinished(plan.shards, records)
    if records and left:
        say(f"{plan.folder}: resuming; {len(records)} of {len(plan.shards)} shards are there")
    answers = [answer for shard in left for answer in shard.answers]
    # One shard is written beside the decoder, which goes on meanwhile; the next one waits for it.
    with (
        open_engine(plan.target, answers, prompts, plan.settings) as engine,
        bar("Capturing", len(answers), "answers", remaining=False) as tick,
        ThreadPoolExecutor(1) as writer,
    ):
        meter = Meter(plan.folder, left, records.values(), prompts, plan.settings, plan.settings.budget, tick)
        start, writing = time.monotonic(), list[tuple[ShardPlan, Future[Json]]]()
        about = {} if engine is None else {"engine": engine.about}
        for shard, found in answer_shards(plan.target, left, prompts, plan.settings, meter, recorded, engine):
            seconds, start = time.monotonic() - start, time.monotonic()
            _finish(writing, records, meter)
            writing.append((shard, writer.submit(_write, plan.folder, shard, found, seconds, about)))
        _finish(writing, records, meter)
    if meter.ended_by is not None:
        _say_what_is_left(plan, records, meter.ended_by)
    return meter.ended_by


def _finish(writing: list[tuple[ShardPlan, Future[Json]]], records: dict[str, Json], meter: Meter) -> None:
    """Wait for the shard that is being written, and add its record."""
    while writing:
        shard, written = writing.pop()
        records[shard.name] = written.result()
        meter.wrote(shard, records[shard.name]["bytes"])


def _unfinished(shards: Sequence[ShardPlan], records: dict[str, Json]) -> list[ShardPlan]:
    return [shard for shard in shards if shard.name not in records]


def _say_what_is_left(plan: _Plan, records: dict[str, Json], ended_by: str) -> None:
    """Raises InputError where the budget left nothing to train on."""
    train = [shard for shard in plan.shards if shard.split == "train"]
    done = sum(shard.name in records for shard in train)
    assert plan.settings.budget is not None
    limit = f"{ended_by}: {plan.settings.budget.limits[ended_by]:g}"
    if not done and PART not in plan.header:
        raise InputError(
            f"capture.budget.{limit}: reached before a train conversation was answered (selection and holdout come "
            f"first); raise it, and the same command goes on"
        )
    say(f"{plan.folder}: ended by capture.budget.{limit}; {done} of {len(train)} train shards are answered")


def _write(folder: Path, shard: ShardPlan, answers: Answers, seconds: float, about: Json) -> Json:
    """Write and record one shard. The record comes last: without it the shard does not count.

    `about`: the engine that answered. `seconds`: since the shard before it was complete, so that those of all shards
    add up to the run's.
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
        **about,
    }
    if answers.logp_difference is not None:
        record["logp_difference"] = round(answers.logp_difference, 6)
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
