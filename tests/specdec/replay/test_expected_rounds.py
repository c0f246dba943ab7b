"""The walk against the decoder's law: every draft, every accept, every answer of toy models, enumerated exactly."""

import itertools
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftforge.specdec.replay.expected_rounds import (
    RoundCounts,
    count_rounds,
    survival_block,
    survival_chosen,
    survival_match,
    survival_token,
    walk_expected,
)

V = 3
STOP = 2
Model = Callable[[tuple[int, ...]], np.ndarray]
Law = Callable[[list[np.ndarray], list[np.ndarray], tuple[int, ...]], list[tuple[float, np.ndarray]]]


def toy_model(seed: int, zeros: bool = False) -> Model:
    """A distribution that depends on the whole prefix."""

    def next_token(prefix: tuple[int, ...]) -> np.ndarray:
        p = np.random.default_rng([seed, len(prefix), *prefix]).dirichlet(np.full(V, 0.7))
        if zeros:
            p = np.where(p < 0.15, 0.0, p)
        return normalised(p)

    return next_token


# A law gives, for one round's drafted tokens x with q and p rows, [(P(accept exactly j), next token's distribution)].
def law_token(p: list[np.ndarray], q: list[np.ndarray], x: tuple[int, ...]) -> list[tuple[float, np.ndarray]]:
    out, survive = [], 1.0
    for i, token in enumerate(x):
        accept = min(1.0, p[i][token] / q[i][token])
        out.append((survive * (1 - accept), normalised(np.maximum(p[i] - q[i], 0))))
        survive *= accept
    return [*out, (survive, p[len(x)])]


def law_block(p: list[np.ndarray], q: list[np.ndarray], x: tuple[int, ...]) -> list[tuple[float, np.ndarray]]:
    g = len(x)
    P = [1.0]
    for i, token in enumerate(x):
        P.append(min(P[-1] * p[i][token] / q[i][token], 1.0))
    h = [1.0]
    for i in range(1, g + 1):
        if i == g:
            h.append(P[g])
        else:
            z = np.maximum(P[i] * p[i] - q[i], 0).sum()
            h.append(z / (z + 1 - P[i]) if z + 1 - P[i] > 0 else 1.0)
    out = []
    for j in range(g + 1):  # the last u_i < h_i is at j
        last = h[j] * float(np.prod([1 - h[i] for i in range(j + 1, g + 1)]))
        out.append((last, p[g] if j == g else normalised(np.maximum(P[j] * p[j] - q[j], 0))))
    return out


def law_onehot(p: list[np.ndarray], q: list[np.ndarray], x: tuple[int, ...]) -> list[tuple[float, np.ndarray]]:
    out, survive = [], 1.0
    for i, token in enumerate(x):
        out.append((survive * (1 - p[i][token]), normalised(np.where(np.arange(V) == token, 0, p[i]))))
        survive *= p[i][token]
    return [*out, (survive, p[len(x)])]


def law_match(p: list[np.ndarray], q: list[np.ndarray], x: tuple[int, ...]) -> list[tuple[float, np.ndarray]]:
    """The target draws its own token, which is the drafted one or one of the rest: as onehot, whatever x came from."""
    return law_onehot(p, q, x)


def normalised(x: np.ndarray) -> np.ndarray:
    total = float(x.sum())
    return np.asarray(x / total) if total > 0 else x


def enumerate_decoder(target: Model, draft: Model, law: Law, K: int, limit: int) -> dict[tuple[int, ...], np.ndarray]:
    """answer -> [P(answer), E[1(answer) * counts]]: rounds, tokens, drafted, accepted, reached_K, accepted_K."""
    totals: dict[tuple[int, ...], np.ndarray] = defaultdict(lambda: np.zeros(5 + 2 * K))

    def run(emitted: tuple[int, ...], mass: float, rounds: list[tuple[int, int, int, int]]) -> None:
        if mass == 0.0:
            return
        if len(emitted) == limit or (emitted and emitted[-1] == STOP):
            totals[emitted] += mass * np.array([1.0, *flat(count_rounds(rounds, K))])
            return
        if not emitted:  # the prefill
            for token, probability in enumerate(target(())):
                run((token,), mass * probability, rounds)
            return
        drafted = min(K, limit - len(emitted) - 1)
        for x in itertools.product(range(V), repeat=drafted):
            q = [draft(emitted + x[:i]) for i in range(drafted)]
            if law is law_onehot:
                drawn = float(all(token == int(row.argmax()) for token, row in zip(x, q)))
            else:
                drawn = float(np.prod([row[token] for token, row in zip(x, q)]))
            if drawn == 0.0:
                continue
            p = [target(emitted + x[:i]) for i in range(drafted + 1)]
            for j, (chance, final) in enumerate(law(p, q, x)):
                kept = x[:j]
                if STOP in kept:
                    kept = kept[: kept.index(STOP) + 1]
                    run(emitted + kept, mass * drawn * chance, [*rounds, (drafted, len(kept), len(kept), len(kept))])
                    continue
                for token, probability in enumerate(final):
                    entry = (drafted, j, j + 1, min(j + 1, drafted))
                    run((*emitted, *kept, token), mass * drawn * chance * probability, [*rounds, entry])

    run((), 1.0, [])
    return totals


