"""Streaming file readers, plain or compressed: lines, JSON values or table rows.

No file is read whole: memory holds one line, one value of a JSON array, or one batch of rows at a time, each of limited
size. What is over a limit is an item that raises InputError when it is decoded. Lines end at
"\\n" alone: other separators stand inside JSON and text. NUL bytes in front of a line, which logrotate's `copytruncate`
leaves where the writer had been, are passed over.
"""

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from .. import progress
from ..errors import InputError
from ..storage import size_text, size_unit
from .file_search import PACKED, READ_BY_NAME, ending_of, is_hidden, require_file, unpacked_name
from .logs.chat import LeftOut
from .logs.containers import CRI_LINE
from .read_limits import (
    USUAL,
    CountedStream,
    Limits,
    TooLargeError,
    check_table_size,
    json_within,
    memory_within,
    rows_within,
    values_bytes,
)

_UNPACKING = (EOFError, OSError, zlib.error, lzma.LZMAError)
_BOM = b"\xef\xbb\xbf"
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_ITEMS_PER_UPDATE = 256
_PIECE_BYTES = 1 << 16
_NESTED_ROWS = 32


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
    limits: Limits

    def item(self, where: str, line: bytes | int, decoder: Callable[[Any, str], Any]) -> Item:
        """Make the item of a line, or of one that was too long: its size."""
        return Item(self.path, where, line, _too_long if isinstance(line, int) else decoder)


def _too_long(size: int, where: str) -> Any:
    raise InputError(f"{where}: has {size_text(size)}, more than read_limits.line_megabytes allows")


def _no_text(row: Any, where: str) -> Any:
    raise InputError(f"{where}: holds text that is not valid UTF-8")


def _as_error(message: str, where: str) -> Any:
    raise InputError(message)


def text_lines(paths: Sequence[Path], title: str, limits: Limits = USUAL) -> Iterator[Item]:
    """Yield the lines that are not blank, as text without line ends."""
    return _items(paths, title, limits, lambda file: (file.item(*line, _log_line) for line in _lines(file)))


def prompt_lines(
    paths: Sequence[Path], title: str, limits: Limits = USUAL, column: str | None = None
) -> Iterator[Item]:
    """Prompts: what `objects` reads where the file's name says JSON or a table, else {"prompt": line} of each line that
    is not blank."""

    def read(file: _Open) -> Iterator[Item]:
        if not is_text(file.path):
            return _objects(file, column)
        if column not in (None, "prompt"):
            raise InputError(f"{file.path}: is read line by line; only JSON and tables have a column {column!r}")
        return (file.item(where, line, _prompt) for where, line in _lines(file))

    return _items(paths, title, limits, read)


def objects(paths: Sequence[Path], title: str, limits: Limits = USUAL, column: str | None = None) -> Iterator[Item]:
    """Yield rows of .csv, .tsv and .parquet files as objects, of other files JSON values: one a line, the elements of
    an array, or values over many lines. Raises InputError for a table without `column`, if one is named."""
    return _items(paths, title, limits, lambda file: _objects(file, column))


def _items(
    paths: Sequence[Path], title: str, limits: Limits, read: Callable[[_Open], Iterator[Item]]
) -> Iterator[Item]:
    """Yield the items of each file; one that cannot be read on ends with an item that says so."""
    for file in _opened(paths, title, limits):
        try:
            yield from read(file)
        except TooLargeError as error:
            rest = f"{error}; the rest of the file is not read"
            if title:  # where broken rules are skipped, it counts as one
                progress.say(rest)
            yield Item(file.path, str(file.path), rest, _as_error)


def first_line(path: Path) -> Any:
    """Decode the first value of a file; None: it is empty. A line of a text file gives {"prompt": line}."""
    return next((item.decode() for item in prompt_lines([path], f"reading {path.name}")), None)


def is_text(path: Path) -> bool:
    """Whether `prompt_lines` takes each line for a prompt: the file's name is neither that of JSON nor of a table."""
    return not ending_of(path)


