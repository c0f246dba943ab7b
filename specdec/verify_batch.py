"""The accept rules for a batch of slots, on their device and without ever waiting for it.

`verify.py` states each rule in p and q; here the same uniforms decide the same. Rules by which one look at a node
settles all its children (greedy, match, onehot) go level by level; rules for chains (token, block) judge a chain as a
whole; the others (multiround, recursive, traversal, typical) go node by node.

Shapes: B slots, N drafted nodes, M = N + 1 rows of the target, K drafted tokens of a chain, D levels, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .accept_rules import known_rule
from .kv_cache import runs_triton
from .proposers.tree_shape import ROOT
from .sampling import categorical
from .tree import TreeBatch
from .verify import typical_threshold

__all__ = ["BatchVerdict", "Settled", "settle", "settle_greedy", "verify_batch", "verify_greedy_chains"]


class BatchVerdict(NamedTuple):
    """Verdict of one round in each slot."""

    length_B: Tensor
    """Number of accepted nodes."""
    path_BD: Tensor
    """Indexes of the accepted nodes, root to leaf; -1 past the end."""
    token_B: Tensor
    """Correction or bonus token that follows them."""


def verify_batch(
    rule: str, p_BMV: Tensor, q_BNV: Tensor | None, tree: TreeBatch, u_BN: Tensor, u_final_BD: Tensor
) -> BatchVerdict:
    """Verify one drafted tree a slot by the accept rule of that name.

    p_BMV: row 0 after the last emitted token, row i+1 after node i; may be logits for `greedy`. q_BNV: row i is the
    full distribution that node i was drawn from; None for a rule that reads none. u_BN: the acceptance number of each
    node. u_final_BD: column 0 draws the final token; `match` needs D+1 columns, and draws the token at depth d with
    column d. For a rule that takes only chains each node must be the parent of the next. Raises InputError for a draft
    whose way of drawing the rule does not take.
    """
    # 1) Refuse drafts that the rule does not take, and rows that do not match the nodes.
    known = known_rule(rule)
    known.check_drawn(tree.drawn)
    nodes = tree.tokens_BN.shape[1]
    if p_BMV.shape[1] != nodes + 1:
        raise ValueError(f"p: {p_BMV.shape[1]} rows: must be {nodes + 1} for this draft")
    if known.needs_q and (q_BNV is None or q_BNV.shape[1] != nodes):
        raise ValueError(f"q: {None if q_BNV is None else q_BNV.shape[1]} rows: must be {nodes} for rule {rule!r}")
    # 2) With nothing drafted every rule draws from p; `greedy` is left to its own function, as p may be logits there.
    inputs = _Inputs(p_BMV, p_BMV[:, :0] if q_BNV is None else q_BNV, tree, u_BN, u_final_BD)
    if nodes == 0 and rule != "greedy":
        return _Walk(tree).end(inputs.draw(inputs.p(ROOT)))
    return _VERIFY[rule](inputs)


class Settled(NamedTuple):
    """What a round's verdict comes to in each slot; E = D + 1 tokens that a round may emit."""

    read_BX: Tensor
    """What the host reads: accepted, drafted and reached counts, then the tokens [B, E]; more of these follow than are
    emitted."""
    counts_B: Tensor
    """Tokens that are emitted: the accepted ones and the target's own. 0 in a slot that holds no request."""
    last_B: Tensor
    """The last of them."""
    path_BE: Tensor
    """Rows of the target's pass that stay, the last token's own first; -1 past the end."""

    @property
    def ids_BE(self) -> Tensor:  # noqa: N802
        return self.read_BX[:, 3:]


