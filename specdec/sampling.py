"""Sampling: the distributions that its settings make, and counter-based random numbers that draw from them.

Shapes: N rows (any leading dimensions, none included), V vocabulary, K best tokens, B slots, C numbers for one purpose.
"""

import math
from enum import IntEnum

import torch
from torch import Tensor

from ..errors import InputError
from .sampling_settings import SamplingSettings


def probabilities(logits_NV: Tensor, settings: SamplingSettings, seen_NV: Tensor | None = None) -> Tensor:
    """Sampling distribution [N, V] in fp32 after all processors; greedy: all mass on the (first) best token.

    `seen` (bool, broadcast to the logits) marks the tokens of the prompt and of the answer so far. It must be given
    where there is a repetition penalty, and is not read elsewhere.
    """
    logits_NV = penalised(logits_NV, settings, seen_NV)
    if settings.greedy:
        best_N1 = logits_NV.argmax(-1, keepdim=True)
        return torch.zeros_like(logits_NV, dtype=torch.float32).scatter_(-1, best_N1, 1.0)
    # With the best score at 0, no temperature overflows, and min-p compares scores instead of probabilities.
    scores_NV = logits_NV.float()
    scores_NV = (scores_NV - scores_NV.amax(-1, keepdim=True)) / settings.temperature
    # Top-k, then top-p; the two together need only the k best in order. Dropped tokens get score -inf.
    bounded = 0 < settings.top_k < scores_NV.shape[-1]
    if bounded and settings.top_p < 1.0:
        scores_NV = _keep_top_k_then_p(scores_NV, settings.top_k, settings.top_p)
    elif bounded:
        scores_NV = _keep_top_k(scores_NV, settings.top_k)
    elif settings.top_p < 1.0:
        scores_NV = _keep_top_p(scores_NV, settings.top_p)
    # p / p_best >= min_p, as the best score is 0.
    if settings.min_p > 0.0:
        scores_NV = scores_NV.masked_fill(scores_NV < math.log(settings.min_p), -math.inf)
    return scores_NV.softmax(-1)


def penalised(logits_NV: Tensor, settings: SamplingSettings, seen_NV: Tensor | None) -> Tensor:
    """Logits after the repetition penalty (Keskar et al. 2019, arXiv 1909.05858), in fp32; as they are without one.

    Raises InputError where there is a penalty and `seen` is not given.
    """
    penalty = settings.repetition_penalty
    if penalty == 1.0:
        return logits_NV
    if seen_NV is None:
        raise InputError(f"repetition_penalty {penalty}: must be 1 here, where the tokens seen so far are not known")
    scores_NV = logits_NV.float()
    return torch.where(seen_NV, torch.where(scores_NV < 0, scores_NV * penalty, scores_NV / penalty), scores_NV)


def categorical(p_NV: Tensor, u_N: Tensor | float) -> Tensor:
    """Categorical draw [N] by inversion: the token at which the cumulative mass first exceeds `u` of the whole.

    `u` is float64 in [0, 1). `p` need not be normalised but must have mass. A token of zero probability is never drawn,
    not even where a parallel cumulative sum is off by a rounding.
    """
    u_N = torch.as_tensor(u_N, dtype=torch.float64, device=p_NV.device)
    cumulative_NV = p_NV.double().cumsum(-1)
    possible_NV = p_NV > 0
    exceeds_NV = possible_NV & (cumulative_NV > u_N[..., None] * cumulative_NV[..., -1:])
    first_N = exceeds_NV.to(torch.uint8).argmax(-1)
    # Where rounding leaves no token above u, the last possible one is drawn.
    last_possible_N = p_NV.shape[-1] - 1 - possible_NV.flip(-1).to(torch.uint8).argmax(-1)
    return torch.where(exceeds_NV.any(-1), first_N, last_possible_N)


class Purpose(IntEnum):
    """Purpose of a random number. The values are part of the hash: never renumber them."""

    DRAFT = 0
    """Draws a drafted token from the draft's distribution."""
    ACCEPT = 1
    """Accepts or rejects a drafted token."""
    FINAL = 2
    """Draws the token that ends a round: a correction, a bonus, or the only one of plain decoding."""


