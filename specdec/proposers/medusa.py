"""Medusa drafter: each level of a tree comes from one head, whatever tokens stand above it.

Shapes: B active slots, F nodes read at once, R round starts of recorded texts, H hidden size, V vocabulary.
"""

from functools import partial

from torch import Tensor

from ..drafts.medusa import MedusaDraft
from ..models import States
from ..replay.packing import Pack
from ..sampling_settings import SamplingSettings
from .base import Texts, Trace
from .logits import last_of, trace_levels


class MedusaDrafter:
    """Medusa drafter. Its only state: the target's post-norm state from which each slot's last token was emitted."""

    aux_layers: tuple[int, ...] = ()
    needs_hidden_states = True
    nested = True
    needs_host_sync = False

    def __init__(self, draft: MedusaDraft) -> None:
        self._draft = draft
        self._heads = draft.config.num_heads
        self.levels: int | None = self._heads
        self.width = draft.config.vocab_size
        self._weight: Tensor = draft.lm_heads[0].weight  # type: ignore[assignment]

    def reserve(self, slots: int, tokens: int, nodes: int, levels: int) -> None:
        self._state_SH = self._weight.new_zeros(slots, self._draft.config.hidden_size)

    def begin(self, slots_R: Tensor, known: Texts, states: States) -> None:
        self._state_SH[slots_R] = self._last(states, known.counts_B - 1)

    def open(self, batch: int, chain: bool) -> Tensor:
        return self._draft.logits(self._state_SH[:batch], 0)

    def expand(self, tokens_BF: Tensor, parents_BF: Tensor, depth: int) -> Tensor:
        logits_BV = self._draft.logits(self._state_SH[: len(tokens_BF)], depth + 1)
        return logits_BV[:, None].expand(-1, tokens_BF.shape[1], -1)

    def observe(self, new: Texts, states: States) -> None:
        self._state_SH[: len(new.counts_B)] = self._last(states, new.counts_B)

    def move(self, source: int, destination: int) -> None:
        self._state_SH[destination] = self._state_SH[source]

    def trace(self, pack: Pack, count: int, sampling: SamplingSettings, states: States | None) -> Trace:
        """Trace: head j at every round start drafts the token j + 1 places on."""
        if states is None:
            raise ValueError("Medusa heads need the target's states; ask for proposer.needs_hidden_states")
        hidden_RH = pack.pick(states.hidden_BTH, -2).to(self._weight.dtype)
        levels = ((hidden_RH, partial(self._draft.logits, head=head)) for head in range(min(count, self._heads)))
        return trace_levels(pack, count, levels, self.width, sampling)

    def _last(self, states: States, counts_B: Tensor) -> Tensor:
        return last_of(states.hidden_BTH, counts_B).to(self._weight.dtype)
