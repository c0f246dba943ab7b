"""Draft configurations that are scored: chains of each K, and trees."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ..specdec.proposers.base import Proposer
from ..specdec.proposers.tree_settings import StaticTree, Tree, tree_identity


class DraftConfig(NamedTuple):
    """Draft configuration of a round: a chain of K tokens, or the tree of a name."""

    levels: int
    """K of a chain, or the depth of the tree."""
    tree: str = ""

    @property
    def label(self) -> str:
        """Label in tables: K, or the tree's name."""
        return self.tree or str(self.levels)

    def __str__(self) -> str:
        """Name in messages: "K=4" or "tree wide"."""
        return f"tree {self.tree}" if self.tree else f"K={self.levels}"


@dataclass(frozen=True)
class ProposerSpec:
    """One way of drafting: chains of some lengths, or one tree."""

    make: Callable[[], Proposer]
    """Factory of proposers: each decoding run needs one of its own."""
    depths: tuple[int, ...]
    """K of each chain, or the tree's levels."""
    tree: str = ""
    """Name of the tree; empty: chains."""
    fixed: Tree | None = None
    """Shape of the tree for this draft; None: chains."""

    @cached_property
    def proposer(self) -> Proposer:
        return self.make()

    @property
    def configs(self) -> list[DraftConfig]:
        return [DraftConfig(depth, self.tree) for depth in self.depths]

    @property
    def work(self) -> dict[str, Any] | None:
        """Shape of the tree as its times depend on it; None: chains.

        A static tree's is the number of nodes of each level, and how many of them have children and so are read by the
        draft.
        """
        if not isinstance(self.fixed, StaticTree):
            return tree_identity(self.fixed)
        shape = self.fixed.shape
        read = set(shape.inner)
        return {"nodes_and_read": [[len(level), len(read.intersection(level))] for level in shape.levels]}
