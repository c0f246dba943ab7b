"""Estimates of a long stage's time and disk: said when it starts or as soon as there is one, compared at its end.

The last stage of the same kind in the work folder, made under the same conditions, tells the pace (`estimates.json`):
twice the work takes twice the time and the disk. Without one the stage's own beginning does, once it has run for a
while. A stage whose pace turns out to be another one says so: its first epoch fills a cache, or the host is busy.
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
_FIRST_SECONDS = 20.0  # of a stage, before its own pace is looked at; then at 40, 80, 160, …
_MOST = 1e15  # of a record's numbers: seconds, bytes or tokens
_ANOTHER_PACE = 1.5  # times as long, or as short, as was said: it is said anew


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
        self._look_at, self._seconds_seen, self._share_seen = _FIRST_SECONDS, 0.0, 0.0
        self._said: list[Needs] = []

    @property
    def needs(self) -> Needs | None:
        """What it is expected to take; None: not known yet."""
        return self._said[-1] if self._said else None

    def begin(self) -> None:
        """Say what the stage will take by the last one of its kind, if there is one."""
        known = self._known()
        last = known.get(self._stage) or known.get(self._like, {})
        if last.get("conditions") != self._work.conditions or last.get("unit") != self._work.unit:
            return
        # Numbers of a damaged or foreign record tell nothing.
        numbers = [last.get(name) for name in ("amount", "seconds", "bytes")]
        if not all(isinstance(one, int | float) and 0 <= one < _MOST for one in numbers) or not numbers[0]:
            return
        amount, seconds, size = map(float, numbers)  # type: ignore[arg-type]
        if self._stage not in known:  # what another stage wrote says nothing of this one
            size = 0.0
        needs = Needs(self._work.amount * seconds / amount, self._work.amount * size / amount)
        self._expect(needs, f"{last.get('folder')}: {rate_text(amount, seconds, self._work.unit)}")

    def reached(self, share: float, size: float = 0.0) -> None:
        """Take note of the share of the work that is done, between 0 and 1, and of the bytes that all of it will write,
        where that is known: an estimate is made of them, or mended."""
        # 1) Before the first look the newest beginning counts: what was done until then is not done again.
        taken = self._clock() - self._start
        if taken < self._look_at:
            if not self._share_seen:
                self._seconds_seen, self._share_seen = taken, share
            return
        if not self._share_seen < share < 1:
            return
        # 2) The rest at the pace since the last look.
        pace = (taken - self._seconds_seen) / (share - self._share_seen)
        needs = Needs(taken + pace * (1 - share), size or (self.needs.bytes if self.needs else 0))
        why = f"its own pace, {share - self._share_seen:.1%} in {duration_text(taken - self._seconds_seen)}"
        self._look_at, self._seconds_seen, self._share_seen = 2 * taken, taken, share
        # 3) Said where nothing was said, or something else.
        if self.needs is None:
            self._expect(needs, why)
        elif not 1 / _ANOTHER_PACE < needs.seconds / self.needs.seconds < _ANOTHER_PACE:
            self._expect(needs, why, "now ")

    def end(self) -> None:
        """Compare the estimate with what the stage took, and keep that for the next one of its kind."""
        took = Needs(self._clock() - self._start, max(size_on_disk(self._folder) - self._before, 0))
        if self._said:
            say(f"{self._stage}: estimated {', then '.join(map(str, self._said))}; took {took}")
        record = {**self._work._asdict(), **took._asdict(), "folder": self._folder.name, "at": time.time()}
        storage.write_json(self._root / ESTIMATES_FILE, self._known() | {self._stage: record})

    def _expect(self, needs: Needs, why: str, now: str = "") -> None:
        self._said.append(needs)
        free = f" ({storage.size_text(storage.free_bytes(self._root))} free)" if needs.bytes else ""
        work = f"{self._work.amount:,.0f} {self._work.unit}"
        say(f"{self._stage}: {work}, estimated {now}{needs}{free}, by {why}")

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
) -> Iterator[Callable[..., None]]:
    """Estimate around the body, which does the work and calls what is yielded with the share that is done.

    `like`: a stage whose pace is taken where none of this kind is known.

    Only the first rank estimates, for all of them. A body that fails tells nothing of the pace.
    """
    todo = work() if space.first_rank else None
    if todo is None or not todo.amount:
        yield lambda share, size=0.0: None
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
