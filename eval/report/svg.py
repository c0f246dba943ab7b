"""Drawing: axes, marks and text as SVG. Colours are CSS classes, so that a page's dark mode reaches into its figures.

A picture is a list of elements; whatever text goes into one is escaped here.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from markupsafe import Markup

WIDTH = 680
LEFT, RIGHT, TOP, BOTTOM = 58, 18, 16, 54


class Axis(NamedTuple):
    """One axis: the values at its ends, where labels stand, and what it shows."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    title: str


class Frame(NamedTuple):
    """The plot inside a picture; values to pixels."""

    x_axis: Axis
    y_axis: Axis
    height: int
    width: int = WIDTH
    left: int = LEFT

    @property
    def right(self) -> int:
        return self.width - RIGHT

    @property
    def bottom(self) -> int:
        return self.height - BOTTOM

    def x(self, value: float) -> float:
        share = (value - self.x_axis.low) / (self.x_axis.high - self.x_axis.low)
        return self.left + share * (self.right - self.left)

    def y(self, value: float) -> float:
        share = (value - self.y_axis.low) / (self.y_axis.high - self.y_axis.low)
        return self.bottom - share * (self.bottom - TOP)


def numeric_axis(values: Iterable[float], title: str, unit: str = "", at_least: Sequence[float] = ()) -> Axis:
    """An axis with round ticks that holds all finite values and those of `at_least`."""
    known = [value for value in [*values, *at_least] if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(known), max(known)
    room = 0.06 * (high - low) or 0.1 * max(abs(high), 1.0)
    low = low if low in at_least else low - room
    high = high if high in at_least and high > low else high + room
    return Axis(low, high, [(tick, f"{tick:g}{unit}") for tick in round_ticks(low, high)], title)


def round_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten between the ends."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(size * power for size in (1, 2, 5, 10) if size * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(step * place, 10) for place in range(first, last + 1)]


def picture(name: str, description: str, frame: Frame, elements: Iterable[Markup]) -> Markup:
    """The whole SVG: axes below the elements, a name and a description for those who do not see it."""
    title, text = f"{name}-title", f"{name}-text"
    return Markup(
        '<svg class="chart" id="{}" viewBox="0 0 {} {}" role="img" aria-labelledby="{} {}">'
        '<title id="{}">{}</title><desc id="{}">{}</desc>{}</svg>'
    ).format(
        *(name, frame.width, frame.height, title, text, title, name.replace("-", " "), text, description),
        join([*axes(frame), *elements]),
    )


def join(elements: Iterable[Markup]) -> Markup:
    return Markup("").join(elements)


def group(elements: Iterable[Markup], tip: str = "", classes: str = "") -> Markup:
    """Elements with one tooltip."""
    title = Markup("<title>{}</title>").format(tip) if tip else Markup("")
    return Markup('<g class="{}">{}{}</g>').format(classes, title, join(elements))


def text(x: float, y: float, words: str, classes: str = "label", anchor: str = "start") -> Markup:
    return Markup('<text x="{}" y="{}" class="{}" text-anchor="{}">{}</text>').format(
        _px(x), _px(y), classes, anchor, words
    )


def line(x1: float, y1: float, x2: float, y2: float, classes: str) -> Markup:
    return Markup('<line x1="{}" y1="{}" x2="{}" y2="{}" class="{}"/>').format(*map(_px, (x1, y1, x2, y2)), classes)


def polyline(points: Iterable[tuple[float, float]], classes: str) -> Markup:
    path = " ".join(f"{_px(x)},{_px(y)}" for x, y in points)
    return Markup('<polyline points="{}" class="{}"/>').format(path, classes)


def polygon(points: Iterable[tuple[float, float]], classes: str) -> Markup:
    path = " ".join(f"{_px(x)},{_px(y)}" for x, y in points)
    return Markup('<polygon points="{}" class="{}"/>').format(path, classes)


def circle(x: float, y: float, radius: float, classes: str) -> Markup:
    return Markup('<circle cx="{}" cy="{}" r="{}" class="{}"/>').format(_px(x), _px(y), _px(radius), classes)


def rect(x: float, y: float, width: float, height: float, classes: str) -> Markup:
    return Markup('<rect x="{}" y="{}" width="{}" height="{}" class="{}"/>').format(
        *map(_px, (x, y, max(width, 0.0), max(height, 0.0))), classes
    )


def axes(frame: Frame) -> list[Markup]:
    """Grid, labels and titles."""
    right, bottom = frame.right, frame.bottom
    drawn: list[Markup] = []
    for value, label in frame.y_axis.ticks:
        y = frame.y(value)
        drawn += [line(frame.left, y, right, y, "grid"), text(frame.left - 8, y + 4, label, "tick", "end")]
    for value, label in frame.x_axis.ticks:
        drawn.append(text(frame.x(value), bottom + 18, label, "tick", "middle"))
    drawn.append(line(frame.left, bottom, right, bottom, "axis"))
    drawn.append(text((frame.left + right) / 2, frame.height - 6, frame.x_axis.title, "axis-title", "middle"))
    turned = '<text transform="translate(14 {}) rotate(-90)" class="axis-title" text-anchor="middle">{}</text>'
    drawn.append(Markup(turned).format(_px((TOP + bottom) / 2), frame.y_axis.title))
    return drawn


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
