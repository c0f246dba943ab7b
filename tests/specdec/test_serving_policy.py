"""Policies as engines read them: what each scheduler takes at every batch size is what the policy says.

vLLM's own reader is asked in its environment (tests/engines/test_vllm_commands.py). SGLang and TensorRT-LLM need a GPU
to be installed: their rules here are those of SGLang 0.5.23 (speculative/adaptive_spec_params.py) and of TensorRT-LLM's
`get_draft_len_for_batch_size`, in both of its readings, with the checks of their configs.
"""

import itertools
import json
import shlex
from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from draftforge.errors import InputError
from draftforge.specdec.model_card import DraftFacts, card_files, write_card
from draftforge.specdec.serve_commands import serve_command
from draftforge.specdec.serving_plan import FoundPlan, ServingPlan, read_plan
from draftforge.specdec.serving_policy import (
    POLICY_LAYOUTS,
    AcceptanceGate,
    DraftRange,
    PolicyEngine,
    ServingPolicy,
    check_policy,
    known_policy_engine,
)
from draftforge.specdec.target_settings import TargetSettings

TARGET = TargetSettings(model="owner/model", revision="main", context=4096)
FALLING = (DraftRange(1, 4, 4), DraftRange(5, 16, 2), DraftRange(17, 64, 0))
ENGINES: tuple[PolicyEngine, ...] = ("vllm", "sglang", "tensorrt-llm")


PARTS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 6)), min_size=1, max_size=6)
"""Width and K of each range."""


def ranges_of(parts: list[tuple[int, int]]) -> tuple[DraftRange, ...]:
    """Ranges from batch 1 on, one after the other."""
    ends = list(itertools.accumulate(width for width, _ in parts))
    return tuple(DraftRange(before + 1, end, K) for before, end, (_, K) in zip([0, *ends], ends, parts))


def asked(ranges: tuple[DraftRange, ...], size: int) -> int:
    return next(one.draft_tokens for one in ranges if one.first <= size <= one.last)


def content(policy: ServingPolicy, family: str, plan: ServingPlan) -> Any:
    """The policy's file, parsed as its engine does."""
    command = serve_command(POLICY_LAYOUTS[policy.engine], family, plan, "/a draft", TARGET, policy)
    return yaml.safe_load(command.policy_text) if policy.file.endswith("yaml") else json.loads(command.policy_text)


def sglang_steps(config: Any, size: int, graphs: list[int]) -> int:
    """Steps of a batch: it is padded to a CUDA graph, and the largest entry at or below that counts."""
    assert all(key.isdigit() and set(entry) == {"candidate_steps"} for key, entry in config.items())
    entries = {int(key): entry["candidate_steps"] for key, entry in config.items()}
    padded = next((graph for graph in graphs if graph >= size), size)
    keys = sorted(entries)
    (steps,) = entries[keys[max(0, bisect_right(keys, padded) - 1)]]  # one candidate: nothing to adapt
    assert type(steps) is int and steps >= 0
    return steps


def tensorrt_length(schedule: dict[int, int], most: int, size: int, newer: bool) -> int:
    """Draft length of a batch, after the checks of both versions against max_draft_len."""
    assert all(type(key) is int and key >= 1 for key in schedule)
    assert all(0 <= length <= most for length in schedule.values())
    assert schedule[1] == schedule[min(schedule)] == most > 0
    keys = sorted(schedule)
    if newer:
        place = bisect_left(keys, size)
        return schedule[keys[place]] if place < len(keys) else 0
    return schedule[keys[bisect_right(keys, size) - 1]]


@given(PARTS, st.lists(st.integers(1, 80), unique=True))
def test_sglang_drafts_what_the_policy_says(parts: list[tuple[int, int]], graphs: list[int]) -> None:
    assume(any(K for _, K in parts))
    policy = ServingPolicy("sglang", ranges_of(parts))
    for size in range(1, policy.largest + 1):
        assert sglang_steps(policy.schedule, size, []) == asked(policy.ranges, size)
        padded = min((graph for graph in graphs if graph >= size), default=size)
        taken = asked(policy.ranges, padded) if padded <= policy.largest else 0
        assert sglang_steps(policy.schedule, size, sorted(graphs)) == taken
    assert not {sglang_steps(policy.schedule, policy.largest + more, []) for more in (1, 1000)} - {0}


@given(PARTS)
def test_vllm_drafts_what_the_policy_says_and_nothing_above(parts: list[tuple[int, int]]) -> None:
    assume(any(K for _, K in parts))
    policy = ServingPolicy("vllm", ranges_of(parts))
    found = [K for first, last, K in policy.schedule for _ in range(first, last + 1)]
    most = policy.largest
    assert found[:most] == [asked(policy.ranges, size) for size in range(1, most + 1)]
    assert found[-1] == 0  # vLLM keeps the last K for all larger batches
    assert [first for first, _, _ in policy.schedule] == [1, *(last + 1 for _, last, _ in policy.schedule[:-1])]


@given(PARTS, st.booleans())
def test_both_readings_of_tensorrts_schedule_are_the_policy(parts: list[tuple[int, int]], newer: bool) -> None:
    most = max(K for _, K in parts)
    assume(most)
    policy = ServingPolicy("tensorrt-llm", ranges_of([(parts[0][0], most), *parts[1:]]))
    for size in range(1, policy.largest + 1):
        assert tensorrt_length(policy.schedule, most, size, newer) == asked(policy.ranges, size)
    for size in (policy.largest + 1, policy.largest + 1000):
        assert tensorrt_length(policy.schedule, most, size, newer) == 0