def has_data(path: Path) -> bool:
    """Whether a file of a dataset holds rows by its name: that of JSON, a table or text, and of no description."""
    name = unpacked_name(path).lower()
    described = name.startswith(("dataset_", "readme", "license"))
    return name.endswith((*READ_BY_NAME, ".arrow", ".txt")) and not (described or is_hidden(path))


def _objects(file: _Open, column: str | None) -> Iterator[Item]:
    ending = ending_of(file.path)
    if ending in _DELIMITERS:
        return _csv_rows(file, _DELIMITERS[ending], column)
    return _parquet_rows(file, column) if ending == ".parquet" else _json_values(file)


def _opened(paths: Sequence[Path], title: str, limits: Limits) -> Iterator[_Open]:
    """Each file in turn, under one progress bar; without a title, under none.

    Raises InputError for one that was replaced or cut since the first one was opened, as a log that is rotated.
    """
    begun = [require_file(path).stat() for path in paths]
    total = sum(file.st_size for file in begun)
    unit, name = size_unit(total)
    with progress.bar(title, total / unit, name) if title else nullcontext(lambda amount: None) as advance:
        for path, before in zip(paths, begun):
            with require_file(path).open("rb") as raw:
                _require_same(path, before, os.fstat(raw.fileno()))
                yield _Open(path, _unpack(path, raw, limits), _ticks(raw, advance, unit), limits)
                _require_same(path, before, os.fstat(raw.fileno()))


def _require_same(path: Path, before: os.stat_result, now: os.stat_result) -> None:
    """Raise InputError unless a file is the one that it was, and has lost nothing: more may have been written to it."""
    changed = (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns)
    # Some network file systems give a file another number each time.
    if now.st_size < before.st_size or (changed and now.st_ino != before.st_ino):
        raise InputError(f"{path}: was replaced or cut while its source was read, as a rotated log is; read it again")


def _ticks(raw: IO[bytes], advance: progress.Advance, unit: float) -> Callable[[], None]:
    done = 0

    def tick() -> None:
        nonlocal done
        position = raw.tell()
        advance((position - done) / unit)
        done = position

    return tick


def _unpack(path: Path, raw: IO[bytes], limits: Limits) -> IO[bytes]:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        unpacked: Any = gzip.GzipFile(fileobj=raw)
    elif suffix == ".bz2":
        unpacked = bz2.BZ2File(raw)
    elif suffix == ".xz":
        unpacked = lzma.LZMAFile(raw)  # noqa: SIM115
    elif suffix == ".zst":
        unpacked = io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd"))
    else:
        return raw
    return io.BufferedReader(CountedStream(path, unpacked, limits.unpacked_bytes), _PIECE_BYTES)


@contextmanager
def _unpacking(path: Path, where: Callable[[], str]) -> Iterator[None]:
    """Turn the error of a cut or damaged packed file into an InputError that names the line."""
    try:
        yield
    except _UNPACKING as error:
        if path.suffix.lower() not in PACKED:
            raise
        raise InputError(f"{where()}: not a complete {PACKED[path.suffix.lower()]} file ({error})") from None


def _lines(file: _Open) -> Iterator[tuple[str, bytes | int]]:
    """Yield the place and the bytes of each line that is not blank; of one that is too long its size."""
    number = 0
    with _unpacking(file.path, lambda: f"{file.path}:{number + 1}"):
        for number, line in enumerate(_physical_lines(file), start=1):
            if isinstance(line, int) or line.strip():
                yield f"{file.path}:{number}", line
            if number % _ITEMS_PER_UPDATE == 0:
                file.tick()
    file.tick()


