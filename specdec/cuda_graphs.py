"""CUDA graphs and the sizes of passes over many slots: exact sizes on a CPU, few fixed ones in graphs on a GPU.

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
    """Whether passes have few sizes, for graphs; else each pass is as large as its work."""

    def rows(self, active: int) -> int:
        """Rows of a decoding step, for `active` slots: all slots, or half of them, or a quarter, ..."""
        if not self.fixed:
            return active
        # Halve while the active slots fit and a smaller pass is still faster.
        rows = self.slots
        while (rows + 1) // 2 >= max(active, _FEWEST):
            rows = (rows + 1) // 2
        return rows

    def width(self, prompt: int) -> int:
        """Width in tokens to which a prompt is padded: a power of two. 0: as wide as the longest of its pass."""
        if not self.fixed:
            return 0
        return min(max(_SHORTEST, 1 << (prompt - 1).bit_length()), self.capacity)

    def prompts(self, width: int) -> int:
        """Most prompts of that width in one pass."""
        return min(self.slots, max(1, _PREFILL_TOKENS // width)) if self.fixed else self.slots

    def padding(self, prompts: int) -> int:
        """Padding rows to add to a pass that reads so many prompts, up to a power of two or all slots."""
        return min(self.slots, 1 << (prompts - 1).bit_length()) - prompts if self.fixed else 0

    @property
    def ahead(self) -> int:
        """Number of requests that should wait beside those in slots, so that passes over prompts are full."""
        return self.slots if self.fixed else 0


class Replays:
    """Replays of captured CUDA graphs, by name, for functions of tensors that do not wait for the device.

    Without `graphed` (CUDA only) every call runs as it is. With it the first call of a name runs as it is: it compiles
    kernels and allocates what stays. The second call is captured as a graph, and it and all later ones replay the
    graph; what a call returns is overwritten by the next. A name stands for one shape of inputs and one value of
    everything that is no tensor.
    """

    def __init__(self, graphed: bool) -> None:
        self._graphed = graphed
        self._graphs: dict[object, _Graph | None] = {}
        self._pool = torch.cuda.graph_pool_handle() if graphed else None

    def run(self, name: object, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function(*args)`, or replay its graph; arguments are tensors, or tuples that hold some."""
        if not self._graphed:
            return function(*args, **kwargs)
        # First call: warm up, and note that the name is known.
        if name not in self._graphs:
            self._graphs[name] = None
            return function(*args, **kwargs)
        # Second call: capture. Every call from here on replays.
        graph = self._graphs[name]
        if graph is None:
            graph = self._graphs[name] = _Graph(lambda *given: function(*given, **kwargs), args, self._pool)
        replayed: T = graph.replay(args)
        return replayed


class _Graph:
    """CUDA graph of one recorded call, with the places that its inputs are copied to."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], pool: Any) -> None:
        leaves, spec = tree_flatten(args)
        # What another graph returned stays where it is; other inputs are copied into places of our own.
        self._places = [x if not isinstance(x, Tensor) or hasattr(x, _STAYS) else x.clone() for x in leaves]
        # Graphs share one memory pool, as they run one after another.
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._output = function(*tree_unflatten(self._places, spec))
        # Outputs keep their addresses, so that a later graph can read them where they are.
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
        # Copy what stands elsewhere; other inputs are at their place already.
        copied = False
        for place, value in zip(self._places, given, strict=True):
            if isinstance(place, Tensor) and place.data_ptr() != value.data_ptr():
                place.copy_(value)
                copied = True
        # Outputs of graphs that this one reads where they are need no look next time.
        if not copied and all(hasattr(value, _STAYS) for value in given if isinstance(value, Tensor)):
            self._args = args


_STAYS = "_stays_where_it_is"


def send(values: Tensor, device: torch.device) -> Tensor:
    """Send a CPU tensor to the device without waiting for the device's work: from pinned memory on CUDA."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def read_back(values: Tensor) -> Callable[[], Tensor]:
    """Start a copy of a tensor to the host. Returns a function that waits for it, but for no later work."""
    if values.device.type != "cuda":
        return lambda: values
    copy, passed = values.to("cpu", non_blocking=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
    passed.record()

    def wait() -> Tensor:
        passed.synchronize()
        return copy

    return wait


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Context in which the device is torch's current one: Triton launches there, wherever its tensors lie."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def running(device: torch.device) -> Iterator[None]:
    """Context in which models run on the device: inference mode, and the device is torch's current one."""
    with torch.inference_mode(), current(device):
        yield


class OpCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that notes the operations under it that a CUDA graph cannot hold."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waiting: list[str] = []
        """Names of operations that wait for the device."""
        self.bringing: list[str] = []
        """Names of operations that bring numbers of the host to the device."""
        self._numbers: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name, tensors = str(func), [value for value in (*args, result) if isinstance(value, Tensor)]
        # Copies between devices, and operations whose output's size depends on values, wait.
        copies = "copy" in name and len({value.device for value in tensors}) > 1
        if copies or any(word in name for word in _READING):
            self.waiting.append(name)
        # Remember numbers of Python's, to recognise them where they are written.
        if _BRINGING in name:
            self._numbers.append(result)
        # A single number is filled in on the device, but not at places that a tensor names.
        placed = "index_put" in name and any(args[2] is number for number in self._numbers)
        if placed or (_BRINGING in name and result.dim() > 0):
            self.bringing.append(name)
        return result
