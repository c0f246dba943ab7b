"""Losslessness of the rules for sampled trees, by exact enumeration (`enumeration.py` says how), the wrong rules that
this enumeration catches, and by how much typical acceptance is off.
"""

import numpy as np
import pytest
import torch
from enumeration import Memoryless, Round, World, error, load, mean_accepted, round_error, round_law
from hypothesis import given, settings
from hypothesis import strategies as st

from draftforge.specdec import verify
from draftforge.specdec.accept_rules import RULES
from draftforge.specdec.proposers.tree_shape import ROOT, Drawn
from draftforge.specdec.tree import DraftTree
from draftforge.specdec.verify import (
    verify_block,
    verify_match,
    verify_multiround,
    verify_recursive,
    verify_traversal,
    verify_typical,
)

REAL = load()
SHAPES = {
    "siblings": (ROOT, ROOT, ROOT),
    "fork": (ROOT, ROOT, 0, 1),
    "late": (ROOT, 0, 0),
    "deep": (ROOT, ROOT, 0, 2),
    "depth-first": (ROOT, 0, 1, 0, ROOT),
    "scattered": (ROOT, ROOT, 0, 1, 0),
}
# rule, how drafts are drawn, how many drafts share a tree
WAYS: list[tuple[str, Drawn, int]] = [
    ("match", "deterministic", 1),
    ("match", "iid", 1),
    ("match", "without_replacement", 1),
    ("multiround", "iid", 1),
    ("multiround", "iid", 2),
    ("recursive", "without_replacement", 1),
    ("traversal", "iid", 1),
    ("traversal", "iid", 2),
    ("traversal", "without_replacement", 1),
]
SMALL = [World(seed, vocabulary=3) for seed in range(3)]
WORLDS = [*SMALL, World(4, vocabulary=4)]


def of_shape(shape: str, rule: str, drawn: Drawn, drafts: int = 1) -> Round:
    return Round(rule, REAL, drawn, SHAPES[shape], drafts)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_one_round_has_the_targets_distribution(shape: str, way: tuple[str, Drawn, int]) -> None:
    play = of_shape(shape, *way)
    worlds = SMALL if len(play.shape) > 4 else WORLDS
    assert max(round_error(play, world, depth=3) for world in worlds) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_several_rounds_have_the_targets_distribution(way: tuple[str, Drawn, int]) -> None:
    """Each begins in another context, where the last one ended."""
    play = of_shape("deep", *way)
    assert max(error(play, world, length=4, depth=2) for world in WORLDS[2:]) < 1e-12


@pytest.mark.parametrize("way", [*WAYS, ("typical", "deterministic", 1), ("typical", "iid", 1)], ids=str)
def test_at_temperature_zero_output_is_the_targets_best_tokens(way: tuple[str, Drawn, int]) -> None:
    play = of_shape("deep", *way)
    worlds = [World(world.seed, world.vocabulary, greedy=True) for world in WORLDS]
    assert max(error(play, world, length=4, depth=3) for world in worlds) < 1e-12


@pytest.mark.parametrize("drawn", ["deterministic", "iid", "without_replacement"])
@pytest.mark.parametrize("rule", ["token", "block", "multiround", "recursive", "traversal"])
def test_a_rule_that_reads_q_takes_exactly_the_drafts_for_which_it_is_lossless(rule: str, drawn: Drawn) -> None:
    if not RULES[rule].trees and drawn == "without_replacement":
        pytest.skip("an only child is drawn alike with and without replacement; rules for chains call it iid")
    play = of_shape("siblings", rule, drawn) if RULES[rule].trees else Round(rule, REAL, drawn)
    worst = max(round_error(play, world, depth=1) for world in WORLDS)
    assert worst < 1e-12 if drawn in RULES[rule].drawn else worst > 1e-2


def test_every_lossless_rule_is_proved_for_every_draft_that_it_takes() -> None:
    elsewhere = {("token", "iid"), ("block", "iid"), ("onehot", "deterministic")}  # test_verify.py, as is greedy
    promised = {(rule.name, drawn) for rule in RULES.values() if rule.lossless for drawn in rule.drawn}
    assert {(rule, drawn) for rule, drawn, _ in WAYS} | elsewhere == {way for way in promised if way[0] != "greedy"}


