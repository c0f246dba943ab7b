"""What every way of drafting promises to the decoder, and every draft to its proposer.

Shapes: B active slots (always slots 0..B-1), N drafted nodes, F nodes read at once, K drafted tokens of a chain,
V vocabulary, R round starts of recorded texts.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cuda_graphs import send
from ..models import States
from ..replay.packing import Pack
from ..sampling import SamplingSettings
from ..tree import ROOT, Drawn, TreeBatch
from .tree_shape import TreeShape

UNRANKED = 1 << 30
"""The rank of a token that is not drafted, whatever the tree: more than any vocabulary has tokens."""


class Texts(NamedTuple):
    """Tokens of several slots, right-padded, on the device."""

    ids_BT: Tensor
    counts_B: Tensor
    known: list[list[int]] | None = None
    """The same on the host, where it is known there."""

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> "Texts":
        """From token lists."""
        longest = max(map(len, rows))
        ids = [[*row, *[0] * (longest - len(row)), len(row)] for row in rows]
        ids_BT = send(torch.tensor(ids), torch.device(device))
        return cls(ids_BT[:, :-1], ids_BT[:, -1], [list(row) for row in rows])

    @property
    def rows(self) -> list[list[int]]:
        """As token lists. Waits for the device where the host does not know them."""
        if self.known is not None:
            return self.known
        return [row[:count] for row, count in zip(self.ids_BT.tolist(), self.counts_B.tolist())]

    def cut(self) -> "Texts":
        """Without columns that no row needs, where looking for them costs no wait."""
        if self.ids_BT.device.type != "cpu":
            return self
        return Texts(self.ids_BT[:, : int(self.counts_B.max())], self.counts_B, self.known)

    def wide(self, columns: int) -> "Texts":
        """With at least so many columns."""
        return self._replace(ids_BT=F.pad(self.ids_BT, (0, max(0, columns - self.ids_BT.shape[1]))))

    def last(self) -> Tensor:
        """[B]: each row's last token."""
        return self.ids_BT.gather(1, (self.counts_B - 1).clamp(min=0)[:, None])[:, 0]


class Ask(NamedTuple):
    """What a round asks of a proposer, one entry a slot."""

    limits_B: Tensor
    """Levels to draft at most: what is drafted below them is no candidate."""
    levels: int
    """The largest of them, or more: so deep is the largest tree."""
    sampling: list[SamplingSettings]
    uniforms: Callable[[int], Tensor] | None
    """So many numbers [B, count] to draw nodes 0, 1, ... with; None: take the likeliest tokens."""
    seen_BV: Tensor | None
    """Tokens known to each slot, for repetition penalties; None: no slot has one."""


class Draft(NamedTuple):
    """One tree a slot."""

    tree: TreeBatch
    q_BNV: Tensor | None
    """Row i is the full distribution that node i was drawn from; None: nothing was drawn."""
    chain: bool
    """Every tree is a chain: it needs no tree mask and no sorting of the cache."""

    @classmethod
    def of_chains(cls, tokens_BK: Tensor, counts_B: Tensor, drawn: Drawn, q_BKV: Tensor | None = None) -> "Draft":
        return cls(TreeBatch.chains(tokens_BK, counts_B, drawn), q_BKV, chain=True)

    def padded(self, nodes: int, levels: int) -> "Draft":
        """With so many nodes and at least so many levels; those that are missing are no candidates."""
        missing, tree = nodes - self.tree.tokens_BN.shape[1], self.tree
        if not missing and tree.depth >= levels:
            return self
        more_N = torch.arange(nodes - missing, nodes, device=tree.tokens_BN.device) - 1 if self.chain else None
        parents_BN = F.pad(tree.parents_BN, (0, missing), value=ROOT)
        if more_N is not None:  # a chain stays one
            parents_BN[:, nodes - missing :] = more_N
        tree = tree._replace(
            tokens_BN=F.pad(tree.tokens_BN, (0, missing)),
            parents_BN=parents_BN,
            candidate_BN=F.pad(tree.candidate_BN, (0, missing)),
            depth=max(levels, tree.depth),  # riders may stand deeper
        )
        return Draft(tree, None if self.q_BNV is None else F.pad(self.q_BNV, (0, 0, 0, missing)), self.chain)


class Trace(NamedTuple):
    """What a draft would have said along recorded texts.

    Row r is the r-th round start of the texts, text by text; column j its (j+1)-th level, given that all drafted tokens
    above it equal the text.
    """

    rank_RK: Tensor
    """Tokens that the draft puts before the answer's: 0 where that is its most likely one. UNRANKED where nothing is
    drafted, the answer has ended, or the draft cannot say that token."""
    q_RK: Tensor
    """The draft's probability, after the sampling processors, of the answer's token; 0 where it is UNRANKED."""
    offered_R: Tensor | None = None  # tokens on offer at each start, where that may be fewer than K


