"""The figures of a report, from records. Each comes with its legend; the numbers stand in a table beside it.

A record whose number is unknown (null) draws nothing; its table says so.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from ..counts import largest_prompt
from ..table import UNKNOWN
from . import svg
from .svg import Axis, Frame

PLAIN, LOOKUP = "plain", "lookup"


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """Such as "1.06x"; an unknown number is "n/a"."""
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value:,.{digits}f}{unit}"


def interval(estimate: Mapping[str, Any] | None, unit: str = "", digits: int = 2) -> str:
    """Such as "2.06 [1.95, 2.17]"; without an interval "2.06"."""
    if estimate is None or estimate.get("value") is None:
        return UNKNOWN
    value, low, high = (estimate.get(name) for name in ("value", "low", "high"))
    if low is None or high is None:
        return number(value, digits, unit)
    return f"{number(value, digits, unit)} [{number(low, digits)}, {number(high, digits)}]"


def plan_of(row: Mapping[str, Any]) -> str:
    """How a row drafts: "K = 4", "tree wide", or "-" for plain decoding."""
    if not row["draft_tokens"]:
        return "-"
    return f"tree {row['tree']}" if row["tree"] else f"K = {row['draft_tokens']}"


def name_of(row: Mapping[str, Any]) -> str:
    """A row in a legend: the draft, and its step where it was trained."""
    return f"{row['draft']}, step {row['step']}" if row["step"] and not row["baseline"] else str(row["draft"])


def bucket(label: str) -> str:
    """A context bucket as people say it: "up to 128", "over 32,768"."""
    top = largest_prompt(label)
    return f"over {top:,}" if label.endswith("+") else f"up to {top:,}"


def milliseconds(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else number(seconds * 1e3, 1)


def joined(words: list[str]) -> str:
    """a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


Record = Mapping[str, Any]
HEIGHT, NARROW = 300, 480
COLOURS = 6


class Chart(NamedTuple):
    """A picture and what its colours mean: pairs of class and words."""

    svg: Markup
    legend: list[tuple[str, str]]


class Point(NamedTuple):
    x: float
    value: float
    low: float | None
    high: float | None
    tip: str


class Series(NamedTuple):
    name: str
    classes: str
    points: list[Point]


class Palette:
    """One colour a draft over the whole page; grey for what needs no training. The candidate is the chosen draft."""

    def __init__(self, rows: Iterable[Record]) -> None:
        trained = dict.fromkeys(row["draft"] for row in rows if not row["baseline"])
        self._classes = {name: f"s{place % COLOURS}" for place, name in enumerate(trained)}
        chosen = next((row["draft"] for row in rows if row["chosen"]), None)
        self._classes = {"champion": "s-champion", "candidate": self._classes.get(chosen, "s0"), **self._classes}

    def __call__(self, row: Record) -> str:
        return "s-base" if row["baseline"] else self._classes.get(row["draft"], "s0")


def positions(rows: Sequence[Record], colours: Palette) -> Chart | None:
    """Acceptance at each position, given that all before it were accepted; bars: how many rounds get that far.

    The bars are of the first row.
    """
    deepest = max((len(row["alphas"]) for row in rows), default=0)
    if not deepest:
        return None
    ticks = [(k, str(k)) for k in range(1, deepest + 1)]
    frame = Frame(
        Axis(0.4, deepest + 0.6, ticks, "position in the draft"),
        Axis(0, 1, [(tick / 5, f"{tick * 20} %") for tick in range(6)], "accepted"),
        HEIGHT,
    )
    bars = svg.group(_reached_bars(rows[0], frame), classes=colours(rows[0]))
    spread = 0.13
    series = [
        Series(
            name_of(row),
            colours(row),
            [
                _point(k + 1 + spread * (place - (len(rows) - 1) / 2), alpha, f"{name_of(row)}, position {k + 1}", 100)
                for k, alpha in enumerate(row["alphas"])
                if alpha["value"] is not None
            ],
        )
        for place, row in enumerate(rows)
    ]
    drawn = svg.picture(
        "acceptance-by-position",
        "Share of drafted tokens accepted at each position of the draft, given that the ones before were accepted.",
        frame,
        [bars, *(_drawn(one, frame) for one in series)],
    )
    legend = [(one.classes, one.name) for one in series]
    return Chart(drawn, [*legend, (f"bar {colours(rows[0])}", f"{name_of(rows[0])}: rounds that accept this far")])


