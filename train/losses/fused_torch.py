"""What objectives are worth at a row of logits, and their gradient, without autograd.

Shapes: T temperatures, R rows, C teacher positions, V draft vocabulary.

With q = softmax(z / tau), p the teacher's share of the same entries (their sum P may be below 1: a reduced vocabulary),
x = log q - log p and y = log q / m = log 2 - softplus(-x), the gradients on z / tau are

    kl           P q - p                              ce      q - onehot(best), 0 where the draft cannot say it
    alpha        q (1[x < 0] - sum q 1[x < 0])        jsd     q (y - sum q y) / 2
    reverse_kl   q (x - sum q x)

and tv, lk, lk_hybrid and expected_length read alpha. So any mix of them is six numbers a row:

    q (f_0 + f_1 1[x < 0] + f_2 x + f_3 y) - f_4 p - f_5 onehot(best)

Two implementations make `Stats` and this gradient: eager.py (torch, the reference) and kernels.py (Triton).
"""

import math
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...data.teacher_logprobs import FLOOR
from .objectives import CHAINED
from .schedule import Objective, by_temperature

LSE, ALPHA, BELOW, MASS, KL, REVERSE, JS_P, JS_Q, BEST, AGREE = range(10)
"""Columns of a row's statistics: log sum exp; sum min(p, q); sum q 1[x < 0]; P; kl; reverse_kl; sum p log p / m;
sum q log q / m; log q of the target's likeliest token, 0 without one; 1 where it is the draft's likeliest too."""
STATS = 10
CONSTANT, WHERE_BELOW, TIMES_X, TIMES_Y, TIMES_P, AT_BEST = range(6)
"""Columns of a row's coefficients: f_0 to f_5."""
COEFFICIENTS = 6
LOG_2 = math.log(2.0)
ALPHA_FLOOR = 1e-30
"""`lk` takes a smaller overlap for this one, so that 1 / alpha stays finite."""


class FullDistribution(NamedTuple):
    """The target's whole distribution at C positions."""

    logits_CV: Tensor
    """Of the draft's tokens, in any float dtype; scale and soft-cap are applied."""
    lse_TC: Tensor
    """log sum exp of all its logits, each divided by one temperature: what the draft cannot say keeps its share."""
    best_C: Tensor
    """Which entry is its likeliest token; -1 where the draft's vocabulary lacks it."""


class ChunkPass(Protocol):
    """Some rows of logits while their gradient is made."""

    best_R: Tensor
    """The teacher's likeliest entries; -1 where there is none."""

    def stats(self) -> Tensor:
        """[T, R, STATS], float32."""
        ...

    def gradient(self, coefficients_TR6: Tensor) -> None:
        """The gradient on the logits, summed over temperatures, in their place. Once, after `stats`."""
        ...


class LossPlan(NamedTuple):
    """An objective, sorted for the sweeps."""

    temperatures: tuple[float, ...]
    """The first is 1: acceptance is reported there."""
    terms: tuple[Mapping[str, float], ...]
    """Weights of the objectives at each temperature; none at the first where all have another."""
    lk_eta: float

    @classmethod
    def of(cls, objective: Objective, lk_eta: float) -> "LossPlan":
        """Group the objective's parts by temperature."""
        parts: dict[float, dict[str, float]] = {1.0: {}} | by_temperature(objective)
        return cls(tuple(parts), tuple(parts.values()), lk_eta)

    def has(self, *names: str) -> bool:
        """Whether one of these objectives is part of it."""
        return any(name in terms for terms in self.terms for name in names)

    @property
    def chained(self) -> int | None:
        """At which temperature (index) rows are chained by `expected_length`; None: nowhere."""
        return next((at for at, terms in enumerate(self.terms) if CHAINED in terms), None)


class LossWeights(NamedTuple):
    """How much R rows count."""

    weight_R: Tensor
    """Weight of the row's step, of all objectives that look at one row alone."""
    valid_R: Tensor
    """bool: the others count nothing."""
    slope_R: Tensor | None
    """d loss / d alpha of `expected_length`, its weight included."""

    def part(self, at: slice) -> "LossWeights":
        """Some of the rows."""
        return LossWeights(self.weight_R[at], self.valid_R[at], None if self.slope_R is None else self.slope_R[at])


