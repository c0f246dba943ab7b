"""The frozen target as a teacher while a draft trains.

Shapes: N supervised positions, H hidden size, V vocabulary, J entries, K stored top ids.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...data.batches import Batch
from ...errors import StaleInputError
from ...specdec.targets import Target
from ..head import Head
from ..objectives import Entries, live_entries
from .features import Features

_TOLERANCE = {torch.float32: 0.02, torch.float16: 0.5, torch.bfloat16: 1.0}
_CHECKED_LOGP = -8.0  # rarer tokens are not compared: rounding alone moves them far


@dataclass(frozen=True)
class LiveTeacher:
    """The target's head on its own hidden states, a few positions at a time: only the rows that the draft has."""

    head: Head
    features: Features
    draft_ids: Tensor | None

    @torch.no_grad()
    def entries(self, rows: slice) -> tuple[Entries, Tensor | None]:
        """The whole draft vocabulary."""
        logits_CJ = self.head.logits(self.features.hidden_NH[rows])
        return live_entries(logits_CJ, self.features.lse_N[rows], self.features.best_N[rows], self.draft_ids), None


@torch.no_grad()
def check_live(target: Target, batch: Batch) -> None:
    """Compare the live head with the stored top-k of a batch. Raises StaleInputError where they part."""
    assert batch.signals is not None
    hidden_NH = target.states(batch.ids_BT).hidden_BTH.flatten(0, 1)[batch.positions_N]
    logp_NV = target.logits(hidden_NH).float().log_softmax(-1)
    stored_NK = batch.signals.topk_logp_nk
    difference_NK = (logp_NV.gather(-1, batch.signals.topk_ids_nk.long()) - stored_NK).abs()
    largest = float(difference_NK.masked_fill(stored_NK < _CHECKED_LOGP, 0.0).max())
    limit = _TOLERANCE[target.dtype]
    if not largest <= limit:
        raise StaleInputError(
            f"capture: stored log-probs differ from the loaded target's by up to {largest:.3g}, "
            f"must be within {limit:g} for {target.dtype}; capture again"
        )
