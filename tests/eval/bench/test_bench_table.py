"""Figures of a benchmark against runs that were written by hand."""

import math

import pytest
from benched import PARTS, PLAIN, SMALL, answer, run

from draftforge.eval.bench.run import EVERY, BenchPrompt, BenchRow, Environment, Report, RunRecord, Setting
from draftforge.eval.bench.table import bench_rows, length_range

PROMPTS = [BenchPrompt("a", "math", [1] * 9), BenchPrompt("b", "code", [2] * 9)]
BOTH, ONE, NONE = (2, 2, 3, 2), (2, 1, 2, 2), (2, 0, 1, 1)


def runs(repeat: int = 0, pace: float = 1.0) -> list[RunRecord]:
    """Plain: prompts of 1 s, steps of 1 s. small: rounds of 1.5 s. All times `pace` as long."""

    def at(*moments: float) -> list[float]:
        return [pace * moment for moment in moments]

    plain = [answer(0, 0.0, at(1, 2, 3, 4, 5, 6, 7)), answer(1, 7 * pace, at(8, 9, 10))]
    small = [answer(0, 0.0, at(1, 2.5, 4), [BOTH, BOTH]), answer(1, 4 * pace, at(5, 6.5, 8), [NONE, NONE], "other")]
    return [run(PLAIN, plain, 10 * pace, repeat), run(SMALL, small, 8 * pace, repeat)]


def rows_of(records: list[RunRecord], greedy: bool = True) -> dict[tuple[str, str], BenchRow]:
    found = bench_rows(records, PROMPTS, 0.95, greedy)
    return {(row.setting.method, row.domain): row for row in found}


def test_every_figure_of_one_repeat() -> None:
    rows = rows_of(runs())
    assert list(rows) == [(method, domain) for method in ("plain", "small") for domain in (EVERY, "code", "math")]
    row = rows["small", EVERY]
    assert (row.prompts, row.tokens, row.rounds) == (2, 10, 4)
    assert row.tau.value == pytest.approx((3 + 3 + 1 + 1) / 4)
    assert [alpha.value for alpha in row.alphas] == pytest.approx([2 / 4, 2 / 2])
    assert row.tokens_per_second.value == pytest.approx(10 / 8)
    assert row.decoding_tokens_per_second.value == pytest.approx(8 / 6)
    assert row.speedup.value == pytest.approx((10 / 8) / (10 / 10))
    assert row.decoding_speedup.value == pytest.approx((8 / 6) / (8 / 8))
    assert row.first_token_p50 == row.first_token_p95 == 1.0
    assert row.inter_token_p50 == pytest.approx(0.5)  # six of 0.5 s, two of 1.5 s
    assert row.first_token_share == pytest.approx(2 / 8)
    assert row.round_seconds == 1.5
    assert row.break_even_tau == 1.5
    assert row.slots == 1.0
    assert row.equal_answers == 0.5
    assert row.parts == PARTS and row.memory.weights == 5_000_000
    plain = rows["plain", EVERY]
    assert plain.speedup.value == 1.0 and plain.tau.value == 1.0 and plain.alphas == []
    assert plain.equal_answers == 1.0


def test_domains() -> None:
    rows = rows_of(runs())
    assert rows["small", "math"].tau.value == 3.0
    assert rows["small", "math"].speedup.value == pytest.approx(7 / 4)
    assert rows["small", "code"].tau.value == 1.0
    assert rows["small", "code"].speedup.value == pytest.approx(3 / 4)
    assert rows["small", "code"].equal_answers == 0.0
    assert rows["small", "code"].break_even_tau == rows["small", EVERY].break_even_tau


def test_one_domain_needs_no_row_of_its_own() -> None:
    prompts = [prompt._replace(domain="math") for prompt in PROMPTS]
    found = bench_rows(runs(), prompts, 0.95, greedy=True)
    assert [row.domain for row in found] == [EVERY, EVERY]


def test_a_repeat_is_compared_with_the_plain_run_beside_it() -> None:
    """A machine that is three times as slow in one repeat changes rates, and no ratio."""
    row = rows_of([*runs(), *runs(1, pace=3.0), *runs(2, pace=1.25)])["small", EVERY]
    assert (row.speedup.low, row.speedup.value, row.speedup.high) == pytest.approx((1.25,) * 3)
    assert row.break_even_tau == pytest.approx(1.5)
    assert row.tokens_per_second.value == pytest.approx(1.0)
    assert row.tokens_per_second.low == pytest.approx(10 / 24)
    assert row.tau.value == 2.0  # counted once
    slow = runs(1)
    slow[1] = run(SMALL, slow[1].answers, 12.5, 1)
    spread = rows_of([*runs(), *slow])["small", EVERY].speedup
    assert (spread.low, spread.high) == pytest.approx((0.8, 1.25))


