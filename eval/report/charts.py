"""Charts of the run report, the mix page and a benchmark, from records, each with its legend, in the width asked for.

A record whose number is unknown (null) draws nothing; its table says so.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from ..bench.run import EVERY, BenchRow
from ..counts import bucket_label
from ..summary import bench_speedup, config_label, draft_label
from ..table import interval, milliseconds
from . import svg
from .svg import Axis, Chart, Frame

Record = Mapping[str, Any]
Shares = Mapping[str, tuple[str, list[float]]]
"""CSS class and one share a label, by name of a side."""
Lines = Mapping[str, tuple[str, list[tuple[float, float]]]]
"""CSS class and points, by name of a line."""
HEIGHT, HALF, FRONTIER_HEIGHT = 300, 480, 400
"""Heights of charts, and the width of two beside each other, in pixels."""
COLOURS = 6
_ENDS = ("value", "low", "high")
_SPEEDUPS = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 10.0)
_STAGGER = 0.13  # of a category: series stand beside each other, not on each other


class Point(NamedTuple):
    """Data point: a value with its interval and its tooltip."""

    x: float
    value: float
    low: float | None
    high: float | None
    tip: str


class Series(NamedTuple):
    """Series of points of one colour, joined by a line."""

    name: str
    classes: str
    points: list[Point]


class Figure(NamedTuple):
    """A chart as a page shows it, and as a phone does."""

    wide: Chart
    phone: Chart


def figure(draw: Callable[[int], Chart | None], wide: int = svg.WIDTH) -> Figure | None:
    """Draw a chart at both widths; None where there is nothing to draw."""
    drawn, small = draw(wide), draw(svg.PHONE)
    return None if drawn is None or small is None else Figure(drawn, small)


class Palette:
    """Palette with one colour a draft over the whole page; baselines are grey. The candidate has the chosen draft's."""

    def __init__(self, rows: Iterable[Record]) -> None:
        trained = dict.fromkeys(row["draft"] for row in rows if not row["baseline"])
        self._classes = {name: colour(place) for place, name in enumerate(trained)}
        chosen = next((row["draft"] for row in rows if row["chosen"]), None)
        self._classes = {"champion": "s-champion", "candidate": self._classes.get(chosen, "s0"), **self._classes}

    def __call__(self, row: Record) -> str:
        return "s-base" if row["baseline"] else self._classes.get(row["draft"], "s0")


def colour(place: int) -> str:
    """CSS classes of the n-th series; once every colour is taken, lines are dashed."""
    dash = place // COLOURS % 3
    return f"s{place % COLOURS}" + (f" dash{dash}" if dash else "")


def line_chart(
    name: str, description: str, frame: Frame, series: Sequence[Series], below: Iterable[Markup] = ()
) -> Chart:
    """Line chart: lines through points with whiskers and tooltips. `below`: elements that are drawn first."""
    drawn = svg.picture(name, description, frame, [*below, *(_line(one, frame) for one in series)])
    return Chart(drawn, [(one.classes, one.name) for one in series])


def bar_chart(name: str, description: str, labels: Sequence[str], sides: Shares, width: int) -> Chart:
    """Bar chart of shares: a band a label, and in it a horizontal bar a side."""
    # The frame grows with the labels; the axis ends at the largest share.
    left, above = _label_room(labels, width)
    each = above + 12 + 11 * len(sides)
    highest = max((share for _, shares in sides.values() for share in shares), default=0.0) or 1.0
    frame = Frame(
        svg.percent_axis("share", min(1.0, 1.06 * highest)),
        Axis(0, len(labels), [], ""),
        svg.TOP + svg.BOTTOM + each * len(labels),
        width,
        left,
    )
    elements = _label_lines(labels, frame, each)
    # A bar a side, one below the other in the label's band.
    for place, label in enumerate(labels):
        for turn, (side, (classes, shares)) in enumerate(sides.items()):
            y = svg.TOP + place * each + above + 6 + 11 * turn
            bar = svg.rect(frame.x(0), y, frame.x(shares[place]) - frame.x(0), 9, "bar solid")
            elements.append(svg.group([bar], f"{label}, {side}: {shares[place]:.1%}", classes))
    legend = [(classes, side) for side, (classes, _) in sides.items()]
    return Chart(svg.picture(name, description, frame, elements), legend)


