"""Tree rules for a batch that judge node by node: multiround, recursive, traversal, typical.

Shapes: B slots, N drafted nodes, M = N + 1 columns (the root, then the nodes), D levels, V vocabulary.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from .batch_round import BatchVerdict, Given, Walk, norm, pick, ratio, residual, share
from .tree import ROOT, TreeBatch
from .verify import typical_threshold


def siblings(given: Given) -> BatchVerdict:
    """multiround and recursive. Parents stand before children and siblings in order, so one scan tries each in turn."""
    tree, walk, rest_BV = given.tree, Walk(given.tree), given.p(ROOT)
    rejected = _Rejected(tree, rest_BV)
    for node in range(tree.tokens_BN.shape[1]):
        tried_B = tree.candidate_BN[:, node] & (tree.parents_BN[:, node] == walk.node_B)
        token_B, q_BV = tree.tokens_BN[:, node], given.q(node, rejected.tokens_BV)
        accepted_B = tried_B & (given.u_BN[:, node] < ratio(rest_BV, q_BV, token_B))
        rejected_B = tried_B & ~accepted_B
        rest_BV = torch.where(rejected_B[:, None], norm((rest_BV - q_BV).clamp(min=0.0), rest_BV), rest_BV)
        rest_BV = torch.where(accepted_B[:, None], given.p(node), rest_BV)
        rejected.forget(accepted_B)
        rejected.add(rejected_B, token_B)
        walk.step(accepted_B, torch.full_like(token_B, node))
    return walk.end(given.draw(rest_BV))


class _Rejected:
    """Tokens of the rejected siblings, to be taken out of q where they were drawn without replacement."""

    def __init__(self, tree: TreeBatch, like_BV: Tensor) -> None:
        self.tokens_BV = torch.zeros_like(like_BV, dtype=torch.bool) if tree.drawn == "without_replacement" else None

    def forget(self, slots_B: Tensor) -> None:
        if self.tokens_BV is not None:
            self.tokens_BV = self.tokens_BV & ~slots_B[:, None]

    def add(self, slots_B: Tensor, token_B: Tensor) -> None:
        if self.tokens_BV is not None:
            self.tokens_BV.scatter_(1, token_B[:, None], self.tokens_BV.gather(1, token_B[:, None]) | slots_B[:, None])


def traversal(given: Given) -> BatchVerdict:
    """Traversal verification, leaf to root, without climbing.

    What becomes of a node's weight and of its p once all below it is rejected depends on no uniform. So one scan finds
    the weight that each node has in the end; the first node in post-order with u < weight is where the walk ends.
    """
    tree, nodes = given.tree, given.tree.tokens_BN.shape[1]
    ancestors_BNN = tree.ancestors_BNN
    order_BN, parents_BN = _families(tree)
    around_BN = pad(parents_BN, (1, 1), value=_NOBODY - 1)
    eldest_BN, youngest_BN = around_BN[:, :-2] != parents_BN, around_BN[:, 2:] != parents_BN
    rank_BM = pad(_post_order(tree, ancestors_BNN), (1, 0), value=nodes)  # the root comes last ...
    u_BM = pad(given.u_BN, (1, 0), value=-1.0)  # ... and always accepts
    weight_BM = torch.ones_like(u_BM)
    rest_BV = end_BV = given.p(ROOT)  # what is left of p: after the parent at hand; after the first one that accepts
    end_B, end_rank_B = torch.full_like(order_BN[:, 0], ROOT), torch.full_like(order_BN[:, 0], nodes)
    rejected = _Rejected(tree, rest_BV)
    for step in range(nodes):
        node_B, candidate_B = order_BN[:, step], parents_BN[:, step] != _NOBODY
        parent_B = parents_BN[:, step].clamp(min=ROOT)
        rest_BV = torch.where(eldest_BN[:, step, None], given.p(parent_B), rest_BV)
        rejected.forget(eldest_BN[:, step])
        token_B, q_BV = pick(tree.tokens_BN, node_B), given.q(node_B, rejected.tokens_BV)
        # The child's weight before its own children; then the parent's, and its p, without this child.
        weight_B = pick(weight_BM, parent_B + 1)
        child_weight_B = (weight_B * ratio(rest_BV, q_BV, token_B)).clamp(max=1.0)
        residual_BV = residual(weight_B, rest_BV, q_BV)
        weight_B = torch.where(candidate_B, share(residual_BV.sum(1), 1.0 - weight_B), weight_B)
        rest_BV = norm(residual_BV, rest_BV)
        weight_BM = weight_BM.scatter(1, node_B[:, None] + 1, child_weight_B[:, None])
        weight_BM = weight_BM.scatter(1, parent_B[:, None] + 1, weight_B[:, None])
        rejected.add(candidate_B, token_B)
        # The parent's last child: keep its rest if it accepts before all others so far.
        rank_B = pick(rank_BM, parent_B + 1)
        ends_B = candidate_B & youngest_BN[:, step] & (pick(u_BM, parent_B + 1) < weight_B) & (rank_B <= end_rank_B)
        end_B, end_rank_B = torch.where(ends_B, parent_B, end_B), torch.where(ends_B, rank_B, end_rank_B)
        end_BV = torch.where(ends_B[:, None], rest_BV, end_BV)
    accepts_BM = pad(tree.candidate_BN, (1, 0), value=True) & (u_BM < weight_BM)
    node_B = torch.where(accepts_BM, rank_BM, nodes + 1).argmin(1) - 1
    # Of a leaf nothing was rejected.
    rest_BV = torch.where((node_B == end_B)[:, None], end_BV, given.p(node_B))
    return _end_at(tree, ancestors_BNN, node_B, given.draw(rest_BV))


_NOBODY = ROOT - 1
"""The parent of what is no candidate."""


def _families(tree: TreeBatch) -> tuple[Tensor, Tensor]:
    """Nodes [B, N] with siblings side by side, elders first and parents before children, and the parent of each.

    What is no candidate comes last.
    """
    nodes = tree.tokens_BN.shape[1]
    index_N = torch.arange(nodes, device=tree.tokens_BN.device)
    order_BN = torch.where(tree.candidate_BN, tree.parents_BN * nodes + index_N, nodes * nodes).argsort(1)
    parents_BN = torch.where(tree.candidate_BN, tree.parents_BN, _NOBODY)
    return order_BN, parents_BN.gather(1, order_BN)


def _post_order(tree: TreeBatch, ancestors_BNN: Tensor) -> Tensor:
    """Rank [B, N] of each candidate in the order in which a climb from the leaves meets them.

    Before a node come all below it, and the whole families of its elder siblings and of each ancestor's.
    """
    index_N = torch.arange(tree.tokens_BN.shape[1], device=tree.tokens_BN.device)
    family_BN = (ancestors_BNN & tree.candidate_BN[:, :, None]).sum(1)
    siblings_BNN = (tree.parents_BN[:, :, None] == tree.parents_BN[:, None]) & tree.candidate_BN[:, None]
    elders_BN = (siblings_BNN * (index_N < index_N[:, None]) * family_BN[:, None]).sum(2)
    return (ancestors_BNN * elders_BN[:, None]).sum(2) + family_BN - 1


def typical(given: Given) -> BatchVerdict:
    """Typical acceptance. A node is accepted with all its ancestors, so no walk is needed."""
    tree, ancestors_BNN = given.tree, given.tree.ancestors_BNN
    is_typical: list[Tensor] = []
    likelihood_BM = torch.ones_like(given.p_BMV[:, :1, 0], dtype=torch.float64)  # of the path to the root, the nodes
    for node in range(tree.tokens_BN.shape[1]):
        parent_B = tree.parents_BN[:, node]
        p_BV = given.p(parent_B)
        p_B = pick(p_BV, tree.tokens_BN[:, node])
        is_typical.append(p_B > typical_threshold(p_BV))
        likelihood_BM = torch.cat([likelihood_BM, (pick(likelihood_BM, parent_B + 1) * p_B)[:, None]], 1)
    typical_BN = torch.stack(is_typical, 1) & tree.candidate_BN
    accepted_BN = ~(ancestors_BNN & ~typical_BN[:, None]).any(2)
    length_BN = ancestors_BNN.sum(2) * accepted_BN
    longest_BN = accepted_BN & (length_BN == length_BN.amax(1, keepdim=True))
    likeliest_B = torch.where(longest_BN, likelihood_BM[:, 1:], -1.0).argmax(1)  # the first of equals
    node_B = torch.where(accepted_BN.any(1), likeliest_B, ROOT)
    return _end_at(tree, ancestors_BNN, node_B, given.draw(given.p(node_B)))


def _end_at(tree: TreeBatch, ancestors_BNN: Tensor, node_B: Tensor, token_B: Tensor) -> BatchVerdict:
    """Accept a node of each slot (or ROOT: none) and all its ancestors."""
    index_BN = torch.arange(tree.tokens_BN.shape[1], device=node_B.device).expand_as(tree.tokens_BN)
    accepted_BN = (ancestors_BNN & (index_BN == node_B[:, None])[:, :, None]).any(1)
    # A node's depth is its column; the last column takes what is not accepted.
    column_BN = torch.where(accepted_BN, ancestors_BNN.sum(2) - 1, tree.depth)
    path_BD = torch.full_like(node_B, -1)[:, None].repeat(1, tree.depth + 1).scatter(1, column_BN, index_BN)
    return BatchVerdict(accepted_BN.sum(1), path_BD[:, :-1], token_B)
