"""HTML pages of a run and of a benchmark, from their records. Names of domains come from logs, so everything is
escaped; the pages fetch nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache, partial
from typing import Any

import pyarrow as pa
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from ..acceptance import acceptance, tau
from ..bench.run import EVERY, Report
from ..bench.table import speed_cells, waiting_cells
from ..counts import bucket_label, concat, groups, values, where
from ..leaderboard import Checkpoint, ConfigRows, DomainRow, Row, Times, at_config, by_config, plain_row, serving
from ..settings import ScoreSettings
from ..summary import config_label, decision_summary, draft_label
from ..table import NUMERIC, interval, milliseconds, number
from . import charts, svg
from .charts import Figure, Palette, Record, bench_panels, figure


def score_record(
    table: pa.Table,
    costs: Mapping[Checkpoint, Times],
    rows: Sequence[Row],
    settings: ScoreSettings,
    configs: ConfigRows,
    domains: Sequence[DomainRow],
) -> dict[str, Any]:
    """Score record of the selection split: the leaderboard, every checkpoint at every K and tree, and round times.

    Domains and contexts are of the chosen checkpoint and the baselines only. `configs` and `domains`: the results of
    `config_rows` and `domain_rows` for all `rows`.
    """
    # Times of the chosen checkpoint, else of the first; parts of it and of the baselines beside it.
    chosen = next((row for row in rows if row.chosen), None)
    times = costs[(chosen or rows[0]).draft, (chosen or rows[0]).step]
    compared = [row for row in rows if row.baseline or row is chosen]
    names = {(row.draft, row.step) for row in compared}
    return {
        "rows": [plain_row(times).record(), *(row.record() for row in rows)],
        "plans": [one.record() for row in rows for one in by_config(configs, row)],
        **_parts([table], compared, settings, [one for one in domains if (one.draft, one.step) in names]),
        "times": times_record(times),
    }


def holdout_record(
    tables: Sequence[pa.Table], rows: Sequence[Row], settings: ScoreSettings, domains: Sequence[DomainRow]
) -> dict[str, Any]:
    """Holdout record: candidate, champion and prompt lookup, whole and in parts. `domains`: domain rows of `rows`."""
    return {"rows": [row.record() for row in rows], **_parts(tables, rows, settings, domains)}


def times_record(times: Times) -> dict[str, Any]:
    """Record of where the round times come from: hardware, software, precision and model sizes."""
    key = times.key
    return {
        "hardware": key.hardware,
        "draft_hardware": key.draft.get("hardware"),
        "software": key.software,
        "dtype": key.dtype,
        "plain_ms": times.plain_seconds * 1e3,
        "said": times.description,
        "target_parameters": key.target.get("parameters"),
        "draft_parameters": key.draft.get("parameters"),
    }


def _parts(
    tables: Sequence[pa.Table], rows: Sequence[Row], settings: ScoreSettings, domains: Sequence[DomainRow]
) -> dict[str, Any]:
    return {
        "domains": [row.record() for row in domains],
        "contexts": list(_contexts(serving(concat(tables), settings), rows, settings)),
        "confidence": settings.confidence,
    }


def _contexts(table: pa.Table, rows: Sequence[Row], settings: ScoreSettings) -> Iterator[dict[str, Any]]:
    """Records of the rows' drafts by prompt length, shortest first, all domains and sampling settings together."""
    # A draft without answers of this length has no record.
    for (bucket,), part in groups(table, "context_bucket"):
        for row in rows:
            mine = at_config(where(part, draft=row.draft, step=row.step), row.config)
            if len(mine):
                yield {
                    "context_bucket": bucket,
                    "draft": row.draft,
                    "step": row.step,
                    "baseline": row.baseline,
                    "conversations": len(values(mine, "conversation")),
                    "rounds": sum(mine["rounds"].to_pylist()),
                    "tau": tau(mine, settings.confidence).record(),
                    "acceptance": acceptance(mine, settings.confidence).record(),
                }


@dataclass(frozen=True)
class Link:
    """One step of a lineage: its kind, its name or fingerprint, and notes."""

    kind: str
    name: str
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class ReportRecords:
    """Records behind a report. A part that is not known yet is None or empty, and has no section."""

    name: str
    """The recipe's name."""
    target: str
    made_at: datetime
    scores: Record
    """Score record, as `score_record` makes it."""
    promotion: Record | None = None
    """Gate record with `version`, `decision` and `holdout` (as `holdout_record` makes it); None: no gate yet."""
    mix: Record | None = None
    """Manifest of the mix; None: not known."""
    lineage: Sequence[Link] = ()
    recipe: Record = field(default_factory=dict)
    """The recipe with every default, without passwords."""
    commands: Sequence[str] = ()
    """Shell commands that repeat this run."""
    version: str = ""
    """Version of draftforge."""


