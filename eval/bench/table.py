"""From the records of runs to the figures of a benchmark: a row for each setting and domain.

A repeat is compared with plain decoding of the same repeat, which ran a moment before on the same machine; figures are
medians over repeats, with the least and the most beside them.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import pyarrow as pa

from ...specdec.replay.expected_rounds import count_rounds
from ...specdec.rules import RULES
from ..counts import CountRow, context_bucket, to_table
from ..figures import Bootstrap, alphas, tau
from ..table import UNKNOWN, interval, milliseconds, number, positions, show_cells
from .latency import Timeline, mean, median, over, percentiles
from .run import (
    EVERY,
    BenchPrompt,
    BenchRow,
    Environment,
    Failure,
    Interval,
    LengthRow,
    RoundParts,
    RunRecord,
    Setting,
    Spread,
)

LENGTHS = (16, 64, 256, 1024)
"""Where ranges of answer lengths end."""


def bench_rows(
    runs: Sequence[RunRecord], prompts: Sequence[BenchPrompt], bootstrap: Bootstrap, greedy: bool
) -> list[BenchRow]:
    """Rows of all settings that have a run with plain decoding beside it: all domains together, then each."""
    timed = {(run.setting, run.repeat): _Timed(run) for run in runs}
    plain = {(s.batch_size, repeat): one for (s, repeat), one in timed.items() if s.plain}
    rows: list[BenchRow] = []
    for setting in dict.fromkeys(setting for setting, _ in timed):
        pairs = [
            (one, plain[setting.batch_size, repeat])
            for (found, repeat), one in sorted(timed.items(), key=lambda item: item[0][1])
            if found == setting and (setting.batch_size, repeat) in plain
        ]
        if pairs:
            rows += _Figures(setting, pairs, prompts, bootstrap, greedy).rows()
    return rows


class _Timed:
    def __init__(self, run: RunRecord) -> None:
        self.run = run
        self.line = Timeline(run.answers, run.seconds)
        self.step = mean(self.line.round_seconds())
        self.tokens = {one.prompt: one.tokens for one in run.answers}
        self.digests = {one.prompt: one.digest for one in run.answers}


Pair = tuple[_Timed, _Timed]
"""A run, and plain decoding of the same repeat."""


class _Figures:
    """Of one setting."""

    def __init__(
        self,
        setting: Setting,
        pairs: Sequence[Pair],
        prompts: Sequence[BenchPrompt],
        bootstrap: Bootstrap,
        greedy: bool,
    ) -> None:
        self._setting, self._pairs, self._prompts = setting, pairs, prompts
        self._bootstrap, self._greedy = bootstrap, greedy
        self._counts = self._table()

    def rows(self) -> list[BenchRow]:
        domains = sorted({prompt.domain for prompt in self._prompts})
        return [self._row(EVERY), *(self._row(domain) for domain in domains if len(domains) > 1)]

    def _row(self, domain: str) -> BenchRow:
        chosen = frozenset(i for i, one in enumerate(self._prompts) if domain in (EVERY, one.domain))
        runs = [one.run for one, _ in self._pairs]
        answers = [answer for run in runs for answer in run.answers if answer.prompt in chosen]
        first = [answer for answer in runs[0].answers if answer.prompt in chosen]
        table = self._counts.filter(pa.array([domain in (EVERY, name) for name in self._counts["domain"].to_pylist()]))
        gaps = percentiles([gap for answer in answers for gap in answer.token_gaps])
        waits = percentiles([answer.first_token_seconds for answer in answers])
        return BenchRow(
            setting=self._setting,
            domain=domain,
            prompts=len(chosen),
            tokens=sum(answer.tokens for answer in first),
            rounds=sum(len(answer.arrivals) - 1 for answer in first),
            tau=Interval.of(tau(table, self._bootstrap)),
            alphas=[Interval.of(alpha) for alpha in alphas(table, self._bootstrap)],
            tokens_per_second=_spread(one.line.rate(chosen) for one, _ in self._pairs),
            decoding_tokens_per_second=_spread(one.line.decoding_rate(chosen) for one, _ in self._pairs),
            speedup=self._speedup(chosen, Timeline.rate),
            decoding_speedup=self._speedup(chosen, Timeline.decoding_rate),
            first_token_p50=waits[0],
            first_token_p95=waits[1],
            inter_token_p50=gaps[0],
            inter_token_p95=gaps[1],
            first_token_share=self._first_token_share(chosen),
            round_seconds=median([one.step for one, _ in self._pairs]),
            break_even_tau=median([over(one.step, plain.step) for one, plain in self._pairs]),
            slots=median([one.line.slots for one, _ in self._pairs]),
            parts=_parts([run.parts for run in runs]),
            memory=runs[-1].memory,
            equal_answers=self._equal(chosen),
            lengths=self._lengths(chosen),
        )

    def _table(self) -> pa.Table:
        """Counts of the first repeat: the others draw the same numbers."""
        setting, rows = self._setting, list[CountRow]()
        for answer in self._pairs[0][0].run.answers:
            prompt = self._prompts[answer.prompt]
            rounds = answer.rounds or [(0, 0, 1, 0)] * (answer.tokens - 1)
            rows.append(
                CountRow(
                    draft=setting.method,
                    step=0,
                    conversation=prompt.name,
                    turn=0,
                    cluster=prompt.name,
                    domain=prompt.domain,
                    split="",
                    context_bucket=context_bucket(len(prompt.ids)),
                    setting="",
                    rule=setting.rule,
                    draft_tokens=setting.levels,
                    tree=setting.tree,
                    method="decode",
                    counts=count_rounds(rounds, setting.levels),
                )
            )
        return to_table(rows)

    def _speedup(self, chosen: frozenset[int], rate: Callable[[Timeline, frozenset[int]], float]) -> Spread:
        return _spread(over(rate(one.line, chosen), rate(plain.line, chosen)) for one, plain in self._pairs)

    def _first_token_share(self, chosen: frozenset[int]) -> float:
        answers = [answer for one, _ in self._pairs for answer in one.run.answers if answer.prompt in chosen]
        return over(sum(answer.first_token_seconds for answer in answers), sum(answer.seconds for answer in answers))

    def _equal(self, chosen: frozenset[int]) -> float:
        one, plain = self._pairs[0]
        if not self._greedy or not chosen:
            return math.nan
        return sum(one.digests[i] == plain.digests[i] for i in chosen) / len(chosen)

    def _lengths(self, chosen: frozenset[int]) -> list[LengthRow]:
        """By the length of plain decoding's answer."""
        found: dict[str, set[int]] = {}
        for prompt in sorted(chosen, key=lambda i: self._pairs[0][1].tokens[i]):
            found.setdefault(length_range(self._pairs[0][1].tokens[prompt]), set()).add(prompt)
        return [
            LengthRow(
                lengths=name,
                prompts=len(some),
                speedup=self._speedup(frozenset(some), Timeline.rate),
                first_token_share=self._first_token_share(frozenset(some)),
            )
            for name, some in found.items()
        ]


