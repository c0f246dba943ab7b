"""From draft states to the loss, over few positions at a time: logits of all of them never exist together.

Shapes: S rows of states a position (steps ahead, mostly), N supervised positions, R rows of a chunk, H hidden size,
V draft vocabulary, J entries, K steps ahead.

Sums over the vocabulary, coefficients and the gradient of weights are float32; logits and their gradient are of the
dtype of the matrix products. On CUDA, where a plain linear head meets a live teacher, Triton kernels sweep the logits
(kernels.py). liger-kernel's distillation losses are no substitute: float32 autograd through both whole heads, one row
of the draft to one of the teacher, the same weight for all rows, and none that knows the overlap of p and q.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...specdec.models import CausalModel, head_arithmetic
from . import fused_torch
from .expected_length import ChainLoss, chain_loss, chains_of_steps
from .fused_torch import ChunkPass, EagerSweep, EagerTeacher, FullDistribution, LossPlan, LossWeights, coefficients
from .objectives import CHAINED, Entries, LogProbsAt, acceptance, weighted_loss
from .schedule import Objective


class Sparse(NamedTuple):
    """The target's distribution at C positions, by some of its entries."""

    entries: Entries
    ids_CJ: Tensor
    """Token ids of the entries."""


class Teacher(Protocol):
    """The target's distribution at N supervised positions."""

    @property
    def live(self) -> bool:
        """Whether `at` gives the whole of it."""
        ...

    def at(self, rows: slice, temperatures: Sequence[float]) -> FullDistribution | Sparse:
        """Some positions' distribution. Stored signals know that of temperature 1 only."""
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


@dataclass(frozen=True)
class Rows:
    """What one micro-batch trains: draft states against teacher positions."""

    states_SNH: Tensor
    """Row (s, n) drafts the token whose teacher is position n."""
    valid_SN: Tensor | None
    """False: there is no such draft (too near the start); None: all are valid."""
    teacher: Teacher
    step_weights: tuple[float, ...] = (1.0,)
    """[K] weight of the loss of a row that is k steps ahead."""
    step_SN: Tensor | None = None
    """How many steps ahead, from 0, a row is; None: row (s, n) is s steps ahead."""
    chains_KM: Tensor | None = None
    """Rows, s * N + n, that follow each other from one start (see chains.py); None: those of the steps."""
    chain_weight: float = 1.0
    """Of each chain, where there are fewer of them than positions."""
    beside: Tensor | None = None
    """A loss of another kind, summed over the supervised positions; what it counts for is the family's to say."""

    def steps(self) -> Tensor:
        """[S, N] steps ahead."""
        if self.step_SN is not None:
            return self.step_SN
        steps, positions, _ = self.states_SNH.shape
        return torch.arange(steps, device=self.states_SNH.device)[:, None].expand(-1, positions)

    def valid(self) -> Tensor:
        """[S, N] bool."""
        if self.valid_SN is not None:
            return self.valid_SN
        return torch.ones(self.states_SNH.shape[:2], dtype=torch.bool, device=self.states_SNH.device)


@dataclass(frozen=True)
class LossSettings:
    """What `head_loss` computes, and how."""

    objective: Objective
    """Of the current step."""
    lk_eta: float = 3.0
    dtype: torch.dtype = torch.float32
    """Of the matrix products."""
    logits_bytes: int = 1 << 28


LOSS, ALPHA, AGREE, COUNT = range(4)
"""Columns of the sums that `head_loss` returns: loss, sum of min(p, q), equal likeliest tokens, positions."""
_CACHED = 1 << 18  # entries that a CPU sweeps at a time: they stay in its cache from the first pass to the last


def head_of(model: CausalModel) -> Head:
    """A transformers model's head with its own scale and soft-cap."""
    linear = model.model.get_output_embeddings()
    scale, softcap = head_arithmetic(model.config)

    def finish(logits: Tensor) -> Tensor:
        scaled = logits * scale
        return scaled if softcap is None else softcap * torch.tanh(scaled / softcap)

    plain = scale == 1.0 and softcap is None
    return Head(linear.weight, getattr(linear, "bias", None), None if plain else finish)


