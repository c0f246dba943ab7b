"""Leaderboard: picks the checkpoint, and its K or tree, by expected speed-up.

1. One row a (draft, step, config), a config being a K or a tree: counts pooled over the split's mix as it is (no other
   domain weights), all scored sampling settings together, each under its serving rule; replayed counts where there are
   any, else decoded ones. Expected speed-up is at the recipe's load, or at batch 1 where it states none.
2. A checkpoint's config is the one with the best expected speed-up; those within `tie_share` of it tie (times repeat no
   better than that), and the fewest drafted tokens win.
3. The checkpoint with the best expected speed-up at its config is chosen; of equal ones that with fewer drafted tokens,
   then the earlier step.
Perplexity is carried along for people to see. It decides nothing. Neither do baselines, which are never chosen; one
that does not draft in every round (prompt lookup) pays a plain token's time for the rounds in which it does not. Nor is
a checkpoint chosen that a race dropped: its counts are of a part of the conversations, the long ones first.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from ..errors import InputError
from ..specdec.accept_rules import RULES, deciding_rule
from .acceptance import Estimate, acceptance, alphas, cluster_sums, ratio, tau, tau_bounds, tau_difference
from .cost_table import CostKey, RoundCost
from .counts import concat, groups, values, where
from .draft_configs import DraftConfig
from .serving_load import (
    BatchFigures,
    BreakEvenPoint,
    Candidate,
    LoadFigures,
    LoadTimes,
    batch_figures,
    finite,
    load_figures,
)
from .settings import ScoreSettings
from .speedup import Gain

PLAIN = "plain"
_UNKNOWN = Estimate(math.nan)
Checkpoint = tuple[str, int]
"""A draft's name and training step."""


class Times(Protocol):
    """Protocol of round times, at batch 1 (`CostTable`) or at a load (`LoadTimes`)."""

    @property
    def key(self) -> CostKey:
        """Hardware, software, precision and shapes."""

    @property
    def plain_seconds(self) -> float:
        """Seconds of a round without a draft."""

    @property
    def description(self) -> str:
        """Words that say where the times hold and come from."""

    def cost(self, config: DraftConfig) -> RoundCost:
        """Seconds of a round of this K or tree, by part."""

    def gain(self, config: DraftConfig, drafted_share: float = 1.0) -> Gain:
        """Gain, the map from tau to speed-up, of this K or tree. `drafted_share`: share of rounds that draft at all."""


@dataclass(frozen=True)
class Row:
    """One line of the leaderboard: a draft at one step and one K or tree."""

    draft: str
    step: int
    config: DraftConfig
    drafted: float
    """Mean number of tokens drafted a round."""
    tau: Estimate
    acceptance: Estimate
    alphas: tuple[Estimate, ...]
    draft_seconds: float
    verify_seconds: float
    speedup: Estimate
    gain: Gain
    """Map from tau to `speedup`."""
    perplexity: float = math.nan
    baseline: bool = False
    chosen: bool = False
    drafted_share: float = 1.0
    """Share of rounds whose draft is paid for."""
    load: LoadFigures | None = None
    """Figures at the recipe's load; None where it states none."""
    scored_share: float = 1.0
    """Share of the answers' tokens that it was scored on; less than 1: dropped by a race."""
    trained_for: str = ""
    """The target that the draft was made for, where that is another than the one it was scored on, or another form of
    it (quantised, with an adapter): 12 hex digits of its fingerprint."""
    start: str = ""
    """The champion, `name/number`, that a retraining started from, where this is it as it was; empty: a checkpoint."""

    @property
    def break_even_tau(self) -> float:
        """Break-even tau, from which this K or tree pays."""
        return self.gain.break_even_tau

    @property
    def dropped(self) -> bool:
        """Whether a race dropped it: its figures are of a part of the conversations."""
        return self.scored_share < 1

    def record(self) -> dict[str, Any]:
        """JSON-able mapping of the row; an unknown number is null."""
        # All fields, with nested objects replaced by their records.
        config = {"draft_tokens": self.config.levels, "tree": self.config.tree, "break_even_tau": self.break_even_tau}
        # Intervals are records of their own.
        known: dict[str, Any] = finite({**config, **vars(self), "dropped": self.dropped})
        for name in ("config", "gain", "load"):
            del known[name]
        for name in ("tau", "acceptance", "speedup"):
            known[name] = getattr(self, name).record()
        known["alphas"] = [alpha.record() for alpha in self.alphas]
        return known if self.load is None else known | {"load": self.load.record()}

    def metrics(self) -> dict[str, float]:
        """Flat known numbers, for a run's metrics."""
        # Everything that has a number; what is not known is left out at the end.
        flat = {"tau": self.tau.value, "tau_low": self.tau.low, "tau_high": self.tau.high}
        flat |= {"acceptance": self.acceptance.value, "draft_tokens": float(self.config.levels)}
        flat |= {"drafted": self.drafted}
        flat |= {f"alpha_{k + 1}": alpha.value for k, alpha in enumerate(self.alphas)}
        flat |= {"draft_ms": self.draft_seconds * 1e3, "verify_ms": self.verify_seconds * 1e3}
        flat |= {"speedup": self.speedup.value, "speedup_low": self.speedup.low, "speedup_high": self.speedup.high}
        flat |= {"perplexity": self.perplexity, "break_even_tau": self.break_even_tau}
        flat |= {"scored_share": self.scored_share} if self.dropped else {}
        flat |= self.load.metrics() if self.load is not None else {}
        return {name: value for name, value in flat.items() if math.isfinite(value)}


