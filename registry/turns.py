"""One mover of a champion at a time, on this host and between hosts.

MLflow has no compare-and-set, only tags where the last writer wins. Fischer's algorithm makes a turn of one (Lamport,
"A Fast Mutual Exclusion Algorithm", ACM TOCS 5(1), 1987, section 2): wait until nobody claims the turn, claim it, wait
longer than a claim takes to arrive, and hold the turn if the claim is still one's own. It fails only where a claim
takes longer than that to reach the server; the move itself then still reads the alias before and after.
"""

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..errors import LockedError, RegistryError, TrackingError
from ..progress import say
from .connect import Tracking, mlflow_errors
from .models import aliases_lock

TURN_TAG = "draftforge.turn"
_SETTLE_SECONDS = 1.0
"""Least time between a claim and its reading: a request to a server takes a few hundredths of this."""
_ABANDONED_SECONDS = 30.0
"""A claim that stands so long was left by a process that died: a move takes a second or two."""
_GIVE_UP_SECONDS = 120.0
_LOOK_SECONDS = 0.25


@contextmanager
def moving(tracking: Tracking, name: str) -> Iterator[None]:
    """Hold this while the champion of a registered model is compared and moved. Raises LockedError."""
    with aliases_lock(tracking, name):
        if tracking.uri.startswith("sqlite"):  # a file: whoever reaches it shares the lock beside it
            yield
            return
        with turn(tracking, name):
            yield


@contextmanager
def turn(tracking: Tracking, name: str) -> Iterator[None]:
    """The turn among hosts."""
    mine = uuid.uuid4().hex
    _take(tracking, name, mine)
    try:
        yield
    finally:
        with suppress(TrackingError, RegistryError):  # it is abandoned, and so taken over in time
            if _claimed(tracking, name) == mine:
                _release(tracking, name)


def _take(tracking: Tracking, name: str, mine: str) -> None:
    until = time.monotonic() + _GIVE_UP_SECONDS
    while True:
        _wait_until_free(tracking, name, until)
        started = time.monotonic()
        try:
            with mlflow_errors(tracking.uri):
                tracking.client.set_registered_model_tag(name, TURN_TAG, mine)
        except TrackingError:  # two that make a new tag at once: the database takes one of them
            if _claimed(tracking, name) in ("", mine):
                raise
        time.sleep(max(_SETTLE_SECONDS, 3 * (time.monotonic() - started)))
        if _claimed(tracking, name) == mine:
            return


def _wait_until_free(tracking: Tracking, name: str, until: float) -> None:
    """Until nobody claims the turn, or the same claim has stood for too long. By this host's clock alone."""
    seen, since = None, time.monotonic()
    while holder := _claimed(tracking, name):
        if holder != seen:
            seen, since = holder, time.monotonic()
        if time.monotonic() - since > _ABANDONED_SECONDS:
            say(f"{name}: another promotion or rollback was cut off; going on without it")
            return
        if time.monotonic() > until:
            raise LockedError(f"{name}: held by other promotions or rollbacks; wait for them to end")
        time.sleep(_LOOK_SECONDS)


def _claimed(tracking: Tracking, name: str) -> str:
    with mlflow_errors(tracking.uri):
        return str(tracking.client.get_registered_model(name).tags.get(TURN_TAG, ""))


def _release(tracking: Tracking, name: str) -> None:
    with mlflow_errors(tracking.uri):
        tracking.client.delete_registered_model_tag(name, TURN_TAG)
