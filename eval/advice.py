"""What scores come to for serving, in sentences. Every figure in them was measured or fitted; none is a rule of thumb.

A gain or a loss is claimed where the interval of the speed-up, widened by how far fitted times are off, leaves out 1.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Literal

from .figures import Estimate
from .leaderboard import DomainRow, Row
from .serving_load import BatchFigures, LoadFigures
from .settings import ScoreSettings

Verdict = Literal["gains", "loses", "not clear"]


def advice(rows: Sequence[Row], domains: Sequence[DomainRow], settings: ScoreSettings) -> list[str]:
    """Of the chosen row: whether, how and up to where to speculate, and where it does not pay."""
    chosen = next((row for row in rows if row.chosen), None)
    if chosen is None:
        return []
    error = 0.0 if chosen.load is None else chosen.load.fit_error
    said = [*_overall(chosen, error)]
    if chosen.load is not None:
        said += [*_by_batch(chosen.load, error), *_above(chosen, chosen.load), *_costs(chosen, chosen.load)]
    mine = [row for row in domains if (row.draft, row.step) == (chosen.draft, chosen.step)]
    if len({(row.domain, row.setting) for row in mine}) > 1:
        said += _domains(mine, error)
    return [*said, *_baselines(chosen, rows)]


def verdict(speedup: Estimate, error: float) -> Verdict:
    """Which side of 1 it is on, `error` of fitted times allowed for."""
    low, high = (speedup.value if math.isnan(one) else one for one in (speedup.low, speedup.high))
    if low * (1 - error) > 1:
        return "gains"
    return "loses" if high * (1 + error) < 1 else "not clear"


def _overall(row: Row, error: float) -> Iterator[str]:
    where = "at batch 1" if row.load is None else "at this load"
    which, even = f"{row.draft} step {row.step} at {row.config}", _even(row)
    match verdict(row.speedup, error):
        case "gains":
            yield f"{which} gains {where}: {_times(row.speedup)}; tau {row.tau.value:.2f}, {even}."
        case "loses":
            yield (
                f"Speculation loses {where}, do not serve it: the best is {which}, {_times(row.speedup)}; tau "
                f"{row.tau.value:.2f}, {even}."
            )
        case _:
            yield f"No clear gain {where}: the best is {which}, {_times(row.speedup)}; tau {row.tau.value:.2f}, {even}."


def _even(row: Row) -> str:
    """From which tau, and which acceptance of a token, it pays."""
    if math.isinf(row.break_even_tau):
        return "and it pays at no tau"
    alpha = math.nan if row.load is None else row.load.break_even_alpha
    accepted = "" if math.isnan(alpha) else f" (each drafted token accepted with {alpha:.0%})"
    return f"it pays from {row.break_even_tau:.2f}{accepted}"


def _by_batch(load: LoadFigures, error: float) -> Iterator[str]:
    """The best K or tree of neighbouring batch sizes, and those at which none pays."""
    groups: list[list[BatchFigures]] = []
    for one in load.batches:
        known = groups[-1][-1] if groups else None
        if known is not None and _advised(known, error) == _advised(one, error):
            groups[-1].append(one)
        else:
            groups.append([one])
    clauses = [f"{_advised(some[0], error)} at batch {_sizes(some)} ({_span(some)})" for some in groups]
    yield f"By batch size: {'; '.join(clauses)}."


def _advised(one: BatchFigures, error: float) -> str:
    match verdict(one.speedup, error):
        case "gains":
            return str(one.config)
        case "loses":
            return "no speculation"
        case _:
            return f"{one.config} without a clear gain"


def _sizes(some: Sequence[BatchFigures]) -> str:
    first, last = some[0].batch_size, some[-1].batch_size
    return str(first) if first == last else f"{first} to {last}"


def _span(some: Sequence[BatchFigures]) -> str:
    values = [f"{one.speedup.value:.2f}x" for one in some]
    return values[0] if values[0] == values[-1] else f"{values[0]} to {values[-1]}"


def _above(row: Row, load: LoadFigures) -> Iterator[str]:
    losing = load.losing
    if losing is None:
        return
    if losing.above is None:
        yield f"{row.config} does not lose up to batch {losing.largest}, the largest that was measured."
    elif losing.above:
        yield f"Switch speculation off above batch {losing.above}: there {row.config} loses."
    else:
        yield f"{row.config} loses at every batch size up to {losing.largest}."


def _costs(row: Row, load: LoadFigures) -> Iterator[str]:
    weights, caches = (count / 1e6 for count in load.memory)
    yield (
        f"Goodput {load.goodput.value:.0f} tokens/s, {load.plain_goodput:.0f} without a draft, which takes "
        f"{weights:,.0f} MB of weights and {caches:,.0f} MB of caches."
    )


def _domains(rows: Sequence[DomainRow], error: float) -> Iterator[str]:
    """Domains that do not pay, or stop paying at another batch size than all together."""
    for row in rows:
        where = f"domain {row.domain!r} ({row.setting})"
        if verdict(row.speedup, error) == "loses":
            yield f"{where} does not pay: {_times(row.speedup)}."
        elif row.losing is not None and row.losing.above is not None:
            yield f"{where} pays up to batch {row.losing.above}."


def _baselines(chosen: Row, rows: Sequence[Row]) -> Iterator[str]:
    """What needs no training and does as well."""
    for row in rows:
        if row.baseline and row.speedup.value >= chosen.speedup.value:
            yield f"{row.draft} at {row.config}, which takes no training, does as well: {_times(row.speedup)}."


def _times(speedup: Estimate) -> str:
    if math.isnan(speedup.low) or math.isnan(speedup.high):
        return f"{speedup.value:.2f}x"
    return f"{speedup.value:.2f}x [{speedup.low:.2f}, {speedup.high:.2f}]"
