"""Serving load: speed-up, goodput and break-even by batch size at the operator's load, from fitted times.

All B slots run their rounds together, each with progress of its own, so a round yields tau tokens a slot. A slot's
answer of L tokens costs one prompt, which yields the first token, and (L - 1) / tau rounds. A prompt delays all slots,
and each slot has one to be read. So the time T_B of an answer in each of B slots, at context C, with prompts' seconds
p(B), the draft's part included, and without a draft:

    T_B(tau) = B p(B) + (L - 1) / tau x round(B, C)      plain: B p(B) + (L - 1) plain(B, C)

In draftforge's own decoder the others wait while a prompt is read, so p is the time that it takes alone, whatever B is.
An engine reads prompts together, and in the rounds of others: its p(B) is measured under such load (`cost_model.py`).

Speed-up at B: plain over T_B. Goodput: B L / T_B tokens a second. Shares are of the busy *time* at each batch size, as
a server's log shows them, so the work of a share is what plain decoding does in it: speed-ups pool harmonically, by
share, and goodput is plain decoding's, pooled by share, times that.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ..errors import InputError
from ..specdec.serving_policy import AcceptanceGate, DraftRange, PolicyEngine, ServingPolicy
from .acceptance import Estimate
from .cost_model import CostFit
from .cost_table import CostKey, CostTable, RoundCost
from .draft_configs import DraftConfig
from .settings import LoadSettings
from .speedup import Gain, chain_alpha, pooled

MOST_POLICY_LOSS = 0.03
"""Share of the best speed-up that a policy may give away at a batch size, so as to have fewer ranges."""
_FEWEST_GATE_ROUNDS, _GATE_ERRORS = 200, 6.0


class Memory(NamedTuple):
    """Memory that the draft takes beside the target, in bytes."""

    weights: int
    caches: float
    """Bytes of the draft's caches at the load's largest batch size, for prompts and answers of its lengths."""


class BreakEvenPoint(NamedTuple):
    """Break-even batch size: the largest at which drafting pays."""

    above: int | None
    """Batch size above which drafting loses at every measured size (0: at all of them); None: it does not lose at
    the largest."""
    largest: int
    """The largest batch size at which times hold."""

    @property
    def label(self) -> str:
        """Label in tables: the batch size, or "> N?" where drafting still pays at the largest measured size N."""
        return f"> {self.largest}?" if self.above is None else str(self.above)


@dataclass(frozen=True)
class LoadTimes:
    """Fitted times of a cost table at one load. Raises InputError where they do not hold there."""

    table: CostTable
    load: LoadSettings

    def __post_init__(self) -> None:
        # Every batch size of the load must lie inside the measured grid: fits do not extrapolate.
        for size in self.load.batch_sizes:
            why = self.fit.outside(size, self.load.context_tokens, self.load.prompt_tokens)
            if why is not None:
                raise InputError(
                    f"score.load: {why} ({self.fit.hardware}); measure there, or give a fit that covers it"
                )

    @property
    def key(self) -> CostKey:
        """Key of the cost table; its hardware is the machine that was measured."""
        return self.table.key

    @cached_property
    def fit(self) -> CostFit:
        return CostFit(self.table)

    @property
    def plain_seconds(self) -> float:
        """Seconds of a plain round at the load's main batch size."""
        return self.fit.plain(self.load.main, self.load.context_tokens)

    def cost(self, config: DraftConfig) -> RoundCost:
        """Seconds of a round of this K or tree, by part, at the load's main batch size."""
        return self.fit.round(config, self.load.main, self.load.context_tokens)

    @property
    def description(self) -> str:
        """Words on the load, and on where its times come from."""
        # An engine's times are of whole rounds.
        parts = "verify ms, the whole round," if self.key.engine else "draft and verify ms"
        return (
            f"load: {self.load.description}; times of {self.fit.hardware}, fitted to {self.fit.error:.0%} (plain "
            f"rounds: {self.fit.plain_error:.0%}); {parts} at batch {self.load.main}"
        )

    def gain(self, config: DraftConfig, drafted_share: float = 1.0) -> Gain:
        """Gain over the whole load: speed-ups pooled harmonically, by share of time."""
        shares = self.load.shares
        return pooled([self.gain_at(size, config, drafted_share) for size in shares], list(shares.values()))

    def gain_at(self, batch_size: int, config: DraftConfig, drafted_share: float = 1.0) -> Gain:
        """Gain at one batch size. `drafted_share`: share of a slot's rounds that draft at all."""
        place = batch_size, config, drafted_share
        if place not in self._gains:
            self._gains[place] = self._gain_at(*place)
        return self._gains[place]

    @cached_property
    def _gains(self) -> dict[tuple[int, DraftConfig, float], Gain]:
        """Memo of gains by batch size, config and drafted share: checkpoints and domains ask for the same ones."""
        return {}

    def _gain_at(self, batch_size: int, config: DraftConfig, drafted_share: float) -> Gain:
        # Both parts of an answer in units of plain decoding of all of it.
        context, later = self.load.context_tokens, self.load.answer_tokens - 1
        prompts = batch_size * self.fit.prompt(config, batch_size, self.load.prompt_tokens)
        a_round = self.fit.mean_round(config, batch_size, context, drafted_share)
        rounds = later * (a_round + self.fit.prompts_in_round(config, batch_size))
        plain = self._plain_answer(batch_size)
        return Gain(prompts / plain, rounds / plain)

    def _plain_answer(self, batch_size: int) -> float:
        """Seconds of an answer without a draft in each of so many slots."""
        prompts = batch_size * self.fit.prompt(DraftConfig(0), batch_size, self.load.prompt_tokens)
        return prompts + (self.load.answer_tokens - 1) * self.fit.plain(batch_size, self.load.context_tokens)

    def plain_goodput_at(self, batch_size: int) -> float:
        """Goodput without a draft at one batch size, in tokens a second."""
        return batch_size * self.load.answer_tokens / self._plain_answer(batch_size)

    @cached_property
    def plain_goodput(self) -> float:
        """Goodput without a draft over the whole load, by shares of time."""
        return sum(share * self.plain_goodput_at(size) for size, share in self.load.shares.items())

    def break_even(self, config: DraftConfig, tau: float, drafted_share: float = 1.0) -> BreakEvenPoint:
        """Batch size above which this K or tree loses, searched over all sizes within the measured range."""
        # From the largest size down: above the first one at which it pays, it loses at every size.
        least, largest = min(self.fit.batch_sizes), max(self.fit.batch_sizes)
        pays = (size for size in range(largest, least - 1, -1) if self._pays(size, config, tau, drafted_share))
        above = next(pays, 0)
        return BreakEvenPoint(None if above == largest else above, largest)

    def _pays(self, batch_size: int, config: DraftConfig, tau: float, drafted_share: float) -> bool:
        return self.gain_at(batch_size, config, drafted_share).speedup(tau) >= 1

    @property
    def sizes(self) -> list[int]:
        """Batch sizes that tables show: those of the load, and the measured ones."""
        return sorted({*self.load.batch_sizes, *self.fit.batch_sizes})

    @property
    def memory(self) -> Memory:
        """Memory of the draft at this load."""
        tokens = self.load.prompt_tokens + self.load.answer_tokens
        return Memory(self.table.draft_bytes, self.table.cache_bytes_per_token * tokens * self.load.largest)


