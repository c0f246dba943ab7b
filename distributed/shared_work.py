"""Ranks that share work which needs no collective: shards to answer, checkpoints to count.

The first rank says what there is to do, and every rank takes one piece of it after another, so that all end together
however fast each is. They talk through a key-value store on the first rank's machine: torchrun's own, or one that the
first rank opens where another launcher set the ranks' places. A rank that fails leaves its reason there, and stays
until the others have heard it; one that dies stops its pulse. Either ends those that wait for it.
"""

import atexit
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..errors import InputError, LostRankError, MissingFileError, StaleInputError, StoppedError, one_line
from ..progress import say
from . import process_group

Json = dict[str, Any]


class Work(Protocol):
    """One piece of work, as one process sees it."""

    plan: Json
    """What the first process said that there is to do."""
    size: int
    """Processes that share it."""

    def claim(self, item: str) -> bool:
        """Whether this process takes an item; none is given to two."""

    def add(self, figures: Mapping[str, int]) -> dict[str, int]:
        """Add to sums that all processes share; what they are now."""

    def finish(self, report: Json) -> list[Json]:
        """Say that this process is through. On the first one: wait for all, and give every report, its own first."""

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Poll, as long as the others live."""


class Crew(Protocol):
    """The processes."""

    rank: int
    size: int

    @property
    def first(self) -> bool:
        """Whether this process says what there is to do."""

    def agree(self, settings: Json) -> None:
        """Meet the others at the start. Raises InputError where they have other settings than the first process."""

    def together(self, name: str) -> AbstractContextManager[None]:
        """Work whose collectives need all of them, from the moment that all are there."""

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Poll, as long as the others live. Raises MissingFileError where the first one has `made` it, elsewhere."""

    def made(self, what: str) -> None:
        """Say, on the first process, that files which the others wait for are there."""

    def share(
        self, name: str, plan: Json | None, over: Callable[[], bool] = lambda: False
    ) -> AbstractContextManager[Work | None]:
        """Begin a piece of work of that name: the first process gives its plan, the others wait for that.

        None where it was `over` before. All processes begin the same pieces in the same order.
        """


class _Solo:
    """Work of one process: it takes everything, and nobody else is waited for."""

    size = 1

    def __init__(self, plan: Json | None = None) -> None:
        self.plan: Json = plan or {}
        self._sums: dict[str, int] = {}

    def claim(self, item: str) -> bool:
        return True

    def add(self, figures: Mapping[str, int]) -> dict[str, int]:
        for name, amount in figures.items():
            self._sums[name] = self._sums.get(name, 0) + amount
        return {name: self._sums[name] for name in figures}

    def finish(self, report: Json) -> list[Json]:
        return [report]

    def wait(self, done: Callable[[], bool], what: str) -> None:
        assert done(), what


class _Alone:
    """A crew of one."""

    rank, size, first = 0, 1, True

    def agree(self, settings: Json) -> None:
        pass

    @contextmanager
    def together(self, name: str) -> Iterator[None]:
        yield

    def wait(self, done: Callable[[], bool], what: str) -> None:
        assert done(), what

    def made(self, what: str) -> None:
        pass

    @contextmanager
    def share(self, name: str, plan: Json | None, over: Callable[[], bool] = lambda: False) -> Iterator[Work | None]:
        yield _Solo(plan)


ALONE: Crew = _Alone()


def solo() -> Work:
    """Work that nobody shares."""
    return _Solo()


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
        if absent and not self._asked and time.monotonic() > self._since + process_group.PATIENCE_SECONDS:
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
    return dist.PrefixStore(f"draftforge/{attempt}", process_group.connect(hosts=rank == 0))


_POLL_SECONDS = 0.1
_HEARD_SECONDS = 10.0  # for the others to hear why a rank ends
_SEEN_SECONDS = 60.0  # until a file of another machine is seen


