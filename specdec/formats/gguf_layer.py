"""What GGUF files of Llama models and of EAGLE-3 heads share: dimension keys, names of a layer, order of rows.

llama.cpp rotates neighbouring pairs of a head's rows where transformers rotates its halves, so the rows of q and k
are permuted.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from ...errors import FormatError
from .gguf_file import Field, GgufFile, read_gguf
from .tensors import Spec, check_tensors

LAYER = {
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
"""GGUF's name of a layer's tensor -> transformers'."""


def open_gguf(path: Path, architecture: str) -> GgufFile:
    """The content of a file of that architecture."""
    content = read_gguf(path)
    if content.architecture != architecture:
        raise FormatError(f"{path}: general.architecture {content.architecture!r}: must be {architecture!r}")
    return content


def dimensions(arch: str, config: Any, layers: int, theta: float) -> dict[str, Field]:
    """The keys that every architecture has."""
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
        f"{arch}.vocab_size": config.vocab_size,
    }


def read_dimensions(content: GgufFile, path: Path) -> dict[str, Any]:
    """Fields of a Llama config; where a key may be absent, what llama.cpp takes then. Raises FormatError by key."""

    def read(key: str, kind: type = int, default: Any = None) -> Any:
        return content.get(path, f"{content.architecture}.{key}", kind, default)

    hidden, heads = read("embedding_length"), read("attention.head_count")
    size = read("attention.key_length", default=hidden // max(heads, 1))
    tokens = content.fields.get("tokenizer.ggml.tokens")
    fixed = {"attention.value_length": size, "rope.dimension_count": size}
    for key, wanted in fixed.items():
        found = content.fields.get(f"{content.architecture}.{key}", wanted)
        if found != wanted:
            raise FormatError(f"{path}: {content.architecture}.{key} {found}: must be {wanted}")
    return {
        "max_position_embeddings": read("context_length"),
        "hidden_size": hidden,
        "intermediate_size": read("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": read("attention.head_count_kv", default=heads),
        "head_dim": size,
        "rms_norm_eps": read("attention.layer_norm_rms_epsilon", float),
        "rope_theta": read("rope.freq_base", float, 10000.0),
        "vocab_size": read("vocab_size", default=len(tokens) if isinstance(tokens, list) else None),
    }


def shapes_of(tensors: dict[str, Tensor]) -> dict[str, Spec]:
    """What tensors are expected to be that are right as they are."""
    return {name: Spec(tuple(tensor.shape)) for name, tensor in tensors.items()}


def plain_weights(path: Path, tensors: dict[str, Tensor], expected: dict[str, Spec]) -> dict[str, Tensor]:
    """Checked, in float32 (ids stay integers)."""
    check_tensors(path, tensors, expected)
    floats = {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}
    return {name: tensor.cpu().contiguous() for name, tensor in floats.items()}


def to_ggml(path: Path, tensors: dict[str, Tensor], expected: dict[str, Spec], config: Any) -> dict[str, Tensor]:
    """Checked, in float32 (ids stay integers), q and k in llama.cpp's order of rows."""
    stored = plain_weights(path, tensors, expected)
    return {
        name: _permute(name, tensor, config, (2, config.head_dim // 2)).contiguous() for name, tensor in stored.items()
    }


def from_ggml(path: Path, tensors: dict[str, Tensor], expected: dict[str, Spec], config: Any) -> dict[str, Tensor]:
    """Checked, q and k in transformers' order of rows."""
    check_tensors(path, tensors, expected)
    return {name: _permute(name, tensor, config, (config.head_dim // 2, 2)) for name, tensor in tensors.items()}


def _permute(name: str, weight: Tensor, config: Any, split: tuple[int, int]) -> Tensor:
    """Rows of each head: halves (2, D / 2) to neighbouring pairs, or back (D / 2, 2). Other tensors as they are."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2:][0])
    if heads is None:
        return weight
    return weight.reshape(heads, *split, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)
