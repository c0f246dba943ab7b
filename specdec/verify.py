"""Accept rules: which drafted tokens of one round survive, and which token ends it. The readable reference.

Every function is pure. p is the target's distribution, q the draft's, both after the same sampling processors and with
float64 inside. u are uniforms in [0, 1) that serve this round alone; a token is accepted iff u < h, its threshold.
Which drafts a rule may judge, and whether it is lossless, stands in `accept_rules.py`.

Shapes: N drafted nodes, K drafted tokens of a chain, D accepted nodes and one, V vocabulary. Row 0 of p stands after
the last emitted token, row i+1 after node i. Row i of q is the distribution that node i was drawn from, before its
siblings' tokens are taken out of it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .proposers.tree_shape import ROOT
from .sampling import categorical
from .tree import DraftTree

__all__ = [
    "Verdict",
    "typical_threshold",
    "verify_block",
    "verify_greedy",
    "verify_match",
    "verify_multiround",
    "verify_onehot",
    "verify_recursive",
    "verify_token",
    "verify_traversal",
    "verify_typical",
]

Numbers = Sequence[float] | Tensor

TYPICAL_EPSILON = 0.09
"""Epsilon of rule `typical`: cap of its threshold, which holds where the target is sure."""
TYPICAL_DELTA = 0.3
"""Delta of rule `typical`: the threshold's share of exp(-entropy), which holds where the target is unsure."""


class Verdict(NamedTuple):
    """Verdict of one round."""

    accepted: list[int]
    """Indexes of the accepted nodes, root to leaf."""
    token: int
    """Correction or bonus token that follows them."""


def verify_greedy(p_NV: Tensor, tree: DraftTree) -> Verdict:
    """Greedy verification: accept what equals the target's best token. `p` has N+1 rows and may be logits."""
    _check_rows("p", p_NV, len(tree) + 1)
    best_N: list[int] = p_NV.argmax(-1).tolist()
    accepted: list[int] = []
    node = ROOT
    # Go down as long as a child is the target's best token after its parent.
    while matching := [child for child in tree.children(node) if tree.tokens_N[child] == best_N[node + 1]]:
        node = matching[0]
        accepted.append(node)
    return Verdict(accepted, best_N[node + 1])


def verify_token(p_NV: Tensor, q_KV: Tensor, tokens_K: Sequence[int], u_K: Numbers, u_final: float) -> Verdict:
    """Token verification of a chain drawn from q. `p` has K+1 rows.

    Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318.
    """
    drafted = len(tokens_K)
    p_NV, q_KV = _distributions("p", p_NV, drafted + 1), _distributions("q", q_KV, drafted)
    length = 0
    # Accept x_i with probability min(1, p(x_i) / q(x_i)); stop at the first rejection.
    while length < drafted and u_K[length] < _ratio(p_NV[length], q_KV[length], tokens_K[length]):
        length += 1
    # Rejected: emit from norm(max(p - q, 0)). All accepted: a bonus from p.
    rest_V = _residual(1.0, p_NV, q_KV, length)
    return Verdict(list(range(length)), int(categorical(_norm(rest_V, p_NV[length]), u_final)))


def verify_block(p_NV: Tensor, q_KV: Tensor, tokens_K: Sequence[int], u_K: Numbers, u_final: float) -> Verdict:
    """Block verification (Sun et al. 2025, arXiv 2403.10444) of a chain drawn from q. `p` has K+1 rows.

    Accepts at least as many tokens on average as token verification: a likely token makes up for an unlikely one.
    """
    drafted = len(tokens_K)
    p_NV, q_KV = _distributions("p", p_NV, drafted + 1), _distributions("q", q_KV, drafted)
    weight = 1.0  # P_0 = 1
    length, rest_V = 0, _residual(weight, p_NV, q_KV, 0)
    for i in range(1, drafted + 1):
        # P_i = min(P_{i-1} p(x_i) / q(x_i), 1), p and q being those that x_i was judged by and drawn from.
        weight = min(weight * _ratio(p_NV[i - 1], q_KV[i - 1], tokens_K[i - 1]), 1.0)
        # Z_i = sum_x max(P_i p(x) - q(x), 0), p and q being those of the token after x_i.
        residual_V = _residual(weight, p_NV, q_KV, i)
        # h_i = Z_i / (Z_i + 1 - P_i) for i < K; h_K = P_K.
        threshold = _share(float(residual_V.sum()), 1.0 - weight) if i < drafted else weight
        # Accept up to the *last* i with u_i < h_i: a failure does not end the search.
        if u_K[i - 1] < threshold:
            length, rest_V = i, residual_V
    # Emit from norm(max(P_i p - q, 0)), or after all K a bonus from p.
    return Verdict(list(range(length)), int(categorical(_norm(rest_V, p_NV[length]), u_final)))