class Candidate(NamedTuple):
    """Candidate K or tree with its tau on the conversations."""

    config: DraftConfig
    tau: Estimate
    drafted: float
    """Mean number of tokens drafted a round."""
    drafted_share: float


@dataclass(frozen=True)
class BatchFigures:
    """Figures of the best K or tree at one batch size."""

    batch_size: int
    share: float
    """Share of the load's time; 0: not part of the load."""
    config: DraftConfig
    tau: Estimate
    speedup: Estimate
    goodput: Estimate
    """Expected tokens a second."""
    plain_goodput: float
    break_even_tau: float
    break_even_alpha: float
    """Acceptance of each drafted token of a chain from which it pays; NaN: none is enough, or a tree."""

    def record(self) -> dict[str, Any]:
        """JSON-able: what is not known, or not finite, is null."""
        # Numbers that are always known, then those that may not be.
        known: dict[str, Any] = {"batch_size": self.batch_size, "share": self.share}
        known |= {"draft_tokens": self.config.levels, "tree": self.config.tree}
        return known | {
            "tau": self.tau.record(),
            "speedup": self.speedup.record(),
            "goodput": self.goodput.record(),
            **finite({name: getattr(self, name) for name in ("plain_goodput", "break_even_tau", "break_even_alpha")}),
        }


