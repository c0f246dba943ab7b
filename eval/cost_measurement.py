"""Measures rounds and prompts over batch size, levels and context, for the fit of `load_fit.py`.

The grid is a cross: every batch size at the load's context, and the least and largest at shorter and longer ones; of
chains the least, the middle and the largest K. At each of its points plain decoding and every way of drafting take
turns, round by round, as at batch 1 (`turns.py`). Slots hold real prompts, cut or repeated to one length: times do not
depend on what is said.
"""

import statistics
from collections.abc import Callable, Sequence
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import ValidationError

from .. import fingerprint
from ..errors import CorruptDataError, DeviceMemoryError, InputError, MissingFileError
from ..progress import Advance, bar, say
from ..specdec.decoder import decode_rounds
from ..specdec.memory_fit import takes_graphs
from ..specdec.models import CausalModel
from ..specdec.requests import DecodeRun, Request, RoundSeconds
from ..specdec.sampling import SamplingSettings
from ..storage import lock, read_json, write_json
from .bench.run import draft_bytes
from .cost_model import PLAIN_WAY, CostFit, Point, PromptPoint, way_of
from .costs import PLAIN_MODE, CostKey, Mode, Parts, by_turns, lower_quartile, most_tokens, plain_seconds, typical
from .draft_configs import DraftConfig, ProposerSpec
from .settings import LoadSettings, ScoreSettings

_PROMPT_REPEATS = 3
_PROMPTS_A_RUN = 6
_SETTLING_PROMPTS = 2  # of a run: the first of a width runs as it is, the second is recorded as a graph


