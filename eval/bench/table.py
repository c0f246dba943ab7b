"""Benchmark tables: figures from the records of runs, a row for each setting and domain.

A repeat is compared with plain decoding of the same repeat, which ran a moment before on the same machine; figures are
medians over repeats, with the least and the most beside them.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

import pyarrow as pa

from ...specdec.accept_rules import RULES
from ...specdec.replay.expected_rounds import count_rounds
from ...storage import size_text
from ..acceptance import alphas, tau
from ..counts import CountRow, context_bucket, to_table
from ..summary import outcome
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
"""Upper ends, in tokens, of the ranges of answer lengths."""


def bench_rows(
    runs: Sequence[RunRecord], prompts: Sequence[BenchPrompt], confidence: float, greedy: bool
) -> list[BenchRow]:
    """Rows of all settings that have a run with plain decoding beside it: all domains together, then each domain.

    `greedy`: sampling at temperature 0, so that answers can be compared with plain decoding's.
    """
    # Runs by setting and repeat, and plain ones by batch size and repeat.
    timed = {(run.setting, run.repeat): _Timed(run) for run in runs}
    plain = {(s.batch_size, repeat): one for (s, repeat), one in timed.items() if s.plain}
    rows: list[BenchRow] = []
    # Pair each run with the plain one of its repeat and batch size; a setting without pairs has no row.
    for setting in dict.fromkeys(setting for setting, _ in timed):
        pairs = [
            (one, plain[setting.batch_size, repeat])
            for (found, repeat), one in sorted(timed.items(), key=lambda item: item[0][1])
            if found == setting and (setting.batch_size, repeat) in plain
        ]
        if pairs:
            rows += _Figures(setting, pairs, prompts, confidence, greedy).rows()
    return rows


class _Timed:
    def __init__(self, run: RunRecord) -> None:
        self.run = run
        self.line = Timeline(run.answers, run.seconds)
        self.step = mean(self.line.round_seconds())
        self.tokens = {one.prompt: one.tokens for one in run.answers}
        self.digests = {one.prompt: one.digest for one in run.answers}


Pair = tuple[_Timed, _Timed]
"""A run, and the plain decoding run of the same repeat."""


class _Figures:
    """Figures of one setting, from its runs and the plain ones beside them."""

    def __init__(
        self,
        setting: Setting,
        pairs: Sequence[Pair],
        prompts: Sequence[BenchPrompt],
        confidence: float,
        greedy: bool,
    ) -> None:
        self._setting, self._pairs, self._prompts = setting, pairs, prompts
        self._confidence, self._greedy = confidence, greedy
        self._counts = self._table()

    def rows(self) -> list[BenchRow]:
        domains = sorted({prompt.domain for prompt in self._prompts})
        return [self._row(EVERY), *(self._row(domain) for domain in domains if len(domains) > 1)]

    def _row(self, domain: str) -> BenchRow:
        # 1) What belongs to this domain: prompts, answers of all repeats and of the first one, and counts.
        chosen = frozenset(i for i, one in enumerate(self._prompts) if domain in (EVERY, one.domain))
        runs = [one.run for one, _ in self._pairs]
        answers = [answer for run in runs for answer in run.answers if answer.prompt in chosen]
        first = [answer for answer in runs[0].answers if answer.prompt in chosen]
        table = self._counts.filter(pa.array([domain in (EVERY, name) for name in self._counts["domain"].to_pylist()]))
        # 2) Latencies pool all repeats; rates and speed-ups are computed by repeat.
        gaps = percentiles([gap for answer in answers for gap in answer.token_gaps])
        waits = percentiles([answer.first_token_seconds for answer in answers])
        return BenchRow(
            setting=self._setting,
            domain=domain,
            prompts=len(chosen),
            tokens=sum(answer.tokens for answer in first),
            rounds=sum(len(answer.arrivals) - 1 for answer in first),
            tau=Interval.of(tau(table, self._confidence)),
            alphas=[Interval.of(alpha) for alpha in alphas(table, self._confidence)],
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
        """Counts table of the first repeat; later repeats use the same random numbers."""
        setting, rows = self._setting, list[CountRow]()
        # Plain decoding has no rounds on record: each of its tokens counts as a round that drafts nothing.
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
        # Above temperature 0 answers need not be equal.
        one, plain = self._pairs[0]
        if not self._greedy or not chosen:
            return math.nan
        return sum(one.digests[i] == plain.digests[i] for i in chosen) / len(chosen)

    def _lengths(self, chosen: frozenset[int]) -> list[LengthRow]:
        """Rows by the length of plain decoding's answer."""
        # Grouped by plain decoding's length, which is the same whatever drafts; short ones first.
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
    """Name of the range that a number of tokens lies in, such as "17 to 64 tokens"."""
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


