"""`draftforge metrics`: a Prometheus exporter of the champion and of what serving engines accept.

It reads the registry, the work folder and engines' counters, and loads no model. Figures come from the counts that the
champion's promotion kept; served acceptance is compared with what those counts make expected. Metrics are written once,
to a file or to standard output, or served at each scrape of a port.
"""

import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from pathlib import Path
from urllib.parse import unquote, urlsplit

import requests
from mlflow.entities.model_registry import ModelVersion
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .. import storage
from ..data.domain_rules import served_domain
from ..errors import (
    AcceptanceMismatchError,
    CorruptDataError,
    DraftforgeError,
    InputError,
    MissingFileError,
    ServedError,
    spelt_out,
)
from ..eval.acceptance import Estimate
from ..eval.counts import groups
from ..eval.engine_metrics import AcceptanceMismatch, Counters, ExpectedAcceptance, compare, expected_acceptance
from ..eval.leaderboard import serving
from ..eval.request_metrics import DomainOf, counters_of
from ..eval.summary import describe_mismatch
from ..http_replies import BearerAuth, UnusableError, bounded_session, no_reply_reason, read_body
from ..masking import masked
from ..progress import say
from ..recipe import Recipe
from ..registry.champion_alias import DECISION_TAG, RECORD_TAG, SPEEDUP_TAG, history
from ..registry.connect import Tracking, mlflow_errors, whole_number
from ..registry.lineage import Version, as_version
from ..registry.versions import CHAMPION, aliases, model_name
from .cli_options import MetricsOptions
from .listener import Handler, listening_on
from .promotion import kept_counts
from .staleness import STALENESS_FILE
from .workspace import Workspace

_SCRAPE_SECONDS = 10.0
MOST_SCRAPE_BYTES = storage.MOST_TEXT_BYTES
"""Largest text of an engine's metrics that is read."""
MOST_INTERVAL_SECONDS = 86_400.0 * 365
"""Longest time between two looks at counters."""
METRICS_PATH, CACHE_SECONDS = "/metrics", 5.0
"""Path of `--listen`, and how long its text is served again."""
Labels = Mapping[str, str]


def metrics(recipe: Recipe, options: MetricsOptions) -> None:
    """Write the metrics to a file or to standard output, or serve them until stopped."""
    text = write_metrics(Workspace(recipe, read_only=True), options)
    if text is not None:
        print(text, end="")


def write_metrics(space: Workspace, options: MetricsOptions) -> str | None:
    """Write the metrics to `options.out`, or serve them until stopped; returned as text where neither is asked for.

    Raises the error of engines' counters that cannot be read and, with `options.fail_on_mismatch`,
    AcceptanceMismatchError where served and expected acceptance differ.
    """
    _check(options)
    assert space.tracking  # a store that does not answer is an error now, not a gap in a file
    collector = ChampionCollector(space, options)
    registry = CollectorRegistry(auto_describe=False)
    if options.listen is not None:
        _listen(registry, collector, options.listen)
        return None
    # 1) Look once; twice where counts of an interval are asked for.
    registry.register(collector)
    if options.interval_seconds:
        generate_latest(registry)
        time.sleep(options.interval_seconds)
    text = generate_latest(registry)
    # 2) Write, in one piece as node_exporter's textfile collector wants it.
    if options.out is not None:
        storage.write_bytes(options.out, text)
        say(f"metrics: {options.out}")
    # 3) What the file says with served_up 0 or acceptance_mismatch 1 is an error or a warning here.
    if options.served:
        if collector.unread is not None:
            raise collector.unread
        _warn(collector, options)
        _tell_requests(collector, options)
    return None if options.out is not None else text.decode()


def _check(options: MetricsOptions) -> None:
    """Raise InputError for options that contradict each other, before anything is read."""
    if options.since and len(options.since) != len(options.served):
        raise InputError(f"--since: {len(options.since)} given for {len(options.served)} --served; one each is needed")
    if options.since and options.interval_seconds:
        raise InputError("--interval: looks twice by itself; give it or --since")
    if not 0 <= options.interval_seconds <= MOST_INTERVAL_SECONDS:
        raise InputError(f"--interval {options.interval_seconds:g}: must be 0 to {MOST_INTERVAL_SECONDS:g} seconds")
    if (options.interval_seconds or options.fail_on_mismatch) and not options.served:
        raise InputError("--interval, --fail-on-mismatch: need --served")
    storage.require_file_place(options.out, "--out")
    if options.listen is not None and (options.out is not None or options.fail_on_mismatch):
        raise InputError("--listen: serves until stopped; --out and --fail-on-mismatch go without it")


