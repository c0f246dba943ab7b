"""A small causal LM out of a large one: some of its layers, everything else as it is."""

import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ...errors import InputError, one_line
from ...specdec.models import CausalModel


def spread(count: int, total: int) -> list[int]:
    """`count` of `total` layers, evenly spread, first and last included."""
    if not 2 <= count <= total:
        raise InputError(f"draft.layers {count}: must be between 2 and the target's {total}")
    return [round(index * (total - 1) / (count - 1)) for index in range(count)]


def check_layers(layers: list[int], total: int) -> None:
    """Raise InputError unless the list names existing layers, first and last among them."""
    if layers[0] != 0 or layers[-1] != total - 1:
        raise InputError(f"draft.layers {layers}: must start at 0 and end at {total - 1}, the target's last layer")


@torch.no_grad()
def prune(target: CausalModel, layers: list[int]) -> PreTrainedModel:
    """A float32 copy of a model with only these layers. Embeddings, norms and head are copied."""
    model, config = target.model, target.config
    prefix = layers_prefix(model, config.num_hidden_layers)
    small: PreTrainedModel = AutoModelForCausalLM.from_config(prune_config(config, layers), dtype=torch.float32)
    kept = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(prefix)}
    for index, layer in enumerate(layers):
        kept |= {f"{prefix}{index}.{name}": tensor for name, tensor in target.layer_weights(layer).items()}
    try:
        small.load_state_dict(kept)
    except RuntimeError as error:
        raise InputError(f"draft.layers {layers}: {type(model).__name__} cannot be pruned: {one_line(error)}") from None
    small.tie_weights()
    small.generation_config = copy.deepcopy(model.generation_config)
    return small


def prune_config(config: Any, layers: list[int]) -> Any:
    """A configuration for the kept layers; every list with an entry per layer is cut to them."""
    total = config.num_hidden_layers
    pruned = copy.deepcopy(config)
    for name, value in list(vars(config).items()):
        if isinstance(value, list | tuple) and len(value) == total and name != "architectures":
            setattr(pruned, name, [value[layer] for layer in layers])
    pruned.num_hidden_layers = len(layers)
    return pruned


def layers_prefix(model: nn.Module, total: int) -> str:
    found = [
        name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) == total
    ]
    if not found:
        raise InputError(f"draft.layers: {type(model).__name__} has no list of {total} layers to prune")
    return f"{found[0]}."
