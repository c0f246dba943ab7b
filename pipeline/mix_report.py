"""`draftforge inspect-mix`: what needs attention in a mix, and the mix beside its log, as tables or one page.

Shares and lengths of the log, the mix and the holdout; distances between them; copies, redactions, contamination, and
requests in flight.
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .. import __version__, storage
from ..data.conversation import SPLITS
from ..data.stratify import DAY, NONE
from ..data.traffic_profile import DISTINCT, JOINT, LOG, MIX, QUANTILES, SIDES, Profile, Shares, profile
from ..errors import DraftforgeError, InputError
from ..eval.report import svg
from ..eval.report.charts import HEIGHT, Figure, bar_chart, curves
from ..eval.report.page import render
from ..eval.table import UNKNOWN, show_cells
from ..progress import Console, say
from ..recipe import Recipe
from ..specdec.target_settings import TargetSettings
from ..specdec.targets import context_length
from .mix_headline import NOTHING, Headline, headline
from .shown_prompts import sample_prompts
from .stages import Stages, mix_stage
from .workspace import Workspace

_MOST_BARS, _CURVE_POINTS = 14, 200
_DAY_WIDTH, _TICK_WIDTH = 85, 66  # pixels of a label below the axis
_COLOURS = {LOG: "s-base", MIX: "s0", SPLITS[2]: "s1"}
_SHARES_CAPTION = "Shares of the log's most frequent labels."
_LENGTHS_CAPTION = "Share of the records that are at most so long."


Cells = list[list[str]]


class Table(NamedTuple):
    """Table as text: a title, cells (the header first), and a note below."""

    title: str
    cells: Cells
    note: str

    @property
    def line(self) -> str:
        """Its only row as a line, each cell behind the name of its column; empty: it has more rows."""
        if len(self.cells) != 2:
            return ""
        return ", ".join(f"{name} {cell}" for name, cell in zip(*self.cells) if cell)


def check_out(out: Path) -> None:
    """Raise InputError unless `out` is a page to write."""
    if out.suffix != ".html":
        raise InputError(f"--out {out}: must end in .html")
    storage.require_file_place(out, "--out")


def write_page(out: Path, name: str, head: Headline, tables: Sequence[Table], found: Profile) -> None:
    """Write one HTML file in the style of a run's report: the headline, then a section for each table, its chart
    above it."""
    # One section for each table; its anchor is made of the title.
    charts, small = mix_charts(found, svg.WIDTH), mix_charts(found, svg.PHONE)
    by_section = {table.title.lower().replace(" ", "-"): table for table in tables}
    # "By KEY" tables have the chart of that key; most other tables have none.
    drawn = {
        anchor: Figure(charts[key], small[key]) if (key := anchor.removeprefix("by-")) in charts else None
        for anchor in by_section
    }
    captions = {anchor: _LENGTHS_CAPTION if anchor == "lengths" else _SHARES_CAPTION for anchor in by_section}
    page = render(
        "mix.html.jinja",
        name=name,
        version=__version__,
        sections=[(anchor, table.title) for anchor, table in by_section.items()],
        headline=head,
        nothing=NOTHING,
        charts=drawn,
        captions=captions,
        tables=by_section,
    )
    storage.write_bytes(out, page.encode())


def mix_charts(found: Profile, width: int) -> dict[str, svg.Chart]:
    """Charts by name: shares of each label, shares of days, lengths."""
    charts = {}
    for one in found.shares:
        if one.key != JOINT and len(one.labels) > 1:
            charts[one.key] = (_day_chart if one.key == DAY else _share_chart)(one, width)
    charts["lengths"] = _length_chart(found, width)
    return charts


def _sides(one: Shares, shown: Sequence[int]) -> dict[str, tuple[str, list[float]]]:
    """Colour and shares of the labels with indices `shown`, by side: log, mix and holdout."""
    sides = {}
    # A side without records has shares of 0.
    for side, colour in _COLOURS.items():
        shares = one.counts[side] / max(1, one.counts[side].sum())
        sides[side] = (colour, [float(shares[i]) for i in shown])
    return sides


def _share_chart(one: Shares, width: int) -> svg.Chart:
    """Bar chart of the shares of the log's most frequent labels, the sides beside each other."""
    # The most frequent labels of the log, drawn in the order of `labels`.
    sizes = one.counts[LOG]
    shown = sorted(sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))[:_MOST_BARS])
    labels = [one.labels[i] for i in shown]
    rarer = f"; {len(sizes) - len(shown)} rarer labels are not shown" if len(sizes) > len(shown) else ""
    described = f"Shares of each {one.key} in the log, the mix and the holdout{rarer}."
    return bar_chart(f"shares-{one.key}", described, labels, _sides(one, shown), width)


