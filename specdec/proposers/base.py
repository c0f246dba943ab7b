"""Protocols of drafting: `Proposer`, which the decoder calls, and `Drafter`, which a proposer calls.

Shapes: B active slots (always slots 0..B-1), N drafted nodes, F nodes read at once, K drafted tokens of a chain,
V vocabulary, R round starts of recorded texts.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cuda_graphs import send
from ..models import States
from ..replay.packing import Pack
from ..sampling_settings import SamplingSettings
from ..tree import TreeBatch
from .tree_shape import ROOT, Drawn, TreeShape

T = TypeVar("T")
UNRANKED = 1 << 30
"""Rank of a token that no tree drafts: larger than any vocabulary."""


class Texts(NamedTuple):
    """Token ids of several slots, right-padded, on the device."""

    ids_BT: Tensor
    counts_B: Tensor
    known: list[list[int]] | None = None
    """The token lists on the host, where the host knows them."""

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> "Texts":
        """Texts of token lists, brought to the device."""
        # One transfer: the counts travel as the last column of the padded ids.
        longest = max(map(len, rows))
        ids = [[*row, *[0] * (longest - len(row)), len(row)] for row in rows]
        ids_BT = send(torch.tensor(ids), torch.device(device))
        return cls(ids_BT[:, :-1], ids_BT[:, -1], [list(row) for row in rows])

    @property
    def rows(self) -> list[list[int]]:
        """Token lists on the host. Waits for the device where `known` is None."""
        # The device's copy is read only where the host has none.
        if self.known is not None:
            return self.known
        return [row[:count] for row, count in zip(self.ids_BT.tolist(), self.counts_B.tolist())]

    def cut(self) -> "Texts":
        """Texts without the padding columns that no row needs; on a GPU unchanged, where counting them would wait."""
        if self.ids_BT.device.type != "cpu":
            return self
        return Texts(self.ids_BT[:, : int(self.counts_B.max())], self.counts_B, self.known)

    def wide(self, columns: int) -> "Texts":
        """Texts with at least `columns` columns."""
        return self._replace(ids_BT=F.pad(self.ids_BT, (0, max(0, columns - self.ids_BT.shape[1]))))

    def last(self) -> Tensor:
        """Last token [B] of each row."""
        return self.ids_BT.gather(1, (self.counts_B - 1).clamp(min=0)[:, None])[:, 0]


class Ask(NamedTuple):
    """A round's request to a proposer, one entry a slot."""

    limits_B: Tensor
    """Most levels to draft, per slot: deeper nodes are no candidates."""
    levels: int
    """Depth of the largest tree: the largest of `limits_B`, or more."""
    sampling: list[SamplingSettings]
    uniforms: Callable[[int], Tensor] | None
    """count -> uniform random numbers [B, count], with which nodes 0, 1, ... are drawn; None: take the likeliest."""
    seen_BV: Tensor | None
    """Tokens known to each slot, for repetition penalties; None: no slot has one."""


class Draft(NamedTuple):
    """Drafted token trees, one a slot."""

    tree: TreeBatch
    q_BNV: Tensor | None
    """Draft distributions: row i is the full one that node i was drawn from; None: nothing was drawn."""
    chain: bool
    """Whether every tree is a chain: then verification needs no tree mask and no sorting of the cache."""

    @classmethod
    def of_chains(cls, tokens_BK: Tensor, counts_B: Tensor, drawn: Drawn, q_BKV: Tensor | None = None) -> "Draft":
        return cls(TreeBatch.chains(tokens_BK, counts_B, drawn), q_BKV, chain=True)

    def padded(self, nodes: int, levels: int) -> "Draft":
        """The draft padded to `nodes` nodes and at least `levels` levels; nodes added are no candidates."""
        # Nothing to add.
        missing, tree = nodes - self.tree.tokens_BN.shape[1], self.tree
        if not missing and tree.depth >= levels:
            return self

        # New nodes stand below the root; in a chain each follows the one before it.
        more_N = torch.arange(nodes - missing, nodes, device=tree.tokens_BN.device) - 1 if self.chain else None
        parents_BN = F.pad(tree.parents_BN, (0, missing), value=ROOT)
        if more_N is not None:  # a chain stays one
            parents_BN[:, nodes - missing :] = more_N

        # They are no candidates, so verification skips them.
        tree = tree._replace(
            tokens_BN=F.pad(tree.tokens_BN, (0, missing)),
            parents_BN=parents_BN,
            candidate_BN=F.pad(tree.candidate_BN, (0, missing)),
            depth=max(levels, tree.depth),  # riders may stand deeper
        )
        return Draft(tree, None if self.q_BNV is None else F.pad(self.q_BNV, (0, 0, 0, missing)), self.chain)


