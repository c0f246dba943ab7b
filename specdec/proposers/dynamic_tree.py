"""EAGLE-2's dynamic tree (Li et al. 2024, arXiv 2406.16858): the draft's own confidence gives each round its shape.

Shapes: B slots, k nodes of the frontier, C candidates so far, N drafted nodes, V vocabulary.
"""

import torch
from torch import Tensor

from ...errors import InputError
from ..kv_cache import CacheStep, KVCache
from ..models import States
from ..replay.packing import Pack
from ..sampling_settings import SamplingSettings
from ..tree import TreeBatch
from .base import Ask, Draft, Drafter, FollowsDrafter, Trace
from .logits import gather_rows, penalised_rows, see
from .tree_shape import Drawn


class DynamicProposer(FollowsDrafter):
    """Four steps. The root's `top_k` best tokens are the first frontier. On each further level the frontier is read
    at once, each of its nodes offers its `top_k` best, and the best `top_k` of all those are the next frontier.
    Among all that were offered the best `nodes` by score are drafted. A score is the product of the draft's
    probabilities on the way (so a parent is never below its child; ties go to the earlier one, the parent).
    """

    drawn: Drawn = "deterministic"
    replayable = True
    chain = False

    def __init__(self, drafter: Drafter, top_k: int = 10, nodes: int = 59) -> None:
        if top_k < 1 or nodes < 1:
            raise InputError(f"dynamic tree: top_k {top_k}, nodes {nodes}: must both be at least 1")
        super().__init__(drafter)
        self._top_k, self._nodes = min(top_k, drafter.width), nodes

    def trace(self, pack: Pack, count: int, sampling: SamplingSettings, states: States | None) -> Trace:
        raise InputError("dynamic tree: no trace fits it; draft along the answer")

    def reserve(self, slots: int, tokens: int, levels: int) -> None:
        self._drafter.reserve(slots, tokens, self._top_k * max(levels - 1, 0), levels)

    def most_nodes(self, levels: int) -> int:
        k = self._top_k
        return min(self._nodes, k + k * k * (levels - 1)) if levels > 0 else 0

    def shape(self, levels: int) -> None:
        return None

    def propose(self, ask: Ask) -> Draft:
        # Each level offers children of the frontier; all but the last level also read the next frontier.
        levels = self._within(ask.levels)
        pool = _Pool(ask, self._top_k)
        logits_BFV = self._drafter.open(len(ask.limits_B), chain=False)[:, None]
        for depth in range(levels):
            pool.offer(logits_BFV, depth)
            if depth + 1 < levels:
                tokens_Bk, parents_Bk = pool.advance(depth)
                logits_BFV = self._drafter.expand(tokens_Bk, parents_Bk, depth)
        # Rerank all candidates and keep the best.
        return Draft(pool.best(self.most_nodes(levels), levels), None, chain=False)


