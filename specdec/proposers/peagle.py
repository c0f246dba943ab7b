"""P-EAGLE drafter: the logits of all levels come out of one pass over masks, whatever tokens stand above each.

Shapes: B active slots, F nodes read at once, K drafted tokens, H hidden size, A features, V vocabulary.
"""

import torch
from torch import Tensor

from ..drafts.peagle import PEagleDraft
from ..kernels.document_mask import QueryMask
from ..models import CausalModel
from .eagle import Eagle3Drafter


class PEagleDrafter(Eagle3Drafter):
    """P-EAGLE drafter. Masks see the true states and the masks before them; their keys are dropped with the round."""

    _draft: PEagleDraft

    def __init__(self, draft: PEagleDraft, target: CausalModel) -> None:
        super().__init__(draft, target)

    def reserve(self, slots: int, tokens: int, nodes: int, levels: int) -> None:
        super().reserve(slots, tokens, nodes, levels)
        self._masks = levels - 1

    def open(self, batch: int, chain: bool) -> Tensor:
        # The true states give the first token, masks the others.
        first_BV = self._logits(self._state_SH[:batch])
        if self._masks < 1:
            return first_BV
        embeds_BKH, states_BKH = (
            one.expand(batch, self._masks, -1) for one in (self._mask(), self._draft.mask_state())
        )
        states_BKH = self._draft.decode(embeds_BKH, states_BKH, self._cache.extend(batch, self._masks))
        self._later_BKV = self._logits(states_BKH)
        return first_BV

    def expand(self, tokens_BF: Tensor, parents_BF: Tensor, depth: int) -> Tensor:
        # Logits of a level do not depend on the node: every node of it gets the same.
        return self._later_BKV[:, depth, None].expand(-1, tokens_BF.shape[1], -1)

    def _unrolled(self, embeds_BTH: Tensor, read_BTA: Tensor, starts: QueryMask, count: int) -> list[Tensor]:
        return self._draft.parallel(embeds_BTH, read_BTA, starts, count, self._mask())

    def _mask(self) -> Tensor:
        """Embedding [H] of the mask token."""
        token = torch.full((1, 1), self._draft.mask_token_id, device=self._draft.device)
        embeds: Tensor = self._embed(token)
        return embeds[0, 0]
