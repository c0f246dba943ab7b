"""`draftforge watch`: one retraining at a time, none lost, none left behind; and webhooks as MLflow signs them."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from mlflow.webhooks import delivery as mlflow_delivery

from draftforge.errors import CorruptDataError, InputError, StoppedError
from draftforge.pipeline import watch as watching
from draftforge.pipeline.cli_exit import sigterm_unwinds
from draftforge.pipeline.watch import (
    DELIVERY,
    SIGNATURE,
    TIMESTAMP,
    Receiver,
    RetrainScheduler,
    describe_end,
    listening,
    matches,
    run_once,
    seconds_of,
    secret_of,
    watched_alias,
)
from draftforge.storage import read_json


class Process:
    """A retraining that ends when it is told to."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def wait(self, timeout: float | None = None) -> int:
        assert self.ended.wait(60)
        return 0

    def poll(self) -> int | None:
        return 0 if self.ended.is_set() else None

    def send_signal(self, number: int) -> None:
        self.ended.set()


class Starts:
    """Starts such processes, and keeps them."""

    def __init__(self) -> None:
        self.processes: list[Process] = []
        self._started = threading.Semaphore(0)

    def __call__(self) -> Any:
        self.processes.append(Process())
        self._started.release()
        return self.processes[-1]

    def next(self) -> Process:
        """The next one that is started."""
        assert self._started.acquire(timeout=60)
        return self.processes[-1]


@pytest.fixture
def starts() -> Starts:
    return Starts()


@pytest.fixture
def scheduler(starts: Starts) -> Iterator[RetrainScheduler]:
    """A schedule that runs until the test ends."""
    schedule = RetrainScheduler(starts, every_seconds=3600)
    schedule._scheduler.start()
    yield schedule
    schedule.stop()


def script(code: str) -> Callable[[], "subprocess.Popen[bytes]"]:
    return lambda: subprocess.Popen([sys.executable, "-c", code])


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "too late"
        time.sleep(0.02)


def test_times_are_read() -> None:
    texts = ("90s", "30m", "6h", "1d", "1.5h")
    assert [seconds_of(text, "--every") for text in texts] == [90, 1800, 21600, 86400, 5400]
    for text in ("6", "h", "0s", "0.5s", "-1h", "6 h", "6w", "1e3s", "366d", "9" * 400 + "s"):
        with pytest.raises(InputError, match=r"--every .*: must be a number and s, m, h or d"):
            seconds_of(text, "--every")


def test_the_first_retraining_starts_at_once_and_the_others_follow(scheduler: RetrainScheduler, starts: Starts) -> None:
    starts.next()
    job = scheduler._scheduler.get_job("retrain")
    assert job.trigger.interval == timedelta(hours=1)
    assert job.coalesce  # what was missed is done once
    scheduler._run()
    assert len(starts.processes) == 1  # no two at once


def test_what_is_requested_meanwhile_is_done_once_afterwards(scheduler: RetrainScheduler, starts: Starts) -> None:
    first = starts.next()
    for _ in range(5):
        scheduler.request()
    assert len(starts.processes) == 1
    first.ended.set()
    starts.next().ended.set()
    until(lambda: scheduler._running is None)
    assert len(starts.processes) == 2
    scheduler.request()  # nothing runs: at once
    starts.next()


def test_what_is_requested_right_after_an_end_is_done(starts: Starts) -> None:
    """While APScheduler still counts the run that has ended."""
    found: list[Process] = []

    class Ending(RetrainScheduler):
        def _run(self) -> None:
            super()._run()
            if len(found) < 2:
                self.request()
                found.append(starts.next())

    schedule = Ending(starts, every_seconds=3600)
    schedule._scheduler.start()
    starts.next().ended.set()
    until(lambda: len(found) == 1)
    found[0].ended.set()
    until(lambda: len(found) == 2)
    schedule.stop()
    assert len(starts.processes) == 3


