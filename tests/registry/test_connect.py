"""Reaching the store: where it is, how fast it says no, and what it never prints or leaves behind."""

import dataclasses
import os
import shutil
import socket
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
import urllib3
from google.protobuf.json_format import ParseError
from mlflow.entities import FileInfo
from mlflow.exceptions import MlflowException
from mlflow.store.entities import PagedList
from mlflow.tracking import MlflowClient
from mlflow.utils.rest_utils import MlflowHostCreds, http_request
from sqlalchemy.exc import OperationalError

from draftforge.errors import DiskFullError, InputError, RegistryError, TrackingError, one_line
from draftforge.masking import masked
from draftforge.registry import connect
from draftforge.registry.artifacts import _sizes, _walk
from draftforge.registry.connect import (
    Tracking,
    all_pages,
    how_to_look,
    mlflow_errors,
    open_tracking,
    quick_requests,
    unreachable,
    watched,
)
from draftforge.registry.settings import RegistrySettings
from draftforge.registry.store_address import resolve_uri


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_recipe_goes_before_environment_before_local_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert resolve_uri(RegistrySettings(), tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server:5000")
    assert resolve_uri(RegistrySettings(), tmp_path) == "http://server:5000"
    assert resolve_uri(RegistrySettings(tracking_uri="https://other"), tmp_path) == "https://other"


def test_relative_database_becomes_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        resolve_uri(RegistrySettings(tracking_uri="sqlite:///some/x.db"), tmp_path) == f"sqlite:///{tmp_path}/some/x.db"
    )


@pytest.mark.parametrize("uri", ["file:///tmp/runs", "./mlruns", "sqlite://", "sqlite:///:memory:"])
def test_stores_that_cannot_work_are_refused(uri: str, tmp_path: Path) -> None:
    with pytest.raises(TrackingError, match=r"registry\.tracking_uri"):
        resolve_uri(RegistrySettings(tracking_uri=uri), tmp_path)


@pytest.mark.parametrize("uri", ["http://[::1", "http://a:b@[x]:1/", "sqlite://["])
def test_what_is_no_address_is_refused(uri: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"registry\.tracking_uri: .*: is no address"):
        resolve_uri(RegistrySettings(tracking_uri=uri), tmp_path)


def test_path_that_a_database_address_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="may not contain"):
        resolve_uri(RegistrySettings(), tmp_path / "50%#")


