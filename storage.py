"""Atomic files and folders, locks, free space, and paths and names that stay inside their place."""

import errno
import itertools
import json
import os
import re
import shutil
import stat
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from filelock import FileLock, Timeout

from .errors import CorruptDataError, DiskFullError, DraftforgeError, InputError, LockedError, MissingFileError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_REVISION = re.compile(r"\w[\w.-]{0,199}(?:/[\w.-]{1,200}){0,9}")
_SIZE_UNITS = ("B", "kB", "MB", "GB", "TB")
_LEFTOVER = re.compile(r"\.(?P<final>.+)\.[0-9a-f]{8}\.(?P<kind>tmp|old)")  # what a kill may leave of a write
_MOST_DIGITS = 308
# Messages of libraries that wrap a full disk in an error without errno (torch, safetensors, SQLite).
_CUT_SHORT = re.compile(r"\d+ requested and \d+ written")  # of NumPy, which writes GGUF's tensors
_DISK_FULL = ("No space left on device", "Disk quota exceeded", "File too large", "database or disk is full")


def require_file_place(path: Path | None, option: str) -> None:
    """Check that a file can be written at `path` before hours of work end there.

    Raises InputError, naming the option, where `path` is a folder, a device, a pipe or a link (the file takes its
    place), or where its nearest existing parent is a file or cannot be written to.
    """
    if path is None:
        return
    # The place itself, and the nearest folder around it that exists.
    if path.is_dir() or not path.name:
        raise InputError(f"{option} {path}: is a folder; must be a file")
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise InputError(f"{option} {path}: is a link, a device or a pipe; must be a regular file, or not exist")
    folder = next(one for one in path.absolute().parents if one.exists())
    if not folder.is_dir():
        raise InputError(f"{option} {path}: {folder} is a file; must be a folder")
    # Only a trial tells whether something can be written there; it leaves nothing behind.
    try:
        with TemporaryDirectory(prefix=".draftforge-", dir=folder):
            pass
    except OSError as error:  # permissions alone do not tell of every file system
        raise InputError(f"{option} {path}: nothing can be written in {folder} ({error.strerror})") from None


def _require_file(path: Path) -> None:
    """Raise InputError where a rename to `path` would put a file in the place of a device, a pipe or a folder."""
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: must be a regular file, or not exist")


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file so that readers see the old content or the new one, never a part.

    Raises InputError for what is no regular file: a device such as /dev/null would be gone afterwards.
    """
    _require_file(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    # The temporary file lies in the same folder, as a rename is atomic within one file system only.
    try:
        with disk_errors(path), beside.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically, readable by people."""
    write_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


MOST_DEPTH = 100
"""Deepest nesting of JSON that is read: what walks through a value may call itself once a level."""


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError, also for values nested deeper than MOST_DEPTH and for whole numbers that are
    larger than any float."""
    too_deep = f"nested deeper than {MOST_DEPTH} levels"
    try:
        value = json.loads(text, parse_int=_whole)
    except RecursionError:
        raise ValueError(too_deep) from None
    # Few texts have so many brackets that they could be too deep.
    brackets = text.count("[") + text.count("{") if isinstance(text, str) else text.count(b"[") + text.count(b"{")
    level, depth = ([value] if brackets > MOST_DEPTH and isinstance(value, dict | list) else []), 0
    while level:
        depth += 1
        if depth > MOST_DEPTH:
            raise ValueError(too_deep)
        inside = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
        level = [one for one in inside if isinstance(one, dict | list)]
    return value


def _whole(digits: str) -> int:
    """A whole number of JSON. Raises ValueError for one that no float comes up to: arithmetic trips over it later."""
    length = len(digits.removeprefix("-"))
    if length > _MOST_DIGITS:
        raise ValueError(f"a number of {length} digits, must have {_MOST_DIGITS} at most")
    return int(digits)


def expanded(path: str) -> Path:
    """Path with `~` and `~user` as their folders; that of a user whom this machine has not stays as it is."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


MOST_TEXT_BYTES = 64 << 20
"""Largest text that is read whole: a request, prompts, an engine's metrics or responses."""


def utf8(text: str) -> str:
    """Text that a file can hold: half a character, as JSON can name one, is spelt out."""
    return text.encode(errors="backslashreplace").decode()


