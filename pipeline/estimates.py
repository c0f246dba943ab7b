"""Estimates of a long stage's time and disk: said when it starts or as soon as there is one, compared at its end.

The last stage of the same kind in the work folder, made under the same conditions, tells the pace (`estimates.json`).
Without one the stage's own beginning does, once it has run for a while. Both count as constant: twice the work takes
twice the time and the disk.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import fingerprint, storage
from ..errors import CorruptDataError, MissingFileError
from ..eval.cost_table import hardware_name
from ..progress import say
from .workspace import Workspace

ESTIMATES_FILE = "estimates.json"
_FIRST_SECONDS = 20.0  # of a stage, before its own beginning tells its pace


class Work(NamedTuple):
    """What a stage is about to do."""

    amount: float
    """How much, in units."""
    unit: str
    conditions: str
    """What its pace depends on: hardware, ranks and settings. Stages of other conditions tell nothing of it."""


class Needs(NamedTuple):
    """Time and disk that a stage takes."""

    seconds: float
    bytes: float

    def __str__(self) -> str:
        return duration_text(self.seconds) + (f" and {storage.size_text(self.bytes)} on disk" if self.bytes else "")


class StageEstimate:
    """Estimate of one stage, which writes into `folder`; `root` is the work folder.

    `like`: a stage that tells the pace where there has been none of its own kind.
    """

    def __init__(
        self,
        root: Path,
        stage: str,
        work: Work,
        folder: Path,
        clock: Callable[[], float] = time.monotonic,
        like: str = "",
    ) -> None:
        self._root, self._stage, self._work, self._folder, self._clock = root, stage, work, folder, clock
        self._like = like
        self._start, self._before = clock(), size_on_disk(folder)
        self.needs: Needs | None = None
        """What it is expected to take; None: not known yet."""

    def begin(self) -> None:
        """Say what the stage will take by the last one of its kind, if there is one."""
        known = self._known()
        last = known.get(self._stage) or known.get(self._like, {})
        if last.get("conditions") != self._work.conditions or last.get("unit") != self._work.unit:
            return
        # Numbers of a damaged or foreign record tell nothing.
        numbers = [last.get(name) for name in ("amount", "seconds", "bytes")]
        if not all(isinstance(one, int | float) and one >= 0 for one in numbers) or not numbers[0]:
            return
        amount, seconds, size = map(float, numbers)  # type: ignore[arg-type]
        if self._stage not in known:  # what another stage wrote says nothing of this one
            size = 0.0
        needs = Needs(self._work.amount * seconds / amount, self._work.amount * size / amount)
        self._expect(needs, f"{last.get('folder')}: {rate_text(amount, seconds, self._work.unit)}")

    def reached(self, share: float) -> None:
        """Take note of the share of the work that is done, between 0 and 1; without an estimate, one is made of it."""
        taken = self._clock() - self._start
        if self.needs is None and taken >= _FIRST_SECONDS and 0 < share < 1:
            size = size_on_disk(self._folder) - self._before
            self._expect(Needs(taken / share, size / share), f"its first {duration_text(taken)}, {share:.1%} of it")

    def end(self) -> None:
        """Compare the estimate with what the stage took, and keep that for the next one of its kind."""
        took = Needs(self._clock() - self._start, max(size_on_disk(self._folder) - self._before, 0))
        if self.needs is not None:
            say(f"{self._stage}: estimated {self.needs}; took {took}")
        record = {**self._work._asdict(), **took._asdict(), "folder": self._folder.name, "at": time.time()}
        storage.write_json(self._root / ESTIMATES_FILE, self._known() | {self._stage: record})

    def _expect(self, needs: Needs, why: str) -> None:
        self.needs = needs
        free = f" ({storage.size_text(storage.free_bytes(self._root))} free)" if needs.bytes else ""
        work = f"{self._work.amount:,.0f} {self._work.unit}"
        say(f"{self._stage}: {work}, estimated {needs}{free}, by {why}")

    def _known(self) -> dict[str, dict[str, Any]]:
        """What earlier stages took, by name. A damaged file is said, and begun anew."""
        try:
            known = storage.read_object(self._root / ESTIMATES_FILE)
        except MissingFileError:
            return {}
        except CorruptDataError as error:
            say(f"{error}; estimates begin anew")
            return {}
        return {name: one for name, one in known.items() if isinstance(one, dict)}


@contextmanager
def estimated(
    space: Workspace, stage: str, work: Callable[[], Work], folder: Path, like: str = ""
) -> Iterator[Callable[[float], None]]:
    """Estimate around the body, which does the work and calls what is yielded with the share that is done.

    `like`: a stage whose pace is taken where none of this kind is known.

    Only the first rank estimates, for all of them. A body that fails tells nothing of the pace.
    """
    todo = work() if space.first_rank else None
    if todo is None or not todo.amount:
        yield lambda share: None
        return
    estimate = StageEstimate(space.root, stage, todo, folder, like=like)
    estimate.begin()
    yield estimate.reached
    estimate.end()


def conditions_of(space: Workspace, device: torch.device, *settings: Any) -> str:
    """Conditions of a stage: a digest of hardware, ranks and the settings that its pace depends on."""
    return fingerprint.short(fingerprint.of_json([hardware_name(device), space.ranks.world_size, *settings]))


def size_on_disk(folder: Path) -> int:
    """Bytes of all files in a folder; 0 where there is none."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def duration_text(seconds: float) -> str:
    """So many seconds in the two units that suit them: "12 s", "5 min 10 s", "3 h 20 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60:,} h {minutes % 60} min"


def rate_text(amount: float, seconds: float, unit: str) -> str:
    """Pace of a stage: "48.2 answers a second"."""
    return f"{amount / max(seconds, 1e-9):,.3g} {unit} a second"