def _warn(collector: "ChampionCollector", options: MetricsOptions) -> None:
    """Say how served acceptance compares with the expected one; an error where a mismatch is to fail."""
    mismatch, counters = collector.mismatch, collector.counters
    if mismatch is None:
        alone = "" if counters is None else f"; served tau {counters.tau:.2f} over {counters.rounds:,.0f} rounds"
        say(f"served: {collector.without}: nothing to compare with{alone}")
        return
    line = f"served: {describe_mismatch(mismatch, options.margin)}"
    say(f"{'WARNING: ' if mismatch.mismatch else ''}{line}")
    if mismatch.mismatch and options.fail_on_mismatch:
        raise AcceptanceMismatchError(line)


def _tell_requests(collector: "ChampionCollector", options: MetricsOptions) -> None:
    """Say how each domain compares, and how many responses tell no counts or no domain."""
    counters, domains = collector.counters, collector.domains
    if counters is None or not counters.domains:
        return
    for name, found in domains.items():
        say(f"{'WARNING: ' if found.mismatch else ''}domain {name!r}: {describe_mismatch(found, options.margin)}")
    named = {name: one for name, one in counters.domains.items() if name}
    unknown = counters.requests - sum(one.requests for one in named.values())
    without = [name for name in named if collector.mismatch is not None and name not in domains]
    say(
        f"served: {counters.requests:,.0f} responses with counts, {unknown:,.0f} of them of no known domain; "
        f"{counters.uncounted:,.0f} without counts"
        + (f"; not on the holdout: {', '.join(sorted(without))}" if without else "")
    )


def _listen(registry: CollectorRegistry, collector: Collector, where: str) -> None:
    """Serve /metrics at HOST:PORT until the process is stopped. Raises InputError where it cannot be listened on."""
    host, colon, port = where.rpartition(":")
    if not colon or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(f"--listen {where}: must be HOST:PORT, such as 127.0.0.1:9109")
    registry.register(collector)
    cached = CachedText(lambda: generate_latest(registry))

    class Scrapes(Handler):
        def do_GET(self) -> None:  # noqa: N802  http.server's name
            """Answer /metrics, and nothing else."""
            if urlsplit(self.path).path != METRICS_PATH:
                self.answer(HTTPStatus.NOT_FOUND)
            else:
                self.answer(HTTPStatus.OK, cached.text(), CONTENT_TYPE_LATEST)

    # Brackets are those of an IPv6 address; without a host, this machine alone can connect.
    with listening_on(Scrapes, host.strip("[]") or "127.0.0.1", int(port), f"--listen {where}"):
        say(f"metrics: http://{host or '127.0.0.1'}:{port}{METRICS_PATH}")
        wait_until_stopped()


def wait_until_stopped() -> None:
    """Wait for a signal's exception."""
    threading.Event().wait()


class CachedText:
    """Text that is made at most once in CACHE_SECONDS, by one thread at a time: a scrape asks registry and engines."""

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._text, self._until = b"", -math.inf

    def text(self) -> bytes:
        """The text, made anew where it is too old."""
        with self._lock:
            if time.monotonic() >= self._until:
                self._text = self._make()
                self._until = time.monotonic() + CACHE_SECONDS
            return self._text