def test_a_clock_that_is_set_moves_the_next_run_and_a_disciplined_one_does_not(
    monkeypatch: pytest.MonkeyPatch, starts: Starts, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = RetrainScheduler(starts, every_seconds=3600)
    schedule._scheduler.start(paused=True)
    job, honest = schedule._scheduler.get_job("retrain"), time.time
    before = job.next_run_time
    for shift, moved in ((0.5, 0), (-60, -60), (-60, -60), (3600, 3600)):  # against the clock at the start
        monkeypatch.setattr(watching.time, "time", lambda shift=shift: honest() + shift)
        schedule.tick()
        found = (schedule._scheduler.get_job("retrain").next_run_time - before).total_seconds()
        assert abs(found - moved) < 1
    assert "the clock was set by -60 s" in capsys.readouterr().err
    schedule.stop()


def test_stopping_ends_the_retraining_kindly(tmp_path: Path) -> None:
    mark, ready = tmp_path / "unwound", tmp_path / "ready"
    code = (
        f"import signal, sys, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: (open({str(mark)!r}, 'w').close(), sys.exit(143)))\n"
        f"open({str(ready)!r}, 'w').close()\ntime.sleep(60)"
    )
    schedule = RetrainScheduler(script(code), every_seconds=3600)
    schedule._scheduler.start()
    until(ready.exists)
    running = schedule._running
    assert running is not None
    schedule.stop()
    assert mark.exists() and running.poll() == 143 and not schedule._scheduler.running


def test_a_retraining_that_does_not_listen_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_STOP_SECONDS", 0.3)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.read(1) == b"1"
    watching.terminate(process)
    assert process.wait(60) == -signal.SIGKILL


def test_a_start_that_fails_is_said_and_tried_again(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> Any:
        raise OSError("no more processes")

    schedule = RetrainScheduler(refuse, every_seconds=3600)
    for _ in range(2):
        schedule._run()
    assert capsys.readouterr().err.count("cannot be started (no more processes)") == 2


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
    assert describe_end(code, 12.4) == f"retrain: exit code {code} ({said}) after 12 s"


def test_once_gives_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_once(script("raise SystemExit(5)")) == 5
    assert run_once(script("import os; os.kill(os.getpid(), 9)")) == 137
    assert "refused" in capsys.readouterr().err


def test_sigterm_ends_the_schedule_and_the_retraining(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    schedule = RetrainScheduler(script(f"import time; open({str(ready)!r}, 'w').close(); time.sleep(600)"), 3600)
    running: list[Any] = []

    def stop() -> None:
        until(ready.exists)
        running.append(schedule._running)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(StoppedError), sigterm_unwinds():
        schedule.serve()
    thread.join()
    assert running[0].wait(60) == -signal.SIGTERM


SECRET = "not a real secret"
MOVED = {
    "entity": "model_version_alias",
    "action": "created",
    "timestamp": "2026-01-01T00:00:00+00:00",
    "data": {"name": "assistant", "alias": "production", "version": "7"},
}


class Server:
    def __init__(self) -> None:
        self.requested = 0
        self.receiver = Receiver(SECRET, lambda event: matches(event, "assistant", "production"), self._request)
        self.port = 0

    def _request(self) -> None:
        self.requested += 1

    def post(self, body: bytes, headers: dict[str, str]) -> int:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("POST", "/", body, headers)
            return connection.getresponse().status
        finally:
            connection.close()


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    with listening(found.receiver, "127.0.0.1", 0) as found.port:
        yield found


def signed(body: bytes, delivery: str = "d1", at: float | None = None, secret: str = SECRET) -> dict[str, str]:
    """Headers as MLflow's own code makes them."""
    stamp = str(int(time.time() if at is None else at))
    mark = mlflow_delivery._generate_hmac_signature(secret, delivery, stamp, body.decode())
    return {SIGNATURE: mark, TIMESTAMP: stamp, DELIVERY: delivery}


def test_an_alias_that_moved_asks_for_a_retraining_once(server: Server) -> None:
    body = json.dumps(MOVED).encode()
    assert server.post(body, signed(body)) == 202
    assert server.post(body, signed(body)) == 204  # the same delivery again
    assert server.requested == 1


def test_a_replay_is_known_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body, kept, acted = json.dumps(MOVED).encode(), tmp_path / "deliveries.json", []

    def restarted() -> Receiver:
        return Receiver(SECRET, lambda event: matches(event, "assistant", "production"), lambda: acted.append(1), kept)

    headers = signed(body)
    assert restarted().accept(headers, body) == 202
    assert restarted().accept(headers, body) == 204 and acted == [1]
    assert restarted().accept(signed(body, "d2"), body) == 202
    # Ids are forgotten only once their signature is too old.
    now = time.time()
    monkeypatch.setattr(watching.time, "time", lambda: now + 290)
    assert restarted().accept(headers, body) == 204
    monkeypatch.setattr(watching.time, "time", lambda: now + 310)
    assert restarted().accept(headers, body) == 401
    assert restarted().accept(signed(body, "d4", at=10.0**40), body) == 401
    assert restarted().accept(signed(body, "d3", at=now + 310), body) == 202
    assert list(read_json(kept)) == ["d3"]
    kept.write_text("[")
    with pytest.raises(CorruptDataError, match="not valid JSON"):
        restarted()


def test_a_delivery_that_could_not_be_remembered_is_acted_on_when_it_is_repeated(tmp_path: Path) -> None:
    """A full disk for a moment lost it: the repetition counted as a replay."""
    body, kept, acted = json.dumps(MOVED).encode(), tmp_path / "deliveries.json", []
    receiver = Receiver(SECRET, lambda event: True, lambda: acted.append(1), kept)
    kept.mkdir()
    with pytest.raises(InputError, match="must be a regular file"):
        receiver.accept(signed(body), body)
    kept.rmdir()
    assert receiver.accept(signed(body), body) == 202 and acted == [1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"entity": "model_version", "action": "created"},
        {"action": "deleted"},
        {"data": {"name": "assistant", "alias": "staging", "version": "7"}},
        {"data": {"name": "another", "alias": "production", "version": "7"}},
        {"data": None},
    ],
)
def test_other_events_are_heard_and_left(change: dict[str, Any], server: Server) -> None:
    body = json.dumps(MOVED | change).encode()
    assert server.post(body, signed(body)) == 204 and server.requested == 0


def test_what_is_not_signed_rightly_is_refused(server: Server) -> None:
    body = json.dumps(MOVED).encode()
    assert server.post(body, {}) == 401
    assert server.post(body, signed(body, secret="another")) == 401
    assert server.post(body + b" ", signed(body)) == 401
    for name in (SIGNATURE, TIMESTAMP, DELIVERY):
        headers = signed(body)
        del headers[name]
        assert server.post(body, headers) == 401
    assert server.post(body, signed(body) | {DELIVERY: "d2"}) == 401  # the signature covers the id
    assert server.post(body, signed(body, at=time.time() - 301)) == 401
    assert server.post(body, signed(body, at=time.time() + 330)) == 401
    assert server.requested == 0
    assert server.post(b"{", signed(b"{", "d3")) == 400
    assert server.post(b"[]", signed(b"[]", "d4")) == 204


def test_bodies_have_a_limit_and_a_length(server: Server) -> None:
    large = b"x" * (watching.MOST_BYTES + 1)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
        raw.sendall(f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {len(large)}\r\n\r\n".encode())
        assert b" 413 " in raw.recv(100)  # before any of it was read
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
        raw.sendall(b"POST / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 411 " in raw.recv(100)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 501 " in raw.recv(100)


def test_a_silent_client_holds_up_nobody(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps(MOVED).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
        raw.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nab")
        assert server.post(body, signed(body)) == 202


def test_many_at_once_ask_once_each(server: Server) -> None:
    body = json.dumps(MOVED).encode()
    statuses: list[int] = []
    threads = [
        threading.Thread(target=lambda: statuses.append(server.post(body, signed(body, "same")))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(statuses) == [202] + [204] * 7 and server.requested == 1


def test_mlflow_itself_is_heard(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A delivery by MLflow's own sender."""
    from mlflow.entities.webhook import Webhook, WebhookAction, WebhookEntity, WebhookEvent

    monkeypatch.setenv("MLFLOW_WEBHOOK_ALLOWED_SCHEMES", "http")
    monkeypatch.setenv("MLFLOW_WEBHOOK_ALLOW_PRIVATE_IPS", "true")
    event = WebhookEvent(WebhookEntity.MODEL_VERSION_ALIAS, WebhookAction.CREATED)
    hook = Webhook("id", "name", f"http://127.0.0.1:{server.port}/", [event], 0, 0, secret=SECRET)
    session = mlflow_delivery._create_webhook_session()
    payload: Any = {"name": "assistant", "alias": "production", "version": "8"}
    assert mlflow_delivery._send_webhook_request(hook, payload, event, session).status_code == 202
    assert server.requested == 1


def test_without_a_secret_or_an_alias_nothing_listens() -> None:
    assert secret_of({watching.SECRET_VARIABLE: "s"}) == "s"
    with pytest.raises(InputError, match="DRAFTFORGE_WEBHOOK_SECRET: is not set"):
        secret_of({})
    assert watched_alias("models:/assistant@production") == ("assistant", "production")
    for model in ("models:/assistant/3", "./folder", "owner/name@production"):
        with pytest.raises(InputError, match="must be models:/NAME@ALIAS"):
            watched_alias(model)


def test_a_taken_port_is_one_line(server: Server) -> None:
    said = rf"--webhook {server.port}: cannot listen on 127.0.0.1:{server.port} \("
    with pytest.raises(InputError, match=said), listening(server.receiver, "127.0.0.1", server.port):
        pass


def test_a_retraining_takes_no_module_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    with monkeypatch.context() as patch:
        patch.setattr(watching.subprocess, "Popen", started.append)
        watching.retrain_command(["recipe.yaml"])()
    (tmp_path / "draftforge.py").write_text("print('a module of the folder')")
    python = [*started[0][: started[0].index("-m")], "-c", "import draftforge; print('the package')"]
    done = subprocess.check_output(python, cwd=tmp_path, text=True)
    assert done == "the package\n"
