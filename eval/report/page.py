"""The page: records in, HTML out. Names of domains come from logs, so everything is escaped; nothing is fetched."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from ..counts import concat, groups, values, where
from ..figures import Estimate, acceptance, tau
from ..leaderboard import Checkpoint, ConfigRows, DomainRow, Row, Times, at_config, by_config, plain_row, serving
from ..settings import ScoreSettings
from . import charts
from .charts import Palette, Record, frontier, interval, joined, name_of, number, plan_of


def score_record(
    table: pa.Table,
    costs: Mapping[Checkpoint, Times],
    rows: Sequence[Row],
    settings: ScoreSettings,
    plans: ConfigRows,
    domains: Sequence[DomainRow],
) -> dict[str, Any]:
    """All checkpoints on the selection split: the leaderboard, each at every K and tree; the chosen one in parts.

    `plans` and `domains`: of all `rows`, as they were computed for people to see.
    """
    chosen = next((row for row in rows if row.chosen), None)
    times = costs[(chosen or rows[0]).draft, (chosen or rows[0]).step]
    compared = [row for row in rows if row.baseline or row is chosen]
    names = {(row.draft, row.step) for row in compared}
    return {
        "rows": [plain_row(times).record(), *(row.record() for row in rows)],
        "plans": [one.record() for row in rows for one in by_config(plans, row)],
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
        "said": times.said,
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
                    "tau": _estimate(tau(mine, settings.bootstrap)),
                    "acceptance": _estimate(acceptance(mine, settings.bootstrap)),
                }


def _estimate(estimate: Estimate) -> dict[str, Any]:
    """JSON-able: an unknown number is null."""
    return {
        name: None if isinstance(value, float) and math.isnan(value) else value
        for name, value in estimate._asdict().items()
    }


Kind = Literal["promoted", "refused", "scored", "nothing"]


class Verdict(NamedTuple):
    """The head of the page."""

    kind: Kind
    title: str
    paragraph: str
    reasons: Sequence[str]
    """The gate's own words, where it decided."""
    split: str
    """Where the figures below come from: the holdout once a gate has decided, else the selection split."""
    row: Record | None
    """The draft that it is about."""
    compared: Sequence[Record]
    """That draft first, then what it is compared with, baselines last."""
    domains: Sequence[Record]
    contexts: Sequence[Record]


def verdict(scores: Record, promotion: Record | None) -> Verdict:
    """From the score alone, or from the gate's decision where there is one."""
    chosen = next((row for row in scores["rows"] if row["chosen"]), None)
    if chosen is None:
        why = "No checkpoint has a known speed-up: the scored split is too small. Give the mix more conversations."
        return Verdict("nothing", "Nothing to choose", why, [], "selection", None, [], [], [])
    if promotion is None or not promotion["holdout"]["rows"]:
        return _scored(scores, chosen)
    decision, holdout = promotion["decision"], promotion["holdout"]
    rows = holdout["rows"]
    candidate = next(row for row in rows if row["draft"] == "candidate")
    told = [_worth(candidate, chosen, "On the holdout, which no draft was trained or picked on,"), _against(rows)]
    kind: Kind = "promoted" if decision["promote"] else "refused"
    title = f"{promotion['version']} is the champion" if decision["promote"] else f"{promotion['version']} was refused"
    return Verdict(
        kind,
        title,
        " ".join(part for part in told if part),
        decision["reasons"],
        "holdout",
        candidate,
        _candidate_first(rows),
        _candidate_first(holdout["domains"], "domain", "setting"),
        _candidate_first(holdout["contexts"], "context_bucket"),
    )


def _scored(scores: Record, chosen: Record) -> Verdict:
    compared = [chosen, *(row for row in scores["rows"] if row["baseline"] and row["alphas"])]
    told = _worth(chosen, chosen, "On the selection split")
    return Verdict(
        "scored",
        f"{name_of(chosen)} has the best expected speed-up",
        f"{told} No gate has judged it on the holdout yet.",
        [],
        "selection",
        chosen,
        compared,
        _candidate_first(scores["domains"], "domain", "setting"),
        _candidate_first(scores["contexts"], "context_bucket"),
    )


def _worth(row: Record, chosen: Record, where: str) -> str:
    """The draft's tau and speed in a sentence, and whether it pays."""
    gained = row["speedup"]
    tau, even = row["tau"]["value"], row["break_even_tau"]
    told = (
        f"{where} {name_of(chosen)} at {plan_of(row)} emits {interval(row['tau'])} tokens per pass of the target; "
        f"measured round times make that {interval(gained, 'x')} of plain decoding's speed."
    )
    if even is None or tau is None:
        return told
    if gained["low"] is not None and gained["low"] > 1:
        return f"{told} It pays: break-even is at tau {number(even)}, below the whole interval."
    if gained["high"] is not None and gained["high"] < 1:
        return f"{told} It does not pay on this machine: break-even is at tau {number(even)}, above the whole interval."
    return f"{told} Break-even is at tau {number(even)}, inside the interval: whether it pays is not settled."


def _against(rows: Sequence[Record]) -> str:
    """What stood beside it."""
    others = [row for row in rows if row["draft"] != "candidate" and row["speedup"]["value"] is not None]
    beside = [f"{row['draft']} has tau {interval(row['tau'])} and {interval(row['speedup'], 'x')}" for row in others]
    return f"Beside it, {joined(beside)}." if beside else ""


def _candidate_first(rows: Sequence[Record], *columns: str) -> list[Record]:
    """Sorted by the columns; the candidate before the champion before baselines."""

    def place(row: Record) -> tuple[Any, ...]:
        return (*(row[name] for name in columns), row["baseline"], row["draft"] != "candidate")

    return sorted(rows, key=place)


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
        "interval": charts.interval,
        "number": charts.number,
        "ms": charts.milliseconds,
        "plan": charts.plan_of,
        "named": charts.name_of,
        "bucket": charts.bucket,
        "when": lambda moment: f"{moment:%Y-%m-%d %H:%M} UTC",
    }
    return environment.get_template("page.html.jinja")
