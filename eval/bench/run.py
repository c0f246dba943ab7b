"""Benchmark runs: real decoding of the same prompts with every method by turns, plain decoding first in each turn.

A method is warmed up at each batch size before it is timed. Where its rounds become CUDA graphs, which belong to one
run, each run begins with short answers that are not timed. Repeats go round all methods, so that other load on the
machine affects all of them. Each run is recorded when it is done, and a recorded run is not run again.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError

from ... import fingerprint
from ...errors import CorruptDataError, DraftforgeError, MissingFileError, one_line
from ...progress import Advance, bar, say
from ...specdec.decoder import decode_rounds
from ...specdec.memory_fit import takes_graphs
from ...specdec.models import CausalModel
from ...specdec.proposers.base import Proposer
from ...specdec.requests import DecodeRun, Generation, Request, RoundTimer
from ...specdec.sampling_settings import SamplingSettings
from ...storage import read_json, write_bytes
from ..acceptance import Estimate
from ..draft_configs import DraftConfig
from .draft_memory import draft_bytes
from .latency import TimedAnswer, mean

# Names that stand for no method and no domain of the user's.
PLAIN = "plain"
EVERY = "(all)"
"""Name of all domains together; no real domain has it."""


class BenchPrompt(NamedTuple):
    """One prompt, as the target reads it."""

    name: str
    domain: str
    ids: list[int]


def _known(value: Any) -> Any:
    return math.nan if value is None else value


Number = Annotated[
    float, BeforeValidator(_known), PlainSerializer(lambda x: None if math.isnan(x) else x, when_used="json")
]
"""NaN where it is not known; null in JSON."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Setting(_Record):
    """Setting of a run: the method, its K or tree, the accept rule and the batch size."""

    method: str
    levels: int = Field(ge=0)
    """K of a chain, or levels of the tree; 0: nothing is drafted."""
    tree: str = ""
    rule: str = "greedy"
    batch_size: int = Field(ge=1)

    @property
    def config(self) -> DraftConfig:
        return DraftConfig(self.levels, self.tree)

    @property
    def plain(self) -> bool:
        return not self.levels

    @property
    def label(self) -> str:
        """Label in sentences: the method and its K or tree."""
        return self.method if self.plain else f"{self.method} {self.config}"


# --- records of runs: what is measured ---
class RoundParts(_Record):
    """Mean seconds of a round's parts, measured under a timer in a short run of its own."""

    draft_seconds: Number
    verify_seconds: Number
    rest_seconds: Number


class Memory(_Record):
    """Bytes of memory that drafting adds."""

    weights: int
    """Bytes of the draft's weights, without those that it shares with the target."""
    state: int
    """Bytes of the draft's caches and buffers at this batch size."""
    peak: int | None
    """Peak bytes that torch allocated during the run beyond those before it; None without CUDA."""


class RunRecord(_Record):
    """Record of one run over all prompts."""

    setting: Setting
    repeat: int = Field(ge=0)
    seconds: float = Field(gt=0)
    answers: list[TimedAnswer] = Field(min_length=1)
    parts: RoundParts
    memory: Memory


# --- figures of rows: what is derived ---
class Spread(_Record):
    """Spread of a figure over repeats: median, least and most."""

    value: Number
    low: Number
    high: Number

    @property
    def estimate(self) -> Estimate:
        """Estimate for tables; equal ends, as of one repeat, give no interval."""
        return Estimate(self.value) if self.low == self.high else Estimate(self.value, self.low, self.high)


class Interval(_Record):
    """Figure from counts with its interval by conversation cluster."""

    value: Number
    low: Number
    high: Number
    reason: str = ""
    """Reason why there is no interval, or no value."""

    @classmethod
    def of(cls, estimate: Estimate) -> "Interval":
        return cls(value=estimate.value, low=estimate.low, high=estimate.high, reason=estimate.reason)

    @property
    def estimate(self) -> Estimate:
        return Estimate(self.value, self.low, self.high, reason=self.reason)


class LengthRow(_Record):
    """Figures of the answers of one range of lengths."""

    lengths: str
    prompts: int
    speedup: Spread
    first_token_share: Number
    """Share of the answers' time that passes before the first token."""


class BenchRow(_Record):
    """Figures of one setting in one domain."""

    setting: Setting
    domain: str
    prompts: int
    tokens: int
    rounds: float
    tau: Interval
    alphas: list[Interval]
    tokens_per_second: Spread
    decoding_tokens_per_second: Spread
    """Throughput without first tokens and without the time in which the target reads prompts."""
    speedup: Spread
    decoding_speedup: Spread
    first_token_p50: Number
    first_token_p95: Number
    inter_token_p50: Number
    inter_token_p95: Number
    first_token_share: Number
    round_seconds: Number
    """Mean seconds of this setting's fullest rounds in all domains; the median of that over repeats."""
    break_even_tau: Number
    """Time of a round over the time of a plain decoding step, at this batch size."""
    slots: Number
    """Mean number of slots in use."""
    parts: RoundParts
    memory: Memory
    equal_answers: Number
    """Share of answers that equal plain decoding's at this batch size; NaN above temperature 0."""
    lengths: list[LengthRow]