def length_range(tokens: int) -> str:
    """Such as "17 to 64 tokens"."""
    start = 1
    for end in LENGTHS:
        if tokens <= end:
            return f"{start} to {end} tokens"
        start = end + 1
    return f"{start} tokens and more"


def _spread(values: Iterable[float]) -> Spread:
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return Spread(value=math.nan, low=math.nan, high=math.nan)
    return Spread(value=statistics.median(known), low=min(known), high=max(known))


def _parts(found: Sequence[RoundParts]) -> RoundParts:
    return RoundParts(**{name: median([getattr(one, name) for one in found]) for name in RoundParts.model_fields})


Verdict = Literal["gains", "loses", "no clear difference", "not measured"]


def verdict(speedup: Spread) -> Verdict:
    """Which side of 1 all repeats are on."""
    if math.isnan(speedup.value):
        return "not measured"
    if speedup.low > 1:
        return "gains"
    return "loses" if speedup.high < 1 else "no clear difference"


class _EntryRows(NamedTuple):
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


def _ways(rows: Sequence[BenchRow]) -> list[_EntryRows]:
    found: dict[str, list[BenchRow]] = {}
    for row in rows:
        if not row.setting.plain:
            found.setdefault(row.setting.way, []).append(row)
    return [_EntryRows(name, some) for name, some in found.items()]


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


def _batches(way: _EntryRows) -> Iterator[str]:
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


def _domains(way: _EntryRows) -> Iterator[str]:
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


def _lengths(way: _EntryRows) -> Iterator[str]:
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


def _least_accepted(ways: Sequence[_EntryRows]) -> Iterator[str]:
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