class Trace(NamedTuple):
    """Trace: ranks and probabilities that a draft gives to the tokens of recorded texts, for replay.

    Row r is the r-th round start of the texts, text by text; column j its (j+1)-th level, given that all drafted tokens
    above it equal the text.
    """

    rank_RK: Tensor
    """Rank of the answer's token in the draft's order: 0 for the draft's most likely one. UNRANKED where nothing is
    drafted, the answer has ended, or the draft cannot say that token."""
    q_RK: Tensor
    """The draft's probability, after the sampling processors, of the answer's token; 0 where it is UNRANKED."""
    offered_R: Tensor | None = None  # tokens on offer at each start, where that may be fewer than K


class Reader(Protocol):
    """Reader protocol: follows the texts of a batch of slots. All calls of one decoding run come from one decoder."""

    aux_layers: tuple[int, ...]  # target layers whose hidden states it needs (hidden_states numbering)
    needs_hidden_states: bool  # whether it needs the target's states at all
    nested: bool  # a draft of fewer levels is the start of one of more: one trace tells of every number of levels

    needs_host_sync: bool
    """Whether the reader waits for the device or reads tokens on the host: then no CUDA graph can capture it. A reader
    that does not wait keeps its state in tensors at fixed addresses."""

    def begin(self, slots_R: Tensor, known: Texts, states: States) -> None:
        """Prefill fresh slots. `known`: prompt and first emitted token; `states`: the target's, without that token."""

    def observe(self, new: Texts, states: States) -> None:
        """Read a round's result. `new`: tokens that each of the first slots emitted (accepted ones, then the target's
        own); position j of `states`: the target's state from which token j was emitted."""

    def move(self, source: int, destination: int) -> None:
        """Move slot `source` to slot `destination`."""

    def trace(self, pack: Pack, count: int, sampling: SamplingSettings, states: States | None) -> Trace:
        """Trace of all rounds that may start along the texts, `count` drafted tokens deep.

        `states`: the target's, [B, T, ...], of the texts' rows; None for one without `needs_hidden_states`.
        """


class Drafter(Reader, Protocol):
    """Drafter protocol: a trained draft that reads nodes and returns the logits of what follows each."""

    levels: int | None  # most levels that it can draft; None: any number
    width: int  # tokens that it can draft: the logits of all others are -inf

    def reserve(self, slots: int, tokens: int, nodes: int, levels: int) -> None:
        """Allocate caches before a run. `tokens`: most of a slot; `nodes`: most read in a round on top of them;
        `levels`: of a round's trees."""

    def open(self, batch: int, chain: bool) -> Tensor:
        """Start a round: logits [B, V] of the first drafted token. Forgets all nodes of the round before. `chain`: each
        node that is read in this round follows the one before."""

    def expand(self, tokens_BF: Tensor, parents_BF: Tensor, depth: int) -> Tensor:
        """Read F more nodes of one level (0: below the root); logits [B, F, V] of what follows each.

        `parents_BF`: place of each node's parent among all nodes read in this round, or ROOT; it is on the level above.
        """


class FollowsDrafter:
    """Reader half of a proposer, delegated to its drafter."""

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
        """`levels`, or the drafter's most levels where it has fewer."""
        return levels if self._drafter.levels is None else min(levels, self._drafter.levels)


class Proposer(Reader, Protocol):
    """Proposer protocol: drafts one tree a slot in every round."""

    replayable: bool  # False: recorded answers never tell its rounds; else the rule decides (replay.py)
    drawn: Drawn  # how siblings are drawn where a rule wants draws; deterministic: it never draws
    chain: bool

    def reserve(self, slots: int, tokens: int, levels: int) -> None:
        """Allocate before a run: at most `slots` slots of `tokens` tokens, which draft `levels` levels a round."""

    def most_nodes(self, levels: int) -> int:
        """Nodes of the largest tree of `levels` levels."""

    def shape(self, levels: int) -> TreeShape | None:
        """Tree shape of `levels` levels, if it is the same in every round: then one trace replays it. Else None."""

    def propose(self, ask: Ask) -> Draft:
        """Draft a tree for each slot. Called before every `observe`, but where no slot may emit more than one token."""


Run = Callable[[tuple[object, ...], Callable[[], T]], T]
"""(name, function) -> what the function returns: it runs, or a graph of it is replayed. A name stands for one function.
"""


@runtime_checkable
class DraftsInSteps(Proposer, Protocol):
    """Proposer that drafts in steps, of which only the first ones may be needed: the host looks after each. So no graph
    can hold them all, but one can hold each step."""

    def propose_in_steps(self, run: Run[Any], levels: int, ask: Callable[[], Ask]) -> Draft:
        """`propose`, in steps that `run` runs; `ask` makes the request anew in every step that reads it, as a step's
        tensors are made in it. `levels`: of the request."""


@runtime_checkable
class ObservesTargetArgmax(Proposer, Protocol):
    """Proposer that also reads the target's argmax after all nodes of a round, accepted or not."""

    def observe_target_argmax(self, best_BM: Tensor) -> None:
        """The target's likeliest token, penalties applied, after each row of the round: 0 the root, i + 1 node i.

        Called after `propose` and before `observe`, unless nothing was drafted. Another round overwrites it.
        """