class Grid(NamedTuple):
    """Where is measured."""

    batch_sizes: list[int]
    contexts: list[int]
    context: int
    """The load's own: one of the contexts."""
    prompts: list[int]
    """Lengths of prompts that are read alone."""

    @classmethod
    def of(cls, load: LoadSettings, most_context: int) -> "Grid":
        """Around a load. Raises InputError where its context is longer than `most_context`."""
        if load.context_tokens > most_context:
            raise InputError(
                f"score.load.context_tokens {load.context_tokens}: with the rounds that are timed (score.costs.rounds) "
                f"at most {most_context} fit the target's context"
            )
        powers = (1 << n for n in range(load.largest.bit_length()))
        contexts, prompts = (
            sorted({max(middle // 2, 1), middle, min(2 * middle, most_context)})
            for middle in (load.context_tokens, load.prompt_tokens)
        )
        return cls(sorted({*load.batch_sizes, *powers}), contexts, load.context_tokens, prompts)

    @property
    def places(self) -> list[tuple[int, int]]:
        """Batch size and context of every point, the largest first: what does not fit is known at once."""
        ends = {self.batch_sizes[0], self.batch_sizes[-1]}
        cross = {(size, self.context) for size in self.batch_sizes}
        return sorted(cross | {(size, context) for size in ends for context in self.contexts}, reverse=True)


def measure_fit(
    key: CostKey,
    target: CausalModel,
    specs: Sequence[ProposerSpec],
    prompts: Sequence[list[int]],
    settings: ScoreSettings,
    grid: Grid,
) -> CostFit:
    """Decode the prompts plainly and in every way at every point of the grid, and fit the times."""
    text = [token for prompt in prompts for token in prompt]
    if not text:
        raise InputError("no prompts: times are measured on at least one")
    modes = [PLAIN_MODE, *(Mode.of(config, spec, settings) for spec in specs for config in _some(spec))]
    points: list[Point] = []
    memory = 0, 0.0
    with bar("measure times", len(grid.places) + len(grid.prompts) + 1, "points") as advance:
        _rounds(target, modes, text, 1, grid.context, settings)  # allocations, kernel choices and clocks settle
        advance(note="warm-up")
        for size, context in grid.places:
            points += _points(target, modes, text, size, context, settings)
            if (size, context) == grid.places[0]:
                memory = _memory(target, modes[1], size, context, settings.costs.rounds)
            advance(note=f"batch {size}, context {context}")
        read = _read_prompts(target, modes, text, grid.prompts, settings.sampling[0], advance)
    return CostFit.of(key, points, read, *memory)


def most_context(max_positions: int, deepest: int, rounds: int) -> int:
    """The longest context at which rounds of at most so many levels can be timed."""
    return max_positions - most_tokens(rounds, deepest) + rounds // 2


def cached_fit(
    folder: Path, key: CostKey, grid: Grid, measure: Callable[[], CostFit], wait_seconds: float = 0.0
) -> CostFit:
    """The fit of this key over this grid under `folder`; measured and kept where there is none."""
    path = folder / f"fit-{fingerprint.short(fingerprint.of_json([key.digest, grid._asdict()]))}.json"
    with lock(folder / ".costs.lock", wait_seconds, "a process that measures times"):
        known = _stored(path)
        if known is not None and known.key == key:
            return known
        measured = measure()
        write_json(path, measured.model_dump(mode="json"))
        return measured


def _stored(path: Path) -> CostFit | None:
    try:
        return CostFit.model_validate(read_json(path))
    except MissingFileError:
        return None
    except (CorruptDataError, ValidationError):
        say(f"{path}: not readable fitted times; measuring again")
        return None


def _some(spec: ProposerSpec) -> list[DraftConfig]:
    """Of chains the least, the middle and the largest K."""
    configs = sorted(spec.configs)
    return sorted({configs[0], configs[(len(configs) - 1) // 2], configs[-1]})


def _prompts(text: Sequence[int], count: int, length: int) -> list[list[int]]:
    """So many of that length, from different places of the text."""
    step = max(len(text) // count, 1)
    return [list(islice(cycle(text), place * step, place * step + length)) for place in range(count)]


def _points(
    target: CausalModel, modes: Sequence[Mode], text: Sequence[int], size: int, context: int, settings: ScoreSettings
) -> list[Point]:
    """One place of the grid, every mode."""
    try:
        rounds = _rounds(target, modes, text, size, context, settings)
    except torch.OutOfMemoryError:
        raise DeviceMemoryError(
            f"score.load: batch {size} at context {context} does not fit the device's memory; state a smaller one"
        ) from None
    plain = rounds[PLAIN_MODE.config]
    parts = {
        mode: typical(mode, rounds[mode.config], plain, f", batch {size}, context {context}") for mode in modes[1:]
    }
    bare = Parts(0.0, plain_seconds(plain), 0.0, len(plain))
    return [_point(mode, each, size, context) for mode, each in {PLAIN_MODE: bare, **parts}.items()]


def _point(mode: Mode, parts: Parts, size: int, context: int) -> Point:
    return Point(
        way=PLAIN_WAY if mode is PLAIN_MODE else way_of(mode.config),
        batch_size=size,
        levels=mode.config.levels,
        tokens=mode.nodes + 1,
        context_tokens=context,
        draft_seconds=parts.draft,
        verify_seconds=parts.verify,
        rest_seconds=parts.rest,
        rounds=parts.rounds,
    )


def _rounds(
    target: CausalModel, modes: Sequence[Mode], text: Sequence[int], size: int, context: int, settings: ScoreSettings
) -> dict[DraftConfig, list[RoundSeconds]]:
    """Timed rounds of every mode: of as many runs as give each batch size about as many prompts."""
    asked, found = settings.costs, {mode.config: list[RoundSeconds]() for mode in modes}
    length = max(context - asked.rounds // 2, 1)  # so that the rounds' mean context is the one asked for
    for _ in range(max(asked.prompts // size, 1)):
        prompts = _prompts(text, size, length)
        for config, rounds in by_turns(target, modes, prompts, settings.sampling[0], asked.rounds).items():
            found[config] += rounds[asked.warmup_rounds :]
    return found


def _memory(target: CausalModel, mode: Mode, size: int, context: int, rounds: int) -> tuple[int, float]:
    """Bytes of the draft's weights, and of what it keeps of a token of a sequence, after rounds at that place."""
    weights, state = draft_bytes(mode.proposer, target)
    capacity = max(context - rounds // 2, 1) + most_tokens(rounds, mode.config.levels) + mode.nodes
    return weights, state / ((size + takes_graphs(target)) * capacity)


def _read_prompts(
    target: CausalModel,
    modes: Sequence[Mode],
    text: Sequence[int],
    lengths: Sequence[int],
    sampling: SamplingSettings,
    advance: Advance,
) -> list[PromptPoint]:
    """Prompts of each length read alone, plainly and with a draft beside, by turns of a few prompts."""
    found = []
    for length in lengths:
        plain, drafted = list[float](), list[float]()
        for _ in range(_PROMPT_REPEATS):
            plain += _prompt_seconds(target, PLAIN_MODE, text, length, sampling)
            drafted += _prompt_seconds(target, modes[1], text, length, sampling)
        seconds = lower_quartile(plain)
        ratio = statistics.median(one / beside for one, beside in zip(drafted, plain))
        found.append(PromptPoint(tokens=length, plain_seconds=seconds, draft_seconds=seconds * max(ratio - 1, 0.0)))
        advance(note=f"prompts of {length}")
    return found


def _prompt_seconds(
    target: CausalModel, mode: Mode, text: Sequence[int], length: int, sampling: SamplingSettings
) -> list[float]:
    """From when a prompt's turn comes to when the next one's does, of answers that end with their first token."""
    prompts = _prompts(text, _PROMPTS_A_RUN, length)
    requests = [Request(prompt, sampling, seed, 1) for seed, prompt in enumerate(prompts)]
    run = DecodeRun(target, mode.proposer, requests, mode.rule, max(mode.config.levels, 1))
    done = sorted((index, one.begun) for finished in decode_rounds(run) for index, one in finished)
    return [after - before for (_, before), (_, after) in pairwise(done[_SETTLING_PROMPTS:])]
