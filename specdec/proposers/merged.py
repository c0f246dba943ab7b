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
    """Merges the trees of several proposers, side by side below one root. Each node keeps the q it was drawn from.

    Raises InputError for fewer than two proposers, for one that does not draw iid, and for unlike captured layers.
    """

    replayable = False
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
        raise InputError("merged drafts: cannot be replayed, decode them")

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

        # 3) Where nothing is drawn, only the first of equal branches stays a candidate.
        chosen = tuple(ask.uniforms is None or setting.greedy for setting in ask.sampling)
        repeats_BN = _repeated(tree) & constant(chosen, tree.tokens_BN.device, torch.bool)[:, None]
        tree = tree._replace(candidate_BN=tree.candidate_BN & ~repeats_BN)
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


def _repeated(tree: TreeBatch) -> Tensor:
    """Marks [B, N] of nodes on a branch whose first token an earlier draft's branch has too.

    Deterministic siblings must differ, so such a branch is no candidate. Drawn ones may be equal.
    """
    # First-level nodes that equal an earlier one.
    nodes = tree.tokens_BN.shape[1]
    first_BN = (tree.parents_BN < 0) & tree.candidate_BN
    same_BNN = (tree.tokens_BN[:, :, None] == tree.tokens_BN[:, None]) & first_BN[:, :, None] & first_BN[:, None]
    earlier_NN = torch.ones(nodes, nodes, dtype=torch.bool, device=tree.tokens_BN.device).tril(-1)

    # They and all that stands below them.
    repeats_BN = (same_BNN & earlier_NN).any(-1)
    return (tree.ancestors_BNN & repeats_BN[:, None]).any(-1)
