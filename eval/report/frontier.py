"""Draft cost against tau: where each checkpoint, K and tree stands, and what speed that makes.

A round costs 1 + x plain steps, x being all that speculation adds: the draft, the wider verification, the bookkeeping.
It emits tau tokens, so its speed-up is s = tau / (1 + x): equal speed-ups are straight lines, and break-even is s = 1.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from . import svg
from .charts import Chart, Palette
from .svg import Frame
from .words import interval, milliseconds, name_of, plan_of

Record = Mapping[str, Any]
HEIGHT = 400
_SPEEDUPS = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 10.0)


class Place(NamedTuple):
    """One way of drafting."""

    row: Record
    cost: float
    """What its round takes beyond a plain step, in plain steps."""
    tau: float


def places(plans: Sequence[Record]) -> list[Place]:
    """Where the rows stand whose cost and tau are known."""
    return [
        Place(row, row["tau"]["value"] / row["speedup"]["value"] - 1.0, row["tau"]["value"])
        for row in plans
        if row["tau"]["value"] is not None and row["speedup"]["value"]
    ]


def pareto(found: Sequence[Place]) -> list[Place]:
    """Those that no other beats in both: more tau for no more cost. Cheapest first."""
    best: list[Place] = []
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
    frame = Frame(x_axis, y_axis, HEIGHT)
    elements = [_slower(frame), *_equal_speeds(frame)]
    best = pareto([Place({}, 0.0, 1.0), *found]) if min(costs) >= 0 else pareto(found)
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


def _mark(place: Place, frame: Frame, colours: Palette, named: bool) -> Markup:
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


def _ends(place: Place) -> list[float]:
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
