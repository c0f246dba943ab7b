"""The ranks of this launch: who they are, how they divide work, and where they meet.

torchrun, DeepSpeed's launcher or any other one that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT starts them. All
ranks call the same functions; only the first one writes files that exist once. They talk in three ways:

- the tensors of a training go through the default process group (NCCL on GPUs, gloo on CPUs), whose collectives take
  seconds: one that lasts longer than `COLLECTIVE_LIMIT` means that a rank hangs;
- `barrier`, `gather` and `broadcast` go through a gloo group on the CPU, and wait for hours where a rank has to work;
- a rank that fails leaves its reason in the launch's key-value store (torchrun's, or one that the first rank hosts).
  Its gloo connections close then, which wakes whoever waits for it: it finds the reason there, and ends with it;
- a rank whose machine loses power closes no connection, and NCCL notices no rank that is gone: each rank counts up in
  the store, and the others end where its count, or the store, stands still for `SILENCE_LIMIT`.
"""

import atexit
import itertools
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import InputError, LostRankError, MissingFileError, StaleInputError, one_line
from .progress import say

T = TypeVar("T")

START_LIMIT = timedelta(minutes=10)  # importing from a cold disk takes its time
COLLECTIVE_LIMIT = timedelta(minutes=10)
WAIT_LIMIT = timedelta(hours=24)  # the first rank may build a mix, and any rank answer its share, for hours
SILENCE_LIMIT = timedelta(seconds=45)  # a process that works gives signs of life, whatever it is at
FILE_LIMIT = timedelta(seconds=60)  # until a file of another machine is seen
_PATIENCE = timedelta(seconds=15)  # until it is said who is waited for
_HEARD_LIMIT = timedelta(seconds=8)  # for the others to read why the rank that hosts the store ends
_POLL_SECONDS = 0.1
_MOST_RANKS = 1_000_000
_BEAT_SECONDS = 5.0  # from one sign of life to the next
_FAILURE = "failure"  # key of the first rank that failed, and of why
_HOST = "the host of the ranks' store"
_LEFT = "left"  # in place of a count: the rank has ended in order
# Words of the errors that a collective raises when a rank is gone, in lower case.
_LOST = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "timed out", "socket", "tcpstore")


