"""One matrix product where several linear layers of a frozen model read the same few rows.

Attention asks its layers for queries, keys and values of the same input, a gated MLP for gate and up. On a GPU a
product of a few rows takes as long to launch as to run, so the first layer that is asked multiplies by all their
weights side by side, and the others find their part waiting. Large inputs keep to products of their own: there the copy
of a slice would cost more than a launch.

Weights are not doubled: each layer's own becomes a view of the joint one. A copy of a layer, or one whose weights were
put elsewhere or learn, multiplies by its own.
"""

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_MOST_ROWS = 256


def share_products(model: nn.Module) -> int:
    """Let every attention and gated MLP of the model multiply once; how many do."""
    groups: list[list[Any]] = [
        [getattr(module, name, None) for name in names] for module in model.modules() for names in _TOGETHER
    ]
    found = [linears for linears in groups if _alike(linears)]
    for linears in found:
        _Shared(linears)
    return len(found)


def _alike(linears: Sequence[Any]) -> bool:
    if not all(type(linear) is nn.Linear and "forward" not in vars(linear) for linear in linears):
        return False
    first = linears[0].weight
    same = all(
        one.weight.shape[1] == first.shape[1] and one.weight.dtype == first.dtype and one.weight.device == first.device
        for one in linears
    )
    return same and len({one.bias is None for one in linears}) == 1


class _Shared:
    """The joint weights of a few layers, and the parts of the last product that nobody has fetched."""

    @torch.no_grad()
    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self._sizes = [linear.out_features for linear in linears]
        self._weight = torch.cat([linear.weight for linear in linears])
        self._bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
        self._input: Tensor | None = None
        self._parts: dict[int, Tensor] = {}
        weights = torch.split(self._weight, self._sizes)
        biases = None if self._bias is None else torch.split(self._bias, self._sizes)
        for place, linear in enumerate(linears):
            linear.weight.data = weights[place]
            if biases is not None:
                linear.bias.data = biases[place]
            ours: Any = linear
            ours.shared, ours.place = self, place
            ours.forward = MethodType(_forward, linear)  # bound: a copy of the layer asks for itself
        self._addresses = [weight.data_ptr() for weight in weights]

    def part(self, linear: nn.Linear, place: int, x: Tensor) -> Tensor:
        """What the layer at this place makes of x [..., H]."""
        moved = linear.weight.data_ptr() != self._addresses[place]
        learns = torch.is_grad_enabled() and linear.weight.requires_grad
        if moved or learns or x.numel() > _MOST_ROWS * x.shape[-1]:
            return F.linear(x, linear.weight, linear.bias)
        if self._input is not x or place not in self._parts:
            self._input = x  # kept until all is fetched, so that no other tensor takes its identity
            product = F.linear(x, self._weight, self._bias)
            self._parts = dict(enumerate(torch.split(product, self._sizes, dim=-1)))
        part = self._parts.pop(place)
        if not self._parts:
            self._input = None
        return part


def _forward(linear: Any, x: Tensor) -> Tensor:
    part: Tensor = linear.shared.part(linear, linear.place, x)
    return part
