"""Batches made ahead: the same, in the same order, one step early and no earlier."""

import itertools
from collections.abc import Iterator

import pytest

from draftforge.train.loop import prefetch


def test_order_and_one_item_early() -> None:
    begun: list[int] = []

    def items() -> Iterator[int]:
        for number in itertools.count():
            begun.append(number)
            yield number

    found = list(itertools.islice(prefetch(items(), lambda number: number * number), 5))
    assert found == [(0, 0), (1, 1), (2, 4), (3, 9), (4, 16)]
    assert begun[:5] == [0, 1, 2, 3, 4] and len(begun) <= 6


def test_an_error_comes_with_its_item() -> None:
    stream = prefetch(iter(range(9)), lambda number: 10 // (2 - number))
    assert [next(stream), next(stream)] == [(0, 5), (1, 10)]
    with pytest.raises(ZeroDivisionError):
        next(stream)
