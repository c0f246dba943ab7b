"""vLLM in an environment of its own, on this machine: servers with and without drafts, and what they count and take.

For `bench_served.py`. Flags and requests are those of vLLM 0.23 to 0.33.
"""

import math
import os
import re
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import requests

from draftforge.errors import EngineError
from draftforge.eval.engine_metrics import Counters, parse
from draftforge.progress import say
from draftforge.specdec.formats.layouts import NATIVE
from draftforge.specdec.serve_commands import ServeCommand, lookup_command, plain_command, serve_command
from draftforge.specdec.serving_plan import ServingPlan
from draftforge.specdec.target_settings import TargetSettings

PLAIN = "plain"
MODEL = "served"
"""Name of the target in requests."""
_WARM_TOKENS = 16
_ANSWER_SECONDS = 600.0
_SETTLE_SECONDS = 0.5
"""The engine's process tells its server a step later: counters are read until two readings so far apart are equal."""
_STOP_SECONDS = 30.0
_ERROR = re.compile(r"\b\w*(?:Error|Exception): .+")
Json = dict[str, Any]


class Draft(NamedTuple):
    """What a server drafts with; `folder` None: prompt lookup."""

    name: str
    step: int
    family: str
    folder: Path | None
    digest: str

    @property
    def key(self) -> str:
        return self.name if self.folder is None else f"{self.name}-step-{self.step}"


class Setup(NamedTuple):
    """One server: a draft at one K, or (None) no draft."""

    draft: Draft | None
    draft_tokens: int

    @property
    def key(self) -> str:
        return PLAIN if self.draft is None else f"{self.draft.key}-K{self.draft_tokens}"

    def command(self, target: TargetSettings) -> ServeCommand:
        """vLLM's command by draftforge's own words."""
        if self.draft is None:
            return plain_command("vllm", target)
        if self.draft.folder is None:
            return lookup_command("vllm", self.draft_tokens, target)
        plan = ServingPlan.chain(self.draft_tokens)
        return serve_command(NATIVE, self.draft.family, plan, str(self.draft.folder), target)