def curves(name: str, description: str, frame: Frame, lines: Lines) -> Chart:
    """Chart of lines without point marks."""
    elements = [
        svg.group([svg.polyline(((frame.x(x), frame.y(y)) for x, y in points), "curve")], words, classes)
        for words, (classes, points) in lines.items()
    ]
    legend = [(classes, words) for words, (classes, _) in lines.items()]
    return Chart(svg.picture(name, description, frame, elements), legend)


# --- the run report ---


def positions(rows: Sequence[Record], colours: Palette, width: int) -> Chart | None:
    """Chart of conditional acceptance by position; None where no row has any.

    Bars show the share of rounds of the first row that accept at least so many tokens.
    """
    # 1) The frame: one place a position of the deepest draft.
    deepest = max((len(row["alphas"]) for row in rows), default=0)
    if not deepest:
        return None
    axis = svg.category_axis([str(k) for k in range(1, deepest + 1)], "position in the draft")
    frame = Frame(axis, svg.percent_axis("accepted"), HEIGHT, width)
    # 2) A line a draft, the drafts side by side at each position.
    series = [
        Series(
            draft_label(row),
            colours(row),
            [
                _point(k + 1 + _aside(place, rows), alpha, f"{draft_label(row)}, position {k + 1}", percent=True)
                for k, alpha in enumerate(row["alphas"])
                if alpha["value"] is not None
            ],
        )
        for place, row in enumerate(rows)
    ]
    described = (
        "Share of drafted tokens accepted at each position of the draft, given that the ones before were accepted."
    )
    # 3) Bars of the first draft below the lines, with an entry of their own in the legend.
    bars = svg.group(_reached_bars(rows[0], frame), classes=colours(rows[0]))
    chart = line_chart("acceptance-by-position", described, frame, series, [bars])
    bar_words = (f"bar {colours(rows[0])}", f"{draft_label(rows[0])}: rounds that accept this far")
    return chart._replace(legend=[*chart.legend, bar_words])


def joint_acceptance(alphas: Sequence[Record]) -> list[float | None]:
    """Joint acceptance: shares of full rounds that accept at least 1, 2, ... tokens, products of the conditional ones.

    After the first unknown position all are None.
    """
    shares: list[float | None] = []
    share: float | None = 1.0
    for alpha in alphas:
        share = None if share is None or alpha["value"] is None else share * float(alpha["value"])
        shares.append(share)
    return shares


def _reached_bars(row: Record, frame: Frame) -> Iterator[Markup]:
    width = min(0.62 * abs(frame.x(2) - frame.x(1)), 90.0)
    for k, share in enumerate(joint_acceptance(row["alphas"])):
        if share is not None:
            x, y = frame.x(k + 1), frame.y(share)
            bar = svg.rect(x - width / 2, y, width, frame.y(0) - y, "bar")
            yield svg.group([bar], f"{share:.0%} of rounds accept at least {k + 1}")


def domains(rows: Sequence[Record], colours: Palette, width: int) -> Chart | None:
    """Dot chart of tau by domain and sampling setting: a band a pair, in it a dot a draft; None where none is known."""
    # Unknown taus have no dot.
    known = [row for row in rows if row["tau"]["value"] is not None]
    if not known:
        return None
    # One band a (domain, setting), one line in it a draft.
    pairs = list(dict.fromkeys((row["domain"], row["setting"]) for row in known))
    drafts = list(dict.fromkeys((row["draft"], row["step"]) for row in known))
    several = len({setting for _, setting in pairs}) > 1
    labels = [_cut(f"{domain}, {setting}" if several else domain, 28) for domain, setting in pairs]
    left, above = _label_room(labels, width)
    each = above + 14 + 13 * len(drafts)
    x_axis = svg.numeric_axis(
        _bounds(row["tau"] for row in known), "tau: tokens per pass of the target", at_least=[1.0]
    )
    height = svg.TOP + svg.BOTTOM + each * len(pairs)
    frame = Frame(x_axis, Axis(0, len(pairs), [], ""), height, width, left)
    elements = _label_lines(labels, frame, each)
    elements.append(svg.line(frame.x(1), svg.TOP, frame.x(1), frame.bottom, "axis"))
    # Dots with their intervals along x.
    for row in known:
        place = pairs.index((row["domain"], row["setting"]))
        y = svg.TOP + place * each + above + 7 + 13 * (drafts.index((row["draft"], row["step"])) + 0.5)
        tip = f"{draft_label(row)}, {row['domain']}, {row['setting']}: {interval(row['tau'])}"
        tip = f"{tip}, {row['conversations']} conversations"
        value, low, high = (row["tau"][end] for end in _ENDS)
        marks = []
        if low is not None and high is not None:
            low, high = frame.x(low), frame.x(high)
            marks.append(svg.line(low, y, high, y, "whisker"))
            marks += [svg.line(end, y - 3.5, end, y + 3.5, "whisker") for end in (low, high)]
        marks.append(svg.circle(frame.x(value), y, 4.5, "dot"))
        elements.append(svg.group(marks, tip, colours(row)))
    # Each draft once in the legend.
    legend = {draft_label(row): colours(row) for row in known}
    described = "Tokens per pass of the target by domain and sampling setting, with intervals."
    drawn = svg.picture("tau-by-domain", described, frame, elements)
    return Chart(drawn, [(classes, name) for name, classes in legend.items()])