def verify_onehot(p_NV: Tensor, tree: DraftTree, u_N: Numbers, u_final: float) -> Verdict:
    """One-hot verification: of children that were chosen, not drawn, in a chain or a tree. `p` has N+1 rows.

    It is multi-round verification with q = 1 at each child's token.
    """
    p_NV = _distributions("p", p_NV, len(tree) + 1)
    accepted: list[int] = []
    rest_V, children = p_NV[0], tree.children(ROOT)
    while children:
        child = children.pop(0)
        token = tree.tokens_N[child]
        # Accept child x with probability p(x), and go on below it ...
        if u_N[child] < float(rest_V[token] / rest_V.sum()):
            accepted.append(child)
            rest_V, children = p_NV[child + 1], tree.children(child)
        # ... else p(x) <- 0, renormalised (by the sum above), for its next sibling.
        else:
            rest_V[token] = 0.0
    # No child left: emit from the rest.
    return Verdict(accepted, int(categorical(rest_V, u_final)))


def verify_match(p_NV: Tensor, tree: DraftTree, u_final_D: Numbers) -> Verdict:
    """Match verification: draw the target's own token at each node, and go on while a child equals it.

    It takes drafts of any kind. `p` has N+1 rows. The token at depth d is drawn with number d of `u_final_D`, which
    has one number more than the tree has levels.
    """
    p_NV = _distributions("p", p_NV, len(tree) + 1)
    accepted: list[int] = []
    node = ROOT
    while True:
        token = int(categorical(p_NV[node + 1], u_final_D[len(accepted)]))
        matching = [child for child in tree.children(node) if tree.tokens_N[child] == token]
        if not matching:
            return Verdict(accepted, token)
        node = matching[0]
        accepted.append(node)


def verify_multiround(p_NV: Tensor, q_NV: Tensor, tree: DraftTree, u_N: Numbers, u_final: float) -> Verdict:
    """Multi-round verification (SpecInfer, arXiv 2305.09781) of children drawn independently of each other.

    Each child may have a q of its own, as where several drafts share a tree. `p` has N+1 rows.
    """
    p_NV, q_NV = _distributions("p", p_NV, len(tree) + 1), _distributions("q", q_NV, len(tree))
    accepted: list[int] = []
    rest_V, children = p_NV[0], tree.children(ROOT)
    while children:
        child = children.pop(0)
        # Accept child x with probability min(1, p(x) / q(x)), and go on below it ...
        if u_N[child] < _ratio(rest_V, q_NV[child], tree.tokens_N[child]):
            accepted.append(child)
            rest_V, children = p_NV[child + 1], tree.children(child)
        # ... else p <- norm(max(p - q, 0)) for its next sibling.
        else:
            rest_V = _norm((rest_V - q_NV[child]).clamp(min=0.0), rest_V)
    # No child left: emit from the rest.
    return Verdict(accepted, int(categorical(rest_V, u_final)))


def verify_recursive(p_NV: Tensor, q_NV: Tensor, tree: DraftTree, u_N: Numbers, u_final: float) -> Verdict:
    """Recursive rejection of children drawn without replacement (Sequoia, arXiv 2402.12374). `p` has N+1 rows."""
    p_NV, q_NV = _distributions("p", p_NV, len(tree) + 1), _distributions("q", q_NV, len(tree))
    accepted: list[int] = []
    rest_V, children, rejected = p_NV[0], tree.children(ROOT), list[int]()
    while children:
        child = children.pop(0)
        q_V = _without(q_NV[child], rejected)
        # Accept child x with probability min(1, p(x) / q(x)), and go on below it ...
        if u_N[child] < _ratio(rest_V, q_V, tree.tokens_N[child]):
            accepted.append(child)
            rest_V, children, rejected = p_NV[child + 1], tree.children(child), []
        # ... else p <- norm(max(p - q, 0)), and q <- q without x, renormalised, for its next sibling.
        else:
            rest_V = _norm((rest_V - q_V).clamp(min=0.0), rest_V)
            rejected.append(tree.tokens_N[child])
    # No child left: emit from the rest.
    return Verdict(accepted, int(categorical(rest_V, u_final)))


