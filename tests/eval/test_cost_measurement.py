"""Measuring times: which rounds count, interleaving on a busy machine, and the grid of a load."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import stand_ins
import torch

from draftforge.errors import DeviceMemoryError, InputError
from draftforge.eval import cost_measurement
from draftforge.eval.cost_measurement import Grid, costs_file, measure_costs, most_context, rounds_to_time
from draftforge.eval.cost_model import CostFit
from draftforge.eval.cost_table import CostKey, CostTable, cached_costs, cost_key
from draftforge.eval.draft_configs import DraftConfig, ProposerSpec
from draftforge.eval.serving_load import LoadTimes
from draftforge.eval.settings import CostSettings, LoadSettings, ScoreSettings
from draftforge.specdec.models import CausalModel
from draftforge.specdec.proposers.factory import make_proposer
from draftforge.specdec.proposers.prompt_lookup import PromptLookup
from draftforge.specdec.proposers.tree_settings import StaticTree
from draftforge.specdec.requests import DecodeRun, RoundSeconds
from draftforge.specdec.sampling_settings import SamplingSettings

LOAD = LoadSettings(batch_sizes={1: 0.5, 3: 0.5}, context_tokens=48, answer_tokens=32)
SETTINGS = ScoreSettings(costs=CostSettings(prompts=2, rounds=6, warmup_rounds=1), load=LOAD)


@pytest.fixture(scope="module")
def target() -> CausalModel:
    return stand_ins.target(4)


def key_of(target: CausalModel, draft: Any, specs: list[ProposerSpec]) -> CostKey:
    return cost_key(target, draft, specs, SETTINGS)


def lookup(*depths: int) -> list[ProposerSpec]:
    return [ProposerSpec(PromptLookup, depths)]


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


def measure(target: CausalModel, monkeypatch: pytest.MonkeyPatch, decoder: FakeDecoder, **settings: Any) -> CostTable:
    monkeypatch.setattr(cost_measurement, "decode_rounds", decoder)
    monkeypatch.setattr(cost_measurement, "RoundTimer", FakeTimer)
    rounds = len(decoder.by_K[0])
    known = ScoreSettings(costs=CostSettings(**{"rounds": rounds, "prompts": 1, "warmup_rounds": 0, **settings}))
    prompts, shares = [[1, 2], [3] * 4, [4]], list[float]()
    found = measure_costs(key_of(target, "lookup", lookup(2)), target, lookup(2), prompts, known, reached=shares.append)
    runs = 1 + known.costs.prompts  # one warms up
    assert shares == [done / runs for done in range(2, runs + 1)]
    assert rounds_to_time(lookup(2), len(prompts), known, None) == 2 * runs * rounds
    return found


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
    assert table.plain_seconds == pytest.approx(0.081) and table.cost(DraftConfig(0)).rounds == 12
    cost = table.cost(DraftConfig(2))
    assert (cost.draft_seconds, cost.verify_seconds, cost.rest_seconds) == pytest.approx((0.02, 0.1, 0.002))
    assert cost.rounds == 10
    assert cost.context_tokens == pytest.approx(3 + 3.5)


def test_on_a_gpu_a_decoder_makes_all_its_rounds_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds run ahead there as they do when they serve; one at a time they would wait for the host."""
    rounds = [RoundSeconds(0.0, 1.0, 0.0, 0, 1)] * 4
    fake = FakeDecoder({0: rounds, 1: rounds, 2: rounds})
    monkeypatch.setattr(cost_measurement, "decode_rounds", fake)
    monkeypatch.setattr(cost_measurement, "RoundTimer", FakeTimer)
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"), max_positions=100, vocab_size=9)
    decoders = cost_measurement._decoders(lookup(1, 2), ScoreSettings(), lambda spec: spec.configs)
    found = cost_measurement.interleaved_rounds(on_gpu, decoders, [[1, 2]], SamplingSettings(), 4)
    assert fake.turns == [0] * 4 + [1] * 4 + [2] * 4
    assert all(len(timed) == 4 for timed in found.values())


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
        assert table.cost(DraftConfig(2)).seconds == pytest.approx(0.042)


