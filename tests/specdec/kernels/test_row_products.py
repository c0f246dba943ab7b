"""Products of few rows with what stands around them, against plain operations, in Triton's interpreter."""

import pytest
import torch
import torch.nn.functional as F
from hopper import check_kernels_compile
from torch import Tensor

pytest.importorskip("triton")

from draftforge.specdec.kernels import row_products
from draftforge.specdec.kernels.pointwise import rotate
from draftforge.specdec.kernels.row_products import Blocks, Norm, add_product, gated_product, turned_product

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS = [(1,), (1, 3), (3, 6)]
DTYPES = [torch.float32, torch.float16]  # the interpreter cuts bfloat16 off instead of rounding it


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer programs, for the interpreter takes its time for each; several blocks of a row, columns and rows."""
    if DEVICE.type == "cpu":
        few = lambda rows, width, kind: Blocks(1 if rows <= 8 else 16, 32, 32, 4)  # noqa: E731
        monkeypatch.setattr(row_products, "_blocks", few)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).div(shape[-1] ** 0.25).to(DEVICE, dtype)


def normed(x: Tensor, norm: Norm) -> Tensor:
    scaled = x.float() * (x.float().pow(2).mean(-1, keepdim=True) + norm.eps).rsqrt()
    return (scaled * (norm.weight.float() + norm.offset)).to(x.dtype)


def close(found: Tensor, expected: Tensor) -> None:
    most = 1e-2 if expected.dtype == torch.float16 else 1e-4
    torch.testing.assert_close(found, expected, rtol=most, atol=most)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("width", "size"), [(96, 48), (130, 7)])
def test_a_product_is_added(width: int, size: int, rows: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = draw(*rows, width, dtype=dtype), draw(size, width, dtype=dtype)
    residual = draw(*rows, size, dtype=dtype)
    kept = residual.clone()
    close(add_product(x, weight, residual), residual + F.linear(x, weight))
    assert torch.equal(residual, kept)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_gate_and_up_are_gated(offset: float, rows: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = draw(*rows, 100, dtype=dtype)[..., :80], draw(2 * 37, 80, dtype=dtype)
    norm = Norm(draw(80, dtype=dtype), 1e-5, offset)
    gate, up = F.linear(normed(x, norm), weight).chunk(2, -1)
    close(gated_product(x, norm, weight), F.silu(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("with_norm", [True, False])
def test_queries_and_keys_turn(with_norm: bool, parts: int, rows: tuple[int, ...], dtype: torch.dtype) -> None:
    """Factors differ between the halves of a head; values stay."""
    heads, groups, size = 3, 2, 12
    xs = [draw(*rows, 40, dtype=dtype), draw(*rows, 48, dtype=dtype)[..., :40]][:parts]
    norms = [Norm(draw(40 + 8 * i, dtype=dtype)[:40], 1e-5) if with_norm else None for i in range(parts)]
    weight = draw((heads + 2 * groups) * size, 40 * parts, dtype=dtype)
    cos, sin = draw(*rows, size, dtype=dtype), draw(*rows, size, dtype=dtype) + 1
    z = torch.cat([x if norm is None else normed(x, norm) for x, norm in zip(xs, norms)], -1)
    product = F.linear(z, weight)
    query, key, _ = torch.split(product, [heads * size, groups * size, groups * size], -1)
    lead = rows if len(rows) == 2 else (1, 1)
    queries, keys = (part.view(*lead, -1, size).transpose(1, 2) for part in (query, key))
    rotate(queries, keys, cos.view(*lead, size), sin.view(*lead, size))
    close(turned_product(list(zip(xs, norms)), weight, cos, sin, heads + groups), product)


@pytest.mark.parametrize("count", [3, 18])
def test_a_row_is_what_it_is_alone(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, norm = draw(count, 80), draw(64, 80), Norm(draw(80), 1e-5)
    blocks = row_products._blocks(count, 80, row_products._GATED)
    monkeypatch.setattr(row_products, "_blocks", lambda *given: blocks)
    together = gated_product(x, norm, weight)
    assert torch.equal(together[-1], gated_product(x[-1:], norm, weight)[0])
    assert torch.equal(together[:2], gated_product(x[:2], norm, weight))


@pytest.mark.slow
def test_kernels_compile_for_hopper() -> None:
    check_kernels_compile(COMPILE)


COMPILE = """
from draftforge.specdec.kernels import flash_decoding, row_products

NUMBERS = {**dict.fromkeys(["x_row", "y_row", "added_row", "angle_row", "rows", "size", "heads"], "i32"), "eps": "fp32",
           "offset": "fp32"}
for kind, parts, normed, added in [(0, 1, False, True), (1, 1, True, False), (2, 2, True, False)]:
    given = dict(WIDTH=576, PARTS=parts, NORMED=normed, KIND=kind, ADDED=added, HALF=32, EARLY=True)
    for kernel, rows in [(row_products._multiply_row, 2), (row_products._multiply_tiles, 20)]:
        blocks = row_products._blocks(rows, 576 * parts, kind)
        constants = {**given, "ROWS": blocks.rows, "COLUMNS": blocks.columns, "DEPTH": blocks.depth}
        constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
        types = {name: NUMBERS.get(name, "*bf16") for name in kernel.arg_names}
        compiled(kernel, types, constants, blocks.warps)

tensors = {**dict.fromkeys(["query", "new_keys", "new_values", "keys", "values", "output"], "*bf16"), "past": "*i64",
           "means": "*fp32", "softmax": "*fp32", "depth": "*i64", "visible": "*i8", "scale": "fp32", "cap": "fp32"}
for tree, parts in [(False, 16), (True, 1)]:
    constants = dict(N=5, F=5, R=3, D=64, PARTS=parts, TREE=tree, WINDOWED=not tree, CAPPED=not tree, ROWS=16, KEYS=32,
                     ENTRIES=16, SIZE=64, AHEAD=1024, EARLY=True)
    compiled(flash_decoding._attend, tensors, constants)
tensors = {"means": "*fp32", "softmax": "*fp32", "output": "*bf16"}
compiled(flash_decoding._add_parts, tensors, dict(D=64, SIZE=64, PARTS=16), 1)
"""
