"""`draftforge metrics`: what to tell a monitoring system of a champion, once as a file or over and over on a port."""

import json
import math
import re
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import requests
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .. import storage
from ..errors import (
    AcceptanceMismatchError,
    CorruptDataError,
    DraftforgeError,
    InputError,
    MissingFileError,
    RegistryError,
    ServedError,
)
from ..eval.engine_metrics import AcceptanceMismatch, Counters, ExpectedAcceptance, compare, expected_acceptance, parse
from ..eval.figures import Estimate
from ..eval.leaderboard import serving
from ..eval.summary import describe_mismatch
from ..progress import say
from ..recipe import Recipe
from ..registry.artifacts import download
from ..registry.connect import Tracking, mlflow_errors, redacted
from ..registry.lineage import Version, get_version
from ..registry.promotion import history
from ..registry.versions import CHAMPION, aliases, model_name
from .options import MetricsOptions
from .promotion import kept_counts
from .staleness import STALENESS_FILE
from .workspace import Workspace


@dataclass(frozen=True)
class ChampionStatus:
    """What the registry and the work folder say of a target's champion."""

    target: str
    target_name: str
    model: str
    version: int | None = None
    family: str = ""
    step: int = 0
    draft_tokens: int = 0
    tree: str = ""
    created_at: float | None = None
    promoted_at: float | None = None
    tau: Estimate | None = None
    speedup: float | None = None
    acceptance: Estimate | None = None
    alphas: Sequence[Estimate] = ()
    stale: bool | None = None
    stale_causes: Sequence[str] = ()
    checked_at: float | None = None
    decision: str | None = None
    """promote or refuse, of the newest version that a gate judged."""
    decided_version: int | None = None
    decided_at: float | None = None
    run_ended_at: float | None = None
    """When the last run of the recipe ended."""
    run_succeeded: bool | None = None


def champion_families(standing: ChampionStatus, now: float) -> Iterator[Metric]:
    """The champion: who, how good, how old, stale or not; the last decision and the last run."""
    labels = {"target": standing.target[:12], "model": standing.model}
    about = labels | {
        "target_name": standing.target_name,
        "version": "" if standing.version is None else str(standing.version),
        "family": standing.family,
        "step": str(standing.step),
        "draft_tokens": str(standing.draft_tokens),
        "tree": standing.tree,
    }
    there = standing.version is not None
    yield _one("champion_exists", "Whether the target has a champion.", labels, float(there))
    if there:
        yield _one("champion_info", "The champion of the target; always 1.", about, 1.0)
        yield from _quality(standing, labels)
        yield from _ages(standing, labels, now)
    yield from _staleness_metrics(standing, labels)
    if standing.decision is not None:
        told = labels | {"decision": standing.decision, "version": str(standing.decided_version)}
        yield _one("last_decision", "The gate's last decision, promote or refuse; always 1.", told, 1.0)
    yield from _known("last_decision_timestamp_seconds", "When it was taken.", labels, standing.decided_at)
    yield from _known("last_retrain_timestamp_seconds", "When the last run ended.", labels, standing.run_ended_at)
    succeeded = None if standing.run_succeeded is None else float(standing.run_succeeded)
    yield from _known("last_retrain_success", "Whether the last run ended well.", labels, succeeded)


def served_families(counters: Counters | None, mismatch: AcceptanceMismatch | None) -> Iterator[Metric]:
    """What an engine counts, beside what was promised. No counters: the engine did not answer."""
    yield _one("served_up", "Whether the engine's counters could be read.", {}, float(counters is not None))
    if counters is None:
        return
    labels = {"engine": counters.engine}
    yield _one("served_rounds", "Rounds in the window that is compared.", labels, counters.rounds)
    yield from _known("served_tau", "Tokens a round, as the engine counts them.", labels, counters.tau)
    if mismatch is None:
        return
    yield from _estimate("promised_tau", "Holdout tau in the engine's counting.", labels, mismatch.expected)
    yield from _estimate("served_difference", "Served minus promised tau.", labels, mismatch.difference, value=False)
    differs = None if mismatch.mismatch is None else float(mismatch.mismatch)
    yield from _known(
        "acceptance_mismatch", "1: served tau is not the expected one; absent: not known.", labels, differs
    )


def _quality(standing: ChampionStatus, labels: Mapping[str, str]) -> Iterator[Metric]:
    if standing.tau is not None:
        yield from _estimate("champion_tau", "Tokens per pass of the target, on the holdout.", labels, standing.tau)
    yield from _known(
        "champion_expected_speedup", "Over plain decoding at the recipe's load.", labels, standing.speedup
    )
    if standing.acceptance is not None:
        overall = standing.acceptance.value
        yield from _known("champion_drafted_accepted", "Share of drafted tokens accepted.", labels, overall)
    positions = _gauge(
        "champion_acceptance", "Accepted at a position of the draft, of rounds that reach it.", labels, "position"
    )
    for place, alpha in enumerate(standing.alphas, 1):
        if math.isfinite(alpha.value):
            positions.add_metric([*labels.values(), str(place)], alpha.value)
    yield positions