class ChampionCollector(Collector):
    """Prometheus collector that reads registry, work folder and engines anew at each scrape.

    What cannot be read has no sample; each error is said once, not at every scrape.
    """

    def __init__(self, space: Workspace, options: MetricsOptions) -> None:
        self._space, self._options = space, options
        self._expected: dict[str, dict[str, ExpectedAcceptance]] = {}  # by version and domain; "": of all
        self._looks: deque[tuple[float, Counters]] = deque()  # time, and all that was counted since the first look
        self._last: Counters | None = None
        self._complained = ""
        self.mismatch: AcceptanceMismatch | None = None
        self.counters: Counters | None = None
        """What was counted in the window that was compared the last time."""
        self.without = ""
        """Why there is nothing to compare with, where `mismatch` is None."""
        self.domains: dict[str, AcceptanceMismatch] = {}
        """Comparison by domain, where single requests tell theirs and the holdout has it."""
        self.unread: DraftforgeError | None = None
        """Why the engines' counters could not be read or put together the last time."""

    def describe(self) -> list[Metric]:
        """No metrics in advance: registering the collector must not read everything."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Metrics of the champion, then of the served engines; an error of the one leaves the others."""
        expected: dict[str, ExpectedAcceptance] = {}
        self.without = "the champion could not be read"
        try:
            self._space = self._space.reopened()
            version = _champion(self._space)
            expected = {} if version is None else self._expected_of(version[0])
            self.without = "no champion" if version is None else "the champion has no counts of a promotion"
            # All of it, or none.
            yield from list(champion_families(self._space, version, expected.get(""), time.time()))
        except DraftforgeError as error:
            expected, self.without = {}, "the champion could not be read"
            self._complain(error)
        if self._options.served:
            yield from self._served(expected)

    def _expected_of(self, version: Version) -> dict[str, ExpectedAcceptance]:
        """Expected acceptance of a version, in all ("") and by domain, from the counts that its promotion kept; they
        never change: read once."""
        if version.reference not in self._expected:
            settings = self._space.recipe.score
            table = kept_counts(self._space.tracking, version)
            found: dict[str, ExpectedAcceptance] = {}
            if table is not None and len(table) > 0:
                decides = serving(table, settings)
                parts = {"": decides} | {name: part for (name,), part in groups(decides, "domain")}
                found = {name: expected_acceptance(part, settings.confidence) for name, part in parts.items()}
            self._expected = {version.reference: found}
        return self._expected[version.reference]

    def _served(self, expected: Mapping[str, ExpectedAcceptance]) -> Iterator[Metric]:
        """Metrics of the engines; the comparisons, or the error, stay in `mismatch`, `domains` and `unread`."""
        self.mismatch = self.unread = self.counters = None
        self.domains = {}
        try:
            self.counters = counters = self._window()
            margin = self._options.margin
            self.mismatch = compare(counters, expected[""], margin) if expected else None
            known = {name: one for name, one in counters.domains.items() if name and name in expected}
            self.domains = {name: compare(one, expected[name], margin) for name, one in sorted(known.items())}
        except DraftforgeError as error:
            self.unread = error
            self._complain(error)
            yield from served_families(None, None)
            return
        yield from served_families(counters, self.mismatch)
        yield from request_families(counters, self.domains)

    def _window(self) -> Counters:
        """Counters of the compared window: since `--since`, over the last `--interval` seconds, or since the start."""
        # 1) Two given looks, or all that the engines have counted.
        domain_of: DomainOf = partial(served_domain, self._space.recipe.mix)
        now, look = time.monotonic(), read_counters(self._options.served, domain_of)
        if self._options.since:
            return look.since(read_counters(self._options.since, domain_of))
        if not self._options.interval_seconds:
            return look
        # 2) A sliding window: the sum since the first look survives an engine that restarts and counts from 0.
        counted = look.since(look) if self._last is None else look.since(self._last).plus(self._looks[-1][1])
        self._last = look
        self._looks.append((now, counted))
        # 3) Keep one look that is at least an interval old, as the start of the window.
        while len(self._looks) > 2 and self._looks[1][0] <= now - self._options.interval_seconds:
            self._looks.popleft()
        return counted.since(self._looks[0][1])

    def _complain(self, error: DraftforgeError) -> None:
        """Say an error, without secrets, unless it is the one that was said last."""
        if str(error) != self._complained:
            self._complained = str(error)
            say(f"metrics: {masked(str(error))}")


def read_counters(sources: list[str], domain_of: DomainOf = lambda line: "") -> Counters:
    """Counters of all replicas, summed. Raises ServedError, MissingFileError or InputError, naming the source.

    `domain_of`: domain of a logged request, where a source holds responses.
    """
    first, *others = [counters_of(_source_text(source), masked(source), domain_of) for source in sources]
    for other in others:
        first = first.plus(other)
    return first


