"""Lookahead decoding against the same written out densely: every window token read by a plain pass over its own text.

Shapes: W columns, K levels, M rows of the target.
"""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from stand_ins import bigram, prompts, target
from torch import Tensor

from draftforge.errors import InputError
from draftforge.specdec.decoder import generate
from draftforge.specdec.models import CausalModel, States
from draftforge.specdec.proposers.base import Ask, Draft, Texts
from draftforge.specdec.proposers.lookahead import LookaheadOnDevice, LookaheadProposer, NgramPool
from draftforge.specdec.replay.packing import Pack, Text
from draftforge.specdec.requests import Generation, Request
from draftforge.specdec.sampling_settings import SamplingSettings

GREEDY = SamplingSettings()
STATES = States(torch.zeros(1, 1, 1), None)
Way = tuple[int, ...]


class Listening(LookaheadProposer):
    """Keeps, round by round, each slot's drafted ways, its riders' tokens, and what the target said after those."""

    def __init__(self, window: int, guesses: int) -> None:
        super().__init__(window, guesses)
        self.rounds: list[list[tuple[list[Way], list[int], list[int]]]] = []

    def propose(self, ask: Ask) -> Draft:
        self._draft = super().propose(ask)
        return self._draft

    def observe_target_argmax(self, best_BM: Tensor) -> None:
        super().observe_target_argmax(best_BM)
        self.rounds.append([])
        tree = self._draft.tree
        for tokens, parents, candidates, best in zip(*(column.tolist() for column in tree[:3]), best_BM.tolist()):
            ways: list[Way] = []
            for token, parent in zip(tokens[: sum(candidates)], parents):
                ways.append((*(ways[parent] if parent >= 0 else ()), token))
            first, nodes = sum(candidates), sum(candidates) + self._columns * self._levels
            self.rounds[-1].append((ways, tokens[first:nodes], best[first + 1 : nodes + 1]))


