"""Streaming file readers: a file, a folder or a pattern, plain or compressed; as lines, JSON values or table rows.

No file is read whole: memory holds one line, one value of a JSON array, or one batch of rows at a time.
"""

import bz2
import csv
import glob
import gzip
import io
import itertools
import json
import lzma
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import ijson
import pyarrow as pa
import pyarrow.parquet as pq

from .. import fingerprint, progress
from ..errors import InputError, MissingFileError
from ..storage import size_unit

_PACKED = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}
_UNPACKING = (EOFError, OSError, zlib.error, lzma.LZMAError)
_JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
_BOM = b"\xef\xbb\xbf"
_ITEMS_PER_UPDATE = 256
_DEEPEST = 200  # of a JSON value: far below what Python's own JSON module can write again


def _as_it_is(value: Any, where: str) -> Any:
    return value


class Item(NamedTuple):
    """One line, JSON value or row of a file, decoded on demand."""

    path: Path
    where: str
    """`file:line`, or `file: item N` of a JSON array."""
    raw: Any
    """Bytes of a line, or a value that its file's format has decoded."""
    decoder: Callable[[Any, str], Any] = _as_it_is
    """A function of this module, so that an item can go to another process."""

    def decode(self) -> Any:
        """Parse the item. Raises InputError starting with `where`."""
        return self.decoder(self.raw, self.where)


class _Open(NamedTuple):
    """A file that is being read."""

    path: Path
    stream: IO[bytes]
    tick: Callable[[], None]
    """Move the progress bar to the current position in the file on disk."""


def find(base_dir: Path, name: str) -> list[Path]:
    """Find the files that a source names, sorted by name: one file, all of a folder, or the matches of a pattern.

    Files whose name starts with a dot are left out of folders. Raises MissingFileError.
    """
    # A folder: all files in it and below.
    path = base_dir / name
    if path.is_dir():
        found = [inner for inner in path.rglob("*") if inner.is_file() and not _hidden(inner.relative_to(path))]
        if not found:
            raise MissingFileError(f"{path}: the folder holds no file")
        return sorted(found)
    # A pattern, unless a file has that very name.
    if not path.exists() and glob.has_magic(name):
        found = [base_dir / match for match in glob.glob(name, root_dir=base_dir, recursive=True)]  # noqa: PTH207  absolute patterns too
        found = sorted(match for match in found if match.is_file())
        if not found:
            raise MissingFileError(f"{path}: no file matches")
        return found
    return [require_file(path)]


def digest(base_dir: Path, name: str) -> str:
    """Digest (64 hex digits) of the contents of a source's files, and of their names where there may be several."""
    # A single file's name does not count; others count relative to the folder that holds all of them.
    paths = find(base_dir, name)
    if paths == [base_dir / name]:
        return fingerprint.of_file(paths[0])
    root = base_dir / name if (base_dir / name).is_dir() else Path(os.path.commonpath([path.parent for path in paths]))
    return fingerprint.of_files(root, [path.relative_to(root).as_posix() for path in paths])


def require_file(path: Path) -> Path:
    """The path, if it is a file. Raises MissingFileError, or InputError for a folder."""
    if path.is_dir():
        raise InputError(f"{path}: is a folder; must be a file")
    if not path.is_file():
        raise MissingFileError(f"{path}: no such file")
    return path


def text_lines(paths: Sequence[Path], title: str) -> Iterator[Item]:
    """Yield the lines that are not blank, as text without line ends."""
    for file in _opened(paths, title):
        for where, line in _lines(file):
            yield Item(file.path, where, line, _text)


def prompt_lines(paths: Sequence[Path], title: str) -> Iterator[Item]:
    """Prompts: JSON values where the file's name says JSON, else each line that is not blank as {"prompt": line}."""
    for file in _opened(paths, title):
        if _unpacked_name(file.path).endswith(_JSON_SUFFIXES):
            yield from _json_values(file)
            continue
        for where, line in _lines(file):
            yield Item(file.path, where, line, _prompt)


def objects(paths: Sequence[Path], title: str) -> Iterator[Item]:
    """Yield JSON values: one a line, the elements of an array, or a file's only value over many lines."""
    for file in _opened(paths, title):
        yield from _json_values(file)


