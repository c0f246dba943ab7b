"""Fused loss in two Triton kernels, for CUDA: no float32 copy of any logits, and the gradient in their place.

Shapes: T temperatures, R rows, C teacher positions that row r shares as r % C, V draft vocabulary.

A program takes one row and passes over the vocabulary in blocks: `_stats` twice (log sum exp online, then the sums that
need it), `_gradient` once; fused_torch.py has the formulas. Logits are bfloat16 or float32; every sum and all
arithmetic is float32, and only the gradient is rounded, to the dtype of the draft's logits.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...data.teacher_logprobs import FLOOR
from .fused_torch import COEFFICIENTS, LOG_2, STATS
from .objectives import FullDistribution
from .schedule import LossPlan

_BLOCK = 2048
_WARPS = 8


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _to_middle(x, log_2):  # type: ignore[no-untyped-def]
    """log(q / m) given x = log(q / p), with m = (p + q) / 2; given -x it is log(p / m)."""
    # log 2 - softplus(-x), in the form that does not overflow.
    return log_2 - tl.maximum(-x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit(do_not_specialize=["rows", "positions"])  # type: ignore[untyped-decorator,unused-ignore]
def _stats(  # type: ignore[no-untyped-def]
    draft_ptr,
    target_ptr,
    scale_ptr,
    lse_ptr,
    best_ptr,
    out_ptr,
    rows,
    positions,
    vocabulary,
    floor: tl.constexpr,
    log_2: tl.constexpr,
    width: tl.constexpr,
    middle: tl.constexpr,
    block: tl.constexpr,
):
    """Statistics of one row at one temperature, in the columns of fused_torch.py."""
    # Where this program's row, teacher position and temperature lie. 64-bit offsets: R x V may exceed 2^31.
    row = tl.program_id(0)
    number = tl.program_id(1)
    position = row % positions
    draft = draft_ptr + row.to(tl.int64) * vocabulary
    target = target_ptr + position.to(tl.int64) * vocabulary
    scale = tl.load(scale_ptr + number)
    lse_p = tl.load(lse_ptr + number * positions + position)
    best = tl.load(best_ptr + position)
    lanes = tl.arange(0, block)

    # 1) log sum exp of the draft's row, online, one a lane: lanes meet once, behind the last block
    top_of = tl.full([block], -1e30, tl.float32)
    total_of = tl.zeros([block], tl.float32)
    for start in range(0, vocabulary, block):
        at = start + lanes
        u = tl.load(draft + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32) * scale
        # The larger one of two terms counts as 1, so only the smaller one's exponential is computed.
        rise = u - top_of
        least = tl.exp(-tl.abs(rise))
        total_of = tl.where(rise > 0.0, total_of * least + 1.0, total_of + least)
        top_of = tl.maximum(top_of, u)
    top = tl.max(top_of, 0)
    lse_q = top + tl.log(tl.sum(total_of * tl.exp(top_of - top), 0))

    # 2) sums over the vocabulary, one a lane
    alpha = tl.zeros([block], tl.float32)
    below = tl.zeros([block], tl.float32)
    mass = tl.zeros([block], tl.float32)
    kl = tl.zeros([block], tl.float32)
    reverse = tl.zeros([block], tl.float32)
    js_p = tl.zeros([block], tl.float32)
    js_q = tl.zeros([block], tl.float32)
    for start in range(0, vocabulary, block):
        at = start + lanes
        inside = at < vocabulary
        u = tl.load(draft + at, mask=inside, other=-float("inf")).to(tl.float32) * scale
        v = tl.load(target + at, mask=inside, other=-float("inf")).to(tl.float32) * scale
        # Where both are at the floor, past the end too, p = q = 0 and x = 0: nothing is added.
        logq = tl.maximum(u - lse_q, floor)
        logp = tl.maximum(v - lse_p, floor)
        q = tl.exp(logq)
        p = tl.exp(logp)
        x = logq - logp
        alpha += tl.minimum(p, q)
        below += tl.where(x < 0.0, q, 0.0)
        mass += p
        kl -= p * x
        reverse += q * x
        if middle:
            js_p += p * _to_middle(-x, log_2)
            js_q += q * _to_middle(x, log_2)

    # 3) the target's likeliest token, and all columns in their order
    known = best >= 0
    u_best = tl.load(draft + tl.maximum(best, 0)).to(tl.float32) * scale
    out = out_ptr + (number.to(tl.int64) * rows + row) * width
    tl.store(out + 0, lse_q)
    tl.store(out + 1, tl.sum(alpha, 0))
    tl.store(out + 2, tl.sum(below, 0))
    tl.store(out + 3, tl.sum(mass, 0))
    tl.store(out + 4, tl.sum(kl, 0))
    tl.store(out + 5, tl.where(known, u_best - lse_q, 0.0))
    tl.store(out + 6, tl.where(known & (u_best >= top), 1.0, 0.0))
    tl.store(out + 7, tl.sum(reverse, 0))
    tl.store(out + 8, tl.sum(js_p, 0))
    tl.store(out + 9, tl.sum(js_q, 0))


@triton.jit(do_not_specialize=["rows", "positions"])  # type: ignore[untyped-decorator,unused-ignore]
def _gradient(  # type: ignore[no-untyped-def]
    draft_ptr,
    target_ptr,
    scale_ptr,
    lse_ptr,
    best_ptr,
    stats_ptr,
    coefficients_ptr,
    rows,
    positions,
    vocabulary,
    floor: tl.constexpr,
    log_2: tl.constexpr,
    stats_width: tl.constexpr,
    width: tl.constexpr,
    middle: tl.constexpr,
    first: tl.constexpr,
    temperatures: tl.constexpr,
    block: tl.constexpr,
):
    """Gradient of one row, summed over temperatures from `first` on, written over its logits."""
    # Where this program's row and teacher position lie.
    row = tl.program_id(0)
    position = row % positions
    draft = draft_ptr + row.to(tl.int64) * vocabulary
    target = target_ptr + position.to(tl.int64) * vocabulary
    best = tl.load(best_ptr + position)
    lanes = tl.arange(0, block)

    # Each block is read before it is overwritten, and no other program reads it: the gradient goes in its place.
    for start in range(0, vocabulary, block):
        at = start + lanes
        inside = at < vocabulary
        z = tl.load(draft + at, mask=inside, other=-float("inf")).to(tl.float32)
        t = tl.load(target + at, mask=inside, other=-float("inf")).to(tl.float32)
        # All temperatures of this block; their number is fixed at compilation, so the loop is unrolled.
        gradient = tl.zeros([block], tl.float32)
        for number in tl.static_range(first, temperatures):
            scale = tl.load(scale_ptr + number)
            line = number * rows + row
            # log q and log p from the stored log sum exps, with the same floor as in `_stats`.
            logq = tl.maximum(z * scale - tl.load(stats_ptr + line.to(tl.int64) * stats_width), floor)
            logp = tl.maximum(t * scale - tl.load(lse_ptr + number * positions + position), floor)
            x = logq - logp

            # q (f_0 + f_1 1[q < p] + f_4 x + f_5 y) - f_2 p - f_3 onehot(best), see fused_torch.py.
            f = coefficients_ptr + line.to(tl.int64) * width
            factor = tl.load(f) + tl.where(x < 0.0, tl.load(f + 1), 0.0) + tl.load(f + 4) * x
            if middle:
                factor += tl.load(f + 5) * _to_middle(x, log_2)
            gradient += tl.exp(logq) * factor - tl.load(f + 2) * tl.exp(logp)
            gradient -= tl.where(at == best, tl.load(f + 3), 0.0)
        tl.store(draft + at, gradient.to(draft_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["vocabulary"])  # type: ignore[untyped-decorator,unused-ignore]
def _summary(  # type: ignore[no-untyped-def]
    logits_ptr, lse_ptr, best_ptr, vocabulary, block: tl.constexpr
):
    """log sum exp of one row, and the index of its largest logit."""
    # One sweep: an online log sum exp, and the first index of the largest logit so far.
    row = tl.program_id(0)
    logits = logits_ptr + row.to(tl.int64) * vocabulary
    lanes = tl.arange(0, block)
    top = tl.full([], -float("inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    best = tl.full([], 0, tl.int32)
    for start in range(0, vocabulary, block):
        at = start + lanes
        z = tl.load(logits + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
        largest = tl.max(z, 0)
        if largest > top:
            best = start + tl.argmax(z, 0)
        higher = tl.maximum(top, largest)
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(z - higher), 0)
        top = higher
    tl.store(lse_ptr + row, top + tl.log(total))
    tl.store(best_ptr + row, best.to(tl.int64))


def summarize(logits_CV: Tensor) -> tuple[Tensor, Tensor]:
    """log sum exp [C], float32, and index of the largest logit [C], of rows of logits."""
    count, vocabulary = logits_CV.shape
    lse_C = torch.empty(count, device=logits_CV.device)
    best_C = torch.empty(count, dtype=torch.int64, device=logits_CV.device)
    # An empty grid cannot be launched.
    if count:
        _summary[(count,)](logits_CV.contiguous(), lse_C, best_C, vocabulary, block=_BLOCK, num_warps=_WARPS)
    return lse_C, best_C


@lru_cache
def _scales(temperatures: tuple[float, ...], device: torch.device) -> Tensor:
    """[T] 1 / temperature, made once: a copy from the host would wait for the device."""
    return torch.tensor([1.0 / t for t in temperatures], device=device)


class TritonPass:
    """Pass in Triton over logits [R, V], which it overwrites with their gradient."""

    def __init__(self, logits_RV: Tensor, whole: FullDistribution, plan: LossPlan) -> None:
        # Row r = s * C + c reads teacher position c.
        self._rows, vocabulary = logits_RV.shape
        best_C = whole.best_C.contiguous()
        self.best_R = best_C.repeat(self._rows // len(best_C))
        self._plan = plan

        # What both kernels read. Rows are found by their offset: the teacher's tensors must be contiguous.
        self._scale_T = _scales(tuple(plan.temperatures), logits_RV.device)
        self._read = (logits_RV, whole.logits_CV.contiguous(), self._scale_T, whole.lse_TC.contiguous(), best_C)
        self._sizes = (self._rows, len(best_C), vocabulary)
        self._constants = {
            "floor": FLOOR,
            "log_2": LOG_2,
            "middle": plan.has("jsd"),
            "block": _BLOCK,
            "num_warps": _WARPS,
        }
        self._stats_TRX: Tensor | None = None

    def stats(self) -> Tensor:
        """Statistics of the rows, [T, R, STATS]; kept for `gradient`."""
        temperatures = len(self._scale_T)
        stats_TRX = torch.empty(temperatures, self._rows, STATS, device=self._scale_T.device)
        # One program a row and temperature.
        _stats[(self._rows, temperatures)](*self._read, stats_TRX, *self._sizes, width=STATS, **self._constants)
        self._stats_TRX = stats_TRX
        return stats_TRX

    def gradient(self, coefficients_TR6: Tensor) -> None:
        """Write the gradient over the logits, in their dtype. Called once, after `stats`."""
        assert self._stats_TRX is not None
        # One program a row. Temperature 1 is skipped where no objective has it: it is there for the report alone.
        _gradient[(self._rows,)](
            *self._read,
            self._stats_TRX,
            coefficients_TR6.contiguous(),
            *self._sizes,
            stats_width=STATS,
            width=COEFFICIENTS,
            first=0 if self._plan.terms[0] else 1,
            temperatures=len(self._scale_T),
            **self._constants,
        )