def settle(verdict: BatchVerdict, tree: TreeBatch, live_B: Tensor) -> Settled:
    """What a verdict comes to. `live_B`: slots that hold a request."""
    # A level was reached if a node on it was judged: one more than accepted, where a candidate stands there.
    along_BD = tree.tokens_BN.gather(1, verdict.path_BD.clamp(min=0))
    ids_BE = pad(along_BD, (0, 1)).scatter(1, verdict.length_B[:, None], verdict.token_B[:, None])
    drafted_B, reached_B = tree.candidate_BN.sum(1), verdict.length_B + tree.goes_on(verdict.path_BD)
    read_BX = torch.cat([torch.stack([verdict.length_B, drafted_B, reached_B], 1), ids_BE], 1)
    path_BE = torch.where(verdict.path_BD < 0, -1, verdict.path_BD + 1)
    return Settled(read_BX, (verdict.length_B + 1) * live_B, verdict.token_B, pad(path_BE, (1, 0)))


def settle_greedy(best_BM: Tensor, tree: TreeBatch, live_B: Tensor, chain: bool) -> Settled:
    """What the greedy rule comes to, by the target's likeliest token after each row; on a GPU in one kernel.

    `chain`: each node is the parent of the next.
    """
    if runs_triton(best_BM.device):
        from .kernels.trees import greedy_verdict

        read_BX, path_BE, counts_B, last_B = greedy_verdict(best_BM, *tree[:3], live_B, tree.depth)
        return Settled(read_BX, counts_B, last_B, path_BE)
    return settle((verify_greedy_chains if chain else _greedy_trees)(best_BM, tree), tree, live_B)


def verify_greedy_chains(best_BM: Tensor, tree: TreeBatch) -> BatchVerdict:
    """Greedy verification of chains, each node the parent of the next, by the target's likeliest tokens."""
    # All levels at once. The cumulative product stops counting at the first node that disagrees.
    agree_BK = tree.candidate_BN & (tree.tokens_BN == best_BM[:, :-1])
    length_B = agree_BK.long().cumprod(1).sum(1)
    return BatchVerdict(length_B, _path(length_B, tree.depth), best_BM.gather(1, length_B[:, None])[:, 0])


# What every rule is made of.


class _Inputs(NamedTuple):
    """Inputs of one round: distributions, trees and random numbers, as `verify_batch` takes them."""

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
        return self.tree.children(node_B)

    def draw(self, p_BV: Tensor) -> Tensor:
        return categorical(p_BV, self.u_final_BD[:, 0])


class _Walk:
    """Walk down each slot's tree: the last accepted node, or ROOT, and the path to it."""

    def __init__(self, tree: TreeBatch) -> None:
        self.node_B = tree.tokens_BN.new_full((len(tree.tokens_BN),), ROOT)
        self.length_B = torch.zeros_like(self.node_B)
        self._path_BD = self.node_B[:, None].repeat(1, tree.depth + 1)  # the last column takes what is no step

    def step(self, moves_B: Tensor, to_B: Tensor) -> None:
        """Accept node `to` in the slots that move."""
        # A slot that does not move writes into the spare last column, so that no branch depends on the device.
        column_B = torch.where(moves_B, self.length_B, self._path_BD.shape[1] - 1)
        self._path_BD.scatter_(1, column_B[:, None], to_B[:, None])
        self.node_B = torch.where(moves_B, to_B, self.node_B)
        self.length_B = self.length_B + moves_B

    def step_to_first(self, matching_BN: Tensor) -> Tensor:
        """Accept the first matching node of each slot, if any; returns which slots moved."""
        moves_B = matching_BN.any(1)
        self.step(moves_B, matching_BN.to(torch.uint8).argmax(1))
        return moves_B

    def end(self, token_B: Tensor) -> BatchVerdict:
        return BatchVerdict(self.length_B, self._path_BD[:, :-1], token_B)


def _pick(rows_BN: Tensor, index_B: Tensor) -> Tensor:
    """One entry [B] of each slot's row."""
    return rows_BN.gather(1, index_B[:, None])[:, 0]


def _ratio(p_BV: Tensor, q_BV: Tensor, token_B: Tensor) -> Tensor:
    """p(x) / q(x) [B] of a drafted token; 0 where q(x) = 0."""
    p_B, q_B = _pick(p_BV, token_B), _pick(q_BV, token_B)
    return torch.where(q_B > 0.0, p_B / q_B, 0.0)