def joint(alphas: Sequence[Record]) -> list[float | None]:
    """Share of full rounds that accept at least 1, 2, ... tokens: products of the conditional ones."""
    shares: list[float | None] = []
    share: float | None = 1.0
    for alpha in alphas:
        share = None if share is None or alpha["value"] is None else share * float(alpha["value"])
        shares.append(share)
    return shares


def _reached_bars(row: Record, frame: Frame) -> Iterator[Markup]:
    width = min(0.62 * abs(frame.x(2) - frame.x(1)), 90.0)
    for k, share in enumerate(joint(row["alphas"])):
        if share is not None:
            x, y = frame.x(k + 1), frame.y(share)
            bar = svg.rect(x - width / 2, y, width, frame.y(0) - y, "bar")
            yield svg.group([bar], f"{share:.0%} of rounds accept at least {k + 1}")


def domains(rows: Sequence[Record], colours: Palette) -> Chart | None:
    """tau in each domain at each sampling setting: a line a pair, a dot a draft."""
    known = [row for row in rows if row["tau"]["value"] is not None]
    if not known:
        return None
    places = list(dict.fromkeys((row["domain"], row["setting"]) for row in known))
    drafts = list(dict.fromkeys((row["draft"], row["step"]) for row in known))
    several = len({setting for _, setting in places}) > 1
    labels = [_cut(f"{domain}, {setting}" if several else domain, 28) for domain, setting in places]
    left = 24 + int(7.2 * max(map(len, labels)))
    each = 14 + 13 * len(drafts)
    height = svg.TOP + svg.BOTTOM + each * len(places)
    x_axis = svg.numeric_axis(
        _bounds(row["tau"] for row in known), "tau: tokens per pass of the target", at_least=[1.0]
    )
    frame = Frame(x_axis, Axis(0, len(places), [], ""), height, left=left)
    elements = [svg.line(frame.x(tick), svg.TOP, frame.x(tick), frame.bottom, "grid") for tick, _ in x_axis.ticks]
    elements.append(svg.line(frame.x(1), svg.TOP, frame.x(1), frame.bottom, "axis"))
    for place, label in enumerate(labels):
        top = svg.TOP + place * each
        if place:
            elements.append(svg.line(16, top, frame.right, top, "grid"))
        elements.append(svg.text(left - 12, top + each / 2 + 4, label, "label", "end"))
    for row in known:
        place = places.index((row["domain"], row["setting"]))
        y = svg.TOP + place * each + 7 + 13 * (drafts.index((row["draft"], row["step"])) + 0.5)
        tip = f"{name_of(row)}, {row['domain']}, {row['setting']}: {interval(row['tau'])}"
        tip = f"{tip}, {row['conversations']} conversations"
        elements.append(_lying(row["tau"], y, frame, colours(row), tip))
    legend = {name_of(row): colours(row) for row in known}
    described = "Tokens per pass of the target by domain and sampling setting, with intervals."
    return Chart(svg.picture("tau-by-domain", described, frame, elements), [(c, n) for n, c in legend.items()])


