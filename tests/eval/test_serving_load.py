"""Drafts at a load: closed forms, what the load changes, and what it comes to in words. All times are made up."""

import json
import math
from pathlib import Path
from typing import Any

import loads
import pytest
from counted import counts_of
from pydantic import ValidationError

from draftforge.errors import CorruptDataError, InputError
from draftforge.eval import cost_table
from draftforge.eval.cost_model import CostFit
from draftforge.eval.cost_table import CostTable
from draftforge.eval.draft_configs import DraftConfig
from draftforge.eval.leaderboard import Row, domain_rows, engine_tau, leaderboard, speedup_difference
from draftforge.eval.serving_load import BreakEvenPoint, LoadTimes
from draftforge.eval.settings import LoadSettings, ScoreSettings
from draftforge.eval.summary import serving_advice

CHEAP = loads.grid_table(lambda B, L, N, C: 2e-4 * L)
DEAR = loads.grid_table(lambda B, L, N, C: 1e-3 * L * (1 + B / 16))


def load_of(**changes: Any) -> LoadSettings:
    return LoadSettings(**{"batch_sizes": {1: 1.0}, "context_tokens": 512, "answer_tokens": 128, **changes})


def settings_of(**changes: Any) -> ScoreSettings:
    return ScoreSettings(draft_tokens=[1, 2, 3, 4], load=load_of(**changes))


def rows_of(settings: ScoreSettings, *drafts: tuple[str, dict[int, float], CostTable]) -> list[Row]:
    assert settings.load is not None
    times = {(name, 10): LoadTimes(fit, settings.load) for name, _, fit in drafts}
    return leaderboard([counts_of(name, 10, taus) for name, taus, _ in drafts], times, settings)


WEAK = {1: 1.5, 2: 1.75, 3: 1.9, 4: 1.95}
STRONG = {1: 1.85, 2: 2.6, 3: 3.3, 4: 3.9}


def test_one_batch_size_by_hand() -> None:
    """Batch 8, 448 prompt tokens, 128 answer tokens, context 512, K = 3."""
    times = LoadTimes(CHEAP, load_of(batch_sizes={8: 1}))
    plain = 5e-3 + 2e-8 * 8 * 512
    drafted = plain + 3 * 2e-4  # 32 tokens of a pass: still bound by memory
    prompt = 2e-5 * 448
    without, with_draft = 8 * prompt + 127 * plain, 8 * prompt * 1.1 + 127 / 2.5 * drafted
    gain = times.gain(DraftConfig(3))
    assert gain.speedup(2.5) == pytest.approx(without / with_draft, rel=1e-3)
    assert times.plain_goodput == pytest.approx(8 * 128 / without, rel=1e-3)
    even = 127 * drafted / (127 * plain - 8 * prompt * 0.1)
    assert gain.break_even_tau == pytest.approx(even, rel=1e-3)
    assert times.plain_seconds == pytest.approx(plain, rel=1e-3)
    assert times.cost(DraftConfig(3)).draft_seconds == pytest.approx(6e-4, rel=1e-3)
    assert tuple(times.memory) == pytest.approx((12_000_000, 512 * (448 + 128) * 8))


def test_shares_are_of_time_and_the_work_is_what_plain_decoding_does_in_it() -> None:
    one, eight = (LoadTimes(DEAR, load_of(batch_sizes={size: 1})) for size in (1, 8))
    both = LoadTimes(DEAR, load_of(batch_sizes={1: 3, 8: 1}))
    speedups = [times.gain(DraftConfig(2)).speedup(2.2) for times in (one, eight)]
    tokens = [0.75 * one.plain_goodput, 0.25 * eight.plain_goodput]  # in a second of plain decoding
    goodputs = [times.plain_goodput * speedup for times, speedup in zip((one, eight), speedups)]
    seconds = sum(work / rate for work, rate in zip(tokens, goodputs))
    assert both.plain_goodput == pytest.approx(sum(tokens))
    assert both.gain(DraftConfig(2)).speedup(2.2) == pytest.approx(1 / seconds)
    assert both.plain_goodput / seconds == pytest.approx(sum(tokens) * both.gain(DraftConfig(2)).speedup(2.2))


