"""One matrix product where several linear layers of a frozen model read the same few rows.

Attention asks its layers for queries, keys and values of the same input, a gated MLP for gate and up. On a GPU a
product of a few rows takes as long to launch as to run, so the first layer that is asked multiplies by all their
weights side by side, and the others find their part waiting. Large inputs keep to products of their own: there the copy
of a slice would cost more than a launch.

Weights are not doubled: each layer's own becomes a view of the joint one. A layer that is copied around the same
weights shares with the one that it was copied from; one that has copies of them, or whose weights were put elsewhere or
learn, multiplies by its own.
"""

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_MOST_ROWS = 512  # of an input whose product is shared


def share_products(model: nn.Module) -> int:
    """Merge the query, key and value layers, and gate and up layers, of a model. Returns how many groups share."""
    # Candidates: the named layers of every module, None where a module lacks one.
    groups: list[list[Any]] = [
        [getattr(module, name, None) for name in names] for module in model.modules() for names in _GROUPS
    ]
    found = [linears for linears in groups if _can_share(linears)]
    for linears in found:
        _SharedProduct(linears)
    return len(found)


def joint_weights(linears: Sequence[Any]) -> Tensor | None:
    """Weights of layers that share a product, one below the other; None: they share none, were moved or have biases."""
    shared = getattr(linears[0], "shared", None) if linears else None
    return shared.joint(linears) if isinstance(shared, _SharedProduct) else None


def _can_share(linears: Sequence[Any]) -> bool:
    """Whether these are plain linear layers of one input size, type and device, all with or all without bias."""
    # A layer with a forward of its own (quantised, adapted, shared already) is left alone.
    if not all(type(linear) is nn.Linear and "forward" not in vars(linear) for linear in linears):
        return False
    first = linears[0].weight
    # Weights must stack along their rows; so must the biases, if any.
    same = all(
        one.weight.shape[1] == first.shape[1] and one.weight.dtype == first.dtype and one.weight.device == first.device
        for one in linears
    )
    return same and len({one.bias is None for one in linears}) == 1


class _SharedProduct:
    """The joint weights of a few layers, and the parts of the last product that no layer has fetched."""

    @torch.no_grad()
    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        # The joint weights, and the last product: its input, the state it was made in, and the parts left over, each
        # with how often its weights had changed.
        self._sizes = [linear.out_features for linear in linears]
        self._weight = torch.cat([linear.weight for linear in linears])
        self._bias: Tensor | None = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
        self._device_type = self._weight.device.type
        self._input: Tensor | None = None
        self._state: object = None
        self._parts: dict[int, tuple[Tensor, int]] = {}
        # Each layer's weights become views of the joint ones, and its forward asks here.
        weights = torch.split(self._weight, self._sizes)
        biases = None if self._bias is None else torch.split(self._bias, self._sizes)
        for number, linear in enumerate(linears):
            linear.weight.data = weights[number]
            if biases is not None:
                linear.bias.data = biases[number]
            # The layer keeps its place in the module tree; only its forward is replaced.
            ours: Any = linear
            ours.shared, ours.shared_number = self, number
            ours.forward = MethodType(_forward, linear)  # bound: a copy of the layer asks for itself
        # Addresses tell later whether a layer's weights were moved or replaced.
        self._held = [(linear.weight, linear.bias) for linear in linears]
        self._addresses = [_addresses(*held) for held in self._held]

    def __deepcopy__(self, memo: dict[int, Any]) -> "_SharedProduct | None":
        """Copy of a sharing layer: it goes on sharing where its weights are the same tensors, else it gets None."""
        ours = [tensor for held in self._held for tensor in held if tensor is not None]
        return self if all(memo.get(id(tensor)) is tensor for tensor in ours) else None

    def joint(self, linears: Sequence[Any]) -> Tensor | None:
        """The joint weights where these layers are those that share them, without biases and with weights in place."""
        if self._bias is not None or any(getattr(linear, "shared", None) is not self for linear in linears):
            return None
        in_place = [_addresses(linear.weight, None) for linear in linears] == self._addresses
        return self._weight if in_place else None

    def part(self, linear: nn.Linear, number: int, x: Tensor) -> Tensor:
        """Product of one layer with x [..., H], taken from the joint product where possible.

        `number`: the layer's place in its group.
        """
        weight, bias = linear.weight, linear.bias
        # 1) Weights that were put elsewhere or learn, and large inputs: a product of its own.
        moved = _addresses(weight, bias) != self._addresses[number]
        learns = torch.is_grad_enabled() and (weight.requires_grad or (bias is not None and bias.requires_grad))
        if moved or learns or x.numel() > _MOST_ROWS * x.shape[-1]:
            return F.linear(x, weight, bias)
        # 2) Another layer has multiplied this very input by all weights: fetch the part.
        state = self._product_state(x)
        if self._input is x and self._state == state:
            part, changes = self._parts.pop(number, (None, 0))
            if not self._parts:
                self._input = None
            if part is not None and changes == _changes(weight, bias):
                return part
        # 3) The first that is asked multiplies for all.
        parts = torch.split(F.linear(x, self._weight, self._bias), self._sizes, dim=-1)
        changed = [_changes(*held) for held in self._held]
        self._input, self._state = x, state  # x is kept until all is fetched, so that no other takes its identity
        self._parts = {other: (parts[other], changed[other]) for other in range(len(parts)) if other != number}
        return parts[number]

    def _product_state(self, x: Tensor) -> object:
        """State that a product depends on beside the tensors: a kept part is only valid while it stays the same.

        Torch counts no in-place changes of inference tensors: such an x must stay as it is between two layers.
        """
        autocast = torch.get_autocast_dtype(self._device_type) if torch.is_autocast_enabled(self._device_type) else None
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast
        return modes, x.requires_grad, _changes(x, None)


def _changes(one: Tensor, other: Tensor | None) -> int:
    """Number of in-place changes of two tensors together; inference tensors count 0."""
    found = 0 if one.is_inference() else one._version
    return found if other is None or other.is_inference() else found + other._version


def _addresses(weight: Tensor, bias: Tensor | None) -> tuple[int, int | None]:
    return weight.data_ptr(), None if bias is None else bias.data_ptr()


def _forward(linear: Any, x: Tensor) -> Tensor:
    shared: _SharedProduct | None = linear.shared
    if shared is None:  # a copy of the layer
        return F.linear(x, linear.weight, linear.bias)
    return shared.part(linear, linear.shared_number, x)
