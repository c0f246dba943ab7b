"""Llama-style config.json of draft heads with one decoder layer: reading, validation and writing."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from ...errors import FormatError
from ..drafts.layers import ROPE_TYPES, LayerConfig, frequencies
from .tensors import Shape, Spec

Config = TypeVar("Config", bound=BaseModel)

_FIXED = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "logit_scale": 1.0,
}
# Who computes what a head is refused for.
_READERS = {"mlp_bias": "vLLM and TensorRT-LLM compute it", "logit_scale": "vLLM computes it"}
_LLAMA_DEFAULTS = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048}
SLIDES, FULL = "sliding_attention", "full_attention"
_QWEN_FIRST = 28  # max_window_layers where a Qwen's config names none
QWEN3_DEFAULTS = {"head_dim": 128, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6}
_MOST_LAYERS = 1024
_LLAMA_THETA = 10000.0
_BESIDE_SCALING = ("type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
# No scaling at all: of several coordinates a text has the same in each (mrope); the base grows past the draft's context
# only (dynamic), beyond which no draft is used.
_UNSCALED = ("default", "mrope", "dynamic")


def layer_fields(path: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """LayerConfig fields from a config, with Llama's defaults for absent ones.

    Raises FormatError where the config describes another layer than ours.
    """
    # Absent fields mean our value; any other value is a layer that we do not compute.
    for name, value in _FIXED.items():
        if raw.get(name) not in (None, value):
            reader = f"; {_READERS[name]}" if name in _READERS else ""
            raise FormatError(f"{path}: {name} {raw[name]}: must be {value}{reader}")

    # Defaults of multi-head attention, where the config does not say otherwise.
    fields = {name: raw[name] for name in LayerConfig.model_fields if raw.get(name) is not None}
    heads, hidden = raw.get("num_attention_heads"), raw.get("hidden_size")
    if isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        fields = {"num_key_value_heads": heads, "head_dim": hidden // heads, **fields}
    return {**_LLAMA_DEFAULTS, **fields, **rope_fields(path, raw)}


def rope_fields(path: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary base and scaling, from `rope_theta` and `rope_scaling` or from `rope_parameters` (transformers 5).

    Raises FormatError for an unknown scaling and for a partial rotary embedding.
    """
    # What the newer name says is read last, and wins.
    theta, share, scaling = raw.get("rope_theta"), raw.get("partial_rotary_factor"), None
    for name in ("rope_scaling", "rope_parameters"):
        rope = raw.get(name) or {}
        if not isinstance(rope, Mapping):
            raise FormatError(f"{path}: {name} {rope}: must be an object")

        # The scaling's type, under its newer or older key.
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in (*_UNSCALED, *ROPE_TYPES):
            raise FormatError(f"{path}: {name}: rope_type {kind}: must be {', '.join((*_UNSCALED, *ROPE_TYPES))}")
        if kind == "dynamic":
            _check_grows_late(path, name, rope, raw)

        # A base inside the object goes before one beside it.
        theta, share = rope.get("rope_theta", theta), rope.get("partial_rotary_factor", share)
        if kind not in _UNSCALED:
            named = {key: value for key, value in rope.items() if key not in _BESIDE_SCALING and value is not None}
            scaling = named | {"rope_type": kind}

    # Every pair of every head must rotate.
    if share not in (None, 1):
        raise FormatError(f"{path}: partial_rotary_factor {share}: must be 1")
    return {"rope_theta": _LLAMA_THETA if theta is None else theta, "rope_scaling": scaling}


def _check_grows_late(path: Path, name: str, rope: Mapping[str, Any], raw: Mapping[str, Any]) -> None:
    """Raise FormatError for dynamic scaling that changes the base within the draft's own context."""
    for field in ("alpha", "max_trained_positions"):
        if rope.get(field) is not None:
            raise FormatError(f"{path}: {name}: dynamic: {field} {rope[field]}: vLLM reads it, transformers does not")
    original, context = rope.get("original_max_position_embeddings"), raw.get("max_position_embeddings")
    if original is not None and original != context:
        raise FormatError(
            f"{path}: {name}: dynamic: original_max_position_embeddings {original}: must be max_position_embeddings, "
            f"{context}: the base follows from the length of the text in transformers, and is one in vLLM and SGLang"
        )


