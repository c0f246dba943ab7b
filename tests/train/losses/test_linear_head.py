"""The chunked loss with gradients made by hand, against plain autograd over all logits at once."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from draftforge.data.teacher_logprobs import teacher_signals
from draftforge.train.losses import linear_head as chunked
from draftforge.train.losses.linear_head import AGREE, ALPHA, COUNT, LOSS, Head, LossSettings, Rows, head_loss
from draftforge.train.losses.objectives import (
    OBJECTIVES,
    Entries,
    FullDistribution,
    StoredDistribution,
    acceptance,
    live_entries,
    stored_entries,
    weighted_loss,
)
from draftforge.train.losses.schedule import Objective, Weighted

S, N, H, V = 3, 11, 8, 20
OBJECTIVE = {"kl": 1.0, "ce": 0.3, "tv": 0.5}
STEP_WEIGHTS = (1.0, 0.8, 0.64)


ETA = 2.0


class Fixed(NamedTuple):
    """A teacher given as logits, or as signals of them."""

    logits_NV: Tensor
    stored: bool

    @property
    def live(self) -> bool:
        return not self.stored

    def at(self, rows: slice, temperatures: Sequence[float]) -> FullDistribution | StoredDistribution:
        logits = self.logits_NV[rows]
        if self.live:
            return FullDistribution(
                logits, torch.stack([(logits / t).logsumexp(-1) for t in temperatures]), logits.argmax(-1)
            )
        entries, ids = self.entries(rows)
        assert ids is not None
        return StoredDistribution(entries, ids)

    def entries(self, rows: slice) -> tuple[Entries, Tensor | None]:
        """For the plain way."""
        logits = self.logits_NV[rows]
        if self.live:
            return live_entries(logits, logits.logsumexp(-1), logits.argmax(-1)), None
        draws = torch.linspace(0.1, 0.9, 4).expand(len(logits), -1)
        return stored_entries(teacher_signals(logits, torch.zeros(len(logits), dtype=torch.long), draws, top_k=6))


def problem(stored: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Fixed]:
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(S, N, H, generator=generator).requires_grad_()
    weight = torch.randn(V, H, generator=generator).requires_grad_()
    bias = torch.randn(V, generator=generator).requires_grad_()
    valid = torch.rand(S, N, generator=generator) > 0.3
    return states, weight, bias, valid, Fixed(torch.randn(N, V, generator=generator) * 3, stored)


EVERY = {name: 0.1 * n for n, name in enumerate(OBJECTIVES, start=1)}
"""All that look at one position: some of them have no closed form."""


def plain_loss(
    states: Tensor,
    weight: Tensor,
    bias: Tensor,
    valid: Tensor,
    teacher: Fixed,
    objective: dict[str, float],
    finish: object,
) -> Tensor:
    entries, ids = teacher.entries(slice(None))
    total = torch.zeros(())
    for step, factor in enumerate(STEP_WEIGHTS):
        logits = states[step] @ weight.T + bias
        logq = (finish(logits) if callable(finish) else logits).log_softmax(-1)
        loss = weighted_loss(objective, entries, logq if ids is None else logq.gather(-1, ids), ETA)
        total = total + factor * loss[valid[step]].sum()
    return total


def softcap(logits: Tensor) -> Tensor:
    return 4.0 * torch.tanh(logits * 0.5 / 4.0)


@pytest.mark.parametrize("finish", [None, softcap])
@pytest.mark.parametrize(
    "stored,objective",
    [
        pytest.param(True, OBJECTIVE, id="stored"),
        pytest.param(False, OBJECTIVE, id="closed form"),
        pytest.param(False, EVERY, id="autograd"),
    ],
)
@pytest.mark.parametrize("rows_at_once", [1, 4, 100])
def test_chunked_equals_plain(
    stored: bool, objective: dict[str, float], rows_at_once: int, finish: Callable[[Tensor], Tensor] | None
) -> None:
    states, weight, bias, valid, teacher = problem(stored)
    settings = LossSettings(objective, ETA, logits_bytes=4 * V * rows_at_once)
    loss, sums = head_loss(Rows(states, valid, teacher, STEP_WEIGHTS), Head(weight, bias, finish), settings)
    expected = plain_loss(states, weight, bias, valid, teacher, objective, finish)
    torch.testing.assert_close(loss, expected)
    wanted = torch.autograd.grad(expected * 0.37, [states, weight, bias])
    for found, gradient in zip(torch.autograd.grad(loss * 0.37, [states, weight, bias]), wanted):
        torch.testing.assert_close(found, gradient)
    assert sums[:, COUNT].tolist() == valid.sum(-1).tolist()
    torch.testing.assert_close((sums[:, LOSS] * torch.tensor(STEP_WEIGHTS)).sum(), expected.detach())


@pytest.mark.parametrize("stored", [False, True])
def test_figures_beside_the_loss(stored: bool) -> None:
    states, weight, bias, valid, teacher = problem(stored)
    _, sums = head_loss(Rows(states, valid, teacher, STEP_WEIGHTS), Head(weight, bias), LossSettings(OBJECTIVE))
    entries, ids = teacher.entries(slice(None))
    for step in range(S):
        logits = (states[step] @ weight.T + bias).detach()
        logq = logits.log_softmax(-1)
        alpha = acceptance(entries, logq if ids is None else logq.gather(-1, ids))
        assert float(sums[step, ALPHA]) == pytest.approx(float(alpha[valid[step]].sum()), rel=1e-5)
        agree = logits.argmax(-1) == teacher.logits_NV.argmax(-1)
        assert int(sums[step, AGREE]) == int(agree[valid[step]].sum())


@pytest.mark.parametrize("stored", [False, True])
def test_all_masked(stored: bool) -> None:
    states, weight, bias, valid, teacher = problem(stored)
    rows = Rows(states, torch.zeros_like(valid), teacher, STEP_WEIGHTS)
    loss, sums = head_loss(rows, Head(weight, bias), LossSettings(OBJECTIVE))
    assert float(loss.detach()) == 0 and sums.abs().sum() == 0
    assert all(float(gradient.abs().sum()) == 0 for gradient in torch.autograd.grad(loss, [states, weight, bias]))


def test_no_positions_at_all() -> None:
    _, weight, _, _, teacher = problem(False)
    states = torch.zeros(1, 0, H, requires_grad=True)
    loss, _ = head_loss(Rows(states, None, teacher), Head(weight), LossSettings(OBJECTIVE))
    states_grad, weight_grad = torch.autograd.grad(loss, [states, weight])
    assert float(loss.detach()) == 0 and states_grad.shape == states.shape and float(weight_grad.abs().sum()) == 0


def test_a_frozen_head_gets_no_gradient() -> None:
    states, weight, _, valid, teacher = problem(False)
    loss, _ = head_loss(Rows(states, valid, teacher, STEP_WEIGHTS), Head(weight.detach()), LossSettings(OBJECTIVE))
    loss.backward()  # type: ignore[no-untyped-call]
    assert states.grad is not None and weight.grad is None


def test_bfloat16_products_stay_close() -> None:
    states, weight, _, valid, teacher = problem(True)
    rows = Rows(states, valid, teacher, STEP_WEIGHTS)
    exact, _ = head_loss(rows, Head(weight), LossSettings(OBJECTIVE))
    rough, _ = head_loss(rows, Head(weight), LossSettings(OBJECTIVE, dtype=torch.bfloat16))
    (wanted,), (found,) = torch.autograd.grad(exact, weight), torch.autograd.grad(rough, weight)
    assert float(rough.detach()) == pytest.approx(float(exact.detach()), rel=0.02)
    assert float((found - wanted).norm() / wanted.norm()) < 0.02
    assert found.dtype == torch.float32


@pytest.mark.parametrize("stored", [False, True])
def test_every_step_may_have_a_head_of_its_own(stored: bool) -> None:
    states, weight, bias, valid, teacher = problem(stored)
    weights = [weight.detach().roll(k, 0).requires_grad_() for k in range(S)]
    heads = [Head(weights[0]), Head(weights[1], bias), Head(weights[2])]
    loss, sums = head_loss(Rows(states, valid, teacher, STEP_WEIGHTS), heads, LossSettings(OBJECTIVE))
    parts = []
    for k, (head, factor) in enumerate(zip(heads, STEP_WEIGHTS)):
        rows = Rows(states[k : k + 1], valid[k : k + 1], teacher, (factor,))
        parts.append(head_loss(rows, head, LossSettings(OBJECTIVE)))
    torch.testing.assert_close(loss, sum(part[0] for part in parts))
    torch.testing.assert_close(sums, torch.cat([part[1] for part in parts]))
    wanted = torch.autograd.grad(sum(part[0] for part in parts), [states, *weights, bias])  # type: ignore[arg-type]
    for found, gradient in zip(torch.autograd.grad(loss, [states, *weights, bias]), wanted):
        torch.testing.assert_close(found, gradient)


@pytest.mark.parametrize("stored", [False, True])
def test_rows_of_one_s_may_be_of_different_steps(stored: bool) -> None:
    """Weights and figures go by the step of the row."""
    states, weight, bias, valid, teacher = problem(stored)
    order = torch.randint(S, (1, N), generator=torch.Generator().manual_seed(5))
    picked = states.detach()[order, torch.arange(N)].requires_grad_()
    whole, settings = valid[order, torch.arange(N)], LossSettings(OBJECTIVE)
    loss, sums = head_loss(Rows(picked, whole, teacher, STEP_WEIGHTS, order), Head(weight, bias), settings)
    only = valid & (order == torch.arange(S)[:, None])
    wanted, wanted_sums = head_loss(Rows(states, only, teacher, STEP_WEIGHTS), Head(weight, bias), settings)
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(sums, wanted_sums)
    torch.testing.assert_close(torch.autograd.grad(loss, weight), torch.autograd.grad(wanted, weight))


@pytest.mark.parametrize("rows_at_once", [1, 4, 100])
def test_expected_length_equals_autograd_over_products(rows_at_once: int) -> None:
    """Chain c: rows (0, c), (1, c + 1), ... as far as they are valid; step weights hold for kl alone."""
    states, weight, bias, valid, teacher = problem(False)
    objective: Objective = {"kl": 0.5, "expected_length": Weighted(weight=2.0, temperature=1.5)}
    rows = Rows(states, valid, teacher, STEP_WEIGHTS)
    settings = LossSettings(objective, logits_bytes=4 * V * rows_at_once)
    loss, sums = head_loss(rows, Head(weight, bias), settings)
    logp, q = teacher.logits_NV.log_softmax(-1), (states @ weight.T + bias).log_softmax(-1)
    kl = (logp.exp() * (logp - q)).sum(-1)
    expected = 0.5 * (torch.tensor(STEP_WEIGHTS)[:, None] * torch.where(valid, kl, 0.0)).sum()
    p = (teacher.logits_NV / 1.5).softmax(-1)
    alpha = torch.minimum(p, ((states @ weight.T + bias) / 1.5).softmax(-1)).sum(-1)
    for start in range(N):
        product, length = torch.ones(()), torch.ones(())
        steps = [k for k in range(S) if start + k < N and all(valid[j, start + j] for j in range(k + 1))]
        for k in steps:
            product = product * alpha[k, start + k]
            length = length + product
        expected = expected - 2.0 * length * bool(steps)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close((sums[:, LOSS] * torch.tensor(STEP_WEIGHTS)).sum(), expected.detach())
    wanted = torch.autograd.grad(expected, [states, weight, bias])
    for found, gradient in zip(torch.autograd.grad(loss, [states, weight, bias]), wanted):
        torch.testing.assert_close(found, gradient, atol=1e-5, rtol=1e-4)


def test_heads_that_share_a_matrix_share_its_copy_for_products(monkeypatch: pytest.MonkeyPatch) -> None:
    states, weight, _, valid, teacher = problem(stored=False)
    seen: list[int] = []
    original = chunked._chunks

    def chunks(rows: Rows, heads: Any, weights: list[Tensor], *rest: Any) -> Any:
        seen.append(len({each.data_ptr() for each in weights}))
        return original(rows, heads, weights, *rest)

    monkeypatch.setattr(chunked, "_chunks", chunks)
    settings, rows = LossSettings({"kl": 1.0}, dtype=torch.bfloat16), Rows(states, valid, teacher, STEP_WEIGHTS)
    shared, _ = head_loss(rows, [Head(weight)] * len(STEP_WEIGHTS), settings)
    apart, _ = head_loss(rows, [Head(weight.detach().clone()) for _ in STEP_WEIGHTS], settings)
    assert seen == [1, len(STEP_WEIGHTS)] and torch.equal(shared, apart)


def test_a_loss_is_differentiated_once() -> None:
    states, weight, _, valid, teacher = problem(False)
    loss, _ = head_loss(Rows(states, valid, teacher, STEP_WEIGHTS), Head(weight), LossSettings(OBJECTIVE))
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]
