"""Teacher log-probs of emitted tokens: signals from which a draft can be distilled without the target.

Let p be the target's raw distribution (T=1, before any processor) at a position. Stored are log p of the emitted token,
the k likeliest ids with their log p, the log mass of the tail (all other ids) and M iid draws from the tail with their
log p. Then

    E_p[f] ~ sum_topk p f + (1 - P_k) / M * sum_m f(s_m)

is unbiased for every f, and exact if k covers the vocabulary. An engine beside the target gives no draws (M = 0); the
second term is left out then.

Shapes: B rows, n tokens, V vocabulary, k top ids, M tail draws, N blocks of C vocabulary entries.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..specdec.sampling import Purpose, uniforms
from .settings import CaptureSettings

FLOOR = -1e4
"""Stands for log 0: exp(FLOOR) is 0 and 0 * FLOOR is 0, where 0 * -inf would be NaN. Fits float16."""

_BLOCK = 64


class Signals(NamedTuple):
    """Signals of n answer tokens, in order. An empty tail has mass exp(FLOOR); its draws repeat the likeliest id."""

    logp_n: Tensor
    topk_ids_nk: Tensor
    topk_logp_nk: Tensor
    tail_logmass_n: Tensor
    tail_ids_nM: Tensor
    tail_logp_nM: Tensor


@torch.no_grad()
def emitted_logp(logits_BV: Tensor, tokens_B: Tensor) -> Tensor:
    """log p of each row's emitted token, fp32."""
    return _logp_of(logits_BV.float(), tokens_B)


def _logp_of(logits_BV: Tensor, tokens_B: Tensor) -> Tensor:
    top_B = logits_BV.amax(-1)
    total_B = (logits_BV - top_B[:, None]).exp_().sum(-1)
    return logits_BV.gather(-1, tokens_B.long()[:, None])[:, 0] - top_B - total_B.log()


@torch.no_grad()
def teacher_signals(logits_BV: Tensor, tokens_B: Tensor, u_BM: Tensor, top_k: int) -> Signals:
    """Signals of one emitted token a row; `u_BM` in [0, 1) draws the tail. One exp pass, no sort of the vocabulary."""
    # 1) The k likeliest tokens, and the next one as reference for the tail.
    vocab = logits_BV.shape[-1]
    top_k = min(top_k, vocab)
    blocks_BNC = _blocks(logits_BV)
    values_Bk, ids_Bk = _largest(blocks_BNC, min(top_k + 1, vocab))

    # 2) The tail's mass, summed relative to its own largest logit, so that e-200 is as exact as 0.5.
    reference_B = torch.where(values_Bk[:, -1].isfinite(), values_Bk[:, -1], values_Bk[:, 0])
    values_Bk, ids_Bk = values_Bk[:, :top_k], ids_Bk[:, :top_k]
    weights_BNC = blocks_BNC - reference_B[:, None, None]  # fp32, whatever the logits are
    weights_BNC.flatten(1).scatter_(1, ids_Bk, -torch.inf)
    weights_BNC.exp_()
    sums_BN = weights_BNC.sum(-1).double()
    tail_B = sums_BN.sum(-1).log().float() + reference_B
    lse_B = torch.logaddexp(values_Bk.logsumexp(-1), tail_B)
    topk_logp_Bk = (values_Bk - lse_B[:, None]).clamp_min(FLOOR)

    # 3) Draws from the tail; an empty one repeats the likeliest token.
    empty_B1 = ~tail_B.isfinite()[:, None]
    tail_ids_BM = torch.where(empty_B1, ids_Bk[:, :1], _draw(weights_BNC, sums_BN, u_BM))
    return Signals(
        logp_n=logits_BV.gather(-1, tokens_B.long()[:, None])[:, 0].float() - lse_B,
        topk_ids_nk=ids_Bk.int(),
        topk_logp_nk=topk_logp_Bk,
        tail_logmass_n=(tail_B - lse_B).clamp_min(FLOOR),
        tail_ids_nM=tail_ids_BM.int(),
        tail_logp_nM=(logits_BV.gather(-1, tail_ids_BM).float() - lse_B[:, None]).clamp_min(FLOOR),
    )


def stored_signals(
    logits_BV: Tensor, tokens_B: Tensor, seeds_B: Tensor, emitted_B: Tensor, settings: CaptureSettings
) -> dict[str, Tensor]:
    """Signals by name, in the types that a capture stores.

    `seeds_B`: seeds of the tail draws, other than those that drew the tokens; `emitted_B`: answer tokens before this
    one.
    """
    u_BM = uniforms(seeds_B, emitted_B, Purpose.FINAL, settings.tail_samples)
    columns = teacher_signals(logits_BV, tokens_B, u_BM, settings.top_k)._asdict()
    dtype = getattr(torch, settings.store_dtype)
    return columns | {name: columns[name].to(dtype) for name in ("topk_logp_nk", "tail_logp_nM")}


def _blocks(logits_BV: Tensor) -> Tensor:
    """View [B, N, C] of the logits in blocks, padded with -inf where C does not divide the vocabulary."""
    missing = -logits_BV.shape[-1] % _BLOCK
    filled = F.pad(logits_BV, (0, missing), value=-torch.inf) if missing else logits_BV.contiguous()
    return filled.view(filled.shape[0], -1, _BLOCK)


def _largest(blocks_BNC: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest values of each row in fp32, descending, and their ids.

    They all lie in the `count` blocks with the largest maxima, so only those are searched.
    """
    if count >= blocks_BNC.shape[1]:
        return blocks_BNC.flatten(1).float().topk(count, dim=-1)
    block_Bk = blocks_BNC.amax(-1).float().topk(count, dim=-1).indices
    found_BkC = blocks_BNC.gather(1, block_Bk[..., None].expand(-1, -1, _BLOCK))
    values_Bk, place_Bk = found_BkC.flatten(1).float().topk(count, dim=-1)
    ids_Bk = block_Bk.gather(1, place_Bk // _BLOCK) * _BLOCK + place_Bk % _BLOCK
    return values_Bk, ids_Bk


def _draw(weights_BNC: Tensor, sums_BN: Tensor, u_BM: Tensor) -> Tensor:
    """Ids drawn iid in proportion to the weights: inverse CDF over blocks, then inside the block."""
    # The place inside the drawn block is itself uniform, so it draws the entry without another random number.
    edges_BN = sums_BN.cumsum(-1)
    block_BM, within_BM = _invert(edges_BN, u_BM.to(edges_BN))
    inside_BMC = weights_BNC.gather(1, block_BM[..., None].expand(-1, -1, _BLOCK)).double().cumsum(-1)
    place_BM1, _ = _invert(inside_BMC, within_BM[..., None])
    return block_BM * _BLOCK + place_BM1[..., 0]


def _invert(edges: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Invert a running sum: the interval that u in [0, 1) falls into, never an empty one, and the place in it."""
    total = edges[..., -1:].contiguous()
    point = u * total
    index = torch.searchsorted(edges, point, right=True)
    last = torch.searchsorted(edges, total)  # rounding may put a point on the very end; NaN lies beyond it
    index = index.minimum(last).clamp_max(edges.shape[-1] - 1)
    # Place inside the interval; an empty total (0 / 0) gives 0.
    low = torch.where(index > 0, edges.gather(-1, (index - 1).clamp_min(0)), 0.0)
    width = edges.gather(-1, index) - low
    return index, ((point - low) / width).clamp(0.0, 1.0).nan_to_num(0.0)
