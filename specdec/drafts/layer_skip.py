"""A draft that is the target without some of its sublayers (Draft & Verify, Zhang et al. 2023, arXiv 2309.08168).

A sublayer is the attention or the gated product of one decoder layer: what it adds to the residual stream is left out.
The draft is a view. It has no weights of its own, and of the target it changes nothing: the stack, and those layers
that lack a sublayer, are shallow copies whose children are the target's own modules but for the missing ones. Layers
keep their places and numbers, so that each has its own rotary embedding and window, and its own row of a cache.
"""

import copy
from collections import OrderedDict
from types import MethodType
from typing import TypeVar

import torch
from pydantic import BaseModel, ConfigDict, field_validator
from torch import Tensor, nn

from ...errors import FormatError, InputError
from ..models import CausalModel, named
from .base import DraftModule

ATTENTION, MLP = "self_attn", "mlp"
"""Names of a decoder layer's two sublayers in transformers."""
M = TypeVar("M", bound=nn.Module)


class SkippedLayers(BaseModel):
    """Skipped sublayers: layers without attention, and layers without MLP, counted from 0 and sorted."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    attention: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()

    @field_validator("attention", "mlp")
    @classmethod
    def _sorted(cls, layers: tuple[int, ...]) -> tuple[int, ...]:
        if min(layers, default=0) < 0 or len(set(layers)) < len(layers):
            raise ValueError(f"{list(layers)}: must be layers from 0 on, each named once")
        return tuple(sorted(layers))

    def kept_share(self, layers: int) -> float:
        """Share of sublayers that the draft still runs, of a target with `layers` layers."""
        return 1 - (len(self.attention) + len(self.mlp)) / (2 * layers)


class SkippedDraft(DraftModule):
    """A self-speculative draft: the target without some sublayers. `lm` runs it on a KV cache of its own, which is all
    the memory that the draft takes."""

    family = "skipped"

    def __init__(self, target: CausalModel, skipped: SkippedLayers) -> None:
        super().__init__()
        self.config = skipped
        self.lm = target.with_stack(_without(target, skipped))

    @property
    def vocab_size(self) -> int:
        return self.lm.vocab_size

    @property
    def max_positions(self) -> int:
        return self.lm.max_positions

    @property
    def device(self) -> torch.device:
        """The target's device: the draft has no weights of its own."""
        return self.lm.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm.dtype


def check_skips(target: CausalModel, skipped: SkippedLayers) -> None:
    """Raise InputError for a layer that the target lacks, FormatError for a target with other sublayers than ours."""
    # Numbers must be of the target's layers.
    for field, layers in skipped:
        if max(layers, default=-1) >= target.num_layers:
            raise InputError(f"{field} of layer {max(layers)}: the target has {target.num_layers} layers, 0 the first")

    # The sublayers must bear the names by which they are replaced.
    for number, layer in enumerate(_layers(target)):
        if missing := [name for name in (ATTENTION, MLP) if name not in layer._modules]:
            raise FormatError(f"{named(target.model)}: layer {number} has no {missing[0]}; it cannot be skipped")


def _without(target: CausalModel, skipped: SkippedLayers) -> nn.Module:
    # Each layer becomes a view in which the skipped sublayers add zeros; a layer without both is the identity.
    check_skips(target, skipped)
    layers: list[nn.Module] = []
    for number, layer in enumerate(_layers(target)):
        gone: dict[str, nn.Module] = {}
        if number in skipped.attention:
            gone[ATTENTION] = _NoAttention()
        if number in skipped.mlp:
            gone[MLP] = _NoMLP()
        layers.append(_NoLayer() if len(gone) == 2 else _view(layer, gone))
    return _view(target.stack, {"layers": nn.ModuleList(layers)})


def _layers(target: CausalModel) -> list[nn.Module]:
    return list(target.stack.layers)  # type: ignore[arg-type]


def _view(module: M, children: dict[str, nn.Module]) -> M:
    """The module over the same tensors, with other children and with no hooks: who watches the target's own passes
    sees none of the draft's."""
    view = copy.copy(module)
    view.__dict__.update(
        _modules={**module._modules, **children}, _forward_hooks=OrderedDict(), _forward_pre_hooks=OrderedDict()
    )
    # A fused forward is bound to the module that it was made for.
    if "forward" in vars(module):
        view.forward = MethodType(vars(module)["forward"].__func__, view)
    return view


class _NoAttention(nn.Module):
    def forward(self, hidden_states: Tensor, *inputs: object, **options: object) -> tuple[Tensor, None]:
        return torch.zeros_like(hidden_states), None


class _NoMLP(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return torch.zeros_like(hidden_states)


class _NoLayer(nn.Module):
    def forward(self, hidden_states: Tensor, *inputs: object, **options: object) -> Tensor:
        return hidden_states
