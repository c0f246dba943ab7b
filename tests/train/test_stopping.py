"""Which drafts are kept, and when training no longer pays."""

import pytest

from draftforge.train.stopping import CheckpointScore, best_steps, stalled


def scores(*taus: float, half: float = 0.1) -> list[CheckpointScore]:
    return [CheckpointScore(step, tau, tau - half, tau + half) for step, tau in enumerate(taus, start=1)]


def test_the_best_are_those_of_the_highest_tau_and_the_earlier_of_equals() -> None:
    assert best_steps(scores(1.0, 3.0, 2.0, 3.0), 2) == {2, 4}
    assert best_steps(scores(1.0, 3.0, 2.0, 3.0), 1) == {2}
    assert best_steps(scores(1.0), 3) == {1}


@pytest.mark.parametrize(
    ("taus", "expected"),
    [
        ((), False),
        ((1.0, 1.0), False),
        ((1.0, 1.0, 1.0), True),
        ((1.0, 1.0, 1.2), False),  # a rise
        ((1.0, 1.05, 1.09), True),  # inside the first one's interval
        ((1.0, 1.06, 1.12, 1.18), False),  # small steps add up: 1.12 is above 1.1, and 1.18 the first after it
        ((1.0, 1.5, 1.4, 1.55), True),
        ((2.0, 1.0, 1.0), True),
    ],
)
def test_two_scores_without_a_rise_are_enough(taus: tuple[float, ...], expected: bool) -> None:
    assert stalled(scores(*taus), 2) is expected
