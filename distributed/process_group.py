"""This process's place among the ranks that torchrun or accelerate started.

All ranks do each step together, so a collective that lasts longer than `COLLECTIVE_LIMIT` means that one of them is
gone or hangs, and ends the process. What only the first rank does (a mix, measuring times, saving) may take hours: the
others poll for it, and give up when the key-value store on its machine dies, as torchrun's does with the rank. Work
that ranks share without collectives: `crew.py`.
"""

import atexit
import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import InputError, LostRankError, one_line
from ..progress import say

COLLECTIVE_LIMIT = timedelta(minutes=10)
PATIENCE_SECONDS = 15.0  # until it is said who is waited for
_CONNECT_LIMIT = timedelta(seconds=30)
_POLL_SECONDS, _POLLS_A_CHECK = 0.2, 25
_LOST = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "timed out", "socket", "tcpstore")
_turns = itertools.count()  # of `after_first`, which all ranks call equally often


@dataclass(frozen=True)
class Ranks:
    """Who we are, and the few collectives that training needs. With one rank they do nothing."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this rank writes files and talks to people."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def after_first(self) -> None:
        """Wait until the first rank has come here too, however long it takes."""
        if self.world_size == 1:
            return
        store, turn = dist.distributed_c10d._get_default_store(), f"draftforge/{next(_turns)}"
        if self.first:
            store.set(turn, "")
        wait_until(lambda: bool(store.check([turn])), "the first rank")

    def gather_bytes(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's uint8 tensor (all of one size), on the CPU."""
        if self.world_size == 1:
            return [tensor.cpu()]
        mine = tensor.to(self.device)
        parts = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(parts, mine)
        return [part.cpu() for part in parts]


def wait_until(done: Callable[[], bool], what: str) -> None:
    """Poll until the first rank has done its part, however long that takes.

    Raises LostRankError when torchrun on the first rank's machine is gone. On a machine of its own it ends its ranks.
    """
    store = None
    for poll in itertools.count():
        if done():
            return
        time.sleep(_POLL_SECONDS)
        if not _agent_hosts() or poll % _POLLS_A_CHECK:
            continue
        try:
            store = store or connect()
            store.check([what])
        except (dist.DistError, RuntimeError, LostRankError) as error:
            raise store_lost(what, error) from error


def connect(hosts: bool = False) -> dist.Store:
    """The key-value store on the first rank's machine: torchrun's, else the one of the process that `hosts` it.

    A process group that is made later finds the same one.
    """
    absent = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if absent:
        raise InputError(f"WORLD_SIZE {world_size()}: {' and '.join(absent)} must be set too; launch with torchrun")
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosted = hosts and not _agent_hosts()
    limit = _CONNECT_LIMIT if _agent_hosts() else COLLECTIVE_LIMIT  # the first rank may still be importing
    if not hosted:
        _reach(address, port, limit.total_seconds())
    try:
        return dist.TCPStore(address, port, is_master=hosted, wait_for_workers=False, timeout=limit, multi_tenant=True)
    except dist.DistError as error:
        if not hosted:
            raise
        said = one_line(error, 160)
        raise InputError(f"MASTER_PORT {port}: the first rank cannot listen there ({said})") from error


def _reach(address: str, port: int, limit_seconds: float) -> None:
    """Wait until something listens there, and after a while say so: the store's own client would wait in silence."""
    host, begun, said = f"{_host()} at {address}:{port}", time.monotonic(), False
    while True:
        try:
            with socket.create_connection((address, port), timeout=min(limit_seconds, PATIENCE_SECONDS)):
                return
        except OSError as error:
            waited = time.monotonic() - begun
            if waited > limit_seconds:
                raise LostRankError(f"{host} was not there within {limit_seconds:.0f} s ({one_line(error)})") from error
            if waited > PATIENCE_SECONDS and not said:
                said = True
                say(f"waiting for {host} to start, for {limit_seconds:.0f} s at most", every_rank=True)
        time.sleep(_POLL_SECONDS)


def store_lost(what: str, error: Exception) -> LostRankError:
    """The error of a store that does not answer. `what` was waited for."""
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    return LostRankError(f"{what} was waited for, but {_host()} at {address} is gone ({one_line(error, 160)})")


def _host() -> str:
    return "torchrun" if _agent_hosts() else "the first rank"


def _agent_hosts() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def world_size() -> int:
    """Ranks that were launched."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def join(need_group: bool) -> Iterator[Ranks]:
    """This process's ranks. A process group is made where one is needed and none exists.

    It lives as long as the process: DeepSpeed remembers the first group it saw, so a second training needs the same.
    Raises LostRankError where a collective fails because another rank is gone.
    """
    world, rank = world_size(), int(os.environ.get("RANK", "0"))
    local = int(os.environ.setdefault("LOCAL_RANK", "0"))  # DeepSpeed asks for it even where nothing was launched
    cuda = torch.cuda.is_available()
    device = torch.device(f"cuda:{local}") if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if need_group and not dist.is_initialized():
        backend = "nccl" if cuda else "gloo"
        if world > 1:
            dist.init_process_group(backend, timeout=COLLECTIVE_LIMIT, device_id=device if cuda else None)
        else:
            store = dist.HashStore()
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        atexit.register(leave)
    try:
        yield Ranks(rank, world, device)
    except BaseException as error:
        atexit.unregister(leave)  # others may be inside a collective: leaving in order would wait for them
        if world > 1 and _is_loss(error):
            raise LostRankError(
                f"another rank is gone or hangs ({one_line(error, 160)}); "
                "the same command goes on from the last checkpoint"
            ) from error
        raise


def _is_loss(error: BaseException) -> bool:
    """Whether a collective failed. Gloo's errors have no type of their own."""
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and any(word in str(error).lower() for word in _LOST)


def leave() -> None:
    """Take the process group down, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
