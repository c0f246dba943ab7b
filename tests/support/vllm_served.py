"""A vLLM server in an environment of its own (scripts/make_vllm_venv.sh): float32, on a CPU."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests
from ports import free_port

VLLM = Path(os.environ.get("VLLM_VENV", Path(__file__).parents[2] / ".cache" / "vllm")) / "bin" / "python"


def environment() -> dict[str, str]:
    """Of a process that runs vLLM. Skips the test where there is none."""
    if not VLLM.is_file():
        pytest.skip(f"no vLLM at {VLLM}: `make test-vllm` builds it")
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return own | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


@contextmanager
def served(model: Path, log: Path, **more: object) -> Iterator[str]:
    """The address of a server of a model. `more`: its options, with `_` for `-`."""
    port = free_port()
    arguments = {"model": model, "dtype": "float32", "max_num_seqs": 4, "host": "127.0.0.1", "port": port, **more}
    named = [part for name, value in arguments.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    command = [str(VLLM), "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", *named]
    with log.open("wb") as stream:
        process = subprocess.Popen(command, env=environment(), stdout=stream, stderr=subprocess.STDOUT)
    try:
        address = f"http://127.0.0.1:{port}"
        _wait_until_healthy(address, process, log)
        yield address
    finally:
        process.terminate()
        process.wait(timeout=60)


def _wait_until_healthy(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(300):
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            if requests.get(f"{address}/health", timeout=2).status_code == 200:
                return
        except requests.RequestException:
            pass
        time.sleep(1)
    raise AssertionError(log.read_text()[-4000:])
