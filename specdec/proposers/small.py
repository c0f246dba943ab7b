"""Reading an independent small model as a draft.

Shapes: B active slots, K drafted tokens, F nodes read at once, H hidden size, R round starts of recorded texts.
"""

from collections.abc import Sequence

from torch import Tensor

from ..cache import KVCache
from ..drafts.small import SmallDraft
from ..models import States
from ..sampling import SamplingSettings
from ..texts import Texts
from .base import UNRANKED, Trace
from .branches import Branches
from .rows import fill_rows, last_of, trace_level


class SmallDrafter:
    """Runs the draft on a cache of its own. `pending`: known tokens that it has not read yet."""

    aux_layers: tuple[int, ...] = ()
    reads_states = False
    nested = True
    levels: int | None = None

    def __init__(self, draft: SmallDraft) -> None:
        self._lm = draft.lm
        self.width = draft.vocab_size
        self._pending: list[list[int]] = []

    def reserve(self, slots: int, tokens: int, nodes: int, levels: int) -> None:
        self._cache = KVCache(slots, tokens + nodes, self._lm.device)
        self._pending = [[] for _ in range(slots)]

    def begin(self, slots: Sequence[int], ids: Sequence[list[int]], states: States) -> None:
        prompts = [row[:-1] for row in ids]
        step = self._cache.prefill(slots, [len(prompt) for prompt in prompts])
        self._lm.states(fill_rows(prompts, self._lm.device), step)
        for slot, row in zip(slots, ids):
            self._pending[slot] = row[-1:]

    def open(self, batch: int) -> Tensor:
        fed = self._pending[:batch]
        counts = [len(row) for row in fed]
        ids_BN = fill_rows(fed, self._lm.device)
        hidden_BNH = self._lm.states(ids_BN, self._cache.extend(*ids_BN.shape)).hidden_BTH
        self._cache.keep(counts)
        self._pending[:batch] = [[] for _ in range(batch)]
        self._branches = Branches(self._cache, batch)
        return self._lm.logits(last_of(hidden_BNH, counts))

    def expand(self, tokens_BF: Tensor, parents_BF: Tensor, depth: int) -> Tensor:
        step = self._branches.grow(parents_BF, depth)
        return self._lm.logits(self._lm.states(tokens_BF, step).hidden_BTH)

    def observe(self, tokens: Sequence[list[int]], states: States) -> None:
        """Nodes that were read are dropped, accepted or not: the next pass reads all that was emitted at once."""
        for slot, emitted in enumerate(tokens):
            self._pending[slot] = [*self._pending[slot], *emitted]

    def move(self, source: int, destination: int) -> None:
        self._cache.move(source, destination)
        self._pending[destination] = self._pending[source]

    def trace(self, texts: Texts, count: int, sampling: SamplingSettings, states: States | None) -> Trace:
        """One teacher-forced pass: given the true prefix, every depth sees the same context as decoding would."""
        hidden_RH = texts.pick(self._lm.states(texts.ids_BT).hidden_BTH, -1)
        rank_R, q_R = trace_level(texts, 0, hidden_RH, self._lm.logits, self.width, sampling)
        return Trace(texts.ahead(rank_R, count, UNRANKED), texts.ahead(q_R, count, 0.0))