def window_fields(path: Path, raw: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Sliding window and the layers without it. Raises FormatError where a config leaves it open which layers slide."""
    # Each layer's type, by the draft's own number; a list may be the target's, of which vLLM takes the first ones.
    window, types = raw.get("sliding_window"), raw.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) < layers or not all(kind in (SLIDES, FULL) for kind in types):
            raise FormatError(f"{path}: layer_types {types}: must be {FULL} or {SLIDES} for each of {layers} layers")
        types = types[:layers]
        if SLIDES in types and window is None:
            raise FormatError(f"{path}: layer_types {types}: needs sliding_window")
        full = [layer for layer, kind in enumerate(types) if kind == FULL]
        return {} if len(full) == layers else {"sliding_window": window, "full_attention_layers": full}

    # Without types: Qwen's two fields, else no window at all.
    if window is None or raw.get("use_sliding_window") is False:
        return {}
    if raw.get("use_sliding_window") is None:
        raise FormatError(f"{path}: sliding_window {window}: layer_types must say which layers slide, {FULL} for none")
    first = raw.get("max_window_layers", _QWEN_FIRST if str(raw.get("model_type")).startswith("qwen") else 0)
    if type(first) is not int or layers > _MOST_LAYERS:
        raise FormatError(
            f"{path}: max_window_layers {first}: must be a number, of at most {_MOST_LAYERS} layers; there are {layers}"
        )
    full = list(range(min(layers, first)))
    return {} if len(full) == layers else {"sliding_window": window, "full_attention_layers": full}


def validated(model: type[Config], path: Path, fields: Mapping[str, Any]) -> Config:
    """Validated pydantic model of the fields. Raises FormatError naming the file and the field."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{part}: " for part in first["loc"] if isinstance(part, str))
        raise FormatError(f"{path}: {where}{first['msg']}") from None


def layer_entries(config: LayerConfig) -> dict[str, Any]:
    """config.json entries of the decoder layer."""
    # Every field is named, also those with one value: readers differ in their defaults.
    return {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
    }


def rope_entries(config: LayerConfig) -> dict[str, Any]:
    """config.json entries of the rotary embedding, under the names that every release of the engines reads."""
    return {"rope_theta": config.rope_theta, "rope_scaling": _scaling(config) or None}


def rope_parameters(config: LayerConfig) -> dict[str, Any]:
    """`rope_parameters` of the rotary embedding, as transformers names it from release 5 on."""
    return {"rope_type": "default", "rope_theta": config.rope_theta, **_scaling(config)}


def _scaling(config: LayerConfig) -> dict[str, Any]:
    return {} if config.rope_scaling is None else config.rope_scaling.model_dump(mode="json", exclude_none=True)


def dtype_entries(dtype: str) -> dict[str, Any]:
    """config.json entries of the weights' dtype, under transformers' new and old name."""
    return {"dtype": dtype, "torch_dtype": dtype}


def without_frequencies(config: LayerConfig, where: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A file's tensors without tables of rotary frequencies, which older releases of transformers stored.

    Raises FormatError for a table that is not what the config says.
    """
    found = dict(tensors)
    for name in [name for name in found if name.endswith("rotary_emb.inv_freq")]:
        table, fits = found.pop(name), False
        if table.shape == (config.head_dim // 2,):
            wanted = frequencies(config.rope_theta, config.head_dim, config.rope_scaling)
            fits = torch.allclose(table.float(), wanted, rtol=1e-2)  # may be stored in bfloat16
        if not fits:
            raise FormatError(f"{where}: tensor {name} has other rotary frequencies than the config")
    return found


def layer_specs(config: LayerConfig, prefix: str, width: int, bias: bool = False) -> dict[str, Spec]:
    """Specs of attention (whose input has `width` features; with or without `bias`), MLP and the norm between them."""
    # Output sizes of the query projection, and of key and value.
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, groups = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes: dict[str, Shape] = {
        "self_attn.q_proj.weight": (heads, width),
        "self_attn.k_proj.weight": (groups, width),
        "self_attn.v_proj.weight": (groups, width),
        "self_attn.o_proj.weight": (hidden, heads),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "post_attention_layernorm.weight": (hidden,),
    }
    if bias:
        attention = [name for name in shapes if name.startswith("self_attn.")]
        shapes |= {name.replace(".weight", ".bias"): shapes[name][:1] for name in attention}
    return {f"{prefix}{name}": Spec(shape) for name, shape in shapes.items()}


def embedding_specs(config: LayerConfig) -> dict[str, Spec]:
    """Spec of the draft's own embeddings, which may be absent."""
    return {"embed_tokens.weight": Spec((config.vocab_size, config.hidden_size))}
