"""Draft checkpoint folders: the layout that engines read, plus `draftforge.json` with the draft's lineage."""

from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field
from transformers import PreTrainedTokenizerBase

from ...errors import FormatError, MissingFileError
from ...storage import new_folder, read_object, write_json
from ..drafts.base import DraftModule
from ..serving_plan import ServingPlan, find_plan, write_plan
from ..targets import copy_tokenizer
from . import hf
from .detect import read_draft
from .gguf.file import Field as GgufField
from .layouts import NATIVE, Format, write_draft
from .llama import validated
from .speculators import Verifier

META_FILE = "draftforge.json"
OWN_TARGET = "target"
"""Subfolder with the target that was trained together with the draft; `target_fingerprint` is of that target."""
ORIGINAL_TARGET = "original_target"
"""Key in `extra`: fingerprint of the target from which a target trained with the draft was made."""

HELD_LOSS = "held_loss"
"""Key in `extra`: loss of that target on held answers, before and after the training (`eval/held_loss.py`)."""


class DraftMeta(BaseModel):
    """Lineage of a draft: its target, tokenizer and training. Travels with the checkpoint; engines ignore it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    family: Literal["small", "eagle", "eagle3", "medusa", "dflash", "dspark"]
    target_fingerprint: str
    tokenizer_digest: str
    step: int = Field(ge=0)
    draft_tokens: int = Field(ge=1)
    """Drafted tokens a round that the draft was trained for."""
    draftforge_version: str
    extra: dict[str, Any] = {}


class LoadedDraft(NamedTuple):
    """A draft module and its lineage."""

    draft: DraftModule
    meta: DraftMeta


def save_draft(draft: DraftModule, folder: Path, meta: DraftMeta, tokenizer_folder: Path | None = None) -> None:
    """Write a draft's folder atomically, read back. Raises FormatError where a tensor is missing or not finite.

    `tokenizer_folder`: files that a `small` draft needs to stand on its own.
    """
    with new_folder(folder) as beside:
        write_draft(draft, beside, NATIVE)
        if tokenizer_folder is not None:
            copy_tokenizer(tokenizer_folder, beside)
        write_json(beside / META_FILE, meta.model_dump())


def convert_draft(
    source: Path,
    folder: Path,
    name: Format,
    verifier: Verifier | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Convert a draft: write it into another, existing folder in the format `name`. Lineage and plan are copied.

    `verifier`, and the target's `tokenizer`: for formats that hold them (see `write_draft`).
    """
    # 1) The draft, with the K of its plan where the format names one. Engines draft no tree that a folder names.
    meta, found = read_meta(source), find_plan(source)
    plan = found.plan.as_chain
    write_draft(_read(source, meta), folder, name, plan.draft_tokens, verifier, tokenizer, _hints(meta, plan))
    if name == "hf":
        hf.write_draft_tokens(folder, plan.draft_tokens)
    # 2) What stands beside it. A GGUF file holds its tokenizer; other small drafts need the files.
    if meta.family == "small" and name != "gguf":
        copy_tokenizer(source, folder)
    write_json(folder / META_FILE, meta.model_dump())
    if not found.assumed:
        write_plan(folder, found.plan if name == NATIVE else plan)


def _hints(meta: DraftMeta, plan: ServingPlan) -> dict[str, GgufField]:
    """GGUF keys that say what a draft is and how it is served; llama.cpp shows the general ones."""
    K, rule = plan.draft_tokens, plan.rule
    return {
        "general.name": f"{meta.family} draft, K={K}",
        "general.description": f"draft for speculative decoding, --spec-draft-n-max {K}, accept rule {rule}",
        "general.tags": ["speculative-decoding"],
        "draftforge.draft_tokens": K,
        "draftforge.rule": rule,
        "draftforge.target_fingerprint": meta.target_fingerprint,
    }


def load_draft(place: Path, device: torch.device, dtype: torch.dtype) -> LoadedDraft:
    """Load a draft from a folder that `save_draft` or `convert_draft` wrote, or from the GGUF file in one.

    Raises MissingFileError or FormatError.
    """
    meta = read_meta(place)
    return LoadedDraft(_read(place, meta).to(device=device, dtype=dtype).eval(), meta)


def meta_file(place: Path) -> Path:
    """Path of a draft's lineage file: in its folder, or beside a bare file. It need not exist."""
    return (place.parent if place.is_file() else place) / META_FILE


def read_meta(place: Path) -> DraftMeta:
    """Lineage of a draft. Raises MissingFileError or FormatError."""
    path = meta_file(place)
    if not path.parent.is_dir():
        raise MissingFileError(f"{path.parent}: no such draft folder")
    if not path.is_file():
        raise MissingFileError(f"{path}: no such file: only a draft that was made here has one")
    return validated(DraftMeta, path, read_object(path))


def _read(place: Path, meta: DraftMeta) -> DraftModule:
    draft = read_draft(place)
    if draft.family != meta.family:
        raise FormatError(f"{place}: holds a draft of family {draft.family}, {META_FILE} says {meta.family}")
    return draft