def each_head(head: Head | Sequence[Head]) -> tuple[Head, ...]:
    """The heads, whether all rows share one or each s has its own."""
    return (head,) if isinstance(head, Head) else tuple(head)


def head_loss(rows: Rows, head: Head | Sequence[Head], settings: LossSettings) -> tuple[Tensor, Tensor]:
    """Loss, summed over positions and weighted steps, and detached sums [K, 4] (see LOSS ...).

    `head`: one that all rows share, or one for each s. The loss can be differentiated once.
    """
    heads = each_head(head)
    tensors = [tensor for head in heads for tensor in (head.weight_VH, head.bias_V)]
    return _HeadLoss.apply(rows.states_SNH, rows, heads, settings, *tensors)  # type: ignore[no-any-return, no-untyped-call]


class _HeadLoss(torch.autograd.Function):
    """Gradients are made in the forward pass, chunk by chunk: three matrix products and no recomputation."""

    @staticmethod
    def forward(
        ctx: Any,
        states_SNH: Tensor,
        rows: Rows,
        heads: tuple[Head, ...],
        settings: LossSettings,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        wanted = [ctx.needs_input_grad[0], *ctx.needs_input_grad[4:]]
        gradients = [
            torch.zeros_like(tensor, dtype=torch.float32) if tensor is not None and want else None
            for tensor, want in zip((states_SNH, *tensors), wanted)
        ]
        with torch.autocast(states_SNH.device.type, enabled=False):
            loss, sums_K4 = _run(rows, heads, settings, gradients)
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (states_SNH, *tensors)]
        ctx.mark_non_differentiable(sums_K4)
        return loss, sums_K4

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        states, *tensors = [  # in place: a head's gradient is as large as the head
            None if gradient is None else gradient.mul_(grad_loss).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes)
        ]
        return (states, None, None, None, *tensors)


def _run(
    rows: Rows, heads: Sequence[Head], settings: LossSettings, gradients: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor]:
    """Loss and sums; adds to the gradients of the states and of each head's weight and bias."""
    device = rows.states_SNH.device
    plan = LossPlan.of(settings.objective, settings.lk_eta)
    matrices = {id(head.weight_VH): head.weight_VH for head in heads}  # heads may share one
    cast = {key: matrix.detach().to(settings.dtype) for key, matrix in matrices.items()}
    weights = [cast[id(head.weight_VH)] for head in heads]
    weights_K = on_device(rows.step_weights, device)
    step_SN, valid_SN = rows.steps(), rows.valid()
    weight_SN = weights_K[step_SN]
    steps_K1 = torch.arange(len(weights_K), device=device)[:, None]
    sums_K4 = torch.zeros(len(weights_K), 4, device=device)
    chained = _chained(rows, heads, weights, settings, plan)
    for chunk in _chunks(rows, heads, weights, settings, plan):
        weight_R, valid_R = chunk.of(weight_SN), chunk.of(valid_SN)
        slope_R = None if chained is None else chunk.of(chained.slope_SN)
        logits_RV = chunk.logits()
        figures_R4, grad_RV = chunk.sweep(logits_RV, LossWeights(weight_R, valid_R, slope_R), plan)
        if chained is not None:
            figures_R4[:, LOSS] += chunk.of(chained.loss_SN) / weight_R  # step weights are none of its business
        counted_KR = (chunk.of(step_SN) == steps_K1) & valid_R
        sums_K4 += torch.where(counted_KR[:, :, None], figures_R4, 0.0).sum(1)
        chunk.add_gradients(grad_RV, gradients)
        del logits_RV, grad_RV  # before the next ones come
    return (sums_K4[:, LOSS] * weights_K).sum(), sums_K4


