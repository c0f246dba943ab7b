"""Policies from counts and times: K by batch size against the exhaustive best, over made-up and recorded tables."""

import math
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import loads
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from draftforge.errors import InputError
from draftforge.eval.acceptance import Estimate
from draftforge.eval.cost_table import CostTable
from draftforge.eval.draft_configs import DraftConfig
from draftforge.eval.serving_load import Candidate, LoadTimes, _fewest_ranges, policy_speedups, serving_policy
from draftforge.eval.settings import LoadSettings
from draftforge.eval.speedup import chain_tau
from draftforge.eval.summary import policy_summary
from draftforge.specdec.serving_policy import PolicyEngine, ServingPolicy

BAR = 0.03
RECORDED = Path(__file__).parent / "recorded_times.json"
"""Times of a tiny target and an EAGLE-3 head on one thread of a busy EPYC: noise and all."""
MADE_UP = {
    "cheap": loads.grid_table(lambda B, L, N, C: 2e-4 * L),
    "dear": loads.grid_table(lambda B, L, N, C: 1e-3 * L * (1 + B / 16)),
    "block": loads.grid_table(lambda B, L, N, C: 9e-4 + 1e-5 * B * L, depths=(1, 2, 4, 7)),
    "odd": loads.grid_table(
        lambda B, L, N, C: 5e-4 + 3e-4 * L + 2e-5 * B, verify=lambda B, L, N, C: 4e-3 + 2e-4 * B * N
    ),
    "falls late": loads.grid_table(
        lambda B, L, N, C: 1e-4 * L, verify=lambda B, L, N, C: 8e-3 + 4e-5 * max(B * N - 128, 0)
    ),
    "padded": loads.grid_table(
        lambda B, L, N, C: 2e-4 * L,
        verify=lambda B, L, N, C: 4e-3 + 5e-5 * 2 ** math.ceil(math.log2(B * N)),
        depths=(1, 2, 4),
    ),
    "tiles": loads.grid_table(
        lambda B, L, N, C: 2e-4 * L, verify=lambda B, L, N, C: 4e-3 + 4e-3 * math.ceil(B * N / 64)
    ),
    "another kernel": loads.grid_table(
        lambda B, L, N, C: 1e-4 * L, verify=lambda B, L, N, C: 5e-3 + 3e-3 * (B * N > 24) + 1e-5 * B * N
    ),
}
TIMES = MADE_UP | {"recorded": CostTable.model_validate_json(RECORDED.read_text())}


@cache
def load_of(name: str, answer: int = 128) -> LoadTimes:
    """Times at a load that the table covers; gains that were computed once stay."""
    context = 96 if name == "recorded" else 512
    load = LoadSettings(batch_sizes={1: 1.0}, context_tokens=context, answer_tokens=min(answer, context))
    return LoadTimes(TIMES[name], load)


def chains(name: str, alpha: float) -> list[Candidate]:
    """Every measured K, each token accepted with `alpha`."""
    Ks = sorted({point.levels for point in TIMES[name].points} - {0})
    return [Candidate(DraftConfig(K), Estimate(chain_tau(alpha, K)), float(K), 1.0) for K in Ks]


def speedup_from_the_table(name: str, times: LoadTimes, K: int, tau: float, size: int) -> float:
    """Speed-up at a measured place, from the measured seconds themselves."""
    load, found = times.load, {}
    for point in TIMES[name].points:
        if (point.batch_size, point.context_tokens) == (size, load.context_tokens):
            found[point.levels] = point.seconds
    prompt, with_draft = (times.fit.prompt(DraftConfig(levels), size, load.prompt_tokens) for levels in (0, K))
    later = load.answer_tokens - 1
    plain = size * prompt + later * found[0]
    return plain if K == 0 else plain / (size * with_draft + later / tau * found[K])


def chosen(policy: ServingPolicy) -> list[int]:
    """K at each batch size from 1 on."""
    return [one.draft_tokens for one in policy.ranges for _ in range(one.first, one.last + 1)]


def made(engine: PolicyEngine, times: LoadTimes, candidates: list[Candidate], tie_share: float) -> ServingPolicy | None:
    """The policy; None where a refusal is right, which is checked."""
    try:
        return serving_policy(engine, times, candidates, tie_share)
    except InputError as error:
        best = [max(some.values()) for some in policy_speedups(times, candidates)]
        if "begin with the largest K" in str(error):
            assert engine == "tensorrt-llm"
        else:
            assert max(best) * (1 - min(tie_share, BAR)) <= 1 and "no K beats plain decoding" in str(error)
        return None


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(TIMES)),
    st.floats(0.05, 0.98),
    st.sampled_from(["vllm", "sglang", "tensorrt-llm"]),
    st.sampled_from([0.0, 0.01, 0.5]),
    st.sampled_from([16, 128]),
)
def test_every_batch_size_is_near_its_best_and_none_slower_than_plain(
    name: str, alpha: float, engine: PolicyEngine, tie_share: float, answer: int
) -> None:
    times, candidates = load_of(name, answer), chains(name, alpha)
    policy = made(engine, times, candidates, tie_share)
    assume(policy is not None)
    assert policy is not None
    speedups = policy_speedups(times, candidates)
    assert len(chosen(policy)) == len(speedups) == max(times.fit.batch_sizes)
    for K, some in zip(chosen(policy), speedups, strict=True):
        assert some[K] >= 1 and some[K] >= max(some.values()) * (1 - BAR)
    if policy.gate is not None and policy.gate.rate > 0:
        # With every chain's acceptance a little below the gate, nothing pays at any batch size.
        less = [one._replace(tau=Estimate(1 + one.config.levels * policy.gate.rate * 0.999)) for one in candidates]
        lower = policy_speedups(times, less)
        assert all(some[K] < 1 for K, some in zip(chosen(policy), lower, strict=True) if K)


