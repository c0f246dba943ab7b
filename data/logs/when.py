"""Times as logs write them."""

import math
import re
from datetime import UTC, datetime
from typing import Any

_PER_SECOND = ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3))  # nanoseconds, microseconds, milliseconds since 1970
_YEAR_10000 = 253402300800.0
_FRACTION = re.compile(r"(?<=\d)[.,](\d+)")


def seconds(value: Any) -> float | None:
    """Unix seconds of a number (seconds down to nanoseconds, told apart by their size) or of a date in ISO 8601.

    A date without a zone counts as UTC. None of anything else, and of times before 1970 or after 9999.
    """
    if isinstance(value, datetime):
        found: float | None = (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    else:
        found = number(value)
        if found is not None:
            found = next((found / scale for least, scale in _PER_SECOND if found >= least), found)
        elif isinstance(value, str):
            return _of_text(value.strip())
    return found if found is not None and 0 <= found < _YEAR_10000 else None


def number(value: Any) -> float | None:
    """A finite number, or a text that is one; None of anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def _of_text(text: str) -> float | None:
    # Python reads at most six digits of a fraction, and a point before them.
    text = _FRACTION.sub(lambda match: f".{match[1][:6].ljust(6, '0')}", text, count=1)
    try:
        return seconds(datetime.fromisoformat(text.removesuffix(" UTC")))
    except (ValueError, OverflowError):
        return None
