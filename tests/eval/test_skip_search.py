"""The search over subsets, on values that can be enumerated."""

import itertools
import random
from collections.abc import Callable
from functools import partial

import pytest

from draftforge.eval.layer_skip import search

Value = Callable[[frozenset[int]], float]


def bumpy(seed: int, parts: int) -> Value:
    """Each part is worth something, and so is each pair of parts together."""
    chance = random.Random(seed)
    alone = [chance.gauss(0, 1) for _ in range(parts)]
    pairs = {pair: chance.gauss(0, 0.7) for pair in itertools.combinations(range(parts), 2)}
    return lambda chosen: (
        sum(alone[one] for one in chosen) + sum(worth for pair, worth in pairs.items() if chosen.issuperset(pair))
    )


def every_set(parts: int) -> list[frozenset[int]]:
    return [frozenset(one) for m in range(parts + 1) for one in itertools.combinations(range(parts), m)]


def test_it_ends_where_no_neighbour_is_better() -> None:
    best = 0
    for seed in range(20):
        value = bumpy(seed, 8)
        found = search(range(8), value, 256, seed=1)
        inside, outside = sorted(found.parts), sorted(set(range(8)) - found.parts)
        near = [found.parts ^ {one} for one in range(8)]
        near += [found.parts ^ {one, other} for one in inside for other in outside]
        assert found.value == value(found.parts) == max(map(value, [found.parts, *near]))
        best += found.value == max(map(value, every_set(8)))
    assert best >= 15  # a local optimum is mostly the global one here


def test_parts_that_do_not_interact_are_found_in_few_tries() -> None:
    """60 parts, 23 of which are worth leaving out: 2^60 sets."""
    chance = random.Random(5)
    good = set(chance.sample(range(60), 23))
    found = search(range(60), lambda chosen: len(chosen & good) - 1.5 * len(chosen - good), 90, seed=3)
    assert found.parts == good and found.tries <= 90


def smaller_is_better(asked: list[frozenset[int]], chosen: frozenset[int]) -> float:
    asked.append(chosen)
    return -float(len(chosen))


def test_never_more_tries_than_allowed_and_none_twice() -> None:
    for tries in (1, 2, 5, 9, 24, 1000):
        asked: list[frozenset[int]] = []
        found = search(range(12), partial(smaller_is_better, asked), tries, seed=0)
        assert len(asked) == len(set(asked)) == found.tries == min(tries, 24)  # the 24th ends a way down
        assert found.value == -min(map(len, asked)) and found.parts in asked


def test_the_same_seed_asks_the_same_sets() -> None:
    def asked(seed: int) -> list[frozenset[int]]:
        seen: list[frozenset[int]] = []
        value = bumpy(3, 10)
        search(range(10), lambda chosen: (seen.append(chosen), value(chosen))[1], 60, seed)  # type: ignore[func-returns-value]
        return seen

    assert asked(4) == asked(4) != asked(5)


def test_sets_to_start_from_come_first() -> None:
    seen: list[frozenset[int]] = []
    given = [frozenset({1, 2}), frozenset({7})]

    def value(chosen: frozenset[int]) -> float:
        seen.append(chosen)
        return float(chosen == given[0])

    found = search(range(9), value, 5, 0, given)
    assert seen[:2] == given and found.parts == given[0] and found.tries == 5


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_few_parts(parts: int) -> None:
    found = search(range(parts), lambda chosen: float(len(chosen)), 100, 0)
    assert found.parts == frozenset(range(parts)) and found.tries <= 2**parts
