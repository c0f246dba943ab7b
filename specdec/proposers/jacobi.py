"""Jacobi decoding (Santilli et al. 2023, arXiv 2305.10427): the target's own last guesses are the draft.

Shapes: B active slots, K drafted tokens of a chain, M = K + 1 rows of the target.
"""

from torch import Tensor

from ...errors import InputError
from ..models import States
from ..packs import Pack
from ..sampling import SamplingSettings
from ..tree import Drawn
from .base import Ask, Draft, Texts, Trace


class JacobiProposer:
    """A chain of guesses, all of which one pass of the target makes anew, each from those before it.

    What the target said after the guesses that were not accepted is the next round's draft, as far as it goes; the
    rest, and the first draft of a request, repeats the last token before it.
    """

    replayable = False  # guesses depend on where earlier rounds started
    nested = False
    drawn: Drawn = "deterministic"
    chain = True
    aux_layers: tuple[int, ...] = ()
    reads_states = False
    waits = True

    def reserve(self, slots: int, tokens: int, levels: int) -> None:
        self._levels = levels
        self._guesses: list[list[int]] = [[] for _ in range(slots)]
        self._best_BM: Tensor | None = None  # what the target said in this round

    def most_nodes(self, levels: int) -> int:
        return levels

    def shape(self, levels: int) -> None:
        return None

    def begin(self, slots_R: Tensor, known: Texts, states: States) -> None:
        for slot, row in zip(slots_R.tolist(), known.rows):
            self._guesses[slot] = [row[-1]] * self._levels
        self._device = slots_R.device

    def propose(self, ask: Ask) -> Draft:
        drafts = [guesses[:limit] for guesses, limit in zip(self._guesses, ask.limits_B.tolist())]
        self._counts = [len(draft) for draft in drafts]
        drafted = Texts.of(drafts, self._device)
        return Draft.of_chains(drafted.ids_BT, drafted.counts_B, self.drawn)

    def hear(self, best_BM: Tensor) -> None:
        self._best_BM = best_BM  # read later, when the round has waited for the device anyway

    def observe(self, new: Texts, states: States) -> None:
        if self._best_BM is None:  # nothing was drafted
            return
        rows, self._best_BM = self._best_BM.tolist(), None
        for slot, (emitted, row, count) in enumerate(zip(new.rows, rows, self._counts)):
            guesses = row[len(emitted) : count + 1]
            last = guesses[-1] if guesses else emitted[-1]
            self._guesses[slot] = [*guesses, *[last] * (self._levels - len(guesses))]

    def move(self, source: int, destination: int) -> None:
        self._guesses[destination] = self._guesses[source]

    def trace(self, pack: Pack, count: int, sampling: SamplingSettings, states: States | None) -> Trace:
        raise InputError("jacobi: its guesses depend on the rounds before, decode it")
