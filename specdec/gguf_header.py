"""Header of a GGUF file: its keys, and every length in it checked against the file's size before a library reads it.

The `gguf` package believes what a file says of its own lengths, and keeps an object of hundreds of bytes for every
element of a list. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import gguf

from ..errors import FormatError, MissingFileError

MOST_ELEMENTS = 1 << 22
"""Most elements of all lists of keys together; the largest vocabularies have a million, their merges included."""
_LONGEST_NAME = 256  # characters
_MOST_DIMENSIONS, _MOST_NESTING = 4, 3
_NUMBERS = dict(enumerate(("B", "b", "H", "h", "I", "i", "f", "?"))) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_TOKENIZER = "tokenizer."
_VERSIONS = (2, 3)


class GgufHeader(NamedTuple):
    """Header of a GGUF file."""

    keys: dict[str, Any]
    """Values by key; of lists None, but for lists of texts beside those of the tokenizer."""
    tensors: int
    elements: int
    """Elements of all tensors together."""


def read_header(path: Path) -> GgufHeader:
    """Read and check a header. Raises MissingFileError, or FormatError naming the key or tensor that is wrong."""
    if not path.is_file():
        raise MissingFileError(f"{path}: no such file")
    found = path.stat()
    return _read_header(path.resolve(), found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=8)
def _read_header(path: Path, size: int, changed: int) -> GgufHeader:
    with path.open("rb") as file:
        if not size:
            raise FormatError(f"{path}: is empty; must be a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).header()


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data = path, data
        self._at, self._elements = 0, 0

    def header(self) -> GgufHeader:
        # 1) What kind of file it is, and how much it says to hold: a tensor and a key take 24 and 13 bytes at least.
        magic, version, tensors, count = self._unpack("4sIQQ", "header")
        if magic != b"GGUF" or version not in _VERSIONS:
            raise FormatError(f"{self._path}: not a GGUF file of version 2 or 3")
        self._fits(24 * tensors + 13 * count, f"{tensors} tensors and {count} keys")
        # 2) Keys; a later one of the same name is refused, as libraries differ in which of them they take.
        keys: dict[str, Any] = {}
        for number in range(count):
            name = self._name(f"name of key {number}")
            (kind,) = self._unpack("I", name)
            if name in keys:
                raise FormatError(f"{self._path}: key {name} is there twice")
            keys[name] = self._value(kind, name)
        if not isinstance(named := keys.get("general.architecture", ""), str):  # transformers takes a list's first
            raise FormatError(f"{self._path}: general.architecture {str(named)[:40]}: must be text")
        # 3) Tensors, none of which may reach beyond the file.
        alignment = keys.get("general.alignment", 32)
        infos = [self._tensor(number) for number in range(tensors)]
        if not isinstance(alignment, int) or alignment < 1:
            raise FormatError(f"{self._path}: general.alignment {alignment}: must be a number above 0")
        start = -(-self._at // alignment) * alignment
        for name, _, end in infos:
            if start + end > len(self._data):
                raise FormatError(
                    f"{self._path}: tensor {name} ends at byte {start + end}, the file has {len(self._data)}"
                )
        return GgufHeader(keys, tensors, sum(elements for _, elements, _ in infos))

    def _value(self, kind: int, name: str, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._string(name)
        if kind in _NUMBERS:
            return self._unpack(_NUMBERS[kind], name)[0]
        if kind != _ARRAY or depth == _MOST_NESTING:
            raise FormatError(f"{self._path}: key {name} is of kind {kind} at depth {depth}, which no model has")
        # A list is passed over: numbers at once, texts one by one, as each has a length of its own.
        inner, length = self._unpack("IQ", name)
        self._elements += length
        if self._elements > MOST_ELEMENTS:
            raise FormatError(f"{self._path}: key {name} has {length} elements; {MOST_ELEMENTS} of all keys are read")
        if inner in _NUMBERS:
            self._skip(length * struct.calcsize(_NUMBERS[inner]), name)
        elif inner == _STRING and not name.startswith(_TOKENIZER):
            return [self._string(name) for _ in range(length)]
        else:
            for _ in range(length):
                self._value(inner, name, depth + 1)
        return None

    def _tensor(self, number: int) -> tuple[str, int, int]:
        """Name of a tensor, its number of elements, and the byte of the tensors' part at which it ends."""
        name = self._name(f"name of tensor {number}")
        (count,) = self._unpack("I", name)
        if count > _MOST_DIMENSIONS:
            raise FormatError(f"{self._path}: tensor {name} has {count} dimensions; {_MOST_DIMENSIONS} are known")
        elements = math.prod(self._unpack(f"{count}Q", name))
        kind, offset = self._unpack("IQ", name)
        try:
            block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            raise FormatError(f"{self._path}: tensor {name} is of type {kind}, which is not known") from None
        return name, elements, offset + -(-elements // block) * size

    def _name(self, what: str) -> str:
        found = self._string(what)
        if len(found) > _LONGEST_NAME or not found.isprintable():
            raise FormatError(f"{self._path}: {what} {found[:40]!r}: is no name of at most {_LONGEST_NAME} characters")
        return found

    def _string(self, name: str) -> str:
        (length,) = self._unpack("Q", name)
        start = self._at
        self._skip(length, name)
        return self._data[start : self._at].decode("utf-8", "replace")

    def _unpack(self, layout: str, name: str) -> tuple[Any, ...]:
        start = self._at
        self._skip(struct.calcsize(f"<{layout}"), name)
        return struct.unpack_from(f"<{layout}", self._data, start)

    def _skip(self, length: int, name: str) -> None:
        self._fits(length, name)
        self._at += length

    def _fits(self, length: int, what: str) -> None:
        left = len(self._data) - self._at
        if length > left:
            raise FormatError(f"{self._path}: {what:.80} takes {length} bytes, the file has {left} more")
