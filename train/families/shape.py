"""The dimensions of a head of one decoder layer that drafts for a target."""

from typing import Any

from ...specdec.models import CausalModel
from .rope import rope_fields


def layer_fields(target: CausalModel, intermediate_size: int | None = None) -> dict[str, Any]:
    """Fields of LayerConfig: the target's own, its rotary embedding included; `intermediate_size` may be another."""
    config = target.config
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or target.hidden_size // heads
    return {
        "hidden_size": target.hidden_size,
        "intermediate_size": intermediate_size or config.intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": head_dim,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": target.max_positions,
        "rms_norm_eps": getattr(config, "rms_norm_eps", None) or 1e-6,
        **rope_fields(target, head_dim),
    }
