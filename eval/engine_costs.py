"""Costs from the engine: times of rounds and prompts in the operator's own vLLM, as a cost table over a load's grid.

At each place of the grid as many requests as the batch size are sent at once, with prompts of their own and answers of
one fixed length, so that the mean context is the same whatever is accepted. The engine's counters are read while it
answers: between two readings at which every request is past its prompt and none has ended, all rounds are of the whole
batch. The engine itself counts these rounds and adds up their seconds (`vllm:inter_token_latency_seconds`), so neither
the client's speed nor acceptance enters.

Prompt lookup drafts in a share s of a request's rounds only, and a round over B requests in which none drafts costs a
plain one: the full round F follows from the measured mean M = (1 - i) F + i plain, i = (1 - s)^B, as `serving_load.py`
puts them together again.

Servers draft for real, or where vLLM can accept synthetically (0.23 and later, on GPUs only), half of each draft.
"""

import json
import re
import shlex
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import NamedTuple, Protocol

from ..data.backends.http_json import key_in
from ..errors import EngineError, InputError, named
from ..progress import bar, say
from ..specdec.formats.layouts import NATIVE, layout_of
from ..specdec.proposers.training_free import LOOKUP
from ..specdec.sampling_settings import SamplingSettings
from ..specdec.serve_commands import ServeCommand, lookup_command, plain_command, serve_command
from ..specdec.serving_plan import ServingPlan
from ..specdec.stored_draft import StoredDraft
from ..specdec.target_settings import TargetSettings
from .cost_measurement import Grid, cut_prompts, measured_configs, runs_at
from .cost_table import CHAIN_WAY, PLAIN_WAY, CostKey, CostTable, MeasuredPrompt, MeasuredRound
from .draft_configs import ProposerSpec
from .settings import EngineCostSettings, ScoreSettings
from .vllm_server import MODEL, EngineReading, VllmClient, VllmLauncher

FIELD = "score.load.costs"
_LOOK_SECONDS = 0.05  # between two readings of the counters, which cost the server some milliseconds each
_SETTLE_SECONDS = 30.0  # for the counters to tell what was answered
_WARM_TOKENS = 8
_DOUBLINGS = 4  # of an answer's length, until enough rounds are of the whole batch
_PROMPTS_A_LENGTH = 6  # the first settles
_REPEATED_TOKENS = 16  # prompts of prompt lookup repeat so many, so that it finds what to draft
_LEAST_SHARE = 0.9  # of a trained draft's rounds that draft, and of a full draft that is drafted
_SYNTHETIC_SINCE = (0, 23)


class EngineClient(Protocol):
    """One server of an engine: what `VllmClient` is, or a test's stand-in."""

    name: str

    def begin(
        self, prompts: Sequence[Sequence[int]], tokens: int, sampling: SamplingSettings
    ) -> list[Future[list[int]]]:
        """Ask for answers of `tokens` tokens to all prompts at once."""

    def read(self) -> EngineReading:
        """The server's counters."""


# --- servers: started here one after another, or the operator's ---


