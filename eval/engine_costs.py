"""Costs from the engine: times of rounds and answers in the operator's own vLLM, as a cost table over a load's grid.

At each place of the grid as many requests as the batch size are sent at once, with prompts of their own and answers of
one fixed length, so that the mean context is the same whatever is accepted. The engine's counters are read while it
answers: between two readings at which every request is past its prompt and none has ended, all rounds are of the whole
batch. The engine itself counts these rounds and adds up their seconds (`vllm:inter_token_latency_seconds`), so neither
the client's speed nor acceptance enters.

At each batch size closed-loop traffic follows, with prompts and answers of the load's lengths: as many requests as the
batch size are in flight, and the next one is sent when one ends. Answers have from half to one and a half times that
length, as an operator's differ, too: those of one length that begin together end together, and their prompts are read
in one pass. Between two readings at which all are in flight, seconds and rounds for each prompt that was read hold what
it costs the others: it is read in their rounds, and by a server that has a front end.

Prompt lookup drafts in a share s of a request's rounds only, and a round over B requests in which none drafts costs a
plain one: the full round F follows from the measured mean M = (1 - i) F + i plain, i = (1 - s)^B, as `serving_load.py`
puts them together again.

Servers draft for real, or where vLLM can accept synthetically (0.23 and later, on GPUs only), as if each token after
accepted ones were accepted half the time.
"""

import json
import math
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

from pydantic import ValidationError

from ..data.backends.http_json import key_in
from ..errors import EngineError, InputError, named, refused_value
from ..progress import bar, say
from ..specdec.formats.layouts import NATIVE, layout_of
from ..specdec.proposers.training_free import LOOKUP
from ..specdec.sampling_settings import SamplingSettings
from ..specdec.serve_commands import ServeCommand, lookup_command, plain_command, serve_command
from ..specdec.serving_plan import ServingPlan
from ..specdec.stored_draft import StoredDraft
from ..specdec.target_settings import TargetSettings
from .cost_measurement import Grid, cut_prompts, measured_configs, runs_at
from .cost_table import CHAIN_WAY, PLAIN_WAY, UNSTEADY, ClosedLoop, CostKey, CostTable, MeasuredRound
from .draft_configs import ProposerSpec
from .settings import EngineCostSettings, ScoreSettings
from .vllm_server import MODEL, EngineReading, TimedAnswer, VllmClient, VllmLauncher

FIELD = "score.load.costs"
_LOOK_SECONDS = 0.05  # between two readings of the counters, which cost the server some milliseconds each
_SETTLE_SECONDS = 30.0  # for the counters to tell what was answered
_WARM_TOKENS = 8
_DOUBLINGS = 4  # of an answer's length, until enough rounds are of the whole batch
_STEADY_SECONDS, _MOST_RUNS = 1.0, 8  # of rounds that are timed at a place, and runs for them at most
_LOOP_SECONDS, _FEWEST_WAVES, _MOST_WAVES = 3.0, 2, 64  # of closed-loop traffic; a wave: an answer of each in flight
_LOOPS = 2
_TEXTS = 16  # prompts of closed-loop traffic are so many at least
_REPEATED_TOKENS = 16  # prompts of prompt lookup repeat so many, so that it finds what to draft
_LEAST_SHARE = 0.9  # of a trained draft's rounds that draft, and of a full draft that is drafted
_SYNTHETIC_SINCE = (0, 23)


class EngineClient(Protocol):
    """One server of an engine: what `VllmClient` is, or a test's stand-in."""

    name: str

    def begin(
        self, prompts: Sequence[Sequence[int]], at_once: int, tokens: Sequence[int], sampling: SamplingSettings
    ) -> list[Future[TimedAnswer]]:
        """Ask for answers to all prompts, of so many tokens each, so many at once, the next one when one ends."""

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
        return synthetic(command, K) if self._synthetic else command

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


