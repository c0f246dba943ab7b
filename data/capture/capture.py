"""Capture: the target answers a mix; its answers and teacher signals go to disk shard by shard.

A killed run resumes: a shard counts once its record is written, so only shards in flight are lost and none is answered
twice. A folder begun with another target, tokenizer, template, setting or mix is refused.

Several ranks can share a capture. The first rank owns the folder, announces which shards are missing, and writes the
manifest; each rank answers its share of the shards. The result is what one rank makes alone, and any number of ranks
can resume it.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from ... import fingerprint, storage
from ...distributed import ALONE, Ranks
from ...errors import InputError, StaleInputError
from ...progress import bar, say
from ...specdec.sampling_settings import SamplingSettings
from ...specdec.targets import Target
from ..backends.base import open_engine
from ..conversation import Conversation, as_served
from ..logged_prompts import OTHER_COUNT
from ..mix import load_mix
from ..settings import BudgetSettings, CaptureSettings
from ..store import HEADER, MANIFEST, SHARDS, read_manifest
from .budget import CaptureBudget
from .manifest import (
    PART,
    Part,
    check_claim,
    finished_records,
    header_of,
    inputs_record,
    is_captured,
    manifest_of,
    versions,
    write_answers,
)
from .plan import Prompts, ShardPlan, check_domains, plan_shards
from .reuse import ReusableAnswers
from .scheduler import answer_shards

Json = dict[str, Any]

_LAST_WRITES_SECONDS = 10.0  # of a rank whose first one was killed


class _Plan(NamedTuple):
    """Inputs, shards and folder of one run."""

    target: Target
    settings: CaptureSettings
    budget: BudgetSettings | None
    """Budget of the whole capture, also where this run answers a part of it."""
    shards: Sequence[ShardPlan]
    header: Json
    folder: Path
    reusable: ReusableAnswers | None
    reached: Callable[[float, float], None]
    """Is told the share of the work that is done."""

    @property
    def nothing_left(self) -> bool:
        """Whether the folder holds every shard, or every one that the budget pays for."""
        if not is_captured(self.folder, self.budget):
            return False
        return _promised(self.folder) <= finished_records(self.folder, self.shards, content=False).keys()


class _Report(NamedTuple):
    """The shards that one rank has written of its share."""

    written: Sequence[str] = ()
    ended_by: str | None = None
    """The limit of the budget that ended it."""


def capture(
    target: Target,
    mix: Path,
    settings: CaptureSettings,
    scored: Sequence[SamplingSettings],
    folder: Path,
    part: Part | None = None,
    ranks: Ranks = ALONE,
    may_be_unanswered: Collection[str] = (),
    reached: Callable[[float, float], None] = lambda share, size: None,
) -> None:
    """Answer the mix into `folder`, or finish what a stopped run left there; `part`: no more than that part of it.

    Train conversations are answered at their own sampling setting, selection and holdout once per `scored` setting.
    All `ranks` call it, and each answers a share. `may_be_unanswered`: domains of which it is right that no turn can be
    asked. `reached` is told now and then which share of this rank's work is done. Raises StaleInputError for a folder
    of other inputs, ContextLengthError, InputError, DiskFullError, EngineError, LostRankError.
    """
    conversations = as_served(load_mix(mix), target.sampling_defaults)
    capture_conversations(target, conversations, settings, scored, folder, part, ranks, may_be_unanswered, reached)


def capture_conversations(
    target: Target,
    conversations: Sequence[Conversation],
    settings: CaptureSettings,
    scored: Sequence[SamplingSettings],
    folder: Path,
    part: Part | None = None,
    ranks: Ranks = ALONE,
    may_be_unanswered: Collection[str] | None = None,
    reached: Callable[[float, float], None] = lambda share, size: None,
) -> None:
    """Capture conversations that are given directly and not as a mix folder; see `capture`.

    `may_be_unanswered` None: any domain may be.
    """
    if target.collective:
        check_spread(settings)
    if settings.engine is not None and settings.engine.url is None:  # an engine in this process has GPUs of its own
        if not ranks.first:
            return
        ranks = ALONE

    # 1) What is to be answered, the same on all ranks.
    shards = plan_shards(conversations, settings, scored)
    reusable = None
    if settings.answers is not None:
        reusable = ReusableAnswers(settings.answers, target.fingerprint, target.vocab_size)
    inputs = inputs_record(target.fingerprint, str(target.dtype), conversations, settings, scored)
    header = header_of(target, inputs, len(shards), part and str(part))
    budget = settings.budget
    if part is not None:
        shards, settings = part.shards(shards), part.settings(settings)
    plan = _Plan(target, settings, budget, shards, header, folder, reusable, reached)
    _check_same_plan(plan, ranks)
    done = ranks.first and check_claim(folder, header) and plan.nothing_left
    if ranks.broadcast(f"{folder.name}: whether it is done", done):
        return
    prompts = Prompts(target, shards, settings, conversations)
    for line in (target.prompts_in_doubt, *prompts.check.lines()):
        if line is not None:
            say(line)
    if may_be_unanswered is not None and part is None:
        check_domains(shards, prompts, may_be_unanswered)
    if ranks.first:
        _say_what_is_refused(prompts)
    with ExitStack() as locks:
        # 2) The first rank takes the folder, and says what is missing of it.
        records = _begin(plan, prompts, locks) if ranks.first else {}
        names, earlier = ranks.broadcast(
            f"{folder.name}: what is missing",
            [[shard.name for shard in _unfinished(shards, records)], _sums(records.values())],
        )

        # 3) Each rank answers its share of that.
        missing = [shard for shard in shards if shard.name in set(names)]
        mine = ranks.share(missing, [_size(shard) for shard in missing])
        started = time.monotonic()
        with nullcontext() if ranks.first else _writing(folder / f".lock-{ranks.rank}"):
            report = _answer(plan, prompts, mine, earlier, ranks) if mine else _Report()
        reports = [_Report(*report) for report in ranks.gather(folder.name, report)]

        # 4) The first one says what there is now.
        if ranks.first:
            seconds = time.monotonic() - started
            _finish(plan, records, reports, ranks)
            tokens = _sums(records.values())["tokens"] - earlier["tokens"]
            say(f"answered: {tokens:,} tokens in {seconds:.1f} s")


def _say_what_is_refused(prompts: Prompts) -> None:
    if prompts.refused:
        reasons = Counter(
            OTHER_COUNT if reason.startswith(OTHER_COUNT) else reason for reason in prompts.refused.values()
        ).most_common()
        more = f", and for {len(reasons) - 1} other reasons" if len(reasons) > 1 else ""
        say(f"turns left out: {len(prompts.refused)}, {reasons[0][1]} as {reasons[0][0]}{more}")


def _check_same_plan(plan: _Plan, ranks: Ranks) -> None:
    """Raise StaleInputError, on every rank, where one would answer something else than the first one."""
    first, *others = ranks.gather(f"{plan.folder.name}: plan", fingerprint.of_json([plan.header, versions()]))
    for rank, theirs in enumerate(others, start=1):
        if theirs != first:
            raise StaleInputError(
                f"{plan.folder}: rank {rank} has another mix, target, setting or version than the first rank"
            )


def _begin(plan: _Plan, prompts: Prompts, locks: ExitStack) -> dict[str, Json]:
    """Lock and claim the folder, and remove what a killed run left. Returns the records of finished shards.

    Raises LockedError where another run, or a rank of one, still writes.
    """
    folder, shards = plan.folder, plan.shards

    # 1) The disk must have room for the next shard at least.
    left = _unfinished(shards, finished_records(folder, shards, content=False))
    if left:
        CaptureBudget(folder, left, [], prompts, plan.settings, None).require_space_for(left[0])

    # 2) Lock the folder, then claim it with a header; the lock is held until the manifest is written.
    locks.enter_context(storage.lock(folder / ".lock", what="another capture into this folder"))
    if not check_claim(folder, plan.header):
        storage.write_json(folder / HEADER, plan.header)

    # 3) Wait for ranks of a killed run that still write, and remove their locks and unfinished files.
    for path in folder.glob(".lock-*"):
        with storage.lock(path, _LAST_WRITES_SECONDS, "a rank of another capture into this folder"):
            path.unlink(missing_ok=True)
    for leftover in (folder / SHARDS).glob(".*.tmp"):
        leftover.unlink(missing_ok=True)

    # 4) What is finished, content compared.
    records = finished_records(folder, shards, content=True)
    if records and len(records) < len(shards):
        say(f"{folder}: resuming; {len(records)} of {len(shards)} shards are there")
    return records


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Hold the lock file of a rank other than the first, so that a later run waits for a killed rank's last writes."""
    with storage.lock(path, what="a rank of another capture into this folder"):
        yield
        path.unlink(missing_ok=True)


