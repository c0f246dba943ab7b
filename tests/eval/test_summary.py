"""Sentences say what the figures say, no more and no less."""

import math
import re
import xml.etree.ElementTree as ET

import pytest
from benched import row, spread
from hypothesis import given
from hypothesis import strategies as st

from draftforge.eval.acceptance import Estimate
from draftforge.eval.bench.run import EVERY, BenchRow, Failure, LengthRow, Spread
from draftforge.eval.bench.table import speed_cells, waiting_cells
from draftforge.eval.report import svg
from draftforge.eval.report.charts import bench_panels
from draftforge.eval.summary import Outcome, bench_summary, outcome


def sentences(*rows: BenchRow, repeats: int = 3, half: bool = False) -> str:
    return "\n".join(bench_summary(rows, repeats, half))


@pytest.mark.parametrize(
    ("estimate", "error", "expected"),
    [
        (Estimate(1.2, 1.01, 1.3), 0.0, "gains"),
        (Estimate(0.9, 0.8, 0.99), 0.0, "loses"),
        (Estimate(1.2, 0.9, 1.3), 0.0, "no clear difference"),
        (Estimate(0.9, 0.8, 1.0), 0.0, "no clear difference"),
        (Estimate(1.1, 1.0, 1.2), 0.0, "no clear difference"),
        (Estimate(1.2, 1.1, 1.3), 0.05, "gains"),
        (Estimate(1.2, 1.1, 1.3), 0.1, "no clear difference"),
        (Estimate(0.8, 0.7, 0.9), 0.1, "loses"),
        (Estimate(0.8, 0.7, 0.96), 0.05, "no clear difference"),
        (Estimate(1.2), 0.0, "gains"),
        (Estimate(math.nan), 0.0, "not measured"),
    ],
)
def test_only_what_is_clear_is_claimed(estimate: Estimate, error: float, expected: Outcome) -> None:
    assert outcome(estimate, error) == expected


def test_batch_sizes_at_which_it_loses_are_named_with_what_a_round_costs() -> None:
    text = sentences(
        row(1, spread(1.4, 1.5, 1.6), break_even=1.25),
        row(4, spread(0.95, 1.01, 1.05), break_even=2.0),
        row(16, spread(0.84, 0.86, 0.88), break_even=2.5),
    )
    assert "At batch 1 the fastest is small K=4, 1.50x, repeats 1.40 to 1.60 over plain decoding." in text
    assert "At batch 4 nothing is clearly faster than plain decoding: the best is small K=4, 1.01x" in text
    assert "At batch 16 speculation loses, whatever drafts: the best is small K=4, 0.86x" in text
    assert (
        "small K=4: loses at batch 16 (0.86x, repeats 0.84 to 0.88; tau 2.00, a round pays from 2.50); "
        "no clear difference at batch 4 (1.01x, repeats 0.95 to 1.05; tau 2.00, a round pays from 2.00); "
        "gains at batch 1 (1.50x, repeats 1.40 to 1.60; tau 2.00, a round pays from 1.25)."
    ) in text


def test_domains_that_lose_though_the_whole_does_not() -> None:
    whole = row(speedup=spread(1.2))
    few = row(speedup=spread(0.9), domain="math", tau=1.4, alpha=0.3)
    waits = row(speedup=spread(0.8), domain="short", tau=1.8, alpha=0.6, share=0.7)
    fine = row(speedup=spread(1.5), domain="code", alpha=0.9)
    text = sentences(whole, few, waits, fine)
    assert "loses in math (0.90x; tau 1.40, a round pays from 1.50): 30% of first drafted tokens are accepted" in text
    assert "loses in short (0.80x; tau 1.80, a round pays from 1.50): 70% of the time there passes before" in text
    assert "loses in code" not in text
    assert "small K=4: first drafted tokens are accepted least in math (30%), most in code (90%)." in text
    assert "loses in math" not in sentences(row(speedup=spread(0.9)), few)  # that is said of the whole


def test_short_answers() -> None:
    short = LengthRow(lengths="1 to 16 tokens", prompts=5, speedup=spread(0.97), first_token_share=0.62)
    worse = LengthRow(lengths="17 to 64 tokens", prompts=5, speedup=spread(1.1), first_token_share=0.3)
    long = LengthRow(lengths="65 to 256 tokens", prompts=10, speedup=spread(1.6), first_token_share=0.05)
    text = sentences(row(speedup=spread(1.4), lengths=(short, worse, long)))
    assert "loses on answers of 1 to 16 tokens (0.97x; on all 1.40x): 62% of their time passes before the first" in text
    assert "does worse on answers of 17 to 64 tokens" in text and "65 to 256" not in text
    noisy = worse.model_copy(update={"speedup": spread(1.0, 1.1, 1.5)})
    assert "17 to 64" not in sentences(row(speedup=spread(1.3, 1.4, 1.5), lengths=(noisy, long)))


