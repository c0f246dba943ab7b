"""MLflow runs: parameters, metrics, inputs and artifacts; resumable by id, and FAILED with the reason."""

import json
import math
import os
import re
import shlex
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE, MLFLOW_SOURCE_NAME, MLFLOW_SOURCE_TYPE

from ..errors import COMMAND, DiskFullError, MissingFileError, RegistryError, TrackingError
from ..masking import masked, masked_value
from ..progress import say
from .connect import (
    KIND_TAG,
    MODEL_TRAINING,
    Tracking,
    mlflow_errors,
    quick_requests,
    unreachable,
    watched,
)
from .trackers import Trackers, open_trackers

FINGERPRINT_TAG = "draftforge.fingerprint"
FAILURE_TAG = "draftforge.failure"
_SOURCE = {MLFLOW_SOURCE_NAME: "draftforge", MLFLOW_SOURCE_TYPE: "JOB"}
_MAX_DIGEST = 36  # MLflow's limits
_MAX_VALUE = 6000
_MAX_BATCH = 100
_MAX_METRICS = 1000
_SEND_SECONDS, _RETRY_SECONDS = 5.0, 30.0
"""How long metrics wait for others to be sent with, and after the store refused some."""


def missing(metrics: Iterable[Metric], logged: Mapping[str, Collection[int]]) -> list[Metric]:
    """Metrics whose step the run has not logged under their key, in order; of several for one step the first.

    `logged`: steps by key. A resumed training repeats steps, and its file of figures holds steps that were sent.
    """
    found: dict[tuple[str, int], Metric] = {}
    for metric in metrics:
        if metric.step not in logged.get(metric.key, ()):
            found.setdefault((metric.key, metric.step), metric)
    return list(found.values())