def _finish(plan: _Plan, records: dict[str, Json], reports: Sequence[_Report], ranks: Ranks) -> None:
    """Write the manifest, once the first rank sees every shard that a rank has written."""
    folder, shards, budget = plan.folder, plan.shards, plan.budget

    # 1) Wait until the file system shows this rank the records that the others wrote.
    names = {name for report in reports for name in report.written}
    written = [shard for shard in shards if shard.name in names]

    def all_seen() -> bool:
        records.update(finished_records(folder, _unfinished(written, records), content=False))
        return names <= records.keys()

    ranks.wait_for_file(all_seen, f"a shard of {folder.name}")

    # 2) If a budget ended the run, say what it left out.
    ended_by = next((report.ended_by for report in reports if report.ended_by is not None), None)
    if len(records) == len(shards):
        ended_by = None  # the others could pay for what one could not
    if ended_by is not None:
        _say_what_is_left(plan, records, ended_by)

    # 3) The manifest makes the capture complete.
    limits = {} if budget is None else budget.limits
    storage.write_json(folder / MANIFEST, manifest_of(plan.header, shards, records, ended_by, limits))


def check_spread(settings: CaptureSettings) -> None:
    """Raise InputError where a target that is spread over the ranks of a training would have to run."""
    # An engine whose log-probs are checked, or no engine and no recorded answers, needs the target to run.
    why = "needs passes of the target, which target.shard = true spreads over the ranks of a training"
    if settings.engine is not None and settings.engine.signals != "engine":
        raise InputError(f"capture.backend.signals = {settings.engine.signals}: {why}; set engine")
    if settings.engine is None and settings.answers is None:
        raise InputError(
            f"capture.backend = transformers: {why}; set kind vllm with signals engine, or give capture.answers"
        )
    # Recorded answers need a pass for their signals.
    if settings.answers is not None and settings.top_k:
        raise InputError(f"capture.top_k = {settings.top_k}: for signals of recorded answers it {why}; set 0")