def test_artifacts_lie_beside_the_database_and_never_in_the_current_folder(
    shared_tracking: Tracking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    database = Path(shared_tracking.uri.removeprefix("sqlite:///"))
    again = open_tracking(RegistrySettings(), database.parent)
    run = again.client.create_run(again.experiment_id)
    again.client.log_text(run.info.run_id, "x", "x.txt")
    assert again.experiment_id == shared_tracking.experiment_id
    assert run.info.artifact_uri.startswith((database.parent / "mlflow-artifacts").as_uri())
    assert [entry.name for entry in tmp_path.iterdir()] == []


def test_a_copied_store_is_refused_as_its_files_would_go_into_the_original(tmp_path: Path) -> None:
    """A moved one opens again once a link leads from the old place to the new one."""
    old, new = tmp_path / "old", tmp_path / "a new"
    old.mkdir()
    open_tracking(RegistrySettings(), old)
    shutil.copytree(old, new)
    with pytest.raises(TrackingError, match=f"was copied or moved: its runs name {old}/mlflow-artifacts"):
        open_tracking(RegistrySettings(), new)
    shutil.rmtree(old)
    (new / "mlflow-artifacts").mkdir(exist_ok=True)
    old.symlink_to(new)
    assert open_tracking(RegistrySettings(), new).experiment_id == open_tracking(RegistrySettings(), old).experiment_id


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A server that accepts and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def closed_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
    return port


@pytest.mark.parametrize("scheme", ["http", "postgresql"])
def test_unreachable_server_is_one_line_at_once(scheme: str, tmp_path: Path) -> None:
    uri = f"{scheme}://me:secret@127.0.0.1:{closed_port()}/x"
    started = time.monotonic()
    with pytest.raises(TrackingError) as caught:
        open_tracking(RegistrySettings(tracking_uri=uri), tmp_path)
    message = str(caught.value)
    assert time.monotonic() - started < 5
    assert "\n" not in message and "connection refused" in message and "cannot be reached" in message
    assert "secret" not in message and caught.value.exit_code == 3


@pytest.mark.slow
def test_silent_server_is_refused_in_time(silent_port: int, tmp_path: Path) -> None:
    settings = RegistrySettings(tracking_uri=f"http://127.0.0.1:{silent_port}", connect_seconds=1)
    started = time.monotonic()
    with pytest.raises(TrackingError, match=r"no answer within 1 s|timed out"):
        open_tracking(settings, tmp_path)
    assert time.monotonic() - started < 5


def test_hanging_name_resolution_is_refused_in_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(connect, "_experiment", lambda *_: time.sleep(3))
    settings = RegistrySettings(tracking_uri="http://somewhere", connect_seconds=0.2)
    with pytest.raises(TrackingError, match=r"no answer within 0\.2 s"):
        open_tracking(settings, tmp_path)


def test_unknown_scheme_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(TrackingError, match="foo://x: MLflow cannot be reached"):
        open_tracking(RegistrySettings(tracking_uri="foo://x"), tmp_path)


def test_database_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("not SQLite, but long enough to be looked at: " + "x" * 4096)
    with pytest.raises(TrackingError, match=r"mlflow\.db: MLflow cannot be reached"):
        open_tracking(RegistrySettings(), tmp_path)


def test_a_database_that_is_being_made_is_whole_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between two tables left a file that MLflow never opened again."""
    from mlflow.store.db import utils

    whole = utils._upgrade_db

    def stopped(engine: Any) -> None:
        whole(engine)  # type: ignore[no-untyped-call]
        raise KeyboardInterrupt

    (tmp_path / "mlflow.db").touch()  # a first look leaves it empty
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(utils, "_upgrade_db", stopped)
        open_tracking(RegistrySettings(), tmp_path)
    assert (tmp_path / "mlflow.db").stat().st_size == 0
    (tmp_path / ".mlflow.db.0123abcd.tmp").touch()  # of a kill
    assert open_tracking(RegistrySettings(), tmp_path).client.search_experiments()
    assert {path.name for path in tmp_path.iterdir()} == {"mlflow.db", "mlflow.open.lock"}


def test_a_disk_without_room_for_a_database_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("draftforge.registry.connect.MlflowClient", full)
    with pytest.raises(DiskFullError, match=r"^\S*mlflow\.db: no space left on the device$"):
        open_tracking(RegistrySettings(), tmp_path)


def test_a_folder_in_the_databases_place_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow would try to open it for minutes."""
    monkeypatch.setattr("draftforge.registry.connect.MlflowClient", pytest.fail)
    (tmp_path / "mlflow.db").mkdir()
    with pytest.raises(TrackingError, match=r"mlflow\.db: MLflow cannot be reached \(.*unable to open database file"):
        open_tracking(RegistrySettings(), tmp_path)


def test_deleted_experiment_says_so(shared_tracking: Tracking) -> None:
    database = Path(shared_tracking.uri.removeprefix("sqlite:///"))
    settings = RegistrySettings(experiment="deleted one")
    opened = open_tracking(settings, database.parent)
    opened.client.delete_experiment(opened.experiment_id)
    with pytest.raises(TrackingError, match=r"registry\.experiment: deleted one"):
        open_tracking(settings, database.parent)


def test_lock_folder_moves_when_the_cache_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    assert connect._lock_folder("http://x", None).is_relative_to(tmp_path / f"draftforge-{os.getuid()}")
    with pytest.raises(TrackingError, match="cannot be made"):
        connect._lock_folder("sqlite:///x", tmp_path / "file" / "mlflow.db")


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        (
            "sqlite:////a/mlflow.db",
            "mlflow ui --backend-store-uri sqlite:////a/mlflow.db, then http://127.0.0.1:5000/{}",
        ),
        ("sqlite:////a b/x.db", "mlflow ui --backend-store-uri 'sqlite:////a b/x.db', then http://127.0.0.1:5000/{}"),
        ("http://host:5000", "http://host:5000/{}"),
        ("https://me:secret@host/mlflow/", "https://host/mlflow/{}"),
        (
            "postgresql+psycopg://h/d",
            "mlflow ui --backend-store-uri postgresql+psycopg://h/d, then http://127.0.0.1:5000/{}",
        ),
        (
            "postgresql+psycopg://me:secret@h/d",
            "mlflow ui --backend-store-uri postgresql+psycopg://***@h/d (with user and password for ***), "
            "then http://127.0.0.1:5000/{}",
        ),
        ("databricks", "run r1 in databricks"),
    ],
)
def test_the_way_to_look_at_a_run(shared_tracking: Tracking, uri: str, shown: str) -> None:
    store = dataclasses.replace(shared_tracking, uri=uri, experiment_id="7")
    assert how_to_look(store, "r1") == shown.format("#/experiments/7/runs/r1")


