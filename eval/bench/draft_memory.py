"""Draft memory: bytes of weights and state that a proposer adds to the target, by walking its objects."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from ...specdec.models import CausalModel
from ...specdec.proposers.base import Proposer

_OWN = __name__.partition(".")[0]


def draft_bytes(proposer: Proposer | None, target: CausalModel) -> tuple[int, int]:
    """Bytes of the weights that drafting adds, and bytes of its caches and other tensors.

    All tensors that can be reached from the proposer count, each once; tensors of the target do not count.
    """
    # Tensors are told apart by their address: weights shared with the target and views of one buffer count once.
    seen = {_place(tensor) for tensor in _tensors_of(target.model)}
    weights, state = dict[tuple[str, int], int](), dict[tuple[str, int], int]()
    for tensor, is_weight in _reachable(proposer, target, set()):
        if _place(tensor) not in seen:
            found = weights if is_weight else state
            found[_place(tensor)] = max(tensor.nbytes, found.get(_place(tensor), 0))
    return sum(weights.values()), sum(size for at, size in state.items() if at not in weights)


def _reachable(value: Any, target: CausalModel, visited: set[int]) -> Iterator[tuple[Tensor, bool]]:
    """Tensors that can be reached from a value, each with whether it is a weight."""
    # 1) Leaves: tensors, what was visited before, and modules, whose tensors are all weights.
    if isinstance(value, Tensor):
        yield value, False
        return
    if value is target or id(value) in visited:
        return
    visited.add(id(value))
    if isinstance(value, nn.Module):
        for tensor in _tensors_of(value):
            yield tensor, True
        return
    # 2) Containers (not of plain numbers or strings), and fields of our own objects; others are not entered.
    inner: Iterable[Any] = ()
    if isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list | tuple | set):
        inner = () if value and isinstance(next(iter(value)), int | str) else value
    elif type(value).__module__.startswith(_OWN):
        inner = [getattr(value, name, None) for name in _fields(value)]
    for one in inner:
        yield from _reachable(one, target, visited)


def _fields(value: Any) -> list[str]:
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*getattr(value, "__dict__", {}), *slots]


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _place(tensor: Tensor) -> tuple[str, int]:
    return str(tensor.device), tensor.data_ptr()
