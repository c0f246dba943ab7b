"""The final tables, on a terminal and without one."""

import io
import math
from dataclasses import replace

from draftforge.eval.acceptance import Estimate
from draftforge.eval.draft_configs import DraftConfig
from draftforge.eval.leaderboard import DomainRow, Row
from draftforge.eval.serving_load import BatchFigures, BreakEvenPoint, LoadFigures, Memory
from draftforge.eval.speedup import Gain
from draftforge.eval.summary import outcome
from draftforge.eval.table import (
    domain_cells,
    leaderboard_cells,
    plain_text,
    show_contexts,
    show_domains,
    show_leaderboard,
    show_load,
)
from draftforge.progress import Console

NAN = math.nan
SMALL = Row(
    draft="small",
    step=60,
    config=DraftConfig(3),
    drafted=2.9,
    tau=Estimate(2.06, 1.95, 2.17, 20),
    acceptance=Estimate(0.5),
    alphas=(Estimate(0.71), Estimate(0.62), Estimate(NAN, reason="no rounds that reach position 3")),
    draft_seconds=0.0121,
    verify_seconds=0.0414,
    speedup=Estimate(1.31, 1.2, 1.4, 20),
    gain=Gain(0.0, 1.5),
    chosen=True,
)
LOOKUP = replace(SMALL, draft="lookup", step=0, tau=Estimate(1.2), speedup=Estimate(NAN), baseline=True, chosen=False)
ONE = Estimate(1, 1, 1)
PLAIN = Row("plain", 0, DraftConfig(0), 0.0, ONE, Estimate(NAN), (), 0.0, 0.035, ONE, Gain(0.0, 1.0), baseline=True)
FIGURES = (SMALL.tau, SMALL.acceptance, SMALL.alphas)
SUPPORT = DomainRow("small", 60, DraftConfig(3), "support [new]", "t0", "greedy", 12, *FIGURES)


def shown(rows: list[Row], terminal: bool) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=60 if not terminal else 160, color_system=None)
    show_leaderboard(rows, 0.95, "Drafts", "times at batch 1", console)
    return stream.getvalue()


def test_plain_text_is_aligned_and_never_wrapped() -> None:
    lines = shown([PLAIN, LOOKUP, SMALL], terminal=False).splitlines()
    assert lines[1].split("  ")[0] == "draft" and len(lines) == 6
    assert "2.06 [1.95, 2.17]  0.71 0.62 n/a" in lines[4] and lines[4].endswith("1.31x [1.20, 1.40]  <- chosen")
    assert "12.1" in lines[4] and "41.4" in lines[4]
    assert lines[3].split()[:4] == ["lookup", "-", "3", "1.20"] and "n/a" in lines[3] and lines[3].endswith("baseline")
    assert lines[2].split()[:3] == ["plain", "-", "-"] and "35.0" in lines[2]
    assert len({line.index("[") for line in lines[2:5:2]}) == 1
    assert "95%" in lines[5]


def test_a_tree_is_shown_by_its_name() -> None:
    cells = leaderboard_cells([replace(SMALL, config=DraftConfig(4, "wide"))])
    assert cells[1][cells[0].index("K")] == "wide"


def test_perplexity_has_a_column_only_when_known() -> None:
    assert "perplexity" not in leaderboard_cells([SMALL])[0]
    cells = leaderboard_cells([SMALL, replace(SMALL, step=80, perplexity=3.14159)])
    column = cells[0].index("perplexity")
    assert [line[column] for line in cells[1:]] == ["n/a", "3.14"]
    assert len({len(line) for line in cells}) == 1 and "3.14" in plain_text(cells)


def test_a_terminal_gets_a_box() -> None:
    text = shown([PLAIN, SMALL], terminal=True)
    assert "━" in text and "2.06 [1.95, 2.17]" in text and "<- chosen" in text


def test_domains_print_brackets_as_they_are() -> None:
    for terminal in (True, False):
        stream = io.StringIO()
        console = Console(file=stream, force_terminal=terminal, width=160, color_system=None)
        show_domains([SUPPORT], 0.95, "By domain", console)
        assert "support [new]" in stream.getvalue() and "12" in stream.getvalue()


