"""`draftforge watch`: a scheduler and a webhook receiver that start retrainings, each in a process of its own.

A retraining that crashes or leaks memory does not affect the watcher. One runs at a time; requests that come meanwhile
are served by one more, after it. APScheduler keeps the times by the wall clock; `RetrainScheduler.tick` moves them
along whenever that clock is set. Webhooks are MLflow's, signed with HMAC-SHA256: one that says that the target's alias
moved starts a retraining.
"""

import base64
import hashlib
import hmac
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apscheduler.schedulers.background import BackgroundScheduler

from .. import storage
from ..errors import InputError
from ..progress import say
from .cli_options import WatchOptions
from .listener import Handler, listening_on

if TYPE_CHECKING:
    from ..recipe import Recipe

# Exit codes of `draftforge retrain` that do not mean a failure.
MEANINGS = {
    0: "up to date, or promoted",
    4: "another one runs",
    5: "the new draft was refused",
    6: "promotion.command failed; the promotion stands",
}
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MOST_SECONDS = 365 * 86400
_JOB = "retrain"
_TICK_SECONDS = 1.0
_MOST_INSTANCES = 1000  # no limit
_CLOCK_SET_SECONDS = 2.0  # the wall clock left the monotonic one by so much: it was set, not merely disciplined
_STOP_SECONDS = 60.0
SECRET_VARIABLE = "DRAFTFORGE_WEBHOOK_SECRET"
SIGNATURE, TIMESTAMP, DELIVERY = "X-MLflow-Signature", "X-MLflow-Timestamp", "X-MLflow-Delivery-Id"
MOST_BYTES = 64 * 1024
_CLOCK_SKEW_SECONDS = 300.0
_TIMESTAMP_DIGITS = 12  # of a delivery, in seconds
DELIVERIES_FILE = ".deliveries.json"
"""Ids of recent deliveries, in the work folder; hidden, as a folder with other content is never taken over."""

Start = Callable[[], "subprocess.Popen[bytes]"]


def watch(recipe: "Recipe", arguments: Sequence[str], options: WatchOptions) -> int:
    """Retrain at an interval, and when a webhook says that the target changed; the exit code.

    `arguments`: those of `draftforge retrain`, the recipe's file and overrides. Raises InputError for options that do
    not fit each other.
    """
    # 1) Check the options; `--once` needs no schedule.
    start = retrain_command(arguments)
    every_seconds = seconds_of(options.every, "--every")
    jitter_seconds = 0.0 if options.jitter is None else seconds_of(options.jitter, "--jitter")
    if options.once and options.webhook is not None:
        raise InputError(f"--webhook {options.webhook}: cannot be served with --once; leave one of them out")
    if options.once:
        return run_once(start)
    # 2) Serve the schedule, and the webhook beside it where one is asked for.
    schedule = RetrainScheduler(start, every_seconds, jitter_seconds)
    say(f"watching {recipe.name}: a retraining now, then every {options.every}")
    if options.webhook is None:
        schedule.serve()
        return 0
    name, alias = watched_alias(recipe.target.model)
    kept = recipe.workdir.resolve() / DELIVERIES_FILE
    receiver = Receiver(secret_of(), lambda event: matches(event, name, alias), schedule.request, kept)
    with listening(receiver, options.bind, options.webhook) as port:
        say(f"listening for webhooks of {name}@{alias} on {options.bind}:{port}")
        schedule.serve()
    return 0


