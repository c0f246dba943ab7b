"""The pages in a real browser, headless: what is drawn, what is asked of the network, dark, narrow, and on paper.

Needs Chromium (`apt-get install chromium`; CHROMIUM names another one) and the package playwright, which drives it.
"""

import json
import os
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from benched import sample_report
from reported import DOMAINS, sample_records

from draftforge.eval.report.page import bench_page, report_page
from draftforge.eval.table import interval
from draftforge.pipeline.mix_report import inspect_mix
from draftforge.recipe import load_recipe

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright, which drives the browser, is not installed")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium, or name one in CHROMIUM"),
]
DOMAIN_NAMES = ("support", "code", "a-domain-with-a-name-that-is-as-long-as-names-get")
ATTACK = "</script><script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\">"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(report_page(sample_records({**DOMAINS, ATTACK: 0.02})))
    return path


@pytest.fixture(scope="module")
def mix_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a mix of long names, several days and lengths."""
    folder = tmp_path_factory.mktemp("mix")
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"topic{i} asks about thing{i * 7} and part{i * 3} " * (1 + i % 40)}
            ],
            "domain": DOMAIN_NAMES[i % len(DOMAIN_NAMES)],
            "started": 1_790_000_000 + 43_200 * i,
            "ended": 1_790_000_009 + 43_200 * i,
        }
        for i in range(60)
    ]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    mix = {"sources": [{"kind": "messages", "path": str(folder / "log.jsonl")}]}
    raw = {"name": "mixed", "target": {"model": "./none"}, "mix": mix, "workdir": str(folder / "work")}
    raw["drafts"] = {"small": {"family": "small", "layers": 2}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(raw))
    inspect_mix(load_recipe(folder / "recipe.yaml"), folder / "mix.html")
    return folder / "mix.html"


@pytest.fixture(scope="module")
def bench_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "bench.html"
    path.write_text(bench_page(sample_report(), datetime(2026, 11, 30, tzinfo=UTC)))
    return path


class Opened:
    """A page, what it asked for and what its console said."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.asked: list[str] = []
        self.said: list[str] = []
        self.page = browser.new_page(**options)
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.goto(path.as_uri(), wait_until="load")

    def of(self, script: str) -> Any:
        return self.page.evaluate(script)

    def close(self) -> None:
        self.page.close()


@pytest.fixture(params=[1200, 390], ids=["wide", "narrow"])
def opened(request: pytest.FixtureRequest, browser: Any, page_file: Path) -> Iterator[Opened]:
    found = Opened(browser, page_file, viewport={"width": request.param, "height": 900})
    yield found
    found.close()


def test_it_is_quiet_and_asks_for_nothing_but_itself(opened: Opened, page_file: Path) -> None:
    assert opened.said == []
    assert [url for url in opened.asked if not url.startswith("data:")] == [page_file.as_uri()]
    assert opened.page.title() == "demo: draft report"  # what a domain's name asks for does not run


def charts_of(opened: Opened) -> list[dict[str, Any]]:
    """Charts that are shown: their boxes, their marks, what sticks out of them, and texts that lie on each other."""
    found: list[dict[str, Any]] = opened.of("""() => [...document.querySelectorAll('svg.chart')]
        .filter(svg => svg.getBoundingClientRect().width > 0).map(svg => {
        const box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
        const marks = [...svg.querySelectorAll('circle, rect, polyline, text')].filter(m => m.getBBox().width > 0);
        const out = [...svg.querySelectorAll('circle, text')].filter(mark => {
            const one = mark.getBoundingClientRect();
            return one.left < box.left - 1 || one.right > box.right + 1 || one.top < box.top - 1
                || one.bottom > box.bottom + 1;
        });
        const texts = [...svg.querySelectorAll('text')].map(one => [one.textContent, one.getBoundingClientRect()]);
        const touching = texts.flatMap(([said, a], i) => texts.slice(i + 1)
            .filter(([_, b]) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
                && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3)
            .map(([other]) => said + ' | ' + other));
        return {id: svg.id, width: box.width, height: box.height, marks: marks.length, ratio: view.width / view.height,
                letters: 12.5 * box.width / view.width, out: out.map(mark => mark.outerHTML), touching,
                dots: svg.querySelectorAll('circle.dot').length};
    })""")
    return found


def test_charts_are_drawn_inside_their_boxes(opened: Opened) -> None:
    charts = charts_of(opened)
    assert {chart["id"].removesuffix("-phone") for chart in charts} == {
        "acceptance-by-position",
        "tau-by-domain",
        "tau-by-context",
        "cost-against-tau",
        "speedup-by-step",
        "tau-by-step",
    }
    assert len(charts) == 6  # of two widths one is shown
    for chart in charts:
        assert chart["width"] > 300 and chart["height"] > 150 and chart["marks"] > 10 and chart["dots"] >= 4, chart
        assert chart["width"] / chart["height"] == pytest.approx(chart["ratio"], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1200, 390])
