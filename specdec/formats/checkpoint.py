"""One folder a draft: the layout that engines read, plus `draftforge.json` with what they do not ask for."""

from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from ...errors import FormatError, MissingFileError
from ...storage import new_folder, read_object, write_json
from ..drafts import AnyDraft
from ..targets import copy_tokenizer
from .detect import read_draft
from .layouts import NATIVE, Format, write_draft
from .llama import validated
from .speculators import Verifier

META_FILE = "draftforge.json"


class DraftMeta(BaseModel):
    """Where a draft comes from. Travels with the checkpoint; engines ignore it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    family: Literal["small", "eagle", "eagle3", "medusa"]
    target_fingerprint: str
    tokenizer_digest: str
    step: int = Field(ge=0)
    draft_tokens: int = Field(ge=1)
    """Tokens a round that it was trained for."""
    draftforge_version: str
    extra: dict[str, Any] = {}


class LoadedDraft(NamedTuple):
    draft: AnyDraft
    meta: DraftMeta


def save_draft(draft: nn.Module, folder: Path, meta: DraftMeta, tokenizer_folder: Path | None = None) -> None:
    """Write the folder atomically and read it back. Raises FormatError where a tensor is missing or not finite.

    `tokenizer_folder`: files that a `small` draft needs to stand on its own.
    """
    assert isinstance(draft, AnyDraft)
    with new_folder(folder) as beside:
        _fill(draft, beside, meta, NATIVE, None, tokenizer_folder)


def convert_draft(source: Path, folder: Path, name: Format, verifier: Verifier | None = None) -> None:
    """Write the draft of one folder into another, existing one in a format of choice. The lineage goes along."""
    meta = read_meta(source)
    _fill(_read(source, meta), folder, meta, name, verifier, source if meta.family == "small" else None)


def load_draft(folder: Path, device: torch.device, dtype: torch.dtype) -> LoadedDraft:
    """Read a folder that `save_draft` or `convert_draft` wrote. Raises MissingFileError or FormatError."""
    meta = read_meta(folder)
    return LoadedDraft(_read(folder, meta).to(device=device, dtype=dtype).eval(), meta)


def read_meta(folder: Path) -> DraftMeta:
    """The lineage beside the weights."""
    if not folder.is_dir():
        raise MissingFileError(f"{folder}: no such draft folder")
    return validated(DraftMeta, folder / META_FILE, read_object(folder / META_FILE))


def _fill(
    draft: AnyDraft, folder: Path, meta: DraftMeta, name: Format, verifier: Verifier | None, tokenizer: Path | None
) -> None:
    write_draft(draft, folder, name, meta.draft_tokens, verifier)
    if tokenizer is not None:
        copy_tokenizer(tokenizer, folder)
    write_json(folder / META_FILE, meta.model_dump())


def _read(folder: Path, meta: DraftMeta) -> AnyDraft:
    draft = read_draft(folder)
    if draft.family != meta.family:
        raise FormatError(f"{folder}: holds a draft of family {draft.family}, {META_FILE} says {meta.family}")
    return draft
