"""What a model must be for our cache and attention to run it; anything else is refused in one line when it is loaded.

Shapes: B rows, T tokens.

Three nets, since transformers grows new features faster than a list of names can: what each layer hands to its
attention function is recorded once; the config's own words (layer types, sliding windows) must agree with it; and a
cached pass must give what transformers' own attention gives without a cache.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..errors import FormatError
from .attention import attend
from .cache import Step

PROBE = "draftforge-probe"

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_HARMLESS = {"position_ids", "position_embeddings", "cache_position"}
_FEATURES = {
    "attention_mask": "an attention mask of its own",
    "indices": "sparse attention",
    "position_bias": "position biases",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
}


class Call(NamedTuple):
    """What one layer handed to its attention function."""

    layer: int
    causal: bool
    window: int | None
    extras: tuple[str, ...]  # names of tensors beside query, key and value


class Probe(NamedTuple):
    """What one pass of the decoder stack showed."""

    calls: list[Call]
    hidden_BTH: Tensor  # after the final norm


def _probe(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    kv_step: Step | None = None,
    calls: list[Call] | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """`attend`, noting the call."""
    tensors = {"attention_mask": attention_mask, **options}
    extras = [name for name, value in tensors.items() if isinstance(value, Tensor) and name not in _HARMLESS]
    causal = getattr(module, "is_causal", True) is not False and options.get("is_causal") is not False
    layer = int(getattr(module, "layer_idx", -1))
    if calls is not None:
        calls.append(Call(layer, causal, sliding_window, tuple(extras)))
    step = kv_step if layer >= 0 else None
    return attend(
        module, query, key, value, None, scaling, sliding_window=sliding_window, softcap=softcap, kv_step=step
    )


AttentionInterface.register(PROBE, _probe)


@torch.no_grad()
def probe(decoder: nn.Module, ids_BT: Tensor, step: Step) -> Probe:
    """Prefill the stack once; the model's attention implementation must be PROBE."""
    calls: list[Call] = []
    positions_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
    output = decoder(input_ids=ids_BT, position_ids=positions_BT, use_cache=False, kv_step=step, calls=calls)
    return Probe(calls, output.last_hidden_state)


def find_decoder(model: PreTrainedModel, config: Any) -> nn.Module:
    """The stack of decoder layers. Raises FormatError where it is not one of plain attention layers."""
    for layer, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in _LAYER_TYPES:
            raise FormatError(f"{named(model)}: layer {layer} is {kind}: must be full_attention or sliding_attention")
    decoder, layers = model.get_decoder(), config.num_hidden_layers
    if not isinstance(decoder, nn.Module) or len(getattr(decoder, "layers", ())) != layers:
        raise FormatError(f"{named(model)}: has no decoder with {layers} `layers`; not supported")
    return decoder


def check_layers(model: PreTrainedModel, config: Any, calls: Sequence[Call]) -> None:
    """Raise FormatError unless every layer runs plain causal attention of its own, windowed where the config says."""
    ran = [call.layer for call in calls]
    for layer in range(config.num_hidden_layers):
        if ran.count(layer) != 1:
            raise FormatError(
                f"{named(model)}: layer {layer} takes our key-value cache {ran.count(layer)} times, must be once; "
                "recurrent, convolutional and cross-attention layers are not supported"
            )
    for call in calls:
        if call.extras:
            what = _FEATURES.get(call.extras[0], f"the attention input {call.extras[0]}")
            raise FormatError(f"{named(model)}: layer {call.layer} uses {what}; not supported")
        if not call.causal:
            raise FormatError(f"{named(model)}: layer {call.layer} attends to later tokens; must be causal")
        _check_window(model, config, call)


def _check_window(model: PreTrainedModel, config: Any, call: Call) -> None:
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    slides = types[call.layer] == "sliding_attention" if types else getattr(config, "use_sliding_window", True)
    if window is not None and slides and call.window is None:
        raise FormatError(
            f"{named(model)}: layer {call.layer} has a sliding window of {window} that it does not tell its attention; "
            "not supported"
        )


def fix_rope(model: PreTrainedModel, decoder: nn.Module, context: int) -> None:
    """Rotary frequencies that follow the longest row of a pass stop doing so: a cached key is rotated once, for good.

    Long rope (Ding et al. 2024, arXiv 2402.13753) takes its long factors where `context`, the longest sequence that is
    served, exceeds the original one; its short factors otherwise. So does vLLM. Dynamic scaling keeps the frequencies
    of the config's own context, past which no request may go.
    """
    rotary: Any
    for rotary in decoder.modules():
        kind = getattr(rotary, "rope_type", None)
        if isinstance(kind, dict):
            for name, one in kind.items():
                if _grows(one):
                    raise FormatError(f"{named(model)}: rope type {one} of {name} layers; not supported")
        elif _grows(kind):
            rotary.inv_freq.copy_(rotary.original_inv_freq)
            original = rotary.config.rope_parameters.get("original_max_position_embeddings")
            if kind == "longrope" and context > original:
                longer, _ = ROPE_INIT_FUNCTIONS[kind](rotary.config, rotary.inv_freq.device, seq_len=original + 1)
                rotary.inv_freq.copy_(longer)
            rotary.rope_type = "default"


def _grows(rope_type: object) -> bool:
    return rope_type == "longrope" or "dynamic" in str(rope_type)


def named(model: PreTrainedModel) -> str:
    """How errors call the model: its folder or hub id where known, and its class."""
    return " ".join(filter(None, (model.name_or_path, type(model).__name__)))
