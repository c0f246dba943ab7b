"""Worker processes that prepare the records of large sources: in order, with bounded memory, started late.

Small inputs never leave this process. Results come in the order of their batches, so they do not depend on how many
processes there are, and neither does the line that an error names.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import is_dataclass
from types import ModuleType, TracebackType
from typing import Any, Concatenate, TypeVar

from ..errors import InputError, LostRankError
from .prepared_records import Preparer
from .settings import MixSettings

R = TypeVar("R")
T = TypeVar("T")

MOST_PROCESSES = 16
"""More would wait for the one process that collects their results."""
_CORES = "LOKY_MAX_CPU_COUNT"  # which limits the cores that joblib counts
_BATCH_UNITS, _BATCH_BYTES = 64, 1 << 20
_ALONE_BATCHES = 8  # what this process prepares before it starts others: half a second's work, as starting them is
_QUEUED_BATCHES = 3  # of each process


class Workers:
    """Processes with a `Preparer` each."""

    def __init__(self, settings: MixSettings, processes: int | None = None) -> None:
        """`processes`: absent: one for each core that this process may use."""
        self._settings, self._batches = settings, 0
        self._processes = min(available_cores(), MOST_PROCESSES) if processes is None else processes
        self._own = Preparer(settings)
        self._pool: ProcessPoolExecutor | None = None
        self._started: list[Future[int]] = []

    def __enter__(self) -> "Workers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=error is not None, cancel_futures=True)  # idle processes end by themselves

    def map(
        self, method: Callable[Concatenate[Preparer, ...], Sequence[R]], batches: Iterable[tuple[Any, ...]]
    ) -> Iterator[R]:
        """Yield the results of a method of `Preparer` for every batch (its arguments), in the order of the batches.

        Batches are drawn as processes become free, so that no more than a few of each wait. What drawing one raises
        comes after the results of those before it. Raises LostRankError if a process dies.
        """
        waiting: deque[Future[Sequence[R]]] = deque()
        drawn, failure = iter(batches), None
        while True:
            # 1) Draw the next batch.
            try:
                batch = next(drawn, None)
            except Exception as error:
                batch, failure = None, error
            if batch is None:
                break

            # 2) Prepare it here while there is little to do, or no other process is ready yet.
            if not self._others_ready():
                yield from method(self._own, *batch)
                continue

            # 3) Else give it away, and collect what was given away long ago.
            with _named_death():
                assert self._pool is not None
                waiting.append(self._pool.submit(_prepare, method.__name__, batch))
            if len(waiting) > _QUEUED_BATCHES * self._processes:
                yield from _result(waiting.popleft())

        # 4) Collect the rest.
        while waiting:
            yield from _result(waiting.popleft())
        if failure is not None:
            raise failure

    def _others_ready(self) -> bool:
        """Count a batch, and tell whether other processes can take it. They start once there are many batches."""
        self._batches += 1
        if self._processes == 1 or self._batches <= _ALONE_BATCHES:
            return False
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._processes, context, _start, (self._settings,))
            with _bare_children():  # each of the first tasks starts a process
                self._started = [self._pool.submit(os.getpid) for _ in range(self._processes)]
        return all(task.done() for task in self._started)


def available_cores() -> int:
    """Cores that this process may use, by its affinity, its container's quota and LOKY_MAX_CPU_COUNT.

    Raises InputError where that is no number.
    """
    from joblib import cpu_count  # slow to import

    try:
        found: int = cpu_count()
    except ValueError:
        given = os.environ.get(_CORES, "")
        raise InputError(f"{_CORES} {given[:40]!r}: must be a whole number") from None
    return found


def batched(units: Iterable[T]) -> Iterator[list[T]]:
    """Batches of lines: so many, or so many bytes of them. An error comes after the lines before it."""
    batch, size, failure = list[T](), 0, None
    drawn = iter(units)
    while True:
        try:
            unit = next(drawn, None)
        except Exception as error:
            unit, failure = None, error
        if unit is None:
            break
        batch.append(unit)
        size += _text_length(unit)
        if len(batch) == _BATCH_UNITS or size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
    if failure is not None:
        raise failure


def _text_length(unit: Any) -> int:
    """Length of the texts in a unit: of a line, a table's row, or a request that is joined of lines."""
    if isinstance(unit, str | bytes):
        return len(unit)
    if isinstance(unit, Mapping):
        return sum(map(_text_length, unit.values()))
    if isinstance(unit, tuple | list):
        return sum(map(_text_length, unit))
    return sum(map(_text_length, vars(unit).values())) if is_dataclass(unit) else 0


def _result(future: Future[Sequence[R]]) -> Sequence[R]:
    with _named_death():
        return future.result()


@contextmanager
def _named_death() -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool:
        raise LostRankError(
            "mix: a process that reads the log was killed (out of memory?); LOKY_MAX_CPU_COUNT=1 reads with one"
        ) from None


_preparer: Preparer | None = None  # of a worker process


def _start(settings: MixSettings) -> None:
    global _preparer
    _preparer = Preparer(settings)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A process that nobody collects from any more would wait for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _prepare(method: str, batch: tuple[Any, ...]) -> Any:
    return getattr(_preparer, method)(*batch)


@contextmanager
def _bare_children() -> Iterator[None]:
    """Children started in the body import no main module, which may be heavy, and never see Ctrl-C, which this process
    handles."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        sys.modules["__main__"] = main
