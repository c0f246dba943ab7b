"""A real MLflow server that is killed and started again under an open run, and the command that shows a run."""

import shlex
import shutil
import sys
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue

import pytest
from mlflow_server import mlflow_server, serving

from draftforge.distributed import free_port
from draftforge.registry import tracking as module
from draftforge.registry.connect import Tracking, how_to_look, open_tracking
from draftforge.registry.settings import RegistrySettings
from draftforge.registry.tracking import start_run

pytestmark = pytest.mark.slow


def test_a_killed_server_is_said_within_30_seconds_and_gets_everything_later(
    shared_tracking: Tracking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the settings as they come; nothing is logged meanwhile, so that only the watch can notice."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    said: SimpleQueue[str] = SimpleQueue()
    monkeypatch.setattr(module, "say", said.put)
    # A store of its own: the experiments that a server makes lie beyond the reach of other tests.
    store = f"sqlite:///{shutil.copy(shared_tracking.uri.removeprefix('sqlite:///'), tmp_path / 'served.db')}"
    server, port = ExitStack(), free_port()
    with server:
        url = server.enter_context(mlflow_server(store, tmp_path, port))
        tracking = open_tracking(RegistrySettings(tracking_uri=url, connect_seconds=60), tmp_path)
        with start_run(tracking, "demo") as run:
            sink = run.sink("train/small")
            sink.log(1, {"loss": 1.0})
            server.close()
            line = said.get(timeout=tracking.settings.notice_seconds)
            assert line.startswith(f"{url}: MLflow does not answer (connection refused)")
            for step in (2, 3):
                sink.log(step, {"loss": 1 / step})
            assert [metric.step for metric in run.waiting] == [2, 3]
            server.enter_context(mlflow_server(store, tmp_path, port))
            assert said.get(timeout=60) == f"{url}: MLflow answers again"
            assert said.empty()
        history = tracking.client.get_metric_history(run.id, "train/small/loss")
        assert [(metric.step, metric.value) for metric in history] == [(1, 1.0), (2, 1 / 2), (3, 1 / 3)]
        assert tracking.client.get_run(run.id).info.status == "FINISHED"


def test_the_command_for_a_database_shows_the_run_and_its_files(shared_tracking: Tracking, tmp_path: Path) -> None:
    with start_run(shared_tracking, "demo") as run:
        run.log_json({"a": 1}, "tables/recipe.json")
    command, page = how_to_look(shared_tracking, run.id).split(", then ")
    port = free_port()
    words = [sys.executable, "-m", *shlex.split(command), "--port", str(port), "--workers", "1"]
    quick = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # eight processes more, none of which shows a run
    with serving(words, tmp_path, port, quick) as place:
        assert page.startswith("http://127.0.0.1:5000/#/experiments/") and page.endswith(f"/runs/{run.id}")
        assert run.id in _get(f"{place}/ajax-api/2.0/mlflow/runs/get?run_id={run.id}")
        assert '"a": 1' in _get(f"{place}/get-artifact?run_uuid={run.id}&path=tables/recipe.json")


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())
