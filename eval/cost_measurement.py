"""Cost measurement: times rounds of plain decoding and of every K or tree by turns.

A time counts as its ratio to the plain round of its turn, so that other load on the machine affects both alike. Without
a load, rounds are measured at batch 1, on real prompts one by one, for every K or tree. With one, over a grid that is a
cross: every batch size at the load's context, and the least and largest at shorter and longer ones; of chains the
least, the middle and the largest K; slots hold real prompts, cut or repeated to one length. Answers do not stop before
`costs.rounds`: times do not depend on what is said.
"""

import statistics
from collections.abc import Callable, Sequence
from itertools import cycle, islice, pairwise
from typing import NamedTuple

import torch

from .. import fingerprint
from ..errors import DeviceMemoryError, InputError
from ..progress import Advance, bar, say
from ..specdec.decoder import decode_rounds
from ..specdec.memory_fit import takes_graphs
from ..specdec.models import CausalModel
from ..specdec.proposers.base import Proposer
from ..specdec.requests import DecodeRun, Request, RoundSeconds, RoundTimer
from ..specdec.sampling_settings import SamplingSettings
from .bench.draft_memory import draft_bytes
from .cost_table import CostKey, CostTable, MeasuredPrompt, MeasuredRound, timed_rule, way_of
from .draft_configs import DraftConfig, ProposerSpec
from .settings import LoadSettings, ScoreSettings

_FEWEST_ROUNDS = 5
_PROMPT_REPEATS = 3
_PROMPTS_A_RUN = 6
_SETTLING_PROMPTS = 2  # of a run: the first of a width runs as it is, the second is recorded as a graph