class Outage:
    """Watch over the server of an open run, by a thread: a line soon after it went away, and one when it is back.

    A third of `registry.notice_seconds` passes between two looks, and a look takes at most another third.
    """

    def __init__(self, tracking: Tracking) -> None:
        self._tracking = tracking
        self.pause_seconds = self.look_seconds = tracking.settings.notice_seconds / 3
        self.reason: str | None = None
        """Why the server does not answer; None: it did at the last look."""
        self._looking = threading.Lock()
        self._over = threading.Event()

    def look(self) -> str | None:
        """Ask the server now, and say what has changed. Returns `reason`."""
        with self._looking:
            before, self.reason = self.reason, unreachable(self._tracking, self.look_seconds)
            where = self._tracking.uri
            if self._over.is_set():  # a look that outlived the run
                return self.reason
            if self.reason and not before:
                say(f"{where}: MLflow does not answer ({self.reason}); the work goes on, and metrics are sent later")
            elif before and not self.reason:
                say(f"{where}: MLflow answers again")
            return self.reason

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look again and again while the body runs; a store that is a file is not looked at."""
        if not watched(self._tracking):
            yield
            return
        threading.Thread(target=self._watch, name="mlflow-outage", daemon=True).start()
        try:
            yield
        finally:
            self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(self.pause_seconds):
            self.look()


class MlflowSink:
    """Metric sink of one prefix of a run (a draft's name, say), which goes before each key."""

    def __init__(self, run: "TrackedRun", prefix: str = "") -> None:
        self._run, self._prefix = run, f"{prefix}/" if prefix else ""

    def log(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        """Add the values of one step, of the time `at` (seconds since 1970; now).

        A step that the run has is dropped. Infinite values become NaN: MLflow would turn infinity into 1.8e308.
        """
        milliseconds = int((time.time() if at is None else at) * 1000)
        for key, value in values.items():
            number = float(value) if math.isfinite(value) else math.nan
            self._run.waiting.append(Metric(_clean(self._prefix + key), number, milliseconds, step))
        self._run.send_when_due()

    def log_rows(self, rows: Iterable[Mapping[str, float]]) -> None:
        """Add what of a training's file of figures the run does not have: rows with `step`, and `time` where known."""
        for row in rows:
            values = {key: value for key, value in row.items() if key not in ("step", "time")}
            self.log(int(row["step"]), values, row.get("time"))


class TrackedRun:
    """One MLflow run that is open for writing.

    What only records (metrics, inputs) waits while the store does not answer, and stops no work.
    """

    def __init__(self, tracking: Tracking, run_id: str, name: str, resumed: bool) -> None:
        self.id, self.name, self.resumed = run_id, name, resumed
        self.waiting: list[Metric] = []
        """Metrics that are not sent yet, in order."""
        self.outage = Outage(tracking)
        self.trackers = Trackers({})
        """Further trackers, which get the parameters and what the store has taken of the figures."""
        self._tracking, self._client = tracking, tracking.client
        self._records: list[Callable[[], None]] = []
        self._logged: dict[str, set[int]] = {}
        self._next_send = 0.0
        self._complained = False

    def sink(self, prefix: str = "") -> MlflowSink:
        """A metric sink; `prefix` goes before each key. What waits is sent when the run ends."""
        return MlflowSink(self, prefix)

    def log_params(self, values: Mapping[str, Any]) -> None:
        """Log nested settings, flat, secrets masked.

        MLflow keeps a first value for good; a new one becomes a tag `changed.KEY`.
        """
        # Only new parameters are sent: MLflow refuses a batch that changes a known one.
        wanted = {key: _shorten(value) for key, value in flatten(masked_value(values)).items()}
        with mlflow_errors(self._tracking.uri):
            known: dict[str, str] = self._client.get_run(self.id).data.params
            fresh = [Param(key, value) for key, value in wanted.items() if key not in known]
            for start in range(0, len(fresh), _MAX_BATCH):
                self._client.log_batch(self.id, params=fresh[start : start + _MAX_BATCH])
        # A resumed run whose settings changed shows it in tags.
        changed = {f"changed.{key}": value for key, value in wanted.items() if known.get(key, value) != value}
        self.set_tags(changed)
        self.trackers.log_params(wanted)

    def log_input(self, kind: str, folder: Path, fingerprint: str) -> None:
        """Log a mix or a capture as the run's input: its kind, its place and its fingerprint."""
        dataset = Dataset(
            name=f"{kind} of {self.name}",
            digest=fingerprint[:_MAX_DIGEST],
            source_type="local",
            source=json.dumps({"uri": folder.absolute().as_uri()}),
            profile=json.dumps({"fingerprint": fingerprint}),
        )
        tags = [InputTag("mlflow.data.context", kind), InputTag("draftforge.fingerprint", fingerprint)]
        self._records.append(partial(self._client.log_inputs, self.id, [DatasetInput(dataset, tags)]))
        self._try_send()

    def log_result(self, step: int, tau: float, speedup: float, draft_tokens: int) -> None:
        """Log the figures that a reader looks for first; a changed value replaces that of the same step.

        MLflow's charts are sorted by name, its list of metrics by when each was first logged: `result/…` is first in
        both where a run begins with it.
        """
        now = int(time.time() * 1000)
        with mlflow_errors(self._tracking.uri):
            for key, value in (("result/tau", tau), ("result/speedup", speedup), ("result/K", float(draft_tokens))):
                # The newest of a step is shown.
                known = [one for one in self._client.get_metric_history(self.id, key) if one.step == step]
                newest = max(known, key=lambda one: one.timestamp, default=None)
                if newest is None or newest.value != value:
                    self._client.log_metric(self.id, key, value, now, step)
                    self.trackers.log([Metric(key, value, now, step)])

    def describe(self, text: str) -> None:
        """Set the description, Markdown, that MLflow shows at the head of the run."""
        self.set_tags({MLFLOW_RUN_NOTE: text})

    def log_file(self, path: Path, to: str | None = None) -> None:
        """Upload a file into the artifact folder `to`."""
        if not path.is_file():
            raise MissingFileError(f"{path}: no such file")
        with mlflow_errors(self._tracking.uri):
            self._client.log_artifact(self.id, str(path), to)

    def log_json(self, value: Any, name: str) -> None:
        """Upload a value as a JSON artifact, secrets masked."""
        text = json.dumps(masked_value(value), indent=2, ensure_ascii=False, allow_nan=False)
        with mlflow_errors(self._tracking.uri):
            self._client.log_text(self.id, text, name)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags on the run, secrets masked."""
        items = [RunTag(_clean(key), _shorten(masked(value))) for key, value in tags.items()]
        with mlflow_errors(self._tracking.uri):
            for start in range(0, len(items), _MAX_BATCH):
                self._client.log_batch(self.id, tags=items[start : start + _MAX_BATCH])

    def flush(self) -> None:
        """Send all that waits. Raises TrackingError when the store refuses; a later flush sends what was left."""
        # Each leaves its queue once it is sent. What was sent although the answer got lost is sent again: the same
        # metric with the same time is one metric to MLflow.
        with mlflow_errors(self._tracking.uri):
            while self._records:
                self._records[0]()
                del self._records[0]
            for key in {metric.key for metric in self.waiting} - self._logged.keys():
                history = self._client.get_metric_history(self.id, key) if self.resumed else []
                self._logged[key] = {metric.step for metric in history}
            self.waiting = missing(self.waiting, self._logged)
            while batch := self.waiting[:_MAX_METRICS]:
                self._client.log_batch(self.id, metrics=batch)
                for metric in batch:
                    self._logged[metric.key].add(metric.step)
                del self.waiting[: len(batch)]
                self.trackers.log(batch)

    def send_when_due(self) -> None:
        """Send what waits, if it has waited long enough and the store was not seen to be away."""
        if time.monotonic() >= self._next_send and not self.outage.reason:
            self._try_send()

    def _try_send(self) -> None:
        """Send what waits; a failure is said once, until something is sent again."""
        try:
            with quick_requests(timeout_seconds=5):
                self.flush()
        except (TrackingError, RegistryError, DiskFullError) as error:
            self._next_send = time.monotonic() + _RETRY_SECONDS
            # A server that is away is said by the watch over it; here, why one that answers takes nothing.
            if not self.outage.look() and not self._complained:
                self._complained = True
                say(f"metrics wait ({len(self.waiting)} values), and are sent later: {error}")
        else:
            self._next_send = time.monotonic() + _SEND_SECONDS
            if self._complained:
                self._complained = False
                say("metrics that waited are sent")


@contextmanager
def start_run(
    tracking: Tracking,
    name: str,
    fingerprint: str = "",
    tags: Mapping[str, str] | None = None,
    run_id: str | None = None,
    trackers_folder: Path | None = None,
) -> Iterator[TrackedRun]:
    """Open a new run, or resume the one with `run_id`. It ends FINISHED, FAILED (an error) or KILLED (a signal).

    `fingerprint` is what `find_run` finds it by. `trackers_folder`: files of the trackers of `registry.log_with`, which
    get what the run gets; None: MLflow alone.
    """
    # 1) Create the run, or open it again without the failure of last time.
    client = tracking.client
    tags = {**(tags or {}), **({FINGERPRINT_TAG: fingerprint} if fingerprint else {})}
    with mlflow_errors(tracking.uri):
        if run_id is None:
            _file_as_training(tracking)
            created = client.create_run(tracking.experiment_id, tags={**_SOURCE, **tags}, run_name=name)
            run = TrackedRun(tracking, created.info.run_id, name, resumed=False)
        else:
            client.update_run(run_id, status="RUNNING")
            run = TrackedRun(tracking, run_id, name, resumed=True)
            run.set_tags({**tags, FAILURE_TAG: ""})
    # 2) Whatever ends the block is recorded; metrics that wait are sent first, and further trackers closed last.
    with ExitStack() as closing:
        try:
            if trackers_folder is not None:
                run.trackers = closing.enter_context(open_trackers(tracking.settings, name, run.id, trackers_folder))
            with run.outage.watching():
                yield run
                run.flush()
        except BaseException as error:
            _record_failure(run, tracking, error)
            raise
    with mlflow_errors(tracking.uri):
        client.set_terminated(run.id, "FINISHED")


def _file_as_training(tracking: Tracking) -> None:
    """File the experiment under model training in MLflow's pages, unless somebody has filed it already."""
    if KIND_TAG not in tracking.client.get_experiment(tracking.experiment_id).tags:
        tracking.client.set_experiment_tag(tracking.experiment_id, KIND_TAG, MODEL_TRAINING)


def find_run(tracking: Tracking, fingerprint: str) -> str | None:
    """The id of the newest run tagged `draftforge.fingerprint` with this value, to resume it."""
    with mlflow_errors(tracking.uri):
        found = tracking.client.search_runs(
            [tracking.experiment_id],
            f"tags.`{FINGERPRINT_TAG}` = '{_clean(fingerprint)}'",
            max_results=1,
            order_by=["attributes.start_time DESC"],
        )
    return str(found[0].info.run_id) if found else None


def flatten(value: Any, prefix: str = "") -> dict[str, str]:
    """Flatten nested mappings and lists to `a.b.0.c` -> text, in names that MLflow accepts."""
    # Empty mappings and lists are leaves, so that they are logged too.
    if isinstance(value, Mapping) and value:
        items: Sequence[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, list | tuple) and value:
        items = list(enumerate(value))
    else:
        return {_clean(prefix): str(value)}
    # Recurse with the path so far as the prefix.
    flat: dict[str, str] = {}
    for key, inner in items:
        flat |= flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _record_failure(run: TrackedRun, tracking: Tracking, error: BaseException) -> None:
    """Tag the run with why it ended. The error itself matters more than a store that does not answer."""
    # Each call may fail by itself: the next is tried all the same, and no error of the store hides the run's own.
    status = "FAILED" if isinstance(error, Exception) else "KILLED"
    reason = f"{type(error).__name__}: {error}"
    try:
        with quick_requests(timeout_seconds=5):
            run.flush()
    except Exception:
        if run.waiting:
            # The command as it was typed; a launch of several ranks is more than one command.
            alone = COMMAND.get() and os.environ.get("WORLD_SIZE", "1") == "1"
            again = f"`{shlex.join(COMMAND.get())}`" if alone else "the same command"
            say(f"{len(run.waiting):,} values of metrics were not sent to MLflow; {again} sends them and goes on")
    with suppress(Exception), quick_requests(timeout_seconds=5):
        run.set_tags({FAILURE_TAG: reason})
    with suppress(Exception), quick_requests(timeout_seconds=5):
        tracking.client.set_terminated(run.id, status)


def _clean(name: str) -> str:
    """Name that MLflow accepts: ASCII letters, digits and `_-. :/`, without empty or dotted path parts."""
    # Forbidden characters first, then path parts that MLflow takes for a traversal.
    name = re.sub(r"[^\w.\- :/]", "_", name, flags=re.ASCII)
    return re.sub(r"/+", "/", re.sub(r"(^|/)\.+(?=/|$)", r"\1_", name)).strip("/")[:250] or "_"


def _shorten(value: str) -> str:
    return value if len(value) <= _MAX_VALUE else value[: _MAX_VALUE - 1] + "…"
