"""Logits helpers of all proposers: sampling processors by slot, top tokens with ties in order, traces of a level.

Shapes: B slots, F nodes a slot, N tokens, R ranks of tokens or round starts of recorded texts, C tokens on offer,
H hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kv_cache import runs_triton
from ..models import States
from ..replay.packing import Pack
from ..sampling import penalised, probabilities
from ..sampling_settings import SamplingSettings
from .base import UNRANKED, Trace

MOST_PAIRS = 1 << 22
"""Most query-key pairs of the texts that are traced at once: attention off packed rows holds a score for each."""
MOST_RANKS = 64
"""Most ranks that kernels find one after another; for more of them a sort is faster."""
MOST_CANDIDATES = 1024
"""Most candidates of a tree that a kernel ranks, each against all others; for more of them a sort is faster."""
MOST_LOGITS = 1 << 25
"""Most logits (rows x vocabulary) that a trace holds at once."""
NOT_SAID = -1
"""Place of a token that a draft's vocabulary does not hold."""
Head = Callable[[Tensor], Tensor]
"""States [N, H] -> logits [N, V]."""


def over_vocabulary(logits: Tensor, ids_R: Tensor, size: int) -> Tensor:
    """Logits [..., R] of some tokens as logits [..., V]: -inf for all others, nothing renormalised."""
    full = logits.new_full((*logits.shape[:-1], size), float("-inf"))
    full[..., ids_R] = logits
    return full


