"""Value and gradient in closed form against autograd of the definitions."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from objective_mixes import ETA, MIXES
from torch import Tensor

from draftforge.train.losses.fused_torch import AGREE, ALPHA, TorchPass, TorchTeacher, coefficients
from draftforge.train.losses.objectives import (
    FullDistribution,
    LossWeights,
    acceptance,
    draft_index,
    live_entries,
    weighted_loss,
)
from draftforge.train.losses.schedule import LossPlan, Objective

V, R = 12, 3


class Problem(NamedTuple):
    """A teacher over V tokens, of which the draft knows some, and the draft's logits."""

    target_RV: Tensor
    draft_RJ: Tensor
    ids_J: Tensor | None

    @property
    def best(self) -> Tensor:
        return draft_index(self.target_RV.argmax(-1), self.ids_J)

    @property
    def kept(self) -> Tensor:
        return self.target_RV if self.ids_J is None else self.target_RV[:, self.ids_J]

    def lse(self, temperature: float) -> Tensor:
        return (self.target_RV / temperature).logsumexp(-1)

    def whole(self, plan: LossPlan) -> FullDistribution:
        return FullDistribution(self.kept, torch.stack([self.lse(t) for t in plan.temperatures]), self.best)


def problem(target_RV: Tensor, draft_RV: Tensor, kept: set[int] | None) -> Problem:
    ids_J = None if kept is None else torch.tensor(sorted(kept))
    return Problem(target_RV, draft_RV if ids_J is None else draft_RV[:, ids_J], ids_J)


def by_definition(found: Problem, objective: Objective, weight_R: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of each row and the gradient of its weighted sum, by autograd over the plain functions."""
    logits = found.draft_RJ.double().requires_grad_()
    loss_R = torch.zeros(len(logits), dtype=torch.float64)
    plan = LossPlan.from_objective(objective, ETA)
    for temperature, weights in zip(plan.temperatures, plan.terms):
        if not weights:
            continue
        entries = live_entries((found.kept / temperature), found.lse(temperature), found.best)
        entries = entries._replace(logp_NJ=entries.logp_NJ.double(), weight_NJ=entries.weight_NJ.double())
        loss_R = loss_R + weighted_loss(weights, entries, (logits / temperature).log_softmax(-1), ETA)
    (gradient,) = torch.autograd.grad((loss_R * weight_R).sum(), logits)
    return loss_R.detach().float(), gradient.float()


def in_closed_form(found: Problem, objective: Objective, weights: LossWeights) -> tuple[Tensor, Tensor, Tensor]:
    plan = LossPlan.from_objective(objective, ETA)
    logits = found.draft_RJ.clone()
    chunk_pass = TorchPass(logits, TorchTeacher.from_distribution(found.whole(plan), plan), plan)
    stats = chunk_pass.stats()
    loss_R, coefficients_TR4 = coefficients(plan, stats, chunk_pass.best_R, weights)
    chunk_pass.gradient(coefficients_TR4)
    return loss_R, logits, stats


def assume_apart(found: Problem) -> None:
    """tv has no gradient where p = q."""
    for temperature in (0.5, 1.0, 2.0):
        logp = found.kept / temperature - found.lse(temperature)[:, None]
        assume(bool((logp - (found.draft_RJ / temperature).log_softmax(-1)).abs().min() > 1e-4))


def drawn(seed: int, scale: float) -> Tensor:
    return torch.randn(R, V, generator=torch.Generator().manual_seed(seed)) * scale


Rows = st.builds(drawn, st.integers(0, 10_000), st.sampled_from([0.1, 1.0, 4.0]))
Kept = st.none() | st.sets(st.integers(0, V - 1), min_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("mix", MIXES)
@given(target=Rows, draft=Rows, kept=Kept)
def test_value_and_gradient_are_those_of_the_definition(
    mix: str, target: Tensor, draft: Tensor, kept: set[int] | None
) -> None:
    found = problem(target, draft, kept)
    assume_apart(found)
    weight_R = torch.tensor([1.0, 0.8, 0.3])
    valid_R = torch.tensor([True, True, False])
    loss, gradient, stats = in_closed_form(found, MIXES[mix], LossWeights(weight_R, valid_R, None))
    expected, wanted = by_definition(found, MIXES[mix], weight_R * valid_R)
    torch.testing.assert_close(loss, expected * valid_R, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(gradient, wanted, atol=2e-5, rtol=2e-4)
    entries = live_entries(found.kept, found.lse(1.0), found.best)
    alpha = acceptance(entries, found.draft_RJ.log_softmax(-1))
    torch.testing.assert_close(stats[0, :, ALPHA], alpha, atol=1e-5, rtol=1e-4)
    agree = (found.best >= 0) & (found.draft_RJ.argmax(-1) == found.best)
    if bool((found.draft_RJ.topk(2).values.diff().abs() > 1e-4).all()):  # a tie may be broken either way
        assert stats[0, :, AGREE].tolist() == agree.float().tolist()


def test_a_likeliest_token_that_the_draft_lacks_is_not_pulled_at() -> None:
    found = problem(torch.eye(R, V) * 9, torch.randn(R, V, generator=torch.Generator().manual_seed(0)), {1, 2, 7})
    assert found.best.tolist() == [-1, 0, 1]
    weights = LossWeights(torch.ones(R), torch.ones(R, dtype=torch.bool), None)
    loss, gradient, _ = in_closed_form(found, {"ce": 1.0}, weights)
    assert float(loss[0]) == 0 and float(gradient[0].abs().sum()) == 0 and float(gradient[1].abs().sum()) > 0


def test_no_overlap_at_all_stays_finite() -> None:
    target, draft = torch.zeros(1, V), torch.zeros(1, V)
    target[0, 0], draft[0, 1] = 500.0, 500.0
    weights = LossWeights(torch.ones(1), torch.ones(1, dtype=torch.bool), None)
    objective = MIXES["all"]
    loss, gradient, _ = in_closed_form(problem(target, draft, None), objective, weights)
    assert bool(loss.isfinite().all()) and bool(gradient.isfinite().all())
