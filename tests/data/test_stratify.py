"""Shares, weights and choices: exact where they can be, and right on average over salts where they cannot."""

import itertools
import math
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftforge.data.conversation import Message
from draftforge.data.records import Record
from draftforge.data.sources import smallest
from draftforge.data.stratify import (
    Column,
    LogTable,
    Margin,
    allot,
    choose,
    exponential_keys,
    half_lives,
    largest_size,
    log_row,
    odd_clocks,
    rake_weights,
)
from draftforge.errors import InputError

NAN = float("nan")


def column(labels: list[str]) -> Column:
    names = sorted(set(labels))
    return Column(names, np.array([names.index(label) for label in labels], dtype=np.int64))


def log(count: int, seed: int = 0) -> tuple[list[str], list[Column]]:
    """Ids, and three labels that go together: skewed domains, tools mostly in the first, many system prompts."""
    draw = random.Random(seed)
    domains = draw.choices("abc", [6, 3, 1], k=count)
    tools = ["with" if draw.random() < (0.7 if domain == "a" else 0.1) else "without" for domain in domains]
    systems = [f"{domain}{int(draw.expovariate(0.3))}" for domain in domains]
    return sorted(f"{draw.getrandbits(96):024x}" for _ in range(count)), [column(c) for c in (domains, tools, systems)]


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=30),
    st.floats(0, 1, exclude_max=True),
    st.floats(0.01, 1),
)
def test_every_run_of_strata_is_within_one_of_its_share(sizes: list[int], start: float, part: float) -> None:
    total = int(sum(sizes) * part)
    counts = allot(np.array(sizes, dtype=float), total, start)
    assert counts.sum() == total and (counts >= 0).all() and (counts <= sizes).all()
    share = np.array(sizes) / sum(sizes) * total
    for first, last in itertools.combinations(range(len(sizes) + 1), 2):
        assert abs(counts[first:last].sum() - share[first:last].sum()) < 1 + 1e-6


def test_whole_shares_are_met_exactly_and_small_ones_on_average() -> None:
    assert allot(np.array([2.0, 4.0, 6.0]), 6, 0.999).tolist() == [1, 2, 3]
    mass = np.array([0.3] * 10 + [0.7])
    mean = np.mean([allot(mass, 2, start) for start in np.linspace(0, 1, 1000, endpoint=False)], axis=0)
    assert mean == pytest.approx(mass / mass.sum() * 2, abs=0.01)


def test_a_part_of_a_log_keeps_its_joint_distribution() -> None:
    ids, columns = log(3000)
    total = 700
    kept = choose(ids, np.ones(3000), columns, total, "salt")
    assert kept.sum() == total
    for depth in (1, 2, 3):  # every prefix of the nesting
        cells = list(zip(*(c.codes_N.tolist() for c in columns[:depth])))
        whole, part = Counter(cells), Counter(itertools.compress(cells, kept))
        assert all(abs(part[cell] - whole[cell] * total / 3000) < 1 for cell in whole)


def test_a_rare_label_is_kept_as_often_as_its_share() -> None:
    """On average over salts, each conversation has the same chance, whatever its stratum's size."""
    ids, columns = log(300)
    chosen = np.mean([choose(ids, np.ones(300), columns, 75, str(salt)) for salt in range(500)], axis=0)
    assert chosen.mean() == pytest.approx(0.25) and np.abs(chosen - 0.25).max() < 5 * math.sqrt(0.25 * 0.75 / 500)


def test_order_of_the_exponential_keys_is_a_weighted_draw_without_replacement() -> None:
    """Efraimidis and Spirakis: P(order) is the product of weight over what is left."""
    weight = np.array([4.0, 2.0, 1.0, 1.0])
    ids, draws = list("abcd"), 6_000
    found = Counter(tuple(np.argsort(exponential_keys(ids, weight, str(salt))).tolist()) for salt in range(draws))
    for order in itertools.permutations(range(4)):
        left = [weight[list(order[i:])].sum() for i in range(4)]
        expected = math.prod(weight[i] / rest for i, rest in zip(order, left))
        assert found[order] / draws == pytest.approx(expected, abs=4.5 * math.sqrt(expected / draws))


def test_a_weight_halves_each_half_life() -> None:
    day = 86400.0
    started = np.array([10 * day, 3 * day, -4 * day, NAN])
    assert half_lives(started, 7).tolist() == [1, 0.5, 0.25, 1]
    assert half_lives(np.array([NAN, NAN]), 7).tolist() == [1, 1]


def test_raking_meets_every_margin_and_leaves_odds_alone() -> None:
    ids, (domains, tools, _) = log(2000)
    shares = {"a": 0.2, "b": 0.5, "c": 0.3}
    margins = [Margin("weights.domain", domains, shares), Margin("weights.tools", tools, {"with": 1, "without": 3})]
    weight = rake_weights(np.ones(2000), margins)
    by_domain, by_tools = (np.bincount(c.codes_N, weight) / weight.sum() for c in (domains, tools))
    assert by_domain == pytest.approx([0.2, 0.5, 0.3]) and by_tools == pytest.approx([0.25, 0.75])

    def odds(of: np.ndarray) -> float:
        cell = np.bincount(domains.codes_N * 2 + tools.codes_N, of).reshape(3, 2)
        return float(cell[0, 0] * cell[1, 1] / (cell[0, 1] * cell[1, 0]))

    assert odds(weight) == pytest.approx(odds(np.ones(2000)))
    assert len(ids) == 2000


