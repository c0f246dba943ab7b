"""Counts of drafts whose tau is known."""

import pyarrow as pa

from draftforge.eval.counts import CountRow, Method, to_table
from draftforge.specdec.replay.expected_rounds import RoundCounts


def counts_of(
    draft: str,
    step: int,
    taus: dict[int, float],
    domain: str = "support",
    setting: str = "t0",
    rule: str = "greedy",
    method: Method = "replay",
    conversations: int = 10,
    drafted: float | None = None,
    tree: str = "",
) -> pa.Table:
    """Conversations whose pooled tau at each K is the given one; every other is better, every other worse, by 0.1 or as
    much less as keeps it above 1."""
    rows = []
    for number in range(conversations):
        for K, tau in taus.items():
            apart = min(0.1, tau - 1)
            tokens = 100 * (tau + (apart if number % 2 else -apart))
            accepted = tokens - 100
            drafting = 100.0 if drafted is None or tree else drafted / K  # rounds that draft at all
            counts = RoundCounts(
                100.0, tokens, 100.0 * K if drafted is None else drafted, accepted, (drafting,) * K, (accepted / K,) * K
            )
            name = f"{domain}-{number}"
            row = CountRow(
                draft, step, name, 0, name, domain, "selection", "128", setting, rule, K, tree, method, counts
            )
            rows.append(row)
    return to_table(rows)