@dataclass(frozen=True)
class DomainRow:
    """Figures of one draft in one domain at one sampling setting."""

    draft: str
    step: int
    config: DraftConfig
    domain: str
    setting: str
    rule: str
    conversations: int
    tau: Estimate
    acceptance: Estimate
    alphas: tuple[Estimate, ...]
    baseline: bool = False
    speedup: Estimate = _UNKNOWN
    """Expected speed-up if all traffic were like this domain's."""
    goodput: Estimate = _UNKNOWN
    """Expected tokens a second at the load; NaN where none is stated."""
    break_even: BreakEvenPoint | None = None
    """Batch size up to which drafting pays in this domain; None without a load."""
    taus: tuple[tuple[str, Estimate], ...] = ()
    """tau under every rule that was scored, the deciding one among them, by the rule's label."""
    batches: tuple[BatchFigures, ...] = ()
    """The best K or tree for this domain at each batch size, where a load is stated."""

    def record(self) -> dict[str, Any]:
        """JSON-able mapping of the row."""
        # Plain fields, then intervals, then figures at the load.
        known = {name: getattr(self, name) for name in ("draft", "step", "domain", "setting", "rule", "conversations")}
        known |= {"draft_tokens": self.config.levels, "tree": self.config.tree, "baseline": self.baseline}
        for name in ("tau", "acceptance", "speedup", "goodput"):
            known[name] = getattr(self, name).record()
        known["loses_above"] = None if self.break_even is None else self.break_even.above
        known["taus"] = {rule: tau.record() for rule, tau in self.taus}
        known["batches"] = [one.record() for one in self.batches]
        return known | {"alphas": [alpha.record() for alpha in self.alphas]}


ConfigRows = Mapping[Checkpoint, Sequence[Row]]
"""Rows of every checkpoint at every K and tree, nothing chosen yet."""


def config_rows(
    tables: Sequence[pa.Table],
    costs: Mapping[Checkpoint, Times],
    settings: ScoreSettings,
    baselines: Collection[str] = (),
) -> ConfigRows:
    """Rows of every checkpoint at every K and tree. They take hundreds of intervals: compute them once."""
    return {
        (draft, step): _config_rows(table, _times(costs, draft, step), draft in baselines, settings)
        for (draft, step), table in groups(serving(concat(tables), settings), "draft", "step")
    }


def leaderboard(
    tables: Sequence[pa.Table],
    costs: Mapping[Checkpoint, Times],
    settings: ScoreSettings,
    baselines: Collection[str] = (),
    perplexity: Mapping[Checkpoint, float] | None = None,
    scored_shares: Mapping[Checkpoint, float] | None = None,
    configs: ConfigRows | None = None,
) -> list[Row]:
    """Leaderboard rows: one a checkpoint, at its best K or tree, baselines first, the chosen one marked.

    `scored_shares`: of each checkpoint that a race dropped, the share of the answers that it was scored on. `configs`:
    the result of `config_rows` for the same arguments, where it is known already.
    """
    known = config_rows(tables, costs, settings, baselines) if configs is None else configs
    # 1) each checkpoint at its best config
    best: list[Row] = []
    for (draft, step), table in groups(serving(concat(tables), settings), "draft", "step"):
        times, seen = _times(costs, draft, step), (perplexity or {}).get((draft, step), math.nan)
        rows = known[draft, step]
        row = best_config(rows, settings.tie_share)
        share = (scored_shares or {}).get((draft, step), 1.0)
        best.append(
            replace(row, perplexity=seen, scored_share=share, load=_load_figures(table, times, rows, row, settings))
        )
    # 2) the best of them
    best.sort(key=lambda row: (not row.baseline, row.draft, row.step))
    winner = choose(best)
    return [replace(row, chosen=row is winner) for row in best]


