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
from ..tree import TreeBatch, tree_mask
from .base import Ask, Draft, Drafter, FollowsDrafter, Trace
from .logits import constant, gather_rows, likeliest, likeliest_logp, penalised_rows, see
from .tree_shape import ROOT, Drawn


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
            pool.offer(logits_BFV)
            if depth + 1 < levels:
                tokens_Bk, parents_Bk = pool.advance()
                logits_BFV = self._drafter.expand(tokens_Bk, parents_Bk, depth)
        # Rerank all candidates and keep the best.
        return Draft(pool.best(self.most_nodes(levels), levels), None, chain=False)


class _Pool:
    """Candidate nodes of one round, parents before children."""

    def __init__(self, ask: Ask, top_k: int) -> None:
        self._ask, self._top_k = ask, top_k
        self._seen_BFV = None if ask.seen_BV is None else ask.seen_BV[:, None]
        self._tokens: list[Tensor] = []
        self._scores: list[Tensor] = []
        # Places in the pool of all nodes that offered children, `top_k` each, in order: the root, then each frontier.
        self._offered = [constant((ROOT,), ask.limits_B.device).expand(len(ask.limits_B), 1)]
        self._above_BF: Tensor | None = None  # the frontier's scores; None: the root's

    def offer(self, logits_BFV: Tensor) -> None:
        """Add the `top_k` best children of every frontier node."""
        # A child's score adds its parent's: the log of the product on the way.
        penalised_BFV = penalised_rows(logits_BFV, self._ask.sampling, self._seen_BFV)
        scores_BFk, tokens_BFk = likeliest_logp(penalised_BFV, self._top_k)
        if self._above_BF is not None:
            scores_BFk = scores_BFk + self._above_BF[..., None]

        self._scores.append(scores_BFk.flatten(1))
        self._tokens.append(tokens_BFk.flatten(1))

    def advance(self) -> tuple[Tensor, Tensor]:
        """Next frontier: the best `top_k` nodes of this level. Returns their tokens, and the place of each one's parent
        among all nodes that were read (-1: the root)."""
        # The best of this level's candidates, by their places in the pool.
        start = sum(scores.shape[1] for scores in self._scores[:-1])
        self._above_BF, chosen_Bk = likeliest(self._scores[-1], self._top_k)
        tokens_Bk = self._tokens[-1].gather(1, chosen_Bk)
        self._offered.append(start + chosen_Bk)

        # Each frontier node has seen what its parent has, and itself.
        if self._seen_BFV is not None:
            self._seen_BFV = see(gather_rows(self._seen_BFV, chosen_Bk // self._top_k), tokens_Bk)

        # All that offered were read in the same order, but for the root, which stands first.
        return tokens_Bk, self._offered[-1] // self._top_k - 1

    def best(self, nodes: int, levels: int) -> TreeBatch:
        """Trees of the best `nodes` candidates by score, in the pool's order. What lies past a slot's limit is none."""
        # The pool as one list; past the limit no score wins.
        scores_BC, tokens_BC, offered_BO = (torch.cat(x, 1) for x in (self._scores, self._tokens, self._offered))
        depths = tuple(depth for depth, scores in enumerate(self._scores) for _ in range(scores.shape[1]))
        past_BC = constant(depths, scores_BC.device) >= self._ask.limits_B[:, None]
        scores_BC = scores_BC.masked_fill(past_BC, -torch.inf)

        # Of equal scores the earlier candidate wins, and a parent stands before its child.
        best_BN, chosen_BN = likeliest(scores_BC, nodes)
        chosen_BN, order_BN = chosen_BN.sort(-1)

        # Parents: from places in the pool to places among the chosen.
        above_BN = offered_BO.gather(1, chosen_BN // self._top_k)
        parents_BN = torch.where(above_BN < 0, ROOT, torch.searchsorted(chosen_BN, above_BN))

        # Finite scores only: the others lie past a slot's limit.
        candidate_BN = best_BN.isfinite().gather(1, order_BN)
        return TreeBatch(tokens_BC.gather(1, chosen_BN), parents_BN, candidate_BN, levels, "deterministic")


class Branches:
    """Cache steps by which a draft reads a tree level by level, with tree masks. The cache's lengths do not grow.

    `chain`: each node follows the one before, so that the past is all there is to see.
    """

    def __init__(self, cache: KVCache, chain: bool) -> None:
        self._cache, self._chain = cache, chain
        self._parents_BE: Tensor | None = None

    def grow(self, parents_BF: Tensor, depth: int) -> CacheStep:
        """Cache step that reads F more nodes of one level, each below an earlier node or the root (-1)."""
        # A chain needs no mask: each node sees all before it.
        batch, new = parents_BF.shape
        if self._chain:
            return self._cache.extend(batch, new, skip=depth)

        # A node sees all that its parent sees, and itself.
        known = self._parents_BE
        self._parents_BE = parents_BF if known is None else torch.cat([known, parents_BF], 1)
        return self._cache.branch(*tree_mask(self._parents_BE, depth + 1, new))