def contexts(rows: Sequence[Record], colours: Palette) -> Chart | None:
    """tau by how many tokens the prompt had."""
    known = [row for row in rows if row["tau"]["value"] is not None]
    buckets = sorted({row["context_bucket"] for row in known})
    if not buckets:
        return None
    most = {label: max(row["conversations"] for row in known if row["context_bucket"] == label) for label in buckets}
    ticks = [(place + 1.0, bucket(label)) for place, label in enumerate(buckets)]
    frame = Frame(
        Axis(0.4, len(buckets) + 0.6, ticks, "prompt tokens (conversations)"),
        svg.numeric_axis(_bounds(row["tau"] for row in known), "tau", at_least=[1.0]),
        HEIGHT,
    )
    drafts = list(dict.fromkeys((row["draft"], row["step"]) for row in known))
    series = []
    for place, draft in enumerate(drafts):
        mine = [row for row in known if (row["draft"], row["step"]) == draft]
        aside = 0.12 * (place - (len(drafts) - 1) / 2)
        points = [
            _point(
                buckets.index(row["context_bucket"]) + 1 + aside,
                row["tau"],
                f"{name_of(row)}, {bucket(row['context_bucket'])} tokens, {row['conversations']} conversations",
            )
            for row in mine
        ]
        series.append(Series(name_of(mine[0]), colours(mine[0]), points))
    below = [
        svg.text(frame.x(place + 1), frame.bottom + 32, f"({most[label]})", "tick faint", "middle")
        for place, label in enumerate(buckets)
    ]
    described = "Tokens per pass of the target by length of the prompt, with intervals."
    elements = [*below, *(_drawn(one, frame) for one in series)]
    return Chart(svg.picture("tau-by-context", described, frame, elements), [(s.classes, s.name) for s in series])


def checkpoints(rows: Sequence[Record], figure: str, title: str, colours: Palette) -> Chart | None:
    """One figure of every checkpoint against its step."""
    known = [row for row in rows if not row["baseline"] and row[figure]["value"] is not None]
    steps = sorted({row["step"] for row in known})
    if not known:
        return None
    unit = "x" if figure == "speedup" else ""
    axis = svg.numeric_axis(steps, "training step", at_least=[0.0])
    y_axis = svg.numeric_axis(_bounds(row[figure] for row in known), title, unit, [1.0])
    frame = Frame(axis, y_axis, HEIGHT, NARROW)
    series = []
    for draft in dict.fromkeys(row["draft"] for row in known):
        mine = sorted((row for row in known if row["draft"] == draft), key=lambda row: int(row["step"]))
        tips = [f"{name_of(row)} at {plan_of(row)}" for row in mine]
        points = [_point(row["step"], row[figure], tip, 1, unit) for row, tip in zip(mine, tips)]
        series.append(Series(draft, colours(mine[0]), points))
    elements = [_even(frame), *(_drawn(one, frame) for one in series)]
    for row in known:
        if row["chosen"]:
            elements.append(svg.circle(frame.x(row["step"]), frame.y(row[figure]["value"]), 9, "ring"))
    described = f"{title} of each checkpoint by training step, with intervals; the chosen one is ringed."
    legend = [*((one.classes, one.name) for one in series), ("ring", "chosen")]
    return Chart(svg.picture(f"{figure}-by-step", described, frame, elements), legend)


def by_batch_size(rows: Sequence[Record], colours: Palette) -> Chart | None:
    """Expected speed-up at each batch size, each at its best K or tree there; of rows that have a load.

    Of each draft one checkpoint: the chosen one, or the last.
    """
    loaded = [row for row in rows if row.get("load") and not row["baseline"]]
    known = list({row["draft"]: row for row in sorted(loaded, key=lambda row: (row["chosen"], row["step"]))}.values())
    sizes = sorted({one["batch_size"] for row in known for one in row["load"]["batches"]})
    if not sizes:
        return None
    ends = _bounds(one["speedup"] for row in known for one in row["load"]["batches"])
    frame = Frame(
        Axis(0.4, len(sizes) + 0.6, [(place + 1.0, str(size)) for place, size in enumerate(sizes)], "batch size"),
        svg.numeric_axis(ends, "expected speed-up", "x", [1.0]),
        HEIGHT,
    )
    series = [
        Series(
            name_of(row),
            colours(row),
            [
                _point(
                    sizes.index(one["batch_size"]) + 1.0,
                    one["speedup"],
                    f"{name_of(row)} at batch size {one['batch_size']}, {plan_of(one)}",
                    1,
                    "x",
                )
                for one in row["load"]["batches"]
                if one["speedup"]["value"] is not None
            ],
        )
        for row in known
    ]
    elements = [_even(frame), *(_drawn(one, frame) for one in series)]
    described = "Expected speed-up over plain decoding at each batch size, at the best K or tree there."
    return Chart(svg.picture("speedup-by-batch", described, frame, elements), [(s.classes, s.name) for s in series])


