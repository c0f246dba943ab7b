"""Records of a run that never was: drawn counts, so that a report has every section and a known number in each."""

from copy import deepcopy
from datetime import UTC, datetime
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
from loads import batch_one_table

from draftforge.eval.cost_table import CostKey, CostTable
from draftforge.eval.counts import CountRow, concat, context_bucket, to_table
from draftforge.eval.leaderboard import Checkpoint, Row, config_rows, domain_rows, leaderboard
from draftforge.eval.report.page import Link, ReportRecords, holdout_record, score_record
from draftforge.eval.settings import ScoreSettings
from draftforge.specdec.replay.expected_rounds import RoundCounts
from draftforge.specdec.sampling_settings import SamplingSettings

DEPTHS = (1, 2, 4)
SETTINGS = ScoreSettings(sampling=[SamplingSettings(), SamplingSettings(temperature=0.8)], draft_tokens=list(DEPTHS))
DOMAINS = {"support": 0.12, "code": 0.05, "math": 0.0, "writing": -0.1}  # added to what a draft accepts there
DRAFTS: dict[Checkpoint, float] = {
    ("lookup", 0): 0.22,
    ("small", 40): 0.38,
    ("eagle3", 120): 0.52,
    ("eagle3", 240): 0.62,
    ("eagle3", 360): 0.64,
}
DRAFT_MS = {"lookup": 0.1, "small": 5.0, "eagle3": 2.1}


def drawn_counts(
    draft: str, step: int, alpha: float, split: str = "selection", seed: int = 0, domains: dict[str, float] = DOMAINS
) -> pa.Table:
    """Conversations whose rounds accept each position with about `alpha`; every fifth prompt is long."""
    rng = np.random.default_rng([seed, step, *draft.encode()])
    rows = []
    for domain, plus in domains.items():
        for number in range(14):
            for setting in SETTINGS.sampling:
                own = float(np.clip(alpha + plus + rng.normal(0, 0.07) - 0.08 * (not setting.greedy), 0.02, 0.97))
                for K in DEPTHS:
                    rows.append(_row(draft, step, split, domain, number, setting, K, own, rng))
    return to_table(rows)


def _row(
    draft: str,
    step: int,
    split: str,
    domain: str,
    number: int,
    setting: SamplingSettings,
    K: int,
    alpha: float,
    rng: np.random.Generator,
) -> CountRow:
    alphas = np.clip(alpha - 0.04 * np.arange(K), 0.01, 0.98)
    accepted = np.minimum.accumulate(rng.random((40, K)) < alphas, axis=1)
    reached = np.concatenate([np.ones((40, 1)), accepted[:, :-1]], axis=1)
    kept = float(accepted.sum())
    by_position = [tuple(map(float, counted.sum(axis=0))) for counted in (reached, accepted)]
    counts = RoundCounts(40.0, 40.0 + kept, 40.0 * K, kept, by_position[0], by_position[1])
    return CountRow(
        draft=draft,
        step=step,
        conversation=f"{domain}/{number}",
        turn=0,
        cluster=f"{domain}/{number // 2}",
        domain=domain,
        split=split,
        context_bucket=context_bucket(90 if number % 5 else 900 + 4000 * (number % 2)),
        setting=setting.key,
        rule="greedy" if setting.greedy else "token",
        draft_tokens=K,
        tree="",
        method="replay",
        counts=counts,
    )


def costs_of(draft: str) -> CostTable:
    """Times of a draft on a machine that is made up."""
    each = DRAFT_MS[draft] / 1e3
    plans = {str(K): {"rule": "greedy", "levels": K, "tree": None} for K in DEPTHS}
    key = CostKey(
        hardware="Some CPU, 2 threads",
        software="torch 2.13.0",
        dtype="float32",
        target={"parameters": 134_515_072},
        draft={"parameters": 8_600_688},
        sampling="greedy",
        plans=plans,
    )
    parts = {str(K): (each * K, 0.0405 + 0.002 * K, 0.0004) for K in DEPTHS}
    return batch_one_table(key, 0.040, parts)


