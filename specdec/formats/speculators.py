"""EAGLE-3 heads in the format of the `speculators` project, which vLLM serves without flags.

It names the target ("verifier") and how many tokens to draft. Layers are numbered as in vLLM's own layout.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import FormatError
from ...storage import read_object, write_json
from ..drafts.eagle3 import Eagle3Config, Eagle3Draft
from . import eagle3
from .eagle3 import FLAGS, LAYER_IDS, OTHER_LAYER
from .llama import layer_entries, rope_parameters
from .tensors import read_tensors

MODEL_TYPE = "speculators_model_type"
_VERSION = "0.9.0"
_LAYER = "transformer_layer_config"


class Verifier(NamedTuple):
    """The target as engines find it again."""

    name: str
    """Its id on the hub: vLLM loads it from there."""
    architectures: list[str]


def write(draft: Eagle3Draft, folder: Path, draft_tokens: int, verifier: Verifier) -> None:
    """Write config.json and model.safetensors."""
    dtype = eagle3.write_weights(draft, folder, OTHER_LAYER)
    write_json(folder / "config.json", engine_config(draft.config, dtype, draft_tokens, verifier))


def read(folder: Path) -> Eagle3Draft:
    """Load a folder of this format."""
    path = folder / "config.json"
    return eagle3.load(read_config(path, read_object(path)), read_tensors(folder))


def engine_config(config: Eagle3Config, dtype: str, draft_tokens: int, verifier: Verifier) -> dict[str, Any]:
    """config.json. Every flag is written: readers differ in what they take an absent one for."""
    own_width = config.target_hidden_size != config.hidden_size
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": draft_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        MODEL_TYPE: "eagle3",
        "speculators_version": _VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": verifier.name, "architectures": verifier.architectures},
        },
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size if own_width else None,
        **{flag: getattr(config, flag) for flag in FLAGS},
        "norm_before_fc": False,
        LAYER_IDS: list(config.aux_layers),
        "tie_word_embeddings": False,
        "dtype": dtype,
        _LAYER: {**layer_entries(config), "rope_parameters": rope_parameters(config)},
    }


def read_config(path: Path, raw: Mapping[str, Any]) -> Eagle3Config:
    """The dimensions. Raises FormatError naming the field."""
    if raw.get(MODEL_TYPE) != "eagle3":
        raise FormatError(f"{path}: {MODEL_TYPE} {raw.get(MODEL_TYPE)}: only eagle3 can be read")
    layer = raw.get(_LAYER)
    if not isinstance(layer, Mapping) or layer.get("model_type") != "llama":
        found = layer.get("model_type") if isinstance(layer, Mapping) else layer
        raise FormatError(f"{path}: {_LAYER}.model_type {found}: must be llama")
    if raw.get("norm_before_residual") is None:
        raise FormatError(
            f"{path}: norm_before_residual: must be named: vLLM takes none for true, speculators for false"
        )
    if raw.get(LAYER_IDS) is None:
        raise FormatError(f"{path}: {LAYER_IDS}: must be named")
    named = ("draft_vocab_size", "target_hidden_size", "norm_before_fc", LAYER_IDS, *FLAGS)
    return eagle3.read_config(path, {**layer, **{name: raw.get(name) for name in named}}, None)