def test_a_shape_that_seldom_drafts_is_timed_on_what_it_does(
    target: CausalModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = [RoundSeconds(0.001, 0.03, 0.0, 0, 1)] * 7
    once = [*empty[:6], RoundSeconds(0.1, 0.1, 0.1, 2, 1)]
    table = measure(target, monkeypatch, FakeDecoder({0: empty, 2: once}))
    assert table.cost(DraftConfig(2)).rounds == 7 and table.cost(DraftConfig(2)).verify_seconds == pytest.approx(0.03)
    assert "K=2: only 1 full rounds" in capsys.readouterr().err


@pytest.mark.slow
def test_real_rounds_are_timed(target: CausalModel) -> None:
    draft = stand_ins.near_copy(target)
    tree = StaticTree(kind="static", widths=[3, 2])
    specs = [
        ProposerSpec(partial(make_proposer, draft, target), (1, 3)),
        ProposerSpec(partial(make_proposer, draft, target, tree), (2,), "wide", tree),
    ]
    settings = ScoreSettings(costs=CostSettings(prompts=3, rounds=6, warmup_rounds=1))
    key = cost_key(target, draft, specs, settings)
    prompts = [*stand_ins.prompts(2), [7] * target.max_positions]
    table = measure_costs(key, target, specs, prompts, settings)
    configs = [DraftConfig(0), DraftConfig(1), DraftConfig(3), DraftConfig(2, "wide")]
    rows = [table.cost(config) for config in configs]
    assert table.points == rows and table.plain_seconds > 0
    assert all(row.rounds == 3 * 5 and row.verify_seconds > 0 for row in rows)  # not one draft was clipped
    assert all(row.draft_seconds > 0 for row in rows[1:])
    assert CostTable.model_validate_json(table.model_dump_json()) == table


def test_rounds_that_outgrow_the_context_are_named() -> None:
    """64 positions: one of the prompt, one of the prefill, and rounds of up to 3 tokens."""
    target, most = CausalModel(stand_ins.llama(layers=2), context=64), 20

    def rounds(count: int) -> int:
        settings = ScoreSettings(costs=CostSettings(prompts=1, rounds=count, warmup_rounds=1))
        key = cost_key(target, "lookup", lookup(1, 2), settings)
        return measure_costs(key, target, lookup(1, 2), [[1, 2]], settings).points[0].rounds

    with pytest.raises(InputError, match=rf"^score\.costs\.rounds = {most + 1}: .* context of 64; at most {most} do"):
        rounds(most + 1)
    assert rounds(most) == most - 1


def test_the_grid_is_a_cross() -> None:
    load = LoadSettings(batch_sizes={6: 1, 20: 0}, context_tokens=512, answer_tokens=128)
    grid = Grid.around(load, 800)
    assert grid.batch_sizes == [1, 2, 4, 6, 8, 16, 20] and grid.contexts == [256, 512, 800]
    assert grid.prompts == [224, 448, 800]
    assert grid.places[:3] == [(20, 800), (20, 512), (20, 256)] and len(grid.places) == 7 + 4
    with pytest.raises(InputError, match=r"score\.load\.context_tokens 512: .* at most 500 fit the target's context"):
        Grid.around(load, 500)


@pytest.mark.slow
def test_real_rounds_and_prompts_are_fitted(
    target: CausalModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, tree = stand_ins.near_copy(target), StaticTree(kind="static", widths=[3, 2])
    specs = [
        ProposerSpec(partial(make_proposer, draft, target), (1, 2, 4)),
        ProposerSpec(partial(make_proposer, draft, target, tree), (2,), "wide", tree),
    ]
    grid = Grid.around(LOAD, most_context(target.max_positions, 4, 6))
    key = key_of(target, draft, specs)
    timed, inner, shares = list[int](), cost_measurement.interleaved_rounds, list[float]()

    def counted(target: Any, decoders: Any, prompts: Any, sampling: Any, rounds: int) -> Any:
        timed.append(len(decoders) * rounds)
        return inner(target, decoders, prompts, sampling, rounds)

    monkeypatch.setattr(cost_measurement, "interleaved_rounds", counted)
    table = measure_costs(key, target, specs, stand_ins.prompts(2), SETTINGS, grid, shares.append)
    assert sum(timed) == rounds_to_time(specs, 2, SETTINGS, grid)
    assert shares == sorted(shares) and len(shares) == len(grid.places) and shares[-1] == 1
    fit = CostFit(table)
    assert fit.batch_sizes == [1, 2, 3] and {point.context_tokens for point in table.points} == {24, 48, 96}
    assert [point.tokens for point in table.prompt_points] == [16, 32, 64]
    assert list(fit.rounds) == ["plain", "chain", "tree wide"]
    assert fit.rounds["chain"].tokens_per_level == {1: 2, 2: 3, 4: 5}
    assert fit.rounds["tree wide"].tokens_per_level == {2: 10}
    assert len(table.points) == 7 * 5 and all(point.rounds >= 5 for point in table.points)
    weights = sum(tensor.nbytes for tensor in [*draft.parameters(), *draft.buffers()])
    assert 0 < table.draft_bytes <= weights
    keys_and_values = 2 * 4 * 2 * 8 * 4  # layers, heads, head size, float32
    assert keys_and_values <= table.cache_bytes_per_token < 1.5 * keys_and_values
    times = LoadTimes(table, LOAD)
    assert times.plain_seconds > 0 and times.cost(DraftConfig(3)).draft_seconds > 0
    assert times.gain(DraftConfig(2, "wide")).rounds > 0 and fit.prompt(DraftConfig(0), 1, 32) > 0
    # The table is kept in a file of its grid; batch 1 has another.
    path = tmp_path / costs_file(key, grid)
    assert cached_costs(path, key, lambda: table) == cached_costs(path, key, pytest.fail) == table
    assert len({costs_file(key, one) for one in (None, grid, grid._replace(contexts=[48]))}) == 3


def test_what_drafts_without_weights_takes_no_memory(target: CausalModel) -> None:
    specs = [ProposerSpec(PromptLookup, (1, 2))]
    grid = Grid([1], [32], 32, [16])
    table = measure_costs(key_of(target, "lookup", specs), target, specs, [[1, 2, 3]], SETTINGS, grid)
    assert table.draft_bytes == 0 and CostFit(table).rounds["chain"].levels == (1, 2)


def test_a_batch_that_does_not_fit_is_named(target: CausalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = cost_measurement.interleaved_rounds

    def interleaved(target: Any, decoders: Any, prompts: list[list[int]], *args: Any) -> Any:
        if len(prompts) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate much")
        return inner(target, decoders, prompts, *args)

    monkeypatch.setattr(cost_measurement, "interleaved_rounds", interleaved)
    specs = [ProposerSpec(PromptLookup, (1,))]
    key = key_of(target, "lookup", specs)
    with pytest.raises(DeviceMemoryError, match=r"score\.load: batch 3 at context 96 does not fit the device's memory"):
        measure_costs(key, target, specs, [[1, 2]], SETTINGS, Grid.around(LOAD, 128))
    with pytest.raises(InputError, match="no prompts"):
        measure_costs(key, target, specs, [], SETTINGS, Grid.around(LOAD, 128))
