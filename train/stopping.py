"""Stopping on request: SIGTERM lets the current step end, saves, and leaves with an exception of its own."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ..errors import DraftforgeError


class TrainingStoppedError(DraftforgeError, InterruptedError):
    """SIGTERM arrived; the last step is saved and the same command goes on from it."""

    exit_code = 143


class StopRequest:
    """Whether someone asked this process to stop."""

    def __init__(self) -> None:
        self.asked = False

    def ask(self, number: int = 0, frame: FrameType | None = None) -> None:
        """Remember the request; also a signal handler."""
        self.asked = True


@contextmanager
def on_sigterm() -> Iterator[StopRequest]:
    """A request that SIGTERM sets, while inside. Only a main thread can listen to signals."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = signal.signal(signal.SIGTERM, request.ask)
    try:
        yield request
    finally:
        signal.signal(signal.SIGTERM, before)
    if request.asked and callable(before):  # asked too late to stop the training: the caller must still hear of it
        before(signal.SIGTERM, None)
