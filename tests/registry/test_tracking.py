"""Runs: what is logged arrives, a run resumes by id without doubled steps, and failures are recorded as such."""

import dataclasses
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from draftforge.errors import COMMAND, MissingFileError, RegistryError, TrackingError
from draftforge.registry import tracking as module
from draftforge.registry.connect import KIND_TAG, MODEL_TRAINING, Tracking
from draftforge.registry.settings import RegistrySettings
from draftforge.registry.tracking import Outage, TrackedRun, find_run, flatten, missing, start_run


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
    assert inputs == {"mix of demo": "1" * 36, "capture of demo": "2" * 36}
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


def test_what_people_look_for_is_first_and_described(tracking: Tracking) -> None:
    """In the order of MLflow's list of metrics, and in that of its charts, whatever a draft is called."""
    with start_run(tracking, "demo") as run:
        run.log_result(0, 1.0, 1.0, 0)
        run.sink("train/0-draft").log(1, {"loss": 3.0, "Alpha": 0.5})
        run.sink("score/0-draft").log(1, {"tau": 2.0})
        run.log_result(1, 2.0, 1.2, 4)
        run.log_result(1, 2.0, 1.2, 4)
        run.describe("Drafts for **a target**")
    with start_run(tracking, "demo", run_id=run.id) as run:
        run.log_result(0, 1.0, 1.0, 0)
        run.log_result(1, 2.1, 1.2, 4)  # scored again, by another version say
    data = tracking.client.get_run(run.id).data
    assert list(data.metrics)[:3] == ["result/tau", "result/speedup", "result/K"]
    assert sorted(data.metrics)[:3] == ["result/K", "result/speedup", "result/tau"]
    assert data.metrics["result/tau"] == 2.1 and data.metrics["result/speedup"] == 1.2 and data.metrics["result/K"] == 4
    assert steps(tracking, run.id, "result/tau") == [0, 1, 1] and steps(tracking, run.id, "result/K") == [0, 1]
    assert data.tags["mlflow.note.content"] == "Drafts for **a target**"
    assert data.tags["mlflow.source.name"] == "draftforge"


def test_runs_are_filed_under_model_training(tracking: Tracking, tmp_path: Path) -> None:
    client = tracking.client
    assert client.get_experiment(tracking.experiment_id).tags[KIND_TAG] == MODEL_TRAINING
    # One that was made before, and one that somebody has filed.
    for kind, then in (({}, MODEL_TRAINING), ({KIND_TAG: "finetuning"}, "finetuning")):
        made = client.create_experiment(f"kind-{tmp_path.name}-{then}", artifact_location=tmp_path.as_uri(), tags=kind)
        with start_run(dataclasses.replace(tracking, experiment_id=made), "demo"):
            pass
        assert client.get_experiment(made).tags[KIND_TAG] == then


METRICS = st.builds(
    lambda key, step, value: Metric(key, value, 0, step), st.sampled_from("abc"), st.integers(0, 5), st.floats(0, 1)
)


@given(st.lists(METRICS, max_size=40), st.dictionaries(st.sampled_from("abc"), st.sets(st.integers(0, 5))))
def test_what_is_missing_is_each_step_once_and_no_other(waiting: list[Metric], logged: dict[str, set[int]]) -> None:
    found = missing(waiting, logged)
    places = [(metric.key, metric.step) for metric in found]
    wanted = {(metric.key, metric.step) for metric in waiting}
    assert len(places) == len(set(places))
    assert set(places) == {(key, step) for key, step in wanted if step not in logged.get(key, set())}
    # In order, and of each step the first.
    firsts = [next(metric for metric in waiting if (metric.key, metric.step) == place) for place in places]
    assert all(one is other for one, other in zip(found, firsts, strict=True))
    assert sorted(map(waiting.index, found)) == list(map(waiting.index, found))
    # Once it is logged, nothing is missing.
    known = {key: logged.get(key, set()) | {step for one, step in places if one == key} for key in "abc"}
    assert missing(waiting, known) == []


