"""Samples side by side in rows of equal length, with little padding: several in a row, or one."""

from bisect import bisect_left, insort
from collections.abc import Sequence

MOST_PADDING = 0.05
"""Share of padding above which samples are packed into fewer, longer rows; one row has none."""
_SHARE = 64  # rows that turned out too short grow by this part of themselves; too many lose this part of them


def pack(lengths: Sequence[int], row_tokens: int = 0) -> tuple[list[list[int]], int]:
    """Rows of sample indexes, and the tokens of a row.

    Best fit, longest first, into as many rows of about `row_tokens` tokens (at least the longest sample) as there are
    tokens for, or into fewer where too much of them would be padding.
    """
    if not lengths:
        raise ValueError("no samples to pack")
    total, longest = sum(lengths), max(lengths)
    count = max(1, round(total / max(row_tokens, longest)))
    while True:
        rows, tokens = _rows(lengths, count, max(longest, -(-total // count)))
        if total >= (1 - MOST_PADDING) * len(rows) * tokens:
            return rows, tokens
        count = len(rows) - max(1, len(rows) // _SHARE)


def buckets(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Sample indexes, longest first, in groups of about one length: filled up to their longest, with one sample a row,
    each group is at most `tokens` tokens, or one sample."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if not groups or (len(groups[-1]) + 1) * lengths[groups[-1][0]] > tokens:
            groups.append([])
        groups[-1].append(index)
    return groups


def _rows(lengths: Sequence[int], count: int, tokens: int) -> tuple[list[list[int]], int]:
    """At most `count` rows, made a little longer until all samples have a place."""
    while (rows := _best_fit(lengths, count, tokens)) is None:
        tokens += max(1, tokens // _SHARE)
    return rows, max(sum(lengths[index] for index in row) for row in rows)


def _best_fit(lengths: Sequence[int], count: int, tokens: int) -> list[list[int]] | None:
    """Each sample, longest first, goes into the fullest row that has room; None where one has none."""
    rows: list[list[int]] = [[] for _ in range(count)]
    room = [(tokens, row) for row in range(count)]  # ascending
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        best = bisect_left(room, (lengths[index], -1))
        if best == count:
            return None
        left, row = room.pop(best)
        rows[row].append(index)
        insort(room, (left - lengths[index], row))
    return sorted(sorted(row) for row in rows if row)
