"""EAGLE-3 heads, DFlash and DSpark drafts in the `speculators` project's format, which vLLM serves without flags.

It names the target ("verifier") and how many tokens to draft. Layers are numbered as in vLLM's own layout.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from torch import Tensor

from ...errors import FormatError, InputError
from ...storage import read_object, write_json
from ..drafts.dflash import DFlashConfig, DFlashDraft
from ..drafts.eagle3 import Body, Eagle3Config, Eagle3Draft
from ..engine_features import FLAGS
from . import dflash, eagle3, eagle3_config
from .eagle3 import OTHER_LAYER
from .eagle3_config import LAYER_IDS
from .llama import layer_entries, rope_parameters
from .tensors import read_tensors

MODEL_TYPE = "speculators_model_type"
_VERSION = "0.9.0"
_PARALLEL = "peagle"
_BLOCKS = {"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel"}  # and their architectures
_LAYER = "transformer_layer_config"
_NOT_CAUSAL = "sliding_window_non_causal"
_DFLASH_LAYER_IDS = "aux_hidden_state_layer_ids"


class Verifier(NamedTuple):
    """The target ("verifier") as the format names it."""

    name: str
    """The target's id on the hub, from which vLLM loads it."""
    architectures: list[str]


def write(draft: Eagle3Draft, folder: Path, draft_tokens: int, verifier: Verifier) -> None:
    """Write config.json and model.safetensors of an EAGLE-3 head."""
    dtype = eagle3.write_weights(draft, folder, OTHER_LAYER)
    write_json(folder / "config.json", engine_config(draft.config, dtype, draft_tokens, verifier))


def write_dflash(draft: DFlashDraft, folder: Path, draft_tokens: int, verifier: Verifier) -> None:
    """Write config.json and model.safetensors of a DFlash draft. Raises InputError for embeddings, a head or a width of
    the draft's own, where readers would use the target's."""
    # The format has no place for these tensors, or for another width.
    config = draft.config
    if draft.embed_tokens is not None or (draft.lm_head is not None and not config.reduced):
        raise InputError("format speculators: its drafts use the target's embeddings and head; the draft has its own")
    if config.target_hidden_size != config.hidden_size:
        sizes = f"{config.hidden_size} and {config.target_hidden_size}"
        raise InputError(f"format speculators: takes a dflash draft to be as wide as its target; {sizes} differ")

    # The tensors are those of vLLM's own layout.
    dtype = dflash.write_weights(draft, folder)
    write_json(folder / "config.json", dflash_config(config, dtype, draft_tokens, verifier))


def read(folder: Path, target_layers: int | None = None) -> Eagle3Draft | DFlashDraft:
    """Load a draft from a folder of this format. `target_layers`: the target's number of layers, from which those that
    an EAGLE-3 head reads follow where the config names none. Raises MissingFileError or FormatError."""
    path = folder / "config.json"
    raw, stored = read_object(path), read_tensors(folder)
    if raw.get(MODEL_TYPE) in _BLOCKS:
        return dflash.load(read_dflash_config(path, raw), stored)
    config = read_config(path, raw, stored.tensors, target_layers)
    entries = {"mask_token_id": raw.get("mask_token_id"), "vocab_size": config.vocab_size}
    mask = eagle3_config.mask_token(path, entries, stored.tensors)
    if (mask is not None) != (raw[MODEL_TYPE] == _PARALLEL):
        has = "has none" if mask is None else "is there"
        raise FormatError(f"{path}: {MODEL_TYPE} {raw[MODEL_TYPE]}: tensor {eagle3_config.MASK} {has}")
    return eagle3.load(config, stored, mask)


def engine_config(config: Eagle3Config, dtype: str, draft_tokens: int, verifier: Verifier) -> dict[str, Any]:
    """config.json of an EAGLE-3 head. Every flag is written: readers differ in their defaults."""
    # target_hidden_size is only named where it differs from the head's.
    own_width = config.target_hidden_size != config.hidden_size
    return {
        "architectures": ["Eagle3DraftModel"],
        **_common("eagle3", draft_tokens, verifier),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size if own_width else None,
        **{flag: getattr(config, flag) for flag in FLAGS},
        LAYER_IDS: list(config.aux_layers),
        "tie_word_embeddings": False,
        "dtype": dtype,
        _LAYER: {
            **layer_entries(config),
            **eagle3_config.body_entries(config),
            "rope_parameters": rope_parameters(config),
        },
    }