def test_what_has_no_plain_run_beside_it_is_left_out() -> None:
    assert rows_of(runs()[1:]) == {}
    batched = SMALL.model_copy(update={"batch_size": 4})
    kept = rows_of([*runs(), run(batched, runs()[1].answers, 8.0)])
    assert {row.setting for row in kept.values()} == {PLAIN, SMALL}


def test_above_temperature_0_answers_are_not_compared() -> None:
    assert math.isnan(rows_of(runs(), greedy=False)["small", EVERY].equal_answers)


def test_lengths() -> None:
    lengths = ((1, "1 to 16 tokens"), (16, "1 to 16 tokens"), (17, "17 to 64 tokens"), (2000, "1025 tokens and more"))
    assert all(length_range(tokens) == name for tokens, name in lengths)
    long = [answer(0, 0.0, [float(t) for t in range(1, 21)]), answer(1, 20.0, [21.0, 22.0, 23.0])]
    quick = answer(0, 0.0, [float(t) for t in range(1, 12)], [(2, 1, 2, 2)] * 9 + [NONE])
    short = [quick, answer(1, 11.0, [12.0, 13.5, 15.0], [NONE, NONE])]
    row = rows_of([run(PLAIN, long, 23.0), run(SMALL, short, 15.0)])["small", EVERY]
    assert [(some.lengths, some.prompts) for some in row.lengths] == [("1 to 16 tokens", 1), ("17 to 64 tokens", 1)]
    assert row.lengths[0].speedup.value == pytest.approx(3 / 4)
    assert row.lengths[0].first_token_share == pytest.approx(1 / 4)
    assert row.lengths[1].speedup.value == pytest.approx(20 / 11)


def test_a_drawn_answer_counts_as_long_as_plain_decoding_s() -> None:
    """Above temperature 0 two methods' answers to a prompt differ in length; the range must be the same for both."""
    plain = [answer(0, 0.0, [float(t) for t in range(1, 21)]), answer(1, 20.0, [21.0, 22.0, 23.0])]
    small = [answer(0, 0.0, [1.0, 2.0], [NONE]), answer(1, 2.0, [3.0, 4.0], [NONE])]
    row = rows_of([run(PLAIN, plain, 23.0), run(SMALL, small, 4.0)], greedy=False)["small", EVERY]
    assert [(some.lengths, some.prompts) for some in row.lengths] == [("1 to 16 tokens", 1), ("17 to 64 tokens", 1)]


def test_answers_without_a_round() -> None:
    """What nothing was measured of is not known, and never 0."""
    records = [run(setting, [answer(0, 0.0, [1.0]), answer(1, 1.0, [2.0])], 2.0) for setting in (PLAIN, SMALL)]
    row = rows_of(records)["small", EVERY]
    assert row.speedup.value == 1.0
    for figure in (row.tau.value, row.alphas[0].value, row.decoding_speedup.value, row.inter_token_p50):
        assert math.isnan(figure)
    assert math.isnan(row.break_even_tau)


def test_a_report_is_read_back_as_it_was() -> None:
    rows = bench_rows(runs(), PROMPTS, 0.95, greedy=False)
    about = Environment(
        hardware="h", dtype="float32", torch="2", transformers="5", draftforge="0", commit=None, command=["x"],
        target="t", target_fingerprint="0", drafts={}, prompts={"math": 1}, prompts_left_out=0, max_new_tokens=7,
        sampling="t0", repeats=1, confidence=0.95,
    )  # fmt: skip
    report = Report(surroundings=about, rows=rows, failures=[], words=["x"])
    text = report.model_dump_json()
    assert '"equal_answers":null' in text and "NaN" not in text
    assert Report.model_validate_json(text).model_dump_json() == text


def test_settings_differ_by_what_is_drafted() -> None:
    names = [Setting(method="m", levels=2, tree=tree, batch_size=1).label for tree in ("", "wide")]
    assert names == ["m K=2", "m tree wide"] and PLAIN.label == "plain"