def _source_text(source: str) -> str:
    """Text of an engine's metrics, from a file or an http address; an address without a path gets /metrics."""
    # A file, such as a saved earlier look.
    if not source.startswith(("http://", "https://")):
        try:
            return storage.read_text(Path(source), "--served")
        except MissingFileError as error:
            raise MissingFileError(f"{error}; addresses begin with http:// or https://") from None
        except OSError as error:
            raise InputError(f"--served {source}: not a readable text file ({error})") from None
    # A server. The address may hold a password: errors show it without.
    address = source if "/" in source.split("://", 1)[1].rstrip("/") else f"{source.rstrip('/')}{METRICS_PATH}"
    try:
        return _scrape(address)
    except UnusableError as error:
        raise ServedError(f"--served {masked(source)}: {error}") from None
    except requests.RequestException as error:
        raise ServedError(f"--served {masked(source)}: does not answer ({masked(no_reply_reason(error))})") from None
    except ValueError as error:
        raise InputError(f"--served {masked(source)}: is no address ({error})") from None


def _scrape(address: str) -> str:
    """Text at an address: nothing but what it holds itself is sent, and no redirect is followed to another host.

    Raises UnusableError for another answer than 200 or one that is too large, requests.RequestException for none.
    """
    with bounded_session() as session:
        # Without this, requests would send a password of the user's .netrc.
        parts = urlsplit(address)
        given = parts.username is not None
        session.auth = (unquote(parts.username or ""), unquote(parts.password or "")) if given else BearerAuth(None)
        with session.get(address, timeout=_SCRAPE_SECONDS, allow_redirects=False, stream=True) as answer:
            if answer.status_code != HTTPStatus.OK:
                raise UnusableError(f"answers {answer.status_code} {answer.reason}")
            return read_body(answer, MOST_SCRAPE_BYTES).decode("utf-8", "replace")


def _champion(space: Workspace) -> tuple[Version, ModelVersion] | None:
    """Champion of the recipe's target, as our `Version` and as MLflow's record; None: there is none."""
    tracking, name = space.tracking, model_name(space.tracking, space.target_fingerprint)
    number = aliases(tracking, name).get(CHAMPION)
    if number is None:
        return None
    with mlflow_errors(tracking.uri):
        record = tracking.client.get_model_version(name, str(number))
    return as_version(record), record


def champion_families(
    space: Workspace, champion: tuple[Version, ModelVersion] | None, expected: ExpectedAcceptance | None, now: float
) -> Iterator[Metric]:
    """Metrics of the champion (which, how good, how old, whether stale), of the last decision and of the last run."""
    name = model_name(space.tracking, space.target_fingerprint)
    labels = {"target": space.target_fingerprint[:12], "model": name}
    yield _gauge("champion_exists", "Whether the target has a champion.", labels, float(champion is not None))
    # Metrics that only a champion has: its identity is in labels, by the convention of `_info` metrics.
    if champion is not None:
        version, record = champion
        lineage = version.lineage
        about = labels | {
            "target_name": Path(space.recipe.target.model).name,
            "version": str(version.number),
            "family": lineage.family,
            "step": str(lineage.step),
            "draft_tokens": str(0 if lineage.plan is None else lineage.plan.draft_tokens),
            "tree": "" if lineage.plan is None else lineage.plan.tree_name,
        }
        yield _gauge("champion_info", "The champion of the target; always 1.", about, 1.0)
        yield from _quality(record, expected, labels)
        yield from _ages(space.tracking, version, record, labels, now)
    # Metrics that exist without one too.
    yield from _staleness(space.root / STALENESS_FILE, None if champion is None else champion[0].reference, labels)
    yield from _last_decision(space.tracking, name, labels)
    yield from _last_run(space.tracking, space.recipe.name, labels)


def served_families(counters: Counters | None, mismatch: AcceptanceMismatch | None) -> Iterator[Metric]:
    """Metrics of what an engine counts, beside what is expected. `counters` None: the engine did not answer."""
    yield _gauge("served_up", "Whether the engine's counters could be read.", {}, float(counters is not None))
    if counters is None:
        return
    # What the engine counted.
    labels = {"engine": counters.engine}
    yield _gauge("served_rounds", "Rounds in the window that is compared.", labels, counters.rounds)
    yield from _known("served_tau", "Tokens a round, as the engine counts them.", labels, counters.tau)
    # What the holdout makes expected, translated into how this engine counts.
    if mismatch is None:
        return
    yield from _known("promised_tau", "Holdout tau in the engine's counting.", labels, mismatch.expected.value)
    yield from _interval("promised_tau", "Holdout tau in the engine's counting.", labels, mismatch.expected)
    yield from _interval("served_difference", "Served minus promised tau.", labels, mismatch.difference)
    text = "1: served tau is not the expected one; absent: not known."
    yield from _known("acceptance_mismatch", text, labels, mismatch.mismatch)


