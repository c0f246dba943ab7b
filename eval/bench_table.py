"""A benchmark's tables: speed by domain, and what a request and the machine feel."""

import math
from collections.abc import Sequence

from ..specdec.rules import RULES
from .bench_records import EVERY, BenchRow, Failure, Spread, Surroundings
from .bench_words import verdict
from .table import UNKNOWN, interval, milliseconds, number, positions, show_cells

_SETTING = ("batch", "method", "K")
_SPEEDS = ("tokens/s", "decoding tokens/s", "speed-up", "decoding speed-up")
_WAITS = ("first token ms", "inter-token ms")
_ROUNDS = ("rounds", "round ms", "draft ms", "verify ms", "break-even tau")
_MEMORY = ("draft MB", "caches MB", "peak MB")
_STYLES = {"gains": "green", "loses": "red"}


def show_bench(rows: Sequence[BenchRow], failures: Sequence[Failure], about: Surroundings) -> None:
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
                "-" if plain else row.setting.plan.label,
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
                "-" if plain else row.setting.plan.label,
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
