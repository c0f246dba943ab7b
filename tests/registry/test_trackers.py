"""TensorBoard and Weights & Biases get the parameters and figures that MLflow gets, each step once, secrets masked."""

import dataclasses
import importlib.util
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from draftforge.errors import RecipeError, TrackingError
from draftforge.registry.connect import Tracking
from draftforge.registry.settings import RegistrySettings
from draftforge.registry.trackers import check_trackers
from draftforge.registry.tracking import start_run

PARAMS = {"draft": {"steps": 60}, "target": {"token": "hunter2hunter2"}, "url": "https://me:hunter2hunter2@host/"}
FIGURES = {"train/small/loss": {1: 2.5, 2: 2.0, 3: 1.5}, "score/small/tau": {1: 1.25}, "result/tau": {0: 1.5}}


def run_twice(tracking: Tracking, folder: Path) -> str:
    """A run that is killed after two steps, and goes on: it logs the steps that it knows, and one more."""
    with pytest.raises(KeyboardInterrupt), start_run(tracking, "demo", trackers_folder=folder) as run:
        run.log_params(PARAMS)
        for step in (1, 2):
            run.sink("train/small").log(step, {"loss": FIGURES["train/small/loss"][step], "norm": math.inf})
        raise KeyboardInterrupt
    with start_run(tracking, "demo", run_id=run.id, trackers_folder=folder) as again:
        again.log_params(PARAMS)
        again.sink("train/small").log_rows([{"step": step, "loss": 9.0} for step in (1, 2)])
        again.sink("train/small").log(3, {"loss": 1.5})
        again.sink("score/small").log(1, {"tau": 1.25})
        again.log_result(0, 1.5, 1.1, 4)
    return run.id


def using(tracking: Tracking, *names: str) -> Tracking:
    settings = RegistrySettings.model_validate({"log_with": names, "experiment": "drafts"})
    return dataclasses.replace(tracking, settings=settings)


def of_mlflow(tracking: Tracking, run_id: str) -> dict[str, dict[int, float]]:
    points = {key: tracking.client.get_metric_history(run_id, key) for key in FIGURES}
    return {key: {point.step: point.value for point in history} for key, history in points.items()}


@pytest.mark.slow
def test_tensorboard_gets_what_mlflow_gets(tracking: Tracking, tmp_path: Path) -> None:
    tracking = using(tracking, "tensorboard")
    run_id = run_twice(tracking, tmp_path)
    folder = tmp_path / "tensorboard" / f"demo-{run_id[:8]}"
    read = EventAccumulator(str(folder))
    read.Reload()
    points = {key: read.Scalars(key) for key in FIGURES}
    assert {key: [(point.step, point.value) for point in found] for key, found in points.items()} == {
        key: list(steps.items()) for key, steps in FIGURES.items()
    }
    assert of_mlflow(tracking, run_id) == FIGURES
    assert math.isnan(read.Scalars("train/small/norm")[0].value)
    assert_masked(tmp_path)


@pytest.mark.slow
def test_wandb_gets_what_mlflow_gets(tracking: Tracking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb.teardown()
    monkeypatch.setattr("sys.argv", ["draftforge", "distill", "target.token=hunter2hunter2"])
    tracking = using(tracking, "wandb")
    run_id = run_twice(tracking, tmp_path)
    wandb.teardown()  # its process has written all when it ends
    # Two attempts are two files of one run; the first one has failed.
    first, second = (list(records(path)) for path in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")))
    runs = [record.run for record in first + second if record.WhichOneof("record_type") == "run"]
    assert {(run.run_id, run.project, run.display_name) for run in runs} == {(run_id, "drafts", "demo")}
    exits = [record.exit.exit_code for record in first + second if record.WhichOneof("record_type") == "exit"]
    assert exits == [1, 0]
    config = {item.key or item.nested_key[0] for record in first for item in record.config.update}
    assert {"draft.steps", "target.token", "url"} <= config
    # Figures by the step that they are of.
    figures: dict[str, list[tuple[int, float]]] = {}
    for record in first + second:
        row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for key in row.keys() & FIGURES.keys():
            figures.setdefault(key, []).append((row["step"], row[key]))
    assert figures == {key: list(steps.items()) for key, steps in FIGURES.items()}
    assert [record.metric.step_metric for record in first if record.metric.glob_name == "*"] == ["step"]
    assert_masked(tmp_path)


@pytest.mark.slow
def test_a_tracker_that_cannot_be_opened_is_named(
    tracking: Tracking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    for name in ("WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    wandb.teardown()  # it reads its variables once a process
    with (
        pytest.raises(TrackingError, match=r"registry\.log_with = wandb: "),
        start_run(using(tracking, "wandb"), "demo", trackers_folder=tmp_path),
    ):
        raise AssertionError
    ended = tracking.client.search_runs([tracking.experiment_id], max_results=1)[0]
    assert ended.info.status == "FAILED"


def test_a_tracker_that_fails_later_stops_nothing(
    tracking: Tracking, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with start_run(using(tracking, "tensorboard"), "demo", trackers_folder=tmp_path) as run:
        broken = run.trackers._opened["tensorboard"]
        monkeypatch.setattr(broken, "log", fail)
        for step in range(1, 4):
            run.sink("small").log(step, {"loss": 1.0})
            run.flush()
    assert capsys.readouterr().err.count("tensorboard: takes no figures (disk of password=*** is gone)") == 1
    assert [point.step for point in tracking.client.get_metric_history(run.id, "small/loss")] == [1, 2, 3]


def test_a_missing_package_is_named_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "wandb" else find_spec(name))
    check_trackers(RegistrySettings(log_with=["tensorboard"]))
    with pytest.raises(RecipeError) as error:
        check_trackers(RegistrySettings(log_with=["tensorboard", "wandb"]))
    assert str(error.value) == (
        "registry.log_with = wandb: the package wandb is not installed: pip install 'draftforge[wandb]'"
    )


def fail(*_: object, **__: object) -> None:
    raise OSError("disk of password=hunter2hunter2 is gone")


def assert_masked(folder: Path) -> None:
    written = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    assert written and not [path for path in written if b"hunter2hunter2" in path.read_bytes()]


def records(path: Path) -> Iterator[Any]:
    """Records of a run's file: LevelDB's log format behind a head of 7 bytes, in one block of 32 KiB."""
    data = path.read_bytes()
    assert data[:4] == b":W&B" and len(data) < 32768
    at = 7
    while at < len(data):
        size = int.from_bytes(data[at + 4 : at + 6], "little")
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data[at + 7 : at + 7 + size])
        yield record
        at += 7 + size