def sample_rows(domains: dict[str, float] = DOMAINS) -> tuple[pa.Table, dict[Checkpoint, CostTable], list[Row]]:
    """Counts, times and leaderboard of the checkpoints."""
    tables = [drawn_counts(draft, step, alpha, domains=domains) for (draft, step), alpha in DRAFTS.items()]
    costs = {checkpoint: costs_of(checkpoint[0]) for checkpoint in DRAFTS}
    perplexity = {checkpoint: 9.0 - alpha * 6 for checkpoint, alpha in DRAFTS.items() if checkpoint[0] != "lookup"}
    return concat(tables), costs, leaderboard(tables, costs, SETTINGS, ["lookup"], perplexity)


def sample_scores(domains: dict[str, float] = DOMAINS) -> dict[str, Any]:
    """What a score leaves for a report; a copy to change."""
    return deepcopy(_scores(tuple(domains.items())))


@cache
def _scores(items: tuple[tuple[str, float], ...]) -> dict[str, Any]:
    table, costs, rows = sample_rows(dict(items))
    plans = config_rows([table], costs, SETTINGS, ["lookup"])
    return score_record(table, costs, rows, SETTINGS, plans, domain_rows([table], rows, SETTINGS, costs))


def sample_holdout(domains: dict[str, float] = DOMAINS, champion: bool = True) -> dict[str, Any]:
    """Candidate, champion and prompt lookup on the holdout; a copy to change."""
    return deepcopy(_holdout(tuple(domains.items()), champion))


@cache
def _holdout(items: tuple[tuple[str, float], ...], champion: bool) -> dict[str, Any]:
    domains = dict(items)
    alphas = {"lookup": 0.21, "candidate": 0.63, **({"champion": 0.55} if champion else {})}
    tables, rows, costs = [], [], dict[Checkpoint, CostTable]()
    for draft, alpha in alphas.items():
        kind = "lookup" if draft == "lookup" else "eagle3"
        step = {"lookup": 0, "candidate": 360, "champion": 240}[draft]
        tables.append(drawn_counts(draft, step, alpha, "holdout", seed=7, domains=domains))
        costs[draft, step] = costs_of(kind)
        rows += leaderboard(tables[-1:], costs, SETTINGS, ["lookup"])
    return holdout_record(tables, rows, SETTINGS, domain_rows(tables, rows, SETTINGS, costs))


def sample_records(
    domains: dict[str, float] = DOMAINS, promote: bool = True, worth_serving: bool = True
) -> ReportRecords:
    """A run with everything."""
    reasons = ["expected speed-up over plain decoding is 1.65", "faster than champion demo-0123/2 by +9.1 % [+4, +14]"]
    refused = ["math gets worse: tau -0.31 [-0.42, -0.20] on 14 conversations, allowed is -0.10 (gate.domain_margin)"]
    mix = {
        "conversations": {
            split: {domain: size * (9 if domain == "support" else 2) for domain in domains}
            for split, size in (("train", 40), ("selection", 8), ("holdout", 8))
        },
        "sources": [{"kind": "messages", "name": "support.jsonl", "digest": "0" * 64, "read": 603, "taken": 603}],
        "left_out": {"exact copy": 3, "near-copy": 12},
        "redacted": {"email": 4, "phone": 0},
    }
    return ReportRecords(
        name="demo",
        target="SmolLM2-135M-Instruct",
        scores=sample_scores(domains),
        promotion={
            "version": "demo-0123456789ab/3",
            "decision": {
                "promote": promote,
                "reasons": reasons if promote else refused,
                "worth_serving": worth_serving,
            },
            "holdout": sample_holdout(domains),
        },
        mix=mix,
        lineage=[
            Link("Target", "fca082cfe52e9ea1", ["SmolLM2-135M-Instruct"]),
            Link("Mix", "354de0b1a941442d", ["536 conversations to train on"]),
            Link("Capture", "6c512431eda1", ["33,065 answer tokens"]),
            Link("Parent", "demo-0123456789ab/2", ["eagle3, step 240"]),
            Link("Version", "demo-0123456789ab/3", ["eagle3, step 360, K = 4"]),
        ],
        recipe={"name": "demo", "target": {"model": "./target"}},
        commands=["git checkout 201031c", "draftforge distill demo.yaml"],
        made_at=datetime(2026, 11, 28, 12, 30, tzinfo=UTC),
        version="0.1.0",
    )
