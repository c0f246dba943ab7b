"""Attention of block drafts without a dense mask: values and gradients are those of the dense one."""

from typing import Any

import pytest
import torch
from torch import Tensor

from draftforge.specdec.kernels import block_attention
from draftforge.specdec.kernels.attention import attention
from draftforge.specdec.kernels.block_attention import BlockMask, Sight, merged_blocks
from draftforge.specdec.kernels.document_mask import Documents, QueryMask

# Two rows of three documents or padding; anchors inside and at the beginning of documents, in no order, some twice.
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 9 + [2] * 6, [0] * 12 + [1] * 5 + [-1] * 3])
POSITIONS = torch.tensor([[*range(5), *range(9), *range(6)], [*range(12), *range(5), *range(3)]])
ANCHORS = torch.tensor([[3, 4, 5, 8, 11, 14, 19], [0, 11, 12, 13, 5, 16, 0]])


@pytest.mark.parametrize("width", [2, 5])
@pytest.mark.parametrize("groups", [1, 3])
def test_merged_blocks_equal_one_softmax(width: int, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = BlockMask(QueryMask(Documents(DOCUMENTS, POSITIONS), ANCHORS), width)
    torch.manual_seed(0)
    places, tokens = ANCHORS.shape[1] * width, DOCUMENTS.shape[1]
    sizes = ((3, places), (groups, tokens), (groups, tokens), (groups, places), (groups, places))
    inputs = [torch.randn(2, heads, many, 8, requires_grad=True) for heads, many in sizes]
    query, known, values, key, value = inputs
    together = torch.cat([known, key], 2), torch.cat([values, value], 2)
    dense = attention(query, *together, mask.dense(Sight(None, False)), None).transpose(1, 2)

    # FlexAttention's values on the CPU.
    plain = [one.detach() for one in inputs]
    found = merged_blocks(plain[0], (plain[1], plain[2]), plain[3], plain[4], mask)
    torch.testing.assert_close(found, dense, atol=1e-5, rtol=1e-5)

    # It gives no gradient there: what it computes is written out.
    def written_out(query: Tensor, key: Tensor, value: Tensor, *_: Any, with_lse: bool) -> tuple[Tensor, Tensor]:
        keys, values = (one.repeat_interleave(query.shape[1] // groups, 1) for one in (key, value))
        scores = (query @ keys.mT * 8**-0.5).masked_fill(~mask.before.dense()[:, None], -torch.inf)
        return scores.softmax(-1) @ values, scores.logsumexp(-1)

    monkeypatch.setattr(block_attention, "flex", written_out)
    merged = merged_blocks(query, (known, values), key, value, mask)
    torch.testing.assert_close(merged, dense, atol=1e-5, rtol=1e-5)
    weight = torch.randn_like(dense)
    for ours, theirs in zip(*(torch.autograd.grad((one * weight).sum(), inputs) for one in (merged, dense))):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
