"""Lookahead decoding and Jacobi decoding (Fu et al. 2024, arXiv 2402.02057): the target itself guesses n-grams ahead.

Shapes: B active slots, N nodes of a tree, M = N + 1 rows of the target, W columns of the window, K levels of it, which
make n-grams of K + 1 tokens.
"""

from collections.abc import Sequence

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

_NOTHING = DraftTree.of((), (), "deterministic")


class _Lookahead:
    """What lookahead's proposers have in common: their settings, and what they say of themselves."""

    replayable = False  # what is guessed depends on where earlier rounds started
    nested = False
    drawn: Drawn = "deterministic"
    chain = False
    aux_layers: tuple[int, ...] = ()
    needs_hidden_states = False
    needs_host_sync = True

    def __init__(self, window: int = 15, guesses: int = 15) -> None:
        for name, value in (("window", window), ("guesses", guesses)):
            if value < 1:
                raise InputError(f"lookahead: {name} {value}: must be at least 1")
        self._columns, self._guesses = window, guesses
        self._said_BM: Tensor | None = None  # by the target in this round

    def most_nodes(self, levels: int) -> int:
        return (self._guesses + self._columns) * levels

    def shape(self, levels: int) -> None:
        return None

    def observe_target_argmax(self, best_BM: Tensor) -> None:
        self._said_BM = best_BM

    def trace(self, pack: Pack, count: int, sampling: SamplingSettings, states: States | None) -> Trace:
        raise InputError("lookahead: what it guesses depends on the rounds before, decode it")


class LookaheadProposer(_Lookahead):
    """Lookahead decoding: two branches in one pass of the target. One verifies: up to `guesses` n-grams of the pool
    that begin with the text's last token, as one tree. The other looks ahead: a window of riders that the target
    evaluates and may never accept, `window` columns of K levels, where K is the number of tokens to draft.

    Column j of level 0 stands for the (j+1)-th token to come, and each level below for the next one. Level 0 is read as
    one text; what stands below it sees level 0 up to its own column, and its own column:

        last - a0 - a1 - a2      c1 stands four tokens after the last one of the text and sees that one, a0, a1, b1
               |    |    |       and itself. Lines lead to a token's parent: its left neighbour on level 0, and the
               b0   b1   b2      one above it on all others. What the target says after c0, c1 and c2 completes an
               |    |    |       n-gram in each column.
               c0   c1   c2

    Those n-grams go to the pool, and what completed them is the last level of the next round, in which the first one
    is gone. So the window moves by one token in every round, also where more are accepted: its n-grams are the
    target's wherever they stand, and columns that were moved in from the right would start from nothing.

    At first the window holds the prompt's last tokens in their order. The pool also takes the n-grams of the text, and
    keeps the `guesses` latest of each first token.
    """

    def reserve(self, slots: int, tokens: int, levels: int) -> None:
        # Windows are made in `begin`, from the prompt.
        self._levels = levels
        self._searches: list[_Search | None] = [None] * slots
        self._said_BM = None

    def begin(self, slots_R: Tensor, known: Texts, states: States) -> None:
        self._device = slots_R.device
        for slot, row in zip(slots_R.tolist(), known.rows):
            self._searches[slot] = _Search(row, self._columns, self._levels, self._guesses)

    def propose(self, ask: Ask) -> Draft:
        limits = ask.limits_B.tolist()
        trees = [_NOTHING if search is None else search.tree(limit) for search, limit in zip(self._searches, limits)]
        return Draft(TreeBatch.of(trees, self._device), None, chain=False)

    def observe(self, new: Texts, states: States) -> None:
        # Without a round of drafting (nothing to draft) there is no argmax to read.
        emitted_B = new.rows
        rows = [[]] * len(emitted_B) if self._said_BM is None else self._said_BM.tolist()
        self._said_BM = None

        # First the window, which stands on the text before these tokens; then the text.
        for search, emitted, row in zip(self._searches, emitted_B, rows):
            if search is not None:
                search.observe_target_argmax(row[1:])
                search.read(emitted)

    def move(self, source: int, destination: int) -> None:
        self._searches[destination], self._searches[source] = self._searches[source], None


