"""The same flow through a real MLflow server: the REST answers differ from the database's in types and addresses."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from draftforge.errors import RegistryError
from draftforge.registry.champions import history, rollback
from draftforge.registry.connect import Tracking, open_tracking
from draftforge.registry.lineage import Version, holdout_overlap
from draftforge.registry.models import CHAMPION, aliases, fetch, targets
from draftforge.registry.promoting import promote
from draftforge.registry.records import Decision
from draftforge.registry.resolve import resolve_models_uri
from draftforge.registry.settings import RegistrySettings
from draftforge.registry.tracking import start_run

pytestmark = pytest.mark.slow
Register = Callable[..., Version]
TARGET = "a" * 64


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.fixture(scope="module")
def server(shared_tracking: Tracking, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An MLflow server over the session's database, that keeps artifacts itself."""
    folder = tmp_path_factory.mktemp("server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--backend-store-uri", shared_tracking.uri, "--artifacts-destination", str(folder / "artifacts")]
    options += ["--port", str(port), "--workers", "1"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *options], stdout=log, stderr=log, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 120
        while not _answers(url):
            assert process.poll() is None and time.monotonic() < until, (folder / "log").read_text()[-2000:]
            time.sleep(0.3)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def tracking(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tracking:
    """The server as the pipeline opens it; `register` uses it too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    settings = RegistrySettings(model="served", experiment="served", connect_seconds=30)
    return open_tracking(settings, tmp_path)


def test_the_flow_through_a_server(
    tracking: Tracking, register: Register, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with start_run(tracking, "demo") as run:
        run.log_params({"steps": 3})
        run.sink().log(1, {"tau": 2.0, "loss": float("nan")})
        run.log_input("mix", tmp_path, "1" * 64)
    with start_run(tracking, "demo", run_id=run.id) as run:
        run.sink().log(1, {"tau": 2.0})
    assert len(tracking.client.get_metric_history(run.id, "tau")) == 1
    one = register("one", clusters=("a",))
    two = register("two", clusters=("b",), parent=one.reference)
    assert register("one") == one and (one.number, two.number) == (1, 2)
    assert one.source.startswith("mlflow-artifacts:")
    assert holdout_overlap(tracking, two, ["a", "x"]) == 1
    for version, compared in ((one, None), (two, one.reference)):
        decision = Decision(promote=True, reasons=["better"], compared=compared)
        assert promote(tracking, decision, version).promote
    with pytest.raises(RegistryError, match="lost a race"):
        promote(tracking, Decision(promote=True, reasons=["x"], compared=None), one)
    assert fetch(tracking, TARGET, tmp_path / "out") == two
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"word": "two"}
    assert (tmp_path / "out" / "nested" / "chat_template.jinja").is_file()
    assert (resolve_models_uri(tracking, "models:/" + one.reference, tmp_path / "m") / "config.json").is_file()
    assert rollback(tracking, TARGET) == one and aliases(tracking, one.name) == {CHAMPION: 1}
    assert len(history(tracking, one.name)) == 3 and targets(tracking)[0].champion == 1
    with pytest.raises(RegistryError, match="has no champion in the registry; targets with a champion: target-aa"):
        fetch(tracking, "b" * 64, tmp_path / "none")
    assert capfd.readouterr() == ("", "")
