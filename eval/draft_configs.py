"""What is scored of a draft: chains of each K, and trees."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ..specdec.proposers.base import Proposer
from ..specdec.proposers.tree_settings import StaticTree, Tree


class DraftConfig(NamedTuple):
    """How a round drafts: a chain, or the tree of that name."""

    levels: int
    """K of a chain, or how deep the tree is."""
    tree: str = ""

    @property
    def label(self) -> str:
        """As tables show it: K, or the tree's name."""
        return self.tree or str(self.levels)

    def __str__(self) -> str:
        """As messages show it."""
        return f"tree {self.tree}" if self.tree else f"K={self.levels}"


@dataclass(frozen=True)
class ProposerSpec:
    """One way of drafting: chains of some lengths, or one tree."""

    make: Callable[[], Proposer]
    """Makes a proposer of its own for each decoding run."""
    depths: tuple[int, ...]
    """K of each chain, or the tree's levels."""
    tree: str = ""
    """Its name; empty: chains."""
    fixed: Tree | None = None
    """The tree as this draft drafts it; None: chains."""

    @cached_property
    def proposer(self) -> Proposer:
        return self.make()

    @property
    def configs(self) -> list[DraftConfig]:
        return [DraftConfig(depth, self.tree) for depth in self.depths]

    @property
    def work(self) -> dict[str, Any] | None:
        """What the tree's times depend on: of a static one, how many nodes of each level there are and are read."""
        if not isinstance(self.fixed, StaticTree):
            return None if self.fixed is None else self.fixed.model_dump(mode="json")
        shape = self.fixed.shape
        read = set(shape.inner)
        return {"nodes_and_read": [[len(level), len(read.intersection(level))] for level in shape.levels]}