@lru_cache
def on_device(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Made once: a copy from the host would wait for the device."""
    return torch.tensor(values, device=device)


def _chained(
    rows: Rows, heads: Sequence[Head], weights: Sequence[Tensor], settings: LossSettings, plan: LossPlan
) -> ChainLoss | None:
    """`expected_length` of all rows, times its weight, by a pass of its own; None where it is not asked for."""
    if plan.chained is None:
        return None
    alpha_SN = torch.zeros(rows.states_SNH.shape[:2], device=rows.states_SNH.device)
    for chunk in _chunks(rows, heads, weights, settings, plan):
        alpha_SN[chunk.steps, chunk.at] = chunk.overlaps(plan).view(-1, chunk.at.stop - chunk.at.start)
    chains_KM = rows.chains_KM
    if chains_KM is None:
        chains_KM = chains_of_steps(rows.steps(), rows.valid(), len(rows.step_weights))
    found = chain_loss(alpha_SN, chains_KM)
    weight = plan.terms[plan.chained][CHAINED] * rows.chain_weight
    return ChainLoss(found.loss_SN * weight, found.slope_SN * weight)


def fusible(rows: Rows, heads: Sequence[Head]) -> bool:
    """Whether the kernels can do it."""
    plain = all(head.bias_V is None and head.finish is None for head in heads)
    return rows.states_SNH.device.type == "cuda" and find_spec("triton") is not None and rows.teacher.live and plain


def _chunks(
    rows: Rows, heads: Sequence[Head], weights: Sequence[Tensor], settings: LossSettings, plan: LossPlan
) -> "Iterator[_Chunk]":
    """All rows, so many at a time that their logits fit the memory that is set."""
    count, positions, _ = rows.states_SNH.shape
    fused = fusible(rows, heads)
    together = count if fused and len(heads) == 1 else 1
    if fused:
        size = settings.logits_bytes // (settings.dtype.itemsize * weights[0].shape[0] * (together + 1))  # + teacher's
    else:
        size = settings.logits_bytes // (4 * weights[0].shape[0])
    for start in range(0, positions, max(1, size)):
        at = slice(start, min(start + max(1, size), positions))
        target: FullDistribution | Sparse | EagerTeacher = rows.teacher.at(at, plan.temperatures)
        if isinstance(target, FullDistribution) and not fused:
            target = EagerTeacher.of(target, plan)
        for step in range(0, count, together):
            steps, number = slice(step, step + together), min(step, len(heads) - 1)
            states_RH = rows.states_SNH[steps, at].detach().flatten(0, 1).to(settings.dtype)
            yield _Chunk(steps, at, number, states_RH, heads[number], weights[number], target)


@dataclass(frozen=True)
class _Chunk:
    """Rows of some steps at some positions, all of one head."""

    steps: slice
    at: slice
    number: int
    """Which head."""
    states_RH: Tensor
    head: Head
    weight_VH: Tensor
    """The head's, in the dtype of matrix products."""
    target: FullDistribution | Sparse | EagerTeacher

    def of(self, values_SN: Tensor) -> Tensor:
        """The chunk's part, [R]."""
        return values_SN[self.steps, self.at].flatten()

    def logits(self) -> Tensor:
        """[R, V] of the matrix product; float32 but for the kernels."""
        logits_RV = torch.nn.functional.linear(self.states_RH, self.weight_VH)
        if isinstance(self.target, FullDistribution):
            return logits_RV
        logits_RV = logits_RV.float()
        return logits_RV if self.head.bias_V is None else logits_RV.add_(self.head.bias_V.detach())

    def sweep(self, logits_RV: Tensor, weighing: LossWeights, plan: LossPlan) -> tuple[Tensor, Tensor]:
        """Loss (unweighted), acceptance, agreement and 1 of each row [R, 4]; the weighted gradient on the logits."""
        if isinstance(self.target, Sparse):
            return self._sparse(self.target, logits_RV, weighing, plan)
        with torch.enable_grad():
            raw_RV = logits_RV.detach().requires_grad_(self.head.finish is not None)
            final_RV = raw_RV if self.head.finish is None else self.head.finish(raw_RV)
        work_RV = raw_RV if self.head.finish is None else final_RV.detach().clone()
        figures = []
        for part, sweep in self._sweeps(work_RV, plan):
            stats_TRX = sweep.stats()
            loss_R, coefficients_TR6 = coefficients(plan, stats_TRX, sweep.best_R, weighing.part(part))
            sweep.gradient(coefficients_TR6)
            plain_RX = stats_TRX[0]
            one_R = torch.ones_like(loss_R)
            columns = [loss_R, plain_RX[:, fused_torch.ALPHA], plain_RX[:, fused_torch.AGREE], one_R]
            figures.append(torch.stack(columns, dim=-1))
        if self.head.finish is not None:
            (work_RV,) = torch.autograd.grad(final_RV, raw_RV, work_RV)
        return torch.cat(figures), work_RV

    def overlaps(self, plan: LossPlan) -> Tensor:
        """Acceptance [R] where `expected_length` reads it."""
        assert plan.chained is not None
        logits_RV = self.logits()
        final_RV = logits_RV if self.head.finish is None else self.head.finish(logits_RV)
        parts = [sweep.stats()[plan.chained, :, fused_torch.ALPHA] for _, sweep in self._sweeps(final_RV, plan)]
        return torch.cat(parts)

    def _sweeps(self, logits_RV: Tensor, plan: LossPlan) -> Iterator[tuple[slice, ChunkPass]]:
        """The rows, so many at a time as are best; each sweep writes into its part of the logits."""
        if isinstance(self.target, FullDistribution):
            from .fused_triton import FusedSweep

            yield slice(0, len(logits_RV)), FusedSweep(logits_RV, self.target, plan)
            return
        assert isinstance(self.target, EagerTeacher)
        size = len(logits_RV) if logits_RV.is_cuda else max(1, _CACHED // logits_RV.shape[1])
        for start in range(0, len(logits_RV), size):
            part = slice(start, start + size)
            yield part, EagerSweep(logits_RV[part], self.target.part(part), plan)

    def _sparse(
        self, target: Sparse, logits_RV: Tensor, weighing: LossWeights, plan: LossPlan
    ) -> tuple[Tensor, Tensor]:
        """The same from some entries, by autograd over these."""
        entries, ids_RJ = target
        with torch.enable_grad():
            raw_RV = logits_RV.detach().requires_grad_()
            final_RV = raw_RV if self.head.finish is None else self.head.finish(raw_RV)
            place_R1 = ids_RJ.gather(-1, entries.best_N[:, None].clamp_min(0))
            best_R = final_RV.detach().gather(-1, place_R1)[:, 0]
            # A copy where autograd still needs the logits themselves (a soft-cap saved them).
            logq_RJ, top_R = LogProbsAt.apply(final_RV if final_RV.is_leaf else final_RV.clone(), ids_RJ)  # type: ignore[no-untyped-call]
            loss_R = weighted_loss(plan.terms[0], entries, logq_RJ, plan.lk_eta)
            loss_R = torch.where(weighing.valid_R, loss_R, 0.0)
            (grad_RV,) = torch.autograd.grad((loss_R * weighing.weight_R).sum(), raw_RV)
        agree_R = (entries.best_N >= 0) & (best_R >= top_R)
        loss_R = loss_R.detach()
        columns = [loss_R, acceptance(entries, logq_RJ.detach()), agree_R.float(), torch.ones_like(loss_R)]
        return torch.stack(columns, dim=-1), grad_RV

    def add_gradients(self, grad_RV: Tensor, gradients: Sequence[Tensor | None]) -> None:
        """From the gradient on the logits to those of the states and of this chunk's head."""
        grad = grad_RV.to(self.states_RH.dtype)
        states, weight, bias = gradients[0], gradients[1 + 2 * self.number], gradients[2 + 2 * self.number]
        if states is not None:
            states[self.steps, self.at] = (grad @ self.weight_VH).view(states[self.steps, self.at].shape).float()
        if weight is not None:
            _add_product(weight, grad.T, self.states_RH)
        if bias is not None:
            bias += grad_RV.sum(0)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in float32 whatever the factors are."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        total += torch.mm(left, right, out_dtype=torch.float32)
    else:
        total += left @ right