@pytest.mark.parametrize("kind", ["page_file", "mix_file", "bench_file"])
def test_every_page_is_legible_wide_and_on_a_phone(
    kind: str, width: int, browser: Any, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Letters of 11 pixels and more, nothing cut, no text on another, nothing beyond the window, dark and light."""
    size = {"width": width, "height": 844}
    opened = Opened(browser, request.getfixturevalue(kind), viewport=size, color_scheme="dark")
    assert opened.said == []
    charts = charts_of(opened)
    assert charts
    for chart in charts:
        assert chart["letters"] >= 11 and chart["out"] == [] and chart["touching"] == [], chart
    papers = set()
    for scheme in ("light", "dark"):
        opened.page.emulate_media(color_scheme=scheme)
        opened.of("() => document.querySelectorAll('details').forEach(one => one.open = true)")
        assert opened.of("() => document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
        papers.add(opened.page.screenshot(path=tmp_path / f"{scheme}.png"))
    assert len(papers) == 2
    policy = opened.of("() => document.querySelector('meta[http-equiv=Content-Security-Policy]').content")
    assert "default-src 'none'" in policy and "script" not in policy
    opened.close()


def test_nothing_sticks_out_of_the_window(opened: Opened) -> None:
    for scheme in ("light", "dark"):
        opened.page.emulate_media(color_scheme=scheme)
        opened.of("() => document.querySelectorAll('details').forEach(one => one.open = true)")
        assert opened.of("() => document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0


def test_tables_hold_the_numbers(opened: Opened) -> None:
    records = sample_records({**DOMAINS, ATTACK: 0.02})
    assert records.promotion is not None
    opened.of("() => document.querySelectorAll('details').forEach(one => one.open = true)")
    domains = opened.page.locator("#domains details table")
    assert domains.locator("tbody tr").count() == len(records.promotion["holdout"]["domains"])
    for row in records.promotion["holdout"]["domains"]:
        line = domains.locator("tbody tr").filter(has=opened.page.get_by_text(row["domain"], exact=True))
        assert line.filter(has_text=interval(row["tau"])).count() >= 1
    chosen = opened.page.locator("#checkpoints tr.chosen")
    assert chosen.count() == 1 and "chosen" in chosen.inner_text()
    best = next(row for row in records.scores["rows"] if row["chosen"])
    assert interval(best["speedup"], "x") in chosen.inner_text()


def contrast(opened: Opened, selector: str) -> float:
    """Of a text's colour on the page's (WCAG 2.2): 1 to 21."""
    script = """selector => {
        const light = colour => {
            const parts = colour.match(/[\\d.]+/g).slice(0, 3).map(part => {
                const share = part / 255;
                return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
            });
            return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
        };
        const style = getComputedStyle(document.querySelector(selector));
        const ink = selector.includes('svg') ? style.fill : style.color;
        const pair = [light(ink), light(getComputedStyle(document.body).backgroundColor)].sort((a, b) => b - a);
        return (pair[0] + 0.05) / (pair[1] + 0.05);
    }"""
    return float(opened.page.evaluate(script, selector))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_can_be_read_in_both_schemes(browser: Any, page_file: Path, scheme: str) -> None:
    opened = Opened(browser, page_file, color_scheme=scheme)
    paper = opened.of("() => getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
    for selector in ("h1", "nav a", "figcaption", "caption", "svg .tick", "svg .label", ".badge", "tr.baseline td"):
        assert contrast(opened, selector) >= 4.5, selector
    for colour in ("s0", "s1", "s-base", "s-champion"):  # marks need less
        assert contrast(opened, f".wide svg .{colour} .dot") >= 3, colour
    opened.close()


def test_on_paper_every_table_is_there_on_white(browser: Any, page_file: Path, tmp_path: Path) -> None:
    opened = Opened(browser, page_file, color_scheme="dark")
    assert not opened.page.locator("#positions details table").is_visible()
    opened.page.emulate_media(media="print")
    assert opened.of("() => getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    for table in opened.page.locator("table").all():
        assert table.bounding_box()["height"] > 20
    assert not opened.page.locator("nav").is_visible()
    opened.page.pdf(path=tmp_path / "report.pdf", format="A4", print_background=True)
    data = (tmp_path / "report.pdf").read_bytes()
    assert data.startswith(b"%PDF-") and data.count(b"/Type /Page\n") >= 3
    opened.close()


def test_the_keyboard_reaches_what_can_be_opened(browser: Any, page_file: Path) -> None:
    opened = Opened(browser, page_file)
    opened.page.keyboard.press("Tab")
    assert opened.of("() => document.activeElement.className") == "skip"
    opened.page.locator("#positions summary").focus()
    opened.page.keyboard.press("Enter")
    assert opened.page.locator("#positions details table").is_visible()
    levels = [int(tag[1]) for tag in opened.of("() => [...document.querySelectorAll('h1,h2,h3')].map(h => h.tagName)")]
    assert levels[0] == 1 and levels.count(1) == 1 and all(b - a <= 1 for a, b in pairwise(levels))
    opened.close()
