"""Base class of the draft families: the parts of a training that differ between families of drafts."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from typing_extensions import TypeVar

from ... import fingerprint
from ...data.batches import Batch
from ...data.store import Capture
from ...errors import InputError, TokenizerMismatchError
from ...specdec.drafts.base import DraftModule
from ...specdec.targets import Target
from ..losses.linear_head import LOSS, Head, LossSettings, Rows, each_head, loss_and_acceptance
from ..losses.schedule import Objective
from ..settings import Settings
from .target_features import Features

LoadTarget = Callable[[], Target]
SettingsT = TypeVar("SettingsT", bound=Settings, default=Any)
DraftT = TypeVar("DraftT", bound=DraftModule, default=Any)
NumberT = TypeVar("NumberT", float, Tensor)


@dataclass(frozen=True)
class Start:
    """Initial draft, before its first step."""

    draft: DraftModule
    extra: dict[str, Any] = field(default_factory=dict)
    """Entries of its lineage that say how it was made."""
    tokenizer: PreTrainedTokenizerBase | Path | None = None
    """Tokenizer of a draft that is served on its own; a path: the folder that holds the tokenizer."""


@dataclass(frozen=True)
class Inputs:
    """Inputs of a forward pass: one micro-batch on the device, with the frozen target's embeddings and features."""

    batch: Batch
    embeds_BTH: Tensor | None = None
    features: Features | None = None