def contexts(rows: Sequence[Record], colours: Palette, width: int) -> Chart | None:
    """Chart of tau by prompt length; None where no tau is known."""
    # 1) The frame: one place a bucket of prompt lengths.
    known = [row for row in rows if row["tau"]["value"] is not None]
    buckets = sorted({row["context_bucket"] for row in known})
    if not buckets:
        return None
    most = {label: max(row["conversations"] for row in known if row["context_bucket"] == label) for label in buckets}
    names = [bucket_label(label) for label in buckets]
    if width == svg.PHONE:
        names = [name.replace("up to ", "≤").replace("over ", ">") for name in names]
    x_axis = svg.category_axis(names, "prompt tokens (conversations)")
    frame = Frame(x_axis, svg.numeric_axis(_bounds(row["tau"] for row in known), "tau", at_least=[1.0]), HEIGHT, width)
    # 2) A line a draft, the drafts side by side in each bucket.
    drafts = list(dict.fromkeys((row["draft"], row["step"]) for row in known))
    series = []
    for place, draft in enumerate(drafts):
        mine = [row for row in known if (row["draft"], row["step"]) == draft]
        points = []
        for row in mine:
            bucket, label = row["context_bucket"], draft_label(row)
            tip = f"{label}, {bucket_label(bucket)} tokens, {row['conversations']} conversations"
            points.append(_point(buckets.index(bucket) + 1 + _aside(place, drafts), row["tau"], tip))
        series.append(Series(draft_label(mine[0]), colours(mine[0]), points))
    # 3) The number of conversations below each bucket: small ones have wide intervals.
    below = [
        svg.text(frame.x(place + 1), frame.bottom + 32, f"({most[label]})", "tick faint", "middle")
        for place, label in enumerate(buckets)
    ]
    described = "Tokens per pass of the target by length of the prompt, with intervals."
    return line_chart("tau-by-context", described, frame, series, below)


def checkpoints(rows: Sequence[Record], figure: str, title: str, colours: Palette, width: int) -> Chart | None:
    """Chart of one figure (tau or speedup) of every checkpoint by training step; None where none is known."""
    # 1) Trained drafts only: baselines have no steps.
    known = [row for row in rows if not row["baseline"] and row[figure]["value"] is not None]
    steps = sorted({row["step"] for row in known})
    if not known:
        return None
    unit = "x" if figure == "speedup" else ""
    axis = svg.numeric_axis(steps, "training step", at_least=[0.0])
    y_axis = svg.numeric_axis(_bounds(row[figure] for row in known), title, unit, [1.0])
    frame = Frame(axis, y_axis, HEIGHT, width)
    # 2) A line a draft over its checkpoints.
    series = []
    for draft in dict.fromkeys(row["draft"] for row in known):
        mine = sorted((row for row in known if row["draft"] == draft), key=lambda row: int(row["step"]))
        tips = [f"{draft_label(row)} at {config_label(row)}" for row in mine]
        points = [_point(row["step"], row[figure], tip, unit) for row, tip in zip(mine, tips)]
        series.append(Series(draft, colours(mine[0]), points))
    # 3) A ring round the chosen checkpoint, and the line at break-even.
    rings = [_ring(frame.x(row["step"]), frame.y(row[figure]["value"])) for row in known if row["chosen"]]
    described = f"{title} of each checkpoint by training step, with intervals; the chosen one is ringed."
    chart = line_chart(f"{figure}-by-step", described, frame, series, [break_even(frame), *rings])
    return chart._replace(legend=[*chart.legend, ("ring", "chosen")])