def test_a_round_is_plain_only_where_no_slot_drafts() -> None:
    """Prompt lookup drafts in half of a slot's rounds: in three of four rounds of two slots. On a GPU all are alike."""
    times = LoadTimes(DEAR, load_of(batch_sizes={2: 1}))
    never, always, half = (times.gain_at(2, DraftConfig(2), share).rounds for share in (0.0, 1.0, 0.5))
    assert never < always and half == pytest.approx(0.75 * always + 0.25 * never)
    alike = LoadTimes(DEAR.model_copy(update={"idle_as_full": True}), load_of(batch_sizes={2: 1}))
    assert alike.gain_at(2, DraftConfig(2), 0.5).rounds == pytest.approx(always)


def test_a_draft_without_rounds_is_not_known_to_lose() -> None:
    unknown = counts_of("none", 10, {2: 1.0}).slice(0, 1).set_column(13, "rounds", [[0.0]])
    times = {("none", 10): LoadTimes(CHEAP, load_of())}
    (row,) = leaderboard([unknown], times, settings_of())
    assert math.isnan(row.speedup.value) and row.load is not None and row.load.break_even is None
    assert json.dumps(row.record(), allow_nan=False) and "loses_above" not in row.metrics()


def test_short_answers_gain_less() -> None:
    """Most of their time passes before the first token, which no draft shortens."""
    speedups = [
        LoadTimes(CHEAP, load_of(context_tokens=448 + tokens // 2, answer_tokens=tokens))
        .gain(DraftConfig(3))
        .speedup(2.5)
        for tokens in (4, 16, 64, 256)
    ]
    assert speedups == sorted(speedups) and speedups[0] < 1.5 < 2.0 < speedups[-1]


def test_the_load_decides_which_draft_is_picked() -> None:
    """Alone the strong, dear draft wins; in a full batch, where every verified token costs, the weak and cheap one."""
    alone, full = (
        rows_of(settings_of(batch_sizes={size: 1}), ("weak", WEAK, CHEAP), ("strong", STRONG, DEAR)) for size in (1, 64)
    )
    assert [row.draft for row in alone if row.chosen] == ["strong"]
    assert next(row for row in alone if row.chosen).config == DraftConfig(4)
    assert [row.draft for row in full if row.chosen] == ["weak"]
    assert {row.draft: row.config.levels for row in full} == {"weak": 1, "strong": 1}
    assert all(row.speedup.low < row.speedup.value < row.speedup.high for row in (*alone, *full))


def test_where_it_loses_is_looked_up_batch_size_by_batch_size() -> None:
    (row,) = rows_of(settings_of(batch_sizes={1: 1, 64: 0}), ("strong", STRONG, DEAR))
    assert row.load is not None and row.config == DraftConfig(4) and row.load.break_even is not None
    above, times = row.load.break_even.above, LoadTimes(DEAR, load_of())
    assert above is not None and 16 < above < 64
    assert times.gain_at(above, row.config).speedup(3.9) >= 1 > times.gain_at(above + 1, row.config).speedup(3.9)
    assert [one.batch_size for one in row.load.batches] == list(loads.SIZES)
    plans = [one.config.levels for one in row.load.batches]
    assert plans == sorted(plans, reverse=True) and plans[0] == 4 and plans[-1] == 1
    assert [one.share for one in row.load.batches] == [1.0, *[0.0] * 6]
    for one in row.load.batches:
        even = times.gain_at(one.batch_size, one.config).speedup(one.break_even_tau)
        assert even == pytest.approx(1.0) and one.goodput.value == pytest.approx(one.speedup.value * one.plain_goodput)
    assert times.break_even(DraftConfig(4), 1.0) == BreakEvenPoint(0, 64) and times.break_even(
        DraftConfig(1), 9.0
    ) == BreakEvenPoint(None, 64)


def test_a_domain_has_a_speedup_of_its_own() -> None:
    settings = settings_of(batch_sizes={1: 1, 64: 0})
    assert settings.load is not None
    tables = [counts_of("strong", 10, STRONG, "support"), counts_of("strong", 10, dict.fromkeys(STRONG, 1.1), "chat")]
    times = {("strong", 10): LoadTimes(DEAR, settings.load)}
    rows = leaderboard(tables, times, settings)
    chat, support = domain_rows(tables, rows, settings, times)
    assert chat.speedup.value < 1 < support.speedup.value and chat.break_even == BreakEvenPoint(0, 64)
    assert chat.speedup.value == pytest.approx(rows[0].gain.speedup(1.1))
    assert support.goodput.value == pytest.approx(support.speedup.value * times["strong", 10].plain_goodput)
    record = json.loads(json.dumps(chat.record(), allow_nan=False))
    assert record["loses_above"] == 0 and len(record["batches"]) == len(loads.SIZES)
    assert {one.config for one in chat.batches} == {DraftConfig(1)} and support.batches[0].config == DraftConfig(4)
    sentences = serving_advice(rows, [chat, support], settings)
    assert any(line.startswith("domain 'chat' (t0) does not pay: 0.") for line in sentences)
    assert not any("domain 'support' (t0) does not" in line for line in sentences)


def test_tau_under_every_rule_stands_beside_the_deciding_one() -> None:
    settings = settings_of(engine="vllm")
    assert settings.load is not None
    rules = {"token": 2.0, "block": 2.1, "onehot": 1.8}
    tables = [counts_of("a", 10, {2: tau}, setting="t1", rule=rule) for rule, tau in rules.items()]
    times = {("a", 10): LoadTimes(CHEAP, settings.load)}
    (row,) = domain_rows(tables, leaderboard(tables, times, settings), settings, times)
    assert row.rule == "onehot" and row.tau.value == pytest.approx(1.8)
    assert {rule: tau.value for rule, tau in row.taus} == {rule: pytest.approx(tau) for rule, tau in rules.items()}
    assert row.record()["taus"]["block"]["value"] == pytest.approx(2.1)


def test_a_difference_of_speed_is_not_linear_in_tau() -> None:
    settings = settings_of(answer_tokens=16)
    rows = rows_of(settings, ("a", {2: 2.0}, CHEAP), ("b", {2: 2.5}, DEAR))
    tables = [counts_of("a", 10, {2: 2.0}), counts_of("b", 10, {2: 2.5})]
    difference = speedup_difference(tables, rows[0], rows[1], settings)
    assert difference.value == pytest.approx(rows[0].speedup.value - rows[1].speedup.value)


def test_records_and_metrics_are_whole() -> None:
    (row,) = rows_of(settings_of(batch_sizes={1: 0.5, 8: 0.5}, engine="vllm"), ("strong", STRONG, DEAR))
    record = json.loads(json.dumps(row.record(), allow_nan=False))
    assert record["load"]["hardware"] == "card, bfloat16" and len(record["load"]["batches"]) == len(loads.SIZES)
    assert record["load"]["load"] == "vllm, batch 1 (50%), 8 (50%), context 512, answers of 128"
    assert record["break_even_tau"] == pytest.approx(row.gain.break_even_tau) and not record["dropped"]
    metrics = row.metrics()
    assert {"goodput", "goodput_low", "speedup_batch_8", "break_even_tau", "draft_mb", "loses_above"} <= set(metrics)
    assert all(math.isfinite(value) for value in metrics.values())
    assert row.load is not None and row.load.goodput.value == pytest.approx(row.speedup.value * row.load.plain_goodput)


def test_tau_as_the_engine_counts() -> None:
    """vLLM and the like count no round without a draft."""
    table = counts_of("lookup", 0, {2: 1.2}, drafted=60.0)  # 100 rounds, 30 of them draft, 20 tokens are accepted
    assert engine_tau(table, settings_of(engine="vllm")).value == pytest.approx(1 + 20 / 30)
    assert engine_tau(table, settings_of()).value == pytest.approx(1.2)


def test_advice_says_what_the_figures_say() -> None:
    settings = settings_of(batch_sizes={1: 1, 64: 0})
    rows = rows_of(settings, ("strong", STRONG, DEAR))
    sentences = serving_advice(rows, [], settings)
    assert sentences[0].startswith("strong step 10 at K=4 gains at this load: ") and "it pays from" in sentences[0]
    (by_batch,) = [line for line in sentences if line.startswith("By batch size")]
    assert by_batch.startswith("By batch size: K=4 at batch 1 to ") and "no speculation at batch 64" in by_batch
    assert rows[0].load is not None and rows[0].load.break_even is not None
    assert f"Switch speculation off above batch {rows[0].load.break_even.above}: there K=4 loses." in sentences
    lost = serving_advice(rows_of(settings, ("weak", dict.fromkeys(WEAK, 1.01), DEAR)), [], settings)
    assert lost[0].startswith("Speculation loses at this load, do not serve it: the best is weak")
    assert "K=1 loses at every batch size up to 64." in lost
    assert serving_advice([], [], settings) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_sizes": {128: 1}}, r"batch 128 is not within the measured range of 1 to 64 \(card, bfloat16\)"),
        ({"context_tokens": 2000}, "context 2000 is not within the measured range of 256 to 1024"),
        ({"context_tokens": 512, "answer_tokens": 900}, "prompt 62 is not within the measured range of 128 to 900"),
    ],
)
def test_nothing_is_said_beyond_what_was_measured(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        LoadTimes(CHEAP, load_of(**changes))
    with pytest.raises(InputError, match=r"K=5 \(5 levels\): no times measured; there are times for .*chain \(1 to 4"):
        LoadTimes(CHEAP, load_of()).gain(DraftConfig(5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_sizes": {0: 1.0}}, "a batch size must be >= 1 and its share >= 0"),
        ({"batch_sizes": {1: -1.0}}, "a batch size must be >= 1 and its share >= 0"),
        ({"batch_sizes": {1: 0.0}}, "one share must be > 0"),
        ({"batch_sizes": {}}, "at least 1 item"),
        ({"context_tokens": 64, "answer_tokens": 128}, "that leaves no prompt"),
        ({"engine": "sglang", "rule": "match"}, "rule match: sglang has token, onehot"),
        ({"engine": "tensorrt"}, "'vllm', 'sglang'"),
    ],
)
def test_loads_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        load_of(**changes)


def test_the_engine_fixes_the_rule() -> None:
    assert ScoreSettings(rules=["greedy", "token"], load=load_of(engine="vllm")).sampled_rules == ["onehot", "token"]
    assert settings_of(engine="vllm", rule="token").sampled_rules[0] == "token"
    assert settings_of().sampled_rules[0] == "token"
    with pytest.raises(ValidationError, match=r"costs.fit x: needs a load"):
        ScoreSettings.model_validate({"costs": {"fit": "x"}})


def test_a_fit_is_read_where_its_shapes_are_known(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    other = loads.grid_table(
        lambda B, L, N, C: 1e-3, draft={"class": "E", "parameters": 5, "config": {"layers": 1, "new": 2}}
    )
    cost_table.write_tables(path, [CHEAP, other])
    tables = cost_table.read_tables(path)
    assert tables == [CHEAP, other]
    elsewhere = other.key.model_copy(update={"hardware": "here", "software": "t", "dtype": "float32"})
    asked = elsewhere.model_copy(update={"draft": {"class": "E", "parameters": 5, "config": {"layers": 1, "old": 3}}})
    assert cost_table.table_for(asked, tables, path) == other
    deeper = asked.model_copy(update={"draft": {"class": "E", "parameters": 5, "config": {"layers": 2}}})
    with pytest.raises(
        InputError, match=r"times.json: holds no times of this .*: draft class D .* E; draft layers differs"
    ):
        cost_table.table_for(deeper, tables, path)
    longer = asked.model_copy(update={"plans": {"9": {"rule": "greedy", "levels": 9, "tree": None}}})
    with pytest.raises(InputError, match="; no 9"):
        cost_table.table_for(longer, tables, path)
    between = asked.model_copy(update={"plans": {"3": {"rule": "greedy", "levels": 3, "tree": None}}})
    assert cost_table.incompatibility(between, other.key) is None
    tree = asked.model_copy(update={"plans": {"wide": {"rule": "greedy", "levels": 2, "tree": {}}}})
    assert cost_table.incompatibility(tree, other.key) == "no wide"
    path.write_text(path.read_text().replace('"verify_seconds"', '"verified"', 1))
    with pytest.raises(CorruptDataError, match=r"times.json: fits\.0\.points\.0\."):
        cost_table.read_tables(path)
    path.write_text('{"fits": []}')
    with pytest.raises(CorruptDataError, match="must be a list of measured times"):
        cost_table.read_tables(path)


@pytest.mark.parametrize(("name", "value"), [("levels", "x"), ("levels", 10.5), ("config", [1]), ("config", "x")])
def test_times_of_another_machine_are_checked(name: str, value: object, tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    cost_table.write_tables(path, [CHEAP])
    record = json.loads(path.read_text())
    key = record["fits"][0]["key"]
    (next(iter(key["plans"].values())) if name == "levels" else key["draft"])[name] = value
    path.write_text(json.dumps(record))
    with pytest.raises(CorruptDataError, match="a key's plans must have levels and a tree, its models a config"):
        cost_table.read_tables(path)


def test_a_batch_size_that_no_engine_has_is_refused(tmp_path: Path) -> None:
    """Break-even and policies look at every batch size up to the largest."""
    path = tmp_path / "times.json"
    cost_table.write_tables(path, [CHEAP])
    path.write_text(path.read_text().replace('"batch_size": 64,', '"batch_size": 999999999,'))
    with pytest.raises(CorruptDataError, match=r"times\.json: fits: batch_size 999999999: must be 4,096 at most"):
        cost_table.read_tables(path)


def test_a_fit_that_leaves_the_limits_of_times_is_one_line() -> None:
    table = loads.grid_table(lambda B, L, N, C: 1e9 if B > 16 else 0.0)
    with pytest.raises(
        InputError, match=r"^times of rounds, fitted at batch 64: draft_seconds = \d.*: input should be "
    ):
        CostFit(table).round(DraftConfig(4), 64, 1024)


def test_a_tree_has_times_of_its_own() -> None:
    fit = CostFit(loads.grid_table(lambda B, L, N, C: 1e-3 * L, trees={"wide": (2, 20)}))
    assert fit.round(DraftConfig(2, "wide"), 8, 512).verify_seconds == pytest.approx(
        5e-3 + 2e-8 * 8 * 512 + 5e-5 * 104, rel=0.01
    )
    assert fit.round(DraftConfig(2), 8, 512).verify_seconds == pytest.approx(5e-3 + 2e-8 * 8 * 512, rel=0.01)
    assert fit.error < 0.02 and all(one.worst_error < 0.02 for one in fit.rounds.values())


def test_a_busy_place_of_the_grid_does_not_move_speedups() -> None:
    """Everything that was measured at some places took up to twice as long."""
    table = loads.grid_table(lambda B, L, N, C: 1e-3 * L)
    slow = {place: 1 + (n * 7 % 5) / 4 for n, place in enumerate(sorted({point.place for point in table.points}))}
    points = [point.scaled(slow[point.place]) for point in table.points]
    quiet, busy = CostFit(table), CostFit(table.model_copy(update={"points": points}))
    assert busy.rounds["plain"].error > 0.1 > 0.02 > busy.error
    for batch in (1, 8, 64):
        ratios = [fit.round(DraftConfig(3), batch, 512).seconds / fit.plain(batch, 512) for fit in (quiet, busy)]
        assert ratios[1] == pytest.approx(ratios[0], rel=0.04)
