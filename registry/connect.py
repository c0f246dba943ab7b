"""Connection to the MLflow store: resolve its address, probe it quickly, find or make the experiment.

A store that cannot be reached is one TrackingError within seconds; MLflow alone would retry for minutes.
"""

import os
import re
import shlex
import socket
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import requests
from google.protobuf.json_format import ParseError
from mlflow.exceptions import MlflowException
from mlflow.store.entities import PagedList
from mlflow.tracking import MlflowClient
from mlflow.utils import request_utils
from mlflow.utils.rest_utils import http_request
from sqlalchemy import NullPool, create_engine
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from urllib3.exceptions import MaxRetryError, ReadTimeoutError
from urllib3.util import Retry

from .. import storage
from ..errors import DiskFullError, DraftforgeError, RegistryError, TrackingError, one_line
from ..fingerprint import of_bytes, short
from ..http_replies import BoundedAdapter
from ..masking import masked
from .settings import RegistrySettings
from .store_address import resolve_uri, sqlite_file

KIND_TAG, MODEL_TRAINING = "mlflow.experimentKind", "custom_model_development"
"""Tag of an experiment, and its value by which MLflow's pages file it under model training and open its runs."""
_DATABASE_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
_MOST_PAGES = 1000
_YEAR_10000 = 253402300800000  # milliseconds
MOST_RETRY_SECONDS, MOST_WAIT_SECONDS = 300.0, 30.0
"""How long after its first failure a request is sent again, and longest wait before that which a server may ask for."""
_UNUSABLE = (
    *(ParseError, KeyError, IndexError, TypeError, AttributeError, ValueError, RecursionError),
    *(OverflowError, SystemError),  # sizes without end; half a character in a message's name
)
"""What MLflow's client raises where a reply is no reply of an MLflow server."""
T = TypeVar("T")


class _EndingRetry(Retry):
    """Retries of MLflow's requests, with an end: none follows a reply that took all of its time, none begins after
    MOST_RETRY_SECONDS, and a server's `Retry-After` is waited for no longer than MOST_WAIT_SECONDS."""

    begun: float | None = None

    def increment(self, *args: Any, **kwargs: Any) -> "_EndingRetry":
        """Count a failed try. Raises where there is no other one."""
        error = kwargs.get("error")
        if isinstance(error, ReadTimeoutError):
            raise error
        following = super().increment(*args, **kwargs)
        following.begun = time.monotonic() if self.begun is None else self.begun
        if time.monotonic() - following.begun > MOST_RETRY_SECONDS:
            raise MaxRetryError(kwargs["_pool"], args[1], error)
        return following

    def parse_retry_after(self, retry_after: str) -> float:
        """Seconds of a server's `Retry-After`, as far as they are waited for."""
        return min(super().parse_retry_after(retry_after), MOST_WAIT_SECONDS)


class _MlflowAdapter(BoundedAdapter, request_utils.TCPKeepAliveHTTPAdapter):
    """MLflow's own adapter, with replies of bounded time and size; MLflow takes it from its module alone.

    JSON of many small values takes twenty times its size in memory. Files are streamed.
    """

    most_bytes = 32 << 20

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.max_retries = _EndingRetry(**vars(self.max_retries))


request_utils.TCPKeepAliveHTTPAdapter = _MlflowAdapter  # type: ignore[misc]
# A redirect begins anew with time and retries, and what is sent goes to another host.
os.environ.setdefault("MLFLOW_ALLOW_HTTP_REDIRECTS", "false")


@dataclass(frozen=True)
class Tracking:
    """An MLflow store that answered, and the experiment in it."""

    uri: str
    client: MlflowClient
    experiment_id: str
    settings: RegistrySettings
    lock_folder: Path
    """Locks that keep two processes of this host apart: beside a SQLite file, in the user's cache for a server."""

    def __repr__(self) -> str:
        return f"Tracking({masked(self.uri)})"


