"""A mix's profile as pictures (matplotlib): in one HTML page that needs nothing else, or as files in a folder."""

import io
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import storage
from ..data.conversation import SPLITS
from ..data.profile import JOINT, LOG, MIX, Profile, Shares
from ..data.strata import DAY
from ..errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_BARS = 14
_COLOURS = {LOG: "#59636e", MIX: "#3b78b8", SPLITS[2]: "#d9822b"}
_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#1f2328}
table{border-collapse:collapse;margin:.4rem 0}
td,th{padding:.15rem .7rem;border-bottom:1px solid #d0d7de;text-align:right}
td:first-child,th:first-child{text-align:left}caption{text-align:left;font-weight:600;padding:.8rem 0 .2rem}
p.note{color:#59636e;margin:.1rem 0 1.2rem;white-space:pre-line}figure{margin:1rem 0}svg{max-width:100%;height:auto}"""


Cells = list[list[str]]


class Table(NamedTuple):
    """A table as text: a header and rows."""

    title: str
    cells: Cells
    note: str


def check_place(out: Path) -> None:
    """Raise InputError unless `out` is a page to write or a folder to make."""
    if out.suffix == ".html":
        if out.is_dir():
            raise InputError(f"--out {out}: is a folder; must be a file to write")
    elif out.exists():
        raise InputError(f"--out {out}: exists; give a new folder, or a file that ends in .html")


def write_page(out: Path, name: str, tables: Sequence[Table], found: Profile) -> None:
    """One HTML file with pictures and tables."""
    title = f"The mix of {escape(name)}"
    parts = [f"<h1>{title}</h1>"]
    parts += [f"<figure>{_svg(figure)}</figure>" for _, figure in pictures(found)]
    parts += [_html(table) for table in tables]
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )
    storage.write_bytes(out, page.encode())


def write_pictures(out: Path, found: Profile) -> None:
    """A folder of pictures, each as PNG and SVG."""
    with storage.new_folder(out) as folder:
        for name, figure in pictures(found):
            figure.savefig(folder / f"{name}.png", dpi=150)
            (folder / f"{name}.svg").write_text(_svg(figure))


def pictures(found: Profile) -> Iterator[tuple[str, "Figure"]]:
    """Name and picture: shares of each label, days, lengths."""
    for one in found.shares:
        if one.key == DAY and len(one.labels) > 1:
            yield "days", _days(one)
        elif one.key not in (DAY, JOINT):
            yield one.key, _bars(one)
    yield "lengths", _lengths(found)


def _figure(width: float, height: float, panels: int = 1) -> tuple["Figure", list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = list(np.atleast_1d(figure.subplots(1, panels)))
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _bars(one: Shares) -> "Figure":
    """Shares of the most frequent labels of the log, side by side."""
    sizes = one.counts[LOG]
    shown = sorted(sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))[:_MOST_BARS])
    figure, (ax,) = _figure(7, 1.4 + 0.42 * len(shown))
    places, height = np.arange(len(shown)), 0.8 / len(_COLOURS)
    for turn, (side, colour) in enumerate(_COLOURS.items()):
        share = one.counts[side][shown] / max(1, one.counts[side].sum())
        ax.barh(places + (turn - 1) * height, share, height, color=colour, label=side)
    ax.set_yticks(places, [one.labels[i] for i in shown])
    ax.invert_yaxis()
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
    left = len(sizes) - len(shown)
    ax.set_title(f"By {one.key}" + (f" ({left} rarer ones not shown)" if left else ""), loc="left")
    ax.legend(frameon=False)
    return figure


def _days(one: Shares) -> "Figure":
    """Shares of each day."""
    figure, (ax,) = _figure(9, 3)
    for side, colour in _COLOURS.items():
        share = one.counts[side] / max(1, one.counts[side].sum())
        ax.plot(one.labels, share, color=colour, label=side, marker="." if len(one.labels) < 60 else None)
    ax.set_xticks(np.unique(np.linspace(0, len(one.labels) - 1, min(8, len(one.labels))).astype(int)))
    ax.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
    ax.set_title("By day", loc="left")
    ax.legend(frameon=False)
    return figure


def _lengths(found: Profile) -> "Figure":
    """How many records are at most so long."""
    known = {name: sides for name, sides in found.tokens.items() if len(sides[LOG])}
    figure, axes = _figure(4.5 * len(known), 3, len(known))
    for ax, (name, sides) in zip(axes, known.items()):
        for side, values in sides.items():
            if len(values):
                ax.ecdf(np.maximum(values, 1), color=_COLOURS[side], label=f"{side} ({len(values):,})")
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        ax.set_title(f"Tokens of the {name}, at most", loc="left")
        ax.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
        ax.legend(frameon=False)
    return figure


def _svg(figure: "Figure") -> str:
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "draftforge", "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    whole = text.getvalue()
    return whole[whole.index("<svg") :]


def _html(table: Table) -> str:
    title, (header, *rows), note = table
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    caption = f"<caption>{escape(title)}</caption>"
    return f'<table>{caption}<tr>{head}</tr>{body}</table><p class="note">{escape(note)}</p>'
