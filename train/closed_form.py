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

from .objectives import CHAINED
from .phases import Objective, by_temperature

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


class Whole(NamedTuple):
    """The target's whole distribution at C positions."""

    logits_CV: Tensor
    """Of the draft's tokens, in any float dtype; scale and soft-cap are applied."""
    lse_TC: Tensor
    """log sum exp of all its logits, each divided by one temperature: what the draft cannot say keeps its share."""
    best_C: Tensor
    """Which entry is its likeliest token; -1 where the draft's vocabulary lacks it."""


class Sweep(Protocol):
    """Some rows of logits while their gradient is made."""

    best_R: Tensor
    """The teacher's likeliest entries; -1 where there is none."""

    def stats(self) -> Tensor:
        """[T, R, STATS], float32."""
        ...

    def gradient(self, coefficients_TR6: Tensor) -> None:
        """The gradient on the logits, summed over temperatures, in their place. Once, after `stats`."""
        ...


class Plan(NamedTuple):
    """An objective, sorted for the sweeps."""

    temperatures: tuple[float, ...]
    """The first is 1: acceptance is reported there."""
    terms: tuple[Mapping[str, float], ...]
    """Weights of the objectives at each temperature; none at the first where all have another."""
    lk_eta: float

    @classmethod
    def of(cls, objective: Objective, lk_eta: float) -> "Plan":
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


class Weighing(NamedTuple):
    """How much R rows count."""

    weight_R: Tensor
    """Weight of the row's step, of all objectives that look at one row alone."""
    valid_R: Tensor
    """bool: the others count nothing."""
    slope_R: Tensor | None
    """d loss / d alpha of `expected_length`, its weight included."""

    def part(self, at: slice) -> "Weighing":
        """Some of the rows."""
        return Weighing(self.weight_R[at], self.valid_R[at], None if self.slope_R is None else self.slope_R[at])


def coefficients(plan: Plan, stats_TRX: Tensor, best_R: Tensor, weighing: Weighing) -> tuple[Tensor, Tensor]:
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
