"""When a training ends before its last step: SIGTERM lets the current step end, saves, and leaves with an exception of
its own; early stopping ends it once the acceptance of scored checkpoints has stopped rising."""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

from ..errors import DraftforgeError


class TrainingStoppedError(DraftforgeError, InterruptedError):
    """SIGTERM arrived; the last step is saved and the same command goes on from it."""

    exit_code = 143


class StopRequest:
    """Flag: whether someone asked this process to stop."""

    def __init__(self) -> None:
        self.requested = False

    def request(self, number: int = 0, frame: FrameType | None = None) -> None:
        """Remember the request; also a signal handler."""
        self.requested = True


@contextmanager
def on_sigterm() -> Iterator[StopRequest]:
    """SIGTERM handler for the duration of the context: yields the request that the signal sets.

    Outside the main thread, where Python cannot handle signals, the request is never set.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    # Listen, and put the handler back that was there before.
    before = signal.signal(signal.SIGTERM, request.request)
    try:
        yield request
    finally:
        signal.signal(signal.SIGTERM, before)
    if request.requested and callable(before):  # too late to stop the training: the caller must still hear of it
        before(signal.SIGTERM, None)


class CheckpointScore(NamedTuple):
    """Acceptance of one step's draft on the conversations that are scored while training."""

    step: int
    tau: float
    low: float
    high: float
    """Upper end of the confidence interval of tau; `low` is its lower end."""


def best_steps(scores: Sequence[CheckpointScore], count: int) -> set[int]:
    """Steps of the `count` highest tau; of equals the earlier."""
    return {score.step for score in sorted(scores, key=lambda score: (-score.tau, score.step))[:count]}


def stalled(scores: Sequence[CheckpointScore], patience: int) -> bool:
    """Early stopping: whether the last `patience` scores brought no rise.

    A rise lies above the interval of the last rise, at first of the first score: small steps up add up to one.
    """
    # `last` is the score of the last rise, `since` the number of scores after it.
    last, since = None, 0
    for score in scores:
        if last is None or score.tau > last.high:
            last, since = score, 0
        else:
            since += 1
    return since >= patience