class EngineServers:
    """Servers of a target, without a draft and with one, as `score.load.costs` has them.

    `dtype`, such as bfloat16, and `hardware` are the target's here; `logs`: folder of the logs of started servers.
    """

    def __init__(
        self, settings: EngineCostSettings, target: TargetSettings, dtype: str, hardware: str, gpu: bool, logs: Path
    ) -> None:
        self._settings, self._target, self._dtype, self._gpu, self._logs = settings, target, dtype, gpu, logs
        self.hardware = hardware if settings.start else str(settings.hardware)
        if settings.start and target.adapter is not None:
            raise InputError(
                f"{FIELD}.start: the target's adapter {target.adapter} is merged here, which the engine does not do; "
                "name a folder that it is merged into"
            )

    @cached_property
    def engine(self) -> str:
        """Engine and version. Raises InputError or EngineError where there is none."""
        if self._settings.start:
            with named(f"{FIELD}.venv"):
                return f"vLLM {self._launcher.version()}"
        return self._client("plain_url", str(self._settings.plain_url)).version()

    @property
    def software(self) -> str:
        """Engine and version, with all options of servers that are started."""
        synthetic = ["with synthetic acceptance"] if self._synthetic else []
        return " ".join([self.engine, *self._settings.flags, *synthetic])

    def check(self, families: Collection[str]) -> None:
        """Raise InputError or EngineError, before any work, without an engine or with too few running servers.

        `families`: of every draft that is to be measured.
        """
        for family, drafts in Counter(() if self._settings.start else families).items():
            self._running(family)
            if drafts > 1:
                raise InputError(
                    f"{FIELD}.draft_urls.{family}: are servers of one draft; {drafts} drafts of that family are to be "
                    "scored: score them one by one"
                )
        assert self.engine

    def depths(self, draft: StoredDraft, spec: ProposerSpec) -> list[int]:
        """Every K at which a draft's rounds are measured. Raises InputError where running servers have too few."""
        if self._settings.start:
            return [config.levels for config in measured_configs(spec)]
        return self._running(draft.family)

    def _running(self, family: str) -> list[int]:
        there = sorted(self._settings.draft_urls.get(family, {}))
        if not there:
            raise InputError(
                f"{FIELD}.draft_urls.{family}: required: a draft of that family is to be scored; must have servers of "
                "the least and the largest K of score.draft_tokens"
            )
        return there

    @contextmanager
    def plain(self) -> Iterator[EngineClient]:
        """A server without a draft."""
        with self._server(
            "plain_url", self._settings.plain_url, "plain", lambda: plain_command("vllm", self._target)
        ) as found:
            yield found

    @contextmanager
    def drafting(self, draft: StoredDraft, K: int, rule: str) -> Iterator[EngineClient]:
        """A server that drafts `K` tokens. `rule`: the accept rule above temperature 0."""
        url = self._settings.draft_urls.get(draft.family, {}).get(K)
        name = f"{draft.family}-K{K}"
        with self._server(f"draft_urls.{draft.family}.{K}", url, name, lambda: self._command(draft, K, rule)) as found:
            yield found

    @contextmanager
    def _server(
        self, field: str, url: str | None, name: str, command: Callable[[], ServeCommand]
    ) -> Iterator[EngineClient]:
        if not self._settings.start:
            yield self._client(field, str(url))
            return
        # What fails names the server; its log stays.
        with named(f"{FIELD}: vLLM, {name}"):
            made, log = command(), self._logs / f"{name}.log"
            say(f"starting {self.engine}, {name} (log: {log})")
            with self._launcher.serving(made, self._dtype, log) as address:
                yield VllmClient("its server", address, timeout_seconds=self._settings.timeout_seconds, model=MODEL)

    def _client(self, field: str, url: str) -> VllmClient:
        key = key_in(self._settings.api_key_env, f"{FIELD}.api_key_env")
        return VllmClient(f"{FIELD}.{field}", url, key, self._settings.timeout_seconds)

    @cached_property
    def _launcher(self) -> VllmLauncher:
        venv = self._settings.venv
        python = Path(sys.executable) if venv is None else venv / "bin" / "python"
        return VllmLauncher(python, self._settings.flags, self._settings.start_seconds)

    def _command(self, draft: StoredDraft, K: int, rule: str) -> ServeCommand:
        """vLLM's command with this draft, by draftforge's own words."""
        if draft.family == LOOKUP:
            command = lookup_command("vllm", K, self._target)
        else:
            plan = ServingPlan.chain(K, rule)  # type: ignore[arg-type]
            command = serve_command(NATIVE, draft.family, plan, str(_served_folder(draft)), self._target)
        return _synthetic(command, K) if self._synthetic else command

    @property
    def _synthetic(self) -> bool:
        """Whether started servers accept synthetically: vLLM's kernels do so on GPUs only."""
        version = tuple(map(int, re.findall(r"\d+", self.engine)[:2]))
        return self._settings.start and self._gpu and version >= _SYNTHETIC_SINCE


def _served_folder(draft: StoredDraft) -> Path:
    """Folder of a draft as vLLM reads it. Raises InputError where it is none."""
    if draft.path is None or not draft.same_tokenizer or draft.path.is_file():
        raise InputError(f"{draft.path or draft.family}: vLLM serves no such draft with this target")
    if (layout := layout_of(draft.path)) != NATIVE:
        raise InputError(
            f"{draft.path}: has format {layout}; must be as vLLM reads it (`draftforge export --format {NATIVE}`)"
        )
    return draft.path.absolute()


