"""Small Triton kernels that read slices of a wider tensor where they lie: rotary embeddings, gated activations, norms,
chosen rows.

Shapes: B rows, N tokens, Q query heads, G key-value heads, D head size, F = D / 2 rotated pairs, H width, I inner size,
R rows of a product, E rows to choose from.

Inside, numbers are float32 and are rounded once. No kernel here has a gradient.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .early_launch import early

_INNER = 1024  # a program's columns of a gated product


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotary embedding of query [B, Q, N, D] and key [B, G, N, D] in place, by given cos and sin.

    Halves layout: pair f is columns f and f + D / 2 (RoPE: Su et al. 2021, arXiv 2104.09864).

    cos, sin [B or 1, N, D] have a factor for either half. The last dimension of every tensor is contiguous.
    """
    # A stride of 0 lets all rows read the same cos and sin.
    steps = [step for x in (cos, sin) for step in (x.stride(0) if x.shape[0] > 1 else 0, x.stride(1))]
    _rotate_heads(query, key, cos, sin, 1.0, steps, by_position=False)


def rotate_at(query: Tensor, key: Tensor, positions_BN: Tensor, frequency_F: Tensor, stretch: float) -> None:
    """Rotary embedding in place, by position: pair f turns by position * frequency_F[f], times `stretch`.

    Query, key and layout are those of `rotate`. `stretch` is the attention factor of scaled rope.
    """
    _rotate_heads(query, key, positions_BN, frequency_F, stretch, [*positions_BN.stride(), 0, 0], by_position=True)


def _rotate_heads(
    query: Tensor, key: Tensor, first: Tensor, second: Tensor, stretch: float, steps: list[int], by_position: bool
) -> None:
    """Launch the rotary kernel, one program a token. `steps`: strides of first and second by row and by token."""
    (batch, heads, new, size), groups = query.shape, key.shape[1]
    _rotate[(batch * new,)](
        query, key, first, second, stretch, *steps, *query.stride()[:3], *key.stride()[:3], new, heads, groups,
        HALF=size // 2,
        # Triton's blocks are powers of two; one block covers the heads of query and of key alike.
        HEADS=triton.next_power_of_2(max(heads, groups)),
        PAIRS=triton.next_power_of_2(size // 2),
        BY_POSITION=by_position,
        num_warps=2,
    )  # fmt: skip


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """Gated SiLU activation silu(gate) * up of [..., I]. Rows may be strided; the last dimension is contiguous."""
    size = gate.shape[-1]
    gate_RI, up_RI = _rows(gate), _rows(up)
    output = gate.new_empty(gate.shape)
    _gated_silu[(len(gate_RI), triton.cdiv(size, _INNER))](
        gate_RI, up_RI, output, gate_RI.stride(0), up_RI.stride(0), size, COLUMNS=_INNER, num_warps=4
    )
    return output


def add_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float, offset: float, late: bool) -> tuple[Tensor, Tensor]:
    """Sum x + y of [..., H], and its RMSNorm by weight + offset; `late`: rounded before the weight, as Llama's is."""
    total, normed = x.new_empty(x.shape), x.new_empty(x.shape)  # contiguous, whatever x is
    x_RH, y_RH = _rows(x), _rows(y)
    _add_norm[(len(x_RH),)](
        x_RH, y_RH, weight, total, normed, x_RH.stride(0), y_RH.stride(0), x.shape[-1], eps, offset,
        LATE=late, WIDTH=triton.next_power_of_2(x.shape[-1]), num_warps=4,
    )  # fmt: skip
    return total, normed


