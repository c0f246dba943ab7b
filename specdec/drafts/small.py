"""The independent draft: a small causal LM with the target's tokenizer (Leviathan et al. 2023, arXiv 2211.17192)."""

from torch import Tensor
from transformers import PreTrainedModel

from ..kernels.document_mask import Documents
from ..models import CausalModel
from .base import DraftModule


class SmallDraft(DraftModule):
    """An independent small model (a transformers causal LM) as a draft; `lm` runs it on our own KV cache."""

    family = "small"

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.lm = CausalModel(model)

    @property
    def vocab_size(self) -> int:
        return self.lm.vocab_size

    @property
    def max_positions(self) -> int:
        return self.lm.max_positions

    def forward(self, ids_BT: Tensor, documents: Documents | None = None) -> Tensor:
        """Post-norm hidden states [B, T, H] of right-padded or packed rows; `logits` takes those that matter."""
        return self.lm.states(ids_BT, documents=documents).hidden_BTH

    def logits(self, hidden: Tensor) -> Tensor:
        """Post-norm states [..., H] -> logits [..., V]."""
        return self.lm.logits(hidden)
