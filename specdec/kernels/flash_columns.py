"""Attention of the training-time test in half precision on CUDA: torch's kernel for runs of many lengths over the true
states, and Triton kernels for the few keys of each query's own column.

Shapes: L queries and P keys of all documents end to end, J own keys a query, Q query heads, G key-value heads
(R = Q / G), D head size; B, M, T as in column_attention.py.

Both kinds of keys share one softmax. With o and z the output and log-sum-exp over the true states, and s_j the scores
of the own keys: Z = log(exp z + sum_j exp s_j) and O = exp(z - Z) o + sum_j exp(s_j - Z) v_j. The backward kernel makes
a key's probability anew, as exp(score - log-sum-exp), and its score's gradient as p (dO v - dO O); so given Z and O in
place of z and o it returns the gradients under the joint softmax (as ring attention does, arXiv 2310.01889).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .document_mask import QueryRuns

_ROWS = 32  # queries of a program


def flash_columns(
    query_BQMD: Tensor, keys: list[Tensor], values: list[Tensor], runs: QueryRuns, window: int | None
) -> Tensor:
    """`attend_columns` [B, M, Q, D] of queries in runs; zeros at places that no run holds.

    `window`: true states that a query sees, its own position's included; None: all, 0: none.
    """
    output: Tensor = _FlashColumns.apply(query_BQMD, runs, window, len(keys), *keys, *values)  # type: ignore[no-untyped-call]
    return output


class _FlashColumns(torch.autograd.Function):
    """Autograd function of `flash_columns`."""

    @staticmethod
    def forward(
        ctx: Any, query_BQMD: Tensor, runs: QueryRuns, window: int | None, count: int, *tensors: Tensor
    ) -> Tensor:
        keys, values = tensors[:count], tensors[count:]
        # 1) Queries, keys and values of the runs end to end.
        query_LQD = _picked(query_BQMD, runs.queries_L)
        key_PGD, value_PGD = (_picked(one, runs.keys_P) for one in (keys[0], values[0]))
        own = [[_picked(one, runs.queries_L) for one in some[1:]] for some in (keys, values)]
        own_JLGD = [torch.stack(some) if some else query_LQD.new_empty(0) for some in own]

        # 2) The true states, then the own columns on top of them.
        found, lse_QL, *random = _attend_true(query_LQD, key_PGD, value_PGD, runs, window)
        output_LQD = found
        if count > 1:
            output_LQD = torch.empty_like(found)
            _launch(_join_columns, query_LQD, own_JLGD, found, lse_QL, output_LQD)

        # 3) Back to their places.
        ctx.save_for_backward(query_LQD, key_PGD, value_PGD, *own_JLGD, output_LQD, lse_QL, *random)
        ctx.runs, ctx.window, ctx.count = runs, window, count
        ctx.shapes = (query_BQMD.shape, keys[0].shape)
        return _placed(output_LQD, runs.queries_L, query_BQMD.shape).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad_BMQD: Tensor) -> tuple[Tensor | None, ...]:
        query_LQD, key_PGD, value_PGD, own_key_JLGD, own_value_JLGD, output_LQD, lse_QL, *random = ctx.saved_tensors
        runs: QueryRuns = ctx.runs
        query_shape, key_shape = ctx.shapes
        grad_LQD = _picked(grad_BMQD.transpose(1, 2), runs.queries_L)

        # 1) The true states' part, under the joint softmax.
        grads = _true_gradients(grad_LQD, query_LQD, key_PGD, value_PGD, output_LQD, lse_QL, random, runs, ctx.window)
        query_grad_LQD, key_grad_PGD, value_grad_PGD = grads

        # 2) The own columns: their part of the queries' gradient is added in place.
        own: list[list[Tensor]] = [[], []]
        if ctx.count > 1:
            own_grads = [torch.empty_like(own_key_JLGD), torch.empty_like(own_value_JLGD)]
            shares_2JQL = query_LQD.new_empty(2, ctx.count - 1, *lse_QL.shape, dtype=torch.float32)
            given = (query_LQD, [own_key_JLGD, own_value_JLGD])
            _launch(_query_gradients, *given, grad_LQD, output_LQD, lse_QL, query_grad_LQD, *shares_2JQL)
            _own_gradients[(triton.cdiv(len(query_LQD), _ROWS), own_key_JLGD.shape[2], ctx.count - 1)](
                query_LQD, grad_LQD, *shares_2JQL, *own_grads, len(query_LQD), **_sizes(query_LQD, own_key_JLGD)
            )
            places = (query_shape[0], key_shape[1], *query_shape[2:])
            own = [[_placed(one, runs.queries_L, places) for one in some] for some in own_grads]

        true = [_placed(one, runs.keys_P, key_shape) for one in (key_grad_PGD, value_grad_PGD)]
        query_grad = _placed(query_grad_LQD, runs.queries_L, query_shape)
        return (query_grad, None, None, None, true[0], *own[0], true[1], *own[1])


def _picked(x_BHMD: Tensor, at_L: Tensor) -> Tensor:
    """Rows [L, heads, D] at indexes into the flattened [B, M]."""
    return x_BHMD.transpose(1, 2).flatten(0, 1).index_select(0, at_L)


def _placed(x_LHD: Tensor, at_L: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `_picked`: [B, heads, M, D] of the given shape, zeros elsewhere."""
    batch, heads, places, size = shape
    placed = x_LHD.new_zeros(batch * places, heads, size).index_copy_(0, at_L, x_LHD)
    return placed.view(batch, places, heads, size).transpose(1, 2)


