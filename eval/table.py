"""Result tables as text: colours and boxes on a terminal, else plain columns."""

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple

from rich.table import Table
from rich.text import Text

from ..progress import Console
from ..specdec.drafts.layer_skip import SkippedLayers
from ..storage import size_text
from .acceptance import Estimate
from .counts import bucket_label
from .leaderboard import DomainRow, Row
from .serving_load import LoadFigures

_SCORES = ("step", "K", "tau", "draft ms", "verify ms", "expected speed-up", "perplexity", "conversations")
_LOADS = ("goodput", "plain", "loses above", "share", "break-even alpha")
_SKIPS = ("kept", "sets tried")
_SPEEDS = ("batch", "tokens/s", "decoding tokens/s", "speed-up", "decoding speed-up")
_WAITS = (
    "first token ms",
    "inter-token ms",
    "rounds",
    "round ms",
    "break-even tau",
    "draft memory",
    "cache memory",
    "caches memory",
    "peak memory",
)
NUMERIC = frozenset([*_SCORES, *_SKIPS, *_LOADS, *_SPEEDS, *_WAITS, "equal"])
UNKNOWN = "n/a"


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A figure as text, such as "1.06x"; "n/a" where it is not known, "never" where it is infinite."""
    if value is None or math.isnan(value):
        return UNKNOWN
    return "never" if math.isinf(value) else f"{value:,.{digits}f}{unit}"


def interval(
    estimate: Estimate | Mapping[str, Any] | None, unit: str = "", digits: int = 2, sign: Literal["", "+"] = ""
) -> str:
    """An estimate, or its record, as text: "2.06 [1.95, 2.17]"; "2.06 (too few ...)" where a reason says why it has no
    interval, "2.06" where none does; unknown: "n/a"."""
    known = estimate.record() if isinstance(estimate, Estimate) else estimate or {}
    value, low, high = (known.get(name) for name in ("value", "low", "high"))
    if value is None or math.isnan(value):
        return UNKNOWN
    if low is None or high is None or math.isnan(low) or math.isnan(high):
        reason = known.get("reason")
        return f"{value:{sign},.{digits}f}{unit}" + (f" ({reason})" if reason else "")
    return f"{value:{sign},.{digits}f}{unit} [{low:{sign},.{digits}f}, {high:{sign},.{digits}f}]"


def milliseconds(seconds: float | None) -> str:
    """Seconds as text in milliseconds."""
    return number(None if seconds is None else seconds * 1e3, 1)


def show_leaderboard(
    rows: Sequence[Row], confidence: float, title: str, times: str, console: Console | None = None
) -> None:
    """Print checkpoints and baselines, the chosen one marked. `times`: where they hold, in words."""
    styles = ["bold green" if row.chosen else "dim" if row.baseline or row.dropped else "" for row in rows]
    note = f"tau: tokens per round, pooled; intervals: {confidence:.0%}, by conversation cluster; {times}"
    show_cells(title, leaderboard_cells(rows), styles, note, console)


def show_domains(rows: Sequence[DomainRow], confidence: float, title: str, console: Console | None = None) -> None:
    """Print drafts per domain and sampling setting."""
    styles = ["dim" if row.baseline else "" for row in rows]
    show_cells(title, domain_cells(rows), styles, f"intervals: {confidence:.0%}, by conversation cluster", console)


def show_contexts(rows: Sequence[Mapping[str, Any]], title: str, console: Console | None = None) -> None:
    """Print drafts by prompt length, from records of `contexts`; nothing where all prompts are of one length."""
    if len({row["context_bucket"] for row in rows}) > 1:
        styles = ["dim" if row["baseline"] else "" for row in rows]
        show_cells(title, context_cells(rows), styles, "all domains and sampling settings together", console)


def show_load(row: Row, title: str, console: Console | None = None) -> None:
    """Print what one draft is worth at each batch size, at the best K or tree there."""
    if row.load is None:
        return
    styles = ["" if one.share else "dim" for one in row.load.batches]
    note = f"goodput: tokens/s; share: of the load's time; times of {row.load.hardware}"
    show_cells(title, batch_cells(row.load), styles, note, console)


class SkipRow(NamedTuple):
    """Best set of sublayers to skip in one domain."""

    domain: str
    skipped: SkippedLayers
    layers: int
    """Number of the target's layers."""
    K: int
    tau: float
    speedup: float
    tries: int

    def record(self) -> dict[str, Any]:
        """JSON-able mapping of the row, without the set itself."""
        return {name: value for name, value in self._asdict().items() if name != "skipped"} | {"kept": self.kept}

    @property
    def kept(self) -> float:
        """Share of the sublayers that the draft runs."""
        return self.skipped.kept_share(self.layers)