def test_typical_acceptance_is_lossy() -> None:
    assert not RULES["typical"].lossless
    for drawn in RULES["typical"].drawn:
        assert any(round_error(of_shape("deep", "typical", drawn), world, depth=3) > 1e-2 for world in WORLDS)


MUTANTS = {
    "accepts at u = h": [
        ("multiround", "u_N[child] < _ratio", "u_N[child] <= _ratio"),
        ("recursive", "u_N[child] < _ratio", "u_N[child] <= _ratio"),
        ("traversal", "u_N[node] < weight", "u_N[node] <= weight"),
    ],
    "residual of p": [
        ("multiround", "(rest_V - q_NV[child]).clamp(min=0.0)", "rest_V"),
        ("recursive", "(rest_V - q_V).clamp(min=0.0)", "rest_V"),
        ("traversal", "(weight * rest_V - q_V).clamp(min=0.0)", "(weight * rest_V)"),
    ],
    "residual of q - p": [
        ("multiround", "(rest_V - q_NV[child])", "(q_NV[child] - rest_V)"),
        ("recursive", "(rest_V - q_V)", "(q_V - rest_V)"),
        ("traversal", "(weight * rest_V - q_V)", "(q_V - weight * rest_V)"),
    ],
    "p not renormalised": [
        ("multiround", "_norm((rest_V - q_NV[child]).clamp(min=0.0), rest_V)", "(rest_V - q_NV[child]).clamp(min=0.0)"),
        ("recursive", "_norm((rest_V - q_V).clamp(min=0.0), rest_V)", "(rest_V - q_V).clamp(min=0.0)"),
        ("traversal", "_norm(residual_V, rest_V)", "residual_V"),
    ],
    "q not renormalised without a child": [
        (rule, "return _norm(q_V, q_V)", "return q_V") for rule in ("recursive", "traversal")
    ],
    "q keeps the rejected child": [
        ("recursive", "rejected.append(tree.tokens_N[child])", "pass"),
        ("traversal", 'if tree.drawn == "without_replacement"', "if False"),
    ],
    "q loses a child that may be drawn again": [
        ("multiround", "q_NV[child]", "_without(q_NV[child], [tree.tokens_N[c] for c in range(child)])"),
        ("traversal iid", 'if tree.drawn == "without_replacement"', "if True"),
    ],
    "q of the eldest sibling": [
        (rule, "q_NV[child]", "q_NV[tree.children(tree.parents_N[child])[0]]")
        for rule in ("multiround drafts", "traversal drafts")
    ],
    "rejected siblings not forgotten below": [
        ("recursive", "tree.children(child), []", "tree.children(child), rejected"),
        ("traversal", "rest_V, rejected = p_NV[node + 1], list[int]()", "rest_V, rejected = p_NV[node + 1], [0]"),
    ],
    "parent judged before its children": [
        (
            "traversal",
            "        for child in tree.children(node):\n            token",
            "        if node != ROOT and u_N[node] < weight:\n"
            "            return Verdict([], int(categorical(rest_V, u_final)))\n"
            "        for child in tree.children(node):\n            token",
        )
    ],
    "weight kept after a rejected child": [
        ("traversal", "weight, rest_V = _share(float(residual_V.sum()), 1.0 - weight), _norm", "rest_V = _norm"),
    ],
    "p kept after a rejected child": [
        ("traversal", "1.0 - weight), _norm(residual_V, rest_V)", "1.0 - weight), rest_V"),
    ],
    "weight not capped": [("traversal", "_ratio(rest_V, q_V, token), 1.0)", "_ratio(rest_V, q_V, token), 1e9)")],
    "child's weight without its parent's": [("traversal", "min(weight * _ratio", "min(_ratio")],
    "residual without its weight": [("traversal", "(weight * rest_V - q_V)", "(rest_V - q_V)")],
    "root's draw used again": [(rule, "u_final_D[len(accepted)]", "u_final_D[0]") for rule in ("match", "match iid")],
}
MUTANT_WAYS: dict[str, tuple[str, Drawn, int]] = {
    "match": ("match", "deterministic", 1),
    "match iid": ("match", "iid", 1),
    "multiround": ("multiround", "iid", 1),
    "multiround drafts": ("multiround", "iid", 2),
    "recursive": ("recursive", "without_replacement", 1),
    "traversal": ("traversal", "without_replacement", 1),
    "traversal iid": ("traversal", "iid", 1),
    "traversal drafts": ("traversal", "iid", 2),
}