class ExtraLoss(NamedTuple):
    """Name and weight of the loss that a family adds to that of the drafting steps (`Rows.extra_loss`)."""

    name: str
    """Name in the log of its mean over supervised tokens."""
    weight: float
    """Weight of the extra loss."""
    steps_weight: float = 1.0
    """Weight of the drafting steps' loss, which stands beside it."""

    def total(self, steps: NumberT, extra: NumberT) -> NumberT:
        """Total loss: both parts, each times its weight."""
        return self.steps_weight * steps + self.weight * extra


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes that tensors take."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Family(nn.Module, ABC, Generic[SettingsT, DraftT]):
    """A draft under training. The engine wraps this module: its trainable parameters are the draft's.

    A frozen target is held by reference only (it is no submodule), so no engine ever sees or replicates it.
    """

    name: ClassVar[str]
    """Name in recipes and in checkpoints."""
    draft_class: ClassVar[type[nn.Module]]
    """Module class of its drafts."""
    needs_signals: bool = False
    """Whether batches carry the stored signals."""
    step_weights: tuple[float, ...] = (1.0,)
    """Weight of the loss of each step ahead that one forward pass trains."""
    extra_loss: ExtraLoss | None = None
    """The loss that `rows` adds; its sum is the last row of the sums."""
    step: int = 0
    """Optimizer steps done; set by the loop before every step."""
    epoch: int = 0
    """Epoch of the step: passes over the samples that are done; set by the loop before every step."""
    slow_rate_share: float = 1.0
    """Share of the learning rate that `slow_parameters` have."""
    draft: DraftT

    def __init__(self, draft: DraftT, settings: SettingsT, loss: LossSettings, target: Target | None) -> None:
        """`target`: given where `needs_target` says so."""
        super().__init__()
        self.draft = draft
        self.loss_settings = loss

    @classmethod
    @abstractmethod
    def start(cls, settings: SettingsT, seed: int, capture: Capture, load_target: LoadTarget) -> Start:
        """A fresh draft, float32. Raises an error about the field of the recipe that does not fit."""

    @classmethod
    @abstractmethod
    def needs_target(cls, settings: SettingsT) -> bool:
        """Whether the target runs while the draft trains."""

    @classmethod
    def changes_target(cls, settings: SettingsT) -> bool:
        """Whether training changes the target's weights too; the draft then fits the changed target alone."""
        return False

    @classmethod
    @abstractmethod
    def incompatibility(cls, settings: SettingsT, draft: DraftT, source: str) -> str | None:
        """The first field in which the recipe wants another shape than the draft from `source` has; None: it fits."""

    @classmethod
    @abstractmethod
    def check(cls, settings: SettingsT, load_target: LoadTarget) -> DraftT:
        """Check that a fresh draft can be made for this target; called before the capture, which takes hours.

        Returns one without weights (on the device "meta"). Raises InputError.
        """

    @classmethod
    def freeze(cls, draft: DraftT, settings: SettingsT) -> None:
        """Let those parameters of a draft that are trained have gradients, and no others."""
        draft.requires_grad_(True)

    @classmethod
    def beside(cls, settings: SettingsT, load_target: LoadTarget) -> nn.Module | None:
        """What is trained or saved beside the draft, without weights; None: nothing."""
        return None

    @classmethod
    def check_capture(cls, draft: DraftT, capture: Capture, where: str) -> None:
        """Raise InputError where a draft cannot be trained or scored on these answers."""

    @abstractmethod
    def inputs(self, batch: Batch, samples: Sequence[int]) -> Inputs:
        """Prepare a batch of these sample indexes outside the engine, without gradients; a frozen target runs here."""

    @abstractmethod
    def rows(self, inputs: Inputs) -> Rows:
        """The draft's states, with their teacher. Supervised positions only."""

    @abstractmethod
    def head(self) -> Head | Sequence[Head]:
        """The linear head that turns states into logits: one for all rows, or one for each s of their states."""

    def set_objective(self, objective: Objective) -> None:
        """Set the objective to minimise; called by the loop before every step."""
        self.loss_settings = replace(self.loss_settings, objective=objective)

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Summed loss and detached sums [K, 4] of one micro-batch (see linear_head.py); the extra loss adds a row."""
        # The draft's states, under autocast; the loss chooses its dtypes by itself.
        dtype = self.loss_settings.dtype
        device = inputs.batch.ids_BT.device.type
        with torch.autocast(device, dtype=torch.bfloat16, enabled=dtype != torch.float32):
            rows = self.rows(inputs)

        # The loss of the drafting steps.
        loss, sums, alpha_SN = loss_and_acceptance(rows, self.head(), self.loss_settings)
        if self.extra_loss is None:
            return loss, sums

        # The extra loss joins it; its sum becomes one more row, which `reduce` takes off again.
        assert rows.extra_loss is not None
        extra, last_14 = rows.extra_loss(alpha_SN), torch.zeros_like(sums[:1])
        last_14[0, LOSS] = extra.detach()
        return self.extra_loss.total(loss, extra), torch.cat([sums, last_14])

    def export(self) -> DraftModule:
        """The draft as it is saved and served. Adapters are merged into a copy."""
        return self.draft

    def saved_bytes(self) -> int:
        """Bytes on disk of a saved draft, extra files included."""
        return bytes_of(self.draft.parameters())

    def write_extra_files(self, folder: Path) -> None:
        """Write into a saved draft's folder what belongs to it but is no part of its weights."""

    def slow_parameters(self) -> list[nn.Parameter]:
        """Trainable parameters that learn at `slow_rate_share` of the learning rate."""
        return []

    def parameter_groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
        """Trainable parameters in three groups: matrices inside the network; embeddings, heads and tensors of more than
        two dimensions; norms and biases."""
        # Tables are known by identity: heads may be tied to each other or to embeddings.
        tables = {id(matrix) for head in each_head(self.head()) for matrix in (head.weight_VH, head.markov_VE)}
        tables |= {id(module.weight) for module in self.modules() if isinstance(module, nn.Embedding)}
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]

        # Muon is for matrices alone (see optimizers.py), of which one row is none.
        inside = [p for p in trainable if p.ndim == 2 and len(p) > 1 and id(p) not in tables]
        known = {id(p) for p in inside}
        return (
            inside,
            [p for p in trainable if p.ndim > 1 and id(p) not in known],  # experts of a mixture lie in one tensor
            [p for p in trainable if p.ndim < 2],
        )

    def trainable(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by name; a tied one once."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}

    def check_teacher(self, batch: Batch) -> None:
        """Compare a live teacher with a batch's stored signals. Raises StaleInputError where they differ."""


def resolve_aux_layers(wanted: tuple[int, ...] | None, total: int) -> tuple[int, ...]:
    """Indexes of the target layers that are read: those that the recipe names, or the default ones."""
    if wanted is None:
        return default_aux_layers(total)
    if not 1 <= wanted[0] <= wanted[-1] <= total:
        raise InputError(f"draft.aux_layers = {list(wanted)}: must be between 1 and {total}, the target's last layer")
    return wanted


def default_aux_layers(total: int) -> tuple[int, int, int]:
    """Indexes of a low, a middle and a high layer of `total`; shallow targets take the first, middle and last."""
    if total < 3:
        raise InputError(f"draft.aux_layers: the target has {total} layers, must have at least 3")
    # As in EAGLE-3, where these are three different layers.
    usual = (2, total // 2, total - 3)
    return usual if usual[0] < usual[1] < usual[2] else (1, (total + 1) // 2, total)


def check_same_tokenizer(field: str, source: str, digest: str, fits: Target | Capture) -> None:
    """Raise TokenizerMismatchError unless the draft from `source` reads the target's ids. `fits`: target or capture."""
    if digest != fits.tokenizer_digest:
        raise TokenizerMismatchError(
            f"{field}: {source}: tokenizer {fingerprint.short(digest)}, must be the target's "
            f"{fingerprint.short(fits.tokenizer_digest)}"
        )
