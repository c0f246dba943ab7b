"""The report of a run: records of scores in, one HTML page out. Names of domains come from logs, so everything is
escaped; nothing is fetched.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import Any

import pyarrow as pa
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from ..acceptance import acceptance, tau
from ..counts import concat, groups, values, where
from ..leaderboard import Checkpoint, ConfigRows, DomainRow, Row, Times, at_config, by_config, plain_row, serving
from ..serving_load import finite
from ..settings import ScoreSettings
from ..summary import bucket_label, config_label, decision_summary, draft_label
from ..table import interval, milliseconds, number
from . import charts
from .charts import Palette, Record


def score_record(
    table: pa.Table,
    costs: Mapping[Checkpoint, Times],
    rows: Sequence[Row],
    settings: ScoreSettings,
    configs: ConfigRows,
    domains: Sequence[DomainRow],
) -> dict[str, Any]:
    """All checkpoints on the selection split: the leaderboard, each at every K and tree; the chosen one in parts.

    `configs` and `domains`: of all `rows`, as they were computed for people to see.
    """
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
    """Candidate, champion and prompt lookup on the holdout, whole and in parts (`domains`: of these rows)."""
    return {"rows": [row.record() for row in rows], **_parts(tables, rows, settings, domains)}


def times_record(times: Times) -> dict[str, Any]:
    """Where the round times come from."""
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
    """The rows' drafts by length of the prompt, all domains and sampling settings together, shortest first."""
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
                    "tau": finite(tau(mine, settings.bootstrap)._asdict()),
                    "acceptance": finite(acceptance(mine, settings.bootstrap)._asdict()),
                }


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
    """The whole page of a run."""
    rows, configs = records.scores["rows"], records.scores["plans"]
    chosen = next((row for row in rows if row["chosen"]), None)
    decision = decision_summary(records.scores, records.promotion)
    colours = Palette(rows)
    figures = {
        "positions": charts.positions([row for row in decision.compared if row["alphas"]], colours),
        "domains": charts.domains(decision.domains, colours),
        "contexts": charts.contexts(decision.contexts, colours),
        "frontier": charts.frontier(configs, chosen, colours) if chosen else None,
        "speedups": charts.checkpoints(rows, "speedup", "expected speed-up", colours),
        "taus": charts.checkpoints(rows, "tau", "tau", colours),
        "batches": charts.by_batch_size(rows, colours),
    }
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


def render(template: str, **values: Any) -> str:
    """A page from one of the templates beside this file; whatever text goes into it is escaped."""
    return _environment().get_template(template).render(values)


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


def _sections(records: ReportRecords) -> list[tuple[str, str]]:
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
def _environment() -> Environment:
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
