"""Lookahead decoding and Jacobi decoding (Fu et al. 2024, arXiv 2402.02057): the target itself guesses n-grams ahead.

Shapes: B active slots, N nodes of a tree, M = N + 1 rows of the target, W columns of the window, K levels of it, which
make n-grams of K + 1 tokens.
"""

from collections.abc import Sequence

from torch import Tensor

from ...errors import InputError
from ..models import States
from ..replay.packing import Pack
from ..sampling_settings import SamplingSettings
from ..tree import DraftTree, TreeBatch
from .base import Ask, Draft, Texts, Trace
from .tree_shape import ROOT, Drawn

_NOTHING = DraftTree.of((), (), "deterministic")


class LookaheadProposer:
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

    def reserve(self, slots: int, tokens: int, levels: int) -> None:
        # Windows are made in `begin`, from the prompt.
        self._levels = levels
        self._searches: list[_Search | None] = [None] * slots
        self._best_BM: Tensor | None = None  # what the target said in this round

    def most_nodes(self, levels: int) -> int:
        return (self._guesses + self._columns) * levels

    def shape(self, levels: int) -> None:
        return None

    def begin(self, slots_R: Tensor, known: Texts, states: States) -> None:
        self._device = slots_R.device
        for slot, row in zip(slots_R.tolist(), known.rows):
            self._searches[slot] = _Search(row, self._columns, self._levels, self._guesses)

    def propose(self, ask: Ask) -> Draft:
        limits = ask.limits_B.tolist()
        trees = [_NOTHING if search is None else search.tree(limit) for search, limit in zip(self._searches, limits)]
        return Draft(TreeBatch.of(trees, self._device), None, chain=False)

    def observe_target_argmax(self, best_BM: Tensor) -> None:
        self._best_BM = best_BM  # read later, when the round has waited for the device anyway

    def observe(self, new: Texts, states: States) -> None:
        # Without a round of drafting (nothing to draft) there is no argmax to read.
        emitted_B = new.rows
        rows = [[]] * len(emitted_B) if self._best_BM is None else self._best_BM.tolist()
        self._best_BM = None

        # First the window, which stands on the text before these tokens; then the text.
        for search, emitted, row in zip(self._searches, emitted_B, rows):
            if search is not None:
                search.observe_target_argmax(row[1:])
                search.read(emitted)

    def move(self, source: int, destination: int) -> None:
        self._searches[destination], self._searches[source] = self._searches[source], None

    def trace(self, pack: Pack, count: int, sampling: SamplingSettings, states: States | None) -> Trace:
        raise InputError("lookahead: what it guesses depends on the rounds before, decode it")


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
    needs_host_sync = True

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

    def observe_target_argmax(self, best_BM: Tensor) -> None:
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
