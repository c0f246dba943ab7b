"""Waiting times and round times of runs whose clock readings are written by hand."""

import math

import pytest
from benched import answer
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from draftforge.eval.bench.latency import Timeline, median, percentiles

FULL = (2, 2, 3, 2)  # all of two drafted tokens accepted
NONE = (2, 0, 1, 1)


def test_one_answer_alone() -> None:
    """Prompt 1 s, then rounds of 1 s that give 3, 1 and 3 tokens."""
    one = answer(0, 0.5, [1.5, 2.5, 3.5, 4.5], [FULL, NONE, FULL])
    assert one.tokens == 8
    assert (one.first_token_seconds, one.seconds) == (1.0, 4.0)
    assert one.token_gaps == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1.0, 1 / 3, 1 / 3, 1 / 3])
    line = Timeline([one], 5.0)
    assert line.prompt_seconds == 1.0
    assert line.rate() == pytest.approx(8 / 5.0)  # the half second before and after is the run's too
    assert line.decoding_rate() == pytest.approx(7 / 4.0)
    assert line.slots == pytest.approx(4.0 / 5.0)
    assert line.round_seconds() == [1.0, 1.0]  # the first follows a prompt


def test_two_slots_and_a_prompt_between_rounds() -> None:
    """Prompts 0 and 1 are read together; 1 ends first, and prompt 2 takes its slot while 0 waits."""
    answers = [
        answer(0, 0.0, [1.0, 2.0, 5.0, 6.5]),
        answer(1, 0.0, [1.0, 2.0]),
        answer(2, 2.0, [4.0, 5.0, 6.5]),
    ]
    line = Timeline(answers, 6.5)
    assert line.prompt_seconds == 1.0 + 2.0
    assert line.decoding_seconds(answers[0]) == 5.5 - 2.0
    assert line.decoding_seconds(answers[2]) == 2.5
    assert line.round_seconds() == [1.5]  # two slots, no prompt: only the last one
    assert line.rate() == pytest.approx(9 / 6.5)
    assert line.decoding_rate() == pytest.approx(6 / 3.5)
    held = 6.5 + 2.0 + 4.5
    assert line.rate(frozenset([1])) == pytest.approx(2 / 2.0 * held / 6.5)
    assert line.rate(frozenset([0, 1, 2])) == line.rate()
    assert math.isnan(line.rate(frozenset([7])))


def test_rounds_behind_a_prompt_count_where_there_are_no_others() -> None:
    answers = [answer(0, 0.0, [1.0, 1.5]), answer(1, 1.5, [2.0, 2.75])]
    assert Timeline(answers, 2.75).round_seconds() == [0.5, 0.75]
    assert Timeline([answer(0, 0.0, [1.0])], 1.0).round_seconds() == []


def test_a_round_of_fewer_slots_does_not_count() -> None:
    answers = [answer(0, 0.0, [1.0, 2.0, 3.0, 3.25, 3.5]), answer(1, 0.0, [1.0, 2.0, 3.0])]
    assert Timeline(answers, 3.5).round_seconds() == [1.0]


@given(st.lists(st.lists(st.tuples(st.floats(0.01, 9), st.integers(0, 2)), min_size=1), min_size=1))
def test_a_queue_of_one_slot_adds_up(asked: list[list[tuple[float, int]]]) -> None:
    """Whatever the times are: gaps add up to decoding, decoding and prompts to the run."""
    clock, answers = 0.0, []
    for prompt, steps in enumerate(asked):
        begun, moments = clock, []
        for seconds, _ in steps:
            clock += seconds
            moments.append(clock)
        rounds = [(2, accepted, accepted + 1, min(accepted + 1, 2)) for _, accepted in steps[1:]]
        answers.append(answer(prompt, begun, moments, rounds))
    line = Timeline(answers, clock)
    spent = sum(map(line.decoding_seconds, answers))
    assert sum(sum(one.token_gaps) for one in answers) == pytest.approx(spent)
    assert spent + line.prompt_seconds == pytest.approx(clock)
    assert line.slots == pytest.approx(1.0)
    assert line.rate() == pytest.approx(sum(one.tokens for one in answers) / clock)
    if spent:
        assert line.decoding_rate() == pytest.approx(sum(one.tokens - 1 for one in answers) / spent)


@pytest.mark.parametrize(
    ("begun", "arrivals", "tokens"), [(2.0, [1.0, 3.0], 2), (0.0, [2.0, 1.0], 2), (0.0, [1.0, 2.0], 3)]
)
def test_readings_that_cannot_be_are_refused(begun: float, arrivals: list[float], tokens: int) -> None:
    known = answer(0, 0.0, [1.0, 2.0]).model_dump()
    with pytest.raises(ValidationError, match="arrivals"):
        type(answer(0, 0.0, [1.0])).model_validate(known | {"begun": begun, "arrivals": arrivals, "tokens": tokens})


def test_percentiles_and_medians() -> None:
    assert percentiles([1.0, 2.0, 3.0]) == pytest.approx((2.0, 2.9))
    assert all(map(math.isnan, percentiles([])))
    assert median([1.0, math.nan, 3.0]) == 2.0
    assert math.isnan(median([math.nan]))