class Reader(Protocol):
    """Follows a batch of texts. All calls of one decoding run come from one decoder."""

    aux_layers: tuple[int, ...]  # target layers whose hidden states it needs (hidden_states numbering)
    needs_hidden_states: bool  # whether it needs the target's states at all
    nested: bool  # a draft of fewer levels is the start of one of more: one trace tells of every number of levels

    needs_host_sync: bool
    """Whether it waits for the device, or reads tokens on the host: then no graph can hold what it does. One that does
    not wait keeps what it knows in tensors of its own, at the same places all along."""

    def begin(self, slots_R: Tensor, known: Texts, states: States) -> None:
        """Fill fresh slots. `known`: prompt and first emitted token; `states`: the target's, of all but that token."""

    def observe(self, new: Texts, states: States) -> None:
        """What each of the first slots emitted this round (accepted tokens, then the target's own), and the target's
        states: position j of `states` is the state from which token j was emitted."""

    def move(self, source: int, destination: int) -> None:
        """Slot `source` continues as slot `destination`."""

    def trace(self, pack: Pack, count: int, sampling: SamplingSettings, states: States | None) -> Trace:
        """The trace of all rounds that may start along the texts, `count` drafted tokens deep.

        `states`: the target's, [B, T, ...], of the texts' rows; None for one without `needs_hidden_states`.
        """


class Drafter(Reader, Protocol):
    """A trained draft: it reads nodes and says what may follow each."""

    levels: int | None  # most levels that it can draft; None: any number
    width: int  # tokens that it can draft: the logits of all others are -inf

    def reserve(self, slots: int, tokens: int, nodes: int, levels: int) -> None:
        """Called before a run: so many slots of at most so many tokens, nodes read on top of them in a round, and
        levels of its trees."""

    def open(self, batch: int, chain: bool) -> Tensor:
        """Logits [B, V] of the first drafted token. Forgets all nodes of the round before. `chain`: each node that is
        read in this round follows the one before."""

    def expand(self, tokens_BF: Tensor, parents_BF: Tensor, depth: int) -> Tensor:
        """Read F more nodes of one level (0: below the root); logits [B, F, V] of what follows each.

        `parents_BF`: place of each node's parent among all nodes read in this round, or ROOT.
        """


class FollowsDrafter:
    """The half of a proposer that a drafter does: follow the texts."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.aux_layers, self.needs_hidden_states, self.nested = (
            drafter.aux_layers,
            drafter.needs_hidden_states,
            drafter.nested,
        )
        self.needs_host_sync = drafter.needs_host_sync

    def begin(self, slots_R: Tensor, known: Texts, states: States) -> None:
        self._drafter.begin(slots_R, known, states)

    def observe(self, new: Texts, states: States) -> None:
        self._drafter.observe(new, states)

    def move(self, source: int, destination: int) -> None:
        self._drafter.move(source, destination)

    def _within(self, levels: int) -> int:
        """So many levels, or as many as the drafter has."""
        return levels if self._drafter.levels is None else min(levels, self._drafter.levels)


class Proposer(Reader, Protocol):
    """Drafts a tree a slot."""

    replayable: bool  # False: recorded answers never tell its rounds; else the rule decides (replay.py)
    drawn: Drawn  # how siblings are drawn where a rule wants draws; deterministic: it never draws
    chain: bool

    def reserve(self, slots: int, tokens: int, levels: int) -> None:
        """Called before a run: at most so many slots, of so many tokens, that draft so many levels a round."""

    def most_nodes(self, levels: int) -> int:
        """Nodes of the largest tree of so many levels."""

    def shape(self, levels: int) -> TreeShape | None:
        """The tree of so many levels, if every round has the same: then one trace replays it. None: each its own."""

    def propose(self, ask: Ask) -> Draft:
        """Draft a tree for each slot. Called before every `observe`, but where no slot may emit more than one token."""


@runtime_checkable
class ObservesTargetArgmax(Proposer, Protocol):
    """A proposer that learns from all nodes of a round, accepted or not."""

    def observe_target_argmax(self, best_BM: Tensor) -> None:
        """The target's likeliest token, penalties applied, after each row of the round: 0 the root, i + 1 node i.

        Called after `propose` and before `observe`, unless nothing was drafted. Another round overwrites it.
        """
