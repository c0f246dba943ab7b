"""What the loss is given: draft states, their heads and their teacher.

Shapes: S rows of states a position (steps ahead, mostly), N supervised positions, C positions of a chunk, H hidden
size, V draft vocabulary, J entries, K steps ahead, M chains.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .closed_form import Whole
from .objectives import Entries
from .phases import Objective


class Sparse(NamedTuple):
    """The target's distribution at C positions, by some of its entries."""

    entries: Entries
    ids_CJ: Tensor
    """Token ids of the entries."""


class Teacher(Protocol):
    """The target's distribution at N supervised positions."""

    @property
    def live(self) -> bool:
        """Whether `at` gives the whole of it."""
        ...

    def at(self, rows: slice, temperatures: Sequence[float]) -> Whole | Sparse:
        """Some positions' distribution. Stored signals know that of temperature 1 only."""
        ...


class Head(NamedTuple):
    """A linear head, given as tensors so that its gradient can be made by hand."""

    weight_VH: Tensor
    bias_V: Tensor | None = None
    finish: Callable[[Tensor], Tensor] | None = None
    """What the model does to its logits after the matrix product (scale, soft-cap)."""

    def logits(self, states: Tensor) -> Tensor:
        """The plain way: [..., H] -> [..., V]."""
        logits = torch.nn.functional.linear(states, self.weight_VH, self.bias_V)
        return logits if self.finish is None else self.finish(logits)

    def only(self, ids: Tensor) -> "Head":
        """The same head with these rows."""
        return Head(self.weight_VH[ids], None if self.bias_V is None else self.bias_V[ids], self.finish)


@dataclass(frozen=True)
class Rows:
    """What one micro-batch trains: draft states against teacher positions."""

    states_SNH: Tensor
    """Row (s, n) drafts the token whose teacher is position n."""
    valid_SN: Tensor | None
    """False: there is no such draft (too near the start); None: all are valid."""
    teacher: Teacher
    step_weights: tuple[float, ...] = (1.0,)
    """[K] weight of the loss of a row that is k steps ahead."""
    step_SN: Tensor | None = None
    """How many steps ahead, from 0, a row is; None: row (s, n) is s steps ahead."""
    chains_KM: Tensor | None = None
    """Rows, s * N + n, that follow each other from one start (see chains.py); None: those of the steps."""
    chain_weight: float = 1.0
    """Of each chain, where there are fewer of them than positions."""
    beside: Tensor | None = None
    """A loss of another kind, summed over the supervised positions; what it counts for is the family's to say."""

    def steps(self) -> Tensor:
        """[S, N] steps ahead."""
        if self.step_SN is not None:
            return self.step_SN
        steps, positions, _ = self.states_SNH.shape
        return torch.arange(steps, device=self.states_SNH.device)[:, None].expand(-1, positions)

    def valid(self) -> Tensor:
        """[S, N] bool."""
        if self.valid_SN is not None:
            return self.valid_SN
        return torch.ones(self.states_SNH.shape[:2], dtype=torch.bool, device=self.states_SNH.device)


@dataclass(frozen=True)
class LossSettings:
    """What `head_loss` computes, and how."""

    objective: Objective
    """Of the current step."""
    lk_eta: float = 3.0
    dtype: torch.dtype = torch.float32
    """Of the matrix products."""
    logits_bytes: int = 1 << 28