def verify_traversal(p_NV: Tensor, q_NV: Tensor, tree: DraftTree, u_N: Numbers, u_final: float) -> Verdict:
    """Traversal verification (Weng et al. 2025) of a sampled tree, from its leaves to the root. `p` has N+1 rows.

    A likely token makes up for an unlikely ancestor, as in block verification, which it is on a chain.
    """
    p_NV, q_NV = _distributions("p", p_NV, len(tree) + 1), _distributions("q", q_NV, len(tree))

    def climb(node: int, weight: float) -> Verdict | None:
        """Verdict of a node's subtree: the accepted nodes below it; None where the node and all below it are rejected.

        `weight` a: the node's chance before anything below it was tried.
        """
        rest_V, rejected = p_NV[node + 1], list[int]()
        for child in tree.children(node):
            token = tree.tokens_N[child]
            q_V = _without(q_NV[child], rejected)
            # a_c = min(1, a p(x) / q(x)) for child x; its subtree is judged first.
            below = climb(child, min(weight * _ratio(rest_V, q_V, token), 1.0))
            if below is not None:
                return Verdict([child, *below.accepted], below.token)
            # All of it rejected: r = max(a p - q, 0), Z = sum r; a <- Z / (Z + 1 - a), p <- r / Z ...
            residual_V = (weight * rest_V - q_V).clamp(min=0.0)
            weight, rest_V = _share(float(residual_V.sum()), 1.0 - weight), _norm(residual_V, rest_V)
            # ... and q <- q without x, renormalised, unless siblings were drawn independently of each other.
            rejected += [token] if tree.drawn == "without_replacement" else []
        # No child left: accept the node with probability a, the root always, and emit from the rest.
        if node == ROOT or u_N[node] < weight:
            return Verdict([], int(categorical(rest_V, u_final)))
        return None

    verdict = climb(ROOT, 1.0)
    assert verdict is not None  # the root accepts
    return verdict


def verify_typical(p_NV: Tensor, tree: DraftTree, u_final: float) -> Verdict:
    """Typical acceptance (Medusa, arXiv 2401.10774). Lossy: likely tokens become likelier. `p` has N+1 rows.

    Accepts the longest path of typical tokens; of several the likeliest by p, as Medusa's own code does; of equals the
    one whose last node comes first.
    """
    p_NV = _distributions("p", p_NV, len(tree) + 1)
    threshold_N = typical_threshold(p_NV)
    paths: dict[int, tuple[float, list[int]]] = {ROOT: (1.0, [])}  # the probability of each, and its nodes
    # A node is on a typical path if its parent is and its own token passes the threshold after that parent.
    for node, (parent, token) in enumerate(zip(tree.parents_N, tree.tokens_N)):
        p = float(p_NV[parent + 1, token])
        if tree.candidate_N[node] and parent in paths and p > threshold_N[parent + 1]:
            likelihood, above = paths[parent]
            paths[node] = (likelihood * p, [*above, node])
    # Longest first, then likeliest; max keeps the first of equals.
    last, (_, accepted) = max(paths.items(), key=lambda path: (len(path[1][1]), path[1][0]))
    return Verdict(accepted, int(categorical(p_NV[last + 1], u_final)))


def typical_threshold(p_NV: Tensor) -> Tensor:
    """Typical threshold [N], above which a token's probability must lie: min(eps, delta exp(-H(p))), H in nats."""
    entropy_N: Tensor = torch.special.entr(p_NV).sum(-1)
    return (TYPICAL_DELTA * (-entropy_N).exp()).clamp(max=TYPICAL_EPSILON)


def _check_rows(name: str, rows: Tensor, count: int) -> None:
    if rows.shape[0] != count:
        raise ValueError(f"{name}: {rows.shape[0]} rows: must be {count} for this draft")


def _distributions(name: str, rows_NV: Tensor, count: int) -> Tensor:
    """Distributions as a float64 copy whose rows sum to one; fp32 rows are off by 1e-7. Raises ValueError."""
    _check_rows(name, rows_NV, count)
    rows_NV = rows_NV.double()
    return rows_NV / rows_NV.sum(-1, keepdim=True)


def _ratio(p_V: Tensor, q_V: Tensor, token: int) -> float:
    """p(x) / q(x) of a drafted token. q never draws a token of q(x) = 0; a caller who names one sees it rejected."""
    q = float(q_V[token])
    return float(p_V[token]) / q if q > 0.0 else 0.0


def _residual(weight: float, p_NV: Tensor, q_KV: Tensor, row: int) -> Tensor:
    """max(P p - q, 0) [V] of a row that has a q; p itself of the last row, which has none."""
    if row == len(q_KV):
        return p_NV[row]
    return (weight * p_NV[row] - q_KV[row]).clamp(min=0.0)


def _share(part: float, rest: float) -> float:
    """part / (part + rest), and 1, its limit as `rest` vanishes first, where both are 0."""
    return part / (part + rest) if rest > 0.0 else 1.0


def _norm(weights_V: Tensor, otherwise_V: Tensor) -> Tensor:
    """norm(weights); `otherwise` where they have no mass, as when p = q rejects by a rounding."""
    mass = float(weights_V.sum())
    return weights_V / mass if mass > 0.0 else otherwise_V


def _without(q_V: Tensor, tokens: Sequence[int]) -> Tensor:
    """q without those tokens, renormalised; all zeros where nothing is left, so that any more are rejected."""
    if not tokens:
        return q_V
    q_V = q_V.clone()
    q_V[list(tokens)] = 0.0
    return _norm(q_V, q_V)
