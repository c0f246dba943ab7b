"""What every way of drafting promises to the decoder.

Shapes: B active slots (always slots 0..B-1), K drafted tokens, V vocabulary, T known tokens, A captured features.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from ..models import States
from ..sampling import SamplingSettings


class Draft(NamedTuple):
    """One chain a slot, padded on the right to the longest."""

    tokens_BK: Tensor
    count_B: list[int]
    q_BKV: Tensor | None  # the distribution each token was drawn from; None: deterministic


class Trace(NamedTuple):
    """What a draft would have said along a recorded answer.

    Row r is a round that starts with `start + r` tokens known; column j its (j+1)-th drafted token, given that all
    earlier ones equal the answer. False and 0 where nothing is drafted or the answer has ended.
    """

    hit_TK: Tensor  # bool: the draft's most likely token is the answer's
    q_TK: Tensor  # float: the draft's probability, after the sampling processors, of the answer's token
    offered_T: Tensor | None = None  # tokens on offer at each start, where that may be fewer than K


class Proposer(Protocol):
    """Drafts tokens for a batch of slots. All calls of one decoding run come from one decoder."""

    replayable: bool
    deterministic: bool  # never samples: at T > 0 it suits no rule that reads q
    aux_layers: tuple[int, ...]  # target layers whose hidden states it needs (hidden_states numbering)

    def begin(self, slots: Sequence[int], ids: Sequence[list[int]], states: States) -> None:
        """Fill fresh slots. `ids`: prompt and first emitted token; `states`: the target's, of all but that token."""

    def propose(
        self,
        limits: Sequence[int],
        sampling: Sequence[SamplingSettings],
        uniforms_BK: Tensor | None,
    ) -> Draft:
        """Draft up to `limits[b]` tokens for slot b. `uniforms_BK` None: take the most likely token (q is None)."""

    def observe(self, tokens: Sequence[list[int]], states: States) -> None:
        """What each slot emitted this round (accepted tokens, then the target's own), and the target's states:
        position j of `states` is the state from which token j was emitted."""

    def move(self, source: int, destination: int) -> None:
        """Slot `source` continues as slot `destination`."""

    def reserve(self, slots: int, capacity: int) -> None:
        """Called before a run: at most so many slots of so many tokens."""

    def trace(self, ids: list[int], start: int, count: int, sampling: SamplingSettings, states: States | None) -> Trace:
        """The trace of rounds that start with start..len(ids)-1 known tokens, `count` drafted tokens deep.

        `states`: the target's states of ids[:-1] as [1, T-1, ...]; None for a proposer without `aux_layers`.
        """