class LookaheadOnDevice(TextTable, _Lookahead):
    """`LookaheadProposer` without the host: by kernels, where texts, pool and window are."""

    def __init__(self, window: int = 15, guesses: int = 15) -> None:
        _Lookahead.__init__(self, window, guesses)
        TextTable.__init__(self)

    def reserve(self, slots: int, tokens: int, levels: int) -> None:
        # A round's tokens come as wide as its deepest rider. A pool has room for all n-grams of a text, and of a window
        # in each round.
        super().reserve(slots, tokens, levels + self._columns)
        self._levels, self._most = levels, tokens * (self._columns + 1)
        self._said_BM = None

    def begin(self, slots_R: Tensor, known: Texts, states: States) -> None:
        fresh, ids_BT, counts_B1 = not len(self._counts_S), known.ids_BT, known.counts_B[:, None]
        super().begin(slots_R, known, states)
        device, levels = slots_R.device, self._levels
        if fresh:
            slots = len(self._counts_S)
            self._pool_SPn = torch.full((slots, self._most, levels + 1), -1, dtype=torch.int32, device=device)
            self._window_SKW = torch.zeros(slots, levels, self._columns, dtype=torch.long, device=device)
            self._sizes_S, self._asked_S = torch.zeros_like(self._counts_S), torch.zeros_like(self._counts_S)
        # Level k of column j starts as token k + j of the prompt's end, which is repeated if it is too short.
        length_B1 = counts_B1.clamp(max=self._columns + levels)
        place_KW = torch.arange(levels, device=device)[:, None] + torch.arange(self._columns, device=device)
        at_BX = counts_B1 - length_B1 + place_KW.flatten() % length_B1.clamp(min=1)
        self._window_SKW[slots_R] = ids_BT.gather(1, at_BX).view(-1, *place_KW.shape)
        # The pool starts with the n-grams of the prompt.
        self._sizes_S[slots_R] = torch.zeros_like(known.counts_B)
        ends_BT = torch.arange(ids_BT.shape[1], device=device).expand_as(ids_BT)
        self._add(slots_R, _ngrams(ids_BT, ends_BT, levels + 1), known.counts_B)

    def propose(self, ask: Ask) -> Draft:
        from ..kernels.ngram_pool import ngram_tree

        limits_B = self._asked_S[: len(ask.limits_B)] = ask.limits_B
        state = self._pool_SPn, self._sizes_S, self._window_SKW
        columns = ngram_tree(self._ids_SL, self._counts_S[: len(limits_B)], limits_B, *state, self._guesses)
        return Draft(TreeBatch(*columns, self._columns + self._levels - 1, self.drawn), None, chain=False)

    def observe(self, new: Texts, states: States) -> None:
        batch, known_B = len(new.counts_B), self._counts_S[: len(new.counts_B)].clone()
        super().observe(new, states)
        if self._said_BM is None:  # nothing was drafted
            return
        # What the target said after the last level completes the window's n-grams, and is its new last level.
        window_BKW, said_B1W = self._window_SKW[:batch], self._said_BM[:, None, -self._columns :]
        longer_BnW, asked_B11 = torch.cat([window_BKW, said_B1W], 1), (self._asked_S[:batch] > 0)[:, None, None]
        self._window_SKW[:batch] = torch.where(asked_B11, longer_BnW[:, 1:], window_BKW)
        # Those come to the pool, then the ones that the text's new tokens complete.
        ends_BE = known_B[:, None] + torch.arange(self._levels + 1, device=known_B.device)
        text_BEn = _ngrams(self._ids_SL[:batch], ends_BE, self._levels + 1)
        fresh_BXn = torch.cat([torch.where(asked_B11, longer_BnW, -1).transpose(1, 2), text_BEn], 1)
        added_B = torch.where(new.counts_B > 0, new.counts_B + self._columns, 0)
        self._add(torch.arange(batch, device=known_B.device), fresh_BXn, added_B)
        self._said_BM = None

    def move(self, source: int, destination: int) -> None:
        super().move(source, destination)
        for part in (self._pool_SPn, self._window_SKW, self._sizes_S):
            part[destination] = part[source]

    def _add(self, slots_B: Tensor, fresh_BXn: Tensor, counts_B: Tensor) -> None:
        from ..kernels.ngram_pool import add_ngrams

        add_ngrams(self._pool_SPn, self._sizes_S, slots_B, fresh_BXn, counts_B)


