"""Where the time of a decoding round goes: its milliseconds, and the kernels and GPU time of each captured graph.

    python3 scripts/profile_rounds.py                       # every way at batches 1 and 16, SmolLM2-135M's shape
    python3 scripts/profile_rounds.py --target FOLDER --way plain --way eagle3 --batch 1 --kernels 8 --host

Target and drafts are of these shapes and have random weights, as times do not depend on what they say; FOLDER needs
its config alone. K = 4, T = 0. Milliseconds are the median of the rounds, their tenth and ninetieth percentile beside
it; later rounds are traced. Where drafts are accepted, texts grow by up to five tokens a round. `outside` is what no
graph launched. On a CPU the operations of a round are counted, those within another one left out, and drafting is
`outside`.
"""

import cProfile
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from copy import deepcopy
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar
from unittest import mock

import torch
import typer
from torch import nn
from torch.profiler import profile
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from draftforge.pipeline import cli_exit
from draftforge.scripts.profile_training import Event, activities, innermost, part_at, ranged, trace_events
from draftforge.specdec.cuda_graphs import Replays
from draftforge.specdec.decoder import decode_rounds
from draftforge.specdec.drafts.eagle3 import Eagle3Draft
from draftforge.specdec.drafts.small import SmallDraft
from draftforge.specdec.kernels.fused import can_fuse, fuse
from draftforge.specdec.loading import refused
from draftforge.specdec.models import CausalModel
from draftforge.specdec.proposers.base import Proposer
from draftforge.specdec.proposers.cascade import CascadeProposer, LookupHelper
from draftforge.specdec.proposers.dynamic_tree import DynamicProposer
from draftforge.specdec.proposers.factory import make_drafter, make_proposer
from draftforge.specdec.proposers.prompt_lookup import PromptLookup
from draftforge.specdec.proposers.static_tree import StaticProposer
from draftforge.specdec.proposers.training_free import TRAINING_FREE
from draftforge.specdec.proposers.tree_shape import TreeShape
from draftforge.specdec.requests import DecodeRun, Request
from draftforge.specdec.sampling_settings import SamplingSettings
from draftforge.specdec.targets import resolve_device
from draftforge.train.families.eagle3 import eagle3_config
from draftforge.train.settings import Eagle3Settings

K = 4
_WARM_ROUNDS, _TRACED_ROUNDS, _HOST_ROUNDS = 12, 6, 12
_SMALL_LAYERS = 6
_REPEATED = 64  # tokens, over and over, for proposers that look texts up
_ACCURACIES = [[0.55, 0.16, 0.08, 0.05, 0.03, 0.02], [0.5, 0.15, 0.08, 0.05], [0.45, 0.15, 0.07], [0.4, 0.12]]
_FUNCTIONS = 12
_OUTSIDE = "outside"
_CALLS = {
    "graphs": ("cudaGraphLaunch",),
    "single kernels": ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"),
    "copies": ("cudaMemcpyAsync", "cudaMemsetAsync"),
    "waits": ("cudaStreamSynchronize", "cudaEventSynchronize"),
}
M = TypeVar("M", bound=nn.Module)
SMOLLM2 = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)
app = typer.Typer(add_completion=False)


class Way(StrEnum):
    """Ways to decode."""

    PLAIN = "plain"
    EAGLE3 = "eagle3"
    STATIC = "static"
    DYNAMIC = "dynamic"
    MEASURED = "measured"
    SMALL = "small"
    LOOKUP = "lookup"
    SUFFIX = "suffix"
    LOOKAHEAD = "lookahead"
    JACOBI = "jacobi"
    CASCADE = "cascade"


