"""Independent drafts, targets and EAGLE-3 heads as GGUF, the format of llama.cpp, in float32.

llama.cpp rotates neighbouring pairs of a head's rows where transformers rotates its halves, so the rows of q and k
are permuted. A missing tensor or key may load silently: the whole set is checked, written, and read back.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from ...errors import FormatError
from ..drafts.eagle3 import Eagle3Config, Eagle3Draft
from . import eagle3
from .gguf_file import Field, GgufFile, read_gguf, write_gguf
from .gguf_rope import ROPE_FACTORS, factor_tensors, read_scaling, refuse_factors, scaling_fields
from .gguf_vocabulary import vocabulary_fields
from .llama import embedding_specs, validated
from .tensors import Spec, check_tensors

_LLAMA_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EAGLE3 = {
    "fc.weight": "fc.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
    "blk.0.attn_norm_2.weight": "midlayer.hidden_norm.weight",
    **{f"blk.0.{ours}.weight": f"midlayer.{name}.weight" for ours, name in _LLAMA_LAYER.items()},
}


def write_llama(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Write an independent draft, or a target. Raises FormatError, by name, for anything but a plain Llama."""
    if not isinstance(model, LlamaForCausalLM):
        raise FormatError(f"{path}: {type(model).__name__}: only LlamaForCausalLM can be written as GGUF")
    config, weights = model.config, model.state_dict()
    _check_llama(config, path)
    names = _llama_names(config)
    tensors = {name: weights[source] for name, source in names.items()}
    if config.rope_parameters["rope_type"] == "llama3":
        tensors[ROPE_FACTORS] = _rope_factors(model)
    fields = _dimensions("llama", config, config.num_hidden_layers, config.rope_parameters["rope_theta"])
    fields |= {"llama.vocab_size": config.vocab_size, **vocabulary_fields(tokenizer, config.vocab_size)}
    write_gguf(path, GgufFile("llama", fields, _to_ggml(path, tensors, _shapes_of(tensors), config)))


def read_llama(path: Path) -> LlamaForCausalLM:
    """Load a file that `write_llama` wrote. Files with scaled rotary frequencies do not say which scaling it was."""
    content = _open(path, "llama")
    refuse_factors(content, path)
    tied = "output.weight" not in content.tensors
    dimensions = _read_dimensions(content, path)
    config = LlamaConfig(
        rope_parameters={"rope_type": "default", "rope_theta": dimensions.pop("rope_theta")},
        **dimensions,
        num_hidden_layers=content.get(path, "llama.block_count", int),
        vocab_size=content.get(path, "llama.vocab_size", int),
        bos_token_id=content.fields.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=content.fields.get("tokenizer.ggml.eos_token_id"),
        tie_word_embeddings=tied,
    )
    names = _llama_names(config)
    with torch.device("meta"):
        specs = _shapes_of(LlamaForCausalLM(config).state_dict())
    tensors = _from_ggml(path, content.tensors, {name: specs[source] for name, source in names.items()}, config)
    model = LlamaForCausalLM(config)
    model.load_state_dict({names[name]: tensor for name, tensor in tensors.items()}, strict=not tied)
    model.tie_weights()
    return model.eval()


