"""The suffix proposer: its counts against scans of the texts, its trees against their definition."""

import itertools
from collections import Counter
from typing import TypeVar

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from stand_ins import prompts, target

from draftforge.errors import InputError
from draftforge.specdec.decoder import generate
from draftforge.specdec.models import States
from draftforge.specdec.proposers.base import Ask, Texts
from draftforge.specdec.proposers.suffix import Node, SuffixOnDevice, SuffixProposer, SuffixTrie, following, times
from draftforge.specdec.requests import Request
from draftforge.specdec.sampling_settings import SamplingSettings

GREEDY = SamplingSettings()
STATES = States(torch.zeros(1, 1, 1), None)
DEPTH = 4
texts = st.lists(st.integers(1, 3), min_size=1, max_size=24)
PATTERNS = [way for size in range(1, DEPTH + 1) for way in itertools.product((1, 2, 3), repeat=size)]
Way = tuple[int, ...]
Suffix = TypeVar("Suffix", bound=SuffixProposer | SuffixOnDevice)


def ends(text: list[int], pattern: list[int] | Way) -> list[int]:
    """Where its occurrences end, by looking at every place."""
    size = len(pattern)
    return [place + size for place in range(len(text) - size + 1) if text[place : place + size] == list(pattern)]


def check_counts(trie: SuffixTrie, known: list[list[int]]) -> None:
    for pattern in PATTERNS:
        expected = [(text, end) for text in known for end in ends(text, pattern)]
        place = trie.find(pattern)
        assert (0 if place is None else times(place)) == len(expected)
        if place is not None and len(pattern) < DEPTH:
            followed = Counter(text[end] for text, end in expected if end < len(text))
            assert {token: times(below) for token, below in following(place)} == followed


@given(parts=st.lists(st.lists(texts, min_size=1, max_size=3), min_size=1, max_size=3), gone=st.integers(0, 3))
def test_counts_are_those_of_a_scan(parts: list[list[list[int]]], gone: int) -> None:
    """Texts that grew piece by piece, of which the first ones are taken out again, and one more is added."""
    trie, known = SuffixTrie(DEPTH), list[list[int]]()
    for pieces in parts:
        known.append(trie.start())
        for piece in pieces:
            trie.extend(piece)
            check_counts(trie, known)
    assert known == [[token for piece in pieces for token in piece] for pieces in parts]
    trie.start()
    for text in known[:gone]:
        trie.remove(text)
    check_counts(trie, known[gone:])
    trie.extend(parts[0][0])
    check_counts(trie, [*known[gone:], parts[0][0]])


@given(known=texts, end=texts)
def test_contexts_are_the_suffixes_that_something_followed(known: list[int], end: list[int]) -> None:
    trie = SuffixTrie(DEPTH)
    trie.start()
    trie.extend(known)
    longest = end[-DEPTH + 1 :]
    expected = [n for n in range(len(longest), 0, -1) if any(after < len(known) for after in ends(known, longest[-n:]))]
    assert [length for length, _ in trie.contexts(longest)] == expected


def nodes_below(node: Node) -> int:
    return sum(1 + nodes_below(place) for place in node.next.values() if isinstance(place, Node))


def test_what_is_taken_out_leaves_nothing_and_long_texts_stay_small() -> None:
    trie = SuffixTrie(24)
    text = trie.start()
    trie.extend([7] * 2000)
    assert nodes_below(trie._root) <= 24
    trie.start()
    trie.remove(text)
    assert not trie._root.next
    varied = torch.randint(0, 1000, (2000,), generator=torch.Generator().manual_seed(0)).tolist()
    trie.extend(varied)
    assert nodes_below(trie._root) < len(varied)  # not 24 for every token


def started(proposer: Suffix, *rows: list[int], levels: int = 4) -> Suffix:
    proposer.reserve(len(rows), 64, levels)
    proposer.begin(torch.arange(len(rows)), Texts.of(rows), STATES)
    return proposer


def drafted(proposer: Suffix, *limits: int) -> list[list[Way]]:
    """The nodes of each slot's tree as ways from the root, in their order."""
    draft = proposer.propose(Ask(torch.tensor(limits), max(limits), [GREEDY] * len(limits), None, None))
    tree = draft.tree
    assert draft.q_BNV is None and not draft.chain and tree.drawn == "deterministic"
    found: list[list[Way]] = []
    for tokens, parents, candidates in zip(*(column.tolist() for column in tree[:3])):
        ways: dict[int, Way] = {-1: ()}
        for node, (token, parent) in enumerate(zip(tokens, parents)):
            ways[node] = (*ways[parent], token)
        found.append([ways[node] for node, candidate in enumerate(candidates) if candidate])
    return found


