"""Requests in flight against a count by brute force, and the load that they propose."""

import math
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from draftforge.data.concurrency import (
    UNNAMED,
    Concurrency,
    Level,
    Traffic,
    batch_shares,
    engine_of,
    level_of,
    measure_concurrency,
    proposed_load,
)
from draftforge.data.settings import MixSettings
from draftforge.errors import InputError

SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), min_size=1, max_size=25)
HISTOGRAMS = st.lists(st.floats(0, 100), min_size=1, max_size=200).filter(lambda times: sum(times) > 0)


def traffic_of(*requests: tuple[Any, ...]) -> Traffic:
    traffic = Traffic()
    for request in requests:
        traffic.add(*request)
    return traffic


def counted(spans: list[tuple[int, int]]) -> list[int]:
    """Seconds with 0, 1, 2, … requests, looked at second by second; without the idle ones."""
    running = [sum(start <= second < start + length for start, length in spans) for second in range(50)]
    return [0, *(running.count(level) for level in range(1, max(running) + 1))]


@given(SPANS)
def test_levels_are_those_of_a_count_second_by_second(spans: list[tuple[int, int]]) -> None:
    start = np.array([start for start, _ in spans], dtype=float)
    level = level_of(start, start + [length for _, length in spans])
    assert list(level.seconds) == counted(spans)
    assert level.most == len(counted(spans)) - 1 and level.busy_seconds == sum(counted(spans))
    assert level.mean * level.busy_seconds == pytest.approx(sum(length for _, length in spans))


@given(SPANS)
def test_quantiles_are_those_of_the_busy_seconds_in_a_row(spans: list[tuple[int, int]]) -> None:
    seconds = [level for level, time in enumerate(counted(spans)) for _ in range(time)]
    level = Level(tuple(float(time) for time in counted(spans)))
    for share, found in ((0.5, level.p50), (0.95, level.p95)):
        assert found == seconds[math.ceil(share * len(seconds) - 1e-9) - 1]


@given(SPANS, st.floats(-1e9, 1e9), st.randoms())
def test_neither_order_nor_the_zero_of_the_clock_matters(
    spans: list[tuple[int, int]], zero: float, random: Any
) -> None:
    shuffled = random.sample(spans, len(spans))
    reports = [
        measure_concurrency(traffic_of(*((shift + start, shift + start + length) for start, length in some)))
        for some, shift in ((spans, 0.0), (shuffled, float(round(zero))))
    ]
    assert reports[0] == reports[1]


def test_replicas_are_counted_apart_and_pooled_by_their_busy_time() -> None:
    report = measure_concurrency(
        traffic_of(
            (0, 10, "a"),
            (0, 10, "a"),
            (10, 12, "a"),
            (0, 4, "b"),
            (0, 1, None),
            (5, 5, "b"),
            (9, 8, "a"),
            (1, None),
            (0, 1e9, "b"),
        )
    )
    assert report.replicas == {"a": Level((0, 2, 10)), "b": Level((0, 4)), UNNAMED: Level((0, 1))}
    assert report.pooled == Level((0, 7, 10)) and report.pooled.p50 == 2
    assert (report.requests, report.zero_length, report.skewed, report.untimed) == (5, 1, 2, 1)


def test_medians_are_of_all_that_count_tokens() -> None:
    report = measure_concurrency(traffic_of((0, 1, "a", 10, 1), (0, None, "a", 30, 2), (2, 3, "a", 20, None), (4, 5)))
    assert (report.prompt_tokens, report.answer_tokens) == (20, 1.5)


def test_nothing_timed_proposes_nothing() -> None:
    report = measure_concurrency(Traffic())
    assert report == Concurrency(0, 0, 0, 0, {}, None, None, None)
    with pytest.raises(InputError, match="logs: 0 requests with a start and a later end"):
        report.yaml(None)


@pytest.mark.parametrize(
    "times, shares",
    [
        ([0, 1], {1: 1.0}),
        ([0, 1, 1, 1, 1], {1: 0.25, 2: 0.25, 4: 0.5}),  # 3 is nearer to 4 than to 2
        ([0, 0, 0, 0, 0, 1, 3], {4: 0.25, 8: 0.75}),  # 5 is nearer to 4, 6 to 8
        ([0, 96, 4], {1: 1.0}),  # below 5 %: to the neighbour
        ([0, 1, 1] + [0] * 13 + [1], {1: 0.34, 2: 0.33, 16: 0.33}),
        (
            [0, 10, 10, 0, 10, 0, 0, 0, 10] + [0] * 7 + [10] + [0] * 15 + [5],
            {1: 0.18, 2: 0.18, 4: 0.18, 8: 0.18, 16: 0.28},
        ),
    ],
)
def test_batch_sizes(times: list[float], shares: dict[int, float]) -> None:
    assert batch_shares(Level(tuple(times))) == shares


@given(HISTOGRAMS)
def test_batch_sizes_are_few_powers_of_two_that_share_the_whole(times: list[float]) -> None:
    level = Level((0.0, *times))
    shares = batch_shares(level)
    assert 1 <= len(shares) <= 5 and sum(round(100 * share) for share in shares.values()) == 100
    assert all(size & (size - 1) == 0 and share >= 0.04 for size, share in shares.items())
    assert list(shares) == sorted(shares) and max(shares) <= 2 * level.most


def test_the_block_is_the_recipes() -> None:
    block = proposed_load(Level((0, 1, 0, 0, 3)), 700.5, 240, "sglang")
    assert yaml.safe_load(block) == {
        "score": {
            "load": {
                "engine": "sglang",
                "batch_sizes": {1: 0.25, 4: 0.75},
                "context_tokens": 820,  # the prompt and half the answer
                "answer_tokens": 240,
            }
        }
    }
    unknown = proposed_load(Level((0, 1)), None, 3)
    assert yaml.safe_load(unknown) == {"score": {"load": {"batch_sizes": {1: 1.0}}}}
    assert "# engine: the log does not tell; vllm, sglang or llama.cpp, by hand" in unknown
    smallest = yaml.safe_load(proposed_load(Level((0, 1)), 0, 0))["score"]["load"]
    assert (smallest["context_tokens"], smallest["answer_tokens"]) == (2, 2)


@pytest.mark.parametrize(
    ("kinds", "engine"),
    [
        (["vllm"], "vllm"),
        (["sglang", "sglang", "messages"], "sglang"),
        (["litellm", "vllm"], "vllm"),
        (["openai"], None),
        (["vllm", "sglang"], None),
    ],
)
def test_the_proposed_engine_is_the_one_whose_logs_they_are(kinds: list[str], engine: str | None) -> None:
    sources = [{"kind": kind, "path": f"{place}.log"} for place, kind in enumerate(kinds)]
    assert engine_of(MixSettings.model_validate({"sources": sources})) == engine