def _physical_lines(file: _Open) -> Iterator[bytes | int]:
    """Yield every line with its end, without the byte order mark of the file and NUL bytes in front of the line; of one
    that is too long its size."""
    # A hole of NUL bytes, or a line, may be larger than memory, so both are passed over piece by piece.
    begun: list[bytes] = []
    mark, size, longest = _BOM, 0, file.limits.line_bytes
    while piece := file.stream.readline(_PIECE_BYTES):
        if size or (piece := piece.lstrip(b"\0")):
            size += len(piece)
            if size <= longest:
                begun.append(piece)
            else:
                begun.clear()
        if piece.endswith(b"\n"):
            yield b"".join(begun).removeprefix(mark) if size <= longest else size
            begun, size, mark = [], 0, b""
    if size:
        yield b"".join(begun).removeprefix(mark) if size <= longest else size


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
    if ending_of(file.path) == ".json" and isinstance(line, bytes) and not _is_json(line):
        yield from _whole_values(file, line)
        return

    # 3) JSON lines.
    for where, line in itertools.chain([first], lines):
        yield file.item(where, line, _json_line)


def _text(line: bytes, where: str) -> str:
    if b"\0" in line:
        raise InputError(f"{where}: holds NUL bytes; must be text in UTF-8")
    return _utf8(line, where).rstrip("\r\n")


def _log_line(line: bytes, where: str) -> str:
    """Text of a log's line; bytes of a character that Kubernetes cut are escaped until its pieces are joined."""
    if CRI_LINE.match(line) and b"\0" not in line:
        return line.decode(errors="surrogateescape").rstrip("\r\n")
    return _text(line, where)


def _prompt(line: bytes, where: str) -> dict[str, str]:
    return {"prompt": _text(line, where)}


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _json_line(line: bytes, where: str) -> Any:
    return _json(line, where, "; must be one object a line")


def _json(data: bytes, where: str, rule: str = "") -> Any:
    text = _utf8(data, where)
    try:
        return json_within(text)
    except ValueError as error:
        # The message without the text that it would quote.
        reason = getattr(error, "msg", str(error))
        column = getattr(error, "colno", None)
        spot = f" at column {column}" if column else ""
        raise InputError(f"{where}: not valid JSON ({reason}{spot}){rule}") from None


def _utf8(line: bytes, where: str) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not valid UTF-8 (byte {error.start + 1} of the line)") from None


def _whole_values(file: _Open, begun: bytes) -> Iterator[Item]:
    """Yield the elements of an array, or consecutive values, wherever lines end. `begun`: bytes read already.

    They are cut apart at their brackets, and decoded by the parser that decodes lines.
    """
    number = 0
    with _unpacking(file.path, lambda: f"{file.path}: item {number + 1}"):
        try:
            for number, data in enumerate(_values(begun, file.stream, file.limits.line_bytes), start=1):
                yield Item(file.path, f"{file.path}: item {number}", data, _json)
                if number % _ITEMS_PER_UPDATE == 0:
                    file.tick()
        except OverflowError as error:
            raise TooLargeError(f"{file.path}: item {number + 1}: {error}") from None
        except _BrokenArrayError as error:
            raise InputError(f"{file.path}: item {number + 1}: not valid JSON ({error})") from None
    file.tick()


class _BrokenArrayError(Exception):
    """Values cannot be told apart; the message says why."""


_BLANK = re.compile(rb"[ \t\r\n]*")
_SCALAR = re.compile(rb'[^ \t\r\n,\[\]{}"]+|,')
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[\]{}]|"', re.DOTALL)
_OPENING, _CLOSING, _QUOTE = b"[{", b"]}", b'"'


def _values(text: bytes, stream: IO[bytes], longest: int) -> Iterator[bytes]:
    """Yield the text of each value; a top-level array gives its elements instead.

    Raises _BrokenArrayError, or OverflowError for a value of more bytes than `longest`.
    """
    at, array, after = 0, False, b""
    while True:
        # 1) The next mark, in the next piece if this one is used up.
        at = _BLANK.match(text, at).end()  # type: ignore[union-attr]  # nothing matches too
        if at == len(text):
            text, at = stream.read(_PIECE_BYTES), 0
            if not text:
                break
            continue
        mark = text[at : at + 1]

        # 2) The brackets of a top-level array and its commas; `after` is what stands before the mark.
        begins, ends = mark == b"[" and not array, mark == b"]" and array and after != b","
        if begins or ends or (mark == b"," and after == b"value"):
            array, after, at = not ends, mark, at + 1
            continue
        if after == b"value":
            raise _BrokenArrayError("a comma is missing")

        # 3) A value. Its text is looked through again when more is read, so the pieces double.
        while (end := _value_end(text, at)) is None and (more := stream.read(max(_PIECE_BYTES, len(text) - at))):
            text, at = text[at:] + more, 0
            if len(text) > longest + _PIECE_BYTES and _value_end(text, at) is None:
                raise OverflowError("is larger than read_limits.line_megabytes allows")
        if end is None and (array or mark in b'[{"'):
            raise _BrokenArrayError("the file ends inside it")
        yield text[at:end]
        at, after = len(text) if end is None else end, b"value" if array else b""
    if array:
        raise _BrokenArrayError("the array is not closed")