def test_tensorrts_file() -> None:
    policy = ServingPolicy("tensorrt-llm", FALLING, AcceptanceGate(0.12345678, 900), (1, 14, 26))
    plan = ServingPlan.chain(3, "token")
    assert content(policy, "eagle3", plan) == {
        "speculative_config": {
            "decoding_type": "Eagle3",
            "speculative_model": "/a draft",
            "max_draft_len": 4,
            "draft_len_schedule": {1: 4, 4: 4, 5: 2, 16: 2, 17: 0, 64: 0, 65: 0},
            "use_rejection_sampling": True,
            "eagle3_layers_to_capture": [1, 14, 26],
            "acceptance_rate_window_size": 900,
            "acceptance_rate_threshold": 0.1235,
        }
    }
    command = serve_command("sglang", "eagle3", plan, "/a draft", TARGET, policy)
    expected = ["trtllm-serve", "owner/model", "--config", "/a draft/policy-tensorrt-llm.yaml", "--max_seq_len", "4096"]
    assert shlex.split(command.text) == expected
    notes = " ".join(command.notes)
    for said in (
        "older versions, which stop at them",
        "min_runtime_draft_len draft one token",
        "12.3% of drafted",
        "over 900 rounds",
        "revision main",
    ):
        assert said in notes
    assert "above batch 64, the largest that was measured, TensorRT-LLM does not draft" in command.notes


def test_vllms_command_reads_the_file() -> None:
    policy = ServingPolicy("vllm", FALLING[:2])
    command = serve_command("vllm", "small", ServingPlan.chain(1, "block"), "/a draft", TARGET, policy)
    expected = ["vllm", "serve", "owner/model", "--revision", "main", "--max-model-len", "4096"]
    assert shlex.split(command.text) == [*expected, "--config", "/a draft/policy-vllm.yaml"]
    assert content(policy, "small", ServingPlan.chain(1, "block"))["speculative-config"] == {
        "method": "draft_model",
        "model": "/a draft",
        "num_speculative_tokens": 4,
        "draft_sample_method": "probabilistic",
        "rejection_sample_method": "block",
        "num_speculative_tokens_per_batch_size": [[1, 4, 4], [5, 16, 2], [17, 17, 0]],
    }
    said = (
        "above batch 16, the largest that was measured, vLLM does not draft; list larger ones in score.load.batch_siz"
    )
    assert any("where K is 0" in note for note in command.notes) and any(said in note for note in command.notes)
    off = serve_command("vllm", "small", ServingPlan.chain(1), "/d", TARGET, ServingPolicy("vllm", FALLING))
    assert off.notes[-1] == "above batch 64, the largest that was measured, vLLM does not draft"


def test_a_card_writes_the_policy_and_the_plan_names_it(tmp_path: Path) -> None:
    policy, facts = ServingPolicy("sglang", FALLING), DraftFacts("eagle3", "t")
    before = FoundPlan(ServingPlan.chain(2).model_copy(update={"policy": "policy-vllm.yaml"}))
    command = write_card(tmp_path, str(tmp_path), "sglang", before, facts, TARGET, policy=policy)
    plan = read_plan(tmp_path)
    assert plan is not None and plan.policy == policy.file == "policy-sglang.json"
    assert json.loads((tmp_path / plan.policy).read_text()) == policy.schedule
    words = shlex.split(command.text)
    assert words[-2:] == ["--speculative-adaptive-config", str(tmp_path / plan.policy)]
    assert command.text in (tmp_path / "README.md").read_text()
    write_card(tmp_path, str(tmp_path), "sglang", before, facts, TARGET)  # without one
    again = read_plan(tmp_path)
    assert again is not None and not again.policy


@pytest.mark.parametrize(
    ("engine", "ranges", "says"),
    [
        ("vllm", (DraftRange(1, 8, 0),), "drafts at no batch size"),
        ("vllm", (DraftRange(2, 8, 1),), "must follow one another"),
        ("sglang", (DraftRange(1, 8, 1), DraftRange(10, 12, 2)), "must follow one another"),
        ("tensorrt-llm", (DraftRange(1, 8, 1), DraftRange(9, 12, 2)), "K=1 at batch 1; its schedule must begin with"),
    ],
)
def test_what_is_no_policy(engine: PolicyEngine, ranges: tuple[DraftRange, ...], says: str) -> None:
    with pytest.raises(InputError, match=says):
        ServingPolicy(engine, ranges)


def test_families_and_formats_that_an_engine_has_no_policy_for() -> None:
    assert [check_policy(engine, "eagle3", None) for engine in ENGINES] == ["vllm", "sglang", "sglang"]
    assert check_policy("vllm", "dflash", "vllm") == "vllm"
    with pytest.raises(InputError, match=r"--policy llama.cpp: must be one of vllm, sglang, tensorrt-llm"):
        known_policy_engine("llama.cpp")
    with pytest.raises(InputError, match=r"--policy vllm: .* a medusa draft; it does for small, eagle, eagle3, dflash"):
        check_policy("vllm", "medusa", None)
    with pytest.raises(InputError, match=r"--policy sglang: .* a small draft"):
        check_policy("sglang", "small", None)
    with pytest.raises(InputError, match="--policy vllm: goes with --format vllm, not speculators"):
        check_policy("vllm", "eagle3", "speculators")


def test_files_of_a_card_are_known_by_its_plan(tmp_path: Path) -> None:
    assert card_files(tmp_path) == set()
    write_card(tmp_path, "/d", "vllm", FoundPlan(ServingPlan.chain(2)), DraftFacts("small", "t"), None)
    assert card_files(tmp_path) - {""} == {"serve.json", "README.md"}
    policy = ServingPolicy("vllm", FALLING)
    write_card(tmp_path, "/d", "vllm", FoundPlan(ServingPlan.chain(2)), DraftFacts("small", "t"), None, policy=policy)
    assert card_files(tmp_path) == {path.name for path in tmp_path.iterdir()}
