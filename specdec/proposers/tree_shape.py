"""Tree shapes of static trees, which are the same in every round: chains, Medusa's choices, sampled trees.

Shapes: N nodes, L levels, H heads, R ranks, T round starts, K levels of a trace.
"""

import heapq
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ...errors import CorruptDataError, InputError
from ...storage import read_json

if TYPE_CHECKING:  # a recipe needs the words of this file alone: NumPy is imported where a shape is followed
    import numpy as np
    from numpy.typing import NDArray

Drawn = Literal["deterministic", "iid", "without_replacement"]
"""Way in which siblings were drawn, which decides the accept rules that may judge them.

`deterministic`: the likeliest tokens were chosen. There is no chance in it that a ratio p / q could undo: `recursive`
on a chosen top-2 with p = (.5, .3, .2) and q = (.6, .3, .1) emits (.83, 0, .17). Rules that read no q hold for it.
`iid`: each sibling was drawn from q anew, so a token may stand there twice. Merged drafts are of this kind.
`without_replacement`: each was drawn from q without its elder siblings, renormalised; where q has no token left, there
is no node. The recorded q is the full one, and the rule takes the elders out again.

Which tokens a sampled tree holds must follow from those draws alone. It is never pruned or sorted by what was drawn,
and its shape is fixed before: stopping where q(x) is low turns (.5, .3, .2) into (.55, .33, .12).
"""

ROOT = -1
"""The parent of first-level nodes: the last emitted token, which is not a drafted node."""
Choice = tuple[int, ...]
"""A node by its way from the root: (0, 2) is the third choice below the first one."""