def _ages(standing: ChampionStatus, labels: Mapping[str, str], now: float) -> Iterator[Metric]:
    created, promoted = standing.created_at, standing.promoted_at
    yield from _known("champion_created_timestamp_seconds", "When the version was registered.", labels, created)
    yield from _known("champion_promoted_timestamp_seconds", "When it became champion.", labels, promoted)
    since = promoted if promoted is not None else created
    age = None if since is None else max(now - since, 0.0)
    yield from _known("champion_age_seconds", "Since it became champion.", labels, age)


def _staleness_metrics(standing: ChampionStatus, labels: Mapping[str, str]) -> Iterator[Metric]:
    stale = None if standing.stale is None else float(standing.stale)
    yield from _known("champion_stale", "Whether the last check found a new draft due.", labels, stale)
    causes = _gauge("champion_stale_cause", "Why; always 1.", labels, "cause")
    for cause in standing.stale_causes:
        causes.add_metric([*labels.values(), cause], 1.0)
    yield causes
    yield from _known("staleness_checked_timestamp_seconds", "When that was.", labels, standing.checked_at)


def _estimate(
    name: str, text: str, labels: Mapping[str, str], estimate: Estimate, value: bool = True
) -> Iterator[Metric]:
    """The figure and its interval's ends, as three metrics."""
    if value:
        yield from _known(name, text, labels, estimate.value)
    yield from _known(f"{name}_low", f"Lower end of the interval. {text}", labels, estimate.low)
    yield from _known(f"{name}_high", f"Upper end of the interval. {text}", labels, estimate.high)


def _known(name: str, text: str, labels: Mapping[str, str], value: float | None) -> Iterator[Metric]:
    if value is not None and math.isfinite(value):
        yield _one(name, text, labels, value)


def _one(name: str, text: str, labels: Mapping[str, str], value: float) -> Metric:
    family = _gauge(name, text, labels)
    family.add_metric(list(labels.values()), value)
    return family


def _gauge(name: str, text: str, labels: Mapping[str, str], *more: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"draftforge_{name}", text, labels=[*labels, *more])


DECISION_TAG, RECORD_TAG = "draftforge.decision", "draftforge.decision_record"


def standing_of(space: Workspace) -> tuple[ChampionStatus, Version | None]:
    """What is known of the champion of the recipe's target, and the version itself."""
    tracking, target = space.tracking, space.target_fingerprint
    name = model_name(tracking, target)
    known: dict[str, Any] = {"target": target, "target_name": Path(space.recipe.target.model).name, "model": name}
    number = aliases(tracking, name).get(CHAMPION)
    reference = None if number is None else f"{name}/{number}"
    known |= _staleness(space.root / STALENESS_FILE, reference) | _last_run(tracking, space.recipe.name)
    known |= _last_decision(tracking, name)
    if number is None:
        return ChampionStatus(**known), None
    version = get_version(tracking, f"{name}/{number}")
    lineage = version.lineage
    with mlflow_errors(tracking.uri):
        record = tracking.client.get_model_version(name, str(number))
    known |= {
        "version": number,
        "family": lineage.family,
        "step": lineage.step,
        "draft_tokens": lineage.draft_tokens or 0,
        "tree": lineage.tree_name or "",
        "created_at": record.creation_timestamp / 1e3,
        "promoted_at": _promoted_at(tracking, name, number),
        "speedup": _speedup(tracking, version, record.tags or {}),
    }
    return ChampionStatus(**known), version


def _promoted_at(tracking: Tracking, name: str, number: int) -> float | None:
    """When the alias last moved to this version."""
    moves = [event for event in history(tracking, name) if event.get("to") == number]
    try:
        return datetime.fromisoformat(moves[-1]["at"]).timestamp() if moves else None
    except (KeyError, TypeError, ValueError):
        return None  # edited by hand


def _speedup(tracking: Tracking, version: Version, tags: Mapping[str, str]) -> float | None:
    """The expected speed-up that the decision rests on."""
    path = tags.get(RECORD_TAG)
    if path is None:
        return None
    try:
        with mlflow_errors(tracking.uri):
            root = str(tracking.client.get_run(version.run_id).info.artifact_uri)
        with tempfile.TemporaryDirectory() as folder:
            download(tracking, root, {path: 0}, Path(folder))
            found = json.loads((Path(folder) / path).read_bytes())["numbers"]["evidence"]["candidate"]["speedup"]
        return None if found is None else float(found)
    except (RegistryError, OSError, KeyError, TypeError, ValueError):
        return None  # gone, or written by hand: the metric is absent


