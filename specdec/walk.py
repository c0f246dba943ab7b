"""Replay's walk: from what a draft would have got right along a recorded answer to the counts that decoding gives.

Shape letters: T round starts (row r: the round starts with 1 + r answer tokens emitted), K depths (column j: the
drafted token j + 1), N answer tokens. Pure arrays on the CPU; no models.

Counting. The prefill and the token it yields are not a round. A round with t tokens emitted drafts
min(K, max_new_tokens - t - 1) tokens. A stop ends the answer: drafted tokens after it are drafted, but neither reached
nor accepted, and a run that accepts it gets no bonus. `tokens` counts what rounds emit, so N - 1 in all.
"""

from collections.abc import Iterable
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
    w_TK: ArrayLike,
    K: int,
    n_answer: int,
    max_new_tokens: int,
    offered_T: ArrayLike | None = None,
    nodes_T: ArrayLike | None = None,
) -> RoundCounts:
    """Expected counts given the answer: push the mass of round starts forward.

    Where every w is 0 or 1 (temperature 0, and drafts of chosen siblings) the mass jumps from round to round, as the
    decoder does, and the counts are whole.

    w_TK[r, j]: probability that a round starting there accepts at least j + 1 tokens, given the answer (`survival_*`).
    offered_T: levels that judge the answer's tokens at each start, where that may be fewer than K (prompt lookup, or
    trees in which the answer's way ends early).
    nodes_T: nodes drafted by a round at each start, where that is a tree; else one a level.
    """
    w = _starts(w_TK, n_answer, max_new_tokens, "w_TK").astype(np.float64)
    if n_answer > 1 and (w.ndim != 2 or w.shape[1] < K):
        raise ValueError(f"w_TK has shape {w.shape}: two axes and at least K = {K} columns are needed")
    drafted_T = drafted_levels(K, n_answer, max_new_tokens, offered_T)
    nodes = drafted_T if nodes_T is None else _starts(nodes_T, n_answer, max_new_tokens, "nodes_T")
    starts = np.zeros(n_answer + 2)  # probability that a round starts with that many tokens emitted
    starts[1] = 1.0
    reached, accepted = np.zeros(K), np.zeros(K)
    rounds = drafted = 0.0
    for emitted in range(1, n_answer):
        mass = starts[emitted]
        if mass == 0.0:  # no round starts here
            continue
        inside = min(int(drafted_T[emitted - 1]), n_answer - emitted)
        at_least = np.concatenate(([1.0], w[emitted - 1, :inside], [0.0]))  # index j: accepts j tokens or more
        rounds += mass
        drafted += mass * nodes[emitted - 1]
        reached[:inside] += mass * at_least[:inside]
        accepted[:inside] += mass * at_least[1 : inside + 1]
        # j accepted and the correction or bonus; where j reaches the answer's end the last index takes the overshoot
        starts[emitted + 1 : emitted + inside + 2] += mass * (at_least[:-1] - at_least[1:])
    tokens = float(max(n_answer - 1, 0))
    return RoundCounts(
        float(rounds), tokens, float(drafted), float(accepted.sum()), tuple(reached.tolist()), tuple(accepted.tolist())
    )


def count_rounds(rounds: Iterable[tuple[int, int, int, int]], K: int) -> RoundCounts:
    """Counts of decoded rounds (drafted, accepted, emitted, reached), by the same rules as the walk."""
    reached, accepted_at = np.zeros(K), np.zeros(K)
    total = drafted_total = accepted_total = emitted_total = 0
    for drafted, accepted, emitted, judged in rounds:
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


def drafted_levels(K: int, n_answer: int, max_new_tokens: int, offered_T: ArrayLike | None) -> NDArray[np.int64]:
    """Levels drafted by a round at each start."""
    if K < 0:
        raise ValueError(f"K = {K}: must be at least 0")
    emitted = np.arange(1, max(n_answer, 1))
    drafted = np.minimum(K, max_new_tokens - emitted - 1)
    if offered_T is not None:
        drafted = np.minimum(drafted, _starts(offered_T, n_answer, max_new_tokens, "offered_T")[: len(drafted)])
    return drafted.astype(np.int64)


def windows(value_N: ArrayLike, K: int, fill: float = 1.0) -> Floats:
    """Per-token values as rows of round starts: out[r, j] = value[1 + r + j], `fill` past the answer's end."""
    value = np.asarray(value_N, dtype=np.float64)
    starts = max(len(value) - 1, 0)
    padded = np.concatenate((value, np.full(K, fill)))
    rows_TK: Floats = padded[1 + np.arange(starts)[:, None] + np.arange(K)[None, :]]
    return rows_TK


def survival_token(p_TK: ArrayLike, q_TK: ArrayLike) -> Floats:
    """Token verification: w_j = prod_{i<=j} min(1, q(x_i) / p(x_i)), x the answer."""
    survival_TK: Floats = np.exp(np.cumsum(np.minimum(_log_ratio(p_TK, q_TK), 0.0), axis=1))
    return survival_TK


def survival_block(p_TK: ArrayLike, q_TK: ArrayLike) -> Floats:
    """Block verification: w_j = P_j * prod_{i<=j} q(x_i) / p(x_i), P_j restarting at 1 with each round.

    With R_j that product, P_j = min(P_{j-1} * p/q, 1) makes w_j = min(w_{j-1}, R_j): a running minimum, w_0 = 1.
    """
    product = np.cumsum(_log_ratio(p_TK, q_TK), axis=1)
    survival_TK: Floats = np.exp(np.minimum(np.minimum.accumulate(product, axis=1), 0.0))
    return survival_TK


def survival_match(q_TK: ArrayLike) -> Floats:
    """Drawn drafts, accepted where they equal the target's own draw: w_j = prod_{i<=j} q(x_i), x the answer."""
    survival_TK: Floats = np.multiply.accumulate(np.asarray(q_TK, dtype=np.float64), axis=1)
    return survival_TK


def survival_chosen(run_T: ArrayLike, K: int) -> Floats:
    """Drafts that are chosen, not drawn: the round surely goes on along the run, while the answer's token is drafted.

    Temperature 0, and above it the rules `onehot` and `match`, of chains and of trees.
    """
    survival_TK: Floats = (np.arange(K) < np.asarray(run_T)[:, None]).astype(np.float64)
    return survival_TK


def _log_ratio(p_TK: ArrayLike, q_TK: ArrayLike) -> Floats:
    """log(q / p). p of an emitted token is positive; one that arithmetic rounded to 0 counts as the smallest number."""
    p, q = np.asarray(p_TK, dtype=np.float64), np.asarray(q_TK, dtype=np.float64)
    if p.shape != q.shape or p.ndim != 2:
        raise ValueError(f"p_TK has shape {p.shape}, q_TK {q.shape}: one shape of two axes is needed")
    with np.errstate(divide="ignore"):
        return np.log(q) - np.log(np.maximum(p, _SMALLEST))


def _starts(value: ArrayLike, n_answer: int, max_new_tokens: int, name: str) -> NDArray[Any]:
    array = np.asarray(value)
    if not 0 <= n_answer <= max_new_tokens:
        raise ValueError(f"n_answer = {n_answer}: must be between 0 and max_new_tokens = {max_new_tokens}")
    if len(array) < n_answer - 1:
        raise ValueError(f"{name} has {len(array)} rows: n_answer - 1 = {n_answer - 1} round starts are needed")
    return array
