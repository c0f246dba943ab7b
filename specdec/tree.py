"""The tokens that a draft proposes for one round, as a tree. A chain is a tree of single children.

Shapes: N drafted nodes, in the order in which the target sees them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import InputError

Drawn = Literal["deterministic", "iid", "without_replacement"]
"""How siblings were drawn: chosen (the k most likely), or sampled with or without replacement."""

ROOT = -1
"""The parent of first-level nodes: the last emitted token, which is not a drafted node."""


@dataclass(frozen=True)
class DraftTree:
    """Drafted tokens of one round. Parents come before children; siblings stand in draft order."""

    tokens_N: tuple[int, ...]
    parents_N: tuple[int, ...]
    """Index of each node's parent, or ROOT."""
    position_N: tuple[int, ...]
    """Distance from the first drafted position; of a candidate, its depth (0: child of the root)."""
    candidate_N: tuple[bool, ...]
    """False: a rider, which the target evaluates in the same pass but may never accept."""
    drawn: Drawn

    def __post_init__(self) -> None:
        lengths = {len(self.parents_N), len(self.position_N), len(self.candidate_N)}
        if lengths != {len(self.tokens_N)}:
            raise InputError(f"tree: {len(self.tokens_N)} tokens: all other columns must be as long, not {lengths}")
        _check_order(self.parents_N)
        for node in range(len(self)):
            if self.candidate_N[node]:
                self._check_candidate(node)
        if self.drawn != "iid":
            self._check_distinct_siblings()

    @classmethod
    def of(cls, tokens_N: Sequence[int], parents_N: Sequence[int], drawn: Drawn) -> "DraftTree":
        """A tree in which every node is a candidate."""
        _check_order(parents_N)
        depths: list[int] = []
        for parent in parents_N:
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        return cls(tuple(tokens_N), tuple(parents_N), tuple(depths), (True,) * len(tokens_N), drawn)

    @classmethod
    def chain(cls, tokens_N: Sequence[int], drawn: Drawn) -> "DraftTree":
        """A tree in which each token is the only child of the one before."""
        return cls.of(tokens_N, range(ROOT, len(tokens_N) - 1), drawn)

    def __len__(self) -> int:
        return len(self.tokens_N)

    def children(self, node: int) -> list[int]:
        """The candidates below a node (or ROOT), in draft order."""
        return [child for child, parent in enumerate(self.parents_N) if parent == node and self.candidate_N[child]]

    def _check_candidate(self, node: int) -> None:
        parent = self.parents_N[node]
        if parent != ROOT and not self.candidate_N[parent]:
            raise InputError(f"tree: node {node}: a candidate's parent must be a candidate, and {parent} is a rider")
        depth = 0 if parent == ROOT else self.position_N[parent] + 1
        if self.position_N[node] != depth:
            raise InputError(f"tree: node {node}: position {self.position_N[node]} must be its depth, {depth}")

    def _check_distinct_siblings(self) -> None:
        seen: set[tuple[int, int]] = set()
        for node in (node for node in range(len(self)) if self.candidate_N[node]):
            edge = (self.parents_N[node], self.tokens_N[node])
            if edge in seen:
                raise InputError(f"tree: node {node}: token {edge[1]} repeats a sibling's, which only iid draws may do")
            seen.add(edge)


def _check_order(parents_N: Sequence[int]) -> None:
    for node, parent in enumerate(parents_N):
        if not ROOT <= parent < node:
            raise InputError(f"tree: node {node}: parent {parent} must be {ROOT} (the root) or an earlier node")
