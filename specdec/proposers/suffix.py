"""Suffix decoding: drafts by counts of what followed the text's last tokens, in the request and in earlier answers.

After SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975). Training-free and deterministic.

Shapes: B active slots, N drafted nodes.
"""

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ...errors import InputError
from ..models import States
from ..replay.packing import Pack
from ..sampling_settings import SamplingSettings
from ..tree import DraftTree, TreeBatch
from .base import Ask, Draft, Texts, Trace
from .text_table import TextTable
from .tree_shape import ROOT, Drawn


class Once(NamedTuple):
    """Place of a token sequence that occurred once: in `text`, followed by text[at:]."""

    text: Sequence[int]
    at: int


class Node:
    """Trie node: a token sequence that occurred `count` times, and the places of its continuations (`next`).

    Made when a sequence occurs a second time; `SuffixTrie.remove` may count it down.
    """

    __slots__ = ("count", "next")

    def __init__(self, count: int, follows: "dict[int, Place]") -> None:
        self.count, self.next = count, follows


Place: TypeAlias = Node | Once
"""Place in the trie where a walk along some tokens ends. Every sequence that occurred has exactly one."""


def times(place: Place) -> int:
    """Occurrences of a place's token sequence."""
    return place.count if isinstance(place, Node) else 1


def following(place: Place) -> list[tuple[int, Place]]:
    """Tokens that followed a place's sequence, with their places."""
    # A sequence that occurred once has at most one continuation, the next token of its text.
    if isinstance(place, Node):
        return list(place.next.items())
    text, at = place
    return [(text[at], Once(text, at + 1))] if at < len(text) else []


class SuffixTrie:
    """Suffix trie: counts of all sequences of at most `depth` tokens in a set of texts, one of which may still grow.

    A sequence that occurred once is a reference into its text (`Once`) and has no nodes below it.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._root = Node(0, {})
        self._text: list[int] = []
        self._repeated: list[Node] = []  # the nodes of the growing text's suffixes said before, by length from 1

    def start(self) -> list[int]:
        """Begin a new text, and return it; the text that grew so far is complete."""
        self._text, self._repeated = [], []
        return self._text

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the growing text, and count its new suffixes."""
        # Suffixes that occurred before, by length: each is extended by the token, from the root up to the depth.
        for token in tokens:
            self._text.append(token)
            repeated: list[Node] = []
            for node in (self._root, *self._repeated[: self._depth - 1]):
                place = node.next.get(token)
                if place is None:
                    node.next[token] = Once(self._text, len(self._text))
                    continue
                # It occurred before: count it, as a node of its own from the second time on.
                if isinstance(place, Node):
                    place.count += 1
                else:  # the two part from here on, or later
                    place = node.next[token] = Node(2, dict(following(place)))
                repeated.append(place)
            self._repeated = repeated

    def remove(self, text: Sequence[int]) -> None:
        """Remove a complete text: uncount all its sequences."""
        # From each start down to the depth. Where the count ends, all longer sequences end with it.
        for start in range(len(text)):
            node = self._root
            for token in text[start : start + self._depth]:
                place = node.next[token]
                # This was the last occurrence: drop the place with all that lies below it.
                if isinstance(place, Once) or place.count == 1:
                    del node.next[token]
                    break
                place.count -= 1
                node = place

    def find(self, tokens: Sequence[int]) -> Place | None:
        """Place of a token sequence; None: it never occurred."""
        # Past a sequence that occurred once, the rest is compared with its text.
        place: Place = self._root
        for read, token in enumerate(tokens):
            if isinstance(place, Once):
                text, at = place
                rest = tokens[read:]
                return Once(text, at + len(rest)) if list(text[at : at + len(rest)]) == list(rest) else None
            found = place.next.get(token)
            if found is None:
                return None
            place = found
        return place

    def contexts(self, tokens: Sequence[int]) -> Iterator[tuple[int, Place]]:
        """Suffixes of `tokens` that occurred and were followed by something, longest first: length and place."""
        for length in range(len(tokens), 0, -1):
            place = self.find(tokens[-length:])
            if place is not None and following(place):
                yield length, place


