"""config.json of EAGLE-3 heads, as vLLM and SGLang both read it and as trainers of 2025 and 2026 write it.

vLLM and llama.cpp number captured layers as transformers' hidden_states (2 = output of layer 1) at the top level;
SGLang reads `eagle_config` and adds one. Both are written.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ...errors import FormatError
from ..drafts.eagle3 import Eagle3Config
from ..engine_features import FLAGS
from .llama import (
    FULL,
    QWEN3_DEFAULTS,
    SLIDES,
    dtype_entries,
    layer_entries,
    layer_fields,
    rope_entries,
    validated,
    window_fields,
)

ARCHITECTURE, QWEN3_ARCHITECTURE = "LlamaForCausalLMEagle3", "Eagle3Qwen3ForCausalLM"
ARCHITECTURES = (
    ARCHITECTURE,
    QWEN3_ARCHITECTURE,
    "Eagle3LlamaForCausalLM",
    "Eagle3MiniMaxM2ForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
    "PEagleDraftModel",
    "PeagleLlamaForCausalLM",
    "PeagleQwen3ForCausalLM",
    "Qwen3ForCausalLMEagle3",
)
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
MASK = "mask_hidden"
_MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")
_NESTED, _COUNT = "eagle_config", "num_aux_hidden_states"
# Fields that our head reads by itself: a plain Llama layer is all that the Llama reader knows.
_OWN = ("model_type", "num_hidden_layers", "attention_bias")
# Fields of eagle_config that change the layer, with the one value that is ours.
_FIXED_NESTED = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}


def engine_config(config: Eagle3Config, dtype: str) -> dict[str, Any]:
    """config.json of an EAGLE-3 head as engines expect it."""
    # SGLang looks for captured layers, vLLM's older releases for their number, beside the flags.
    nested = {"use_aux_hidden_state": bool(config.aux_layers), LAYER_IDS: [layer - 1 for layer in config.aux_layers]}
    return {
        "architectures": [ARCHITECTURE if config.body == "llama" else QWEN3_ARCHITECTURE],
        **layer_entries(config),
        **body_entries(config),
        **rope_entries(config),
        "target_hidden_size": config.target_hidden_size,
        "draft_vocab_size": config.draft_vocab_size,
        **{flag: getattr(config, flag) for flag in FLAGS},
        LAYER_IDS: list(config.aux_layers),
        **({} if len(config.aux_layers) == 3 else {_COUNT: len(config.aux_layers)}),
        **({"bias": True} if config.fc_bias else {}),
        _NESTED: nested | ({"norm_before_fc": True} if config.norm_before_fc else {}),
        **dtype_entries(dtype),
    }


def body_entries(config: Eagle3Config) -> dict[str, Any]:
    """config.json entries of the decoder layers in which they differ from one plain Llama layer."""
    entries = {
        "model_type": config.body,
        "num_hidden_layers": config.num_hidden_layers,
        "attention_bias": config.attention_bias,
    }
    if config.sliding_window is None:
        return entries
    types = [FULL if window is None else SLIDES for window in config.windows]
    return entries | {
        "sliding_window": config.sliding_window,
        "use_sliding_window": True,
        "max_window_layers": 0,
        "layer_types": types,
    }


def read_config(
    path: Path, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], target_layers: int | None
) -> Eagle3Config:
    """EAGLE-3 config from an engine's config.json, and from the tensors where configs say nothing or do not agree.

    Raises FormatError naming the field.
    """
    # Variants that we do not compute.
    nested = raw.get(_NESTED) or {}
    if not isinstance(nested, Mapping):
        raise FormatError(f"{path}: {_NESTED} {nested}: must be an object")
    for name, value in _FIXED_NESTED.items():
        if nested.get(name) not in (None, value):
            raise FormatError(f"{path}: {_NESTED}.{name} {nested[name]}: must be {value}")

    # The layers; what the tensors tell goes before the config, whose model_type is often the target's.
    fields = layer_fields(path, _plain_layer(path, raw))
    layers = raw.get("num_hidden_layers")
    fields["num_hidden_layers"] = 1 if layers is None else layers
    fields["body"] = "qwen3" if any(name.endswith("self_attn.q_norm.weight") for name in tensors) else "llama"
    bias = any(name.endswith("self_attn.q_proj.bias") for name in tensors)
    fields["attention_bias"] = bias or bool(raw.get("attention_bias"))
    fields["fc_bias"] = "fc.bias" in tensors
    if type(fields["num_hidden_layers"]) is int:  # else the config refuses it
        fields |= window_fields(path, raw, fields["num_hidden_layers"])

    # Flags may stand in either place, which must agree.
    for flag in FLAGS:
        values = [place[flag] for place in (raw, nested) if place.get(flag) is not None]
        if len(values) > 1 and values[0] != values[1]:
            raise FormatError(f"{path}: {_NESTED}.{flag} {nested[flag]}: must equal {flag} {raw[flag]}")
        if values:
            fields[flag] = values[0]

    # target_hidden_size follows from fc, and draft_vocab_size is vocab_size, where they are absent.
    fields["aux_layers"] = aux = _aux_layers(path, raw, nested, target_layers)
    fc = tensors.get("fc.weight")
    width = fc.shape[1] if aux and fc is not None and fc.dim() == 2 else 0
    known = width // len(aux) if width and width % len(aux) == 0 else raw.get("hidden_size")
    fields["target_hidden_size"] = raw.get("target_hidden_size") or known
    fields["draft_vocab_size"] = raw.get("draft_vocab_size") or raw.get("vocab_size")
    return validated(Eagle3Config, path, fields)


def mask_token(path: Path, raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int | None:
    """The mask token of a P-EAGLE head, which has a learned state; None: it is none. Raises FormatError."""
    if MASK not in tensors:
        return None
    found = next((raw[name] for name in _MASK_TOKENS if raw.get(name) is not None), None)
    size = raw.get("vocab_size")
    if type(found) is not int or not isinstance(size, int) or not 0 <= found < size:
        raise FormatError(f"{path}: {_MASK_TOKENS[0]} {found}: must be a token id below vocab_size {size}")
    return found


def _plain_layer(path: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The config of one plain Llama layer in a head's. Raises FormatError for an absent field without one default."""
    # Engines read every head as a Llama or a Qwen 3, and take what is absent from the model type's own defaults.
    kind = raw.get("model_type") or "llama"
    for name in QWEN3_DEFAULTS if kind not in ("llama", "qwen3") else ():
        if raw.get(name) is None and name != "head_dim":
            raise FormatError(f"{path}: {name}: must be named for model_type {kind}: readers differ in their defaults")
    named = {name: value for name, value in raw.items() if name not in _OWN and value is not None}
    return {**(QWEN3_DEFAULTS if kind == "qwen3" else {}), **named}