def coefficients(plan: LossPlan, stats_TRX: Tensor, best_R: Tensor, weighing: LossWeights) -> tuple[Tensor, Tensor]:
    """Loss [R] of the objectives that look at one row alone, unweighted; coefficients [T, R, 6], weighted."""
    loss_R = torch.zeros_like(weighing.weight_R)
    found = []
    for number, (temperature, terms) in enumerate(zip(plan.temperatures, plan.terms)):
        stats = stats_TRX[number].unbind(-1)
        value_R, pulls = _pulls(terms, stats, plan.lk_eta)
        loss_R = loss_R + value_R
        kl, ce, alpha, reverse, middle = (pull * weighing.weight_R for pull in pulls)
        if weighing.slope_R is not None and number == plan.chained:
            alpha = alpha + weighing.slope_R
        ce = torch.where(best_R >= 0, ce, 0.0)
        constant = kl * stats[MASS] + ce - alpha * stats[BELOW] - reverse * stats[REVERSE] - middle * stats[JS_Q]
        found.append(torch.stack([constant, alpha, reverse, middle, kl, ce], dim=-1) / temperature)
    valid = weighing.valid_R
    return torch.where(valid, loss_R, 0.0), torch.where(valid[:, None], torch.stack(found), 0.0)


def _pulls(
    terms: Mapping[str, float], stats: tuple[Tensor, ...], eta: float
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """Loss [R], and how strongly it pulls along the gradients of kl, ce, alpha, reverse_kl and 2 jsd, [R] each."""
    zero = torch.zeros_like(stats[ALPHA])
    loss, kl, ce, alpha, reverse, middle = zero, zero, zero, zero, zero, zero
    for name, weight in terms.items():
        if name == "kl":
            loss, kl = loss + weight * stats[KL], kl + weight
        elif name == "ce":
            loss, ce = loss - weight * stats[BEST], ce + weight
        elif name == "tv":
            loss, alpha = loss + weight * (1.0 - stats[ALPHA]), alpha - weight
        elif name == "lk":
            overlap = stats[ALPHA].clamp_min(ALPHA_FLOOR)
            loss, alpha = loss - weight * overlap.log(), alpha - weight / overlap
        elif name == "lk_hybrid":
            share = weight * torch.exp(-eta * stats[ALPHA])
            loss = loss + share * stats[KL] + (weight - share) * (1.0 - stats[ALPHA])
            kl, alpha = kl + share, alpha - (weight - share)
        elif name == "reverse_kl":
            loss, reverse = loss + weight * stats[REVERSE], reverse + weight
        elif name == "jsd":
            outside = (1.0 - stats[MASS]).clamp_min(0.0) * LOG_2
            loss = loss + 0.5 * weight * (stats[JS_P] + stats[JS_Q] + outside)
            middle = middle + 0.5 * weight
    return loss, (kl, ce, alpha, reverse, middle)


_OF_OVERLAP = ("tv", "lk", "lk_hybrid", "expected_length")
_OF_RATIO = ("reverse_kl", "jsd")


class EagerTeacher(NamedTuple):
    """A chunk's teacher, worked out once for all steps that read it: by temperature, of R rows each."""

    best_R: Tensor
    p_RV: tuple[Tensor, ...]
    logp_RV: tuple[Tensor, ...]
    """None kept where no objective needs log q - log p."""
    negentropy_R: tuple[Tensor, ...]
    mass_R: tuple[Tensor, ...]

    @classmethod
    def of(cls, whole: FullDistribution, plan: LossPlan) -> "EagerTeacher":
        """p and what follows from it alone."""
        p, logp, negentropy, mass = [], [], [], []
        for temperature, lse_R in zip(plan.temperatures, whole.lse_TC):
            logits_RV = whole.logits_CV.float()
            scaled_RV = logits_RV if temperature == 1.0 else logits_RV / temperature
            logp_RV = (scaled_RV - lse_R[:, None]).clamp_min_(FLOOR)
            p_RV = logp_RV.exp()
            p.append(p_RV)
            negentropy.append(torch.linalg.vecdot(p_RV, logp_RV))
            mass.append(p_RV.sum(-1))
            if plan.has(*_OF_RATIO):
                logp.append(logp_RV)
        return cls(whole.best_C, tuple(p), tuple(logp), tuple(negentropy), tuple(mass))

    def part(self, at: slice) -> "EagerTeacher":
        """Some of the rows."""
        return EagerTeacher(self.best_R[at], *(tuple(tensor[at] for tensor in tensors) for tensors in self[1:]))


class EagerSweep:
    """Rows of float32 logits, which it overwrites: with q at the last temperature, then with the gradient."""

    def __init__(self, logits_RV: Tensor, teacher: EagerTeacher, plan: LossPlan) -> None:
        self.best_R = teacher.best_R
        self._logits_RV, self._teacher, self._plan = logits_RV, teacher, plan
        self._q_RV: list[Tensor] = []
        self._x_RV: list[Tensor] = []
        self._below_RV: list[Tensor] = []

    def stats(self) -> Tensor:
        """[T, R, STATS]."""
        last = len(self._plan.temperatures) - 1
        found = []
        for number, temperature in enumerate(self._plan.temperatures):
            u_RV = self._logits_RV if number == last else self._logits_RV.clone()
            found.append(self._stats(number, u_RV if temperature == 1.0 else u_RV.div_(temperature)))
        return torch.stack(found)

    def _stats(self, number: int, u_RV: Tensor) -> Tensor:
        plan, best_R = self._plan, self.best_R
        p_RV, mass_R = self._teacher.p_RV[number], self._teacher.mass_R[number]
        top_R = u_RV.amax(-1)
        best_u_R = u_RV.gather(-1, best_R.clamp_min(0)[:, None])[:, 0]
        stats = torch.zeros(len(top_R), STATS, device=u_RV.device)
        stats[:, MASS] = mass_R
        stats[:, AGREE] = ((best_R >= 0) & (best_u_R >= top_R)).float()
        u_RV.sub_(top_R[:, None])
        if plan.has("kl", "lk_hybrid"):
            stats[:, KL] = self._teacher.negentropy_R[number] - torch.linalg.vecdot(p_RV, u_RV)
        if plan.has(*_OF_RATIO):
            self._x_RV.append(u_RV - self._teacher.logp_RV[number])
        q_RV = u_RV.exp_()
        total_R = q_RV.sum(-1)
        q_RV.mul_(total_R.reciprocal()[:, None])
        self._q_RV.append(q_RV)
        log_total_R = total_R.log()
        if plan.has("kl", "lk_hybrid"):
            stats[:, KL] += mass_R * log_total_R
        stats[:, LSE] = top_R + log_total_R
        stats[:, BEST] = torch.where(best_R >= 0, best_u_R - stats[:, LSE], 0.0)
        stats[:, ALPHA] = torch.minimum(p_RV, q_RV).sum(-1)
        if plan.has(*_OF_OVERLAP):
            self._below_RV.append(torch.where(q_RV < p_RV, q_RV, 0.0))
            stats[:, BELOW] = self._below_RV[number].sum(-1)
        if plan.has(*_OF_RATIO):
            x_RV = self._x_RV[number].sub_(log_total_R[:, None]).clamp_min_(FLOOR)
            stats[:, REVERSE] = torch.linalg.vecdot(q_RV, x_RV)
            stats[:, JS_P] = torch.linalg.vecdot(p_RV, _to_middle(-x_RV))
            stats[:, JS_Q] = torch.linalg.vecdot(q_RV, _to_middle(x_RV))
        return stats

    def gradient(self, coefficients_TR6: Tensor) -> None:
        """[R, V], where the logits were."""
        last = len(coefficients_TR6) - 1
        for number in range(last, -1, -1):
            if self._plan.terms[number]:
                self._gradient(number, coefficients_TR6[number])
            if self._plan.terms[number] and number < last:
                self._q_RV[last].add_(self._q_RV[number])

    def _gradient(self, number: int, columns_R6: Tensor) -> None:
        plan, f = self._plan, columns_R6[:, :, None].unbind(1)
        p_RV, q_RV = self._teacher.p_RV[number], self._q_RV[number]
        factor = f[CONSTANT]
        if plan.has(*_OF_RATIO):
            x_RV = self._x_RV[number]
            factor = factor + f[TIMES_X] * x_RV + f[TIMES_Y] * _to_middle(x_RV)
        q_RV.mul_(factor)
        if plan.has(*_OF_OVERLAP):
            q_RV.addcmul_(self._below_RV[number], f[WHERE_BELOW])
        if plan.has("kl", "lk_hybrid"):
            q_RV.addcmul_(p_RV, f[TIMES_P], value=-1.0)
        if plan.has("ce"):
            q_RV.scatter_add_(-1, self.best_R.clamp_min(0)[:, None], -f[AT_BEST])


def _to_middle(x: Tensor) -> Tensor:
    """log q / m of x = log q / p, with m = (p + q) / 2; of -x it is log p / m."""
    return LOG_2 - torch.nn.functional.softplus(-x)
