"""Losslessness of the rules for chains and for chosen children, by exact enumeration (`enumeration.py` says how), and
the wrong rules that this enumeration catches.
"""

from collections.abc import Callable

import pytest
import torch
from enumeration import CHAIN, Memoryless, Round, World, error, load, mean_accepted
from hypothesis import given, settings
from hypothesis import strategies as st

from draftforge.specdec import verify
from draftforge.specdec.proposers.tree_shape import ROOT
from draftforge.specdec.tree import DraftTree
from draftforge.specdec.verify import verify_block, verify_greedy, verify_onehot, verify_token

REAL = load()
TREE = (ROOT, 0, 1, 1, 0, 4, ROOT, 6, 7)  # depth first, narrower below the less likely
TOKEN, BLOCK = Round("token", REAL), Round("block", REAL)
LOSSLESS = [TOKEN, BLOCK, *(Round("onehot", REAL, "deterministic", shape) for shape in (CHAIN, TREE))]
GREEDY = [Round("greedy", REAL, "deterministic", shape) for shape in (CHAIN, TREE)]
# world, length of the output, depth of the draft
GAMES = [*((World(seed), 5, 3) for seed in range(4)), *((World(seed, vocabulary=4), 4, 3) for seed in range(6, 9))]


def label(play: Round) -> str:
    return f"{play.rule}-{'chain' if play.shape == CHAIN else 'tree'}"


@pytest.mark.parametrize("play", LOSSLESS, ids=label)
@pytest.mark.parametrize(("world", "length", "depth"), GAMES)
def test_output_has_the_targets_distribution(play: Round, world: World, length: int, depth: int) -> None:
    assert error(play, world, length, depth) < 1e-12


@pytest.mark.parametrize("play", GREEDY + LOSSLESS, ids=label)
@pytest.mark.parametrize(("world", "length", "depth"), GAMES[::3])
def test_at_temperature_zero_output_is_the_targets_best_tokens(
    play: Round, world: World, length: int, depth: int
) -> None:
    assert error(play, World(world.seed, world.vocabulary, greedy=True), length, depth) < 1e-12


RESIDUAL = "(weight * p_NV[row] - q_KV[row])"
MUTANTS = {
    "accepts at u = h": [
        ("token", "u_K[length] < _ratio", "u_K[length] <= _ratio"),
        ("block", "u_K[i - 1] < threshold", "u_K[i - 1] <= threshold"),
        ("onehot", "u_N[child] < float", "u_N[child] <= float"),
    ],
    "residual of p": [(rule, RESIDUAL, "p_NV[row]") for rule in ("token", "block")],
    "residual of q - p": [(rule, RESIDUAL, "(q_KV[row] - weight * p_NV[row])") for rule in ("token", "block")],
    "residual of a q that does not sum to one": [
        (rule, RESIDUAL, "(weight * p_NV[row] - q_KV[row] / 2)") for rule in ("token", "block")
    ],
    "bonus from q": [
        (rule, "        return p_NV[row]", "        return q_KV[-1] if row else p_NV[row]")
        for rule in ("token", "block")
    ],
    "accepts with q / p": [
        (rule, "float(p_V[token]) / q if q > 0.0", "q / p if (p := float(p_V[token])) > 0.0")
        for rule in ("token", "block")
    ],
    "block stops at the first failure": [
        ("block", "length, rest_V = i, residual_V", "length, rest_V = i, residual_V\n        else:\n            break")
    ],
    "block's residual without its weight": [("block", RESIDUAL, "(p_NV[row] - q_KV[row])")],
    "block's weight not capped": [("block", "tokens_K[i - 1]), 1.0)", "tokens_K[i - 1]), 1e9)")],
    "block's last threshold like the others": [("block", "if i < drafted else weight", "")],
    "block's residual of the longest draft": [("block", "_norm(rest_V,", "_norm(residual_V if drafted else rest_V,")],
    "onehot keeps the rejected child": [("onehot", "rest_V[token] = 0.0", "pass")],
    "onehot does not renormalise": [("onehot", "rest_V[token] / rest_V.sum()", "rest_V[token]")],
}


