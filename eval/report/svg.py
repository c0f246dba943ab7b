"""SVG drawing: axes, marks and text. Colours are CSS classes (chart.css), so a page's dark mode
reaches into its charts. Whatever text goes into an element is escaped here.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from markupsafe import Markup

WIDTH, PHONE = 680, 350
"""Widths of a chart in pixels: of a page, and of the same page on a phone."""
LEFT, RIGHT, TOP, BOTTOM = 58, 18, 16, 54
_LETTER = 7.5  # width of a letter of chart.css, at most


class Axis(NamedTuple):
    """One axis: the values at its ends, where labels stand, and what it shows."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    title: str


class Frame(NamedTuple):
    """The plot area inside a picture; maps values to pixels."""

    x_axis: Axis
    y_axis: Axis
    height: int
    width: int
    left: int = LEFT

    @property
    def phone(self) -> bool:
        return self.width <= PHONE

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


class Chart(NamedTuple):
    """Chart: an SVG picture, and a legend of pairs of CSS class and words."""

    svg: Markup
    legend: list[tuple[str, str]]


def numeric_axis(values: Iterable[float], title: str, unit: str = "", at_least: Sequence[float] = ()) -> Axis:
    """Numeric axis with round ticks that holds all finite values and those of `at_least`.

    An end that is one of `at_least` gets no margin.
    """
    # Ends with a margin of 6 %, but for ends that are fixed; one single value gets room around it.
    known = [value for value in [*values, *at_least] if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(known), max(known)
    room = 0.06 * (high - low) or 0.1 * max(abs(high), 1.0)
    low = low if low in at_least else low - room
    high = high if high in at_least and high > low else high + room
    return Axis(low, high, [(tick, f"{tick:g}{unit}") for tick in round_ticks(low, high)], title)


def category_axis(labels: Sequence[str], title: str, most_ticks: int = 0) -> Axis:
    """Category axis with equally distant places 1, 2, ... and a label each; `most_ticks`: only about so many labels."""
    step = math.ceil(len(labels) / most_ticks) if most_ticks else 1
    ticks = [(place + 1.0, label) for place, label in enumerate(labels) if place % step == 0]
    return Axis(0.4, len(labels) + 0.6, ticks, title)


def percent_axis(title: str, high: float = 1.0) -> Axis:
    """Percent axis of shares from 0 to `high`."""
    return Axis(0, high, [(tick, f"{tick:.0%}".replace("%", " %")) for tick in round_ticks(0, high)], title)


def round_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round tick values between the ends: multiples of 1, 2 or 5 times a power of ten, about `most` of them."""
    # The smallest round step that gives at most so many ticks; the tolerances absorb rounding errors.
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(size * power for size in (1, 2, 5, 10) if size * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(step * place, 10) for place in range(first, last + 1)]


def picture(name: str, description: str, frame: Frame, elements: Iterable[Markup]) -> Markup:
    """Whole SVG picture: axes below the elements, with a title and a description for screen readers."""
    id = f"{name}-phone" if frame.phone else name
    title, text = f"{id}-title", f"{id}-text"
    return Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" class="chart" id="{}" viewBox="0 0 {} {}" role="img" '
        'aria-labelledby="{} {}"><title id="{}">{}</title><desc id="{}">{}</desc>{}</svg>'
    ).format(
        *(id, frame.width, frame.height, title, text, title, name.replace("-", " "), text, description),
        join([*axes(frame), *elements]),
    )


def join(elements: Iterable[Markup]) -> Markup:
    return Markup("").join(elements)


def group(elements: Iterable[Markup], tip: str = "", classes: str = "") -> Markup:
    """SVG group of elements with one tooltip and CSS classes."""
    title = Markup("<title>{}</title>").format(tip) if tip else Markup("")
    return Markup('<g class="{}">{}{}</g>').format(classes, title, join(elements))


def text(x: float, y: float, words: str, classes: str = "label", anchor: str = "start") -> Markup:
    return Markup('<text x="{}" y="{}" class="{}" text-anchor="{}">{}</text>').format(
        _px(x), _px(y), classes, anchor, words
    )


def line(x1: float, y1: float, x2: float, y2: float, classes: str) -> Markup:
    return Markup('<line x1="{}" y1="{}" x2="{}" y2="{}" class="{}"/>').format(*map(_px, (x1, y1, x2, y2)), classes)


def polyline(points: Iterable[tuple[float, float]], classes: str) -> Markup:
    return _path("polyline", points, classes)


def polygon(points: Iterable[tuple[float, float]], classes: str) -> Markup:
    return _path("polygon", points, classes)


def circle(x: float, y: float, radius: float, classes: str) -> Markup:
    return Markup('<circle cx="{}" cy="{}" r="{}" class="{}"/>').format(_px(x), _px(y), _px(radius), classes)


def rect(x: float, y: float, width: float, height: float, classes: str) -> Markup:
    return Markup('<rect x="{}" y="{}" width="{}" height="{}" class="{}"/>').format(
        *map(_px, (x, y, max(width, 0.0), max(height, 0.0))), classes
    )


def axes(frame: Frame) -> list[Markup]:
    """Elements of both axes: grid lines, tick labels and titles."""
    # Horizontal grid lines with labels, labels below, the base line, and both titles.
    right, bottom = frame.right, frame.bottom
    drawn: list[Markup] = []
    for value, label in frame.y_axis.ticks:
        y = frame.y(value)
        drawn += [line(frame.left, y, right, y, "grid"), text(frame.left - 8, y + 4, label, "tick", "end")]
    for value, label in frame.x_axis.ticks:
        # A label at the end of the axis ends with the picture.
        x = min(frame.x(value), frame.width - 2 - _LETTER / 2 * len(label))
        drawn.append(text(x, bottom + 18, label, "tick", "middle"))
    drawn.append(line(frame.left, bottom, right, bottom, "axis"))
    drawn.append(text((frame.left + right) / 2, frame.height - 6, frame.x_axis.title, "axis-title", "middle"))
    turned = '<text transform="translate(14 {}) rotate(-90)" class="axis-title" text-anchor="middle">{}</text>'
    drawn.append(Markup(turned).format(_px((TOP + bottom) / 2), frame.y_axis.title))
    return drawn


def _path(shape: str, points: Iterable[tuple[float, float]], classes: str) -> Markup:
    path = " ".join(f"{_px(x)},{_px(y)}" for x, y in points)
    return Markup('<{} points="{}" class="{}"/>').format(Markup(shape), path, classes)


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