def seconds_of(text: str, option: str) -> float:
    """Seconds of a duration such as `90s`, `30m`, `6h` or `1d`. Raises InputError, naming the option."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    # At a time behind the last year of a calendar the scheduler's thread would end, and nothing be retrained any more.
    if match is None or not 1 <= float(match[1]) * _UNITS[match[2]] <= _MOST_SECONDS:
        raise InputError(f"{option} {text}: must be a number and s, m, h or d, 1s to 365d, such as 6h")
    return float(match[1]) * _UNITS[match[2]]


def retrain_command(arguments: Sequence[str]) -> Start:
    """Starter of retrainings with these arguments, each in a new process of this interpreter."""
    # -P: no module is taken from the current folder, which may hold files of strangers.
    command = [sys.executable, "-P", "-m", "draftforge.cli", "retrain", *arguments]
    return lambda: subprocess.Popen(command)


class RetrainScheduler:
    """Scheduler of one recipe's retrainings: at an interval, on request, and never two at once."""

    def __init__(self, start: Start, every_seconds: float, jitter_seconds: float = 0.0) -> None:
        self._start = start
        self._scheduler = BackgroundScheduler(timezone=UTC)
        # The first run is due at once; runs that were missed while one ran are done once. `_run` lets one at a time
        # through: APScheduler counts one for a moment after its end, and would drop a request that comes then.
        self._scheduler.add_job(
            self._run,
            "interval",
            id=_JOB,
            seconds=every_seconds,
            jitter=jitter_seconds or None,
            next_run_time=datetime.now(UTC),
            coalesce=True,
            max_instances=_MOST_INSTANCES,
            misfire_grace_time=None,  # late, after a suspend say, is better than never
        )
        # Shared by the threads of the scheduler and of the webhook.
        self._lock = threading.Lock()
        self._running: subprocess.Popen[bytes] | None = None
        self._busy = self._requested = self._stopping = False
        self._offset = time.time() - time.monotonic()

    def serve(self) -> None:
        """Retrain by the schedule until a signal's exception ends it; a retraining that runs then is stopped."""
        logging.getLogger("apscheduler").setLevel(logging.ERROR)  # that one still runs is no news
        self._scheduler.start()
        try:
            while True:
                time.sleep(_TICK_SECONDS)
                self.tick()
        finally:
            self.stop()

    def tick(self) -> None:
        """Move the next run by as much as the wall clock was set, so that the time until it stays the same."""
        # The monotonic clock never jumps: a change of the difference is a change of the wall clock.
        offset = time.time() - time.monotonic()
        jump = offset - self._offset
        if abs(jump) < _CLOCK_SET_SECONDS:
            return
        self._offset = offset
        job = self._scheduler.get_job(_JOB)
        if job is not None and job.next_run_time is not None:
            job.modify(next_run_time=job.next_run_time + timedelta(seconds=jump))
            say(f"the clock was set by {jump:+.0f} s: the next retraining moves along")

    def request(self) -> None:
        """Request a retraining as soon as possible; requests that come before it starts are one."""
        with self._lock:
            if self._requested or self._stopping:
                return
            self._requested = True
            # One that runs sees the request when it ends, in `_run`.
            if not self._busy:
                self._scheduler.modify_job(_JOB, next_run_time=datetime.now(UTC))

    def stop(self) -> None:
        """Stop the schedule, and end the retraining that runs."""
        with self._lock:
            self._stopping = True
            running = self._running
        if running is not None:
            terminate(running)
        if self._scheduler.running:
            self._scheduler.shutdown()

    def _run(self) -> None:
        """Run a retraining to its end, and another one if that was requested meanwhile; in a thread of the scheduler.

        Nothing is done where one runs already.
        """
        with self._lock:
            if self._busy:
                return
            self._busy = True
        while True:
            # 1) Start it. `stop` holds the same lock: it finds the process, or nothing starts after it.
            with self._lock:
                self._requested = False
                started = time.monotonic()
                try:
                    process = None if self._stopping else self._start()
                except OSError as error:
                    say(f"retrain: cannot be started ({error}); next time again")
                    process = None
                self._running, self._busy = process, process is not None
                if process is None:
                    return
            # 2) Wait without the lock, so that requests can come in.
            code = process.wait()
            say(describe_end(code, time.monotonic() - started))
            # 3) Go on only if one has.
            with self._lock:
                self._running, self._busy = None, self._requested
                if not self._requested:
                    return


def run_once(start: Start) -> int:
    """Run one retraining, and return its exit code; 128 + N where signal N killed it, as shells do."""
    started, process = time.monotonic(), start()
    try:
        code = process.wait()
    finally:
        terminate(process)
    say(describe_end(code, time.monotonic() - started))
    return code if code >= 0 else 128 - code


def terminate(process: "subprocess.Popen[bytes]") -> None:
    """Terminate a retraining that still runs: SIGTERM, so that it can close its MLflow run; SIGKILL after a minute."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def describe_end(code: int, seconds: float) -> str:
    """Line about a retraining that ended: exit code, its meaning, and seconds."""
    meaning = MEANINGS.get(code, "failed; the champion is untouched" if code > 0 else f"killed by signal {-code}")
    return f"retrain: exit code {code} ({meaning}) after {seconds:.0f} s"


def secret_of(environment: Mapping[str, str] = os.environ) -> str:
    """Secret that webhooks are signed with, from the environment.

    Raises InputError where there is none: without it anybody could start retrainings.
    """
    secret = environment.get(SECRET_VARIABLE, "")
    if not secret:
        raise InputError(f"{SECRET_VARIABLE}: is not set; it must hold the secret that the webhook was made with")
    return secret


def signature(secret: str, delivery: str, timestamp: str, body: bytes) -> str:
    """Signature in MLflow's header `X-MLflow-Signature`: HMAC-SHA256 of `delivery.timestamp.body`, in base64."""
    signed = f"{delivery}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.new(secret.encode(), signed, hashlib.sha256).digest()).decode()