def synthetic(command: ServeCommand, K: int, accept: float = 0.5) -> ServeCommand:
    """The command with each draft token after accepted ones accepted with this probability, whatever is drafted."""
    words = shlex.split(command.text)
    at = words.index("--speculative-config") + 1
    rates = [accept ** (k + 1) for k in range(K)]
    accepting = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    words[at] = json.dumps(json.loads(words[at]) | accepting)
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

        def check(share: float, drafted: float) -> None:
            if share > 0:
                raise InputError(f"{client.name}: drafts; must be a server without a draft")

        probe = _Probe(client, self.prompts, self.settings, self.room, 0)
        points, loops, again = self._measured(probe, "plain", check, lambda place, found: found.seconds)
        return CostTable(key=key, points=points, closed_loops=loops, again=[again], measured=_today())

    def with_draft(self, table: CostTable, client: EngineClient, K: int, family: str) -> CostTable:
        """The table with the times of a server that drafts K tokens. Raises InputError or EngineError."""
        beside = {point.place: point.seconds for point in table.points if point.way == PLAIN_WAY}

        def full(place: tuple[int, int], found: "_SteadyRounds") -> float:
            return full_round(found.seconds, beside[place], found.share, place[0])

        def check(share: float, drafted: float) -> None:
            _check_drafts(share, drafted, K, family == LOOKUP, client.name)

        probe = _Probe(client, self.prompts, self.settings, self.room, K, repeated=family == LOOKUP)
        points, loops, again = self._measured(probe, f"{family} K={K}", check, full)
        more = {"points": [*table.points, *points], "closed_loops": [*table.closed_loops, *loops]}
        return table.model_copy(update={**more, "again": [*table.again, again], "measured": _today()})

    def _measured(
        self,
        probe: "_Probe",
        name: str,
        check: Callable[[float, float], None],
        seconds: Callable[[tuple[int, int], "_SteadyRounds"], float],
    ) -> tuple[list[MeasuredRound], list[ClosedLoop], MeasuredRound]:
        """Rounds and closed loops of one server, and the rounds of the last place again.

        `check` refuses a share of rounds that draft, and tokens of a draft; `seconds`: of a round at a place.
        """
        grid, K, points, loops = self.grid, probe.K, list[MeasuredRound](), list[ClosedLoop]()

        def timed(size: int, context: int) -> MeasuredRound:
            found = probe.rounds(size, context)
            check(found.share, found.drafted)
            with _told_times(probe.name):
                return MeasuredRound(
                    way=CHAIN_WAY if K else PLAIN_WAY, batch_size=size, levels=K, tokens=K + 1, context_tokens=context,
                    draft_seconds=0.0, verify_seconds=seconds((size, context), found), rest_seconds=0.0,
                    rounds=max(round(found.rounds), 1),
                )  # fmt: skip

        with bar(f"times of vLLM, {name}", len(grid.places) + len(grid.batch_sizes) + 1, "points") as advance:
            for size, context in grid.places:
                points.append(timed(size, context))
                advance(note=f"batch {size}, context {context}")
            for size in grid.batch_sizes:
                with _told_times(probe.name):
                    loop, drafted = probe.closed_loop(size)
                if not probe.repeated:  # prompt lookup drafts what it finds
                    check(loop.drafted_share, drafted)
                loops.append(loop)
                advance(note=f"{size} in flight")
            # An engine whose rounds wait for its host is as fast as that host is at the moment: what it took at first
            # and takes now says how much a promise by these times is worth.
            again = timed(*grid.places[-1])
            advance(note=f"batch {again.batch_size} again")
        if again.apart_from(points[-1]) > UNSTEADY:
            say(
                f"{probe.name}: a round at batch {again.batch_size} took {1e3 * points[-1].seconds:.2f} ms, and "
                f"{1e3 * again.seconds:.2f} ms when all was measured: promises by these times are as uncertain"
            )
        return points, loops, again


@contextmanager
def _told_times(name: str) -> Iterator[None]:
    """Raise EngineError for counts of a server of which no times of rounds can be made. `name`: of the server."""
    try:
        yield
    except ValidationError as error:
        raise EngineError(f"{name}: counts what no server takes: {refused_value(error)}") from None
    except ArithmeticError:
        raise EngineError(f"{name}: drafts in too small a share of its rounds for their times to tell") from None


