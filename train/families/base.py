"""What one family of drafts adds to the loop that all of them share."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...data.batches import Batch
from ..head import Head, LossSettings, Rows, head_loss
from .features import Features


@dataclass(frozen=True)
class Inputs:
    """One micro-batch on the device, with whatever a frozen target said about it."""

    batch: Batch
    embeds_BTH: Tensor | None = None
    features: Features | None = None


class Family(nn.Module, ABC):
    """A draft under training. The engine wraps this module: its trainable parameters are the draft's.

    A frozen target is held by reference only (it is no submodule), so no engine ever sees or replicates it.
    """

    name: str
    needs_signals: bool
    """Whether batches carry the stored signals."""
    step_weights: tuple[float, ...] = (1.0,)
    """Weight of the loss of each step ahead that one forward pass trains."""

    def __init__(self, draft: nn.Module, loss: LossSettings) -> None:
        super().__init__()
        self.draft = draft
        self.loss_settings = loss

    @abstractmethod
    def inputs(self, batch: Batch, samples: Sequence[int]) -> Inputs:
        """Prepare a batch of these sample indexes outside the engine, without gradients; a frozen target runs here."""

    @abstractmethod
    def rows(self, inputs: Inputs) -> Rows:
        """The draft's states, with their teacher. Supervised positions only."""

    @abstractmethod
    def head(self) -> Head:
        """The linear head that turns states into logits."""

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Summed loss and detached sums [S, 4] of one micro-batch (see head.py)."""
        dtype = self.loss_settings.dtype
        device = inputs.batch.ids_BT.device.type
        with torch.autocast(device, dtype=torch.bfloat16, enabled=dtype != torch.float32):
            rows = self.rows(inputs)
        return head_loss(rows, self.head(), self.loss_settings)

    def export(self) -> nn.Module:
        """The draft as it is saved and served. Adapters are merged into a copy."""
        return self.draft

    def parameter_groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
        """Trainable matrices inside the network; embeddings and heads; norms and biases."""
        tables = {id(self.head().weight_VH)}
        tables |= {id(module.weight) for module in self.modules() if isinstance(module, nn.Embedding)}
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        matrices = [p for p in trainable if p.ndim >= 2]
        return (
            [p for p in matrices if id(p) not in tables],
            [p for p in matrices if id(p) in tables],
            [p for p in trainable if p.ndim < 2],
        )

    def trainable(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by name; a tied one once."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}

    def check_teacher(self, batch: Batch) -> None:
        """Compare a live teacher with a batch's stored signals. Raises StaleInputError where they part."""