def show_skips(rows: Sequence[SkipRow], console: Console | None = None) -> None:
    """Print which sublayers are skipped in which domain."""
    note = "tau and speed-up on the answers that chose the set; `draftforge score --draft FILE` scores the whole split"
    show_cells("Layers to skip, by expected speed-up", skip_cells(rows), [""] * len(rows), note, console)


def skip_cells(rows: Sequence[SkipRow]) -> list[list[str]]:
    """Cells of the layer-skip table, header first."""
    cells = [["domain", "attention skipped", "MLP skipped", "kept", "K", "tau", "expected speed-up", "sets tried"]]
    for row in rows:
        sets = (ranges(row.skipped.attention), ranges(row.skipped.mlp))
        figures = (f"{row.kept:.0%}", str(row.K), number(row.tau), f"{row.speedup:.2f}x", str(row.tries))
        cells.append([row.domain, *sets, *figures])
    return cells


def ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers, neighbours as ranges, such as "3-5 8"; none: "-"."""
    # A value minus its place is constant within a run of neighbours.
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return " ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "-"


def leaderboard_cells(rows: Sequence[Row]) -> list[list[str]]:
    """Cells of the leaderboard, header first. Perplexity has a column only where one is known."""
    # One line of text a row, in the order of the header.
    header = ["draft", "step", "K", "tau", "alpha", "draft ms", "verify ms", "expected speed-up", "perplexity", ""]
    cells = [header]
    for row in rows:
        cells.append(
            [
                row.draft,
                str(row.step) if row.step or row.start else "-",
                row.config.label if row.config.levels else "-",
                interval(row.tau),
                positions(row.alphas),
                milliseconds(row.draft_seconds) if row.config.levels else "-",
                milliseconds(row.verify_seconds),
                interval(row.speedup, "x"),
                number(row.perplexity),
                _remark(row),
            ]
        )
    # Columns that would be empty are left out; the load's stand before the remark.
    if all(math.isnan(row.perplexity) for row in rows):
        cells = [line[:-2] + line[-1:] for line in cells]
    if any(row.load is not None for row in rows):
        cells = [[*line[:-1], *_load_cells(row), line[-1]] for line, row in zip(cells, [None, *rows])]
    return cells


def _load_cells(row: Row | None) -> list[str]:
    """Load columns of a leaderboard row; None: their header."""
    if row is None:
        return ["goodput", "break-even tau", "loses above", "draft memory", "cache memory"]
    if row.load is None:  # plain decoding
        return ["-"] * 5
    above = UNKNOWN if row.load.break_even is None else row.load.break_even.label
    return [interval(row.load.goodput, digits=0), number(row.break_even_tau), above, *map(size_text, row.load.memory)]


def batch_cells(load: LoadFigures) -> list[list[str]]:
    """Cells of the table by batch size, header first."""
    # One line a batch size, at its best K or tree.
    header = ["batch", "share", "K", "tau", "expected speed-up", "goodput", "plain", "break-even tau"]
    cells = [[*header, "break-even alpha"]]
    for one in load.batches:
        share = f"{one.share:.0%}" if one.share else "-"
        gains = (
            interval(one.tau),
            interval(one.speedup, "x"),
            interval(one.goodput, digits=0),
            number(one.plain_goodput, 0),
        )
        even = (number(one.break_even_tau), number(one.break_even_alpha))
        cells.append([str(one.batch_size), share, one.config.label, *gains, *even])
    return cells


def domain_cells(rows: Sequence[DomainRow]) -> list[list[str]]:
    """Cells of the table by domain and sampling setting, header first."""
    # Columns that depend on the rows: figures at a load, and tau by rule where several were scored.
    loaded = any(row.break_even is not None for row in rows)
    header = ["domain", "sampling", "rule", "draft", "step", "K", "tau", "alpha", "conversations", "expected speed-up"]
    ruled = any(len(row.taus) > 1 for row in rows)
    cells = [[*header, *(["goodput", "loses above"] if loaded else []), *(["tau by rule"] if ruled else [])]]
    for row in rows:
        # Cells of the optional columns, then the whole line.
        load = (
            [interval(row.goodput, digits=0), UNKNOWN if row.break_even is None else row.break_even.label]
            if loaded
            else []
        )
        cells.append(
            [
                row.domain,
                row.setting,
                row.rule,
                row.draft,
                str(row.step) if row.step else "-",
                row.config.label,
                interval(row.tau),
                positions(row.alphas),
                str(row.conversations),
                interval(row.speedup, "x"),
                *load,
                *([", ".join(f"{rule} {number(tau.value)}" for rule, tau in row.taus)] if ruled else []),
            ]
        )
    return cells


def context_cells(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Cells of the table by prompt length, header first."""
    cells = [["prompt tokens", "draft", "step", "tau", "accepted", "conversations"]]
    for row in rows:
        step, figures = str(row["step"]) if row["step"] else "-", (interval(row["tau"]), interval(row["acceptance"]))
        cells.append([bucket_label(row["context_bucket"]), row["draft"], step, *figures, str(row["conversations"])])
    return cells