_SETTING = ("batch", "method", "K")
_SPEEDS = ("tokens/s", "decoding tokens/s", "speed-up", "decoding speed-up")
_WAITS = ("first token ms", "inter-token ms")
_ROUNDS = ("rounds", "round ms", "draft ms", "verify ms", "break-even tau")
_MEMORY = ("draft memory", "caches memory", "peak memory")
_STYLES = {"gains": "green", "loses": "red"}


def show_bench(rows: Sequence[BenchRow], failures: Sequence[Failure], about: Environment) -> None:
    """Print the tables of speed, and of waiting and memory."""
    # 1) Speed of every row and failure.
    repeats = f"{about.repeats} repeats" if about.repeats > 1 else "one repeat"
    note = (
        f"tau: tokens per round, pooled, {about.confidence:.0%} interval by prompt; alpha: accepted of reached, by "
        f"position; tokens/s and speed-up over plain decoding: medians of {repeats} [least, most]; decoding: without "
        "the reading of prompts"
    )
    styles = ["dim" if row.setting.plain else _STYLES.get(outcome(row.speedup.estimate), "") for row in rows]
    show_cells("Speed", speed_cells(rows, failures), [*styles, *["yellow"] * len(failures)], note)
    # 2) Waiting and memory, for all domains together only.
    whole = [row for row in rows if row.domain == EVERY]
    note = (
        "p50 / p95; inter-token: time between two arrivals, divided among the tokens of the second; caches: of the "
        "draft at this batch; peak: allocated in the run on top of all weights (CUDA); equal: answers that are plain "
        "decoding's"
    )
    show_cells("Waiting and memory", waiting_cells(whole), ["dim" if row.setting.plain else "" for row in whole], note)


def speed_cells(rows: Sequence[BenchRow], failures: Sequence[Failure]) -> list[list[str]]:
    """Cells of the speed table, header first. A setting that did not run is a line with its reason."""
    cells = [[*_SETTING, "domain", "tau", "alpha", *_SPEEDS, ""]]
    # One line a setting and domain; plain decoding has no draft columns.
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
    # One line a failure, its reason in the last column.
    for failure in failures:
        batch = "-" if failure.batch_size is None else str(failure.batch_size)
        cells.append([batch, failure.method, failure.plan, "-", *["-"] * 6, f"not run: {failure.reason}"])
    return cells


def waiting_cells(rows: Sequence[BenchRow]) -> list[list[str]]:
    """Cells of the table of waiting and memory, header first, one line a setting."""
    cells = [[*_SETTING, *_WAITS, *_ROUNDS, *_MEMORY, "equal"]]
    # Columns in the order of the header: latencies, rounds, memory, and equal answers.
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
                "-" if plain else size_text(memory.weights),
                "-" if plain else size_text(memory.state),
                "-" if memory.peak is None else size_text(memory.peak),
                "-" if plain else UNKNOWN if math.isnan(row.equal_answers) else f"{row.equal_answers:.0%}",
            ]
        )
    return cells


def _note(row: BenchRow) -> str:
    rule = row.setting.rule
    said = [] if rule == "greedy" else [f"rule {RULES[rule].label}"]
    return ", ".join([*said, *(["loses"] if outcome(row.speedup.estimate) == "loses" else [])])


def _rate(rate: Spread) -> str:
    return UNKNOWN if math.isnan(rate.value) else f"{rate.value:,.1f}"
