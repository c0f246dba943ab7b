"""The accept rules for a batch of slots, on their device and without ever waiting for it.

`verify.py` states each rule in p and q; here the same uniforms decide the same. Level by level, where one look at a
node settles all its children (greedy, match, onehot) or a chain is all there is (token, block); `batch_trees.py` has
the rules that go node by node.

Shapes: B slots, N drafted nodes, M = N + 1 rows of the target, K drafted tokens of a chain, D levels, V vocabulary.
"""

import torch
from torch import Tensor

from .batch_round import BatchVerdict, Given, Walk, norm, ratio, residual, share
from .batch_trees import siblings, traversal, typical
from .rules import check_rule
from .sampling import categorical
from .tree import ROOT, TreeBatch

__all__ = ["BatchVerdict", "verify_batch", "verify_greedy_chains"]


def verify_batch(
    rule: str, p_BMV: Tensor, q_BNV: Tensor | None, tree: TreeBatch, u_BN: Tensor, u_final_BD: Tensor
) -> BatchVerdict:
    """Verify one tree a slot by the rule of that name.

    p_BMV: row 0 after the last emitted token, row i+1 after node i; may be logits for `greedy`. q_BNV: row i is the
    full distribution that node i was drawn from; None for a rule that reads none. u_BN: the acceptance number of each
    node. u_final_BD: column 0 draws the final token; `match` needs D+1 columns, and draws the token at depth d with
    column d. For a rule that takes only chains each node must be the parent of the next. Raises InputError for a draft
    whose way of drawing the rule does not take.
    """
    needs_q = check_rule(rule, tree.drawn).needs_q
    nodes = tree.tokens_BN.shape[1]
    if p_BMV.shape[1] != nodes + 1:
        raise ValueError(f"p: {p_BMV.shape[1]} rows: must be {nodes + 1} for this draft")
    if needs_q and (q_BNV is None or q_BNV.shape[1] != nodes):
        raise ValueError(f"q: {None if q_BNV is None else q_BNV.shape[1]} rows: must be {nodes} for rule {rule!r}")
    given = Given(p_BMV, p_BMV[:, :0] if q_BNV is None else q_BNV, tree, u_BN, u_final_BD)
    if nodes == 0 and rule != "greedy":
        return Walk(tree).end(given.draw(given.p(ROOT)))
    return _VERIFY[rule](given)


def verify_greedy_chains(p_BMV: Tensor, tree: TreeBatch) -> BatchVerdict:
    """`greedy` where every tree is a chain, each node the parent of the next: all levels at once."""
    best_BM = p_BMV.argmax(-1)
    agree_BK = tree.candidate_BN & (tree.tokens_BN == best_BM[:, :-1])
    length_B = agree_BK.long().cumprod(1).sum(1)
    return BatchVerdict(length_B, _path(length_B, tree.depth), best_BM.gather(1, length_B[:, None])[:, 0])


def _path(length_B: Tensor, depth: int) -> Tensor:
    """[B, D]: the first nodes of a chain."""
    index_D = torch.arange(depth, device=length_B.device)
    return torch.where(index_D < length_B[:, None], index_D, -1)


def _greedy(given: Given) -> BatchVerdict:
    best_BM, walk = given.p_BMV.argmax(-1), Walk(given.tree)
    for _ in range(given.tree.depth):
        best_B1 = best_BM.gather(1, walk.node_B[:, None] + 1)
        walk.step_to_first(given.children(walk.node_B) & (given.tree.tokens_BN == best_B1))
    return walk.end(best_BM.gather(1, walk.node_B[:, None] + 1)[:, 0])


def _match(given: Given) -> BatchVerdict:
    walk = Walk(given.tree)
    token_B = categorical(given.p(ROOT), given.u_final_BD[:, 0])
    for level in range(1, given.tree.depth + 1):
        matching_BN = given.children(walk.node_B) & (given.tree.tokens_BN == token_B[:, None])
        # A slot that has stopped meets its last token again, and stops again.
        moves_B = walk.step_to_first(matching_BN)
        token_B = torch.where(moves_B, categorical(given.p(walk.node_B), given.u_final_BD[:, level]), token_B)
    return walk.end(token_B)


