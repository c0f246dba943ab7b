"""What every way of drafting promises to the decoder, and every draft to its proposer.

Shapes: B active slots (always slots 0..B-1), N drafted nodes, F nodes read at once, K drafted tokens of a chain,
V vocabulary, R round starts of recorded texts.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from ..models import States
from ..sampling import SamplingSettings
from ..texts import Texts
from ..tree import Drawn, TreeBatch
from .shape import TreeShape

UNRANKED = 1 << 30
"""The rank of a token that is not drafted, whatever the tree: more than any vocabulary has tokens."""


class Ask(NamedTuple):
    """What a round asks of a proposer, one entry a slot."""

    limits: list[int]
    """Levels to draft at most."""
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
    def of_chains(cls, tokens_BK: Tensor, counts: Sequence[int], drawn: Drawn, q_BKV: Tensor | None = None) -> "Draft":
        return cls(TreeBatch.chains(tokens_BK, counts, drawn), q_BKV, chain=True)


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
    reads_states: bool  # whether it needs the target's states at all
    nested: bool  # a draft of fewer levels is the start of one of more: one trace tells of every number of levels

    def begin(self, slots: Sequence[int], ids: Sequence[list[int]], states: States) -> None:
        """Fill fresh slots. `ids`: prompt and first emitted token; `states`: the target's, of all but that token."""

    def observe(self, tokens: Sequence[list[int]], states: States) -> None:
        """What each slot emitted this round (accepted tokens, then the target's own), and the target's states:
        position j of `states` is the state from which token j was emitted."""

    def move(self, source: int, destination: int) -> None:
        """Slot `source` continues as slot `destination`."""

    def trace(self, texts: Texts, count: int, sampling: SamplingSettings, states: States | None) -> Trace:
        """The trace of all rounds that may start along the texts, `count` drafted tokens deep.

        `states`: the target's, [B, T, ...], of the texts' rows; None for one without `reads_states`.
        """


class Drafter(Reader, Protocol):
    """A trained draft: it reads nodes and says what may follow each."""

    levels: int | None  # most levels that it can draft; None: any number
    width: int  # tokens that it can draft: the logits of all others are -inf

    def reserve(self, slots: int, tokens: int, nodes: int, levels: int) -> None:
        """Called before a run: so many slots of at most so many tokens, nodes read on top of them in a round, and
        levels of its trees."""

    def open(self, batch: int) -> Tensor:
        """Logits [B, V] of the first drafted token. Forgets all nodes of the round before."""

    def expand(self, tokens_BF: Tensor, parents_BF: Tensor, depth: int) -> Tensor:
        """Read F more nodes of one level (0: below the root); logits [B, F, V] of what follows each.

        `parents_BF`: place of each node's parent among all nodes read in this round, or ROOT.
        """


class FollowsDrafter:
    """The half of a proposer that a drafter does: follow the texts."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.aux_layers, self.reads_states, self.nested = drafter.aux_layers, drafter.reads_states, drafter.nested

    def begin(self, slots: Sequence[int], ids: Sequence[list[int]], states: States) -> None:
        self._drafter.begin(slots, ids, states)

    def observe(self, tokens: Sequence[list[int]], states: States) -> None:
        self._drafter.observe(tokens, states)

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
        """Draft a tree for each slot."""
