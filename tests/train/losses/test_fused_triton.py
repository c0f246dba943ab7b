"""The Triton kernels against autograd of the definitions, in Triton's interpreter where there is no GPU."""

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from objective_mixes import ETA, MIXES, OTHERS

from draftforge.train.losses import fused_triton
from draftforge.train.losses import linear_head as heads
from draftforge.train.losses.fused_torch import AGREE, ALPHA, coefficients
from draftforge.train.losses.linear_head import Head, LossSettings, Rows, head_loss
from draftforge.train.losses.objectives import FullDistribution, LossWeights, TeacherEntries, autograd_loss
from draftforge.train.losses.schedule import LossPlan, Objective, Weighted

pytestmark = pytest.mark.slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STEPS, C, V, H = 2, 3, 300, 16
"""300 entries: two whole blocks and a part of one."""


@pytest.fixture(autouse=True)
def small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_triton, "_BLOCK", 128)
        patch.setattr(fused_triton, "_WARPS", 1)
        yield


def draw(*shape: int, scale: float = 2.0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(DEVICE, dtype)


def teacher_of(logits_CW: Tensor, plan: LossPlan) -> FullDistribution:
    """A draft's vocabulary of V out of a larger one: P < 1, and some likeliest tokens are outside."""
    lse = torch.stack([(logits_CW.float() / t).logsumexp(-1) for t in plan.temperatures])
    best_C = logits_CW.argmax(-1)
    return FullDistribution(logits_CW[:, :V], lse, torch.where(best_C < V, best_C, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mix", MIXES | OTHERS)
def test_kernels_equal_autograd_of_the_definitions(mix: str, dtype: torch.dtype) -> None:
    """Given the same logits, both compute in float32 and differ by the order of sums; the gradient is then rounded to
    bfloat16 (8 bits: a unit in the last place is up to 2 ** -7 of it, and the interpreter truncates)."""
    plan = LossPlan.from_objective((MIXES | OTHERS)[mix], ETA)
    rows = STEPS * C
    logits, whole = draw(rows, V, dtype=dtype), teacher_of(draw(C, V + 60, dtype=dtype), plan)
    weights = LossWeights(torch.linspace(0.3, 1.0, rows, device=DEVICE), torch.arange(rows, device=DEVICE) != 1, None)
    ours = logits.clone()
    kernels = fused_triton.TritonPass(ours, whole, plan)
    stats = kernels.stats()
    loss, six = coefficients(plan, stats, kernels.best_R, weights)
    kernels.gradient(six)
    for step in range(STEPS):
        at = slice(step * C, (step + 1) * C)
        theirs = logits[at].float().requires_grad_()
        total, *wanted = autograd_loss(theirs, TeacherEntries.from_distribution(whole, plan), plan, weights.part(at))
        for found, expected in zip((loss[at], stats[0, at, ALPHA], stats[0, at, AGREE]), wanted):
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
        rounding = 2.0**-7 if dtype == torch.bfloat16 else 1e-4
        (gradient,) = torch.autograd.grad(total, theirs)
        torch.testing.assert_close(ours[at].float(), gradient, atol=1e-6, rtol=rounding)


class Live:
    """A teacher over the same positions."""

    live = True

    def __init__(self, logits_NW: Tensor) -> None:
        self._logits_NW = logits_NW

    def at(self, rows: slice, temperatures: Sequence[float]) -> FullDistribution:
        return teacher_of(
            self._logits_NW[rows], LossPlan.from_objective({"kl": 1.0}, ETA)._replace(temperatures=tuple(temperatures))
        )


@pytest.mark.parametrize("own_heads", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_by_kernels_equals_one_without(
    dtype: torch.dtype, own_heads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All steps of a chunk at once or not, chained or not. In bfloat16 both round logits and gradient alike."""
    count = 7
    states = draw(STEPS, count, H, scale=1.0).requires_grad_()
    weights = [draw(V, H + k, scale=0.7)[:, :H].clone().requires_grad_() for k in range(STEPS if own_heads else 1)]
    valid = torch.ones(STEPS, count, dtype=torch.bool, device=DEVICE)
    valid[1, 2] = False
    objective: Objective = {
        "lk_hybrid": 1.0,
        "jsd": 0.5,
        "ce": 0.1,
        "expected_length": Weighted(weight=0.3, temperature=2.0),
    }
    rows = Rows(states, valid, Live(draw(count, V + 60)), (1.0, 0.5))
    found = []
    for way in ("triton", "autograd"):
        monkeypatch.setattr(heads, "way_of", lambda *_, way=way: way)
        settings = LossSettings(objective, ETA, dtype, logits_bytes=dtype.itemsize * V * 3 * 3)
        loss, sums = head_loss(rows, [Head(weight) for weight in weights], settings)
        found.append((loss.detach(), sums, *torch.autograd.grad(loss, [states, *weights])))
    assert float(found[0][1][:, 3].sum()) == 2 * count - 1
    for ours, theirs in zip(*found):
        if dtype == torch.float32:
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
        else:  # gradients that the interpreter truncates to 8 bits, which does not average out
            assert float((ours - theirs).norm()) <= 0.01 * float(theirs.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_summary_of_a_row(dtype: torch.dtype) -> None:
    logits = draw(5, V, dtype=dtype)
    logits[2, -1], logits[3, 0] = 50.0, 60.0
    lse_C, best_C = fused_triton.summarize(logits)
    torch.testing.assert_close(lse_C, logits.float().logsumexp(-1), rtol=1e-6, atol=1e-6)
    assert torch.equal(best_C, logits.float().argmax(-1)) or dtype == torch.bfloat16  # there ties are likely
    assert torch.equal(logits.gather(-1, best_C[:, None])[:, 0], logits.amax(-1))
    assert fused_triton.summarize(logits[:0])[0].shape == (0,)