def report_page(records: ReportRecords) -> str:
    """HTML page of a run, with all charts and tables."""
    # 1) What was decided, and one colour a draft for the whole page.
    rows, configs = records.scores["rows"], records.scores["plans"]
    chosen = next((row for row in rows if row["chosen"]), None)
    decision = decision_summary(records.scores, records.promotion)
    colours = Palette(rows)
    # 2) Charts; None where a chart would be empty.
    known = [row for row in decision.compared if row["alphas"]]
    speedups = partial(charts.checkpoints, rows, "speedup", "expected speed-up", colours)
    figures = {
        "positions": figure(partial(charts.positions, known, colours)),
        "domains": figure(partial(charts.domains, decision.domains, colours)),
        "contexts": figure(partial(charts.contexts, decision.contexts, colours)),
        "frontier": figure(partial(charts.frontier, configs, chosen, colours)) if chosen else None,
        "speedups": figure(speedups, charts.HALF),
        "taus": figure(partial(charts.checkpoints, rows, "tau", "tau", colours), charts.HALF),
        "batches": figure(partial(charts.by_batch_size, rows, colours)),
    }
    # 3) Everything that the template shows.
    return render(
        "page.html.jinja",
        records=records,
        version=records.version,
        decision=decision,
        rows=rows,
        confidence=f"{records.scores['confidence']:.0%}",
        times=records.scores["times"],
        figures=figures,
        leaderboard=sorted(rows, key=lambda row: -(row["speedup"]["value"] or 0.0)),
        configs=[one for one in configs if chosen and (one["draft"], one["step"]) == (chosen["draft"], chosen["step"])],
        sections=_sections(records),
        heat=heat_map(decision.domains, decision.row) if decision.row else None,
        shares=_shares(records.mix),
        recipe=yaml.safe_dump(dict(records.recipe), sort_keys=False, allow_unicode=True) if records.recipe else "",
        colours=colours,
        joint=charts.joint_acceptance,
    )


def bench_page(report: Report, made_at: datetime) -> str:
    """HTML page of a benchmark: its conclusions, a chart of all domains and of each, and both tables."""
    wide, phone = (bench_panels(report.rows, width) for width in (charts.HALF, svg.PHONE))
    whole = [row for row in report.rows if row.domain == EVERY]
    return render(
        "bench.html.jinja",
        report=report,
        made_at=made_at,
        version=report.surroundings.draftforge,
        sections=[("speed-ups", "Speed-up by batch size"), ("speed", "Speed"), ("waiting", "Waiting and memory")],
        panels=[(title, Figure(chart, small)) for (title, chart), (_, small) in zip(wide, phone, strict=True)],
        speed=_method_first(speed_cells(whole, report.failures)),
        domains=_method_first(speed_cells([row for row in report.rows if row.domain != EVERY], [])),
        waiting=_method_first(waiting_cells(whole)),
        numeric=NUMERIC,
    )


def _method_first(cells: Sequence[Sequence[str]]) -> list[list[str]]:
    """Cells with the method in the first column, which heads the rows, and the batch size behind it."""
    return [[method, batch, *rest] for batch, method, *rest in cells]


def render(template: str, **values: Any) -> str:
    """Page from one of the templates beside this file; all text that goes into it is escaped."""
    return _environment().get_template(template).render(values)


def heat_map(domains: Sequence[Record], row: Record) -> dict[str, Any] | None:
    """Heat map of one draft's tau, domains down and sampling settings across; None where no tau is known.

    `share` of a cell sets its colour: 0 at the least tau, 1 at the largest.
    """
    # One draft, and cells that are known only.
    mine = [one for one in domains if one["draft"] == row["draft"] and one["tau"]["value"] is not None]
    if not mine:
        return None
    settings = list(dict.fromkeys(one["setting"] for one in mine))
    taus = [one["tau"]["value"] for one in mine]
    # Colours stretch over this draft's own range.
    low, spread = min(taus), max(taus) - min(taus)
    cells = {
        (one["domain"], one["setting"]): {**one, "share": (one["tau"]["value"] - low) / spread if spread else 0.5}
        for one in mine
    }
    names = list(dict.fromkeys(one["domain"] for one in mine))
    return {"settings": settings, "lines": [(name, [cells.get((name, key)) for key in settings]) for name in names]}


def _sections(records: ReportRecords) -> list[tuple[str, str]]:
    """Anchors and headings of the page's sections, in order."""
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
    # A domain that is missing in a split counts 0 there; an empty split has no shares.
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
def _environment() -> Environment:
    # Strict: a name that a template misspells is an error, not an empty place.
    environment = Environment(
        loader=PackageLoader(__package__, "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "interval": interval,
        "number": number,
        "ms": milliseconds,
        "config": config_label,
        "named": draft_label,
        "bucket": bucket_label,
        "when": lambda moment: f"{moment:%Y-%m-%d %H:%M} UTC",
    }
    return environment
