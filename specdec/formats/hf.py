"""An independent draft as a plain Hugging Face folder."""

from pathlib import Path

import torch

from ...errors import FormatError, MissingFileError
from ..drafts.small import SmallDraft
from ..loading import load_model


def write(draft: SmallDraft, folder: Path) -> None:
    """config.json, generation_config.json and safetensors; read back and compared."""
    weights = draft.model.state_dict()
    for name, tensor in weights.items():
        if not bool(torch.isfinite(tensor).all()):
            raise FormatError(f"{folder}: tensor {name} has values that are not finite")
    draft.model.save_pretrained(folder, safe_serialization=True)
    again = read(folder).model.state_dict()
    for name, tensor in weights.items():
        if name not in again or not torch.equal(again[name].cpu(), tensor.cpu()):
            raise FormatError(f"{folder}: tensor {name} reads back different from what was written")


def read(folder: Path) -> SmallDraft:
    """Load with the stored dtype. Raises where tensors are missing: transformers would leave them random."""
    if not (folder / "config.json").is_file():
        raise MissingFileError(f"{folder / 'config.json'}: no such file")
    return SmallDraft(load_model(folder, str(folder), only_known=True, dtype="auto", use_safetensors=True))
