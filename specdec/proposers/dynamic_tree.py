"""EAGLE-2's dynamic tree (Li et al. 2024, arXiv 2406.16858): the draft's own confidence gives each round its shape.

Shapes: B slots, k nodes of the frontier, R nodes read, C candidates, N drafted nodes, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import InputError
from ..kv_cache import CacheStep, KVCache, runs_triton
from ..models import States
from ..replay.packing import Pack
from ..sampling_settings import SamplingSettings
from ..tree import TreeBatch, tree_mask
from .base import Ask, Draft, Drafter, FollowsDrafter, Trace
from .logits import MOST_CANDIDATES, Offers, constant, gather_rows, likeliest, penalised_rows, see
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
        pool = _Pool(ask, self._top_k, levels)
        logits_BFV = self._drafter.open(len(ask.limits_B), chain=False)[:, None]
        for depth in range(levels):
            pool.offer(logits_BFV)
            if depth + 1 < levels:
                tokens_Bk, parents_Bk = pool.advance()
                logits_BFV = self._drafter.expand(tokens_Bk, parents_Bk, depth)
        # Rerank all candidates and keep the best.
        return Draft(pool.best(self.most_nodes(levels), levels), None, chain=False)


class _Pool:
    """Candidate nodes of one round, parents before children: `top_k` of the root, then of each node of a frontier."""

    def __init__(self, ask: Ask, top_k: int, levels: int) -> None:
        self._ask, self._top_k = ask, top_k
        self._seen_BFV = None if ask.seen_BV is None else ask.seen_BV[:, None]
        size, (batch,), device = top_k + top_k * top_k * (levels - 1), ask.limits_B.shape, ask.limits_B.device
        self._offers = Offers(batch, size, device)
        self._on_kernels = size <= MOST_CANDIDATES and runs_triton(device)
        # Places in the pool of the nodes that were read below the root, in order.
        self._read_BR = torch.empty(batch, top_k * (levels - 1), dtype=torch.long, device=device)
        self._known = 0
        self._above_BF: Tensor | None = None  # the frontier's scores; None: the root's

    def offer(self, logits_BFV: Tensor) -> None:
        """Add the `top_k` best children of every frontier node."""
        # A child's score adds its parent's: the log of the product on the way.
        penalised_BFV = penalised_rows(logits_BFV, self._ask.sampling, self._seen_BFV)
        self._level = self._offers.add(penalised_BFV, self._top_k, self._above_BF, normalised=True)

    def advance(self) -> tuple[Tensor, Tensor]:
        """Next frontier: the best `top_k` nodes of this level. Returns their tokens, and the place of each one's parent
        among all nodes that were read (-1: the root)."""
        # The best of this level's candidates, by their places in the pool.
        (start, stop), known, k = self._level, self._known, self._top_k
        self._known += k
        scores_BC, tokens_BC = self._offers.scores_BC, self._offers.tokens_BC
        if self._on_kernels:
            from ..kernels.trees import next_frontier

            chosen = next_frontier(scores_BC, tokens_BC, self._read_BR, start, stop, known, k)
            self._above_BF, tokens_Bk, parents_Bk = chosen
        else:
            self._above_BF, places_Bk = likeliest(scores_BC[:, start:stop], k)
            places_Bk = self._read_BR[:, known : self._known] = start + places_Bk
            # All that offered were read in the same order, but for the root, which stands first.
            tokens_Bk, parents_Bk = tokens_BC.gather(1, places_Bk), places_Bk // k - 1

        # Each frontier node has seen what its parent has, and itself.
        if self._seen_BFV is not None:
            first = known - k if known else ROOT  # of the frontier above
            self._seen_BFV = see(gather_rows(self._seen_BFV, parents_Bk, first), tokens_Bk)
        return tokens_Bk, parents_Bk

    def best(self, nodes: int, levels: int) -> TreeBatch:
        """Trees of the best `nodes` candidates by score, in the pool's order. What lies past a slot's limit is none."""
        scores_BC, tokens_BC = self._offers.scores_BC, self._offers.tokens_BC
        limits_B, k = self._ask.limits_B, self._top_k
        if self._on_kernels:
            from ..kernels.trees import best_nodes

            tree = best_nodes(scores_BC, tokens_BC, self._read_BR, limits_B, nodes, k)
            return TreeBatch(*tree, levels, "deterministic")

        # Past the limit no score wins.
        depths = (0,) * k + tuple(level for level in range(1, levels) for _ in range(k * k))
        scores_BC = scores_BC.masked_fill(constant(depths, limits_B.device) >= limits_B[:, None], -torch.inf)

        # Of equal scores the earlier candidate wins, and a parent stands before its child.
        best_BN, chosen_BN = likeliest(scores_BC, nodes)
        chosen_BN, order_BN = chosen_BN.sort(-1)

        # Parents: from places in the pool to places among the chosen.
        above_BN = F.pad(self._read_BR, (1, 0), value=ROOT).gather(1, chosen_BN // k)
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
        known_BE = parents_BF[:, :0] if self._parents_BE is None else self._parents_BE
        if runs_triton(parents_BF.device):
            from ..kernels.trees import branch

            *entries, self._parents_BE = branch(parents_BF, depth + 1, self._cache.lengths_S, known_BE)
            return self._cache.branch(*entries)
        self._parents_BE = torch.cat([known_BE, parents_BF], 1)
        return self._cache.branch(*tree_mask(self._parents_BE, depth + 1, new))