def _ngrams(ids_BT: Tensor, ends_BX: Tensor, tokens: int) -> Tensor:
    """N-grams [B, X, n] of texts by the places of their last tokens; -1 in front where one would begin before the
    text."""
    at_BXn = ends_BX[..., None] + torch.arange(1 - tokens, 1, device=ids_BT.device)
    found_BXn = ids_BT.gather(1, at_BXn.flatten(1).clamp(0, ids_BT.shape[1] - 1)).view_as(at_BXn)
    return torch.where(at_BXn < 0, -1, found_BXn)


class NgramPool:
    """N-gram pool: the latest n-grams of each first token, at most `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._rest: dict[int, dict[tuple[int, ...], None]] = {}  # by first token, in the order of their coming

    def add(self, ngram: Sequence[int]) -> None:
        # Dicts keep insertion order: an n-gram that comes again becomes the latest, the oldest is dropped.
        rest = self._rest.setdefault(ngram[0], {})
        rest.pop(tuple(ngram[1:]), None)
        rest[tuple(ngram[1:])] = None
        if len(rest) > self._most:
            del rest[next(iter(rest))]

    def after(self, token: int) -> list[tuple[int, ...]]:
        """Continuations of the n-grams that begin with `token`, the latest first."""
        return list(reversed(self._rest.get(token, {})))


class _Search:
    """Lookahead window and n-gram pool of one slot."""

    def __init__(self, ids: Sequence[int], columns: int, levels: int, guesses: int) -> None:
        # Level k of column j starts as token k + j of the prompt's end, which is repeated if it is too short.
        start = ids[-(columns + levels) :]
        self._window_KW = [[start[(level + place) % len(start)] for place in range(columns)] for level in range(levels)]
        self._pool, self._tokens = NgramPool(guesses), levels + 1  # of an n-gram
        self._tail: list[int] = []  # the last tokens of the text, as many as begin an n-gram
        self.read(ids)
        self._ends = slice(0)  # the nodes of the window's last level, in this round

    def read(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text, and add the n-grams that they complete to the pool."""
        text = [*self._tail, *tokens]
        for place in range(len(text) - self._tokens + 1):
            self._pool.add(text[place : place + self._tokens])
        self._last, self._tail = text[-1], text[max(len(text) - self._tokens + 1, 0) :]

    def tree(self, limit: int) -> DraftTree:
        """Tree of a round: the pool's n-grams that begin with the last token, cut to `limit` more tokens, merged; then
        the window's tokens as riders."""
        # A slot that may draft nothing verifies nothing, and its window rests.
        if limit <= 0:
            self._ends = slice(0)
            return _NOTHING

        # Candidates first, then the riders, whose parents and positions count from there.
        drafted = _merged([rest[:limit] for rest in self._pool.after(self._last)])
        parents_R, position_R = _window(len(self._window_KW), len(self._window_KW[0]), len(drafted))
        riders_R = [token for tokens_W in self._window_KW for token in tokens_W]

        # Remember the last level's nodes: what the target says after them completes the n-grams.
        nodes = len(drafted) + len(riders_R)
        self._ends = slice(nodes - len(self._window_KW[0]), nodes)
        return DraftTree(
            (*drafted.tokens_N, *riders_R),
            (*drafted.parents_N, *parents_R),
            (*drafted.position_N, *position_R),
            (*drafted.candidate_N, *[False] * len(riders_R)),
            "deterministic",
        )

    def observe_target_argmax(self, best_N: Sequence[int]) -> None:
        """Read the target's argmax after each node: complete the window's n-grams, and move it on by one level."""
        new_W = list(best_N[self._ends])
        if new_W:
            for ngram in zip(*self._window_KW, new_W):
                self._pool.add(ngram)
            self._window_KW = [*self._window_KW[1:], new_W]