def _last_decision(tracking: Tracking, name: str) -> dict[str, Any]:
    """Of the newest version that a gate judged."""
    with mlflow_errors(tracking.uri):
        found = tracking.client.search_model_versions(
            f"name = '{name}'", max_results=100, order_by=["version_number DESC"]
        )
    judged = next((one for one in found if DECISION_TAG in (one.tags or {})), None)
    if judged is None:
        return {}
    at = re.search(r"-(\d{8}T\d{6})(?:\.\d+)?\.json$", judged.tags.get(RECORD_TAG, ""))
    return {
        "decision": judged.tags[DECISION_TAG],
        "decided_version": int(judged.version),
        "decided_at": datetime.strptime(at[1], "%Y%m%dT%H%M%S").replace(tzinfo=UTC).timestamp() if at else None,
    }


def _last_run(tracking: Tracking, recipe: str) -> dict[str, Any]:
    """When the recipe's last run that is over ended, and how."""
    with mlflow_errors(tracking.uri):
        found = tracking.client.search_runs(
            [tracking.experiment_id],
            f"attributes.run_name = '{recipe}' and attributes.status != 'RUNNING'",
            max_results=1,
            order_by=["attributes.end_time DESC"],
        )
    if not found or not found[0].info.end_time:
        return {}
    return {"run_ended_at": found[0].info.end_time / 1e3, "run_succeeded": found[0].info.status == "FINISHED"}


def _staleness(path: Path, champion: str | None) -> dict[str, Any]:
    """The last check's record: `champion`, `checked_at` (Unix seconds), `stale`, `causes`, each an object with `kind`.

    It says nothing of a champion that came after it.
    """
    if not path.is_file():
        return {}
    try:
        record = storage.read_object(path)
        if champion is not None and record["champion"] != champion:
            return {}
        looked_at = [cause if isinstance(cause, dict) else {"kind": str(cause)} for cause in record.get("causes", [])]
        causes = [cause["kind"] for cause in looked_at if cause.get("verdict", "stale") == "stale"]
        return {
            "stale": bool(record["stale"]),
            "stale_causes": sorted(set(causes)) if record["stale"] else [],
            "checked_at": float(record["checked_at"]),
        }
    except (CorruptDataError, KeyError, TypeError, ValueError) as error:
        say(f"{path}: not a record of a check ({type(error).__name__}: {error}); staleness is not told")
        return {}


_SCRAPE_SECONDS = 10.0
_WAIT_SECONDS = 3600.0


class ChampionCollector(Collector):
    """Asks registry, work folder and engines anew at each scrape. What cannot be read is absent, and said once."""

    def __init__(self, space: Workspace, options: MetricsOptions) -> None:
        self._space, self._options = space, options
        self._promises: dict[str, ExpectedAcceptance | None] = {}
        self._looks: deque[tuple[float, Counters]] = deque()  # each with all that was counted since the first one
        self._last: Counters | None = None
        self._complained = ""
        self.mismatch: AcceptanceMismatch | None = None
        self.unread: DraftforgeError | None = None
        """Why the engines' counters could not be read or put together the last time."""

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        try:
            standing, promise = self._standing()
            yield from champion_families(standing, time.time())
        except DraftforgeError as error:
            promise = None
            self._complain(error)
        if self._options.served:
            yield from self._compared(promise)

    def _standing(self) -> tuple[ChampionStatus, ExpectedAcceptance | None]:
        self._space = self._space.again()
        standing, version = standing_of(self._space)
        if version is None:
            return standing, None
        if version.reference not in self._promises:  # never changes: it is asked for once
            settings = self._space.recipe.score
            table = kept_counts(self._space.tracking, version)
            known = table is not None and len(table) > 0
            promise = expected_acceptance(serving(table, settings), settings.bootstrap) if known else None
            self._promises = {version.reference: promise}
        promise = self._promises[version.reference]
        if promise is None:
            return standing, None
        figures: dict[str, Any] = {"tau": promise.taus["rounds"], "acceptance": promise.acceptance}
        return _with(standing, **figures, alphas=promise.alphas), promise

    def _compared(self, promise: ExpectedAcceptance | None) -> Iterator[Metric]:
        self.mismatch = self.unread = None
        try:
            counters = self._counted()
            self.mismatch = None if promise is None else compare(counters, promise, self._options.margin)
        except DraftforgeError as error:
            self.unread = error
            self._complain(error)
            yield from served_families(None, None)
            return
        yield from served_families(counters, self.mismatch)

    def _counted(self) -> Counters:
        """Counts of the window: since `since`, or of the last `interval_seconds` that were looked at."""
        now, look = time.monotonic(), look_at(self._options.served)
        if self._options.since:
            return look.since(look_at(self._options.since))
        if not self._options.interval_seconds:
            return look
        counted = look.since(look) if self._last is None else look.since(self._last).plus(self._looks[-1][1])
        self._last = look
        self._looks.append((now, counted))
        while len(self._looks) > 2 and self._looks[1][0] <= now - self._options.interval_seconds:
            self._looks.popleft()
        return counted.since(self._looks[0][1])

    def _complain(self, error: DraftforgeError) -> None:
        if str(error) != self._complained:
            self._complained = str(error)
            say(f"metrics: {redacted(str(error))}")