def by_batch_size(rows: Sequence[Record], colours: Palette, width: int) -> Chart | None:
    """Chart of expected speed-up by batch size, at the best K or tree of each; None where no row has a load.

    Each draft has one line, of its chosen checkpoint or else its last.
    """
    # 1) One checkpoint a draft: later entries replace earlier ones, and the chosen one, else the last, is sorted last.
    loaded = [row for row in rows if row.get("load") and not row["baseline"]]
    known = list({row["draft"]: row for row in sorted(loaded, key=lambda row: (row["chosen"], row["step"]))}.values())
    sizes = sorted({one["batch_size"] for row in known for one in row["load"]["batches"]})
    if not sizes:
        return None
    # 2) The frame: one place a batch size.
    ends = _bounds(one["speedup"] for row in known for one in row["load"]["batches"])
    x_axis = svg.category_axis([str(size) for size in sizes], "batch size")
    frame = Frame(x_axis, svg.numeric_axis(ends, "expected speed-up", "x", [1.0]), HEIGHT, width)
    # 3) A line a draft; each point names its K or tree in the tooltip.
    series = []
    for row in known:
        points = []
        for one in row["load"]["batches"]:
            if one["speedup"]["value"] is not None:
                tip = f"{draft_label(row)} at batch size {one['batch_size']}, {config_label(one)}"
                points.append(_point(sizes.index(one["batch_size"]) + 1.0, one["speedup"], tip, "x"))
        series.append(Series(draft_label(row), colours(row), points))
    described = "Expected speed-up over plain decoding at each batch size, at the best K or tree there."
    return line_chart("speedup-by-batch", described, frame, series, [break_even(frame)])


class ConfigPoint(NamedTuple):
    """Cost and tau of one checkpoint at one K or tree."""

    row: Record
    cost: float
    """Time that a round takes beyond a plain step, in plain steps: tau / speed-up - 1."""
    tau: float


def config_points(rows: Sequence[Record]) -> list[ConfigPoint]:
    """Cost and tau of the rows for which both are known."""
    return [
        ConfigPoint(row, row["tau"]["value"] / row["speedup"]["value"] - 1.0, row["tau"]["value"])
        for row in rows
        if row["tau"]["value"] is not None and row["speedup"]["value"]
    ]


def pareto(points: Sequence[ConfigPoint]) -> list[ConfigPoint]:
    """Pareto frontier, cheapest first: points for which no other has at least the tau at no more cost."""
    best: list[ConfigPoint] = []
    for point in sorted(points, key=lambda point: (point.cost, -point.tau)):
        if not best or point.tau > best[-1].tau:
            best.append(point)
    return best


