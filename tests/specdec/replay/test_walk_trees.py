"""The walk of trees of chosen siblings against the decoder's law, enumerated exactly on toy models."""

from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pytest

from draftforge.specdec.proposers.tree_shape import TreeShape
from draftforge.specdec.replay.expected_rounds import (
    RoundCounts,
    count_rounds,
    drafted_levels,
    survival_chosen,
    walk_expected,
)

V, STOP = 4, 3
Way = tuple[int, ...]
Model = Callable[[Way], np.ndarray]
Rounds = list[tuple[int, int, int, int]]


def toy_model(seed: int) -> Model:
    """A distribution that depends on the whole prefix."""
    return lambda prefix: np.random.default_rng([seed, len(prefix), *prefix]).dirichlet(np.full(V, 0.7))


def drafted_tokens(draft: Model, shape: TreeShape, emitted: Way) -> dict[Way, Way]:
    """Tokens along the way to each choice."""
    tokens: dict[Way, Way] = {(): ()}
    for choice in shape.choices:
        above = tokens[choice[:-1]]
        ranked = np.argsort(-draft((*emitted, *above)), kind="stable")
        tokens[choice] = (*above, int(ranked[choice[-1]]))
    return tokens


def enumerate_decoder(target: Model, draft: Model, shape: TreeShape, K: int, limit: int) -> dict[Way, list[np.ndarray]]:
    """answer -> its decodings, each as (probability, counts times it). The target's own token decides every level:
    that is rule match, and onehot accepts a child with the same probability and ends with the same token.
    """
    found: dict[Way, list[np.ndarray]] = defaultdict(list)

    def decode(emitted: Way, mass: float, rounds: Rounds) -> None:
        if len(emitted) == limit or STOP in emitted:
            found[emitted].append(mass * np.array([1.0, *flat(count_rounds(rounds, K))]))
            return
        cut = shape.cut(min(K, limit - len(emitted) - 1)) if emitted else TreeShape([])
        tokens = drafted_tokens(draft, cut, emitted)
        go((), emitted, mass, rounds, set(tokens.values()) - {()})

    def go(way: Way, emitted: Way, mass: float, rounds: Rounds, nodes: set[Way]) -> None:
        """The round has accepted `way`; the target draws what follows."""
        below = [node for node in nodes if node[:-1] == way]
        for token, share in enumerate(target((*emitted, *way))):
            longer = (*way, token)
            if longer not in nodes:
                entry = (len(nodes), len(way), len(longer), len(way) + bool(below))
                decode((*emitted, *longer), mass * share, [*rounds, entry] if emitted else rounds)
            elif token == STOP:
                entry = (len(nodes), len(longer), len(longer), len(longer))
                decode((*emitted, *longer), mass * share, [*rounds, entry])
            else:
                go(longer, emitted, mass * share, rounds, nodes)

    decode((), 1.0, [])
    return found


def flat(counts: RoundCounts) -> list[float]:
    return [counts.rounds, counts.tokens, counts.drafted, counts.accepted, *counts.reached_K, *counts.accepted_K]


def replayed(answer: Way, draft: Model, shape: TreeShape, K: int, limit: int) -> RoundCounts:
    n = len(answer)
    rank_TK = np.full((max(n - 1, 0), K), 1 << 30)
    for r in range(n - 1):
        for j in range(min(K, n - 1 - r)):
            place = 1 + r + j
            rank_TK[r, j] = np.argsort(-draft(answer[:place]), kind="stable").tolist().index(answer[place])
    run_T, judged_T = shape.cut(K).follow(rank_TK)
    levels_T = drafted_levels(K, [n], [limit], None)
    nodes_T = shape.cut(K).sizes[np.minimum(levels_T, shape.cut(K).depth)]
    judged_T = np.minimum(judged_T, levels_T)
    (counts,) = walk_expected(survival_chosen(run_T, K), K, [n], [limit], judged_T, nodes_T)
    return counts


SHAPES = {
    "chain": TreeShape.chain(3),
    "bushy": TreeShape([[0], [1], [2], [0, 0], [0, 1], [2, 0], [0, 1, 0], [2, 0, 0], [2, 0, 1]]),
    "odd": TreeShape([[1], [1, 0], [1, 2], [1, 0, 3]]),  # without the likeliest
}


@pytest.mark.slow
@pytest.mark.parametrize("K, limit", [(1, 4), (2, 5), (3, 5), (4, 3)])
@pytest.mark.parametrize("name", SHAPES)
def test_counts_of_trees_equal_the_decoders_law_answer_by_answer(name: str, K: int, limit: int) -> None:
    """Of one answer every decoding counts the same: what was drafted decides the rounds, not what was drawn."""
    target, draft, shape = toy_model(1), toy_model(2), SHAPES[name]
    found = enumerate_decoder(target, draft, shape, K, limit)
    assert sum(entry[0] for entries in found.values() for entry in entries) == pytest.approx(1.0, abs=1e-12)
    assert any(answer[-1] == STOP for answer in found) and any(answer[-1] != STOP for answer in found)
    for answer, entries in found.items():
        probability, *expected = np.sum(entries, axis=0)
        counts = flat(replayed(answer, draft, shape, K, limit))
        np.testing.assert_allclose(np.array(expected) / probability, counts, atol=1e-9)
