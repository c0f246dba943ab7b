"""Loss of a linear head in chunks, from draft states: logits of all positions never exist together.

Shapes: S rows of states a position (steps ahead, mostly), N supervised positions, R rows of a chunk, H hidden size,
V draft vocabulary, J entries, K steps ahead.

For each chunk the head's logits are made, then the gradient on them: by autograd of the definitions (objectives.py), or
in closed form under a live teacher (on CUDA and under a plain linear head fused_triton.py; for kl, ce, tv and lk_hybrid
fused_torch.py). Sums over the vocabulary and the gradient of weights are float32; logits and their
gradient are of the dtype of the matrix products. liger-kernel's distillation losses are no substitute: float32 autograd
through both whole heads, one row of the draft to one of the teacher, the same weight for all rows, and none that knows
the overlap of p and q.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ...specdec.models import CausalModel, head_arithmetic
from . import fused_torch
from .expected_length import ChainLoss, chain_loss, chains_of_steps
from .fused_torch import ChunkPass, TorchPass, TorchTeacher, can_fuse, coefficients
from .objectives import FullDistribution, LossWeights, StoredDistribution, TeacherEntries, acceptance, autograd_loss
from .schedule import CHAINED, LossPlan, Objective


class Teacher(Protocol):
    """Teacher protocol: the target's distribution at N supervised positions."""

    @property
    def live(self) -> bool:
        """Whether `at` returns a FullDistribution (a loaded target) rather than a StoredDistribution."""
        ...

    def at(self, rows: slice, temperatures: Sequence[float]) -> FullDistribution | StoredDistribution:
        """Distribution at the positions `rows`. Stored signals hold temperature 1 only."""
        ...


class Head(NamedTuple):
    """A linear head, given as tensors so that its gradient can be made by hand."""

    weight_VH: Tensor
    bias_V: Tensor | None = None
    finish: Callable[[Tensor], Tensor] | None = None
    """Scale and soft-cap that the model applies to its logits after the matrix product; None: neither."""
    markov_VE: Tensor | None = None
    """Weight on E more features that stand behind the H of each state: those of a Markov head; None: none stand there.
    It is trained where `weight_VH` may be frozen."""

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Weights and bias, each of which may have a gradient."""
        return self.weight_VH, self.bias_V, self.markov_VE

    def whole(self, dtype: torch.dtype) -> Tensor:
        """Weight [V, H + E] on all features of a state."""
        weight_VH = self.weight_VH.to(dtype)
        return weight_VH if self.markov_VE is None else torch.cat([weight_VH, self.markov_VE.to(dtype)], 1)

    def logits(self, states: Tensor) -> Tensor:
        """Logits by plain differentiable torch: [..., H] -> [..., V]."""
        logits = torch.nn.functional.linear(states, self.whole(self.weight_VH.dtype), self.bias_V)
        return logits if self.finish is None else self.finish(logits)

    def only(self, ids: Tensor) -> "Head":
        """Head of a reduced vocabulary: only the rows `ids` of weight and bias."""
        return Head(self.weight_VH[ids], None if self.bias_V is None else self.bias_V[ids], self.finish)


@dataclass(frozen=True)
class Rows:
    """Draft states of one micro-batch, with the teacher positions that they are compared with."""

    states_SNH: Tensor
    """Draft states before the head. Row (s, n) drafts the token whose teacher is position n."""
    valid_SN: Tensor | None
    """Mask of the rows that count. False: no such draft exists (too near the start); None: all rows count."""
    teacher: Teacher
    step_weights: tuple[float, ...] = (1.0,)
    """[K] weight of the loss of a row that is k steps ahead."""
    step_SN: Tensor | None = None
    """Steps ahead of each row, from 0; None: row (s, n) is s steps ahead."""
    chains_KM: Tensor | None = None
    """Rows, s * N + n, that follow each other from one start (see expected_length.py); None: those of the steps."""
    chain_weight: float = 1.0
    """Weight of each chain, where there are fewer chains than positions."""
    extra_loss: Callable[[Tensor], Tensor] | None = None
    """A loss of another kind, summed over the supervised positions, from the acceptance [S, N] of the rows; the
    family's `ExtraLoss` weighs it."""

    def steps(self) -> Tensor:
        """Steps ahead of each row, [S, N]."""
        if self.step_SN is not None:
            return self.step_SN
        steps, positions, _ = self.states_SNH.shape
        return torch.arange(steps, device=self.states_SNH.device)[:, None].expand(-1, positions)

    def valid(self) -> Tensor:
        """Mask of the rows that count, [S, N] bool."""
        if self.valid_SN is not None:
            return self.valid_SN
        return torch.ones(self.states_SNH.shape[:2], dtype=torch.bool, device=self.states_SNH.device)


