"""The cost table: what its key depends on, that a shape is measured once, and what rounds come to."""

import copy
import json
import threading
from pathlib import Path
from typing import Any

import loads
import pytest
import stand_ins
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftforge.errors import CorruptDataError, InputError, LockedError
from draftforge.eval import cost_table
from draftforge.eval.acceptance import Estimate
from draftforge.eval.cost_model import CostFit
from draftforge.eval.draft_configs import DraftConfig, ProposerSpec
from draftforge.eval.settings import ScoreSettings
from draftforge.specdec.models import CausalModel
from draftforge.specdec.proposers.prompt_lookup import PromptLookup
from draftforge.storage import lock


@pytest.fixture(scope="module")
def target() -> CausalModel:
    return stand_ins.target(4)


def lookup(*depths: int) -> list[ProposerSpec]:
    return [ProposerSpec(PromptLookup, depths)]


def key_of(target: CausalModel, draft: Any = "lookup", K: tuple[int, ...] = (1, 2)) -> cost_table.CostKey:
    return cost_table.cost_key(target, draft, lookup(*K), ScoreSettings())


def table_of(key: cost_table.CostKey, plain: float = 0.03) -> cost_table.CostTable:
    return loads.batch_one_table(
        key, plain, {label: (0.002 * K["levels"], 0.031, 0.001) for label, K in key.plans.items()}
    )


def test_weights_do_not_change_the_key_but_shapes_do(target: CausalModel) -> None:
    draft = stand_ins.near_copy(target, seed=1)
    key = key_of(target, draft)
    assert (
        key_of(stand_ins.CausalModel(stand_ins.llama(seed=7)), stand_ins.near_copy(target, seed=2)).digest == key.digest
    )
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
    assert cost_table.module_signature(heads) != cost_table.module_signature(target.model)
    named = copy.deepcopy(target.model)
    named.config._name_or_path, named.config.eos_token_id = "elsewhere", 5
    assert cost_table.module_signature(named) == cost_table.module_signature(target.model)


def test_hardware_is_named() -> None:
    name = cost_table.hardware_name(torch.device("cpu"))
    assert name.endswith(f", {torch.get_num_threads()} threads") and len(name) > len(", 1 threads")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("verify_seconds", value) for value in (0.0, 5e-324, 1e300)),
        *((name, 10**300) for name in ("levels", "tokens", "context_tokens", "rounds")),
        *(("batch_size", value) for value in (3, 10**30)),
    ],
)
def test_times_of_another_machine_can_be_fitted_or_are_refused(name: str, value: float, tmp_path: Path) -> None:
    path = tmp_path / "theirs.json"
    cost_table.write_tables(path, [loads.grid_table(lambda B, L, N, C: 1e-4 * L, [1, 2])])
    known = json.loads(path.read_text())
    assert CostFit(cost_table.read_tables(path)[0]).rounds
    point = next(one for one in known["fits"][0]["points"] if one["way"] != cost_table.PLAIN_WAY)
    point[name] = value
    path.write_text(json.dumps(known))
    with pytest.raises(CorruptDataError, match=r"theirs\.json: fits"):
        cost_table.read_tables(path)


def test_times_are_measured_once(target: CausalModel, tmp_path: Path) -> None:
    key, calls = key_of(target), []

    def measure() -> cost_table.CostTable:
        calls.append(1)
        return table_of(key)

    first = cost_table.cached_costs(tmp_path / "costs" / "a.json", key, measure)
    assert cost_table.cached_costs(tmp_path / "costs" / "a.json", key, measure) == first == table_of(key)
    assert len(calls) == 1
    (path,) = (tmp_path / "costs").glob("*.json")
    path.write_text(path.read_text()[:-30])
    assert (
        cost_table.cached_costs(tmp_path / "costs" / "a.json", key, measure) == first
    )  # an unreadable table is measured again
    assert len(calls) == 2
    with pytest.raises(InputError, match="another shape"):
        cost_table.cached_costs(tmp_path / "costs" / "a.json", key_of(target, K=(5,)), measure)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("points", []),
        ("points.0.way", "chain"),
        ("points.0.verify_seconds", 0),
        ("points.0.verify_seconds", float("nan")),
        ("points.1.draft_seconds", float("inf")),
        ("points.1.draft_seconds", -0.01),
        ("points.1.rest_seconds", "NaN"),
        ("points.2.rounds", 0),
        ("points.2.batch_size", 0),
    ],
)
def test_times_that_cannot_be_are_measured_again(
    target: CausalModel, tmp_path: Path, field: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    key = key_of(target)
    sound = cost_table.cached_costs(tmp_path / "a.json", key, lambda: table_of(key))
    (path,) = tmp_path.glob("*.json")
    stored = json.loads(path.read_text())
    at = stored
    *above, last = field.split(".")
    for name in above:
        at = at[int(name)] if name.isdigit() else at[name]
    at[last] = value
    path.write_text(json.dumps(stored))
    capsys.readouterr()
    assert cost_table.cached_costs(tmp_path / "a.json", key, lambda: table_of(key)) == sound
    assert "measuring again" in capsys.readouterr().err
    assert cost_table.cached_costs(tmp_path / "a.json", key, pytest.fail) == sound


def test_two_processes_do_not_measure_at_once(target: CausalModel, tmp_path: Path) -> None:
    key = key_of(target)
    with lock(tmp_path / ".costs.lock"), pytest.raises(LockedError, match="a process that measures times"):
        cost_table.cached_costs(tmp_path / "a.json", key, lambda: table_of(key))
    entered, leave = threading.Event(), threading.Event()

    def slow() -> cost_table.CostTable:
        entered.set()
        assert leave.wait(10)
        return table_of(key)

    thread = threading.Thread(target=cost_table.cached_costs, args=(tmp_path / "a.json", key, slow))
    thread.start()
    assert entered.wait(10)
    threading.Timer(0.1, leave.set).start()
    assert cost_table.cached_costs(tmp_path / "a.json", key, pytest.fail, wait_seconds=10) == table_of(key)
    thread.join()


@given(st.floats(1.0, 6.0), st.integers(1, 2), st.floats(0.001, 1.0))
def test_break_even_is_a_speedup_of_one(tau: float, K: int, plain: float) -> None:
    key = cost_table.CostKey(
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
    on_a_gpu = table.model_copy(update={"idle_as_full": True})
    assert on_a_gpu.round_seconds(DraftConfig(K), 0.25) == pytest.approx(seconds)


def test_an_unmeasured_depth_is_named(target: CausalModel) -> None:
    with pytest.raises(InputError, match=r"K=4 \(4 levels\): no times .* for 1 \(1 levels\), 2 \(2 levels\)"):
        table_of(key_of(target)).gain(DraftConfig(4))
    with pytest.raises(InputError, match=r"tree wide \(2 levels\): no times measured"):
        table_of(key_of(target)).cost(DraftConfig(2, "wide"))
    deep = ProposerSpec(PromptLookup, (3,), "wide")
    table = table_of(cost_table.cost_key(target, "lookup", [deep], ScoreSettings()))
    assert table.cost(DraftConfig(3, "wide")).rounds == 9
    with pytest.raises(InputError, match=r"tree wide \(2 levels\): no times measured; .* wide \(3 levels\)"):
        table.cost(DraftConfig(2, "wide"))
