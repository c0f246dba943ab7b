"""The next step's batches are made while the device works on this step's."""

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
U = TypeVar("U")


def ahead(items: Iterator[T], work: Callable[[T], U]) -> Generator[tuple[T, U], None, None]:
    """Each item with the result of its work, which a thread did while the item before was used.

    `items` never ends. An error of the work is raised where its item is due.
    """
    with ThreadPoolExecutor(1, "batches") as pool:

        def begin() -> tuple[T, U]:
            item = next(items)
            return item, work(item)

        pending = pool.submit(begin)
        while True:
            ready = pending.result()
            pending = pool.submit(begin)
            yield ready
