"""`small`: an independent causal LM, trained from the stored signals; no target is loaded."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ...data.batches import Batch
from ...data.signals import Signals
from ...errors import InputError
from ...specdec.drafts.small import SmallDraft
from ..head import Head, LossSettings, Rows, head_of
from ..objectives import Entries, stored_entries
from ..settings import LoraSettings, SmallSettings
from .base import Family, Inputs


@dataclass(frozen=True)
class StoredTeacher:
    """The target as the capture recorded it."""

    signals: Signals

    def entries(self, rows: slice) -> tuple[Entries, Tensor | None]:
        """Top k and tail draws of some positions."""
        return stored_entries(Signals(*(tensor[rows] for tensor in self.signals)))


class SmallFamily(Family):
    """Predicts the next token at every supervised position."""

    name = "small"
    needs_signals = True
    draft: SmallDraft

    def __init__(self, draft: SmallDraft, settings: SmallSettings, loss: LossSettings) -> None:
        super().__init__(draft, loss)
        self._lora = settings.lora
        draft.model.eval()
        draft.requires_grad_(True)
        if settings.lora is not None:
            add_lora(draft, settings.lora)
        if settings.activation_checkpointing:
            draft.model.train()
            draft.model.gradient_checkpointing_enable()

    def inputs(self, batch: Batch, samples: Sequence[int]) -> Inputs:
        """Nothing to prepare: the teacher is in the batch."""
        return Inputs(batch)

    def rows(self, inputs: Inputs) -> Rows:
        """Hidden states of the supervised positions only: the head never sees a prompt."""
        batch = inputs.batch
        hidden_BTH = self.draft(batch.ids_BT)
        states_NH = hidden_BTH.flatten(0, 1)[batch.positions_N]
        signals = batch.signals if batch.signals is not None else _no_signals(states_NH.device)
        return Rows(states_NH[None], None, StoredTeacher(signals))

    def head(self) -> Head:
        """The model's own head."""
        return head_of(self.draft.lm)

    def export(self) -> SmallDraft:
        """The draft itself, or a copy with the adapters merged: training goes on unrounded."""
        return self.draft if self._lora is None else merged(self.draft)


def add_lora(draft: SmallDraft, lora: LoraSettings) -> None:
    """Put adapters into the draft's linear layers and freeze everything else."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.targets, lora_dropout=0.0)
    try:
        inject_adapter_in_model(config, draft.model)
    except ValueError as error:
        raise InputError(f"draft.lora: targets {lora.targets}: {' '.join(str(error).split())}") from None


@torch.no_grad()
def merged(draft: SmallDraft) -> SmallDraft:
    """A plain copy of a draft with adapters: W + alpha / rank * B A."""
    from peft.tuners.lora import LoraLayer

    weights: dict[str, Tensor] = {}
    for name, tensor in draft.model.state_dict().items():
        if ".lora_" not in name:
            weights[name.replace(".base_layer.", ".")] = tensor
    for name, module in draft.model.named_modules():
        if isinstance(module, LoraLayer):
            delta = sum(module.get_delta_weight(adapter) for adapter in module.active_adapters)
            weights[f"{name}.weight"] = module.get_base_layer().weight + delta
    config = copy.deepcopy(draft.model.config)
    plain = AutoModelForCausalLM.from_config(config, dtype=next(iter(weights.values())).dtype)
    plain.load_state_dict(weights)
    plain.tie_weights()
    plain.generation_config = copy.deepcopy(draft.model.generation_config)
    return SmallDraft(plain.to(draft.lm.device)).eval()


def _no_signals(device: torch.device) -> Signals:
    empty, ids = torch.zeros(0, 1, device=device), torch.zeros(0, 1, dtype=torch.int32, device=device)
    return Signals(empty[:, 0], ids, empty, empty[:, 0], ids, empty)