class _SuffixTrees:
    """What suffix proposers have in common: their settings, and what they say of themselves."""

    replayable = True
    nested = False
    drawn: Drawn = "deterministic"
    chain = False
    aux_layers: tuple[int, ...] = ()
    needs_hidden_states = False
    needs_host_sync = True

    def __init__(self, nodes: int = 16, min_score: float = 0.1, max_match: int = 16) -> None:
        for name, value in (("nodes", nodes), ("max_match", max_match)):
            if value < 1:
                raise InputError(f"suffix: {name} {value}: must be at least 1")
        if not 0.0 < min_score < 1.0:
            raise InputError(f"suffix: min_score {min_score}: must be above 0 and below 1")
        self._nodes, self._min_score, self._max_match = nodes, min_score, max_match

    def most_nodes(self, levels: int) -> int:
        return self._nodes if levels > 0 else 0

    def shape(self, levels: int) -> None:
        return None

    def trace(self, pack: Pack, count: int, sampling: SamplingSettings, states: States | None) -> Trace:
        raise InputError("suffix: no trace fits its trees; draft along the answer")


class SuffixProposer(_SuffixTrees):
    """Suffix-decoding proposer: a tree of what followed earlier occurrences of the text's end, likeliest nodes first.

    Where the last m tokens were said before and x followed c of n times, x is given the probability c / (n + 1/m): the
    longer the match, the surer. What is missing to 1 goes to what followed the last m - 1 tokens, and so on down to
    one token. A node's score is the product of the probabilities on the way to it; drafted are the `nodes` best, as far
    as their score is at least `min_score`. Matches are at most `max_match` tokens long.

    `memory`: that many tokens of the run's finished answers are drafted from as well, the latest ones; where both match
    equally far, the request's own text goes first. What is drafted then depends on which answers were finished before,
    so that recorded answers do not tell the rounds, and above temperature 0 a request's answer is no longer the same
    in every batch (its distribution is). 0: every request is drafted for as if it were alone.
    """

    def __init__(self, nodes: int = 16, min_score: float = 0.1, max_match: int = 16, memory: int = 0) -> None:
        super().__init__(nodes, min_score, max_match)
        if memory < 0:
            raise InputError(f"suffix: memory {memory}: must be at least 0")
        self._kept_tokens = memory
        self.replayable = memory == 0
        self._device = torch.device("cpu")

    def reserve(self, slots: int, tokens: int, levels: int) -> None:
        self._depth = self._max_match + levels
        self._texts: list[_Text | None] = [None] * slots
        self._memory = _Memory(self._kept_tokens, self._depth)

    def begin(self, slots_R: Tensor, known: Texts, states: States) -> None:
        self._device = slots_R.device
        for slot, row in zip(slots_R.tolist(), known.rows):
            self._finish(slot)
            self._texts[slot] = _Text(row, self._depth)

    def propose(self, ask: Ask) -> Draft:
        # Host work: trees are built per slot and sent to the device as one batch.
        trees = [self._tree(text, limit) for text, limit in zip(self._texts, ask.limits_B.tolist())]
        return Draft(TreeBatch.of(trees, self._device), None, chain=False)

    def observe(self, new: Texts, states: States) -> None:
        rows = new.rows
        for text, emitted in zip(self._texts, rows):
            if text is not None:
                text.trie.extend(emitted)
        for slot in range(len(rows), len(self._texts)):  # no longer active
            self._finish(slot)

    def move(self, source: int, destination: int) -> None:
        self._finish(destination)
        self._texts[destination], self._texts[source] = self._texts[source], None

    def _finish(self, slot: int) -> None:
        """Add the answer of a finished slot to the memory, and empty the slot."""
        text, self._texts[slot] = self._texts[slot], None
        if text is not None:
            self._memory.add(text.answer)

    def _tree(self, text: "_Text | None", limit: int) -> DraftTree:
        """Draft tree by best-first search. Scores only fall on the way down, so the next best node's parent is in the
        tree."""
        if text is None or limit <= 0:
            return DraftTree.of((), (), self.drawn)
        # The heap starts with the first level.
        tokens: list[int] = []
        parents: list[int] = []
        queue = self._first_level(text)
        heapq.heapify(queue)
        offered = len(queue)

        # Take the best candidate into the tree.
        while queue and len(tokens) < self._nodes:
            best = heapq.heappop(queue)
            node, way = len(tokens), (*best.way, best.token)
            tokens.append(best.token)
            parents.append(best.parent)

            # Offer its children: c of n times gives c / (n + 1 / match), times the node's score.
            if len(way) == limit:
                continue
            follows = following(best.place) or text.goes_on(best.place, way)
            total = sum(times(place) for _, place in follows) + 1 / best.match
            for token, place in follows:
                score = best.score * times(place) / total
                if score >= self._min_score:
                    offered += 1
                    heapq.heappush(queue, _CandidateNode(-score, offered, token, node, way, place, best.match + 1))
        return DraftTree.of(tokens, parents, self.drawn)

    def _first_level(self, text: "_Text") -> list["_CandidateNode"]:
        """Candidates of the first level: what followed the text's end before, by ever shorter matches, each weighted
        with the probability that longer matches leave to it."""
        # Matches of the request's own text and of the memory, longest first.
        end = text.ids[-self._max_match :]
        found = [*text.trie.contexts(end), *self._memory.trie.contexts(end)]
        offers: dict[int, _CandidateNode] = {}
        left = 1.0
        for match, context in sorted(found, key=lambda one: -one[0]):  # stable: its own text first
            # A token keeps the candidate of its longest match.
            follows = following(context)
            total = sum(times(place) for _, place in follows) + 1 / match
            for token, place in follows:
                score = left * times(place) / total
                if score >= self._min_score and token not in offers:
                    offers[token] = _CandidateNode(-score, len(offers), token, ROOT, (), place, match + 1)
            # What this match leaves to shorter ones.
            left *= 1 / match / total
            if left < self._min_score:
                break
        return list(offers.values())


