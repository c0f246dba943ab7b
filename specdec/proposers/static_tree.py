"""Static trees, of the same shape in every round: greedy and sampled chains, Medusa's trees, top-k and sampled trees.

Shapes: B slots, N nodes, F nodes that have children on one level, C children or tokens on offer, V vocabulary.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ...errors import InputError
from ..kv_cache import runs_triton
from ..models import States
from ..replay.packing import Pack
from ..sampling import categorical
from ..sampling_settings import SamplingSettings
from ..tree import TreeBatch
from .base import Ask, Draft, Drafter, FollowsDrafter, Trace
from .logits import Offers, constant, likeliest, penalised_rows, process_rows, see
from .tree_shape import ROOT, Drawn, TreeShape


class StaticProposer(FollowsDrafter):
    """Proposer of static trees: reads a draft level by level. `shape` None: a chain as long as asked for. A node has no
    more children than the draft has tokens.

    Where a rule wants draws, siblings are drawn iid, or without replacement; a node that q has no mass left for is
    no candidate, so there are never more children than q has support.
    """

    replayable = True

    def __init__(self, drafter: Drafter, shape: TreeShape | None = None, drawn: Drawn = "iid") -> None:
        super().__init__(drafter)
        self._shape = None if shape is None else shape.narrowed(drafter.width)
        if self._shape is not None and not len(self._shape):
            raise InputError(f"tree: no first choice is below {drafter.width}, the tokens that the draft can say")
        self.drawn: Drawn = drawn
        self.chain = shape is None

    def trace(self, pack: Pack, count: int, sampling: SamplingSettings, states: States | None) -> Trace:
        levels = count if self._shape is None else self._shape.cut(count).depth
        return self._drafter.trace(pack, levels, sampling, states)

    def reserve(self, slots: int, tokens: int, levels: int) -> None:
        self._drafter.reserve(slots, tokens, self.most_nodes(levels), self.shape(levels).depth)

    def most_nodes(self, levels: int) -> int:
        return len(self.shape(levels))

    def shape(self, levels: int) -> TreeShape:
        levels = self._within(levels)
        return TreeShape.chain(levels) if self._shape is None else self._shape.cut(levels)

    def propose(self, ask: Ask) -> Draft:
        # Greedy trees without penalties take the short way.
        shape, batch = self.shape(ask.levels), len(ask.limits_B)
        if self.drawn == "deterministic":
            ask = ask._replace(uniforms=None)
        if ask.uniforms is None and ask.seen_BV is None:
            return self._likeliest_tree(ask, shape)

        # Level by level: fill in tokens from the parents' logits, then read those that have children.
        drawn: Drawn = "deterministic" if ask.uniforms is None else self.drawn
        logits_BFV = self._drafter.open(batch, self.chain)[:, None]
        growing = _PartialTree(shape, ask, drawn, logits_BFV)
        for depth, level in enumerate(shape.levels):
            growing.draw(level, logits_BFV)
            inner = [node for node in level if node in growing.entry]
            if inner:
                tokens_BF, parents_BF = growing.read(level, inner)
                logits_BFV = self._drafter.expand(tokens_BF, parents_BF, depth)
        return growing.draft(chain=self.chain)

    def _likeliest_tree(self, ask: Ask, shape: TreeShape) -> Draft:
        """Greedy tree, without a partial tree's bookkeeping, each line of which is a kernel launch on a GPU."""
        # The nodes that each level hangs from, and how many of the best tokens of each.
        batch, device = len(ask.limits_B), ask.limits_B.device
        entry = {node: place for place, node in enumerate(shape.inner)}  # the order in which nodes are read
        above = [[ROOT], *([node for node in level if node in entry] for level in shape.levels)]
        ranks = [1 + max(shape.choices[node][-1] for node in level) for level in shape.levels]
        offers = Offers(batch, sum(len(some) * count for some, count in zip(above, ranks)), device)

        # Level by level: the best tokens of the parents, then read those that have children.
        places: list[int] = []
        logits_BFV = self._drafter.open(batch, self.chain)[:, None]
        for depth, (level, parents, inner) in enumerate(zip(shape.levels, above, above[1:])):
            start = offers.add(logits_BFV, ranks[depth])[0]
            at = {node: start + ranks[depth] * place for place, node in enumerate(parents)}
            places += [at[shape.parents[node]] + shape.choices[node][-1] for node in level]
            if inner:
                tokens_BF = _columns(offers.tokens_BC, [places[node] for node in inner])
                parents_F = constant(tuple(entry.get(shape.parents[node], ROOT) for node in inner), device)
                logits_BFV = self._drafter.expand(tokens_BF, parents_F.expand(batch, -1), depth)

        drawn: Drawn = "deterministic" if self.chain else self.drawn
        parents_BN = constant(tuple(shape.parents), device).expand(batch, -1)
        chosen = _fixed_nodes(offers, constant(tuple(places), device), shape, ask.limits_B)
        return Draft(TreeBatch(chosen[0], parents_BN, chosen[1], shape.depth, drawn), None, self.chain)


