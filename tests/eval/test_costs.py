"""Times: which rounds count, what the key depends on, and that a shape is measured once."""

import copy
import json
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import stand_ins
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from draftforge.errors import InputError, LockedError
from draftforge.eval import costs
from draftforge.eval.draft_configs import DraftConfig, ProposerSpec
from draftforge.eval.figures import Estimate
from draftforge.eval.settings import CostSettings, ScoreSettings
from draftforge.specdec.models import CausalModel
from draftforge.specdec.proposers import make_proposer
from draftforge.specdec.proposers.lookup import PromptLookup
from draftforge.specdec.proposers.trees import StaticTree
from draftforge.specdec.requests import DecodeRun, RoundSeconds
from draftforge.storage import lock


@pytest.fixture(scope="module")
def target() -> CausalModel:
    return stand_ins.target()


def lookup(*depths: int) -> list[ProposerSpec]:
    return [ProposerSpec(PromptLookup, depths)]


def key_of(target: CausalModel, draft: Any = "lookup", K: tuple[int, ...] = (1, 2)) -> costs.CostKey:
    return costs.cost_key(target, draft, lookup(*K), ScoreSettings())


def table_of(key: costs.CostKey, plain: float = 0.03) -> costs.CostTable:
    by_plan = {
        label: costs.RoundCost(draft_seconds=0.002 * K["levels"], verify_seconds=0.031, rest_seconds=0.001, rounds=9)
        for label, K in key.plans.items()
    }
    return costs.CostTable(key=key, plain_seconds=plain, plain_rounds=50, context_tokens=40.0, by_plan=by_plan)


class FakeDecoder:
    """Takes rounds of given times instead of decoding; starts them anew with each prompt."""

    def __init__(self, by_K: dict[int, list[RoundSeconds]]) -> None:
        self.by_K, self.calls, self.turns = by_K, list[tuple[int, list[int]]](), list[int]()

    def __call__(self, run: DecodeRun) -> Iterator[list[Any]]:
        K = run.draft_tokens if run.proposer is not None else 0
        assert len(run.requests) == 1 and not run.requests[0].stop_ids and run.timer is not None
        self.calls.append((K, run.requests[0].prompt_ids))
        yield []
        for one in self.by_K[K]:
            self.turns.append(K)
            run.timer.rounds.append(one)
            yield []


class FakeTimer:
    """Holds what it is given."""

    def __init__(self, device: torch.device) -> None:
        self.rounds: list[RoundSeconds] = []


def measure(
    target: CausalModel, monkeypatch: pytest.MonkeyPatch, decoder: FakeDecoder, **settings: Any
) -> costs.CostTable:
    monkeypatch.setattr(costs, "decode_rounds", decoder)
    monkeypatch.setattr(costs, "RoundTimer", FakeTimer)
    rounds = len(decoder.by_K[0])
    known = ScoreSettings(costs=CostSettings(**{"rounds": rounds, "prompts": 1, "warmup_rounds": 0, **settings}))
    return costs.measure_costs(key_of(target, K=(2,)), target, lookup(2), [[1, 2], [3] * 4, [4]], known)