def _onehot(given: Given) -> BatchVerdict:
    walk = Walk(given.tree)
    for _ in range(given.tree.depth):
        children_BN = given.children(walk.node_B)
        p_BN, others_BV = _take_out(given.p(walk.node_B), given.tree.tokens_BN, children_BN)
        # What is left of p when a child is tried: itself, its younger siblings, and all tokens that are no child's.
        left_BN = p_BN.flip(1).cumsum(1).flip(1) + others_BV.sum(1, keepdim=True)
        walk.step_to_first(children_BN & (given.u_BN < p_BN / left_BN))
    _, others_BV = _take_out(given.p(walk.node_B), given.tree.tokens_BN, given.children(walk.node_B))
    return walk.end(given.draw(others_BV))


def _take_out(p_BV: Tensor, tokens_BN: Tensor, children_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Split p into that of the children's (distinct) tokens [B, N] and that of all other tokens [B, V]."""
    p_BN = p_BV.gather(1, tokens_BN) * children_BN
    return p_BN, p_BV.scatter_add(1, tokens_BN, -p_BN)


def _token(given: Given) -> BatchVerdict:
    drafted_BK = given.tree.candidate_BN.long().cumprod(1)
    accepted = [
        given.u_BN[:, k] < ratio(given.p(k - 1), given.q(k), given.tree.tokens_BN[:, k])
        for k in range(drafted_BK.shape[1])
    ]
    length_B = (drafted_BK * torch.stack(accepted, 1)).cumprod(1).sum(1)
    return _end_of_chain(given, length_B, drafted_BK.sum(1), torch.ones_like(given.u_BN[:, 0]))


def _block(given: Given) -> BatchVerdict:
    drafted_B = given.tree.candidate_BN.long().cumprod(1).sum(1)
    nodes = given.tree.tokens_BN.shape[1]
    weight_B = torch.ones_like(given.u_BN[:, 0])
    length_B, weight_at_length_B = torch.zeros_like(drafted_B), weight_B
    p_BV, q_BV = given.p(ROOT), given.q(0)
    for i in range(1, nodes + 1):
        weight_B = (weight_B * ratio(p_BV, q_BV, given.tree.tokens_BN[:, i - 1])).clamp(max=1.0)
        threshold_B = weight_B
        if i < nodes:
            p_BV, q_BV = given.p(i - 1), given.q(i)
            mass_B = residual(weight_B, p_BV, q_BV).sum(1)
            threshold_B = torch.where(i < drafted_B, share(mass_B, 1.0 - weight_B), weight_B)
        accepted_B = (i <= drafted_B) & (given.u_BN[:, i - 1] < threshold_B)
        length_B = torch.where(accepted_B, i, length_B)
        weight_at_length_B = torch.where(accepted_B, weight_B, weight_at_length_B)
    return _end_of_chain(given, length_B, drafted_B, weight_at_length_B)


def _end_of_chain(given: Given, length_B: Tensor, drafted_B: Tensor, weight_B: Tensor) -> BatchVerdict:
    """Emit from norm(max(P p - q, 0)) after so many accepted tokens, or after all that were drafted from p."""
    p_BV = given.p(length_B - 1)
    residual_BV = residual(weight_B, p_BV, given.q(length_B.clamp(max=given.tree.tokens_BN.shape[1] - 1)))
    rest_BV = torch.where((length_B < drafted_B)[:, None], norm(residual_BV, p_BV), p_BV)
    return BatchVerdict(length_B, _path(length_B, given.tree.depth), given.draw(rest_BV))


_VERIFY = {
    "greedy": _greedy,
    "token": _token,
    "block": _block,
    "onehot": _onehot,
    "match": _match,
    "multiround": siblings,
    "recursive": siblings,
    "traversal": traversal,
    "typical": typical,
}
