"""Prompt lookup in one Triton kernel: where a text's longest suffix stood before, and what followed it there.

Shapes: S slots of L places, B rows (the first B slots), K drafted tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # places that are compared at once


def copy_after_suffix(
    ids_SL: Tensor, counts_B: Tensor, limits_B: Tensor, ngrams: range, first: bool, count: int
) -> tuple[Tensor, Tensor]:
    """Drafted tokens [B, K] and their counts [B]; see `PromptLookup`, whose plain operations give the same."""
    batch = len(counts_B)
    tokens_BK = torch.empty(batch, count, dtype=torch.long, device=ids_SL.device)
    drafted_B = torch.empty_like(counts_B)
    _copy_after_suffix[(batch,)](
        ids_SL, counts_B, limits_B, tokens_BK, drafted_B, ids_SL.stride(0),
        LEAST=ngrams.start, MOST=ngrams.stop - 1, FIRST=first, K=count, TOKENS=triton.next_power_of_2(max(count, 2)),
        BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return tokens_BK, drafted_B


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _copy_after_suffix(  # type: ignore[no-untyped-def]
    ids,
    counts,
    limits,
    tokens,
    drafted,
    slot_stride,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    FIRST: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One slot's draft. An occurrence's key is its length, then its place: the largest key is the one to copy from."""
    slot = tl.program_id(0).to(tl.int64)
    text, length = ids + slot * slot_stride, tl.load(counts + slot)
    # 1) Compare the text's end with every earlier place, from the last token backwards.
    best = length * 0 - 1
    for start in range(0, length - 1, BLOCK):
        end = start + tl.arange(0, BLOCK).to(tl.int64)
        same = end < length - 1
        run = tl.zeros([BLOCK], tl.int64)
        for back in range(MOST):
            mine = tl.load(text + length - 1 - back, mask=back < length, other=-1)
            theirs = tl.load(text + end - back, mask=same & (end >= back), other=-2)
            same = same & (theirs == mine)
            run += same.to(tl.int64)
        place = end
        if FIRST:
            place = length - end
        key = tl.where(run >= LEAST, (run << 32) + place, -1)
        best = tl.maximum(best, tl.max(key, 0))
    # 2) Copy what followed: to the text's end, or on with itself.
    place = best & 0xFFFFFFFF
    if FIRST:
        place = length - place
    found, source = best >= 0, place + 1
    step = tl.arange(0, TOKENS).to(tl.int64)
    at, count = source + step, tl.minimum(tl.load(limits + slot), K)
    if FIRST:
        count = tl.minimum(count, length - source)
    else:
        at = source + step % tl.maximum(length - source, 1)
    count = tl.where(found, count, 0)
    token = tl.load(text + at, mask=step < count, other=0)
    tl.store(tokens + slot * K + step, token, mask=step < K)
    tl.store(drafted + slot, count)
