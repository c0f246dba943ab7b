"""Layout detection of drafts, by config and tensor names, and loading from any layout."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ...errors import FormatError, MissingFileError
from ...storage import read_object
from ..drafts.base import DraftModule
from ..loading import refused
from . import dflash, eagle, eagle3, eagle3_config, hf, medusa, speculators
from .gguf import layouts
from .tensors import is_pickle, pickled, read_types

Layout = Literal["hf", "eagle", "eagle3", "medusa", "dflash", "speculators", "gguf"]
_SHOWN = 5
# Drafts of other kinds, by architecture, and the engines that read them.
_READ_BY = {
    "Eagle3DeepseekV2ForCausalLM": "vLLM reads",
    "Eagle3DeepseekV3ForCausalLM": "vLLM reads",
    "DFlash2DraftModel": "vLLM reads",
    "Gemma4DSparkModel": "vLLM reads",
}


def read_draft(place: Path, target_layers: int | None = None) -> DraftModule:
    """Load a draft from a folder in any layout, or from a GGUF file: on the CPU, with the stored dtype.

    `target_layers`: layers of the target, for EAGLE-3 configs that do not name the captured ones. Raises
    MissingFileError or FormatError naming what is wrong.
    """
    # Each layout has a reader, which checks the whole file; a value of another type than it knows ends it.
    with refused(str(place)):
        return _read(place, target_layers)


def _read(place: Path, target_layers: int | None) -> DraftModule:
    match detect(place):
        case "hf":
            return hf.read(place)
        case "eagle":
            return eagle.read(place)
        case "eagle3":
            return eagle3.read(place, target_layers)
        case "medusa":
            return medusa.read(place)
        case "dflash":
            return dflash.read(place)
        case "speculators":
            return speculators.read(place, target_layers)
        case "gguf":
            return layouts.read(place)


def detect(place: Path) -> Layout:
    """Layout of a draft's folder or file. Raises MissingFileError, or FormatError saying what is there instead."""
    # GGUF is the one layout that may be a bare file.
    if layouts.file_in(place) is not None:
        return "gguf"
    if place.is_file():
        if is_pickle(place):
            raise pickled(place)
        raise FormatError(f"{place}: is a file; a draft is a folder or a .gguf file")

    # All others are a folder with a config.json.
    if not place.is_dir():
        raise MissingFileError(f"{place}: no such draft folder")
    path = place / "config.json"
    if not path.is_file():
        raise MissingFileError(f"{path}: no such file; the folder holds {_some(p.name for p in place.iterdir())}")

    # Architectures and tensor names tell them apart; no weight is read.
    raw, tensors = read_object(path), set(read_types(place))
    named = raw.get("architectures") or []
    if not isinstance(named, list):
        raise FormatError(f"{path}: architectures {named}: must be a list of names")
    found = _layout(raw, set(map(str, named)), tensors)
    if found is None:
        raise FormatError(
            f"{place}: not a draft that can be read: architectures {named}, model_type {raw.get('model_type')}, "
            f"tensors {_some(tensors)}{_readers(named)}"
        )
    return found


def _readers(named: Iterable[Any]) -> str:
    readers = [_READ_BY[name] for name in map(str, named) if name in _READ_BY]
    return f"; {readers[0]} it" if readers else ""


def _layout(raw: Mapping[str, Any], named: set[str], tensors: set[str]) -> Layout | None:
    # Marks that only one layout has go first.
    if speculators.MODEL_TYPE in raw:
        return "speculators"
    if raw.get("model_type") == "medusa" or "medusa_num_heads" in raw or medusa.is_original(tensors):
        return "medusa"

    # Then the architecture's name.
    if named & set(dflash.ARCHITECTURES):
        return "dflash"
    if named & set(eagle3_config.ARCHITECTURES):
        return "eagle3"
    if named & set(eagle.ARCHITECTURES.values()):
        return "eagle"

    # Then the tensors: of EAGLE's heads only EAGLE-3's have a head, a final norm or a vocabulary map.
    if "fc.weight" in tensors:  # the original project gives its heads a plain model's architecture
        if not named <= {"LlamaForCausalLM"}:
            return None
        return "eagle3" if {"lm_head.weight", "norm.weight", "d2t"} & tensors else "eagle"

    # Last, a plain causal LM.
    return "hf" if named & _causal_models() else None


def _causal_models() -> set[str]:
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return {name for entry in names for name in ([entry] if isinstance(entry, str) else entry)}


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return (", ".join(ordered[:_SHOWN]) or "nothing") + more
