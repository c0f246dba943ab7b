"""What the accept rules of a batch share: one round's numbers, the walk down the trees, arithmetic on rows.

Shapes: B slots, N drafted nodes, M = N + 1 rows of the target, D levels, V vocabulary. Rows become float64 one [B, V]
slice at a time: as a whole [B, M, V] they would need twice the memory of the logits.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .sampling import categorical
from .tree import ROOT, TreeBatch


class BatchVerdict(NamedTuple):
    """What one round emits in each slot."""

    length_B: Tensor
    """How many nodes were accepted."""
    path_BD: Tensor
    """Their indexes, root to leaf; -1 past the end."""
    token_B: Tensor
    """The correction or bonus that follows them."""


class Given(NamedTuple):
    """One round's numbers."""

    p_BMV: Tensor
    q_BNV: Tensor
    tree: TreeBatch
    u_BN: Tensor
    u_final_BD: Tensor

    def p(self, node_B: Tensor | int) -> Tensor:
        """The target's distribution [B, V] after a node of each slot, or after ROOT."""
        return _distribution(_rows(self.p_BMV, node_B + 1))

    def q(self, node_B: Tensor | int, without_BV: Tensor | None = None) -> Tensor:
        """The distribution [B, V] that a node of each slot was drawn from; all zeros where nothing is left of it."""
        q_BV = _rows(self.q_BNV, node_B)
        return _distribution(q_BV if without_BV is None else q_BV.masked_fill(without_BV, 0.0))

    def children(self, node_B: Tensor) -> Tensor:
        """True [B, N] at the candidates below a node of each slot, or below ROOT."""
        return self.tree.candidate_BN & (self.tree.parents_BN == node_B[:, None])

    def draw(self, p_BV: Tensor) -> Tensor:
        return categorical(p_BV, self.u_final_BD[:, 0])


class Walk:
    """Where each slot stands: at the root, or at the last node that it accepted."""

    def __init__(self, tree: TreeBatch) -> None:
        self.node_B = tree.tokens_BN.new_full((len(tree.tokens_BN),), ROOT)
        self.length_B = torch.zeros_like(self.node_B)
        self._path_BD = self.node_B[:, None].repeat(1, tree.depth + 1)  # the last column takes what is no step

    def step(self, moves_B: Tensor, to_B: Tensor) -> None:
        """Accept node `to` in the slots that move."""
        column_B = torch.where(moves_B, self.length_B, self._path_BD.shape[1] - 1)
        self._path_BD.scatter_(1, column_B[:, None], to_B[:, None])
        self.node_B = torch.where(moves_B, to_B, self.node_B)
        self.length_B = self.length_B + moves_B

    def step_to_first(self, matching_BN: Tensor) -> Tensor:
        """Accept the first matching node, if any; tells which slots moved."""
        moves_B = matching_BN.any(1)
        self.step(moves_B, matching_BN.to(torch.uint8).argmax(1))
        return moves_B

    def end(self, token_B: Tensor) -> BatchVerdict:
        return BatchVerdict(self.length_B, self._path_BD[:, :-1], token_B)


def pick(rows_BN: Tensor, index_B: Tensor) -> Tensor:
    """One entry [B] of each slot's row."""
    return rows_BN.gather(1, index_B[:, None])[:, 0]


def ratio(p_BV: Tensor, q_BV: Tensor, token_B: Tensor) -> Tensor:
    """p(x) / q(x) [B] of a drafted token; 0 where q(x) = 0."""
    p_B, q_B = pick(p_BV, token_B), pick(q_BV, token_B)
    return torch.where(q_B > 0.0, p_B / q_B, 0.0)


def residual(weight_B: Tensor, p_BV: Tensor, q_BV: Tensor) -> Tensor:
    """max(P p - q, 0) [B, V]."""
    return (weight_B[:, None] * p_BV - q_BV).clamp(min=0.0)


def norm(weights_BV: Tensor, otherwise_BV: Tensor) -> Tensor:
    """norm(weights) [B, V]; `otherwise` where they have no mass."""
    mass_B1 = weights_BV.sum(1, keepdim=True)
    return torch.where(mass_B1 > 0.0, weights_BV / mass_B1, otherwise_BV)


def share(part_B: Tensor, rest_B: Tensor) -> Tensor:
    """part / (part + rest) [B], and 1 where `rest` is 0."""
    return torch.where(rest_B > 0.0, part_B / (part_B + rest_B), 1.0)


def _rows(rows_BMV: Tensor, row_B: Tensor | int) -> Tensor:
    """One row [B, V] of each slot, all the same one or each its own."""
    if isinstance(row_B, int):
        return rows_BMV[:, row_B]
    return rows_BMV[torch.arange(len(row_B), device=row_B.device), row_B]


def _distribution(rows_BV: Tensor) -> Tensor:
    """In float64, summing to one; zeros stay zeros."""
    rows_BV = rows_BV.double()
    return norm(rows_BV, rows_BV)
