"""Each engine's law of counting on rounds small enough to check by hand, and ours against the decoder."""

from collections.abc import Callable

import pytest
from engine_counts import (
    CountedRounds,
    CountingConvention,
    EngineCounts,
    EngineRound,
    engine_rounds,
    matched_runs,
)
from stand_ins import near_copy, prompts, random_eagle3, target

from draftforge.errors import InputError
from draftforge.specdec.decoder import Request, generate
from draftforge.specdec.proposers.base import Proposer
from draftforge.specdec.proposers.factory import make_proposer
from draftforge.specdec.proposers.prompt_lookup import PromptLookup
from draftforge.specdec.replay.expected_rounds import count_rounds
from draftforge.specdec.sampling_settings import SamplingSettings

# Row t: what of three drafted tokens is right when t tokens of the answer are known. Eight tokens are asked for.
RUNS = CountedRounds([2, 3, 0, 1, 0, 0, 2, 3, 0, 0, 0], [3] * 11)


@pytest.mark.parametrize(
    ("counting", "expected"),
    [
        ("draftforge", [(3, 3), (2, 0), (1, 1)]),  # at 1, 5, 6; of the last draft one token still fits
        ("llamacpp", [(3, 3), (2, 0), (1, 1)]),
        ("transformers", [(3, 2), (3, 1), (2, 0), (1, 1)]),  # at 0, 3, 5, 6
        ("vllm", [(3, 3), (3, 0), (3, 2)]),  # at 1, 5, 6: nothing is clipped, the surplus is accepted
    ],
)
def test_an_answer_that_ends_by_length(counting: CountingConvention, expected: list[tuple[int, int]]) -> None:
    assert engine_rounds(counting, RUNS, 3, 8) == expected


@pytest.mark.parametrize(
    ("counting", "expected"),
    [
        ("draftforge", [(3, 2)]),  # the third token is the stop; the fourth is right, and not emitted
        ("llamacpp", [(3, 1)]),
        ("vllm", [(3, 3)]),
    ],
)
def test_an_answer_that_ends_inside_a_draft(counting: CountingConvention, expected: list[tuple[int, int]]) -> None:
    assert engine_rounds(counting, RUNS, 3, 8, stopped_after=3) == expected


def test_llamacpp_accepts_a_stop_token_only_as_the_drafts_last() -> None:
    assert engine_rounds("llamacpp", CountedRounds([9, 3], [3, 3]), 3, 8, stopped_after=4) == [(3, 3)]
    assert engine_rounds("llamacpp", CountedRounds([9, 2], [3, 3]), 3, 8, stopped_after=3) == [(3, 1)]
    assert engine_rounds("draftforge", CountedRounds([9, 2], [3, 3]), 3, 8, stopped_after=3) == [(3, 2)]


def test_a_last_round_of_one_token_drafts_nothing_and_llamacpp_does_not_count_it() -> None:
    assert engine_rounds("draftforge", RUNS, 3, 6) == [(3, 3), (0, 0)]
    assert engine_rounds("llamacpp", RUNS, 3, 6) == [(3, 3)]
    assert engine_rounds("vllm", RUNS, 3, 6) == [(3, 3), (3, 0)]


def test_one_token_is_no_round_but_for_transformers() -> None:
    assert engine_rounds("vllm", RUNS, 3, 1) == engine_rounds("draftforge", RUNS, 3, 1) == []
    assert engine_rounds("transformers", RUNS, 3, 1) == [(0, 0)]


@pytest.mark.parametrize(
    ("counting", "expected"),
    [
        ("draftforge", [(0, 0), (2, 2), (0, 0), (1, 1)]),  # at 1, 2, 5, 6
        ("llamacpp", [(2, 2), (1, 1)]),
        ("vllm", [(2, 2), (3, 2)]),
    ],
)
def test_a_round_without_a_draft(counting: CountingConvention, expected: list[tuple[int, int]]) -> None:
    """Prompt lookup: nothing to copy after 1 and 5 tokens, two after 2, three after 6."""
    runs = CountedRounds([0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 0], [0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 0])
    assert engine_rounds(counting, runs, 3, 8) == expected


def test_transformers_is_not_guessed_where_a_stop_ends_the_answer() -> None:
    with pytest.raises(InputError, match="counting transformers: an answer that ends with a stop token"):
        engine_rounds("transformers", RUNS, 3, 8, stopped_after=3)


def test_totals_name_each_position() -> None:
    rounds = [EngineRound(3, 3), EngineRound(3, 1), EngineRound(1, 0)]
    assert EngineCounts.from_rounds(rounds, 3) == (3, 7, 4, (2, 1, 1))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "K"), [("small", 1), ("eagle3", 4), ("lookup", 4), ("lookup first", 1)])
def test_our_own_law_is_the_decoders(name: str, K: int) -> None:
    model, length, stops = target(), 24, frozenset({5, 17})
    proposers: dict[str, Callable[[], Proposer]] = {
        "small": lambda: make_proposer(near_copy(model, noise=0.1), model),
        "eagle3": lambda: make_proposer(random_eagle3(model), model),
        "lookup": PromptLookup,
        "lookup first": lambda: PromptLookup(occurrence="first"),
    }
    proposer, total = proposers[name](), 0
    for ids in prompts(4):
        ((_, answer),) = generate(model, proposer, [Request(ids, SamplingSettings(), 0, length, stops)], draft_tokens=K)
        ((_, text),) = generate(model, None, [Request(ids, SamplingSettings(), 0, length + K)])
        stopped = len(answer.tokens) if answer.finish == "stop" else None
        rounds = engine_rounds("draftforge", matched_runs(model, proposer, ids, text.tokens, K), K, length, stopped)
        assert rounds == [r[:2] for r in answer.rounds]
        decoded = count_rounds(answer.rounds, K)
        assert EngineCounts.from_rounds(rounds, K) == (
            decoded.rounds,
            decoded.drafted,
            decoded.accepted,
            decoded.accepted_K,
        )
        total += len(rounds)
    assert total > 5