def _point(x: float, estimate: Record, what: str, scale: float = 1.0, unit: str = "") -> Point:
    value, low, high = (estimate[name] for name in ("value", "low", "high"))
    if scale == 100:
        parts = {name: None if part is None else 100 * part for name, part in estimate.items() if name in _ENDS}
        return Point(x, value, low, high, f"{what}: {interval(parts, ' %', 0)}")
    return Point(x, value, low, high, f"{what}: {interval(estimate, unit)}")


_ENDS = ("value", "low", "high")


def _drawn(series: Series, frame: Frame) -> Markup:
    """A line through the points, whiskers, dots with tooltips."""
    elements = []
    if len(series.points) > 1:
        elements.append(svg.polyline(((frame.x(one.x), frame.y(one.value)) for one in series.points), "curve"))
    for one in series.points:
        x = frame.x(one.x)
        marks = []
        if one.low is not None and one.high is not None:
            low, high = frame.y(one.low), frame.y(one.high)
            marks += [svg.line(x, low, x, high, "whisker")]
            marks += [svg.line(x - 4, end, x + 4, end, "whisker") for end in (low, high)]
        marks.append(svg.circle(x, frame.y(one.value), 4.5, "dot"))
        elements.append(svg.group(marks, one.tip))
    return svg.group(elements, classes=series.classes)


def _lying(estimate: Record, y: float, frame: Frame, classes: str, tip: str) -> Markup:
    """A dot with its interval along x."""
    marks = []
    if estimate["low"] is not None and estimate["high"] is not None:
        low, high = frame.x(estimate["low"]), frame.x(estimate["high"])
        marks.append(svg.line(low, y, high, y, "whisker"))
        marks += [svg.line(end, y - 3.5, end, y + 3.5, "whisker") for end in (low, high)]
    marks.append(svg.circle(frame.x(estimate["value"]), y, 4.5, "dot"))
    return svg.group(marks, tip, classes)


def _even(frame: Frame) -> Markup:
    """The line of plain decoding."""
    return svg.line(frame.left, frame.y(1), frame.right, frame.y(1), "even")


def _bounds(estimates: Iterable[Record]) -> list[float]:
    return [one[end] for one in estimates for end in _ENDS if one[end] is not None]


def _cut(words: str, most: int) -> str:
    return words if len(words) <= most else words[: most - 1] + "…"


FRONTIER_HEIGHT = 400
_SPEEDUPS = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 10.0)


class ChartPoint(NamedTuple):
    """One way of drafting."""

    row: Record
    cost: float
    """What its round takes beyond a plain step, in plain steps."""
    tau: float


def places(plans: Sequence[Record]) -> list[ChartPoint]:
    """Where the rows stand whose cost and tau are known."""
    return [
        ChartPoint(row, row["tau"]["value"] / row["speedup"]["value"] - 1.0, row["tau"]["value"])
        for row in plans
        if row["tau"]["value"] is not None and row["speedup"]["value"]
    ]


def pareto(found: Sequence[ChartPoint]) -> list[ChartPoint]:
    """Those that no other beats in both: more tau for no more cost. Cheapest first."""
    best: list[ChartPoint] = []
    for place in sorted(found, key=lambda place: (place.cost, -place.tau)):
        if not best or place.tau > best[-1].tau:
            best.append(place)
    return best


