"""`expected_length`: expected tokens a round, when the draft runs on from each position, as a loss.

Shapes: K tokens of a chain, M chains, S rows of states a position, N positions.

A chain accepts its first k tokens with probability prod_{j<k} alpha_j, so a round emits 1 + sum_k prod_{j<=k} alpha_j
tokens in expectation, and the loss of a chain is minus that. It is summed over chains, of which every supervised
position starts one (but where the first of an answer has no draft); divided, as all losses are, by the number of
supervised tokens, it is minus the mean number of tokens a round. A draft that fills in blocks has one chain a block
only, which counts for as many as a block has tokens. The product itself discounts later steps, so step weights do not
apply.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class ChainLoss(NamedTuple):
    """Loss of chains and its derivative, spread over the rows that make them up."""

    loss_SN: Tensor
    """Loss of each row; the sum is that of all chains. Row k of a chain has term k, row 0 the bonus token's too."""
    slope_SN: Tensor
    """Derivative of the loss by the row's alpha."""


def chains_of_steps(step_SN: Tensor, valid_SN: Tensor, steps: int) -> Tensor:
    """Chains of drafts that unroll steps, [K, N]: the row s * N + n that drafts token k from position c; -1: none.

    Row (s, n), which is k steps ahead, belongs to the chain that starts at position n - k.
    """
    # Where each row belongs, in a table [K, N] laid flat; rows that belong nowhere go to a cell past its end.
    rows_SN = torch.arange(step_SN.numel(), device=step_SN.device).view_as(step_SN)
    positions = step_SN.shape[1]
    start_SN = torch.arange(positions, device=step_SN.device) - step_SN
    nowhere = steps * positions  # picking out the valid rows instead would wait for the device
    place_SN = torch.where(valid_SN & (start_SN >= 0), step_SN * positions + start_SN, nowhere)

    # Cells that no row claims stay -1.
    chains = torch.full((nowhere + 1,), -1, device=step_SN.device)
    chains[place_SN.flatten()] = rows_SN.flatten()
    return chains[:nowhere].view(steps, positions)


def chains_of_runs(offsets: list[int], tokens: int) -> Tensor:
    """Chains of drafts with one row a position, [K, N] on the CPU: `tokens` neighbours of the same sample, each on the
    true prefix; -1 past the sample's end.

    `offsets`: sample b owns positions offsets[b]:offsets[b + 1].
    """
    # Row n + k of position n, as long as it lies before the end of n's sample.
    bounds = torch.tensor(offsets)
    end_N = torch.repeat_interleave(bounds[1:], bounds.diff())
    row_KN = torch.arange(offsets[-1]) + torch.arange(tokens)[:, None]
    return torch.where(row_KN < end_N, row_KN, -1)


def chain_loss(alpha_SN: Tensor, chains_KM: Tensor) -> ChainLoss:
    """Minus the expected tokens a round of every chain, and the slope by alpha, spread over rows.

    A chain ends where it first lacks a row.
    """
    # 1) alpha of each link; products of those up to it (reached) and before it
    held_KM = chains_KM >= 0
    at_KM = chains_KM.clamp_min(0)
    alpha_KM = torch.where(held_KM, alpha_SN.flatten()[at_KM], 0.0)  # nothing comes after a 0
    reached_KM = alpha_KM.cumprod(0)
    before_KM = torch.cat([torch.ones_like(alpha_KM[:1]), reached_KM[:-1]])

    # 2) what hangs on each link: its slope is before x after
    after_KM = torch.ones_like(alpha_KM)  # 1 + alpha_{k+1} (1 + alpha_{k+2} (...)): no division, alpha may be 0
    for k in range(len(alpha_KM) - 2, -1, -1):
        after_KM[k] += alpha_KM[k + 1] * after_KM[k + 1]

    # 3) from chains to rows; the first row of a chain takes the token that the target adds itself
    reached_KM[0] += 1.0
    loss, slope = torch.zeros(2, alpha_SN.numel(), device=alpha_SN.device)
    for k in range(len(alpha_KM)):  # the rows of one k are all different: the sums have one order, on any device
        loss.index_add_(0, at_KM[k], torch.where(held_KM[k], -reached_KM[k], 0.0))
        slope.index_add_(0, at_KM[k], torch.where(held_KM[k], -before_KM[k] * after_KM[k], 0.0))
    return ChainLoss(loss.view_as(alpha_SN), slope.view_as(alpha_SN))