def _load_figures(
    table: pa.Table, times: Times, rows: Sequence[Row], row: Row, settings: ScoreSettings
) -> LoadFigures | None:
    # Without a load there is nothing beyond batch 1. With one, all K and trees compete at each batch size.
    if not isinstance(times, LoadTimes):
        return None
    candidates = [Candidate(one.config, one.tau, one.drafted, one.drafted_share) for one in rows]
    counted = engine_tau(at_config(table, row.config), settings)
    return load_figures(times, candidates, row.config, counted, settings.tie_share)


def engine_tau(table: pa.Table, settings: ScoreSettings) -> Estimate:
    """Engine tau: tokens a round in the engine's own counting, 1 + accepted / rounds in which anything was drafted.

    draftforge counts rounds without a draft too. What still differs: vLLM does not shorten an answer's last drafts, and
    counts all of their surplus as accepted.
    """
    if settings.load is None or settings.load.engine == "draftforge":
        return tau(table, settings.confidence)
    # Rounds that reach position 1 are those in which anything was drafted.
    K = int(values(table, "draft_tokens")[0])
    sums = cluster_sums(table, K)
    rounds = sums.position("reached", 0)
    return ratio(rounds + sums.column("accepted"), rounds, settings.confidence, "rounds that draft", tau_bounds(table))


def by_config(configs: ConfigRows, row: Row) -> list[Row]:
    """The row's checkpoint at every K and tree, the fewest drafted tokens first; its own config is marked."""
    rows = sorted(configs[row.draft, row.step], key=lambda one: one.drafted)
    return [replace(one, chosen=one.config == row.config) for one in rows]


def choose(rows: Sequence[Row]) -> Row | None:
    """Chosen row: the best expected speed-up, baselines and dropped rows aside; None where no speed-up is known."""
    # Unknown speed-ups cannot win. Ties go to the fewest drafted tokens, then to the earlier step.
    known = [row for row in rows if not row.baseline and not row.dropped and math.isfinite(row.speedup.value)]
    return min(known, key=lambda row: (-row.speedup.value, row.drafted, row.step), default=None)


def best_config(rows: Sequence[Row], tie_share: float) -> Row:
    """Best row of one checkpoint: of those within `tie_share` of the best expected speed-up, the fewest drafted tokens.

    Where no speed-up is known it is the first row.
    """
    known = [row for row in rows if math.isfinite(row.speedup.value)]
    if not known:
        return rows[0]
    floor = max(row.speedup.value for row in known) * (1 - tie_share)
    return min((row for row in known if row.speedup.value >= floor), key=lambda row: row.drafted)


def plain_row(costs: Times) -> Row:
    """Leaderboard row of plain decoding, without a draft."""
    # Plain decoding emits one token a round, at the speed that everything is compared with.
    one = Estimate(1.0, 1.0, 1.0)
    none = Estimate(math.nan, reason="nothing is drafted")
    return Row(
        PLAIN, 0, DraftConfig(0), 0.0, one, none, (), 0.0, costs.plain_seconds, one, Gain(0.0, 1.0), baseline=True
    )


def domain_rows(
    tables: Sequence[pa.Table],
    rows: Sequence[Row],
    settings: ScoreSettings,
    costs: Mapping[Checkpoint, Times],
) -> list[DomainRow]:
    """Domain rows: each draft by domain, sampling setting and rule, at the K or tree of its leaderboard row."""
    # Two tables: the counts that decide, and those under every rule for the column `taus`.
    everything = concat(tables)
    table = serving(everything, settings)
    found: list[DomainRow] = []
    # One row a draft, domain, setting and rule; its intervals are of that part alone.
    for row in rows:
        configs = where(table, draft=row.draft, step=row.step)
        mine, all_rules = at_config(configs, row.config), _rows_of(everything, row)
        times = _times(costs, row.draft, row.step)
        for (domain, setting, rule), part in groups(mine, "domain", "setting", "rule"):
            # The load's figures need a known tau.
            pooled = tau(part, settings.confidence)
            share = _drafted_share(part, row.baseline)
            speedup = times.gain(row.config, share).estimate(pooled)
            loaded = times if isinstance(times, LoadTimes) and math.isfinite(pooled.value) else None
            found.append(
                DomainRow(
                    draft=row.draft,
                    step=row.step,
                    config=row.config,
                    domain=domain,
                    setting=setting,
                    rule=RULES[rule].label,
                    conversations=len(values(part, "conversation")),
                    tau=pooled,
                    acceptance=acceptance(part, settings.confidence),
                    alphas=tuple(alphas(part, settings.confidence)),
                    baseline=row.baseline,
                    speedup=speedup,
                    goodput=speedup.scaled(math.nan if loaded is None else loaded.plain_goodput),
                    taus=_taus(where(all_rules, domain=domain, setting=setting), settings),
                    break_even=None if loaded is None else loaded.break_even(row.config, pooled.value, share),
                    batches=_batches(where(configs, domain=domain, setting=setting), row.baseline, loaded, settings),
                )
            )
    return sorted(found, key=lambda one: (one.domain, one.setting, not one.baseline, one.draft, one.step))


