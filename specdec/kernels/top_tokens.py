"""Top tokens of rows of logits, ties in order, in two small Triton kernels: every level of a tree begins with them.

Shapes: B slots, F nodes of a slot, N = B F rows, V vocabulary, C blocks of a row, R ranks, X = F R.

A logit and its token are packed into one number that grows with the logit and falls with the token, so that the largest
ones are the best in order, and taking one out is a comparison. One program finds the R best of a block, another the R
best of those. Within a block, logits of 16 bits and their places fit into an int32, which a GPU compares faster.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .early_launch import early

_BLOCK = 2048  # logits of a program
_FEW_KEYS = 256  # that one warp compares sooner than four


def top_tokens(logits: Tensor, ranks: int, normalised: bool = False) -> tuple[Tensor, Tensor]:
    """Best `ranks` logits [..., R] of each row [..., V], and their tokens; of equal ones the lower first.

    `normalised`: log-probabilities, in float32, in place of logits. V must be `ranks` or more.
    """
    rows_NV = logits.reshape(-1, logits.shape[-1])
    kind = torch.float32 if normalised else logits.dtype
    best_NR = torch.empty(len(rows_NV), ranks, dtype=kind, device=logits.device)
    tokens_NR = torch.empty(len(rows_NV), ranks, dtype=torch.int64, device=logits.device)
    put_top_tokens(rows_NV[:, None], ranks, best_NR, tokens_NR, normalised)
    shape = (*logits.shape[:-1], ranks)
    return best_NR.view(shape), tokens_NR.view(shape)


def put_top_tokens(
    logits_BFV: Tensor,
    ranks: int,
    best_BX: Tensor,
    tokens_BX: Tensor,
    normalised: bool = False,
    above_BF: Tensor | None = None,
) -> None:
    """Write the `ranks` best of each row, node after node, into two tensors of one layout; see `top_tokens`.

    `above_BF` is added to what is written of each node. The last dimension of both tensors is contiguous.
    """
    # 1) Rows, and the keys and sums that the first kernel leaves of each block.
    rows_NV = logits_BFV.reshape(-1, logits_BFV.shape[-1])
    if rows_NV.stride(1) != 1:
        rows_NV = rows_NV.contiguous()
    (rows, size), device = rows_NV.shape, logits_BFV.device
    blocks = triton.cdiv(size, _BLOCK)
    keys_NCR = torch.empty(rows, blocks, ranks, dtype=torch.int64, device=device)
    sums_NC2 = torch.empty(rows, blocks, 2, dtype=torch.float32, device=device)
    # 2) The best of each block, and of all blocks.
    _best_of_blocks[(rows, blocks)](
        rows_NV, keys_NCR, sums_NC2, rows_NV.stride(0), size, blocks,
        RANKS=ranks, BLOCK=min(_BLOCK, triton.next_power_of_2(size)), SUMS=normalised, **early(device), num_warps=4,
    )  # fmt: skip
    count = triton.next_power_of_2(blocks * ranks)
    _best_of_rows[(rows,)](
        keys_NCR, sums_NC2, best_BX if above_BF is None else above_BF, best_BX, tokens_BX,
        blocks * ranks, blocks, logits_BFV.shape[1], best_BX.stride(0),
        RANKS=ranks, KEYS=count, BLOCKS=triton.next_power_of_2(blocks),
        SUMS=normalised, ABOVE=above_BF is not None, **early(device), num_warps=1 if count <= _FEW_KEYS else 4,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def ordered_key(x, place):  # type: ignore[no-untyped-def]
    """An int64 that grows with x, a float32, and falls with its place."""
    # The bits of a float32 grow with it, once those of negative ones are turned around; -0 equals 0.
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - place).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _best_of_blocks(  # type: ignore[no-untyped-def]
    logits,
    keys,
    sums,
    row_stride,
    size,
    blocks,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    SUMS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The packed best logits of one block of one row, and its maximum and sum of exponentials."""
    row, block, column = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    token = block * BLOCK + column
    real = token < size
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    kind: tl.constexpr = logits.dtype.element_ty
    SHORT: tl.constexpr = kind.primitive_bitwidth == 16
    LEAST: tl.constexpr = -0x7FFFFFFF if SHORT else -0x7FFFFFFFFFFFFFFF
    given = tl.load(logits + row * row_stride + token, mask=real, other=float("-inf"))
    x = given.to(tl.float32)
    # Keys of 16 bits each for a logit and its place, or of 32.
    if SHORT:
        bits = tl.where(x == 0, 0, given.to(tl.int16, bitcast=True).to(tl.int32))
        key = ((bits ^ ((bits >> 15) & 0x7FFF)) << 16) | (BLOCK - 1 - column)
    else:
        key = ordered_key(x, token)
    key = tl.where(real, key, LEAST)
    # Take out the best, rank by rank.
    at = row * blocks + block
    for rank in range(RANKS):
        best = tl.max(key, 0)
        key = tl.where(key == best, LEAST, key)
        if SHORT:
            order = best >> 16
            value = (order ^ ((order >> 15) & 0x7FFF)).to(tl.int16).to(kind, bitcast=True).to(tl.float32)
            whole = ordered_key(value, block * BLOCK + BLOCK - 1 - (best & 0xFFFF))
            best = tl.where(best == LEAST, -0x7FFFFFFFFFFFFFFF, whole)
        tl.store(keys + at * RANKS + rank, best)
    if SUMS:
        most = tl.max(x, 0)
        least = tl.where(most == float("-inf"), 0.0, most)  # of nothing but -inf the sum is 0
        tl.store(sums + at * 2, most)
        tl.store(sums + at * 2 + 1, tl.sum(tl.exp(x - least), 0))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _best_of_rows(  # type: ignore[no-untyped-def]
    keys,
    sums,
    above,
    best_values,
    best_tokens,
    count,
    blocks,
    nodes,
    slot_stride,
    RANKS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SUMS: tl.constexpr,
    ABOVE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The best logits of one row and their tokens, from the packed ones of its blocks."""
    row = tl.program_id(0).to(tl.int64)
    to = row // nodes * slot_stride + row % nodes * RANKS
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
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
        value = value - total
        if ABOVE:
            value += tl.load(above + row)
        tl.store(best_values + to + rank, value)
        tl.store(best_tokens + to + rank, 0x7FFFFFFF - (best & 0x7FFFFFFF))
        key = tl.where(key == best, -0x7FFFFFFFFFFFFFFF, key)