def read_text(path: Path, option: str) -> str:
    """Text of a file that an option names; `-`: standard input. Raises MissingFileError, or InputError for what is no
    UTF-8 text of at most MOST_TEXT_BYTES."""
    where = f"{option} {path}"
    try:
        with nullcontext(sys.stdin.buffer) if str(path) == "-" else path.open("rb") as file:
            data = file.read(MOST_TEXT_BYTES + 1)
        if len(data) > MOST_TEXT_BYTES:
            raise InputError(f"{where}: has more than {size_text(MOST_TEXT_BYTES)}")
        return data.decode()
    except FileNotFoundError:
        raise MissingFileError(f"{where}: no such file") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: is not UTF-8 text ({error.reason} at byte {error.start})") from None


MOST_JSON_BYTES = 256 << 20
"""Largest file of JSON that is read: a config, a tokenizer, a record."""


def read_json(path: Path) -> Any:
    """Read JSON of at most MOST_JSON_BYTES. Raises MissingFileError or CorruptDataError, both naming the file."""
    # A pipe or a device in a stranger's folder would never end.
    if path.exists() and not path.is_file():
        raise CorruptDataError(f"{path}: must be a regular file")
    try:
        with path.open("rb") as file:
            data = file.read(MOST_JSON_BYTES + 1)
        if len(data) > MOST_JSON_BYTES:
            raise ValueError(f"more than {size_text(MOST_JSON_BYTES)}")
        return parse_json(data)
    except FileNotFoundError:
        raise MissingFileError(f"{path}: no such file") from None
    except ValueError as error:
        raise CorruptDataError(f"{path}: not valid JSON ({error})") from None


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises MissingFileError or CorruptDataError, both naming the file."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise CorruptDataError(f"{path}: holds a JSON {type(value).__name__}, must be an object")
    return value


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder beside `path`; rename it to `path` on success, remove it on failure.

    An existing `path` is replaced only after the new one is complete. Where a process is killed between the two renames
    of that, the old folder has a hidden name until the next call, or `clear_leftover`, gives it its own back.
    """
    # 1) An empty folder beside the final one, on the same file system, so that it can be renamed.
    path.parent.mkdir(parents=True, exist_ok=True)
    _put_back(path)
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    beside.mkdir()
    # 2) The caller fills it.
    try:
        with disk_errors(path):
            yield beside
        # 3) Rename. A folder cannot be renamed over a full one, so the old one steps aside first.
        old = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.old")
        if path.exists():
            path.rename(old)
        beside.rename(path)
        clear_leftover(old)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        _put_back(path)


def clear_leftover(path: Path) -> None:
    """Remove a file or folder that a killed write left under a hidden name; any other name is left alone.

    A folder that stepped aside for a new one that never came is renamed back instead.
    """
    name = _LEFTOVER.fullmatch(path.name)
    if name is None or not path.exists():
        return
    if name["kind"] == "old":
        _put_back(path.with_name(name["final"]))
    # What is called .old is whole: it gets another name before it is deleted.
    if path.is_dir():
        shutil.rmtree(path.rename(path.with_suffix(".tmp")))
    else:
        path.unlink(missing_ok=True)


def _put_back(path: Path) -> None:
    """Rename a folder back to `path` that stepped aside for a new one that never came."""
    if path.exists():
        return
    for hidden in path.parent.glob(".*.old"):
        name = _LEFTOVER.fullmatch(hidden.name)
        if name is not None and name["final"] == path.name:
            hidden.rename(path)
            return


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a name beside `path` to write to; rename it to `path` on success, remove it on failure.

    Raises InputError for what is no regular file.
    """
    _require_file(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with disk_errors(path):
            yield beside
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


Access = Literal["owner", "group", "umask"]
"""Who may enter a work folder: its owner; the owner's group, to write too; whoever this process's umask lets in."""
_FOLDER_MODES = {"owner": 0o700, "group": 0o770}


def restrict(root: Path, access: Access) -> list[Path]:
    """Give a folder and all below it the modes of `access`: 0700 and 0600, or 0770 and 0660. Links are not followed.

    Returns the paths that are another user's, or lie on a file system without modes, and so stay as they are.
    """
    if access == "umask":
        return []
    wanted, left = _FOLDER_MODES[access], []
    # The root first: what lies below it is out of reach from then on.
    for path in itertools.chain([root], root.rglob("*")):
        try:
            found = path.lstat().st_mode
            mode = wanted if stat.S_ISDIR(found) else wanted & 0o660
            if not stat.S_ISLNK(found) and stat.S_IMODE(found) & 0o777 != mode:
                path.chmod(mode)
        except FileNotFoundError:
            continue  # another process's temporary file
        except OSError:
            left.append(path)
    return left


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn "no space left", whichever library says it, into DiskFullError naming the path."""
    try:
        yield
    except Exception as error:
        if isinstance(error, DraftforgeError) or not is_disk_full(error):
            raise
        raise DiskFullError(f"{path}: no space left on the device") from error


def is_disk_full(error: BaseException) -> bool:
    """Whether this is a full disk, a used-up quota or a file over its limit. Not every library keeps the number."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return True
    return any(words in str(error) for words in _DISK_FULL) or _CUT_SHORT.fullmatch(str(error)) is not None


def size_unit(count: float) -> tuple[float, str]:
    """Decimal unit that suits so many bytes: its number of bytes, and its name (B, kB, MB, GB, TB)."""
    # 999.5 kB would round to 1,000 kB: it is shown as 1.00 MB.
    power = next((i for i in range(len(_SIZE_UNITS)) if abs(count) < 999.5 * 1000.0**i), len(_SIZE_UNITS) - 1)
    return 1000.0**power, _SIZE_UNITS[power]


def size_text(count: float) -> str:
    """So many bytes as text, with three digits that mean something: "512 B", "1.05 MB", "84.0 GB"."""
    unit, name = size_unit(count)
    value = count / unit
    digits = 0 if unit == 1 or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:,.{digits}f} {name}"


