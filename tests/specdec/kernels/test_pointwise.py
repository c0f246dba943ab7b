"""The pointwise kernels against plain operations, in Triton's interpreter where there is no GPU."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from draftforge.specdec.drafts import layers
from draftforge.specdec.drafts.layers import LinearRope, Rope, RopeScaling, YarnRope
from draftforge.specdec.kernels.pointwise import gated_silu, rotate

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
