"""A vLLM server: start one from an environment of its own on this machine, send it requests, and read its counters.

Options, requests and metrics are those of vLLM 0.23 to 0.33.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import requests

from ..data.backends.http_json import JsonServer, RefusedError
from ..distributed import free_port
from ..errors import EngineError, InputError, one_line
from ..http_replies import UnusableError, bounded_session
from ..progress import say
from ..specdec.sampling_settings import SamplingSettings
from ..specdec.serve_commands import ServeCommand
from .engine_metrics import MOST_COUNT, samples_by_name, total

MODEL = "served"
"""Name of the target in requests to a server that was started here."""
_LOOPBACK = "127.0.0.1"
_HEALTH_SECONDS, _ENDING_SECONDS, _STOP_SECONDS = 2.0, 5.0, 30.0
_MOST_REPLY_BYTES = 64 << 20
_LONGEST_NAME = 512
_GREEDY = SamplingSettings()
_ERROR = re.compile(r"\b\w*(?:Error|Exception): .+")
_VERSION_SCRIPT = "import importlib.metadata as m; print(m.version(m.packages_distributions()['vllm'][0]))"
_VERSION_SECONDS = 120.0
_TIED_SCRIPT = """import ctypes, os, signal, sys
sys.platform == "linux" and ctypes.CDLL(None).prctl(1, signal.SIGTERM)
os.execvp(sys.argv[1], sys.argv[1:])"""
"""Starts a command that gets SIGTERM where this process is killed: nobody else would stop it (PR_SET_PDEATHSIG)."""


# --- a server's process ---


@dataclass(frozen=True)
class VllmLauncher:
    """vLLM's environment, and the flags that every server has."""

    python: Path
    flags: Sequence[str]
    start_seconds: float
    """A server must answer within these."""
    site: Path | None = None
    """PYTHONPATH of that Python; None: none."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables beside this process's."""

    def version(self) -> str:
        """Version of vLLM in the environment, without starting it. Raises InputError where there is none."""
        try:
            done = subprocess.run(
                [str(self.python), "-c", _VERSION_SCRIPT],
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=_VERSION_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise InputError(
                f"{self.python}: must be the Python of vLLM's environment ({one_line(error, 150)})"
            ) from None
        if done.returncode != 0 or not (found := done.stdout.strip()):
            why = (done.stderr.strip().splitlines() or ["it printed no version"])[-1][:150]
            raise InputError(f"{self.python}: must be the Python of vLLM's environment; it has no vLLM ({why})")
        return found

    def words(self, command: ServeCommand, dtype: str, port: str) -> list[str]:
        """The command of a server: what `draftforge export` prints, run by the environment's Python.

        The program `vllm` asks for its own distribution's version, which builds for CPUs have under another name.
        """
        _, _, model, *given = shlex.split(command.text)  # vllm serve TARGET ...
        own = ["--host", _LOOPBACK, "--port", port, "--served-model-name", MODEL, "--dtype", dtype]
        words = [str(self.python), "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        return [*words, *given, *own, *self.flags]

    @property
    def environment(self) -> dict[str, str]:
        """This process's environment, without its own packages."""
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        # Safe path: no module is taken from the current folder, which may hold files of strangers.
        kept |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}
        kept |= self.variables
        return kept | ({"PYTHONPATH": str(self.site.resolve())} if self.site else {})

    @contextmanager
    def serving(self, command: ServeCommand, dtype: str, log: Path) -> Iterator[str]:
        """The address of a server that runs; it and all its processes are gone afterwards.

        Raises EngineError, with the reason that its log gives, where it does not start or ends before it is stopped.
        """
        with self.starting(command, dtype, log) as server:
            address = server.wait()
            with server.watched():
                yield address

    @contextmanager
    def starting(self, command: ServeCommand, dtype: str, log: Path) -> Iterator["StartedServer"]:
        """A server that does not answer yet; it and all its processes are gone afterwards."""
        port = free_port()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _TIED_SCRIPT, *self.words(command, dtype, str(port))],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its processes are one group, which can be stopped as a whole
            )
        try:
            yield StartedServer(process, f"http://{_LOOPBACK}:{port}", log, self.start_seconds)
        finally:
            stop(process)


