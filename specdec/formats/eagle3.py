"""EAGLE-3 in the layout that vLLM and SGLang both read.

vLLM and llama.cpp number captured layers as transformers' hidden_states (2 = output of layer 1) at the top level;
SGLang reads `eagle_config` and adds one. Both are written.
"""

from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from ...errors import FormatError
from ...storage import read_object, write_json
from ..drafts.eagle3 import Eagle3Config, Eagle3Draft
from .tensors import Shape, read_tensors, write_tensors

WEIGHTS_FILE = "model.safetensors"


def write(draft: Eagle3Draft, folder: Path) -> None:
    """Write config.json and model.safetensors."""
    tensors = draft.state_dict()
    write_tensors(folder / WEIGHTS_FILE, tensors, {**tensor_shapes(draft.config), **_embedding_shape(draft)})
    dtype = str(draft.lm_head.weight.dtype).removeprefix("torch.")
    write_json(folder / "config.json", engine_config(draft.config, dtype))


def read(folder: Path) -> Eagle3Draft:
    """Load a folder of this layout."""
    config = read_config(folder / "config.json")
    embeddings: dict[str, Shape] = {"embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    tensors = read_tensors(folder / WEIGHTS_FILE, tensor_shapes(config), embeddings)
    draft_ids = tensors["d2t"] + torch.arange(config.draft_vocab_size)
    if bool((draft_ids < 0).any()) or bool((draft_ids >= config.vocab_size).any()):
        raise FormatError(f"{folder / WEIGHTS_FILE}: d2t points outside the vocabulary of {config.vocab_size}")
    draft = Eagle3Draft(config, draft_ids, own_embeddings="embed_tokens.weight" in tensors)
    if not torch.equal(draft.t2d, tensors["t2d"]):
        raise FormatError(f"{folder / WEIGHTS_FILE}: t2d does not mark the ids that d2t names")
    draft.load_state_dict(tensors)
    return draft.to(tensors["lm_head.weight"].dtype)


def engine_config(config: Eagle3Config, dtype: str) -> dict[str, Any]:
    """config.json as engines expect it."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.target_hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layers),
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in config.aux_layers],
        },
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def read_config(path: Path) -> Eagle3Config:
    """The dimensions out of an engine's config.json. Raises FormatError naming the field."""
    raw = read_object(path)
    if raw.get("architectures") != ["LlamaForCausalLMEagle3"]:
        raise FormatError(f"{path}: architectures {raw.get('architectures')}: must be ['LlamaForCausalLMEagle3']")
    if raw.get("norm_before_residual"):
        raise FormatError(f"{path}: norm_before_residual true: only false is supported")
    known = {name: raw[name] for name in Eagle3Config.model_fields if name in raw}
    known["aux_layers"] = raw.get("eagle_aux_hidden_state_layer_ids")
    known.setdefault("target_hidden_size", raw.get("hidden_size"))
    try:
        return Eagle3Config.model_validate(known)
    except ValidationError as error:
        first = error.errors()[0]
        raise FormatError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def tensor_shapes(config: Eagle3Config) -> dict[str, Shape]:
    """Every tensor that the layout must hold."""
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, groups = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    return {
        "fc.weight": (hidden, 3 * config.target_hidden_size),
        "midlayer.self_attn.q_proj.weight": (heads, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (groups, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (groups, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, heads),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
        "d2t": (config.draft_vocab_size,),
        "t2d": (config.vocab_size,),
    }


def _embedding_shape(draft: Eagle3Draft) -> dict[str, Shape]:
    if draft.embed_tokens is None:
        return {}
    return {"embed_tokens.weight": (draft.config.vocab_size, draft.config.hidden_size)}
