"""Work that several processes share: who says what there is to do, who takes which piece of it, and who is through.

Ranks of one launch are one implementation (`train/crew.py`); a process of its own is the other.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

Json = dict[str, Any]


class Work(Protocol):
    """One piece of work, as one process sees it."""

    plan: Json
    """What the first process said that there is to do."""
    size: int
    """Processes that share it."""

    def claim(self, item: str) -> bool:
        """Whether this process takes an item; none is given to two."""

    def add(self, figures: Mapping[str, int]) -> dict[str, int]:
        """Add to sums that all processes share; what they are now."""

    def finish(self, report: Json) -> list[Json]:
        """Say that this process is through. On the first one: wait for all, and give every report, its own first."""

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Poll, as long as the others live."""


class Crew(Protocol):
    """The processes."""

    rank: int
    size: int

    @property
    def first(self) -> bool:
        """Whether this process says what there is to do."""

    def agree(self, settings: Json) -> None:
        """Meet the others at the start. Raises InputError where they have other settings than the first process."""

    def together(self, name: str) -> AbstractContextManager[None]:
        """Work whose collectives need all of them, from the moment that all are there."""

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Poll, as long as the others live. Raises MissingFileError where the first one has `made` it, elsewhere."""

    def made(self, what: str) -> None:
        """Say, on the first process, that files which the others wait for are there."""

    def share(
        self, name: str, plan: Json | None, over: Callable[[], bool] = lambda: False
    ) -> AbstractContextManager[Work | None]:
        """Begin a piece of work of that name: the first process gives its plan, the others wait for that.

        None where it was `over` before. All processes begin the same pieces in the same order.
        """


class _Solo:
    """Work of one process: it takes everything, and nobody else is waited for."""

    size = 1

    def __init__(self, plan: Json | None = None) -> None:
        self.plan: Json = plan or {}
        self._sums: dict[str, int] = {}

    def claim(self, item: str) -> bool:
        return True

    def add(self, figures: Mapping[str, int]) -> dict[str, int]:
        for name, amount in figures.items():
            self._sums[name] = self._sums.get(name, 0) + amount
        return {name: self._sums[name] for name in figures}

    def finish(self, report: Json) -> list[Json]:
        return [report]

    def wait(self, done: Callable[[], bool], what: str) -> None:
        assert done(), what


class _Alone:
    """A crew of one."""

    rank, size, first = 0, 1, True

    def agree(self, settings: Json) -> None:
        pass

    @contextmanager
    def together(self, name: str) -> Iterator[None]:
        yield

    def wait(self, done: Callable[[], bool], what: str) -> None:
        assert done(), what

    def made(self, what: str) -> None:
        pass

    @contextmanager
    def share(self, name: str, plan: Json | None, over: Callable[[], bool] = lambda: False) -> Iterator[Work | None]:
        yield _Solo(plan)


ALONE: Crew = _Alone()


def solo() -> Work:
    """Work that nobody shares."""
    return _Solo()
