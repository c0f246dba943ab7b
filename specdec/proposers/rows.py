"""Work on rows of tokens and logits that every way of drafting needs.

Shapes: B slots, F nodes a slot, N tokens, T positions, H hidden size, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..models import States
from ..sampling import SamplingSettings, penalised, probabilities, seen_before


def fill_rows(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Token lists as one right-padded [B, N] tensor."""
    longest = max(len(row) for row in rows)
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)


def process_rows(logits: Tensor, sampling: Sequence[SamplingSettings], seen: Tensor | None = None) -> Tensor:
    """Each slot's logits [B, ..., V] through its own processors: probabilities in fp32.

    `seen` marks the tokens that stand before each row, for repetition penalties; None: no slot has one.
    """
    if len(set(sampling)) == 1:
        return probabilities(logits, sampling[0], seen)
    p = torch.empty_like(logits, dtype=torch.float32)
    for setting in set(sampling):
        rows = [row for row, other in enumerate(sampling) if other == setting]
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


def last_of(x_BNH: Tensor, counts: Sequence[int]) -> Tensor:
    """[B, H]: what stands at the end of each right-padded row."""
    last_B = torch.tensor(counts, device=x_BNH.device) - 1
    return x_BNH[torch.arange(len(counts), device=x_BNH.device), last_B]


def trace_from_logits(
    logits_TV: Tensor, ids: Sequence[int], first: int, sampling: SamplingSettings
) -> tuple[Tensor, Tensor]:
    """Per row: is ids[first + row] the draft's most likely token, and its processed probability.

    `logits_TV`: of drafts that know ids[: first + row].
    """
    rows, vocab = logits_TV.shape
    answer_T = torch.tensor(ids[first : first + rows], dtype=torch.long, device=logits_TV.device)
    seen_TV = None
    if sampling.repetition_penalty != 1.0:
        seen_TV = seen_before(ids, first, rows, vocab, logits_TV.device)
    hit_T = penalised(logits_TV, sampling, seen_TV).argmax(-1) == answer_T
    if sampling.greedy:
        return hit_T, hit_T.float()
    return hit_T, probabilities(logits_TV, sampling, seen_TV).gather(-1, answer_T[:, None])[:, 0]
