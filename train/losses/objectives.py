"""What a draft is trained to minimise, at one position.

Shapes: N positions, J vocabulary entries that stand for the teacher's p, k top ids, M tail draws, V vocabulary.

Every expectation over p is a weighted sum over entries: E_p[f] = sum_j weight_j f(entry_j). With the stored signals the
entries are the top k (weight p) and the tail draws (weight (1 - P_k) / M), which is unbiased; with a live target they
are the whole draft vocabulary (weight p). p is never renormalised: what a reduced vocabulary leaves out of the sum
counts as rejected in `tv` and `lk`, and pulls nowhere in `kl`, `ce` and `reverse_kl`. Objectives that are no such
expectation (FULL) need the live target.

These functions say what each objective is. Stored signals are trained with them as they are; with a live target, value
and gradient come from closed_form.py, which the tests hold against autograd of these.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ...data.teacher_logprobs import Signals


class Entries(NamedTuple):
    """The teacher at N positions."""

    logp_NJ: Tensor
    weight_NJ: Tensor
    best_N: Tensor
    """Which entry is the target's likeliest token; -1 where the draft's vocabulary lacks it."""


Objective = Callable[..., Tensor]
"""(entries, log q of each entry [N, J]) -> loss [N]."""


def kl(entries: Entries, logq_NJ: Tensor) -> Tensor:
    """sum p (log p - log q): the gradient on the logits is q - p."""
    return (entries.weight_NJ * (entries.logp_NJ - logq_NJ)).sum(-1)


def ce(entries: Entries, logq_NJ: Tensor) -> Tensor:
    """-log q(argmax p): what the greedy rule accepts; 0 where the draft cannot say that token."""
    best_N1 = entries.best_N[:, None]
    picked_N = logq_NJ.gather(-1, best_N1.clamp_min(0))[:, 0]
    return torch.where(entries.best_N >= 0, -picked_N, 0.0)


def tv(entries: Entries, logq_NJ: Tensor) -> Tensor:
    """1 - alpha, the rejection rate of the `token` rule; gradients vanish at low overlap, so start from kl."""
    return 1.0 - acceptance(entries, logq_NJ)


def reverse_kl(entries: Entries, logq_NJ: Tensor) -> Tensor:
    """sum q (log q - log p): seeks the modes that q has mass for already."""
    return (logq_NJ.exp() * (logq_NJ - entries.logp_NJ)).sum(-1)


def jsd(entries: Entries, logq_NJ: Tensor) -> Tensor:
    """(KL(p, m) + KL(q, m)) / 2 with m = (p + q) / 2; between 0 and log 2."""
    logm_NJ = torch.logaddexp(entries.logp_NJ, logq_NJ) - _LOG_2
    of_p_NJ = entries.weight_NJ * (entries.logp_NJ - logm_NJ)
    of_q_NJ = logq_NJ.exp() * (logq_NJ - logm_NJ)
    outside_N = (1.0 - entries.weight_NJ.sum(-1)).clamp_min(0.0) * _LOG_2  # there m = p / 2
    return 0.5 * ((of_p_NJ + of_q_NJ).sum(-1) + outside_N)


def lk(entries: Entries, logq_NJ: Tensor) -> Tensor:
    """-log alpha: the steeper, the less is accepted."""
    return -torch.minimum(entries.logp_NJ, logq_NJ).logsumexp(-1)


def lk_hybrid(entries: Entries, logq_NJ: Tensor, eta: float = 3.0) -> Tensor:
    """l kl + (1 - l) tv with l = exp(-eta alpha), by position: kl where little is accepted, then the rejection rate."""
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
CHAINED = "expected_length"
"""The one that no single position has: minus the tokens that a round emits in expectation (see chains.py)."""
FULL = frozenset({"reverse_kl", "jsd", "lk", "lk_hybrid", CHAINED})
"""Objectives that need the target's whole distribution."""
_LOG_2 = math.log(2.0)


