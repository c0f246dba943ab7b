"""Scaled rotary embeddings as llama.cpp reads them: by keys, or Llama 3's by a factor a pair.

Shapes: F = D / 2 rotated pairs of a head.

Long rope is refused, and so are YaRN's ramps but for the usual one: llama.cpp does not read where it begins and ends.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import FormatError
from ..drafts.rope import LinearRope, Llama3Rope, RopeScaling, YarnRope, frequencies
from .gguf_file import Field, GgufFile
from .tensors import Spec, check_tensors

ROPE_FACTORS = "rope_freqs.weight"
_USUAL_RAMP = (32.0, 1.0)
_LOW, _HIGH = 1.0, 4.0  # low_freq_factor and high_freq_factor of every Llama 3


def scaling_fields(arch: str, scaling: RopeScaling | None) -> dict[str, Field]:
    """The keys. Raises FormatError for a scaling that llama.cpp would not compute as it was trained."""
    match scaling:
        case None | Llama3Rope():
            return {}
        case LinearRope(factor=factor):
            return {f"{arch}.rope.scaling.type": "linear", f"{arch}.rope.scaling.factor": factor}
        case YarnRope(factor=factor) as yarn if (yarn.beta_fast, yarn.beta_slow) == _USUAL_RAMP:
            return {
                f"{arch}.rope.scaling.type": "yarn",
                f"{arch}.rope.scaling.factor": factor,
                f"{arch}.rope.scaling.original_context_length": yarn.original_max_position_embeddings,
            }
        case YarnRope() as yarn:
            ramp = f"beta_fast {yarn.beta_fast:g} and beta_slow {yarn.beta_slow:g}"
            raise FormatError(f"format gguf: rope_scaling yarn: {ramp}: llama.cpp computes 32 and 1 only")
    raise FormatError(f"format gguf: rope_scaling {scaling.rope_type}: cannot be written")


def factor_tensors(theta: float, head_dim: int, scaling: RopeScaling | None) -> dict[str, Tensor]:
    """[F] what llama.cpp divides each frequency by, where keys do not say it.

    Raises FormatError for factors that would not tell a reader which scaling they came from.
    """
    if not isinstance(scaling, Llama3Rope):
        return {}
    factors_F = _factors(theta, head_dim, scaling)
    _llama3(factors_F, Path("format gguf"), theta, head_dim)
    return {ROPE_FACTORS: factors_F}


def take_scaling(
    content: GgufFile, tensors: dict[str, Tensor], path: Path, theta: float, head_dim: int
) -> dict[str, Any] | None:
    """`rope_scaling` of a file; its factors leave `tensors`. Raises FormatError for one that we do not compute."""
    factors_F = tensors.pop(ROPE_FACTORS, None)
    keys = f"{content.architecture}.rope.scaling"
    kind = content.fields.get(f"{keys}.type", "none")
    if factors_F is not None and kind == "none":
        check_tensors(path, {ROPE_FACTORS: factors_F}, {ROPE_FACTORS: Spec((head_dim // 2,))})
        return _llama3(factors_F, path, theta, head_dim)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn") or factors_F is not None:
        also = f" beside {ROPE_FACTORS}" if factors_F is not None else ""
        raise FormatError(f"{path}: {keys}.type {kind}{also}: must be none, linear or yarn, or none beside the factors")
    scaling = {"rope_type": kind, "factor": content.get(path, f"{keys}.factor", float)}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = content.get(path, f"{keys}.original_context_length", int)
    return scaling


def _llama3(factors_F: Tensor, path: Path, theta: float, head_dim: int) -> dict[str, Any] | None:
    """The Llama 3 scaling that gives these factors, where there is one: a file keeps what came of it, not its fields.

    Wavelengths above `original` are stretched by the largest factor, those below original / 4 are left; in between
    1 / factor goes linearly in original / wavelength, from 1 to 4.
    """
    if _close(factors_F, 1.0).all():
        return None
    most = float(f"{float(factors_F.max()):.6g}")
    wavelength_F = 2 * math.pi / frequencies(theta, head_dim, None).double()
    between_F = ~_close(factors_F, 1.0) & ~_close(factors_F, most)
    share_F = (1 / factors_F.double() - 1 / most) / (1 - 1 / most)
    found = ((_LOW + share_F * (_HIGH - _LOW)) * wavelength_F)[between_F]
    original = float(found.median()) if len(found) else float(wavelength_F[_close(factors_F, most)].min()) - 0.5
    scaling = {
        "rope_type": "llama3",
        "factor": most,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": round(original),
    }
    if original >= 1 and most > 1:
        again_F = _factors(theta, head_dim, Llama3Rope.model_validate(scaling))
        if torch.allclose(again_F, factors_F, rtol=1e-5):
            return scaling
    raise FormatError(f"{path}: tensor {ROPE_FACTORS}: is not a rope scaling in the way of Llama 3")


def _close(factors_F: Tensor, value: float) -> Tensor:
    return torch.isclose(factors_F, torch.tensor(value), rtol=1e-5)


def _factors(theta: float, head_dim: int, scaling: Llama3Rope) -> Tensor:
    return frequencies(theta, head_dim, None) / frequencies(theta, head_dim, scaling)