def _residual(weight_B: Tensor, p_BV: Tensor, q_BV: Tensor) -> Tensor:
    """max(P p - q, 0) [B, V]."""
    return (weight_B[:, None] * p_BV - q_BV).clamp(min=0.0)


def _norm(weights_BV: Tensor, otherwise_BV: Tensor) -> Tensor:
    """Normalised weights [B, V]; `otherwise` where they have no mass."""
    mass_B1 = weights_BV.sum(1, keepdim=True)
    return torch.where(mass_B1 > 0.0, weights_BV / mass_B1, otherwise_BV)


def _share(part_B: Tensor, rest_B: Tensor) -> Tensor:
    """part / (part + rest) [B], and 1 where `rest` is 0."""
    return torch.where(rest_B > 0.0, part_B / (part_B + rest_B), 1.0)


def _rows(rows_BMV: Tensor, row_B: Tensor | int) -> Tensor:
    """Row [B, V] of each slot, by one index for all or one for each."""
    if isinstance(row_B, int):
        return rows_BMV[:, row_B]
    return rows_BMV[torch.arange(len(row_B), device=row_B.device), row_B]


def _distribution(rows_BV: Tensor) -> Tensor:
    """Distributions in float64 whose rows sum to one; rows of zeros stay zeros."""
    rows_BV = rows_BV.double()
    return _norm(rows_BV, rows_BV)


# Level by level.


def _greedy(inputs: _Inputs) -> BatchVerdict:
    return _greedy_trees(inputs.p_BMV.argmax(-1), inputs.tree)


def _greedy_trees(best_BM: Tensor, tree: TreeBatch) -> BatchVerdict:
    walk = _Walk(tree)
    # Level by level: go to the child that is the target's best token. A slot that has stopped stays where it is.
    for _ in range(tree.depth):
        best_B1 = best_BM.gather(1, walk.node_B[:, None] + 1)
        walk.step_to_first(tree.children(walk.node_B) & (tree.tokens_BN == best_B1))
    return walk.end(best_BM.gather(1, walk.node_B[:, None] + 1)[:, 0])


def _match(inputs: _Inputs) -> BatchVerdict:
    walk = _Walk(inputs.tree)
    # The target's own draw after the last token, then one more after each accepted node.
    token_B = categorical(inputs.p(ROOT), inputs.u_final_BD[:, 0])
    for level in range(1, inputs.tree.depth + 1):
        matching_BN = inputs.children(walk.node_B) & (inputs.tree.tokens_BN == token_B[:, None])
        # A slot that has stopped meets its last token again, and stops again.
        moves_B = walk.step_to_first(matching_BN)
        token_B = torch.where(moves_B, categorical(inputs.p(walk.node_B), inputs.u_final_BD[:, level]), token_B)
    return walk.end(token_B)


def _onehot(inputs: _Inputs) -> BatchVerdict:
    walk = _Walk(inputs.tree)
    for _ in range(inputs.tree.depth):
        children_BN = inputs.children(walk.node_B)
        p_BN, others_BV = _take_out(inputs.p(walk.node_B), inputs.tree.tokens_BN, children_BN)
        # What is left of p when a child is tried: itself, its younger siblings, and all tokens that are no child's.
        left_BN = p_BN.flip(1).cumsum(1).flip(1) + others_BV.sum(1, keepdim=True)
        walk.step_to_first(children_BN & (inputs.u_BN < p_BN / left_BN))
    # Where the walk ended all children were rejected: the final token is drawn from what is left.
    _, others_BV = _take_out(inputs.p(walk.node_B), inputs.tree.tokens_BN, inputs.children(walk.node_B))
    return walk.end(inputs.draw(others_BV))