class Dense:
    """The algorithm by its definition, one plain pass a token."""

    def __init__(self, model: CausalModel, ids: list[int], W: int, K: int, guesses: int, penalty: float) -> None:
        self.model, self.ids, self.W, self.K, self.guesses, self.penalty = model, list(ids), W, K, guesses, penalty
        start = ids[-(W + K) :]
        self.window_KW = [[start[(level + column) % len(start)] for column in range(W)] for level in range(K)]
        self.ngrams = [tuple(ids[place : place + K + 1]) for place in range(len(ids) - K)]

    def says(self, ids: Sequence[int]) -> int:
        with torch.no_grad():
            logits_V = self.model.logits(self.model.states(torch.tensor([list(ids)])).hidden_BTH[0, -1])
        seen = sorted(set(ids))
        logits_V[seen] = torch.where(logits_V[seen] > 0, logits_V[seen] / self.penalty, logits_V[seen] * self.penalty)
        return int(logits_V.argmax())

    def drafts(self, limit: int) -> set[Way]:
        """Every beginning of the latest n-grams that start with the last token, without that token."""
        latest: list[Way] = []
        for ngram in reversed(self.ngrams):
            if ngram[0] == self.ids[-1] and ngram not in latest:
                latest.append(ngram)
        kept = [ngram[1 : limit + 1] for ngram in latest[: self.guesses]]
        return {way[:size] for way in kept for size in range(1, len(way) + 1)}

    def riders_say(self) -> list[int]:
        """Level by level: a token sees the text, level 0 up to its column, and its own column."""
        return [
            self.says(
                [
                    *self.ids,
                    *self.window_KW[0][: column + 1],
                    *(self.window_KW[below][column] for below in range(1, level + 1)),
                ]
            )
            for level in range(self.K)
            for column in range(self.W)
        ]

    def step(self, said: list[int], emitted: list[int]) -> None:
        new = said[-self.W :]
        self.ngrams += zip(*self.window_KW, new)
        self.window_KW = [*self.window_KW[1:], new]
        for token in emitted:
            self.ids.append(token)
            if len(self.ids) > self.K:
                self.ngrams.append(tuple(self.ids[-self.K - 1 :]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("W", "K", "guesses", "penalty"), [(1, 1, 1, 1.0), (4, 3, 2, 1.3), (5, 2, 3, 1.0), (2, 4, 9, 1.3), (4, 3, 2, 1.0)]
)
def test_windows_pools_and_drafts_are_those_of_plain_passes(W: int, K: int, guesses: int, penalty: float) -> None:
    model, drafted = target(), 0
    for ids in prompts(3):
        proposer = Listening(W, guesses)
        request = Request(ids, SamplingSettings(repetition_penalty=penalty), 0, 14)
        ((_, answer),) = generate(model, proposer, [request], draft_tokens=K)
        dense, known = Dense(model, [*ids, answer.tokens[0]], W, K, guesses, penalty), 1
        assert len(proposer.rounds) >= len(answer.rounds) - 1  # the last round may have nothing to draft
        for ((ways, riders, said),), round_ in zip(proposer.rounds, answer.rounds):
            assert len(ways) == len(set(ways)) == round_.drafted
            assert set(ways) == dense.drafts(min(K, 14 - known - 1))
            assert riders == [token for level in dense.window_KW for token in level]
            assert said == dense.riders_say()
            dense.step(said, answer.tokens[known : known + round_.emitted])
            known += round_.emitted
            drafted += round_.drafted
    assert drafted > 0


def test_a_window_is_one_tree_whose_depths_are_places_in_the_text() -> None:
    proposer = LookaheadProposer(window=3, guesses=2)
    proposer.reserve(1, 30, 3)
    proposer.begin(torch.tensor([0]), Texts.of([[7, 8, 9, 7, 5, 6, 7]]), STATES)
    tree = proposer.propose(Ask(torch.tensor([3]), 3, [GREEDY], None, None)).tree
    assert tree.tokens_BN[0].tolist() == [5, 6, 7, 8, 9, 7, *(8, 9, 7), *(9, 7, 5), *(7, 5, 6)]
    assert tree.parents_BN[0].tolist() == [-1, 0, 1, -1, 3, 4, *(-1, 6, 7), *(6, 7, 8), *(9, 10, 11)]
    assert tree.candidate_BN[0].tolist() == [True] * 6 + [False] * 9
    depth_BM, visible_BMM = tree.below_one_root()
    assert depth_BM[0, 7:].tolist() == [1, 2, 3, 2, 3, 4, 3, 4, 5]
    last = visible_BMM[0, -1].nonzero()[:, 0].tolist()  # of column 2: the text, level 0, and above it
    assert last == [0, 7, 8, 9, 12, 15]


def answer(model: CausalModel, proposer: LookaheadProposer, prompt: list[int], K: int, length: int) -> Generation:
    ((_, generation),) = generate(model, proposer, [Request(prompt, GREEDY, 0, length)], draft_tokens=K)
    return generation


def test_riders_are_never_accepted_and_do_not_count() -> None:
    """The target says one token for ever, so the first round's riders are all right; but no n-gram is known yet."""
    same = bigram(8.0 * torch.eye(6))
    proposer = Listening(4, 2)
    generation = answer(same, proposer, [1], 3, 10)
    ((ways, riders, _),) = proposer.rounds[0]
    assert ways == [] and riders == [1] * 12
    # Then 1 1 1 1 is one of the pool, and drafted as far as there is need.
    assert [r[:3] for r in generation.rounds] == [(0, 0, 1), (3, 3, 4), (3, 3, 4)]


def test_what_the_target_guesses_ahead_is_drafted() -> None:
    """After t comes t + 1: n-grams that the text never held, but one window token started."""
    counting = bigram(8.0 * torch.eye(30).roll(1, dims=1))
    generation = answer(counting, LookaheadProposer(window=6, guesses=4), [9, 4, 2, 6, 1], 2, 16)
    assert generation.tokens == list(range(2, 18))
    assert any(r.accepted == 2 for r in generation.rounds)


@given(
    ngrams=st.lists(st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3)), max_size=20),
    most=st.integers(1, 4),
)
def test_a_pool_keeps_the_latest_of_each_first_token(ngrams: list[tuple[int, int, int]], most: int) -> None:
    pool = NgramPool(most)
    for ngram in ngrams:
        pool.add(ngram)
    for first in (1, 2, 3):
        latest = list(dict.fromkeys(ngram[1:] for ngram in reversed(ngrams) if ngram[0] == first))
        assert pool.after(first) == latest[:most]


def ways_of(proposer: LookaheadProposer | LookaheadOnDevice, limits: list[int]) -> list[tuple[list[Way], list[int]]]:
    """Drafted ways of each slot in their order, and what the window's riders are."""
    tree = proposer.propose(Ask(torch.tensor(limits), 3, [GREEDY] * len(limits), None, None)).tree
    found: list[tuple[list[Way], list[int]]] = []
    for limit, tokens, parents, candidates in zip(limits, *(column.tolist() for column in tree[:3])):
        ways: dict[int, Way] = {-1: ()}
        for node, (token, parent) in enumerate(zip(tokens, parents)):
            ways[node] = (*ways[parent], token)
        drafted = [ways[node] for node, ok in enumerate(candidates) if ok]
        first = len(drafted) if isinstance(proposer, LookaheadProposer) else len(tokens) - 12
        found.append((drafted, tokens[first : first + 12] if limit else []))
    return found


