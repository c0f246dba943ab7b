"""Fused loss: objectives at rows of logits, with their gradient in closed form, without autograd.

Shapes: T temperatures, R rows, V draft vocabulary.

With q = softmax(z / tau), p the teacher's share of the same entries (their sum P may be below 1: a reduced vocabulary),
alpha = sum min(p, q), x = log q - log p and y = log q / m = log 2 - softplus(-x), the gradients on z / tau are

    kl           P q - p                              ce    q - onehot(best), 0 where the draft cannot say it
    alpha        q (1[q < p] - sum q 1[q < p])        jsd   q (y - sum q y) / 2
    reverse_kl   q (x - sum q x)

and tv, lk, lk_hybrid and expected_length read alpha. So any mix of them is six numbers a row:

    q (f_0 + f_1 1[q < p] + f_4 x + f_5 y) - f_2 p - f_3 onehot(best)

A pass makes `stats` of its rows; `coefficients` turns them into the loss and these numbers; the pass then writes the
gradient over its logits. fused_triton.py has the pass in Triton, for all objectives. Here is the one in torch, for kl,
ce, tv and lk_hybrid: the others gain nothing by it over autograd. What the objectives mean is said in objectives.py,
whose autograd the tests compare both with.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...data.teacher_logprobs import FLOOR
from .objectives import FullDistribution, LossWeights
from .schedule import CHAINED, LossPlan

FUSED = frozenset({"kl", "ce", "tv", "lk_hybrid"})
"""Objectives of the pass in torch."""
LSE, ALPHA, BELOW, MASS, KL, BEST, AGREE, REVERSE, JS_P, JS_Q = range(10)
"""Columns of a row's statistics: log sum exp; sum min(p, q); sum q 1[q < p]; P; kl; log q of the target's likeliest
token, 0 without one; 1 where it is the draft's likeliest too. Of Triton alone: reverse_kl; sum p log p / m; sum q y."""
STATS = 10
CONSTANT, WHERE_BELOW, TIMES_P, AT_BEST, TIMES_X, TIMES_Y = range(6)
"""Columns of a row's coefficients: f_0 to f_5."""
COEFFICIENTS = 6
LOG_2 = math.log(2.0)
ALPHA_FLOOR = 1e-30
"""`lk` takes a smaller overlap for this one, so that 1 / alpha stays finite."""


def can_fuse(plan: LossPlan) -> bool:
    """Whether the pass in torch knows every objective of the plan."""
    return all(name in FUSED for terms in plan.terms for name in terms)


class ChunkPass(Protocol):
    """Pass protocol: rows of logits, for which first statistics are made, then the gradient."""

    best_R: Tensor
    """Index of the teacher's likeliest entry of each row; -1 where there is none."""

    def stats(self) -> Tensor:
        """Statistics of the rows, [T, R, STATS], float32."""
        ...

    def gradient(self, coefficients_TR6: Tensor) -> None:
        """Gradient on the logits, summed over temperatures, in their place. Called once, after `stats`."""
        ...


def coefficients(plan: LossPlan, stats_TRX: Tensor, best_R: Tensor, weights: LossWeights) -> tuple[Tensor, Tensor]:
    """Loss [R] of the objectives that look at one row alone, unweighted, and the gradient's coefficients [T, R, 6],
    weighted; rows that are not valid have zeros."""
    loss_R = torch.zeros_like(weights.weight_R)
    found = []
    for number, (temperature, terms) in enumerate(zip(plan.temperatures, plan.terms)):
        # 1) the loss of this temperature's terms, and its slopes by the figures that they read, times the row's weight
        stats = stats_TRX[number].unbind(-1)
        value_R, slopes = _slopes(terms, stats, plan.lk_eta)
        loss_R = loss_R + value_R
        kl, ce, alpha, reverse, middle = (slope * weights.weight_R for slope in slopes)

        # 2) expected_length reads alpha with a weight of its own; without a likeliest token there is no ce
        if weights.slope_R is not None and CHAINED in terms:
            alpha = alpha + weights.slope_R
        ce = torch.where(best_R >= 0, ce, 0.0)

        # 3) f_0 gathers all terms that are q times a number; logits are z / temperature, hence the division
        constant = kl * stats[MASS] + ce - alpha * stats[BELOW] - reverse * stats[REVERSE] - middle * stats[JS_Q]
        found.append(torch.stack([constant, alpha, kl, ce, reverse, middle], dim=-1) / temperature)
    valid = weights.valid_R
    return torch.where(valid, loss_R, 0.0), torch.where(valid[:, None], torch.stack(found), 0.0)