class Failure(_Record):
    """Failure of a method, or of one of its settings, to run."""

    method: str
    plan: str
    batch_size: int | None
    """Batch size that did not run; None: every one."""
    reason: str


class Environment(_Record):
    """Environment of a benchmark: machine, software, models and options behind its figures."""

    hardware: str
    dtype: str
    torch: str
    transformers: str
    draftforge: str
    commit: str | None
    command: list[str]
    target: str
    target_fingerprint: str
    drafts: dict[str, str]
    """Address of each method's draft; "" where nothing was trained."""
    prompts: dict[str, int]
    """Number of prompts by domain."""
    prompts_left_out: int
    """Number of prompts that are too long for the target's context."""
    max_new_tokens: int
    sampling: str
    repeats: int
    confidence: float


class Report(_Record):
    """Whole benchmark, as bench.json holds it."""

    version: int = 1
    surroundings: Environment
    rows: list[BenchRow]
    failures: list[Failure]
    words: list[str]


# --- the runs themselves ---
_WARM_TOKENS = 32
_SETTLING = 2  # first rounds of a run: in the second of its kind each part is recorded as a graph
_MICROSECOND = 6


@dataclass(frozen=True)
class BenchEntry:
    """Benchmark entry: a method with its K or tree, and how to make its proposer."""

    setting: Setting
    """Setting at batch size 1; the others differ in the batch size alone."""
    make: Callable[[], Proposer] | None
    """Factory of proposers, one for each run; None: plain decoding."""

    def at(self, batch_size: int) -> Setting:
        return self.setting.model_copy(update={"batch_size": batch_size})


@dataclass(frozen=True)
class BenchRun:
    """Work that is the same for every method: target, prompts, answer length and sampling."""

    target: CausalModel
    prompts: Sequence[BenchPrompt]
    max_new_tokens: int
    sampling: SamplingSettings
    stop_ids: frozenset[int]
    seed: int = 0

    def requests(self, most_prompts: int | None = None, most_tokens: int | None = None) -> list[Request]:
        """Requests for all prompts, or for the first `most_prompts` with answers of at most `most_tokens`.

        A prompt has the same random numbers for every method.
        """
        # Warm-up asks for fewer and shorter answers; the seeds stay those of the full run.
        longest = self.max_new_tokens if most_tokens is None else min(self.max_new_tokens, most_tokens)
        return [
            Request(one.ids, self.sampling, _seed(self.seed, one.name), longest, self.stop_ids)
            for one in self.prompts[:most_prompts]
        ]


