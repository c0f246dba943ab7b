"""A small causal LM out of a large one: some of its layers, everything else as it is."""

import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ...errors import InputError, one_line


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
def prune(model: PreTrainedModel, layers: list[int]) -> PreTrainedModel:
    """A float32 copy of `model` with only these layers. Embeddings, norms and head are copied."""
    config = model.config.get_text_config()
    prefix = layers_prefix(model, config.num_hidden_layers)
    small: PreTrainedModel = AutoModelForCausalLM.from_config(prune_config(config, layers), dtype=torch.float32)
    place = {source: index for index, source in enumerate(layers)}
    kept = {}
    for name, tensor in model.state_dict().items():
        if not name.startswith(prefix):
            kept[name] = tensor
            continue
        layer, _, rest = name.removeprefix(prefix).partition(".")
        if int(layer) in place:
            kept[f"{prefix}{place[int(layer)]}.{rest}"] = tensor
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