def frontier(plans: Sequence[Record], chosen: Record, colours: Palette) -> Chart | None:
    """The scatter, its frontier, and lines of equal speed-up."""
    found = places(plans)
    if not found:
        return None
    costs, taus = [place.cost for place in found], [place.tau for place in found]
    x_axis = svg.numeric_axis(costs, "what a round takes beyond a plain step, in plain steps", at_least=[0.0])
    y_axis = svg.numeric_axis([*taus, *(end for place in found for end in _ends(place))], "tau", at_least=[1.0])
    frame = Frame(x_axis, y_axis, FRONTIER_HEIGHT)
    elements = [_slower(frame), *_equal_speeds(frame)]
    best = pareto([ChartPoint({}, 0.0, 1.0), *found]) if min(costs) >= 0 else pareto(found)
    elements.append(svg.polyline(((frame.x(one.cost), frame.y(one.tau)) for one in best), "frontier"))
    elements.append(svg.group([svg.circle(frame.x(0.0), frame.y(1.0), 4.5, "dot")], "plain decoding", "s-plain"))
    last = {place.row["draft"]: place.row["step"] for place in sorted(found, key=lambda place: int(place.row["step"]))}
    last[chosen["draft"]] = chosen["step"]
    for place in sorted(found, key=lambda place: _is(place.row, chosen)):
        elements.append(_mark(place, frame, colours, named=last[place.row["draft"]] == place.row["step"]))
        if _is(place.row, chosen):
            elements.append(svg.circle(frame.x(place.cost), frame.y(place.tau), 9, "ring"))
    legend = {name_of({**row, "step": 0}): colours(row) for row in (place.row for place in found)}
    described = (
        "Tokens per pass of the target against the cost of a round, for every checkpoint, K and tree; lines of equal "
        "expected speed-up; below the break-even line speculation is slower than plain decoding."
    )
    words = [*((classes, name) for name, classes in legend.items()), ("frontier", "frontier"), ("ring", "chosen")]
    return Chart(svg.picture("cost-against-tau", described, frame, elements), [*words, ("slower", "slower than plain")])


def _mark(place: ChartPoint, frame: Frame, colours: Palette, named: bool) -> Markup:
    """A dot with its interval; `named`: its K or tree beside it."""
    row, (x, y) = place.row, (frame.x(place.cost), frame.y(place.tau))
    tip = (
        f"{name_of(row)}, {plan_of(row)}: tau {interval(row['tau'])}, draft {milliseconds(row['draft_seconds'])} ms, "
        f"verify {milliseconds(row['verify_seconds'])} ms, expected speed-up {interval(row['speedup'], 'x')}"
    )
    low, high = _ends(place) or (place.tau, place.tau)
    marks = [svg.line(x, frame.y(low), x, frame.y(high), "whisker thin"), svg.circle(x, y, 4.5, "dot")]
    if named:
        aside, anchor = (-12, "end") if x > frame.right - 60 else (12, "start")
        marks.append(svg.text(x + aside, y + 4, row["tree"] or f"K={row['draft_tokens']}", "mark", anchor))
    return svg.group(marks, tip, colours(row))


def _is(row: Record, chosen: Record) -> bool:
    return all(row[name] == chosen[name] for name in ("draft", "step", "draft_tokens", "tree"))


def _ends(place: ChartPoint) -> list[float]:
    low, high = place.row["tau"]["low"], place.row["tau"]["high"]
    return [] if low is None or high is None else [low, high]


def _slower(frame: Frame) -> Markup:
    """The region under break-even, clipped to the frame."""
    x_axis, y_axis = frame.x_axis, frame.y_axis
    corner = min(x_axis.high, y_axis.high - 1.0)  # where the line leaves the frame
    line = [(0.0, 1.0), (corner, 1.0 + corner)]
    if corner < x_axis.high:
        line.append((x_axis.high, y_axis.high))
    corners = [*line, (x_axis.high, y_axis.low), (0.0, y_axis.low)]
    return svg.polygon(((frame.x(x), frame.y(y)) for x, y in corners), "slower")


def _equal_speeds(frame: Frame) -> Iterator[Markup]:
    """Rays tau = s (1 + x), where they pass through the frame, each with its speed-up at its end."""
    x_axis, y_axis = frame.x_axis, frame.y_axis
    for speedup in _SPEEDUPS:
        start = max(x_axis.low, y_axis.low / speedup - 1.0)
        end = min(x_axis.high, y_axis.high / speedup - 1.0)
        if end - start < 0.06 * (x_axis.high - x_axis.low):
            continue
        ray = [(frame.x(x), frame.y(speedup * (1.0 + x))) for x in (start, end)]
        yield svg.polyline(ray, "even" if speedup == 1.0 else "ray")
        (x, y), at_top = ray[1], end < x_axis.high
        yield svg.text(x - 4, y + (13 if at_top else -5), f"{speedup:g}x", "tick ray-label", "end")
