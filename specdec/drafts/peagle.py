"""P-EAGLE (parallel EAGLE): an EAGLE-3 head whose later steps read a mask token and a learned state, so that one pass
drafts all tokens. It is read and scored, not trained here.

Shapes: B rows, T tokens, H hidden size, A features of the captured layers.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.document_mask import QueryMask
from .eagle3 import Eagle3Config, Eagle3Draft


class PEagleDraft(Eagle3Draft):
    """A P-EAGLE head. `mask_hidden` [1, 1, A] stands for the features of a position that is to be drafted."""

    family = "peagle"

    def __init__(self, config: Eagle3Config, mask_token_id: int, *args: Any, **named: Any) -> None:
        """`mask_token_id`: the token whose embedding stands there; the rest is as for `Eagle3Draft`."""
        super().__init__(config, *args, **named)
        self.mask_token_id = mask_token_id
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, len(config.aux_layers) * config.target_hidden_size))

    def mask_state(self) -> Tensor:
        """State [H] that all later steps read."""
        fused: Tensor = self.fc(self.mask_hidden)
        return fused[0, 0]

    def parallel(
        self, embeds_BTH: Tensor, aux_BTA: Tensor, trained: QueryMask, steps: int, mask_H: Tensor
    ) -> list[Tensor]:
        """As `forward`, with the mask token's embedding `mask_H` [H]."""
        return self.unroll(embeds_BTH, self.fc(aux_BTA), trained, steps, (mask_H, self.mask_state()))
