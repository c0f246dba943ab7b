"""Scaled rotary embeddings of EAGLE-3 heads as llama.cpp reads them: by keys, or Llama 3's by a factor a pair.

Long rope is refused, and so are YaRN's ramps but for the usual one: llama.cpp does not read where it begins and ends.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from ...errors import FormatError
from ..drafts.layers import LayerConfig
from ..drafts.rope import LinearRope, Llama3Rope, YarnRope, frequencies
from .gguf_file import Field, GgufFile

ROPE_FACTORS = "rope_freqs.weight"
_USUAL_RAMP = (32.0, 1.0)


def scaling_fields(arch: str, config: LayerConfig, path: Path) -> dict[str, Field]:
    """The keys. Raises FormatError for a scaling that llama.cpp would not compute as it was trained."""
    match config.rope_scaling:
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
            raise FormatError(f"{path}: rope_scaling: yarn: {ramp}: llama.cpp computes 32 and 1 only")
    raise FormatError(f"{path}: rope_scaling: {config.rope_scaling.rope_type}: cannot be written as GGUF")


def factor_tensors(config: LayerConfig) -> dict[str, Tensor]:
    """[F] what llama.cpp divides each frequency by, where keys do not say it."""
    if not isinstance(config.rope_scaling, Llama3Rope):
        return {}
    plain_F, scaled_F = (frequencies(config.rope_theta, config.head_dim, x) for x in (None, config.rope_scaling))
    return {ROPE_FACTORS: plain_F / scaled_F}


def read_scaling(content: GgufFile, path: Path) -> dict[str, Any] | None:
    """`rope_scaling` of a head. Raises FormatError for one that the file does not name."""
    refuse_factors(content, path)
    keys = f"{content.architecture}.rope.scaling"
    kind = content.fields.get(f"{keys}.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise FormatError(f"{path}: {keys}.type {kind}: must be none, linear or yarn")
    scaling = {"rope_type": kind, "factor": content.get(path, f"{keys}.factor", float)}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = content.get(path, f"{keys}.original_context_length", int)
    return scaling


def refuse_factors(content: GgufFile, path: Path) -> None:
    """Raise FormatError where the file scales frequencies and does not say how it came by the factors."""
    if ROPE_FACTORS in content.tensors:
        raise FormatError(f"{path}: tensor {ROPE_FACTORS}: cannot be turned back into a rope scaling; keep the folder")
