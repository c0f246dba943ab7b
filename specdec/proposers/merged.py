"""Merged trees: several drafts in one tree, as in SpecInfer (Miao et al. 2024, arXiv 2305.09781).

Shapes: B slots, N drafted nodes of one proposer, V vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...errors import InputError
from ..models import States
from ..replay.packing import Pack
from ..sampling_settings import SamplingSettings
from ..tree import TreeBatch
from .base import Ask, Draft, Proposer, Texts, Trace
from .logits import constant
from .tree_shape import Drawn


class MergedProposer:
    """Merges the trees of several proposers below one root. Each node keeps the q it was drawn from.

    Where tokens are chosen, equal paths become one, as in SpecInfer's token trees. Drawn ones stand side by side: a
    rule has to see every draw, also of a token that stands there already. Raises InputError for fewer than two
    proposers, for one that does not draw iid, and for unlike captured layers.
    """

    replayable = True
    nested = True
    chain = False
    drawn: Drawn = "iid"

    def __init__(self, proposers: Sequence[Proposer]) -> None:
        # Rules judge siblings of several drafts only where each was drawn independently.
        others = [proposer.drawn for proposer in proposers if proposer.drawn != "iid"]
        if len(proposers) < 2 or others:
            raise InputError(f"merged drafts: {len(proposers)} with {others or 'iid'}: must be two or more, drawn iid")

        # The target captures one set of layers for all.
        self._proposers = tuple(proposers)
        self.aux_layers = tuple(sorted({layer for one in proposers for layer in one.aux_layers}))
        self.needs_host_sync = any(one.needs_host_sync for one in proposers)
        self.needs_hidden_states = any(one.needs_hidden_states for one in proposers)
        unlike = [one.aux_layers for one in proposers if one.aux_layers not in ((), self.aux_layers)]
        if unlike:
            raise InputError(f"merged drafts: read layers {unlike[0]} and {self.aux_layers}: must read the same ones")

    def begin(self, slots_R: Tensor, known: Texts, states: States) -> None:
        for proposer in self._proposers:
            proposer.begin(slots_R, known, states)

    def observe(self, new: Texts, states: States) -> None:
        for proposer in self._proposers:
            proposer.observe(new, states)

    def move(self, source: int, destination: int) -> None:
        for proposer in self._proposers:
            proposer.move(source, destination)

    def trace(self, pack: Pack, count: int, sampling: SamplingSettings, states: States | None) -> Trace:
        raise InputError("merged drafts: one trace cannot tell where they agree; draft them along the text")

    def reserve(self, slots: int, tokens: int, levels: int) -> None:
        self._counts = [proposer.most_nodes(levels) for proposer in self._proposers]
        for proposer in self._proposers:
            proposer.reserve(slots, tokens + levels, levels)  # a shallow one also reads what a deeper one had accepted

    def most_nodes(self, levels: int) -> int:
        return sum(proposer.most_nodes(levels) for proposer in self._proposers)

    def shape(self, levels: int) -> None:
        return None

    def propose(self, ask: Ask) -> Draft:
        # 1) Each proposer drafts with numbers of its own.
        drafts: list[Draft] = []
        for place, proposer in enumerate(self._proposers):
            first, count = sum(self._counts[:place]), self._counts[place]
            # As many nodes whatever the batch's other slots asked for: a node's number decides what it is judged with.
            draft = proposer.propose(ask._replace(uniforms=_from(ask, first)))
            drafts.append(draft.padded(count, draft.tree.depth))

        # 2) Side by side below the root.
        q_rows = [draft.q_BNV for draft in drafts if draft.q_BNV is not None]
        tree = _side_by_side([draft.tree for draft in drafts])

        # 3) Where nothing is drawn, equal paths become one.
        chosen = tuple(ask.uniforms is None or setting.greedy for setting in ask.sampling)
        tree = _one_path_each(tree, constant(chosen, tree.tokens_BN.device, torch.bool))
        return Draft(tree, torch.cat(q_rows, 1) if q_rows else None, chain=False)


def _from(ask: Ask, first: int) -> Callable[[int], Tensor] | None:
    """Uniform numbers of a round from node `first` on: no two drafts may draw with the same ones."""
    numbers = ask.uniforms
    return None if numbers is None else lambda count: numbers(first + count)[:, first:]


def _side_by_side(trees: Sequence[TreeBatch]) -> TreeBatch:
    # Parents shift by the nodes of the trees before; children of the root stay there.
    first = 0
    parents = []
    for tree in trees:
        parents.append(torch.where(tree.parents_BN < 0, -1, tree.parents_BN + first))
        first += tree.tokens_BN.shape[1]
    return TreeBatch(
        torch.cat([tree.tokens_BN for tree in trees], 1),
        torch.cat(parents, 1),
        torch.cat([tree.candidate_BN for tree in trees], 1),
        max(tree.depth for tree in trees),
        trees[0].drawn,
    )


def _one_path_each(tree: TreeBatch, slots_B: Tensor) -> TreeBatch:
    """The trees with each path from the root once in these slots: the first node of it has the children of all.

    The others are no candidates: chosen siblings must differ. Nodes keep their places.
    """
    # A node is the first of its path or points to that. Level by level, as parents must have been found before.
    nodes, device = tree.tokens_BN.shape[1], tree.tokens_BN.device
    itself_NN = torch.eye(nodes, dtype=torch.bool, device=device)
    places_N = torch.arange(nodes, device=device)
    alike_BNN = (tree.tokens_BN[:, :, None] == tree.tokens_BN[:, None]) & tree.candidate_BN[:, None]
    alike_BNN = alike_BNN & slots_B[:, None, None] & torch.ones_like(itself_NN).tril(-1) | itself_NN
    parents_BN, first_BN = tree.parents_BN, places_N.expand_as(tree.parents_BN)
    for _ in range(tree.depth):
        same_BNN = alike_BNN & (parents_BN[:, :, None] == parents_BN[:, None])
        first_BN = same_BNN.to(torch.uint8).argmax(-1)
        parents_BN = torch.where(tree.parents_BN < 0, -1, first_BN.gather(1, tree.parents_BN.clamp(min=0)))

    # With the parents of the last level known, those that point to themselves are left.
    return tree._replace(parents_BN=parents_BN, candidate_BN=tree.candidate_BN & (first_BN == places_N))