def table_rows(paths: Sequence[Path], title: str) -> Iterator[Item]:
    """Yield the rows of .csv and .parquet files as objects, and the JSON values of all other files."""
    for file in _opened(paths, title):
        name = _unpacked_name(file.path)
        if name.endswith(".csv"):
            yield from _csv_rows(file)
        elif name.endswith(".parquet"):
            yield from _parquet_rows(file)
        else:
            yield from _json_values(file)


def first_line(path: Path) -> Any:
    """Decode the first value of a file; None: it is empty. A line of a text file gives {"prompt": line}."""
    return next((item.decode() for item in prompt_lines([path], f"reading {path.name}")), None)


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _unpacked_name(path: Path) -> str:
    return path.name.removesuffix(path.suffix) if path.suffix in _PACKED else path.name


def _opened(paths: Sequence[Path], title: str) -> Iterator[_Open]:
    """Each file in turn, under one progress bar."""
    total = sum(require_file(path).stat().st_size for path in paths)
    unit, name = size_unit(total)
    with progress.bar(title, total / unit, name) as advance:
        for path in paths:
            with path.open("rb") as raw:
                yield _Open(path, _unpack(path, raw), _ticks(raw, advance, unit))


def _ticks(raw: IO[bytes], advance: progress.Advance, unit: float) -> Callable[[], None]:
    done = 0

    def tick() -> None:
        nonlocal done
        position = raw.tell()
        advance((position - done) / unit)
        done = position

    return tick


def _unpack(path: Path, raw: IO[bytes]) -> IO[bytes]:
    if path.suffix == ".gz":
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    if path.suffix == ".bz2":
        return bz2.BZ2File(raw)
    if path.suffix == ".xz":
        return lzma.LZMAFile(raw)
    if path.suffix == ".zst":
        return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd"))
    return raw


@contextmanager
def _unpacking(path: Path, where: Callable[[], str]) -> Iterator[None]:
    """Turn the error of a cut or damaged packed file into an InputError that names the line."""
    try:
        yield
    except _UNPACKING as error:
        if path.suffix not in _PACKED:
            raise
        raise InputError(f"{where()}: not a complete {_PACKED[path.suffix]} file ({error})") from None


def _lines(file: _Open) -> Iterator[tuple[str, bytes]]:
    number = 0
    with _unpacking(file.path, lambda: f"{file.path}:{number + 1}"):
        for number, line in enumerate(file.stream, start=1):
            if number == 1:
                line = line.removeprefix(_BOM)
            if line.strip():
                yield f"{file.path}:{number}", line
            if number % _ITEMS_PER_UPDATE == 0:
                file.tick()
    file.tick()


def _json_values(file: _Open) -> Iterator[Item]:
    """Yield JSON values: one a line, unless the file starts an array, or is a .json whose first line is no value."""
    # 1) An array: its elements one by one.
    with _unpacking(file.path, lambda: f"{file.path}:1"):
        start = file.stream.peek(1)  # type: ignore[attr-defined]  # an array may be one line of any length
    if start.removeprefix(_BOM).lstrip().startswith(b"["):
        yield from _whole_values(file, file.stream.read(len(start)).removeprefix(_BOM))
        return

    # 2) A .json file with one value over many lines.
    lines = _lines(file)
    first = next(lines, None)
    if first is None:
        return
    where, line = first
    if _unpacked_name(file.path).endswith(".json") and not _is_json(line):
        yield from _whole_values(file, line)
        return

    # 3) JSON lines.
    for where, line in itertools.chain([first], lines):
        yield Item(file.path, where, line, _json)


def _text(line: bytes, where: str) -> str:
    return _utf8(line, where).rstrip("\r\n")


def _prompt(line: bytes, where: str) -> dict[str, str]:
    return {"prompt": _text(line, where)}


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _json(line: bytes, where: str) -> Any:
    text = _utf8(line, where)
    try:
        return json.loads(text)
    except RecursionError:
        raise InputError(f"{where}: nested too deeply for JSON") from None
    except ValueError as error:
        # The message without the text that it would quote.
        reason = getattr(error, "msg", str(error))
        column = getattr(error, "colno", None)
        spot = f" at column {column}" if column else ""
        raise InputError(f"{where}: not valid JSON ({reason}{spot}); must be one object a line") from None