def test_answers_that_differ_are_counted() -> None:
    differs = row(equal=0.9)
    assert "90% of 20 answers equal plain decoding's; in float32 all should" in sentences(differs)
    assert "90% of 20 answers equal plain decoding's; in half precision" in sentences(differs, half=True)
    assert "equal" not in sentences(row(equal=1.0)) + sentences(row(equal=math.nan))


def test_batches_that_are_never_full_and_single_repeats_are_admitted() -> None:
    text = sentences(row(16, method="plain", slots=5.0), repeats=1)
    assert "At batch 16 only 5.0 slots were in use on average: 20 prompts are too few" in text
    assert "One repeat" in text
    assert sentences(row(16, method="plain", slots=9.0)) == ""


FIGURES = st.one_of(st.just(math.nan), st.floats(0.01, 20))
SPREADS = st.one_of(
    st.just(Spread(value=math.nan, low=math.nan, high=math.nan)),
    st.lists(st.floats(0.05, 5), min_size=3, max_size=3).map(lambda x: spread(*sorted(x))),
)


@given(st.dictionaries(st.integers(1, 64), st.tuples(SPREADS, FIGURES, FIGURES, FIGURES), min_size=1))
def test_every_batch_size_gets_one_outcome_and_nothing_unknown_is_shown(
    measured: dict[int, tuple[Spread, float, float, float]],
) -> None:
    rows = [
        row(size, speedup, tau=tau, break_even=needed, alpha=min(alpha, 1.0))
        for size, (speedup, tau, needed, alpha) in sorted(measured.items())
    ]
    text = sentences(*rows, *(row.model_copy(update={"domain": "math"}) for row in rows))
    assert "nan" not in text
    clauses = dict.fromkeys(measured, 0)
    line = next(line for line in text.splitlines() if line.startswith("small K=4: "))
    for kind, sizes in re.findall(r"(loses|no clear difference|gains|not measured) at batch (.*?)(?=\); |\)\.$)", line):
        for size in re.findall(r"(?:^|\), )(\d+) \(", sizes):
            clauses[int(size)] += 1
            assert outcome(measured[int(size)][0].estimate) == kind
    assert set(clauses.values()) == {1}


@pytest.mark.parametrize("width", [480, svg.PHONE])
def test_the_page_has_a_panel_a_domain_and_a_line_a_method(width: int) -> None:
    rows = [
        row(size, spread(low, low + 0.1, low + 0.2), domain, method)
        for method, low in (("plain", 0.9), ("small", 1.2), ("a<b>", 0.5))
        for size in (1, 16)
        for domain in (EVERY, "code", "math", "rag")
    ]
    panels = bench_panels(rows, width)
    assert [title for title, _ in panels] == ["all domains", "code", "math", "rag"]
    for _, chart in panels:
        root = ET.fromstring(chart.svg)
        dots = [one for one in root.iter("{http://www.w3.org/2000/svg}circle") if one.attrib["class"] == "dot"]
        assert len(dots) == 4  # two methods at two batch sizes; plain has no line
        heights = [float(dot.attrib["cy"]) for dot in dots]
        assert max(heights[:2]) < min(heights[2:])  # 1.3x stands above 0.6x
        assert root.attrib["viewBox"].split()[2] == str(width)
        assert [words for _, words in chart.legend] == ["small K=4", "a<b> K=4"]
    # Unknown figures, and plain decoding alone, draw no mark.
    for rest in ([row(1, spread(math.nan)), row(1, method="plain")], [row(1, method="plain")]):
        ((_, chart),) = bench_panels(rest, width)
        assert "nan" not in chart.svg.lower() and "dot" not in chart.svg


def test_cells() -> None:
    rows = [row(4, method="plain"), row(4, spread(0.8, 0.85, 0.9)), row(4, spread(2.0), "math", equal=math.nan)]
    failure = Failure(method="eagle3", plan="-", batch_size=None, reason="vocab_size 5: must be 9, the target's")
    header, plain, loses, _, failed = speed_cells(rows, [failure])
    assert dict(zip(header, plain))["speed-up"] == "-"
    cells = dict(zip(header, loses))
    assert (cells["batch"], cells["K"], cells["speed-up"], cells[""]) == ("4", "4", "0.85x [0.80, 0.90]", "loses")
    assert (failed[1], failed[-1]) == ("eagle3", "not run: vocab_size 5: must be 9, the target's")
    header, *shown = waiting_cells(rows)
    assert [dict(zip(header, line))["equal"] for line in shown] == ["-", "100%", "n/a"]
    assert dict(zip(header, shown[1]))["first token ms"] == "100.0 / 200.0"
