"""A draft as it is read, and changes of that: its module with other fields, and the target's states that it reads.

Weights are shared with the draft, and copied only where a change is of weights.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..drafts.base import DraftModule
from ..models import CausalModel


@dataclass(frozen=True)
class Reading:
    """A draft, and how it reads the target's states."""

    draft: Any
    """The draft's module, a `DraftModule`."""
    before_norm: bool = False
    """The target's last state is read before its final norm, not after it."""
    shift: int = 0
    """Tokens by which the state that is read lies behind the one that serving gives: -1 reads the token before."""
    tampered: bool = False
    """The forward pass was changed in a way that no config says."""


class Change(NamedTuple):
    """A changed reading, in words: what was changed from what."""

    what: str
    reading: Reading


class Scene(NamedTuple):
    """The target, and facts of the draft's files that its module does not hold."""

    target: CausalModel
    vocabulary_marks: Tensor | None = None
    """t2d of the file [V], where it has one."""
    own_ids: Tensor | None = None
    """Target id of each id of the draft's own tokenizer [V], -1 for none; None: it has the target's tokenizer."""
    special_ids: tuple[int, ...] = ()
    """Ids that may be a mask: special and added tokens."""


Changes = Callable[[Reading, Scene], Iterator[Change]]


def shared_copy(draft: DraftModule) -> Any:
    """Copy of a draft whose tensors are the draft's own: fields and modules may be changed, tensors replaced."""
    memo = {id(tensor): tensor for tensor in (*draft.parameters(), *draft.buffers())}
    return copy.deepcopy(draft, memo)


def configured(reading: Reading, **fields: Any) -> Any:
    """Copy of a reading's draft with other fields of its config."""
    draft = shared_copy(reading.draft)
    draft.config = draft.config.model_copy(update=fields)
    return draft


def put(module: Any, name: str, weight: Tensor) -> None:
    """Put a weight in the place of a module's."""
    setattr(module, name, nn.Parameter(weight.to(getattr(module, name).dtype), requires_grad=False))
