"""A benchmark's picture: speed-up against batch size, a line for each method; all domains together, then each.

An SVG on paper of its own, so that it reads on any page. Whiskers are the least and the most of the repeats.
"""

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from .run import EVERY, BenchRow

WIDTH, HEIGHT = 300, 220  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 34, 40  # inside it
COLUMNS, LEGEND_LINE, MARGIN, WHISKER_GAP = 3, 18, 14, 4
INK, GREY, LINE, PAPER = "#1f2328", "#59636e", "#d0d7de", "#ffffff"
COLOURS = ("#3b78b8", "#d9822b", "#2f855a", "#b83280", "#6b46c1", "#975a16", "#0e7490", "#c53030")
DASHES = ("none", "6 3", "2 3")  # once every colour is taken


class _Scale(NamedTuple):
    """Where values lie in a panel. Batch sizes stand at equal distances: they are few, and grow by factors."""

    batches: list[int]
    top: float

    def x(self, batch_size: int) -> float:
        share = (self.batches.index(batch_size) + 0.5) / len(self.batches)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, speedup: float) -> float:
        return TOP + (1 - speedup / self.top) * (HEIGHT - TOP - BOTTOM)


def picture(rows: Sequence[BenchRow]) -> str:
    """The whole picture; of plain decoding alone, axes without lines."""
    drafted = [row for row in rows if not row.setting.plain]
    ways = list(dict.fromkeys(row.setting.way for row in drafted))
    domains = sorted({row.domain for row in rows}, key=lambda name: (name != EVERY, name))
    highs = [row.speedup.high for row in drafted if not math.isnan(row.speedup.high)]
    scale = _Scale(sorted({row.setting.batch_size for row in rows}), max([1.25, *(1.1 * high for high in highs)]))
    columns = min(COLUMNS, len(domains))
    below = math.ceil(len(domains) / COLUMNS) * HEIGHT + MARGIN
    width, height = columns * WIDTH + 2 * MARGIN, below + len(ways) * LEGEND_LINE + MARGIN
    parts = [f'<rect width="{width}" height="{height}" fill="{PAPER}"/>']
    for place, domain in enumerate(domains):
        x, y = MARGIN + place % COLUMNS * WIDTH, place // COLUMNS * HEIGHT
        panel = [*_axes(domain, scale), *_lines([row for row in drafted if row.domain == domain], ways, scale)]
        parts.append(f'<g transform="translate({x} {y})">{"".join(panel)}</g>')
    for place, way in enumerate(ways):
        y = below + place * LEGEND_LINE
        parts.append(
            f'<path d="M{MARGIN + LEFT} {y}h28" {_stroke(place)}/>{_text(MARGIN + LEFT + 36, y + 4, way, INK)}'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12">{"".join(parts)}</svg>\n'
    )


def _axes(domain: str, scale: _Scale) -> Iterator[str]:
    title = "all domains" if domain == EVERY else domain
    yield _text(LEFT, TOP - 12, f"{title}: speed-up over plain decoding", INK)
    for tick in _ticks(scale.top):
        y = scale.y(tick)
        style = f'stroke="{GREY}" stroke-dasharray="4 3"' if tick == 1 else f'stroke="{LINE}"'
        yield f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" {style}/>{_text(LEFT - 6, y + 4, f"{tick:g}x", GREY, "end")}'
    for batch_size in scale.batches:
        yield _text(scale.x(batch_size), HEIGHT - BOTTOM + 16, str(batch_size), GREY, "middle")
    yield _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - BOTTOM + 32, "batch size", GREY, "middle")


def _ticks(top: float) -> list[float]:
    """From 0 by a round step, 1 among them."""
    step = next((step for step in (0.25, 0.5, 1.0) if top / step <= 6), math.ceil(top / 6))
    return sorted({1.0, *(step * place for place in range(int(top / step) + 1))})


def _lines(rows: Sequence[BenchRow], ways: Sequence[str], scale: _Scale) -> Iterator[str]:
    for place, way in enumerate(ways):
        some = sorted((row for row in rows if row.setting.way == way), key=lambda row: row.setting.batch_size)
        aside = WHISKER_GAP * (place - (len(ways) - 1) / 2)  # whiskers beside each other, not on each other
        known = [row for row in some if not math.isnan(row.speedup.value)]
        points = [(scale.x(row.setting.batch_size) + aside, row.speedup) for row in known]
        if not points:
            continue
        path = "L".join(f"{x:.1f} {scale.y(speedup.value):.1f}" for x, speedup in points)
        yield f'<path d="M{path}" {_stroke(place)}/>'
        for x, speedup in points:
            low, high = scale.y(speedup.low), scale.y(speedup.high)
            yield f'<path d="M{x:.1f} {low:.1f}V{high:.1f}" {_stroke(place)}/>'
            yield f'<circle cx="{x:.1f}" cy="{scale.y(speedup.value):.1f}" r="3" fill="{_colour(place)}"/>'


def _stroke(place: int) -> str:
    dashes = DASHES[place // len(COLOURS) % len(DASHES)]
    return f'fill="none" stroke="{_colour(place)}" stroke-width="1.8" stroke-dasharray="{dashes}"'


def _colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def _text(x: float, y: float, text: str, colour: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}">{escape(text)}</text>'
