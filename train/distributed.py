"""This process's place among the ranks that torchrun or accelerate started."""

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


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

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.barrier()

    def gather_bytes(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's uint8 tensor (all of one size), on the CPU."""
        if self.world_size == 1:
            return [tensor.cpu()]
        mine = tensor.to(self.device)
        parts = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(parts, mine)
        return [part.cpu() for part in parts]


def world_size() -> int:
    """Ranks that were launched."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def join(need_group: bool) -> Iterator[Ranks]:
    """This process's ranks. A process group is made where one is needed and none exists.

    It lives as long as the process: DeepSpeed remembers the first group it saw, so a second training needs the same.
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
            dist.init_process_group(backend, device_id=device if cuda else None)
        else:
            store = dist.HashStore()
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        atexit.register(leave)
    yield Ranks(rank, world, device)


def leave() -> None:
    """Take the process group down, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