@pytest.mark.slow  # Triton's interpreter
@settings(max_examples=8, deadline=None, phases=[Phase.generate])
@given(
    prompt=st.lists(st.integers(0, 2), min_size=1, max_size=12),
    numbers=st.lists(st.integers(0, 2), min_size=60, max_size=60),
    limits=st.lists(st.integers(0, 3), min_size=3, max_size=3),
    guesses=st.integers(1, 5),
)
def test_the_kernels_keep_the_same_pool(prompt: list[int], numbers: list[int], limits: list[int], guesses: int) -> None:
    """And the same window. Two slots, over three rounds, that emit from one to four tokens each."""
    pytest.importorskip("draftforge.specdec.kernels.ngram_pool")
    proposers = LookaheadProposer(4, guesses), LookaheadOnDevice(4, guesses)
    for proposer in proposers:
        proposer.reserve(2, 60, 3)
        proposer.begin(torch.tensor([0, 1]), Texts.of([prompt, [1, 0, 1, 0]]), STATES)
    for turn, limit in enumerate(limits):
        on_host, on_device = (ways_of(proposer, [limit, 3]) for proposer in proposers)
        assert on_device == on_host
        said, emitted = numbers[turn * 16 : turn * 16 + 8], numbers[turn * 16 + 8 :]
        for proposer in proposers:  # what the target says stands after the last level of the window
            nodes = [guesses * 3 + 12] * 2 if proposer is proposers[1] else [len(ways) + 12 for ways, _ in on_host]
            rows = [[*[0] * (count - 3), *said[n * 4 : n * 4 + 4]] for n, count in enumerate(nodes)]
            proposer.observe_target_argmax(Texts.of(rows).ids_BT)
            proposer.observe(Texts.of([emitted[: limit + 1], emitted[4 : 5 + turn]]), STATES)


def test_slots_are_apart_and_movable() -> None:
    proposer = LookaheadProposer(window=1, guesses=1)
    proposer.reserve(3, 30, 1)
    proposer.begin(torch.tensor([0, 1, 2]), Texts.of([[1, 2, 1], [3, 4, 3], [5, 6, 5]]), STATES)

    def drafted(*limits: int) -> list[list[int]]:
        tree = proposer.propose(Ask(torch.tensor(limits), max(limits), [GREEDY] * len(limits), None, None)).tree
        return [tokens[ok].tolist() for tokens, ok in zip(tree.tokens_BN, tree.candidate_BN)]

    assert drafted(1, 1, 1) == [[2], [4], [6]]
    assert drafted(1, 0, 1) == [[2], [], [6]]
    proposer.observe_target_argmax(
        torch.tensor([[0, 0, 8], [0, 0, 7], [0, 0, 9]])
    )  # what row 1 says belongs to no window
    proposer.observe(Texts.of([[2], [4], [6]]), STATES)
    proposer.move(2, 0)
    assert drafted(1, 1) == [[9], [3]]
    proposer.begin(torch.tensor([0]), Texts.of([[7, 8]]), STATES)
    assert drafted(1, 1) == [[], [3]]


def test_rows_that_a_round_covers_for_nobody_leave_moved_windows_alone() -> None:
    """Where rounds are of few sizes, the slot that another one was moved out of is asked for nothing."""
    proposer = LookaheadProposer(window=1, guesses=1)
    proposer.reserve(2, 30, 1)
    proposer.begin(torch.tensor([0, 1]), Texts.of([[1, 2, 1], [3, 4, 5]]), STATES)
    proposer.move(1, 0)
    proposer.propose(Ask(torch.tensor([1, 0]), 1, [GREEDY] * 2, None, None))
    proposer.observe_target_argmax(torch.tensor([[6, 7], [0, 0]]))
    proposer.observe(Texts.of([[4]]), STATES)
    tree = proposer.propose(Ask(torch.tensor([1]), 1, [GREEDY], None, None)).tree
    assert tree.tokens_BN.tolist() == [[7, 7]]  # what followed 4 in the window, and the window as it goes on


def test_a_text_shorter_than_an_ngram_begins_one() -> None:
    proposer = LookaheadProposer(window=1, guesses=1)
    proposer.reserve(1, 30, 3)
    proposer.begin(torch.tensor([0]), Texts.of([[7, 8]]), STATES)
    proposer.observe(Texts.of([[9, 1, 7]]), STATES)
    tree = proposer.propose(Ask(torch.tensor([3]), 3, [GREEDY], None, None)).tree
    assert tree.tokens_BN[tree.candidate_BN].tolist() == [8, 9, 1]


def test_refusals() -> None:
    assert not LookaheadProposer().replayable
    with pytest.raises(InputError, match="lookahead: what it guesses depends on the rounds before, decode it"):
        LookaheadProposer().trace(Pack([Text([1, 2], 1)], torch.device("cpu")), 2, GREEDY, None)
    with pytest.raises(InputError, match="lookahead: window 0: must be at least 1"):
        LookaheadProposer(window=0)
    with pytest.raises(InputError, match="lookahead: guesses 0: must be at least 1"):
        LookaheadProposer(guesses=0)
