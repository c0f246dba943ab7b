"""Lookahead's pool of n-grams in two Triton kernels: one adds n-grams, one makes the tree of those to verify.

Shapes: S slots of P places, B rows (the first B slots, or some), X new n-grams of K + 1 tokens, G guesses, W columns of
the window, N = (G + W) K nodes.

The pool is a list in the order of coming. An n-gram that comes again leaves its earlier place: its first token there
becomes -1, which no text holds. So the latest n-grams of a first token are the last places that begin with it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_PLACES = 256  # that one program of the first kernel compares
_BLOCK = 1024  # that the second one looks at, at once


def add_ngrams(pool_SPX: Tensor, sizes_S: Tensor, slots_B: Tensor, fresh_BXn: Tensor, counts_B: Tensor) -> None:
    """Add to each slot's pool the first `counts` of some n-grams; a first token of -1 says that a place holds none."""
    (_, places, tokens), (batch, most, _) = pool_SPX.shape, fresh_BXn.shape
    _add_ngrams[(batch, triton.cdiv(places, _PLACES))](
        pool_SPX, sizes_S, slots_B, fresh_BXn.contiguous(), counts_B.contiguous(), places, most,
        TOKENS=tokens, LANES=triton.next_power_of_2(tokens), BLOCK=_PLACES, num_warps=4,
    )  # fmt: skip
    sizes_S.index_add_(0, slots_B, counts_B)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _add_ngrams(  # type: ignore[no-untyped-def]
    pool,
    sizes,
    slots,
    fresh,
    counts,
    places,
    most,
    TOKENS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some places of a slot's pool: take the new n-grams that come there, leave those that come later."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    size, count = tl.load(sizes + slot), tl.load(counts + row)
    mine, news = pool + slot * places * TOKENS, fresh + row * most * TOKENS
    place, lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, LANES)
    known, new = place < size, (place >= size) & (place < size + count) & (place < places)
    inside = (lane < TOKENS)[None, :]
    at = place.to(tl.int64)[:, None] * TOKENS + lane[None, :]
    ngram = tl.load(mine + at, mask=known[:, None] & inside, other=-1).to(tl.int64)
    came = tl.load(news + at - size * TOKENS, mask=new[:, None] & inside, other=-1).to(tl.int64)
    ngram = tl.where(new[:, None], came, ngram)
    gone = place < 0
    for number in range(0, tl.where(tl.program_id(1) * BLOCK < size + count, count, 0)):
        other = tl.load(news + number * TOKENS + lane, mask=lane < TOKENS, other=-1).to(tl.int64)
        differs = tl.max((ngram != other[None, :]).to(tl.int32), 1)
        gone = gone | ((differs == 0) & (place < size + number))
    ngram = tl.where(gone[:, None] & (lane == 0)[None, :], -1, ngram)
    tl.store(mine + at, ngram.to(pool.dtype.element_ty), mask=(new | (known & gone))[:, None] & inside)


def ngram_tree(
    ids_SL: Tensor,
    counts_B: Tensor,
    limits_B: Tensor,
    pool_SPX: Tensor,
    sizes_S: Tensor,
    window_SKW: Tensor,
    guesses: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, parents and candidates [B, N]: the latest n-grams that begin with each text's last token, merged, then
    the window's tokens as riders; see `LookaheadProposer`."""
    batch, (levels, columns) = len(counts_B), window_SKW.shape[1:]
    nodes, lanes = (guesses + columns) * levels, triton.next_power_of_2(max(guesses, 2))
    tree_B3N = torch.empty(batch, 3, nodes, dtype=torch.long, device=ids_SL.device)
    picked_BG = torch.empty(batch, guesses, dtype=torch.int32, device=ids_SL.device)
    _ngram_tree[(batch,)](
        ids_SL, counts_B, limits_B, pool_SPX, sizes_S, window_SKW, tree_B3N, picked_BG, ids_SL.stride(0),
        pool_SPX.shape[1], G=guesses, GUESSES=lanes, K=levels, W=columns,
        RIDERS=triton.next_power_of_2(levels * columns), BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    tokens_BN, parents_BN, candidates_BN = tree_B3N.unbind(1)
    return tokens_BN, parents_BN, candidates_BN > 0


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _ngram_tree(  # type: ignore[no-untyped-def]
    ids,
    counts,
    limits,
    pool,
    sizes,
    window,
    tree,
    picked,
    slot_stride,
    places,
    G: tl.constexpr,
    GUESSES: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    RIDERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One slot's tree. Node g * K + d is the token at depth d of the g-th latest n-gram."""
    slot = tl.program_id(0).to(tl.int64)
    length, limit = tl.load(counts + slot), tl.load(limits + slot)
    last = tl.load(ids + slot * slot_stride + length - 1, mask=length > 0, other=0)
    mine, mark = pool + slot * places * (K + 1), picked + slot * G
    # 1) From the latest place backwards: the first so many that begin with the last token.
    end = tl.load(sizes + slot)
    taken = limit.to(tl.int32) * 0
    while (end > 0) & (taken < G):
        place = end - 1 - tl.arange(0, BLOCK)
        begins = tl.load(mine + place * (K + 1), mask=place >= 0, other=-1) == last
        rank = taken + tl.cumsum(begins.to(tl.int32), 0)
        tl.store(mark + rank - 1, place.to(tl.int32), mask=begins & (rank <= G))
        taken = tl.minimum(tl.max(rank, 0), G)
        end -= BLOCK
    tl.debug_barrier()  # what one thread noted another one reads
    # 2) Equal beginnings share their nodes: those of the latest n-gram that has them.
    guess, nodes = tl.arange(0, GUESSES), (G + W) * K
    there, to = guess < taken, tree + slot * 3 * (G + W) * K
    place = tl.load(mark + guess, mask=there, other=0).to(tl.int64)
    alike = there[:, None] & there[None, :]
    above = guess * 0
    for depth in tl.static_range(K):
        token = tl.load(mine + place * (K + 1) + 1 + depth, mask=there, other=0)
        alike = alike & (token[:, None] == token[None, :])
        first = tl.min(tl.where(alike, guess[None, :], GUESSES), 1)
        parent = above * K + depth - 1
        if depth == 0:
            parent = guess * 0 - 1
        node = guess * K + depth
        tl.store(to + node, token.to(tl.int64), mask=guess < G)
        tl.store(to + nodes + node, tl.where(there, parent, -1).to(tl.int64), mask=guess < G)
        tl.store(to + 2 * nodes + node, (there & (first == guess) & (depth < limit)).to(tl.int64), mask=guess < G)
        above = first
    # 3) Riders: level 0 of the window is a chain from the root, every other level hangs below the one above it.
    rider = tl.arange(0, RIDERS)
    token = tl.load(window + slot * K * W + rider, mask=rider < K * W, other=0)
    left = tl.where(rider == 0, -1, G * K + rider - 1)
    parent = tl.where(rider < W, left, G * K + rider - W)
    tl.store(to + G * K + rider, token, mask=rider < K * W)
    tl.store(to + nodes + G * K + rider, parent.to(tl.int64), mask=rider < K * W)
    tl.store(to + 2 * nodes + G * K + rider, rider.to(tl.int64) * 0, mask=rider < K * W)
