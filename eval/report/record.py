"""What a report is made of, as plain records: figures of one split, and the times behind the speed-ups.

Figures come from the counts once, when they are scored; a report is drawn again from these records in no time.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from ..counts import concat, groups, values, where
from ..figures import Estimate, acceptance, tau
from ..select import Checkpoint, DomainRow, Plans, Row, Times, at_plan, by_plan, plain_row, serving
from ..settings import ScoreSettings

Record = Mapping[str, Any]


def score_record(
    table: pa.Table,
    costs: Mapping[Checkpoint, Times],
    rows: Sequence[Row],
    settings: ScoreSettings,
    plans: Plans,
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
        "plans": [one.record() for row in rows for one in by_plan(plans, row)],
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
            mine = at_plan(where(part, draft=row.draft, step=row.step), row.plan)
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