def _merged(ways: Sequence[Sequence[int]]) -> DraftTree:
    """Prefix tree of several token sequences: equal beginnings share their nodes."""
    # A node is known by its parent and its token.
    tokens: list[int] = []
    parents: list[int] = []
    known: dict[tuple[int, int], int] = {}
    for way in ways:
        node = ROOT
        for token in way:
            below = known.setdefault((node, token), len(tokens))
            if below == len(tokens):
                tokens.append(token)
                parents.append(node)
            node = below
    return DraftTree.of(tokens, parents, "deterministic")


def _window(levels: int, columns: int, first: int) -> tuple[list[int], list[int]]:
    """Parents and positions of the window's tokens, level by level; node `first` is the window's first."""
    # Level 0 is a chain from the root; every other level hangs below the level above it, column by column.
    top = [ROOT, *range(first, first + columns - 1)]
    above = range(first, first + (levels - 1) * columns)
    return [*top, *above], [level + column for level in range(levels) for column in range(columns)]


class JacobiProposer:
    """Jacobi decoding: a chain of guesses, all of which one pass of the target makes anew, each from those before it.

    What the target said after the guesses that were not accepted is the next round's draft, as far as it goes; the
    rest, and the first draft of a request, repeats the last token before it.
    """

    replayable = False  # guesses depend on where earlier rounds started
    nested = False
    drawn: Drawn = "deterministic"
    chain = True
    aux_layers: tuple[int, ...] = ()
    needs_hidden_states = False
    needs_host_sync = False

    def reserve(self, slots: int, tokens: int, levels: int) -> None:
        # Guesses are made where the first prompts are.
        self._size = (slots, levels)
        self._guesses_SK = self._counts_S = torch.zeros(0, dtype=torch.long)
        self._said_BM: Tensor | None = None  # by the target in this round

    def most_nodes(self, levels: int) -> int:
        return levels

    def shape(self, levels: int) -> None:
        return None

    def begin(self, slots_R: Tensor, known: Texts, states: States) -> None:
        if not len(self._counts_S):
            self._guesses_SK = torch.zeros(self._size, dtype=torch.long, device=slots_R.device)
            self._counts_S = torch.zeros_like(self._guesses_SK[:, 0])
        self._guesses_SK[slots_R] = known.last()[:, None].expand(-1, self._size[1])
        self._counts_S[slots_R] = torch.full_like(slots_R, -1)

    def propose(self, ask: Ask) -> Draft:
        limits_B = self._counts_S[: len(ask.limits_B)] = ask.limits_B
        guesses_BK = self._guesses_SK[: len(limits_B), : ask.levels]
        inside_BK = torch.arange(ask.levels, device=limits_B.device) < limits_B[:, None]
        return Draft.of_chains(torch.where(inside_BK, guesses_BK, 0), limits_B, self.drawn)

    def observe_target_argmax(self, best_BM: Tensor) -> None:
        self._said_BM = best_BM

    def observe(self, new: Texts, states: States) -> None:
        # What the target said after the tokens that stay, up to the last guess; with none left, the last token.
        counts_B1, emitted_B1 = self._counts_S[: len(new.counts_B), None], new.counts_B[:, None]
        fresh_BK = new.last()[:, None].expand(-1, self._size[1])
        if self._said_BM is not None:
            at_BK = emitted_B1 + torch.arange(self._size[1], device=emitted_B1.device)
            said_BK = self._said_BM.gather(1, torch.minimum(at_BK, counts_B1).clamp(min=0))
            fresh_BK = torch.where(emitted_B1 <= counts_B1, said_BK, fresh_BK)
        self._guesses_SK[: len(counts_B1)], self._said_BM = fresh_BK, None

    def move(self, source: int, destination: int) -> None:
        self._guesses_SK[destination], self._counts_S[destination] = self._guesses_SK[source], self._counts_S[source]

    def trace(self, pack: Pack, count: int, sampling: SamplingSettings, states: States | None) -> Trace:
        raise InputError("jacobi: its guesses depend on the rounds before, decode it")