def open_tracking(settings: RegistrySettings, home: Path) -> Tracking:
    """Open the store, or raise TrackingError in one line. `home` holds the local default's database and artifacts."""
    uri = resolve_uri(settings, home)
    database = sqlite_file(uri)
    locks = _lock_folder(uri, database)
    with storage.lock(locks / "mlflow.open.lock", timeout_seconds=120, what="a process that opens the same store"):
        client, experiment_id = _connect(settings, uri, database)
    return Tracking(uri, client, experiment_id, settings, locks)


def unreachable(tracking: Tracking, seconds: float) -> str | None:
    """Reason why the store does not answer a request within `seconds`; None: it does, or is a file.

    MLflow's environment variables are left alone, so that it may be asked from a thread.
    """
    scheme = urllib.parse.urlsplit(tracking.uri).scheme.split("+")[0]

    def ask() -> None:
        if scheme in _DATABASE_PORTS:
            _probe_database(tracking.uri, scheme, seconds)
            return
        # A request that its database answers: a server whose database is gone is as good as gone.
        place = f"/api/2.0/mlflow/experiments/get?experiment_id={tracking.experiment_id}"
        access = tracking.client._tracking_client.store.get_host_creds()
        answer = http_request(  # type: ignore[no-untyped-call]
            access, place, "GET", max_retries=0, timeout=seconds, raise_on_status=False
        )
        if answer.status_code >= 500:
            raise ConnectionError(f"it answers {answer.status_code}")

    if not watched(tracking):
        return None
    try:
        _with_timeout(seconds, ask)
    except (MlflowException, SQLAlchemyError, requests.RequestException, OSError, *_UNUSABLE) as error:
        return _reason(error, tracking.uri)
    return None


def watched(tracking: Tracking) -> bool:
    """Whether the store can go away while a run is open: a server or its database, not a file."""
    scheme = urllib.parse.urlsplit(tracking.uri).scheme.split("+")[0]
    return scheme in _DATABASE_PORTS or scheme in ("http", "https")


def how_to_look(tracking: Tracking, run_id: str) -> str:
    """Command, or address, that shows a run in MLflow's pages."""
    page = f"#/experiments/{tracking.experiment_id}/runs/{run_id}"
    parts = urllib.parse.urlsplit(tracking.uri)
    # A server has the page itself; an address for people holds no password.
    if parts.scheme in ("http", "https"):
        place = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"
        return f"{place}/{page}"
    # A database needs a server over it. What is printed is the command itself, unless that would show a password.
    if sqlite_file(tracking.uri) is None and parts.scheme.split("+")[0] not in _DATABASE_PORTS:
        return f"run {run_id} in {masked(tracking.uri)}"
    store = shlex.quote(tracking.uri)
    if masked(tracking.uri) != tracking.uri:
        known = tracking.uri == os.environ.get("MLFLOW_TRACKING_URI")
        store = '"$MLFLOW_TRACKING_URI"' if known else f"{masked(tracking.uri)} (with user and password for ***)"
    return f"mlflow ui --backend-store-uri {store}, then http://127.0.0.1:5000/{page}"


@contextmanager
def mlflow_errors(tracking_uri: str) -> Iterator[None]:
    """Turn MLflow's errors into one line of ours: RegistryError for what does not exist, TrackingError otherwise.

    The block calls MLflow and nothing else: what a defect of ours raises would be taken for a server's bad reply.
    """
    try:
        yield
    except (MlflowException, requests.RequestException, SQLAlchemyError, OSError) as error:
        # Errors of ours pass through: some of them are OSErrors too.
        if isinstance(error, DraftforgeError):
            raise
        # The order matters: a full disk and a missing object have errors of their own, whichever library reports them.
        where = masked(tracking_uri)
        if storage.is_disk_full(error):
            raise DiskFullError(f"{where}: no space left for runs or artifacts") from error
        if isinstance(error, MlflowException) and error.error_code == "RESOURCE_DOES_NOT_EXIST":
            raise RegistryError(f"{where}: {one_line(error, clean=masked)}") from error
        # Local file errors pass through as they are. Everything else means that the store failed.
        if isinstance(error, OSError) and not isinstance(error, requests.RequestException):
            raise
        raise TrackingError(f"{where}: {_in_one_line(error, tracking_uri)}") from error
    except ImportError as error:
        raise TrackingError(f"{masked(tracking_uri)}: its artifacts need a library: {one_line(error)}") from error
    except _UNUSABLE as error:
        if isinstance(error, DraftforgeError) or not tracking_uri.startswith(("http://", "https://")):
            raise
        said = f"{type(error).__name__}: {one_line(error, clean=masked)}"
        raise TrackingError(f"{masked(tracking_uri)}: MLflow's reply is unusable ({said})") from error