def _synthetic(command: ServeCommand, K: int) -> ServeCommand:
    """The command with half of each draft accepted, whatever is drafted and by which rule."""
    words = shlex.split(command.text)
    at = words.index("--speculative-config") + 1
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 1 + K / 2}
    words[at] = json.dumps(json.loads(words[at]) | synthetic)
    return command._replace(text=shlex.join(words))


# --- tables ---


def plain_key(key: CostKey) -> CostKey:
    """Key of the rounds without a draft, which all drafts of a target share."""
    return key.model_copy(update={"draft": {}, "plans": {}})


@dataclass(frozen=True)
class EngineMeasurement:
    """Measurement of an engine over a grid, one server after another. `room`: longest sequence, in tokens."""

    prompts: Sequence[list[int]]
    settings: ScoreSettings
    grid: Grid
    room: int

    def plain(self, client: EngineClient, key: CostKey) -> CostTable:
        """Table of a server without a draft. Raises InputError or EngineError."""
        grid, points, read = self.grid, list[MeasuredRound](), list[MeasuredPrompt]()
        probe = _Probe(client, self.prompts, self.settings, self.room, 0)
        with bar("times of vLLM, plain", len(grid.places) + len(grid.prompts), "points") as advance:
            for size, context in grid.places:
                found = probe.rounds(size, context)
                if found.share > 0:
                    raise InputError(f"{client.name}: drafts; must be a server without a draft")
                points.append(_row(PLAIN_WAY, size, 0, context, found, found.seconds))
                advance(note=f"batch {size}, context {context}")
            for length in grid.prompts:
                seconds = statistics.median(one.prefill_seconds for one in probe.prompts(length))
                read.append(MeasuredPrompt(tokens=length, plain_seconds=seconds, draft_seconds=0.0))
                advance(note=f"prompts of {length}")
        return CostTable(key=key, points=points, prompt_points=read, measured=_today())

    def with_draft(self, table: CostTable, client: EngineClient, K: int, family: str) -> CostTable:
        """The table with the rounds of a server that drafts K tokens. Raises InputError or EngineError."""
        points, read, lookup = list(table.points), list(table.prompt_points), family == LOOKUP
        beside = {point.place: point.seconds for point in points if point.way == PLAIN_WAY}
        # What the draft adds to a prompt is measured once, beside the first K.
        lengths = self.grid.prompts if len(beside) == len(points) else []
        probe = _Probe(client, self.prompts, self.settings, self.room, K, repeated=lookup)
        steps, alone = len(self.grid.places) + len(lengths), dict[int, float]()
        with bar(f"times of vLLM, {family} K={K}", steps, "points") as advance:
            for size, context in self.grid.places:
                found = probe.rounds(size, context)
                _check_drafts(found, K, lookup, client.name)
                seconds = full_round(found.seconds, beside[size, context], found.share, size)
                points.append(_row(CHAIN_WAY, size, K, context, found, seconds))
                alone |= {context: seconds} if size == self.grid.batch_sizes[0] else {}
                advance(note=f"batch {size}, context {context}")
            # An answer of two tokens takes the prompt, the draft's part of it, and a round.
            for number, length in enumerate(lengths):
                both = statistics.median(one.inference_seconds for one in probe.prompts(length))
                one_round = alone[min(alone, key=lambda context: abs(context - length))]
                added = max(both - one_round - read[number].plain_seconds, 0.0)
                read[number] = read[number].model_copy(update={"draft_seconds": added})
                advance(note=f"prompts of {length}")
        return table.model_copy(update={"points": points, "prompt_points": read, "measured": _today()})


def full_round(measured: float, plain: float, share: float, batch_size: int) -> float:
    """Seconds of a round that verifies drafts, from the mean over all rounds and the seconds of a plain one.

    `share`: of a request's rounds that draft, above 0.
    """
    idle = (1 - min(share, 1.0)) ** batch_size
    return max((measured - idle * plain) / (1 - idle), measured / 2)


