"""The closed form in plain torch, float32: the path of CPUs, of heads with a bias or soft-cap, and the reference.

Shapes: T temperatures, R rows, V draft vocabulary. Row r has teacher position r.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..data.signals import FLOOR
from .closed_form import (
    AGREE,
    ALPHA,
    AT_BEST,
    BELOW,
    BEST,
    CONSTANT,
    JS_P,
    JS_Q,
    KL,
    LOG_2,
    LSE,
    MASS,
    REVERSE,
    STATS,
    TIMES_P,
    TIMES_X,
    TIMES_Y,
    WHERE_BELOW,
    Plan,
    Whole,
)

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
    def of(cls, whole: Whole, plan: Plan) -> "EagerTeacher":
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

    def __init__(self, logits_RV: Tensor, teacher: EagerTeacher, plan: Plan) -> None:
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