class KilledError(Exception):
    """The process is gone: nothing of it runs any more."""


class Store:
    """A store in memory that takes a batch, or loses it, or its answer, or is killed around it, as it is told."""

    def __init__(self, fates: Iterator[str]) -> None:
        self.metrics: list[Metric] = []
        self._fates = fates

    def log_batch(self, run_id: str, metrics: Sequence[Metric]) -> None:
        fate = next(self._fates, "taken")
        if fate == "killed before":
            raise KilledError
        if fate != "refused":  # the same metric of the same time is kept once
            self.metrics += [metric for metric in metrics if metric not in self.metrics]
        if fate == "killed after":
            raise KilledError
        if fate in ("refused", "answer lost"):
            raise MlflowException("connection reset")

    def get_metric_history(self, run_id: str, key: str) -> list[Metric]:
        return [metric for metric in self.metrics if metric.key == key]


FATES = st.sampled_from(["taken", "taken", "refused", "answer lost", "killed before", "killed after"])


@given(st.lists(FATES, max_size=30), st.integers(1, 4), st.integers(1, 3))
def test_a_curve_is_whole_after_any_kills_and_losses(fates: list[str], every: int, sends: int) -> None:
    """Steps are written to a file first and sent then; every few there is a checkpoint, from which a killed one goes on
    and repeats what came after. `sends`: every how many steps something is sent."""
    store, rows, checkpoint, resumed = Store(iter(fates)), dict[int, float](), 0, False
    clock = count(1.0)  # no two figures are of one time, by which they would be one metric
    tracking = cast(Tracking, SimpleNamespace(uri="sqlite:///x", client=store, settings=RegistrySettings()))
    while True:
        run, resumed = TrackedRun(tracking, "id", "demo", resumed), True
        sink = run.sink("train/small")
        run.send_when_due = lambda: None  # type: ignore[method-assign]
        try:
            sink.log_rows([{"step": step, "loss": loss, "time": next(clock)} for step, loss in rows.items()])
            rows = {step: loss for step, loss in rows.items() if step <= checkpoint}
            for step in range(checkpoint + 1, 11):
                rows[step] = 1 / step
                sink.log(step, {"loss": 1 / step}, next(clock))
                if step % sends == 0:
                    run._try_send()
                checkpoint = step if step % every == 0 else checkpoint
            with suppress(TrackingError):  # a store that is away: the next attempt sends it
                run.flush()
                break
        except KilledError:
            continue
    assert [(metric.step, metric.value) for metric in store.metrics] == [(step, 1 / step) for step in range(1, 11)]


class Client:
    """A client whose store refuses batches while `down`."""

    def __init__(self, tracking: Tracking) -> None:
        self.down = True
        self._client = tracking.client

    def __getattr__(self, name: str) -> Any:
        whole = getattr(self._client, name)

        def call(*arguments: Any, **named: Any) -> Any:
            if self.down and name in ("log_batch", "log_inputs"):
                raise MlflowException("API request failed\nwith a long story")
            return whole(*arguments, **named)

        return call


