"""Picks the checkpoint, and how it drafts, by expected speed-up.

1. One row a (draft, step, plan), a plan being a K or a tree: counts pooled over the split's mix as it is (no other
   domain weights), all scored sampling settings together, each under its serving rule; replayed counts where there are
   any, else decoded ones.
2. A checkpoint's plan is the one with the best expected speed-up; plans within `tie_share` of it tie (times repeat no
   better than that), and the fewest drafted tokens win.
3. The checkpoint with the best expected speed-up at its plan is chosen; equal ones: fewer drafted tokens, earlier step.
Perplexity is carried along for people to see. It decides nothing. Neither do baselines, which are never chosen; one
that does not draft in every round (prompt lookup) pays a plain token's time for the rounds in which it does not.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ..errors import InputError
from ..specdec.rules import RULES
from .costs import CostTable, break_even_tau, expected_speedup
from .counts import concat, groups, values, where
from .figures import Bootstrap, Estimate, acceptance, alphas, tau, tau_difference
from .plans import Plan
from .settings import ScoreSettings

PLAIN = "plain"
Checkpoint = tuple[str, int]
"""Draft and step."""


@dataclass(frozen=True)
class Row:
    """One line of the leaderboard: a draft at one step and one K or tree."""

    draft: str
    step: int
    plan: Plan
    drafted: float
    """Tokens drafted a round, on average."""
    tau: Estimate
    acceptance: Estimate
    alphas: tuple[Estimate, ...]
    draft_seconds: float
    verify_seconds: float
    speedup: Estimate
    break_even_tau: float
    perplexity: float = math.nan
    baseline: bool = False
    chosen: bool = False

    def record(self) -> dict[str, Any]:
        """JSON-able: an unknown number is null."""
        known: dict[str, Any] = _without_nan({"draft_tokens": self.plan.levels, "tree": self.plan.tree, **vars(self)})
        del known["plan"]
        for name in ("tau", "acceptance", "speedup"):
            known[name] = _without_nan(getattr(self, name)._asdict())
        return known | {"alphas": [_without_nan(alpha._asdict()) for alpha in self.alphas]}

    def metrics(self) -> dict[str, float]:
        """Flat known numbers, for a run's metrics."""
        flat = {"tau": self.tau.value, "tau_low": self.tau.low, "tau_high": self.tau.high}
        flat |= {"acceptance": self.acceptance.value, "draft_tokens": float(self.plan.levels)}
        flat |= {"drafted": self.drafted}
        flat |= {f"alpha_{k + 1}": alpha.value for k, alpha in enumerate(self.alphas)}
        flat |= {"draft_ms": self.draft_seconds * 1e3, "verify_ms": self.verify_seconds * 1e3}
        flat |= {"speedup": self.speedup.value, "speedup_low": self.speedup.low, "speedup_high": self.speedup.high}
        flat |= {"perplexity": self.perplexity}
        return {name: value for name, value in flat.items() if math.isfinite(value)}


@dataclass(frozen=True)
class DomainRow:
    """One draft in one domain at one sampling setting."""

    draft: str
    step: int
    plan: Plan
    domain: str
    setting: str
    rule: str
    conversations: int
    tau: Estimate
    acceptance: Estimate
    alphas: tuple[Estimate, ...]
    baseline: bool = False


def leaderboard(
    tables: Sequence[pa.Table],
    costs: Mapping[Checkpoint, CostTable],
    settings: ScoreSettings,
    baselines: Collection[str] = (),
    perplexity: Mapping[Checkpoint, float] | None = None,
) -> list[Row]:
    """One row a checkpoint, at its best plan, baselines first, the chosen one marked."""
    best: list[Row] = []
    for (draft, step), table in groups(serving(concat(tables), settings), "draft", "step"):
        times, baseline = _costs(costs, draft, step), draft in baselines
        rows = _rows(table, times, baseline, settings.bootstrap)
        seen = (perplexity or {}).get((draft, step), math.nan)
        best.append(replace(best_plan(rows, settings.tie_share), perplexity=seen))
    best.sort(key=lambda row: (not row.baseline, row.draft, row.step))
    winner = choose(best)
    return [replace(row, chosen=row is winner) for row in best]


def by_plan(tables: Sequence[pa.Table], costs: CostTable, row: Row, settings: ScoreSettings) -> list[Row]:
    """The row's checkpoint at every K and tree, the fewest drafted tokens first."""
    table = where(serving(concat(tables), settings), draft=row.draft, step=row.step)
    rows = sorted(_rows(table, costs, row.baseline, settings.bootstrap), key=lambda one: one.drafted)
    return [replace(one, chosen=one.plan == row.plan) for one in rows]


def choose(rows: Sequence[Row]) -> Row | None:
    """The row with the best expected speed-up, baselines aside; None where no speed-up is known."""
    known = [row for row in rows if not row.baseline and math.isfinite(row.speedup.value)]
    return min(known, key=lambda row: (-row.speedup.value, row.drafted, row.step), default=None)