def flat(counts: RoundCounts) -> list[float]:
    return [counts.rounds, counts.tokens, counts.drafted, counts.accepted, *counts.reached_K, *counts.accepted_K]


def replayed(answer: tuple[int, ...], target: Model, draft: Model, law: Law, K: int, limit: int) -> RoundCounts:
    n = len(answer)
    p_TK, q_TK = np.ones((max(n - 1, 0), K)), np.zeros((max(n - 1, 0), K))
    run_T = np.zeros(max(n - 1, 0), dtype=int)
    for r, j in itertools.product(range(n - 1), range(K)):
        if 1 + r + j < n:
            row = draft(answer[: 1 + r + j])
            p_TK[r, j] = target(answer[: 1 + r + j])[answer[1 + r + j]]
            q_TK[r, j] = row[answer[1 + r + j]]
            run_T[r] += run_T[r] == j and int(row.argmax()) == answer[1 + r + j]
    if law is law_onehot:
        w = survival_chosen(run_T, K)
    elif law is law_match:
        w = survival_match(q_TK)
    else:
        w = (survival_token if law is law_token else survival_block)(p_TK, q_TK)
    (counts,) = walk_expected(w, K, [n], [limit])
    return counts


@pytest.mark.parametrize("law", [law_token, law_block, law_onehot, law_match])
@pytest.mark.parametrize("K, limit, zeros", [(1, 4, False), (2, 5, False), (3, 5, True), (4, 4, False), (2, 1, False)])
def test_expected_counts_equal_the_decoders_law_answer_by_answer(law: Law, K: int, limit: int, zeros: bool) -> None:
    """Clipping at max_new_tokens and the stop included; given each answer, not only on average."""
    target, draft = toy_model(1, zeros), toy_model(2, zeros)
    totals = enumerate_decoder(target, draft, law, K, limit)
    assert sum(entry[0] for entry in totals.values()) == pytest.approx(1.0, abs=1e-12)
    assert any(answer[-1] == STOP for answer in totals)
    for answer, (probability, *expected) in totals.items():
        by_chain = np.prod([target(answer[:i])[answer[i]] for i in range(len(answer))])
        assert probability == pytest.approx(by_chain, abs=1e-12)  # lossless, or the law itself is wrong
        counts = flat(replayed(answer, target, draft, law, K, limit))
        np.testing.assert_allclose(np.array(expected) / probability, counts, atol=1e-9)


def walk_certain(
    run_T: list[int], K: int, n_answer: int, max_new_tokens: int, offered_T: list[int] | None = None
) -> RoundCounts:
    (counts,) = walk_expected(survival_chosen(run_T, K), K, [n_answer], [max_new_tokens], offered_T)
    return counts


def test_a_greedy_walk_by_hand() -> None:
    # answer of 6 tokens, room for 10, K = 3. t=1: run 2 -> 3 emitted; t=4: run 9, 2 left -> accepts both, no bonus.
    counts = walk_certain([2, 0, 0, 9, 0], K=3, n_answer=6, max_new_tokens=10)
    assert counts == RoundCounts(2.0, 5.0, 6.0, 4.0, (2.0, 2.0, 1.0), (2.0, 2.0, 0.0))


def test_the_end_by_length_clips_drafts() -> None:
    # t=1 drafts min(3, 4-1-1) = 2 and accepts them; the bonus is the last token: no round is left.
    assert walk_certain([9, 9, 9], 3, 4, 4) == RoundCounts(1.0, 3.0, 2.0, 2.0, (1.0, 1.0, 0.0), (1.0, 1.0, 0.0))
    # nothing accepted: drafts 2, 1, 0
    assert walk_certain([0, 0, 0], 3, 4, 4) == RoundCounts(3.0, 3.0, 3.0, 0.0, (2.0, 0.0, 0.0), (0.0, 0.0, 0.0))


def test_a_proposer_may_offer_fewer_tokens() -> None:
    counts = walk_certain([3, 3, 3, 3], 3, 5, 9, offered_T=[0, 1, 0, 0])
    assert counts == RoundCounts(3.0, 4.0, 1.0, 1.0, (1.0, 0.0, 0.0), (1.0, 0.0, 0.0))