@dataclass(frozen=True)
class Vllm:
    """vLLM's environment, and the flags that every server has."""

    python: Path
    site: Path | None
    flags: Sequence[str]
    start_seconds: float

    def words(self, setup: Setup, target: TargetSettings, port: str) -> list[str]:
        """The command of a server: what `draftforge export` prints, run by the environment's Python.

        The program `vllm` asks for its own distribution's version, which builds for CPUs have under another name.
        """
        _, _, model, *given = shlex.split(setup.command(target).text)  # vllm serve TARGET ...
        own = ["--host", "127.0.0.1", "--port", port, "--served-model-name", MODEL, "--dtype", target.dtype]
        words = [str(self.python), "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        return [*words, *given, *own, *self.flags]

    @property
    def environment(self) -> dict[str, str]:
        """This process's, without its own packages."""
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        kept |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        return kept | ({"PYTHONPATH": str(self.site.resolve())} if self.site else {})

    @contextmanager
    def serving(self, setup: Setup, target: TargetSettings, log: Path) -> Iterator[str]:
        """The address of a server that runs; it and all its processes are gone afterwards. Raises EngineError."""
        port = _free_port()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as stream:
            process = subprocess.Popen(
                self.words(setup, target, str(port)),
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its processes are one group, which can be stopped as a whole
            )
        address = f"http://127.0.0.1:{port}"
        try:
            self._wait(address, process, log)
            yield address
            if process.poll() is not None:
                raise EngineError(f"the server ended with {process.returncode}: {reason_in(log)}")
        except requests.RequestException as error:
            died = process.poll() is not None
            raise EngineError(reason_in(log) if died else f"a request failed: {type(error).__name__}") from None
        finally:
            stop(process)

    def _wait(self, address: str, process: subprocess.Popen[bytes], log: Path) -> None:
        """Wait until the server answers."""
        until = time.monotonic() + self.start_seconds
        while time.monotonic() < until:
            if process.poll() is not None:
                raise EngineError(f"ended with {process.returncode}: {reason_in(log)}")
            try:
                if requests.get(f"{address}/health", timeout=2).status_code == 200:
                    return
            except requests.RequestException:
                pass
            time.sleep(0.1)
        raise EngineError(f"did not answer within {self.start_seconds:g} s (--start-seconds): {reason_in(log)}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a server: its whole process group, asked first and killed where it does not go."""
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
    say(f"a process of group {process.pid} is still there after {2 * _STOP_SECONDS:g} s")


def reason_in(log: Path) -> str:
    """The line of a log that says why a server failed: its last error but those that only point to another."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [found[0] for line in lines if (found := _ERROR.search(line)) and "See root cause" not in line]
    return ([*lines, *errors] or ["nothing was said"])[-1][-300:]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Prompt(NamedTuple):
    """A prompt with its domain."""

    ids: list[int]
    domain: str


class Client:
    """Requests to one server."""

    def __init__(self, address: str) -> None:
        self._address, self._local = address, threading.local()

    def answer(self, prompt: Prompt, tokens: int) -> tuple[list[int], float]:
        """Ids of a greedy answer of exactly so many tokens, and its seconds. Raises EngineError."""
        if not hasattr(self._local, "session"):
            self._local.session = requests.Session()
        body = {"model": MODEL, "prompt": prompt.ids, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        begun = time.monotonic()
        reply = self._local.session.post(
            f"{self._address}/v1/completions", json=body | {"return_token_ids": True}, timeout=_ANSWER_SECONDS
        )
        if reply.status_code != 200:
            raise EngineError(f"answered {reply.status_code}: {reply.text[:200]}")
        try:
            ids: list[int] = reply.json()["choices"][0]["token_ids"]
        except (LookupError, TypeError):
            raise EngineError(f"answered without token_ids: {reply.text[:200]}") from None
        if len(ids) != tokens:
            raise EngineError(f"answered {len(ids)} tokens, {tokens} were asked for")
        return ids, time.monotonic() - begun

    def counters(self) -> Counters:
        """The engine's counts once nothing is added any more."""
        found, before = self._read(), None
        while found != before:
            time.sleep(_SETTLE_SECONDS)
            found, before = self._read(), found
        return found

    def _read(self) -> Counters:
        return parse(requests.get(f"{self._address}/metrics", timeout=30).text, f"{self._address}/metrics")

    def version(self) -> str:
        return f"vLLM {requests.get(f'{self._address}/version', timeout=30).json()['version']}"


def measure(
    client: Client, setup: Setup, prompts: Sequence[Prompt], concurrency: int, tokens: int, waves: int
) -> tuple[Json, list[tuple[int, list[int]]]]:
    """Figures of one server at one concurrency, and its answers by number of the prompt."""
    # Whole passes over the prompts, so that each counts alike, and at least so many waves of requests.
    passes = math.ceil(waves * concurrency / len(prompts))
    order = [number for _ in range(passes) for number in range(len(prompts))]
    with ThreadPoolExecutor(concurrency) as pool:
        list(pool.map(lambda number: client.answer(prompts[number], min(_WARM_TOKENS, tokens)), order[:concurrency]))
        before = None if setup.draft is None else client.counters()
        begun = time.monotonic()
        replies = list(pool.map(lambda number: client.answer(prompts[number], tokens), order))
        seconds = time.monotonic() - begun
    figures: Json = {"requests": len(order), "tokens": len(order) * tokens, "seconds": seconds}
    figures["tokens_per_second"] = figures["tokens"] / seconds
    figures["slots"] = sum(each for _, each in replies) / seconds
    if before is not None:
        added = client.counters().since(before)
        if not added.rounds:
            raise EngineError("its counters tell no draft")
        figures |= {"drafts": added.rounds, "drafted": added.drafted, "accepted": added.accepted, "tau": added.tau}
        figures["accepted_at"] = [count / added.rounds for count in added.accepted_at]
    return figures, [(number, ids) for number, (ids, _) in zip(order, replies, strict=True)]
