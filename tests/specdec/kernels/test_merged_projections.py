"""Layers that multiply once for all of them give what each would give alone."""

import copy
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from families import SUPPORTED, tiny
from torch import Tensor, nn

from draftforge.specdec.kernels.merged_projections import share_products
from draftforge.specdec.models import CausalModel


class Layer(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, size, bias=bias) for size in (12, 4, 6))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.k_proj(x), self.q_proj(x), self.v_proj(x)]  # in any order


def products(layer: Layer, x: Tensor) -> tuple[list[Tensor], int]:
    with torch.no_grad(), patch.object(F, "linear", wraps=F.linear) as linear:
        return layer(x), linear.call_count


@pytest.mark.parametrize("bias", [False, True])
def test_one_product_gives_all_three(bias: bool) -> None:
    layer, x = Layer(bias), torch.randn(2, 3, 8)
    expected, alone = products(layer, x)
    assert share_products(layer) == 1 and alone == 3
    found, calls = products(layer, x)
    assert calls == 1
    torch.testing.assert_close(found, expected)
    assert products(layer, x.clone())[1] == 1 and products(layer, x)[1] == 1


def test_many_rows_are_multiplied_apart() -> None:
    layer, x = Layer(), torch.randn(600, 8)
    expected, _ = products(layer, x)
    share_products(layer)
    found, calls = products(layer, x)
    assert calls == 3
    torch.testing.assert_close(found, expected)


def test_a_part_asked_twice_is_made_again() -> None:
    layer, x = Layer(), torch.randn(2, 8)
    expected = layer.requires_grad_(False).k_proj(x)
    share_products(layer)
    torch.testing.assert_close([layer.k_proj(x), layer.k_proj(x)], [expected, expected])


def test_weights_that_change_in_place_count() -> None:
    layer, x = Layer(), torch.randn(2, 8)
    share_products(layer)
    with torch.no_grad():
        layer.v_proj.weight.mul_(2)
    found, calls = products(layer, x)
    assert calls == 1
    torch.testing.assert_close(found[2], F.linear(x, layer.v_proj.weight))


def test_weights_that_learn_get_their_gradient() -> None:
    layer, x = Layer(), torch.randn(2, 8)
    share_products(layer)
    sum(part.sum() for part in layer(x)).backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
    frozen = layer.requires_grad_(False)
    asked = x.clone().requires_grad_()
    sum(part.sum() for part in frozen(asked)).backward()
    assert asked.grad is not None


def test_a_copy_and_moved_weights_are_their_own() -> None:
    layer, x = Layer(), torch.randn(2, 8)
    share_products(layer)
    before = [part.detach().clone() for part in layer(x)]
    other = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert all(float(part.detach().abs().max()) == 0 for part in other(x))
    torch.testing.assert_close([part.detach() for part in layer(x)], before)
    doubled = layer.double()(x.double())
    torch.testing.assert_close([part.float().detach() for part in doubled], before)


def test_a_copy_around_the_same_weights_shares_with_the_first() -> None:
    layer, x = Layer(True).requires_grad_(False), torch.randn(2, 8)
    share_products(layer)
    other = copy.deepcopy(layer, {id(parameter): parameter for parameter in layer.parameters()})
    assert {vars(part)["shared"] for part in other.children()} == {vars(layer.q_proj)["shared"]}
    layer.q_proj.weight.mul_(2)
    found, calls = products(other, x)
    assert calls == 1
    torch.testing.assert_close(found, layer(x))


def test_a_copy_holds_no_joint_weights() -> None:
    layer, x = Layer().requires_grad_(False), torch.randn(2, 8)
    share_products(layer)
    expected, other = layer(x), copy.deepcopy(layer)
    assert all(vars(part)["shared"] is None for part in other.children())
    found, calls = products(other, x)
    assert calls == 3
    torch.testing.assert_close(found, expected)


def left_over(bias: bool = False) -> tuple[Layer, Tensor]:
    """A layer whose q is made and not fetched, and what it was made of."""
    layer, x = Layer(bias).requires_grad_(False), torch.randn(2, 8)
    share_products(layer)
    layer.k_proj(x), layer.v_proj(x)
    return layer, x


def test_what_is_left_over_is_made_again_after_a_change() -> None:
    layer, x = left_over()
    x.mul_(2)
    torch.testing.assert_close(layer.q_proj(x), F.linear(x, layer.q_proj.weight))
    layer, x = left_over()
    layer.q_proj.weight.mul_(2)
    torch.testing.assert_close(layer.q_proj(x), F.linear(x, layer.q_proj.weight))
    layer, x = left_over(bias=True)
    layer.q_proj.bias = nn.Parameter(torch.ones(12), requires_grad=False)
    torch.testing.assert_close(layer.q_proj(x), F.linear(x, layer.q_proj.weight, layer.q_proj.bias))


def test_what_is_left_over_of_another_mode_is_made_again() -> None:
    layer = Layer().requires_grad_(False)
    share_products(layer)
    x = torch.randn(2, 8, requires_grad=True)
    with torch.no_grad():
        layer.k_proj(x)
    assert layer.q_proj(x).requires_grad
    x = torch.randn(2, 8)
    with torch.inference_mode():
        layer.k_proj(x)
    assert not layer.q_proj(x).is_inference()
    with torch.autocast("cpu", torch.bfloat16):
        layer.k_proj(x)
    assert layer.q_proj(x).dtype == torch.float32


def test_a_bias_alone_that_learns_gets_its_gradient() -> None:
    layer = Layer(True)
    share_products(layer)
    layer.q_proj.weight.requires_grad_(False)
    assert layer.q_proj(torch.randn(2, 8)).requires_grad


def test_layers_that_differ_are_left_alone() -> None:
    layer = Layer()
    layer.k_proj = nn.Linear(9, 4, bias=False)
    assert share_products(layer) == 0
    layer = Layer()
    layer.v_proj.bias = nn.Parameter(torch.zeros(6))
    assert share_products(layer) == 0
    assert share_products(nn.Sequential(nn.Linear(2, 2))) == 0


def test_what_is_shared_is_not_shared_again() -> None:
    layer = Layer()
    assert (share_products(layer), share_products(layer)) == (1, 0)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_a_model_says_what_it_said(family: str) -> None:
    model, ids = CausalModel(tiny(*SUPPORTED[family])), torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        before = model.states(ids).hidden_BTH
        assert share_products(model.model) == 2 * model.num_layers
        torch.testing.assert_close(model.states(ids).hidden_BTH, before, rtol=1e-4, atol=1e-5)
