"""Small Triton kernels that read slices of a wider product where they lie: rotary embeddings and gated activations.

Shapes: B rows, N tokens, Q query heads, G key-value heads, D head size, F = D / 2 rotated pairs, I inner size, R rows
of a product.

Inside, numbers are float32 and are rounded once. No kernel here has a gradient.
"""

import triton
import triton.language as tl
from torch import Tensor

_INNER = 1024  # a program's columns of a gated product


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotary embedding of query [B, Q, N, D] and key [B, G, N, D] in place, by given cos and sin.

    Halves layout: pair f is columns f and f + D / 2 (RoPE: Su et al. 2021, arXiv 2104.09864).

    cos, sin [B or 1, N, D] have a factor for either half. The last dimension of every tensor is contiguous.
    """
    batch, _, new, _ = query.shape
    # One program a token. A stride of 0 lets all rows read the same cos and sin.
    _rotate[(batch * new,)](
        query,
        key,
        cos,
        sin,
        cos.stride(0) if cos.shape[0] > 1 else 0,
        cos.stride(1),
        sin.stride(0) if sin.shape[0] > 1 else 0,
        sin.stride(1),
        **_heads(query, key),
    )


def rotate_at(query: Tensor, key: Tensor, positions_BN: Tensor, frequency_F: Tensor, stretch: float) -> None:
    """Rotary embedding in place, by position: pair f turns by position * frequency_F[f], times `stretch`.

    Query, key and layout are those of `rotate`. `stretch` is the attention factor of scaled rope.
    """
    batch, _, new, _ = query.shape
    _rotate_at[(batch * new,)](
        query, key, positions_BN, frequency_F, stretch, *positions_BN.stride(), **_heads(query, key)
    )


def _heads(query: Tensor, key: Tensor) -> dict[str, int]:
    """Sizes, strides and block sizes of query and key, as both rotary kernels take them."""
    names = ("query_slot", "query_head", "query_new"), ("key_slot", "key_head", "key_new")
    # Triton's blocks are powers of two; one block covers the heads of query and of key alike.
    strides = {name: step for one, x in zip(names, (query, key)) for name, step in zip(one, x.stride())}
    (_, heads, new, size), groups = query.shape, key.shape[1]
    blocks = {"HEADS": triton.next_power_of_2(max(heads, groups)), "PAIRS": triton.next_power_of_2(size // 2)}
    return {**strides, "new": new, "heads": heads, "groups": groups, "HALF": size // 2, **blocks, "num_warps": 2}


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """Gated SiLU activation silu(gate) * up of [..., I]. Rows may be strided; the last dimension is contiguous."""
    size = gate.shape[-1]
    gate_RI, up_RI = _rows(gate), _rows(up)
    output = gate.new_empty(gate.shape)
    _gated_silu[(len(gate_RI), triton.cdiv(size, _INNER))](
        gate_RI, up_RI, output, gate_RI.stride(0), up_RI.stride(0), size, COLUMNS=_INNER, num_warps=4
    )
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
    cos,
    sin,
    cos_slot,
    cos_new,
    sin_slot,
    sin_new,
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
):
    # 1) This program's token, and its factors for both halves.
    slot, n = (tl.program_id(0) // new).to(tl.int64), tl.program_id(0) % new
    pair = tl.arange(0, PAIRS)[None, :]
    turned = pair < HALF
    cos_at, sin_at = cos + slot * cos_slot + n * cos_new + pair, sin + slot * sin_slot + n * sin_new + pair
    cos_low = tl.load(cos_at, mask=turned, other=0.0).to(tl.float32)
    sin_low = tl.load(sin_at, mask=turned, other=0.0).to(tl.float32)
    cos_high = tl.load(cos_at + HALF, mask=turned, other=0.0).to(tl.float32)
    sin_high = tl.load(sin_at + HALF, mask=turned, other=0.0).to(tl.float32)
    # 2) Rotate its query heads, then its key heads.
    at = query + slot * query_slot + n * query_new
    _turn_heads(at, heads, query_head, cos_low, sin_low, cos_high, sin_high, HALF, HEADS, PAIRS)
    at = key + slot * key_slot + n * key_new
    _turn_heads(at, groups, key_head, cos_low, sin_low, cos_high, sin_high, HALF, HEADS, PAIRS)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _rotate_at(  # type: ignore[no-untyped-def]
    query,
    key,
    positions,
    frequency,
    stretch,
    position_slot,
    position_new,
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
):
    # 1) This program's token, and the angle of each pair by its position.
    slot, n = (tl.program_id(0) // new).to(tl.int64), tl.program_id(0) % new
    pair = tl.arange(0, PAIRS)[None, :]
    position = tl.load(positions + slot * position_slot + n * position_new).to(tl.float32)
    angle = position * tl.load(frequency + pair, mask=pair < HALF, other=0.0)
    cos, sin = tl.cos(angle) * stretch, tl.sin(angle) * stretch
    # 2) Rotate its query heads, then its key heads.
    at = query + slot * query_slot + n * query_new
    _turn_heads(at, heads, query_head, cos, sin, cos, sin, HALF, HEADS, PAIRS)
    at = key + slot * key_slot + n * key_new
    _turn_heads(at, groups, key_head, cos, sin, cos, sin, HALF, HEADS, PAIRS)


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