def follows(texts: list[list[int]], own: list[int] | None, context: list[int], way: Way) -> Counter[int]:
    """What followed context + way; past the end of the slot's own text that is the way itself, as in a loop."""
    said = [*context, *way]
    found = Counter(text[end] for text in texts for end in ends(text, said) if end < len(text))
    if found or own is None:
        return found
    virtual = [*own, *way]
    return Counter(virtual[end] for end in ends(virtual, said)[:1] if end < len(virtual))


def by_definition(own: list[int], answers: list[list[int]], limit: int, least: float, longest: int) -> dict[Way, float]:
    """Every way whose score is at least `least`, and that score."""
    scores: dict[Way, float] = {}

    def below(way: Way, score: float, texts: list[list[int]], loop: list[int] | None, context: list[int]) -> None:
        scores[way] = score
        if len(way) < limit:
            found = follows(texts, loop, context, way)
            total = sum(found.values()) + 1 / (len(context) + len(way))
            for token, count in found.items():
                if score * count / total >= least:
                    below((*way, token), score * count / total, texts, loop, context)

    left = 1.0
    for length in range(min(longest, len(own)), 0, -1):
        context = own[-length:]
        for texts, loop in (([own], own), (answers, None)):
            found = follows(texts, None, context, ())
            if found and left >= least:
                total = sum(found.values()) + 1 / length
                for token, count in found.items():
                    if left * count / total >= least and (token,) not in scores:
                        below((token,), left * count / total, texts, loop, context)
                left *= 1 / length / total
    return scores if limit > 0 else {}


@given(
    own=texts,
    answers=st.lists(texts, max_size=3),
    limit=st.integers(0, 5),
    nodes=st.integers(1, 12),
    least=st.sampled_from([0.02, 0.1, 0.3]),
    longest=st.integers(1, 6),
)
def test_the_best_nodes_by_definition_are_drafted(
    own: list[int], answers: list[list[int]], limit: int, nodes: int, least: float, longest: int
) -> None:
    proposer = SuffixProposer(nodes, least, longest, memory=1000)
    proposer.reserve(1, 64, 5)
    for answer in answers:  # of requests whose prompt was one token
        proposer.begin(torch.tensor([0]), Texts.of([[9, answer[0]]]), STATES)
        proposer.observe(Texts.of([answer[1:]]), STATES)
    proposer.begin(torch.tensor([0]), Texts.of([own]), STATES)
    scores = by_definition(own, answers, limit, least, longest)
    (ways,) = drafted(proposer, limit)
    assert len(set(ways)) == len(ways) == min(nodes, len(scores))
    assert all(way[:-1] in ((), *ways[:place]) for place, way in enumerate(ways))
    best = sorted(scores.values(), reverse=True)[: len(ways)]
    assert [scores[way] for way in ways] == pytest.approx(best)


@pytest.mark.slow  # Triton's interpreter
@settings(max_examples=10, deadline=None, phases=[Phase.generate])
@given(
    rows=st.lists(texts, min_size=1, max_size=2),
    limits=st.tuples(st.integers(0, 4), st.just(4)),
    nodes=st.integers(1, 12),
    least=st.sampled_from([0.02, 0.1, 0.3]),
    longest=st.integers(1, 6),
)
def test_the_kernels_draft_the_same_trees(
    rows: list[list[int]], limits: tuple[int, int], nodes: int, least: float, longest: int
) -> None:
    """Node by node; after some more tokens too."""
    pytest.importorskip("draftforge.specdec.kernels.suffix_tree")
    on_host, on_device = SuffixProposer(nodes, least, longest), SuffixOnDevice(nodes, least, longest)
    for proposer in (started(on_host, *rows), started(on_device, *rows)):
        proposer.observe(Texts.of([[3, 2], [1]][: len(rows)]), STATES)
    asked = limits[: len(rows)]
    assert drafted(on_device, *asked) == drafted(on_host, *asked)


def test_the_longest_match_comes_first_and_what_it_leaves_goes_to_shorter_ones() -> None:
    text = [1, 2, 3, 9, 2, 3, 8, 1, 2, 3]
    (ways,) = drafted(started(SuffixProposer(), text), 1)
    # 1 2 3 was followed by 9: 1 / (1 + 1/3). Of what is left, 8 followed 2 3 once in two times: 1/4 * 1 / (2 + 1/2).
    assert ways == [(9,), (8,)]
    assert drafted(started(SuffixProposer(min_score=0.2), text), 1) == [[(9,)]]


def test_a_loop_is_drafted_as_a_loop() -> None:
    assert drafted(started(SuffixProposer(), [5, 7, 7]), 4)[0][:3] == [(7,), (7, 7), (7, 7, 7)]
    (ways,) = drafted(started(SuffixProposer(), [1, 2, 1, 2]), 4)
    assert ways[-1] == (1, 2, 1, 2)