def angles(positions_BN: Tensor, frequency_F: Tensor, stretch: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine [B, N, D] of rotary angles, times `stretch`, the same for both halves of a head."""
    pairs = len(frequency_F)
    cos, sin = torch.empty(2, *positions_BN.shape, 2 * pairs, dtype=dtype, device=positions_BN.device)
    _angles[(positions_BN.numel(),)](
        positions_BN, frequency_F, cos, sin, stretch, *positions_BN.stride(), positions_BN.shape[1], pairs,
        PAIRS=triton.next_power_of_2(pairs), **early(positions_BN.device), num_warps=1,
    )  # fmt: skip
    return cos, sin


def take_rows(x_BEH: Tensor, index_BN: Tensor, first: int = 0) -> Tensor:
    """Rows [B, N, H] of x at index - first; the last dimension of x is contiguous."""
    (batch, new), size = index_BN.shape, x_BEH.shape[-1]
    output = x_BEH.new_empty(batch, new, size)
    _take_rows[(batch * new,)](
        x_BEH, index_BN, output, *x_BEH.stride()[:2], *index_BN.stride(), new, first, size,
        WIDTH=triton.next_power_of_2(size), **early(x_BEH.device), num_warps=4,
    )  # fmt: skip
    return output


def _rows(x: Tensor) -> Tensor:
    """View as rows [R, I]; copied only where the rows have no common stride."""
    return x.flatten(0, -2) if x.dim() > 1 else x[None]


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _turn_heads(  # type: ignore[no-untyped-def]
    at,
    heads,
    head_stride,
    cos_low,
    sin_low,
    cos_high,
    sin_high,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Rotate every head of one token in place; `at` points to its first head."""
    head, pair = tl.arange(0, HEADS)[:, None], tl.arange(0, PAIRS)[None, :]
    real = (head < heads) & (pair < HALF)
    low_at = at + head * head_stride + pair
    # Both halves are read before either is written.
    low = tl.load(low_at, mask=real, other=0.0).to(tl.float32)
    high = tl.load(low_at + HALF, mask=real, other=0.0).to(tl.float32)
    tl.store(low_at, (low * cos_low - high * sin_low).to(at.dtype.element_ty), mask=real)
    tl.store(low_at + HALF, (high * cos_high + low * sin_high).to(at.dtype.element_ty), mask=real)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _rotate(  # type: ignore[no-untyped-def]
    query,
    key,
    first,
    second,
    stretch,
    first_slot,
    first_new,
    second_slot,
    second_new,
    query_slot,
    query_head,
    query_new,
    key_slot,
    key_head,
    key_new,
    new,
    heads,
    groups,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    BY_POSITION: tl.constexpr,
):
    """Rotate one token's heads. `first` and `second` are cos and sin, or positions and frequencies by BY_POSITION."""
    # 1) This program's token, and its factors for both halves: by the angle of each pair, or as they are given.
    slot, n = (tl.program_id(0) // new).to(tl.int64), tl.program_id(0) % new
    pair = tl.arange(0, PAIRS)[None, :]
    turned = pair < HALF
    first_at, second_at = first + slot * first_slot + n * first_new, second + slot * second_slot + n * second_new + pair
    if BY_POSITION:
        angle = tl.load(first_at).to(tl.float32) * tl.load(second_at, mask=turned, other=0.0)
        cos_low, sin_low = tl.cos(angle) * stretch, tl.sin(angle) * stretch
        cos_high, sin_high = cos_low, sin_low
    else:
        cos_low = tl.load(first_at + pair, mask=turned, other=0.0).to(tl.float32)
        sin_low = tl.load(second_at, mask=turned, other=0.0).to(tl.float32)
        cos_high = tl.load(first_at + pair + HALF, mask=turned, other=0.0).to(tl.float32)
        sin_high = tl.load(second_at + HALF, mask=turned, other=0.0).to(tl.float32)
    # 2) Rotate its query heads, then its key heads.
    at = query + slot * query_slot + n * query_new
    _turn_heads(at, heads, query_head, cos_low, sin_low, cos_high, sin_high, HALF, HEADS, PAIRS)
    at = key + slot * key_slot + n * key_new
    _turn_heads(at, groups, key_head, cos_low, sin_low, cos_high, sin_high, HALF, HEADS, PAIRS)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _gated_silu(gate, up, output, gate_row, up_row, size, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    # A program computes one block of columns of one row.
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = column < size
    # silu(x) = x * sigmoid(x).
    x = tl.load(gate + row * gate_row + column, mask=real, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_row + column, mask=real, other=0.0).to(tl.float32)
    tl.store(output + row * size + column, (x * tl.sigmoid(x) * y).to(output.dtype.element_ty), mask=real)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _add_norm(  # type: ignore[no-untyped-def]
    x, y, weight, total, normed, x_row, y_row, size, eps, offset, LATE: tl.constexpr, WIDTH: tl.constexpr
):
    # A program owns one row. The sum is rounded as it is stored, and the norm reads it so.
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    real = column < size
    left = tl.load(x + row * x_row + column, mask=real, other=0.0).to(tl.float32)
    right = tl.load(y + row * y_row + column, mask=real, other=0.0).to(tl.float32)
    added = (left + right).to(total.dtype.element_ty)
    tl.store(total + row * size + column, added, mask=real)
    added = added.to(tl.float32)
    scaled = added * tl.rsqrt(tl.sum(added * added, 0) / size + eps)
    if LATE:
        scaled = scaled.to(normed.dtype.element_ty).to(tl.float32)
    by = tl.load(weight + column, mask=real, other=0.0).to(tl.float32) + offset
    tl.store(normed + row * size + column, (scaled * by).to(normed.dtype.element_ty), mask=real)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _angles(  # type: ignore[no-untyped-def]
    positions,
    frequency,
    cos,
    sin,
    stretch,
    position_slot,
    position_new,
    new,
    pairs,
    PAIRS: tl.constexpr,
    EARLY: tl.constexpr,
):
    # A program owns one token.
    slot, n, pair = tl.program_id(0) // new, tl.program_id(0) % new, tl.arange(0, PAIRS)
    real = pair < pairs
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    position = tl.load(positions + slot * position_slot + n * position_new).to(tl.float32)
    angle = position * tl.load(frequency + pair, mask=real, other=0.0).to(tl.float32)
    turned = (tl.cos(angle) * stretch).to(cos.dtype.element_ty), (tl.sin(angle) * stretch).to(sin.dtype.element_ty)
    at = tl.program_id(0).to(tl.int64) * 2 * pairs + pair
    tl.store(cos + at, turned[0], mask=real)
    tl.store(cos + at + pairs, turned[0], mask=real)
    tl.store(sin + at, turned[1], mask=real)
    tl.store(sin + at + pairs, turned[1], mask=real)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _take_rows(  # type: ignore[no-untyped-def]
    x,
    index,
    output,
    x_slot,
    x_row,
    index_slot,
    index_new,
    new,
    first,
    size,
    WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    # A program copies one row.
    slot, n, column = (tl.program_id(0) // new).to(tl.int64), tl.program_id(0) % new, tl.arange(0, WIDTH)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.load(index + slot * index_slot + n * index_new) - first
    taken = tl.load(x + slot * x_slot + row * x_row + column, mask=column < size, other=0.0)
    tl.store(output + tl.program_id(0).to(tl.int64) * size + column, taken, mask=column < size)