def uniforms(seed_B: Tensor, emitted_B: Tensor, purpose: Purpose, count: int) -> Tensor:
    """Random numbers [B, C] in [0, 1), float64, for the round of each slot that starts after `emitted` tokens.

    A hash of (request seed, tokens emitted before this round, purpose, index). A round emits at least one token, so no
    number ever serves two rounds: block and traversal verification look at all of a round's numbers, and one that is
    used again in the next round is wrong by as much as 0.066. None depends on the slot, the batch or the device.
    `seed_B` is any int64, `emitted_B` less than 2**31. Runs on their device and never waits for it.
    """
    if not 0 <= count <= 1 << _INDEX_BITS:
        raise ValueError(f"count: {count}: one purpose has at most {1 << _INDEX_BITS} numbers a round")
    # The counter packs (emitted, purpose, index) into 64 bits: 31, 8 and 24 of them, without overlap.
    index_C = torch.arange(count, dtype=torch.int64, device=seed_B.device)
    which_BC = (emitted_B.long()[:, None] << 32) | (int(purpose) << _INDEX_BITS) | index_C
    # For one seed a bijection of `which`, so nothing repeats; for two seeds no stream is a shift of the other. The
    # constants differ: with equal ones a seed equal to `which` would always give 0.
    bits_BC = _mix(_mix(which_BC + _GOLDEN) ^ _mix(seed_B.long() + _PI)[:, None])
    # The upper 53 bits, as a float64's mantissa holds.
    return _shift_right(bits_BC, 11).double() * 2.0**-53


def _keep_top_k(scores_NV: Tensor, k: int) -> Tensor:
    weakest_N1 = scores_NV.topk(k, dim=-1).values[..., -1:]
    return scores_NV.masked_fill(scores_NV < weakest_N1, -math.inf)


def _keep_top_p(scores_NV: Tensor, top_p: float) -> Tensor:
    # From the least likely up: drop a token while it and all below it hold at most 1 - top_p. The best one stays.
    ascending_NV, order_NV = scores_NV.sort(dim=-1, stable=True)
    drop_NV = ascending_NV.softmax(-1).cumsum(-1) <= 1.0 - top_p
    drop_NV[..., -1] = False
    return scores_NV.masked_fill(torch.zeros_like(drop_NV).scatter_(-1, order_NV, drop_NV), -math.inf)


def _keep_top_k_then_p(scores_NV: Tensor, k: int, top_p: float) -> Tensor:
    """Top-k, then top-p, with only the k best sorted; equal to `_keep_top_k`, then `_keep_top_p`. Best score: 0.

    Any number of tokens may tie with the weakest that top-k keeps, and not all of them are among the k. They weigh the
    same and are dropped in order of their ids, so counting them replaces sorting them.
    """
    # 1) The k best from the least likely up; equals in order of their ids, as a stable sort of all would have them.
    best_NK, id_NK = scores_NV.topk(k, dim=-1)
    weakest_N1 = best_NK[..., -1:]
    id_NK, order_NK = id_NK.sort(dim=-1)  # topk does not say which of two equals comes first
    best_NK, rank_NK = best_NK.gather(-1, order_NK).sort(dim=-1, stable=True)
    id_NK = id_NK.gather(-1, rank_NK)

    # 2) Mass of each of the k and of all below it: the ties by their number, the others by a running sum.
    tied_NV = scores_NV == weakest_N1
    nth_NV = tied_NV.cumsum(-1)
    ties_N1 = nth_NV[..., -1:]
    above_NK = best_NK > weakest_N1
    each_N1 = weakest_N1.exp()
    below_NK = each_N1 * ties_N1 + (best_NK.exp() * above_NK).cumsum(-1)
    may_go_N1 = (1.0 - top_p) * below_NK[..., -1:]

    # 3) Drop while the mass from below stays within 1 - top_p: those above the ties by rank, the ties by number.
    drop_NK = above_NK & (below_NK <= may_go_N1)
    drop_NK[..., -1] = False
    alone_N1 = ~above_NK[..., -1:]  # all that are kept tie: the last one stays
    drop_NV = tied_NV & (each_N1 * nth_NV <= may_go_N1) & ~(alone_N1 & (nth_NV == ties_N1))
    drop_NV = drop_NV | (scores_NV < weakest_N1)
    return scores_NV.masked_fill(drop_NV.scatter(-1, id_NK, drop_NK | drop_NV.gather(-1, id_NK)), -math.inf)


def _signed(bits: int) -> int:
    """A 64-bit constant as the int64 that torch takes."""
    return bits - (1 << 64) if bits >> 63 else bits


_INDEX_BITS = 24
_GOLDEN = _signed(0x9E3779B97F4A7C15)
_PI = _signed(0x243F6A8885A308D3)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Logical right shift; the shift of int64 itself would copy the sign bit."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _mix(bits: Tensor) -> Tensor:
    """SplitMix64's finaliser, a bijection of 64 bits (int64 products wrap)."""
    bits = (bits ^ _shift_right(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ _shift_right(bits, 27)) * _signed(0x94D049BB133111EB)
    return bits ^ _shift_right(bits, 31)
