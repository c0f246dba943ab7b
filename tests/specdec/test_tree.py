"""Draft trees: shape, order and what they refuse."""

import pytest

from draftforge.errors import InputError
from draftforge.specdec.tree import ROOT, DraftTree


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
