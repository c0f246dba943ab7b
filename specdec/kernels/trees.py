"""Small Triton kernels of a round's trees, each of which stands for many launches: mask, greedy verdict, kept path.

Shapes: B slots, F entries of a tree, of which the last N are new, N drafted nodes, M = N + 1 rows of the target,
D levels, E = D + 1 tokens that a round may emit, G key-value heads, L cached positions.

The same results are plain operations elsewhere: `tree_mask` in `tree.py`, `settle` in `verify_batch.py` and
`KVCache.keep_path`.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 16  # of the mask that a program makes


def mask(parents_BF: Tensor, levels: int, new: int) -> tuple[Tensor, Tensor]:
    """Depths [B, F] and tree mask [B, N, F] of entries by their parents; see `tree_mask`."""
    batch, entries = parents_BF.shape
    depth_BF = torch.empty(batch, entries, dtype=torch.long, device=parents_BF.device)
    visible_BNF = torch.empty(batch, new, entries, dtype=torch.int8, device=parents_BF.device)
    _mask[(batch, triton.cdiv(entries, _ROWS))](
        parents_BF, visible_BNF, depth_BF, parents_BF.stride(0), parents_BF.stride(1), levels, entries - new,
        F=entries, ROWS=_ROWS, ENTRIES=triton.next_power_of_2(entries), num_warps=4,
    )  # fmt: skip
    return depth_BF, visible_BNF.view(torch.bool)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _mask(  # type: ignore[no-untyped-def]
    parents,
    visible,
    depth,
    parent_slot,
    parent_entry,
    levels,
    old,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Some rows of a slot's mask: each entry climbs to its last ancestor, all at once, and marks where it stands."""
    slot = tl.program_id(0).to(tl.int64)
    row, column = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, ENTRIES)
    at = tl.where(row < F, row, -1).to(tl.int64)
    sees, steps = tl.zeros([ROWS, ENTRIES], tl.int32), tl.zeros([ROWS], tl.int64)
    for _ in range(levels):
        sees = sees | (at[:, None] == column[None, :]).to(tl.int32)
        at = tl.load(parents + slot * parent_slot + at * parent_entry, mask=at >= 0, other=-1)
        steps += (at >= 0).to(tl.int64)
    tl.store(depth + slot * F + row, steps, mask=row < F)
    # Entries that were there before ask nothing.
    to = visible + (slot * (F - old) + row - old)[:, None] * F + column[None, :]
    asks = (row >= old) & (row < F)
    tl.store(to, sees.to(tl.int8), mask=asks[:, None] & (column < F)[None, :])


def greedy_verdict(
    best_BM: Tensor, tokens_BN: Tensor, parents_BN: Tensor, candidate_BN: Tensor, live_B: Tensor, depth: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the host reads [B, 3 + E], entries that stay [B, E], their counts [B] and last tokens [B]; see `settle`.

    best_BM: the target's likeliest token after the last one and after every node.
    """
    batch, nodes = tokens_BN.shape
    read_BX, path_BE = best_BM.new_empty(batch, 4 + depth), best_BM.new_empty(batch, 1 + depth)
    counts_B, last_B = best_BM.new_empty(batch), best_BM.new_empty(batch)
    _greedy_verdict[(batch,)](
        best_BM.contiguous(), tokens_BN.contiguous(), parents_BN, candidate_BN.contiguous().view(torch.int8),
        live_B.view(torch.int8), read_BX, path_BE, counts_B, last_B, parents_BN.stride(0), parents_BN.stride(1),
        N=nodes, D=depth, NODES=triton.next_power_of_2(max(nodes, 2)), num_warps=1,
    )  # fmt: skip
    return read_BX, path_BE, counts_B, last_B


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _greedy_verdict(  # type: ignore[no-untyped-def]
    best,
    tokens,
    parents,
    candidates,
    live,
    read,
    path,
    counts,
    last,
    parent_slot,
    parent_node,
    N: tl.constexpr,
    D: tl.constexpr,
    NODES: tl.constexpr,
):
    """One slot's walk from the root: level by level to the child that is the target's likeliest token there."""
    slot = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES).to(tl.int64)
    real = node < N
    token = tl.load(tokens + slot * N + node, mask=real, other=-1)
    parent = tl.load(parents + slot * parent_slot + node * parent_node, mask=real, other=-2)
    candidate = tl.load(candidates + slot * N + node, mask=real, other=0) != 0
    # The root's row always stays, and a slot that has stopped meets its last token again and stays where it is.
    emitted = read + slot * (D + 4) + 3
    tl.store(path + slot * (D + 1), slot * 0)
    at, length = slot * 0 - 1, slot * 0
    said = tl.load(best + slot * (N + 1))
    for level in range(D):
        tl.store(emitted + level, said)
        child = tl.min(tl.where(candidate & (parent == at) & (token == said), node, NODES), 0)
        moves = child < NODES
        tl.store(path + slot * (D + 1) + level + 1, tl.where(moves, child + 1, -1))
        at = tl.where(moves, child, at)
        length += moves.to(tl.int64)
        said = tl.load(best + slot * (N + 1) + at + 1)
    tl.store(emitted + D, said)
    tl.store(last + slot, said)
    tl.store(counts + slot, (length + 1) * tl.load(live + slot).to(tl.int64))
    # One more level was judged where a candidate stands below the end.
    below = tl.max((candidate & (parent == at)).to(tl.int64), 0)
    tl.store(emitted - 3, length)
    tl.store(emitted - 2, tl.sum(candidate.to(tl.int64), 0))
    tl.store(emitted - 1, length + below)


def keep_path(layers: Sequence[Tensor], addresses: Tensor, lengths_B: Tensor, path_BE: Tensor) -> None:
    """Move the entries of a path to the front of the tree's place in layers [S, G, L, D] of one shape and type.

    `addresses`: where the layers begin, on their device. Past a path's end (-1) nothing moves.
    """
    like, (batch, entries) = layers[0], path_BE.shape
    _, groups, _, size = like.shape
    _keep_path[(len(layers), batch, groups)](
        addresses, like, lengths_B, path_BE.contiguous(), like.stride(0), like.stride(1),
        E=entries, D=size, ENTRIES=triton.next_power_of_2(entries), SIZE=triton.next_power_of_2(size), num_warps=4,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _keep_path(  # type: ignore[no-untyped-def]
    addresses,
    like,
    lengths,
    path,
    slot_stride,
    group_stride,
    E: tl.constexpr,
    D: tl.constexpr,
    ENTRIES: tl.constexpr,
    SIZE: tl.constexpr,
):
    """The path of one slot in one head of one layer: all of it is read before any of it is written."""
    slot, group = tl.program_id(1).to(tl.int64), tl.program_id(2)
    layer = tl.load(addresses + tl.program_id(0)).to(like.dtype) + slot * slot_stride + group * group_stride
    to, column = tl.arange(0, ENTRIES), tl.arange(0, SIZE)
    entry = tl.load(path + slot * E + to, mask=to < E, other=-1)
    moves = ((entry >= 0) & (entry != to))[:, None] & (column < D)[None, :]
    length = tl.load(lengths + slot)
    kept = tl.load(layer + (length + entry)[:, None] * D + column[None, :], mask=moves, other=0.0)
    tl.debug_barrier()  # places that one thread writes may be another's to read
    tl.store(layer + (length + to)[:, None] * D + column[None, :], kept, mask=moves)
