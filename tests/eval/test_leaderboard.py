"""The pick: expected speed-up at the best K, and nothing else."""

import json
import math
from typing import Any

import loads
import pyarrow as pa
import pytest
from counted import counts_of

from draftforge.errors import InputError
from draftforge.eval import leaderboard as module
from draftforge.eval.cost_table import CostKey, CostTable
from draftforge.eval.counts import CountRow, concat, to_table
from draftforge.eval.draft_configs import DraftConfig
from draftforge.eval.leaderboard import (
    Row,
    choose,
    config_rows,
    domain_rows,
    leaderboard,
    plain_row,
    serving,
    speedup_difference,
)
from draftforge.eval.report.page import score_record
from draftforge.eval.settings import ScoreSettings
from draftforge.specdec.replay.expected_rounds import RoundCounts

SETTINGS = ScoreSettings(draft_tokens=[1, 2, 3])
DEPTHS = (1, 2, 3)


def costs_of(draft_ms: float, verify_ms: float = 31.0, plain_ms: float = 30.0) -> CostTable:
    key = CostKey(
        hardware="h", software="s", dtype="float32", target={}, draft={}, sampling="greedy",
        plans={label: {"levels": 2 if label == "wide" else int(label)} for label in [*map(str, DEPTHS), "wide"]},
    )  # fmt: skip
    depths = {**{str(K): K for K in DEPTHS}, "wide": 2}
    parts = {label: (draft_ms * K / 1e3, verify_ms / 1e3, 0.0) for label, K in depths.items()}
    return loads.batch_one_table(key, plain_ms / 1e3, parts)


def board(tables: list[pa.Table], costs: dict[str, CostTable], *args: Any, **options: Any) -> list[Row]:
    """The leaderboard of drafts whose checkpoints share their times."""
    found = {one for table in tables for one in zip(*(table[name].to_pylist() for name in ("draft", "step")))}
    return leaderboard(tables, {one: costs[one[0]] for one in found if one[0] in costs}, *args, **options)


def test_speed_decides_not_tau() -> None:
    slow = counts_of("slow", 10, {1: 1.7, 2: 2.2, 3: 2.9})
    fast = counts_of("fast", 10, {1: 1.6, 2: 1.9, 3: 2.0})
    costs = {"slow": costs_of(12.0), "fast": costs_of(2.0)}
    rows = board([slow, fast], costs, SETTINGS)
    chosen = next(row for row in rows if row.chosen)
    assert [(row.draft, row.chosen) for row in rows] == [("fast", True), ("slow", False)]
    assert chosen.config.levels == 2 and chosen.speedup.value == pytest.approx(1.9 * 30 / 35)
    assert chosen.tau.value == pytest.approx(1.9) and chosen.tau.low < 1.9 < chosen.tau.high
    assert chosen.speedup.low == pytest.approx(chosen.tau.low * 30 / 35)
    assert chosen.break_even_tau == pytest.approx(35 / 30)
    assert chosen.draft_seconds == pytest.approx(0.004) and chosen.verify_seconds == pytest.approx(0.031)
    assert rows[1].config.levels == 3  # its own best K


def test_figures_of_every_plan_are_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [counts_of("small", step, {1: 1.5, 2: 1.5 + step / 100}) for step in (20, 40)]
    costs = {("small", step): costs_of(1.0) for step in (20, 40)}
    alone, plans = leaderboard(tables, costs, SETTINGS), config_rows(tables, costs, SETTINGS)
    domains = domain_rows(tables, alone, SETTINGS, costs)

    def again(*args: object) -> None:
        raise AssertionError("drawn again")

    monkeypatch.setattr(module, "_row", again)
    monkeypatch.setattr(module, "alphas", again)
    rows = leaderboard(tables, costs, SETTINGS, configs=plans)
    assert rows == alone
    record = score_record(concat(tables), costs, rows, SETTINGS, plans, domains)
    told = [(one["step"], one["draft_tokens"], one["chosen"]) for one in record["plans"]]
    assert told == [(20, 1, False), (20, 2, True), (40, 1, False), (40, 2, True)]
    assert {one["step"] for one in record["domains"]} == {40}


def test_perplexity_is_shown_and_never_used() -> None:
    tables = [counts_of("small", step, {1: 1.5, 2: 1.5 + step / 100}) for step in (20, 40)]
    perplexity = {("small", 20): 1.01, ("small", 40): 900.0}
    rows = board(tables, {"small": costs_of(1.0)}, SETTINGS, perplexity=perplexity)
    assert [row.perplexity for row in rows] == [1.01, 900.0] and [row.chosen for row in rows] == [False, True]