def _attend_true(
    query_LQD: Tensor, key_PGD: Tensor, value_PGD: Tensor, runs: QueryRuns, window: int | None
) -> tuple[Tensor, ...]:
    """Attention over the true states [L, Q, D], its log-sum-exp [Q, L], and two tensors for its backward pass."""
    # torch's public function gives no gradient under another log-sum-exp. These operators do, in torch 2.11 and 2.13 by
    # the same arguments; tests/specdec/test_on_cuda.py compares them with one softmax.
    if window == 0:
        nothing = torch.full(query_LQD.shape[1::-1], -torch.inf, device=query_LQD.device)
        return torch.zeros_like(query_LQD), nothing
    output, lse, seed, offset, _ = torch.ops.aten._flash_attention_forward(
        query_LQD, key_PGD, value_PGD, runs.query_starts_D, runs.key_starts_D, runs.most_queries, runs.most_keys,
        0.0, window is None, False, **_within(query_LQD, window),
    )  # fmt: skip
    return output, lse, seed, offset


def _true_gradients(
    grad_LQD: Tensor,
    query_LQD: Tensor,
    key_PGD: Tensor,
    value_PGD: Tensor,
    output_LQD: Tensor,
    lse_QL: Tensor,
    random: list[Tensor],
    runs: QueryRuns,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, true keys and true values, given the joint output and log-sum-exp."""
    if window == 0:
        return torch.zeros_like(query_LQD), torch.zeros_like(key_PGD), torch.zeros_like(value_PGD)
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad_LQD, query_LQD, key_PGD, value_PGD, output_LQD, lse_QL, runs.query_starts_D, runs.key_starts_D,
        runs.most_queries, runs.most_keys, 0.0, window is None, *random, **_within(query_LQD, window),
    )  # fmt: skip
    return found


def _within(query_LQD: Tensor, window: int | None) -> dict[str, Any]:
    """Scale and window of torch's kernel, which counts the keys before a query's own."""
    before = -1 if window is None else window - 1
    return {"scale": query_LQD.shape[-1] ** -0.5, "window_size_left": before, "window_size_right": 0}


def _sizes(query_LQD: Tensor, own_JLGD: Tensor) -> dict[str, Any]:
    """Constants of the Triton kernels."""
    size = query_LQD.shape[-1]
    return {
        "HEADS": query_LQD.shape[1],
        "GROUPS": own_JLGD.shape[2],
        "SIZE": size,
        "WIDTH": triton.next_power_of_2(size),
        "ROWS": _ROWS,
        "num_warps": 4,
    }


def _launch(kernel: Any, query_LQD: Tensor, own_JLGD: list[Tensor], *tensors: Tensor) -> None:
    """Launch a kernel, one program for some queries of one head."""
    count, heads, size = query_LQD.shape
    kernel[(triton.cdiv(count, _ROWS), heads)](
        query_LQD, *own_JLGD, *tensors, count, size**-0.5, OWN=len(own_JLGD[0]), **_sizes(query_LQD, own_JLGD[0])
    )


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator,unused-ignore]
def _join_columns(  # type: ignore[no-untyped-def]
    query_ptr,
    key_ptr,
    value_ptr,
    true_ptr,
    lse_ptr,
    out_ptr,
    count,
    scale,
    OWN: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Join the own columns to the true states' output; the log-sum-exp is replaced by the joint one."""
    # Which queries, and which head with its group.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    lane = tl.arange(0, WIDTH)
    inside = (row < count)[:, None] & (lane < SIZE)[None, :]
    at = (row.to(tl.int64) * HEADS + head)[:, None] * SIZE + lane[None, :]
    query = tl.load(query_ptr + at, mask=inside, other=0.0).to(tl.float32) * scale

    # An online softmax that begins with the true states as one entry of score `lse`.
    place = head.to(tl.int64) * count + row
    top = tl.load(lse_ptr + place, mask=row < count, other=0.0)
    total = tl.where(top == -float("inf"), 0.0, 1.0)
    sum_ = tl.load(true_ptr + at, mask=inside, other=0.0).to(tl.float32)
    for own in range(OWN):
        line = (own * count + row).to(tl.int64) * GROUPS + head // (HEADS // GROUPS)
        from_ = line[:, None] * SIZE + lane[None, :]
        key = tl.load(key_ptr + from_, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(value_ptr + from_, mask=inside, other=0.0).to(tl.float32)
        score = tl.sum(query * key, 1)
        higher = tl.maximum(top, score)
        before = tl.exp(top - higher)
        now = tl.exp(score - higher)
        sum_ = sum_ * before[:, None] + value * now[:, None]
        total = total * before + now
        top = higher
    tl.store(out_ptr + at, (sum_ / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(lse_ptr + place, top + tl.log(total), mask=row < count)


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator,unused-ignore]
def _query_gradients(  # type: ignore[no-untyped-def]
    query_ptr,
    key_ptr,
    value_ptr,
    grad_ptr,
    out_ptr,
    lse_ptr,
    query_grad_ptr,
    share_ptr,
    slope_ptr,
    count,
    scale,
    OWN: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Add the own columns' part to the queries' gradient; store each own key's probability and its score's gradient."""
    # Which queries, and which head with its group.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    lane = tl.arange(0, WIDTH)
    inside = (row < count)[:, None] & (lane < SIZE)[None, :]
    at = (row.to(tl.int64) * HEADS + head)[:, None] * SIZE + lane[None, :]
    query = tl.load(query_ptr + at, mask=inside, other=0.0).to(tl.float32) * scale
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + at, mask=inside, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + head.to(tl.int64) * count + row, mask=row < count, other=0.0)

    # ds = p (dO v - dO O), as of any softmax.
    mean = tl.sum(grad * out, 1)
    query_grad = tl.load(query_grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    for own in range(OWN):
        line = (own * count + row).to(tl.int64) * GROUPS + head // (HEADS // GROUPS)
        from_ = line[:, None] * SIZE + lane[None, :]
        key = tl.load(key_ptr + from_, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(value_ptr + from_, mask=inside, other=0.0).to(tl.float32)
        share = tl.exp(tl.sum(query * key, 1) - lse)
        slope = share * (tl.sum(grad * value, 1) - mean) * scale
        query_grad += slope[:, None] * key
        place = (own * HEADS + head).to(tl.int64) * count + row
        tl.store(share_ptr + place, share, mask=row < count)
        tl.store(slope_ptr + place, slope, mask=row < count)
    tl.store(query_grad_ptr + at, query_grad.to(query_grad_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator,unused-ignore]
def _own_gradients(  # type: ignore[no-untyped-def]
    query_ptr,
    grad_ptr,
    share_ptr,
    slope_ptr,
    key_grad_ptr,
    value_grad_ptr,
    count,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Gradients of one own key and value of some queries: sums over the heads that share them."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1)
    own = tl.program_id(2)
    lane = tl.arange(0, WIDTH)
    inside = (row < count)[:, None] & (lane < SIZE)[None, :]
    key_grad = tl.zeros([ROWS, WIDTH], tl.float32)
    value_grad = tl.zeros([ROWS, WIDTH], tl.float32)
    for shared in range(HEADS // GROUPS):
        head = group * (HEADS // GROUPS) + shared
        at = (row.to(tl.int64) * HEADS + head)[:, None] * SIZE + lane[None, :]
        place = (own * HEADS + head).to(tl.int64) * count + row
        share = tl.load(share_ptr + place, mask=row < count, other=0.0)
        slope = tl.load(slope_ptr + place, mask=row < count, other=0.0)
        key_grad += slope[:, None] * tl.load(query_ptr + at, mask=inside, other=0.0).to(tl.float32)
        value_grad += share[:, None] * tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    to = ((own * count + row).to(tl.int64) * GROUPS + group)[:, None] * SIZE + lane[None, :]
    tl.store(key_grad_ptr + to, key_grad.to(key_grad_ptr.dtype.element_ty), mask=inside)
    tl.store(value_grad_ptr + to, value_grad.to(value_grad_ptr.dtype.element_ty), mask=inside)
