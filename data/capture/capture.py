"""The target answers a mix; its answers and teacher signals go to disk shard by shard.

A killed run goes on where it was: a shard counts once its record is written, so only those in flight are lost and none
is done twice. A folder begun with another target, tokenizer, template, setting or mix is refused.

Several processes may share it, and each takes one shard after another: the first one keeps the folder, says which
shards are left, and writes the manifest. What comes of it is what one makes alone, and any number of them goes on.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from ... import fingerprint, storage
from ...distributed.shared_work import ALONE, Crew, Work
from ...errors import InputError, StaleInputError
from ...progress import bar, say
from ...specdec.sampling import SamplingSettings
from ...specdec.targets import Target
from ..backends.base import open_engine
from ..conversation import Conversation, Prompts, ShardPlan, plan_shards
from ..mix import load_mix
from ..settings import BudgetSettings, CaptureSettings
from ..store import HEADER, MANIFEST, SHARDS
from .budget import CaptureBudget
from .manifest import (
    PART,
    Part,
    claimed,
    finished_records,
    header_of,
    inputs_record,
    is_captured,
    manifest_of,
    versions,
    write_answers,
)
from .reuse import RecordedAnswers
from .scheduler import answer_shards

Json = dict[str, Any]

_SUMMED = ("samples", "tokens", "bytes", "seconds")
_LAST_WRITES_SECONDS = 10.0  # of a rank whose first one was killed


class _Plan(NamedTuple):
    """What one run has to do."""

    target: Target
    settings: CaptureSettings
    budget: BudgetSettings | None
    """Of the whole, whatever a part's share is."""
    shards: Sequence[ShardPlan]
    header: Json
    folder: Path
    recorded: RecordedAnswers | None

    @property
    def nothing_left(self) -> bool:
        """Whether the folder holds all of it, or all that the budget pays for."""
        if not is_captured(self.folder, self.budget):
            return False
        return _promised(self.folder) <= finished_records(self.folder, self.shards, content=False).keys()


def capture(
    target: Target,
    mix: Path,
    settings: CaptureSettings,
    scored: Sequence[SamplingSettings],
    folder: Path,
    part: Part | None = None,
    crew: Crew = ALONE,
) -> None:
    """Answer the mix into `folder`, or finish what a stopped run left there; `part`: no more than that part of it.

    Train conversations are answered at their own sampling setting, selection and holdout once per `scored` setting.
    A `crew` shares the work; only its first process knows, on return, that all of it is done. Raises StaleInputError
    for a folder of other inputs, ContextLengthError, InputError, DiskFullError, EngineError.
    """
    capture_conversations(target, load_mix(mix), settings, scored, folder, part, crew)


def capture_conversations(
    target: Target,
    conversations: Sequence[Conversation],
    settings: CaptureSettings,
    scored: Sequence[SamplingSettings],
    folder: Path,
    part: Part | None = None,
    crew: Crew = ALONE,
) -> None:
    """`capture` of conversations that no mix folder holds."""
    if target.collective:
        check_spread(settings)
    if settings.engine is not None and settings.engine.url is None:  # an engine in this process has GPUs of its own
        if not crew.first:
            return
        crew = ALONE
    shards = plan_shards(conversations, settings, scored)
    recorded = None if settings.answers is None else RecordedAnswers(settings.answers, target.fingerprint)
    inputs = inputs_record(target.fingerprint, str(target.dtype), conversations, settings, scored)
    header = header_of(target, inputs, len(shards), part and str(part))
    budget = settings.budget
    if part is not None:
        shards, settings = part.of(shards), part.share(settings)
    plan = _Plan(target, settings, budget, shards, header, folder, recorded)
    if crew.first:
        _lead(plan, crew)
    else:
        _help(plan, crew)


def _lead(plan: _Plan, crew: Crew) -> None:
    """The first process's part: it keeps the folder, and is through when all are."""
    folder, shards = plan.folder, plan.shards
    if claimed(folder, plan.header) and plan.nothing_left:
        return
    left = _unfinished(shards, finished_records(folder, shards, content=False))
    prompts = Prompts(plan.target, shards, plan.settings)
    if left:
        CaptureBudget(folder, left, [], prompts, plan.settings, None).require_space_for(left[0])
    with storage.lock(folder / ".lock", what="another capture into this folder"):
        if not claimed(folder, plan.header):
            storage.write_json(folder / HEADER, plan.header)
        _clear(folder)
        records = finished_records(folder, shards, content=True)
        ended_by = _answer_rest(plan, prompts, records, crew) if left else None
        limits = {} if plan.budget is None else plan.budget.limits
        storage.write_json(folder / MANIFEST, manifest_of(plan.header, shards, records, ended_by, limits))


def _clear(folder: Path) -> None:
    """Remove what a killed run left. Raises LockedError where a rank of it still writes."""
    for path in folder.glob(".lock-*"):
        with storage.lock(path, _LAST_WRITES_SECONDS, "a rank of another capture into this folder"):
            path.unlink(missing_ok=True)
    for leftover in (folder / SHARDS).glob(".*.tmp"):
        leftover.unlink(missing_ok=True)


def check_spread(settings: CaptureSettings) -> None:
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