def test_depths_within_noise_tie_and_the_fewest_win() -> None:
    table = counts_of("small", 20, {1: 1.5, 2: 1.6, 3: 1.655})
    costs = {"small": costs_of(1.0)}  # expected speed-ups 1.406, 1.455, 1.460: the last two are within 1%
    assert board([table], costs, SETTINGS)[0].config.levels == 2
    exact = SETTINGS.model_copy(update={"tie_share": 0.0})
    assert board([table], costs, exact)[0].config.levels == 3
    wide = SETTINGS.model_copy(update={"tie_share": 0.05})
    assert board([table], costs, wide)[0].config.levels == 1


def test_a_tree_competes_with_chains() -> None:
    tables = [counts_of("small", 20, {2: 2.1}), counts_of("small", 20, {2: 2.4}, tree="wide", drafted=700.0)]
    costs = {"small": costs_of(1.0)}
    (row,) = board(tables, costs, SETTINGS)
    assert row.config == DraftConfig(2, "wide") and row.config.label == "wide" and row.drafted == pytest.approx(7.0)
    assert row.record()["tree"] == "wide" and row.record()["draft_tokens"] == 2
    assert [d.config for d in domain_rows(tables, [row], SETTINGS, {("small", 20): costs["small"]})] == [
        DraftConfig(2, "wide")
    ]
    even = [tables[0], counts_of("small", 20, {2: 2.11}, tree="wide", drafted=700.0)]
    assert board(even, costs, SETTINGS)[0].config == DraftConfig(2)  # within a hundredth: the fewest drafted tokens win
    difference = speedup_difference(tables, row, board(even, costs, SETTINGS)[0], SETTINGS)
    assert difference.value == pytest.approx((2.4 - 2.1) * 30 / 33)


def test_a_lossy_rule_never_decides() -> None:
    settings = ScoreSettings(draft_tokens=[2], rules=["token", "typical"])
    tables = [
        counts_of("small", 20, {2: 1.5}, setting="t1", rule="token"),
        counts_of("small", 20, {2: 2.9}, setting="t1", rule="typical", method="decode"),
        counts_of("small", 20, {2: 1.6}, setting="t1", rule="multiround", method="decode", tree="wide"),
        counts_of("small", 20, {2: 2.9}, setting="t1", rule="typical", method="decode", tree="wide"),
    ]
    assert set(serving(concat(tables), settings)["rule"].to_pylist()) == {"token", "multiround"}
    assert board(tables, {"small": costs_of(1.0)}, settings)[0].tau.value == pytest.approx(1.6)


def test_checkpoints_may_have_times_of_their_own() -> None:
    """A measured tree may be deeper at one step than at another."""
    tables = [counts_of("small", step, {2: 2.0}) for step in (1, 2)]
    rows = leaderboard(tables, {("small", 1): costs_of(1.0), ("small", 2): costs_of(9.0)}, SETTINGS)
    assert [row.chosen for row in rows] == [True, False] and rows[1].draft_seconds == pytest.approx(0.018)


def test_baselines_come_first_and_are_never_chosen() -> None:
    lookup = counts_of("lookup", 0, {1: 2.5, 2: 3.0, 3: 3.5}, drafted=50.0)
    tables = [counts_of("small", 20, {1: 1.5, 2: 1.6, 3: 1.7}), lookup]
    rows = board(tables, {"small": costs_of(1.0), "lookup": costs_of(0.1)}, SETTINGS, baselines=["lookup"])
    assert [(row.draft, row.baseline, row.chosen) for row in rows] == [("lookup", True, False), ("small", False, True)]
    # 50 drafted tokens in 100 rounds of up to 3: a sixth of the rounds drafts, the others cost a plain token
    seconds = (31.3 + 5 * 30.0) / 6
    assert rows[0].config.levels == 3 and rows[0].speedup.value == pytest.approx(3.5 * 30 / seconds)
    plain = plain_row(costs_of(1.0))
    assert plain.speedup.value == plain.tau.value == 1.0 and plain.baseline and math.isnan(plain.acceptance.value)