class StartedServer(NamedTuple):
    """A server's process from its start on."""

    process: "subprocess.Popen[bytes]"
    address: str
    log: Path
    seconds: float
    """It must answer within these."""

    def wait(self) -> str:
        """Its address, once it answers. Raises EngineError, with the reason that its log gives, where it does not."""
        until = time.monotonic() + self.seconds
        with self.watched(), bounded_session() as session:
            session.trust_env = False  # no proxy stands between this machine and itself
            while time.monotonic() < until:
                if self.process.poll() is not None:
                    raise EngineError("it ended")
                try:
                    if session.get(f"{self.address}/health", timeout=_HEALTH_SECONDS).status_code == 200:
                        return self.address
                except requests.RequestException:
                    pass
                time.sleep(0.1)
            raise EngineError(f"did not answer within {self.seconds:g} s: {reason_in(self.log)}")

    @contextmanager
    def watched(self) -> Iterator[None]:
        """What is done with it. Raises EngineError, with the reason that its log gives, where it ends meanwhile."""
        try:
            yield
            if self.process.poll() is not None:
                raise EngineError("it ended")
        except EngineError:
            # A server whose engine fails refuses requests first, and ends a little later.
            if not _ends_within(self.process, _ENDING_SECONDS):
                raise
            raise EngineError(f"the server ended with {self.process.returncode}: {reason_in(self.log)}") from None

    def end(self) -> None:
        """Ask it to end, without waiting for it."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)


def _ends_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a server: its whole process group, asked first and killed where it does not go, or who waits is stopped."""
    for sent, seconds in ((signal.SIGTERM, _STOP_SECONDS), (signal.SIGKILL, _STOP_SECONDS)):
        until = time.monotonic() + seconds
        try:
            os.killpg(process.pid, sent)
            while time.monotonic() < until:
                process.poll()  # what has ended is taken off the list
                os.killpg(process.pid, 0)
                time.sleep(0.05)
        except ProcessLookupError:
            return
        except BaseException:  # a second Ctrl-C
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    say(f"a process of group {process.pid} is still there after {2 * _STOP_SECONDS:g} s")


def reason_in(log: Path) -> str:
    """The line of a log that says why a server failed: its last error but those that only point to another."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [found[0] for line in lines if (found := _ERROR.search(line)) and "See root cause" not in line]
    return ([*lines, *errors] or ["nothing was said"])[-1][-300:]


# --- requests, and what the server counts ---


class EngineReading(NamedTuple):
    """Counters of a vLLM server since its start, or between two readings, and how many requests it holds."""

    running: float
    """Requests that run at the reading itself."""
    waiting: float
    """Requests that wait at the reading itself."""
    engines: int
    """Replicas behind the address."""
    first_tokens: float
    """Requests that got their first token."""
    finished: float
    preempted: float
    rounds: float
    """Rounds of all requests after their first token, with a draft or without: a pass over B requests counts B."""
    round_seconds: float
    """Seconds between the ends of a request's rounds, summed over all of them."""
    drafts: float
    """Rounds with a draft."""
    drafted: float
    """Drafted tokens."""
    at: float = 0.0
    """Time of the reading, in seconds of the client's clock."""

    def since(self, before: "EngineReading") -> "EngineReading":
        """What was added after `before`. Raises EngineError where a counter went backwards: the engine restarted."""
        own = {"running": self.running, "waiting": self.waiting, "engines": self.engines}
        added = {name: now - then for name, now, then in zip(self._fields, self, before, strict=True)} | own
        if any(value < 0 for value in added.values()):
            raise EngineError("its counters went backwards: it was started again meanwhile")
        return EngineReading(**added)  # type: ignore[arg-type]


def read_engine(text: str, source: str) -> EngineReading:
    """Counters in a server's metrics. Raises InputError, naming `source`, for those of anything but vLLM, and for what
    is no count (NaN, infinite, negative)."""
    found = samples_by_name(text, source)
    names = [
        "num_requests_running",
        "num_requests_waiting",
        "time_to_first_token_seconds_count",
        "request_success_total",
        "inter_token_latency_seconds_count",
        "inter_token_latency_seconds_sum",
    ]
    missing = next((name for name in names if f"vllm:{name}" not in found), None)
    if missing is not None:
        raise InputError(
            f"{source}: has no vllm:{missing}; must be metrics of vLLM 0.23 or later, started without "
            "--disable-log-stats"
        )
    running, waiting, first, finished, rounds, seconds = (total(found, f"vllm:{name}") for name in names)
    reading = EngineReading(
        running=running,
        waiting=waiting,
        engines=len({labels.get("engine") for labels, _ in found["vllm:num_requests_running"]}),
        first_tokens=first,
        finished=finished,
        preempted=total(found, "vllm:num_preemptions_total"),
        rounds=rounds,
        round_seconds=seconds,
        drafts=total(found, "vllm:spec_decode_num_drafts_total"),
        drafted=total(found, "vllm:spec_decode_num_draft_tokens_total"),
    )
    odd = next((name for name, value in reading._asdict().items() if not 0 <= value < MOST_COUNT), None)
    if odd is not None:
        raise InputError(f"{source}: {odd.replace('_', ' ')}: {getattr(reading, odd):g}: must be a count or seconds")
    return reading


