"""Drafting with a model of another tokenizer than the target's, by way of text (Timor et al. 2025, arXiv 2502.05202).

Shapes: B active slots, K drafted tokens, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import InputError
from ..cuda_graphs import running, send
from ..kv_cache import KVCache, reads_lengths
from ..models import CausalModel, States
from ..replay.packing import Pack
from ..sampling_settings import SamplingSettings
from ..tokenizer_bridge import ForeignDraft, Retokenized
from .base import Ask, Draft, Texts, Trace
from .logits import gather_rows
from .tree_shape import Drawn


class TextReader:
    """Token ids and KV cache of one text a slot: a settled part, and a tentative part past it.

    Keys stay as far as a text stays the same, so a token is read again only where the tokens before it have changed.
    How many of a text's first tokens have their keys in the cache is known to the host, where the texts are.
    """

    def __init__(self, lm: CausalModel) -> None:
        self._lm = lm
        self._ids: list[list[int]] = []
        self._settled: list[int] = []
        self._read: list[int] = []  # first tokens of each text that have their keys in the cache

    def reserve(self, slots: int, tokens: int) -> None:
        """Allocate `slots` texts of `tokens` tokens; a longer text makes all be read again, into a larger cache."""
        self._cache = KVCache(slots, max(tokens, 1), self._lm.device)
        self._ids, self._settled, self._read = [[] for _ in range(slots)], [0] * slots, [0] * slots

    def begin(self, slots: Sequence[int], rows: Sequence[list[int]]) -> None:
        """Prefill fresh texts, all of it settled. A text may be empty."""
        # A new text has no keys yet.
        for slot, row in zip(slots, rows):
            self._ids[slot], self._settled[slot], self._read[slot] = list(row), len(row), 0
        self._fit()

        # One prefill pass for all that are not empty.
        slots = [slot for slot in slots if self._ids[slot]]
        if not slots:
            return
        with running(self._lm.device):
            texts = Texts.of([self._ids[slot] for slot in slots], self._lm.device)
            self._lm.states(texts.ids_BT, self._cache.prefill(self._numbers(slots), texts.counts_B))
        for slot in slots:
            self._read[slot] = len(self._ids[slot])

    def extend(self, slot: int, tokens: Sequence[int]) -> None:
        """Extend the settled part by `tokens`; the tentative part is dropped, keys of equal tokens are kept."""
        self.append_text(slot, tokens)
        self._settled[slot] += len(tokens)

    def append_text(self, slot: int, tokens: Sequence[int]) -> None:
        """Replace the tentative part, past the settled one, by `tokens`; keys of an equal beginning are kept."""
        # Keys stay as far as the new tokens equal the old ones.
        ids, place = self._ids[slot], self._settled[slot]
        for token in tokens:
            if place == len(ids) or ids[place] != token:
                break
            place += 1

        # The rest is replaced, and must be read again.
        ids[place:] = tokens[place - self._settled[slot] :]
        self._read[slot] = min(self._read[slot], place)

    def truncate(self, slot: int, tokens: int) -> None:
        """Keep the last `tokens` tokens only; they are read again, as a text of their own."""
        gone = max(len(self._ids[slot]) - tokens, 0)
        if gone:
            del self._ids[slot][:gone]
            self._settled[slot], self._read[slot] = max(self._settled[slot] - gone, 0), 0

    def move(self, source: int, destination: int) -> None:
        # The cache moves rows up to their length, which must be what was really read.
        with running(self._lm.device):
            self._cache.lengths_S[source] = self._read[source]
            self._cache.move(source, destination)
        self._ids[destination], self._ids[source] = self._ids[source], []
        self._settled[destination], self._settled[source] = self._settled[source], 0
        self._read[destination], self._read[source] = self._read[source], 0

    def length(self, slot: int) -> int:
        """Tokens of a slot's text, settled and tentative."""
        return len(self._ids[slot])

    def last(self, slot: int, tokens: int) -> list[int]:
        """The last tokens of a slot's text, at most `tokens`."""
        return self._ids[slot][-tokens:]

    def logits(self, tails: Sequence[int]) -> Tensor:
        """Logits [B, R, V] of what follows each of the last `tails[b]` tokens of slot b, R the most of them.

        Reads what was not read yet, in one pass. Instead of padding, a shorter row reads tokens again that stand before
        its new ones. Rows past a slot's tail mean nothing.
        """
        # Width of the pass: the longest stretch that some slot must read, unread tokens and tail together.
        self._fit()
        texts, read = self._ids[: len(tails)], self._read
        width = max(1, *(len(ids) - min(read[slot], len(ids) - tails[slot]) for slot, ids in enumerate(texts)))
        if reads_lengths(self._lm.device):  # its kernel is compiled for every width
            width = min(1 << (width - 1).bit_length(), self._cache.capacity)

        # Each row reads its last `width` tokens; `first`: row of its first tail token.
        starts = [max(len(ids) - width, 0) for ids in texts]
        first = [len(ids) - start - tail for ids, start, tail in zip(texts, starts, tails)]
        rows = Texts.of([[*ids[start:], 0][:width] for ids, start in zip(texts, starts)], self._lm.device)
        read[: len(tails)] = [len(ids) for ids in texts]

        # The cache goes back to where each row starts, and is written from there.
        with running(self._lm.device):
            self._cache.lengths_S[: len(tails)] = self._numbers(starts)
            hidden_BNH = self._lm.states(rows.wide(width).ids_BT, self._cache.extend(len(tails), width)).hidden_BTH
            index_BR = self._numbers(first)[:, None] + torch.arange(max(tails), device=self._lm.device)
            return self._lm.logits(gather_rows(hidden_BNH, index_BR.clamp(0, width - 1)))

    def _numbers(self, values: Sequence[int]) -> Tensor:
        return send(torch.tensor(values), self._lm.device)

    def _fit(self) -> None:
        # Doubling: a growing text is read anew a few times only.
        longest = max(map(len, self._ids))
        if longest > self._cache.capacity:
            self._cache = KVCache(len(self._ids), max(longest, 2 * self._cache.capacity), self._lm.device)
            self._read = [0] * len(self._ids)


