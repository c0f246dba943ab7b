"""Inputs of captured graphs: they are copied to where a graph reads them, unless they stand there already."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from draftforge.specdec import cuda_graphs
from draftforge.specdec.cuda_graphs import Replays


class RecordedCall:
    """Stand-in for a CUDA graph on a CPU: a replay runs the recorded call again, into the tensors it made first."""

    recorded: Callable[[], Any] | None = None
    output: Tensor

    def replay(self) -> None:
        assert self.recorded is not None
        self.output.copy_(self.recorded())


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Replays:
    @contextmanager
    def recording(graph: RecordedCall, pool: object) -> Iterator[None]:
        yield

    class Graph(cuda_graphs._Graph):
        def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], pool: Any) -> None:
            super().__init__(function, args, pool)
            call: Any = self._graph
            call.output, call.recorded = self._output, lambda: function(*self._places)

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedCall)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(cuda_graphs, "_Graph", Graph)
    return Replays(graphed=True)


def test_a_graph_reads_whichever_of_several_graphs_feeds_it(replays: Replays) -> None:
    """As the target's pass does where requests of one sampling setting follow those of another."""
    for number, name in enumerate(["first", "first", "first", "second", "second", "second", "second", "first"]):
        made = replays.run(name, lambda x: x + 1, torch.tensor([float(number)]))
        assert float(replays.run("reader", lambda x: 10 * x, made)) == 10 * (number + 1), (number, name)