def test_an_address_of_the_environment_is_named_and_not_shown(
    shared_tracking: Tracking, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = "postgresql+psycopg://me:secret@h/d"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    shown = how_to_look(dataclasses.replace(shared_tracking, uri=uri), "r1")
    assert shown.startswith('mlflow ui --backend-store-uri "$MLFLOW_TRACKING_URI", then ')


def server_at(tracking: Tracking, port: int, scheme: str = "http") -> Tracking:
    uri = f"{scheme}://me:secret@127.0.0.1:{port}/x"
    client = MlflowClient(tracking_uri=uri) if scheme == "http" else tracking.client
    return dataclasses.replace(tracking, uri=uri, client=client)


@pytest.mark.parametrize("scheme", ["http", "postgresql"])
def test_a_server_that_is_gone_is_seen_at_once(shared_tracking: Tracking, scheme: str) -> None:
    assert unreachable(server_at(shared_tracking, closed_port(), scheme), 60) == "connection refused"


def test_a_server_that_is_silent_is_seen_in_time(shared_tracking: Tracking, silent_port: int) -> None:
    found = unreachable(server_at(shared_tracking, silent_port), 0.5)
    assert found is not None and ("timed out" in found or "no answer within 0.5 s" in found)


@pytest.mark.parametrize(("code", "words"), [(200, None), (401, None), (404, None), (503, "it answers 503")])
def test_a_server_is_there_unless_it_says_that_it_cannot(
    shared_tracking: Tracking, monkeypatch: pytest.MonkeyPatch, code: int, words: str | None
) -> None:
    monkeypatch.setattr(connect, "http_request", lambda *_, **__: SimpleNamespace(status_code=code))
    assert unreachable(server_at(shared_tracking, 1), 60) == words


def test_a_file_is_always_there(shared_tracking: Tracking) -> None:
    assert unreachable(shared_tracking, 0.001) is None and not watched(shared_tracking)


def test_quick_requests_restores_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "77")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    with quick_requests(2.4):
        assert (os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"], os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"]) == ("2", "0")
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "77"
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ


def test_errors_are_ours(tracking: Tracking) -> None:
    with pytest.raises(RegistryError, match="not found"), mlflow_errors(tracking.uri):
        tracking.client.get_registered_model("nothing")
    with pytest.raises(TrackingError, match="sqlite"), mlflow_errors(tracking.uri):
        for _ in range(2):
            tracking.client.create_registered_model(tracking.settings.model)
    with pytest.raises(DiskFullError, match="no space left"), mlflow_errors(tracking.uri):
        raise OSError(28, "No space left on device")
    with pytest.raises(FileNotFoundError), mlflow_errors(tracking.uri):
        raise FileNotFoundError(2, "other errors pass")


def test_passwords_are_never_shown(tracking: Tracking) -> None:
    assert "sqlite" in repr(tracking)


def test_mlflow_stays_quiet(shared_tracking: Tracking, capfd: pytest.CaptureFixture[str]) -> None:
    run = shared_tracking.client.create_run(shared_tracking.experiment_id)
    shared_tracking.client.set_terminated(run.info.run_id)
    assert capfd.readouterr() == ("", "")
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"]


def test_a_store_without_room_is_a_full_disk() -> None:
    said = "(raised as a result of Query-invoked autoflush)\n(sqlite3.OperationalError) database or disk is full"
    with (
        pytest.raises(DiskFullError, match=r"sqlite:///x\.db: no space left for runs or artifacts"),
        mlflow_errors("sqlite:///x.db"),
    ):
        raise MlflowException(said)


def test_of_a_long_line_as_much_is_cleaned_as_may_be_shown_and_no_word_in_half() -> None:
    """Thirty megabytes of a server's took a minute for each error."""
    cleaned = list[str]()

    def clean(text: str) -> str:
        cleaned.append(text)
        return text.replace("x" * 20_000, "***")

    assert one_line(ValueError("x" * 20_000 + " //me:" + "p" * 20_000 + "@h/ " + "y" * 1_000_000), clean=clean) == "***"
    assert one_line(ValueError("y" * 1_000_000), clean=clean) == "ValueError"
    assert max(map(len, cleaned)) <= 32_000


def test_a_password_is_taken_out_before_a_long_line_is_cut() -> None:
    error = OSError("x" * 270 + " http://user:" + "secret" * 10 + "@host")
    assert "secret" not in one_line(error, clean=masked)
    assert one_line(error).endswith("…") and "secret" in one_line(error)  # cut first, it would show