def frontier(rows: Sequence[Record], chosen: Record, colours: Palette, width: int) -> Chart | None:
    """Scatter of cost and tau of every checkpoint at every K and tree, its frontier, and lines of equal speed-up."""
    points = config_points(rows)
    if not points:
        return None
    costs, taus = [point.cost for point in points], [point.tau for point in points]
    ends = [point.row["tau"][end] for point in points for end in ("low", "high")]
    x_axis = svg.numeric_axis(costs, "a round beyond a plain step, in plain steps", at_least=[0.0])
    y_axis = svg.numeric_axis([*taus, *(end for end in ends if end is not None)], "tau", at_least=[1.0])
    frame = Frame(x_axis, y_axis, FRONTIER_HEIGHT, width)
    # 1) the ground: where speculation is slower, rays of equal speed-up, the frontier, plain decoding
    elements = [_slower(frame), *_equal_speeds(frame)]
    best = pareto([ConfigPoint({}, 0.0, 1.0), *points]) if min(costs) >= 0 else pareto(points)
    elements.append(svg.polyline(((frame.x(one.cost), frame.y(one.tau)) for one in best), "frontier"))
    elements.append(svg.group([svg.circle(frame.x(0.0), frame.y(1.0), 4.5, "dot")], "plain decoding", "s-plain"))
    # 2) the points, the chosen one last; K or tree is written beside each draft's last (or chosen) checkpoint
    last = {point.row["draft"]: point.row["step"] for point in sorted(points, key=lambda one: int(one.row["step"]))}
    last[chosen["draft"]] = chosen["step"]
    named = _apart([point for point in points if last[point.row["draft"]] == point.row["step"]], chosen, frame)
    for point in sorted(points, key=lambda point: _is(point.row, chosen)):
        elements.append(_config_mark(point, frame, colours, named=point in named))
        if _is(point.row, chosen):
            elements.append(_ring(frame.x(point.cost), frame.y(point.tau)))
    names = {draft_label({**row, "step": 0}): colours(row) for row in (point.row for point in points)}
    legend = [*((classes, name) for name, classes in names.items()), ("frontier", "frontier"), ("ring", "chosen")]
    described = (
        "Tokens per pass of the target against the cost of a round, for every checkpoint, K and tree; lines of equal "
        "expected speed-up; below the break-even line speculation is slower than plain decoding."
    )
    drawn = svg.picture("cost-against-tau", described, frame, elements)
    return Chart(drawn, [*legend, ("slower", "slower than plain")])


def _apart(points: Sequence[ConfigPoint], chosen: Record, frame: Frame) -> list[ConfigPoint]:
    """Points whose names do not touch each other, the chosen one among them; the table names the others."""
    named: list[ConfigPoint] = []
    for point in sorted(points, key=lambda point: not _is(point.row, chosen)):
        x, y = frame.x(point.cost), frame.y(point.tau)
        if all(abs(x - frame.x(one.cost)) > 42 or abs(y - frame.y(one.tau)) > 12 for one in named):
            named.append(point)
    return named


def _config_mark(point: ConfigPoint, frame: Frame, colours: Palette, named: bool) -> Markup:
    """Mark of a config: a dot with its interval; `named`: with its K or tree beside it."""
    # The tooltip has all figures of the config.
    row, (x, y) = point.row, (frame.x(point.cost), frame.y(point.tau))
    tip = (
        f"{draft_label(row)}, {config_label(row)}: tau {interval(row['tau'])}, draft "
        f"{milliseconds(row['draft_seconds'])} ms, verify {milliseconds(row['verify_seconds'])} ms, "
        f"expected speed-up {interval(row['speedup'], 'x')}"
    )
    # An unknown end of the interval draws no whisker on its side.
    low, high = (point.tau if row["tau"][end] is None else row["tau"][end] for end in ("low", "high"))
    marks = [svg.line(x, frame.y(low), x, frame.y(high), "whisker thin"), svg.circle(x, y, 4.5, "dot")]
    # The name stands left of the dot where it would leave the frame on the right.
    if named:
        aside, anchor = (-12, "end") if x > frame.right - 60 else (12, "start")
        marks.append(svg.text(x + aside, y + 4, row["tree"] or f"K={row['draft_tokens']}", "mark", anchor))
    return svg.group(marks, tip, colours(row))


def _is(row: Record, chosen: Record) -> bool:
    return all(row[name] == chosen[name] for name in ("draft", "step", "draft_tokens", "tree"))


def _slower(frame: Frame) -> Markup:
    """Region below break-even (tau < 1 + cost), clipped to the frame."""
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
    # A ray's part inside the frame; short pieces in a corner are left out, with their labels.
    for speedup in _SPEEDUPS:
        start = max(x_axis.low, y_axis.low / speedup - 1.0)
        end = min(x_axis.high, y_axis.high / speedup - 1.0)
        if end - start < 0.06 * (x_axis.high - x_axis.low):
            continue
        ray = [(frame.x(x), frame.y(speedup * (1.0 + x))) for x in (start, end)]
        yield svg.polyline(ray, "even" if speedup == 1.0 else "ray")
        (x, y), at_top = ray[1], end < x_axis.high
        yield svg.text(x - 4, y + (13 if at_top else -5), f"{speedup:g}x", "tick ray-label", "end")


# --- a benchmark ---


