"""Tiny random models of the families that targets come from, and of some that are refused. Windows are 5 tokens."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SIZES = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = {"sliding_window": 5}
HALVES = {"layer_types": ["sliding_attention", "full_attention"] * 2}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 24, **WINDOW}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 16,
}
SUPPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "max_window_layers": 2, **WINDOW}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "mistral": ("mistral", {"head_dim": 8, **WINDOW}),
    "gemma2": ("gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", {**GEMMA, **HALVES}),
    "phi3": ("phi3", WINDOW),
    "phi3-longrope": ("phi3", {"original_max_position_embeddings": 16, "rope_parameters": LONG_ROPE}),
    "mixtral": ("mixtral", {"num_local_experts": 4, **WINDOW}),
    "qwen3-moe": ("qwen3_moe", {"head_dim": 8, **EXPERTS}),
    "granite": ("granite", {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.5}),
}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "sinks": ("gpt_oss", {"head_dim": 8, "num_local_experts": 4, **WINDOW}),
    "chunked": ("llama4_text", {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 96}),
    "recurrent": ("mamba", {}),
    "convolution": ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
    "untold-window": ("qwen2_moe", {**EXPERTS, "use_sliding_window": True, "max_window_layers": 2, **WINDOW}),
    "bidirectional": ("gemma3_text", {**GEMMA, "use_bidirectional_attention": True}),
    "growing-rope": (
        "gemma3_text",
        {
            **GEMMA,
            **HALVES,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "dynamic", "rope_theta": 1000000.0, "factor": 4.0},
            },
        },
    ),
    "no-cache": ("stablelm", {}),
    "no-layers": ("gpt2", {"n_embd": 48, "n_layer": 4, "n_head": 6}),
}


def tiny(kind: str, options: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    """A random model of a transformers model type. Its attention is transformers' own, without fused kernels."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**SIZES, **options})
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
