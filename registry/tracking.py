"""MLflow runs: parameters, metrics, inputs and artifacts; resumable by id, and FAILED with the reason."""

import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag

from ..errors import MissingFileError, RegistryError, TrackingError
from ..masking import masked, masked_value
from ..progress import say
from .connect import Tracking, mlflow_errors, quick_requests

FINGERPRINT_TAG = "draftforge.fingerprint"
FAILURE_TAG = "draftforge.failure"
_MAX_DIGEST = 36  # MLflow's limits
_MAX_VALUE = 6000
_MAX_BATCH = 100
_MAX_METRICS = 1000


class MlflowSink:
    """Metric sink that sends batches to MLflow. A store that fails for a while delays metrics and never stops training.

    Steps that a resumed run has already logged are dropped: resuming repeats them exactly.
    """

    def __init__(self, tracking: Tracking, run_id: str, prefix: str = "", resumed: bool = False) -> None:
        self._tracking, self._run_id, self._resumed = tracking, run_id, resumed
        self._prefix = f"{prefix}/" if prefix else ""
        self._waiting: list[Metric] = []
        self._last_step: dict[str, int] = {}
        self._next_flush = 0.0
        self._every_seconds = 5.0
        self._retry_seconds = 30.0

    def log(self, step: int, values: dict[str, float]) -> None:
        """Add the values of one step. Infinite values become NaN: MLflow would turn infinity into 1.8e308."""
        now = int(time.time() * 1000)
        for key, value in values.items():
            number = float(value) if math.isfinite(value) else math.nan
            self._waiting.append(Metric(_clean(self._prefix + key), number, now, step))
        if time.monotonic() >= self._next_flush:
            self._try_flush()

    def flush(self) -> None:
        """Send the waiting metrics. Raises TrackingError when the store refuses; a later flush sends what was left."""
        # A resumed run repeats steps that were logged before the stop: drop those. A batch leaves the queue once it is
        # sent.
        with mlflow_errors(self._tracking.uri):
            self._waiting = [metric for metric in self._waiting if metric.step > self._logged_until(metric.key)]
            while self._waiting:
                self._tracking.client.log_batch(self._run_id, metrics=self._waiting[:_MAX_METRICS])
                del self._waiting[:_MAX_METRICS]

    def _try_flush(self) -> None:
        try:
            with quick_requests(timeout_seconds=5):
                self.flush()
            self._next_flush = time.monotonic() + self._every_seconds
        except (TrackingError, RegistryError) as error:
            self._next_flush = time.monotonic() + self._retry_seconds
            say(f"metrics wait ({len(self._waiting)} values), next try in {self._retry_seconds:.0f} s: {error}")

    def _logged_until(self, key: str) -> int:
        if key not in self._last_step:
            history = self._tracking.client.get_metric_history(self._run_id, key) if self._resumed else []
            self._last_step[key] = max((metric.step for metric in history), default=-(2**62))
        return self._last_step[key]


class TrackedRun:
    """One MLflow run that is open for writing."""

    def __init__(self, tracking: Tracking, run_id: str, resumed: bool) -> None:
        self.id, self.resumed = run_id, resumed
        self._tracking, self._client = tracking, tracking.client
        self._sinks: list[MlflowSink] = []

    def sink(self, prefix: str = "") -> MlflowSink:
        """A metric sink; `prefix` (a draft's name, say) goes before each key. Flushed when the run ends."""
        self._sinks.append(MlflowSink(self._tracking, self.id, prefix, self.resumed))
        return self._sinks[-1]

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

    def log_input(self, kind: str, folder: Path, fingerprint: str) -> None:
        """Log a mix or a capture as the run's input: its kind, its place and its fingerprint."""
        dataset = Dataset(
            name=f"{kind}-{fingerprint[:12]}",
            digest=fingerprint[:_MAX_DIGEST],
            source_type="local",
            source=json.dumps({"uri": folder.absolute().as_uri()}),
            profile=json.dumps({"fingerprint": fingerprint}),
        )
        tags = [InputTag("mlflow.data.context", kind), InputTag("draftforge.fingerprint", fingerprint)]
        with mlflow_errors(self._tracking.uri):
            self._client.log_inputs(self.id, [DatasetInput(dataset, tags)])

    def log_file(self, path: Path, to: str | None = None) -> None:
        """Upload a file into the artifact folder `to`."""
        if not path.is_file():
            raise MissingFileError(f"{path}: no such file")
        with mlflow_errors(self._tracking.uri):
            self._client.log_artifact(self.id, str(path), to)

    def log_json(self, value: Any, name: str) -> None:
        """Upload a value as a JSON artifact, secrets masked."""
        with mlflow_errors(self._tracking.uri):
            self._client.log_text(
                self.id, json.dumps(masked_value(value), indent=2, ensure_ascii=False, allow_nan=False), name
            )

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags on the run, secrets masked."""
        items = [RunTag(_clean(key), _shorten(masked(value))) for key, value in tags.items()]
        with mlflow_errors(self._tracking.uri):
            for start in range(0, len(items), _MAX_BATCH):
                self._client.log_batch(self.id, tags=items[start : start + _MAX_BATCH])

    def flush(self) -> None:
        """Send every metric that waits."""
        for sink in self._sinks:
            sink.flush()


@contextmanager
def start_run(
    tracking: Tracking,
    name: str,
    fingerprint: str = "",
    tags: Mapping[str, str] | None = None,
    run_id: str | None = None,
) -> Iterator[TrackedRun]:
    """Open a new run, or resume the one with `run_id`. It ends FINISHED, FAILED (an error) or KILLED (a signal).

    `fingerprint` is what `find_run` finds it by.
    """
    # 1) Create the run, or open it again without the failure of last time.
    client = tracking.client
    tags = {**(tags or {}), **({FINGERPRINT_TAG: fingerprint} if fingerprint else {})}
    with mlflow_errors(tracking.uri):
        if run_id is None:
            created = client.create_run(tracking.experiment_id, tags=tags, run_name=name)
            run = TrackedRun(tracking, created.info.run_id, resumed=False)
        else:
            client.update_run(run_id, status="RUNNING")
            run = TrackedRun(tracking, run_id, resumed=True)
            run.set_tags({**tags, FAILURE_TAG: ""})
    # 2) Whatever ends the block is recorded; metrics that wait are sent first.
    try:
        yield run
        run.flush()
    except BaseException as error:
        _record_failure(run, tracking, error)
        raise
    with mlflow_errors(tracking.uri):
        client.set_terminated(run.id, "FINISHED")


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
    for sink in run._sinks:
        with suppress(Exception), quick_requests(timeout_seconds=5):
            sink.flush()
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
