"""From draft states to the loss, over few positions at a time: logits of all of them never exist together.

Shapes: S steps ahead, N supervised positions, C positions of a chunk, H hidden size, V draft vocabulary, J entries.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..specdec.models import CausalModel, head_arithmetic
from .objectives import Entries, LogProbsAt, acceptance, weighted_loss

LOSS, ALPHA, AGREE, COUNT = range(4)
"""Columns of the sums that `head_loss` returns: loss, sum of min(p, q), equal likeliest tokens, positions."""


class Teacher(Protocol):
    """The target's distribution at N supervised positions."""

    def entries(self, rows: slice) -> tuple[Entries, Tensor | None]:
        """Some positions' entries, and their ids in the draft's vocabulary (None: all of it, in order)."""
        ...


class Head(NamedTuple):
    """A linear head, given as tensors so that its gradient can be made by hand."""

    weight_VH: Tensor
    bias_V: Tensor | None = None
    finish: Callable[[Tensor], Tensor] | None = None
    """What the model does to its logits after the matrix product (scale, soft-cap)."""

    def logits(self, states: Tensor) -> Tensor:
        """The plain way: [..., H] -> [..., V]."""
        logits = torch.nn.functional.linear(states, self.weight_VH, self.bias_V)
        return logits if self.finish is None else self.finish(logits)

    def only(self, ids: Tensor) -> "Head":
        """The same head with these rows."""
        return Head(self.weight_VH[ids], None if self.bias_V is None else self.bias_V[ids], self.finish)


def head_of(model: CausalModel) -> Head:
    """A transformers model's head with its own scale and soft-cap."""
    linear = model.model.get_output_embeddings()
    scale, softcap = head_arithmetic(model.config)

    def finish(logits: Tensor) -> Tensor:
        scaled = logits * scale
        return scaled if softcap is None else softcap * torch.tanh(scaled / softcap)

    plain = scale == 1.0 and softcap is None
    return Head(linear.weight, getattr(linear, "bias", None), None if plain else finish)


@dataclass(frozen=True)
class Rows:
    """What one micro-batch trains: draft states against teacher positions."""

    states_SNH: Tensor
    """Row n at step s drafts the token whose teacher is position n."""
    valid_SN: Tensor | None
    """False: step s has no draft for position n (too near the start); None: all are valid."""
    teacher: Teacher
    step_weights: tuple[float, ...] = (1.0,)
    beside: Tensor | None = None
    """A loss of another kind, summed over the supervised positions; what it counts for is the family's to say."""

    def of_step(self, step: int) -> "Rows":
        """One step alone."""
        at = slice(step, step + 1)
        valid_1N = None if self.valid_SN is None else self.valid_SN[at]
        return replace(self, states_SNH=self.states_SNH[at], valid_SN=valid_1N, step_weights=self.step_weights[at])


@dataclass(frozen=True)
class LossSettings:
    """How `head_loss` computes."""

    objective: Mapping[str, float]
    lk_eta: float = 3.0
    dtype: torch.dtype = torch.float32
    """Of the matrix products; all else is float32."""
    logits_bytes: int = 1 << 28


def each_head(head: Head | Sequence[Head]) -> Sequence[Head]:
    """The heads, whether there is one for all steps or one a step."""
    return [head] if isinstance(head, Head) else head


def head_loss(rows: Rows, head: Head | Sequence[Head], settings: LossSettings) -> tuple[Tensor, Tensor]:
    """Loss, summed over positions and weighted steps, and detached sums [S, 4] (see LOSS ...).

    `head`: of all steps, or one a step.
    """
    if not isinstance(head, Head):
        parts = [head_loss(rows.of_step(step), one, settings) for step, one in enumerate(head)]
        return torch.stack([loss for loss, _ in parts]).sum(), torch.cat([sums for _, sums in parts])
    return _HeadLoss.apply(rows.states_SNH, head.weight_VH, head.bias_V, rows, head, settings)  # type: ignore[no-any-return, no-untyped-call]