@pytest.mark.parametrize("n_answer", [0, 1])
def test_an_answer_without_rounds(n_answer: int) -> None:
    nothing = RoundCounts(0.0, 0.0, 0.0, 0.0, (0.0, 0.0), (0.0, 0.0))
    assert walk_expected(np.zeros((0, 2)), 2, [n_answer], [8]) == [nothing]


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[int], int, int, int]:
    n_answer = draw(st.integers(1, 14))
    K = draw(st.integers(0, 5))
    limit = n_answer + draw(st.integers(0, 8))
    return draw(st.lists(st.integers(0, 7), min_size=n_answer - 1, max_size=n_answer - 1)), K, n_answer, limit


def jumped(run_T: list[int], K: int, n_answer: int, limit: int) -> RoundCounts:
    """Greedy decoding round by round."""
    rounds: list[tuple[int, int, int, int]] = []
    emitted = 1
    while emitted < n_answer:
        drafted = min(K, limit - emitted - 1)
        accepted = min(run_T[emitted - 1], drafted, n_answer - emitted)
        step = min(accepted + 1, n_answer - emitted)
        # A run that reaches the stop ends there: what was drafted after it is not reached.
        rounds.append((drafted, accepted, step, accepted if step == accepted else min(accepted + 1, drafted)))
        emitted += step
    return count_rounds(rounds, K)


@given(runs())
def test_certain_survival_is_greedy_decoding(case: tuple[list[int], int, int, int]) -> None:
    run_T, K, n_answer, limit = case
    counts = walk_certain(run_T, K, n_answer, limit)
    assert counts == jumped(run_T, K, n_answer, limit)
    assert counts.tokens == n_answer - 1
    assert counts.accepted == sum(counts.accepted_K)
    assert 0 <= counts.rounds + counts.accepted - counts.tokens <= 1  # only an accepted stop saves a bonus


@st.composite
def ratios(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    T, K = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    positive = st.floats(1e-6, 1.0)
    p = [[draw(positive) for _ in range(K)] for _ in range(T)]
    q = [[draw(st.one_of(st.just(0.0), positive)) for _ in range(K)] for _ in range(T)]
    return np.array(p), np.array(q)


@given(ratios())
def test_survival_formulas_match_their_recursions(case: tuple[np.ndarray, np.ndarray]) -> None:
    p, q = case
    token, block = survival_token(p, q), survival_block(p, q)
    for r in range(len(p)):
        P = product = survive = 1.0
        for j in range(p.shape[1]):
            survive *= min(1.0, q[r, j] / p[r, j])
            product *= q[r, j] / p[r, j]
            P = min(P * p[r, j] / q[r, j], 1.0) if q[r, j] > 0 else P
            assert token[r, j] == pytest.approx(survive, abs=1e-12)
            assert block[r, j] == pytest.approx(P * product, rel=1e-6, abs=1e-12)
    assert (block >= token - 1e-12).all()  # block never accepts less
    assert (np.diff(block, axis=1) <= 0).all() and (np.diff(token, axis=1) <= 0).all()


def test_a_probability_rounded_to_zero_stays_a_number() -> None:
    p, q = np.array([[0.0, 0.5]]), np.array([[0.3, 0.0]])
    assert survival_token(p, q).tolist() == [[1.0, 0.0]]
    assert survival_block(p, q).tolist() == [[1.0, 0.0]]


@given(st.lists(runs(), min_size=1, max_size=6), st.integers(0, 5), st.integers(0, 1 << 32))
def test_answers_walked_together_count_as_each_alone(
    cases: list[tuple[list[int], int, int, int]], K: int, seed: int
) -> None:
    """Of other lengths, limits, trees and offers, whatever their order; none lends another its mass."""
    draw = np.random.default_rng(seed)
    lengths, limits = [case[2] for case in cases], [case[3] for case in cases]
    ends = np.cumsum([0, *(length - 1 for length in lengths)])
    w_RK = np.minimum.accumulate(draw.random((ends[-1], K)), axis=1)
    offered_R, nodes_R = draw.integers(0, K + 1, ends[-1]), draw.integers(0, 9, ends[-1])
    together = walk_expected(w_RK, K, lengths, limits, offered_R, nodes_R)
    for start, end, length, limit, counts in zip(ends[:-1], ends[1:], lengths, limits, together, strict=True):
        own = slice(start, end)
        assert [counts] == walk_expected(w_RK[own], K, [length], [limit], offered_R[own], nodes_R[own])


def test_bad_shapes_are_named() -> None:
    with pytest.raises(ValueError, match="w_RK has 1 rows: one for each of 4 round starts"):
        walk_certain([1], 2, 5, 8)
    with pytest.raises(ValueError, match=r"at least K = 3 columns"):
        walk_expected(np.zeros((4, 2)), 3, [5], [8])
    with pytest.raises(ValueError, match="an answer of 5 tokens: must be between 0 and max_new_tokens = 4"):
        walk_certain([1, 1, 1, 1], 2, 5, 4)