def test_a_read_only_database_is_named_with_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # MLflow makes a folder of what it takes for a path in the address
    tracking = open_tracking(RegistrySettings(), tmp_path)
    database = tmp_path / "mlflow.db"
    read_only = f"sqlite:///file:{database}?mode=ro&uri=true"  # a file's mode means nothing to root
    client = MlflowClient(tracking_uri=read_only, registry_uri=read_only)
    with pytest.raises(TrackingError) as caught, mlflow_errors(tracking.uri):
        client.create_run(tracking.experiment_id)
    message = str(caught.value)
    assert message.startswith(f"{tracking.uri}: attempt to write a readonly database; {database} is read-only here")
    assert "\n" not in message and "autoflush" not in message
    with pytest.raises(TrackingError, match=r"x: attempt to write a readonly database$"), mlflow_errors("http://x"):
        raise OperationalError("INSERT INTO runs", {}, sqlite3.OperationalError("attempt to write a readonly database"))


def test_what_mlflow_says_itself_about_the_database_stays(tracking: Tracking) -> None:
    tracking.client.create_registered_model(tracking.settings.model)
    with pytest.raises(TrackingError, match="already exists"), mlflow_errors(tracking.uri):
        tracking.client.create_registered_model(tracking.settings.model)


def test_pages_without_end_are_refused(shared_tracking: Tracking) -> None:
    asked: list[str | None] = []

    def search(token: str | None) -> PagedList[int]:
        asked.append(token)
        return PagedList([len(asked)], "more" if len(asked) < 3 else None)

    assert list(all_pages(shared_tracking, search)) == [1, 2, 3] and asked == [None, "more", "more"]
    with pytest.raises(TrackingError, match="more than 1000 pages of one list"):
        list(all_pages(shared_tracking, lambda token: PagedList([], "more")))


@pytest.mark.parametrize("several", [1, 2])
def test_folders_without_end_are_refused(several: int) -> None:
    """Each holds one more, or two more, of which a million would be twenty deep."""

    class Repository:
        def list_artifacts(self, folder: str | None) -> list[FileInfo]:
            return [FileInfo("/".join(filter(None, (folder, f"d{i}"))), True, None) for i in range(several)]

    with pytest.raises(RegistryError, match="more than 10000 files, or folders deeper than 20"):
        _walk(Repository())  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [-1, 1 << 61, 10**400, 1e308])
def test_sizes_that_no_file_has_are_refused(size: Any) -> None:
    class Repository:
        def list_artifacts(self, folder: str | None) -> list[FileInfo]:
            return [FileInfo("config.json", False, size)]

    with pytest.raises(RegistryError, match=r"^config.json: size -?\d{1,40}: must be 0 to"):
        _walk(Repository())  # type: ignore[arg-type]
    with pytest.raises(RegistryError, match=r"^config.json: size"):
        _sizes(Repository(), ["config.json"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "error",
    [
        ParseError("no such\nfield"),
        TypeError("'int' object"),
        KeyError("files"),
        OverflowError("inf"),
        SystemError("get"),
    ],
)
def test_a_reply_that_is_none_of_mlflows_is_one_line(error: Exception) -> None:
    said = rf"^http://h: MLflow's reply is unusable \({type(error).__name__}: "
    with pytest.raises(TrackingError, match=said), mlflow_errors("http://h"):
        raise error
    # A database sends none: there it is a defect, which stays what it is.
    with pytest.raises(type(error)) as raised, mlflow_errors("sqlite:///x.db"):
        raise error
    assert raised.value is error


def test_a_library_that_artifacts_need_is_named() -> None:
    said = r"^http://h: its artifacts need a library: No module named 'azure'"
    with pytest.raises(TrackingError, match=said), mlflow_errors("http://h"):
        raise ModuleNotFoundError("No module named 'azure'")


class _Failing(BaseHTTPRequestHandler):
    """Server that asks for a day of patience, or says nothing."""

    def do_GET(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        if self.path == "/silent":
            threading.Event().wait(0.5)
            return
        self.send_response(503)
        self.send_header("Retry-After", "86400")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize(
    ("path", "most_seconds", "tries", "waited"),
    [("/silent", 300.0, 1, []), ("/busy", 300.0, 4, [30.0, 30.0, 30.0]), ("/busy", -1.0, 1, [])],
)
def test_mlflows_retries_end(
    monkeypatch: pytest.MonkeyPatch, path: str, most_seconds: float, tries: int, waited: list[float]
) -> None:
    slept = list[float]()
    monkeypatch.setattr(connect, "MOST_RETRY_SECONDS", most_seconds)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Failing)
    server.asked = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(urllib3.util.retry.time, "sleep", slept.append)
        host = MlflowHostCreds(f"http://127.0.0.1:{server.server_port}")  # type: ignore[no-untyped-call]
        with pytest.raises((MlflowException, requests.RequestException)):
            http_request(host, path, "GET", max_retries=3, timeout=0.1)  # type: ignore[no-untyped-call]
    assert (len(server.asked), slept) == (tries, waited)  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()