def test_each_setting_counts_under_its_serving_rule() -> None:
    settings = ScoreSettings(draft_tokens=[2], rules=["block", "token"])
    tables = [
        counts_of("small", 20, {2: 2.0}),
        counts_of("small", 20, {2: 1.6}, setting="t1", rule="block"),
        counts_of("small", 20, {2: 1.5}, setting="t1", rule="token"),
        counts_of("small", 20, {2: 2.9}, method="decode", conversations=2),
        counts_of("lookup", 0, {2: 1.2}, setting="t1", rule="onehot"),
        counts_of("odd", 0, {2: 1.3}, method="decode"),
    ]
    kept = serving(concat(tables), settings)
    seen = sorted(set(zip(*(kept[name].to_pylist() for name in ("draft", "setting", "rule", "method")))))
    assert seen == [
        ("lookup", "t1", "onehot", "replay"),
        ("odd", "t0", "greedy", "decode"),
        ("small", "t0", "greedy", "replay"),
        ("small", "t1", "block", "replay"),
    ]
    rows = board(tables[:4], {"small": costs_of(1.0)}, settings)
    assert len(rows) == 1 and rows[0].tau.value == pytest.approx(1.8) and rows[0].tau.clusters == 10


def test_domains_of_the_chosen() -> None:
    tables = [
        counts_of("small", 20, {2: 2.4}, "support"),
        counts_of("small", 20, {2: 1.4}, "chat"),
        counts_of("lookup", 0, {2: 1.3}, "support", drafted=10.0),
    ]
    costs = {("small", 20): costs_of(1.0), ("lookup", 0): costs_of(0.1)}
    rows = leaderboard(tables, costs, SETTINGS, ["lookup"])
    assert next(row for row in rows if row.chosen).tau.value == pytest.approx(1.9)  # pooled over the mix as it is
    domains = domain_rows(tables, rows, SETTINGS, costs)
    assert [(d.domain, d.draft, round(d.tau.value, 6)) for d in domains] == [
        ("chat", "small", 1.4),
        ("support", "lookup", 1.3),
        ("support", "small", 2.4),
    ]
    assert domains[0].conversations == 10 and domains[0].rule == "greedy" and len(domains[0].alphas) == 2
    assert domains[2].speedup.value == pytest.approx(2.4 * 30 / 33) and math.isnan(domains[2].goodput.value)


def test_a_paired_difference_of_speed() -> None:
    tables = [counts_of("a", 1, {2: 2.0}), counts_of("b", 1, {2: 1.8})]
    rows = board(tables, {"a": costs_of(5.0), "b": costs_of(1.0)}, SETTINGS)
    difference = speedup_difference(tables, rows[0], rows[1], SETTINGS)
    assert difference.value == pytest.approx(2.0 * 30 / 41 - 1.8 * 30 / 33)
    assert difference.high < 0  # the same conversations: its interval is narrow


def test_without_times_nothing_is_guessed() -> None:
    with pytest.raises(InputError, match="draft small step 1: no times measured; there are times for lookup 0"):
        leaderboard([counts_of("small", 1, {1: 1.5})], {("lookup", 0): costs_of(1.0)}, SETTINGS)
    assert board([], {}, SETTINGS) == [] and choose([]) is None


def test_a_draft_without_rounds_is_unknown_not_chosen() -> None:
    nothing = RoundCounts(0.0, 0.0, 0.0, 0.0, (0.0,), (0.0,))
    row = CountRow("none", 1, "c", 0, "k", "d", "selection", "128", "t0", "greedy", 1, "", "replay", nothing)
    rows = board([to_table([row])], {"none": costs_of(1.0)}, SETTINGS)
    assert math.isnan(rows[0].speedup.value) and not rows[0].chosen and rows[0].tau.reason == "no rounds"
    record = rows[0].record()
    assert json.loads(json.dumps(record, allow_nan=False))["tau"]["value"] is None
    assert "tau" not in rows[0].metrics() and rows[0].metrics()["draft_ms"] == 1.0


def test_metrics_are_flat_numbers() -> None:
    (row,) = board([counts_of("small", 20, {2: 2.0})], {"small": costs_of(1.0)}, SETTINGS)
    metrics = row.metrics()
    assert metrics["tau"] == pytest.approx(2.0) and metrics["alpha_2"] == pytest.approx(0.5)
    assert {"tau_low", "tau_high", "speedup", "speedup_low", "acceptance", "verify_ms"} <= set(metrics)
    assert isinstance(row, Row) and json.dumps(row.record(), allow_nan=False)