def test_prompt_lengths_have_a_line_each_where_they_differ() -> None:
    short = {"context_bucket": "01024", "draft": "small", "step": 40, "baseline": False, "conversations": 9}
    short |= {"tau": SMALL.tau.record(), "acceptance": Estimate(0.5).record()}
    long, stream = short | {"context_bucket": "08192", "tau": Estimate(1.5).record()}, io.StringIO()
    console = Console(file=stream, width=160)
    show_contexts([short, short], "By context length", console)
    assert not stream.getvalue()
    show_contexts([short, long], "By context length", console)
    lines = [" ".join(line.split()) for line in stream.getvalue().splitlines()]
    assert lines[2:4] == ["up to 1,024 small 40 2.06 [1.95, 2.17] 0.50 9", "up to 8,192 small 40 1.50 0.50 9"]


AT_8 = BatchFigures(
    8, 0.25, DraftConfig(2), SMALL.tau, Estimate(0.9, 0.8, 1.0), Estimate(812, 790, 833), 900.0, 2.3, NAN
)
LOAD = LoadFigures(
    load="vllm, batch 1 (75%), 8 (25%), context 512, answers of 128",
    hardware="card, bfloat16",
    fit_error=0.03,
    goodput=Estimate(412, 400, 420),
    plain_goodput=300.0,
    engine_tau=SMALL.tau,
    break_even_alpha=0.3,
    break_even=BreakEvenPoint(5, 8),
    memory=Memory(12_000_000, 3.4e6),
    batches=(AT_8, replace(AT_8, batch_size=16, share=0.0, break_even_tau=math.inf)),
)


def test_a_figure_of_too_few_clusters_says_how_many_more_it_takes() -> None:
    few = Estimate(2.06, clusters=2, reason="too few clusters to tell: 1 more needed")
    row = dict(zip(*leaderboard_cells([replace(SMALL, tau=few, speedup=few.scaled(0.5))])))
    assert row["tau"] == "2.06 (too few clusters to tell: 1 more needed)"
    assert row["expected speed-up"] == "1.03x (too few clusters to tell: 1 more needed)"
    domain = dict(zip(*domain_cells([replace(SUPPORT, tau=few)])))
    assert domain["tau"] == "2.06 (too few clusters to tell: 1 more needed)"
    assert outcome(few) == "no clear difference" and outcome(Estimate(2.06)) == "gains"


def test_the_start_of_a_retraining_is_labelled() -> None:
    line = leaderboard_cells([replace(SMALL, step=0, start="m/3", chosen=False)])[1]
    assert line[1] == "0" and line[-1] == "the start, m/3"


def test_a_load_adds_its_columns() -> None:
    header, *cells = leaderboard_cells([PLAIN, replace(SMALL, load=LOAD), replace(SMALL, load=LOAD, scored_share=0.4)])
    rows = [dict(zip(header, line)) for line in cells]
    assert rows[1]["goodput"] == "412 [400, 420]" and rows[1]["break-even tau"] == "1.50"
    assert rows[1]["loses above"] == "5"
    assert rows[1]["draft memory"] == "12.0 MB" and rows[1]["cache memory"] == "3.40 MB"
    assert rows[0]["goodput"] == "-" and [row[""] for row in rows] == ["baseline", "<- chosen", "dropped at 40%"]
    domain = dict(zip(*domain_cells([replace(SUPPORT, speedup=Estimate(1.1), break_even=BreakEvenPoint(None, 8))])))
    assert domain["loses above"] == "> 8?" and domain["expected speed-up"] == "1.10x" and domain["goodput"] == "n/a"
    assert "goodput" not in domain_cells([SUPPORT])[0]


def test_a_draft_of_another_form_of_the_target_is_labelled() -> None:
    row = replace(SMALL, trained_for="0123456789ab")
    assert leaderboard_cells([row])[1][-1] == "<- chosen, made for target 0123456789ab"
    assert row.record()["trained_for"] == "0123456789ab"


def test_each_batch_size_has_a_line() -> None:
    stream = io.StringIO()
    show_load(replace(SMALL, load=LOAD), "By batch size", Console(file=stream, width=60))
    lines = stream.getvalue().splitlines()
    assert lines[2].split()[:3] == ["8", "25%", "2"] and "0.90x [0.80, 1.00]" in lines[2]
    assert lines[3].split()[:2] == ["16", "-"] and lines[3].split()[-2:] == ["never", "n/a"]
    assert "card, bfloat16" in lines[4]
    show_load(SMALL, "By batch size", Console(file=stream))
    assert stream.getvalue().splitlines() == lines
