"""Small Triton kernels of a round's trees, each of which stands for many launches: frontiers, trees of what was
offered, mask, greedy verdict, kept path.

Shapes: B slots, F entries of a tree, of which the last N are new, C candidates, R of them read, N drafted nodes,
M = N + 1 rows of the target, D levels, E = D + 1 tokens that a round may emit, G key-value heads, L cached positions.

The same results are plain operations elsewhere: `proposers/dynamic_tree.py` and `static_tree.py`, `tree_mask` in
`tree.py`, `settle` in `verify_batch.py` and `KVCache.keep_path`.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .early_launch import early
from .top_tokens import ordered_key

_ROWS = 16  # of the mask that a program makes
_RANKED = 64  # candidates of a level that a program ranks


def next_frontier(
    scores_BC: Tensor, tokens_BC: Tensor, read_BR: Tensor, start: int, stop: int, known: int, top_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, tokens and parents [B, k] of the best `top_k` candidates of a level, best first, ties in order.

    The level is start <= c < stop. The chosen places c are written behind the `known` ones of `read`. Each node that
    was read offered `top_k` candidates: the root, then those of `read`; a parent is the place of one among these.
    """
    (batch, capacity), device = scores_BC.shape, scores_BC.device
    best_Bk = torch.empty(batch, top_k, dtype=torch.float32, device=device)
    chosen_Bk, parents_Bk = torch.empty(2, batch, top_k, dtype=torch.long, device=device)
    _next_frontier[(batch, triton.cdiv(stop - start, _RANKED))](
        scores_BC, tokens_BC, read_BR, best_Bk, chosen_Bk, parents_Bk, start, stop, known, capacity, read_BR.shape[1],
        K=top_k, PLACES=_RANKED, **early(device), num_warps=4,
    )  # fmt: skip
    return best_Bk, chosen_Bk, parents_Bk


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _keys(scores, place, allowed, stop):  # type: ignore[no-untyped-def]
    """Keys that grow with a candidate's score and fall with its place; from `allowed` on no score counts."""
    score = tl.load(scores + place, mask=place < allowed, other=float("-inf"))
    return tl.where(place < stop, ordered_key(score, place), -0x7FFFFFFFFFFFFFFF)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _ranks(scores, place, start, allowed, stop, PLACES: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many candidates start <= c < stop are better than that of each place."""
    key, better = _keys(scores, place, allowed, stop), tl.zeros([PLACES, 32], tl.int32)
    for first in range(start, stop, 32):
        other = _keys(scores, first + tl.arange(0, 32), allowed, stop)
        better += (other[None, :] > key[:, None]).to(tl.int32)
    return tl.sum(better, 1)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _next_frontier(  # type: ignore[no-untyped-def]
    scores,
    tokens,
    read,
    best,
    chosen,
    parents,
    start,
    stop,
    known,
    capacity,
    most_read,
    K: tl.constexpr,
    PLACES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Some candidates of one slot's level: each of the best knows its rank, and is written there."""
    slot = tl.program_id(0).to(tl.int64)
    place = start + tl.program_id(1) * PLACES + tl.arange(0, PLACES)
    scores, tokens = scores + slot * capacity, tokens + slot * capacity
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    rank = _ranks(scores, place, start, stop, stop, PLACES)
    stays = (place < stop) & (rank < K)
    to = slot * K + rank
    tl.store(best + to, tl.load(scores + place, mask=stays, other=0.0), mask=stays)
    tl.store(chosen + to, tl.load(tokens + place, mask=stays, other=0), mask=stays)
    tl.store(parents + to, place // K - 1, mask=stays)
    tl.store(read + slot * most_read + known + rank, place, mask=stays)


def best_nodes(
    scores_BC: Tensor, tokens_BC: Tensor, read_BR: Tensor, limits_B: Tensor, nodes: int, top_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, parents and marks [B, N] of the best `nodes` candidates, in their order; see `_Pool.best`."""
    (batch, capacity), device = scores_BC.shape, scores_BC.device
    tokens_BN, parents_BN = torch.empty(2, batch, nodes, dtype=torch.long, device=device)
    candidate_BN = torch.empty(batch, nodes, dtype=torch.int8, device=device)
    places = triton.next_power_of_2(capacity)
    _best_nodes[(batch,)](
        scores_BC, tokens_BC, read_BR, limits_B, tokens_BN, parents_BN, candidate_BN, capacity, read_BR.shape[1],
        N=nodes, K=top_k, PLACES=places, **early(device), num_warps=4 if places <= 256 else 8,
    )  # fmt: skip
    return tokens_BN, parents_BN, candidate_BN.view(torch.bool)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _best_nodes(  # type: ignore[no-untyped-def]
    scores,
    tokens,
    read,
    limits,
    to_tokens,
    to_parents,
    to_candidates,
    capacity,
    most_read,
    N: tl.constexpr,
    K: tl.constexpr,
    PLACES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One slot's tree: the best N candidates, each behind those of lower places."""
    slot, place = tl.program_id(0).to(tl.int64), tl.arange(0, PLACES)
    scores, tokens = scores + slot * capacity, tokens + slot * capacity
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    # Levels within the limit: K candidates below the root, then K below each of K nodes a level.
    limit = tl.load(limits + slot).to(tl.int32)
    allowed = tl.minimum(tl.where(limit > 0, K + K * K * (limit - 1), 0), capacity)
    rank = _ranks(scores, place, 0, allowed, capacity, PLACES)
    stays = (place < capacity) & (rank < N)
    at = tl.cumsum(stays.to(tl.int32), 0) - stays.to(tl.int32)
    # Parents: from places in the pool to places among those that stay.
    above = tl.load(read + slot * most_read + place // K - 1, mask=stays & (place >= K), other=-1).to(tl.int32)
    parent = tl.where(above < 0, -1, tl.gather(at, tl.maximum(above, 0), 0))
    score = tl.load(scores + place, mask=stays & (place < allowed), other=float("-inf"))
    tl.store(to_tokens + slot * N + at, tl.load(tokens + place, mask=stays, other=0), mask=stays)
    tl.store(to_parents + slot * N + at, parent.to(tl.int64), mask=stays)
    tl.store(to_candidates + slot * N + at, (tl.abs(score) < float("inf")).to(tl.int8), mask=stays)


def fixed_nodes(
    scores_BC: Tensor, tokens_BC: Tensor, places_N: Tensor, parents_N: Tensor, limits_B: Tensor, levels: int
) -> tuple[Tensor, Tensor]:
    """Tokens and marks [B, N] of the candidates at given places, of one tree in all slots; see `_likeliest_tree`."""
    (batch, capacity), nodes, device = scores_BC.shape, len(places_N), scores_BC.device
    tokens_BN = torch.empty(batch, nodes, dtype=torch.long, device=device)
    candidate_BN = torch.empty(batch, nodes, dtype=torch.int8, device=device)
    _fixed_nodes[(batch,)](
        scores_BC, tokens_BC, places_N, parents_N, limits_B, tokens_BN, candidate_BN, capacity, levels,
        N=nodes, NODES=triton.next_power_of_2(nodes), **early(device), num_warps=1,
    )  # fmt: skip
    return tokens_BN, candidate_BN.view(torch.bool)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _fixed_nodes(  # type: ignore[no-untyped-def]
    scores,
    tokens,
    places,
    parents,
    limits,
    to_tokens,
    to_candidates,
    capacity,
    levels,
    N: tl.constexpr,
    NODES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One slot's tree: each node climbs to the root, and is a candidate where all scores on the way are finite."""
    slot, node = tl.program_id(0).to(tl.int64), tl.arange(0, NODES)
    real = node < N
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    limit = tl.load(limits + slot)
    token = tl.load(tokens + slot * capacity + tl.load(places + node, mask=real, other=0), mask=real, other=0)
    at, depth, finite = tl.where(real, node, -1).to(tl.int64), tl.zeros([NODES], tl.int64), real
    for _ in range(levels):
        place = tl.load(places + at, mask=at >= 0, other=0)
        score = tl.load(scores + slot * capacity + place, mask=at >= 0, other=0.0)
        finite = finite & (tl.abs(score) < float("inf"))
        depth += (at >= 0).to(tl.int64)
        at = tl.load(parents + at, mask=at >= 0, other=-1)
    tl.store(to_tokens + slot * N + node, token, mask=real)
    tl.store(to_candidates + slot * N + node, (finite & (depth <= limit)).to(tl.int8), mask=real)


def mask(parents_BF: Tensor, levels: int, new: int) -> tuple[Tensor, Tensor]:
    """Depths [B, F] and tree mask [B, N, F] of entries by their parents; see `tree_mask`."""
    return _launch_mask(parents_BF, levels, parents_BF.shape[1] - new, parents_BF[:, :0])[:2]


def branch(
    parents_BN: Tensor, levels: int, past_B: Tensor, known_BE: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Depths [B, F], mask [B, N, F] and positions [B, N] of the entries that a pass reads, and the parents of all.

    `known_BE`: parents of the entries before those of the pass. None: there is none, and the pass begins with one more,
    below which all others stand.
    """
    return _launch_mask(parents_BN, levels, 0 if known_BE is None else known_BE.shape[1], known_BE, past_B)


def _launch_mask(
    parents_BN: Tensor, levels: int, first: int, known_BE: Tensor | None, past_B: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the kernel. `first`: the entry from which on each asks for its row of the mask, and for its position."""
    (batch, nodes), device, rooted = parents_BN.shape, parents_BN.device, known_BE is None
    before = 1 if known_BE is None else known_BE.shape[1]
    entries = before + nodes
    depth_BF, parents_BF = torch.empty(2, batch, entries, dtype=torch.long, device=device)
    positions_BN = torch.empty(batch, entries - first, dtype=torch.long, device=device)
    visible_BNF = torch.empty(batch, entries - first, entries, dtype=torch.int8, device=device)
    # Where there is no known entry or no past, any tensor will do.
    known_BE = parents_BN if known_BE is None or not before else known_BE
    _mask[(batch, triton.cdiv(entries, _ROWS))](
        known_BE, parents_BN, depth_BF if past_B is None else past_B, visible_BNF, depth_BF, positions_BN, parents_BF,
        *known_BE.stride(), *parents_BN.stride(), levels, first, before, F=entries, ROOTED=rooted,
        PAST=past_B is not None, ROWS=_ROWS, ENTRIES=triton.next_power_of_2(entries), **early(device), num_warps=4,
    )  # fmt: skip
    return depth_BF, visible_BNF.view(torch.bool), positions_BN, parents_BF


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _mask(  # type: ignore[no-untyped-def]
    known,
    parents,
    past,
    visible,
    depth,
    positions,
    all_parents,
    known_slot,
    known_entry,
    parent_slot,
    parent_node,
    levels,
    first,
    before,
    F: tl.constexpr,
    ROOTED: tl.constexpr,
    PAST: tl.constexpr,
    ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Some rows of a slot's mask: each entry climbs to its last ancestor, all at once, and marks where it stands."""
    slot = tl.program_id(0).to(tl.int64)
    row, column = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, ENTRIES)
    at = tl.where(row < F, row, -1).to(tl.int64)
    sees, steps = tl.zeros([ROWS, ENTRIES], tl.int32), tl.zeros([ROWS], tl.int64)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    for level in range(levels):
        sees = sees | (at[:, None] == column[None, :]).to(tl.int32)
        # Parents of a root's nodes are counted without it.
        new, old = at >= before, (at >= 0) & (at < before)
        up = tl.load(parents + slot * parent_slot + (at - before) * parent_node, mask=new, other=-1)
        if ROOTED:
            up = tl.where(new, up + 1, -1)
        else:
            up = tl.where(new, up, tl.load(known + slot * known_slot + at * known_entry, mask=old, other=-1))
        tl.store(all_parents + slot * F + row, up, mask=(row < F) & (level == 0))
        at = up
        steps += (at >= 0).to(tl.int64)
    tl.store(depth + slot * F + row, steps, mask=row < F)
    # Entries that were there before ask nothing.
    asks, to = (row >= first) & (row < F), slot * (F - first) + row - first
    tl.store(visible + to[:, None] * F + column[None, :], sees.to(tl.int8), mask=asks[:, None] & (column < F)[None, :])
    if PAST:
        tl.store(positions + to, tl.load(past + slot) + steps, mask=asks)


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
        N=nodes, D=depth, NODES=triton.next_power_of_2(max(nodes, 2)), **early(best_BM.device), num_warps=1,
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
    EARLY: tl.constexpr,
):
    """One slot's walk from the root: level by level to the child that is the target's likeliest token there."""
    slot = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES).to(tl.int64)
    real = node < N
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
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
        E=entries, D=size, ENTRIES=triton.next_power_of_2(entries), SIZE=triton.next_power_of_2(size),
        **early(like.device), num_warps=4,
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
    EARLY: tl.constexpr,
):
    """The path of one slot in one head of one layer: all of it is read before any of it is written."""
    slot, group = tl.program_id(1).to(tl.int64), tl.program_id(2)
    layer = tl.load(addresses + tl.program_id(0)).to(like.dtype) + slot * slot_stride + group * group_stride
    to, column = tl.arange(0, ENTRIES), tl.arange(0, SIZE)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    entry = tl.load(path + slot * E + to, mask=to < E, other=-1)
    moves = ((entry >= 0) & (entry != to))[:, None] & (column < D)[None, :]
    length = tl.load(lengths + slot)
    kept = tl.load(layer + (length + entry)[:, None] * D + column[None, :], mask=moves, other=0.0)
    tl.debug_barrier()  # places that one thread writes may be another's to read
    tl.store(layer + (length + to)[:, None] * D + column[None, :], kept, mask=moves)