class TimedAnswer(NamedTuple):
    """An answer, with the times at which it was asked for and had come, in seconds of one clock."""

    ids: list[int]
    begun: float
    ended: float


class VllmClient:
    """Requests to one server, from any number of threads. Nothing is tried again: it would be counted twice.

    `field` names the server in errors; `model`: its name of the target, None: the one that it serves.
    """

    def __init__(
        self, field: str, url: str, key: str | None = None, timeout_seconds: float = 600.0, model: str | None = None
    ) -> None:
        self._server = JsonServer(field, url, key, timeout_seconds, 0, _MOST_REPLY_BYTES)
        self._given, self.name = model, self._server.name

    @cached_property
    def model(self) -> str:
        """The server's name of the target: of several (adapters) the first."""
        return self._given or self._server.get("/v1/models", lambda reply: _name(reply["data"][0]["id"]))

    def version(self) -> str:
        """The engine with its version; without one where a proxy hides it."""
        try:
            return self._server.get("/version", lambda reply: f"vLLM {_name(reply['version'])}")
        except RefusedError:
            return "vLLM"

    def answer(self, prompt: Sequence[int], tokens: int, sampling: SamplingSettings = _GREEDY) -> list[int]:
        """Ids of an answer of exactly so many tokens. Raises EngineError, or InputError where it is refused."""
        drawn = sampling.model_dump() if not sampling.greedy else {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
        # A salt of its own: a prompt that was read before is read again.
        body: dict[str, Any] = {"model": self.model, "prompt": list(prompt), "max_tokens": tokens, **drawn}
        body |= {"ignore_eos": True, "return_token_ids": True, "cache_salt": uuid.uuid4().hex}

        def read(reply: Any) -> list[int]:
            ids: list[int] = reply["choices"][0]["token_ids"]
            if len(ids) != tokens:
                raise UnusableError(f"{len(ids)} tokens, {tokens} were asked for")
            return ids

        return self._server.post("/v1/completions", body, read)

    def begin(
        self,
        prompts: Sequence[Sequence[int]],
        at_once: int,
        tokens: Sequence[int],
        sampling: SamplingSettings = _GREEDY,
    ) -> list[Future[TimedAnswer]]:
        """Ask for the answers to all prompts, each as `answer` does, `at_once` in flight: the next when one has ended.

        `tokens`: of each answer. Where one fails, nothing more is asked for, and what is left fails with it.
        """
        answers = [Future[TimedAnswer]() for _ in prompts]
        left = deque(zip(prompts, tokens, answers, strict=True))

        def ask() -> None:
            # One of those in flight: a connection of its own, and one request after another.
            with suppress(IndexError):  # nothing is left
                while True:
                    prompt, length, found = left.popleft()
                    begun = time.monotonic()
                    try:
                        ids = self.answer(prompt, length, sampling)
                    except BaseException as error:  # raised again by who waits for it
                        found.set_exception(error)
                        while True:
                            left.popleft()[-1].set_exception(error)
                    found.set_result(TimedAnswer(ids, begun, time.monotonic()))

        for _ in range(min(at_once, len(prompts))):
            # A daemon: a server that hangs must not keep the process alive.
            Thread(target=ask, daemon=True).start()
        return answers

    def metrics(self) -> str:
        """The server's metrics, as Prometheus text."""
        return self._server.get_text("/metrics")

    def read(self) -> EngineReading:
        """The server's counters."""
        return read_engine(self.metrics(), f"{self.name}/metrics")._replace(at=time.monotonic())


def _name(value: Any) -> str:
    """A name in a reply, which is kept and shown: a short text. Raises UnusableError for anything else."""
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST_NAME or not value.isprintable():
        raise UnusableError(f"a name of the server must be a text of {_LONGEST_NAME} printable characters at most")
    return value
