"""Ranks that share work which needs no collective: shards to answer, checkpoints to count.

The first rank says what there is to do, and every rank takes one piece of it after another, so that all end together
however fast each is. They talk through a key-value store on the first rank's machine: torchrun's own, or one that the
first rank opens where another launcher set the ranks' places. A rank that fails leaves its reason there, and one that
dies stops its pulse: either ends those that wait for it.
"""

import atexit
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from typing import NoReturn

import torch
import torch.distributed as dist

from ..data.crew import ALONE, Crew, Json, Work
from ..errors import LostRankError, one_line
from . import distributed

_POLL_SECONDS = 0.1
_PULSE_SECONDS = 5.0
_LOST_SECONDS = 45.0  # without a pulse; threads beat beside whatever a rank does
_BIRTH_SECONDS = 600.0  # until a rank's first pulse: importing from a cold disk takes its time
_ENDED = "ended"


@cache
def crew() -> Crew:
    """The ranks of this launch; this process alone where there is one. This rank's GPU is the current one then."""
    size, rank = distributed.world_size(), int(os.environ.get("RANK", "0"))
    if torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # before anything is placed on `cuda`
    return ALONE if size == 1 else RankCrew(rank, size)


class RankCrew:
    """The ranks of one launch, from one of them (see `data.crew.Crew`)."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._store = _connected(rank)
        self._begun: dict[str, int] = {}
        self._seen: dict[int, tuple[str, float]] = {}  # the last pulse of each rank, and when it was new
        self._since = time.monotonic()
        self._pulse = _Pulse(rank)
        self._pulse.start()
        atexit.register(self._pulse.stop)

    @property
    def first(self) -> bool:
        return self.rank == 0

    @contextmanager
    def share(self, name: str, plan: Json | None, over: Callable[[], bool] = lambda: False) -> Iterator[Work | None]:
        """Raises LostRankError where a rank is gone, or has failed."""
        key = f"{name}/{self._begun.get(name, 0)}"
        if plan is not None:
            self.put(f"{key}/plan", json.dumps(plan))
        else:
            self.wait(lambda: over() or self.has(f"{key}/plan"), name)
            if not self.has(f"{key}/plan"):
                yield None
                return
        self._begun[name] = self._begun.get(name, 0) + 1
        try:
            yield _Shared(self, key, plan if plan is not None else json.loads(self.get(f"{key}/plan")))
        except BaseException as error:
            self._leave_word(error)
            raise

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Poll until it is done, however long that takes, as long as those who may do it live."""
        look = time.monotonic() + _PULSE_SECONDS
        while not done():
            time.sleep(_POLL_SECONDS)
            if time.monotonic() > look:
                self._look(what)
                look = time.monotonic() + _PULSE_SECONDS

    def put(self, key: str, value: str) -> None:
        with self._talking(key):
            self._store.set(key, value)

    def has(self, key: str) -> bool:
        with self._talking(key):
            return bool(self._store.check([key]))

    def get(self, key: str) -> str:
        """What is there: a key that is not is waited for, and an error."""
        with self._talking(key):
            return str(self._store.get(key).decode())

    def add(self, key: str, amount: int) -> int:
        with self._talking(key):
            return int(self._store.add(key, amount))

    @contextmanager
    def _talking(self, what: str) -> Iterator[None]:
        try:
            yield
        except (dist.DistError, RuntimeError) as error:
            raise distributed.store_lost(what.partition("/")[0], error) from error

    def _leave_word(self, error: BaseException) -> None:
        """Why this rank ends; the first word stays."""
        with suppress(Exception):
            if not self._store.check([_ENDED]):
                self._store.set(_ENDED, json.dumps([self.rank, one_line(error)]))

    def _look(self, what: str) -> None:
        """Raise LostRankError where a rank said that it ends, or says nothing any more."""
        if self.has(_ENDED):
            rank, reason = json.loads(self.get(_ENDED))
            raise LostRankError(f"{what} was waited for, but rank {rank} ended: {reason}")
        now = time.monotonic()
        for rank in range(self.size) if self.first else (0,):
            beat = self.get(_pulse_of(rank)) if self.has(_pulse_of(rank)) else ""
            known, when = self._seen.get(rank, ("", self._since))
            if beat != known:
                self._seen[rank] = (beat, now)
            elif rank != self.rank and now - when > (_LOST_SECONDS if beat else _BIRTH_SECONDS):
                self._lost(rank, what, now - when)

    def _lost(self, rank: int, what: str, seconds: float) -> NoReturn:
        raise LostRankError(
            f"{what} was waited for, but nothing was heard of rank {rank} for {seconds:.0f} s; the same command goes "
            "on from what is finished"
        )


class _Shared:
    """One piece of work of all ranks (see `data.crew.Work`)."""

    def __init__(self, ranks: RankCrew, key: str, plan: Json) -> None:
        self.plan, self.size = plan, ranks.size
        self._ranks, self._key = ranks, key

    def claim(self, item: str) -> bool:
        return self._ranks.add(f"{self._key}/item/{item}", 1) == 1

    def add(self, figures: Mapping[str, int]) -> dict[str, int]:
        return {name: self._ranks.add(f"{self._key}/sum/{name}", amount) for name, amount in figures.items()}

    def finish(self, report: Json) -> list[Json]:
        if not self._ranks.first:
            self._ranks.put(f"{self._key}/through/{self._ranks.rank}", json.dumps(report))
            return []
        others = [f"{self._key}/through/{rank}" for rank in range(1, self.size)]
        what = self._key.partition("/")[0]
        for key in others:
            self._ranks.wait(lambda key=key: self._ranks.has(key), what)  # type: ignore[misc]
        return [report, *(json.loads(self._ranks.get(key)) for key in others)]

    def wait(self, done: Callable[[], bool], what: str) -> None:
        self._ranks.wait(done, what)


class _Pulse:
    """Says every few seconds that this rank lives, over a connection of its own."""

    def __init__(self, rank: int) -> None:
        self._rank, self._ended = rank, threading.Event()
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Before the interpreter goes: a thread that is inside the store then would take it down."""
        self._ended.set()
        self._thread.join(_PULSE_SECONDS)

    def _beat(self) -> None:
        with suppress(dist.DistError, RuntimeError, LostRankError):  # whoever needs the store finds out
            store = _connected(self._rank)
            for beat in itertools.count():
                store.set(_pulse_of(self._rank), str(beat))
                if self._ended.wait(_PULSE_SECONDS):
                    return


def _pulse_of(rank: int) -> str:
    return f"pulse/{rank}"


def _connected(rank: int) -> dist.Store:
    """This launch's keys. A torchrun that starts its ranks again does not find those of the attempt before."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"draftforge/{attempt}", distributed.connect(hosts=rank == 0))
