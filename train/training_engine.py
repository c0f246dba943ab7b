"""Gradients and optimizer steps, on one CPU process or on many GPUs, behind one small protocol.

Both engines keep float32 weights and optimizer state, and leave the same weights behind: a micro-batch's summed loss is
multiplied by `scale`, gradients are added up over micro-batches and ranks, clipped once, and checked before anything
changes.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn

from .families.base import Family, Inputs
from .optimizers import Moments, read_moments, set_rate, write_moments

NO_DEEPSPEED = (
    "draft.engine deepspeed: the package is not installed; pip install 'draftforge[deepspeed]', or set "
    "draft.engine=torch for one process"
)


class NonFiniteGradientError(ArithmeticError):
    """The gradient's norm is infinite or NaN; weights and optimizer are as they were."""


class Engine(Protocol):
    """Engine protocol: gradients and optimizer steps of one rank, as the loop calls them."""

    name: str
    """Name for the log."""

    def accumulate(self, inputs: Inputs, scale: float, last: bool) -> Tensor:
        """Forward and backward of one micro-batch, its loss times `scale`. Returns its sums (see linear_head.py)."""
        ...

    def step(self, rate: float) -> float:
        """One optimizer step; returns the gradient's norm before clipping. Raises NonFiniteGradientError."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """Trainable weights, float32, unsharded, on the CPU. All ranks must call it."""
        ...

    def moments(self) -> Moments:
        """The optimizer's state by parameter name, unsharded. All ranks must call it."""
        ...

    def load_moments(self, moments: Mapping[str, Mapping[str, Tensor]], step: int) -> None:
        """Restore the state after `step` optimizer steps, whatever engine or sharding saved it."""
        ...

    def unsharded(self) -> AbstractContextManager[None]:
        """Context in which the family's parameters are whole on every rank (to score or export). All ranks enter it."""
        ...


class TorchEngine:
    """Engine of plain torch, for one process; its methods are described in `Engine`."""

    name = "torch"

    def __init__(self, family: Family, optimizer: torch.optim.Optimizer, clip_norm: float) -> None:
        self._family, self._optimizer, self._clip_norm = family, optimizer, clip_norm

    def accumulate(self, inputs: Inputs, scale: float, last: bool) -> Tensor:
        loss, sums = self._family(inputs)
        (loss * scale).backward()
        return sums  # type: ignore[no-any-return]

    def step(self, rate: float) -> float:
        norm = clip(self._family, self._clip_norm)
        set_rate(self._optimizer, rate)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return norm

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().float().cpu() for name, p in self._family.trainable().items()}

    def moments(self) -> Moments:
        return read_moments(self._family, self._optimizer)

    def load_moments(self, moments: Mapping[str, Mapping[str, Tensor]], step: int) -> None:
        write_moments(self._family, self._optimizer, moments, step)

    def unsharded(self) -> AbstractContextManager[None]:
        return nullcontext()


def clip(module: nn.Module, clip_norm: float) -> float:
    """Gradient clipping by the global norm, in place, to `clip_norm` (0: never). Returns the norm before clipping.

    Raises NonFiniteGradientError before any gradient is changed.
    """
    gradients = [p.grad for p in module.parameters() if p.grad is not None]

    # One norm over all parameters. `not <` catches NaN too.
    norm_tensor = torch.nn.utils.get_total_norm(gradients)
    norm = float(norm_tensor)
    if not norm < float("inf"):
        raise NonFiniteGradientError(f"gradient norm {norm}")

    # One fused multiplication for all gradients.
    if 0 < clip_norm < norm:
        torch._foreach_mul_(gradients, clip_norm / norm)
    return norm
