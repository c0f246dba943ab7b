"""Medusa-2's other half: the target under training, by adapters (Cai et al. 2024, 2401.10774, section 2.2.2).

Shapes: B rows, T tokens, H hidden size.

What comes out is another model than the target: it is written beside the draft as a folder that engines serve, and
has a fingerprint of its own.
"""

import copy
from itertools import chain
from pathlib import Path

from torch import Tensor, nn

from ...data.batches import Batch
from ...errors import InputError
from ...specdec.models import CausalModel
from ...specdec.settings import TargetSettings
from ...specdec.targets import Target, copy_tokenizer, locate, target_fingerprint
from ..settings import BackboneSettings
from .lora import add_lora, merged_weights


class Backbone:
    """The target's layers with adapters, on the target's own weights, which are held once and stay as they are."""

    def __init__(self, target: Target, settings: BackboneSettings, recompute: bool) -> None:
        """`recompute`: activations, in the backward pass."""
        check_trainable(target)
        self._target = target
        model = target.model
        weights = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
        self._model = copy.deepcopy(model, weights)  # modules of its own around the same tensors
        add_lora(self._model, settings.lora, "draft.backbone.lora")
        self.adapters = _adapters(self._model).float()
        """The trainable modules: every A and B."""
        self._lm = CausalModel(self._model, target.settings.context)
        if recompute:
            self._model.train()
            self._model.gradient_checkpointing_enable({"use_reentrant": False})

    def states(self, batch: Batch) -> Tensor:
        """Post-norm states [B, T, H], with gradients to the adapters."""
        return self._lm.states(batch.ids_BT, documents=batch.documents).hidden_BTH

    def save(self, folder: Path) -> str:
        """Write the model with merged adapters as a transformers folder; returns its fingerprint as a target."""
        self._target.model.save_pretrained(folder, state_dict=merged_weights(self._model))
        copy_tokenizer(locate(self._target.settings).folder, folder)
        return target_fingerprint(TargetSettings(model=str(folder), context=self._target.settings.context))


def check_trainable(target: Target) -> None:
    """Raise InputError for a target that has no plain weights to write back."""
    if target.collective:
        raise InputError("draft.backbone: target.shard is true: a spread target cannot be trained")
    if getattr(target.model.config, "quantization_config", None) is not None:
        raise InputError("draft.backbone: the target is quantised; train the model that it was made of")


def _adapters(model: nn.Module) -> nn.ModuleList:
    from peft.tuners.lora import LoraLayer

    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    return nn.ModuleList(
        part[name] for layer in layers for name in layer.active_adapters for part in (layer.lora_A, layer.lora_B)
    )