def request_families(counters: Counters, domains: Mapping[str, AcceptanceMismatch]) -> Iterator[Metric]:
    """Metrics of single requests, where the source holds responses: how many, and by domain."""
    if not counters.domains:
        return
    labels, named = {"engine": counters.engine}, {name: one for name, one in counters.domains.items() if name}
    unknown = counters.requests - sum(one.requests for one in named.values())
    yield _gauge("served_requests", "Responses that tell what was accepted.", labels, counters.requests)
    yield _gauge("served_requests_without_domain", "Of those, of no known domain.", labels, unknown)
    yield _gauge("served_responses_without_counts", "Responses that tell nothing.", labels, counters.uncounted)
    rounds = {name: one.rounds for name, one in named.items()}
    taus = {name: one.tau for name, one in named.items() if math.isfinite(one.tau)}
    expected = {name: one.expected.value for name, one in domains.items() if math.isfinite(one.expected.value)}
    judged = {name: float(one.mismatch) for name, one in domains.items() if one.mismatch is not None}
    yield _labelled("served_domain_rounds", "Rounds of a domain's requests.", labels, "domain", rounds)
    yield _labelled("served_domain_tau", "Tokens a round of a domain's requests.", labels, "domain", taus)
    yield _labelled("promised_domain_tau", "Holdout tau of the domain.", labels, "domain", expected)
    text = "1: the domain's served tau is not the expected one; absent: not known."
    yield _labelled("domain_acceptance_mismatch", text, labels, "domain", judged)


def _quality(record: ModelVersion, expected: ExpectedAcceptance | None, labels: Labels) -> Iterator[Metric]:
    """Metrics of the champion's quality: speed-up at its promotion, and tau and acceptance on the holdout."""
    # The speed-up is a tag of the version; the rest needs the kept counts.
    with suppress(KeyError, ValueError):  # never judged, or edited by hand
        speedup = float(record.tags[SPEEDUP_TAG])
        yield from _known("champion_expected_speedup", "Over plain decoding at the recipe's load.", labels, speedup)
    if expected is None:
        return
    tau, text = expected.taus["rounds"], "Tokens per pass of the target, on the holdout."
    yield from _known("champion_tau", text, labels, tau.value)
    yield from _interval("champion_tau", text, labels, tau)
    # Acceptance: the share of all drafted tokens, then position by position (alpha).
    share = expected.acceptance.value
    yield from _known("champion_drafted_accepted", "Share of drafted tokens accepted.", labels, share)
    text = "Accepted at a position of the draft, of rounds that reach it."
    by_position = {str(k): alpha.value for k, alpha in enumerate(expected.alphas, 1) if math.isfinite(alpha.value)}
    yield _labelled("champion_acceptance", text, labels, "position", by_position)


def _ages(tracking: Tracking, version: Version, record: ModelVersion, labels: Labels, now: float) -> Iterator[Metric]:
    """Metrics of the champion's age: since its last promotion or rollback, else since it was registered."""
    created = whole_number(record.creation_timestamp, f"{version.reference}: its time") / 1e3
    promoted = None
    moves = [event for event in history(tracking, version.name) if event.get("to") == version.number]
    with suppress(KeyError, TypeError, ValueError):  # edited by hand
        promoted = datetime.fromisoformat(moves[-1]["at"]).timestamp() if moves else None
    yield _gauge("champion_created_timestamp_seconds", "When the version was registered.", labels, created)
    yield from _known("champion_promoted_timestamp_seconds", "When it became champion.", labels, promoted)
    age = max(now - (created if promoted is None else promoted), 0.0)
    yield _gauge("champion_age_seconds", "Since it became champion.", labels, age)