def _take_out(p_BV: Tensor, tokens_BN: Tensor, children_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Split p into that of the children's (distinct) tokens [B, N] and that of all other tokens [B, V]."""
    p_BN = p_BV.gather(1, tokens_BN) * children_BN
    return p_BN, p_BV.scatter_add(1, tokens_BN, -p_BN)


# Chains.


def _token(inputs: _Inputs) -> BatchVerdict:
    drafted_BK = inputs.tree.candidate_BN.long().cumprod(1)
    # Every token is tried on its own; the chain is as long as the run of accepted ones from its start.
    accepted = [
        inputs.u_BN[:, k] < _ratio(inputs.p(k - 1), inputs.q(k), inputs.tree.tokens_BN[:, k])
        for k in range(drafted_BK.shape[1])
    ]
    length_B = (drafted_BK * torch.stack(accepted, 1)).cumprod(1).sum(1)
    return _end_of_chain(inputs, length_B, drafted_BK.sum(1), torch.ones_like(inputs.u_BN[:, 0]))


def _block(inputs: _Inputs) -> BatchVerdict:
    drafted_B = inputs.tree.candidate_BN.long().cumprod(1).sum(1)
    nodes = inputs.tree.tokens_BN.shape[1]
    weight_B = torch.ones_like(inputs.u_BN[:, 0])
    # The last token that is accepted so far, and the weight P there.
    length_B, weight_at_length_B = torch.zeros_like(drafted_B), weight_B
    p_BV, q_BV = inputs.p(ROOT), inputs.q(0)
    for i in range(1, nodes + 1):
        # P_i = min(P_{i-1} p(x_i) / q(x_i), 1); h_i = Z_i / (Z_i + 1 - P_i) with the next p and q, and h_K = P_K.
        weight_B = (weight_B * _ratio(p_BV, q_BV, inputs.tree.tokens_BN[:, i - 1])).clamp(max=1.0)
        threshold_B = weight_B
        if i < nodes:
            p_BV, q_BV = inputs.p(i - 1), inputs.q(i)
            mass_B = _residual(weight_B, p_BV, q_BV).sum(1)
            threshold_B = torch.where(i < drafted_B, _share(mass_B, 1.0 - weight_B), weight_B)
        # The last accepted position counts, as a rejection does not end the search; its weight makes the residual.
        accepted_B = (i <= drafted_B) & (inputs.u_BN[:, i - 1] < threshold_B)
        length_B = torch.where(accepted_B, i, length_B)
        weight_at_length_B = torch.where(accepted_B, weight_B, weight_at_length_B)
    return _end_of_chain(inputs, length_B, drafted_B, weight_at_length_B)


def _end_of_chain(inputs: _Inputs, length_B: Tensor, drafted_B: Tensor, weight_B: Tensor) -> BatchVerdict:
    """Emit from _norm(max(P p - q, 0)) after so many accepted tokens, or after all that were drafted from p."""
    p_BV = inputs.p(length_B - 1)
    # A full chain has no q after it: the index is clamped there, and its residual is not used.
    residual_BV = _residual(weight_B, p_BV, inputs.q(length_B.clamp(max=inputs.tree.tokens_BN.shape[1] - 1)))
    rest_BV = torch.where((length_B < drafted_B)[:, None], _norm(residual_BV, p_BV), p_BV)
    return BatchVerdict(length_B, _path(length_B, inputs.tree.depth), inputs.draw(rest_BV))


def _path(length_B: Tensor, depth: int) -> Tensor:
    """Path [B, D] of the first nodes of a chain, -1 past them."""
    index_D = torch.arange(depth, device=length_B.device)
    return torch.where(index_D < length_B[:, None], index_D, -1)


# Node by node.


def _siblings(inputs: _Inputs) -> BatchVerdict:
    """multiround and recursive. Parents stand before children and siblings in order, so one scan tries each in turn."""
    tree, walk, rest_BV = inputs.tree, _Walk(inputs.tree), inputs.p(ROOT)
    rejected = _Rejected(tree, rest_BV)
    for node in range(tree.tokens_BN.shape[1]):
        # A node is tried where its parent is the last that was accepted; earlier siblings were rejected.
        tried_B = tree.candidate_BN[:, node] & (tree.parents_BN[:, node] == walk.node_B)
        token_B, q_BV = tree.tokens_BN[:, node], inputs.q(node, rejected.tokens_BV)
        # Accept child x with probability min(1, p(x) / q(x)), else p <- _norm(max(p - q, 0)) for its next sibling.
        accepted_B = tried_B & (inputs.u_BN[:, node] < _ratio(rest_BV, q_BV, token_B))
        rejected_B = tried_B & ~accepted_B
        rest_BV = torch.where(rejected_B[:, None], _norm((rest_BV - q_BV).clamp(min=0.0), rest_BV), rest_BV)
        rest_BV = torch.where(accepted_B[:, None], inputs.p(node), rest_BV)
        rejected.forget(accepted_B)
        rejected.add(rejected_B, token_B)
        walk.step(accepted_B, torch.full_like(token_B, node))
    return walk.end(inputs.draw(rest_BV))


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


def _traversal(inputs: _Inputs) -> BatchVerdict:
    """Traversal verification, leaf to root, without climbing.

    What becomes of a node's weight and of its p once all below it is rejected depends on no uniform. So one scan finds
    the weight that each node has in the end; the first node in post-order with u < weight is where the walk ends.
    """
    tree, nodes = inputs.tree, inputs.tree.tokens_BN.shape[1]
    ancestors_BNN = tree.ancestors_BNN
    # 1) Set families side by side, and number the nodes as a climb meets them: the root last, which always accepts.
    order_BN, parents_BN = _families(tree)
    around_BN = pad(parents_BN, (1, 1), value=_NOBODY - 1)
    eldest_BN, youngest_BN = around_BN[:, :-2] != parents_BN, around_BN[:, 2:] != parents_BN
    rank_BM = pad(_post_order(tree, ancestors_BNN), (1, 0), value=nodes)
    u_BM = pad(inputs.u_BN, (1, 0), value=-1.0)
    # 2) Scan families from the root down: each child's first weight, and its parent's when the child is rejected.
    weight_BM, rest_BV = torch.ones_like(u_BM), inputs.p(ROOT)
    rejected, first = _Rejected(tree, rest_BV), _FirstParent(rest_BV, nodes)
    for step in range(nodes):
        node_B, candidate_B = order_BN[:, step], parents_BN[:, step] != _NOBODY
        parent_B = parents_BN[:, step].clamp(min=ROOT)
        # A family begins with its parent's whole p, and none of its tokens rejected.
        rest_BV = torch.where(eldest_BN[:, step, None], inputs.p(parent_B), rest_BV)
        rejected.forget(eldest_BN[:, step])
        token_B, q_BV = _pick(tree.tokens_BN, node_B), inputs.q(node_B, rejected.tokens_BV)
        # The child: a_c = min(1, a p(x) / q(x)).
        weight_B = _pick(weight_BM, parent_B + 1)
        child_weight_B = (weight_B * _ratio(rest_BV, q_BV, token_B)).clamp(max=1.0)
        weight_BM = weight_BM.scatter(1, node_B[:, None] + 1, child_weight_B[:, None])
        # Its parent, once it is rejected: r = max(a p - q, 0), Z = sum r; a <- Z / (Z + 1 - a), p <- r / Z.
        residual_BV = _residual(weight_B, rest_BV, q_BV)
        weight_B = torch.where(candidate_B, _share(residual_BV.sum(1), 1.0 - weight_B), weight_B)
        weight_BM = weight_BM.scatter(1, parent_B[:, None] + 1, weight_B[:, None])
        rest_BV = _norm(residual_BV, rest_BV)
        rejected.add(candidate_B, token_B)
        # After its last child the parent's weight and p are what they will be.
        accepts_B = candidate_B & youngest_BN[:, step] & (_pick(u_BM, parent_B + 1) < weight_B)
        first.offer(accepts_B, parent_B, _pick(rank_BM, parent_B + 1), rest_BV)
    # 3) End at the first that accepts. Of a leaf nothing was rejected: its p is whole.
    accepts_BM = pad(tree.candidate_BN, (1, 0), value=True) & (u_BM < weight_BM)
    node_B = torch.where(accepts_BM, rank_BM, nodes + 1).argmin(1) - 1
    rest_BV = torch.where((node_B == first.node_B)[:, None], first.rest_BV, inputs.p(node_B))
    return _end_at(tree, ancestors_BNN, node_B, inputs.draw(rest_BV))


class _FirstParent:
    """The first node in post-order, of those with children, that accepts; and what is left of its p."""

    def __init__(self, root_BV: Tensor, nodes: int) -> None:
        """The root, until another accepts: it comes last and always does. `root`: its p."""
        self.node_B = torch.full_like(root_BV[:, 0], ROOT, dtype=torch.long)
        self._rank_B = torch.full_like(self.node_B, nodes)
        self.rest_BV = root_BV

    def offer(self, accepts_B: Tensor, node_B: Tensor, rank_B: Tensor, rest_BV: Tensor) -> None:
        """Take a node of each slot where it accepts and comes before the one that is known."""
        sooner_B = accepts_B & (rank_B <= self._rank_B)
        self.node_B = torch.where(sooner_B, node_B, self.node_B)
        self._rank_B = torch.where(sooner_B, rank_B, self._rank_B)
        self.rest_BV = torch.where(sooner_B[:, None], rest_BV, self.rest_BV)


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


def _typical(inputs: _Inputs) -> BatchVerdict:
    """Typical acceptance. A node is accepted with all its ancestors, so no walk is needed."""
    tree, ancestors_BNN = inputs.tree, inputs.tree.ancestors_BNN
    # 1) Which tokens are typical after their parent, and how likely each path is.
    is_typical: list[Tensor] = []
    likelihood_BM = torch.ones_like(inputs.p_BMV[:, :1, 0], dtype=torch.float64)  # of the path to the root, the nodes
    for node in range(tree.tokens_BN.shape[1]):
        parent_B = tree.parents_BN[:, node]
        p_BV = inputs.p(parent_B)
        p_B = _pick(p_BV, tree.tokens_BN[:, node])
        is_typical.append(p_B > typical_threshold(p_BV))
        likelihood_BM = torch.cat([likelihood_BM, (_pick(likelihood_BM, parent_B + 1) * p_B)[:, None]], 1)
    # 2) The longest path of typical tokens, the likeliest of several.
    typical_BN = torch.stack(is_typical, 1) & tree.candidate_BN
    accepted_BN = ~(ancestors_BNN & ~typical_BN[:, None]).any(2)
    length_BN = ancestors_BNN.sum(2) * accepted_BN
    longest_BN = accepted_BN & (length_BN == length_BN.amax(1, keepdim=True))
    likeliest_B = torch.where(longest_BN, likelihood_BM[:, 1:], -1.0).argmax(1)  # the first of equals
    node_B = torch.where(accepted_BN.any(1), likeliest_B, ROOT)
    return _end_at(tree, ancestors_BNN, node_B, inputs.draw(inputs.p(node_B)))


def _end_at(tree: TreeBatch, ancestors_BNN: Tensor, node_B: Tensor, token_B: Tensor) -> BatchVerdict:
    """Accept a node of each slot (or ROOT: none) and all its ancestors."""
    index_BN = torch.arange(tree.tokens_BN.shape[1], device=node_B.device).expand_as(tree.tokens_BN)
    accepted_BN = (ancestors_BNN & (index_BN == node_B[:, None])[:, :, None]).any(1)
    # A node's depth is its column; the last column takes what is not accepted.
    column_BN = torch.where(accepted_BN, ancestors_BNN.sum(2) - 1, tree.depth)
    path_BD = torch.full_like(node_B, -1)[:, None].repeat(1, tree.depth + 1).scatter(1, column_BN, index_BN)
    return BatchVerdict(accepted_BN.sum(1), path_BD[:, :-1], token_B)


_VERIFY = {
    "greedy": _greedy,
    "token": _token,
    "block": _block,
    "onehot": _onehot,
    "match": _match,
    "multiround": _siblings,
    "recursive": _siblings,
    "traversal": _traversal,
    "typical": _typical,
}
