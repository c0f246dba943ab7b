"""Trace a few steps of a training: which part of a step the GPU's time goes to, and how long it waits.

    torchrun --nproc-per-node 2 scripts/profile_training.py OUT.json train RECIPE --draft NAME

What follows OUT.json is for draftforge; a training needs at least 11 steps. The first rank traces steps 7 to 11. A
kernel belongs to the part of the step that launched it, collectives and copies are told by their names; a collective's
time is also that of waiting for a slower rank. `exposed collectives` is when nothing else ran, `idle` when nothing did.
"""

import functools
import json
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import draftforge.cli
from draftforge.data.batches import Batch, OptimizerStep
from draftforge.train import loop
from draftforge.train.families import base

TARGET, DRAFT, LOSS, BACKWARD = "target forward", "draft forward", "loss and its gradient", "backward"
FIGURES, OPTIMIZER = "sums over ranks", "clip and optimizer"
COLLECTIVES, COPIES, OTHER = "collectives", "copies", "other"
_PREFIX = "part: "
_FIRST, _STEPS = 6, 5
Event = dict[str, Any]


class Span(NamedTuple):
    """Microseconds of the trace."""

    start: float
    end: float


class PartSpan(NamedTuple):
    """A span in which the host runs one part."""

    start: float
    end: float
    part: str


def main(out: Path, arguments: list[str]) -> None:
    """Run draftforge with its training loop traced."""
    found: dict[str, Any] = {}
    base.loss_and_acceptance = ranged(LOSS, base.loss_and_acceptance)
    whole = loop.Trainer.loop

    def traced(self: loop.Trainer) -> list[Path]:
        self.family.inputs = ranged(TARGET, self.family.inputs)  # type: ignore[method-assign]
        self.family.rows = ranged(DRAFT, self.family.rows)  # type: ignore[method-assign]
        self.engine.accumulate = ranged(BACKWARD, self.engine.accumulate)  # type: ignore[method-assign]
        self.reduce = ranged(FIGURES, self.reduce)  # type: ignore[method-assign]
        self.update = ranged(OPTIMIZER, self.update)  # type: ignore[method-assign]
        one_step = self.one_step
        profiler: profile | None = None

        def traced_step(step: OptimizerStep, batches: list[Batch]) -> dict[str, float]:
            nonlocal profiler
            if self.state.step == _FIRST and self.ranks.first:
                profiler = profile(activities=activities())
                profiler.start()
            values = one_step(step, batches)
            if self.state.step == _FIRST + _STEPS and profiler is not None:
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                profiler.stop()
                found[self.folder.name] = shares(trace_events(profiler), _STEPS)
                out.write_text(json.dumps(found, indent=1))
                profiler = None
            return values

        self.one_step = traced_step  # type: ignore[method-assign]
        return whole(self)

    loop.Trainer.loop = traced  # type: ignore[method-assign]
    draftforge.cli.main(arguments)


def ranged(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call, inside a range of the trace."""

    @functools.wraps(call)
    def inside(*given: Any, **named: Any) -> Any:
        with record_function(_PREFIX + part):
            return call(*given, **named)

    return inside


def shares(events: Iterable[Event], steps: int) -> dict[str, Any]:
    """Milliseconds of a step by part, on the device and on the host, and the device's shares of the whole time."""
    events = [event for event in events if event.get("ph") == "X"]
    inner = innermost(events)
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    spans: dict[str, list[Span]] = {}
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            part = _part(event, launched, inner)
            spans.setdefault(part, []).append(Span(event["ts"], event["ts"] + event["dur"]))
    host: dict[str, float] = {}
    for start, end, part in inner:
        host[part] = host.get(part, 0.0) + end - start
    device = {part: sum(end - start for start, end in found) for part, found in spans.items()}
    begun = inner[0].start
    ended = max([inner[-1].end] + [end for found in spans.values() for _, end in found])
    everything = covered(span for found in spans.values() for span in found)
    but_collectives = covered(span for part, found in spans.items() if part != COLLECTIVES for span in found)
    device |= {"exposed " + COLLECTIVES: everything - but_collectives, "idle": ended - begun - everything}
    result: dict[str, Any] = {"step_ms": round((ended - begun) / 1000 / steps, 2), "host_ms": _per_step(host, steps)}
    if spans:
        result |= {
            "device_ms": _per_step(device, steps),
            "device_share": {part: round(value / (ended - begun), 4) for part, value in device.items()},
        }
    return result


def covered(spans: Iterable[Span]) -> float:
    """Length of the union."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def innermost(events: Iterable[Event]) -> list[PartSpan]:
    """Runs of time, ascending, with the innermost of the nested ranges there. Ranges are of one thread."""
    edges: list[tuple[float, int, float, str]] = []
    for event in events:
        if event.get("cat") != "user_annotation" or not event["name"].startswith(_PREFIX):
            continue
        start, length, part = event["ts"], event["dur"], event["name"].removeprefix(_PREFIX)
        edges += [(start, 1, -length, part), (start + length, 0, length, part)]
    found: list[PartSpan] = []
    open_parts: list[str] = []
    since = 0.0
    for at, opens, _, part in sorted(edges):
        if open_parts and at > since:
            found.append(PartSpan(since, at, open_parts[-1]))
        if opens:
            open_parts.append(part)
        else:
            open_parts.remove(part)
        since = at
    return found


def part_at(at: float, inner: list[PartSpan], other: str = OTHER) -> str:
    """The part of that time; `other` outside of all ranges."""
    number = bisect_right(inner, at, key=lambda run: run.start) - 1
    return inner[number].part if number >= 0 and at <= inner[number].end else other


def _part(event: Event, launched: dict[int, float], inner: list[PartSpan]) -> str:
    if "nccl" in event["name"].lower():
        return COLLECTIVES
    if event["cat"] != "kernel":
        return COPIES
    return part_at(launched.get(event.get("args", {}).get("correlation"), -1.0), inner)


def _per_step(microseconds: dict[str, float], steps: int) -> dict[str, float]:
    return {part: round(value / 1000 / steps, 2) for part, value in microseconds.items()}


def activities() -> list[ProfilerActivity]:
    """What to record here: the host, and a GPU where there is one."""
    return [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()


def trace_events(profiler: profile) -> list[Event]:
    """Events of a trace that has ended, as Chrome's format has them: times in microseconds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return list(json.loads(path.read_text())["traceEvents"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