def test_a_store_that_refuses_delays_metrics_and_inputs_and_stops_nothing(
    tracking: Tracking, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_RETRY_SECONDS", 0.0)
    with start_run(tracking, "demo") as run:
        client = Client(tracking)
        run._client = cast(MlflowClient, client)
        run.log_input("mix", tmp_path, "1" * 64)
        for step in range(5):
            run.sink().log(step, {"loss": float(step)})
        said = capfd.readouterr().err.splitlines()
        assert len(said) == 1 and said[0].startswith("metrics wait (0 values), and are sent later: ")
        with pytest.raises(TrackingError, match="API request failed"):
            run.flush()
        client.down = False
        run.sink().log(5, {"loss": 5.0})
        assert capfd.readouterr().err == "metrics that waited are sent\n"
    assert steps(tracking, run.id, "loss") == [0, 1, 2, 3, 4, 5]
    inputs = tracking.client.get_run(run.id).inputs
    assert inputs is not None and [one.dataset.name for one in inputs.dataset_inputs] == ["mix of demo"]


@pytest.mark.parametrize(
    ("typed", "ranks", "again"),
    [
        ("draftforge distill r.yaml registry.tracking_uri=http://u:p@h", "1", "`draftforge distill r.yaml {}`"),
        ("draftforge distill r.yaml", "2", "the same command"),
        ("", "1", "the same command"),
    ],
)
def test_what_could_not_be_sent_is_said_with_the_command_that_sends_it(
    tracking: Tracking,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    typed: str,
    ranks: str,
    again: str,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", ranks)
    command = COMMAND.set(tuple(typed.split()))
    with pytest.raises(TrackingError, match="API request failed"), start_run(tracking, "demo") as run:
        run._client = cast(MlflowClient, Client(tracking))
        run.waiting += [Metric(key, 1.0, 1, 1) for key in ("loss", "tau")]
    COMMAND.reset(command)
    again = again.format("registry.tracking_uri=http://***@h")
    said = f"2 values of metrics were not sent to MLflow; {again} sends them and goes on\n"
    assert capfd.readouterr().err == said


class Asked:
    """A server that answers, or not, as it is told; each look at it is an event."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reason: str | None = None
        self.limits: list[float] = []
        self.looks: SimpleQueue[str | None] = SimpleQueue()
        monkeypatch.setattr(module, "unreachable", self)

    def __call__(self, tracking: Tracking, seconds: float) -> str | None:
        self.limits.append(seconds)
        self.looks.put(self.reason)
        return self.reason


def server_at(tracking: Tracking, **settings: float) -> Tracking:
    return dataclasses.replace(tracking, uri="http://u:p@host", settings=RegistrySettings(**settings))  # type: ignore[arg-type]


def test_an_outage_is_one_line_and_its_end_another(
    tracking: Tracking, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    server, outage = Asked(monkeypatch), Outage(server_at(tracking))
    for reason in (None, "connection refused", "timed out", None, None):
        server.reason = reason
        assert outage.look() == outage.reason == reason
    assert capfd.readouterr().err.splitlines() == [
        "http://***@host: MLflow does not answer (connection refused); the work goes on, and metrics are sent later",
        "http://***@host: MLflow answers again",
    ]


def test_an_outage_is_noticed_in_time(tracking: Tracking, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever the server goes away: a pause and a whole look later it is said."""
    assert RegistrySettings().notice_seconds == 30
    for seconds in (30.0, 7.0):
        server, outage = Asked(monkeypatch), Outage(server_at(tracking, notice_seconds=seconds))
        outage.look()
        assert server.limits == [outage.look_seconds]
        assert outage.pause_seconds + outage.look_seconds < seconds


def test_a_thread_looks_while_the_run_is_open(
    tracking: Tracking, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    server, outage = Asked(monkeypatch), Outage(server_at(tracking, notice_seconds=0.01))
    with outage.watching():
        server.looks.get(timeout=60)
        server.reason = "timed out"
        while server.looks.get(timeout=60) is None:
            pass
        server.looks.get(timeout=60)  # the look before this one is over
        assert capfd.readouterr().err.count("does not answer (timed out)") == 1
        # Metrics are not tried meanwhile: each try would hold the training up.
        run = TrackedRun(tracking, "none", "demo", resumed=False)
        run.outage = outage
        run.sink().log(1, {"loss": 1.0})
        assert len(run.waiting) == 1
    server.reason = None
    assert outage.look() is None and capfd.readouterr().err == ""  # the run is over


def test_a_file_is_not_watched(tracking: Tracking, monkeypatch: pytest.MonkeyPatch) -> None:
    with start_run(tracking, "demo"):
        assert [thread.name for thread in threading.enumerate() if thread.name == "mlflow-outage"] == []
    assert Outage(tracking).look() is None
