"""Objectives of draft training at one position: their definitions, and their gradient by autograd.

Shapes: N or R positions, J vocabulary entries that stand for the teacher's p, k top ids, M tail draws, V vocabulary,
T temperatures, C teacher positions.

Every expectation over p is a weighted sum over entries: E_p[f] = sum_j weight_j f(entry_j). With the stored signals the
entries are the top k (weight p) and the tail draws (weight (1 - P_k) / M), which is unbiased; with a live target they
are the whole draft vocabulary (weight p). p is never renormalised: what a reduced vocabulary leaves out of the sum
counts as rejected in `tv` and `lk`, and pulls nowhere in `kl`, `ce` and `reverse_kl`. Objectives that are no such
expectation (FULL) need the live target.

`autograd_loss` differentiates the definitions for any teacher and any mix of objectives. With a live target
fused_torch.py (for kl, ce, tv and lk_hybrid) and fused_triton.py compute the same in fewer passes.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ...data.teacher_logprobs import FLOOR, Signals
from .schedule import CHAINED, LossPlan


class Entries(NamedTuple):
    """Teacher at N positions, as J weighted vocabulary entries."""

    logp_NJ: Tensor
    """log p of each entry."""
    weight_NJ: Tensor
    """Weight of each entry in an expectation over p."""
    best_N: Tensor
    """Index of the entry of the target's likeliest token; -1 where the draft's vocabulary lacks it."""


Objective = Callable[..., Tensor]
"""Definition of an objective: (entries, log q of each entry [N, J]) -> loss [N]."""


def kl(entries: Entries, logq_NJ: Tensor) -> Tensor:
    """KL divergence of q from p, sum p (log p - log q): the gradient on the logits is q - p."""
    return (entries.weight_NJ * (entries.logp_NJ - logq_NJ)).sum(-1)


def ce(entries: Entries, logq_NJ: Tensor) -> Tensor:
    """Cross-entropy of the target's likeliest token, -log q(argmax p): what the greedy rule accepts.

    0 where the draft cannot say that token.
    """
    best_N1 = entries.best_N[:, None]
    picked_N = logq_NJ.gather(-1, best_N1.clamp_min(0))[:, 0]
    return torch.where(entries.best_N >= 0, -picked_N, 0.0)


def tv(entries: Entries, logq_NJ: Tensor) -> Tensor:
    """Total variation, 1 - alpha: the `token` rule's rejection rate. Its gradient vanishes at low overlap."""
    return 1.0 - acceptance(entries, logq_NJ)


def reverse_kl(entries: Entries, logq_NJ: Tensor) -> Tensor:
    """Reverse KL divergence, sum q (log q - log p): seeks the modes that q has mass for already."""
    return (logq_NJ.exp() * (logq_NJ - entries.logp_NJ)).sum(-1)


def jsd(entries: Entries, logq_NJ: Tensor) -> Tensor:
    """Jensen-Shannon divergence, (KL(p, m) + KL(q, m)) / 2 with m = (p + q) / 2; between 0 and log 2."""
    logm_NJ = torch.logaddexp(entries.logp_NJ, logq_NJ) - _LOG_2
    of_p_NJ = entries.weight_NJ * (entries.logp_NJ - logm_NJ)
    of_q_NJ = logq_NJ.exp() * (logq_NJ - logm_NJ)
    outside_N = (1.0 - entries.weight_NJ.sum(-1)).clamp_min(0.0) * _LOG_2  # there m = p / 2
    return 0.5 * ((of_p_NJ + of_q_NJ).sum(-1) + outside_N)


def lk(entries: Entries, logq_NJ: Tensor) -> Tensor:
    """Negative log of the acceptance, -log alpha: the steeper, the less is accepted."""
    return -torch.minimum(entries.logp_NJ, logq_NJ).logsumexp(-1)


def lk_hybrid(entries: Entries, logq_NJ: Tensor, eta: float = 3.0) -> Tensor:
    """Mix of kl and tv by position, l kl + (1 - l) tv, l = exp(-eta alpha): kl where little is accepted, else tv."""
    share_N = torch.exp(-eta * acceptance(entries, logq_NJ.detach()))
    return share_N * kl(entries, logq_NJ) + (1.0 - share_N) * tv(entries, logq_NJ)


OBJECTIVES: Mapping[str, Objective] = {
    "kl": kl,
    "ce": ce,
    "tv": tv,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "lk": lk,
    "lk_hybrid": lk_hybrid,
}
_LOG_2 = math.log(2.0)