@cache
def crew() -> Crew:
    """The ranks of this launch; this process alone where there is one. This rank's GPU is the current one then."""
    size, rank = process_group.world_size(), int(os.environ.get("RANK", "0"))
    if torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # before anything is placed on `cuda`
    return ALONE if size == 1 else RankCrew(rank, size)


def tell_others(error: BaseException) -> None:
    """Say why this rank ends, where it is one of several that have begun to talk."""
    ranks = crew() if crew.cache_info().currsize else ALONE
    if isinstance(ranks, RankCrew):
        ranks.end(error)


class RankCrew:
    """The ranks of one launch, from one of them (see `data.crew.Crew`)."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._store = connected(rank)
        self._begun, self._look_at, self._doing = 0, 0.0, "the start"
        self._pulse = Pulse(rank, size)
        self._pulse.start()
        atexit.register(self._leave)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def agree(self, settings: Json) -> None:
        """Raises InputError where this rank has others than the first one, LostRankError where one is gone."""
        name, settings = "the start of every rank", json.loads(json.dumps(settings))
        with self.share(name, settings) if self.first else self.share(name, None) as work:
            assert work is not None
            theirs: Json = work.plan
            for field in sorted(settings.keys() | theirs.keys()):
                if settings.get(field) != theirs.get(field):
                    raise InputError(
                        f"{field} = {settings.get(field)}: the first rank has {theirs.get(field)}; all ranks of a "
                        "launch need the same recipe and options"
                    )
            work.finish({})

    @contextmanager
    def together(self, name: str) -> Iterator[None]:
        """Raises LostRankError where a rank is gone before all have begun or, with its reason, inside."""
        with self.share(name, {} if self.first else None) as work:
            assert work is not None
            work.finish({})
        try:
            yield
        except LostRankError as error:
            raise self._explained(name, error) from error

    @contextmanager
    def share(self, name: str, plan: Json | None, over: Callable[[], bool] = lambda: False) -> Iterator[Work | None]:
        """Raises LostRankError where a rank is gone, or has failed; StaleInputError where the first one does
        something else."""
        key, self._doing = f"work/{self._begun}", name
        if plan is not None:
            self.put(f"{key}/plan", json.dumps([name, plan]))
        else:
            self.wait(lambda: over() or self.has(f"{key}/plan"), name)
            known, found = json.loads(self.get(f"{key}/plan")) if self.has(f"{key}/plan") else ("", None)
            if known != name and over():  # the first one may have begun what comes next
                yield None
                return
            plan = found
            if known != name:
                error = StaleInputError(
                    f"{name} is what rank {self.rank} comes to, but {known} is what the first rank does: they have "
                    "another recipe, target or mix"
                )
                self._leave_word(error)
                raise error
        self._begun += 1
        try:
            assert plan is not None
            yield _Shared(self, key, name, plan)
        except BaseException as error:
            self._leave_word(error)
            raise

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Poll until it is done, however long that takes, as long as those who may do it live."""
        self._doing, since = what, None
        while not done():
            time.sleep(_POLL_SECONDS)
            if self.look(what) and self.has(f"made/{what}"):
                since = since or time.monotonic()
                if time.monotonic() - since > _SEEN_SECONDS:
                    raise MissingFileError(
                        f"{what}: the first rank has made it, but rank {self.rank} does not find it; workdir must lie "
                        "on a file system that all ranks share"
                    )

    def made(self, what: str) -> None:
        if self.first:
            self.put(f"made/{what}", "")

    def look(self, what: str) -> bool:
        """Every few seconds, and True then: raise LostRankError where a rank said that it ends, or says nothing."""
        now = time.monotonic()
        if now < self._look_at:
            return False
        self._look_at = now + PULSE_SECONDS
        if self.has(ENDED):
            raise self._explained(what, LostRankError(what))
        for rank, (beat, when) in sorted(self._pulse.heard.items()):
            silent = now - when > (LOST_SECONDS if beat else BIRTH_SECONDS)
            if silent and not self.has(gone_of(rank)):
                self._pulse.lost.add(rank)
                raise LostRankError(
                    f"{what} was waited for, but nothing was heard of rank {rank} for {now - when:.0f} s; the same "
                    "command goes on from what is finished"
                )
        return True

    def put(self, key: str, value: str) -> None:
        with self._talking():
            self._store.set(key, value)

    def has(self, key: str) -> bool:
        with self._talking():
            return bool(self._store.check([key]))

    def get(self, key: str) -> str:
        """What is there: a key that is not is waited for, and an error."""
        with self._talking():
            return str(self._store.get(key).decode())

    def add(self, key: str, amount: int) -> int:
        with self._talking():
            return int(self._store.add(key, amount))

    def end(self, error: BaseException) -> None:
        """Leave word of why this rank ends, and stay until the others, but for those that are lost, have heard it: the
        store may go with this process, and what is left would be that it is gone."""
        self._leave_word(error)
        with suppress(Exception):
            self._store.set(gone_of(self.rank), "")
            until = time.monotonic() + (0 if isinstance(error, StoppedError) else _HEARD_SECONDS)
            for rank in {*range(self.size)} - {self.rank, *self._pulse.lost}:
                while not (self._store.check([gone_of(rank)]) or self._store.check([heard_of(rank)])):
                    if time.monotonic() > until:
                        return
                    time.sleep(_POLL_SECONDS)

    def _leave(self) -> None:
        """At the end of the process. Where the store goes with it, the others leave first."""
        failed = getattr(sys, "last_value", None)
        with suppress(Exception):
            if failed is not None:
                self.end(failed)
            self._store.set(gone_of(self.rank), "")
            until = time.monotonic() + _SEEN_SECONDS
            while self.first and not self._store.check([ENDED]) and time.monotonic() < until:
                if self._store.check([gone_of(rank) for rank in range(1, self.size)]):
                    break
                time.sleep(_POLL_SECONDS)
        self._pulse.stop()

    @contextmanager
    def _talking(self) -> Iterator[None]:
        try:
            yield
        except (dist.DistError, RuntimeError) as error:
            raise self._explained(self._doing, process_group.store_lost(self._doing, error)) from error

    def _leave_word(self, error: BaseException) -> None:
        """Why this rank ends; the first word stays."""
        with suppress(Exception):
            if not self._store.check([ENDED]):
                self._store.set(ENDED, json.dumps([self.rank, one_line(error)]))

    def _explained(self, what: str, error: LostRankError) -> LostRankError:
        """The error with the reason that a rank has left, if one has."""
        word = self._pulse.word
        with suppress(Exception):
            word = word or json.loads(self._store.get(ENDED)) if self._store.check([ENDED]) else word
        if word is None or word[0] == self.rank:
            return error
        return LostRankError(f"{what} was waited for, but rank {word[0]} ended: {word[1]}")


class _Shared:
    """One piece of work of all ranks (see `data.crew.Work`)."""

    def __init__(self, ranks: RankCrew, key: str, name: str, plan: Json) -> None:
        self.plan, self.size = plan, ranks.size
        self._ranks, self._key, self._name = ranks, key, name

    def claim(self, item: str) -> bool:
        self._ranks.look(self._name)
        return self._ranks.add(f"{self._key}/item/{item}", 1) == 1

    def add(self, figures: Mapping[str, int]) -> dict[str, int]:
        return {name: self._ranks.add(f"{self._key}/sum/{name}", amount) for name, amount in figures.items()}

    def finish(self, report: Json) -> list[Json]:
        if not self._ranks.first:
            self._ranks.put(f"{self._key}/through/{self._ranks.rank}", json.dumps(report))
            return []
        others = [f"{self._key}/through/{rank}" for rank in range(1, self.size)]
        for key in others:
            self._ranks.wait(lambda key=key: self._ranks.has(key), self._name)  # type: ignore[misc]
        return [report, *(json.loads(self._ranks.get(key)) for key in others)]

    def wait(self, done: Callable[[], bool], what: str) -> None:
        self._ranks.wait(done, what)
