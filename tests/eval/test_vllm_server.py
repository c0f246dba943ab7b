"""Requests to a vLLM server and its counters, over HTTP; an environment of vLLM, by its Python."""

import json
import math
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from simulated_engine import SimulatedEngine

from draftforge.data.backends.http_json import RefusedError
from draftforge.errors import EngineError, InputError, named
from draftforge.eval import vllm_server
from draftforge.eval.vllm_server import EngineReading, VllmClient, VllmLauncher, read_engine, stop
from draftforge.specdec.sampling_settings import SamplingSettings
from draftforge.specdec.serve_commands import plain_command
from draftforge.specdec.target_settings import TargetSettings

GREEDY = SamplingSettings()


def metrics_text(now: EngineReading, engine: str = "0") -> str:
    """As vLLM 0.32 writes them."""
    labels = f'{{engine="{engine}",model_name="served"}}'
    values = {
        "num_requests_running": now.running,
        "num_requests_waiting": now.waiting,
        "num_preemptions_total": now.preempted,
        "time_to_first_token_seconds_count": now.first_tokens,
        "time_to_first_token_seconds_sum": 1.0,
        "inter_token_latency_seconds_count": now.rounds,
        "inter_token_latency_seconds_sum": now.round_seconds,
        "spec_decode_num_drafts_total": now.drafts,
        "spec_decode_num_draft_tokens_total": now.drafted,
    }
    lines = [f"vllm:{name}{labels} {value}" for name, value in values.items()]
    # Finished requests are counted by reason.
    for reason, count in (("length", now.finished), ("stop", 0.0)):
        lines.append(
            f'vllm:request_success_total{{engine="{engine}",finished_reason="{reason}",model_name="served"}} {count}'
        )
    return "\n".join(lines) + "\n"


class Served:
    """A stand-in for a server: a simulated engine behind HTTP, and replies that a test puts in its place."""

    def __init__(self) -> None:
        self.engine = SimulatedEngine(lambda batch, K, context: 0.5, lambda tokens, K: 0.25 * tokens, K=2)
        self.replies: dict[str, tuple[int, str]] = {}
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[str | None] = []

    def answer(self, path: str, body: dict[str, Any] | None) -> tuple[int, str]:
        if path in self.replies:
            return self.replies[path]
        if path == "/version":
            return 200, '{"version": "0.99"}'
        if path == "/v1/models":
            return 200, '{"data": [{"id": "big"}, {"id": "adapter"}]}'
        if path == "/metrics":
            return 200, metrics_text(self.engine.read())
        assert body is not None
        self.bodies.append(body)
        (asked,) = self.engine.begin([body["prompt"]], 1, [body["max_tokens"]], GREEDY)
        return 200, json.dumps({"choices": [{"token_ids": asked.result().ids}]})


@pytest.fixture
def served() -> Iterator[tuple[Served, str]]:
    state = Served()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *ignored: object) -> None:
            pass

        def do_GET(self) -> None:
            self._reply(None)

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _reply(self, body: dict[str, Any] | None) -> None:
            state.headers.append(self.headers["Authorization"])
            status, text = state.answer(self.path, body)
            self.send_response(status)
            self.send_header("Location", "http://127.0.0.1:1/elsewhere")
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield state, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_answers_and_counters_over_http(served: tuple[Served, str]) -> None:
    state, url = served
    client = VllmClient("costs.plain_url", url, key="a-key")
    assert (client.model, client.version()) == ("big", "vLLM 0.99")
    before = client.read()
    warm = SamplingSettings(temperature=0.5, top_p=0.9)
    for prompt, sampling in (([1, 2, 3], GREEDY), ([4, 5], warm)):
        (asked,) = client.begin([prompt], 1, [9], sampling)
        assert asked.result(30).ids == [0] * 9
    added = client.read().since(before)
    assert (added.first_tokens, added.finished, added.engines, added.running) == (2, 2, 1, 0)
    assert added.round_seconds == pytest.approx(0.5 * added.rounds) and added.rounds == added.drafts > 0
    assert added.drafted == 2 * added.drafts
    # Every answer has one length, and no prompt is found in the prefix cache.
    first, second = state.bodies
    assert first["prompt"] == [1, 2, 3] and first["temperature"] == 0 and second["temperature"] == 0.5
    assert all(body["ignore_eos"] and body["max_tokens"] == 9 and body["model"] == "big" for body in state.bodies)
    assert first["cache_salt"] != second["cache_salt"]
    assert set(state.headers) == {"Bearer a-key"}