def _batches(
    table: pa.Table, baseline: bool, times: LoadTimes | None, settings: ScoreSettings
) -> tuple[BatchFigures, ...]:
    """Best K or tree by batch size of one draft and step on a part of the conversations; empty without a load."""
    if times is None:
        return ()
    candidates = [
        Candidate(
            DraftConfig(K, tree),
            tau(part, settings.confidence),
            _per_round(part["drafted"], part),
            _drafted_share(part, baseline),
        )
        for (K, tree), part in groups(table, "draft_tokens", "tree")
    ]
    return batch_figures(times, candidates, settings.tie_share)


def _taus(table: pa.Table, settings: ScoreSettings) -> tuple[tuple[str, Estimate], ...]:
    """tau under each scored rule, from replayed counts where there are any."""
    found = []
    for (rule,), part in groups(table, "rule"):
        method = "replay" if "replay" in values(part, "method") else "decode"
        found.append((RULES[rule].label, tau(where(part, method=method), settings.confidence)))
    return tuple(found)


def speedup_difference(tables: Sequence[pa.Table], first: Row, second: Row, settings: ScoreSettings) -> Estimate:
    """Paired difference of expected speed-ups, first row minus second, by turn: the evidence of a promotion."""
    table = serving(concat(tables), settings)
    one, two = (_rows_of(table, row) for row in (first, second))
    return tau_difference(one, two, settings.confidence, first.gain.speedup, second.gain.speedup)


def serving(table: pa.Table, settings: ScoreSettings) -> pa.Table:
    """Deciding counts: per sampling setting those under its deciding rule, replayed ones where there are any."""
    # Each way of drafting by itself: a tree may have to be decoded where chains are replayed.
    kept = []
    for _, part in groups(table, "draft", "step", "setting", "tree"):
        mine = where(part, rule=deciding_rule(values(part, "rule"), settings.sampled_rules))
        kept.append(where(mine, method="replay" if "replay" in values(mine, "method") else "decode"))
    return concat(kept)


def at_config(table: pa.Table, config: DraftConfig) -> pa.Table:
    """Counts of one K or tree."""
    return where(table, draft_tokens=config.levels, tree=config.tree)


def _rows_of(table: pa.Table, row: Row) -> pa.Table:
    return at_config(where(table, draft=row.draft, step=row.step), row.config)


def _config_rows(table: pa.Table, costs: Times, baseline: bool, settings: ScoreSettings) -> list[Row]:
    """Rows of one draft and step, one for every K or tree."""
    return [_row(part, costs, baseline, settings) for _, part in groups(table, "draft_tokens", "tree")]


def _row(table: pa.Table, costs: Times, baseline: bool, settings: ScoreSettings) -> Row:
    """Row of one draft and step at one K or tree, from its deciding counts."""
    # All rows of the table share these values; tau is pooled over them, and times turn it into a speed-up.
    draft, step, K, tree = (values(table, column)[0] for column in ("draft", "step", "draft_tokens", "tree"))
    config, pooled = DraftConfig(K, tree), tau(table, settings.confidence)
    cost, share = costs.cost(config), _drafted_share(table, baseline)
    gain = costs.gain(config, share)
    return Row(
        draft=draft,
        step=step,
        config=config,
        drafted=_per_round(table["drafted"], table),
        tau=pooled,
        acceptance=acceptance(table, settings.confidence),
        alphas=tuple(alphas(table, settings.confidence)),
        draft_seconds=math.nan if costs.key.engine else cost.draft_seconds,  # an engine's times are of whole rounds
        verify_seconds=cost.verify_seconds,
        speedup=gain.estimate(pooled),
        gain=gain,
        baseline=baseline,
        drafted_share=share,
    )


def _drafted_share(table: pa.Table, baseline: bool) -> float:
    """Share of rounds whose draft is paid for: a trained draft always drafts, and its clipped last rounds are counted
    as full ones."""
    return _per_round(pc.list_element(table["reached"], 0), table) if baseline else 1.0


def _per_round(counts: pa.ChunkedArray, table: pa.Table) -> float:
    """Average count in a round; NaN without rounds."""
    total, rounds = (sum(column.to_pylist()) for column in (counts, table["rounds"]))
    return float(total / rounds) if rounds else math.nan


def _times(costs: Mapping[Checkpoint, Times], draft: str, step: int) -> Times:
    if (draft, step) not in costs:
        known = ", ".join(f"{name} {at}" for name, at in sorted(costs))
        raise InputError(f"draft {draft} step {step}: no times measured; there are times for {known}")
    return costs[draft, step]