def full_round(measured: float, plain: float, share: float, batch_size: int) -> float:
    """Seconds of a round that verifies drafts, from the mean over all rounds and the seconds of a plain one.

    `share`: of a request's rounds that draft, above 0.
    """
    idle = (1 - min(share, 1.0)) ** batch_size
    return max((measured - idle * plain) / (1 - idle), measured / 2)


def answer_lengths(count: int, mean: int, most: int) -> list[int]:
    """Lengths of answers, in tokens: evenly from half to one and a half times the mean, in pairs that have that mean.

    `most`: the longest, at least the mean.
    """
    width = max(min(mean // 2, most - mean, mean - 2), 0)
    # Multiples of the golden ratio, modulo 1, lie evenly however many there are.
    apart = [int((pair * 0.6180339887498949) % 1 * (width + 1)) for pair in range((count + 1) // 2)]
    return [mean + sign * one for one in apart for sign in (-1, 1)][:count]


def prompt_lengths(known: Sequence[int], count: int, mean: int, most: int) -> list[int]:
    """Lengths of prompts, in tokens: spread about the mean as the known ones are about theirs."""
    ranked, scale = sorted(known), mean * len(known) / sum(known)
    places = [int(number * 0.6180339887498949 % 1 * len(ranked)) for number in range(count)]
    return [min(max(round(ranked[place] * scale), 1), most) for place in places]


def _check_drafts(share: float, drafted: float, K: int, lookup: bool, name: str) -> None:
    """Raise InputError where a server does not draft K tokens in every round; prompt lookup may find less to draft."""
    if lookup and share > 0:
        if drafted < _LEAST_SHARE * K:
            say(f"{name}: {drafted:.1f} tokens a draft instead of {K}; its rounds are timed as they are")
        return
    if share < _LEAST_SHARE or abs(drafted - K) > (1 - _LEAST_SHARE) * K:
        raise InputError(
            f"{name}: drafts {drafted:.1f} tokens in {share:.0%} of its rounds; must draft {K} in every one"
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
        self._client, self._settings, self._room, self.K, self.repeated = client, settings, room, K, repeated
        self.name = client.name
        self._text = [token for prompt in prompts for token in prompt]
        self._lengths = [len(prompt) for prompt in prompts]

    def rounds(self, size: int, context: int) -> _SteadyRounds:
        """Rounds of `size` requests at a mean context. Raises EngineError or InputError."""
        # 1) Answers have as many tokens as the wanted rounds need at most, whatever is accepted of the largest K.
        asked = self._settings.costs
        most = max(2, 2 * min(context - 1, self._room - context - self.K - 2))
        tokens = min(most, 1 + asked.rounds * (max(self._settings.draft_tokens) + 1))
        wanted, kept = size * (asked.rounds - asked.warmup_rounds), list[list[EngineReading]]()
        # 2) Kernels are chosen and caches grow in a first short run.
        self._burst(size, context, min(_WARM_TOKENS, most))
        steady, runs = 0.0, runs_at(size, asked.prompts)
        while len(kept) < runs or (steady < _STEADY_SECONDS and len(kept) < _MOST_RUNS):
            # 3) Longer answers where prompts were still read for most of them.
            for _ in range(_DOUBLINGS):
                burst = self._burst(size, context, tokens)
                if burst.rounds >= wanted or tokens == most:
                    break
                tokens = min(most, 2 * tokens)
            kept.append(burst.steady or [self._unsteady(burst, size, context)])
            steady += sum(one.round_seconds for one in kept[-1]) / size
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

    def closed_loop(self, size: int) -> tuple[ClosedLoop, float]:
        """Closed-loop traffic of `size` requests at the load's lengths, and tokens of a draft (0: nothing was drafted).

        Raises EngineError or InputError.
        """
        load = self._settings.load
        assert load is not None
        # Texts as they are, so that prompt lookup drafts about as often as it will in them, and of their lengths: an
        # engine reads short ones another way than long ones.
        longest = self._room - 2 * load.answer_tokens - self.K
        lengths = prompt_lengths(self._lengths, max(size, _TEXTS), load.prompt_tokens, max(longest, load.prompt_tokens))
        whole = cut_prompts(self._text, len(lengths), max(lengths))
        texts = cycle([text[:length] for text, length in zip(whole, lengths)])
        room, most = _room(size, load.context_tokens), self._room - max(lengths) - self.K - 1

        def answers(count: int) -> tuple[EngineReading, EngineReading]:
            """What so many answers add while all requests are in flight, and in all."""
            before, looks = self._idle(), list[EngineReading]()
            prompts = list(islice(texts, count))
            lengths = answer_lengths(count, load.answer_tokens, most)
            asked = self._client.begin(prompts, size, lengths, self._settings.sampling[0])
            while not all(one.done() for one in asked):
                now = self._client.read()
                # From where each has ended two, about, to where none is left to be sent.
                looks += [now] if 2 * size <= now.since(before).finished <= count - size else []
                for one in wait(asked, timeout=5 * _LOOK_SECONDS, return_when=FIRST_EXCEPTION).done:
                    one.result()
            added = self._settled(before, count, room)
            return looks[-1].since(looks[0]) if looks else added, added

        # 1) First answers settle the server, and tell how long the traffic must last.
        _, first = answers(size)
        an_answer = first.at
        for _ in range(_LOOPS):
            # 2) The traffic, again where the first answers were so slow that it was too short.
            waves = min(max(math.ceil(_LOOP_SECONDS / max(an_answer, 1e-9)), _FEWEST_WAVES), _MOST_WAVES)
            seen, added = answers((waves + 3) * size)
            an_answer = added.at / (waves + 3)
            if seen.at >= _LOOP_SECONDS / 2 or waves == _MOST_WAVES:
                break
        # 3) Where it ends before it was seen, all of it counts.
        seen = seen if seen.first_tokens and seen.rounds else added
        self._check_counted(seen.rounds, min(seen.round_seconds, size * seen.at), "rounds")
        loop = ClosedLoop(
            batch_size=size, levels=self.K, prompt_tokens=load.prompt_tokens, answer_tokens=load.answer_tokens,
            seconds=size * seen.at / seen.first_tokens, rounds=seen.rounds / seen.first_tokens,
            drafted_share=seen.drafts / seen.rounds, prompts=round(seen.first_tokens),
        )  # fmt: skip
        return loop, added.drafted / added.drafts if added.drafts else 0.0

    def _check_counted(self, count: float, seconds: float, what: str) -> None:
        """Raise EngineError where a server answers, and counts no time or less than a nanosecond for it."""
        if not seconds > 1e-9 * count > 0:
            raise EngineError(f"{self._client.name}: counts {seconds:g} s for {count:g} {what} that it answered")

    def _prompts(self, count: int, length: int) -> list[list[int]]:
        """Prompts of a length, each of its own text."""
        if not self.repeated:
            return cut_prompts(self._text, count, length)
        return [list(islice(cycle(one), length)) for one in cut_prompts(self._text, count, _REPEATED_TOKENS)]

    def _burst(self, size: int, context: int, tokens: int) -> _Burst:
        """Answers of `tokens` tokens to `size` requests at a mean context. Raises EngineError or InputError."""
        # 1) Look again and again, but at a single request, whose rounds are all alike.
        before, looks, waited = self._idle(), list[EngineReading](), False
        prompts = self._prompts(size, max(context - tokens // 2, 1))
        asked = self._client.begin(prompts, size, [tokens] * size, self._settings.sampling[0])
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
        added = self._settled(before, size, _room(size, context))
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

    def _settled(self, before: EngineReading, size: int, room: str) -> EngineReading:
        """What `size` requests have added, once the server has counted them. `room`: advice where some were stopped."""
        now = self._until(lambda one: one.since(before).finished >= size, "does not count all of its answers")
        added = now.since(before)
        if added.preempted:
            raise EngineError(f"{self._client.name}: stopped {added.preempted:.0f} requests; {room}")
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
