"""EAGLE (Li et al. 2024, arXiv 2401.15077) and EAGLE-2, whose head is the same and whose tree is the decoder's.

Shapes: B rows, T tokens, N new tokens, H hidden size.

The state of a true position is the target's own, after its final norm; `layers.py` says how the head goes on from it.
The target's head turns states into logits: this one has none, and no final norm. Parameters bear the names of the
checkpoint layout that vLLM reads.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..kernels.document_mask import QueryMask
from .layers import Attention, DecoderLayer, FeatureDraft, LayerConfig, Parts


class EagleConfig(LayerConfig):
    """Dimensions of an EAGLE head: one decoder layer with the target's hidden size and vocabulary."""


class EagleDraft(FeatureDraft):
    """An EAGLE head. Embeddings come from the target unless the checkpoint brought its own (`embed_tokens`)."""

    family = "eagle"

    def __init__(self, config: EagleConfig, own_embeddings: bool = False) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([DecoderLayer(config, Attention(config, config.hidden_size))])
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if own_embeddings else None

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_positions(self) -> int:
        return self.config.max_position_embeddings

    @property
    def target_widths(self) -> Mapping[str, int]:
        return {"hidden_size": self.config.hidden_size}

    @property
    def blocks(self) -> Sequence[DecoderLayer]:
        return list(self.layers)  # type: ignore[arg-type]

    def parts_in(self, embeds_BNH: Tensor, state_BNH: Tensor) -> tuple[Tensor, Parts]:
        """fc(embedding, state) [B, N, H], as residual and as attention input: no norm stands before attention."""
        mixed_BNH = self.fc(torch.cat([embeds_BNH, state_BNH], dim=-1))
        return mixed_BNH, [(mixed_BNH, None)]

    def forward(self, embeds_BTH: Tensor, hidden_BTH: Tensor, trained: QueryMask, steps: int) -> list[Tensor]:
        """Training-time test from the target's post-norm states; see `FeatureDraft.unroll`."""
        return self.unroll(embeds_BTH, hidden_BTH, trained, steps)