@dataclass(frozen=True)
class LossSettings:
    """Settings of `head_loss`: the objective, and the precision and memory to compute it in."""

    objective: Objective
    """Objective of the current step."""
    lk_eta: float = 3.0
    """Rate at which lk_hybrid turns from kl to tv as acceptance rises."""
    dtype: torch.dtype = torch.float32
    """Dtype of the matrix products."""
    logits_bytes: int = 1 << 28
    """Memory for the logits of a chunk, in bytes."""


LOSS, ALPHA, AGREE, COUNT = range(4)
"""Columns of the sums that `head_loss` returns: loss, sum of min(p, q), equal likeliest tokens, positions."""
_CACHED = 1 << 18  # entries that a CPU works on at a time: they stay in its cache from the first pass to the last


def head_of(model: CausalModel) -> Head:
    """A transformers model's head with its own scale and soft-cap."""
    linear = model.model.get_output_embeddings()
    scale, softcap = head_arithmetic(model.config)

    def finish(logits: Tensor) -> Tensor:
        scaled = logits * scale
        return scaled if softcap is None else softcap * torch.tanh(scaled / softcap)

    # A head with neither has no `finish`: only then may Triton take it.
    plain = scale == 1.0 and softcap is None
    return Head(linear.weight, getattr(linear, "bias", None), None if plain else finish)


def each_head(head: Head | Sequence[Head]) -> tuple[Head, ...]:
    """Heads as a tuple: the one that all rows share, or one for each s."""
    return (head,) if isinstance(head, Head) else tuple(head)


def head_loss(rows: Rows, head: Head | Sequence[Head], settings: LossSettings) -> tuple[Tensor, Tensor]:
    """Loss, summed over positions and weighted steps, and detached sums [K, 4] (see LOSS ...).

    `head`: one that all rows share, or one for each s. The loss can be differentiated once.
    """
    loss, sums_K4, _ = loss_and_acceptance(rows, head, settings)
    return loss, sums_K4


def loss_and_acceptance(
    rows: Rows, head: Head | Sequence[Head], settings: LossSettings
) -> tuple[Tensor, Tensor, Tensor]:
    """What `head_loss` gives, and the detached acceptance [S, N] of each row, the sum of min(p, q) at temperature 1."""
    heads = each_head(head)
    tensors = [tensor for head in heads for tensor in head.tensors]
    # Heads go in as plain tensors too: autograd sees only those that are arguments.
    return _HeadLoss.apply(rows.states_SNH, rows, heads, settings, *tensors)  # type: ignore[no-any-return, no-untyped-call]


class _HeadLoss(torch.autograd.Function):
    """Autograd function of `head_loss`. The forward pass makes the gradients too, chunk by chunk: three matrix products
    and no recomputation."""

    @staticmethod
    def forward(
        ctx: Any,
        states_SNH: Tensor,
        rows: Rows,
        heads: tuple[Head, ...],
        settings: LossSettings,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Float32 buffers for the gradients that are wanted: inputs 1 to 3 (rows, heads, settings) have none.
        wanted = [ctx.needs_input_grad[0], *ctx.needs_input_grad[4:]]
        gradients = [
            torch.zeros_like(tensor, dtype=torch.float32) if tensor is not None and want else None
            for tensor, want in zip((states_SNH, *tensors), wanted)
        ]

        # Value and gradients together. Autocast is off: the dtype of every product is chosen by hand.
        with torch.autocast(states_SNH.device.type, enabled=False):
            loss, sums_K4, alpha_SN = _sum_chunks(rows, heads, settings, gradients)

        # The gradients for a loss of slope 1 wait for `backward`, which scales them.
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (states_SNH, *tensors)]
        ctx.mark_non_differentiable(sums_K4, alpha_SN)
        return loss, sums_K4, alpha_SN

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        states, *tensors = [  # in place: a head's gradient is as large as the head
            None if gradient is None else gradient.mul_(grad_loss).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes)
        ]
        return (states, None, None, None, *tensors)