def plain_text(cells: Sequence[Sequence[str]], numeric: Collection[str] = NUMERIC) -> str:
    """Aligned columns without colours, for files and pipes. `numeric`: names of columns that are aligned right."""
    # Each column is as wide as its widest cell.
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    lines = []
    for line in cells:
        padded = [
            cell.rjust(width) if name in numeric else cell.ljust(width)
            for cell, width, name in zip(line, widths, cells[0])
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def positions(alphas: Sequence[Estimate]) -> str:
    """Conditional acceptance of positions 1, 2, ..., such as "0.71 0.62 0.55"."""
    if not alphas:
        return "-"
    return " ".join(UNKNOWN if math.isnan(alpha.value) else f"{alpha.value:.2f}" for alpha in alphas)


def _remark(row: Row) -> str:
    """Remark on a draft: what became of it, and the target it was made for where that is another one."""
    dropped = f"dropped at {row.scored_share:.0%}" if row.dropped else ""
    what = dropped or ("<- chosen" if row.chosen else "baseline" if row.baseline else "")
    start = f"the start, {row.start}" if row.start else ""
    other = f"made for target {row.trained_for}" if row.trained_for else ""
    return ", ".join(filter(None, (what, start, other)))


def show_cells(
    title: str,
    cells: Sequence[Sequence[str]],
    styles: Sequence[str],
    note: str,
    console: Console | None = None,
    numeric: Collection[str] = NUMERIC,
) -> None:
    """Print a header and rows: a table on a terminal, else plain columns."""
    # Files and pipes get plain columns, which other programs can read.
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console.print(f"{title}\n{plain_text(cells, numeric)}\n{note}", soft_wrap=True, markup=False, highlight=False)
        return
    # A terminal gets a table. Cells are `Text`, so that brackets in names are not taken for markup.
    table = Table(title=title, caption=note, title_justify="left", caption_justify="left")
    for name in cells[0]:
        table.add_column(name, justify="right" if name in numeric else "left", no_wrap=name != "alpha")
    for line, style in zip(cells[1:], styles):
        table.add_row(*(Text(cell) for cell in line), style=style)
    console.print(table)
