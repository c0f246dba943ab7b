"""Files of a source: by name, of a folder or by pattern, in order of time.

What cannot be found is said: a folder that cannot be read, a link to nothing or out of the folder, a name that is no
UTF-8.
"""

import glob
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from .. import fingerprint
from ..errors import InputError, MissingFileError

PACKED = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}
READ_BY_NAME = (".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".parquet")
"""Endings of names that say how a file is read."""


def find(base_dir: Path, name: str, follow_links: bool = False) -> list[Path]:
    """Find the files that a source names: one file, all of a folder, or those that match a pattern or lie in folders
    that do.

    They are sorted by name; files of one rotated log by time, the oldest first. A folder's files whose name starts with
    a dot are left out. Raises MissingFileError, and InputError for a name that is not UTF-8, a folder that cannot be
    read, a link to nothing, and one out of the folder (of a pattern: the one that its beginning names) unless these are
    followed.
    """
    # A folder: all files in it and below.
    path = base_dir / name
    if path.is_dir():
        found = list(_files_below(path, follow_links))
        if not found:
            raise MissingFileError(f"{path}: the folder holds no file")
        return _by_time(found if follow_links else _inside(found, path))
    # A pattern, unless a file has that very name.
    if not path.exists() and glob.has_magic(name):
        matches = _matches(base_dir, name)
        files = {match for match in matches if _is_file(match)}
        files.update(file for match in matches if match.is_dir() for file in _files_below(match, follow_links))
        found = sorted(files)
        if not found:
            raise MissingFileError(f"{path}: no file matches")
        plain = itertools.takewhile(lambda part: not glob.has_magic(part), path.parts)
        return _by_time(found if follow_links else _inside(found, Path(*plain)))
    return [require_file(path)]


def _matches(base_dir: Path, pattern: str) -> list[Path]:
    """Files and folders that match a pattern. Raises InputError for a folder on the way that cannot be read, and a link
    to nothing, both of which `glob` passes over."""

    def found(pattern: str) -> list[Path]:
        return [base_dir / match for match in glob.glob(pattern, root_dir=base_dir, recursive=True)]  # noqa: PTH207  absolute patterns too

    steps = Path(pattern).parts
    for count in range(1, len(steps)):
        is_listed = glob.has_magic(steps[count])
        for folder in found(str(Path(*steps[:count]))):
            if not _is_file(folder) and folder.is_dir():
                _require_readable(folder, is_listed)
    return found(pattern)


def _require_readable(folder: Path, is_listed: bool) -> None:
    """Raise InputError unless names can be looked up in a folder, and also listed where that is asked for."""
    try:
        os.stat(f"{folder}/.")  # noqa: PTH116  a Path has no dot, which is looked up
        if is_listed:
            os.scandir(folder).close()
    except OSError as error:
        raise InputError(f"{folder}: cannot be read ({error.strerror})") from None


def _is_file(path: Path) -> bool:
    """Whether a path is a file, and no folder or pipe. Raises InputError for a link to nothing."""
    if path.is_symlink() and not path.exists():
        raise InputError(f"{path}: is a link to nothing; remove it, or bring back what it leads to")
    return path.is_file()


def _files_below(folder: Path, follow_links: bool) -> Iterator[Path]:
    """Yield the files of a folder and below that are not hidden, those of each folder once, whatever links lead to it.

    Raises InputError for a folder that cannot be read, a link to nothing, and one to a folder outside unless these are
    followed.
    """
    root = folder.resolve()
    seen = {root}
    for place, folders, names in os.walk(folder, onerror=_unreadable, followlinks=True):
        found = [Path(place, name) for name in sorted(names) if not name.startswith(".")]
        yield from filter(_is_file, found)
        inner = [Path(place, name) for name in sorted(folders) if not name.startswith(".")]
        if not follow_links:
            _inside(inner, folder)
        # A link to a folder that is read by its own name, or was read by another link, is passed over.
        folders.clear()
        for one in inner:
            real = one.resolve()
            is_read = real.is_relative_to(root) and not is_hidden(real.relative_to(root))
            if real not in seen and not (one.is_symlink() and is_read):
                seen.add(real)
                folders.append(one.name)


def _unreadable(error: OSError) -> None:
    raise InputError(f"{error.filename}: cannot be read ({error.strerror})")


def _inside(paths: list[Path], folder: Path) -> list[Path]:
    """The paths. Raises InputError for one that is read from outside of the folder."""
    root = folder.resolve()
    for path in paths:
        if not path.resolve().is_relative_to(root):
            raise InputError(f"{path}: is a link out of {folder}; follow_links of its source reads it")
    return paths


def whole_logs(paths: Sequence[Path]) -> dict[Path, Path]:
    """Map each file to the log that it is a part of: its path without the suffixes of rotation and packing."""
    return {path: part.log for path, part in zip(paths, _parts(paths))}


class _Part(NamedTuple):
    """Place of a file among those of a rotated log."""

    log: Path
    order: tuple[tuple[int, ...], int, tuple[int, ...]]
    """Sort key, oldest first: by the date of its folder; in one folder dated files, then numbered ones, then the one
    that is still written."""


_EXTENSION = r"\.(?:log|jsonl?|ndjson|txt|out|err|csv|tsv|parquet)"
# `server.log-20261130`, `server.log.2026-11-30_10`, `server-2026-11-30T10-00-00.log`; numbers behind a date count on.
_DATED = re.compile(
    rf"(?P<stem>.*?)[-_.]?(?P<year>(?:19|20)\d\d)(?P<mark>[-_.]?)(?P<month>[01]\d)(?P=mark)(?P<day>[0-3]\d)"
    rf"(?P<rest>(?:[-_.:T]\d+)*)Z?(?P<extension>{_EXTENSION})?"
)
# `2026-11-30`, `dt=20261130`, or a folder each for year, month, day and hour.
_DATED_FOLDERS = re.compile(
    r"(?<=/)(?:\w+=)?((?:19|20)\d\d)(?:[-_.]?([01]\d)(?:[-_.]?([0-3]\d)(?:[-_.T]([0-2]\d))?)?)?/((?:(?:\w+=)?\d\d/)*)"
)
# `server.log.1`, `server.1.log`: a higher number is older.
_NUMBERED = re.compile(rf"(?P<stem>.+)\.(?P<number>\d{{1,4}})(?P<extension>{_EXTENSION})?")


def _by_time(paths: Sequence[Path]) -> list[Path]:
    if odd := [name for name in map(str, paths) if name.encode(errors="replace").decode() != name]:
        raise InputError(f"{ascii(odd[0])[1:-1]}: has a name that is not valid UTF-8; rename it")
    return [path for _, path in sorted(zip(_parts(paths), paths))]


def _parts(paths: Sequence[Path]) -> Iterator[_Part]:
    """Yield each file's place in its log. `.1` is a part of a log only if its name or another file shows the log."""
    known = {path.with_name(unpacked_name(path)) for path in paths}
    for path in paths:
        # 1) Folders of one date are passed over: a log goes on in the next.
        folder = f"{path.parent.as_posix()}/"
        day = tuple(int(number) for found in _DATED_FOLDERS.finditer(folder) for number in re.findall(r"\d+", found[0]))
        parent = Path(_DATED_FOLDERS.sub("", folder))

        # 2) What the name says beside the log's.
        name = unpacked_name(path)
        dated, numbered = _DATED.fullmatch(name), _NUMBERED.fullmatch(name)
        whole = dated or numbered
        log = ((whole["stem"] + (whole["extension"] or "")) or name) if whole else name
        if dated:
            numbers = (dated["year"], dated["month"], dated["day"], *re.findall(r"\d+", dated["rest"]))
            yield _Part(parent / log, (day, 0, tuple(map(int, numbers))))
        elif numbered and (path.with_name(log) in known or re.search(f"{_EXTENSION}$", numbered["stem"])):
            yield _Part(parent / log, (day, 1, (-int(numbered["number"]),)))
        else:
            yield _Part(parent / name, (day, 2, ()))


def digest(base_dir: Path, name: str, follow_links: bool = False) -> str:
    """Digest (64 hex digits) of the contents of a source's files, and of their names where there may be several."""
    # Of a single file's name the endings count, which say how it is read; others count relative to the folder that
    # holds all of them.
    paths = find(base_dir, name, follow_links)
    if paths == [base_dir / name]:
        packing = paths[0].suffix.lower()
        endings = [ending_of(paths[0]), packing if packing in PACKED else ""]
        return fingerprint.of_json([*endings, fingerprint.of_file(paths[0])])
    root = base_dir / name if (base_dir / name).is_dir() else Path(os.path.commonpath([path.parent for path in paths]))
    return fingerprint.of_files(root, [path.relative_to(root).as_posix() for path in paths])


def require_file(path: Path) -> Path:
    """The path, if it is a file. Raises MissingFileError, or InputError for a folder."""
    if path.is_dir():
        raise InputError(f"{path}: is a folder; must be a file")
    if not path.is_file():
        raise MissingFileError(f"{path}: no such file")
    return path


def is_hidden(path: Path) -> bool:
    """Whether a part of the path begins with a dot."""
    return any(part.startswith(".") for part in path.parts)


def unpacked_name(path: Path) -> str:
    """A file's name without the ending of its packing."""
    return path.name.removesuffix(path.suffix) if path.suffix.lower() in PACKED else path.name


def ending_of(path: Path) -> str:
    """Ending of a file's name that says how it is read, in small letters: of a rotated file, that of its log. Empty: it
    has none of `READ_BY_NAME`, and may be text."""
    name = unpacked_name(path)
    if whole := _DATED.fullmatch(name) or _NUMBERED.fullmatch(name):
        name = whole["stem"] + (whole["extension"] or "")
    return next((ending for ending in READ_BY_NAME if name.lower().endswith(ending)), "")