def _row(way: str, size: int, K: int, context: int, found: "_SteadyRounds", seconds: float) -> MeasuredRound:
    """Row of a cost table: whole rounds, as the engine does not tell their parts."""
    return MeasuredRound(
        way=way, batch_size=size, levels=K, tokens=K + 1, context_tokens=context, draft_seconds=0.0,
        verify_seconds=seconds, rest_seconds=0.0, rounds=max(round(found.rounds), 1),
    )  # fmt: skip


def _check_drafts(found: "_SteadyRounds", K: int, lookup: bool, name: str) -> None:
    """Raise InputError where a server does not draft K tokens in every round; prompt lookup may find less to draft."""
    if lookup and found.share > 0:
        if found.drafted < _LEAST_SHARE * K:
            say(f"{name}: {found.drafted:.1f} tokens a draft instead of {K}; its rounds are timed as they are")
        return
    if found.share < _LEAST_SHARE or abs(found.drafted - K) > (1 - _LEAST_SHARE) * K:
        raise InputError(
            f"{name}: drafts {found.drafted:.1f} tokens in {found.share:.0%} of its rounds; must draft {K} in every one"
        )


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def _room(size: int, context: int) -> str:
    return f"batch {size} at context {context} needs a larger --max-num-seqs or cache, or score.load a smaller batch"


# --- the measurement in one server ---


class _SteadyRounds(NamedTuple):
    """Rounds of the whole batch."""

    seconds: float
    rounds: float
    """Number of rounds behind the seconds."""
    share: float
    """Share of a request's rounds that draft."""
    drafted: float
    """Tokens of a draft; 0: nothing was drafted."""


class _Burst(NamedTuple):
    """What requests that were sent at once add to the counters."""

    steady: list[EngineReading]
    """Between one reading and the next, all requests past their prompts and none ended."""
    added: EngineReading
    """In all."""
    waited: bool
    """Whether one was seen to wait when another had ended already."""

    @property
    def rounds(self) -> float:
        return sum(one.rounds for one in self.steady)


