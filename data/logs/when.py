"""Times as logs write them."""

import math
import re
from datetime import UTC, datetime
from typing import Any

_PER_SECOND = ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3))  # nanoseconds, microseconds, milliseconds since 1970
_FRACTION = re.compile(r"(?<=\d)[.,](\d+)")


def seconds(value: Any) -> float | None:
    """Unix seconds of a number (seconds down to nanoseconds, told apart by their size) or of a date in ISO 8601.

    A date without a zone counts as UTC. None of anything else.
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        number = float(value)
    elif isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    elif isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return _of_text(value.strip())
    else:
        return None
    if not math.isfinite(number):
        return None
    return next((number / scale for least, scale in _PER_SECOND if abs(number) >= least), number)


def _of_text(text: str) -> float | None:
    # Python reads at most six digits of a fraction, and a point before them.
    text = _FRACTION.sub(lambda match: f".{match[1][:6].ljust(6, '0')}", text, count=1)
    try:
        return seconds(datetime.fromisoformat(text.removesuffix(" UTC")))
    except ValueError:
        return None