def whole_number(value: Any, what: str) -> int:
    """A number of the store's: of a version, or a time in milliseconds. Raises RegistryError, naming `what`, for what
    is none: a server may send anything."""
    found = int(value) if re.fullmatch("[0-9]{1,15}", str(value)) else _YEAR_10000
    if found >= _YEAR_10000:
        raise RegistryError(f"{what}: {str(value)[:80]!r}: must be a number, of times below the year 10000")
    return found


def all_pages(tracking: Tracking, search: Callable[[str | None], PagedList[T]]) -> Iterator[T]:
    """Yield what MLflow returns by pages, given the page's token. Raises TrackingError where they do not end."""
    token: str | None = None
    for _ in range(_MOST_PAGES):
        with mlflow_errors(tracking.uri):
            page = search(token)
        yield from page
        token = page.token
        if not token:
            return
    raise TrackingError(f"{masked(tracking.uri)}: MLflow returns more than {_MOST_PAGES} pages of one list")


@contextmanager
def quick_requests(timeout_seconds: float, retries: int = 0) -> Iterator[None]:
    """Let MLflow's HTTP calls in this block fail fast instead of retrying for minutes."""
    # MLflow reads these variables at each request, so they hold for the block and are put back afterwards.
    wanted = {
        "MLFLOW_HTTP_REQUEST_TIMEOUT": str(max(1, round(timeout_seconds))),
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": str(retries),
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _connect(settings: RegistrySettings, uri: str, database: Path | None) -> tuple[MlflowClient, str]:
    """An MLflow client whose store has answered once, and the experiment's id. Raises TrackingError."""

    def open_client() -> tuple[MlflowClient, str]:
        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        return client, _experiment(client, settings.experiment, database)

    # A database is probed first, then may take its time to make tables; a server must answer in time.
    scheme = urllib.parse.urlsplit(uri).scheme.split("+")[0]
    try:
        with quick_requests(settings.connect_seconds):
            if database is not None and not (database.exists() and database.stat().st_size):
                _make_database(database)
            if database is not None or scheme in _DATABASE_PORTS:
                _probe_database(uri, scheme, settings.connect_seconds)
                return open_client()
            return _with_timeout(settings.connect_seconds, open_client)
    except DraftforgeError:
        raise
    except (MlflowException, SQLAlchemyError, requests.RequestException, OSError, ImportError, *_UNUSABLE) as error:
        if storage.is_disk_full(error):
            raise DiskFullError(f"{masked(uri)}: no space left for runs or artifacts") from error
        raise TrackingError(
            f"{masked(uri)}: MLflow cannot be reached ({_reason(error, uri)}); "
            "check registry.tracking_uri or MLFLOW_TRACKING_URI"
        ) from error


def _make_database(database: Path) -> None:
    """Make a SQLite file with MLflow's tables, whole or not at all: nothing opens one that a kill left with some.

    The caller holds the store's lock.
    """
    for leftover in database.parent.glob(f".{database.name}.*"):
        storage.clear_leftover(leftover)
    with storage.new_file(database) as beside:
        MlflowClient(tracking_uri=f"sqlite:///{beside}")._tracking_client.store.engine.dispose()


def _experiment(client: MlflowClient, name: str, database: Path | None) -> str:
    """Find or make the experiment. A SQLite store keeps its artifacts beside the file, wherever a run is started."""
    found = client.get_experiment_by_name(name)
    # Make a missing experiment. Another process may make it at the same moment, which counts as found.
    if found is None:
        beside = None if database is None else _artifacts_beside(database).as_uri()
        try:
            return str(client.create_experiment(name, artifact_location=beside, tags={KIND_TAG: MODEL_TRAINING}))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            found = client.get_experiment_by_name(name)  # made by somebody else just now
    if database is not None and found is not None:
        _check_not_moved(database, str(found.artifact_location))
    # MLflow keeps deleted experiments by name and refuses runs in them.
    if found is None or found.lifecycle_stage != "active":
        raise TrackingError(f"registry.experiment: {name}: is deleted there; restore it or choose another name")
    return str(found.experiment_id)


def _check_not_moved(database: Path, location: str) -> None:
    """Raise TrackingError for a store that was copied or moved: MLflow would go on writing into the folder that it came
    from."""
    beside, parts = _artifacts_beside(database), urllib.parse.urlsplit(location)
    place = Path(urllib.parse.unquote(parts.path))
    if parts.scheme != "file" or place.name != beside.name or place.resolve() == beside.resolve():
        return
    raise TrackingError(
        f"{database}: was copied or moved: its runs name {place} for their files; where that is no more, make it a link"
        f" to {beside}; of a copy delete {database.name} and {beside.name}, and `draftforge promote` registers anew "
        "what is on disk"
    )


def _artifacts_beside(database: Path) -> Path:
    """Folder that keeps the artifacts of a SQLite file."""
    return database.with_name(f"{database.stem}-artifacts")


def _with_timeout(seconds: float, call: Callable[[], T]) -> T:
    """Result of a call, or TimeoutError. It runs in a daemon thread: name resolution may hang without a timeout."""
    results: list[T] = []
    errors: list[Exception] = []

    # The thread hands its outcome over in lists: an exception would be lost in it.
    def work() -> None:
        try:
            results.append(call())
        except Exception as error:
            errors.append(error)

    # Wait no longer than asked. A call that hangs ends with the process.
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return results[0]


def _probe_database(uri: str, scheme: str, seconds: float) -> None:
    """Reach a database server and log in, or open a file, once: MLflow would retry for minutes, also a wrong password,
    or a folder in the file's place."""
    url = make_url(uri)
    if url.host:
        socket.create_connection((url.host, url.port or _DATABASE_PORTS[scheme]), timeout=seconds).close()
    create_engine(url, poolclass=NullPool).connect().close()


def _lock_folder(uri: str, database: Path | None) -> Path:
    """Folder of this host's locks for the store: the first candidate that exists or can be made."""
    # Beside a SQLite file the lock is seen by all who use that file. A server has no folder, so the user's cache
    # serves.
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    spare = Path(tempfile.gettempdir()) / f"draftforge-{os.getuid()}"
    name = short(of_bytes(masked(uri, {}).encode()))
    candidates = [database.parent] if database else [cache / "draftforge" / "locks" / name, spare / "locks" / name]
    # A home may be read-only (containers): then the temporary folder.
    for folder in candidates:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            return folder
    raise TrackingError(f"{candidates[-1]}: cannot be made ({reason})")


def _reason(error: BaseException, uri: str) -> str:
    """Reason why a store cannot be reached: the network's own words where they are buried in a long message."""
    words = re.search(r"Connection refused|Name or service not known|No route to host|timed out", str(error))
    return words.group().lower() if words else _in_one_line(error, uri)


def _in_one_line(error: BaseException, uri: str) -> str:
    """An error in one line: the database's own words, where SQLAlchemy, or MLflow quoting it, puts more around them."""
    # Which SQLAlchemy error is this, and is its text all that the message says?
    cause = error if isinstance(error, DBAPIError) else error.__cause__
    if not isinstance(cause, DBAPIError) or cause.orig is None or not str(error).startswith(str(cause)):
        return one_line(error, clean=masked)
    # Keep the database's words only, with advice for the one failure that users can mend.
    words = one_line(cause.orig, clean=masked)
    database = sqlite_file(uri)
    if database is not None and "readonly" in words:
        words += f"; {database} is read-only here: make it and its folder writable, or name another store"
    return words
