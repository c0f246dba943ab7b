"""Safetensors files checked against specs: the exact set of names, their shapes and dtypes, and finite values."""

import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...errors import FormatError, MissingFileError

WEIGHTS_FILE = "model.safetensors"
Shape = tuple[int, ...]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_STORED_FLOATS = ("F32", "BF16", "F16")  # as safetensors names them
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_CONVERT = (
    "import sys, torch; from safetensors.torch import save_file; "
    "save_file({k: v.clone().contiguous() for k, v in torch.load(sys.argv[1], weights_only=True).items()}, sys.argv[2])"
)


class Spec(NamedTuple):
    """Shape and dtype that a tensor must have."""

    shape: Shape
    dtype: torch.dtype | None = None
    """Required dtype; None: a weight, which is float32, bfloat16 or float16."""


Specs = Mapping[str, Spec]


class Stored(NamedTuple):
    """Tensors read from a folder, and the path that errors about them name."""

    where: Path
    tensors: dict[str, Tensor]


def write_tensors(path: Path, tensors: Mapping[str, Tensor], expected: Specs) -> str:
    """Write a safetensors file: check, write, read back, compare. Engines load folders without some tensors silently.

    Returns the one dtype of all weights, as config files name it. Raises FormatError.
    """
    # Names, shapes, dtypes and values; then one dtype for all weights, as a config names only one.
    check_tensors(path, tensors, expected)
    dtypes = {tensors[name].dtype: name for name, spec in expected.items() if spec.dtype is None}
    if len(dtypes) > 1:
        (one, first), (other, second), *_ = dtypes.items()
        raise FormatError(f"{path}: tensor {first} is {_name(one)} and {second} is {_name(other)}, must be the same")

    # Write and compare with what is read back.
    contiguous = _apart(tensors)
    save_file(contiguous, path, metadata={"format": "pt"})
    again = load_file(path)
    for name, tensor in contiguous.items():
        if name not in again or again[name].dtype != tensor.dtype or not torch.equal(again[name], tensor):
            raise FormatError(f"{path}: {name}: reads back different from what was written")
    return _name(next(iter(dtypes)))


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors on the CPU, contiguous; tensors that share memory are copied, as safetensors stores no sharing."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        ours = tensor.detach().cpu().contiguous()
        found[name] = ours.clone() if ours.data_ptr() in seen else ours
        seen.add(ours.data_ptr())
    return found


def read_tensors(folder: Path) -> Stored:
    """All tensors of all safetensors files in a folder. Raises MissingFileError or FormatError."""
    # A checkpoint may be split into several files, whose names must not overlap.
    files = weight_files(folder)
    found: dict[str, Tensor] = {}
    for path in files:
        try:
            tensors = load_file(path)
        except SafetensorError as error:
            raise _unreadable(path, error) from None
        twice = sorted(found.keys() & tensors.keys())
        if twice:
            raise FormatError(f"{folder}: tensor {twice[0]} is in {path.name} and in another file")
        found |= tensors
    return Stored(files[0] if len(files) == 1 else folder, found)


def read_types(folder: Path) -> dict[str, str]:
    """Dtypes of all tensors in a folder by name, as safetensors names them ("F32"); no weight is read."""
    types: dict[str, str] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as stream:
                types.update((name, stream.get_slice(name).get_dtype()) for name in stream.keys())  # noqa: SIM118
        except SafetensorError as error:
            raise _unreadable(path, error) from None
    return types


def check_types(folder: Path, types: Mapping[str, str]) -> None:
    """Raise FormatError naming the first tensor that is no weight, by its dtype. `types`: as from `read_types`."""
    for name, found in types.items():
        if found not in _STORED_FLOATS:
            raise FormatError(f"{folder}: tensor {name} is {found}, must be {' or '.join(_STORED_FLOATS)}")


def check_count(path: Path, field: str, count: int, tensors: Collection[str]) -> None:
    """Raise FormatError for more layers or heads than there are tensors, before anything is made for each."""
    if count > len(tensors):
        raise FormatError(f"{path}: {field} {count}: there are only {len(tensors)} tensors")


def weight_files(folder: Path) -> list[Path]:
    """Safetensors files of a folder, sorted. Raises MissingFileError, or for pickles FormatError with a command that
    converts them."""
    files = sorted(folder.glob("*.safetensors"))
    odd = next((path for path in files if not path.is_file()), None)
    if odd is not None:
        raise FormatError(f"{odd}: must be a regular file" + ("" if odd.exists() else ", is a link to none"))
    if files:
        return files
    # Without safetensors: name the pickle that most likely holds the weights.
    pickles = [path for path in folder.glob("*") if is_pickle(path)]
    if not pickles:
        raise MissingFileError(f"{folder / WEIGHTS_FILE}: no such file")
    raise pickled(min(pickles, key=lambda path: ("model" not in path.name and "head" not in path.name, path.name)))


def is_pickle(path: Path) -> bool:
    """Whether a file is a torch pickle, by its suffix."""
    return path.suffix in _PICKLES


def pickled(path: Path) -> FormatError:
    """FormatError for a pickle, with the command that converts it to safetensors."""
    command = shlex.join(["python", "-c", _CONVERT, str(path), str(path.with_name(WEIGHTS_FILE))])
    return FormatError(f"{path}: pickled weights are not loaded; if you trust the file, convert it: {command}")


def check_tensors(where: Path, tensors: Mapping[str, Tensor], expected: Specs) -> None:
    """Raise FormatError naming the first tensor that is missing, misshapen, of a wrong type, unknown or not finite."""
    # Everything that is expected is there, and right.
    for name, spec in expected.items():
        if name not in tensors:
            raise FormatError(f"{where}: tensor {name} is missing")
        tensor = tensors[name]
        if tuple(tensor.shape) != spec.shape:
            raise FormatError(f"{where}: tensor {name} has shape {tuple(tensor.shape)}, must be {spec.shape}")
        allowed = _FLOATS if spec.dtype is None else (spec.dtype,)
        if tensor.dtype not in allowed:
            raise FormatError(
                f"{where}: tensor {name} is {_name(tensor.dtype)}, must be {' or '.join(map(_name, allowed))}"
            )

    # Nothing else is there, and every value is finite.
    for name, tensor in tensors.items():
        if name not in expected:
            raise FormatError(f"{where}: tensor {name} is not part of this format")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise FormatError(f"{where}: tensor {name} has values that are not finite")


def present(optional: Specs, tensors: Mapping[str, Tensor]) -> dict[str, Spec]:
    """Specs of the optional tensors that are there."""
    return {name: spec for name, spec in optional.items() if name in tensors}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _unreadable(path: Path, error: SafetensorError) -> FormatError:
    return FormatError(f"{path}: not a readable safetensors file ({error})")