@dataclass(frozen=True)
class LoadFigures:
    """Figures of one draft at the load: at the K or tree of its leaderboard row, and at the best one by batch size."""

    load: str
    hardware: str
    """Whose times these are: hardware and precision, after the engine where one was measured."""
    fit_error: float
    """Median leave-one-out error of fitted ratios to plain rounds, a share."""
    goodput: Estimate
    plain_goodput: float
    engine_tau: Estimate
    """Tokens a round as the engine's own counters will show them."""
    break_even_alpha: float
    break_even: BreakEvenPoint | None
    """None where tau is not known."""
    memory: Memory
    batches: tuple[BatchFigures, ...]

    def record(self) -> dict[str, Any]:
        """JSON-able mapping of the figures."""
        # Estimates become records of their own. Break-even keys are there only where tau is known.
        known = {"load": self.load, "hardware": self.hardware, "fit_error": self.fit_error}
        known |= {"goodput": self.goodput.record(), "engine_tau": self.engine_tau.record()}
        known |= finite({"plain_goodput": self.plain_goodput, "break_even_alpha": self.break_even_alpha})
        if self.break_even is not None:
            known |= {"loses_above": self.break_even.above, "largest_batch": self.break_even.largest}
        known |= {"draft_bytes": self.memory.weights, "draft_cache_bytes": self.memory.caches}
        return known | {"batches": [one.record() for one in self.batches]}

    def metrics(self) -> dict[str, float]:
        """Flat numbers, known or not."""
        # The whole load, then each batch size.
        flat = {"goodput": self.goodput.value, "goodput_low": self.goodput.low, "goodput_high": self.goodput.high}
        flat |= {"plain_goodput": self.plain_goodput, "engine_tau": self.engine_tau.value}
        flat |= {"break_even_alpha": self.break_even_alpha, "draft_mb": self.memory.weights / 1e6}
        flat |= {"draft_cache_mb": self.memory.caches / 1e6}
        if self.break_even is not None and self.break_even.above is not None:
            flat["loses_above"] = float(self.break_even.above)
        for one in self.batches:
            flat[f"speedup_batch_{one.batch_size}"] = one.speedup.value
            flat[f"draft_tokens_batch_{one.batch_size}"] = float(one.config.levels)
        return flat


def load_figures(
    times: LoadTimes, candidates: Sequence[Candidate], config: DraftConfig, engine_tau: Estimate, tie_share: float
) -> LoadFigures:
    """Figures of one draft at the load, served at `config`, which is among the candidates."""
    # The gain over the whole load at the served config gives goodput and break-even.
    mine = next(one for one in candidates if one.config == config)
    gain = times.gain(config, mine.drafted_share)
    return LoadFigures(
        load=times.load.description,
        hardware=times.fit.hardware,
        fit_error=times.fit.error,
        goodput=gain.estimate(mine.tau).scaled(times.plain_goodput),
        plain_goodput=times.plain_goodput,
        engine_tau=engine_tau,
        break_even_alpha=_break_even_alpha(gain.break_even_tau, config),
        break_even=times.break_even(config, mine.tau.value, mine.drafted_share)
        if math.isfinite(mine.tau.value)
        else None,
        memory=times.memory,
        batches=batch_figures(times, candidates, tie_share),
    )


def batch_figures(times: LoadTimes, candidates: Sequence[Candidate], tie_share: float) -> tuple[BatchFigures, ...]:
    """The best K or tree at each batch size that tables show."""
    return tuple(_best_at(times, size, candidates, tie_share) for size in times.sizes)


def _best_at(times: LoadTimes, batch_size: int, candidates: Sequence[Candidate], tie_share: float) -> BatchFigures:
    """Figures of the best config at one batch size; of those within `tie_share` of it that with the fewest tokens."""
    # Speed-up of every candidate at this batch size; unknown taus do not compete.
    gains = {one: times.gain_at(batch_size, one.config, one.drafted_share) for one in candidates}
    known = {one: gain.speedup(one.tau.value) for one, gain in gains.items() if math.isfinite(one.tau.value)}
    # Candidates near the best tie, and the fewest drafted tokens win.
    floor = max(known.values(), default=0.0) * (1 - tie_share)
    best = min((one for one in known if known[one] >= floor), key=lambda one: one.drafted, default=candidates[0])
    gain, plain = gains[best], times.plain_goodput_at(batch_size)
    speedup = gain.estimate(best.tau)
    return BatchFigures(
        batch_size=batch_size,
        share=times.load.shares.get(batch_size, 0.0),
        config=best.config,
        tau=best.tau,
        speedup=speedup,
        goodput=speedup.scaled(plain),
        plain_goodput=plain,
        break_even_tau=gain.break_even_tau,
        break_even_alpha=_break_even_alpha(gain.break_even_tau, best.config),
    )


def _break_even_alpha(tau: float, config: DraftConfig) -> float:
    return math.nan if config.tree else chain_alpha(tau, config.levels)


# --- the policy of an engine's scheduler: K by batch size ---


def policy_speedups(times: LoadTimes, candidates: Sequence[Candidate]) -> list[dict[int, float]]:
    """Speed-up of each K at every batch size from 1 to the largest measured one, K = 0 (plain decoding) included.

    Trees, and K whose tau is not known, are left out. Raises InputError where times begin above batch 1.
    """
    least, largest = min(times.fit.batch_sizes), max(times.fit.batch_sizes)
    if least > 1:
        raise InputError(f"times begin at batch {least} ({times.fit.hardware}); a policy begins at 1: measure there")
    chains = [one for one in candidates if not one.config.tree and math.isfinite(one.tau.value)]
    return [
        {0: 1.0}
        | {
            one.config.levels: times.gain_at(size, one.config, one.drafted_share).speedup(one.tau.value)
            for one in chains
        }
        for size in range(1, largest + 1)
    ]


