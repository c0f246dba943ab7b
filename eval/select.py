"""Picks the checkpoint and the number of drafted tokens by expected speed-up.

1. One row a (draft, step, K): counts pooled over the split's mix as it is (no other domain weights), all scored
   sampling settings together, each under its serving rule; replayed counts where there are any, else decoded ones.
2. A checkpoint's K is the one with the best expected speed-up; K within `tie_share` of it tie (times repeat no better
   than that), and the fewest drafted tokens win.
3. The checkpoint with the best expected speed-up at its K is chosen; equal ones: fewer drafted tokens, earlier step.
Perplexity is carried along for people to see. It decides nothing. Neither do baselines, which are never chosen; one
that does not draft in every round (prompt lookup) pays a plain token's time for the rounds in which it does not.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from ..errors import InputError
from .costs import CostTable, break_even_tau, expected_speedup
from .counts import concat, groups, values, where
from .figures import Bootstrap, Estimate, acceptance, alphas, tau, tau_difference
from .settings import ScoreSettings

PLAIN = "plain"


@dataclass(frozen=True)
class Row:
    """One line of the leaderboard: a draft at one step and one K."""

    draft: str
    step: int
    draft_tokens: int
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
        known: dict[str, Any] = _without_nan(vars(self))
        for name in ("tau", "acceptance", "speedup"):
            known[name] = _without_nan(getattr(self, name)._asdict())
        return known | {"alphas": [_without_nan(alpha._asdict()) for alpha in self.alphas]}

    def metrics(self) -> dict[str, float]:
        """Flat known numbers, for a run's metrics."""
        flat = {"tau": self.tau.value, "tau_low": self.tau.low, "tau_high": self.tau.high}
        flat |= {"acceptance": self.acceptance.value, "draft_tokens": float(self.draft_tokens)}
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
    draft_tokens: int
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
    costs: Mapping[str, CostTable],
    settings: ScoreSettings,
    baselines: Collection[str] = (),
    perplexity: Mapping[tuple[str, int], float] | None = None,
) -> list[Row]:
    """One row a checkpoint, at its best K, baselines first, the chosen one marked. `costs` by draft name."""
    best: list[Row] = []
    for (draft, step), table in groups(serving(concat(tables), settings), "draft", "step"):
        times, baseline = _costs(costs, draft), draft in baselines
        rows = [_row(part, times, baseline, settings.bootstrap) for _, part in groups(table, "draft_tokens")]
        seen = (perplexity or {}).get((draft, step), math.nan)
        best.append(replace(best_depth(rows, settings.tie_share), perplexity=seen))
    best.sort(key=lambda row: (not row.baseline, row.draft, row.step))
    winner = choose(best)
    return [replace(row, chosen=row is winner) for row in best]


def choose(rows: Sequence[Row]) -> Row | None:
    """The row with the best expected speed-up, baselines aside; None where no speed-up is known."""
    known = [row for row in rows if not row.baseline and math.isfinite(row.speedup.value)]
    return min(known, key=lambda row: (-row.speedup.value, row.draft_tokens, row.step), default=None)


def best_depth(rows: Sequence[Row], tie_share: float) -> Row:
    """Of one checkpoint's rows: the best expected speed-up, or the fewest drafted tokens within `tie_share` of it."""
    known = [row for row in rows if math.isfinite(row.speedup.value)]
    if not known:
        return rows[0]
    floor = max(row.speedup.value for row in known) * (1 - tie_share)
    return min((row for row in known if row.speedup.value >= floor), key=lambda row: row.draft_tokens)


def plain_row(costs: CostTable) -> Row:
    """The baseline of baselines: decoding without a draft."""
    one = Estimate(1.0, 1.0, 1.0)
    none = Estimate(math.nan, reason="nothing is drafted")
    return Row(PLAIN, 0, 0, one, none, (), 0.0, costs.plain_seconds, one, 1.0, baseline=True)


def domain_rows(tables: Sequence[pa.Table], rows: Sequence[Row], settings: ScoreSettings) -> list[DomainRow]:
    """The rows' drafts per domain and sampling setting, each at the K that its row has."""
    table = serving(concat(tables), settings)
    found: list[DomainRow] = []
    for row in rows:
        mine = where(table, draft=row.draft, step=row.step, draft_tokens=row.draft_tokens)
        for (domain, setting, rule), part in groups(mine, "domain", "setting", "rule"):
            found.append(
                DomainRow(
                    draft=row.draft,
                    step=row.step,
                    draft_tokens=row.draft_tokens,
                    domain=domain,
                    setting=setting,
                    rule=rule,
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
    one, two = (where(table, draft=row.draft, step=row.step, draft_tokens=row.draft_tokens) for row in (first, second))
    scales = [row.speedup.value / row.tau.value for row in (first, second)]
    return tau_difference(one, two, settings.bootstrap, *scales)


def serving(table: pa.Table, settings: ScoreSettings) -> pa.Table:
    """The rows that decide: per draft, replayed where it was; per sampling setting, its serving rule.

    That rule is greedy at T = 0, else the first of the settings' other rules; a draft without it (prompt lookup under
    `token`) stands with the rule that it was scored by.
    """
    kept = []
    for _, part in groups(table, "draft", "step", "setting"):
        methods, rules = values(part, "method"), values(part, "rule")
        rule = next((rule for rule in ("greedy", settings.serving_rule) if rule in rules), rules[0])
        kept.append(where(part, method="replay" if "replay" in methods else "decode", rule=rule))
    return concat(kept)


def _row(table: pa.Table, costs: CostTable, baseline: bool, bootstrap: Bootstrap) -> Row:
    """The row of one draft, step and K."""
    draft, step, K = (values(table, column)[0] for column in ("draft", "step", "draft_tokens"))
    pooled, cost, share = tau(table, bootstrap), costs.cost(K), _drafted_share(table, K) if baseline else 1.0
    return Row(
        draft=draft,
        step=step,
        draft_tokens=K,
        tau=pooled,
        acceptance=acceptance(table, bootstrap),
        alphas=tuple(alphas(table, bootstrap)),
        draft_seconds=cost.draft_seconds,
        verify_seconds=cost.verify_seconds,
        speedup=expected_speedup(pooled, costs, K, share),
        break_even_tau=break_even_tau(costs, K, share),
        baseline=baseline,
    )


def _drafted_share(table: pa.Table, K: int) -> float:
    """Drafted tokens over those of a proposer that always drafts K."""
    rounds, drafted = (sum(table[column].to_pylist()) for column in ("rounds", "drafted"))
    return float(drafted / (rounds * K)) if rounds else 1.0


def _costs(costs: Mapping[str, CostTable], draft: str) -> CostTable:
    if draft not in costs:
        raise InputError(f"draft {draft}: no times measured; there are times for {sorted(costs)}")
    return costs[draft]


def _without_nan(record: dict[str, Any]) -> dict[str, Any]:
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in record.items()}