def _sum_chunks(
    rows: Rows, heads: Sequence[Head], settings: LossSettings, gradients: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and sums [K, 4] over all chunks, and the acceptance [S, N] of each row; adds to `gradients`: of the states,
    then of each head's tensors."""
    # 1) the objective by temperature, the heads in the dtype of products (shared ones once), weights by step
    device = rows.states_SNH.device
    plan = LossPlan.from_objective(settings.objective, settings.lk_eta)
    by_weight = {id(head.weight_VH): head for head in heads}
    cast = {key: head.whole(settings.dtype).detach() for key, head in by_weight.items()}
    weights = [cast[id(head.weight_VH)] for head in heads]
    weights_K = on_device(rows.step_weights, device)
    step_SN, valid_SN = rows.steps(), rows.valid()
    weight_SN = weights_K[step_SN]
    steps_K1 = torch.arange(len(weights_K), device=device)[:, None]
    sums_K4, alpha_SN = torch.zeros(len(weights_K), 4, device=device), torch.zeros(step_SN.shape, device=device)

    # 2) expected_length reads the acceptance of all rows of a chain before any of them has a gradient
    chained = _chained(rows, heads, weights, settings, plan)

    # 3) value, figures and gradients, chunk by chunk
    for chunk in _chunks(rows, heads, weights, settings, plan):
        weight_R, valid_R = chunk.of(weight_SN), chunk.of(valid_SN)
        slope_R = None if chained is None else chunk.of(chained.slope_SN)
        figures_R4, grad_RV = chunk.loss_and_gradient(plan, LossWeights(weight_R, valid_R, slope_R))
        if chained is not None:
            figures_R4[:, LOSS] += chunk.of(chained.loss_SN) / weight_R  # step weights are none of its business
        alpha_SN[chunk.steps, chunk.at] = figures_R4[:, ALPHA].view(-1, chunk.at.stop - chunk.at.start)
        counted_KR = (chunk.of(step_SN) == steps_K1) & valid_R
        sums_K4 += torch.where(counted_KR[:, :, None], figures_R4, 0.0).sum(1)
        chunk.add_gradients(grad_RV, gradients)
        del grad_RV  # before the next logits come
    return (sums_K4[:, LOSS] * weights_K).sum(), sums_K4, alpha_SN


@lru_cache
def on_device(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Constant tensor on a device, made once: a copy from the host would wait for the device."""
    return torch.tensor(values, device=device)


def _chained(
    rows: Rows, heads: Sequence[Head], weights: Sequence[Tensor], settings: LossSettings, plan: LossPlan
) -> ChainLoss | None:
    """Loss and slope of `expected_length` for all rows, times its weight, by a pass of its own over the logits.

    None where the objective has no such term.
    """
    # At which temperature of the plan it is asked for, if at any.
    number = next((at for at, terms in enumerate(plan.terms) if CHAINED in terms), None)
    if number is None:
        return None

    # A first pass over the logits, without gradients, for the acceptance of every row.
    alpha_SN = torch.zeros(rows.states_SNH.shape[:2], device=rows.states_SNH.device)
    for chunk in _chunks(rows, heads, weights, settings, plan):
        alpha_SN[chunk.steps, chunk.at] = chunk.acceptance(plan, number).view(-1, chunk.at.stop - chunk.at.start)

    # Then the chains, which couple rows of different chunks.
    chains_KM = rows.chains_KM
    if chains_KM is None:
        chains_KM = chains_of_steps(rows.steps(), rows.valid(), len(rows.step_weights))
    found = chain_loss(alpha_SN, chains_KM)
    weight = plan.terms[number][CHAINED] * rows.chain_weight
    return ChainLoss(found.loss_SN * weight, found.slope_SN * weight)


Way = Literal["autograd", "torch", "triton"]


def way_of(rows: Rows, heads: Sequence[Head], plan: LossPlan) -> Way:
    """Choose how the gradient on the logits is made: by autograd, in closed form in torch, or by Triton.

    On an H200 Triton is 3 to 8 times as fast as autograd, in a fifth of the memory; the closed form in torch is 1.1 to
    1.6 times as fast there, in less memory, and on a CPU as fast or a little faster (scripts/bench_loss.py).
    """
    # Stored signals: few entries a row, read by autograd alone.
    if not rows.teacher.live:
        return "autograd"
    # A live teacher: Triton takes plain heads on CUDA; torch takes the objectives whose closed form it knows.
    plain = all(head.bias_V is None and head.finish is None for head in heads)
    if plain and rows.states_SNH.device.type == "cuda" and find_spec("triton") is not None:
        return "triton"
    return "torch" if can_fuse(plan) else "autograd"


def _chunks(
    rows: Rows, heads: Sequence[Head], weights: Sequence[Tensor], settings: LossSettings, plan: LossPlan
) -> "Iterator[_Chunk]":
    """Chunks of all rows, each so large that its logits fit `logits_bytes`."""
    count, positions, _ = rows.states_SNH.shape
    way = way_of(rows, heads, plan)
    # Triton takes all steps of a chunk at once and reads the teacher's logits for all of them.
    together = count if way == "triton" and len(heads) == 1 else 1
    if way == "triton":
        size = settings.logits_bytes // (settings.dtype.itemsize * weights[0].shape[0] * (together + 1))  # + teacher's
    else:
        size = settings.logits_bytes // (4 * weights[0].shape[0])

    # At least one position a chunk, however little memory is set.
    for start in range(0, positions, max(1, size)):
        # the teacher of these positions, worked out once for all steps
        at = slice(start, min(start + max(1, size), positions))
        found = rows.teacher.at(at, plan.temperatures)
        target: FullDistribution | TorchTeacher | TeacherEntries
        if way == "autograd" or isinstance(found, StoredDistribution):
            target = TeacherEntries.from_distribution(found, plan)
        else:
            target = found if way == "triton" else TorchTeacher.from_distribution(found, plan)
        # the draft's rows
        for step in range(0, count, together):
            steps, number = slice(step, step + together), min(step, len(heads) - 1)
            states_RX = rows.states_SNH[steps, at].detach().flatten(0, 1).to(settings.dtype)
            yield _Chunk(steps, at, number, states_RX, heads[number], weights[number], target)


@dataclass(frozen=True)
class _Chunk:
    """Chunk: rows of some steps at some positions, all of one head."""

    steps: slice
    at: slice
    number: int
    """Index of the head."""
    states_RX: Tensor
    head: Head
    weight_VX: Tensor
    """The head's whole weight in the dtype of matrix products."""
    target: FullDistribution | TorchTeacher | TeacherEntries
    """Teacher of these positions, in the form that Triton, the pass in torch, or autograd reads."""

    def of(self, values_SN: Tensor) -> Tensor:
        """Values of this chunk's rows, [R]."""
        return values_SN[self.steps, self.at].flatten()

    def logits(self) -> Tensor:
        """Logits [R, V] of the matrix product, before scale and soft-cap; float32 but for Triton."""
        logits_RV = torch.nn.functional.linear(self.states_RX, self.weight_VX)
        if isinstance(self.target, FullDistribution):
            return logits_RV
        logits_RV = logits_RV.float()
        return logits_RV if self.head.bias_V is None else logits_RV.add_(self.head.bias_V.detach())

    def loss_and_gradient(self, plan: LossPlan, weights: LossWeights) -> tuple[Tensor, Tensor]:
        """Loss (unweighted), acceptance, agreement and 1 of each row [R, 4]; the weighted gradient on the logits."""
        if isinstance(self.target, TeacherEntries):
            return self._by_autograd(self.target, self.logits(), plan, weights)

        # 1) scale and soft-cap, recorded by autograd; a copy of the result becomes the gradient
        with torch.enable_grad():
            raw_RV = self.logits().detach().requires_grad_(self.head.finish is not None)
            final_RV = raw_RV if self.head.finish is None else self.head.finish(raw_RV)
        work_RV = raw_RV if self.head.finish is None else final_RV.detach().clone()

        # 2) statistics, then the loss and coefficients of the gradient, then the gradient over the logits
        figures = []
        for part, chunk_pass in self._passes(work_RV, plan):
            stats_TRX = chunk_pass.stats()
            loss_R, coefficients_TR6 = coefficients(plan, stats_TRX, chunk_pass.best_R, weights.part(part))
            chunk_pass.gradient(coefficients_TR6)
            plain_RX = stats_TRX[0]
            figures.append(_figures(loss_R, plain_RX[:, fused_torch.ALPHA], plain_RX[:, fused_torch.AGREE]))

        # 3) back through scale and soft-cap
        if self.head.finish is not None:
            (work_RV,) = torch.autograd.grad(final_RV, raw_RV, work_RV)
        return torch.cat(figures), work_RV

    def _passes(self, logits_RV: Tensor, plan: LossPlan) -> Iterator[tuple[slice, ChunkPass]]:
        """Passes over the chunk's rows, each with its slice of them; a pass writes its gradient over its logits."""
        if isinstance(self.target, FullDistribution):
            from .fused_triton import TritonPass

            yield slice(0, len(logits_RV)), TritonPass(logits_RV, self.target, plan)
            return
        assert isinstance(self.target, TorchTeacher)
        for part in _cached_parts(logits_RV):
            yield part, TorchPass(logits_RV[part], self.target.part(part), plan)

    def _by_autograd(
        self, teacher: TeacherEntries, logits_RV: Tensor, plan: LossPlan, weights: LossWeights
    ) -> tuple[Tensor, Tensor]:
        """`loss_and_gradient` by autograd of the definitions in objectives.py."""
        stored = teacher.ids_RJ is not None  # its few entries need no parts; log q is made in the logits' place
        figures: list[Tensor] = []
        gradients: list[Tensor] = []
        for part in [slice(0, len(logits_RV))] if stored else _cached_parts(logits_RV):
            # The gradient goes through scale and soft-cap down to the matrix product.
            with torch.enable_grad():
                raw_RV = logits_RV[part].detach().requires_grad_()
                final_RV = raw_RV if self.head.finish is None else self.head.finish(raw_RV)
                if stored and not final_RV.is_leaf:
                    final_RV = final_RV.clone()  # a soft-cap saved them for its own gradient
                loss, *found = autograd_loss(final_RV, teacher.part(part), plan, weights.part(part))
                gradients += torch.autograd.grad(loss, raw_RV)
            figures.append(_figures(*found))
        return torch.cat(figures), gradients[0] if len(gradients) == 1 else torch.cat(gradients)

    def acceptance(self, plan: LossPlan, number: int) -> Tensor:
        """Acceptance alpha [R] at the plan's temperature of index `number`, which `expected_length` reads."""
        logits_RV = self.logits()
        # Triton: its statistics hold alpha.
        if isinstance(self.target, FullDistribution):
            (only,) = self._passes(logits_RV, plan)
            return only[1].stats()[number, :, fused_torch.ALPHA]

        # Autograd: from the definition, without gradients.
        assert isinstance(self.target, TeacherEntries)  # the pass in torch knows no expected_length
        found = []
        for part in _cached_parts(logits_RV):
            final_RV = logits_RV[part] if self.head.finish is None else self.head.finish(logits_RV[part])
            entries = self.target.part(part).by_temperature[number]
            found.append(acceptance(entries, (final_RV / plan.temperatures[number]).log_softmax(-1)))
        return torch.cat(found)

    def add_gradients(self, grad_RV: Tensor, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of the states and of this chunk's head, given the gradient on the logits."""
        grad = grad_RV.to(self.states_RX.dtype)
        states, (weight, bias, markov) = gradients[0], gradients[1 + 3 * self.number :][:3]
        # Each row of states belongs to one chunk: it is written, not added.
        if states is not None:
            states[self.steps, self.at] = (grad @ self.weight_VX).view(states[self.steps, self.at].shape).float()
        # The head's own gradients add up over chunks, in float32.
        H = self.head.weight_VH.shape[1]
        if weight is not None:
            _add_product(weight, grad.T, self.states_RX[:, :H])
        if markov is not None:
            _add_product(markov, grad.T, self.states_RX[:, H:])
        if bias is not None:
            bias += grad_RV.sum(0)


def _cached_parts(logits_RV: Tensor) -> list[slice]:
    """Slices of rows: all of them on a GPU; on a CPU so many at a time as its cache holds."""
    size = len(logits_RV) if logits_RV.is_cuda else max(1, _CACHED // logits_RV.shape[1])
    return [slice(start, start + size) for start in range(0, len(logits_RV), size)]


def _figures(loss_R: Tensor, alpha_R: Tensor, agree_R: Tensor) -> Tensor:
    """Figures of rows, [R, 4], in the columns LOSS, ALPHA, AGREE, COUNT."""
    return torch.stack([loss_R, alpha_R, agree_R, torch.ones_like(loss_R)], dim=-1)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in float32 whatever the factors are."""
    # Float32 factors; bfloat16 on CUDA, whose product can be float32; bfloat16 on a CPU, rounded once a chunk.
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        total += torch.mm(left, right, out_dtype=torch.float32)
    else:
        total += left @ right