@pytest.mark.parametrize("name", sorted(MADE_UP))
@pytest.mark.parametrize("alpha", [0.35, 0.6, 0.9])
def test_the_choice_holds_for_the_measured_seconds_themselves(name: str, alpha: float) -> None:
    """At the batch sizes of the table, without the fit: these tables have no noise."""
    times, candidates = load_of(name), chains(name, alpha)
    policy = made("vllm", times, candidates, 0.01)
    if policy is None:
        return
    for size in times.fit.batch_sizes:
        real = {0: 1.0} | {
            one.config.levels: speedup_from_the_table(name, times, one.config.levels, one.tau.value, size)
            for one in candidates
        }
        K = chosen(policy)[size - 1]
        assert real[K] >= max(real.values()) * (1 - BAR), (size, K, real)
        assert real[K] >= 1 - 1e-3


@given(st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=1, max_size=7))
def test_no_policy_has_fewer_ranges(allowed: list[set[int]]) -> None:
    """Against every way to cut the batch sizes into ranges."""
    ranges = _fewest_ranges(allowed)
    assert all(one.draft_tokens in allowed[size - 1] for one in ranges for size in range(one.first, one.last + 1))
    assert all(one.draft_tokens != other.draft_tokens for one, other in pairwise(ranges))
    fewest = min(
        bin(cuts).count("1") + 1
        for cuts in range(1 << (len(allowed) - 1))
        if all(set.intersection(*part) for part in _parts(allowed, cuts))
    )
    assert len(ranges) == fewest


def _parts(allowed: list[set[int]], cuts: int) -> list[list[set[int]]]:
    parts = [[allowed[0]]]
    for place, some in enumerate(allowed[1:]):
        if cuts >> place & 1:
            parts.append([])
        parts[-1].append(some)
    return parts


def test_a_policy_by_hand() -> None:
    """Alone four tokens pay, in company fewer, and in a full batch none."""
    times, candidates = load_of("dear"), chains("dear", 0.9)
    policy = serving_policy("vllm", times, candidates, 0.01)
    Ks = chosen(policy)
    assert Ks == sorted(Ks, reverse=True) and (Ks[0], Ks[-1]) == (4, 0)
    said = policy_summary(policy, times, candidates)
    first, last = policy.ranges[0], policy.ranges[-1]
    assert said.startswith(f"policy: K=4 at batch 1 to {first.last} (") and f"off at batch {last.first} to 64; " in said
    assert "times of card, bfloat16, fitted to 0%" in said


@pytest.mark.parametrize(
    ("alpha", "says"),
    [
        (
            0.05,
            r"--policy vllm: no K beats plain decoding at any batch size from 1 to 64 .* \(the best: 0\.\d\dx at batch",
        ),
        (math.nan, "no K beats plain decoding"),
    ],
)
def test_no_policy_where_nothing_pays(alpha: float, says: str) -> None:
    with pytest.raises(InputError, match=says):
        serving_policy("vllm", load_of("dear"), chains("dear", alpha), 0.01)


def test_tensorrt_takes_no_schedule_that_rises() -> None:
    """Deep drafts pay only in company: batch 1 is bound to the largest K, or there is no schedule."""

    class Rising(LoadTimes):
        def gain_at(self, batch_size: int, config: DraftConfig, drafted_share: float = 1.0) -> Any:
            better = config.levels == (1 if batch_size == 1 else 4)
            gain = super().gain_at(1, config)
            return gain._replace(rounds=gain.rounds * (0.5 if better else 1.5))

    times, candidates = Rising(TIMES["cheap"], load_of("cheap").load), chains("cheap", 0.5)
    assert [one.draft_tokens for one in serving_policy("vllm", times, candidates, 0.01).ranges] == [1, 4]
    with pytest.raises(
        InputError, match=r"must begin with the largest K; here K=1 is best at batch 1 and K=4 at batch 2"
    ):
        serving_policy("tensorrt-llm", times, candidates, 0.01)


def test_times_that_begin_above_batch_one_make_no_policy() -> None:
    table = TIMES["cheap"]
    some = table.model_copy(update={"points": [point for point in table.points if point.batch_size > 1]})
    load = LoadSettings(batch_sizes={4: 1.0}, context_tokens=512, answer_tokens=128)
    with pytest.raises(InputError, match=r"times begin at batch 2 .*; a policy begins at 1"):
        serving_policy("vllm", LoadTimes(some, load), chains("cheap", 0.8), 0.01)


def test_trees_are_no_part_of_a_policy() -> None:
    times, candidates = load_of("cheap"), chains("cheap", 0.8)
    tree = Candidate(DraftConfig(9, "wide"), Estimate(9.0), 20.0, 1.0)
    assert serving_policy("vllm", times, [*candidates, tree], 0.01) == serving_policy("vllm", times, candidates, 0.01)