def acceptance(entries: Entries, logq_NJ: Tensor) -> Tensor:
    """alpha = sum min(p, q) = E_p[min(1, q / p)]."""
    ratio_NJ = (logq_NJ - entries.logp_NJ).clamp(max=0.0).exp()
    return (entries.weight_NJ * ratio_NJ).sum(-1)


def weighted_loss(weights: Mapping[str, float], entries: Entries, logq_NJ: Tensor, eta: float = 3.0) -> Tensor:
    """The recipe's weighted sum of objectives, [N]. `eta`: of `lk_hybrid`."""
    options = {"lk_hybrid": {"eta": eta}}
    terms = [weight * OBJECTIVES[name](entries, logq_NJ, **options.get(name, {})) for name, weight in weights.items()]
    return torch.stack(terms).sum(0)


def stored_entries(signals: Signals) -> tuple[Entries, Tensor]:
    """Entries of the stored signals, and their ids [N, J], J = k + M.

    Where a capture kept no draws (M = 0), what lies beyond the top k is left out as a reduced vocabulary leaves it out.
    """
    draws = signals.tail_ids_nM.shape[-1]
    tail_weight_n1 = signals.tail_logmass_n.exp()[:, None] / max(1, draws)
    weight_NJ = torch.cat([signals.topk_logp_nk.exp(), tail_weight_n1.expand(-1, draws)], dim=-1)
    logp_NJ = torch.cat([signals.topk_logp_nk, signals.tail_logp_nM], dim=-1)
    ids_NJ = torch.cat([signals.topk_ids_nk, signals.tail_ids_nM], dim=-1).long()
    best_N = signals.topk_logp_nk.argmax(-1)
    return Entries(logp_NJ.float(), weight_NJ.float(), best_N), ids_NJ


def live_entries(logits_NJ: Tensor, lse_N: Tensor, best_N: Tensor) -> Entries:
    """Entries of the target's own logits of the draft's tokens.

    `lse` is that of all its logits: what the draft cannot say keeps its share of p.
    """
    logp_NJ = logits_NJ.float() - lse_N[:, None]
    return Entries(logp_NJ, logp_NJ.exp(), best_N)


def places(ids_N: Tensor, draft_ids: Tensor | None) -> Tensor:
    """Where target ids stand in the draft's vocabulary (`draft_ids`, ascending; None: all of it); -1: nowhere."""
    if draft_ids is None:
        return ids_N
    place_N = torch.searchsorted(draft_ids, ids_N).clamp(max=len(draft_ids) - 1)
    return torch.where(draft_ids[place_N] == ids_N, place_N, -1)


class LogProbsAt(torch.autograd.Function):
    """log softmax(logits) [N, V] at chosen ids [N, J], and each row's largest logit, without a second [N, V] buffer.

    Uses up `logits`: its storage holds exp(logits - max) for the backward pass, which may run once.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, logits_NV: Tensor, ids_NJ: Tensor) -> tuple[Tensor, Tensor]:
        chosen_NJ = logits_NV.gather(-1, ids_NJ)
        top_N = logits_NV.amax(-1)
        exp_NV = logits_NV.sub_(top_N[:, None]).exp_()
        sum_N = exp_NV.sum(-1)
        ctx.exp_NV, ctx.sum_N, ctx.ids_NJ = exp_NV, sum_N, ids_NJ  # type: ignore[attr-defined]
        ctx.mark_non_differentiable(top_N)
        return chosen_NJ - (top_N + sum_N.log())[:, None], top_N

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad_NJ: Tensor, _: Tensor) -> tuple[Tensor, None]:
        scale_N = -grad_NJ.sum(-1) / ctx.sum_N  # type: ignore[attr-defined]
        grad_NV = ctx.exp_NV.mul_(scale_N[:, None])  # type: ignore[attr-defined]
        return grad_NV.scatter_add_(-1, ctx.ids_NJ, grad_NJ), None  # type: ignore[attr-defined]
