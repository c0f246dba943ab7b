"""What a report says first: what was decided, why, and the figures that it rests on."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from .words import interval, joined, name_of, number, plan_of

Record = Mapping[str, Any]
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
