"""Runs: what is logged arrives, a run resumes by id without doubled steps, and failures are recorded as such."""

import math
from pathlib import Path
from typing import Any

import pytest
from mlflow.exceptions import MlflowException

from draftforge.errors import MissingFileError, RegistryError, TrackingError
from draftforge.registry import tracking as module
from draftforge.registry.connect import Tracking
from draftforge.registry.tracking import MlflowSink, find_run, flatten, start_run


def status(tracking: Tracking, run_id: str) -> str:
    return str(tracking.client.get_run(run_id).info.status)


def steps(tracking: Tracking, run_id: str, key: str) -> list[int]:
    return sorted(metric.step for metric in tracking.client.get_metric_history(run_id, key))


def test_flatten_names_every_leaf() -> None:
    recipe = {"mix": {"sources": [{"path": "a.jsonl"}, {"path": "b.jsonl"}]}, "steps": 60, "off": None, "none": []}
    assert flatten(recipe) == {
        "mix.sources.0.path": "a.jsonl",
        "mix.sources.1.path": "b.jsonl",
        "steps": "60",
        "off": "None",
        "none": "[]",
    }
    assert flatten({"we?ird/../k": "v"}) == {"we_ird/_/k": "v"}


def test_a_finished_run_holds_all(tracking: Tracking, tmp_path: Path) -> None:
    (tmp_path / "counts.parquet").write_bytes(b"PAR1")
    with start_run(tracking, "demo", fingerprint="f" * 64, tags={"draftforge.target": "x"}) as run:
        run.log_params({"draft": {"steps": 60}, **{f"k{index}": index for index in range(150)}, "long": "y" * 9000})
        run.sink("small").log(20, {"tau": 1.8, "loss": math.inf})
        run.log_input("mix", tmp_path, "1" * 64)
        run.log_input("mix", tmp_path, "1" * 64)
        run.log_input("capture", tmp_path, "2" * 64)
        run.log_file(tmp_path / "counts.parquet", "scores")
        run.log_json({"steps": [20, 40]}, "tables/final.json")
    stored = tracking.client.get_run(run.id)
    assert stored.info.status == "FINISHED"
    assert stored.data.params["draft.steps"] == "60" and len(stored.data.params) == 152
    assert len(stored.data.params["long"]) == 6000
    assert stored.data.metrics["small/tau"] == 1.8 and math.isnan(stored.data.metrics["small/loss"])
    assert stored.inputs is not None
    inputs = {entry.dataset.name: entry.dataset.digest for entry in stored.inputs.dataset_inputs}
    assert inputs == {"mix-111111111111": "1" * 36, "capture-222222222222": "2" * 36}
    assert [entry.path for entry in tracking.client.list_artifacts(run.id, "scores")] == ["scores/counts.parquet"]
    assert find_run(tracking, "f" * 64) == run.id and find_run(tracking, "e" * 64) is None


def test_logged_inputs_resolve_in_mlflow(tracking: Tracking, tmp_path: Path) -> None:
    import mlflow.data

    with start_run(tracking, "demo") as run:
        run.log_input("mix", tmp_path, "5" * 64)
    inputs = tracking.client.get_run(run.id).inputs
    assert inputs is not None
    entry = inputs.dataset_inputs[0]
    assert mlflow.data.get_source(entry.dataset).to_dict() == {"uri": tmp_path.as_uri()}


def test_resumed_run_repeats_no_step(tracking: Tracking) -> None:
    with pytest.raises(KeyboardInterrupt), start_run(tracking, "demo") as run:
        sink = run.sink()
        for step in (1, 2, 3):
            sink.log(step, {"loss": 1.0 / step})
        raise KeyboardInterrupt
    assert status(tracking, run.id) == "KILLED"
    with start_run(tracking, "demo", run_id=run.id) as again:
        sink = again.sink()
        for step in (2, 3, 4):
            sink.log(step, {"loss": 1.0 / step, "tau": 2.0})
    assert status(tracking, run.id) == "FINISHED"
    assert steps(tracking, run.id, "loss") == [1, 2, 3, 4]
    assert steps(tracking, run.id, "tau") == [2, 3, 4]


def test_changed_parameter_of_a_resumed_run_becomes_a_tag(tracking: Tracking) -> None:
    with start_run(tracking, "demo") as run:
        run.log_params({"out": "here", "steps": 3, "store": "http://u:p@h", "command": ["roll-out", "--token", "t0p"]})
    with start_run(tracking, "demo", run_id=run.id) as again:
        again.log_params({"out": "there", "steps": 3, "new": 1})
    data = tracking.client.get_run(run.id).data
    secret = {"store": "http://***@h", "command.0": "roll-out", "command.1": "--token", "command.2": "***"}
    assert data.params == {"out": "here", "steps": "3", "new": "1", **secret}
    assert data.tags["changed.out"] == "there" and "changed.steps" not in data.tags


def test_failure_is_recorded_and_passes_on(tracking: Tracking) -> None:
    with pytest.raises(ValueError, match="is NaN"), start_run(tracking, "demo") as run:
        run.sink().log(7, {"loss": 3.0})
        raise ValueError("step 8: loss is NaN; store http://u:p@h")
    stored = tracking.client.get_run(run.id)
    assert stored.info.status == "FAILED" and stored.data.metrics == {"loss": 3.0}
    assert stored.data.tags[module.FAILURE_TAG] == "ValueError: step 8: loss is NaN; store http://***@h"
    with start_run(tracking, "demo", run_id=run.id):
        pass
    assert tracking.client.get_run(run.id).data.tags[module.FAILURE_TAG] == ""


def test_unknown_run_and_missing_file(tracking: Tracking, tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match="not found"), start_run(tracking, "demo", run_id="0" * 32):
        pass
    with pytest.raises(MissingFileError, match=r"none\.json"), start_run(tracking, "demo") as run:
        run.log_file(tmp_path / "none.json")


class Outage:
    """A client whose store fails while `down`."""

    def __init__(self, tracking: Tracking) -> None:
        self.down = True
        self._client = tracking.client

    def __getattr__(self, name: str) -> Any:
        if self.down and name == "log_batch":
            raise MlflowException("API request failed\nwith a long story")
        return getattr(self._client, name)


def test_outage_delays_metrics_and_stops_nothing(
    tracking: Tracking, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with start_run(tracking, "demo") as run:
        sink = MlflowSink(tracking, run.id)
        outage = Outage(tracking)
        object.__setattr__(sink._tracking, "client", outage)
        try:
            for step in range(5):
                sink.log(step, {"loss": float(step)})
            assert capfd.readouterr().err.count("metrics wait") == 1
            with pytest.raises(TrackingError, match="API request failed"):
                sink.flush()
            outage.down = False
            sink.flush()
        finally:
            object.__setattr__(sink._tracking, "client", outage._client)
    assert steps(tracking, run.id, "loss") == [0, 1, 2, 3, 4]