def acceptance(entries: Entries, logq_NJ: Tensor) -> Tensor:
    """Acceptance probability of the `token` rule, alpha = sum min(p, q) = E_p[min(1, q / p)], [N]."""
    ratio_NJ = (logq_NJ - entries.logp_NJ).clamp(max=0.0).exp()
    return (entries.weight_NJ * ratio_NJ).sum(-1)


def weighted_loss(weights: Mapping[str, float], entries: Entries, logq_NJ: Tensor, eta: float = 3.0) -> Tensor:
    """Weighted sum of the recipe's objectives, [N]. `eta`: rate of `lk_hybrid`."""
    options = {"lk_hybrid": {"eta": eta}}
    terms = [weight * OBJECTIVES[name](entries, logq_NJ, **options.get(name, {})) for name, weight in weights.items()]
    return torch.stack(terms).sum(0)


def stored_entries(signals: Signals) -> tuple[Entries, Tensor]:
    """Entries of the stored signals, and their ids [N, J], J = k + M.

    Where a capture kept no draws (M = 0), what lies beyond the top k is left out as a reduced vocabulary leaves it out.
    """
    # The top k weigh their p; the draws share the tail's mass equally, because p drew them.
    draws = signals.tail_ids_nM.shape[-1]
    tail_weight_n1 = signals.tail_logmass_n.exp()[:, None] / max(1, draws)
    weight_NJ = torch.cat([signals.topk_logp_nk.exp(), tail_weight_n1.expand(-1, draws)], dim=-1)

    # Top k first, then draws; the likeliest token is among the top k.
    logp_NJ = torch.cat([signals.topk_logp_nk, signals.tail_logp_nM], dim=-1)
    ids_NJ = torch.cat([signals.topk_ids_nk, signals.tail_ids_nM], dim=-1).long()
    best_N = signals.topk_logp_nk.argmax(-1)
    return Entries(logp_NJ.float(), weight_NJ.float(), best_N), ids_NJ


def live_entries(logits_NJ: Tensor, lse_N: Tensor, best_N: Tensor) -> Entries:
    """Entries from the target's own logits of the draft's tokens.

    `lse_N`: log sum exp of all the target's logits: what the draft cannot say keeps its share of p.
    """
    logp_NJ = (logits_NJ.float() - lse_N[:, None]).clamp_min(FLOOR)
    return Entries(logp_NJ, logp_NJ.exp(), best_N)


def draft_index(ids_N: Tensor, draft_ids: Tensor | None) -> Tensor:
    """Index of target ids in the draft's vocabulary (`draft_ids`, ascending; None: all of it); -1: not in it."""
    if draft_ids is None:
        return ids_N
    index_N = torch.searchsorted(draft_ids, ids_N).clamp(max=len(draft_ids) - 1)
    return torch.where(draft_ids[index_N] == ids_N, index_N, -1)


class FullDistribution(NamedTuple):
    """The target's whole distribution at C positions."""

    logits_CV: Tensor
    """Logits of the draft's tokens, in any float dtype; scale and soft-cap are applied."""
    lse_TC: Tensor
    """log sum exp of all its logits, at each temperature: what the draft cannot say keeps its share."""
    best_C: Tensor
    """Index of its likeliest token in the draft's vocabulary; -1 where that lacks it."""


class StoredDistribution(NamedTuple):
    """The target's distribution at C positions by some of its entries, at temperature 1."""

    entries: Entries
    ids_CJ: Tensor
    """Token ids of the entries."""


class LossWeights(NamedTuple):
    """Weights of R rows in the loss."""

    weight_R: Tensor
    """Weight of the row's step, for all objectives that look at one row alone."""
    valid_R: Tensor
    """Mask, bool: False rows count nothing."""
    slope_R: Tensor | None
    """Derivative of `expected_length` by the row's alpha, its weight included; None: no such term."""

    def part(self, at: slice) -> "LossWeights":
        """Weights of the rows `at`."""
        return LossWeights(self.weight_R[at], self.valid_R[at], None if self.slope_R is None else self.slope_R[at])


class TeacherEntries(NamedTuple):
    """Teacher at R rows, as the definitions read it."""

    by_temperature: tuple[Entries, ...]
    """Entries at each temperature of the plan."""
    ids_RJ: Tensor | None
    """Token ids of the entries; None: entry j is token j of the draft's vocabulary."""

    @classmethod
    def from_distribution(cls, found: FullDistribution | StoredDistribution, plan: LossPlan) -> "TeacherEntries":
        """Entries at every temperature of the plan; stored ones are of temperature 1 alone."""
        if isinstance(found, StoredDistribution):
            return cls((found.entries,), found.ids_CJ)
        logits_CV = found.logits_CV.float()
        entries = (
            live_entries(logits_CV / temperature, lse_C, found.best_C)
            for temperature, lse_C in zip(plan.temperatures, found.lse_TC)
        )
        return cls(tuple(entries), None)

    def part(self, at: slice) -> "TeacherEntries":
        """Entries of the rows `at`."""
        entries = (Entries(*(tensor[at] for tensor in one)) for one in self.by_temperature)
        return TeacherEntries(tuple(entries), None if self.ids_RJ is None else self.ids_RJ[at])


