"""Independent drafts, and targets, as GGUF in float32."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from ...errors import FormatError
from ..drafts.rope import Llama3Rope
from .gguf_file import GgufFile, write_gguf
from .gguf_layer import LAYER, dimensions, from_ggml, open_gguf, read_dimensions, shapes_of, to_ggml
from .gguf_rope import factor_tensors, take_scaling
from .gguf_vocabulary import vocabulary_fields
from .llama import rope_fields, validated
from .tensors import check_count

_ROPES = ("default", "llama3")


def write_llama(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Write an independent draft, or a target. Raises FormatError, by name, for anything but a plain Llama."""
    if not isinstance(model, LlamaForCausalLM):
        raise FormatError(f"format gguf: {type(model).__name__}: only LlamaForCausalLM can be written")
    config, weights = model.config, model.state_dict()
    _check_llama(config)
    names = _names(config)
    tensors = {name: weights[source] for name, source in names.items()}
    theta, scaling = _rope(config)
    tensors |= factor_tensors(theta, config.head_dim, scaling)
    fields = dimensions("llama", config, config.num_hidden_layers, theta)
    fields |= vocabulary_fields(tokenizer, config.vocab_size)
    write_gguf(path, GgufFile("llama", fields, to_ggml(path, tensors, shapes_of(tensors), config)))


def read_llama(path: Path) -> LlamaForCausalLM:
    """Load a plain Llama, in float32. Raises FormatError naming the key or tensor that is wrong."""
    content = open_gguf(path, "llama")
    tensors = dict(content.tensors)
    tied = "output.weight" not in tensors
    fields = read_dimensions(content, path)
    theta = fields.pop("rope_theta")
    scaling = take_scaling(content, tensors, path, theta, fields["head_dim"]) or {"rope_type": "default"}
    if scaling["rope_type"] not in _ROPES:
        raise FormatError(f"{path}: rope scaling {scaling['rope_type']}: must be {' or '.join(_ROPES)} in a Llama")
    layers = content.get(path, "llama.block_count", int)
    check_count(path, "llama.block_count", layers, tensors)
    config = LlamaConfig(
        rope_parameters={"rope_theta": theta, **scaling},
        **fields,
        num_hidden_layers=layers,
        bos_token_id=content.fields.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=content.fields.get("tokenizer.ggml.eos_token_id"),
        tie_word_embeddings=tied,
    )
    names = _names(config)
    with torch.device("meta"):
        specs = shapes_of(LlamaForCausalLM(config).state_dict())
    tensors = from_ggml(path, tensors, {name: specs[source] for name, source in names.items()}, config)
    model = LlamaForCausalLM(config)
    model.load_state_dict({names[name]: tensor for name, tensor in tensors.items()}, strict=not tied)
    model.tie_weights()
    return model.eval()


def _check_llama(config: LlamaConfig) -> None:
    rope = config.rope_parameters["rope_type"]
    if rope not in _ROPES:
        raise FormatError(f"format gguf: rope_type {rope}: only {' and '.join(_ROPES)} can be written")
    if config.hidden_act != "silu":
        raise FormatError(f"format gguf: hidden_act {config.hidden_act}: must be silu, which llama.cpp computes")
    for name in ("attention_bias", "mlp_bias"):
        if getattr(config, name):
            raise FormatError(f"format gguf: {name} true: only models without biases can be written")


def _rope(config: LlamaConfig) -> tuple[float, Llama3Rope | None]:
    """Base and scaling."""
    fields = rope_fields(Path("format gguf"), {"rope_parameters": config.rope_parameters})
    scaling = fields["rope_scaling"]
    return float(fields["rope_theta"]), scaling and validated(Llama3Rope, Path("format gguf"), scaling)


def _names(config: LlamaConfig) -> dict[str, str]:
    """GGUF's name -> transformers' name of every tensor."""
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if not config.tie_word_embeddings:
        names["output.weight"] = "lm_head.weight"
    for layer in range(config.num_hidden_layers):
        for ours, name in LAYER.items():
            names[f"blk.{layer}.{ours}.weight"] = f"model.layers.{layer}.{name}.weight"
    return names
