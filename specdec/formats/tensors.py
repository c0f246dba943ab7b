"""Safetensors with a contract: the exact set of names, their shapes, and finite values."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...errors import FormatError, MissingFileError

Shape = tuple[int, ...]


def write_tensors(path: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, Shape]) -> None:
    """Check, write, read back, compare. Nothing incomplete ever leaves: engines load missing tensors silently."""
    check_tensors(path, tensors, expected)
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, path, metadata={"format": "pt"})
    again = load_file(path)
    for name, tensor in contiguous.items():
        if name not in again or not torch.equal(again[name], tensor):
            raise FormatError(f"{path}: {name}: reads back different from what was written")


def read_tensors(
    path: Path, expected: Mapping[str, Shape], optional: Mapping[str, Shape] | None = None
) -> dict[str, Tensor]:
    """Load and check a file. `optional` tensors may be absent."""
    if not path.is_file():
        raise MissingFileError(f"{path}: no such file")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise FormatError(f"{path}: not a readable safetensors file ({error})") from None
    present = {name: shape for name, shape in (optional or {}).items() if name in tensors}
    check_tensors(path, tensors, {**expected, **present})
    return tensors


def check_tensors(path: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, Shape]) -> None:
    """Raise FormatError naming the first tensor that is missing, unknown, misshapen or not finite."""
    for name, shape in expected.items():
        if name not in tensors:
            raise FormatError(f"{path}: tensor {name} is missing")
        if tuple(tensors[name].shape) != shape:
            raise FormatError(f"{path}: tensor {name} has shape {tuple(tensors[name].shape)}, must be {shape}")
    for name, tensor in tensors.items():
        if name not in expected:
            raise FormatError(f"{path}: tensor {name} is not part of this format")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise FormatError(f"{path}: tensor {name} has values that are not finite")