def best_plan(rows: Sequence[Row], tie_share: float) -> Row:
    """Of one checkpoint's rows: the best expected speed-up, or the fewest drafted tokens within `tie_share` of it."""
    known = [row for row in rows if math.isfinite(row.speedup.value)]
    if not known:
        return rows[0]
    floor = max(row.speedup.value for row in known) * (1 - tie_share)
    return min((row for row in known if row.speedup.value >= floor), key=lambda row: row.drafted)


def plain_row(costs: CostTable) -> Row:
    """The baseline of baselines: decoding without a draft."""
    one = Estimate(1.0, 1.0, 1.0)
    none = Estimate(math.nan, reason="nothing is drafted")
    return Row(PLAIN, 0, Plan(0), 0.0, one, none, (), 0.0, costs.plain_seconds, one, 1.0, baseline=True)


def domain_rows(tables: Sequence[pa.Table], rows: Sequence[Row], settings: ScoreSettings) -> list[DomainRow]:
    """The rows' drafts per domain and sampling setting, each at the plan that its row has."""
    table = serving(concat(tables), settings)
    found: list[DomainRow] = []
    for row in rows:
        mine = _of(table, row)
        for (domain, setting, rule), part in groups(mine, "domain", "setting", "rule"):
            found.append(
                DomainRow(
                    draft=row.draft,
                    step=row.step,
                    plan=row.plan,
                    domain=domain,
                    setting=setting,
                    rule=RULES[rule].label,
                    conversations=len(values(part, "conversation")),
                    tau=tau(part, settings.bootstrap),
                    acceptance=acceptance(part, settings.bootstrap),
                    alphas=tuple(alphas(part, settings.bootstrap)),
                    baseline=row.baseline,
                )
            )
    return sorted(found, key=lambda one: (one.domain, one.setting, not one.baseline, one.draft, one.step))


def speedup_difference(tables: Sequence[pa.Table], first: Row, second: Row, settings: ScoreSettings) -> Estimate:
    """Expected speed-up of the first row minus the second's, paired by turn: what a promotion rests on."""
    table = serving(concat(tables), settings)
    one, two = (_of(table, row) for row in (first, second))
    scales = [row.speedup.value / row.tau.value for row in (first, second)]
    return tau_difference(one, two, settings.bootstrap, *scales)


def serving(table: pa.Table, settings: ScoreSettings) -> pa.Table:
    """The rows that decide: per draft, replayed where it was; per sampling setting, its serving rule.

    That rule is greedy at T = 0, else the first of the settings' other rules by which this way of drafting was scored;
    where there is none (prompt lookup under `token`), the one that it was scored by. A lossy rule decides nothing.
    """
    kept = []
    for _, part in groups(table, "draft", "step", "setting", "tree"):
        rules = [rule for rule in values(part, "rule") if RULES[rule].lossless]
        mine = where(part, rule=next((rule for rule in ("greedy", *settings.sampled_rules) if rule in rules), rules[0]))
        kept.append(where(mine, method="replay" if "replay" in values(mine, "method") else "decode"))
    return concat(kept)


def at_plan(table: pa.Table, plan: Plan) -> pa.Table:
    """The rows of one plan."""
    return where(table, draft_tokens=plan.levels, tree=plan.tree)


def _of(table: pa.Table, row: Row) -> pa.Table:
    return at_plan(where(table, draft=row.draft, step=row.step), row.plan)


def _rows(table: pa.Table, costs: CostTable, baseline: bool, bootstrap: Bootstrap) -> list[Row]:
    """A row for every plan of one draft and step."""
    return [_row(part, costs, baseline, bootstrap) for _, part in groups(table, "draft_tokens", "tree")]


def _row(table: pa.Table, costs: CostTable, baseline: bool, bootstrap: Bootstrap) -> Row:
    """The row of one draft, step and plan."""
    draft, step, K, tree = (values(table, column)[0] for column in ("draft", "step", "draft_tokens", "tree"))
    plan, pooled = Plan(K, tree), tau(table, bootstrap)
    cost, drafted = costs.cost(plan), _a_round(table["drafted"], table)
    # A trained draft always drafts; its clipped last rounds are counted as full ones.
    share = _a_round(pc.list_element(table["reached"], 0), table) if baseline else 1.0
    return Row(
        draft=draft,
        step=step,
        plan=plan,
        drafted=drafted,
        tau=pooled,
        acceptance=acceptance(table, bootstrap),
        alphas=tuple(alphas(table, bootstrap)),
        draft_seconds=cost.draft_seconds,
        verify_seconds=cost.verify_seconds,
        speedup=expected_speedup(pooled, costs, plan, share),
        break_even_tau=break_even_tau(costs, plan, share),
        baseline=baseline,
    )


def _a_round(counts: pa.ChunkedArray, table: pa.Table) -> float:
    """So many on average in a round."""
    total, rounds = (sum(column.to_pylist()) for column in (counts, table["rounds"]))
    return float(total / rounds) if rounds else math.nan


def _costs(costs: Mapping[Checkpoint, CostTable], draft: str, step: int) -> CostTable:
    if (draft, step) not in costs:
        known = ", ".join(f"{name} {at}" for name, at in sorted(costs))
        raise InputError(f"draft {draft} step {step}: no times measured; there are times for {known}")
    return costs[draft, step]


def _without_nan(record: dict[str, Any]) -> dict[str, Any]:
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in record.items()}
