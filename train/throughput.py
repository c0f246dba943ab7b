"""Progress and metrics of a training: the batch arithmetic before the first step, each step's progress line (number,
loss, speed, time left), metrics.jsonl, and the digest of the loss sequence."""

import hashlib
import json
import struct
import time
from collections import deque
from pathlib import Path
from typing import Any, Protocol

from .. import storage
from ..data.batches import BatchPlan
from ..distributed import Ranks
from ..errors import CorruptDataError
from ..progress import say
from .families.base import Family
from .memory_estimate import DiskFootprint
from .settings import Settings

_SMOOTHING = 0.9
_UNTIMED_STEPS = 1  # the first step allocates memory and compiles kernels
_NEWEST_STEPS = 20  # tell the time left: a first epoch may fill a cache of the target's states


def smooth(average: float, loss: float, step: int) -> float:
    """Exponential average of the loss; `step` counts from 0, where the average starts."""
    return loss if step == 0 else _SMOOTHING * average + (1.0 - _SMOOTHING) * loss


class Pace:
    """Throughput over all timed steps of this process; scoring and saving do not count."""

    def __init__(self, steps: int, start: int) -> None:
        self._steps, self._start = steps, start
        self._seconds = 0.0
        self._newest = deque[float](maxlen=_NEWEST_STEPS)
        self._supervised = 0
        self._begun = 0.0

    def begin(self) -> None:
        """Start the clock of a step."""
        self._begun = time.perf_counter()

    def end(self, step: int, supervised: int) -> float:
        """Stop the clock of step number `step` (1-based), which had so many supervised tokens. Returns its seconds."""
        seconds = time.perf_counter() - self._begun
        if step - self._start > _UNTIMED_STEPS:
            self._seconds += seconds
            self._newest.append(seconds)
            self._supervised += supervised
        return seconds

    @property
    def tokens_per_second(self) -> float:
        """Supervised tokens a second; 0 while nothing is timed."""
        return self._supervised / self._seconds if self._seconds else 0.0

    def line(self, step: int, loss: float) -> str:
        """The progress line of one step; without speed and time left until a step was timed."""
        speed, left = "", ""
        # Time left: the mean of the newest timed steps, for the steps that remain.
        if self._newest:
            speed = f"  {self.tokens_per_second:,.0f} supervised tok/s"
            left = f"  {_clock((self._steps - step) * sum(self._newest) / len(self._newest))} left"
        return f"step {step}/{self._steps}  {100 * step // self._steps:>3}%  loss {loss:.4f}{speed}{left}"


def _clock(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def print_training_plan(
    settings: Settings,
    family: Family,
    footprint: DiskFootprint,
    plan: BatchPlan,
    samples: int,
    ranks: Ranks,
    engine: str,
    begun: int,
) -> None:
    """Log what is about to be trained after `begun` steps: batches, steps, epochs, and the disk that it takes."""
    # What is trained, on what. An engine that shards the family leaves nothing to count in it.
    dtype = str(family.loss_settings.dtype).removeprefix("torch.")
    world, epoch = ranks.world_size, plan.steps_per_epoch
    place, trained = f"{world} x {ranks.device.type}", footprint.parameters
    say(f"training {family.name}: {trained:,} parameters, {engine}, {place}, {dtype} products")

    # How ranks and micro-batches divide a step, and how many epochs the steps make.
    say(
        f"{settings.steps} steps of about {plan.tokens_per_step:,} tokens = {world} x {settings.accumulation} "
        f"micro-batches (ranks x accumulation); {samples:,} samples make {epoch:.1f} steps an epoch, so "
        f"{settings.steps / epoch:.1f} epochs; {100 * plan.padding_share:.0f}% padding"
    )

    # Some of it only for a while: the checkpoint before the last one goes when that is there.
    size, draft = footprint.bytes_to_write(settings, begun), storage.size_text(footprint.draft)
    say(f"up to {storage.size_text(size)} on disk, {draft} a draft") if size else None


class MetricSink(Protocol):
    """Receives figures by step. The registry's MLflow run is one."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Record the values of one step."""
        ...


class NoSink:
    """Records nothing."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Record nothing."""


class MetricLog:
    """Metrics file, JSON lines: one object a step, in order of steps, no step twice."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def log(self, step: int, values: dict[str, float]) -> None:
        """Append the line of one step."""
        with storage.disk_errors(self._path), self._path.open("a") as stream:
            stream.write(json.dumps({"step": step, **values}) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """All complete lines; a last line cut short by a kill is left out. Raises CorruptDataError for other lines."""
        if not self._path.is_file():
            return []

        # Every complete line ends with a line feed, so what follows the last one is empty or cut short.
        try:
            lines = self._path.read_text().split("\n")
            read = [storage.parse_json(line) for line in lines[:-1]]
            if not all(type(value) in (int, float) for line in read for value in line.values()):
                raise ValueError("a value is no number")
            return [line | {"step": int(line["step"])} for line in read]
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise CorruptDataError(f"{self._path}: not JSON lines with a step ({error}); delete it") from None

    def truncate(self, step: int) -> None:
        """Delete the lines after `step`: a resumed run will log these steps again."""
        kept = [line for line in self.read() if line["step"] <= step]
        storage.write_bytes(self._path, "".join(json.dumps(line) + "\n" for line in kept).encode())


def extend_digest(digest: str, step: int, loss: float) -> str:
    """Digest of the loss sequence so far: equal digests mean that every loss was equal, bit for bit."""
    return hashlib.sha256(digest.encode() + struct.pack("<qd", step, loss)).hexdigest()
