"""Tree shapes: order, cutting, Medusa's choices files, the tree that measured accuracies ask for."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftforge.errors import InputError, MissingFileError
from draftforge.specdec.proposers.tree_shape import TreeShape


def test_nodes_stand_level_by_level_and_know_their_parents() -> None:
    shape = TreeShape([[1], [0, 0], [0], [0, 1], [1, 0], [0, 1, 0]])
    assert shape.choices == ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0))
    assert shape.parents == [-1, -1, 0, 0, 1, 3]
    assert shape.levels == [range(0, 2), range(2, 5), range(5, 6)]
    assert shape.inner == [0, 1, 3] and shape.depth == 3
    assert shape.cut(2).choices == shape.choices[:5] and shape.cut(7) is shape and len(shape.cut(0)) == 0


def test_chains_and_branching() -> None:
    assert TreeShape.chain(3).choices == ((0,), (0, 0), (0, 0, 0))
    assert TreeShape.branching([2, 2]).parents == [-1, -1, 0, 0, 1, 1]
    assert TreeShape.chain(0).levels == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[0], [1, 0]]", r"choice \[1, 0\]: its parent \[1\] is not in the tree"),
        ("[[0], [-1]]", "each at least 0"),
        ("[[0], []]", "one rank a level"),
        ('[[0], ["1"]]', "must be a list of lists of whole numbers"),
        ("[[0], [true]]", "must be a list of lists of whole numbers"),
        ("{}", "must be a list of lists"),
        ("[[0]", "not valid JSON"),
    ],
)
def test_bad_choices_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "choices.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        TreeShape.read(path)


def test_choices_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text("[[0], [0, 0], [1], [0, 2]]")
    assert TreeShape.read(tmp_path / "c.json").choices == ((0,), (1,), (0, 0), (0, 2))
    with pytest.raises(MissingFileError, match="no such file"):
        TreeShape.read(tmp_path / "none.json")


def test_measured_accuracies_give_the_best_tree() -> None:
    """No other tree of so many nodes expects more accepted tokens."""
    accuracy = [[0.6, 0.2, 0.05], [0.5, 0.15, 0.1], [0.4, 0.3, 0.0]]

    def expected(choices: tuple[tuple[int, ...], ...]) -> float:
        total = 0.0
        for choice in choices:
            share = 1.0
            for head, rank in enumerate(choice):
                share *= accuracy[head][rank]
            total += share
        return total

    every = [c for depth in (1, 2, 3) for c in itertools.product(range(3), repeat=depth)]
    for nodes in (1, 3, 4):
        whole = (c for c in itertools.combinations(every, nodes) if all(len(x) == 1 or x[:-1] in c for x in c))
        best = max(expected(c) for c in whole)
        assert expected(TreeShape.of_accuracies(accuracy, nodes).choices) == pytest.approx(best)
    possible = [c for c in every if 2 not in c[2:]]  # the third head is never right at rank 2
    assert len(TreeShape.of_accuracies(accuracy, 500)) == len(possible)  # all that may be right, no more


def test_few_tokens_to_choose_from_leave_a_narrow_tree() -> None:
    shape = TreeShape([[0], [1], [2], [0, 2], [1, 0], [2, 0], [1, 0, 1]])
    assert shape.narrowed(2).choices == ((0,), (1,), (1, 0), (1, 0, 1))
    assert len(shape.narrowed(3)) == len(shape) and len(shape.narrowed(0)) == 0


def test_a_shape_counts_its_nodes_by_level() -> None:
    assert TreeShape([[0], [1], [0, 0], [0, 1], [1, 0], [0, 1, 0]]).sizes.tolist() == [0, 2, 5, 6]
    assert TreeShape([]).sizes.tolist() == [0]


choices = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=8)
ranks = st.lists(st.lists(st.sampled_from([0, 1, 2, 3, 4, 1 << 30]), min_size=4, max_size=4), min_size=1, max_size=6)


@given(choices, ranks)
def test_ways_are_followed_as_far_as_the_shape_goes(leaves: list[list[int]], rows: list[list[int]]) -> None:
    shape = TreeShape(leaf[: depth + 1] for leaf in leaves for depth in range(len(leaf)))
    run_T, judged_T = shape.follow(np.array(rows))
    for row, run, judged in zip(rows, run_T, judged_T):
        longest = max(length for length in range(5) if length == 0 or tuple(row[:length]) in shape.choices)
        goes_on = any(choice[:-1] == tuple(row[:longest]) for choice in shape.choices)
        assert (run, judged) == (longest, longest + goes_on)
