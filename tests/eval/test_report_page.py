"""A report's page as text: what it says, that nothing in it is run or fetched, and the drawing's arithmetic."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reported import SETTINGS, sample_holdout, sample_records, sample_rows, sample_scores

from draftforge.eval.acceptance import tau
from draftforge.eval.counts import bucket_label
from draftforge.eval.draft_configs import DraftConfig
from draftforge.eval.report import svg
from draftforge.eval.report.charts import ConfigPoint, Palette, by_batch_size, config_points, joint_acceptance, pareto
from draftforge.eval.report.page import heat_map, holdout_record, report_page
from draftforge.eval.summary import decision_summary
from draftforge.eval.table import interval, number

ATTACK = '"><script>alert(1)</script><img src=x onerror=alert(2)>&{{7*7}}'


class Tags(HTMLParser):
    """Every tag with its attributes, and the text of the page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def read(page: str) -> Tags:
    tags = Tags()
    tags.feed(page)
    tags.close()
    return tags


def test_names_out_of_logs_stay_text() -> None:
    domains = {"support": 0.1, ATTACK: 0.0}
    records = replace(sample_records(domains), name=ATTACK, target=ATTACK)
    found = read(report_page(records))
    assert not {"script", "img", "iframe", "object", "form"} & {tag for tag, _ in found.tags}
    assert not [name for _, attributes in found.tags for name in attributes if name.startswith("on")]
    assert ATTACK in found.text and "49" not in re.findall(r"&(\d+)", found.text)
    assert any("&lt;script&gt;" in line for line in report_page(records).splitlines())


