"""Measuring over a grid: which places, real rounds, and that one grid is measured once."""

from functools import partial
from pathlib import Path
from typing import Any

import loads
import pytest
import stand_ins
import torch

from draftforge.errors import DeviceMemoryError, InputError
from draftforge.eval import cost_measurement
from draftforge.eval.cost_measurement import Grid
from draftforge.eval.cost_model import CostFit
from draftforge.eval.costs import CostKey, cost_key
from draftforge.eval.draft_configs import DraftConfig, ProposerSpec
from draftforge.eval.serving_load import LoadTimes
from draftforge.eval.settings import CostSettings, LoadSettings, ScoreSettings
from draftforge.specdec.models import CausalModel
from draftforge.specdec.proposers import make_proposer
from draftforge.specdec.proposers.lookup import PromptLookup
from draftforge.specdec.proposers.trees import StaticTree

LOAD = LoadSettings(batch_sizes={1: 0.5, 3: 0.5}, context_tokens=48, answer_tokens=32)
SETTINGS = ScoreSettings(costs=CostSettings(prompts=2, rounds=6, warmup_rounds=1), load=LOAD)


@pytest.fixture(scope="module")
def target() -> CausalModel:
    return stand_ins.target()


def key_of(target: CausalModel, draft: Any, draftings: list[ProposerSpec]) -> CostKey:
    return cost_key(target, draft, draftings, SETTINGS)


def test_the_grid_is_a_cross() -> None:
    load = LoadSettings(batch_sizes={6: 1, 20: 0}, context_tokens=512, answer_tokens=128)
    grid = Grid.of(load, 800)
    assert grid.batch_sizes == [1, 2, 4, 6, 8, 16, 20] and grid.contexts == [256, 512, 800]
    assert grid.prompts == [224, 448, 800]
    assert grid.places[:3] == [(20, 800), (20, 512), (20, 256)] and len(grid.places) == 7 + 4
    with pytest.raises(InputError, match=r"score\.load\.context_tokens 512: .* at most 500 fit the target's context"):
        Grid.of(load, 500)


def test_real_rounds_and_prompts_are_fitted(target: CausalModel) -> None:
    draft, tree = stand_ins.near_copy(target), StaticTree(kind="static", widths=[3, 2])
    draftings = [
        ProposerSpec(partial(make_proposer, draft, target), (1, 2, 4)),
        ProposerSpec(partial(make_proposer, draft, target, tree), (2,), "wide", tree),
    ]
    grid = Grid.of(LOAD, cost_measurement.most_context(target.max_positions, 4, 6))
    fit = cost_measurement.measure_fit(
        key_of(target, draft, draftings), target, draftings, stand_ins.prompts(2), SETTINGS, grid
    )
    assert fit.batch_sizes == [1, 2, 3] and fit.contexts == [24, 48, 96] and fit.prompt_tokens == [16, 32, 64]
    assert list(fit.rounds) == ["plain", "chain", "tree wide"]
    assert fit.rounds["chain"].tokens_per_level == {1: 2, 2: 3, 4: 5}
    assert fit.rounds["tree wide"].tokens_per_level == {2: 10}
    assert len(fit.points) == 7 * 5 and all(point.rounds >= 5 for point in fit.points)
    weights = sum(tensor.nbytes for tensor in [*draft.parameters(), *draft.buffers()])
    assert 0 < fit.draft_bytes <= weights
    keys_and_values = 2 * 4 * 2 * 8 * 4  # layers, heads, head size, float32
    assert keys_and_values <= fit.cache_bytes_per_token < 1.5 * keys_and_values
    assert CostFit.model_validate_json(fit.model_dump_json()) == fit
    times = LoadTimes(fit, LOAD)
    assert (
        times.plain_seconds > 0
        and times.cost(DraftConfig(3)).draft_seconds > 0
        and times.gain(DraftConfig(2, "wide")).rounds > 0
    )
    assert fit.prompt(32)[0] > 0


def test_what_drafts_without_weights_takes_no_memory(target: CausalModel) -> None:
    draftings = [ProposerSpec(PromptLookup, (1, 2))]
    grid = Grid([1], [32], 32, [16])
    fit = cost_measurement.measure_fit(
        key_of(target, "lookup", draftings), target, draftings, [[1, 2, 3]], SETTINGS, grid
    )
    assert fit.draft_bytes == 0 and fit.rounds["chain"].levels == (1, 2)


def test_a_batch_that_does_not_fit_is_named(target: CausalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = cost_measurement.by_turns

    def by_turns(target: Any, modes: Any, prompts: list[list[int]], *args: Any) -> Any:
        if len(prompts) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate much")
        return inner(target, modes, prompts, *args)

    monkeypatch.setattr(cost_measurement, "by_turns", by_turns)
    draftings = [ProposerSpec(PromptLookup, (1,))]
    key = key_of(target, "lookup", draftings)
    with pytest.raises(DeviceMemoryError, match=r"score\.load: batch 3 at context 96 does not fit the device's memory"):
        cost_measurement.measure_fit(key, target, draftings, [[1, 2]], SETTINGS, Grid.of(LOAD, 128))
    with pytest.raises(InputError, match="no prompts"):
        cost_measurement.measure_fit(key, target, draftings, [], SETTINGS, Grid.of(LOAD, 128))


def test_one_grid_is_measured_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit, grid, measured = loads.fit_of(lambda B, L, N, C: 1e-3), Grid.of(LOAD, 128), list[int]()

    def measure() -> CostFit:
        measured.append(1)
        return fit

    for _ in range(2):
        assert cost_measurement.cached_fit(tmp_path, fit.key, grid, measure) == fit
    assert len(measured) == 1
    other = Grid.of(LOAD.model_copy(update={"context_tokens": 50}), 128)
    assert cost_measurement.cached_fit(tmp_path, fit.key, other, measure) == fit and len(measured) == 2
    for path in tmp_path.glob("fit-*.json"):
        path.write_text("{}")
    cost_measurement.cached_fit(tmp_path, fit.key, grid, measure)
    assert len(measured) == 3 and "not readable fitted times; measuring again" in capsys.readouterr().err