def require_free_space(folder: Path, need_bytes: int, advice: str = "") -> None:
    """Raise DiskFullError, which ends with the advice, unless the file system of `folder` has `need_bytes` free."""
    free = free_bytes(folder)
    if free < need_bytes:
        sizes = f"{size_text(free)} free, {size_text(need_bytes)} needed: {size_text(need_bytes - free)} too little"
        raise DiskFullError(f"{folder}: {sizes}{advice and f'; {advice}'}")


def free_bytes(folder: Path) -> int:
    """Free bytes of the file system that holds a folder, which may not exist yet."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


@contextmanager
def lock(path: Path, timeout_seconds: float = 0.0, what: str = "another process") -> Iterator[None]:
    """Hold an exclusive file lock. Raises LockedError when it is not free within the timeout.

    The lock is the kernel's: a killed holder frees it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = FileLock(path)
    try:
        handle.acquire(timeout=timeout_seconds)
    except Timeout:
        raise LockedError(f"{path}: locked by {what}; wait for it to end") from None
    try:
        yield
    finally:
        handle.release()


def inside(root: Path, name: str) -> Path:
    """Path of `name` inside `root`, resolved.

    Raises InputError where it would leave `root` (absolute names, `..`, links that point outside), and for a name that
    no file can have.
    """
    try:
        path = (root / name).resolve()
    except ValueError:  # NUL, half a character
        raise InputError(f"{name!a}: is no name that a file can have") from None
    if not path.is_relative_to(root.resolve()):
        raise InputError(f"{name}: must stay inside {root}")
    return path


def lies_inside(folder: Path, path: Path) -> bool:
    """Whether a path that begins with `folder` is a file or folder that lies there, with all links followed.

    What the hub's cache shows in a snapshot's folder are links to its own `blobs`, which are inside.
    """
    try:
        root, real = folder.resolve(), path.resolve()
        if not (real.is_file() or real.is_dir()):
            return False
    except (OSError, RuntimeError, ValueError):  # a ring of links, a name that no file can have
        return False
    snapshots = next((one for one in (root, *root.parents) if one.parent.name == "snapshots"), None)
    blobs = None if snapshots is None else snapshots.parent.parent / "blobs"
    return real.is_relative_to(root) or (blobs is not None and real.parent == blobs and real.is_file())


def check_hub_name(name: str, revision: str | None, field: str) -> None:
    """Raise MissingFileError for what is no id of a hub repository, InputError for what is no revision of one.

    Anything else would be a path or an address to one of the libraries behind it, in its cache's folders too.
    """
    if not _HUB_ID.fullmatch(name) or ".." in name:
        raise MissingFileError(f"{field}: {name}: no such folder, and not a hub id (owner/name)")
    if revision is not None and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise InputError(f"{field}: {name}: revision {revision!r}: must be a branch, a tag or a commit")
