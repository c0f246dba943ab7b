"""The page: records in, HTML out. Names of domains come from logs, so everything is escaped; nothing is fetched."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from . import charts, words
from .charts import Palette, Record
from .frontier import frontier
from .verdict import Verdict, verdict


@dataclass(frozen=True)
class Link:
    """One step of a lineage: what it is, its name or fingerprint, and what else there is to say."""

    kind: str
    name: str
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class ReportRecords:
    """Everything that a report shows. What is not known yet is None or empty, and has no section."""

    name: str
    """The recipe's."""
    target: str
    made_at: datetime
    scores: Record
    """As `score_record` makes it."""
    promotion: Record | None = None
    """`version`, `decision` and `holdout`, the last as `holdout_record` makes it."""
    mix: Record | None = None
    """The mix's manifest."""
    lineage: Sequence[Link] = ()
    recipe: Record = field(default_factory=dict)
    """With every default, without passwords."""
    commands: Sequence[str] = ()
    """What makes this run again."""
    version: str = ""
    """Of draftforge."""


def report_page(records: ReportRecords) -> str:
    """The whole page."""
    rows = records.scores["rows"]
    chosen = next((row for row in rows if row["chosen"]), None)
    told = verdict(records.scores, records.promotion)
    colours = Palette(rows)
    return _template().render(
        records=records,
        verdict=told,
        rows=rows,
        chosen=chosen,
        confidence=f"{records.scores['confidence']:.0%}",
        times=records.scores["times"],
        figures=_figures(records, told, chosen, colours),
        leaderboard=sorted(rows, key=lambda row: -(row["speedup"]["value"] or 0.0)),
        plans=[] if chosen is None else _plans_of(records.scores["plans"], chosen),
        sections=_sections(records, told),
        heat=heat_map(told.domains, told.row) if told.row else None,
        shares=_shares(records.mix),
        recipe=yaml.safe_dump(dict(records.recipe), sort_keys=False, allow_unicode=True) if records.recipe else "",
        colours=colours,
        joint=charts.joint,
    )


def heat_map(domains: Sequence[Record], row: Record) -> dict[str, Any] | None:
    """tau of one draft, domains down and sampling settings across; `share`: 0 at its least, 1 at its most."""
    mine = [one for one in domains if one["draft"] == row["draft"] and one["tau"]["value"] is not None]
    if not mine:
        return None
    settings = list(dict.fromkeys(one["setting"] for one in mine))
    taus = [one["tau"]["value"] for one in mine]
    low, spread = min(taus), max(taus) - min(taus)
    cells = {
        (one["domain"], one["setting"]): {**one, "share": (one["tau"]["value"] - low) / spread if spread else 0.5}
        for one in mine
    }
    names = list(dict.fromkeys(one["domain"] for one in mine))
    return {"settings": settings, "lines": [(name, [cells.get((name, key)) for key in settings]) for name in names]}


def _figures(
    records: ReportRecords, told: Verdict, chosen: Record | None, colours: Palette
) -> dict[str, charts.Chart | None]:
    rows = records.scores["rows"]
    return {
        "positions": charts.positions([row for row in told.compared if row["alphas"]], colours),
        "domains": charts.domains(told.domains, colours),
        "contexts": charts.contexts(told.contexts, colours),
        "frontier": frontier(records.scores["plans"], chosen, colours) if chosen else None,
        "speedups": charts.checkpoints(rows, "speedup", "expected speed-up", colours),
        "taus": charts.checkpoints(rows, "tau", "tau", colours),
        "batches": charts.by_batch_size(rows, colours),
    }


def _plans_of(plans: Iterable[Record], chosen: Record) -> list[Record]:
    return [one for one in plans if (one["draft"], one["step"]) == (chosen["draft"], chosen["step"])]


def _sections(records: ReportRecords, told: Verdict) -> list[tuple[str, str]]:
    """Anchors and headings, in order."""
    return [
        ("positions", "Acceptance by position"),
        ("domains", "By domain and temperature"),
        ("contexts", "By context length"),
        ("frontier", "Draft cost against tau"),
        ("checkpoints", "Checkpoints"),
        *([("mix", "Mix")] if records.mix else []),
        *([("lineage", "Lineage")] if records.lineage else []),
        ("hardware", "Hardware and times"),
        ("again", "Run it again"),
    ]


def _shares(mix: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Conversations of each domain in each split, and the domain's share of that split."""
    if mix is None:
        return []
    counts: dict[str, dict[str, int]] = mix["conversations"]
    totals = {split: sum(by_domain.values()) for split, by_domain in counts.items()}
    names = sorted({name for by_domain in counts.values() for name in by_domain})
    return [
        {
            "domain": name,
            "splits": [
                (split, counts[split].get(name, 0), counts[split].get(name, 0) / (totals[split] or 1))
                for split in counts
            ],
        }
        for name in names
    ]


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader(__package__, "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "interval": words.interval,
        "number": words.number,
        "ms": words.milliseconds,
        "plan": words.plan_of,
        "named": words.name_of,
        "bucket": words.bucket,
        "when": lambda moment: f"{moment:%Y-%m-%d %H:%M} UTC",
    }
    return environment.get_template("page.html.jinja")
