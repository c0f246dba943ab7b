"""What chain-drafting proposers share.

Shapes: B rows, K drafted tokens, V vocabulary, T positions.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..sampling import SamplingSettings, categorical, probabilities


def fill_rows(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Token lists as one right-padded [B, T] tensor."""
    longest = max(len(row) for row in rows)
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)


def process_rows(logits_BV: Tensor, sampling: Sequence[SamplingSettings]) -> Tensor:
    """Each row's logits through its own processors: probabilities [B, V]. Rows of one setting go together."""
    if len(set(sampling)) == 1:
        return probabilities(logits_BV, sampling[0])
    p_BV = torch.empty_like(logits_BV, dtype=torch.float32)
    for setting in set(sampling):
        rows = [row for row, other in enumerate(sampling) if other == setting]
        p_BV[rows] = probabilities(logits_BV[rows], setting)
    return p_BV


def draft_token(
    logits_BV: Tensor, sampling: Sequence[SamplingSettings], uniforms_BK: Tensor | None, k: int
) -> tuple[Tensor, Tensor | None]:
    """The k-th drafted token of each row, and the distribution it was drawn from (None: the most likely token)."""
    if uniforms_BK is None:
        return logits_BV.argmax(-1), None
    q_BV = process_rows(logits_BV, sampling)
    return categorical(q_BV, uniforms_BK[:, k]), q_BV


def trace_from_logits(logits_TV: Tensor, answer_T: Tensor, sampling: SamplingSettings) -> tuple[Tensor, Tensor]:
    """Per position: is the answer's token the draft's most likely one, and its processed probability."""
    hit_T = logits_TV.argmax(-1) == answer_T
    if sampling.greedy:
        return hit_T, hit_T.float()
    return hit_T, probabilities(logits_TV, sampling).gather(-1, answer_T[:, None])[:, 0]
