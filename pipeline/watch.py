"""`draftforge watch`: retraining now and then, and when a webhook says so, each time in a process of its own.

A retraining that crashes or leaks takes nothing with it. One runs at a time; what comes meanwhile is done once, after
it. APScheduler keeps the times by the wall clock; `Watch.tick` moves them along whenever that clock is set.
"""

import logging
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta

from apscheduler.schedulers.background import BackgroundScheduler

from ..errors import InputError
from ..progress import say

MEANINGS = {
    0: "up to date, or promoted",
    4: "another one runs",
    5: "the new draft was refused",
    6: "promotion.command failed; the promotion stands",
}
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_JOB = "retrain"
_TICK_SECONDS = 1.0
_CLOCK_SET_SECONDS = 2.0  # the wall clock left the monotonic one by so much: it was set, not merely disciplined
_STOP_SECONDS = 60.0

Start = Callable[[], "subprocess.Popen[bytes]"]


def seconds_of(text: str, option: str) -> float:
    """`90s`, `30m`, `6h`, `1d` in seconds. Raises InputError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None or float(match[1]) * _UNITS[match[2]] < 1:
        raise InputError(f"{option} {text}: must be a number and s, m, h or d, at least 1s, such as 6h")
    return float(match[1]) * _UNITS[match[2]]


def child(recipe: str, overrides: Sequence[str]) -> Start:
    """How a retraining of this recipe is started."""
    command = [sys.executable, "-m", "draftforge.cli", "retrain", recipe, *overrides]
    return lambda: subprocess.Popen(command)


class Watch:
    """The schedule of one recipe's retrainings."""

    def __init__(self, start: Start, every_seconds: float, jitter_seconds: float = 0.0) -> None:
        self._start = start
        self._scheduler = BackgroundScheduler(timezone=UTC)
        self._scheduler.add_job(
            self._run,
            "interval",
            id=_JOB,
            seconds=every_seconds,
            jitter=jitter_seconds or None,
            next_run_time=datetime.now(UTC),
            coalesce=True,
            max_instances=1,
            misfire_grace_time=None,  # late, after a suspend say, is better than never
        )
        self._lock = threading.Lock()
        self._running: subprocess.Popen[bytes] | None = None
        self._asked = self._stopping = False
        self._offset = time.time() - time.monotonic()

    def serve(self) -> None:
        """Run until a signal's exception ends it; a retraining that runs then is stopped and resumes another time."""
        logging.getLogger("apscheduler").setLevel(logging.ERROR)  # that one still runs is no news
        self._scheduler.start()
        try:
            while True:
                time.sleep(_TICK_SECONDS)
                self.tick()
        finally:
            self.stop()

    def tick(self) -> None:
        """Move the next run by as much as the wall clock was set, so that it is neither skipped nor done twice."""
        offset = time.time() - time.monotonic()
        jump = offset - self._offset
        if abs(jump) < _CLOCK_SET_SECONDS:
            return
        self._offset = offset
        job = self._scheduler.get_job(_JOB)
        if job is not None and job.next_run_time is not None:
            job.modify(next_run_time=job.next_run_time + timedelta(seconds=jump))
            say(f"the clock was set by {jump:+.0f} s: the next retraining moves along")

    def ask(self) -> None:
        """Retrain as soon as may be. Asked again before that: still once."""
        with self._lock:
            if self._asked or self._stopping:
                return
            self._asked = True
            if self._running is None:
                self._scheduler.modify_job(_JOB, next_run_time=datetime.now(UTC))

    def stop(self) -> None:
        """Let nothing start any more, and end the retraining that runs."""
        with self._lock:
            self._stopping = True
            running = self._running
        if running is not None:
            end(running)
        if self._scheduler.running:
            self._scheduler.shutdown()

    def _run(self) -> None:
        """A retraining, and another one if that was asked for meanwhile."""
        while True:
            with self._lock:
                if self._stopping:
                    return
                self._asked = False
                started = time.monotonic()
                try:
                    self._running = process = self._start()
                except OSError as error:
                    say(f"retrain: cannot be started ({error}); next time again")
                    return
            code = process.wait()
            say(ended(code, time.monotonic() - started))
            with self._lock:
                self._running = None
                if not self._asked:
                    return


def once(start: Start) -> int:
    """One retraining now; its exit code."""
    started, process = time.monotonic(), start()
    try:
        code = process.wait()
    finally:
        end(process)
    say(ended(code, time.monotonic() - started))
    return code if code >= 0 else 128 - code


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a retraining if it still runs: first kindly, so that it can close its run, then not."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def ended(code: int, seconds: float) -> str:
    """One line about a retraining that ended."""
    meaning = MEANINGS.get(code, "failed; the champion is untouched" if code > 0 else f"killed by signal {-code}")
    return f"retrain: exit code {code} ({meaning}) after {seconds:.0f} s"