def matches(event: Any, name: str, alias: str) -> bool:
    """Whether an event says that the alias of `models:/name@alias` was set."""
    if not isinstance(event, dict) or not isinstance(event.get("data"), dict):
        return False
    kind, data = (event.get("entity"), event.get("action")), event["data"]
    return kind == ("model_version_alias", "created") and (data.get("name"), data.get("alias")) == (name, alias)


def watched_alias(model: str) -> tuple[str, str]:
    """Name and alias of a target `models:/NAME@ALIAS`. Raises InputError for any other: no webhook tells of it."""
    name, at, alias = model.removeprefix("models:/").partition("@")
    if not (model.startswith("models:/") and at):
        raise InputError(f"--webhook: target.model {model}: must be models:/NAME@ALIAS; no event tells of another")
    return name, alias


class Receiver:
    """Webhook receiver: authenticates each delivery, and acts once on each that matches."""

    def __init__(
        self, secret: str, matches: Callable[[Any], bool], act: Callable[[], None], kept: Path | None = None
    ) -> None:
        """`kept`: the file that keeps what was seen, so that no replay is acted on after a restart; None: no file.

        Raises CorruptDataError where that file is damaged.
        """
        self._secret, self._matches, self._act, self._kept = secret, matches, act, kept
        # By id of a delivery: the unix time until which its signature is recent enough to be sent again.
        self._seen: dict[str, float] = {}
        if kept is not None and kept.is_file():
            known = storage.read_object(kept).items()
            self._seen = {delivery: float(until) for delivery, until in known if isinstance(until, int | float)}
        self._lock = threading.Lock()

    def accept(self, headers: Mapping[str, str], body: bytes) -> int:
        """Handle a delivery; returns the HTTP status.

        202 acted on; 204 authentic, and nothing to do; 400 not JSON; 401 not authentic, or too old.
        """
        # 1) Authentic, recent, and not seen before?
        delivery, timestamp = headers.get(DELIVERY) or "", headers.get(TIMESTAMP) or ""
        wanted = signature(self._secret, delivery, timestamp, body)
        # Compared in constant time: the response time must not tell how much of a forged one is right.
        if not hmac.compare_digest(wanted.encode(), (headers.get(SIGNATURE) or "").encode()):
            return 401
        seconds = int(timestamp) if timestamp.isdecimal() and len(timestamp) <= _TIMESTAMP_DIGITS else 0
        if not abs(time.time() - seconds) <= _CLOCK_SKEW_SECONDS:
            return 401
        # A replay is answered as done: MLflow repeats deliveries whose answer it missed.
        with self._lock:
            now = time.time()
            self._seen = {known: until for known, until in self._seen.items() if until >= now}
            if delivery in self._seen:
                return 204
            self._seen[delivery] = seconds + _CLOCK_SKEW_SECONDS
            if self._kept is not None:
                try:
                    storage.write_json(self._kept, self._seen)
                except Exception:  # no answer then: MLflow repeats what was not acted on
                    del self._seen[delivery]
                    raise
        # 2) Is it about this target's alias?
        try:
            event = storage.parse_json(body)
        except ValueError:
            return 400
        if not self._matches(event):
            return 204
        say(f"webhook: {event['data']['name']} changed")
        self._act()
        return 202


@contextmanager
def listening(receiver: Receiver, address: str, port: int) -> Iterator[int]:
    """Serve deliveries while the body runs; yields the port (0 takes a free one).

    Raises InputError where the address cannot be listened on.
    """

    class Deliveries(Handler):
        def do_POST(self) -> None:  # noqa: N802  http.server's name
            """Read a delivery of limited size, and answer with the receiver's status."""
            # The size is checked before anything is read: whoever sends it is not authenticated yet.
            length = self.headers.get("Content-Length") or ""
            if not length.isdecimal():
                self.answer(411)
            elif len(length) > len(str(MOST_BYTES)) or int(length) > MOST_BYTES:
                self.answer(413)
            else:
                body = self.rfile.read(int(length))
                self.answer(receiver.accept(self.headers, body))  # type: ignore[arg-type]

    with listening_on(Deliveries, address, port, f"--webhook {port}") as bound:
        yield bound