def test_times_leave_out_warm_up_and_clipped_rounds(target: CausalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = RoundSeconds(9.0, 9.0, 9.0, 2, 1)
    full = [RoundSeconds(0.01 * i, 0.1, 0.002, 2, 1) for i in (2, 2, 3, 1, 2)]
    clipped = RoundSeconds(5.0, 5.0, 5.0, 1, 1)
    plain = [RoundSeconds(0.0, 0.08, 0.001, 0, 1)] * 6
    decoder = FakeDecoder({0: [slow._replace(drafted=0), *plain], 2: [slow, *full, clipped]})
    table = measure(target, monkeypatch, decoder, prompts=2, warmup_rounds=1)
    assert decoder.calls[:2] == decoder.calls[2:4] == [(0, [1, 2]), (2, [1, 2])]  # the first time to warm up
    assert decoder.calls[4:] == [(0, [3] * 4), (2, [3] * 4)]
    assert decoder.turns == [0, 2] * 21  # round by round
    assert table.plain_seconds == pytest.approx(0.081) and table.plain_rounds == 12
    cost = table.by_plan["2"]
    assert (cost.draft_seconds, cost.verify_seconds, cost.rest_seconds) == pytest.approx((0.02, 0.1, 0.002))
    assert cost.rounds == 10
    assert table.context_tokens == pytest.approx(3 + 3.5)


@pytest.mark.parametrize("busy_rounds", [3, 9, 13, 16])
def test_a_speedup_does_not_move_when_the_machine_is_busy_for_a_while(
    target: CausalModel, monkeypatch: pytest.MonkeyPatch, busy_rounds: int
) -> None:
    """As seen on a shared host: for seconds at a time every round takes three times as long."""
    factors = [3.0 if turn < busy_rounds else 1.0 for turn in range(16)]
    plain = [RoundSeconds(0.0, 0.02 * f, 0.001 * f, 0, 1) for f in factors]
    drafted = [RoundSeconds(0.01 * f, 0.03 * f, 0.002 * f, 2, 1) for f in factors]
    table = measure(target, monkeypatch, FakeDecoder({0: plain, 2: drafted}))
    assert table.gain(DraftConfig(2)).speedup(1.0) == pytest.approx(21 / 42)
    if busy_rounds < 12:
        assert table.by_plan["2"].seconds == pytest.approx(0.042)


def test_a_shape_that_seldom_drafts_is_timed_on_what_it_does(
    target: CausalModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = [RoundSeconds(0.001, 0.03, 0.0, 0, 1)] * 7
    once = [*empty[:6], RoundSeconds(0.1, 0.1, 0.1, 2, 1)]
    table = measure(target, monkeypatch, FakeDecoder({0: empty, 2: once}))
    assert table.by_plan["2"].rounds == 7 and table.by_plan["2"].verify_seconds == pytest.approx(0.03)
    assert "K=2: only 1 full rounds" in capsys.readouterr().err


def test_warm_up_must_leave_rounds_to_time() -> None:
    with pytest.raises(ValidationError, match="warmup_rounds 8: must be below rounds 8"):
        CostSettings(rounds=8, warmup_rounds=8)


def test_real_rounds_are_timed(target: CausalModel) -> None:
    draft = stand_ins.near_copy(target)
    tree = StaticTree(kind="static", widths=[3, 2])
    draftings = [
        ProposerSpec(partial(make_proposer, draft, target), (1, 3)),
        ProposerSpec(partial(make_proposer, draft, target, tree), (2,), "wide", tree),
    ]
    settings = ScoreSettings(costs=CostSettings(prompts=3, rounds=12, warmup_rounds=1))
    key = costs.cost_key(target, draft, draftings, settings)
    prompts = [*stand_ins.prompts(2), [7] * target.max_positions]
    table = costs.measure_costs(key, target, draftings, prompts, settings)
    assert list(table.by_plan) == ["1", "3", "wide"] and table.cost(DraftConfig(2, "wide")).draft_seconds > 0
    assert table.plain_seconds > 0 and table.plain_rounds == 3 * 11
    assert all(cost.rounds == 3 * 11 for cost in table.by_plan.values())  # not one draft was clipped
    assert all(cost.draft_seconds > 0 and cost.verify_seconds > 0 for cost in table.by_plan.values())
    assert table.by_plan["3"].draft_seconds > table.by_plan["1"].draft_seconds
    assert costs.CostTable.model_validate_json(table.model_dump_json()) == table


def test_rounds_that_outgrow_the_context_are_named(target: CausalModel) -> None:
    """256 positions: one of the prompt, one of the prefill, and rounds of up to 3 tokens."""
    most = (target.max_positions - 2) // 3
    wrong = ScoreSettings(costs=CostSettings(prompts=1, rounds=most + 1, warmup_rounds=1))
    with pytest.raises(InputError, match=rf"^score\.costs\.rounds = {most + 1}: .* context of 256; at most {most} do"):
        costs.measure_costs(key_of(target), target, lookup(1, 2), [[1, 2]], wrong)
    fits = ScoreSettings(costs=CostSettings(prompts=1, rounds=most, warmup_rounds=1))
    assert costs.measure_costs(key_of(target), target, lookup(1, 2), [[1, 2]], fits).plain_rounds == most - 1


def test_no_prompts_are_refused(target: CausalModel) -> None:
    with pytest.raises(InputError, match="no prompts"):
        costs.measure_costs(key_of(target), target, lookup(1, 2), [], ScoreSettings())


def test_weights_do_not_change_the_key_but_shapes_do(target: CausalModel) -> None:
    draft = stand_ins.near_copy(target, seed=1)
    key = key_of(target, draft)
    assert key_of(stand_ins.target(seed=7), stand_ins.near_copy(target, seed=2)).digest == key.digest
    assert key_of(target, draft, (2, 1)).digest == key.digest
    assert key_of(target, draft, (1, 2, 3)).digest != key.digest
    assert key_of(target, stand_ins.random_eagle3(target)).digest != key.digest
    full, reduced = stand_ins.random_eagle3(target), stand_ins.random_eagle3(target, draft_vocab=20)
    assert key_of(target, full).digest != key_of(target, reduced).digest
    assert key_of(CausalModel(stand_ins.llama(layers=2)), draft).digest != key.digest
    half = CausalModel(copy.deepcopy(target.model).to(torch.bfloat16))
    assert key_of(half, draft).digest != key.digest
    heads = copy.deepcopy(target.model)
    heads.config.num_attention_heads = 3  # same tensors, another split
    assert costs.module_signature(heads) != costs.module_signature(target.model)
    named = copy.deepcopy(target.model)
    named.config._name_or_path, named.config.eos_token_id = "elsewhere", 5
    assert costs.module_signature(named) == costs.module_signature(target.model)


def test_hardware_is_named() -> None:
    name = costs.hardware_name(torch.device("cpu"))
    assert name.endswith(f", {torch.get_num_threads()} threads") and len(name) > len(", 1 threads")


def test_times_are_measured_once(target: CausalModel, tmp_path: Path) -> None:
    key, calls = key_of(target), []

    def measure() -> costs.CostTable:
        calls.append(1)
        return table_of(key)

    first = costs.cached_costs(tmp_path / "costs", key, measure)
    assert costs.cached_costs(tmp_path / "costs", key, measure) == first == table_of(key)
    assert len(calls) == 1
    (path,) = (tmp_path / "costs").glob("*.json")
    path.write_text(path.read_text()[:-30])
    assert costs.cached_costs(tmp_path / "costs", key, measure) == first  # an unreadable table is measured again
    assert len(calls) == 2
    with pytest.raises(InputError, match="another shape"):
        costs.cached_costs(tmp_path / "costs", key_of(target, K=(5,)), measure)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("plain_seconds", 0),
        ("plain_seconds", float("nan")),
        ("plain_rounds", 0),
        ("context_tokens", -1),
        ("by_plan.1.draft_seconds", float("inf")),
        ("by_plan.2.draft_seconds", -0.01),
        ("by_plan.1.verify_seconds", 0),
        ("by_plan.1.rest_seconds", "NaN"),
        ("by_plan.2.rounds", 0),
        ("by_plan", {}),
        ("by_plan.3", {"draft_seconds": 0.1, "verify_seconds": 0.1, "rest_seconds": 0.1, "rounds": 5}),
    ],
)
def test_times_that_cannot_be_are_measured_again(
    target: CausalModel, tmp_path: Path, field: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    key = key_of(target)
    sound = costs.cached_costs(tmp_path, key, lambda: table_of(key))
    (path,) = tmp_path.glob("costs-*.json")
    stored = json.loads(path.read_text())
    at = stored
    *above, last = field.split(".")
    for name in above:
        at = at[name]
    at[last] = value
    path.write_text(json.dumps(stored))
    capsys.readouterr()
    assert costs.cached_costs(tmp_path, key, lambda: table_of(key)) == sound
    assert "measuring again" in capsys.readouterr().err
    assert costs.cached_costs(tmp_path, key, pytest.fail) == sound


def test_two_processes_do_not_measure_at_once(target: CausalModel, tmp_path: Path) -> None:
    key = key_of(target)
    with lock(tmp_path / ".costs.lock"), pytest.raises(LockedError, match="a process that measures times"):
        costs.cached_costs(tmp_path, key, lambda: table_of(key))
    entered, leave = threading.Event(), threading.Event()

    def slow() -> costs.CostTable:
        entered.set()
        assert leave.wait(10)
        return table_of(key)

    thread = threading.Thread(target=costs.cached_costs, args=(tmp_path, key, slow))
    thread.start()
    assert entered.wait(10)
    threading.Timer(0.1, leave.set).start()
    assert costs.cached_costs(tmp_path, key, pytest.fail, wait_seconds=10) == table_of(key)
    thread.join()


@given(st.floats(1.0, 6.0), st.integers(1, 2), st.floats(0.001, 1.0))
def test_break_even_is_a_speedup_of_one(tau: float, K: int, plain: float) -> None:
    key = costs.CostKey(
        hardware="h", software="s", dtype="float32", target={}, draft={}, sampling="greedy",
        plans={"1": {"levels": 1}, "2": {"levels": 2}},
    )  # fmt: skip
    table = table_of(key, plain)
    speedup = table.gain(DraftConfig(K)).estimate(Estimate(tau, tau - 0.1, tau + 0.1, 5))
    seconds = 0.002 * K + 0.031 + 0.001
    assert speedup.value == pytest.approx(tau * plain / seconds)
    assert speedup.low == pytest.approx((tau - 0.1) * plain / seconds)
    even = table.gain(DraftConfig(K)).break_even_tau
    assert table.gain(DraftConfig(K)).estimate(Estimate(even)).value == pytest.approx(1.0)
    assert table.round_seconds(DraftConfig(K), 0.0) == pytest.approx(plain)
    assert table.round_seconds(DraftConfig(K), 0.25) == pytest.approx(0.25 * seconds + 0.75 * plain)


def test_an_unmeasured_depth_is_named(target: CausalModel) -> None:
    with pytest.raises(InputError, match=r"K=4 \(4 levels\): no times .* for 1 \(1 levels\), 2 \(2 levels\)"):
        table_of(key_of(target)).gain(DraftConfig(4))
    with pytest.raises(InputError, match=r"tree wide \(2 levels\): no times measured"):
        table_of(key_of(target)).cost(DraftConfig(2, "wide"))
    deep = ProposerSpec(PromptLookup, (3,), "wide")
    table = table_of(costs.cost_key(target, "lookup", [deep], ScoreSettings()))
    assert table.cost(DraftConfig(3, "wide")).rounds == 9
    with pytest.raises(InputError, match=r"tree wide \(2 levels\): no times measured; .* wide \(3 levels\)"):
        table.cost(DraftConfig(2, "wide"))
