"""Low-rank adapters (Hu et al. 2021, 2106.09685) on a transformers model: put in, and merged when it is saved."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...errors import InputError
from ..settings import LoraSettings


def add_lora(model: PreTrainedModel, lora: LoraSettings, field: str) -> None:
    """Put adapters into the model's linear layers and freeze everything else. `field` begins an error's line."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.targets, lora_dropout=0.0)
    try:
        inject_adapter_in_model(config, model)
    except ValueError as error:
        raise InputError(f"{field}: targets {lora.targets}: {' '.join(str(error).split())}") from None


@torch.no_grad()
def merged_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights of the same model without adapters, in its own type: W + alpha / rank * B A; these on the CPU."""
    from peft.tuners.lora import LoraLayer

    weights: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if ".lora_" not in name:
            weights[name.replace(".base_layer.", ".")] = tensor
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            base: Tensor = module.get_base_layer().weight
            delta = sum(module.get_delta_weight(adapter) for adapter in module.active_adapters)
            weights[f"{name}.weight"] = (base + delta).to("cpu", base.dtype)
    return weights