@pytest.mark.parametrize(
    ("way", "old", "new"),
    [pytest.param(*edit, id=f"{edit[0]}: {name}") for name, edits in MUTANTS.items() for edit in edits],
)
def test_enumeration_kills_the_mutant(way: str, old: str, new: str) -> None:
    rule, drawn, drafts = MUTANT_WAYS[way]
    mutants = [Round(rule, load(old, new), drawn, shape, drafts) for shape in SHAPES.values()]
    assert any(round_error(mutant, world, depth=3) > 1e-3 for mutant in mutants for world in WORLDS)


def test_recursive_turns_a_chosen_tree_into_another_distribution() -> None:
    world = Memoryless(seed=0, p_V=(0.5, 0.3, 0.2), q_V=(0.6, 0.3, 0.1))
    law = round_law(Round("recursive", REAL, "deterministic", (ROOT, ROOT)), world, depth=1)
    first = [sum(mass for emitted, mass in law.items() if emitted[0] == token) for token in range(3)]
    assert first == pytest.approx([5 / 6, 0.0, 1 / 6])


@pytest.mark.slow
@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    vocabulary=st.integers(2, 3),
    shape=st.sampled_from(sorted(SHAPES)),
    other=st.sampled_from(
        [("recursive", "without_replacement", 1), ("multiround", "iid", 1), ("multiround", "iid", 2)]
    ),
)
def test_traversal_accepts_at_least_as_much(
    seed: int, vocabulary: int, shape: str, other: tuple[str, Drawn, int]
) -> None:
    world = World(seed, vocabulary)
    least = mean_accepted(of_shape(shape, *other), world, depth=3)
    assert mean_accepted(of_shape(shape, "traversal", *other[1:]), world, depth=3) >= least - 1e-12


def test_traversal_accepts_more_somewhere() -> None:
    traversal, recursive = (of_shape("deep", rule, "without_replacement") for rule in ("traversal", "recursive"))
    gain = [mean_accepted(traversal, world, 3) - mean_accepted(recursive, world, 3) for world in WORLDS]
    assert max(gain) > 0.05


@settings(max_examples=100)
@given(seed=st.integers(0, 10**6), drawn=st.sampled_from(["iid", "without_replacement"]))
def test_traversal_of_a_chain_is_block_verification(seed: int, drawn: Drawn) -> None:
    random = np.random.default_rng(seed)
    p_NV, q_KV = torch.tensor(random.dirichlet(np.ones(4), 4)), torch.tensor(random.dirichlet(np.ones(4), 3))
    tokens_K, u_K = random.integers(4, size=3).tolist(), random.random(3).tolist()
    traversed = verify_traversal(p_NV, q_KV, DraftTree.chain(tokens_K, drawn), u_K, 0.3)
    assert traversed == verify_block(p_NV, q_KV, tokens_K, u_K, 0.3)


