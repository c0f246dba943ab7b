"""Cutting supervised text into the blocks that a block-parallel draft fills in.

Shapes: B rows, T tokens, M blocks a row, K drafted tokens of a block, N supervised positions, C blocks of the batch.

A block whose anchor stands at place a drafts x_{a+1} .. x_{a+K}, so supervised position j (the target's distribution
of x_{j+1}) is drafted in one block only, j - a steps ahead. Where the first block begins goes through all K places as
a sample comes again, so that every token is drafted from every distance.
"""

import torch
from torch import Tensor

from ... import fingerprint
from ...data.batches import Batch, moved
from ...specdec.documents import Sight


class Blocks:
    """Where the blocks of a batch stand, and which supervised token each of their masks drafts."""

    def __init__(self, batch: Batch, begins: list[int], draft_tokens: int) -> None:
        """`begins`: of each sample, how many places before its first supervised position its first block begins."""
        rows: list[list[Tensor]] = [[] for _ in range(batch.ids_BT.shape[0])]
        filled = [0] * len(rows)
        block, step, row_of, chains = [], [], [], [torch.zeros(draft_tokens, 0, dtype=torch.int64)]
        for place, low, high, begin in zip(batch.places, batch.offsets[:-1], batch.offsets[1:], begins, strict=True):
            first = place.start + place.prompt - 1
            earlier = min(begin, max(place.prompt - 2, 0))  # an anchor has something before it, as in decoding
            ahead_n = torch.arange(earlier, earlier + high - low)
            count = -(-(earlier + high - low) // draft_tokens) if high > low else 0
            rows[place.row].append(first - earlier + draft_tokens * torch.arange(count))
            block.append(filled[place.row] + ahead_n // draft_tokens)
            step.append(ahead_n % draft_tokens)
            row_of.append(torch.full_like(ahead_n, place.row))
            filled[place.row] += count
            place_n = torch.where(ahead_n < draft_tokens, ahead_n - earlier, ahead_n % draft_tokens)
            chain_KC = torch.full((draft_tokens, count), -1)
            chain_KC[place_n, ahead_n // draft_tokens] = torch.arange(low, high)
            chains.append(chain_KC)
        device, width = batch.ids_BT.device, max(1, *filled)
        at_BM = torch.zeros(len(rows), width, dtype=torch.int64)
        for row, parts in enumerate(rows):
            if filled[row]:
                at_BM[row, : filled[row]] = torch.cat(parts)
        block_N, self.step_N = torch.cat(row_of) * width + torch.cat(block), moved(torch.cat(step), device)
        self.anchors = Sight(batch.documents, moved(at_BM, device))
        """Places [B, M] of the anchors; a row that has fewer repeats its first token, which then means nothing."""
        self.at_N = moved(block_N, device) * draft_tokens + self.step_N
        """The mask that drafts each supervised token, in the flattened [B, M, K]."""

        self.chains_KC = moved(torch.cat(chains, 1), device)
        """The supervised tokens of each block in order, as numbers of positions; -1: it has no more."""

    def ids(self, ids_BT: Tensor, mask_id: int, draft_tokens: int) -> Tensor:
        """Token ids [B, M, 1 + K]: anchors and masks."""
        anchor_BM1 = ids_BT.gather(1, self.anchors.at_BM)[..., None]
        return torch.cat([anchor_BM1, torch.full_like(anchor_BM1, mask_id).expand(-1, -1, draft_tokens)], -1)


def begin_of(sample: int, epoch: int, draft_tokens: int) -> int:
    """How many places before a sample's first supervised position its first block begins, in a pass over the samples.

    By the sample and the pass alone: the same however samples are dealt out, and after a resume.
    """
    return (int(fingerprint.of_json(["blocks", sample])[:8], 16) + epoch) % draft_tokens