class TreeShape:
    """Tree shape: nodes ordered level by level, siblings by rank. Raises InputError for a node without parent."""

    def __init__(self, choices: Iterable[Sequence[int]]) -> None:
        self.choices: tuple[Choice, ...] = tuple(sorted({tuple(c) for c in choices}, key=lambda c: (len(c), c)))
        # Sorted by level, parents stand before their children.
        for choice in self.choices:
            if not choice or min(choice) < 0:
                raise InputError(f"tree: choice {list(choice)}: must be one rank a level, each at least 0")
            if len(choice) > 1 and choice[:-1] not in self._index:
                raise InputError(f"tree: choice {list(choice)}: its parent {list(choice[:-1])} is not in the tree")

    @classmethod
    def chain(cls, length: int) -> "TreeShape":
        return cls((0,) * depth for depth in range(1, length + 1))

    @classmethod
    def branching(cls, widths: Sequence[int]) -> "TreeShape":
        """Tree in which every node of level i has widths[i] children."""
        # Each level extends every node of the level above by all ranks.
        level: list[Choice] = [()]
        choices: list[Choice] = []
        for width in widths:
            level = [(*choice, rank) for choice in level for rank in range(width)]
            choices += level
        return cls(choices)

    @classmethod
    def read(cls, path: Path) -> "TreeShape":
        """Tree shape of a choices file as Medusa's: a JSON list of lists of ranks.

        Raises InputError or MissingFileError.
        """
        try:
            raw = read_json(path)
        except CorruptDataError as error:
            raise InputError(str(error)) from None

        # true and false are ints in Python, but no ranks.
        if not isinstance(raw, list) or not all(_is_choice(choice) for choice in raw):
            raise InputError(f"{path}: must be a list of lists of whole numbers, such as [[0], [1], [0, 0]]")
        return cls(raw)

    @classmethod
    def of_accuracies(cls, accuracy_HR: Sequence[Sequence[float]], nodes: int) -> "TreeShape":
        """Tree of the `nodes` likeliest choices, if heads were right independently (Medusa, arXiv 2401.10774, App. C).

        accuracy_HR[h][r]: how often head h's rank-r token is the target's.
        """
        # Ranks of each head by accuracy. The heap holds the best open child of each node, by share of texts right.
        best_HR = [sorted(enumerate(row), key=lambda one: (-one[1], one[0])) for row in accuracy_HR]
        offers: list[tuple[float, int, Choice, int, float]] = []  # -share, depth, way to the parent, place, its share

        def offer(parent: Choice, place: int, share: float) -> None:
            ranks = best_HR[len(parent)] if len(parent) < len(best_HR) else []
            if place < len(ranks) and share * ranks[place][1] > 0:
                heapq.heappush(offers, (-share * ranks[place][1], len(parent), parent, place, share))

        # Greedy: a node's share is never above its parent's or a better sibling's, so offers come in order.
        chosen: list[Choice] = []
        offer((), 0, 1.0)
        while offers and len(chosen) < nodes:
            negative, depth, parent, place, share = heapq.heappop(offers)
            chosen.append((*parent, best_HR[depth][place][0]))
            offer(parent, place + 1, share)  # the next sibling
            offer(chosen[-1], 0, -negative)  # the first child
        return cls(chosen)

    def __len__(self) -> int:
        return len(self.choices)

    @property
    def depth(self) -> int:
        return len(self.choices[-1]) if self.choices else 0

    def cut(self, levels: int) -> "TreeShape":
        """Tree shape without the nodes below level `levels`."""
        return self if levels >= self.depth else TreeShape(c for c in self.choices if len(c) <= levels)

    def narrowed(self, width: int) -> "TreeShape":
        """Tree shape without ranks of `width` or more: for a draft with `width` tokens."""
        return TreeShape(c for c in self.choices if max(c) < width)

    def follow(self, rank_TK: "NDArray[np.int64]") -> "tuple[NDArray[np.int64], NDArray[np.int64]]":
        """Match ways from the root, one rank a level (UNRANKED: no child), against the shape.

        Returns for each way the levels that it has in common with the shape, and the levels at which the shape has
        nodes to compare it with: one more, where it ends above some.
        """
        import numpy as np

        # All ways start at the root.
        node_T = np.full(len(rank_TK), ROOT)
        run_T, on_T = np.zeros(len(rank_TK), np.int64), np.ones(len(rank_TK), bool)
        nobody = self._child_MR.shape[1] - 1

        # One level of all ways at a time; a way that has left the shape stays at its last node.
        for rank_T in rank_TK.T:
            child_T = self._child_MR[node_T - ROOT, np.minimum(rank_T, nobody)]
            on_T &= child_T != ROOT
            node_T = np.where(on_T, child_T, node_T)
            run_T += on_T
        return run_T, run_T + (self._child_MR[node_T - ROOT] != ROOT).any(1)

    @cached_property
    def sizes(self) -> "NDArray[np.int64]":
        """Nodes on the first 0, 1, ... levels, [L+1]."""
        import numpy as np

        return np.array([0, *(level.stop for level in self.levels)])

    @cached_property
    def parents(self) -> list[int]:
        """Index of each node's parent, or ROOT."""
        return [self._index.get(choice[:-1], ROOT) for choice in self.choices]

    @cached_property
    def levels(self) -> list[range]:
        """The nodes of each level."""
        bounds = [sum(len(c) <= level for c in self.choices) for level in range(self.depth + 1)]
        return [range(start, stop) for start, stop in pairwise(bounds)]

    @cached_property
    def inner(self) -> list[int]:
        """Nodes that have children."""
        return sorted(set(self.parents) - {ROOT})

    @cached_property
    def _child_MR(self) -> "NDArray[np.int64]":  # noqa: N802
        """Child of each rank (columns) below the root (row 0) and each node (rows from 1 on); ROOT: none.

        The last column is always ROOT: larger ranks are looked up there.
        """
        import numpy as np

        # Row node - ROOT: ROOT is -1, so the root has row 0.
        ranks = 1 + max((choice[-1] for choice in self.choices), default=-1)
        child_MR = np.full((len(self) + 1, ranks + 1), ROOT)
        for node, (choice, parent) in enumerate(zip(self.choices, self.parents)):
            child_MR[parent - ROOT, choice[-1]] = node
        return child_MR

    @cached_property
    def _index(self) -> dict[Choice, int]:
        return {choice: place for place, choice in enumerate(self.choices)}


def _is_choice(raw: object) -> bool:
    return isinstance(raw, list) and all(isinstance(rank, int) and not isinstance(rank, bool) for rank in raw)
