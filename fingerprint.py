"""Fingerprints: SHA-256 of the content of settings, files and folders. Same content, same fingerprint.

Stage folders, cached costs and registered models are named by them. A change of how one is computed renames everything
that is on disk, and so makes every stage run again.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import storage
from .errors import MissingFileError

_CHUNK_BYTES = 1 << 22
_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode


def of_json(value: Any) -> str:
    """SHA-256 (64 hex digits) of a JSON-able value, independent of key order and whitespace."""
    # One canonical text for each value. NaN is refused: it has no JSON, and would equal nothing.
    return hashlib.sha256(_canonical(value).encode()).hexdigest()


def of_bytes(data: bytes) -> str:
    """SHA-256 (64 hex digits) of bytes."""
    return hashlib.sha256(data).hexdigest()


def of_file(path: Path) -> str:
    """SHA-256 (64 hex digits) of a file's content. Raises MissingFileError."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
    except FileNotFoundError:
        raise MissingFileError(f"{path}: no such file") from None
    return digest.hexdigest()


class FileDigests:
    """A cache of file digests by (path, size, mtime_ns), so that a 100 GB target is hashed once.

    `store`: the JSON file that keeps the digests between processes; None keeps them in this object only. A lost or
    unreadable file only costs the time to hash again.
    """

    def __init__(self, store: Path | None) -> None:
        self._store = store
        self._known: dict[str, str] = {}
        if store is None:
            return
        with suppress(OSError, ValueError):
            # Entries that are no digests are dropped one by one: the file may have been edited or cut off.
            known = storage.read_object(store)
            self._known = {key: value for key, value in known.items() if is_fingerprint(value)}

    def of_file(self, path: Path) -> str:
        """SHA-256 of a file, cached while size and modification time are unchanged. Raises MissingFileError."""
        if not path.is_file():
            raise MissingFileError(f"{path}: no such file")
        # Nanoseconds: a file that is rewritten within the same second must not keep its digest.
        stat = path.stat()
        key = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
        if key not in self._known:
            self._known[key] = of_file(path)
            if self._store is not None:
                storage.write_bytes(self._store, json.dumps(self._known).encode())
        return self._known[key]


def of_files(root: Path, names: Iterable[str], digests: FileDigests | None = None) -> str:
    """One fingerprint of several files under `root`, by relative name and content."""
    hash_one = digests.of_file if digests else of_file
    return of_json({name: hash_one(root / name) for name in sorted(names)})


def file_digests(path: Path) -> dict[str, str]:
    """Digests, by name, of the files that lie directly in a folder; or of one file."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return {file.name: of_file(file) for file in files if file.is_file()}


def is_fingerprint(value: object) -> bool:
    """Whether a value is a fingerprint: text of 64 lower-case hex digits."""
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def short(fingerprint: str) -> str:
    """Short form of a fingerprint: its first 12 hex digits, as folder and model names have them."""
    return fingerprint[:12]