class Models:
    """A random target, and random drafts for it."""

    def __init__(self, folder: Path | None) -> None:
        self.device, self.dtype = resolve_device("auto", "auto")
        torch.manual_seed(0)
        with refused(f"--target {folder}"):
            self._config: Any = SMOLLM2 if folder is None else AutoConfig.from_pretrained(folder).get_text_config()
            model = self._random(self._config)
            self.target = CausalModel(model)
        self._fused(model)

    def proposer(self, way: Way) -> Proposer | None:
        """A new proposer; None: plain decoding."""
        match way:
            case Way.PLAIN:
                return None
            case Way.LOOKUP:
                return PromptLookup()
            case Way.SUFFIX | Way.LOOKAHEAD | Way.JACOBI:
                return TRAINING_FREE[way](self.target)
            case Way.CASCADE:
                return CascadeProposer(self._small, LookupHelper())
            case Way.SMALL:
                return make_proposer(self._small, self.target)
            case Way.EAGLE3:
                return make_proposer(self._eagle3, self.target)
        drafter = make_drafter(self._eagle3, self.target)
        if way is Way.DYNAMIC:
            return DynamicProposer(drafter, 8, 24)
        shape = TreeShape.branching([3, 2, 1, 1]) if way is Way.STATIC else TreeShape.of_accuracies(_ACCURACIES, 24)
        return StaticProposer(drafter, shape, "deterministic")

    def requests(self, way: Way, batch: int, context: int, rounds: int) -> list[Request]:
        """As many, which go on for so many rounds whatever is accepted."""
        ids = torch.randint(self.target.vocab_size, (context,), device="cpu").tolist()
        if way in (Way.LOOKUP, Way.SUFFIX, Way.CASCADE):
            ids = (ids[:_REPEATED] * (1 + context // _REPEATED))[:context]
        tokens = 1 + rounds * (K + 1)
        return [Request(ids, SamplingSettings(), seed, tokens) for seed in range(batch)]

    @cached_property
    def _eagle3(self) -> Eagle3Draft:
        config = eagle3_config(Eagle3Settings(draft_tokens=K), self.target, self.target.vocab_size)
        return self._fused(Eagle3Draft(config).to(self.device, self.dtype).requires_grad_(False).eval())

    @cached_property
    def _small(self) -> SmallDraft:
        config = deepcopy(self._config)
        config.num_hidden_layers = min(_SMALL_LAYERS, config.num_hidden_layers)
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: config.num_hidden_layers]
        return self._fused(SmallDraft(self._random(config)))

    def _random(self, config: Any) -> Any:
        with self.device:
            model = AutoModelForCausalLM.from_config(config, dtype=self.dtype)
        return model.to(self.device).requires_grad_(False).eval()

    def _fused(self, model: M) -> M:
        if can_fuse(self.device):
            fuse(model)
        return model


def time_rounds(steps: Iterator[Any], rounds: int) -> list[float]:
    """Milliseconds of each round, ascending. The host waits for each round's verdict, so its clock will do."""
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        next(steps)
        found.append(1e3 * (time.perf_counter() - start))
    return sorted(found)


def trace_rounds(steps: Iterator[Any]) -> list[Event]:
    """Events of some rounds, with a range around each part that a graph may hold."""
    run = Replays.run

    def named(self: Replays, name: Any, *given: Any, **options: Any) -> Any:
        return ranged(name[0], run)(self, name, *given, **options)

    with mock.patch.object(Replays, "run", named), profile(activities=activities()) as profiler:
        for _ in range(_TRACED_ROUNDS):
            next(steps)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return trace_events(profiler)


def launched(events: Iterable[Event]) -> dict[str, list[Event]]:
    """What the GPU did, by the part whose graph launched it; without a GPU, operations by the part that called them."""
    events = [event for event in events if event.get("ph") == "X"]
    parts = innermost(events)
    found: dict[str, list[Event]] = {}
    if not any(event.get("cat") == "kernel" for event in events):
        for event in outermost(event for event in events if event.get("cat") == "cpu_op"):
            found.setdefault(part_at(event["ts"], parts, _OUTSIDE), []).append(event)
        return found
    graphs = {
        event["args"]["correlation"]: part_at(event["ts"], parts, _OUTSIDE)
        for event in events
        if event["name"] in _CALLS["graphs"] and "correlation" in event.get("args", {})
    }
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            found.setdefault(graphs.get(event.get("args", {}).get("correlation"), _OUTSIDE), []).append(event)
    return found


def outermost(operations: Iterable[Event]) -> Iterator[Event]:
    """Operations of one thread without those that another one calls."""
    until = float("-inf")
    for event in sorted(operations, key=lambda one: (one["ts"], -one["dur"])):
        if event["ts"] >= until:
            until = event["ts"] + event["dur"]
            yield event


def show_trace(events: list[Event], kernels: int) -> None:
    """Of a round: kernels or operations of each part, their time, those that take longest, and calls of CUDA."""
    for part, some in launched(events).items():
        what = "operations" if some[0]["cat"] == "cpu_op" else "kernels"
        took = sum(event["dur"] for event in some) / _TRACED_ROUNDS
        print(f"  {part:8} {len(some) / _TRACED_ROUNDS:6.1f} {what} {took:8.1f} us")
        counts, totals = Counter(event["name"] for event in some), dict.fromkeys((e["name"] for e in some), 0.0)
        for event in some:
            totals[event["name"]] += event["dur"]
        for name in sorted(totals, key=lambda one: -totals[one])[:kernels]:
            print(f"    {counts[name] / _TRACED_ROUNDS:6.1f} x {totals[name] / counts[name]:7.2f} us  {name[:90]}")
    called = Counter(event["name"] for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver"))
    if called:
        figures = (f"{kind} {sum(called[n] for n in names) / _TRACED_ROUNDS:.1f}" for kind, names in _CALLS.items())
        print(f"  launched or waited for: {', '.join(figures)}")


def show_host(steps: Iterator[Any]) -> None:
    """The functions that the host spends a round's time in, what they call left out; recording slows them."""
    recorder = cProfile.Profile()
    recorder.enable()
    for _ in range(_HOST_ROUNDS):
        next(steps)
    recorder.disable()
    for entry in sorted(recorder.getstats(), key=lambda one: -one.inlinetime)[:_FUNCTIONS]:
        code, calls = entry.code, entry.callcount / _HOST_ROUNDS
        name = code if isinstance(code, str) else f"{Path(code.co_filename).name}:{code.co_firstlineno} {code.co_name}"
        print(f"    host {1e6 * entry.inlinetime / _HOST_ROUNDS:8.1f} us, {calls:6.1f} calls  {name}")


def show_times(models: Models, way: Way, batch: int, context: int, rounds: int) -> Iterator[Any]:
    """Milliseconds of a round; returns the decoder's steps, which go on."""
    requests = models.requests(way, batch, context, _WARM_ROUNDS + rounds + _TRACED_ROUNDS + _HOST_ROUNDS)
    proposer = models.proposer(way)
    steps = decode_rounds(DecodeRun(models.target, proposer, requests, draft_tokens=K, batch_size=batch))
    time_rounds(steps, _WARM_ROUNDS)
    took = time_rounds(steps, rounds)
    nodes = 0 if proposer is None else proposer.most_nodes(K)
    low, high = took[rounds // 10], took[rounds * 9 // 10]
    median = statistics.median(took)
    print(f"batch {batch}, {way}, {nodes} nodes: {median:.3f} ms a round [{low:.3f}, {high:.3f}]", flush=True)
    if isinstance(proposer, CascadeProposer):
        print(f"  passes of the draft: {proposer.passes} instead of {proposer.passes_alone}")
    return steps


@app.command()
def main(
    target: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="Folder with a config; absent: SmolLM2-135M.")
    ] = None,
    way: Annotated[list[Way] | None, typer.Option(help="May be given again; absent: all of them.")] = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Batch size; may be given again; absent: 1 and 16.")
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens of the prompts.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds.")] = 60,
    kernels: Annotated[int, typer.Option(min=0, help="Name so many kernels of each part.")] = 0,
    host: Annotated[bool, typer.Option(help="Also the host's time by function.")] = False,
) -> None:
    """Profile rounds of decoding."""
    models = Models(target)
    for size in batch or [1, 16]:
        for one in way or list(Way):
            steps = show_times(models, one, size, context, rounds)
            show_trace(trace_rounds(steps), kernels)
            if host:
                show_host(steps)


if __name__ == "__main__":
    cli_exit.run(app, None, Path(__file__).name)