def metrics(recipe: Recipe, options: MetricsOptions) -> None:
    """Write the metrics to a file or to standard output, or serve them until stopped."""
    text = write_metrics(Workspace(recipe, reads=True), options)
    if text is not None:
        print(text, end="")


def write_metrics(space: Workspace, options: MetricsOptions) -> str | None:
    """Write the metrics to `options.out`, or serve them until stopped; give them as text where neither is asked for.

    With `options.fail_on_mismatch`, AcceptanceMismatchError where served and expected acceptance differ.
    """
    _check(options)
    assert space.tracking  # a store that does not answer is an error now, not a gap in a file
    collector = ChampionCollector(space, options)
    if options.listen is not None:
        _listen(collector, options.listen)
        return None
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    if options.interval_seconds:
        generate_latest(registry)
        time.sleep(options.interval_seconds)
    text = generate_latest(registry)
    if options.out is not None:
        storage.write_bytes(options.out, text)  # in one piece, as node_exporter's textfile collector wants it
        say(f"metrics: {options.out}")
    if options.served:
        if collector.unread is not None:
            raise collector.unread  # the file says served_up 0; once, that is an error too
        _judge(collector.mismatch, options)
    return None if options.out is not None else text.decode()


def _check(options: MetricsOptions) -> None:
    if options.since and len(options.since) != len(options.served):
        raise InputError(f"--since: {len(options.since)} given for {len(options.served)} --served; one each is needed")
    if options.since and options.interval_seconds:
        raise InputError("--interval: looks twice by itself; give it or --since")
    if (options.interval_seconds or options.fail_on_mismatch) and not options.served:
        raise InputError("--interval, --fail-on-mismatch: need --served")
    storage.require_file_place(options.out, "--out")
    if options.listen is not None and (options.out is not None or options.fail_on_mismatch):
        raise InputError("--listen: serves until stopped; --out and --fail-on-mismatch go without it")


def _judge(mismatch: AcceptanceMismatch | None, options: MetricsOptions) -> None:
    if mismatch is None:
        say("served: the champion has no counts of a promotion; nothing to compare with")
        return
    line = f"served: {describe_mismatch(mismatch, options.margin)}"
    say(f"{'WARNING: ' if mismatch.mismatch else ''}{line}")
    if mismatch.mismatch and options.fail_on_mismatch:
        raise AcceptanceMismatchError(line)


def look_at(sources: Sequence[str]) -> Counters:
    """The counters of all replicas together. Raises ServedError, MissingFileError or InputError."""
    first, *others = [parse(_text(source), redacted(source)) for source in sources]
    for other in others:
        first = first.plus(other)
    return first


def _text(source: str) -> str:
    if not source.startswith(("http://", "https://")):
        try:
            return Path(source).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise MissingFileError(
                f"--served {source}: no such file; addresses begin with http:// or https://"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--served {source}: not a readable text file ({error})") from None
    address = source if "/" in source.split("://", 1)[1].rstrip("/") else f"{source.rstrip('/')}/metrics"
    try:
        answer = requests.get(address, timeout=_SCRAPE_SECONDS)
    except requests.RequestException as error:
        raise ServedError(f"--served {redacted(source)}: does not answer ({type(error).__name__})") from None
    if not answer.ok:
        raise ServedError(f"--served {redacted(source)}: answers {answer.status_code} {answer.reason}")
    return answer.text


def _listen(told: ChampionCollector, where: str) -> None:
    """Serve until the process is stopped."""
    host, colon, port = where.rpartition(":")
    if not colon or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(f"--listen {where}: must be HOST:PORT, such as 127.0.0.1:9109")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(told)
    try:
        server, thread = start_http_server(int(port), addr=host.strip("[]") or "127.0.0.1", registry=registry)
    except OSError as error:
        raise InputError(f"--listen {where}: cannot be listened on ({error.strerror or error})") from None
    say(f"metrics: http://{host or '127.0.0.1'}:{port}/metrics")
    try:
        while thread.is_alive():
            thread.join(_WAIT_SECONDS)
    finally:
        with suppress(Exception):
            server.shutdown()
            server.server_close()


def _with(standing: ChampionStatus, **changes: Any) -> ChampionStatus:
    return ChampionStatus(**{**vars(standing), **changes})
