"""A frozen layer's product of few rows, with what stands before and behind it, in one Triton kernel.

Decoding one token reads weights of a megabyte a product, which takes less time than launching it: what counts is how
many kernels follow one another, and what each waits for. So RMSNorm of the input comes in front of the product here,
each program norming its rows for itself; and behind it come the rotary embedding, a gated activation or the sum with
the residual. On GPUs since Hopper a kernel begins while the one before it ends (programmatic dependent launch): it
fetches its weights, which nobody writes, and then waits for what it reads.

Shapes: R rows, H width of a part of the input, K width of the whole input, N columns of the product, I inner size of a
gated product, D head size.

Products are summed in float32. Between a norm and its product nothing is rounded for few rows; for more, only the
number times the norm's weight is, which waits for no other number: the row's root mean square divides its sums. A row's
result does not depend on the other rows.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .early_launch import early, fetch

_FEW = 8  # rows that a program each multiplies; more of them by tensor cores
_MOST_ROWS = 96
_MOST_WEIGHTS = 1 << 23  # of a product; larger ones take as long as their weights' bytes, in any kernel
_MOST_PRODUCTS = 1 << 28  # rows times weights: every 16 rows read the weights again
_PLAIN, _GATED, _TURNED = range(3)  # what a kernel makes of its products


class Norm(NamedTuple):
    """RMSNorm by weight + offset."""

    weight: Tensor
    eps: float
    offset: float = 0.0


class Blocks(NamedTuple):
    """Sizes of a program: its rows, its columns, and the numbers of a row that it multiplies at once."""

    rows: int  # 1: no tensor cores
    columns: int
    depth: int
    warps: int


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether products of rows x [..., K] with weights of this size gain from these kernels."""
    rows = x.numel() // x.shape[-1]
    # Half precision may not hold numbers that are multiplied by a norm's weight before they are divided.
    most = _FEW if x.dtype == torch.float16 else _MOST_ROWS
    small = weight.numel() <= min(_MOST_WEIGHTS, _MOST_PRODUCTS // max(rows, 1))
    return rows <= most and small


def add_product(x: Tensor, weight_NK: Tensor, residual: Tensor) -> Tensor:
    """Product of x [..., K] with a layer's weights, added to the residual [..., N]. Returns a new tensor [..., N]."""
    return _multiply([(x, None)], weight_NK, len(weight_NK), _PLAIN, residual=residual)


def gated_product(x: Tensor, norm: Norm, weight_2IK: Tensor) -> Tensor:
    """silu(gate) * up of the normed x [..., K]; the weights of gate and up stand one below the other.

    Returns [..., I].
    """
    return _multiply([(x, norm)], weight_2IK, len(weight_2IK) // 2, _GATED)


def turned_product(
    parts: Sequence[tuple[Tensor, Norm | None]], weight_NK: Tensor, cos: Tensor, sin: Tensor, heads: int
) -> Tensor:
    """Product of one or two parts [..., H], side by side, with the weights of queries, keys and values: [..., N].

    The first `heads` heads are rotated, as `pointwise.rotate` does: cos, sin [..., D] have a factor for either half.
    """
    return _multiply(parts, weight_NK, len(weight_NK), _TURNED, cos=cos, sin=sin, heads=heads)


def _multiply(
    parts: Sequence[tuple[Tensor, Norm | None]],
    weight: Tensor,
    size: int,
    kind: int,
    residual: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    heads: int = 0,
) -> Tensor:
    """Launch the kernel. `size`: columns of the output, whose rows are contiguous."""
    # 1) Rows of the input's parts; one that there is not is the first one again, which nobody reads.
    (x, norm), (y, other) = parts[0], parts[-1]
    x_RH, y_RH = _rows(x), _rows(y)
    rows, width = x_RH.shape
    output = x.new_empty(*x.shape[:-1], size)
    # 2) Rows of what the result is added to, or rotated by.
    added_RN = weight if residual is None else _rows(residual)
    cos_RD, sin_RD = (weight if one is None else _rows(one) for one in (cos, sin))
    half = cos_RD.shape[-1] // 2 if kind == _TURNED else 1
    # 3) One program for each block of columns and rows.
    columns = size // 2 if kind == _TURNED else size  # a program makes both halves of a pair
    blocks = _blocks(rows, width * len(parts), kind)
    kernel, tiled = (_multiply_row, {}) if blocks.rows == 1 else (_multiply_tiles, {"rows": rows, "ROWS": blocks.rows})
    kernel[(triton.cdiv(columns, blocks.columns), triton.cdiv(rows, blocks.rows))](
        x_RH, y_RH, x_RH.stride(0), y_RH.stride(0),
        weight if norm is None else norm.weight, weight if other is None else other.weight,
        0.0 if norm is None else norm.eps, 0.0 if norm is None else norm.offset,
        weight, added_RN, added_RN.stride(0), cos_RD, sin_RD, cos_RD.stride(0), output, columns, heads,
        WIDTH=width, PARTS=len(parts), NORMED=norm is not None, KIND=kind, ADDED=residual is not None, HALF=half,
        COLUMNS=blocks.columns, DEPTH=blocks.depth, **early(weight.device), **tiled,
        num_warps=blocks.warps, num_stages=5,
    )  # fmt: skip
    return output


def _blocks(rows: int, width: int, kind: int) -> Blocks:
    """Sizes that an H200 is fastest with; more rows are more programs, not larger ones."""
    if rows > _FEW:
        return Blocks(16, 16, 128, 4) if kind == _PLAIN and rows <= 32 else Blocks(16, 32, 64, 4)
    # All of a program's weights lie in registers: eight numbers of a thread at once, a few times over.
    depth = min(1024, max(64, triton.next_power_of_2(width) // 8))
    return Blocks(1, 8, depth, depth // 32)


def _rows(x: Tensor) -> Tensor:
    """View as rows [R, K] whose numbers are contiguous; copied only where there is none."""
    flat = x.flatten(0, -2) if x.dim() > 1 else x[None]
    return flat if flat.stride(-1) == 1 else flat.contiguous()


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _weights_at(column, HALF: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Row of the weights that a column of the output is a product with: the first one where there are two."""
    if KIND == 2:  # pair f of a head is rows f and f + HALF
        return (column // HALF) * 2 * HALF + column % HALF
    return column


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _nothing():  # type: ignore[no-untyped-def]
    """The tuple that tensors are gathered in."""
    return ()


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _beside(  # type: ignore[no-untyped-def]
    row,
    column,
    real,
    added,
    added_row,
    cos,
    sin,
    angle_row,
    heads,
    KIND: tl.constexpr,
    ADDED: tl.constexpr,
    HALF: tl.constexpr,
):
    """What the products of these rows and columns are rotated by, for either half, or added to."""
    beside = _nothing()
    if KIND == 2:
        # Heads behind the rotated ones turn by no angle.
        turned = real & (column // HALF < heads)
        cos_at, sin_at = cos + row * angle_row + column % HALF, sin + row * angle_row + column % HALF
        cos_low = tl.load(cos_at, mask=turned, other=1.0).to(tl.float32)
        sin_low = tl.load(sin_at, mask=turned, other=0.0).to(tl.float32)
        cos_high = tl.load(cos_at + HALF, mask=turned, other=1.0).to(tl.float32)
        sin_high = tl.load(sin_at + HALF, mask=turned, other=0.0).to(tl.float32)
        beside = (cos_low, sin_low, cos_high, sin_high)
    if ADDED:
        beside = (tl.load(added + row * added_row + column, mask=real, other=0.0).to(tl.float32),)
    return beside


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _finish(  # type: ignore[no-untyped-def]
    low,
    high,
    beside,
    row,
    column,
    real,
    output,
    size,
    KIND: tl.constexpr,
    ADDED: tl.constexpr,
    HALF: tl.constexpr,
):
    """Round products [rows, columns], and store what is made of them."""
    to = output.dtype.element_ty
    low, high = low.to(to).to(tl.float32), high.to(to).to(tl.float32)
    if KIND == 2:
        to_at = output + row * size * 2 + column // HALF * 2 * HALF + column % HALF
        tl.store(to_at, (low * beside[0] - high * beside[1]).to(to), mask=real)
        tl.store(to_at + HALF, (high * beside[2] + low * beside[3]).to(to), mask=real)
    else:
        if KIND == 1:
            low = low * tl.sigmoid(low) * high
        if ADDED:
            low += beside[0]
        tl.store(output + row * size + column, low.to(to), mask=real)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _multiply_row(  # type: ignore[no-untyped-def]
    x,
    y,
    x_row,
    y_row,
    x_norm,
    y_norm,
    eps,
    offset,
    weight,
    added,
    added_row,
    cos,
    sin,
    angle_row,
    output,
    size,
    heads,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    NORMED: tl.constexpr,
    KIND: tl.constexpr,
    ADDED: tl.constexpr,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One row. All tensors have the shape of a block of weights, so that no thread waits for another."""
    DEEP: tl.constexpr = WIDTH * PARTS
    CHUNKS: tl.constexpr = (WIDTH + DEPTH - 1) // DEPTH
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.broadcast_to(tl.arange(0, DEPTH)[None, :], (COLUMNS, DEPTH))
    real = (column < size)[:, None]

    # 1) This program's weights, which nobody writes: they are fetched before the kernel in front is waited for.
    weights_at = weight + _weights_at(column, HALF, KIND).to(tl.int64)[:, None] * DEEP + depth
    second = (size if KIND == 1 else HALF) * DEEP
    low_weights, high_weights, norms = _nothing(), _nothing(), _nothing()
    for part in tl.static_range(PARTS):
        for chunk in tl.static_range(CHUNKS):
            inside = real & (chunk * DEPTH + depth < WIDTH)
            at = weights_at + part * WIDTH + chunk * DEPTH
            low_weights = low_weights + (tl.load(at, mask=inside, other=0.0),)  # noqa: RUF005
            if KIND != 0:
                high_weights = high_weights + (tl.load(at + second, mask=inside, other=0.0),)  # noqa: RUF005
            if NORMED:
                norm_at = (x_norm if part == 0 else y_norm) + chunk * DEPTH + depth
                norms = norms + (tl.load(norm_at, mask=chunk * DEPTH + depth < WIDTH, other=0.0),)  # noqa: RUF005
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()

    # 2) The row's numbers, normed, times the weights, summed at the end.
    row, stored = tl.program_id(1).to(tl.int64), (column < size)[None, :]
    beside = _beside(row, column[None, :], stored, added, added_row, cos, sin, angle_row, heads, KIND, ADDED, HALF)
    low, high = tl.zeros([COLUMNS, DEPTH], tl.float32), tl.zeros([COLUMNS, DEPTH], tl.float32)
    for part in tl.static_range(PARTS):
        from_at = (x + row * x_row if part == 0 else y + row * y_row) + depth
        squares = tl.zeros([COLUMNS, DEPTH], tl.float32)
        part_low, part_high = tl.zeros([COLUMNS, DEPTH], tl.float32), tl.zeros([COLUMNS, DEPTH], tl.float32)
        for chunk in tl.static_range(CHUNKS):
            inside = chunk * DEPTH + depth < WIDTH
            v = tl.load(from_at + chunk * DEPTH, mask=inside, other=0.0).to(tl.float32)
            if NORMED:
                squares += v * v
                v *= norms[part * CHUNKS + chunk].to(tl.float32) + offset
            part_low += v * low_weights[part * CHUNKS + chunk].to(tl.float32)
            if KIND != 0:
                part_high += v * high_weights[part * CHUNKS + chunk].to(tl.float32)
        scale = tl.rsqrt(tl.sum(squares, 1) / WIDTH + eps)[:, None] if NORMED else 1.0
        low += part_low * scale
        high += part_high * scale
    low_sum, high_sum = tl.sum(low, 1)[None, :], tl.sum(high, 1)[None, :]
    _finish(low_sum, high_sum, beside, row, column[None, :], stored, output, size, KIND, ADDED, HALF)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _multiply_tiles(  # type: ignore[no-untyped-def]
    x,
    y,
    x_row,
    y_row,
    x_norm,
    y_norm,
    eps,
    offset,
    weight,
    added,
    added_row,
    cos,
    sin,
    angle_row,
    output,
    size,
    heads,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    NORMED: tl.constexpr,
    KIND: tl.constexpr,
    ADDED: tl.constexpr,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EARLY: tl.constexpr,
    rows,
    ROWS: tl.constexpr,
):
    """A block of rows, by tensor cores."""
    DEEP: tl.constexpr = WIDTH * PARTS
    column, depth = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    real, exists = (column < size)[:, None], (row < rows)[:, None]
    weights_at = weight + _weights_at(column, HALF, KIND).to(tl.int64)[:, None] * DEEP
    second = (size if KIND == 1 else HALF) * DEEP

    # 1) Weights are on their way from memory before the kernel in front is waited for.
    if EARLY:
        for start in tl.static_range(0, DEEP, 1024):
            line = tl.minimum(start + 64 * tl.arange(0, 16), DEEP - 1)
            lines_at = tl.where(real, weights_at, weight) + line[None, :]
            fetch(lines_at)
            if KIND != 0:
                fetch(lines_at + second)
        gdc_wait()
        gdc_launch_dependents()

    # 2) Rows of each part, normed, times the weights.
    stored = exists & (column < size)[None, :]
    beside = _beside(
        row[:, None], column[None, :], stored, added, added_row, cos, sin, angle_row, heads, KIND, ADDED, HALF
    )
    low, high = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    for part in tl.static_range(PARTS):
        if part == 0:
            from_at, norm_at = x + row[:, None] * x_row + depth[None, :], x_norm + depth
        else:
            from_at, norm_at = y + row[:, None] * y_row + depth[None, :], y_norm + depth
        squares = tl.zeros([ROWS, DEPTH], tl.float32)
        part_low, part_high = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, WIDTH, DEPTH):
            inside = (start + depth < WIDTH)[None, :]
            v = tl.load(from_at + start, mask=exists & inside, other=0.0)
            if NORMED:
                by = tl.load(norm_at + start, mask=start + depth < WIDTH, other=0.0)[None, :].to(tl.float32)
                squares += v.to(tl.float32) * v.to(tl.float32)
                v = (v.to(tl.float32) * (by + offset)).to(x.dtype.element_ty)
            at = weights_at + (part * WIDTH + start + depth)[None, :]
            w = tl.load(at, mask=real & inside, other=0.0)
            part_low = tl.dot(v, tl.trans(w), part_low, input_precision="ieee")
            if KIND != 0:
                w = tl.load(at + second, mask=real & inside, other=0.0)
                part_high = tl.dot(v, tl.trans(w), part_high, input_precision="ieee")
        scale = tl.rsqrt(tl.sum(squares, 1) / WIDTH + eps)[:, None] if NORMED else 1.0
        low += part_low * scale
        high += part_high * scale
    _finish(low, high, beside, row[:, None], column[None, :], stored, output, size, KIND, ADDED, HALF)