@cache
def constant(values: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """Cached constant tensor: numbers that do not change from round to round, brought to the device once."""
    return torch.tensor(values, device=device, dtype=dtype)


def process_rows(logits: Tensor, sampling: Sequence[SamplingSettings], seen: Tensor | None = None) -> Tensor:
    """Probabilities [B, ..., V] in fp32 of each slot's logits, after that slot's own sampling processors.

    `seen` marks the tokens that stand before each row, for repetition penalties; None: no slot has one.
    """
    # All slots alike: one pass for the batch.
    if len(set(sampling)) == 1:
        return probabilities(logits, sampling[0], seen)

    # Otherwise one pass for each group of slots with equal settings.
    p = torch.empty_like(logits, dtype=torch.float32)
    for setting in set(sampling):
        rows = constant(tuple(row for row, other in enumerate(sampling) if other == setting), logits.device)
        p[rows] = probabilities(logits[rows], setting, None if seen is None else seen[rows])
    return p


def penalised_rows(logits: Tensor, sampling: Sequence[SamplingSettings], seen: Tensor | None) -> Tensor:
    """Logits [B, ..., V] after each slot's repetition penalty: the one processor that changes their order."""
    if seen is None:
        return logits
    rows = [penalised(row, setting, known) for row, setting, known in zip(logits, sampling, seen)]
    return torch.stack(rows)


def see(seen: Tensor | None, tokens: Tensor) -> Tensor | None:
    """Marks of seen tokens [..., V] with one more token [...] each."""
    return None if seen is None else seen.scatter(-1, tokens[..., None], True)


def gather_rows(x: Tensor, index_BF: Tensor, first: int = 0) -> Tensor:
    """Rows [B, F, ...] of x [B, N, ...] at index - first, index [B, F]."""
    if x.dim() == 3 and x.is_floating_point() and x.stride(2) == 1 and runs_triton(x.device):
        from ..kernels.pointwise import take_rows

        return take_rows(x, index_BF, first)
    index = (index_BF - first if first else index_BF).reshape(*index_BF.shape, *[1] * (x.dim() - 2))
    return x.gather(1, index.expand(*index_BF.shape, *x.shape[2:]))


def pick_states(states: States, index_BN: Tensor) -> States:
    """The states of some positions of each row."""
    aux = None if states.aux_BTA is None else gather_rows(states.aux_BTA, index_BN)
    return States(gather_rows(states.hidden_BTH, index_BN), aux)


def last_of(x_BNH: Tensor, counts_B: Tensor) -> Tensor:
    """Last vector [B, H] of each right-padded row."""
    return gather_rows(x_BNH, counts_B.clamp(min=1)[:, None], first=1)[:, 0]


class Offers:
    """The best tokens of all nodes that were read in a round, level by level: C in each slot, and their scores. On a
    GPU kernels write them where they stay."""

    def __init__(self, batch: int, size: int, device: torch.device) -> None:
        self.tokens_BC = torch.empty(batch, size, dtype=torch.long, device=device)
        self.scores_BC = torch.empty(batch, size, device=device)
        self.count = 0

    def add(
        self, logits_BFV: Tensor, ranks: int, above_BF: Tensor | None = None, normalised: bool = False
    ) -> tuple[int, int]:
        """Add the `ranks` best tokens of each node, in the order of `likeliest`; returns their first place and the one
        behind the last. A score is a logit or, `normalised`, a log-probability, plus that of the node above."""
        start, self.count = self.count, self.count + logits_BFV.shape[1] * ranks
        scores_BX, tokens_BX = self.scores_BC[:, start : self.count], self.tokens_BC[:, start : self.count]
        if ranks <= MOST_RANKS and runs_triton(logits_BFV.device):
            from ..kernels.top_tokens import put_top_tokens

            put_top_tokens(logits_BFV, ranks, scores_BX, tokens_BX, normalised, above_BF)
        else:
            best_BFR, ids_BFR = likeliest(logits_BFV.float().log_softmax(-1) if normalised else logits_BFV, ranks)
            best_BFR = best_BFR if above_BF is None else best_BFR + above_BF[..., None]
            scores_BX[:], tokens_BX[:] = best_BFR.flatten(1), ids_BFR.flatten(1)
        return start, self.count


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Top-k with ties in order: the `count` best logits [..., R] of each row [..., V], best first, and their tokens.
    Among equal logits lower token ids come first.

    That is the order of `argmax`. `topk` promises none: on the CPU it returns any of the tokens that tie, in any order,
    even for a count of 1, and in bfloat16 many rows have ties near the top.
    """
    # The kernels settle ties by themselves, and so does argmax.
    if count <= MOST_RANKS and runs_triton(logits.device):
        from ..kernels.top_tokens import top_tokens

        return top_tokens(logits, count)
    if count == 1:
        tokens = logits.argmax(-1, keepdim=True)
        return logits.gather(-1, tokens), tokens

    # topk finds the right values; only its choice among tokens that tie with the last value is open.
    best = logits.topk(count, dim=-1)
    last = best.values[..., -1:]
    above = best.values != last  # better than the last: surely among them; of those that tie with it the lowest are
    # The lowest ids that tie with the last value: topk of V, V - 1, ... at their places.
    backwards_V = torch.arange(logits.shape[-1], 0, -1, dtype=torch.int32, device=logits.device)
    lowest = torch.where(logits == last, backwards_V, 0).topk(count, dim=-1).indices

    # Tokens by ascending id, then a stable sort by value, so that ties keep the order of ids.
    tokens = best.indices.sort(-1).values
    tokens = tokens.gather(-1, logits.gather(-1, tokens).sort(dim=-1, descending=True, stable=True).indices)

    # Place i takes the i-th of those above, or the next of the lowest that tie.
    rank_R = torch.arange(count, device=logits.device)
    nth = (rank_R - above.sum(-1, keepdim=True)).clamp(min=0)
    return best.values, torch.where(above, tokens, lowest.gather(-1, nth))


def own_vocabulary(head: Head, ids_R: Tensor | None) -> tuple[Head, Tensor | None]:
    """Head and ids that `trace_level` takes, of a head whose logits are those of some target ids (None: of all)."""
    if ids_R is None:
        return head, None
    # In the order of the target's ids, so that ties fall as they do over its vocabulary.
    ascending_R, order_R = ids_R.sort()
    return lambda state: head(state).index_select(-1, order_R), ascending_R


def trace_levels(
    pack: Pack,
    count: int,
    levels: Iterable[tuple[Tensor, Head]],
    vocab_size: int,
    sampling: SamplingSettings,
    ids_R: Tensor | None = None,
) -> Trace:
    """Trace from the draft's states, level by level. The j-th of `levels`: states [R, H] of level j at all round
    starts, and the head that reads them. There may be fewer levels than `count`: the rest is UNRANKED."""
    # A column a level.
    columns = [trace_level(pack, j, *level, vocab_size, sampling, ids_R) for j, level in enumerate(levels)]
    rank_RK, q_RK = (torch.stack(column, 1) for column in zip(*columns))

    # Levels that the draft does not have offer nothing.
    missing = count - len(columns)
    if not missing:
        return Trace(rank_RK, q_RK)
    offered_R = torch.full((pack.rounds,), len(columns), device=rank_RK.device)
    return Trace(F.pad(rank_RK, (0, missing), value=UNRANKED), F.pad(q_RK, (0, missing)), offered_R)


def trace_level(
    pack: Pack,
    ahead: int,
    state_RH: Tensor,
    head: Head,
    vocab_size: int,
    sampling: SamplingSettings,
    ids_R: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rank and probability [R] of the token that follows the known ones and `ahead` more, which are the draft's.

    `head`: states to logits [N, V], which are made of a few round starts at a time; with `ids_R` to logits of these
    target ids alone, in ascending order: nothing else can be said.
    """
    # The text's own token at this level; not `inside` where the answer has ended.
    answer_R, inside_R = pack.next_tokens(ahead)
    first_BV, width = None if sampling.repetition_penalty == 1.0 else pack.first_places(vocab_size), vocab_size

    # In a vocabulary of the draft's own a token has another place, or none.
    if ids_R is not None:
        first_BV, width = None if first_BV is None else first_BV[:, ids_R], len(ids_R)
        places_V = torch.full((vocab_size,), NOT_SAID, device=ids_R.device)
        places_V[ids_R] = torch.arange(width, device=ids_R.device)
        answer_R = places_V[answer_R]

    # Logits of a few round starts at a time: rows x vocabulary may be large.
    step = max(1, MOST_LOGITS // width)
    found: list[tuple[Tensor, Tensor]] = []
    for start in range(0, max(pack.rounds, 1), step):
        rows = slice(start, start + step)
        seen_NV = None if first_BV is None else pack.seen(first_BV, rows, ahead)
        found.append(trace_from_logits(head(state_RH[rows]), answer_R[rows], sampling, seen_NV))

    # Past the answer's end there is nothing to rank.
    rank_R, q_R = (torch.cat(part) for part in zip(*found))
    return torch.where(inside_R, rank_R, UNRANKED), torch.where(inside_R, q_R, 0.0)


def trace_from_logits(
    logits_NV: Tensor, answer_N: Tensor, sampling: SamplingSettings, seen_NV: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Rank [N] of the answer's token (NOT_SAID: none) among the draft's, in the order of `likeliest`, and its
    probability [N] after the sampling processors (greedy: 1 at rank 0, else 0)."""
    # Rank: tokens with a higher score, or with an equal one and a lower id.
    said_N, answer_N1 = answer_N != NOT_SAID, answer_N.clamp(min=0)[:, None]
    scores_NV = penalised(logits_NV, sampling, seen_NV)
    answer_score_N1 = scores_NV.gather(-1, answer_N1)
    lower_NV = torch.arange(logits_NV.shape[-1], device=logits_NV.device) < answer_N1
    before_NV = (scores_NV > answer_score_N1) | ((scores_NV == answer_score_N1) & lower_NV)
    ranked_N = said_N & answer_score_N1[:, 0].isfinite()
    rank_N = torch.where(ranked_N, before_NV.sum(-1, dtype=torch.int32), UNRANKED)

    # Probability under the draft's processed distribution; greedy drafts put all mass on rank 0.
    if sampling.greedy:
        return rank_N, (rank_N == 0).float()
    q_N = probabilities(logits_NV, sampling, seen_NV).gather(-1, answer_N1)[:, 0]
    return rank_N, torch.where(rank_N == UNRANKED, 0.0, q_N)  # where nothing is said there are no probabilities
