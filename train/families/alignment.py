"""Which state of a draft meets which supervised token, for families that draft several tokens from one position.

Shapes: B rows, W trained positions a row, S steps ahead, N supervised positions.

Position i holds the target's state of x_i and drafts x_{i+2+k} at step k. So the token x_{j+1}, supervised by the
target's distribution at j, is drafted at step k from position j - 1 - k, and the loss mask is that of x_{j+1}.
"""

import torch
from torch import Tensor

from ...data.batches import Batch


class Alignment:
    """Where the draft's states stand, and which supervised token each of them drafts."""

    def __init__(self, batch: Batch) -> None:
        offsets = torch.tensor(batch.offsets, device=batch.ids_BT.device)
        self._counts_B = offsets.diff()
        self._start_B = offsets[:-1]
        self._supervised = batch.supervised
        tokens = batch.ids_BT.shape[1]
        first_row = torch.arange(len(self._counts_B), device=offsets.device) * tokens
        # The first supervised position j of a row; a row with none trains nothing, wherever it starts.
        known = torch.cat([batch.positions_N, batch.positions_N.new_zeros(1)])
        j_B = torch.where(self._counts_B > 0, known[self._start_B] - first_row, 1)
        self.first_B = (j_B - 1).clamp_min(0)
        """[B] first trained position: the one that drafts the first supervised token at step 0, if there is one."""
        self._late_B = self.first_B - (j_B - 1)
        self.width = max(1, max(b - a for a, b in zip(batch.offsets, batch.offsets[1:])))
        """Trained positions a row."""
        places_BM = self.first_B[:, None] + torch.arange(self.width, device=offsets.device)
        self.at_BM = places_BM.clamp(max=tokens - 1)
        """[B, M = width] those positions; past a row's end its last one, which means nothing."""

    def rows(self, steps: int) -> tuple[Tensor, Tensor]:
        """[S, N] where each supervised token is drafted, in the flattened [B, W] states, and whether it is."""
        row_N = torch.repeat_interleave(self._counts_B, output_size=self._supervised)
        local_N = torch.arange(len(row_N), device=row_N.device) - self._start_B[row_N]
        step_S1 = torch.arange(steps, device=row_N.device)[:, None]
        column_SN = local_N - self._late_B[row_N] - step_S1
        return row_N * self.width + column_SN.clamp_min(0), column_SN >= 0
