"""The target's rotary embedding, as a head of one layer can have it: checkpoints of heads say it to engines."""

from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ...specdec.models import CausalModel

_LLAMA_THETA = 10000.0
_FIELDS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
}


def rope_fields(target: CausalModel, head_dim: int) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` of a head.

    Where layers differ, the head takes after those that see the whole past, as it does. A scaling that does nothing
    within the context (dynamic), or whose factors are those of a part of each head, is left out.
    """
    rope = getattr(target.config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    theta = rope.get("rope_theta") or getattr(target.config, "rope_theta", None) or _LLAMA_THETA
    return {"rope_theta": float(theta), "rope_scaling": _scaling(target, rope, head_dim)}


def _scaling(target: CausalModel, rope: dict[str, Any], head_dim: int) -> dict[str, Any] | None:
    kind = rope.get("rope_type")
    if kind == "longrope" and 2 * len(rope["long_factor"]) == head_dim:
        return {"rope_type": kind, **_long_fields(target, rope)}
    if kind not in _FIELDS:
        return None
    return {"rope_type": kind} | {name: rope[name] for name in _FIELDS[kind] if rope.get(name) is not None}


def _long_fields(target: CausalModel, rope: dict[str, Any]) -> dict[str, Any]:
    """The factors that the target takes at the context that it is served with, whichever an engine would choose."""
    original = rope["original_max_position_embeddings"]
    factors = rope["long_factor" if target.max_positions > original else "short_factor"]
    _, stretch = ROPE_INIT_FUNCTIONS["longrope"](target.config, target.device)
    return {
        **dict.fromkeys(("short_factor", "long_factor"), factors),
        **dict.fromkeys(("attention_factor", "short_mscale", "long_mscale"), stretch),
        "original_max_position_embeddings": original,
    }
