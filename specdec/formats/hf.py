"""An independent draft as a plain Hugging Face folder."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ...errors import FormatError, MissingFileError
from ..drafts.small import SmallDraft


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
    config = AutoConfig.from_pretrained(folder)
    options: dict[str, Any] = {"config": config, "dtype": "auto", "use_safetensors": True, "output_loading_info": True}
    try:
        model, info = AutoModelForCausalLM.from_pretrained(folder, **options)
    except (OSError, RuntimeError, ValueError) as error:
        raise FormatError(f"{folder}: {str(error).splitlines()[0]}") from None
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            raise FormatError(f"{folder}: {kind.replace('_', ' ')}: {sorted(map(str, info[kind]))[0]}")
    return SmallDraft(model)
