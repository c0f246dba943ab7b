"""Progress of running work: a live bar on a terminal, a plain line every ten seconds in logs and pipes.

Progress goes to standard error, so that standard output stays clean for results.
"""

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import TypeVar

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.segment import Segment

from .masking import masked

# The last ones turn the order of what is read around.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


class Console(rich.console.Console):
    """A console whose texts control no terminal: what files and servers hold may stand in them."""

    def render(
        self, renderable: rich.console.RenderableType, options: rich.console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Segments with control characters but newlines and tabs spelt out; rich's own are apart from texts."""
        for segment in super().render(renderable, options):
            if segment.control or not _CONTROLS.search(segment.text):
                yield segment
            else:
                yield Segment(_CONTROLS.sub(lambda mark: repr(mark[0])[1:-1], segment.text), segment.style)


console = Console(stderr=True, highlight=False)
PLAIN_EVERY_SECONDS = 10.0
Advance = Callable[..., None]
T = TypeVar("T")


def say(message: str, every_rank: bool = False) -> None:
    """Print one line for people, secrets masked; silent on ranks other than 0 unless it is for `every_rank`."""
    rank = os.environ.get("RANK", "0")
    if rank == "0" or every_rank:
        message = masked(message)
        console.print(message if rank == "0" else f"rank {rank}: {message}", soft_wrap=True, markup=False)


@contextmanager
def bar(title: str, total: float | None, unit: str = "", remaining: bool = True) -> Iterator[Advance]:
    """Progress bar; yields `advance(amount=1, note="")`. Shows done/total, elapsed and remaining time, and the note.

    `total` None: how much there is to do is unknown. `remaining` False: the notes say themselves what time is left.
    """
    # Ranks other than the first show nothing: all do about the same work.
    if os.environ.get("RANK", "0") != "0":
        yield lambda amount=1, note="": None
    elif console.is_terminal:
        with _live(title, total, unit, remaining) as advance:
            yield advance
    else:
        yield _PlainLines(title, total, unit, remaining)


@contextmanager
def _live(title: str, total: float | None, unit: str, remaining: bool) -> Iterator[Advance]:
    """Live bar of rich, redrawn in place on a terminal."""
    # Title, bar, done/total, unit, times, and the note as the last column. Brackets are those of names: no markup.
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}", markup=False),
        TimeElapsedColumn(),
        *([TimeRemainingColumn()] if remaining else []),
        TextColumn("{task.fields[note]}", markup=False),
    )
    # Without a total, rich shows a pulsing bar.
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=total, unit=unit, note="")

        def advance(amount: float = 1, note: str = "") -> None:
            progress.advance(task, amount)
            if note:
                progress.update(task, note=note)

        yield advance


class _PlainLines:
    """Progress as plain lines: at most one every PLAIN_EVERY_SECONDS, and one at the end of what took over 2 s."""

    def __init__(self, title: str, total: float | None, unit: str, remaining: bool) -> None:
        self._title, self._total, self._unit, self._remaining = title, total, unit, remaining
        self._done = 0.0
        self._start = self._last = time.monotonic()

    def __call__(self, amount: float = 1, note: str = "") -> None:
        """Advance by `amount`, and print a line if one is due."""
        self._done += amount
        now = time.monotonic()
        finished = self._total is not None and self._done >= self._total
        if now - self._last >= PLAIN_EVERY_SECONDS or (finished and now - self._start > 2):
            self._last = now
            self._print(now - self._start, note)

    def _print(self, elapsed: float, note: str) -> None:
        """Print done/total, elapsed and remaining seconds, and the note."""
        of = f"/{self._total:.0f}" if self._total else ""
        # Time left at the average rate so far.
        remaining = ""
        if self._remaining and self._total and self._done:
            remaining = f", {elapsed * (self._total / self._done - 1):.0f} s left"
        say(f"{self._title}: {self._done:.0f}{of} {self._unit} in {elapsed:.0f} s{remaining} {note}".rstrip())


def track(items: Iterable[T], title: str, total: int | None = None, unit: str = "") -> Iterator[T]:
    """Iterate with a bar; `total` defaults to len(items) where it has one."""
    count = total if total is not None else (len(items) if isinstance(items, Sized) else None)
    with bar(title, count, unit) as advance:
        for item in items:
            yield item
            advance()
