"""Changes of weights: another order, another scale, another dtype."""

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..drafts.eagle3 import Eagle3Draft
from .reading import Change, Reading, Scene, put, shared_copy

_CODED = (0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
"""Sizes of coded weights, of 1 / sqrt(width): steps of a root of two, as tau bears an error of a fifth."""


def halves(reading: Reading, scene: Scene) -> Iterator[Change]:
    """Embedding and state the other way round in what the first layer, or EAGLE's fc, reads."""
    draft: Any = shared_copy(reading.draft)
    if isinstance(draft, Eagle3Draft):
        attention = draft.midlayer.self_attn
        linears = [attention.q_proj, attention.k_proj, attention.v_proj]
    else:
        linears = [draft.fc]
    for linear in linears:
        put(linear, "weight", torch.cat(linear.weight.chunk(2, 1)[::-1], 1))
    yield Change("state and embedding the other way round in the first layer's input", replace(reading, draft=draft))


def gates(reading: Reading, scene: Scene) -> Iterator[Change]:
    """gate_proj and up_proj, or k_proj and v_proj, exchanged; square projections transposed; layers in reverse."""
    for one, other in (("gate_proj", "up_proj"), ("k_proj", "v_proj")):
        draft = shared_copy(reading.draft)
        found = [module for module in draft.modules() if hasattr(module, one) and hasattr(module, other)]
        for module in found:
            first, second = getattr(module, one), getattr(module, other)
            setattr(module, one, second)
            setattr(module, other, first)
        if found:
            yield Change(f"{one} and {other} exchanged", replace(reading, draft=draft))
    squares = {
        name.rpartition(".")[2]
        for name, module in reading.draft.named_modules()
        if isinstance(module, nn.Linear) and module.in_features == module.out_features
    }
    for kind in sorted(squares):
        draft = shared_copy(reading.draft)
        for name, module in draft.named_modules():
            if (
                isinstance(module, nn.Linear)
                and module.in_features == module.out_features
                and name.rpartition(".")[2] == kind
            ):
                put(module, "weight", module.weight.T.contiguous())
        shown = kind if not kind.isdigit() else "the blocks' layers"
        yield Change(f"{shown} transposed", replace(reading, draft=draft))
    if len(getattr(reading.draft, "layers", ())) > 1:
        draft = shared_copy(reading.draft)
        draft.layers = nn.ModuleList(reversed(draft.layers))
        for number, layer in enumerate(draft.layers):
            layer.self_attn.layer_idx = number
        yield Change("layers in reverse order", replace(reading, draft=draft))


def medusa(reading: Reading, scene: Scene) -> Iterator[Change]:
    """Heads that draft one token further on or less far than their number says, or in reverse."""
    count = reading.draft.config.num_heads
    for what, order in (
        (
            "the first head predicts the target's own next token: heads count from the second",
            [*range(1, count), count - 1],
        ),
        ("heads in reverse order", list(reversed(range(count)))),
    ):
        draft = shared_copy(reading.draft)
        draft.blocks = nn.ModuleList(draft.blocks[place] for place in order)
        draft.lm_heads = nn.ModuleList(draft.lm_heads[place] for place in order)
        if count > 1:
            yield Change(what, replace(reading, draft=draft))


def codes(reading: Reading, scene: Scene) -> Iterator[Change]:
    """Integer codes of a quantised file that were read as weights: scaled to the size that weights have."""
    coded = [name for name, weight in reading.draft.named_parameters() if holds_codes(weight)]
    if not coded:
        return
    for size in _CODED:
        draft = shared_copy(reading.draft)
        for name in coded:
            module, _, field = name.rpartition(".")
            owner = draft.get_submodule(module)
            weight = getattr(owner, field)
            fan = weight.shape[-1] if weight.dim() > 1 else 1
            put(owner, field, weight * (size / math.sqrt(fan) / float(weight.float().std())))
        yield Change(
            f"{len(coded)} weights are integer codes ({coded[0]} for one); scaled to {size:g}/sqrt(width)",
            replace(reading, draft=draft),
        )


def holds_codes(weight: Tensor) -> bool:
    """Whether a weight holds integers beyond what weights are: codes of a quantised file."""
    some = weight.detach().float().flatten()[:4096]
    return weight.dim() > 1 and float(some.abs().max()) > 4 and bool((some == some.round()).all())


def float32(reading: Reading, scene: Scene) -> Iterator[Change]:
    if reading.draft.dtype == torch.float32:
        return
    draft = copy.deepcopy(reading.draft).float()
    yield Change(
        f"computed in float32, not {str(reading.draft.dtype).removeprefix('torch.')}", replace(reading, draft=draft)
    )
