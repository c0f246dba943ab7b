"""Suffix decoding's draft in three Triton kernels: where a text's end was said before, what followed, the best nodes.

Shapes: S slots of L places, B rows (the first B slots), K levels, N drafted nodes.

`SuffixProposer` does the same with a trie that the host grows. Here nothing is kept but the texts. A match is a place
in the text whose tokens before it are the text's last ones; how many is its run. The first kernel lists the matches.
The second compares each with all others: those whose next d tokens are the same are the occurrences of one node of the
trie, which is known by the first of them. So each match learns the score of the d nodes along it, and shows those of
which it is the first. The third takes the best ones into the tree.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_PLACES = 256  # that one program looks at
_ROWS, _COLUMNS = 8, 32  # matches that are compared at once
_FAR = tl.constexpr(1 << 30)


def suffix_tree(
    ids_SL: Tensor,
    counts_B: Tensor,
    limits_B: Tensor,
    least: Tensor,
    scores: int,
    longest: int,
    nodes: int,
    levels: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, parents and candidates [B, N] of each slot's tree; see `SuffixProposer`.

    `least`: the least score, one number in float64; `scores`: most nodes of a level that may reach it; `longest`: most
    tokens of a match.
    """
    batch, places, device = len(counts_B), ids_SL.shape[1], ids_SL.device
    bins = triton.next_power_of_2(longest + 1)
    # Of each slot: matches by run, in place 0 the number of all, behind them the number of nodes that were shown.
    tallies_BX = torch.zeros(batch, bins + 1, dtype=torch.int32, device=device)
    match_B2L = torch.empty(batch, 2, places, dtype=torch.int32, device=device)
    _find_matches[(batch, triton.cdiv(places, _PLACES))](
        ids_SL, counts_B, tallies_BX, match_B2L, ids_SL.stride(0), places,
        MOST=longest, BINS=bins, BLOCK=_PLACES, num_warps=4,
    )  # fmt: skip
    shown = levels * scores
    score_BC = torch.empty(batch, shown, dtype=torch.float64, device=device)
    node_B5C = torch.empty(batch, 5, shown, dtype=torch.int32, device=device)
    _show_nodes[(batch, triton.cdiv(places, _ROWS))](
        ids_SL, counts_B, tallies_BX, match_B2L, score_BC, node_B5C, least, ids_SL.stride(0), places,
        BINS=bins, K=levels, DEPTHS=triton.next_power_of_2(max(levels, 2)), SHOWN=shown, ROWS=_ROWS, COLUMNS=_COLUMNS,
        num_warps=4,
    )  # fmt: skip
    tree_B3N = torch.empty(batch, 3, nodes, dtype=torch.long, device=device)
    _take_best[(batch,)](
        limits_B, tallies_BX, score_BC, node_B5C, tree_B3N,
        BINS=bins, SHOWN=shown, LANES=triton.next_power_of_2(max(shown, 2)), N=nodes,
        NODES=triton.next_power_of_2(max(nodes, 2)), num_warps=1,
    )  # fmt: skip
    tokens_BN, parents_BN, candidates_BN = tree_B3N.unbind(1)
    return tokens_BN, parents_BN, candidates_BN > 0


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _find_matches(  # type: ignore[no-untyped-def]
    ids,
    counts,
    tallies,
    matches,
    slot_stride,
    places,
    MOST: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """List a slot's matches among some places, with their runs, in any order."""
    slot = tl.program_id(0).to(tl.int64)
    text, length = ids + slot * slot_stride, tl.load(counts + slot)
    place = tl.program_id(1) * BLOCK + 1 + tl.arange(0, BLOCK)
    inside = place < length
    same, run = inside, tl.zeros([BLOCK], tl.int32)
    for back in tl.static_range(MOST):
        mine = tl.load(text + length - 1 - back, mask=length > back, other=-1)
        theirs = tl.load(text + place - 1 - back, mask=inside & (place > back), other=-2)
        same = same & (theirs == mine)
        run += same.to(tl.int32)
    # Each program takes as many places of the list as it has matches.
    found = run > 0
    tally, to = tallies + slot * (BINS + 1), matches + slot * 2 * places
    rank = tl.cumsum(found.to(tl.int32), 0)
    base = tl.atomic_add(tally, tl.max(rank, 0))
    tl.store(to + base + rank - 1, place, mask=found)
    tl.store(to + places + base + rank - 1, run, mask=found)
    tl.atomic_add(tally + run, 1, mask=found)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _show_nodes(  # type: ignore[no-untyped-def]
    ids,
    counts,
    tallies,
    matches,
    scores,
    nodes,
    least_score,
    slot_stride,
    places,
    BINS: tl.constexpr,
    K: tl.constexpr,
    DEPTHS: tl.constexpr,
    SHOWN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Some matches of a slot against all: show the nodes of sufficient score of which each is the first occurrence."""
    slot = tl.program_id(0).to(tl.int64)
    text, length = ids + slot * slot_stride, tl.load(counts + slot).to(tl.int32)
    tally, listed = tallies + slot * (BINS + 1), matches + slot * 2 * places
    matched, least = tl.load(tally), tl.load(least_score)
    bin = tl.arange(0, BINS)
    of_run = tl.load(tally + bin, mask=bin > 0, other=0)
    # 1) This program's matches; with none it compares nothing.
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    mine = row < matched
    columns = tl.where(tl.program_id(1) * ROWS < matched, matched, 0)
    place = tl.load(listed + row, mask=mine, other=0)
    token, own_run = tl.load(text + place, mask=mine, other=-1), tl.load(listed + places + row, mask=mine, other=0)

    # 2) The first level, by ever shorter suffixes of the text: the longest by which the next token scores enough.
    size = tl.max(tl.where(of_run > 0, bin, 0), 0)
    size = tl.where(columns > 0, size, 0)
    left = least * 0.0 + 1.0
    match, score = tl.zeros([ROWS], tl.int32), tl.zeros([ROWS], tl.float64)
    while (size > 0) & (left >= least):
        agree = tl.zeros([ROWS, COLUMNS], tl.int32)
        for start in range(0, columns, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            run = tl.load(listed + places + column, mask=column < matched, other=0)
            other = tl.load(listed + column, mask=column < matched, other=0)
            theirs = tl.load(text + other, mask=column < matched, other=-2)
            agree += ((token[:, None] == theirs[None, :]) & (run >= size)[None, :]).to(tl.int32)
        times = tl.sum(agree, 1)
        one_th = 1.0 / size.to(tl.float64)
        total = tl.sum(tl.where(bin >= size, of_run, 0), 0).to(tl.float64) + one_th
        offer = left * times.to(tl.float64) / total
        takes = (match == 0) & (times > 0) & (offer >= least)
        match = tl.where(takes, size, match)
        score = tl.where(takes, offer, score)
        # What this suffix leaves to shorter ones.
        left = left * (one_th / total)
        size -= 1
    match = tl.where(own_run >= match, match, 0)

    # 3) Occurrences of each node along the matches: how many, how many that something followed, and the first.
    depth = tl.arange(0, DEPTHS)
    count, goes_on = tl.zeros([ROWS, COLUMNS, DEPTHS], tl.int32), tl.zeros([ROWS, COLUMNS, DEPTHS], tl.int32)
    first = tl.full([ROWS, COLUMNS, DEPTHS], _FAR, tl.int32)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        other = tl.load(listed + column, mask=column < matched, other=0)
        run = tl.load(listed + places + column, mask=column < matched, other=0)
        alike = (run[None, :] >= match[:, None]) & (match > 0)[:, None] & (column < matched)[None, :]
        together = tl.zeros([ROWS, COLUMNS], tl.int32)
        for level in tl.static_range(K):
            ours = tl.load(text + place + level, mask=mine & (place + level < length), other=-1)
            theirs = tl.load(text + other + level, mask=(column < matched) & (other + level < length), other=-2)
            alike = alike & (ours[:, None] == theirs[None, :])
            together += alike.to(tl.int32)
        here = together[:, :, None] > depth[None, None, :]
        followed = other[None, :, None] + depth[None, None, :] + 1 < length
        count += here.to(tl.int32)
        goes_on += (here & followed).to(tl.int32)
        first = tl.where(here, tl.minimum(first, other[None, :, None]), first)
    counts_RD, goes_on_RD, first_RD = tl.sum(count, 1), tl.sum(goes_on, 1), tl.min(first, 1)

    # 4) Scores from level to level. Past the text's end only a node that occurred once goes on: with itself.
    to, info = scores + slot * SHOWN, nodes + slot * 5 * SHOWN
    alive, parent = match > 0, place
    total, once = tl.full([ROWS], 1.0, tl.float64), match > 0
    for level in tl.static_range(K):
        at = (depth == level)[None, :]
        real = place + level < length
        times = tl.where(real, tl.sum(tl.where(at, counts_RD, 0), 1), 1)
        if level > 0:
            score = score * times.to(tl.float64) / total
            alive = alive & (real | once) & (score >= least)
        start = tl.where(real, tl.sum(tl.where(at, first_RD, 0), 1), place)
        shows = alive & (start == place)
        rank = tl.cumsum(shows.to(tl.int32), 0)
        number = tl.atomic_add(tally + BINS, tl.max(rank, 0)) + rank - 1
        shows = shows & (number < SHOWN)
        said = tl.load(text + place + (place * 0 + level) % tl.maximum(length - place, 1), mask=shows, other=0)
        tl.store(to + number, score, mask=shows)
        tl.store(info + number, said.to(tl.int32), mask=shows)
        tl.store(info + SHOWN + number, tl.zeros([ROWS], tl.int32) + level, mask=shows)
        tl.store(info + 2 * SHOWN + number, match, mask=shows)
        tl.store(info + 3 * SHOWN + number, place, mask=shows)
        tl.store(info + 4 * SHOWN + number, parent, mask=shows)
        once, parent = times == 1, start
        follows = tl.where(once, 1, tl.sum(tl.where(at, goes_on_RD, 0), 1))
        total = follows.to(tl.float64) + 1.0 / (match + 1 + level).to(tl.float64)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _take_best(  # type: ignore[no-untyped-def]
    limits,
    tallies,
    scores,
    nodes,
    tree,
    BINS: tl.constexpr,
    SHOWN: tl.constexpr,
    LANES: tl.constexpr,
    N: tl.constexpr,
    NODES: tl.constexpr,
):
    """A slot's tree by best-first search; of equals the node that was offered first."""
    slot = tl.program_id(0).to(tl.int64)
    limit = tl.load(limits + slot)
    lane, out = tl.arange(0, LANES), tl.arange(0, NODES)
    known = lane < tl.minimum(tl.load(tallies + slot * (BINS + 1) + BINS), SHOWN)
    score = tl.load(scores + slot * SHOWN + lane, mask=known, other=-1.0)
    info = nodes + slot * 5 * SHOWN + lane
    token, level = tl.load(info, mask=known, other=0), tl.load(info + SHOWN, mask=known, other=0)
    match, place = tl.load(info + 2 * SHOWN, mask=known, other=0), tl.load(info + 3 * SHOWN, mask=known, other=0)
    above = tl.load(info + 4 * SHOWN, mask=known, other=0)
    # Offers in their order: with the node that they stand below, longest matches first, then in the text's order.
    order = ((BINS - match).to(tl.int64) << 32) + place
    free = known & (level == 0) & (limit > 0)
    parent = tl.zeros([LANES], tl.int32) - 1
    tokens, parents, taken = tl.zeros([NODES], tl.int32), tl.zeros([NODES], tl.int32) - 1, limit.to(tl.int32) * 0
    more = tl.max(free.to(tl.int32), 0)
    while (more > 0) & (taken < N):
        best = tl.max(tl.where(free, score, -1.0), 0)
        equals = free & (score == best)
        earliest = tl.min(tl.where(equals, order, 1 << 62), 0)
        picked = equals & (order == earliest)
        picked_place, picked_level = tl.sum(tl.where(picked, place, 0), 0), tl.sum(tl.where(picked, level, 0), 0)
        tokens = tl.where(out == taken, tl.sum(tl.where(picked, token, 0), 0), tokens)
        parents = tl.where(out == taken, tl.sum(tl.where(picked, parent, 0), 0), parents)
        free = free & (lane != tl.sum(tl.where(picked, lane, 0), 0))
        # Its children are offered.
        below = known & (level == picked_level + 1) & (above == picked_place) & (picked_level + 1 < limit)
        parent = tl.where(below, taken, parent)
        taken += 1
        order = tl.where(below, (taken.to(tl.int64) << 48) + order, order)
        free = free | below
        more = tl.max(free.to(tl.int32), 0)
    to = tree + slot * 3 * N + out
    tl.store(to, tokens.to(tl.int64), mask=out < N)
    tl.store(to + N, parents.to(tl.int64), mask=out < N)
    tl.store(to + 2 * N, (out < taken).to(tl.int64), mask=out < N)