def _promised(folder: Path) -> set[str]:
    """Shards that a manifest lists."""
    return {record["name"] for record in read_manifest(folder)["shards"]}


def _answer(plan: _Plan, prompts: Prompts, shards: Sequence[ShardPlan], earlier: Json, ranks: Ranks) -> _Report:
    """Answer and write this rank's share of the shards. `earlier`: sums over the records that earlier runs finished."""
    answers = [answer for shard in shards for answer in shard.answers]
    title = "Capturing" if ranks.world_size == 1 else f"Capturing (1 of {ranks.world_size} shares)"
    settings = _share_of_settings(plan.settings, earlier, ranks.world_size)
    # One shard is written beside the decoder, which goes on meanwhile; the next one waits for it.
    with (
        open_engine(plan.target, answers, prompts, settings) as engine,
        bar(title, len(answers), "answers", remaining=False) as tick,
        ThreadPoolExecutor(1) as writer,
    ):

        def advance(amount: float, note: str = "") -> None:
            tick(amount, note)
            if note:  # computed twice a second at most
                plan.reached(budget.share_done, budget.bytes_of_run)

        budget = CaptureBudget(
            plan.folder, shards, [earlier], prompts, settings, settings.budget, advance, writers=ranks.world_size
        )
        start, writing, names = time.monotonic(), list[tuple[ShardPlan, Future[Json]]](), list[str]()
        about = {} if engine is None else {"engine": engine.about}

        # The bytes of a shard count once it is on disk; an error of its write is raised here.
        def wait_for_write() -> None:
            while writing:
                shard, written = writing.pop()
                budget.wrote(shard, written.result()["bytes"])
                names.append(shard.name)

        # A shard's seconds run from the shard before it. Ranks work side by side, so each counts its part of the time.
        for shard, found in answer_shards(plan.target, shards, prompts, settings, budget, plan.reusable, engine):
            seconds, start = (time.monotonic() - start) / ranks.world_size, time.monotonic()
            wait_for_write()
            writing.append((shard, writer.submit(write_answers, plan.folder, shard, found, seconds, about)))
        wait_for_write()
    return _Report(names, budget.ended_by)


def _share_of_settings(settings: CaptureSettings, earlier: Json, ranks: int) -> CaptureSettings:
    """Settings for one of `ranks` ranks: its share of what is left of the budget, and of the requests to a server."""
    budget = settings.budget and settings.budget.share(ranks, earlier["tokens"], earlier["bytes"])
    requests = settings.batch_size if settings.engine is None else -(-settings.batch_size // ranks)
    return settings.model_copy(update={"batch_size": requests, "budget": budget})


def _sums(records: Iterable[Json]) -> Json:
    found = list(records)
    return {name: sum(record[name] for record in found) for name in ("samples", "tokens", "bytes", "seconds")}


def _size(shard: ShardPlan) -> int:
    """Most answer tokens that a shard may have."""
    return sum(answer.max_new_tokens for answer in shard.answers)


def _unfinished(shards: Sequence[ShardPlan], records: dict[str, Json]) -> list[ShardPlan]:
    return [shard for shard in shards if shard.name not in records]


def _say_what_is_left(plan: _Plan, records: dict[str, Json], ended_by: str | None) -> None:
    """Report which share of the train shards a budget paid for. Raises InputError where it left none to train on."""
    # A part of a capture may be without train shards; a whole one may not.
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