class _Pool:
    """Candidate nodes of one round, parents before children."""

    def __init__(self, ask: Ask, top_k: int) -> None:
        self._ask, self._top_k = ask, top_k
        self._seen_BFV = None if ask.seen_BV is None else ask.seen_BV[:, None]
        self._tokens: list[Tensor] = []
        self._parents: list[Tensor] = []
        self._scores: list[Tensor] = []
        self._frontier_Bk: Tensor | None = None  # places in the pool; None: the root

    def offer(self, logits_BFV: Tensor, depth: int) -> None:
        """Add the `top_k` best children of every frontier node. Past a slot's limit their score is -inf."""
        # Log-probabilities of the frontier's children, after repetition penalties.
        batch = len(logits_BFV)
        logp_BFV = penalised_rows(logits_BFV, self._ask.sampling, self._seen_BFV).float().log_softmax(-1)
        best = logp_BFV.topk(self._top_k, dim=-1)
        scores_BFk = best.values

        # A child's score adds its parent's: the log of the product on the way.
        if self._frontier_Bk is None:
            parents_BF = best.indices.new_full((batch, 1), -1)
        else:
            parents_BF = self._frontier_Bk
            scores_BFk = scores_BFk + torch.cat(self._scores, 1).gather(1, parents_BF)[..., None]

        # -inf never wins against a candidate, and `best` marks it as none.
        past_B = depth >= self._ask.limits_B
        self._scores.append(scores_BFk.masked_fill(past_B[:, None, None], -torch.inf).flatten(1))
        self._tokens.append(best.indices.flatten(1))
        self._parents.append(parents_BF[..., None].expand(-1, -1, self._top_k).flatten(1))

    def advance(self, depth: int) -> tuple[Tensor, Tensor]:
        """Next frontier: the best `top_k` nodes of this level. Returns their tokens, and the place of each one's parent
        among all nodes that were read (-1: the root)."""
        # The best of this level's candidates, by their places in the pool.
        start = sum(scores.shape[1] for scores in self._scores[:-1])
        chosen_Bk = self._scores[-1].topk(self._top_k, dim=-1).indices
        tokens_Bk = self._tokens[-1].gather(1, chosen_Bk)
        above_Bk = chosen_Bk // self._top_k  # which of the nodes that offered
        self._frontier_Bk = start + chosen_Bk

        # Each frontier node has seen what its parent has, and itself.
        if self._seen_BFV is not None:
            self._seen_BFV = see(gather_rows(self._seen_BFV, above_Bk), tokens_Bk)

        # Level by level top_k nodes are read, so the level above starts at (depth - 1) * top_k.
        return tokens_Bk, torch.full_like(above_Bk, -1) if depth == 0 else (depth - 1) * self._top_k + above_Bk

    def best(self, nodes: int, levels: int) -> TreeBatch:
        """Trees of the best `nodes` candidates by score, in the pool's order."""
        # The pool as one list.
        scores_BC, tokens_BC, parents_BC = (torch.cat(x, 1) for x in (self._scores, self._tokens, self._parents))
        # Stable: of equal scores the earlier candidate wins, and a parent stands before its child.
        chosen_BN = scores_BC.sort(dim=-1, descending=True, stable=True).indices[:, :nodes].sort(-1).values

        # Parents: from places in the pool to places among the chosen.
        above_BN = parents_BC.gather(1, chosen_BN)
        parents_BN = torch.where(above_BN < 0, -1, torch.searchsorted(chosen_BN, above_BN.clamp(min=0)))

        # Finite scores only: the others lie past a slot's limit.
        candidate_BN = scores_BC.gather(1, chosen_BN).isfinite()
        return TreeBatch(tokens_BC.gather(1, chosen_BN), parents_BN, candidate_BN, levels, "deterministic")


class Branches:
    """Cache steps by which a draft reads a tree level by level, with tree masks. The cache's lengths do not grow.

    `chain`: each node follows the one before, so that the past is all there is to see.
    """

    def __init__(self, cache: KVCache, batch: int, chain: bool) -> None:
        self._cache, self._chain = cache, chain
        self._depth_BE = torch.zeros(batch, 0, dtype=torch.long, device=cache.device)
        self._above_BEE = torch.zeros(batch, 0, 0, dtype=torch.bool, device=cache.device)

    def grow(self, parents_BF: Tensor, depth: int) -> CacheStep:
        """Cache step that reads F more nodes of one level, each below an earlier node or the root (-1)."""
        # A chain needs no mask: each node sees all before it.
        batch, new = parents_BF.shape
        if self._chain:
            return self._cache.extend(batch, new, skip=depth)

        # A node sees all that its parent sees, and itself. A child of the root starts with nothing.
        known = self._depth_BE.shape[1]
        padded_BEE = torch.nn.functional.pad(self._above_BEE, (0, new))
        above_BFE = padded_BEE.new_zeros(batch, new, known + new)
        if known:
            inherited_BFE = padded_BEE.gather(1, parents_BF.clamp(min=0)[..., None].expand(-1, -1, known + new))
            above_BFE = inherited_BFE & (parents_BF >= 0)[..., None]
        itself_FE = torch.eye(known + new, dtype=torch.bool, device=parents_BF.device)[known:]
        above_BFE = above_BFE | itself_FE

        # Remember rows and depths for the levels below.
        self._above_BEE = torch.cat([padded_BEE, above_BFE], 1)
        self._depth_BE = torch.cat([self._depth_BE, torch.full_like(parents_BF, depth)], 1)
        return self._cache.branch(self._depth_BE, above_BFE)
