"""Attention of a few new tokens a slot over its cached past, in two Triton kernels that read true lengths.

Shapes: S slots, B rows of the pass (the first B slots), N queries a row, F new entries of which the queries are the
last N, H query heads, G key-value heads (R = H / G queries share one), L cached positions, D head size, C parts.

One program owns one (slot, key-value head), or a block of its R * N queries where these are many, and one of C parts of
the keys: its queries stand as the rows of one matrix product, and the keys stream past them block by block with a
running softmax (Dao et al. 2022, arXiv 2205.14135): the past from the first one inside the window, then the entries. A
part is every C-th block, and a second kernel adds the parts up (Dao et al. 2023, Flash-Decoding). The length is read on
the device, so the launch is the same at every step and a CUDA graph can hold it. The new keys and values are read where
the layer made them, while one program of each slot and head also puts them into the cache: nothing waits for what it
writes.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .early_launch import early, fetch

_BLOCK_BYTES = 1 << 12  # of a block of keys: three of them, and of values, lie in shared memory at once
_LEAST = 16  # rows and columns of the smallest product
_MOST = 64  # rows of the largest
_AHEAD = 1024  # tokens of the past that are asked for before the kernel in front ends
_PROGRAMS = 256  # that keep a GPU busy: beyond them, larger products and fewer parts
_PARTS = 16  # at most
_FEW = 8  # queries that may be a chain beside plain decoding's one


def attend_cached(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    past_B: Tensor,
    scaling: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    visible_BNF: Tensor | None = None,
    depth_BF: Tensor | None = None,
) -> Tensor:
    """Decoding attention of query [B, H, N, D] over the cache keys, values [S, G, L, D]. Returns [B, H, N, D].

    A slot holds `past` tokens and F entries after them. The last N entries, key and value [B, G, N, D], are written
    into the cache first. Without `visible` the entries are a chain, F = N, and causal. With it they are a tree: query
    n sees entry f where `visible_BNF` is true, and an entry's position is the past's length plus its depth. Every
    query sees itself, the entry F - N + n.
    """
    batch, heads, new, size = query.shape
    groups, entries = keys.shape[1], new if visible_BNF is None else visible_BNF.shape[2]
    shared = heads // groups
    # The kernel reads and writes rows by strides; only the last dimension must be contiguous.
    query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
    output_BNHD = query.new_empty(batch, new, heads, size)  # as the layer's next product reads it
    output = output_BNHD.transpose(1, 2)
    # Without a tree the kernel still wants two pointers; any tensor will do.
    tree: dict[str, Any] = {"visible": past_B, "depth": past_B}  # not read without a tree
    if visible_BNF is not None and depth_BF is not None:
        tree = {"visible": visible_BNF.contiguous().view(torch.int8), "depth": depth_BF.contiguous()}
    # A program's rows are the queries that share a key-value head. Few rows a program are soonest done, while the GPU
    # has room for more programs.
    rows = _LEAST
    while rows < _MOST and batch * groups * triton.cdiv(shared * new, rows) > _PROGRAMS:
        rows *= 2
    # Parts of few queries do not depend on how many they are: one sums up alike whichever others its pass has.
    busy = batch * groups * (1 if new <= _FEW else 2 * triton.cdiv(shared * new, rows))
    parts = 1
    while parts < _PARTS and 2 * parts * busy <= _PROGRAMS:
        parts *= 2
    means = output if parts == 1 else query.new_empty(batch * heads * new * parts, size, dtype=torch.float32)
    softmax = means if parts == 1 else means.new_empty(batch * heads * new * parts, 2)
    columns = max(_LEAST, triton.next_power_of_2(size))
    block_keys = min(128, max(_LEAST, _BLOCK_BYTES // (columns * keys.element_size())))
    # Constants of compilation: one kernel for each kind of mask and block size.
    options = {"TREE": visible_BNF is not None, "WINDOWED": window is not None, "CAPPED": softcap is not None}
    blocks = {"ROWS": rows, "KEYS": block_keys, "SIZE": columns}
    blocks["ENTRIES"] = min(64, max(_LEAST, triton.next_power_of_2(entries)))
    # One program for each slot, key-value head, part of its keys and block of its queries.
    _attend[(batch, groups * parts, triton.cdiv(shared * new, rows))](
        query,
        key,
        value,
        keys,
        values,
        output,
        means,
        softmax,
        past_B.contiguous(),
        **tree,
        scale=scaling if scaling is not None else size**-0.5,
        cap=softcap or 0.0,
        window=window or 0,
        **_strides("query", query, ("slot", "head", "new")),
        **_strides("new_key", key, ("slot", "group", "row")),
        **_strides("new_value", value, ("slot", "group", "row")),
        **_strides("output", output, ("slot", "head", "new")),
        **_strides("key", keys, ("slot", "group")),
        **_strides("value", values, ("slot", "group")),
        capacity=keys.shape[2],
        N=new,
        F=entries,
        R=shared,
        D=size,
        PARTS=parts,
        **options,
        **blocks,
        AHEAD=_AHEAD,
        **early(query.device),
        num_warps=4,
        num_stages=3,
    )
    if parts > 1:
        _add_parts[(batch, heads, new)](
            means, softmax, output, *output.stride()[:3], D=size, SIZE=columns, PARTS=parts, **early(query.device),
            num_warps=1,
        )  # fmt: skip
    return output


def _strides(name: str, x: Tensor, dimensions: tuple[str, ...]) -> dict[str, int]:
    """Strides of the first dimensions, under the names that the kernel has for them."""
    return {f"{name}_{dimension}": stride for dimension, stride in zip(dimensions, x.stride())}


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _store_new(  # type: ignore[no-untyped-def]
    new_keys,
    new_values,
    new_key_row,
    new_value_row,
    keys,
    values,
    first,
    capacity,
    N: tl.constexpr,
    D: tl.constexpr,
    ENTRIES: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Write a slot's N new keys and values of one head into its cache, from position `first` on."""
    column = tl.arange(0, SIZE)
    for start in range(0, N, ENTRIES):
        row = start + tl.arange(0, ENTRIES)
        to = first + row
        # Behind the cache's last position lies the next head's memory: nothing may be written there.
        fits = ((row < N) & (to < capacity))[:, None] & (column < D)[None, :]
        k = tl.load(new_keys + row[:, None] * new_key_row + column[None, :], mask=fits, other=0.0)
        v = tl.load(new_values + row[:, None] * new_value_row + column[None, :], mask=fits, other=0.0)
        tl.store(keys + to[:, None] * D + column[None, :], k.to(keys.dtype.element_ty), mask=fits)
        tl.store(values + to[:, None] * D + column[None, :], v.to(values.dtype.element_ty), mask=fits)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _fetch_past(  # type: ignore[no-untyped-def]
    keys, values, length, window, D: tl.constexpr, WINDOWED: tl.constexpr, AHEAD: tl.constexpr
):
    """Ask for the first keys and values of the past that a query may see, of one slot and head."""
    LINE: tl.constexpr = 1024 // keys.dtype.element_ty.primitive_bitwidth
    first = length * 0
    if WINDOWED:
        first = tl.maximum(length - window + 1, 0)
    end = tl.minimum(first + AHEAD, length) * D
    for start in range(first * D, end, 256 * LINE):
        line = tl.minimum(start + LINE * tl.arange(0, 256), end - 1)
        fetch(keys + line)
        fetch(values + line)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _read_block(  # type: ignore[no-untyped-def]
    q, k, v, sees, scale, cap, best, total, mean, CAPPED: tl.constexpr
):
    """Attend to one block of keys and values: the online softmax's maximum, sum and weighted mean after it."""
    # Scores of all query rows against this block. "ieee": no TF32, so that float32 stays exact.
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if CAPPED:
        score = cap - 2 * cap / (tl.exp(2 * score / cap) + 1)  # cap * tanh(score / cap)
    # A row that has seen nothing yet gathers nonsense, which its first visible key multiplies by exp(-1e30) = 0.
    score = tl.where(sees, score, -1e30)
    # Earlier sums are faded to the new maximum before this block is added.
    higher = tl.maximum(best, tl.max(score, 1))
    weight = tl.exp(score - higher[:, None])
    fade = tl.exp(best - higher)
    mean = mean * fade[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
    return higher, total * fade + tl.sum(weight, 1), mean


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _attend(  # type: ignore[no-untyped-def]
    query,
    new_keys,
    new_values,
    keys,
    values,
    output,
    means,
    softmax,
    past,
    visible,
    depth,
    scale,
    cap,
    window,
    query_slot,
    query_head,
    query_new,
    new_key_slot,
    new_key_group,
    new_key_row,
    new_value_slot,
    new_value_group,
    new_value_row,
    output_slot,
    output_head,
    output_new,
    key_slot,
    key_group,
    value_slot,
    value_group,
    capacity,
    N: tl.constexpr,
    F: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    TREE: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    ENTRIES: tl.constexpr,
    SIZE: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
):
    slot, group, part = tl.program_id(0).to(tl.int64), tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    key_base, value_base = keys + slot * key_slot + group * key_group, values + slot * value_slot + group * value_group
    # The past's memory lines are on their way before the kernel in front is waited for.
    if EARLY:
        known = tl.minimum(tl.maximum(tl.load(past + slot, volatile=True), 0), capacity)
        _fetch_past(key_base, value_base, known, window, D, WINDOWED, AHEAD)
        gdc_wait()
        gdc_launch_dependents()
    # 1) This program's queries: a row is (head r of the group, query n).
    row, column = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, SIZE)
    real, n = row < R * N, row % N
    head = group * R + row // N
    inside = real[:, None] & (column < D)[None, :]
    at = slot * query_slot + head * query_head + n * query_new
    q = tl.load(query + at[:, None] + column[None, :], mask=inside, other=0.0)

    # 2) One program puts the new keys and values into the cache, behind the past and the entries that stand there.
    length = tl.load(past + slot)
    fresh_keys = new_keys + slot * new_key_slot + group * new_key_group
    fresh_values = new_values + slot * new_value_slot + group * new_value_group
    if (part == 0) & (tl.program_id(2) == 0):
        _store_new(
            fresh_keys,
            fresh_values,
            new_key_row,
            new_value_row,
            key_base,
            value_base,
            length + F - N,
            capacity,
            N,
            D,
            ENTRIES,
            SIZE,
        )

    # 3) The queries' own positions, and the first block of the past that any of them sees.
    position = length + F - N + n
    if TREE:
        position = length + tl.load(depth + slot * F + F - N + n)
    first = length * 0
    if WINDOWED:  # no query stands before the end of the past
        first = tl.maximum(length - window + 1, 0) // KEYS * KEYS

    # 4) The whole blocks of the past stream by; best, total and mean are those of the softmax so far. Every query sees
    # them, in its window. Blocks begin at fixed positions: a query adds up alike whichever others its pass has.
    best = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mean = tl.zeros([ROWS, SIZE], tl.float32)
    whole = length // KEYS * KEYS
    first += (part + PARTS - first // KEYS % PARTS) % PARTS * KEYS  # this part's first block
    for start in range(first, whole, KEYS * PARTS):
        key = start + tl.arange(0, KEYS)
        place = key[:, None] * D + column[None, :]
        k = tl.load(key_base + place, mask=(column < D)[None, :], other=0.0)
        v = tl.load(value_base + place, mask=(column < D)[None, :], other=0.0)
        sees = real[:, None] & (key >= 0)[None, :]
        if WINDOWED:
            sees = sees & (position[:, None] - key[None, :] < window)
        best, total, mean = _read_block(q, k, v, sees, scale, cap, best, total, mean, CAPPED)

    # 5) The rest of the past and the entries: those that the cache has, then the new ones. Each query sees the past and
    # its chain, or its path by the mask.
    whole += (part + PARTS - whole // KEYS % PARTS) % PARTS * KEYS
    for start in range(whole, length + F, KEYS * PARTS):
        key = start + tl.arange(0, KEYS)
        entry, new = key - length, key - length - (F - N)
        held = (new < 0)[:, None] & (column < D)[None, :]
        fresh = ((new >= 0) & (new < N))[:, None] & (column < D)[None, :]
        place = key[:, None] * D + column[None, :]
        k = tl.load(key_base + place, mask=held, other=0.0)
        v = tl.load(value_base + place, mask=held, other=0.0)
        k_new = tl.load(fresh_keys + new[:, None] * new_key_row + column[None, :], mask=fresh, other=0.0)
        v_new = tl.load(fresh_values + new[:, None] * new_value_row + column[None, :], mask=fresh, other=0.0)
        k, v = tl.where(fresh, k_new.to(k.dtype), k), tl.where(fresh, v_new.to(v.dtype), v)
        sees, key_position = (new[None, :] <= n[:, None]) & real[:, None], key
        if TREE:
            inside_tree = (entry >= 0) & (entry < F)
            among = visible + (slot * N + n[:, None]) * F + entry[None, :]
            path = tl.load(among, mask=real[:, None] & inside_tree[None, :], other=0) != 0
            sees = real[:, None] & (path | (entry < 0)[None, :])
            deep = tl.load(depth + slot * F + entry, mask=inside_tree, other=0)
            key_position = tl.where(entry < 0, key, length + deep)
        if WINDOWED:
            sees = sees & (position[:, None] - key_position[None, :] < window)
        best, total, mean = _read_block(q, k, v, sees, scale, cap, best, total, mean, CAPPED)

    # 6) The weighted mean of the values is the attention; of a part, what the parts are added up by is kept.
    if PARTS == 1:
        at = slot * output_slot + head * output_head + n * output_new
        to = output + at[:, None] + column[None, :]
        tl.store(to, (mean / total[:, None]).to(output.dtype.element_ty), mask=inside)
    else:
        heads = tl.num_programs(1) // PARTS * R
        at = ((slot * heads + head) * N + n) * PARTS + part
        tl.store(means + at[:, None] * D + column[None, :], mean, mask=inside)
        tl.store(softmax + at * 2, best, mask=real)
        tl.store(softmax + at * 2 + 1, total, mask=real)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _add_parts(  # type: ignore[no-untyped-def]
    means,
    softmax,
    output,
    output_slot,
    output_head,
    output_new,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One query's attention of one head, from the maximum, sum and weighted values of each part of its keys."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    slot, head, n = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    part, column = tl.arange(0, PARTS), tl.arange(0, SIZE)
    at = ((slot * tl.num_programs(1) + head) * tl.num_programs(2) + n) * PARTS + part
    best, total = tl.load(softmax + at * 2), tl.load(softmax + at * 2 + 1)
    mean = tl.load(means + at[:, None] * D + column[None, :], mask=(column < D)[None, :], other=0.0)
    weight = tl.exp(best - tl.max(best, 0))  # 0 for a part of which the query sees nothing
    found = tl.sum(weight[:, None] * mean, 0) / tl.sum(weight * total, 0)
    to = output + slot * output_slot + head * output_head + n * output_new + column
    tl.store(to, found.to(output.dtype.element_ty), mask=column < D)