def test_shares_are_kept_without_doubling() -> None:
    ids, (domains, *_) = log(1000)
    there = np.bincount(domains.codes_N)
    weight = rake_weights(np.ones(1000), [Margin("weights.domain", domains, {"a": 1, "b": 1, "c": 2})])
    size = largest_size(weight)
    assert size == 2 * there[2]  # the scarcest domain whole
    kept = np.bincount(domains.codes_N[choose(ids, weight, [domains], size, "salt")])
    assert kept.tolist() == pytest.approx([size / 4, size / 4, size / 2], abs=1)
    assert largest_size(np.ones(7)) == 7 and choose(ids, np.ones(1000), [domains], 1000, "s").all()


@pytest.mark.parametrize(
    "labels, shares, rule",
    [
        ("ab", {"a": 1}, "mix.weights.x: 'b' has no weight; weights name a"),
        ("aa", {"a": 1, "b": 2}, "mix.weights.x.b: weight 2, but no conversation is left for it"),
    ],
)
def test_shares_that_no_conversation_has_are_refused(labels: str, shares: dict[str, float], rule: str) -> None:
    with pytest.raises(InputError) as caught:
        rake_weights(np.ones(2), [Margin("weights.x", column(list(labels)), shares)])
    assert str(caught.value) == rule


def test_shares_that_contradict_each_other_are_refused() -> None:
    same = column(["a", "b"])
    margins = [Margin("weights.x", same, {"a": 1, "b": 1}), Margin("weights.y", same, {"a": 1, "b": 2})]
    with pytest.raises(InputError, match=r"mix\.weights\.x and mix\.weights\.y: no weights"):
        rake_weights(np.ones(2), margins)


def test_who_else_is_there_hardly_changes_who_stays() -> None:
    """A choice is a conversation's own hash: with one stratum, leaving out one that was not kept changes nothing."""
    ids = [f"{i:04d}" for i in range(200)]
    everyone = column(["a"] * 200)
    kept = choose(ids, np.ones(200), [everyone], 50, "salt")
    out = int(np.flatnonzero(~kept)[0])
    rest = [i for i in range(200) if i != out]
    again = choose([ids[i] for i in rest], np.ones(199), [column(["a"] * 199)], 50, "salt")
    assert again.tolist() == kept[rest].tolist()


def test_a_source_s_limit_is_an_even_sample() -> None:
    """Hashes of the whole content choose, so every label's expected share is the log's."""
    records = [
        Record(domain="ab"[i % 4 == 0], messages=(Message(role="user", content=f"text {i}"),), source=0)
        for i in range(4000)
    ]
    some = smallest(records, 1000)
    share = sum(record.domain == "b" for record in some) / 1000
    assert len(some) == 1000 and abs(share - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 1000)
    assert smallest(records[::-1], 1000) == some


DAYS = 86400.0
NOVEMBER, IN_2099, LONG_AGO = 1793491200.0, 4070908800.0, 0.0  # 2026-11-01, 2099-01-01, 1970-01-01
MONTH = [NOVEMBER + day * DAYS for day in range(40)]


@pytest.mark.parametrize(
    "times, odd",
    [
        ([], []),
        ([NOVEMBER], []),
        ([NAN, NAN], []),
        (MONTH, []),
        ([*MONTH, NAN], []),
        ([*MONTH, IN_2099], [IN_2099]),
        ([*MONTH, LONG_AGO, LONG_AGO, IN_2099], [LONG_AGO, LONG_AGO, IN_2099]),
        ([*MONTH, *[IN_2099 + second for second in range(39)]], [IN_2099 + second for second in range(39)]),
        ([NOVEMBER, IN_2099], []),
        ([LONG_AGO] * 40 + MONTH, [LONG_AGO] * 40),
        ([*MONTH, MONTH[-1] + 40 * DAYS], [MONTH[-1] + 40 * DAYS]),
        ([*MONTH, MONTH[-1] + 29 * DAYS], []),
        ([*MONTH, *[MONTH[-1] + (40 + day) * DAYS for day in range(5)]], []),
        ([NOVEMBER - 400 * DAYS, *MONTH], []),
        ([NOVEMBER - 100 * DAYS, *MONTH, MONTH[-1] + 299 * DAYS], []),
        ([NOVEMBER - 100 * DAYS, *MONTH, MONTH[-1] + 301 * DAYS], [MONTH[-1] + 301 * DAYS]),
    ],
)
def test_clocks_far_from_the_rest(times: list[float], odd: list[float]) -> None:
    shuffled = random.Random(1).sample(times, len(times))
    found = np.array(shuffled)[odd_clocks(np.array(shuffled, dtype=float))]
    assert sorted(found.tolist()) == sorted(odd)


def test_a_wrong_clock_weighs_as_much_as_an_unknown_one_and_is_named() -> None:
    log = LogTable()
    for number, time in enumerate([IN_2099, *MONTH, LONG_AGO]):
        message = Message(role="user", content=f"question {number}")
        record = Record(domain="d", messages=(message,), started=time, where=f"log.jsonl:{number + 1}")
        log.add(log_row(record, None))
    assert log.distrust_clocks() == [("1970-01-01", "log.jsonl:42"), ("2099-01-01", "log.jsonl:1")]
    assert log.odd_clocks == 2 and np.isnan(np.array(log.started)[[0, 41]]).all()
    weight_N = half_lives(np.array(log.started), 14)
    assert weight_N.max() == weight_N[40] == weight_N[0] == 1 and weight_N[1] == pytest.approx(2 ** (-39 / 14))
    days = log.column("day")
    assert days.counts()["unknown"] == 2 and len(days.names) == 41 and not {"1970-01-01", "2099-01-01"} & {*days.names}
    assert log.distrust_clocks() == [] and log.odd_clocks == 0
