"""TEMPORARY, replaced at merge."""

from typing import NamedTuple

import torch
from torch import Tensor

from . import verify as v
from .tree import DraftTree


class BatchVerdict(NamedTuple):
    length_B: Tensor
    path_BD: Tensor
    token_B: Tensor


def verify_batch(rule, p_BMV, q_BNV, tree, u_BN, u_final_BD):
    out = []
    for b in range(len(tree.tokens_BN)):
        t = DraftTree(
            tuple(tree.tokens_BN[b].tolist()),
            tuple(tree.parents_BN[b].tolist()),
            tuple(tree.depth_BN[b].tolist()),
            tuple(tree.candidate_BN[b].tolist()),
            tree.drawn,
        )
        u = u_BN[b].tolist()
        f = float(u_final_BD[b, 0])
        p = p_BMV[b]
        if rule == "greedy":
            r = v.verify_greedy(p, t)
        elif rule == "onehot":
            r = v.verify_onehot(p, t, u, f)
        else:
            n = sum(t.candidate_N)
            r = getattr(v, "verify_" + rule)(p[: n + 1], q_BNV[b, :n], list(t.tokens_N[:n]), u[:n], f)
        out.append(r)
    D = tree.depth
    path = torch.tensor([[*r.accepted, *[-1] * (D - len(r.accepted))] for r in out], dtype=torch.long).reshape(
        len(out), D
    )
    return BatchVerdict(torch.tensor([len(r.accepted) for r in out]), path, torch.tensor([r.token for r in out]))
