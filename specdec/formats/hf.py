"""Independent small drafts as plain Hugging Face model folders."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from ...errors import FormatError
from ...storage import read_object, write_json
from ..drafts.small import SmallDraft
from ..loading import load_model
from .tensors import check_count, check_types, read_types


def write(draft: SmallDraft, folder: Path) -> None:
    """Write config.json, generation_config.json and safetensors; read back and compared. Raises FormatError."""
    weights = draft.model.state_dict()
    _check_finite(draft.model, folder)
    draft.model.save_pretrained(folder, safe_serialization=True)
    again = read(folder).model.state_dict()
    for name, tensor in weights.items():
        if name not in again or not torch.equal(again[name].cpu(), tensor.cpu()):
            raise FormatError(f"{folder}: tensor {name} reads back different from what was written")


def write_draft_tokens(folder: Path, draft_tokens: int) -> None:
    """Say in generation_config.json how much transformers' assisted generation drafts: always so many tokens."""
    path = folder / "generation_config.json"
    raw = read_object(path) if path.is_file() else {}
    raw |= {"num_assistant_tokens": draft_tokens, "num_assistant_tokens_schedule": "constant"}
    write_json(path, raw | {"assistant_confidence_threshold": 0.0})  # else it stops where the draft is less sure


def read(folder: Path) -> SmallDraft:
    """Load a causal LM with its stored dtype. Raises FormatError or MissingFileError, also where tensors are missing:
    transformers would leave them random."""
    # Check before transformers loads: it converts and allocates silently.
    path = folder / "config.json"
    raw, types = read_object(path), read_types(folder)
    if "quantization_config" not in raw:
        check_types(folder, types)  # transformers would turn whatever it finds into floats
    layers = raw.get("num_hidden_layers")
    if isinstance(layers, int):  # transformers would build them all before it looks for their tensors
        check_count(path, "num_hidden_layers", layers, types)

    # Only tensors that the model knows, and all of them, must be there.
    model = load_model(folder, str(folder), only_known=True, dtype="auto", use_safetensors=True)
    _check_finite(model, folder)
    return SmallDraft(model)


def _check_finite(model: PreTrainedModel, folder: Path) -> None:
    for name, tensor in model.state_dict().items():
        if not bool(torch.isfinite(tensor).all()):
            raise FormatError(f"{folder}: tensor {name} has values that are not finite")