def _value_end(text: bytes, at: int) -> int | None:
    """Index behind the value that begins at `at`; None: it may go on behind the text."""
    scalar = _SCALAR.match(text, at)
    if scalar:
        return scalar.end() if scalar.end() < len(text) else None
    depth = 0
    for token in _TOKEN.finditer(text, at):
        start, end = token.span()
        if text[start] in _OPENING:
            depth += 1
        elif text[start] in _CLOSING:
            depth -= 1
        elif end - start == 1:  # a string that is not closed yet
            return None
        if depth <= 0:
            return end
    return None


def _csv_rows(file: _Open, delimiter: str, column: str | None) -> Iterator[Item]:
    csv.field_size_limit(file.limits.line_bytes)  # a conversation is one field
    rows = csv.DictReader(_table_lines(file), delimiter=delimiter, strict=True)
    # The header is read at once, so that an error in it has line 1.
    with _table_errors(file.path, f"{file.path}:1"):
        _check_columns(file.path, rows.fieldnames or (), column)
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


def _table_lines(file: _Open) -> Iterator[str]:
    for number, line in enumerate(_physical_lines(file), start=1):
        where = f"{file.path}:{number}"
        if isinstance(line, int):
            raise TooLargeError(f"{where}: has {size_text(line)}, more than read_limits.line_megabytes allows")
        yield _utf8(line, where)


def _check_columns(path: Path, names: Sequence[str], column: str | None) -> None:
    if column is not None and column not in names:
        raise InputError(f"{path}: has no column {column!r}; it has {', '.join(sorted(names)) or 'none'}")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"{path}: has several columns {twice!r}; rename all but one")


@contextmanager
def _table_errors(path: Path, where: str) -> Iterator[None]:
    try:
        with _unpacking(path, lambda: where):
            yield
    except csv.Error as error:
        if "field limit" in str(error):
            raise TooLargeError(f"{where}: has more than read_limits.line_megabytes allows") from None
        raise InputError(f"{where}: not valid CSV ({error})") from None


def _checked_row(row: dict[Any, Any], where: str) -> dict[str, str]:
    if None in row or None in row.values():
        raise InputError(f"{where}: has not as many values as the header has names")
    if r"\N" in row.values():
        raise InputError(rf"{where}: has \N for no value, as tables with backslash escapes do; must be CSV with quotes")
    return {name: value for name, value in row.items() if value}  # an empty cell is no value


def _parquet_rows(file: _Open, column: str | None) -> Iterator[Item]:
    number = unpacked = 0
    try:
        with memory_within(file.path, file.limits):
            found = pq.ParquetFile(file.stream).metadata
            check_table_size(file.path, found, file.limits)
            # Text stays in its dictionary until a row is made of it: a small file may repeat a long text a million
            # times. Inside lists Arrow does so only where a whole part of the file has one dictionary, so of those
            # fewer rows are read at a time.
            every = map(found.schema.column, range(found.num_columns))
            texts = [one.path for one in every if one.physical_type == _TEXT]
            flat = [path for path in texts if "." not in path]
            file.stream.seek(0)
            table = pq.ParquetFile(file.stream, read_dictionary=flat)
        _check_columns(file.path, table.schema_arrow.names, column)
        read = row_decoder(table.schema_arrow)
        # One batch of rows is in memory at a time.
        batches = table.iter_batches(_ITEMS_PER_UPDATE if flat == texts else _NESTED_ROWS)
        while True:
            with memory_within(file.path, file.limits):
                batch = next(batches, None)
            if batch is None:
                break
            # Its metadata count a text once that every row repeats.
            unpacked += values_bytes(batch.columns)
            if unpacked > file.limits.unpacked_bytes:
                raise TooLargeError(f"{file.path}: unpacks to more than read_limits.unpacked_gigabytes allows")
            for row in rows_within(batch, file.limits.line_bytes):
                number += 1
                place = f"{file.path}: row {number}"
                decoder = _too_long if isinstance(row, int) else _no_text if row is None else read
                yield Item(file.path, place, row, decoder)
            file.tick()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file.path}: row {number + 1}: not a complete Parquet file ({error})") from None


