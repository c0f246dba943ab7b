"""A thread that says every few seconds that this rank lives, and hears who else does and why one has ended.

It goes on beside whatever the rank does, so one that hears nothing of another may take that for lost.
"""

import itertools
import json
import os
import threading
import time
from contextlib import suppress

import torch.distributed as dist

from ..errors import LostRankError
from ..progress import say
from . import distributed

PULSE_SECONDS = 5.0
LOST_SECONDS = 45.0  # without a pulse
BIRTH_SECONDS = 600.0  # until a rank's first pulse: importing from a cold disk takes its time
ENDED = "ended"
"""Key of the first rank that has failed, and of why."""


class Pulse:
    """Says every few seconds that this rank lives, and hears who else does, over a connection of its own."""

    def __init__(self, rank: int, size: int) -> None:
        now = time.monotonic()
        self.heard = {other: ("", now) for other in (range(size) if rank == 0 else (0,)) if other != rank}
        """Of those that this rank watches: the last pulse, and when it was new."""
        self.lost: set[int] = set()
        self.word: tuple[int, str] | None = None
        """Who ended, and why."""
        self._rank, self._ended, self._since, self._asked = rank, threading.Event(), now, False
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Before the interpreter goes: a thread that is inside the store then would take it down."""
        self._ended.set()
        self._thread.join(PULSE_SECONDS)

    def _beat(self) -> None:
        with suppress(dist.DistError, RuntimeError, LostRankError):  # whoever needs the store finds out
            store = connected(self._rank)
            for beat in itertools.count():
                store.set(pulse_of(self._rank), str(beat))
                self._listen(store)
                if self._ended.wait(PULSE_SECONDS):
                    return

    def _listen(self, store: dist.Store) -> None:
        for rank, (known, _) in self.heard.items():
            beat = store.get(pulse_of(rank)).decode() if store.check([pulse_of(rank)]) else ""
            if beat != known:
                self.heard[rank] = beat, time.monotonic()
        if self.word is None and store.check([ENDED]):
            rank, reason = json.loads(store.get(ENDED))
            self.word = rank, reason
            store.set(heard_of(self._rank), "")
        absent = [str(rank) for rank, (beat, _) in self.heard.items() if not beat]
        if absent and not self._asked and time.monotonic() > self._since + distributed.PATIENCE_SECONDS:
            self._asked = True
            say(f"waiting for rank {', '.join(absent)} to start, for {BIRTH_SECONDS:.0f} s at most")


def pulse_of(rank: int) -> str:
    return f"pulse/{rank}"


def heard_of(rank: int) -> str:
    """Key of a rank that knows why another has ended."""
    return f"heard/{rank}"


def gone_of(rank: int) -> str:
    """Key of a rank that ends, whatever the reason."""
    return f"gone/{rank}"


def connected(rank: int) -> dist.Store:
    """This launch's keys. A torchrun that starts its ranks again does not find those of the attempt before."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"draftforge/{attempt}", distributed.connect(hosts=rank == 0))