def _staleness(path: Path, champion: str | None, labels: Labels) -> Iterator[Metric]:
    """Metrics of the last check of staleness (`staleness.json`), unless it judged another champion."""
    stale = checked_at = None
    causes: list[str] = []
    # A record of another draftforge, or one edited by hand, has no sample.
    try:
        record = storage.read_object(path) if path.is_file() else None
        if record is not None and (champion is None or record["champion"] == champion):
            found = [cause if isinstance(cause, dict) else {"kind": str(cause)} for cause in record.get("causes", [])]
            kinds = {str(cause["kind"]) for cause in found if cause.get("verdict", "stale") == "stale"}
            stale, checked_at = bool(record["stale"]), float(record["checked_at"])
            causes = sorted(kinds) if stale else []
    except (CorruptDataError, KeyError, TypeError, ValueError) as error:
        say(f"{path}: not a record of a check ({type(error).__name__}: {error}); its staleness has no sample")
    # Causes that were examined and held are left out; with no check, no sample.
    yield from _known("champion_stale", "Whether the last check found a new draft due.", labels, stale)
    yield _labelled("champion_stale_cause", "Why; always 1.", labels, "cause", dict.fromkeys(causes, 1.0))
    yield from _known("staleness_checked_timestamp_seconds", "When that was.", labels, checked_at)


def _last_decision(tracking: Tracking, name: str, labels: Labels) -> Iterator[Metric]:
    """Metrics of the gate's last decision: that about the newest version that it judged."""
    with mlflow_errors(tracking.uri):
        found = tracking.client.search_model_versions(
            f"name = '{name}'", max_results=100, order_by=["version_number DESC"]
        )
    judged = next((record for record in found if DECISION_TAG in (record.tags or {})), None)
    if judged is None:
        return
    # The decision is a tag; its time is in the name of the decision's file.
    about = {**labels, "decision": judged.tags[DECISION_TAG], "version": str(judged.version)}
    yield _gauge("last_decision", "The gate's last decision, promote or refuse; always 1.", about, 1.0)
    if at := re.search(r"-(\d{8}T\d{6})(?:\.\d+)?\.json$", judged.tags.get(RECORD_TAG, "")):
        taken = None
        with suppress(ValueError):  # edited by hand
            taken = datetime.strptime(at[1], "%Y%m%dT%H%M%S").replace(tzinfo=UTC).timestamp()
        yield from _known("last_decision_timestamp_seconds", "When it was taken.", labels, taken)


def _last_run(tracking: Tracking, recipe: str, labels: Labels) -> Iterator[Metric]:
    """Metrics of the recipe's last finished run, whether it succeeded or failed."""
    with mlflow_errors(tracking.uri):
        found = tracking.client.search_runs(
            [tracking.experiment_id],
            f"attributes.run_name = '{recipe}' and attributes.status != 'RUNNING'",
            max_results=1,
            order_by=["attributes.end_time DESC"],
        )
    if found and found[0].info.end_time:
        info = found[0].info
        ended = whole_number(info.end_time, f"run {info.run_id}: its end") / 1e3
        yield _gauge("last_retrain_timestamp_seconds", "When the last run ended.", labels, ended)
        succeeded = float(info.status == "FINISHED")
        yield _gauge("last_retrain_success", "Whether the last run ended well.", labels, succeeded)


def _gauge(name: str, text: str, labels: Labels, value: float) -> Metric:
    """Gauge with one sample. Labels are of registries and logs: they control no terminal, and are UTF-8."""
    family = GaugeMetricFamily(f"draftforge_{name}", text, labels=list(labels))
    family.add_metric([spelt_out(label) for label in labels.values()], value)
    return family


def _labelled(name: str, text: str, labels: Labels, label: str, values: Mapping[str, float]) -> Metric:
    """Gauge with one more label, and a sample for each of that label's values."""
    family = GaugeMetricFamily(f"draftforge_{name}", text, labels=[*labels, label])
    for key, value in values.items():
        family.add_metric([spelt_out(label) for label in (*labels.values(), key)], value)
    return family


def _known(name: str, text: str, labels: Labels, value: float | None) -> Iterator[Metric]:
    """Gauge where the value is known and finite, else no metric."""
    if value is not None and math.isfinite(value):
        yield _gauge(name, text, labels, float(value))


def _interval(name: str, text: str, labels: Labels, estimate: Estimate) -> Iterator[Metric]:
    """The ends of an estimate's interval, as two gauges."""
    yield from _known(f"{name}_low", f"Lower end of the interval. {text}", labels, estimate.low)
    yield from _known(f"{name}_high", f"Upper end of the interval. {text}", labels, estimate.high)