def _utf8(line: bytes, where: str) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not valid UTF-8 (byte {error.start + 1} of the line)") from None


class _Prepended:
    """A stream with the bytes that were read from it already put back in front."""

    def __init__(self, begun: bytes, stream: IO[bytes]) -> None:
        self._begun, self._stream = begun, stream

    def read(self, size: int = -1) -> bytes:
        if size == 0:  # asked for the kind of what is read
            return b""
        begun, self._begun = self._begun, b""
        return begun or self._stream.read(size)


def _whole_values(file: _Open, begun: bytes) -> Iterator[Item]:
    """Yield the elements of an array, or consecutive values, wherever lines end. `begun`: bytes read already."""
    # ijson parses as it reads, so the place of an error is the item after the last whole one.
    number = 0
    with _unpacking(file.path, lambda: f"{file.path}: item {number + 1}"):
        try:
            for number, value in enumerate(_elements(_Prepended(begun, file.stream)), start=1):
                yield Item(file.path, f"{file.path}: item {number}", value)
                if number % _ITEMS_PER_UPDATE == 0:
                    file.tick()
        except ijson.JSONError as error:  # its other lines quote the file
            reason = str(error).splitlines()[0].strip()
            raise InputError(f"{file.path}: item {number + 1}: not valid JSON ({reason})") from None
        except RecursionError:
            raise InputError(f"{file.path}: item {number + 1}: nested too deeply for JSON") from None
    file.tick()


def _elements(stream: _Prepended) -> Iterator[Any]:
    """Yield top-level values one at a time; a top-level array gives its elements instead."""
    # `depth` counts open brackets, the top-level array's included; `array` is whether one is open.
    depth, array, builder = 0, False, ijson.ObjectBuilder()
    for event, value in ijson.basic_parse(stream, use_float=True, multiple_values=True):
        ends = event in ("end_map", "end_array")
        depth -= ends

        # The brackets of a top-level array are not part of any value.
        if depth == 0 and event in ("start_array", "end_array"):
            array = event == "start_array"
            depth += array
            continue
        builder.event(event, value)
        depth += event in ("start_map", "start_array")
        if depth > _DEEPEST:
            raise RecursionError

        # Back at the top level, or directly inside its array: a value is complete.
        if depth == array and event != "map_key":
            yield builder.value
            builder = ijson.ObjectBuilder()


def _csv_rows(file: _Open) -> Iterator[Item]:
    csv.field_size_limit(sys.maxsize)  # a conversation is one field
    rows = csv.DictReader(io.TextIOWrapper(file.stream, encoding="utf-8-sig", newline=""), strict=True)
    # The header is read at once, so that an error in it has line 1.
    with _table_errors(file.path, f"{file.path}:1"):
        rows.fieldnames  # noqa: B018  reads the header
    for number in itertools.count(1):
        # A row may span lines: it is named by the first.
        where = f"{file.path}:{rows.line_num + 1}"
        with _table_errors(file.path, where):
            row = next(rows, None)
        if row is None:
            break
        yield Item(file.path, where, row, _checked_row)
        if number % _ITEMS_PER_UPDATE == 0:
            file.tick()
    file.tick()


@contextmanager
def _table_errors(path: Path, where: str) -> Iterator[None]:
    try:
        with _unpacking(path, lambda: where):
            yield
    except csv.Error as error:
        raise InputError(f"{where}: not valid CSV ({error})") from None
    except UnicodeDecodeError:  # text is decoded some lines ahead
        raise InputError(f"{where}: not valid UTF-8, here or within the next 8 kB") from None


def _checked_row(row: dict[Any, Any], where: str) -> dict[str, str]:
    if None in row or None in row.values():
        raise InputError(f"{where}: has not as many values as the header has names")
    return row


def _parquet_rows(file: _Open) -> Iterator[Item]:
    number = 0
    try:
        # One batch of rows is in memory at a time.
        for batch in pq.ParquetFile(file.stream).iter_batches(_ITEMS_PER_UPDATE):
            for row in batch.to_pylist():
                number += 1
                yield Item(file.path, f"{file.path}: row {number}", row)
            file.tick()
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{file.path}: row {number + 1}: not a complete Parquet file ({error})") from None
