"""Draft trees: shape, order and what they refuse."""

import pytest
import torch

from draftforge.errors import InputError
from draftforge.specdec.proposers.tree_shape import ROOT
from draftforge.specdec.tree import DraftTree, TreeBatch


def test_a_chain_is_a_tree_of_single_children() -> None:
    chain = DraftTree.chain([7, 7, 9], "iid")
    assert chain.parents_N == (ROOT, 0, 1)
    assert chain.position_N == (0, 1, 2)
    assert chain.candidate_N == (True, True, True)
    assert [chain.children(node) for node in (ROOT, 0, 1, 2)] == [[0], [1], [2], []]
    assert len(chain) == 3


def test_an_empty_draft_is_a_tree() -> None:
    assert len(DraftTree.chain([], "deterministic")) == 0
    assert DraftTree.chain([], "deterministic").children(ROOT) == []


def test_children_stand_in_draft_order_whatever_the_layout() -> None:
    depth_first = DraftTree.of([5, 6, 8, 4], [ROOT, 0, 1, ROOT], "deterministic")
    assert depth_first.children(ROOT) == [0, 3]
    assert depth_first.position_N == (0, 1, 2, 0)


def test_riders_are_nobodys_children_and_stand_anywhere() -> None:
    tree = DraftTree((5, 6, 7), (ROOT, ROOT, 1), (0, 4, 9), (True, False, False), "deterministic")
    assert tree.children(ROOT) == [0]
    assert tree.children(1) == []


def test_only_iid_siblings_may_be_equal() -> None:
    assert DraftTree.of([5, 5], [ROOT, ROOT], "iid").children(ROOT) == [0, 1]
    for drawn in ("deterministic", "without_replacement"):
        with pytest.raises(InputError, match="node 1: token 5 repeats"):
            DraftTree.of([5, 5], [ROOT, ROOT], drawn)


@pytest.mark.parametrize("parents", [[0], [ROOT, 1], [ROOT, 2, 0], [-2]])
def test_parents_come_before_children(parents: list[int]) -> None:
    with pytest.raises(InputError, match="an earlier node"):
        DraftTree.of(list(range(len(parents))), parents, "deterministic")


def test_columns_have_one_length() -> None:
    with pytest.raises(InputError, match="as long"):
        DraftTree((5, 6), (ROOT, 0), (0,), (True, True), "deterministic")


def test_a_candidate_stands_at_its_depth_below_candidates() -> None:
    with pytest.raises(InputError, match="node 1: position 2 must be its depth, 1"):
        DraftTree((5, 6), (ROOT, 0), (0, 2), (True, True), "deterministic")
    with pytest.raises(InputError, match="node 1: a candidate's parent"):
        DraftTree((5, 6), (ROOT, 0), (0, 1), (False, True), "deterministic")


class TestBatch:
    FORK = DraftTree.of([5, 6, 8, 4], [ROOT, 0, 1, 0], "iid")
    RIDER = DraftTree((5, 7), (ROOT, ROOT), (0, 4), (True, False), "iid")
    EMPTY = DraftTree.chain([], "iid")

    def test_trees_stand_side_by_side_padded_on_the_right(self) -> None:
        batch = TreeBatch.of([self.RIDER, self.FORK, self.EMPTY])
        assert batch.tokens_BN.tolist() == [[5, 7, 0, 0], [5, 6, 8, 4], [0, 0, 0, 0]]
        assert batch.parents_BN.tolist() == [[ROOT] * 4, [ROOT, 0, 1, 0], [ROOT] * 4]
        assert batch.candidate_BN.tolist() == [[True, False, False, False], [True] * 4, [False] * 4]
        assert (batch.depth, batch.drawn) == (3, "iid")
        assert [column.dtype for column in batch[:3]] == [torch.long, torch.long, torch.bool]

    def test_ancestors_include_the_node_itself(self) -> None:
        batch = TreeBatch.of([self.FORK, self.RIDER])
        assert batch.ancestors_BNN[0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]
        assert batch.ancestors_BNN[1].equal(torch.eye(4, dtype=torch.bool))
        assert (batch.ancestors_BNN.sum(-1) - 1).tolist() == [[0, 1, 2, 1], [0, 0, 0, 0]]

    def test_chains_of_several_lengths(self) -> None:
        tokens_BN = torch.tensor([[5, 6, 7], [8, 0, 0]])
        chains = TreeBatch.chains(tokens_BN, torch.tensor([3, 1]), "deterministic")
        of_trees = TreeBatch.of([DraftTree.chain([5, 6, 7], "deterministic"), DraftTree.chain([8], "deterministic")])
        assert chains.candidate_BN.equal(of_trees.candidate_BN)
        assert chains.parents_BN[0].equal(of_trees.parents_BN[0])
        assert chains.depth == of_trees.depth == 3

    def test_nothing_drafted(self) -> None:
        batch = TreeBatch.of([self.EMPTY])
        assert batch.depth == 0
        assert batch.ancestors_BNN.shape == (1, 0, 0)

    def test_trees_of_a_batch_are_drawn_in_one_way(self) -> None:
        with pytest.raises(InputError, match=r"trees: drawn in 2 ways \['deterministic', 'iid'\]: must be one"):
            TreeBatch.of([self.EMPTY, DraftTree.chain([1], "deterministic")])
