"""Initial weights and dimensions of drafts: pruned layers, LoRA adapters, recomputed activations, layer dimensions,
rotary embedding."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ...errors import InputError, one_line
from ...specdec.models import CausalModel
from ..settings import LoraSettings


def add_lora(model: PreTrainedModel, lora: LoraSettings, field: str) -> None:
    """LoRA adapters: put them into the model's linear layers and freeze everything else.

    Raises InputError, whose line begins with `field`, for targets that the model does not have.
    """
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.targets, lora_dropout=0.0)
    try:
        inject_adapter_in_model(config, model)
    except ValueError as error:
        raise InputError(f"{field}: targets {lora.targets}: {' '.join(str(error).split())}") from None


def without_weights(config: Any, dtype: torch.dtype, trust_remote_code: bool = False) -> PreTrainedModel:
    """A causal model of this configuration that takes no memory."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=trust_remote_code
        )
    return model


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Activation checkpointing of a model in evaluation mode: its layers are computed again in the backward pass.

    Dropout stays off, so that gradients are those of a model that keeps its activations.
    """
    model.gradient_checkpointing_enable({"use_reentrant": False})
    # Layers recompute in training mode only: they get it, what lies inside them does not, nor their own dropout.
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True
            for name in [name for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]:
                setattr(module, name, 0.0)


@torch.no_grad()
def merged_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Weights with the LoRA adapters merged, W + alpha / rank * B A (arXiv 2106.09685), in the model's dtype.

    The merged ones are on the CPU.
    """
    from peft.tuners.lora import LoraLayer

    # Plain weights, under the names that they have without adapters.
    weights: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if ".lora_" not in name:
            weights[name.replace(".base_layer.", ".")] = tensor

    # Adapted ones: base and update are added, then rounded to the base's dtype once.
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            base: Tensor = module.get_base_layer().weight
            delta = sum(module.get_delta_weight(adapter) for adapter in module.active_adapters)
            weights[f"{name}.weight"] = (base + delta).to("cpu", base.dtype)
    return weights


def evenly_spaced_layers(count: int, total: int) -> list[int]:
    """Indexes of `count` of `total` layers, evenly spaced, first and last included."""
    if not 2 <= count <= total:
        raise InputError(f"draft.layers {count}: must be between 2 and the target's {total}")
    return [round(index * (total - 1) / (count - 1)) for index in range(count)]


def check_layers(layers: list[int], total: int) -> None:
    """Raise InputError unless the list names existing layers, first and last among them."""
    if layers[0] != 0 or layers[-1] != total - 1:
        raise InputError(f"draft.layers {layers}: must start at 0 and end at {total - 1}, the target's last layer")


@torch.no_grad()
def prune(target: CausalModel, layers: list[int]) -> PreTrainedModel:
    """Pruned float32 copy of a model in evaluation mode, with only these layers; embeddings, norms and head copied."""
    # An empty model of the pruned configuration.
    model, config = target.model, target.config
    prefix = layers_prefix(model, config.num_hidden_layers)
    pruned = prune_config(config, layers)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # the factors of the served context, whichever an engine would choose
        pruned.rope_parameters = {**rope, **dict.fromkeys(("short_factor", "long_factor"), _long_factors(target, rope))}
    small: PreTrainedModel = AutoModelForCausalLM.from_config(pruned, dtype=torch.float32)

    # All weights outside the layers, then the kept layers under their new numbers.
    kept = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(prefix)}
    for index, layer in enumerate(layers):
        kept |= {f"{prefix}{index}.{name}": tensor for name, tensor in target.layer_weights(layer).items()}
    try:
        small.load_state_dict(kept)
    except RuntimeError as error:
        raise InputError(f"draft.layers {layers}: {type(model).__name__} cannot be pruned: {one_line(error)}") from None

    # Tied tables are one tensor again; sampling defaults are the target's.
    small.tie_weights()
    small.generation_config = copy.deepcopy(model.generation_config)
    return small.eval()


def prune_config(config: Any, layers: list[int]) -> Any:
    """A configuration for the kept layers; every list with an entry per layer is cut to them."""
    total = config.num_hidden_layers
    pruned = copy.deepcopy(config)
    for name, value in list(vars(config).items()):
        if isinstance(value, list | tuple) and len(value) == total and name != "architectures":
            setattr(pruned, name, [value[layer] for layer in layers])
    pruned.num_hidden_layers = len(layers)
    return pruned


def layers_prefix(model: nn.Module, total: int) -> str:
    """Prefix of the names of all weights inside the decoder's layers, found as the module list of length `total`."""
    found = [
        name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) == total
    ]
    if not found:
        raise InputError(f"draft.layers: {type(model).__name__} has no list of {total} layers to prune")
    return f"{found[0]}."


_LLAMA_THETA = 10000.0
_FIELDS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
}


def rope_fields(target: CausalModel, head_dim: int) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` of a draft's layers.

    Where the target's layers differ, the draft's are like those with full attention. Dynamic scaling is a larger base,
    that of the whole scaled context; a scaling that rotates only a part of each head is left out.
    """
    # Nested by kind of layer where these differ, else flat.
    rope = getattr(target.config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    theta = rope.get("rope_theta") or getattr(target.config, "rope_theta", None) or _LLAMA_THETA
    if rope.get("rope_type") == "dynamic":
        grown = rope["factor"] * rope["factor"] - (rope["factor"] - 1)
        theta *= grown ** (head_dim / (head_dim - 2))
    return {"rope_theta": float(theta), "rope_scaling": _scaling(target, rope, head_dim)}


def _scaling(target: CausalModel, rope: dict[str, Any], head_dim: int) -> dict[str, Any] | None:
    kind = rope.get("rope_type")
    if kind == "longrope" and 2 * len(rope["long_factor"]) == head_dim:
        return {"rope_type": kind, **_long_fields(target, rope)}
    if kind not in _FIELDS:
        return None
    return {"rope_type": kind} | {name: rope[name] for name in _FIELDS[kind] if rope.get(name) is not None}


def _long_fields(target: CausalModel, rope: dict[str, Any]) -> dict[str, Any]:
    """LongRoPE fields with the factors of the target's served context, whichever set an engine would choose."""
    _, stretch = ROPE_INIT_FUNCTIONS["longrope"](target.config, target.device)
    return {
        **dict.fromkeys(("short_factor", "long_factor"), _long_factors(target, rope)),
        **dict.fromkeys(("attention_factor", "short_mscale", "long_mscale"), stretch),
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
    }


def _long_factors(target: CausalModel, rope: dict[str, Any]) -> list[float]:
    """LongRoPE factors of the target's served context."""
    longer = target.max_positions > rope["original_max_position_embeddings"]
    factors: list[float] = rope["long_factor" if longer else "short_factor"]
    return factors


def layer_fields(target: CausalModel, intermediate_size: int | None = None) -> dict[str, Any]:
    """Layer dimensions, the fields of LayerConfig: the target's own, its rotary embedding included.

    `intermediate_size`: another width of the MLP; None: the target's.
    """
    # Older configurations have neither head_dim nor num_key_value_heads: then both follow from the heads.
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