@pytest.mark.parametrize(
    ("rule", "old", "new"),
    [pytest.param(*edit, id=f"{edit[0]}: {name}") for name, edits in MUTANTS.items() for edit in edits],
)
def test_enumeration_kills_the_mutant(rule: str, old: str, new: str) -> None:
    mutant = Round(rule, load(old, new), *(("deterministic", TREE) if rule == "onehot" else ()))
    assert any(error(mutant, *game) > 1e-3 for game in GAMES)


def test_enumeration_kills_uniforms_reused_in_the_next_round() -> None:
    assert any(error(BLOCK, *game, reuse=True) > 1e-3 for game in GAMES)


def test_papers_example() -> None:
    world = Memoryless(seed=0, vocabulary=2, p_V=(1 / 3, 2 / 3), q_V=(2 / 3, 1 / 3))
    assert mean_accepted(TOKEN, world, depth=2) == pytest.approx(10 / 9)
    assert mean_accepted(BLOCK, world, depth=2) == pytest.approx(11 / 9)


@settings(max_examples=100)
@given(seed=st.integers(0, 10**6), vocabulary=st.integers(2, 3), depth=st.integers(1, 3))
def test_block_accepts_at_least_as_much_as_token(seed: int, vocabulary: int, depth: int) -> None:
    world = World(seed, vocabulary)
    assert mean_accepted(BLOCK, world, depth) >= mean_accepted(TOKEN, world, depth) - 1e-12


class TestEdges:
    P = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]])

    def test_greedy_takes_logits_and_follows_the_tree(self) -> None:
        tree = DraftTree.of([1, 0, 2, 1], [ROOT, ROOT, 1, 1], "deterministic")
        logits = torch.zeros(5, 3)
        logits[0, 0] = logits[2, 1] = logits[4, 2] = 7.0
        assert verify_greedy(logits, tree) == ([1, 3], 2)

    @pytest.mark.parametrize("verify_chain", [verify_token, verify_block])
    def test_a_draft_equal_to_the_target_is_always_accepted(self, verify_chain: Callable[..., verify.Verdict]) -> None:
        u_K = torch.full((2,), 1.0 - 2.0**-53, dtype=torch.float64)
        assert verify_chain(self.P, self.P[:2], [2, 0], u_K, 0.0) == ([0, 1], 0)

    @pytest.mark.parametrize("verify_chain", [verify_token, verify_block])
    def test_a_token_that_q_cannot_draw_is_rejected(self, verify_chain: Callable[..., verify.Verdict]) -> None:
        q_KV = torch.tensor([[0.0, 1.0, 0.0]])
        assert verify_chain(self.P[:2], q_KV, [0], [0.0], 0.0) == ([], 0)

    def test_riders_are_never_accepted(self) -> None:
        tree = DraftTree((0, 1), (ROOT, ROOT), (0, 0), (False, True), "deterministic")
        assert verify_greedy(self.P, tree) == ([], 0)
        assert verify_onehot(self.P, tree, [0.0, 0.9], 0.0) == ([], 0)

    def test_rejects_a_target_with_too_few_rows(self) -> None:
        with pytest.raises(ValueError, match="p: 3 rows: must be 4"):
            verify_greedy(self.P, DraftTree.chain([0, 0, 0], "deterministic"))
        with pytest.raises(ValueError, match="q: 2 rows: must be 1"):
            verify_token(self.P[:2], self.P[:2], [0], [0.0], 0.0)

    def test_inputs_are_left_as_they_were(self) -> None:
        p_NV = self.P.double()
        before = p_NV.clone()
        verify_onehot(p_NV, DraftTree.of([0, 1], [ROOT, ROOT], "deterministic"), [0.9, 0.9], 0.5)
        assert torch.equal(p_NV, before)