def test_nothing_is_fetched() -> None:
    found = read(report_page(sample_records()))
    asked = [value for _, attributes in found.tags for name, value in attributes.items() if name in ("src", "href")]
    assert {value for value in asked if value and not value.startswith("#")} == {"data:,"}
    assert "url(" not in found.text and "@import" not in found.text
    (policy,) = (
        a["content"] for t, a in found.tags if t == "meta" and a.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None and policy.startswith("default-src 'none'") and "script-src" not in policy


def test_every_chart_has_a_name_and_a_table_with_its_numbers() -> None:
    records = sample_records()
    found = read(report_page(records))
    charts = [attributes for tag, attributes in found.tags if tag == "svg"]
    ids = {attributes["id"] for _, attributes in found.tags if "id" in attributes}
    assert len(charts) == 12  # each at two widths
    for chart in charts:
        assert chart["role"] == "img" and set(str(chart["aria-labelledby"]).split()) <= ids
    assert len(ids) == len([1 for _, attributes in found.tags if "id" in attributes])
    assert records.promotion is not None
    holdout = records.promotion["holdout"]
    candidate = next(row for row in holdout["rows"] if row["draft"] == "candidate")
    for estimate in [candidate["tau"], *candidate["alphas"]]:
        assert interval(estimate) in found.text
    for row in [*holdout["domains"], *holdout["contexts"], *records.scores["plans"]]:
        assert interval(row["tau"]) in found.text
    for row in records.scores["rows"]:
        assert interval(row["speedup"], "x") in found.text


@pytest.mark.parametrize("promote", [True, False])
def test_the_head_says_what_was_decided_and_why(promote: bool) -> None:
    records = sample_records(promote=promote)
    assert records.promotion is not None
    decision = decision_summary(records.scores, records.promotion)
    assert decision.kind == ("promoted" if promote else "refused") and decision.split == "holdout"
    assert [row["draft"] for row in decision.compared] == ["candidate", "champion", "lookup"]
    assert decision.reasons == records.promotion["decision"]["reasons"]
    assert (
        interval(decision.compared[0]["tau"]) in decision.paragraph
        and interval(decision.compared[1]["tau"]) in decision.paragraph
    )
    page = report_page(records)
    assert all(reason in read(page).text for reason in decision.reasons)


@pytest.mark.parametrize(
    ("promote", "kind", "badge"), [(True, "by-choice", "Promoted by choice"), (False, "unproven", "Not promoted")]
)
def test_the_head_of_a_draft_that_is_not_worth_serving_is_amber(promote: bool, kind: str, badge: str) -> None:
    records = sample_records(promote=promote, worth_serving=False)
    decision = decision_summary(records.scores, records.promotion)
    assert decision.kind == kind and decision.title.endswith("not shown to be worth serving")
    page = report_page(records)
    assert f'class="decision {kind}"' in page and f'<p class="badge">{badge}</p>' in page
    amber = next(line for line in page.splitlines() if line.startswith(".decision.unproven"))
    assert f".decision.{kind}" in amber and "var(--warn-paper)" in amber


def test_too_few_clusters_are_said_wherever_an_interval_would_be() -> None:
    records, few = sample_records(), "too few clusters to tell: 1 more needed"
    assert records.promotion is not None
    holdout = records.promotion["holdout"]
    for row in [*holdout["rows"], *holdout["domains"], *holdout["contexts"]]:
        for name in ("tau", "speedup", "acceptance"):
            if name in row:
                row[name] |= {"low": None, "high": None, "clusters": 2, "reason": few}
    page = report_page(records)
    heat = page.split('<table class="heat">')[1].split("</table>")[0]
    assert few in heat and "n/a" not in heat
    tiles = page.split('<dl class="tiles">')[1].split("</dl>")[0]
    assert tiles.count(few) == 3
    assert f"({few})" in page.split('id="contexts"')[1]


def test_a_retraining_that_brings_nothing_better_says_so() -> None:
    records = sample_records(promote=False)
    assert records.promotion is not None
    reason = "no heir is better than its start, demo-0123456789ab/3, which stays champion"
    decided = {"promote": False, "reasons": [reason], "worth_serving": None}
    found = decision_summary(records.scores, {**records.promotion, "decision": decided, "holdout": {"rows": []}})
    assert found.kind == "refused" and found.title == "demo-0123456789ab/3 stays the champion: no heir is better"
    assert found.reasons == [reason] and found.split == "selection" and "No gate" not in found.paragraph


def test_without_a_gate_the_selection_split_speaks() -> None:
    records = replace(sample_records(), promotion=None, mix=None, lineage=())
    decision = decision_summary(records.scores, None)
    assert (
        decision.kind == "scored"
        and decision.split == "selection"
        and decision.row is not None
        and decision.row["chosen"]
    )
    page = report_page(records)
    assert 'id="mix"' not in page and 'href="#mix"' not in page and 'id="lineage"' not in page


def test_unknown_numbers_are_said_and_not_drawn() -> None:
    scores = sample_scores()
    unknown = {"value": None, "low": None, "high": None, "clusters": 1, "reason": "no rounds"}
    for row in [*scores["rows"], *scores["plans"], *scores["domains"], *scores["contexts"]]:
        row.update({name: unknown for name in ("tau", "speedup", "acceptance") if name in row}, chosen=False)
        row["alphas"] = [unknown for _ in row.get("alphas", [])]
        row["break_even_tau"] = None
    decision = decision_summary(scores, None)
    assert decision.kind == "nothing"
    page = report_page(replace(sample_records(), scores=scores, promotion=None))
    assert "<svg" not in page and "n/a" in page and "No numbers to draw" in page


@pytest.mark.parametrize(
    ("even", "expected"), [(1.01, "It pays"), (9.0, "It does not pay"), (2.0, "whether it pays is not settled")]
)
def test_the_head_compares_with_break_even(even: float, expected: str) -> None:
    scores = sample_scores()
    chosen = next(row for row in scores["rows"] if row["chosen"])
    value = {name: chosen["tau"][name] / even for name in ("value", "low", "high")}
    chosen["break_even_tau"], chosen["speedup"] = even, {**chosen["speedup"], **value}
    assert expected in decision_summary(scores, None).paragraph


def test_a_round_costs_what_its_speedup_says() -> None:
    _, costs, rows = sample_rows()
    plans = sample_scores()["plans"]
    for place in config_points(plans):
        table = costs[place.row["draft"], place.row["step"]]
        if not place.row["baseline"]:
            expected = table.cost(DraftConfig(place.row["draft_tokens"])).seconds / table.plain_seconds - 1
            assert place.cost == pytest.approx(expected)
    assert rows


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(1, 5)), min_size=1, max_size=12))
def test_the_frontier_is_what_nothing_else_beats(points: list[tuple[float, float]]) -> None:
    found = [ConfigPoint({}, cost, value) for cost, value in points]
    best = pareto(found)
    for one in found:
        better = [o for o in found if o.tau >= one.tau and o.cost <= one.cost and o[1:] != one[1:]]
        assert (one[1:] in {b[1:] for b in best}) == (not better)


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_and_inside(low: float, spread: float) -> None:
    high = low + spread
    if high - low < 1e-9 * max(1.0, abs(low)):
        return
    ticks = svg.round_ticks(low, high)
    assert 1 <= len(ticks) <= 8
    slack = 1e-6 * max(abs(low), abs(high), spread)
    assert all(low - slack <= tick <= high + slack for tick in ticks)


