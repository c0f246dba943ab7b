"""Medusa heads in two layouts: vLLM's, and the original project's as safetensors.

vLLM's: `blocks.{h}.layers.{l}.weight`, `lm_heads.{h}.weight`. Original (FasterDecoding/Medusa, its ModuleList of
Sequentials): `{h}.{l}.linear.weight`, and `{h}.{L}.weight` for the head after L blocks. The original always has
biases, which vLLM drops unless `medusa_fc_bias` says otherwise; TensorRT-LLM wants them.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import FormatError
from ...storage import read_object, write_json
from ..drafts.medusa import MedusaConfig, MedusaDraft
from .llama import dtype_entries, validated
from .tensors import WEIGHTS_FILE, Spec, check_count, check_tensors, read_tensors, write_tensors

ORIGINAL_FILE = "medusa_lm_head.safetensors"
_ORIGINAL_NAME = re.compile(r"(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)")


def write(draft: MedusaDraft, folder: Path) -> None:
    """Write config.json and model.safetensors in vLLM's layout."""
    # The module's names are vLLM's.
    config = draft.config
    dtype = write_tensors(folder / WEIGHTS_FILE, draft.state_dict(), tensor_specs(config))
    entries = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "medusa_fc_bias": config.fc_bias,
        **dtype_entries(dtype),
    }
    write_json(folder / "config.json", entries)


def write_original(draft: MedusaDraft, folder: Path, target: str) -> None:
    """Write config.json and medusa_lm_head.safetensors in the original layout. A draft without biases gets zeros."""
    # The original layout always has biases: zeros compute the same.
    config = draft.config.model_copy(update={"fc_bias": True})
    ours = draft.state_dict()
    dtype = ours["lm_heads.0.weight"].dtype
    tensors = {
        _original_name(name, config): ours[name] if name in ours else torch.zeros(spec.shape, dtype=dtype)
        for name, spec in tensor_specs(config).items()
    }

    # Its config names the target, and counts of heads and layers under names of its own.
    written = write_tensors(folder / ORIGINAL_FILE, tensors, original_specs(config))
    entries = {
        "base_model_name_or_path": target,
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "medusa_fc_bias": True,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        **dtype_entries(written),
    }
    write_json(folder / "config.json", entries)


def read(folder: Path) -> MedusaDraft:
    """Load Medusa heads from a folder of either layout. Raises MissingFileError or FormatError."""
    # Original names are turned into ours.
    path = folder / "config.json"
    raw, (where, tensors) = read_object(path), read_tensors(folder)
    if is_original(tensors):
        config = _original_config(path, raw, where, tensors)
        check_tensors(where, tensors, original_specs(config))
        tensors = {name: tensors[_original_name(name, config)] for name in tensor_specs(config)}
        # Biases that are all zero are none: our writer added them.
        if not any(bool(tensor.any()) for name, tensor in tensors.items() if name.endswith(".bias")):
            config = config.model_copy(update={"fc_bias": False})
            tensors = {name: tensors[name] for name in tensor_specs(config)}
    else:
        config = _read_config(path, raw, tensors)
        check_tensors(where, tensors, tensor_specs(config))

    # Weights decide the dtype.
    draft = MedusaDraft(config)
    draft.load_state_dict(tensors)
    return draft.to(tensors["lm_heads.0.weight"].dtype)


def is_original(names: Iterable[str]) -> bool:
    """Whether tensor names are of the original project's layout."""
    return any(map(_ORIGINAL_NAME.fullmatch, names))


def tensor_specs(config: MedusaConfig) -> dict[str, Spec]:
    """Specs of every tensor of vLLM's layout, whose names are our module's."""
    hidden = config.hidden_size
    specs: dict[str, Spec] = {}
    for h in range(config.num_heads):
        for layer in range(config.num_layers):
            specs[f"blocks.{h}.layers.{layer}.weight"] = Spec((hidden, hidden))
            if config.fc_bias:
                specs[f"blocks.{h}.layers.{layer}.bias"] = Spec((hidden,))
        specs[f"lm_heads.{h}.weight"] = Spec((config.vocab_size, hidden))
    return specs


def original_specs(config: MedusaConfig) -> dict[str, Spec]:
    """Specs of every tensor of the original project's layout."""
    return {_original_name(name, config): spec for name, spec in tensor_specs(config).items()}


def _original_name(name: str, config: MedusaConfig) -> str:
    kind, head, *rest = name.split(".")
    return f"{head}.{config.num_layers}.weight" if kind == "lm_heads" else f"{head}.{rest[1]}.linear.{rest[2]}"


def _read_config(path: Path, raw: Mapping[str, Any], tensors: Collection[str]) -> MedusaConfig:
    # Fields under vLLM's names; sizes have no safe default.
    names = {"num_layers": "num_hidden_layers", "fc_bias": "medusa_fc_bias"}
    fields = {name: raw.get(names.get(name, name)) for name in MedusaConfig.model_fields}
    for name in ("hidden_size", "vocab_size", "num_heads", "num_layers"):
        if fields[name] is None:
            raise FormatError(f"{path}: {names.get(name, name)}: must be named")

    # Counts are checked before anything is made for each head or layer.
    config = validated(MedusaConfig, path, {**fields, "fc_bias": fields["fc_bias"] or False})
    check_count(path, "num_heads", config.num_heads, tensors)
    check_count(path, "num_hidden_layers", config.num_layers, tensors)
    return config


def _original_config(path: Path, raw: Mapping[str, Any], where: Path, tensors: Mapping[str, Tensor]) -> MedusaConfig:
    """Medusa config from the tensors' sizes: original configs name none, and published ones name fewer heads than there
    are. Raises FormatError."""
    # Heads are counted by the tensors.
    found = [match.groups() for match in map(_ORIGINAL_NAME.fullmatch, tensors) if match]
    heads = 1 + max(int(head) for head, _, _ in found)
    check_count(where, "heads", heads, tensors)

    # The weight without `linear` is the head's last layer: its number is the count of blocks.
    last = [int(layer) for _, layer, kind in found if kind == "weight"]
    layers = raw.get("medusa_num_layers") or max(last, default=1)
    named = raw.get("medusa_num_heads", 0)
    if not isinstance(named, int) or named > heads:
        raise FormatError(f"{path}: medusa_num_heads {named}: the weights have {heads} heads")

    # Its shape gives vocabulary and width.
    first = f"0.{layers}.weight"
    if first not in tensors:
        raise FormatError(f"{where}: tensor {first} is missing")
    if tensors[first].dim() != 2:
        raise FormatError(f"{where}: tensor {first} has shape {list(tensors[first].shape)}: must have two axes")
    sizes = {"vocab_size": tensors[first].shape[0], "hidden_size": tensors[first].shape[-1]}
    bias = any(kind == "linear.bias" for _, _, kind in found)
    return validated(MedusaConfig, path, {**sizes, "num_heads": heads, "num_layers": layers, "fc_bias": bias})