_TEXT = "BYTE_ARRAY"


def row_decoder(schema: pa.Schema) -> Callable[[Any, str], Any]:
    """Function that makes values of a table's rows. It raises LeftOut for one with objects in columns, InputError for a
    column of JSON that holds none."""
    return partial(_table_row, places=_places_of_json(schema))


def _table_row(row: Any, where: str, places: Any) -> Any:
    value = without_none(row)
    if _has_objects_in_columns(value):
        raise LeftOut(where, "objects in columns of a table")
    try:
        return _with_json(value, places)
    except ValueError:
        raise InputError(f"{where}: a column of JSON holds text that is none") from None


def _places_of_json(kind: pa.Schema | pa.DataType) -> Any:
    """Where values of a type hold JSON as its text, as `datasets` keeps what has another type in each row: True, by
    field, or in each item of a list; None: nowhere."""
    if isinstance(kind, pa.BaseExtensionType):
        return kind.extension_name == "arrow.json" or None
    if isinstance(kind, pa.Schema | pa.StructType):
        return {field.name: inner for field in kind if (inner := _places_of_json(field.type))} or None
    inner = _places_of_json(kind.value_type) if isinstance(kind, pa.ListType | pa.LargeListType) else None
    return inner and [inner]


def _with_json(value: Any, places: Any) -> Any:
    """A value with what its columns of JSON hold. Raises ValueError."""
    if value is None or places is None:
        return value
    if isinstance(places, dict):
        return {name: _with_json(item, places.get(name)) for name, item in value.items()}
    return [_with_json(item, places[0]) for item in value] if isinstance(places, list) else json_within(value)


_PRINTED = re.compile(r"true|false|null|-?\d+(?:\.\d+)?|\[.*\]|\{.*\}", re.IGNORECASE | re.DOTALL)
"""A flag, a number, a list or an object as text."""
_OF_NAMED = ("parameters", "input_schema", "inputSchema", "arguments", "args")


def _has_objects_in_columns(row: Any) -> bool:
    """Whether a row of a table has objects in columns that a template prints as they were sent: schemas of tools,
    arguments of calls, documents, and what is inside of template arguments; or flags and numbers among these as text,
    which a map of texts makes of them. Columns have one order for all rows, and tell no null from an absent field."""
    if isinstance(row, list):
        return any(map(_has_objects_in_columns, row))
    if not isinstance(row, dict):
        return False
    arguments = row.get("chat_template_kwargs")
    values = arguments.values() if isinstance(arguments, dict) else ()
    if any(isinstance(value, str) and _PRINTED.fullmatch(value.strip()) for value in values):
        return True
    inside = [row.get("documents"), *values]
    inside += [row.get(name) for name in _OF_NAMED] if "name" in row else []
    inside += [row.get("input")] if row.get("type") == "tool_use" else []
    return any(map(_holds_object, inside)) or any(map(_has_objects_in_columns, row.values()))


def _holds_object(value: Any) -> bool:
    return any(map(_holds_object, value)) if isinstance(value, list) else isinstance(value, dict) and bool(value)


def without_none(value: Any) -> Any:
    """Remove None fields at all depths: Arrow gives every struct all fields, and those that a row lacks as None."""
    if isinstance(value, dict):
        return {name: without_none(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_none(item) for item in value]
    return value
