"""One folder a draft: the layout that engines read, plus `draftforge.json` with what they do not ask for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import nn

from ...errors import FormatError, MissingFileError
from ...storage import new_folder, read_object, write_json
from ..drafts.eagle3 import Eagle3Draft
from ..drafts.small import SmallDraft
from ..targets import copy_tokenizer
from . import eagle3, hf

META_FILE = "draftforge.json"
Draft = SmallDraft | Eagle3Draft


class DraftMeta(BaseModel):
    """Where a draft comes from. Travels with the checkpoint; engines ignore it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    family: Literal["small", "eagle3"]
    target_fingerprint: str
    tokenizer_digest: str
    step: int = Field(ge=0)
    draft_tokens: int = Field(ge=1)
    """Tokens a round that it was trained for."""
    draftforge_version: str
    extra: dict[str, Any] = {}


class LoadedDraft(NamedTuple):
    draft: Draft
    meta: DraftMeta


def save_draft(draft: nn.Module, folder: Path, meta: DraftMeta, tokenizer_folder: Path | None = None) -> None:
    """Write the folder atomically and read it back. Raises FormatError where a tensor is missing or not finite.

    `tokenizer_folder`: files that a `small` draft needs to stand on its own.
    """
    writers: dict[str, Callable[..., None]] = {"small": hf.write, "eagle3": eagle3.write}
    with new_folder(folder) as beside:
        writers[meta.family](draft, beside)
        if tokenizer_folder is not None:
            copy_tokenizer(tokenizer_folder, beside)
        write_json(beside / META_FILE, meta.model_dump())


def load_draft(folder: Path, device: torch.device, dtype: torch.dtype) -> LoadedDraft:
    """Read a folder that `save_draft` wrote. Raises MissingFileError or FormatError naming what is wrong."""
    meta = read_meta(folder)
    readers: dict[str, Callable[[Path], Draft]] = {"small": hf.read, "eagle3": eagle3.read}
    draft = readers[meta.family](folder)
    return LoadedDraft(draft.to(device=device, dtype=dtype).eval(), meta)


def read_meta(folder: Path) -> DraftMeta:
    """The lineage beside the weights."""
    if not folder.is_dir():
        raise MissingFileError(f"{folder}: no such draft folder")
    try:
        return DraftMeta.model_validate(read_object(folder / META_FILE))
    except ValidationError as error:
        first = error.errors()[0]
        raise FormatError(f"{folder / META_FILE}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