def test_a_closed_loop_keeps_so_many_in_flight_and_order(served: tuple[Served, str]) -> None:
    """Seven prompts, three at once: the replies to the first three wait for one another, and nothing is asked twice."""
    state, url = served
    client, together, inner = VllmClient("f", url, model="m"), threading.Barrier(3), state.answer
    flying, most, lock = list[int](), list[int](), threading.Lock()

    def answer(path: str, body: dict[str, Any] | None) -> tuple[int, str]:
        assert body is not None
        (number,) = body["prompt"]
        with lock:
            flying.append(number)
            most.append(len(flying))
        if number < 3:
            together.wait(30)
        with lock:
            flying.remove(number)
        return 200, json.dumps({"choices": [{"token_ids": [number] * 2}]})

    state.answer = answer  # type: ignore[method-assign]
    found = [one.result(30) for one in client.begin([[number] for number in range(7)], 3, [2] * 7)]
    assert [one.ids for one in found] == [[number] * 2 for number in range(7)] and max(most) == 3 and len(most) == 7
    assert all(one.begun <= one.ended for one in found) and found[3].begun >= min(one.ended for one in found[:3])
    # One that fails ends it all.
    state.answer = inner  # type: ignore[method-assign]
    state.replies["/v1/completions"] = 500, "{}"
    asked, before = client.begin([[1]] * 50, 2, [2] * 50), len(state.headers)
    assert all(isinstance(one.exception(30), EngineError) for one in asked) and len(state.headers) - before <= 2


def test_a_server_that_fails_or_goes_elsewhere_is_one_line(served: tuple[Served, str]) -> None:
    state, url = served
    client, where = VllmClient("costs.plain_url", url), f"^costs.plain_url: {url.removeprefix('http://')}"
    for status, error, says in (
        (500, EngineError, "status 500"),
        (302, InputError, "status 302"),
        (401, InputError, "wants a key"),
        (404, InputError, "status 404"),
    ):
        state.replies["/metrics"] = state.replies["/v1/completions"] = status, "{}"
        for ask in (client.read, lambda: client.answer([1], 2)):
            with pytest.raises(error, match=f"{where}.*{says}") as found:
                ask()
            assert "\n" not in str(found.value)
    for text, says in (
        ("", "has no vllm:num_requests_running; must be metrics of vLLM 0.23 or later"),
        ("llamacpp:x 1\n", "has no vllm:num_requests_running"),
        ("{", "not Prometheus text"),
    ):
        state.replies["/metrics"] = 200, text
        with pytest.raises(InputError, match=f"{where}/metrics: .*{says}"):
            client.read()
    state.replies["/v1/completions"] = 200, json.dumps({"choices": [{"token_ids": [1]}]})
    with pytest.raises(EngineError, match=f"{where}: unusable reply .*1 tokens, 2 were asked for"):
        client.answer([1], 2)
    state.replies["/v1/completions"] = 200, json.dumps({"choices": []})
    with pytest.raises(EngineError, match=f"{where}: unusable reply .*list index out of range"):
        client.answer([1], 2)
    assert VllmClient("f", url, model="m").model == "m"
    for odd in ("", "\ud800", "\n", "a" * 513, {"a": 1}):
        state.replies["/version"] = 200, json.dumps({"version": odd})
        with pytest.raises(EngineError, match=r"unusable reply .*a name of the server must be"):
            client.version()
    state.replies["/version"] = 404, ""
    assert client.version() == "vLLM"