class _Probe:
    """Measures one server that drafts `K` tokens. `repeated`: prompts repeat themselves; `room`: longest sequence."""

    def __init__(
        self,
        client: EngineClient,
        prompts: Sequence[list[int]],
        settings: ScoreSettings,
        room: int,
        K: int,
        repeated: bool = False,
    ) -> None:
        self._client, self._settings, self._room, self._K, self._repeated = client, settings, room, K, repeated
        self._text = [token for prompt in prompts for token in prompt]

    def rounds(self, size: int, context: int) -> _SteadyRounds:
        """Rounds of `size` requests at a mean context. Raises EngineError or InputError."""
        # 1) Answers have as many tokens as the wanted rounds need at most, whatever is accepted of the largest K.
        asked = self._settings.costs
        most = max(2, 2 * min(context - 1, self._room - context - self._K - 2))
        tokens = min(most, 1 + asked.rounds * (max(self._settings.draft_tokens) + 1))
        wanted, kept = size * (asked.rounds - asked.warmup_rounds), list[list[EngineReading]]()
        # 2) Kernels are chosen and caches grow in a first short run.
        self._burst(size, context, min(_WARM_TOKENS, most))
        for _ in range(runs_at(size, asked.prompts)):
            # 3) Longer answers where prompts were still read for most of them.
            for _ in range(_DOUBLINGS):
                burst = self._burst(size, context, tokens)
                if burst.rounds >= wanted or tokens == most:
                    break
                tokens = min(most, 2 * tokens)
            kept.append(burst.steady or [self._unsteady(burst, size, context)])
        # 4) Their seconds: medians, as somebody may disturb some; but the mean where plain rounds are among them.
        every = [one for burst in kept for one in burst]
        for one in every:
            self._check_counted(one.rounds, one.round_seconds, "rounds")
        rounds, drafts = sum(one.rounds for one in every), sum(one.drafts for one in every)
        drafted = sum(one.drafted for one in every) / drafts if drafts else 0.0
        bursts = [statistics.median(one.round_seconds / one.rounds for one in burst) for burst in kept]
        mixed = 0 < drafts / rounds < _LEAST_SHARE
        seconds = sum(one.round_seconds for one in every) / rounds if mixed else statistics.median(bursts)
        return _SteadyRounds(seconds, rounds / size, drafts / rounds, drafted)

    def prompts(self, length: int) -> list[EngineReading]:
        """What single requests add to the counters: each a prompt of `length` tokens and two tokens of an answer."""
        found = []
        for prompt in self._prompts(_PROMPTS_A_LENGTH, length):
            before = self._idle()
            asked = self._client.begin([prompt], 2, self._settings.sampling[0])
            asked[0].result()
            found.append(self._settled(before, 1))
            self._check_counted(1, min(found[-1].prefill_seconds, found[-1].inference_seconds), "prompts")
        return found[1:]

    def _check_counted(self, count: float, seconds: float, what: str) -> None:
        """Raise EngineError where a server answers, and counts no time or less than a nanosecond for it."""
        if not seconds > 1e-9 * count > 0:
            raise EngineError(f"{self._client.name}: counts {seconds:g} s for {count:g} {what} that it answered")

    def _prompts(self, count: int, length: int) -> list[list[int]]:
        """Prompts of a length, each of its own text."""
        if not self._repeated:
            return cut_prompts(self._text, count, length)
        return [list(islice(cycle(one), length)) for one in cut_prompts(self._text, count, _REPEATED_TOKENS)]

    def _burst(self, size: int, context: int, tokens: int) -> _Burst:
        """Answers of `tokens` tokens to `size` requests at a mean context. Raises EngineError or InputError."""
        # 1) Look again and again, but at a single request, whose rounds are all alike.
        before, looks, waited = self._idle(), list[EngineReading](), False
        prompts = self._prompts(size, max(context - tokens // 2, 1))
        asked = self._client.begin(prompts, tokens, self._settings.sampling[0])
        while not all(one.done() for one in asked):
            if size > 1:
                now = self._client.read().since(before)
                waited |= now.finished > 0 and now.waiting > 0
                looks += [now] if now.first_tokens == size and not now.finished else []
            wait(asked, timeout=_LOOK_SECONDS, return_when=FIRST_EXCEPTION)
            for one in asked:
                if one.done():
                    one.result()
        # 2) What was counted.
        added = self._settled(before, size)
        if added.preempted:
            raise EngineError(f"{self._client.name}: stopped {added.preempted:.0f} requests; {_room(size, context)}")
        steady = [after.since(one) for one, after in pairwise(looks)] if size > 1 else [added]
        return _Burst([one for one in steady if one.rounds], added, waited)

    def _unsteady(self, burst: _Burst, size: int, context: int) -> EngineReading:
        """All rounds of a burst of which no part was seen to be of the whole batch. Raises EngineError."""
        if burst.waited:
            raise EngineError(f"{self._client.name}: did not run {size} requests at once; {_room(size, context)}")
        say(
            f"{self._client.name}: batch {size}, context {context}: answers end too soon to see all requests at once; "
            "rounds of fewer are timed, too"
        )
        return burst.added

    def _idle(self) -> EngineReading:
        """Counters of the server while it has nothing to do."""
        found = self._until(lambda now: not now.running + now.waiting, "holds requests of others")
        if found.engines > 1:
            raise InputError(
                f"{self._client.name}: has {found.engines} replicas; times are of one: name a server of one"
            )
        return found

    def _settled(self, before: EngineReading, size: int) -> EngineReading:
        """What `size` requests have added, once the server has counted them."""
        now = self._until(lambda one: one.since(before).finished >= size, "does not count all of its answers")
        added = now.since(before)
        if (added.finished, added.first_tokens) != (size, size):
            raise EngineError(
                f"{self._client.name}: answered {added.first_tokens:.0f} requests where {size} were sent; it must "
                "serve nothing else while it is measured"
            )
        return added

    def _until(self, is_so: Callable[[EngineReading], bool], why: str) -> EngineReading:
        until = time.monotonic() + _SETTLE_SECONDS
        while not is_so(found := self._client.read()):
            if time.monotonic() > until:
                raise EngineError(f"{self._client.name}: {why}; it must serve nothing else while it is measured")
            time.sleep(_LOOK_SECONDS)
        return found
