"""Drafting with a model of another tokenizer than the target's, by way of text (Timor et al. 2025, arXiv 2502.05202).

Shapes: B active slots, K drafted tokens, V vocabulary.
"""

from collections.abc import Sequence

from ...errors import InputError
from ..foreign import ForeignDraft
from ..models import States
from ..sampling import SamplingSettings
from ..spelling import Respelled
from ..tree import Drawn
from .base import Ask, Draft, Trace
from .rows import fill_rows
from .texts import Texts

_CONTEXT = 8  # own tokens before what is said that tell how it is written there


class ForeignProposer:
    """Chains of what the draft says greedily: so many of its own tokens as are asked for, as tokens of the target.

    Where the text that they make does not spell the tokens that the target has emitted, nothing is drafted. A text
    that is too long for the draft is read from its middle on.
    """

    replayable = True
    nested = False  # where the draft's text ends decides how its last word is spelled
    chain = True
    drawn: Drawn = "deterministic"
    aux_layers: tuple[int, ...] = ()
    reads_states = False

    def __init__(self, draft: ForeignDraft) -> None:
        self._draft, self._texts = draft, Texts(draft.lm)
        self._known: list[Respelled] = []
        self._tails: list[list[int]] = []

    def reserve(self, slots: int, tokens: int, levels: int) -> None:
        self._most = max(self._draft.lm.max_positions - levels, 2)
        self._texts.reserve(slots, min(tokens, self._most) + levels)
        self._known = [self._respelled([]) for _ in range(slots)]
        self._tails = [[] for _ in range(slots)]

    def most_nodes(self, levels: int) -> int:
        return levels

    def shape(self, levels: int) -> None:
        return None

    def trace(self, ids: list[int], start: int, count: int, sampling: SamplingSettings, states: States | None) -> Trace:
        raise InputError("foreign draft: it has no probabilities of the target's tokens; draft along the answer")

    def begin(self, slots: Sequence[int], ids: Sequence[list[int]], states: States) -> None:
        for slot, row in zip(slots, ids):
            self._known[slot] = self._respelled(row)
        self._texts.begin(slots, [self._known[slot].settled[-self._most :] for slot in slots])
        for slot in slots:
            self._read_on(slot, [])

    def observe(self, tokens: Sequence[list[int]], states: States) -> None:
        for slot, emitted in enumerate(tokens):
            self._read_on(slot, self._known[slot].extend(emitted))

    def move(self, source: int, destination: int) -> None:
        self._texts.move(source, destination)
        self._known[destination], self._tails[destination] = self._known[source], self._tails[source]

    def propose(self, ask: Ask) -> Draft:
        rows = [self._respell(*one) for one in zip(range(len(ask.limits)), self._say(ask.limits), ask.limits)]
        counts = [len(row) for row in rows]
        tokens_BK = fill_rows(rows, self._draft.lm.device).long()
        return Draft.of_chains(tokens_BK, counts, self.drawn)

    def _say(self, limits: Sequence[int]) -> list[list[int]]:
        """Up to limits[b] own tokens a slot; one that ends the text is the last."""
        said: list[list[int]] = [[] for _ in limits]
        for count in range(max(limits)):
            going = [
                count < limit and self._texts.length(slot) > 0 and not (row and row[-1] in self._draft.ends)
                for slot, (row, limit) in enumerate(zip(said, limits))
            ]
            if not any(going):
                break
            best_B = self._texts.logits([int(goes) for goes in going])[:, 0].argmax(-1)
            for slot, token in enumerate(best_B.tolist()):
                if going[slot]:
                    said[slot].append(token)
                    self._texts.look_ahead(slot, [*self._tails[slot], *said[slot]])
        return said

    def _respell(self, slot: int, said: list[int], limit: int) -> list[int]:
        """What the draft says, in the target's tokens."""
        ends = bool(said) and said[-1] in self._draft.ends
        told = self._texts.last(slot, _CONTEXT + len(said))
        first = len(told) - len(said)
        text = self._draft.own.text(told, first, len(told) - ends)
        row = self._known[slot].following(text) if text else []
        stop = self._draft.ends[said[-1]] if ends else None
        if stop is not None and (row or not text):
            row = [*row, stop]
        return row[: max(limit, 0)]

    def _read_on(self, slot: int, settled: list[int]) -> None:
        self._texts.extend(slot, settled)
        self._tails[slot] = self._known[slot].tail
        self._texts.look_ahead(slot, self._tails[slot])
        if self._texts.length(slot) > self._most:
            self._texts.shorten(slot, self._most // 2)
            self._tails[slot] = self._tails[slot][-self._texts.length(slot) :]

    def _respelled(self, ids: list[int]) -> Respelled:
        return Respelled(self._draft.known, self._draft.own, ids)