@pytest.mark.parametrize("values", [[], [0.0], [1.0], [1.0, 1.0], [float("nan")], [-3.0], [0.0, 1e-9], [1e9]])
def test_an_axis_is_never_without_width(values: list[float]) -> None:
    for at_least in ([], [0.0], [1.0]):
        axis = svg.numeric_axis(values, "x", at_least=at_least)
        assert axis.low < axis.high and axis.ticks
        assert all(axis.low <= value <= axis.high for value in [*values, *at_least] if value == value)


def test_a_draft_of_one_step_and_no_gain_is_drawn() -> None:
    """A folder of anybody's making has step 0; a draft that accepts nothing has tau 1 everywhere."""
    scores = sample_scores()
    one = {"value": 1.0, "low": 1.0, "high": 1.0, "clusters": 2, "reason": ""}
    for row in [*scores["rows"], *scores["plans"], *scores["domains"], *scores["contexts"]]:
        row.update({name: one for name in ("tau", "speedup", "acceptance") if name in row}, step=0, break_even_tau=1.0)
    page = report_page(replace(sample_records(), scores=scores, promotion=None))
    assert page.count("<svg") == 12 and "nan" not in page.lower().replace("finance", "")


def test_heat_runs_from_the_least_to_the_most() -> None:
    scores = sample_scores()
    chosen = next(row for row in scores["rows"] if row["chosen"])
    heat = heat_map(scores["domains"], chosen)
    assert heat is not None and heat["settings"] == ["t0", "t0.8"]
    shares = {cell["tau"]["value"]: cell["share"] for _, cells in heat["lines"] for cell in cells}
    assert shares[min(shares)] == 0 and shares[max(shares)] == 1


def test_context_rows_are_the_counts_own() -> None:
    table, _, rows = sample_rows()
    chosen = next(row for row in rows if row.chosen)
    record = holdout_record([table], [chosen], SETTINGS, [])
    assert [row["context_bucket"] for row in record["contexts"]] == ["00128", "01024", "08192"]
    assert sum(row["conversations"] for row in record["contexts"]) == 56
    assert sum(row["rounds"] for row in record["contexts"]) == 56 * 2 * 40
    pooled = sum(row["tau"]["value"] * row["rounds"] for row in record["contexts"]) / (56 * 2 * 40)
    assert pooled == pytest.approx(chosen.tau.value)


def test_words() -> None:
    assert joint_acceptance([{"value": 0.5}, {"value": 0.5}, {"value": None}, {"value": 1.0}]) == [
        0.5,
        0.25,
        None,
        None,
    ]
    assert bucket_label("00128") == "up to 128" and bucket_label("32768+") == "over 32,768"
    assert number(None) == number(float("nan")) == "n/a" and number(1234.5, 0) == "1,234"
    assert interval({"value": 1.0, "low": None, "high": None}, "x") == "1.00x"


def test_batch_sizes_are_drawn_where_rows_have_a_load() -> None:
    records = sample_records()
    rows = records.scores["rows"]
    assert by_batch_size(rows, Palette(rows), svg.WIDTH) is None and "speedup-by-batch" not in report_page(records)
    estimate = {"value": 1.5, "low": 1.4, "high": 1.6, "clusters": 9, "reason": ""}
    rest = {"draft_tokens": 4, "tree": "", "tau": estimate, "goodput": estimate, "plain_goodput": 812.0}
    batches = [
        {"batch_size": 1, "share": 0.25, "speedup": estimate, "break_even_tau": 1.2, **rest},
        {"batch_size": 8, "share": 0.75, "speedup": {**estimate, "value": 0.87}, "break_even_tau": None, **rest},
    ]
    chosen = next(row for row in rows if row["chosen"])
    for row in rows:
        if row["draft"] == chosen["draft"]:  # only one checkpoint of a draft is drawn, the chosen one
            row["load"] = {"load": "batch 1 and 8", "batches": batches if row["chosen"] else [batches[0]] * 9}
    records = replace(records, scores={**records.scores, "advice": [f"serve K = 4 {ATTACK}"]})
    chart = by_batch_size(rows, Palette(rows), svg.WIDTH)
    assert chart is not None and chart.svg.count("<circle") == 2
    found = read(report_page(records))
    assert "0.87x" in found.text and "812" in found.text and "75 %" in found.text and "batch 1 and 8" in found.text
    assert f"serve K = 4 {ATTACK}" in found.text


def test_the_sample_is_what_it_says() -> None:
    table, _, rows = sample_rows()
    chosen = next(row for row in rows if row.chosen)
    assert chosen.draft == "eagle3" and tau(table, SETTINGS.confidence).clusters == 28
    assert {row["draft"] for row in sample_holdout(champion=False)["rows"]} == {"lookup", "candidate"}