def write_eagle3(draft: Eagle3Draft, tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Write an EAGLE-3 head. `tokenizer`: the target's, whose keys llama.cpp wants in both files."""
    config, weights = draft.config, draft.state_dict()
    for flag in ("fc_norm", "norm_output"):
        if getattr(config, flag):
            raise FormatError(f"{path}: {flag} true: llama.cpp has no place for it")
    names, expected = _eagle3_names(config, draft.embed_tokens is not None)
    tensors = {name: weights[source] for name, source in names.items()}
    if eagle3.reduced(config):
        tensors["d2t"] = draft.draft_ids
    factors = factor_tensors(config)
    tensors, expected = tensors | factors, expected | _shapes_of(factors)
    fields = _dimensions("eagle3", config, 1, config.rope_theta) | scaling_fields("eagle3", config, path)
    fields |= {
        "eagle3.vocab_size": config.vocab_size,
        "eagle3.target_layers": list(config.aux_layers),
        "eagle3.target_hidden_size": config.target_hidden_size,
        "eagle3.norm_before_residual": config.norm_before_residual,
        "eagle3.norm_before_fc": False,
        **vocabulary_fields(tokenizer, config.vocab_size),
    }
    write_gguf(path, GgufFile("eagle3", fields, _to_ggml(path, tensors, expected, config)))


def read_eagle3(path: Path) -> Eagle3Draft:
    """Load a file that `write_eagle3` wrote."""
    content = _open(path, "eagle3")
    if content.fields.get("eagle3.norm_before_fc"):
        raise FormatError(f"{path}: eagle3.norm_before_fc true: only false is supported")
    vocabulary = content.get(path, "eagle3.vocab_size", int)
    draft_ids = content.tensors.get("d2t")
    fields = {
        **_read_dimensions(content, path),
        "rope_scaling": read_scaling(content, path),
        "target_hidden_size": content.get(path, "eagle3.target_hidden_size", int),
        "vocab_size": vocabulary,
        "draft_vocab_size": vocabulary if draft_ids is None else len(draft_ids),
        "aux_layers": content.get(path, "eagle3.target_layers", list),
        "norm_before_residual": content.get(path, "eagle3.norm_before_residual", bool),
    }
    config = validated(Eagle3Config, path, fields)
    own = "token_embd.weight" in content.tensors
    names, expected = _eagle3_names(config, own)
    tensors = _from_ggml(path, content.tensors, expected, config)
    if draft_ids is not None and not bool(((draft_ids >= 0) & (draft_ids < vocabulary)).all()):
        raise FormatError(f"{path}: d2t points outside the vocabulary of {vocabulary}")
    draft = Eagle3Draft(config, tensors.pop("d2t", None), own_embeddings=own)
    draft.load_state_dict(draft.state_dict() | {names[name]: tensor for name, tensor in tensors.items()})
    return draft.eval()


def _open(path: Path, architecture: str) -> GgufFile:
    content = read_gguf(path)
    if content.architecture != architecture:
        raise FormatError(f"{path}: general.architecture {content.architecture!r}: must be {architecture!r}")
    return content


def _check_llama(config: LlamaConfig, path: Path) -> None:
    rope = config.rope_parameters["rope_type"]
    if rope not in ("default", "llama3"):
        raise FormatError(f"{path}: rope_type {rope}: only default and llama3 can be written as GGUF")
    for name in ("attention_bias", "mlp_bias"):
        if getattr(config, name):
            raise FormatError(f"{path}: {name} true: only models without biases can be written as GGUF")


def _dimensions(arch: str, config: Any, layers: int, theta: float) -> dict[str, Field]:
    """The keys that every architecture shares."""
    return {
        "general.name": arch,
        "general.file_type": 0,
        f"{arch}.block_count": layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.attention.value_length": config.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{arch}.rope.dimension_count": config.head_dim,
        f"{arch}.rope.freq_base": float(theta),
    }


def _read_dimensions(content: GgufFile, path: Path) -> dict[str, Any]:
    def number(key: str, kind: type = int) -> Any:
        return content.get(path, f"{content.architecture}.{key}", kind)

    return {
        "max_position_embeddings": number("context_length"),
        "hidden_size": number("embedding_length"),
        "intermediate_size": number("feed_forward_length"),
        "num_attention_heads": number("attention.head_count"),
        "num_key_value_heads": number("attention.head_count_kv"),
        "head_dim": number("attention.key_length"),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon", float),
        "rope_theta": number("rope.freq_base", float),
    }


def _llama_names(config: LlamaConfig) -> dict[str, str]:
    """GGUF's name -> transformers' name of every tensor."""
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if not config.tie_word_embeddings:
        names["output.weight"] = "lm_head.weight"
    for layer in range(config.num_hidden_layers):
        for ours, name in _LLAMA_LAYER.items():
            names[f"blk.{layer}.{ours}.weight"] = f"model.layers.{layer}.{name}.weight"
    return names


def _eagle3_names(config: Eagle3Config, own_embeddings: bool) -> tuple[dict[str, str], dict[str, Spec]]:
    """GGUF's name -> the checkpoint's name of every weight; and what all tensors must be."""
    names, specs = dict(_EAGLE3), {**eagle3.tensor_specs(config, eagle3.LAYER), **embedding_specs(config)}
    if own_embeddings:
        names["token_embd.weight"] = "embed_tokens.weight"
    expected = {name: specs[source] for name, source in names.items()}
    return names, expected | ({"d2t": eagle3.mapping_specs(config)["d2t"]} if eagle3.reduced(config) else {})


def _shapes_of(tensors: dict[str, Tensor]) -> dict[str, Spec]:
    return {name: Spec(tuple(tensor.shape)) for name, tensor in tensors.items()}


def _to_ggml(path: Path, tensors: dict[str, Tensor], expected: dict[str, Spec], config: Any) -> dict[str, Tensor]:
    """Checked, in float32 (ids stay integers), q and k in llama.cpp's order of rows."""
    check_tensors(path, tensors, expected)
    stored = {name: t.cpu().float() if t.is_floating_point() else t.cpu() for name, t in tensors.items()}
    return {
        name: _permute(name, tensor, config, (2, config.head_dim // 2)).contiguous() for name, tensor in stored.items()
    }


def _from_ggml(path: Path, tensors: dict[str, Tensor], expected: dict[str, Spec], config: Any) -> dict[str, Tensor]:
    check_tensors(path, tensors, expected)
    return {name: _permute(name, tensor, config, (config.head_dim // 2, 2)) for name, tensor in tensors.items()}


def _permute(name: str, weight: Tensor, config: Any, split: tuple[int, int]) -> Tensor:
    """Rows of each head: halves (2, D / 2) to neighbouring pairs, or back (D / 2, 2). Other tensors as they are."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2:][0])
    if heads is None:
        return weight
    return weight.reshape(heads, *split, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def _rope_factors(model: LlamaForCausalLM) -> Tensor:
    """[head_dim / 2]: what llama.cpp divides each rotary frequency by."""
    scaled: Tensor = model.model.rotary_emb.inv_freq.cpu()
    plain: Tensor = model.config.rope_parameters["rope_theta"] ** (-torch.arange(len(scaled)) / len(scaled))
    return plain / scaled