def _equal(ways: Sequence[_EntryRows], half: bool) -> Iterator[str]:
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


_SETTING = ("batch", "method", "K")
_SPEEDS = ("tokens/s", "decoding tokens/s", "speed-up", "decoding speed-up")
_WAITS = ("first token ms", "inter-token ms")
_ROUNDS = ("rounds", "round ms", "draft ms", "verify ms", "break-even tau")
_MEMORY = ("draft MB", "caches MB", "peak MB")
_STYLES = {"gains": "green", "loses": "red"}


def show_bench(rows: Sequence[BenchRow], failures: Sequence[Failure], about: Environment) -> None:
    """Print both tables."""
    repeats = f"{about.repeats} repeats" if about.repeats > 1 else "one repeat"
    note = (
        f"tau: tokens per round, pooled, {about.confidence:.0%} interval by prompt; alpha: accepted of reached, by "
        f"position; tokens/s and speed-up over plain decoding: medians of {repeats} [least, most]; decoding: without "
        "the reading of prompts"
    )
    styles = ["dim" if row.setting.plain else _STYLES.get(verdict(row.speedup), "") for row in rows]
    show_cells("Speed", speed_cells(rows, failures), [*styles, *["yellow"] * len(failures)], note)
    whole = [row for row in rows if row.domain == EVERY]
    note = (
        "p50 / p95; inter-token: time between two arrivals, divided among the tokens of the second; caches: of the "
        "draft at this batch; peak: allocated in the run on top of all weights (CUDA); equal: answers that are plain "
        "decoding's"
    )
    show_cells("Waiting and memory", waiting_cells(whole), ["dim" if row.setting.plain else "" for row in whole], note)


def speed_cells(rows: Sequence[BenchRow], failures: Sequence[Failure]) -> list[list[str]]:
    """Header and rows as text; what did not run is a line with its reason."""
    cells = [[*_SETTING, "domain", "tau", "alpha", *_SPEEDS, ""]]
    for row in rows:
        plain = row.setting.plain
        cells.append(
            [
                str(row.setting.batch_size),
                row.setting.method,
                "-" if plain else row.setting.config.label,
                row.domain,
                "-" if plain else interval(row.tau.estimate),
                positions([alpha.estimate for alpha in row.alphas]),
                _rate(row.tokens_per_second),
                _rate(row.decoding_tokens_per_second),
                "-" if plain else interval(row.speedup.estimate, "x"),
                "-" if plain else interval(row.decoding_speedup.estimate, "x"),
                "" if plain else _note(row),
            ]
        )
    for failure in failures:
        batch = "-" if failure.batch_size is None else str(failure.batch_size)
        cells.append([batch, failure.method, failure.plan, "-", *["-"] * 6, f"not run: {failure.reason}"])
    return cells


def waiting_cells(rows: Sequence[BenchRow]) -> list[list[str]]:
    """Header and rows as text, one a setting."""
    cells = [[*_SETTING, *_WAITS, *_ROUNDS, *_MEMORY, "equal"]]
    for row in rows:
        plain, memory = row.setting.plain, row.memory
        cells.append(
            [
                str(row.setting.batch_size),
                row.setting.method,
                "-" if plain else row.setting.config.label,
                f"{milliseconds(row.first_token_p50)} / {milliseconds(row.first_token_p95)}",
                f"{milliseconds(row.inter_token_p50)} / {milliseconds(row.inter_token_p95)}",
                f"{row.rounds:.0f}",
                milliseconds(row.round_seconds),
                "-" if plain else milliseconds(row.parts.draft_seconds),
                milliseconds(row.parts.verify_seconds),
                "-" if plain else number(row.break_even_tau),
                "-" if plain else _megabytes(memory.weights),
                "-" if plain else _megabytes(memory.state),
                _megabytes(memory.peak),
                "-" if plain else UNKNOWN if math.isnan(row.equal_answers) else f"{row.equal_answers:.0%}",
            ]
        )
    return cells


def _note(row: BenchRow) -> str:
    rule = row.setting.rule
    said = [] if rule == "greedy" else [f"rule {RULES[rule].label}"]
    return ", ".join([*said, *(["loses"] if verdict(row.speedup) == "loses" else [])])


def _rate(rate: Spread) -> str:
    return UNKNOWN if math.isnan(rate.value) else f"{rate.value:,.1f}"


def _megabytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 1e6:.2f}"
