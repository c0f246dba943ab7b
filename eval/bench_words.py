"""What a benchmark says in words: where speculation gains, and where it loses. Every figure in them was measured.

A setting gains or loses where every repeat says so; where repeats are on both sides of 1 nothing is claimed.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from .bench_records import EVERY, BenchRow, LengthRow, Spread

Verdict = Literal["gains", "loses", "no clear difference", "not measured"]


def verdict(speedup: Spread) -> Verdict:
    """Which side of 1 all repeats are on."""
    if math.isnan(speedup.value):
        return "not measured"
    if speedup.low > 1:
        return "gains"
    return "loses" if speedup.high < 1 else "no clear difference"


class _Way(NamedTuple):
    """The rows of one method at one K or tree."""

    name: str
    rows: list[BenchRow]

    def of(self, domain: str) -> list[BenchRow]:
        return [row for row in self.rows if row.domain == domain]


def words(rows: Sequence[BenchRow], repeats: int, half: bool) -> list[str]:
    """Sentences, the shortest answer to "is it worth it?" first. `half`: the target runs below float32."""
    ways = _ways(rows)
    said = [*_best(rows)]
    for way in ways:
        said += [*_batches(way), *_domains(way), *_lengths(way)]
    said += [*_least_accepted(ways), *_equal(ways, half), *_empty_slots(rows)]
    if repeats == 1:
        said.append("One repeat: nothing says how much these figures vary from run to run; --repeats 3 does.")
    return said


def _ways(rows: Sequence[BenchRow]) -> list[_Way]:
    found: dict[str, list[BenchRow]] = {}
    for row in rows:
        if not row.setting.plain:
            found.setdefault(row.setting.way, []).append(row)
    return [_Way(name, some) for name, some in found.items()]


def _best(rows: Sequence[BenchRow]) -> Iterator[str]:
    """At each batch size, whether to speculate at all."""
    drafted = [row for row in rows if row.domain == EVERY and not row.setting.plain]
    for batch_size in sorted({row.setting.batch_size for row in drafted}):
        some = [row for row in drafted if row.setting.batch_size == batch_size and not math.isnan(row.speedup.value)]
        best = max(some, key=lambda row: row.speedup.value, default=None)
        if best is None:
            continue
        what = f"{best.setting.way}, {times(best.speedup)}"
        match verdict(best.speedup):
            case "gains":
                yield f"At batch {batch_size} the fastest is {what} over plain decoding."
            case "loses":
                yield f"At batch {batch_size} speculation loses, whatever drafts: the best is {what}."
            case _:
                yield f"At batch {batch_size} nothing is clearly faster than plain decoding: the best is {what}."


def _batches(way: _Way) -> Iterator[str]:
    """The batch sizes at which a way loses, at which it gains, at which that is not clear; and the tau it needs."""
    clauses = []
    for kind in ("loses", "no clear difference", "gains", "not measured"):
        some = [row for row in way.of(EVERY) if verdict(row.speedup) == kind]
        if some:
            each = ", ".join(f"{row.setting.batch_size} ({times(row.speedup)}{_needed(row)})" for row in some)
            clauses.append(f"{kind} at batch {each}")
    if clauses:
        yield f"{way.name}: {'; '.join(clauses)}."


def _needed(row: BenchRow) -> str:
    """The tau at which a round takes as long as plain decoding of what it yields, beside the one that it has."""
    if math.isnan(row.break_even_tau) or math.isnan(row.tau.value):
        return ""
    return f"; tau {row.tau.value:.2f}, a round pays from {row.break_even_tau:.2f}"


def _domains(way: _Way) -> Iterator[str]:
    """Domains that lose where all together do not, and why."""
    for row in way.rows:
        whole = next(one for one in way.of(EVERY) if one.setting == row.setting)
        if row.domain == EVERY or verdict(row.speedup) != "loses" or verdict(whole.speedup) == "loses":
            continue
        where = (
            f"{way.name}, batch {row.setting.batch_size}: loses in {row.domain} ({times(row.speedup)}{_needed(row)})"
        )
        if row.tau.value >= row.break_even_tau:
            yield f"{where}: {_share(row)} of the time there passes before the first token."
        elif row.alphas and not math.isnan(row.alphas[0].value):
            yield f"{where}: {row.alphas[0].value:.0%} of first drafted tokens are accepted there."
        else:
            yield f"{where}."


def _lengths(way: _Way) -> Iterator[str]:
    """Lengths of answers at which it loses though not on the whole, or is clearly slower than on the whole."""
    for row in way.of(EVERY):
        for some in row.lengths if len(row.lengths) > 1 else []:
            loses = verdict(some.speedup) == "loses" != verdict(row.speedup)
            if loses or some.speedup.high < row.speedup.low:
                yield (
                    f"{way.name}, batch {row.setting.batch_size}: {'loses' if loses else 'does worse'} on answers of "
                    f"{some.lengths} ({times(some.speedup)}; on all {row.speedup.value:.2f}x): {_share(some)} of their "
                    "time passes before the first token, which no draft shortens."
                )


def _share(row: BenchRow | LengthRow) -> str:
    return "an unknown part" if math.isnan(row.first_token_share) else f"{row.first_token_share:.0%}"


def _least_accepted(ways: Sequence[_Way]) -> Iterator[str]:
    """For each method, the domain in which its first drafted tokens are accepted least."""
    said: set[str] = set()
    for way in ways:
        setting = way.rows[0].setting
        firsts = [row for row in way.rows if row.domain != EVERY and row.setting == setting and row.alphas]
        known = sorted((row.alphas[0].value, row.domain) for row in firsts if not math.isnan(row.alphas[0].value))
        least, most = (f"{value:.0%}" for value, _ in (known[0], known[-1])) if known else ("", "")
        if least != most and setting.method not in said:
            said.add(setting.method)
            ends = f"least in {known[0][1]} ({least}), most in {known[-1][1]} ({most})"
            yield f"{way.name}: first drafted tokens are accepted {ends}."


def _equal(ways: Sequence[_Way], half: bool) -> Iterator[str]:
    """Answers that are not plain decoding's, at temperature 0."""
    for way in ways:
        for row in way.of(EVERY):
            if math.isnan(row.equal_answers) or row.equal_answers == 1:
                continue
            where = f"{way.name}, batch {row.setting.batch_size}: {row.equal_answers:.0%} of {row.prompts} answers"
            if half:
                yield f"{where} equal plain decoding's; in half precision near ties between two tokens flip."
            else:
                yield f"{where} equal plain decoding's; in float32 all should: only an exact tie may flip."


def _empty_slots(rows: Sequence[BenchRow]) -> Iterator[str]:
    """Batch sizes that too few prompts keep far from full."""
    for row in rows:
        batch_size = row.setting.batch_size
        if row.setting.plain and row.domain == EVERY and row.slots < batch_size / 2:
            yield (
                f"At batch {batch_size} only {row.slots:.1f} slots were in use on average: {row.prompts} prompts "
                "are too few for it."
            )


def times(speedup: Spread) -> str:
    """Such as "0.86x, repeats 0.84 to 0.88"."""
    if math.isnan(speedup.value):
        return "n/a"
    if speedup.low == speedup.high:
        return f"{speedup.value:.2f}x"
    return f"{speedup.value:.2f}x, repeats {speedup.low:.2f} to {speedup.high:.2f}"