def bench_panels(rows: Sequence[BenchRow], width: int) -> list[tuple[str, Chart]]:
    """Charts of measured speed-up by batch size, with their titles: of all domains, then of each; a line a method.

    Whiskers are the least and the most of the repeats.
    """
    # 1) One frame for all panels, so that they compare.
    drafted = [row for row in rows if not row.setting.plain and not math.isnan(row.speedup.value)]
    names = list(dict.fromkeys(row.setting.label for row in rows if not row.setting.plain))
    sizes = sorted({row.setting.batch_size for row in rows})
    ends = [end for row in drafted for end in (row.speedup.low, row.speedup.high)]
    x_axis = svg.category_axis([str(size) for size in sizes], "batch size")
    frame = Frame(x_axis, svg.numeric_axis(ends, "speed-up", "x", [0.0, 1.0]), HEIGHT, width)
    # 2) A panel a domain, all domains together first.
    panels = []
    for number, domain in enumerate(sorted({row.domain for row in rows}, key=lambda name: (name != EVERY, name))):
        series = []
        for place, name in enumerate(names):
            points = [
                Point(
                    sizes.index(row.setting.batch_size) + 1 + _aside(place, names),
                    *(row.speedup.value, row.speedup.low, row.speedup.high),
                    f"{name}, batch {row.setting.batch_size}: {bench_speedup(row.speedup)}",
                )
                for row in sorted(drafted, key=lambda row: row.setting.batch_size)
                if (row.domain, row.setting.label) == (domain, name)
            ]
            series.append(Series(name, colour(place), points))
        title = "all domains" if domain == EVERY else domain
        described = f"Speed-up over plain decoding by batch size, {title}."
        chart = line_chart(f"speedup-{number}", described, frame, series, [break_even(frame)])
        panels.append((title, chart))
    return panels


# --- marks that charts share ---


def _point(x: float, estimate: Record, what: str, unit: str = "", percent: bool = False) -> Point:
    value, low, high = (estimate[name] for name in _ENDS)
    shown, digits = estimate, 2
    if percent:
        shown, unit, digits = {end: estimate[end] and 100 * estimate[end] for end in _ENDS}, " %", 0
    return Point(x, value, low, high, f"{what}: {interval(shown, unit, digits)}")


def _line(series: Series, frame: Frame) -> Markup:
    """Marks of a series: a line through the points, whiskers, and dots with tooltips."""
    elements = []
    # Line first, so that dots lie on top of it.
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


def break_even(frame: Frame) -> Markup:
    """Horizontal line at 1, plain decoding's speed."""
    return svg.line(frame.left, frame.y(1), frame.right, frame.y(1), "even")


def _ring(x: float, y: float) -> Markup:
    return svg.circle(x, y, 9, "ring")


def _label_room(labels: Sequence[str], width: int) -> tuple[int, int]:
    """Pixels that labels of bands take: left of the plot and, on a phone, above each band."""
    return (16, 16) if width == svg.PHONE else (24 + int(7.2 * max(map(len, labels))), 0)


def _label_lines(labels: Sequence[str], frame: Frame, each: int) -> list[Markup]:
    """Elements of horizontal bands of `each` pixels: labels, lines between bands, and the x grid."""
    elements = [svg.line(frame.x(tick), svg.TOP, frame.x(tick), frame.bottom, "grid") for tick, _ in frame.x_axis.ticks]
    for place, label in enumerate(labels):
        top = svg.TOP + place * each
        if place:
            elements.append(svg.line(16, top, frame.right, top, "grid"))
        if frame.phone:
            elements.append(svg.text(frame.left + 5, top + 15, label))
        else:
            elements.append(svg.text(frame.left - 12, top + each / 2 + 4, label, "label", "end"))
    return elements


def _aside(place: int, all_of: Sequence[object]) -> float:
    """Offset of the n-th of several series from its category, in categories, so that marks do not overlap."""
    return min(_STAGGER, 0.7 / len(all_of)) * (place - (len(all_of) - 1) / 2)


def _bounds(estimates: Iterable[Record]) -> list[float]:
    return [one[end] for one in estimates for end in _ENDS if one[end] is not None]


def _cut(words: str, most: int) -> str:
    return words if len(words) <= most else words[: most - 1] + "…"
