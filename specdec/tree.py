"""Draft trees: the tokens that a draft proposes for one round. A chain is a tree of single children.

Shapes: B slots, N drafted nodes, in the order in which the target sees them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import InputError
from .kv_cache import CacheStep, KVCache, runs_triton
from .proposers.tree_shape import ROOT, Drawn


@dataclass(frozen=True)
class DraftTree:
    """Draft tree of one round. Parents come before children; siblings stand in draft order.

    Raises InputError for a tree that breaks the order, or whose chosen siblings repeat a token.
    """

    tokens_N: tuple[int, ...]
    parents_N: tuple[int, ...]
    """Index of each node's parent, or ROOT."""
    position_N: tuple[int, ...]
    """Distance of each node from the first drafted position; for a candidate, its depth (0: child of the root)."""
    candidate_N: tuple[bool, ...]
    """Whether each node may be accepted; false: a rider, which the target only evaluates in the same pass."""
    drawn: Drawn

    def __post_init__(self) -> None:
        # Columns of one length, parents first, candidates below candidates, and distinct siblings unless drawn iid.
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
        return cls(tuple(tokens_N), tuple(parents_N), tuple(_depths(parents_N)), (True,) * len(tokens_N), drawn)

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


def _depths(parents_N: Sequence[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents_N:
        depths.append(0 if parent == ROOT else depths[parent] + 1)
    return depths


class TreeBatch(NamedTuple):
    """Batch of draft trees, one a slot, on the device, padded on the right to the largest. Ordered as `DraftTree`."""

    tokens_BN: Tensor
    parents_BN: Tensor
    """Index of each node's parent, or ROOT."""
    candidate_BN: Tensor
    """Whether each node may be accepted; false: padding, or a rider, which the target only evaluates."""
    depth: int
    """Levels of the deepest tree; a number of the host, so that no loop over levels waits for the device."""
    drawn: Drawn

    @classmethod
    def of(cls, trees: Sequence[DraftTree], device: torch.device | str = "cpu") -> "TreeBatch":
        """Batch of at least one tree, a slot each. Raises InputError unless all were drawn in the same way."""
        drawn = {tree.drawn for tree in trees}
        if len(drawn) != 1:
            raise InputError(f"trees: drawn in {len(drawn)} ways {sorted(drawn)}: must be one")
        # Padding is no candidate, whatever its token and parent.
        nodes = max(len(tree) for tree in trees)

        def padded(columns: Iterable[Sequence[int]], filler: int) -> Tensor:
            rows = [[*column, *[filler] * (nodes - len(column))] for column in columns]
            return torch.tensor(rows, dtype=torch.long, device=device)

        return cls(
            padded((tree.tokens_N for tree in trees), 0),
            padded((tree.parents_N for tree in trees), ROOT),
            padded((tree.candidate_N for tree in trees), 0).bool(),
            # -1 stands for the root, so that a batch of empty trees has depth 0.
            max(depth + 1 for tree in trees for depth in (-1, *_depths(tree.parents_N))),
            drawn.pop(),
        )

    @classmethod
    def chains(cls, tokens_BN: Tensor, counts_B: Tensor, drawn: Drawn) -> "TreeBatch":
        """Batch of chains: each row's first `counts[b]` tokens, each the only child of the one before."""
        batch, nodes = tokens_BN.shape
        index_N = torch.arange(nodes, device=tokens_BN.device)
        candidate_BN = index_N < counts_B[:, None]
        return cls(tokens_BN, (index_N - 1).expand(batch, nodes), candidate_BN, nodes, drawn)

    def below_last_token(self, cache: KVCache) -> CacheStep:
        """Cache step of the target's pass over [last token, nodes]."""
        if runs_triton(self.parents_BN.device):
            from .kernels.trees import branch

            return cache.branch(*branch(self.parents_BN, self.depth + 1, cache.lengths_S, None)[:3])
        return cache.branch(*self.below_one_root())

    def below_one_root(self) -> tuple[Tensor, Tensor]:
        """Depths [B, M] and the tree attention mask [B, M, M] of [last token, nodes], M = N + 1.

        Each entry sees the last token, its ancestors and itself.
        """
        return tree_mask(F.pad(self.parents_BN + 1, (1, 0), value=-1), self.depth + 1)

    def children(self, node_B: Tensor) -> Tensor:
        """True [B, N] at the candidates below a node of each tree, or below ROOT."""
        return self.candidate_BN & (self.parents_BN == node_B[:, None])

    def goes_on(self, path_BD: Tensor) -> Tensor:
        """Whether a candidate stands below the end of each path (node indexes, -1 past its end), [B]."""
        # Parents come before children, so a path ends at its largest index; an empty one ends at -1, which is ROOT.
        ends_B = path_BD.amax(1) if self.depth else path_BD.new_full((len(path_BD),), ROOT)
        return self.children(ends_B).any(1)

    @property
    def ancestors_BNN(self) -> Tensor:  # noqa: N802
        """True at [b, n, a] where node a is node n or lies on its path to the root."""
        return tree_mask(self.parents_BN, self.depth)[1]


def tree_mask(parents_BF: Tensor, levels: int, new: int | None = None) -> tuple[Tensor, Tensor]:
    """Depths [B, F] of tree entries and the attention mask [B, N, F] of the last `new` (None: all) of them.

    `parents_BF`: place of each entry's parent among them, -1: none. `levels`: of the deepest entry. An entry sees its
    ancestors and itself.
    """
    batch, entries = parents_BF.shape
    new = entries if new is None else new
    if entries and runs_triton(parents_BF.device):
        from .kernels.trees import mask

        return mask(parents_BF, levels, new)
    # Climb from every entry at once, a level a step, and mark where each arrives; a last column takes the root's -1.
    above_BX = F.pad(parents_BF, (0, 1), value=-1).remainder(entries + 1)
    at_BF = torch.arange(entries, device=parents_BF.device).expand(batch, -1)
    visible_BFX = torch.zeros(batch, entries, entries + 1, dtype=torch.bool, device=parents_BF.device)
    for _ in range(levels):
        visible_BFX.scatter_(2, at_BF[..., None], True)
        at_BF = above_BX.gather(1, at_BF)
    visible_BFF = visible_BFX[..., :entries]
    return visible_BFF.sum(-1) - 1, visible_BFF[:, entries - new :]
