"""Drafts as GGUF, llama.cpp's format: dispatch of reading and writing by family. A file names its architecture.

A missing tensor or key may load silently there: the whole set is checked, written, and read back.
"""

from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ....errors import FormatError
from ...drafts.base import DraftModule
from ...drafts.dflash import DFlashDraft
from ...drafts.eagle3 import Eagle3Draft
from ...drafts.small import SmallDraft
from .dflash import is_dspark, read_dflash, write_dflash
from .eagle3 import read_eagle3, write_eagle3
from .file import Field, read_architecture, read_names
from .llama import read_llama, write_llama

DRAFT_FILE = "draft.gguf"
_SUFFIX = ".gguf"


def write(draft: DraftModule, tokenizer: PreTrainedTokenizerBase, folder: Path, hints: Mapping[str, Field]) -> None:
    """Write draft.gguf. `tokenizer`: the target's; llama.cpp wants its keys in both files. `hints`: keys of ours."""
    match draft:
        case SmallDraft():
            write_llama(draft.model, tokenizer, folder / DRAFT_FILE, hints)
        case DFlashDraft():
            write_dflash(draft, tokenizer, folder / DRAFT_FILE, hints)
        case Eagle3Draft():
            write_eagle3(draft, tokenizer, folder / DRAFT_FILE, hints)


def read(place: Path) -> SmallDraft | Eagle3Draft | DFlashDraft:
    """Load a draft from a GGUF file or from a folder with one, in float32. Raises MissingFileError or FormatError."""
    path = file_in(place) or place
    architecture = read_architecture(path)
    if architecture == "llama":
        return SmallDraft(read_llama(path))
    if architecture == "eagle3":
        return read_eagle3(path)
    if architecture == "dflash":
        return read_dflash(path)
    raise FormatError(f"{path}: general.architecture {architecture!r}: a draft is 'llama', 'eagle3' or 'dflash'")


def family_of(path: Path) -> str:
    """Family of the draft in a GGUF file; no weight is read."""
    architecture = read_architecture(path)
    if architecture == "dflash" and is_dspark(read_names(path)):
        return "dspark"
    return "small" if architecture == "llama" else architecture


def file_in(place: Path) -> Path | None:
    """GGUF file of a draft: the path itself, or the only one in a folder without safetensors; None: there is none.

    Raises FormatError for a folder with several.
    """
    if not place.is_dir():
        return place if place.suffix == _SUFFIX else None
    files = sorted(place.glob(f"*{_SUFFIX}"))
    if not files or any(place.glob("*.safetensors")):
        return None
    if len(files) > 1:
        raise FormatError(f"{place}: holds {files[0].name} and {files[1].name}; name the file that is the draft")
    return files[0]
