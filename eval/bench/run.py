"""Real decoding of the same prompts with every method, by turns, and plain decoding first in every turn.

A method is warmed up at each batch size before it counts, and where its rounds become CUDA graphs, which belong to one
run, each run begins with short answers that are not timed. Repeats go round all methods, so that what else a machine
does meets all of them; each run is kept when it is done, and one that is kept is not run again.
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
from ...specdec.sampling import SamplingSettings
from ...storage import read_json, write_bytes
from ..acceptance import Estimate
from ..draft_configs import DraftConfig
from .draft_memory import draft_bytes
from .latency import TimedAnswer, mean

PLAIN = "plain"
EVERY = "(all)"
"""All domains together; no domain is called so."""


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
    """What one run differs from another in: a method, how much it drafts, and the batch size."""

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
        """The method and what it drafts, as sentences name it."""
        return self.method if self.plain else f"{self.method} {self.config}"


class RoundParts(_Record):
    """Where the time of a round goes: means under a timer, in a short run of its own."""

    draft_seconds: Number
    verify_seconds: Number
    rest_seconds: Number


class Memory(_Record):
    """Bytes that drafting adds."""

    weights: int
    """Of the draft, what it shares with the target left out."""
    state: int
    """Its caches and buffers at this batch size."""
    peak: int | None
    """Most that torch allocated during the run on top of what was there before it; CUDA only."""


class RunRecord(_Record):
    """One run of all prompts."""

    setting: Setting
    repeat: int = Field(ge=0)
    seconds: float = Field(gt=0)
    answers: list[TimedAnswer] = Field(min_length=1)
    parts: RoundParts
    memory: Memory


class Spread(_Record):
    """A figure of several repeats: the median, the least and the most."""

    value: Number
    low: Number
    high: Number

    @property
    def estimate(self) -> Estimate:
        """As tables show it: one repeat has no spread."""
        return Estimate(self.value) if self.low == self.high else Estimate(self.value, self.low, self.high)


class Interval(_Record):
    """A figure of counts with its bootstrap interval."""

    value: Number
    low: Number
    high: Number

    @classmethod
    def of(cls, estimate: Estimate) -> "Interval":
        return cls(value=estimate.value, low=estimate.low, high=estimate.high)

    @property
    def estimate(self) -> Estimate:
        return Estimate(self.value, self.low, self.high)


class LengthRow(_Record):
    """Answers of one range of lengths."""

    lengths: str
    prompts: int
    speedup: Spread
    first_token_share: Number
    """Of their time, what passes before the first token."""


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
    """Without the time in which the target reads prompts, and without first tokens."""
    speedup: Spread
    decoding_speedup: Spread
    first_token_p50: Number
    first_token_p95: Number
    inter_token_p50: Number
    inter_token_p95: Number
    first_token_share: Number
    round_seconds: Number
    """Of this setting, in all domains: the mean of its fullest rounds, the median of that over repeats."""
    break_even_tau: Number
    """The time of a round over that of a step of plain decoding, at this batch size."""
    slots: Number
    """In use, on average."""
    parts: RoundParts
    memory: Memory
    equal_answers: Number
    """Share that equals plain decoding's at this batch size; not known above temperature 0."""
    lengths: list[LengthRow]


class Failure(_Record):
    """A method, or one of its settings, that did not run."""

    method: str
    plan: str
    batch_size: int | None
    """None: at every batch size."""
    reason: str


class Environment(_Record):
    """Where figures come from."""

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
    """Where each method's draft lies; "" where nothing was trained."""
    prompts: dict[str, int]
    """By domain."""
    prompts_left_out: int
    """Too long for the target's context."""
    max_new_tokens: int
    sampling: str
    repeats: int
    confidence: float


class Report(_Record):
    """All of it; what bench.json holds."""

    version: int = 1
    surroundings: Environment
    rows: list[BenchRow]
    failures: list[Failure]
    words: list[str]


_WARM_TOKENS = 32
_SETTLING = 2  # first rounds of a run: in the second of its kind each part is recorded as a graph
_MICROSECOND = 6


@dataclass(frozen=True)
class BenchEntry:
    """A method that can be run, and how much it drafts."""

    setting: Setting
    """At batch size 1; the others differ in that alone."""
    make: Callable[[], Proposer] | None
    """Makes a proposer of its own for each run; None: plain decoding."""

    def at(self, batch_size: int) -> Setting:
        return self.setting.model_copy(update={"batch_size": batch_size})


@dataclass(frozen=True)
class BenchRun:
    """What every method answers."""

    target: CausalModel
    prompts: Sequence[BenchPrompt]
    max_new_tokens: int
    sampling: SamplingSettings
    stop_ids: frozenset[int]
    seed: int = 0

    def requests(self, most_prompts: int | None = None, most_tokens: int | None = None) -> list[Request]:
        """All of them, or the first ones with short answers. A prompt's numbers are the same for every method."""
        longest = self.max_new_tokens if most_tokens is None else min(self.max_new_tokens, most_tokens)
        return [
            Request(one.ids, self.sampling, _seed(self.seed, one.name), longest, self.stop_ids)
            for one in self.prompts[:most_prompts]
        ]


class RunFolder:
    """The records of finished runs, one file each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, setting: Setting, repeat: int) -> RunRecord | None:
        """The record of an earlier call; None where there is none, or (said aloud) a damaged one."""
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
    """Records of all runs, plain decoding (the first entry) beside each, and what could not be run, with the reason."""
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
    """Two short runs: one for what happens once, and one under a timer for the parts of a round."""
    requests = work.requests(2 * batch_size, _WARM_TOKENS)
    for timer in (None, RoundTimer(work.target.device)):
        for _ in decode_rounds(_run(work, entry, batch_size, requests, _proposer(entry), timer)):
            pass
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
    """All prompts once, timed as a whole and at every arrival, without a wait that serving would not have."""
    device, proposer = work.target.device, _proposer(entry)
    first, barriers = _settling(work, batch_size)
    run = _run(work, entry, batch_size, [*first, *work.requests()], proposer, None, barriers)
    before = _start_memory(device)
    done: dict[int, Generation] = {}
    for finished in decode_rounds(run):
        for index, generation in finished:
            if index >= len(first):
                done[index - len(first)] = generation
                advance(note=f"{entry.setting.label}, batch {batch_size}")
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
    whole, refilled = (work.requests(count * batch_size, _WARM_TOKENS) for count in (1, 2))
    return [*whole, *refilled], frozenset([len(whole), len(whole) + len(refilled)])


def timed_answer(prompt: int, generation: Generation, start: float) -> TimedAnswer:
    """What is kept of an answer."""
    return TimedAnswer(
        prompt=prompt,
        tokens=len(generation.tokens),
        digest=fingerprint.short(fingerprint.of_json(generation.tokens)),
        begun=round(generation.begun - start, _MICROSECOND),
        arrivals=[round(at - start, _MICROSECOND) for at in generation.arrivals],
        rounds=[(one.drafted, one.accepted, one.emitted, one.reached) for one in generation.rounds],
    )


def _memory(proposer: Proposer | None, target: CausalModel, device: torch.device, before: int) -> Memory:
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