class SuffixOnDevice(TextTable, _SuffixTrees):
    """`SuffixProposer` without memory, and without the host: by kernels, where the texts are, as fast as they are."""

    def __init__(self, nodes: int = 16, min_score: float = 0.1, max_match: int = 16) -> None:
        _SuffixTrees.__init__(self, nodes, min_score, max_match)
        TextTable.__init__(self)

    def begin(self, slots_R: Tensor, known: Texts, states: States) -> None:
        super().begin(slots_R, known, states)
        if not hasattr(self, "_least"):  # as a number of Python it would travel in single precision
            self._least = torch.full((1,), self._min_score, dtype=torch.float64, device=slots_R.device)

    def propose(self, ask: Ask) -> Draft:
        from ..kernels.suffix_tree import suffix_tree

        # Scores of one level add up to less than 1.
        most = int(1 / self._min_score)
        counts_B = self._counts_S[: len(ask.limits_B)]
        columns = suffix_tree(
            self._ids_SL, counts_B, ask.limits_B, self._least, most, self._max_match, self._nodes, ask.levels
        )
        return Draft(TreeBatch(*columns, ask.levels, self.drawn), None, chain=False)


class _CandidateNode(NamedTuple):
    """Candidate node of the search. Tuples sort by negative score, then number: best first, earliest of equals."""

    negative_score: float
    number: int
    token: int
    parent: int
    way: tuple[int, ...]  # the tokens above it
    place: Place
    match: int  # tokens that were said before, up to this one

    @property
    def score(self) -> float:
        return -self.negative_score


class _Text:
    """Known tokens of one slot, prompt and answer, and their suffix trie."""

    def __init__(self, ids: Sequence[int], depth: int) -> None:
        self.trie = SuffixTrie(depth)
        self.ids = self.trie.start()
        self._prompt_tokens = len(ids) - 1
        self.trie.extend(ids)

    @property
    def answer(self) -> list[int]:
        return self.ids[self._prompt_tokens :]

    def goes_on(self, place: Place, way: Sequence[int]) -> list[tuple[int, Place]]:
        """Continuation where the known text ends: the drafted tokens, so that a loop is drafted as a loop."""
        if isinstance(place, Once) and place.text is self.ids:
            return [(way[place.at - len(self.ids)], Once(self.ids, place.at + 1))]
        return []


class _Memory:
    """Memory of the latest finished answers, as many as fit in `tokens` tokens, and their suffix trie."""

    def __init__(self, tokens: int, depth: int) -> None:
        self.trie = SuffixTrie(depth)
        self._answers: deque[list[int]] = deque()
        self._tokens = tokens

    def add(self, answer: Sequence[int]) -> None:
        # A longer answer keeps its last tokens; then the oldest answers go until the rest fits.
        if self._tokens == 0:
            return
        self._answers.append(self.trie.start())
        self.trie.extend(answer[-self._tokens :])
        while sum(map(len, self._answers)) > self._tokens:
            self.trie.remove(self._answers.popleft())
