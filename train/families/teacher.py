"""The frozen target as a teacher while a draft trains.

Shapes: N supervised positions, C of a chunk, H hidden size, V vocabulary, K stored top ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...data.batches import Batch
from ...errors import StaleInputError
from ...specdec.targets import Target
from ..closed_form import Whole
from ..objectives import places
from ..rows import Head
from .features import Features, summary

_TOLERANCE = {torch.float32: 0.02, torch.float16: 0.5, torch.bfloat16: 1.0}
_CHECKED_LOGP = -8.0  # rarer tokens are not compared: rounding alone moves them far


@dataclass(frozen=True)
class LiveTeacher:
    """The target's head on its own hidden states, a few positions at a time: only the rows that the draft has."""

    head: Head
    """Of the draft's tokens; of all where `draft_ids` is None."""
    features: Features
    """With `lse` and `best` where the vocabulary is reduced: its logits do not tell them."""
    draft_ids: Tensor | None
    whole_head: Head | None = None
    """Of all tokens: what a reduced vocabulary needs at temperatures other than 1."""
    live = True

    @torch.no_grad()
    def at(self, rows: slice, temperatures: Sequence[float]) -> Whole:
        """The whole draft vocabulary, in the target's dtype."""
        hidden_CH = self.features.hidden_NH[rows]
        logits_CV = self.head.logits(hidden_CH)
        if self.features.lse_N is None or self.features.best_N is None:
            lse_C, best_C = summary(logits_CV)
        else:
            lse_C, best_C = self.features.lse_N[rows], self.features.best_N[rows]
        if self.draft_ids is None:
            lse = [lse_C if t == 1.0 else _lse(logits_CV, t) for t in temperatures]
        else:
            lse = [lse_C if t == 1.0 else self._whole_lse(hidden_CH, t) for t in temperatures]
        return Whole(logits_CV, torch.stack(lse), places(best_C, self.draft_ids))

    def _whole_lse(self, hidden_CH: Tensor, temperature: float) -> Tensor:
        """log sum exp over the whole vocabulary, with no more logits at a time than the draft's tokens have."""
        assert self.whole_head is not None
        size = max(1, len(hidden_CH) * self.head.weight_VH.shape[0] // self.whole_head.weight_VH.shape[0])
        return torch.cat([_lse(self.whole_head.logits(part), temperature) for part in torch.split(hidden_CH, size)])


def _lse(logits_CV: Tensor, temperature: float) -> Tensor:
    return (logits_CV.float() / temperature).logsumexp(-1)


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