class TestExamples:
    P = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]])
    Q = torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1]])
    PAIR = DraftTree.of([0, 1], [ROOT, ROOT], "without_replacement")

    def test_match_takes_one_number_a_level(self) -> None:
        chain = DraftTree.chain([0, 1], "iid")
        assert verify_match(self.P, chain, [0.4, 0.85, 0.5]) == ([0, 1], 2)
        assert verify_match(self.P, chain, [0.4, 0.95, 0.5]) == ([0], 2)
        assert verify_match(self.P, chain, [0.6, 0.0, 0.0]) == ([], 1)

    def test_match_takes_the_first_of_equal_siblings(self) -> None:
        tree = DraftTree.of([0, 0], [ROOT, ROOT], "iid")
        assert verify_match(self.P, tree, [0.0, 0.5]) == ([0], 1)

    def test_recursive_by_hand(self) -> None:
        # 0 is accepted below .5 / .8. Then p is (0, .2, .1) / .3 and q (0, .5, .5), so that 1 always is.
        q_NV = self.Q[[0, 0]]
        assert verify_recursive(self.P, q_NV, self.PAIR, [0.624, 0.0], 0.0) == ([0], 0)
        assert verify_recursive(self.P, q_NV, self.PAIR, [0.626, 0.999], 0.9) == ([1], 2)

    def test_multiround_reads_each_childs_own_q(self) -> None:
        # After 0 p is (0, 2/3, 1/3); 1 is accepted below 2/3 / .8, and then only 2 is left.
        tree = DraftTree.of([0, 1], [ROOT, ROOT], "iid")
        assert verify_multiround(self.P, self.Q, tree, [0.626, 0.833], 0.0) == ([1], 0)
        assert verify_multiround(self.P, self.Q, tree, [0.626, 0.834], 0.0) == ([], 2)

    def test_typical_compares_with_the_entropy(self) -> None:
        flat, sharp = torch.full((2, 64), 1 / 64), torch.tensor([[0.95, 0.05]] * 2)
        assert verify_typical(flat, DraftTree.chain([5], "deterministic"), 0.0).accepted == [0]
        assert verify_typical(sharp, DraftTree.chain([1], "deterministic"), 0.0) == ([], 0)
        assert verify_typical(sharp, DraftTree.chain([0], "deterministic"), 0.96) == ([0], 1)

    def test_typical_threshold_falls_with_the_entropy_from_a_cap(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(verify, "TYPICAL_EPSILON", 0.4)
        monkeypatch.setattr(verify, "TYPICAL_DELTA", 0.5)
        p_NV = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
        assert verify.typical_threshold(p_NV).tolist() == pytest.approx([0.125, 0.25, 0.4])

    def test_typical_keeps_the_first_of_the_longest_paths(self) -> None:
        tree = DraftTree.of([2, 0, 1, 2], [ROOT, ROOT, 1, 0], "deterministic")
        p_NV = self.P[[0, 2, 1, 0, 0]]
        assert verify_typical(p_NV, tree, 0.0) == ([1, 2], 0)
        assert verify_typical(self.P[[0, 0, 0]], self.PAIR, 0.6) == ([0], 1)

    def test_typical_keeps_the_likeliest_of_the_longest_paths(self) -> None:
        p_V, sure_V, torn_V = torch.tensor([[0.4, 0.6, 0.0], [0.9, 0.1, 0.0], [0.5, 0.5, 0.0]])
        pair = DraftTree.of([0, 1], [ROOT, ROOT], "deterministic")
        assert verify_typical(torch.stack([p_V] * 3), pair, 0.0).accepted == [1]
        # The whole path counts: .4 x .9 is more than .6 x .5, and .4 x .6 is less.
        tree = DraftTree.of([0, 1, 0, 1], [ROOT, ROOT, 0, 1], "deterministic")
        assert verify_typical(torch.stack([p_V, sure_V, torn_V, p_V, p_V]), tree, 0.0).accepted == [0, 2]
        assert verify_typical(torch.stack([p_V, p_V[[1, 0, 2]], torn_V, p_V, p_V]), tree, 0.0).accepted == [1, 3]

    @pytest.mark.parametrize("verify_tree", [verify_multiround, verify_recursive, verify_traversal])
    def test_riders_are_never_accepted(self, verify_tree: object) -> None:
        tree = DraftTree((0, 1), (ROOT, ROOT), (0, 0), (False, True), "iid")
        assert verify_tree(self.P, self.Q, tree, [0.0, 0.99], 0.0) == ([], 0)  # type: ignore[operator]

    def test_typical_ignores_riders(self) -> None:
        tree = DraftTree((0, 1), (ROOT, ROOT), (0, 0), (False, True), "iid")
        assert verify_typical(self.P, tree, 0.0) == ([1], 0)

    @pytest.mark.parametrize("verify_tree", [verify_multiround, verify_recursive, verify_traversal])
    def test_rejects_too_few_rows(self, verify_tree: object) -> None:
        with pytest.raises(ValueError, match="p: 2 rows: must be 3"):
            verify_tree(self.P[:2], self.Q, self.PAIR, [0.0, 0.0], 0.0)  # type: ignore[operator]
        with pytest.raises(ValueError, match="q: 1 rows: must be 2"):
            verify_tree(self.P, self.Q[:1], self.PAIR, [0.0, 0.0], 0.0)  # type: ignore[operator]
