"""Attention of block drafts (DFlash, arXiv 2602.06036) in training: a token of a block sees its document before its
anchor, and the tokens of its own block.

Shapes: B rows, T context tokens, M blocks of a row, W tokens of a block, N = M x W, Q query heads, G key-value heads
(R = Q / G), D head size.
"""

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .document_mask import QueryMask, flex


class Sight(NamedTuple):
    """What the tokens of a block see in one layer."""

    window: int | None
    """Only so many tokens back, their own included; None: the whole context."""
    causal: bool
    """No later token of the block."""


class BlockMask:
    """What the tokens of many blocks see, `width` tokens from each anchor on: made once, for all layers alike."""

    def __init__(self, anchors: QueryMask, width: int) -> None:
        """`anchors`: places [B, M] of the blocks' first tokens."""
        self.anchors, self.width = anchors, width
        self._dense: dict[Sight, Tensor] = {}

    @cached_property
    def before(self) -> QueryMask:
        """The tokens before the anchors, up to which each block's context goes; an anchor that begins its document has
        none, whatever stands before it."""
        return QueryMask(self.anchors.documents, (self.anchors.at_BM - 1).clamp(min=0))

    def some(self, blocks: slice) -> "BlockMask":
        """The mask of some of each row's blocks."""
        return BlockMask(QueryMask(self.anchors.documents, self.anchors.at_BM[:, blocks]), self.width)

    def dense(self, sight: Sight) -> Tensor:
        """Mask [B, 1, N, T + N]: the context before each block, as far as the window reaches, then the block itself."""
        if sight not in self._dense:
            self._dense[sight] = self._make_dense(sight)
        return self._dense[sight]

    def _make_dense(self, sight: Sight) -> Tensor:
        # Places of query and key within a block: later ones are seen unless the layer is causal, far ones not.
        at_BM = self.anchors.at_BM
        (batch, blocks), device = at_BM.shape, at_BM.device
        place_W = torch.arange(self.width, device=device)
        behind_WW = place_W[:, None] - place_W
        inside_WW = torch.ones_like(behind_WW, dtype=torch.bool)
        if sight.causal:
            inside_WW &= behind_WW >= 0

        # The context, for each token of a block alike without a window.
        key_T = torch.arange(self.anchors.documents.document_BT.shape[1], device=device)
        before_BMT = self.anchors.dense() & (key_T < at_BM[..., None])
        before_BMWT = before_BMT[:, :, None].expand(-1, -1, self.width, -1)
        if sight.window is not None:
            inside_WW &= behind_WW < sight.window
            behind_BMWT = (at_BM[..., None] + place_W)[..., None] - key_T
            before_BMWT = before_BMWT & (behind_BMWT < sight.window)

        # Blocks do not see each other.
        same_M1M1 = torch.eye(blocks, dtype=torch.bool, device=device)[:, None, :, None]
        itself_NN = (same_M1M1 & inside_WW[:, None]).reshape(blocks * self.width, -1)
        return torch.cat([before_BMWT.flatten(1, 2), itself_NN.expand(batch, -1, -1)], -1)[:, None]


def merged_blocks(query: Tensor, context: tuple[Tensor, Tensor], key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
    """Attention of block tokens that see the whole context and their whole block, without a score matrix of all pairs.

    query [B, Q, N, D]; context: its keys and values [B, G, T, D]; key, value [B, G, N, D]. Returns [B, N, Q, D].
    FlexAttention over the context, then one softmax with the block's own keys by log-sum-exp.
    """
    # One dtype, that of the values, for all products.
    query, key, known = (one.to(value.dtype).contiguous() for one in (query, key, context[0]))
    value = value.contiguous()

    # All tokens of a block see one context: they stand beside each other as if they were heads.
    (batch, heads, places, size), width, groups = query.shape, mask.width, key.shape[1]
    blocks, shared = places // width, heads // groups
    query_BQMWD = query.view(batch, heads, blocks, width, size)
    folded = query_BQMWD.transpose(2, 3).reshape(batch, heads * width, blocks, size)
    past, lse = flex(folded, known, context[1], mask.before.blocks(), with_lse=True)
    assert lse is not None

    # From then on the queries of a block that share keys stand side by side, R * W of them.
    rows = (batch, groups, blocks, shared * width)
    past = past.view(batch, groups, shared * width, blocks, size).transpose(2, 3)
    lse = lse.view(batch, groups, shared * width, blocks).transpose(2, 3)
    lse = lse.masked_fill((mask.anchors.positions_BM == 0)[:, None, :, None], -torch.inf)
    query = query_BQMWD.view(batch, groups, shared, blocks, width, size).transpose(2, 3).reshape(*rows, size)
    key, value = (one.view(batch, groups, blocks, width, size) for one in (key, value))

    # The log-sum-exp acts as one more score beside those within the block: its softmax weight is the context's share.
    own = (query @ key.mT).float() * size**-0.5  # [B, G, M, R * W, W]
    weights = torch.cat([lse[..., None], own], -1).softmax(-1)
    output = (weights[..., :1] * past + weights[..., 1:].to(value.dtype) @ value).to(value.dtype)
    return output.view(*rows[:3], shared, width, size).permute(0, 2, 4, 1, 3, 5).reshape(batch, places, heads, size)
