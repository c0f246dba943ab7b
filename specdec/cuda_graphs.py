"""How forward passes of many slots are shaped and run: exact sizes on a CPU, fixed ones in CUDA graphs on a GPU.

Where kernels are small and many, launching them costs more than their work. A CUDA graph launches them as one, but
only at the sizes that it was captured with; so there are few sizes, and what is left over in a pass is padding.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

P = ParamSpec("P")
T = TypeVar("T")

_PREFILL_TOKENS = 16384  # of one pass over prompts, padding included
_SHORTEST = 32
_FEWEST = 64  # rows below which a pass does not get faster
_READING = ("_local_scalar_dense", "nonzero", "is_nonzero", "_unique")  # operations whose results shape what follows
_BRINGING = "lift_fresh"  # what makes tensors of Python's numbers


@dataclass(frozen=True)
class Shapes:
    """Sizes of passes over `slots` slots of `capacity` tokens."""

    slots: int
    capacity: int
    fixed: bool
    """Few sizes, for graphs; otherwise each pass is as large as its work."""

    def rows(self, active: int) -> int:
        """Rows of a decoding step, for `active` slots: all slots, or half of them, or a quarter, ..."""
        if not self.fixed:
            return active
        rows = self.slots
        while (rows + 1) // 2 >= max(active, _FEWEST):
            rows = (rows + 1) // 2
        return rows

    def width(self, prompt: int) -> int:
        """Prompts of one width are read in one pass. 0: whatever the longest needs."""
        if not self.fixed:
            return 0
        return min(max(_SHORTEST, 1 << (prompt - 1).bit_length()), self.capacity)

    def prompts(self, width: int) -> int:
        """Prompts of that width in one pass."""
        return min(self.slots, max(1, _PREFILL_TOKENS // width)) if self.fixed else self.slots

    def padding(self, prompts: int) -> int:
        """Rows to add to a pass that reads so many."""
        return min(self.slots, 1 << (prompts - 1).bit_length()) - prompts if self.fixed else 0

    @property
    def ahead(self) -> int:
        """Requests that should wait beside those that fit in, so that passes over prompts are full."""
        return self.slots if self.fixed else 0


class Replays:
    """Runs functions of tensors that do not wait for the device.

    Where they are `graphed` (CUDA only), the second call of each name is captured, and it and later ones replay that;
    what a call returns is overwritten by the next. The first one runs as it is: it compiles kernels and allocates what
    stays. A name stands for one shape of inputs and one value of everything that is no tensor.
    """

    def __init__(self, graphed: bool) -> None:
        self._graphed = graphed
        self._graphs: dict[object, _Graph | None] = {}
        self._pool = torch.cuda.graph_pool_handle() if graphed else None

    def run(self, name: object, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`function(*args)`, of tensors and of tuples that hold some."""
        if not self._graphed:
            return function(*args, **kwargs)
        if name not in self._graphs:
            self._graphs[name] = None
            return function(*args, **kwargs)
        graph = self._graphs[name]
        if graph is None:
            graph = self._graphs[name] = _Graph(lambda *given: function(*given, **kwargs), args, self._pool)
        replayed: T = graph.replay(args)
        return replayed


class _Graph:
    """One recorded call."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], pool: Any) -> None:
        leaves, spec = tree_flatten(args)
        # What another graph returned stays where it is; other inputs are copied into places of our own.
        self._places = [x if not isinstance(x, Tensor) or hasattr(x, _STAYS) else x.clone() for x in leaves]
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._output = function(*tree_unflatten(self._places, spec))
        for value in tree_leaves(self._output):
            if isinstance(value, Tensor):
                setattr(value, _STAYS, True)
        self._args: tuple[Any, ...] = ()

    def replay(self, args: tuple[Any, ...]) -> Any:
        # The same objects as last time are some graph's outputs, and where this one reads them.
        if len(args) != len(self._args) or any(one is not other for one, other in zip(args, self._args)):
            self._fill(args)
        self._graph.replay()
        return self._output

    def _fill(self, args: tuple[Any, ...]) -> None:
        given = tree_leaves(args)
        for place, value in zip(self._places, given, strict=True):
            if isinstance(place, Tensor) and place.data_ptr() != value.data_ptr():
                place.copy_(value)
        if all(hasattr(value, _STAYS) for value in given if isinstance(value, Tensor)):
            self._args = args


_STAYS = "_stays_where_it_is"


def send(values: Tensor, device: torch.device) -> Tensor:
    """Put a CPU tensor on the device without waiting for what the device does."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def read_back(values: Tensor) -> Callable[[], Tensor]:
    """Start to bring a tensor to the host; what is returned waits for it, and for nothing that is asked later."""
    if values.device.type != "cuda":
        return lambda: values
    copy, passed = values.to("cpu", non_blocking=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
    passed.record()

    def wait() -> Tensor:
        passed.synchronize()
        return copy

    return wait


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Around what launches kernels of Triton there: they go to torch's current device, wherever their tensors lie."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def running(device: torch.device) -> Iterator[None]:
    """Around what runs models there."""
    with torch.inference_mode(), current(device):
        yield


class OpCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which operations run under it that a graph cannot hold."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waiting: list[str] = []
        """Those that wait for the device."""
        self.bringing: list[str] = []
        """Those that bring numbers of the host's to it."""
        self._numbers: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name, tensors = str(func), [value for value in (*args, result) if isinstance(value, Tensor)]
        copies = "copy" in name and len({value.device for value in tensors}) > 1
        if copies or any(word in name for word in _READING):
            self.waiting.append(name)
        if _BRINGING in name:
            self._numbers.append(result)
        # A single number is filled in on the device, but not at places that a tensor names.
        placed = "index_put" in name and any(args[2] is number for number in self._numbers)
        if placed or (_BRINGING in name and result.dim() > 0):
            self.bringing.append(name)
        return result