def autograd_loss(
    logits_RV: Tensor, teacher: TeacherEntries, plan: LossPlan, weights: LossWeights
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weighted loss that can be differentiated; then loss (unweighted), acceptance and agreement [R], detached.

    May use up `logits_RV`, as `LogProbsAt` does.
    """
    loss_R, total = torch.zeros_like(weights.weight_R), torch.zeros_like(weights.weight_R).sum()
    # The draft's logit of the target's likeliest token. It is read first: LogProbsAt uses the logits up.
    best_R = teacher.by_temperature[0].best_N
    best_id_R = best_R.clamp_min(0)
    if teacher.ids_RJ is not None:
        best_id_R = teacher.ids_RJ.gather(-1, best_id_R[:, None])[:, 0]
    best_logit_R = logits_RV.detach().gather(-1, best_id_R[:, None])[:, 0]
    alpha_R = top_R = torch.zeros_like(best_logit_R)
    for number, (temperature, terms) in enumerate(zip(plan.temperatures, plan.terms)):
        # 1) log q of the teacher's entries
        entries = teacher.by_temperature[number]
        if teacher.ids_RJ is None:
            scaled_RV = logits_RV if temperature == 1.0 else logits_RV / temperature
            logq_RJ = scaled_RV.log_softmax(-1)
        else:
            logq_RJ, top_R = LogProbsAt.apply(logits_RV, teacher.ids_RJ)  # type: ignore[no-untyped-call]

        # 2) what is reported of the draft, at temperature 1
        if number == 0:
            alpha_R = acceptance(entries, logq_RJ.detach())
            top_R = logits_RV.detach().amax(-1) if teacher.ids_RJ is None else top_R

        # 3) objectives of one row alone, and the acceptance that a chain of rows reads
        alone = {name: weight for name, weight in terms.items() if name != CHAINED}
        if alone:
            loss_R = loss_R + weighted_loss(alone, entries, logq_RJ, plan.lk_eta)
        if CHAINED in terms and weights.slope_R is not None:
            total = total + torch.where(weights.valid_R, weights.slope_R * acceptance(entries, logq_RJ), 0.0).sum()

    # Rows that are not valid count nothing, in the loss and in its gradient.
    loss_R = torch.where(weights.valid_R, loss_R, 0.0)
    agree_R = ((best_R >= 0) & (best_logit_R >= top_R)).float()
    return total + (loss_R * weights.weight_R).sum(), loss_R.detach(), alpha_R, agree_R


class LogProbsAt(torch.autograd.Function):
    """log softmax(logits) [N, V] at chosen ids [N, J], and each row's largest logit, without a second [N, V] buffer.

    Uses up `logits`: its storage holds exp(logits - max) for the backward pass, which may run once.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, logits_NV: Tensor, ids_NJ: Tensor) -> tuple[Tensor, Tensor]:
        # What is wanted is read before the logits are overwritten.
        chosen_NJ = logits_NV.gather(-1, ids_NJ)
        top_N = logits_NV.amax(-1)

        # exp(logits - max), in place.
        exp_NV = logits_NV.sub_(top_N[:, None]).exp_()
        sum_N = exp_NV.sum(-1)
        ctx.exp_NV, ctx.sum_N, ctx.ids_NJ = exp_NV, sum_N, ids_NJ  # type: ignore[attr-defined]
        ctx.mark_non_differentiable(top_N)
        return chosen_NJ - (top_N + sum_N.log())[:, None], top_N

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad_NJ: Tensor, _: Tensor) -> tuple[Tensor, None]:
        # d log q_j / d logits = onehot(j) - softmax, summed over the chosen j by their gradients; softmax = exp / sum.
        scale_N = -grad_NJ.sum(-1) / ctx.sum_N  # type: ignore[attr-defined]
        grad_NV = ctx.exp_NV.mul_(scale_N[:, None])  # type: ignore[attr-defined]
        return grad_NV.scatter_add_(-1, ctx.ids_NJ, grad_NJ), None  # type: ignore[attr-defined]
