"""The embedded scheduler: one retraining at a time, none lost, none doubled when the clock is set, none left behind."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from draftforge.errors import InputError
from draftforge.pipeline import watch as watching
from draftforge.pipeline.watch import RetrainScheduler, ended, run_once, seconds_of

Popen = subprocess.Popen[bytes]


def script(code: str) -> Callable[[], Popen]:
    return lambda: subprocess.Popen([sys.executable, "-c", code])


class Starts:
    """Starts `true`-like processes and keeps when."""

    def __init__(self, code: str = "pass") -> None:
        self.at: list[float] = []
        self._start = script(code)

    def __call__(self) -> Popen:
        self.at.append(time.monotonic())
        return self._start()


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[RetrainScheduler], None]]:
    """Serve a watch in a thread until the test ends."""
    monkeypatch.setattr(watching, "_TICK_SECONDS", 0.05)
    served: list[tuple[RetrainScheduler, threading.Thread]] = []

    def serve(watch: RetrainScheduler) -> None:
        watch._scheduler.start()

        def loop() -> None:
            while watch._scheduler.running:
                time.sleep(0.05)
                watch.tick()

        thread = threading.Thread(target=loop, daemon=True)
        thread.start()
        served.append((watch, thread))

    yield serve
    for watch, thread in served:
        watch.stop()
        thread.join(5)


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "too late"
        time.sleep(0.02)


def test_times_are_read() -> None:
    assert [seconds_of(text, "--every") for text in ("90s", "30m", "6h", "1d", "1.5h")] == [
        90,
        1800,
        21600,
        86400,
        5400,
    ]
    for text in ("6", "h", "0s", "0.5s", "-1h", "6 h", "6w", "1e3s"):
        with pytest.raises(InputError, match=r"--every .*: must be a number and s, m, h or d"):
            seconds_of(text, "--every")


def test_the_first_retraining_starts_at_once_and_the_others_follow(ticking: Callable[[RetrainScheduler], None]) -> None:
    starts = Starts()
    ticking(RetrainScheduler(starts, every_seconds=1))
    until(lambda: len(starts.at) >= 3)
    gaps = [after - before for before, after in zip(starts.at, starts.at[1:])]
    assert all(0.7 < gap < 1.6 for gap in gaps[:2])


def test_a_long_retraining_is_not_joined_by_another(
    ticking: Callable[[RetrainScheduler], None], tmp_path: Path
) -> None:
    """Each one leaves its times; no two overlap."""
    log = tmp_path / "log"
    code = f"import time; t = time.time(); time.sleep(1.3); open({str(log)!r}, 'a').write(f'{{t}} {{time.time()}}\\n')"
    ticking(RetrainScheduler(Starts(code), every_seconds=1))
    until(lambda: log.exists() and len(log.read_text().splitlines()) >= 3)
    spans = [[float(text) for text in line.split()] for line in log.read_text().splitlines()]
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


def test_what_is_asked_for_meanwhile_is_done_once_afterwards(ticking: Callable[[RetrainScheduler], None]) -> None:
    starts = Starts("import time; time.sleep(0.8)")
    watch = RetrainScheduler(starts, every_seconds=3600)
    ticking(watch)
    until(lambda: len(starts.at) == 1)
    for _ in range(5):
        watch.ask()
    until(lambda: len(starts.at) == 2)
    until(lambda: watch._running is None)
    time.sleep(0.5)
    assert len(starts.at) == 2
    watch.ask()  # nothing runs: at once
    until(lambda: len(starts.at) == 3, seconds=3)


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_a_clock_that_is_set_neither_skips_nor_doubles(
    jump: float,
    ticking: Callable[[RetrainScheduler], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shift = [0.0]
    honest = time.time

    class Clock(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return datetime.fromtimestamp(honest() + shift[0], UTC)

    for module in ("apscheduler.schedulers.base", "apscheduler.triggers.interval", "draftforge.pipeline.watch"):
        monkeypatch.setattr(f"{module}.datetime", Clock)
    monkeypatch.setattr(watching.time, "time", lambda: honest() + shift[0])
    starts = Starts()
    watch = RetrainScheduler(starts, every_seconds=2)
    ticking(watch)
    until(lambda: len(starts.at) == 1)
    time.sleep(0.5)
    shift[0] = jump
    until(lambda: len(starts.at) == 4)
    gaps = [after - before for before, after in zip(starts.at, starts.at[1:])]
    assert all(1.5 < gap < 3 for gap in gaps), gaps
    assert f"the clock was set by {jump:+.0f} s" in capsys.readouterr().err


def test_a_disciplined_clock_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = RetrainScheduler(Starts(), every_seconds=3600)
    watch._scheduler.start(paused=True)
    before = watch._scheduler.get_job("retrain").next_run_time
    honest = time.time
    monkeypatch.setattr(watching.time, "time", lambda: honest() + 0.5)
    watch.tick()
    assert watch._scheduler.get_job("retrain").next_run_time == before
    monkeypatch.setattr(watching.time, "time", lambda: honest() - 60)
    watch.tick()
    moved = watch._scheduler.get_job("retrain").next_run_time - before
    assert timedelta(seconds=-61) < moved < timedelta(seconds=-59)
    watch.stop()


def test_stopping_ends_the_child_kindly(ticking: Callable[[RetrainScheduler], None], tmp_path: Path) -> None:
    mark = tmp_path / "unwound"
    ready = tmp_path / "ready"
    code = (
        f"import signal, sys, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: (open({str(mark)!r}, 'w').close(), sys.exit(143)))\n"
        f"open({str(ready)!r}, 'w').close()\ntime.sleep(60)"
    )
    watch = RetrainScheduler(Starts(code), every_seconds=3600)
    ticking(watch)
    until(ready.exists)
    running = watch._running
    assert running is not None
    watch.stop()
    assert mark.exists() and running.poll() == 143 and not watch._scheduler.running


def test_a_child_that_does_not_listen_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_STOP_SECONDS", 0.3)
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)",
        ],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdout.read(1) == b"1"
    watching.terminate(process)
    assert process.wait(5) == -signal.SIGKILL


def test_a_start_that_fails_is_said_and_tried_again(
    ticking: Callable[[RetrainScheduler], None], capsys: pytest.CaptureFixture[str]
) -> None:
    tries = []

    def refuse() -> Popen:
        tries.append(1)
        raise OSError("no more processes")

    ticking(RetrainScheduler(refuse, every_seconds=1))
    until(lambda: len(tries) >= 2)
    assert "cannot be started (no more processes)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (0, "up to date, or promoted"),
        (5, "the new draft was refused"),
        (4, "another one runs"),
        (6, "promotion.command failed; the promotion stands"),
        (3, "failed; the champion is untouched"),
        (-9, "killed by signal 9"),
    ],
)
def test_every_end_is_one_line(code: int, said: str) -> None:
    assert ended(code, 12.4) == f"retrain: exit code {code} ({said}) after 12 s"


def test_once_gives_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_once(script("raise SystemExit(5)")) == 5
    assert run_once(script("import os; os.kill(os.getpid(), 9)")) == 137
    assert "refused" in capsys.readouterr().err


def test_sigterm_to_the_command_ends_both(tmp_path: Path) -> None:
    """The verb itself, with a retraining that sleeps in place of the real one."""
    ready = tmp_path / "ready"
    code = f"import os, time; open({str(ready)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    program = (
        "import subprocess, sys\n"
        "from draftforge.cli import _sigterm_unwinds\n"
        "from draftforge.errors import StoppedError\n"
        "from draftforge.pipeline.watch import Watch\n"
        f"start = lambda: subprocess.Popen([sys.executable, '-c', {code!r}])\n"
        "try:\n"
        "    with _sigterm_unwinds():\n"
        "        Watch(start, 3600).serve()\n"
        "except StoppedError:\n"
        "    sys.exit(143)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program])
    until(lambda: ready.exists() and bool(ready.read_text()), 60)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int(ready.read_text()), 0)
