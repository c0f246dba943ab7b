"""Records as a reader meets them: names of drafts, numbers with their intervals, lengths of prompts."""

import math
from collections.abc import Mapping
from typing import Any

from ..counts import largest_prompt
from ..table import UNKNOWN

PLAIN, LOOKUP = "plain", "lookup"


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """Such as "1.06x"; an unknown number is "n/a"."""
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value:,.{digits}f}{unit}"


def interval(estimate: Mapping[str, Any] | None, unit: str = "", digits: int = 2) -> str:
    """Such as "2.06 [1.95, 2.17]"; without an interval "2.06"."""
    if estimate is None or estimate.get("value") is None:
        return UNKNOWN
    value, low, high = (estimate.get(name) for name in ("value", "low", "high"))
    if low is None or high is None:
        return number(value, digits, unit)
    return f"{number(value, digits, unit)} [{number(low, digits)}, {number(high, digits)}]"


def plan_of(row: Mapping[str, Any]) -> str:
    """How a row drafts: "K = 4", "tree wide", or "-" for plain decoding."""
    if not row["draft_tokens"]:
        return "-"
    return f"tree {row['tree']}" if row["tree"] else f"K = {row['draft_tokens']}"


def name_of(row: Mapping[str, Any]) -> str:
    """A row in a legend: the draft, and its step where it was trained."""
    return f"{row['draft']}, step {row['step']}" if row["step"] and not row["baseline"] else str(row["draft"])


def bucket(label: str) -> str:
    """A context bucket as people say it: "up to 128", "over 32,768"."""
    top = largest_prompt(label)
    return f"over {top:,}" if label.endswith("+") else f"up to {top:,}"


def milliseconds(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else number(seconds * 1e3, 1)


def joined(words: list[str]) -> str:
    """a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