class Grid(NamedTuple):
    """Measurement grid of a load: batch sizes, contexts and prompt lengths."""

    batch_sizes: list[int]
    contexts: list[int]
    context: int
    """Context of the load itself, in tokens; it is among `contexts`."""
    prompts: list[int]
    """Lengths, in tokens, of prompts that are read alone."""

    @classmethod
    def around(cls, load: LoadSettings, most_context: int) -> "Grid":
        """The grid around a load. Raises InputError where its context is longer than `most_context`."""
        # A load that does not fit cannot be measured.
        if load.context_tokens > most_context:
            raise InputError(
                f"score.load.context_tokens {load.context_tokens}: with the rounds that are timed (score.costs.rounds) "
                f"at most {most_context} fit the target's context"
            )
        # Half and twice the load's context and prompt, so that the fit sees how times grow; batch sizes by powers of
        # two.
        powers = (1 << n for n in range(load.largest.bit_length()))
        contexts, prompts = (
            sorted({max(middle // 2, 1), middle, min(2 * middle, most_context)})
            for middle in (load.context_tokens, load.prompt_tokens)
        )
        return cls(sorted({*load.batch_sizes, *powers}), contexts, load.context_tokens, prompts)

    @property
    def places(self) -> list[tuple[int, int]]:
        """Batch size and context of every grid point, the largest first, so that lack of memory shows at once."""
        # A cross instead of a full grid: other contexts only at the smallest and the largest batch.
        ends = {self.batch_sizes[0], self.batch_sizes[-1]}
        cross = {(size, self.context) for size in self.batch_sizes}
        return sorted(cross | {(size, context) for size in ends for context in self.contexts}, reverse=True)


def most_context(max_positions: int, deepest: int, rounds: int) -> int:
    """Longest context, in tokens, at which `rounds` rounds of at most `deepest` levels can be timed."""
    return max_positions - _answer_tokens(rounds, deepest) + rounds // 2


def room_for_rounds(max_positions: int, deepest: int, rounds: int) -> int:
    """Tokens of a prompt that fit beside `rounds` timed rounds of at most `deepest` levels. Raises InputError."""
    room = max_positions - _answer_tokens(rounds, deepest)
    if room < 1:
        most = (max_positions - 2) // (deepest + 1)
        raise InputError(
            f"score.costs.rounds = {rounds}: so many rounds of up to {deepest + 1} tokens do not fit the target's "
            f"context of {max_positions}; at most {most} do (more with smaller score.draft_tokens)"
        )
    return room


def costs_file(key: CostKey, grid: Grid | None) -> str:
    """File name of a key's cost table, measured over a grid or (None) at batch 1."""
    if grid is None:
        return f"costs-{fingerprint.short(key.digest)}.json"
    return f"fit-{fingerprint.short(fingerprint.of_json([key.digest, grid._asdict()]))}.json"


def measure_costs(
    key: CostKey,
    target: CausalModel,
    specs: Sequence[ProposerSpec],
    prompts: Sequence[list[int]],
    settings: ScoreSettings,
    grid: Grid | None = None,
    reached: Callable[[float], None] = lambda share: None,
) -> CostTable:
    """Decode the prompts plainly and with each config of the specs, interleaved: at batch 1, or over a grid.

    `reached` is told which share of the rounds is timed. Raises InputError without prompts, or where the rounds do not
    fit the target's context.
    """
    if not any(prompts):
        raise InputError("no prompts: times are measured on at least one")
    if grid is None:
        points = _batch_one(target, specs, prompts, settings, reached)
        return CostTable(key=key, points=points, idle_as_full=target.device.type != "cpu")
    return _over_grid(key, target, specs, prompts, settings, grid, reached)


def rounds_to_time(specs: Sequence[ProposerSpec], prompts: int, settings: ScoreSettings, grid: Grid | None) -> int:
    """Rounds that `measure_costs` makes with so many prompts, with its warm-up and without prompts read alone."""
    asked = settings.costs
    if grid is None:
        ways, runs = sum(len(spec.configs) for spec in specs), min(prompts, asked.prompts) + 1
    else:
        ways, runs = sum(len(measured_configs(spec)) for spec in specs), _runs(grid, asked.prompts)
    return (1 + ways) * runs * asked.rounds


class _Decoder(NamedTuple):
    """One decoder whose rounds are interleaved with those of the others."""

    config: DraftConfig
    proposer: Proposer | None
    rule: str
    nodes: int
    """Number of drafted nodes of a full draft."""


_PLAIN = _Decoder(DraftConfig(0), None, "greedy", 0)
Rounds = dict[DraftConfig, list[RoundSeconds]]


def _decoders(
    specs: Sequence[ProposerSpec], settings: ScoreSettings, configs: Callable[[ProposerSpec], list[DraftConfig]]
) -> list[_Decoder]:
    """Decoders to interleave: plain decoding first, then each K or tree with a proposer of its own."""
    decoders = [_PLAIN]
    for spec in specs:
        for config in configs(spec):
            proposer = spec.make()
            nodes = proposer.most_nodes(config.levels)
            decoders.append(_Decoder(config, proposer, timed_rule(spec, settings), nodes))
    return decoders


def _batch_one(
    target: CausalModel,
    specs: Sequence[ProposerSpec],
    prompts: Sequence[list[int]],
    settings: ScoreSettings,
    reached: Callable[[float], None],
) -> list[MeasuredRound]:
    # 1) The longest prompts that leave room for the answers within the target's context.
    asked = settings.costs
    decoders = _decoders(specs, settings, lambda spec: spec.configs)
    deepest = max(decoder.config.levels for decoder in decoders)
    room = room_for_rounds(target.max_positions, deepest, asked.rounds)
    # 2) Time each prompt by itself.
    prompts = [prompt[-room:] for prompt in prompts[: asked.prompts]]  # their ends: the answer needs the rest
    rounds: Rounds = {decoder.config: [] for decoder in decoders}
    with bar("measure times", len(prompts) + 1, "prompts") as advance:
        # Allocations, kernel choices and clocks settle before anything counts.
        interleaved_rounds(target, decoders, prompts[:1], settings.sampling[0], asked.rounds)
        advance(note="warm-up")
        for done, prompt in enumerate(prompts, start=2):
            timed = interleaved_rounds(target, decoders, [prompt], settings.sampling[0], asked.rounds)
            for config, seconds in timed.items():
                rounds[config] += seconds[asked.warmup_rounds :]
            advance()
            reached(done / (len(prompts) + 1))
    # 3) Rows at the mean context of the timed rounds.
    context = statistics.fmean(map(len, prompts)) + asked.rounds / 2
    return _points(decoders, rounds, 1, context)


def _over_grid(
    key: CostKey,
    target: CausalModel,
    specs: Sequence[ProposerSpec],
    prompts: Sequence[list[int]],
    settings: ScoreSettings,
    grid: Grid,
    reached: Callable[[float], None],
) -> CostTable:
    text = [token for prompt in prompts for token in prompt]
    decoders = _decoders(specs, settings, measured_configs)
    points: list[MeasuredRound] = []
    memory, done = (0, 0.0), runs_at(1, settings.costs.prompts)
    with bar("measure times", len(grid.places) + len(grid.prompts) + 1, "points") as advance:
        # 1) allocations, kernel choices and clocks settle
        _rounds_at(target, decoders, text, 1, grid.context, settings)
        advance(note="warm-up")
        # 2) rounds of every decoder at every place; the draft's memory at the largest
        for size, context in grid.places:
            done += runs_at(size, settings.costs.prompts)
            rounds = _rounds_at(target, decoders, text, size, context, settings)
            points += _points(decoders, rounds, size, context, f", batch {size}, context {context}")
            if (size, context) == grid.places[0]:
                memory = _draft_memory(target, decoders[1], size, context, settings.costs.rounds)
            advance(note=f"batch {size}, context {context}")
            reached(done / _runs(grid, settings.costs.prompts))
        # 3) prompts read alone
        read = _read_prompts(target, decoders[1], text, grid.prompts, settings.sampling[0], advance)
    return CostTable(
        key=key, points=points, prompt_points=read, draft_bytes=memory[0], cache_bytes_per_token=memory[1],
        idle_as_full=target.device.type != "cpu",
    )  # fmt: skip


# --- the timer ---


def interleaved_rounds(
    target: CausalModel,
    decoders: Sequence[_Decoder],
    prompts: Sequence[list[int]],
    sampling: SamplingSettings,
    rounds: int,
) -> Rounds:
    """Interleaved timing: `rounds` rounds of every decoder on all prompts as one batch, by turns."""
    # One run a decoder, all on the same prompts, with answers long enough that none ends before the last round.
    timers = {decoder.config: RoundTimer(target.device) for decoder in decoders}
    runs = []
    for decoder in decoders:
        answer = _answer_tokens(rounds, decoder.config.levels)
        requests = [Request(prompt, sampling, seed, answer) for seed, prompt in enumerate(prompts)]
        levels, timer = max(decoder.config.levels, 1), timers[decoder.config]
        run = DecodeRun(target, decoder.proposer, requests, decoder.rule, levels, len(prompts), timer=timer)
        runs.append(decode_rounds(run))
    # The first steps read the prompts.
    for steps in runs:
        next(steps)
    # One round of each decoder in turn: a slow moment of the machine meets all of them. On a GPU all rounds of each:
    # one is launched before the verdict of the one in front of it is read, as when it serves.
    a_turn = rounds if target.device.type == "cuda" else 1
    for _ in range(rounds // a_turn):
        for steps in runs:
            for _ in range(a_turn):
                next(steps)
    return {config: timer.rounds for config, timer in timers.items()}


def _answer_tokens(rounds: int, levels: int) -> int:
    """Answer length, in tokens, that lasts `rounds` rounds of full drafts even if all of them are accepted."""
    return 1 + rounds * (levels + 1)


def _points(
    decoders: Sequence[_Decoder], rounds: Rounds, batch_size: int, context: float, where: str = ""
) -> list[MeasuredRound]:
    """Measured rows of all decoders at one batch size and context."""
    # Absolute times come from the plain rounds alone; drafted ones are ratios to them.
    plain = rounds[_PLAIN.config]
    plain_seconds = _lower_quartile([one.total for one in plain])  # of rounds that nothing else slowed down
    points = []
    for decoder in decoders:
        draft, verify, rest, count = 0.0, plain_seconds, 0.0, len(plain)
        if decoder is not _PLAIN:
            draft, verify, rest, count = _typical_parts(decoder, rounds[decoder.config], plain, plain_seconds, where)
        points.append(
            MeasuredRound(
                way=way_of(decoder.config),
                batch_size=batch_size,
                levels=decoder.config.levels,
                tokens=decoder.nodes + 1,
                context_tokens=context,
                draft_seconds=draft,
                verify_seconds=verify,
                rest_seconds=rest,
                rounds=count,
            )
        )
    return points


def _typical_parts(
    decoder: _Decoder,
    rounds: Sequence[RoundSeconds],
    plain: Sequence[RoundSeconds],
    plain_seconds: float,
    where: str,
) -> tuple[float, float, float, int]:
    """Typical seconds of draft, verification and rest of a round, and the number of rounds behind them.

    Each part is the median of its ratio to the plain round beside it, over rounds with a full draft, times
    `plain_seconds`. A proposer that seldom makes a full draft is timed on all of its rounds.
    """
    # Each round is paired with the plain one that ran beside it. Clipped drafts are cheaper and are left out.
    pairs = list(zip(rounds, plain))
    full = [(one, beside) for one, beside in pairs if one.drafted == decoder.nodes]
    if len(full) < min(_FEWEST_ROUNDS, len(pairs)):
        say(
            f"times of {decoder.config}{where}: only {len(full)} full rounds; taken from all {len(pairs)} that were "
            "not warm-up"
        )
        full = pairs
    # Medians: single rounds that something interrupted do not count.
    draft, verify, rest = (
        plain_seconds * statistics.median(getattr(one, part) / beside.total for one, beside in full)
        for part in ("draft", "verify", "rest")
    )
    return draft, verify, rest, len(full)


def _lower_quartile(values: Sequence[float]) -> float:
    """Lower quartile, interpolated; a single value is returned as it is."""
    return statistics.quantiles(values, n=4, method="inclusive")[0] if len(values) > 1 else values[0]


# --- a place of the grid ---


def measured_configs(spec: ProposerSpec) -> list[DraftConfig]:
    """Configs to measure over a grid: the least, the middle and the largest K of chains, or the tree."""
    configs = sorted(spec.configs)
    return sorted({configs[0], configs[(len(configs) - 1) // 2], configs[-1]})


def _rounds_at(
    target: CausalModel,
    decoders: Sequence[_Decoder],
    text: Sequence[int],
    size: int,
    context: int,
    settings: ScoreSettings,
) -> Rounds:
    """Timed rounds of every decoder at one batch size and context.

    Raises DeviceMemoryError.
    """
    # The first rounds of each run are dropped: kernels are chosen and caches grow in them.
    asked = settings.costs
    rounds: Rounds = {decoder.config: [] for decoder in decoders}
    length = max(context - asked.rounds // 2, 1)  # so that the rounds' mean context is the one asked for
    try:
        for _ in range(runs_at(size, asked.prompts)):
            prompts = cut_prompts(text, size, length)
            timed = interleaved_rounds(target, decoders, prompts, settings.sampling[0], asked.rounds)
            for config, seconds in timed.items():
                rounds[config] += seconds[asked.warmup_rounds :]
    except torch.OutOfMemoryError:
        raise DeviceMemoryError(
            f"score.load: batch {size} at context {context} does not fit the device's memory; state a smaller one"
        ) from None
    return rounds


def runs_at(size: int, prompts: int) -> int:
    """Runs at one batch size, so that each size sees about as many prompts."""
    return max(prompts // size, 1)


def _runs(grid: Grid, prompts: int) -> int:
    """Runs over a grid, with those at batch size 1 that warm up."""
    return runs_at(1, prompts) + sum(runs_at(size, prompts) for size, _ in grid.places)


def cut_prompts(text: Sequence[int], count: int, length: int) -> list[list[int]]:
    """Prompts of equal length (tokens), cut from different places of the text; a short text is repeated."""
    step = max(len(text) // count, 1)
    return [list(islice(cycle(text), place * step, place * step + length)) for place in range(count)]


def draft_memory(
    target: CausalModel, spec: ProposerSpec, prompt: Sequence[int], settings: ScoreSettings
) -> tuple[int, float]:
    """Bytes of the draft's weights, and bytes that it keeps per token of a sequence, after a few rounds on a prompt."""
    decoder = _decoders([spec], settings, lambda one: measured_configs(one)[:1])[1]
    rounds = settings.costs.rounds
    interleaved_rounds(target, [decoder], [list(prompt)], settings.sampling[0], rounds)
    return _draft_memory(target, decoder, 1, len(prompt) + rounds // 2, rounds)


def _draft_memory(target: CausalModel, decoder: _Decoder, size: int, context: int, rounds: int) -> tuple[int, float]:
    """Bytes of the draft's weights, and bytes that it keeps per token of a sequence, after rounds at this place."""
    # The cache holds a row a slot, with a spare one where CUDA graphs are recorded, up to the longest sequence.
    weights, state = draft_bytes(decoder.proposer, target)
    capacity = max(context - rounds // 2, 1) + _answer_tokens(rounds, decoder.config.levels) + decoder.nodes
    return weights, state / ((size + takes_graphs(target)) * capacity)


def _read_prompts(
    target: CausalModel,
    decoder: _Decoder,
    text: Sequence[int],
    lengths: Sequence[int],
    sampling: SamplingSettings,
    advance: Advance,
) -> list[MeasuredPrompt]:
    """Prefill times of each prompt length, without and with a draft, a few prompts of each by turns."""
    # Plain and drafted prompts alternate; their ratio is what the draft adds.
    found = []
    for length in lengths:
        plain, drafted = list[float](), list[float]()
        for _ in range(_PROMPT_REPEATS):
            plain += _prompt_seconds(target, _PLAIN, text, length, sampling)
            drafted += _prompt_seconds(target, decoder, text, length, sampling)
        seconds = _lower_quartile(plain)
        ratio = statistics.median(one / beside for one, beside in zip(drafted, plain))
        found.append(MeasuredPrompt(tokens=length, plain_seconds=seconds, draft_seconds=seconds * max(ratio - 1, 0.0)))
        advance(note=f"prompts of {length}")
    return found


def _prompt_seconds(
    target: CausalModel, decoder: _Decoder, text: Sequence[int], length: int, sampling: SamplingSettings
) -> list[float]:
    """Seconds from a prompt's slot to the next one's, in a run whose answers end with their first token."""
    # With one slot, each prompt starts when the one before it is read: differences of starts are prefill times.
    prompts = cut_prompts(text, _PROMPTS_A_RUN, length)
    requests = [Request(prompt, sampling, seed, 1) for seed, prompt in enumerate(prompts)]
    run = DecodeRun(target, decoder.proposer, requests, decoder.rule, max(decoder.config.levels, 1))
    done = sorted((index, one.begun) for finished in decode_rounds(run) for index, one in finished)
    return [after - before for (_, before), (_, after) in pairwise(done[_SETTLING_PROMPTS:])]
