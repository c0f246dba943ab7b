"""Alignment of draft states with supervised tokens, for families that draft several tokens from one position (the
training-time test of EAGLE-3, arXiv 2503.01840, and the heads of Medusa).

Shapes: B rows, M trained positions a row, S steps ahead, N supervised positions, D samples.

Position i of a sample holds the target's state of x_i and drafts x_{i+2+k} at step k. So the token x_{j+1}, supervised
by the target's distribution at j, is drafted at step k from position j - 1 - k, and the loss mask is that of x_{j+1}.
A sample with n supervised tokens has n trained positions, from the one that drafts the first of them at step 0 on.
"""

import torch
from torch import Tensor

from ...data.batches import Batch, moved
from ...specdec.kernels.document_mask import QueryMask, QueryRuns


class Alignment:
    """Alignment of a batch: the positions that draft, and which supervised token each of their states drafts."""

    def __init__(self, batch: Batch) -> None:
        # For each sample: the positions that draft, their columns in the row's M, the row's first column of the sample.
        ranges: list[list[Tensor]] = [[] for _ in range(batch.ids_BT.shape[0])]
        filled = [0] * len(ranges)
        columns = [torch.zeros(0, dtype=torch.int64)]
        rows, firsts, keys = [], [], []
        for place, low, high in zip(batch.spans, batch.offsets, batch.offsets[1:]):
            wanted = place.start + place.prompt - 2  # drafts the first supervised token at step 0
            first = max(wanted, place.start)
            ranges[place.row].append(torch.arange(first, first + high - low))
            columns.append(torch.arange(filled[place.row], filled[place.row] + high - low) - (first - wanted))
            firsts.append(filled[place.row])
            rows.append(place.row)
            keys.append(first - place.start + high - low if high > low else 0)
            filled[place.row] += high - low
        self.width = max(1, *filled)
        """Number of trained positions a row, M."""

        # Then as tensors: [B, M] positions, and for each supervised token its row, column and first column.
        counts = torch.tensor(batch.offsets).diff()
        at_BM = torch.zeros(len(ranges), self.width, dtype=torch.int64)
        for row, parts in enumerate(ranges):
            if filled[row]:
                at_BM[row, : filled[row]] = torch.cat(parts)
        begins = torch.tensor([place.row * batch.ids_BT.shape[1] + place.start for place in batch.spans])
        columns_D = torch.tensor(rows) * self.width + torch.tensor(firsts)
        runs = query_runs(columns_D, counts, begins, torch.tensor(keys), batch.ids_BT.device)
        self._row_N = moved(torch.repeat_interleave(torch.tensor(rows), counts), batch.ids_BT.device)
        self._first_N = moved(torch.repeat_interleave(torch.tensor(firsts), counts), batch.ids_BT.device)
        self._column_N = moved(torch.cat(columns), batch.ids_BT.device)
        self.trained = QueryMask(batch.documents, moved(at_BM, batch.ids_BT.device), runs)
        """The positions that draft, [B, M]; a row that has fewer repeats its first token, which then means nothing."""

    def rows(self, steps: int) -> tuple[Tensor, Tensor]:
        """Indexes [S, N] of the states that draft each supervised token, into the flattened [B, M], and a mask [S, N]:
        False where no state drafts it at that step."""
        # One step further ahead, a token is drafted one position earlier, but never before the sample's first column.
        step_S1 = torch.arange(steps, device=self._row_N.device)[:, None]
        column_SN = self._column_N - step_S1
        valid_SN = column_SN >= self._first_N
        return self._row_N * self.width + torch.where(valid_SN, column_SN, self._first_N), valid_SN


def query_runs(
    queries_D: Tensor, counts_D: Tensor, keys_D: Tensor, lengths_D: Tensor, device: torch.device
) -> QueryRuns:
    """Runs of D samples, each with its first query's index, its number of queries, and the same of its keys."""
    queries_L, query_starts_D = _end_to_end(queries_D, counts_D)
    keys_P, key_starts_D = _end_to_end(keys_D, lengths_D)
    return QueryRuns(
        moved(queries_L, device),
        moved(keys_P, device),
        moved(query_starts_D, device),
        moved(key_starts_D, device),
        int(counts_D.max()),
        int(lengths_D.max()),
    )


def _end_to_end(firsts_D: Tensor, counts_D: Tensor) -> tuple[Tensor, Tensor]:
    """Indexes firsts[d] .. firsts[d] + counts[d] - 1 of all d, and where each d begins among them (int32 [D + 1])."""
    ends_D = counts_D.cumsum(0)
    at = torch.arange(int(ends_D[-1])) + torch.repeat_interleave(firsts_D - ends_D + counts_D, counts_D)
    return at, torch.cat([torch.zeros(1, dtype=torch.int64), ends_D]).int()
