"""Two optimizers in one: each parameter gets the step of its own."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from draftforge.data.store import Capture
from draftforge.specdec.drafts.small import SmallDraft
from draftforge.train.families import build
from draftforge.train.families.base import Family
from draftforge.train.families.initial_draft import store_initial_draft
from draftforge.train.families.small import SmallFamily
from draftforge.train.losses.linear_head import LossSettings
from draftforge.train.optimizers import Muon, make_optimizer, orthogonal, read_moments, set_rate, write_moments
from draftforge.train.settings import Eagle3Settings, LoraSettings, Settings, SmallSettings

MUON = Eagle3Settings(
    draft_vocabulary=200, draft_tokens=2, optimizer="muon", learning_rate=1e-3, muon_rate=5e-3, weight_decay=0.0
)


ADAPTERS = SmallSettings(layers=2, lora=LoraSettings(rank=4), optimizer="muon", weight_decay=0.0)


def family_of(settings: Settings, capture: Capture, load_target: Any, folder: Path) -> Family:
    init = store_initial_draft(settings, 0, capture, folder, load_target)
    return build(settings, init, load_target, capture, torch.device("cpu"))


@pytest.fixture
def family(tiny_capture: Capture, load_tiny_target: Any, tmp_path: Path) -> Family:
    return family_of(MUON, tiny_capture, load_tiny_target, tmp_path / "t")


def make_up_gradients(family: Family, seed: int) -> None:
    drawn = torch.Generator().manual_seed(seed)
    for parameter in family.trainable().values():
        parameter.grad = torch.randn(parameter.shape, generator=drawn)


def step(family: Family, optimizer: torch.optim.Optimizer, rate: float, seed: int) -> dict[str, Tensor]:
    """How far one step moves each parameter."""
    make_up_gradients(family, seed)
    before = {name: parameter.detach().clone() for name, parameter in family.trainable().items()}
    set_rate(optimizer, rate)
    optimizer.step()
    return {name: parameter.detach() - before[name] for name, parameter in family.trainable().items()}


def test_first_step_is_orthogonal_inside_and_signs_elsewhere(family: Family) -> None:
    """At half the peak rate: AdamW moves every number by the rate, Muon turns the gradient into a near-rotation."""
    moved = step(family, make_optimizer(family, MUON), MUON.learning_rate / 2, seed=1)
    hidden = {id(p) for p in family.parameter_groups()[0]}
    seen = 0
    for name, parameter in family.trainable().items():
        assert parameter.grad is not None
        if id(parameter) in hidden:
            size = MUON.muon_rate / 2 * 0.2 * math.sqrt(max(parameter.shape))
            values = torch.linalg.svdvals(moved[name]) / size
            assert float(values.quantile(0.02)) > 0.3 and float(values.max()) < 1.4, (
                name
            )  # all but a gradient's null space
            assert float((moved[name] * parameter.grad).sum()) < 0
            seen += 1
        else:
            expected = -MUON.learning_rate / 2 * parameter.grad.sign()
            torch.testing.assert_close(moved[name], expected, atol=1e-6, rtol=1e-3)
    assert seen == len(hidden) > 5 and seen < len(family.trainable())


def test_experts_in_one_tensor_train_by_adamw() -> None:
    config = Qwen3MoeConfig(
        hidden_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        vocab_size=64,
    )
    model = AutoModelForCausalLM.from_config(config)
    settings = SmallSettings(layers=2, optimizer="muon", weight_decay=0.0)
    family = SmallFamily(SmallDraft(model), settings, LossSettings({"kl": 1.0}), None)
    moved = step(family, make_optimizer(family, settings), settings.learning_rate, seed=1)
    experts = {name: parameter for name, parameter in family.trainable().items() if parameter.ndim > 2}
    for name, parameter in experts.items():
        assert parameter.grad is not None
        expected = -settings.learning_rate * parameter.grad.sign()
        torch.testing.assert_close(moved[name], expected, atol=1e-6, rtol=1e-3)
    assert len(experts) == 4 and all(float(change.abs().sum()) > 0 for change in moved.values())


def test_state_put_back_gives_the_same_next_step(family: Family) -> None:
    optimizer = make_optimizer(family, MUON)
    for seed in range(3):
        step(family, optimizer, 1e-3, seed)
    moments = copy.deepcopy(read_moments(family, optimizer))  # the next step would write into them
    weights = {name: parameter.detach().clone() for name, parameter in family.trainable().items()}
    kinds = {frozenset(moment) for moment in moments.values()}
    assert kinds == {frozenset({"momentum_buffer"}), frozenset({"exp_avg", "exp_avg_sq"})}
    whole = step(family, optimizer, 1e-3, seed=9)
    with torch.no_grad():
        for name, parameter in family.trainable().items():
            parameter.copy_(weights[name])
    other = make_optimizer(family, MUON)
    write_moments(family, other, moments, 3)
    for name, moved in step(family, other, 1e-3, seed=9).items():
        assert torch.equal(moved, whole[name]), name


def test_adapters_are_matrices_only_and_train_by_muon_alone(
    tiny_capture: Capture, load_tiny_target: Any, tmp_path: Path
) -> None:
    family = family_of(ADAPTERS, tiny_capture, load_tiny_target, tmp_path / "t")
    optimizer = make_optimizer(family, ADAPTERS)
    step(family, optimizer, ADAPTERS.learning_rate, seed=1)
    before = {name: parameter.detach().clone() for name, parameter in family.trainable().items()}
    moments = copy.deepcopy(read_moments(family, optimizer))
    assert moments.keys() == before.keys()
    assert {key for moment in moments.values() for key in moment} == {"momentum_buffer"}
    moved = step(family, optimizer, ADAPTERS.learning_rate, seed=2)
    assert all(float(change.abs().sum()) > 0 for change in moved.values())
    with torch.no_grad():
        for name, parameter in family.trainable().items():
            parameter.copy_(before[name])
    other = make_optimizer(family, ADAPTERS)
    write_moments(family, other, moments, 1)
    for name, change in step(family, other, ADAPTERS.learning_rate, seed=2).items():
        assert torch.equal(change, moved[name]), name


@pytest.mark.parametrize(("shape", "dtype"), [((24, 40), torch.bfloat16), ((40, 24), torch.bfloat16)])
def test_muon_steps_as_torchs_own(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """torch's products are bfloat16 always; ours are in the precision of the training."""
    drawn = torch.Generator().manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(shape)) for _ in range(2))
    mine = Muon([{"params": [ours]}], 0.1, dtype)
    reference = torch.optim.Muon([theirs], lr=0.0, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for rate in (1e-2, 2e-2, 5e-3):
        gradient = torch.randn(shape, generator=drawn)
        for parameter, optimizer in ((ours, mine), (theirs, reference)):
            parameter.grad = gradient.clone()
            set_rate(optimizer, rate)
            optimizer.step()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=rate * 0.02)
    assert torch.equal(mine.state[ours]["momentum_buffer"], reference.state[theirs]["momentum_buffer"])


def test_a_matrix_of_zeros_stays_zero() -> None:
    assert torch.equal(orthogonal(torch.zeros(3, 5), torch.float32), torch.zeros(3, 5))