_CONTEXT = 8  # own tokens before what is said that tell how it is written there


class ForeignProposer:
    """Chains of a draft with another tokenizer: its greedy tokens, as many as are asked for, respelled as the target's.

    Where the text that they make does not spell the tokens that the target has emitted, nothing is drafted. A text
    that is too long for the draft is read from its middle on.
    """

    replayable = True
    nested = False  # where the draft's text ends decides how its last word is spelled
    chain = True
    drawn: Drawn = "deterministic"
    aux_layers: tuple[int, ...] = ()
    needs_hidden_states = False
    needs_host_sync = True

    def __init__(self, draft: ForeignDraft) -> None:
        self._draft, self._texts = draft, TextReader(draft.lm)
        self._known: list[Retokenized] = []
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
        # Settled are the draft's tokens whose spelling later text cannot change.
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
        """Greedy tokens of the draft's own vocabulary, up to limits[b] a slot; one that ends the text is the last."""
        # One pass a token, for all slots that still go on.
        said: list[list[int]] = [[] for _ in limits]
        for count in range(max(limits)):
            going = [
                count < limit and self._texts.length(slot) > 0 and not (row and row[-1] in self._draft.ends)
                for slot, (row, limit) in enumerate(zip(said, limits))
            ]
            if not any(going):
                break

            # Slots that are done have a tail of 0: their rows mean nothing.
            best_B = self._texts.logits([int(goes) for goes in going])[:, 0].argmax(-1)

            # The draft reads its own tokens past the text's tail.
            for slot, token in enumerate(best_B.tolist()):
                if going[slot]:
                    said[slot].append(token)
                    self._texts.append_text(slot, [*self._tails[slot], *said[slot]])
        return said

    def _respell(self, slot: int, said: list[int], limit: int) -> list[int]:
        """Tokens of the target that spell the text which the draft said, at most `limit`."""
        # Text of the said tokens, decoded with a few tokens before them, without the token that ends it.
        ends = bool(said) and said[-1] in self._draft.ends
        told = self._texts.last(slot, _CONTEXT + len(said))
        first = len(told) - len(said)
        text = self._draft.own.text(told, first, len(told) - ends)

        # The target's tokens of that text; none if the text does not continue the known one.
        row = self._known[slot].following(text) if text else []

        # An end of the draft is an end of the target, where the target has one.
        stop = self._draft.ends[said[-1]] if ends else None
        if stop is not None and (row or not text):
            row = [*row, stop]
        return row[:limit]

    def _read_on(self, slot: int, settled: list[int]) -> None:
        # Settled tokens, then the tail, whose spelling may still change.
        self._texts.extend(slot, settled)
        self._tails[slot] = self._known[slot].tail
        self._texts.append_text(slot, self._tails[slot])

        # Too long for the draft: keep half of what fits.
        if self._texts.length(slot) > self._most:
            self._texts.truncate(slot, self._most // 2)
            self._tails[slot] = self._tails[slot][-self._texts.length(slot) :]

    def _respelled(self, ids: list[int]) -> Retokenized:
        return Retokenized(self._draft.known, self._draft.own, ids)