def _columns(x_BC: Tensor, places: list[int]) -> Tensor:
    """Columns [B, F] of x; a view where they stand side by side."""
    first, count = places[0], len(places)
    if places == list(range(first, first + count)):
        return x_BC[:, first : first + count]
    return x_BC[:, constant(tuple(places), x_BC.device)]


def _fixed_nodes(offers: Offers, places_N: Tensor, shape: TreeShape, limits_B: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B, N] of a tree's nodes by their places among what was offered, and marks of those that are candidates:
    within the slot's limit, and with a finite logit as all above them."""
    if runs_triton(limits_B.device):
        from ..kernels.trees import fixed_nodes

        parents_N = constant(tuple(shape.parents), limits_B.device)
        return fixed_nodes(offers.scores_BC, offers.tokens_BC, places_N, parents_N, limits_B, shape.depth)
    depths_N = constant(tuple(len(choice) for choice in shape.choices), limits_B.device)
    candidate_BN = offers.scores_BC[:, places_N].isfinite() & (depths_N <= limits_B[:, None])
    for level in shape.levels[1:]:
        parents_F = constant(tuple(shape.parents[node] for node in level), limits_B.device)
        candidate_BN[:, level.start : level.stop] &= candidate_BN[:, parents_F]
    return offers.tokens_BC[:, places_N], candidate_BN