def test_counters_that_went_backwards_are_another_engines() -> None:
    now = read_engine(metrics_text(EngineReading(1, 2, 1, 3, 2, 0, 40, 4.0, 40, 80)), "m")
    assert now == EngineReading(1, 2, 1, 3, 2, 0, 40, 4.0, 40, 80)
    assert now.since(now) == EngineReading(1, 2, 1, 0, 0, 0, 0, 0, 0, 0)
    with pytest.raises(EngineError, match="went backwards"):
        now.since(now._replace(rounds=41))
    two = read_engine(metrics_text(now) + metrics_text(now, engine="1"), "m")
    assert (two.engines, two.rounds, two.waiting) == (2, 80, 4)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 1e308])
def test_what_is_no_count_is_refused(value: float) -> None:
    usual = EngineReading(1, 2, 1, 3, 2, 0, 40, 4.0, 40, 80)
    for name in set(EngineReading._fields) - {"engines", "at"}:
        with pytest.raises(InputError, match=f"^m: {name.replace('_', ' ')}: .*must be a count or seconds"):
            read_engine(metrics_text(usual._replace(**{name: value})), "m")  # type: ignore[arg-type]


def launcher(folder: Path, script: str) -> VllmLauncher:
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return VllmLauncher(python, ["--flag"], start_seconds=30)


def test_the_version_is_that_of_the_environment(tmp_path: Path) -> None:
    assert launcher(tmp_path, "echo 0.99.1").version() == "0.99.1"
    for script, says in (
        ("echo 'KeyError: vllm' >&2; exit 1", r"it has no vLLM \(KeyError: vllm\)$"),
        ("true", r"it has no vLLM \(it printed no version\)$"),
    ):
        with pytest.raises(InputError, match=f"{tmp_path}/python: must be the Python of vLLM's environment; {says}"):
            launcher(tmp_path, script).version()
    with pytest.raises(InputError, match="nowhere: must be the Python of vLLM's environment"):
        VllmLauncher(Path("/nowhere"), [], 1.0).version()


def test_no_module_is_taken_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("csv", "email", "pathlib"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a module of the folder')")
    with suppress(InputError):
        VllmLauncher(Path(sys.executable), [], 1.0).version()
    assert not (tmp_path / "__pycache__").exists()


def test_a_second_interrupt_kills_a_server_that_does_not_go(monkeypatch: pytest.MonkeyPatch) -> None:
    stubborn = ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done"]
    process = subprocess.Popen(stubborn, start_new_session=True, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(vllm_server.time, "sleep", interrupted)
        stop(process)
    assert process.wait(30) == -signal.SIGKILL
    process.stdout.close()


@pytest.mark.skipif(sys.platform != "linux", reason="a process tells its children of its end on Linux alone")
def test_a_server_ends_with_the_process_that_started_it() -> None:
    script = f"""import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-I", "-S", "-c", {vllm_server._TIED_SCRIPT!r}, "sh", "-c",
                          "echo ready >&2; exec sleep 60"], start_new_session=True, stderr=subprocess.PIPE)
child.stderr.readline()
os.kill(os.getpid(), 9)"""
    # Its output is at an end once nobody holds it: the child neither.
    subprocess.run([sys.executable, "-I", "-S", "-c", script], stdout=subprocess.PIPE, timeout=30, check=False)


def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    broken = launcher(tmp_path, 'echo "$@"; echo "ValueError: no memory left"; exit 7')
    command = plain_command("vllm", TargetSettings(model="TARGET", context=64))
    with (
        pytest.raises(EngineError, match=r"^the server ended with 7: ValueError: no memory left$"),
        broken.serving(command, "bfloat16", tmp_path / "logs" / "plain.log"),
    ):
        raise AssertionError
    words = (tmp_path / "logs" / "plain.log").read_text().splitlines()[0]
    assert words.startswith("-m vllm.entrypoints.openai.api_server --model TARGET --max-model-len 64 --host 127.0.0.1")
    assert words.endswith("--dtype bfloat16 --flag")


def test_a_refusal_keeps_its_kind_when_a_field_is_named() -> None:
    with pytest.raises(RefusedError, match=r"^field: no$"), named("field"):
        raise RefusedError("no", 400)
