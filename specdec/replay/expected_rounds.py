"""Expected rounds: from a draft's acceptance along a recorded answer to the counts that decoding would give.

Shape letters: A answers, R round starts, answer by answer (an answer's row r: the round starts with 1 + r of its tokens
emitted), K depths (column j: the drafted token j + 1), J = K + 1 jumps. Pure arrays on the CPU; no models.

Counting. The prefill and the token it yields are not a round. A round with t tokens emitted drafts
min(K, max_new_tokens - t - 1) tokens. A stop ends the answer: drafted tokens after it count as drafted, but neither as
reached nor as accepted, and a run that accepts the stop gets no bonus. `tokens` counts what rounds emit: all but the
first.

Rounds start more often where drafts fail, so averaging over all positions of an answer instead of its round starts is
biased: by 3 to 19 % in tests/specdec/replay/test_replay_bias.py.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
_SMALLEST = np.finfo(np.float64).tiny


class RoundCounts(NamedTuple):
    """Expected counts of one decoded answer; whole numbers at temperature 0. Position k is at index k - 1."""

    rounds: float
    tokens: float
    drafted: float
    accepted: float
    reached_K: tuple[float, ...]
    accepted_K: tuple[float, ...]


def walk_expected(
    w_RK: ArrayLike,
    K: int,
    lengths: Sequence[int],
    limits: Sequence[int],
    offered_R: ArrayLike | None = None,
    nodes_R: ArrayLike | None = None,
) -> list[RoundCounts]:
    """Expected round counts of each answer: push the probability mass of round starts forward along it.

    Where every w is 0 or 1 (temperature 0, and drafts of chosen siblings) the mass jumps from round to round, as the
    decoder does, and the counts are whole.

    w_RK[r, j]: probability that a round starting there accepts at least j + 1 tokens, given the answer (`survival_*`).
    lengths, limits: of each answer, its tokens and its max_new_tokens.
    offered_R: levels that judge the answer's tokens at each start, where that may be fewer than K (prompt lookup, or
    trees in which the answer's way ends early).
    nodes_R: nodes drafted by a round at each start, where that is a tree; else one a level.
    Raises ValueError for arrays whose shapes do not fit, or an answer longer than its limit.
    """
    # 1) What a round drafts at each start, and how likely it goes at least j levels far.
    drafted_R = drafted_levels(K, lengths, limits, offered_R)
    nodes_R = drafted_R if nodes_R is None else _rows(nodes_R, len(drafted_R), "nodes_R")
    w = _rows(w_RK, len(drafted_R), "w_RK").astype(np.float64)
    if w.ndim != 2 or w.shape[1] < K:
        raise ValueError(f"w_RK has shape {w.shape}: two axes and at least K = {K} columns are needed")
    # 2) Cut at the drafted levels and at the answer's end: a token past it is neither reached nor accepted.
    answer_R, row_R = _places(lengths)
    left_R = np.asarray(lengths, np.int64)[answer_R] - 1 - row_R
    inside_RK = np.arange(K) < np.minimum(drafted_R, left_R)[:, None]
    edge_R1 = np.ones((len(drafted_R), 1))
    at_least = np.concatenate((edge_R1, np.where(inside_RK, w[:, :K], 0.0), 0.0 * edge_R1), axis=1)  # [R, K+2]: from 0
    # 3) Differences give the chance of leaving by exactly j levels; they carry the mass from start to start.
    mass_R = _masses(at_least[:, :-1] - at_least[:, 1:], answer_R, row_R)
    # 4) Sum each count over an answer's starts, weighted by mass: rounds, nodes, reached_K, accepted_K.
    columns = np.concatenate((edge_R1, nodes_R[:, None], inside_RK * at_least[:, :K], at_least[:, 1:-1]), axis=1)
    totals_A = np.array([np.bincount(answer_R, mass_R * column_R, len(lengths)) for column_R in columns.T]).T
    return [_counts(length, totals) for length, totals in zip(lengths, totals_A.tolist())]


def _counts(length: int, totals: list[float]) -> RoundCounts:
    rounds, drafted, *at = totals
    reached, accepted = at[: len(at) // 2], at[len(at) // 2 :]
    return RoundCounts(rounds, max(length - 1.0, 0.0), drafted, float(sum(accepted)), tuple(reached), tuple(accepted))


def _masses(leaving_RJ: Floats, answer_R: NDArray[np.int64], row_R: NDArray[np.int64]) -> Floats:
    """Probability [R] that a round starts at each row; leaving_RJ[r, j]: that the next one starts j + 1 rows on."""
    if not len(row_R):
        return np.zeros(0)
    # Dense [rows, jumps, answers], so that one step serves all answers; rows past an answer's end carry nothing.
    rows, jumps, answers = int(row_R.max()) + 1, leaving_RJ.shape[1], int(answer_R.max()) + 1
    leaving = np.zeros((rows, jumps, answers))
    leaving[row_R, :, answer_R] = leaving_RJ
    # Every answer's first round starts at its first row. A row's mass is complete once all rows before it are done.
    mass = np.zeros((rows + jumps, answers))
    mass[0] = 1.0
    for row in range(rows):  # all answers at once
        mass[row + 1 : row + 1 + jumps] += mass[row] * leaving[row]
    found: Floats = mass[row_R, answer_R]
    return found


def count_rounds(rounds: Iterable[tuple[int, int, int, int]], K: int) -> RoundCounts:
    """Round counts of a decoded answer, from its rounds (drafted, accepted, emitted, reached).

    They are counted as `walk_expected` counts, so that decoding and replay can be compared.
    """
    reached, accepted_at = np.zeros(K), np.zeros(K)
    total = drafted_total = accepted_total = emitted_total = 0
    for drafted, accepted, emitted, judged in rounds:
        # A round that reaches or accepts position k has reached or accepted all before it.
        reached[:judged] += 1
        accepted_at[:accepted] += 1
        total += 1
        drafted_total += drafted
        accepted_total += accepted
        emitted_total += emitted
    return RoundCounts(
        float(total),
        float(emitted_total),
        float(drafted_total),
        float(accepted_total),
        tuple(reached.tolist()),
        tuple(accepted_at.tolist()),
    )


def drafted_levels(
    K: int, lengths: Sequence[int], limits: Sequence[int], offered_R: ArrayLike | None
) -> NDArray[np.int64]:
    """Levels [R] drafted by a round at each start of each answer. Raises ValueError where K or a length is wrong."""
    if K < 0:
        raise ValueError(f"K = {K}: must be at least 0")
    wrong = [pair for pair in zip(lengths, limits, strict=True) if not 0 <= pair[0] <= pair[1]]
    if wrong:
        raise ValueError(f"an answer of {wrong[0][0]} tokens: must be between 0 and max_new_tokens = {wrong[0][1]}")
    # Row r has r + 1 tokens emitted, and the target's own token must still fit.
    answer_R, row_R = _places(lengths)
    drafted_R: NDArray[np.int64] = np.minimum(K, np.asarray(limits, np.int64)[answer_R] - row_R - 2)
    return drafted_R if offered_R is None else np.minimum(drafted_R, _rows(offered_R, len(row_R), "offered_R"))


def survival_token(p_RK: ArrayLike, q_RK: ArrayLike) -> Floats:
    """Survival under token verification: w_j = prod_{i<=j} min(1, q(x_i) / p(x_i)), x the answer.

    That is the chance that a chain drawn from q is accepted up to j (Leviathan et al. 2023, arXiv 2211.17192), given
    that the emitted tokens are x.
    """
    survival_RK: Floats = np.exp(np.cumsum(np.minimum(_log_ratio(p_RK, q_RK), 0.0), axis=1))
    return survival_RK


def survival_block(p_RK: ArrayLike, q_RK: ArrayLike) -> Floats:
    """Survival under block verification (Sun et al., arXiv 2403.10444): w_j = P_j * prod_{i<=j} q(x_i) / p(x_i).

    P_j restarts at 1 with each round.

    With R_j that product, P_j = min(P_{j-1} * p/q, 1) makes w_j = min(w_{j-1}, R_j): a running minimum, w_0 = 1.
    """
    product = np.cumsum(_log_ratio(p_RK, q_RK), axis=1)
    survival_RK: Floats = np.exp(np.minimum(np.minimum.accumulate(product, axis=1), 0.0))
    return survival_RK


def survival_match(q_RK: ArrayLike) -> Floats:
    """Survival of drawn drafts under rule `match`: w_j = prod_{i<=j} q(x_i), x the answer.

    A drafted token is accepted where it equals the target's own draw, which is the answer's token.
    """
    survival_RK: Floats = np.multiply.accumulate(np.asarray(q_RK, dtype=np.float64), axis=1)
    return survival_RK


def survival_chosen(run_R: ArrayLike, K: int) -> Floats:
    """Survival of drafts that are chosen, not drawn: 1 along the run of drafted answer tokens, 0 after it.

    It holds at temperature 0, and above it under the rules `onehot` and `match`, for chains and trees.
    """
    survival_RK: Floats = (np.arange(K) < np.asarray(run_R)[:, None]).astype(np.float64)
    return survival_RK


def _log_ratio(p_RK: ArrayLike, q_RK: ArrayLike) -> Floats:
    """log(q / p) [R, K]. An emitted token has p > 0; a p that was rounded to 0 counts as the smallest number."""
    p, q = np.asarray(p_RK, dtype=np.float64), np.asarray(q_RK, dtype=np.float64)
    if p.shape != q.shape or p.ndim != 2:
        raise ValueError(f"p_RK has shape {p.shape}, q_RK {q.shape}: one shape of two axes is needed")
    with np.errstate(divide="ignore"):
        return np.log(q) - np.log(np.maximum(p, _SMALLEST))


def _places(lengths: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Answer of each round start, and the row of each start among its answer's."""
    rounds = [max(length - 1, 0) for length in lengths]
    answer_R = np.repeat(np.arange(len(rounds)), rounds)
    first_A = np.cumsum([0, *rounds])[:-1]
    return answer_R, np.arange(len(answer_R)) - first_A[answer_R]


def _rows(value: ArrayLike, rows: int, name: str) -> NDArray[Any]:
    array = np.asarray(value)
    if len(array) != rows:
        raise ValueError(f"{name} has {len(array)} rows: one for each of {rows} round starts is needed")
    return array
