"""Top tokens of rows of logits, ties in order, in two small Triton kernels: every level of a tree begins with them.

Shapes: N rows, V vocabulary, C blocks of a row, R ranks.

A logit and its token are packed into one int64 that grows with the logit and falls with the token, so that the largest
ones are the best in order, and taking one out is a comparison. One program finds the R best of a block, another the R
best of those; a row of one block needs only the first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048  # logits of a program


def top_tokens(logits: Tensor, ranks: int, normalised: bool = False) -> tuple[Tensor, Tensor]:
    """Best `ranks` logits [..., R] of each row [..., V] in float32, and their tokens; of equal ones the lower first.

    `normalised`: log-probabilities in place of logits. V must be `ranks` or more.
    """
    # 1) Rows, and the keys and sums that the first kernel leaves of each block.
    rows_NV = logits.reshape(-1, logits.shape[-1])
    if rows_NV.stride(1) != 1:
        rows_NV = rows_NV.contiguous()
    (rows, size), device = rows_NV.shape, logits.device
    blocks = triton.cdiv(size, _BLOCK)
    keys_NCR = torch.empty(rows, blocks, ranks, dtype=torch.int64, device=device)
    sums_NC2 = torch.empty(rows, blocks, 2, dtype=torch.float32, device=device)
    # 2) The best of each block, and of all blocks.
    _best_of_blocks[(rows, blocks)](
        rows_NV, keys_NCR, sums_NC2, rows_NV.stride(0), size, blocks,
        RANKS=ranks, BLOCK=min(_BLOCK, triton.next_power_of_2(size)), SUMS=normalised, num_warps=4,
    )  # fmt: skip
    best_NR = torch.empty(rows, ranks, dtype=torch.float32, device=device)
    tokens_NR = torch.empty(rows, ranks, dtype=torch.int64, device=device)
    _best_of_rows[(rows,)](
        keys_NCR, sums_NC2, best_NR, tokens_NR, blocks * ranks, blocks,
        RANKS=ranks, KEYS=triton.next_power_of_2(blocks * ranks), BLOCKS=triton.next_power_of_2(blocks),
        SUMS=normalised, num_warps=1 if blocks == 1 else 4,
    )  # fmt: skip
    shape = (*logits.shape[:-1], ranks)
    return best_NR.view(shape), tokens_NR.view(shape)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _best_of_blocks(  # type: ignore[no-untyped-def]
    logits, keys, sums, row_stride, size, blocks, RANKS: tl.constexpr, BLOCK: tl.constexpr, SUMS: tl.constexpr
):
    """The packed best logits of one block of one row, and its maximum and sum of exponentials."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    real = token < size
    x = tl.load(logits + row * row_stride + token, mask=real, other=float("-inf")).to(tl.float32)
    # The bits of a float32 grow with it, once those of negative ones are turned around; -0 equals 0.
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = (order.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)
    key = tl.where(real, key, -0x7FFFFFFFFFFFFFFF)
    # Take out the best, rank by rank.
    at = row * blocks + block
    for rank in range(RANKS):
        best = tl.max(key, 0)
        tl.store(keys + at * RANKS + rank, best)
        key = tl.where(key == best, -0x7FFFFFFFFFFFFFFF, key)
    if SUMS:
        most = tl.max(x, 0)
        least = tl.where(most == float("-inf"), 0.0, most)  # of nothing but -inf the sum is 0
        tl.store(sums + at * 2, most)
        tl.store(sums + at * 2 + 1, tl.sum(tl.exp(x - least), 0))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _best_of_rows(  # type: ignore[no-untyped-def]
    keys,
    sums,
    best_values,
    best_tokens,
    count,
    blocks,
    RANKS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SUMS: tl.constexpr,
):
    """The best logits of one row and their tokens, from the packed ones of its blocks."""
    row = tl.program_id(0).to(tl.int64)
    # Log of the sum of exponentials over all blocks; 0 where logits are wanted.
    total = 0.0
    if SUMS:
        block = tl.arange(0, BLOCKS)
        most = tl.load(sums + (row * blocks + block) * 2, mask=block < blocks, other=float("-inf"))
        part = tl.load(sums + (row * blocks + block) * 2 + 1, mask=block < blocks, other=0.0)
        highest = tl.max(most, 0)
        total = highest + tl.log(tl.sum(tl.where(part > 0, part * tl.exp(most - highest), 0.0), 0))
    # Take out the best, rank by rank, and unpack it.
    place = tl.arange(0, KEYS)
    key = tl.load(keys + row * count + place, mask=place < count, other=-0x7FFFFFFFFFFFFFFF)
    for rank in range(RANKS):
        best = tl.max(key, 0)
        order = (best >> 32).to(tl.int32)
        value = (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        tl.store(best_values + row * RANKS + rank, value - total)
        tl.store(best_tokens + row * RANKS + rank, 0x7FFFFFFF - (best & 0x7FFFFFFF))
        key = tl.where(key == best, -0x7FFFFFFFFFFFFFFF, key)