def serving_policy(
    engine: PolicyEngine,
    times: LoadTimes,
    candidates: Sequence[Candidate],
    tie_share: float,
    captured_layers: tuple[int, ...] = (),
) -> ServingPolicy:
    """Policy with the fewest ranges whose K is, at every batch size, within `tie_share` (at most `MOST_POLICY_LOSS`) of
    the best speed-up and no slower than plain decoding; in a range the fewest tokens.

    Raises InputError where no K beats plain decoding anywhere, or the engine's schedule cannot hold such a policy.
    """
    # 1) What may be chosen at each batch size.
    speedups = policy_speedups(times, candidates)
    allowed = [_near_best(some, min(tie_share, MOST_POLICY_LOSS)) for some in speedups]
    if all(0 in some for some in allowed):
        size, K, best = max(
            ((size, K, value) for size, some in enumerate(speedups, 1) for K, value in some.items() if K),
            key=lambda one: one[2],
            default=(1, 0, math.nan),
        )
        raise InputError(
            f"--policy {engine}: no K beats plain decoding at any batch size from 1 to {len(speedups)} by more than "
            f"score.tie_share (the best: {best:.2f}x at batch {size}, K={K}); serve without a draft"
        )
    # 2) Ranges. TensorRT-LLM's schedule begins with the largest K.
    ranges = _fewest_ranges(allowed)
    if engine == "tensorrt-llm":
        ranges = _largest_first(allowed, ranges)
        return ServingPolicy(engine, ranges, _gate(times, candidates, ranges), captured_layers)
    return ServingPolicy(engine, ranges)


def _near_best(speedups: Mapping[int, float], slack: float) -> set[int]:
    """Every K (0: off) that is not slower than plain decoding, and within a share `slack` of the best."""
    floor = max(1.0, max(speedups.values()) * (1 - slack))
    off = {0} if max(speedups.values()) * (1 - slack) <= 1 else set()
    return off | {K for K, speedup in speedups.items() if K and speedup >= floor}


def _fewest_ranges(allowed: Sequence[set[int]]) -> tuple[DraftRange, ...]:
    """Fewest ranges of batch sizes, the first of which is 1, that each have a K allowed at all of their sizes."""
    # Each range is as long as can be: no later start of the next one could save a range.
    ranges, first, common = list[DraftRange](), 1, allowed[0]
    for size, some in enumerate(allowed[1:], 2):
        if not common & some:
            ranges.append(DraftRange(first, size - 1, min(common)))
            first, common = size, some
        common = common & some
    return (*ranges, DraftRange(first, len(allowed), min(common)))


def _largest_first(allowed: Sequence[set[int]], free: Sequence[DraftRange]) -> tuple[DraftRange, ...]:
    """Fewest ranges of which the first has the largest K. Raises InputError where there are none; `free`: those without
    that rule."""
    for most in sorted(set().union(*allowed) - {0}):
        bounded = [{K for K in some if most >= K} for some in allowed]
        bounded[0] &= {most}
        if all(bounded):
            return _fewest_ranges(bounded)
    largest = max(free, key=lambda one: one.draft_tokens)
    raise InputError(
        f"--policy tensorrt-llm: draft_len_schedule must begin with the largest K; here K={free[0].draft_tokens} is "
        f"best at batch {free[0].first} and K={largest.draft_tokens} at batch {largest.first}"
    )


def _gate(times: LoadTimes, candidates: Sequence[Candidate], ranges: Sequence[DraftRange]) -> AcceptanceGate:
    """Acceptance below which the policy pays at no batch size.

    Its rounds are so many that a mean rate as measured stays six standard errors above it, whatever the rates of single
    rounds, which lie between 0 and 1 and so deviate by 1/2 at most.
    """
    chains = {one.config.levels: one for one in candidates if not one.config.tree}
    even, measured = list[float](), list[float]()
    for first, last, K in ranges:
        if K:
            one = chains[K]
            sizes = range(first, last + 1)
            gains = [times.gain_at(size, one.config, one.drafted_share) for size in sizes]
            even += [(gain.break_even_tau - 1) / K for gain in gains]
            measured.append((one.tau.value - 1) / K)
    rate = max(min(even), 0.0)
    apart = max(min(measured) - rate, 0.01)
    return AcceptanceGate(rate, max(_FEWEST_GATE_ROUNDS, math.ceil((_GATE_ERRORS / 2 / apart) ** 2)))


def finite(record: dict[str, Any]) -> dict[str, Any]:
    """Copy of a record with null for every number that is not finite."""
    return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in record.items()}
