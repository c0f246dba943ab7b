"""GGUF files as plain data: keys and float32 tensors, written atomically, read back and compared.

Tensors of other types, as files of other projects have, are converted to float32.
"""

from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from torch import Tensor

from ....errors import FormatError
from ....storage import new_file
from ...gguf_header import read_header

Field = str | bool | int | float | list[str] | list[int]
_PLAIN = (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.I64)


class GgufFile(NamedTuple):
    """Contents of a GGUF file. `fields`: all keys but `general.architecture`; integers are stored as uint32 (in lists:
    int32), floats as float32."""

    architecture: str
    fields: dict[str, Field]
    tensors: dict[str, Tensor]

    def get(self, path: Path, key: str, kind: type, default: Any = None) -> Any:
        """Value of a key. Raises FormatError where the key is missing without a default, or is not of type `kind`."""
        value = self.fields.get(key, default)
        if value is None:
            raise FormatError(f"{path}: key {key} is missing")
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise FormatError(f"{path}: key {key} is {value!r:.40}: must be of type {kind.__name__}")
        return value


def write_gguf(path: Path, content: GgufFile) -> None:
    """Write a GGUF file atomically. Raises FormatError where what is read back differs."""
    with new_file(path) as beside:
        # GGUF's order: header, keys, tensors.
        writer = gguf.GGUFWriter(beside, content.architecture)
        for key, value in content.fields.items():
            _add(writer, key, value)
        for name, tensor in content.tensors.items():
            writer.add_tensor(name, tensor.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

        # Compare before the file takes its place.
        _compare(path, content, read_gguf(beside))


def read_gguf(path: Path) -> GgufFile:
    """Read all keys and tensors of a GGUF file. Raises MissingFileError or FormatError."""
    reader = _reader(path)
    fields = {name: _plain(_content(path, field)) for name, field in reader.fields.items() if name[:5] != "GGUF."}
    tensors = {tensor.name: _numbers(path, tensor) for tensor in reader.tensors}
    return GgufFile(str(fields.pop("general.architecture", "")), fields, tensors)


def read_architecture(path: Path) -> str:
    """Architecture that a GGUF file names, "" for none; no weight is read."""
    return str(read_header(path).keys.get("general.architecture", ""))


def read_names(path: Path) -> set[str]:
    """Names of the tensors of a GGUF file; no weight is read."""
    return {tensor.name for tensor in _reader(path).tensors}


def _content(path: Path, field: gguf.ReaderField) -> Any:
    try:
        return field.contents()
    except ValueError as error:  # text that is none
        raise FormatError(f"{path}: key {field.name}: not readable ({error})") from None


def _reader(path: Path) -> gguf.GGUFReader:
    read_header(path)  # lengths that the file cannot have are refused before the library follows them
    try:
        return gguf.GGUFReader(path)
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise FormatError(f"{path}: not a readable GGUF file ({error})") from None


def _numbers(path: Path, tensor: gguf.ReaderTensor) -> Tensor:
    # float32 and int64 as they are; a copy, as the reader maps the file.
    if tensor.tensor_type in _PLAIN:
        return torch.from_numpy(np.array(tensor.data))

    # Everything else is converted, quantized blocks among it.
    try:
        return torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
    except NotImplementedError:
        raise FormatError(f"{path}: tensor {tensor.name} is {tensor.tensor_type.name}: cannot be read") from None


def _add(writer: gguf.GGUFWriter, key: str, value: Field) -> None:
    # bool before int: a bool is an int in Python.
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


def _plain(value: Any) -> Any:
    """Value with floats as the shortest decimal of their float32: 1e-05 instead of 9.99999974e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _compare(path: Path, wrote: GgufFile, read: GgufFile) -> None:
    # The same keys and tensors, no more and no fewer.
    if (read.architecture, set(read.fields), set(read.tensors)) != (
        wrote.architecture,
        set(wrote.fields),
        set(wrote.tensors),
    ):
        raise FormatError(f"{path}: other keys or tensors are read back than were written")

    # The same values; floats as float32 keeps them.
    for key, value in wrote.fields.items():
        if read.fields[key] != _plain(value):
            raise FormatError(f"{path}: key {key}: reads back different from what was written")
    for name, tensor in wrote.tensors.items():
        if read.tensors[name].dtype != tensor.dtype or not torch.equal(read.tensors[name], tensor):
            raise FormatError(f"{path}: tensor {name}: reads back different from what was written")