def _answer_rest(plan: _Plan, prompts: Prompts, records: dict[str, Json], crew: Crew) -> str | None:
    """Answer the shards that have no record yet, all processes together, and add theirs. Returns the limit that ended
    it, if one did."""
    left = _unfinished(plan.shards, records)
    if records and left:
        say(f"{plan.folder}: resuming; {len(records)} of {len(plan.shards)} shards are there")
    sums = {name: sum(record[name] for record in records.values()) for name in _SUMMED}
    asked = {"shards": [shard.name for shard in left], "earlier": sums, "made_by": _maker(plan)}
    with crew.share(plan.folder.name, asked) as work:
        assert work is not None
        own, reports = _answer(plan, prompts, left, sums, work)
        records |= own
        theirs = {name for report in reports for name in report["shards"]} - own.keys()
        written = [shard for shard in left if shard.name in theirs]
        # A file of another machine may take a moment to be seen here.
        work.wait(lambda: len(finished_records(plan.folder, written, content=False)) == len(written), "a shard")
        records |= finished_records(plan.folder, written, content=False)
    ended_by = next((report["ended_by"] for report in reports if report["ended_by"] is not None), None)
    if len(records) == len(plan.shards):
        return None  # the others could pay for what one could not
    _say_what_is_left(plan, records, ended_by)
    return ended_by


def _help(plan: _Plan, crew: Crew) -> None:
    """Another process's part."""
    prompts = Prompts(plan.target, plan.shards, plan.settings)
    with crew.share(plan.folder.name, None, over=lambda: plan.nothing_left) as work:
        if work is None:
            return
        if work.plan["made_by"] != _maker(plan):
            raise StaleInputError(
                f"{plan.folder}: rank {crew.rank} has another mix, target, setting or version than the first rank"
            )
        names = set(work.plan["shards"])
        left = [shard for shard in plan.shards if shard.name in names]
        with storage.lock(plan.folder / f".lock-{crew.rank}", what="a rank of another capture into this folder"):
            _answer(plan, prompts, left, work.plan["earlier"], work)
            (plan.folder / f".lock-{crew.rank}").unlink(missing_ok=True)


def _maker(plan: _Plan) -> str:
    """What all processes must have in common."""
    return fingerprint.of_json([plan.header, versions()])


def _answer(
    plan: _Plan, prompts: Prompts, left: Sequence[ShardPlan], earlier: Json, work: Work
) -> tuple[dict[str, Json], list[Json]]:
    """Answer this process's part of the shards that are left: their records, and on the first process every report.
    `earlier`: sums over the records that are there."""
    answers = [answer for shard in left for answer in shard.answers]
    settings, records = _own(plan.settings, len(answers), earlier, work.size), dict[str, Json]()
    # One shard is written beside the decoder, which goes on meanwhile; the next one waits for it.
    with (
        open_engine(plan.target, answers, prompts, settings) as engine,
        bar("Capturing", len(answers), "answers", remaining=False) as tick,
        ThreadPoolExecutor(1) as writer,
    ):
        meter = CaptureBudget(plan.folder, left, [earlier], prompts, settings, settings.budget, tick, work=work)
        start, writing = time.monotonic(), list[tuple[ShardPlan, Future[Json]]]()
        about = {} if engine is None else {"engine": engine.about}
        for shard, found in answer_shards(plan.target, left, prompts, settings, meter, plan.recorded, engine, work):
            seconds, start = (time.monotonic() - start) / work.size, time.monotonic()
            _finish(writing, records, meter)
            writing.append((shard, writer.submit(write_answers, plan.folder, shard, found, seconds, about)))
        _finish(writing, records, meter)
        meter.hear()
        reports = work.finish({"shards": sorted(records), "ended_by": meter.ended_by})
        meter.hear()
    return records, reports


def _own(settings: CaptureSettings, answers: int, earlier: Json, size: int) -> CaptureSettings:
    """The settings of one of so many processes: no more slots than leave some for the others, and its share of the rest
    of the budget. Requests to a server are divided."""
    share = -(-answers // size)
    slots = min(settings.batch_size, share) if settings.engine is None else -(-settings.batch_size // size)
    budget = settings.budget and settings.budget.share(size, earlier["tokens"], earlier["bytes"])
    return settings.model_copy(update={"batch_size": max(1, slots), "budget": budget})


def _finish(writing: list[tuple[ShardPlan, Future[Json]]], records: dict[str, Json], meter: CaptureBudget) -> None:
    """Wait for the shard that is being written, and add its record."""
    while writing:
        shard, written = writing.pop()
        records[shard.name] = written.result()
        meter.wrote(shard, records[shard.name]["bytes"])


def _unfinished(shards: Sequence[ShardPlan], records: dict[str, Json]) -> list[ShardPlan]:
    return [shard for shard in shards if shard.name not in records]


def _say_what_is_left(plan: _Plan, records: dict[str, Json], ended_by: str | None) -> None:
    """Raises InputError where the budget left nothing to train on."""
    train = [shard for shard in plan.shards if shard.split == "train"]
    done = sum(shard.name in records for shard in train)
    assert plan.settings.budget is not None and ended_by is not None
    limit = f"{ended_by}: {plan.settings.budget.limits[ended_by]:g}"
    if not done and PART not in plan.header:
        raise InputError(
            f"capture.budget.{limit}: reached before a train conversation was answered (selection and holdout come "
            f"first); raise it, and the same command goes on"
        )
    say(f"{plan.folder}: ended by capture.budget.{limit}; {done} of {len(train)} train shards are answered")
