"""Files and databases of tests are not forced out to the disk: they outlive processes that are killed, not the machine.

A commit of SQLite waits for the disk several times, and a test that distils commits some hundred times.
"""

import os
import sqlite3
from contextlib import suppress
from typing import Any


def unsynced() -> None:
    """Let `os.fsync`, and SQLite in connections that SQLAlchemy makes, return before the disk has the data."""
    os.fsync = _ignored
    whole = sqlite3.dbapi2.connect

    def connect(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = whole(*arguments, **options)
        with suppress(sqlite3.DatabaseError):  # where the file is no database, the first real statement says so
            connection.execute("pragma synchronous = off")
        return connection

    sqlite3.dbapi2.connect = connect  # type: ignore[assignment]


def _ignored(fd: object) -> None:
    pass