def dflash_config(config: DFlashConfig, dtype: str, draft_tokens: int, verifier: Verifier) -> dict[str, Any]:
    """config.json of a DFlash or DSpark draft. vLLM reads `sliding_window_non_causal` false as causal attention
    everywhere."""
    # No more is drafted than the block holds.
    kind = "dspark" if config.markov_rank else "dflash"
    layer = {**layer_entries(config), "model_type": dflash.QWEN3, "num_hidden_layers": config.num_hidden_layers}
    return {
        "architectures": [_BLOCKS[kind]],
        **_common(kind, min(draft_tokens, config.draft_tokens), verifier),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": None,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        _DFLASH_LAYER_IDS: list(config.aux_layers),
        _NOT_CAUSAL: True,
        "sample_from_anchor": False,
        **dflash.dspark_entries(config),
        "tie_word_embeddings": False,
        "dtype": dtype,
        _LAYER: {**layer, "rope_parameters": rope_parameters(config)},
    }


def _common(algorithm: str, draft_tokens: int, verifier: Verifier) -> dict[str, Any]:
    # Greedy proposals, accepted where they are the target's first choice.
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": draft_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        MODEL_TYPE: algorithm,
        "speculators_version": _VERSION,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": verifier.name, "architectures": verifier.architectures},
        },
    }


def read_dflash_config(path: Path, raw: Mapping[str, Any]) -> DFlashConfig:
    """DFlash config from config.json. Raises FormatError naming the field."""
    layer, dspark = _layer(path, raw, (dflash.QWEN3,)), raw.get(MODEL_TYPE) == "dspark"
    if dspark and raw.get("sample_from_anchor") is None:
        raise FormatError(f"{path}: sample_from_anchor: must be named: vLLM takes none for false, speculators for true")
    dflash.check_fixed(path, "", raw, {} if dspark else {"sample_from_anchor": False})
    own = {"aux_layers": raw.get(_DFLASH_LAYER_IDS), **{n: raw.get(n) for n in ("block_size", "mask_token_id")}}
    own |= dflash.dspark_fields(path, raw) if dspark else {}
    named = ("draft_vocab_size", "target_hidden_size")
    config = dflash.dimensions(path, {**layer, **{name: raw.get(name) for name in named}}, own)

    # Layers with a window are causal or not by a key of their own, all others never.
    if config.sliding_window is None:
        return config
    if raw.get(_NOT_CAUSAL) is None:
        raise FormatError(f"{path}: {_NOT_CAUSAL}: must be named: vLLM takes none for true, speculators for false")
    return config.model_copy(update={"causal": "none" if raw[_NOT_CAUSAL] else "sliding"})


def _layer(path: Path, raw: Mapping[str, Any], kinds: Sequence[str]) -> Mapping[str, Any]:
    layer = raw.get(_LAYER)
    if isinstance(layer, Mapping) and layer.get("model_type") in kinds:
        return layer
    found = layer.get("model_type") if isinstance(layer, Mapping) else layer
    raise FormatError(f"{path}: {_LAYER}.model_type {found}: must be {' or '.join(kinds)}")


def read_config(
    path: Path, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], target_layers: int | None
) -> Eagle3Config:
    """EAGLE-3 config from config.json, and the body from the tensors. Raises FormatError naming the field."""
    # Fields whose absence means different things to different readers must be there.
    kind = raw.get(MODEL_TYPE)
    if kind not in ("eagle3", _PARALLEL):
        raise FormatError(
            f"{path}: {MODEL_TYPE} {kind}: only eagle3, {_PARALLEL}, dflash and dspark can be read; vLLM reads more"
        )
    layer = _layer(path, raw, get_args(Body))
    if raw.get("norm_before_residual") is None and kind != _PARALLEL:  # false there, all readers agree
        raise FormatError(
            f"{path}: norm_before_residual: must be named: vLLM takes none for true, speculators for false"
        )

    # Then the config reads as vLLM's own layout does.
    named = ("draft_vocab_size", "target_hidden_size", LAYER_IDS, *FLAGS)
    entries = {**layer, **{name: raw.get(name) for name in named}}
    config = eagle3_config.read_config(path, entries, tensors, target_layers)
    if config.body != layer["model_type"]:
        raise FormatError(f"{path}: {_LAYER}.model_type {layer['model_type']}: the tensors are of {config.body}")
    return config