def _day_chart(one: Shares, width: int) -> svg.Chart:
    """Line chart of each day's share, one line for each side."""
    sides = _sides(one, range(len(one.labels)))
    # The axis ends 6 % above the highest share, or at 1 where all shares are 0.
    highest = max(share for _, shares in sides.values() for share in shares)
    x_axis = svg.category_axis(one.labels, "day", (width - svg.LEFT - svg.RIGHT) // _DAY_WIDTH)
    frame = svg.Frame(x_axis, svg.percent_axis("share", 1.06 * highest or 1.0), HEIGHT, width)
    lines = {
        side: (colour, [(place + 1.0, share) for place, share in enumerate(shares)])
        for side, (colour, shares) in sides.items()
    }
    return curves("days", "Share of each day in the log, the mix and the holdout.", frame, lines)


def _length_chart(found: Profile, width: int) -> svg.Chart:
    """Cumulative distribution of prompt and answer lengths in tokens, on a log2 axis; answers are dashed."""
    # 1) Lengths as powers of 2, of the sides that have any; an empty text counts as one token.
    known = {
        (name, side): np.log2(np.maximum(values, 1))
        for name, sides in found.tokens.items()
        for side, values in sides.items()
        if len(values)
    }
    # 2) Axis: whole powers of 2, at most as many ticks as have room.
    highest = math.ceil(max((values.max() for values in known.values()), default=1.0)) or 1
    step = math.ceil(highest * _TICK_WIDTH / width)
    ticks = [(float(power), f"{2**power:,}") for power in range(0, highest + 1, step)]
    frame = svg.Frame(svg.Axis(0, highest, ticks, "tokens"), svg.percent_axis("at most so long"), HEIGHT, width)
    # 3) Curves, thinned to a few hundred points.
    lines = {}
    for (name, side), values in known.items():
        shares = np.linspace(0, 1, min(len(values), _CURVE_POINTS) + 1)[1:]
        points = [(float(x), float(y)) for x, y in zip(np.quantile(values, shares, method="inverted_cdf"), shares)]
        dashed = " dash1" if name == "answer" else ""
        lines[f"{name}, {side} ({len(values):,})"] = (_COLOURS[side] + dashed, points)
    return curves("lengths", "Cumulative shares of prompt and answer lengths in tokens.", frame, lines)


_MOST_ROWS = 12
_COMPARED = 200  # turns whose prompts are compared with the log
_TURNS = {
    "holdout_turns": "turns in the holdout",
    "asked_in_train": "of them asked in this mix's train",
    "asked_in_ancestors_train": "of them asked in an ancestor's train",
}
_NOT_TIMED = {"untimed": "without times", "zero_length": "of no length", "skewed": "of two clocks"}


def inspect_mix(recipe: Recipe, out: Path | None, as_json: bool = False) -> None:
    """Show the recipe's mix, made where it is missing, as text or one JSON object; write a page (`.html`) to `out`."""
    if out is not None:
        check_out(out)
    space = Workspace(recipe)
    with space.alone():
        folder = mix_stage(Stages(space)).folder
        if space.first_rank:
            _show_mix(recipe, folder, out, as_json)


def _show_mix(recipe: Recipe, folder: Path, out: Path | None, as_json: bool) -> None:
    """Print headline and tables of a mix folder, and write its page to `out`."""
    found, context = profile(folder), _known_context(recipe.target)
    head = headline(found, recipe, context, sample_prompts(recipe, folder, _COMPARED))
    tables = tables_of(found, context, recipe.retrain.old_share)
    if as_json:
        notices = [notice._asdict() for notice in head.notices]
        shown = {"needs_attention": notices, "note": head.note, "tables": [table._asdict() for table in tables]}
        print(json.dumps(shown, ensure_ascii=False))
    else:
        _print(head, tables)
    if out is not None:
        write_page(out, recipe.name, head, tables, found)
        say(f"{out}: written")


def _print(head: Headline, tables: Sequence[Table]) -> None:
    """Print the headline, then each table; one of a single row is a line."""
    console = Console(highlight=False)
    console.print("Needs attention" if head.notices else NOTHING, style="bold yellow" if head.notices else "bold green")
    for about, text in head.notices:
        console.print(f"- {about}: {text}", markup=False, soft_wrap=True)
    console.print(f"({head.note})\n", style="dim", markup=False, soft_wrap=True)
    for table in tables:
        title, cells, note = table
        if table.line:
            console.print(f"{title}: {table.line}\n{note}", markup=False, soft_wrap=True)
        else:
            show_cells(title, cells, [""] * (len(cells) - 1), note, console, numeric=cells[0][1:])


def _known_context(settings: TargetSettings) -> int | None:
    """Context length of a target on this disk; None for one that is elsewhere, or whose config cannot be read."""
    if not storage.expanded(settings.model).exists():
        return None
    try:
        return context_length(settings)
    except DraftforgeError:
        return None


def tables_of(found: Profile, context: int | None = None, old_share: float = 0.0) -> list[Table]:
    """Tables of everything in a profile.

    `context`: positions of the target. `old_share`: share of old conversations in the train split of a retraining.
    """
    shares = [one for one in found.shares if one.key != JOINT]
    same = {one.key: one.labels[0] for one in shares if len(one.labels) == 1}
    return [
        _fates(found, context, old_share),
        *(_shares(one, found) for one in shares if len(one.labels) > 1),
        *([Table("Of every record", [list(same), list(same.values())], "the same in the whole log")] if same else []),
        _distances(found.shares),
        _lengths(found),
        *_in_flight(found),
        *_redacted(found),
        _contamination(found),
        *_clusters(found),
    ]


def _fates(found: Profile, context: int | None, old_share: float) -> Table:
    """Table of what became of every record that was read: its reason for being left out, or its split."""
    # 1) Everything read is left out for one reason, or is a conversation of one split.
    manifest = found.manifest
    rows = [["read", str(manifest["read"]), ""]]
    rows += [[f"left out: {reason}", str(count), ""] for reason, count in manifest["left_out"].items()]
    rows += [[f"mix: {split}", str(found.sizes[split]), str(manifest["turns"][split])] for split in SPLITS]
    unfollowed = Counter[str]()
    for source in manifest["sources"]:
        unfollowed.update(source["unfollowed"])
    rows += [[f"of the read, {name} shaped the answer; not followed", str(unfollowed[name]), ""] for name in unfollowed]
    # 2) What the target cannot answer, what the tables below compare, and how near-copies were grouped.
    if context is not None:
        long = int((found.tokens["prompt"][MIX] >= context).sum())
        rows.append([f"of the mix, prompts of {context} tokens or more", str(long), ""])
    clusters = ", ".join(f"{count} in {split}" for split, count in manifest["clusters"].items())
    note = f"the log, as compared below: {found.sizes[LOG]} records; clusters of near ones: {clusters}"
    if manifest["unanswered"]:
        note += f"\nwithout a turn that is asked (mix.may_be_unanswered): {', '.join(manifest['unanswered'])}"
    if clocks := manifest["odd_clocks"]["some"]:
        count = manifest["odd_clocks"]["count"]
        note += f"\nof the log, with a time far from all others, taken for unknown: {count} ({', '.join(clocks)})"
    if old_share:
        note += (
            f"\nretrain.old_share {old_share:g}: a retraining adds conversations of the champion's mix until they are "
            "this share of train; they are not counted here"
        )
    return Table("What became of the log", [["records", "count", "turns"], *rows], note)


def _shares(one: Shares, found: Profile) -> Table:
    """Table of one label's shares on every side, rare labels in one row; system prompts also show their length."""
    # 1) The log's most frequent labels, in the order of `labels`; system prompts by frequency.
    sizes = one.counts[LOG]
    order = sorted(range(len(one.labels)), key=lambda i: (-sizes[i], i))
    shown = sorted(order[:_MOST_ROWS]) if one.key != "system" else order[:_MOST_ROWS]
    # 2) A row each, then one for all others.
    characters = found.manifest["system_characters"]
    extra = ["characters"] if one.key == "system" else []
    cells = [[one.key, *extra, "in the log", *SIDES]]
    for i in shown:
        length = [str(characters.get(one.labels[i], 0)) if one.labels[i] != NONE else "-"] if extra else []
        percents = [_share(one.counts[side][i], one.counts[side].sum()) for side in SIDES]
        cells.append([one.labels[i], *length, str(sizes[i]), *percents])
    rest = order[_MOST_ROWS:]
    if rest:
        percents = [_share(one.counts[side][rest].sum(), one.counts[side].sum()) for side in SIDES]
        cells.append([f"{len(rest)} others", *["" for _ in extra], str(sizes[rest].sum()), *percents])
    return Table(f"By {one.key}", cells, f"{DISTINCT}: the log without copies")


def _share(count: int, total: int) -> str:
    return f"{count / total:.1%}" if total else UNKNOWN


def _distances(shares: Sequence[Shares]) -> Table:
    """Table of total variation distances between sides, by label, with the chance level and a p-value."""
    cells = [["label", *(f"{d.of} | {d.against}" for d in shares[0].distances)]]
    # One row for each label; all labels compare the same pairs of sides.
    for one in shares:
        cells.append([one.key, *(_distance(d.variation, d.by_chance, d.p) for d in one.distances)])
    note = (
        "total variation distance (the part that would have to have another label), in brackets what a random sample "
        "of that size would have on average; p: chi-square test, told below 0.01"
    )
    return Table("Distances between shares", cells, note)


def _distance(value: float, by_chance: float, p: float) -> str:
    """Cell of a distance: its value, in brackets the chance level and, below 0.01, p."""
    if math.isnan(value):
        return UNKNOWN
    told = f", p {p:.0e}" if p < 0.01 else ""
    return f"{value:.3f} ({by_chance:.3f}{told})"


def _lengths(found: Profile) -> Table:
    """Table of quantiles of prompt and answer lengths in tokens, by side."""
    cells = [["tokens", *(f"p{q * 100:.0f}" for q in QUANTILES)]]
    for name, by_side in found.lengths.items():
        for side in (LOG, MIX, *SPLITS):
            values = by_side[side]
            cells.append([f"{name}, {side}", *(UNKNOWN if math.isnan(value) else f"{value:,.0f}" for value in values)])
    note = f"counted by the log for {found.counted:.0%} of its records, else estimated: four characters a token"
    return Table("Lengths", cells, note)


def _in_flight(found: Profile) -> list[Table]:
    """Table of concurrent requests by replica, and the `score.load` to state them; none where logs have no times."""
    told = found.manifest["in_flight"]
    if told is None:
        return []
    # One row for each replica, then one for all of them together.
    cells = [["replica", "p50", "p95", "most", "mean", "busy seconds"]]
    for name, level in [*told["replicas"].items(), ("all", told["all"])]:
        numbers = [str(level["p50"]), str(level["p95"]), str(level["most"]), f"{level['mean']:.1f}"]
        cells.append([name, *numbers, f"{level['busy_seconds']:,.0f}"])
    # What was not counted, by the reason; then the load as YAML, ready for a recipe.
    left = ", ".join(f"{told[name]} {words}" for name, words in _NOT_TIMED.items() if told[name])
    note = f"while any is, over {told['requests']} requests" + (f"; not counted: {left}" if left else "")
    return [Table("Requests in flight", cells, f"{note}\nto score drafts at this load:\n{told['load'].rstrip()}")]


def _redacted(found: Profile) -> list[Table]:
    """Table of redacted personal data and secrets by kind; none where nothing was redacted."""
    kinds: dict[str, int] = found.manifest["redacted"]
    cells = [["kind", "replaced"], *([kind, str(count)] for kind, count in kinds.items() if count)]
    none = ", ".join(kind for kind, count in kinds.items() if not count)
    note = "in all that was read, copies included" + (f"; not found: {none}" if none else "")
    return [Table("Personal data and secrets", cells, note)] if any(kinds.values()) else []


def _contamination(found: Profile) -> Table:
    """Table of contamination: holdout clusters and turns that are near, or asked in, a train or evaluation set."""
    told = found.manifest["contamination"]
    # Clusters first, then single turns; mixes of earlier versions lack some counts.
    rows = [
        ["clusters in the holdout", str(told["holdout_clusters"])],
        ["of them near this mix's train", str(told["near_train"])],
        ["of them near an ancestor's train", str(told["near_ancestors_train"])],
        *([f"of them near {name}", str(count)] for name, count in told["near_evaluation_sets"].items()),
        *([f"conversations near {name}", str(count)] for name, count in told["near_conversations"].items()),
        *([words, str(told[name])] for name, words in _TURNS.items() if name in told),
        *(
            [f"turns of {split} that count elsewhere", str(count)]
            for split, count in told.get("turns_asked_elsewhere", {}).items()
        ),
    ]
    return Table("The holdout", [["what", "count"], *rows], "what is near a train, or asked in one, must be 0")


def _clusters(found: Profile) -> list[Table]:
    """Table of domains found by clustering, with their typical words; none where domains come from the logs."""
    told = found.manifest["domain_clusters"]
    if told is None:
        return []
    cells = [["domain", "words"], *([name, " ".join(words)] for name, words in told["terms"].items())]
    agreement = told["agreement_of_halves"]
    note = (
        "names of an ancestor's" if agreement is None else f"two halves of the log agree by {agreement:.2f} (1: fully)"
    )
    return [Table("Domains by clusters", cells, note)]