class RunFolder:
    """Folder of the records of finished runs, one file each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, setting: Setting, repeat: int) -> RunRecord | None:
        """Record of an earlier call; None where there is none, or, with a message, where it is damaged."""
        # A file of another setting under this name (a digest collision, a copied folder) is not taken.
        path = self._path(setting, repeat)
        try:
            found = RunRecord.model_validate(read_json(path))
        except MissingFileError:
            return None
        except (CorruptDataError, ValidationError):
            say(f"{path}: not a readable record of a run; running it again")
            return None
        return found if (found.setting, found.repeat) == (setting, repeat) else None

    def write(self, record: RunRecord) -> None:
        write_bytes(self._path(record.setting, record.repeat), record.model_dump_json().encode())

    def _path(self, setting: Setting, repeat: int) -> Path:
        digest = fingerprint.short(fingerprint.of_json([setting.model_dump(mode="json"), repeat]))
        return self._folder / f"{digest}.json"


def run_all(
    work: BenchRun, entries: Sequence[BenchEntry], batch_sizes: Sequence[int], repeats: int, folder: RunFolder
) -> tuple[list[RunRecord], list[Failure]]:
    """Run every entry at every batch size, `repeats` times: the records, and failures with their reasons.

    The first entry is plain decoding, which every other is compared with.
    """
    # Batch sizes outermost, then repeats, then methods: a method and its plain run are neighbours in time.
    records: list[RunRecord] = []
    failures: dict[Setting, Failure] = {}
    warm: dict[Setting, RoundParts] = {}  # settings that were warmed up, with the parts of their rounds
    turns = list(product(batch_sizes, range(repeats), entries))
    with bar("bench", len(turns) * len(work.prompts), "answers") as advance:
        for batch_size, repeat, entry in turns:
            setting = entry.at(batch_size)
            # 1) nothing to compare with: plain decoding failed at this batch size
            if setting not in failures and entries[0].at(batch_size) in failures:
                why = f"plain decoding does not run at batch {batch_size}: there is nothing to compare with"
                failures[setting] = _failure(setting, why)
            # 2) a record of an earlier call
            found = None if setting in failures else folder.read(setting, repeat)
            # 3) else run it, once it is warm
            if found is None and setting not in failures:
                try:
                    if setting not in warm:
                        warm[setting] = warm_up(work, entry, batch_size)
                    found = run_once(work, entry, batch_size, repeat, warm[setting], advance)
                except (DraftforgeError, torch.OutOfMemoryError) as error:
                    failures[setting] = _failure(setting, one_line(error))
                    if work.target.device.type == "cuda":
                        torch.cuda.empty_cache()
                    continue
                folder.write(found)
            else:
                advance(len(work.prompts))
            if found is not None:
                records.append(found)
    return records, list(failures.values())


def warm_up(work: BenchRun, entry: BenchEntry, batch_size: int) -> RoundParts:
    """Warm-up in two short runs: one for one-time work, and one under a timer for the parts of a round."""
    # Enough prompts to fill the batch twice: a refilled slot is warm too.
    requests = work.requests(2 * batch_size, _WARM_TOKENS)
    for timer in (None, RoundTimer(work.target.device)):
        for _ in decode_rounds(_run(work, entry, batch_size, requests, _proposer(entry), timer)):
            pass
    # Full batches only, without the rounds in which graphs are recorded.
    rounds = timer.rounds if timer is not None else []
    fullest = max((one.batch for one in rounds), default=0)
    full = [one for one in rounds if one.batch == fullest]
    full = full[_SETTLING:] or full
    return RoundParts(
        draft_seconds=mean([one.draft for one in full]),
        verify_seconds=mean([one.verify for one in full]),
        rest_seconds=mean([one.rest for one in full]),
    )


def run_once(
    work: BenchRun,
    entry: BenchEntry,
    batch_size: int,
    repeat: int,
    parts: RoundParts,
    advance: Advance = lambda amount=1, note="": None,
) -> RunRecord:
    """One timed run over all prompts: the wall time, and the time of every arrival.

    No timer runs in it, so the host waits for the device only where serving would.
    """
    # 1) Requests: short ones that settle the run, then those that are timed.
    device, proposer = work.target.device, _proposer(entry)
    first, barriers = _settling(work, batch_size)
    run = _run(work, entry, batch_size, [*first, *work.requests()], proposer, None, barriers)
    # 2) Decode, and keep the timed answers by their prompt's index.
    before = _start_memory(device)
    done: dict[int, Generation] = {}
    for finished in decode_rounds(run):
        for index, generation in finished:
            if index >= len(first):
                done[index - len(first)] = generation
                advance(note=f"{entry.setting.label}, batch {batch_size}")
    # 3) Stop the clock once the device is done.
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = min(one.begun for one in done.values())
    seconds = time.perf_counter() - start
    return RunRecord(
        setting=entry.at(batch_size),
        repeat=repeat,
        seconds=seconds,
        answers=[timed_answer(index, done[index], start) for index in sorted(done)],
        parts=parts,
        memory=_memory(proposer, work.target, device, before),
    )


def _settling(work: BenchRun, batch_size: int) -> tuple[list[Request], frozenset[int]]:
    """Short answers that come before those that are timed, and where the next wait for all before them.

    A run records each part of its rounds, and each size in which prompts are read, when it comes up for the second
    time: first one whole batch, then one that is refilled. Where nothing is recorded there are none.
    """
    if not takes_graphs(work.target):
        return [], frozenset()
    # One full batch records the rounds, two more record refilled slots; barriers keep them out of the timed part.
    whole, refilled = (work.requests(count * batch_size, _WARM_TOKENS) for count in (1, 2))
    return [*whole, *refilled], frozenset([len(whole), len(whole) + len(refilled)])


def timed_answer(prompt: int, generation: Generation, start: float) -> TimedAnswer:
    """Record of an answer: token count, digest, arrival times since `start`, and rounds."""
    return TimedAnswer(
        prompt=prompt,
        tokens=len(generation.tokens),
        digest=fingerprint.short(fingerprint.of_json(generation.tokens)),
        begun=round(generation.begun - start, _MICROSECOND),
        arrivals=[round(at - start, _MICROSECOND) for at in generation.arrivals],
        rounds=[(one.drafted, one.accepted, one.emitted, one.reached) for one in generation.rounds],
    )


def _memory(proposer: Proposer | None, target: CausalModel, device: torch.device, before: int) -> Memory:
    # Peak memory counts what this run adds; weights of the target were there before.
    peak = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else None
    weights, state = draft_bytes(proposer, target)
    return Memory(weights=weights, state=state, peak=peak)


def _start_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _run(
    work: BenchRun,
    entry: BenchEntry,
    batch_size: int,
    requests: list[Request],
    proposer: Proposer | None,
    timer: RoundTimer | None = None,
    barriers: frozenset[int] = frozenset(),
) -> DecodeRun:
    levels, rule = max(entry.setting.levels, 1), entry.setting.rule
    return DecodeRun(work.target, proposer, requests, rule, levels, batch_size, timer=timer, barriers=barriers)


def _proposer(entry: BenchEntry) -> Proposer | None:
    return None if entry.make is None else entry.make()


def _seed(seed: int, name: str) -> int:
    return int(fingerprint.of_json([seed, name])[:15], 16)


def _failure(setting: Setting, reason: str) -> Failure:
    return Failure(method=setting.method, plan=setting.config.label, batch_size=setting.batch_size, reason=reason)
