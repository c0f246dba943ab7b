"""Drafted nodes that a draft has read in this round, standing on top of its cache until the round ends.

Shapes: B slots, F nodes read at once, E nodes read so far.
"""

import torch
from torch import Tensor

from ..cache import KVCache, Step


class Branches:
    """Makes the steps by which a draft reads a tree level by level. The cache's lengths do not grow.

    `chain`: each node follows the one before, so that the past is all there is to see.
    """

    def __init__(self, cache: KVCache, batch: int, chain: bool) -> None:
        self._cache, self._chain = cache, chain
        self._depth_BE = torch.zeros(batch, 0, dtype=torch.long, device=cache.device)
        self._above_BEE = torch.zeros(batch, 0, 0, dtype=torch.bool, device=cache.device)

    def grow(self, parents_BF: Tensor, depth: int) -> Step:
        """The step that reads F more nodes of one level, each below an earlier one or the root (-1)."""
        batch, new = parents_BF.shape
        if self._chain:
            return self._cache.extend(batch, new, skip=depth)
        known = self._depth_BE.shape[1]
        padded_BEE = torch.nn.functional.pad(self._above_BEE, (0, new))
        above_BFE = padded_BEE.new_zeros(batch, new, known + new)
        if known:
            inherited_BFE = padded_BEE.gather(1, parents_BF.clamp(min=0)[..., None].expand(-1, -1, known + new))
            above_BFE = inherited_BFE & (parents_BF >= 0)[..., None]
        itself_FE = torch.eye(known + new, dtype=torch.bool, device=parents_BF.device)[known:]
        above_BFE = above_BFE | itself_FE
        self._above_BEE = torch.cat([padded_BEE, above_BFE], 1)
        self._depth_BE = torch.cat([self._depth_BE, torch.full_like(parents_BF, depth)], 1)
        return self._cache.branch(self._depth_BE, above_BFE)
