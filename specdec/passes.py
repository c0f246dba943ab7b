"""How forward passes of many slots are shaped and run: exact sizes on a CPU, fixed ones in CUDA graphs on a GPU.

Where kernels are small and many, launching them costs more than their work. A CUDA graph launches them as one, but
only at the sizes that it was captured with; so there are few sizes, and what is left over in a pass is padding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_PREFILL_TOKENS = 16384  # of one pass over prompts, padding included
_SHORTEST = 32
_FEWEST = 64  # rows below which a pass does not get faster
_READING = ("_local_scalar_dense", "nonzero", "is_nonzero", "_unique")  # operations whose results shape what follows


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

    @property
    def ahead(self) -> int:
        """Requests that should wait beside those that fit in, so that passes over prompts are full."""
        return self.slots if self.fixed else 0


class Replays:
    """Runs functions of tensors that neither wait for the device nor change what they read.

    Where they are `graphed` (CUDA only), the first call of each name is captured, and later calls of that name, with
    inputs of the same shapes, replay it; what a call returns is overwritten by the next.
    """

    def __init__(self, graphed: bool) -> None:
        self._graphed = graphed
        self._graphs: dict[object, tuple[torch.cuda.CUDAGraph, list[Tensor], Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle() if graphed else None

    def run(self, name: object, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """`function(*inputs)`."""
        if not self._graphed:
            return function(*inputs)
        if name not in self._graphs:
            self._graphs[name] = self._captured(function, [value.clone() for value in inputs])
        graph, static, output = self._graphs[name]
        for place, value in zip(static, inputs, strict=True):
            place.copy_(value)
        graph.replay()
        return output

    def _captured(
        self, function: Callable[..., Tensor], static: list[Tensor]
    ) -> tuple[torch.cuda.CUDAGraph, list[Tensor], Tensor]:
        """One call to compile and allocate what stays, then one that is recorded."""
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            function(*static)
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = function(*static)
        return graph, static, output


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which operations run under it that wait for the device: a graph cannot hold them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waiting: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name, tensors = str(func), [value for value in (*args, result) if isinstance(value, Tensor)]
        copies = "copy" in name and len({value.device for value in tensors}) > 1
        if copies or any(word in name for word in _READING):
            self.waiting.append(name)
        return result
