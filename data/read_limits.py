"""Limits of what is read: the longest line, JSON value or row, and what a packed file may unpack to.

A file of strangers must not fill the memory, however small it is: one line may be the whole of it, a kilobyte unpacks
to a megabyte or more, and a table may repeat one long text a million times.
"""

import io
import re
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..errors import InputError
from ..storage import parse_json, size_text

LONGEST_LINE_BYTES = 64 * 10**6
LEAST_ROW_BYTES = 64
"""Bytes that a table's row counts with at least: a small file may hold any number of empty ones."""

MOST_CONTAINERS = 1 << 20
"""Objects and lists in one line, which take up to eighty times their text in memory."""
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


def json_within(text: str) -> Any:
    """Parse JSON of a line. Raises ValueError, also for values that are too deep, or of more than MOST_CONTAINERS."""
    if _containers(text) > MOST_CONTAINERS and _containers(_STRING.sub("", text)) > MOST_CONTAINERS:
        raise ValueError(f"has more than {MOST_CONTAINERS:,} objects and lists")
    return parse_json(text)


def _containers(text: str) -> int:
    return text.count("{") + text.count("[")


class Limits(NamedTuple):
    """Sizes, in bytes, that no real log has."""

    line_bytes: int = LONGEST_LINE_BYTES
    """Longest line, JSON value or row of a table."""
    unpacked_bytes: int = 64 * 10**9
    """Largest content of a packed file, or of a Parquet file."""


USUAL = Limits()


class TooLargeError(InputError):
    """What follows in a file cannot be read within the limits; the message says why."""


class CountedStream(io.RawIOBase):
    """Stream that raises TooLargeError once more bytes were read from it than the limit allows."""

    def __init__(self, path: Path, inner: Any, limit: int) -> None:
        self._path, self._inner, self._limit, self._read = path, inner, limit, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._inner.seekable())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._inner.seek(offset, whence))

    def tell(self) -> int:
        return int(self._inner.tell())

    def readinto(self, buffer: Any) -> int:
        count = int(self._inner.readinto(buffer))
        self._read += count
        if self._read > self._limit:
            raise TooLargeError(f"{self._path}: unpacks to more than read_limits.unpacked_gigabytes allows")
        return count


_MEMORY_LINES, _LEAST_MEMORY = 16, 256 << 20
_USED = 5  # place of data and stack, in pages, in Linux's list of a process's sizes


@contextmanager
def memory_within(path: Path, limits: Limits) -> Iterator[None]:
    """Inside, this process gets memory for so many more of the longest lines; Linux alone keeps to it.

    A table is decoded by pages and columns, whose size nothing tells beforehand: a page of a kilobyte unpacks to
    gigabytes, and so does a list that names one text over and over. Raises TooLargeError.
    """
    sizes = Path("/proc/self/statm")
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    used = int(sizes.read_text().split()[_USED]) * resource.getpagesize() if sizes.exists() else 0
    room = max(_LEAST_MEMORY, _MEMORY_LINES * limits.line_bytes)
    most = used + room
    if used and (before == resource.RLIM_INFINITY or most < before):
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    try:
        yield
    except (MemoryError, pa.ArrowCapacityError):
        raise TooLargeError(
            f"{path}: takes more than {size_text(room)} of memory to unpack, {_MEMORY_LINES} times what "
            "read_limits.line_megabytes allows"
        ) from None
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


def check_table_size(path: Path, found: pq.FileMetaData, limits: Limits) -> None:
    """Raise TooLargeError for a Parquet file whose content, as its own metadata says, is over the limit."""
    size = sum(found.row_group(number).total_byte_size for number in range(found.num_row_groups))
    if max(size, found.num_rows * LEAST_ROW_BYTES) > limits.unpacked_bytes:
        raise TooLargeError(
            f"{path}: {found.num_rows} rows, {size_text(size)}: more than read_limits.unpacked_gigabytes allows"
        )


def rows_within(batch: pa.RecordBatch, longest: int) -> Iterator[dict[str, Any] | int | None]:
    """Yield the rows of a batch; of one that is too large its size, as far as it can be told without making it; None
    for one whose text is not valid UTF-8."""
    if values_bytes(batch.columns) <= longest:
        with suppress(UnicodeDecodeError):
            rows = batch.to_pylist(maps_as_pydicts="lossy")
            yield from rows
            return
    for number in range(len(batch)):
        row = batch.slice(number, 1)
        size = values_bytes(row.columns)
        try:
            yield row.to_pylist(maps_as_pydicts="lossy")[0] if size <= longest else size
        except UnicodeDecodeError:
            yield None


def values_bytes(arrays: Sequence[pa.Array]) -> int:
    """Bytes of the values of some arrays, once each has its own: texts count each time that they are named."""
    size = 0
    for array in arrays:
        if pa.types.is_dictionary(array.type):
            lengths = pc.take(pc.binary_length(array.dictionary), array.indices)
            size += int(pc.sum(lengths).as_py() or 0) + 8 * len(array)
        elif pa.types.is_struct(array.type):
            size += values_bytes(array.flatten())
        elif pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
            size += values_bytes([array.flatten()]) + 8 * len(array)
        elif pa.types.is_map(array.type):
            start, stop = array.offsets[0].as_py(), array.offsets[-1].as_py()
            size += values_bytes([array.values.slice(start, stop - start)]) + 8 * len(array)
        else:
            size += int(array.nbytes)
    return size