class _HeadLoss(torch.autograd.Function):
    """Gradients are made in the forward pass, chunk by chunk: three matrix products and no recomputation."""

    @staticmethod
    def forward(
        ctx: Any,
        states_SNH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        rows: Rows,
        head: Head,
        settings: LossSettings,
    ) -> tuple[Tensor, Tensor]:
        steps, positions, _ = states_SNH.shape
        weight = weight_VH.detach().to(settings.dtype)
        want_states, want_weight, want_bias = ctx.needs_input_grad[:3]
        grad_states = torch.zeros_like(states_SNH, dtype=torch.float32) if want_states else None
        grad_weight = torch.zeros_like(weight_VH, dtype=torch.float32) if want_weight else None
        grad_bias = torch.zeros_like(bias_V, dtype=torch.float32) if bias_V is not None and want_bias else None
        sums_S4 = torch.zeros(steps, 4, device=states_SNH.device)
        chunk = max(1, settings.logits_bytes // (4 * weight_VH.shape[0]))
        with torch.autocast(states_SNH.device.type, enabled=False):
            for start in range(0, positions, chunk):
                at = slice(start, start + chunk)
                entries, ids_CJ = rows.teacher.entries(at)
                for step in range(steps):
                    states_CH = states_SNH[step, at].to(settings.dtype)
                    logits_CV = torch.nn.functional.linear(states_CH, weight).float()
                    if bias_V is not None:
                        logits_CV += bias_V
                    valid_C = None if rows.valid_SN is None else rows.valid_SN[step, at]
                    sums_4, grad_CV = _loss_and_gradient(
                        logits_CV, entries, ids_CJ, valid_C, rows.step_weights[step], head.finish, settings
                    )
                    sums_S4[step] += sums_4
                    grad = grad_CV.to(settings.dtype)
                    if grad_states is not None:
                        grad_states[step, at] = grad @ weight
                    if grad_weight is not None:
                        _add_product(grad_weight, grad.T, states_CH)
                    if grad_bias is not None:
                        grad_bias += grad_CV.sum(0)
        weights_S = torch.tensor(rows.step_weights, device=sums_S4.device)
        ctx.save_for_backward(grad_states, grad_weight, grad_bias)
        ctx.dtypes = (states_SNH.dtype, weight_VH.dtype)
        ctx.mark_non_differentiable(sums_S4)
        return (sums_S4[:, LOSS] * weights_S).sum(), sums_S4

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_states, grad_weight, grad_bias = ctx.saved_tensors
        states_dtype, weight_dtype = ctx.dtypes
        return (
            None if grad_states is None else (grad_states * grad_loss).to(states_dtype),
            None if grad_weight is None else (grad_weight * grad_loss).to(weight_dtype),
            None if grad_bias is None else (grad_bias * grad_loss).to(weight_dtype),
            None,
            None,
            None,
        )


def _loss_and_gradient(
    logits_CV: Tensor,
    entries: Entries,
    ids_CJ: Tensor | None,
    valid_C: Tensor | None,
    step_weight: float,
    finish: Callable[[Tensor], Tensor] | None,
    settings: LossSettings,
) -> tuple[Tensor, Tensor]:
    """Sums [4] of a chunk at one step, and the gradient of the weighted loss on its raw logits. Uses up `logits_CV`."""
    with torch.enable_grad():
        raw_CV = logits_CV.detach().requires_grad_()
        final_CV = raw_CV if finish is None else finish(raw_CV)
        logq_CJ, top_C, best_C = _log_probs(final_CV, entries, ids_CJ)
        loss_C = weighted_loss(settings.objective, entries, logq_CJ, settings.lk_eta)
        if valid_C is not None:
            loss_C = torch.where(valid_C, loss_C, 0.0)
        loss = loss_C.sum()
        (grad_CV,) = torch.autograd.grad(loss * step_weight, raw_CV)
    valid_C = torch.ones_like(top_C, dtype=torch.bool) if valid_C is None else valid_C
    agree_C = (entries.best_N >= 0) & (best_C >= top_C)
    alpha_C = acceptance(entries, logq_CJ.detach())
    sums = [loss.detach(), (alpha_C * valid_C).sum(), (agree_C & valid_C).sum(), valid_C.sum()]
    return torch.stack([value.float() for value in sums]), grad_CV


def _log_probs(logits_CV: Tensor, entries: Entries, ids_CJ: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """log q of the entries [C, J]; the largest logit of each row and the logit of the target's likeliest token, [C]."""
    best_C1 = entries.best_N[:, None].clamp_min(0)
    if ids_CJ is None:
        final = logits_CV.detach()
        return logits_CV.log_softmax(-1), final.amax(-1), final.gather(-1, best_C1)[:, 0]
    best_C = logits_CV.detach().gather(-1, ids_CJ.gather(-1, best_C1))[:, 0]
    # A copy where autograd still needs the logits themselves (a soft-cap saved them).
    fresh = logits_CV if logits_CV.is_leaf else logits_CV.clone()
    logq_CJ, top_C = LogProbsAt.apply(fresh, ids_CJ)  # type: ignore[no-untyped-call]
    return logq_CJ, top_C, best_C


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in place where the dtypes allow."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