def _slopes(
    terms: Mapping[str, float], stats: tuple[Tensor, ...], eta: float
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """Loss [R] of these terms, and its derivatives by kl, ce, alpha, reverse_kl and 2 jsd, [R] each."""
    # One branch a term: its part of the loss, and by which figure that part changes.
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
        elif name == "lk_hybrid":  # the share is a constant to the gradient
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


class TorchTeacher(NamedTuple):
    """Teacher of a chunk, worked out once for all steps that read it: tuples by temperature, of R rows each."""

    best_R: Tensor
    """Index of the likeliest entry; -1 where there is none."""
    p_RV: tuple[Tensor, ...]
    """Probabilities of the draft's tokens."""
    negentropy_R: tuple[Tensor, ...]
    """sum p log p."""
    mass_R: tuple[Tensor, ...]
    """sum p, below 1 under a reduced vocabulary."""

    @classmethod
    def from_distribution(cls, whole: FullDistribution, plan: LossPlan) -> "TorchTeacher":
        """Probabilities, their negative entropy and their mass, at every temperature of the plan."""
        p, negentropy, mass = [], [], []
        for temperature, lse_R in zip(plan.temperatures, whole.lse_TC):
            # The floor keeps log p finite where p is 0, as in objectives.py.
            logits_RV = whole.logits_CV.float()
            scaled_RV = logits_RV if temperature == 1.0 else logits_RV / temperature
            logp_RV = (scaled_RV - lse_R[:, None]).clamp_min_(FLOOR)
            p_RV = logp_RV.exp()
            p.append(p_RV)
            negentropy.append(torch.linalg.vecdot(p_RV, logp_RV))
            mass.append(p_RV.sum(-1))
        return cls(whole.best_C, tuple(p), tuple(negentropy), tuple(mass))

    def part(self, at: slice) -> "TorchTeacher":
        """Teacher of the rows `at`."""
        return TorchTeacher(self.best_R[at], *(tuple(tensor[at] for tensor in tensors) for tensors in self[1:]))


class TorchPass:
    """Pass in torch over float32 logits, which it overwrites with q at the last temperature, then with the gradient."""

    def __init__(self, logits_RV: Tensor, teacher: TorchTeacher, plan: LossPlan) -> None:
        self.best_R = teacher.best_R
        self._logits_RV, self._teacher, self._plan = logits_RV, teacher, plan
        self._needs_kl = plan.has("kl", "lk_hybrid")
        self._needs_alpha = plan.has("tv", "lk_hybrid")
        self._q_RV: list[Tensor] = []
        self._below_RV: list[Tensor] = []

    def stats(self) -> Tensor:
        """Statistics [T, R, STATS]. q at the last temperature takes the logits' place; the others are copies."""
        last = len(self._plan.temperatures) - 1
        found = []
        for number, temperature in enumerate(self._plan.temperatures):
            u_RV = self._logits_RV if number == last else self._logits_RV.clone()
            found.append(self._stats(number, u_RV if temperature == 1.0 else u_RV.div_(temperature)))
        return torch.stack(found)

    def _stats(self, number: int, u_RV: Tensor) -> Tensor:
        """Statistics [R, STATS] at one temperature. Turns the scaled logits `u_RV` into q in place, and keeps it."""
        best_R, p_RV, mass_R = self.best_R, self._teacher.p_RV[number], self._teacher.mass_R[number]
        stats = torch.zeros(len(u_RV), STATS, device=u_RV.device)
        stats[:, MASS] = mass_R

        # 1) whether both agree on the likeliest token, read while u still holds the logits
        top_R = u_RV.amax(-1)
        best_u_R = u_RV.gather(-1, best_R.clamp_min(0)[:, None])[:, 0]
        stats[:, AGREE] = ((best_R >= 0) & (best_u_R >= top_R)).float()

        # 2) kl = sum p log p - sum p (u - top) + P log sum exp(u - top): the last term follows when the sum is known
        u_RV.sub_(top_R[:, None])
        if self._needs_kl:
            stats[:, KL] = self._teacher.negentropy_R[number] - torch.linalg.vecdot(p_RV, u_RV)

        # 3) q, in the place of u
        q_RV = u_RV.exp_()
        total_R = q_RV.sum(-1)
        q_RV.mul_(total_R.reciprocal()[:, None])
        self._q_RV.append(q_RV)
        log_total_R = total_R.log()
        if self._needs_kl:
            stats[:, KL] += mass_R * log_total_R
        stats[:, LSE] = top_R + log_total_R
        stats[:, BEST] = torch.where(best_R >= 0, best_u_R - stats[:, LSE], 0.0)

        # 4) the overlap of p and q; where q is below p, its gradient is q's
        stats[:, ALPHA] = torch.minimum(p_RV, q_RV).sum(-1)
        if self._needs_alpha:
            self._below_RV.append(torch.where(q_RV < p_RV, q_RV, 0.0))
            stats[:, BELOW] = self._below_RV[number].sum(-1)
        return stats

    def gradient(self, coefficients_TR6: Tensor) -> None:
        """Gradient [R, V], where the logits were."""
        # q of the last temperature lies in the logits' storage: it goes first, and the others are added to it.
        last = len(coefficients_TR6) - 1
        for number in range(last, -1, -1):
            if self._plan.terms[number]:
                self._gradient(number, coefficients_TR6[number])
            if self._plan.terms[number] and number < last:
                self._q_RV[last].add_(self._q_RV[number])

    def _gradient(self, number: int, columns_R6: Tensor) -> None:
        """Turn q at one temperature into its part of the gradient."""
        # q (f_0 + f_1 1[q < p]) - f_2 p - f_3 onehot(best), in place; terms that no objective has are skipped.
        f = columns_R6[:, :, None].unbind(1)
        q_RV = self._q_RV[number].mul_(f[CONSTANT])
        if self._needs_alpha:
            q_RV.addcmul_(self._below_RV[number], f[WHERE_BELOW])
        if self._needs_kl:
            q_RV.addcmul_(self._teacher.p_RV[number], f[TIMES_P], value=-1.0)
        if self._plan.has("ce"):
            q_RV.scatter_add_(-1, self.best_R.clamp_min(0)[:, None], -f[AT_BEST])
