"""Drafting with a model of another tokenizer than the target's, by way of text (Timor et al. 2025, arXiv 2502.05202).

Shapes: B active slots, K drafted tokens, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import InputError
from ..foreign import ForeignDraft
from ..models import States
from ..packs import Pack
from ..sampling import SamplingSettings
from ..spelling import Respelled
from ..tree import Drawn
from .base import Ask, Draft, Texts, Trace
from .texts import TextReader

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
    waits = True

    def __init__(self, draft: ForeignDraft) -> None:
        self._draft, self._texts = draft, TextReader(draft.lm)
        self._known: list[Respelled] = []
        self._tails: list[list[int]] = []
        self._device = torch.device("cpu")  # of the target

    def reserve(self, slots: int, tokens: int, levels: int) -> None:
        self._most = max(self._draft.lm.max_positions - levels, 2)
        self._texts.reserve(slots, min(tokens, self._most) + levels)
        self._known = [self._respelled([]) for _ in range(slots)]
        self._tails = [[] for _ in range(slots)]

    def most_nodes(self, levels: int) -> int:
        return levels

    def shape(self, levels: int) -> None:
        return None

    def trace(self, pack: Pack, count: int, sampling: SamplingSettings, states: States | None) -> Trace:
        raise InputError("foreign draft: it has no probabilities of the target's tokens; draft along the answer")

    def begin(self, slots_R: Tensor, known: Texts, states: States) -> None:
        self._device, slots = slots_R.device, slots_R.tolist()
        for slot, row in zip(slots, known.rows):
            self._known[slot] = self._respelled(row)
        self._texts.begin(slots, [self._known[slot].settled[-self._most :] for slot in slots])
        for slot in slots:
            self._read_on(slot, [])

    def observe(self, new: Texts, states: States) -> None:
        for slot, emitted in enumerate(new.rows):
            self._read_on(slot, self._known[slot].extend(emitted))

    def move(self, source: int, destination: int) -> None:
        self._texts.move(source, destination)
        self._known[destination], self._tails[destination] = self._known[source], self._tails[source]

    def propose(self, ask: Ask) -> Draft:
        limits: list[int] = ask.limits_B.tolist()
        rows = [self._respell(*one) for one in zip(range(len(limits)), self._say(limits), limits)]
        drafted = Texts.of(rows, self._device)
        return Draft.of_chains(drafted.ids_BT, drafted.counts_B, self.drawn)

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
        return row[:limit]

    def _read_on(self, slot: int, settled: list[int]) -> None:
        self._texts.extend(slot, settled)
        self._tails[slot] = self._known[slot].tail
        self._texts.look_ahead(slot, self._tails[slot])
        if self._texts.length(slot) > self._most:
            self._texts.shorten(slot, self._most // 2)
            self._tails[slot] = self._tails[slot][-self._texts.length(slot) :]

    def _respelled(self, ids: list[int]) -> Respelled:
        return Respelled(self._draft.known, self._draft.own, ids)
