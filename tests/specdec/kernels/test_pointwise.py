"""The pointwise kernels against plain operations, in Triton's interpreter where there is no GPU."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from draftforge.specdec.drafts import layers
from draftforge.specdec.drafts.layers import LinearRope, Rope, RopeScaling, YarnRope
from draftforge.specdec.kernels.pointwise import add_norm, angles, gated_silu, rotate, take_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As transformers writes it, for cos and sin over the whole head."""
    low, high = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-high, low], -1) * sin[:, None]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("heads", "groups", "size"), [(9, 3, 64), (2, 2, 6), (3, 1, 80)])
def test_heads_turn_where_they_lie(heads: int, groups: int, size: int, rows: int) -> None:
    """Slices of one product, and factors that differ between the halves and may be shared by the rows."""
    product = draw(2, 5, (heads + groups + 1) * size)
    query, key, rest = torch.split(product, [heads * size, groups * size, size], -1)
    query, key = (x.view(2, 5, -1, size).transpose(1, 2) for x in (query, key))
    cos, sin = draw(rows, 5, size), draw(rows, 5, size) + 1
    expected, kept = (turned(query, cos, sin), turned(key, cos, sin)), rest.clone()
    rotate(query, key, cos, sin)
    torch.testing.assert_close((query, key), expected)
    assert torch.equal(rest, kept)


@pytest.mark.parametrize(
    "scaling", [None, LinearRope(factor=2.5), YarnRope(factor=4, original_max_position_embeddings=64)]
)
def test_a_draft_turns_both_alike(scaling: RopeScaling | None, monkeypatch: pytest.MonkeyPatch) -> None:
    turning = Rope(10000.0, 16, scaling)
    waves = turning.waves(torch.tensor([[0, 7, 8], [3, 4, 900]], device=DEVICE), torch.float32)
    query, key = draw(2, 4, 3, 16), draw(2, 2, 3, 16)
    expected = turning(query, waves), turning(key, waves)
    monkeypatch.setattr(layers, "runs_triton", lambda device: True)
    found = turning.both(query.clone(), key.clone(), waves)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    learned = query.clone().requires_grad_()
    torch.autograd.backward(turning.both(learned, key, waves)[0].sum())
    assert learned.grad is not None


@pytest.mark.parametrize("shape", [(3, 2, 1500), (1, 7), (5,)])
def test_gated(shape: tuple[int, ...]) -> None:
    joint = draw(*shape[:-1], 2 * shape[-1])
    gate, up = joint.chunk(2, -1)
    found = gated_silu(gate, up)
    assert found.is_contiguous()
    torch.testing.assert_close(found, torch.nn.functional.silu(gate) * up)


def test_half_precision_is_rounded_once() -> None:
    """float16: the interpreter cuts bfloat16 off instead of rounding it."""
    gate, up = draw(4, 64).half(), draw(4, 64).half() * 3
    exact = torch.nn.functional.silu(gate.float()) * up.float()
    assert torch.equal(gated_silu(gate, up), exact.half())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("offset", "late"), [(0.0, True), (1.0, False)])
def test_sums_are_normed(offset: float, late: bool, dtype: torch.dtype) -> None:
    """As Llama does, and as Gemma does; rows may be slices."""
    x, y, weight = draw(2, 3, 90).to(dtype)[..., :80], draw(2, 3, 80).to(dtype), draw(80).to(dtype)
    total, normed = add_norm(x, y, weight, 1e-5, offset, late)
    assert torch.equal(total, x + y)
    scaled = total.float() * (total.float().pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    expected = weight * scaled.to(dtype) if late else (scaled * (weight.float() + offset)).to(dtype)
    torch.testing.assert_close(normed, expected)


def test_angles_are_those_of_both_halves() -> None:
    positions_BN = torch.tensor([[0, 5, 9000]], device=DEVICE).expand(2, -1)
    frequency_F = 10000.0 ** (-torch.arange(6, device=DEVICE) / 6)
    angle = (positions_BN[..., None].float() * frequency_F).repeat(1, 1, 2)
    expected = (1.5 * angle.cos(), 1.5 * angle.sin())
    torch.testing.assert_close(angles(positions_BN, frequency_F, 1.5, torch.float32), expected, rtol=1e-4, atol=1e-4)


def test_rows_are_taken_where_they_lie() -> None:
    """Of slices, by places that count from elsewhere; and of one table for all."""
    x_BEH, index_BN = draw(2, 5, 90)[:, 1:, :80], torch.tensor([[7, 4, 4], [5, 6, 4]], device=DEVICE)
    expected = torch.stack([rows[places - 4] for rows, places in zip(x_BEH, index_BN)])
    assert torch.equal(take_rows(x_BEH, index_BN, first=4), expected)
    assert torch.equal(take_rows(x_BEH[0].expand(3, -1, -1), index_BN.T - 4), x_BEH[0][index_BN.T - 4])