def test_slots_are_apart_padded_and_movable() -> None:
    proposer = started(SuffixProposer(), [1, 2, 3], [4, 5, 4], [6, 6])
    assert drafted(proposer, 3, 1, 1) == [[], [(5,)], [(6,)]]
    proposer.move(2, 0)
    proposer.observe(Texts.of([[8, 6], [5]]), STATES)
    first, second = drafted(proposer, 1, 1)
    assert set(first) == {(6,), (8,)} and second == [(4,)]
    proposer.begin(torch.tensor([0]), Texts.of([[1, 2]]), STATES)
    assert drafted(proposer, 3, 0) == [[], []]


class TestMemory:
    def test_finished_answers_are_drafted_from_and_prompts_and_running_ones_are_not(self) -> None:
        proposer = started(SuffixProposer(memory=100), [1, 2, 3, 4], [20, 4], levels=2)
        proposer.observe(Texts.of([[5, 6], [30]]), STATES)
        assert drafted(proposer, 2, 0)[0] == []
        proposer.move(1, 0)  # the first request is done: it answered 4 5 6
        assert drafted(proposer, 2) == [[]]
        proposer.observe(Texts.of([[4]]), STATES)
        assert drafted(proposer, 2)[0][0] == (30,)  # its own text goes first: 4 30
        proposer.begin(torch.tensor([1]), Texts.of([[8, 4]]), STATES)
        assert drafted(proposer, 2, 2)[1] == [(5,), (5, 6)]
        proposer.begin(torch.tensor([1]), Texts.of([[2, 3]]), STATES)  # was said in a prompt only
        assert drafted(proposer, 2, 2)[1] == []

    def test_a_slot_that_is_no_longer_active_is_remembered(self) -> None:
        proposer = started(SuffixProposer(memory=100), [9, 4], [8, 4])
        proposer.observe(Texts.of([[5], [5]]), STATES)
        proposer.propose(Ask(torch.tensor([2]), 2, [GREEDY], None, None))
        proposer.observe(Texts.of([[4]]), STATES)
        proposer.begin(torch.tensor([0]), Texts.of([[7, 4]]), STATES)
        assert drafted(proposer, 1) == [[(5,)]]
        assert times(proposer._memory.trie.find([4, 5])) == 2  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("memory", "known"), [(3, [False, True]), (5, [False, True]), (6, [True, True]), (2, [False, False])]
    )
    def test_only_the_latest_are_kept(self, memory: int, known: list[bool]) -> None:
        proposer = SuffixProposer(memory=memory)
        proposer.reserve(1, 64, 2)
        for answer in ([4, 5, 6], [1, 2, 3]):
            proposer.begin(torch.tensor([0]), Texts.of([[9, answer[0]]]), STATES)
            proposer.observe(Texts.of([answer[1:]]), STATES)
        for prompt, expected in zip(([9, 4], [9, 1]), known):
            proposer.begin(torch.tensor([0]), Texts.of([prompt]), STATES)
            assert bool(drafted(proposer, 1)[0]) == expected
            proposer._texts[0] = None  # what asks here is not remembered
        proposer.begin(torch.tensor([0]), Texts.of([[9, 2]]), STATES)
        assert drafted(proposer, 1) == [[(3,)]]  # the end of the last answer fits in any case

    def test_another_run_starts_without_it(self) -> None:
        proposer = started(SuffixProposer(memory=100), [9, 4])
        proposer.observe(Texts.of([[5]]), STATES)
        proposer.begin(torch.tensor([0]), Texts.of([[8, 4]]), STATES)
        assert drafted(proposer, 2) == [[(5,)]]
        assert drafted(started(proposer, [8, 4]), 2) == [[]]

    def test_recorded_answers_tell_the_rounds_only_without_it(self) -> None:
        assert SuffixProposer().replayable and not SuffixProposer(memory=1).replayable

    @pytest.mark.parametrize("batch_size", [1, 3])
    def test_repeated_questions_are_answered_alike_in_fewer_rounds(self, batch_size: int) -> None:
        model = target()
        requests = [Request(ids, GREEDY, 0, 24, frozenset({5})) for ids in prompts(4) * 3]
        plain = dict(generate(model, None, requests))
        rounds = []
        for proposer in (SuffixProposer(), SuffixProposer(memory=48)):
            done = dict(generate(model, proposer, requests, batch_size=batch_size))
            assert {n: one.tokens for n, one in done.items()} == {n: one.tokens for n, one in plain.items()}
            rounds.append(sum(len(one.rounds) for one in done.values()))
        assert rounds[1] < rounds[0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"nodes": 0}, "suffix: nodes 0: must be at least 1"),
        ({"max_match": 0}, "suffix: max_match 0: must be at least 1"),
        ({"memory": -1}, "suffix: memory -1: must be at least 0"),
        ({"min_score": 1.0}, "suffix: min_score 1.0: must be above 0 and below 1"),
        ({"min_score": 0.0}, "suffix: min_score 0.0: must be above 0 and below 1"),
    ],
)
def test_refusals(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SuffixProposer(**wrong)  # type: ignore[arg-type]