class _PartialTree:
    """Trees of one round as they grow: tokens, candidates and q on the device; their shape on the host."""

    def __init__(self, shape: TreeShape, ask: Ask, drawn: Drawn, logits_BFV: Tensor) -> None:
        self.shape, self.ask, self.drawn = shape, ask, drawn
        self.entry = {node: place for place, node in enumerate(shape.inner)}  # the order in which nodes are read
        self._device = logits_BFV.device
        # Tokens of each level, and marks of those that exist.
        self._tokens: list[Tensor] = []
        self._possible: list[Tensor] = []

        # Draws: q of every node, and one uniform number for each. Greedy slots may stand beside drawing ones.
        self.q_BNV: Tensor | None = None
        self.some_greedy = ask.uniforms is None or any(setting.greedy for setting in ask.sampling)
        if ask.uniforms is not None:
            size = (len(ask.limits_B), len(shape), logits_BFV.shape[-1])
            self.q_BNV = logits_BFV.new_zeros(size, dtype=torch.float32)
            self._u_BN = ask.uniforms(len(shape))
            self._greedy_B = constant(tuple(one.greedy for one in ask.sampling), self._device, torch.bool)

        # Repetition penalties: tokens seen on the way to each node of the frontier.
        self._frontier = [-1]  # nodes that the logits at hand follow
        self._seen_BFV = None if ask.seen_BV is None else ask.seen_BV[:, None]

    def draw(self, level: range, logits_BFV: Tensor) -> None:
        """Add a level's tokens from the logits of its parents."""
        # Where each parent's logits stand, and which of its children each node is.
        place = {node: at for at, node in enumerate(self._frontier)}
        above = [place[self.shape.parents[node]] for node in level]
        ranks = [self.shape.choices[node][-1] for node in level]
        self._look(logits_BFV, 1 + max(ranks))
        pick = self._pick_likeliest if self.q_BNV is None else partial(self._pick_drawn, level)
        tokens_BC, possible_BC = pick(above, ranks)

        # What stands below no candidate is none.
        if self._possible:
            first = level.start - self._possible[-1].shape[1]
            parents_C = self._constant([self.shape.parents[node] - first for node in level])
            possible_BC = possible_BC & self._possible[-1][:, parents_C]
        self._tokens.append(tokens_BC)
        self._possible.append(possible_BC)

    def _look(self, logits_BFV: Tensor, ranks: int) -> None:
        """Compute the likeliest tokens of each parent, and q where children are drawn.

        Slots at temperature 0 draft their likeliest tokens beside slots that draw, as they would alone; q says that
        those were equally likely, under which every rule accepts the target's best token and no other.
        """
        # Greedy slots, and rounds without draws: the top tokens.
        if self.some_greedy:
            scores_BFV = penalised_rows(logits_BFV, self.ask.sampling, self._seen_BFV)
            self._best_BFR, self._best_ids_BFR = likeliest(scores_BFV, ranks)

        # Drawing slots: the processed distribution; greedy slots' rows are replaced by the uniform one.
        if self.q_BNV is not None:
            self._q_BFV = process_rows(logits_BFV, self.ask.sampling, self._seen_BFV)
            if self.some_greedy:
                among_BFV = torch.zeros_like(self._q_BFV).scatter_(-1, self._best_ids_BFR, 1.0 / ranks)
                self._q_BFV = torch.where(self._greedy_B[:, None, None], among_BFV, self._q_BFV)

            # What is left to draw from: it shrinks without replacement.
            self._left_BFV = self._q_BFV.clone()

    def _pick_likeliest(self, above: list[int], ranks: list[int]) -> tuple[Tensor, Tensor]:
        """Tokens [B, C] of these ranks below these parents, and marks [B, C] of those whose logit is finite."""
        at_C = self._constant([place * self._best_ids_BFR.shape[2] + rank for place, rank in zip(above, ranks)])
        return self._best_ids_BFR.flatten(1)[:, at_C], self._best_BFR.flatten(1)[:, at_C].isfinite()

    def _pick_drawn(self, level: range, above: list[int], ranks: list[int]) -> tuple[Tensor, Tensor]:
        """Tokens [B, C] of a level, drawn with each node's own number, and marks [B, C] of those that exist."""
        assert self.q_BNV is not None
        tokens_BC = torch.zeros(len(self._u_BN), len(level), dtype=torch.long, device=self._device)
        possible_BC = torch.zeros_like(tokens_BC, dtype=torch.bool)

        # Siblings rank by rank: without replacement, a draw changes what is left for the next rank.
        for rank in sorted(set(ranks)):
            some = [place for place, other in enumerate(ranks) if other == rank]
            some_C, parents_C = self._constant(some), self._constant([above[place] for place in some])
            nodes_C = self._constant([level[place] for place in some])
            left_BCV = self._left_BFV[:, parents_C]
            drawn_BC = categorical(left_BCV, self._u_BN[:, nodes_C])
            tokens_BC[:, some_C], possible_BC[:, some_C] = drawn_BC, left_BCV.sum(-1) > 0

            # q is the whole distribution, also without replacement: accept rules remove earlier siblings.
            self.q_BNV[:, nodes_C] = self._q_BFV[:, parents_C]
            if self.drawn == "without_replacement":
                self._left_BFV[:, parents_C] = left_BCV.scatter(-1, drawn_BC[..., None], 0.0)

        # Greedy slots beside them.
        if self.some_greedy:
            best_BC, finite_BC = self._pick_likeliest(above, ranks)
            tokens_BC = torch.where(self._greedy_B[:, None], best_BC, tokens_BC)
            possible_BC = torch.where(self._greedy_B[:, None], finite_BC, possible_BC)
        return tokens_BC, possible_BC

    def read(self, level: range, inner: list[int]) -> tuple[Tensor, Tensor]:
        """Tokens and parents [B, F] of the level's nodes to read next; the next level is drawn from their logits."""
        # A node that is read has seen what its parent has, and itself.
        tokens_BF = self._tokens[-1][:, self._constant([node - level.start for node in inner])]
        if self._seen_BFV is not None:
            above_F = self._constant([self._frontier.index(self.shape.parents[node]) for node in inner])
            self._seen_BFV = see(self._seen_BFV[:, above_F], tokens_BF)

        # Parents by their place among all nodes read, in the order of `entry`.
        self._frontier = inner
        parents_F = self._constant([self.entry.get(self.shape.parents[node], -1) for node in inner])
        return tokens_BF, parents_F.expand(len(tokens_BF), -1)

    def draft(self, chain: bool) -> Draft:
        """The trees. Nodes past a slot's limit are no candidates."""
        tokens_BN, levels_N = torch.cat(self._tokens, 1), [len(choice) for choice in self.shape.choices]
        candidate_BN = torch.cat(self._possible, 1) & (self._constant(levels_N) <= self.ask.limits_B[:, None])
        parents_BN = self._constant(self.shape.parents).expand(*tokens_BN.shape)
        tree = TreeBatch(tokens_BN, parents_BN, candidate_BN, self.shape.depth, self.drawn)
        return Draft(tree, self.q_BNV, chain)

    def _constant(self, values: Sequence[int]) -> Tensor:
        return constant(tuple(values), self._device)