def free_port() -> int:
    """A port of this machine that nothing listens on, for a launch or a server that is started next."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


@dataclass
class Ranks:
    """This process among the ranks of a launch. One process alone waits for nobody."""

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    """Gloo group on the CPU, for `barrier`, `gather` and `broadcast`; None: one process alone."""
    store: dist.Store | None = None
    """Key-value store of the launch, which holds the reason of the first rank that failed."""
    signs: "_SignsOfLife | None" = None
    """Watches for ranks that have stopped; None: one process alone."""

    @property
    def first(self) -> bool:
        """Whether this rank writes files and talks to people."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """All-reduce: the sum over all ranks, in place, through the default process group of the training."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather_bytes(self, tensor: Tensor) -> list[Tensor]:
        """All-gather of bytes: every rank's uint8 tensor (all of one size), in rank order, on the CPU."""
        if self.world_size == 1:
            return [tensor.cpu()]
        return self._all_gather(tensor.cpu())

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(parts, tensor, group=self.group)
        return parts

    def barrier(self, name: str) -> None:
        """Wait until all ranks have called `barrier(name)`. Raises as `gather` does."""
        self.gather(name, None)

    def broadcast(self, name: str, value: Any = None) -> Any:
        """Broadcast: the first rank's JSON value, on every rank; what other ranks pass is ignored."""
        return self.gather(name, value if self.first else None)[0]

    def gather(self, name: str, value: Any) -> list[Any]:
        """All-gather of JSON: every rank's value, in rank order, once all of them have called this with `name`.

        Raises LostRankError, with its reason where it left one, for a rank that failed, is gone or hangs;
        StaleInputError where a rank has come to something else.
        """
        if self.world_size == 1:
            return [value]
        try:
            # 1) Wait; a barrier that fails names the rank.
            dist.monitored_barrier(self.group, timeout=WAIT_LIMIT)
            # 2) Exchange texts, padded to the longest one.
            text = json.dumps([name, value]).encode()
            longest = max(int(size) for size in self._all_gather(torch.tensor([len(text)])))
            padded = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8)
            found = [json.loads(bytes(part.tolist())) for part in self._all_gather(padded)]
        except RuntimeError as error:
            raise self.lost(name, error) from error
        # 3) The name travels with the value: ranks that have come apart would exchange unrelated values otherwise.
        for rank, (other, _) in enumerate(found):
            if other != found[0][0]:
                raise StaleInputError(
                    f"{other} is what rank {rank} comes to, but {found[0][0]} is what the first rank does: they have "
                    "another recipe, target or mix"
                )
        return [theirs for _, theirs in found]

    def check_same_config(self, settings: Mapping[str, Any]) -> None:
        """Raise InputError, on every rank, where one has other JSON values than the first one."""
        # All ranks see all settings, and so all of them stop with the same error.
        first, *others = self.gather("the start of every rank", settings)
        for rank, theirs in enumerate(others, start=1):
            for field in sorted(first.keys() | theirs.keys()):
                if first.get(field) != theirs.get(field):
                    raise InputError(
                        f"{field} = {theirs.get(field)} on rank {rank}: the first rank has {first.get(field)}; all "
                        "ranks of a launch need the same recipe and options"
                    )

    def share(self, items: Sequence[T], sizes: Sequence[float] | None = None) -> list[T]:
        """This rank's part of items that all ranks list alike, in their order.

        Neighbours stay together. With `sizes`, the parts have about equal total sizes: the largest item goes first, to
        the rank with the smallest load (longest processing time first).
        """
        # Without sizes: contiguous parts, whose lengths differ by one at most.
        if sizes is None:
            return list(
                items[len(items) * self.rank // self.world_size : len(items) * (self.rank + 1) // self.world_size]
            )
        # With sizes: every rank computes the same greedy assignment, and keeps its own part of it.
        loads, mine = [0.0] * self.world_size, set[int]()
        for number in sorted(range(len(items)), key=lambda number: -sizes[number]):
            rank = loads.index(min(loads))
            loads[rank] += sizes[number]
            if rank == self.rank:
                mine.add(number)
        return [item for number, item in enumerate(items) if number in mine]

    def wait_for_file(self, seen: Callable[[], bool], what: str) -> None:
        """Wait until this rank sees what another one wrote: on another machine that may take a moment.

        Raises MissingFileError where it does not.
        """
        since = time.monotonic()
        while not seen() and self.world_size > 1:
            if time.monotonic() - since > FILE_LIMIT.total_seconds():
                raise MissingFileError(
                    f"{what}: another rank has made it, but rank {self.rank} does not find it; workdir must lie on a "
                    "file system that all ranks share"
                )
            time.sleep(_POLL_SECONDS)

    def lost(self, what: str, error: Exception) -> LostRankError:
        """LostRankError of waiting in vain for other ranks to come to `what`: says who is gone and, if known, why."""
        # 1) The reason that the failed rank left in the store.
        with suppress(RuntimeError):  # the store may be gone too
            if self.store is not None and (failed := _failure(self.store, what)) is not None:
                return failed
        # 2) No reason: name the rank from the error, or find one whose connection is closed.
        named = re.search(r"Rank (\d+) failed to pass", str(error))
        if named:
            who = f"rank {named[1]}"
        elif "from rank 0" in str(error):
            who = "rank 0"
        else:
            who = next((f"rank {rank}" for rank in range(self.world_size) if self._is_gone(rank)), "another rank")
        return LostRankError(
            f"{what} was waited for, but {who} is gone or hangs; the same command goes on from what is finished"
        )

    def _is_gone(self, rank: int) -> bool:
        """Whether the connection to a rank is closed: nothing can be sent there then."""
        if rank == self.rank or self.group is None:
            return False
        try:
            dist.isend(torch.zeros(1), rank, group=self.group)
        except RuntimeError:
            return True
        return False


ALONE = Ranks(0, 1, torch.device("cpu"))


@cache
def ranks() -> Ranks:
    """This process among the ranks of its launch; the first call meets the others, and makes this rank's GPU current.

    The groups live as long as the process: DeepSpeed remembers the first one that it saw.
    """
    # 1) Who this process is, and which device it owns.
    world = world_size()
    rank, local = _launched("RANK", 0, 0, world - 1), _launched("LOCAL_RANK", 0, 0, _MOST_RANKS)
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed asks for it even where nothing was launched
    device = torch.device(f"cuda:{local}") if torch.cuda.is_available() else torch.device("cpu")
    if world == 1:
        return Ranks(rank, 1, device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # before anything is placed on `cuda`
    # 2) Meet the other ranks, and notice from then on if one stops: over another connection, as this thread may wait.
    store = _meet(rank, world)
    signs = _SignsOfLife(rank, world, _open_store(hosts=False))
    signs.start()
    # 3) Open both groups: short collectives of training, and long waits on the CPU.
    try:
        dist.init_process_group(_backend(), store=store, rank=rank, world_size=world, timeout=COLLECTIVE_LIMIT)
        group = dist.new_group(backend="gloo", timeout=WAIT_LIMIT)
    except RuntimeError as error:
        raise LostRankError(
            f"the ranks cannot connect to each other ({one_line(error, 160)}); where a machine's name leads to its own "
            "loopback, set GLOO_SOCKET_IFNAME"
        ) from error
    atexit.register(_leave)
    return Ranks(rank, world, device, group, store, signs)


class _SignsOfLife:
    """Counts up in the store, and ends this process where another rank's count, or the store itself, stands still.

    A wait inside a collective cannot be interrupted, so the process ends from here: all files are written atomically.
    """

    def __init__(self, rank: int, world: int, store: dist.Store) -> None:
        self._rank, self._store = rank, store
        self._heard = {f"rank {other}": time.monotonic() for other in range(world) if other != rank}
        self._heard[_HOST] = time.monotonic()
        self._reason: LostRankError | None = None
        self.silenced = False
        """Whether the error that ends this process has been said already."""

    def start(self) -> None:
        """Beat and watch, in threads of their own: a store whose host has stopped answers nothing."""
        for part in (self._beat, self._watch):
            threading.Thread(target=part, name="signs of life", daemon=True).start()

    def _beat(self) -> None:
        """Count up, and read the others' counts and why one failed, until the store is closed."""
        counts: dict[str, bytes] = {}
        with suppress(RuntimeError):
            for beats in itertools.count():
                self._store.set(f"alive/{self._rank}", str(beats))
                for who in self._heard.keys() - {_HOST}:
                    key = f"alive/{who.removeprefix('rank ')}"
                    count = self._store.get(key) if self._store.check([key]) else b""
                    if count != counts.get(who, b"") or count == _LEFT.encode():
                        counts[who], self._heard[who] = count, time.monotonic()
                self._reason = self._reason or _failure(self._store, "its next sign of life")
                self._heard[_HOST] = time.monotonic()
                time.sleep(_BEAT_SECONDS)

    def _watch(self) -> None:
        limit = SILENCE_LIMIT.total_seconds()
        while True:
            # The host first: without it nobody is heard.
            for who in (_HOST, *self._heard):
                if time.monotonic() - self._heard[who] > limit + _BEAT_SECONDS * (who != _HOST):
                    self._end(who)
            time.sleep(_BEAT_SECONDS)

    def _end(self, who: str) -> None:
        """End this process as one that waits in vain for a lost rank does."""
        error = self._reason or LostRankError(
            f"{who} has given no sign of life for {SILENCE_LIMIT.total_seconds():.0f} s: it has stopped, or its "
            "machine is gone; the same command goes on from what is finished"
        )
        if not self.silenced:
            whose = f"error (rank {self._rank})" if self._rank else "error"
            print(f"{whose}: {error}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)


def _failure(store: dist.Store, what: str) -> LostRankError | None:
    """Why the first rank that failed did, as the error of waiting for it to come to `what`; None: no rank has."""
    if not store.check([_FAILURE]):
        return None
    rank, reason = json.loads(store.get(_FAILURE))
    return LostRankError(f"{what} was waited for, but rank {rank} ended: {reason}")


def ranks_met() -> Ranks:
    """This process among the ranks that it has met; alone before it has."""
    return ranks() if ranks.cache_info().currsize else ALONE


def world_size() -> int:
    """Number of ranks in this launch, from WORLD_SIZE; 1 where nothing launched this process."""
    return _launched("WORLD_SIZE", 1, 1, _MOST_RANKS)


def _launched(name: str, otherwise: int, least: int, most: int) -> int:
    """Number that a launcher left in an environment variable. Raises InputError for what is none from least to most."""
    text = os.environ.get(name, str(otherwise))
    found = int(text) if re.fullmatch("[0-9]{1,9}", text) else -1
    if not least <= found <= most:
        raise InputError(f"{name} {text!r}: must be a whole number from {least} to {most}; launch with torchrun")
    return found


def _backend() -> str:
    return "nccl" if torch.cuda.is_available() else "gloo"


def _meet(rank: int, world: int) -> dist.Store:
    """The key-value store of this launch, once all ranks have come to it."""
    store = _open_store(hosts=rank == 0 and not _from_torchrun())
    # Every rank sets a key, and polls for the keys of all: a blocking wait could not say who is absent.
    begun, said, limit = time.monotonic(), False, f"{START_LIMIT.total_seconds():.0f} s"
    try:
        store.set(f"started/{rank}", "")
        while absent := [str(other) for other in range(world) if not store.check([f"started/{other}"])]:
            waited = timedelta(seconds=time.monotonic() - begun)
            if waited > START_LIMIT:
                raise LostRankError(f"rank {', '.join(absent)} did not start within {limit}")
            if waited > _PATIENCE and not said:
                said = True
                say(f"waiting for rank {', '.join(absent)} to start, for {limit} at most")
            time.sleep(_POLL_SECONDS)
    except RuntimeError as error:
        raise LostRankError(
            f"the other ranks were waited for, but the first rank is gone ({one_line(error)})"
        ) from error
    return store


def _open_store(hosts: bool) -> dist.Store:
    """Connection to the launch's TCP store: torchrun's own, else one that the first rank hosts (`hosts`: this one).

    A torchrun that starts its ranks again does not find the keys of the attempt before.
    Raises InputError where address or port are not set or cannot be listened on, LostRankError where the host does not
    come up within `START_LIMIT`.
    """
    # 1) Where the store is.
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise InputError(f"WORLD_SIZE {world_size()}: {' and '.join(missing)} must be set too; launch with torchrun")
    address, port = os.environ["MASTER_ADDR"], _launched("MASTER_PORT", 0, 1, 65535)
    attempt = f"draftforge/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    # 2) Connect, again and again: the host may start minutes after this rank.
    until, said = time.monotonic() + START_LIMIT.total_seconds(), False
    while True:
        try:
            store = dist.TCPStore(
                address, port, is_master=hosts, wait_for_workers=False, timeout=_PATIENCE, multi_tenant=True
            )
            return dist.PrefixStore(attempt, store)
        except dist.DistError as error:
            if hosts:
                why = one_line(error, 160)
                raise InputError(f"MASTER_PORT {port}: the first rank cannot listen there ({why})") from error
            host = f"{'torchrun' if _from_torchrun() else 'the first rank'} at {address}:{port}"
            limit = f"{START_LIMIT.total_seconds():.0f} s"
            if time.monotonic() > until:
                raise LostRankError(f"{host} was not there within {limit}") from error
            if not said:
                said = True
                say(f"waiting for {host} to start, for {limit} at most", every_rank=True)


def _from_torchrun() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


@contextmanager
def training_ranks(needs_group: bool) -> Iterator[Ranks]:
    """Ranks of a training run. A collective that fails in the body, as another rank is gone or hangs, becomes a
    LostRankError.

    `needs_group`: make a process group where there is one process too, as DeepSpeed wants it.
    """
    found = ranks()
    # A group of one process needs no address to meet at: a store in memory does.
    if needs_group and not dist.is_initialized():
        dist.init_process_group(_backend(), store=dist.HashStore(), rank=0, world_size=1)
        atexit.register(_leave)
    try:
        yield found
    except RuntimeError as error:
        if found.world_size > 1 and _is_loss(error):
            raise found.lost("a step of the training", error) from error
        raise


def _is_loss(error: RuntimeError) -> bool:
    """Whether an error is that of a failed collective. Gloo's errors have no type of their own, only words."""
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and any(word in str(error).lower() for word in _LOST)


def report_failure(error: BaseException) -> None:
    """Leave the reason why this rank ends in the store, and wake the ranks that wait for it.

    The reason of the first rank to fail is kept: later failures follow from it.
    """
    # Without other ranks, or before they have met, nobody waits.
    mine = ranks_met()
    if mine.store is None or mine.signs is None:
        return
    mine.signs.silenced = True
    # 1) The reason first, then the closed connection: who wakes up finds the reason there.
    others = [f"ended/{rank}" for rank in range(mine.world_size) if rank != mine.rank]
    with suppress(RuntimeError):  # the store may be gone
        if not mine.store.check([_FAILURE]):
            mine.store.set(_FAILURE, json.dumps([mine.rank, one_line(error)]))
        mine.store.set(f"ended/{mine.rank}", "")
    # 2) End at once, without the orderly exit.
    atexit.unregister(_leave)  # others may be inside a collective: leaving in order would wait for them
    if mine.first and not _from_torchrun():  # the store goes with this process: let the others read it first
        _close(mine, error)
        with suppress(RuntimeError):
            mine.store.wait(others, _HEARD_LIMIT)


def _close(mine: Ranks, error: BaseException | None) -> None:
    """Close the gloo connections, which wakes the ranks that wait at their other ends.

    Gloo closes them with the last reference; those of the error's frames are among them.
    """
    # 1) Drop the references that the frames of the error and of its causes hold.
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    # 2) Drop ours, and those of torch.
    group, mine.group = mine.group, None
    if dist.is_initialized():
        dist.destroy_process_group(group if dist.get_backend() == "nccl" else None)  # NCCL waits for what is under way


def _leave() -> None:
    """Say that this rank ends in order, and take the process groups down, if there are any."""
    mine = ranks_met()
    if mine.store is not None:
        with suppress(RuntimeError):  # the store may have gone with its host
            mine.store.set(f"alive/{mine.rank}", _LEFT)
    if dist.is_initialized():
        dist.destroy_process_group()
