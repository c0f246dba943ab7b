"""A real MLflow server for tests, started as an operator starts one."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from draftforge.distributed import free_port

SCRIPT = Path(__file__).resolve().parent.parent.parent / "scripts" / "mlflow_server.sh"


@contextmanager
def mlflow_server(store: str, folder: Path, port: int | None = None) -> Iterator[str]:
    """The address of a server over this database, that keeps its artifacts in `folder`; it is killed in the end.

    `port`: where another one was, to be the same server started again.
    """
    port = port or free_port()
    env = {"MLFLOW_BACKEND_STORE_URI": store, "PYTHON": sys.executable, "MLFLOW_WORKERS": "1"}
    with serving([str(SCRIPT), str(folder / "artifacts"), str(port)], folder, port, env) as url:
        yield url


@contextmanager
def serving(command: Sequence[str], folder: Path, port: int, variables: Mapping[str, str]) -> Iterator[str]:
    """The address of the server that a command starts on this port, once it answers; all of it is killed in the end."""
    env = os.environ | variables
    env.pop("MLFLOW_TRACKING_URI", None)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=folder, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 150
        while not _answers(url):
            assert process.poll() is None and time.monotonic() < until, (folder / "log").read_text()[-2000:]
            time.sleep(0.3)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
