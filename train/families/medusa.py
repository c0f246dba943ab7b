"""`medusa`: heads that each draft one token further from the target's state (Cai et al. 2024, 2401.10774).

Shapes: B rows, T tokens, M trained positions a row, K heads, N supervised positions, H hidden size, V vocabulary.

Head k at position i reads the target's post-norm state of x_i and drafts x_{i+2+k}. Each head has a matrix to the
whole vocabulary: K x V x H weights, and with `train_heads` three times that in gradients and moments, all float32 (8
heads of an 8-billion-parameter target with 128,256 tokens: 17 GB, 67 GB in all). Without it they stay equal to the
target's head, and one copy is held; the checkpoint stores K of them, as engines want.

Medusa-2 (`backbone`) trains the target too. After `start_step` the heads read the states of the target under training,
whose loss is its divergence from the target as it was, beside `heads_weight` times the heads'. Both learn what the
target said before. The heads' weight is the same from the first step on: AdamW's steps do not depend on it.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from ...data.batches import Batch
from ...data.store import Capture
from ...errors import InputError
from ...specdec.drafts.layers import take
from ...specdec.drafts.medusa import MedusaConfig, MedusaDraft
from ...specdec.formats.checkpoint import META_FILE, ORIGINAL_TARGET, OWN_TARGET, read_meta
from ...specdec.models import CausalModel, head_arithmetic
from ...specdec.target_settings import TargetSettings
from ...specdec.targets import Target, copy_tokenizer_of, target_fingerprint
from ...storage import write_json
from ..losses.linear_head import Head, LossSettings, Rows, head_loss
from ..settings import BackboneSettings, MedusaSettings
from .base import ExtraLoss, Inputs, LoadTarget, Start, bytes_of
from .feature_family import FeatureFamily
from .initial_weights import add_lora, checkpoint_activations, merged_weights, without_weights
from .ttt_alignment import Alignment


class Backbone:
    """LoRA adapters around the target's layers (Medusa-2); the target's own weights are held once and stay frozen."""

    def __init__(self, target: Target, settings: BackboneSettings, recompute: bool) -> None:
        """`recompute`: activation checkpointing, that is, activations are made again in the backward pass."""
        check_trainable(target)
        self._target = target
        model = target.model
        # The memo makes deepcopy take the tensors for copied already: only the modules are new.
        weights = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
        self._model = copy.deepcopy(model, weights)  # modules of its own around the same tensors

        # Adapters in float32, whatever the target's dtype; only the copy has them, so the teacher stays as it was.
        add_lora(self._model, settings.lora, "draft.backbone.lora")
        self.adapters = _adapters(self._model).float()
        """Trainable modules: every A and B of the adapters."""
        self._lm = CausalModel(self._model, target.max_positions)

        if recompute:
            checkpoint_activations(self._model)

    def states(self, batch: Batch) -> Tensor:
        """Post-norm states [B, T, H], with gradients to the adapters."""
        return self._lm.states(batch.ids_BT, documents=batch.documents).hidden_BTH

    def save(self, folder: Path) -> str:
        """Write the model with merged adapters as a transformers folder; returns its fingerprint as a target."""
        self._target.model.save_pretrained(folder, state_dict=merged_weights(self._model))
        copy_tokenizer_of(self._target.settings, folder)
        return target_fingerprint(TargetSettings(model=str(folder), context=self._target.settings.context))


def check_trainable(target: Target) -> None:
    """Raise InputError for a target whose weights cannot be trained and saved: sharded or quantised."""
    if target.collective:
        raise InputError("draft.backbone: target.shard is true: a sharded target cannot be trained")
    if getattr(target.model.config, "quantization_config", None) is not None:
        raise InputError("draft.backbone: the target is quantised; train the model that it was made of")


def _adapters(model: nn.Module) -> nn.ModuleList:
    from peft.tuners.lora import LoraLayer

    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    return nn.ModuleList(
        part[name] for layer in layers for name in layer.active_adapters for part in (layer.lora_A, layer.lora_B)
    )


class MedusaFamily(FeatureFamily[MedusaSettings, MedusaDraft]):
    """Medusa family: heads on a frozen target (Medusa-1), or on one that is trained with them (Medusa-2)."""

    name = "medusa"
    draft_class = MedusaDraft

    def __init__(self, draft: MedusaDraft, settings: MedusaSettings, loss: LossSettings, target: Target | None) -> None:
        super().__init__(draft, settings, loss, target)
        # Frozen heads that are equal, as in a fresh draft, share one copy in memory.
        if not settings.train_heads:
            _tie_equal_heads(draft)

        # Medusa-2: the adapters become a part of this module, so that the engine trains them. Heads are the main loss
        # and weigh `heads_weight`; the divergence from the frozen target is the extra loss, of weight 1.
        self._backbone: Backbone | None = None
        if (backbone := settings.backbone) is not None:
            self._backbone = Backbone(self._target, backbone, settings.activation_checkpointing)
            self.adapters = self._backbone.adapters
            self._start_step, self.slow_rate_share = backbone.start_step, backbone.rate_share
            self.extra_loss = ExtraLoss("backbone_loss", 1.0, backbone.heads_weight)
            self._divergence = replace(self.loss_settings, objective={"kl": 1.0})

    @classmethod
    def start(cls, settings: MedusaSettings, seed: int, capture: Capture, load_target: LoadTarget) -> Start:
        """Fresh draft: residual blocks that add nothing yet, under copies of the target's head. Nothing is random."""
        target = load_target()
        capture.check_target(target)
        draft = MedusaDraft(medusa_config(settings, target))
        copy_heads(draft, target)
        return Start(draft)

    @classmethod
    def changes_target(cls, settings: MedusaSettings) -> bool:
        """Whether the recipe is Medusa-2, which trains the target."""
        return settings.backbone is not None

    @classmethod
    def incompatibility(cls, settings: MedusaSettings, draft: MedusaDraft, source: str) -> str | None:
        """Compare the number of heads and of their residual blocks."""
        config = draft.config
        if settings.draft_tokens != config.num_heads:
            return f"draft_tokens = {settings.draft_tokens}: {source} has {config.num_heads} heads"
        if settings.blocks != config.num_layers:
            return f"blocks = {settings.blocks}: {source} has {config.num_layers} a head"
        return None

    @classmethod
    def check(cls, settings: MedusaSettings, load_target: LoadTarget) -> MedusaDraft:
        """Any target fits; one that is to be trained is checked by `beside`."""
        config = medusa_config(settings, load_target())
        with torch.device("meta"):
            return MedusaDraft(config)

    @classmethod
    def freeze(cls, draft: MedusaDraft, settings: MedusaSettings) -> None:
        """Train the blocks, and the heads where the recipe says so."""
        super().freeze(draft, settings)
        draft.lm_heads.requires_grad_(settings.train_heads)

    @classmethod
    def beside(cls, settings: MedusaSettings, load_target: LoadTarget) -> nn.Module | None:
        """In Medusa-2 the target with its adapters. Raises InputError unless it has plain weights and these modules."""
        if settings.backbone is None:
            return None
        target = load_target()
        check_trainable(target)
        model: nn.Module = without_weights(target.config, target.dtype)
        add_lora(model, settings.backbone.lora, "draft.backbone.lora")
        return model

    @torch.no_grad()
    def inputs(self, batch: Batch, samples: Sequence[int]) -> Inputs:
        """Run the frozen target, or take its cached features: the post-norm states of every position."""
        return Inputs(batch, features=self._features(batch, samples))

    def rows(self, inputs: Inputs) -> Rows:
        """Rows: the states that each head's matrix reads, aligned with the positions that teach it."""
        assert inputs.features is not None
        # Medusa-1, and Medusa-2 before its start step: the heads read the frozen target's states.
        if self._backbone is None:
            return self._rows(inputs, inputs.features.aux_BTA)
        if self.step < self._start_step:
            nothing = torch.stack([p.sum() for p in self.adapters.parameters()]).sum() * 0.0  # moments from step 1 on
            return replace(self._rows(inputs, inputs.features.aux_BTA), extra_loss=lambda _: nothing)

        # Afterwards those of the target under training, whose own loss is its divergence from the frozen one.
        hidden_BTH = self._backbone.states(inputs.batch)
        rows = self._rows(inputs, hidden_BTH)
        own_1NH = hidden_BTH.flatten(0, 1)[inputs.batch.positions_N][None]
        divergence, _ = head_loss(Rows(own_1NH, None, rows.teacher), self._teacher_head, self._divergence)
        return replace(rows, extra_loss=lambda _: divergence)

    def _rows(self, inputs: Inputs, hidden_BTH: Tensor) -> Rows:
        assert inputs.features is not None
        # States of the positions that draft, in float32 for the heads.
        heads, alignment = len(self.step_weights), Alignment(inputs.batch)
        read_LH = take(hidden_BTH, alignment.trained.at_BM).flatten(0, 1).float()  # L = B x M

        # Head k reads the position k + 1 before the one that teaches it.
        at_KN, valid_KN = alignment.rows(heads)
        states_KNH = torch.stack([self.draft.state(read_LH[at], head) for head, at in enumerate(at_KN)])
        teacher = self.teacher(inputs.features)
        return Rows(states_KNH, valid_KN, teacher, self.step_weights)

    def head(self) -> list[Head]:
        """Matrix of each head, without the target's scale and soft-cap, which serving engines do not apply either."""
        return [Head(linear.weight) for linear in self.draft.lm_heads]  # type: ignore[arg-type]

    def slow_parameters(self) -> list[nn.Parameter]:
        """Adapters of the backbone, which learn at `rate_share`; none in Medusa-1."""
        return [] if self._backbone is None else list(self.adapters.parameters())

    def saved_bytes(self) -> int:
        """Bytes of a saved draft: all heads, equal ones each time, and the changed target."""
        target = 0 if self._backbone is None else bytes_of(self._target.model.parameters())
        return bytes_of(self.draft.state_dict().values()) + target

    def write_extra_files(self, folder: Path) -> None:
        """Write the changed target beside the draft, which fits no other."""
        if self._backbone is None:
            return
        # The lineage names the changed target, and keeps the fingerprint of the original.
        meta = read_meta(folder)
        changed = {
            "target_fingerprint": self._backbone.save(folder / OWN_TARGET),
            "extra": {**meta.extra, ORIGINAL_TARGET: meta.target_fingerprint},
        }
        write_json(folder / META_FILE, meta.model_copy(update=changed).model_dump())


def medusa_config(settings: MedusaSettings, target: CausalModel) -> MedusaConfig:
    """Configuration of a fresh draft: the target's dimensions, with the recipe's heads and blocks."""
    return MedusaConfig(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_heads=settings.draft_tokens,
        num_layers=settings.blocks,
        fc_bias=False,
    )


@torch.no_grad()
def copy_heads(draft: MedusaDraft, target: CausalModel) -> None:
    """Start every head from the target's, its scale included; a soft-cap has to be learned."""
    scale, _ = head_arithmetic(target.config)
    rows_VH = target.model.get_output_embeddings().weight.float().cpu() * scale
    for linear in draft.lm_heads:
        linear.weight.copy_(rows_VH)  # type: ignore[operator]


def _tie_equal_heads(draft: MedusaDraft) -> None:
    """Let heads whose matrices are equal share one tensor."""
    first: nn.Parameter = draft.lm_heads[0].weight  # type: ignore[assignment]
    for linear in draft.lm_heads:
        if torch.equal(linear.weight, first):  # type: ignore[arg-type]
            linear.weight = first
