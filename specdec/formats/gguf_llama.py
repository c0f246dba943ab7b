"""Independent drafts, and targets, as GGUF in float32."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from ...errors import FormatError
from .gguf_file import GgufFile, write_gguf
from .gguf_layer import LAYER, dimensions, from_ggml, open_gguf, read_dimensions, to_ggml
from .gguf_vocabulary import vocabulary_fields
from .tensors import Spec, check_tensors

_ROPE_FACTORS = "rope_freqs.weight"
_LOW, _HIGH = 1.0, 4.0  # low_freq_factor and high_freq_factor of every Llama 3


def write_llama(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Write an independent draft, or a target. Raises FormatError, by name, for anything but a plain Llama."""
    if not isinstance(model, LlamaForCausalLM):
        raise FormatError(f"format gguf: {type(model).__name__}: only LlamaForCausalLM can be written")
    config, weights = model.config, model.state_dict()
    _check_llama(config)
    names = _names(config)
    tensors = {name: weights[source] for name, source in names.items()}
    if config.rope_parameters["rope_type"] == "llama3":
        tensors[_ROPE_FACTORS] = _rope_factors(model)
    fields = dimensions("llama", config, config.num_hidden_layers, config.rope_parameters["rope_theta"])
    fields |= vocabulary_fields(tokenizer, config.vocab_size)
    write_gguf(path, GgufFile("llama", fields, to_ggml(path, tensors, _shapes_of(tensors), config)))


def read_llama(path: Path) -> LlamaForCausalLM:
    """Load a plain Llama, in float32. Raises FormatError naming the key or tensor that is wrong."""
    content = open_gguf(path, "llama")
    tensors = dict(content.tensors)
    tied = "output.weight" not in tensors
    fields = read_dimensions(content, path)
    theta, factors = fields.pop("rope_theta"), tensors.pop(_ROPE_FACTORS, None)
    if factors is not None:
        check_tensors(path, {_ROPE_FACTORS: factors}, {_ROPE_FACTORS: Spec((fields["head_dim"] // 2,))})
    config = LlamaConfig(
        rope_parameters={"rope_theta": theta, **_rope_scaling(factors, theta)},
        **fields,
        num_hidden_layers=content.get(path, "llama.block_count", int),
        bos_token_id=content.fields.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=content.fields.get("tokenizer.ggml.eos_token_id"),
        tie_word_embeddings=tied,
    )
    names = _names(config)
    with torch.device("meta"):
        specs = _shapes_of(LlamaForCausalLM(config).state_dict())
    tensors = from_ggml(path, tensors, {name: specs[source] for name, source in names.items()}, config)
    model = LlamaForCausalLM(config)
    if factors is not None and not _same_factors(model, factors):
        raise FormatError(f"{path}: tensor {_ROPE_FACTORS}: is not a rope scaling in the way of Llama 3")
    model.load_state_dict({names[name]: tensor for name, tensor in tensors.items()}, strict=not tied)
    model.tie_weights()
    return model.eval()


def _check_llama(config: LlamaConfig) -> None:
    rope = config.rope_parameters["rope_type"]
    if rope not in ("default", "llama3"):
        raise FormatError(f"format gguf: rope_type {rope}: only default and llama3 can be written")
    for name in ("attention_bias", "mlp_bias"):
        if getattr(config, name):
            raise FormatError(f"format gguf: {name} true: only models without biases can be written")


def _names(config: LlamaConfig) -> dict[str, str]:
    """GGUF's name -> transformers' name of every tensor."""
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if not config.tie_word_embeddings:
        names["output.weight"] = "lm_head.weight"
    for layer in range(config.num_hidden_layers):
        for ours, name in LAYER.items():
            names[f"blk.{layer}.{ours}.weight"] = f"model.layers.{layer}.{name}.weight"
    return names


def _shapes_of(tensors: dict[str, Tensor]) -> dict[str, Spec]:
    return {name: Spec(tuple(tensor.shape)) for name, tensor in tensors.items()}


def _rope_factors(model: LlamaForCausalLM) -> Tensor:
    """[head_dim / 2]: what llama.cpp divides each rotary frequency by."""
    scaled: Tensor = model.model.rotary_emb.inv_freq.cpu()
    return _frequencies(len(scaled), model.config.rope_parameters["rope_theta"]) / scaled


def _frequencies(count: int, theta: float) -> Tensor:
    frequencies: Tensor = theta ** (-torch.arange(count) / count)
    return frequencies


def _rope_scaling(factors: Tensor | None, theta: float) -> dict[str, Any]:
    """The Llama 3 scaling that gives these factors, where there is one: a file keeps what came of it, not its fields.

    Wavelengths above `original` are stretched by the largest factor, those below original / 4 are left; in between
    1 / factor goes linearly in original / wavelength, from 1 to 4.
    """
    if factors is None or _close(factors, 1.0).all():
        return {"rope_type": "default"}
    most = float(f"{float(factors.max()):.6g}")
    wavelength = 2 * math.pi / _frequencies(len(factors), theta).double()
    between = ~_close(factors, 1.0) & ~_close(factors, most)
    share = (1 / factors.double() - 1 / most) / (1 - 1 / most)
    found = ((_LOW + share * (_HIGH - _LOW)) * wavelength)[between]
    original = float(found.median()) if len(found) else float(wavelength[_close(factors, most)].min()) - 0.5
    return {
        "rope_type": "llama3",
        "factor": most,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": round(original),
    }


def _close(factors: Tensor, value: float) -> Tensor:
    return torch.isclose(factors, torch.tensor(value), rtol=1e-5)


def _same_factors(model: LlamaForCausalLM, factors: Tensor) -> bool:
    return torch.allclose(_rope_factors(model), factors, rtol=1e-5)