def _aux_layers(path: Path, raw: Mapping[str, Any], nested: Mapping[str, Any], target_layers: int | None) -> list[int]:
    """Captured target layers, numbered as transformers' hidden_states; none where the head reads the target's last
    state. Raises FormatError."""
    if nested.get("use_aux_hidden_state") is False:
        return []

    # Neither list is there, or both are empty: low, middle and high layers of the target.
    named, shifted = raw.get(LAYER_IDS) or None, nested.get(LAYER_IDS) or None
    if named is None and shifted is None:
        if target_layers is None:
            raise FormatError(f"{path}: {LAYER_IDS}: is absent, and the target's number of layers is not known")
        named = [2, target_layers // 2, target_layers - 3]  # what every engine takes then

    # Of the top level, counted so; of eagle_config, one less each. Where both are there, they must agree.
    if shifted is not None:
        _check_layer_ids(path, f"{_NESTED}.{LAYER_IDS}", shifted, lowest=0)
        if named not in (None, [layer + 1 for layer in shifted]):
            raise FormatError(f"{path}: {LAYER_IDS} {named}: must be one more than those of {_NESTED}, {shifted}")
        return [layer + 1 for layer in shifted]
    _check_layer_ids(path, LAYER_IDS, named, lowest=1)
    return list(named or [])


def _check_layer_ids(path: Path, field: str, found: Any, lowest: int) -> None:
    """Raise FormatError unless `found` is a list of ascending layers: vLLM sorts them silently, SGLang does not."""
    if not isinstance(found, list) or not all(type(layer) is int for layer in found):
        raise FormatError(f"{path}: {field} {found}: must be a list of layers")
    if found != sorted(set(found)) or found[0] < lowest:
        raise FormatError(f"{path}: {field} {found}: must be different layers in ascending order, from {lowest} on")
