"""Work on rows of tokens and logits that every way of drafting needs.

Shapes: B slots, F nodes a slot, N tokens, R ranks, T positions, H hidden size, V vocabulary.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from ..models import States
from ..sampling import SamplingSettings, penalised, probabilities, seen_before
from .base import UNRANKED


def over_vocabulary(logits: Tensor, ids_R: Tensor, size: int) -> Tensor:
    """Logits [..., R] of some tokens as logits [..., V]: -inf for all others, nothing renormalised."""
    full = logits.new_full((*logits.shape[:-1], size), float("-inf"))
    full[..., ids_R] = logits
    return full


@cache
def constant(values: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """Numbers that do not change from round to round, brought to the device once."""
    return torch.tensor(values, device=device, dtype=dtype)


def process_rows(logits: Tensor, sampling: Sequence[SamplingSettings], seen: Tensor | None = None) -> Tensor:
    """Each slot's logits [B, ..., V] through its own processors: probabilities in fp32.

    `seen` marks the tokens that stand before each row, for repetition penalties; None: no slot has one.
    """
    if len(set(sampling)) == 1:
        return probabilities(logits, sampling[0], seen)
    p = torch.empty_like(logits, dtype=torch.float32)
    for setting in set(sampling):
        rows = constant(tuple(row for row, other in enumerate(sampling) if other == setting), logits.device)
        p[rows] = probabilities(logits[rows], setting, None if seen is None else seen[rows])
    return p


def penalised_rows(logits: Tensor, sampling: Sequence[SamplingSettings], seen: Tensor | None) -> Tensor:
    """Each slot's logits [B, ..., V] as they are ranked where nothing is drawn: only a penalty changes the order."""
    if seen is None:
        return logits
    rows = [penalised(row, setting, known) for row, setting, known in zip(logits, sampling, seen)]
    return torch.stack(rows)


def see(seen: Tensor | None, tokens: Tensor) -> Tensor | None:
    """The marks [..., V] with one more token [...] each."""
    return None if seen is None else seen.scatter(-1, tokens[..., None], True)


def gather_rows(x: Tensor, index_BF: Tensor) -> Tensor:
    """Rows [B, F, ...] of x [B, N, ...]."""
    index = index_BF.reshape(*index_BF.shape, *[1] * (x.dim() - 2))
    return x.gather(1, index.expand(*index_BF.shape, *x.shape[2:]))


def pick_states(states: States, index_BN: Tensor) -> States:
    """The states of some positions of each row."""
    aux = None if states.aux_BTA is None else gather_rows(states.aux_BTA, index_BN)
    return States(gather_rows(states.hidden_BTH, index_BN), aux)


def last_of(x_BNH: Tensor, counts_B: Tensor) -> Tensor:
    """[B, H]: what stands at the end of each right-padded row."""
    return gather_rows(x_BNH, (counts_B - 1).clamp(min=0)[:, None])[:, 0]


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best logits [..., R] of each row [..., V], best first, and their tokens; of a tie the lower ones.

    That is the order of `argmax`. `topk` promises none: on the CPU it returns any of the tokens that tie, in any order,
    even for a count of 1, and in bfloat16 many rows have ties near the top.
    """
    if count == 1:
        tokens = logits.argmax(-1, keepdim=True)
        return logits.gather(-1, tokens), tokens
    best = logits.topk(count, dim=-1)
    last = best.values[..., -1:]
    above = best.values != last  # better than the last: surely among them; of those that tie with it the lowest are
    backwards_V = torch.arange(logits.shape[-1], 0, -1, dtype=torch.int32, device=logits.device)
    lowest = torch.where(logits == last, backwards_V, 0).topk(count, dim=-1).indices
    tokens = best.indices.sort(-1).values
    tokens = tokens.gather(-1, logits.gather(-1, tokens).sort(dim=-1, descending=True, stable=True).indices)
    rank_R = torch.arange(count, device=logits.device)
    nth = (rank_R - above.sum(-1, keepdim=True)).clamp(min=0)
    return best.values, torch.where(above, tokens, lowest.gather(-1, nth))


def trace_from_logits(
    logits_TV: Tensor, ids: Sequence[int], first: int, sampling: SamplingSettings
) -> tuple[Tensor, Tensor]:
    """Per row: the rank of ids[first + row] among the draft's tokens, as `likeliest` orders them, and its processed
    probability.

    `logits_TV`: of drafts that know ids[: first + row].
    """
    rows, vocab = logits_TV.shape
    answer_T1 = torch.tensor(ids[first : first + rows], dtype=torch.long, device=logits_TV.device)[:, None]
    seen_TV = None
    if sampling.repetition_penalty != 1.0:
        seen_TV = seen_before(ids, first, rows, vocab, logits_TV.device)
    scores_TV = penalised(logits_TV, sampling, seen_TV)
    answer_score_T1 = scores_TV.gather(-1, answer_T1)
    lower_TV = torch.arange(vocab, device=logits_TV.device) < answer_T1
    before_TV = (scores_TV > answer_score_T1) | ((scores_TV == answer_score_T1) & lower_TV)
    rank_T = torch.where(answer_score_T1[:, 0].isfinite(), before_TV.sum(-1, dtype=torch.int32), UNRANKED)
    if sampling.greedy:
        return rank_T, (rank_T == 0).float()
    return rank_T, probabilities(logits_TV, sampling, seen_TV).gather(-1, answer_T1)[:, 0]
