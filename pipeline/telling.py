"""`draftforge metrics`: what to tell a monitoring system of a champion, once as a file or over and over on a port."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import requests
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from .. import storage
from ..errors import DraftforgeError, InputError, MissingFileError, PromiseBrokenError, ServedError
from ..eval.parting import Parting, Promise, compare, promise_of
from ..eval.select import serving
from ..eval.served import Counters, parse
from ..progress import say
from ..registry.settings import redacted
from .kept_counts import kept_counts
from .metric_families import Standing, champion_families, served_families
from .standing import standing_of
from .workspace import Workspace

_SCRAPE_SECONDS = 10.0
_WAIT_SECONDS = 3600.0


class Served(NamedTuple):
    """Where an engine's counters are read, and what is asked of them."""

    sources: Sequence[str] = ()
    """URLs or files of the replicas that serve one draft."""
    since: Sequence[str] = ()
    """An earlier look at each of them, in the same order; none: since the engines started."""
    interval_seconds: float = 0.0
    """Compare what is counted in so long: look twice. 0: what was counted since `since`."""
    margin: float = 0.05
    fail: bool = False


class Told(Collector):
    """Asks registry, work folder and engines anew at each scrape. What cannot be read is absent, and said once."""

    def __init__(self, space: Workspace, served: Served) -> None:
        self._space, self._served = space, served
        self._promises: dict[str, Promise | None] = {}
        self._looks: deque[tuple[float, Counters]] = deque()  # each with all that was counted since the first one
        self._last: Counters | None = None
        self._complained = ""
        self.parting: Parting | None = None
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
        if self._served.sources:
            yield from self._compared(promise)

    def _standing(self) -> tuple[Standing, Promise | None]:
        self._space = self._space.again()
        standing, version = standing_of(self._space)
        if version is None:
            return standing, None
        if version.reference not in self._promises:  # never changes: it is asked for once
            settings = self._space.recipe.score
            table = kept_counts(self._space.tracking, version)
            known = table is not None and len(table) > 0
            promise = promise_of(serving(table, settings), settings.bootstrap) if known else None
            self._promises = {version.reference: promise}
        promise = self._promises[version.reference]
        if promise is None:
            return standing, None
        figures: dict[str, Any] = {"tau": promise.taus["rounds"], "acceptance": promise.acceptance}
        return _with(standing, **figures, alphas=promise.alphas), promise

    def _compared(self, promise: Promise | None) -> Iterator[Metric]:
        self.parting = self.unread = None
        try:
            counters = self._counted()
            self.parting = None if promise is None else compare(counters, promise, self._served.margin)
        except DraftforgeError as error:
            self.unread = error
            self._complain(error)
            yield from served_families(None, None)
            return
        yield from served_families(counters, self.parting)

    def _counted(self) -> Counters:
        """Counts of the window: since `since`, or of the last `interval_seconds` that were looked at."""
        now, look = time.monotonic(), look_at(self._served.sources)
        if self._served.since:
            return look.since(look_at(self._served.since))
        if not self._served.interval_seconds:
            return look
        counted = look.since(look) if self._last is None else look.since(self._last).plus(self._looks[-1][1])
        self._last = look
        self._looks.append((now, counted))
        while len(self._looks) > 2 and self._looks[1][0] <= now - self._served.interval_seconds:
            self._looks.popleft()
        return counted.since(self._looks[0][1])

    def _complain(self, error: DraftforgeError) -> None:
        if str(error) != self._complained:
            self._complained = str(error)
            say(f"metrics: {redacted(str(error))}")


def metrics(space: Workspace, out: Path | None, listen: str | None, served: Served) -> str | None:
    """Write the metrics to a file (None: give them as text), or serve them until stopped.

    With `served.fail`, PromiseBrokenError where served and promised part.
    """
    _check(out, listen, served)
    assert space.tracking  # a store that does not answer is an error now, not a gap in a file
    told = Told(space, served)
    if listen is not None:
        _listen(told, listen)
        return None
    registry = CollectorRegistry(auto_describe=False)
    registry.register(told)
    if served.interval_seconds:
        generate_latest(registry)
        time.sleep(served.interval_seconds)
    text = generate_latest(registry)
    if out is not None:
        storage.write_bytes(out, text)  # in one piece, as node_exporter's textfile collector wants it
        say(f"metrics: {out}")
    if served.sources:
        if told.unread is not None:
            raise told.unread  # the file says served_up 0; once, that is an error too
        _judge(told.parting, served)
    return None if out is not None else text.decode()


def _check(out: Path | None, listen: str | None, served: Served) -> None:
    if served.since and len(served.since) != len(served.sources):
        raise InputError(f"--since: {len(served.since)} given for {len(served.sources)} --served; one each is needed")
    if served.since and served.interval_seconds:
        raise InputError("--interval: looks twice by itself; give it or --since")
    if (served.interval_seconds or served.fail) and not served.sources:
        raise InputError("--interval, --fail-on-parting: need --served")
    storage.require_file_place(out, "--out")
    if listen is not None and (out is not None or served.fail):
        raise InputError("--listen: serves until stopped; --out and --fail-on-parting go without it")


def _judge(parting: Parting | None, served: Served) -> None:
    if parting is None:
        say("served: the champion has no counts of a promotion; nothing to compare with")
        return
    say(f"{'WARNING: ' if parting.parts else ''}served: {parting.why}")
    if parting.parts and served.fail:
        raise PromiseBrokenError(f"served: {parting.why}")


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


def _listen(told: Told, where: str) -> None:
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


def _with(standing: Standing, **changes: Any) -> Standing:
    return Standing(**{**vars(standing), **changes})
