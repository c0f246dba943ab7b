"""DFlash and DSpark drafts in the layout that vLLM and SGLang read: config.json as of a Qwen 3, and `dflash_config`.

`target_layer_ids` count the target's layers from 0 and mean their outputs; engines add one. Embeddings and head may be
absent: the target lends its own. What a DSpark draft has more stands at the top level, where vLLM reads it, and beside
the mask token, where SGLang does; its confidence head is there if its tensors are.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...errors import FormatError
from ...storage import read_object, write_json
from ..drafts.dflash import DFlashConfig, DFlashDraft
from .eagle3 import check_marks, draft_ids_in, mapping_specs, our_maps
from .llama import (
    QWEN3_DEFAULTS,
    SLIDES,
    dtype_entries,
    embedding_specs,
    layer_entries,
    layer_fields,
    layer_specs,
    rope_entries,
    validated,
    window_fields,
    without_frequencies,
)
from .tensors import WEIGHTS_FILE, Spec, Stored, check_count, check_tensors, present, read_tensors, write_tensors

ARCHITECTURE = "DFlashDraftModel"
DSPARK = "Qwen3DSparkModel"
_DSPARKS = (DSPARK, "DSparkDraftModel")  # the second is SpecForge's
ARCHITECTURES = (ARCHITECTURE, "QwenDFlashDraftModel", *_DSPARKS)  # the second is AngelSlim's
QWEN3 = "qwen3"
_NESTED = "dflash_config"
_MASK_FILE = "mask_embedding.pt"
_VANILLA = "vanilla"
_MARKOV = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
_CONFIDENCE = "confidence_head.proj."
# What engines compute otherwise where a config, or its `dflash_config`, asks for it: the one value that is ours.
_FIXED = {
    "is_neox_style": True,
    "logit_scale": 1.0,
    "add_swa_attention_sink_bias": False,
}
_FIXED_NESTED = {
    "use_aux_hidden_state": True,
    "attention_sink_bias": False,
}


def write(draft: DFlashDraft, folder: Path) -> None:
    """Write config.json and model.safetensors."""
    dtype = write_weights(draft, folder)
    write_json(folder / "config.json", engine_config(draft.config, dtype))


def check_writable(config: DFlashConfig) -> None:
    """Raise FormatError for a draft with windows or causal layers: engines differ in how a config says them."""
    if config.sliding_window is not None or config.causal != "none":
        raise FormatError("dflash drafts with a sliding window or causal layers are read and scored, not written")


def write_weights(draft: DFlashDraft, folder: Path) -> str:
    """Write model.safetensors, with d2t and t2d where the vocabulary is reduced. Returns the weights' dtype."""
    check_writable(draft.config)
    # A draft of the whole vocabulary has no d2t and t2d in its file.
    config, tensors = draft.config, dict(draft.state_dict())
    specs = {**tensor_specs(config), **present(optional_specs(config), tensors)}
    if config.reduced:
        specs |= mapping_specs(config)
    else:
        tensors = {name: tensor for name, tensor in tensors.items() if name not in mapping_specs(config)}
    return write_tensors(folder / WEIGHTS_FILE, tensors, specs)


def family_of(raw: Mapping[str, Any]) -> str:
    """Family of the draft that a config.json is of: dflash or dspark."""
    return "dspark" if {*_DSPARKS} & {*map(str, raw.get("architectures") or ())} else "dflash"


def read(folder: Path) -> DFlashDraft:
    """Load a DFlash draft from a folder. Raises MissingFileError or FormatError."""
    path = folder / "config.json"
    stored = read_tensors(folder)
    if (folder / _MASK_FILE).exists():
        raise FormatError(f"{folder / _MASK_FILE}: a mask with an embedding of its own is not supported")
    return load(read_config(path, read_object(path)), stored)


def load(config: DFlashConfig, stored: Stored) -> DFlashDraft:
    """DFlash draft from its config and tensors. Raises FormatError naming the tensor that is wrong."""
    # Its tensors say whether there is a confidence head: engines differ in what they take for an absent key.
    told = bool(config.markov_rank) and any(name.startswith(_CONFIDENCE) for name in stored.tensors)
    config = config.model_copy(update={"confidence_head": told})

    # 1) Check the tensors. The number of layers first: specs are made for each.
    where = stored.where
    tensors = without_frequencies(config, where, our_maps(where, stored.tensors))
    check_count(where, "num_hidden_layers", config.num_hidden_layers, tensors)
    specs = {**tensor_specs(config), **present({**optional_specs(config), **mapping_specs(config)}, tensors)}
    if config.reduced:  # t2d says nothing that d2t does not, and engines do not read it
        specs |= {"d2t": mapping_specs(config)["d2t"], "lm_head.weight": optional_specs(config)["lm_head.weight"]}
    check_tensors(where, tensors, specs)

    # 2) Build the module, with embeddings and head of its own where the file has them.
    own = {name: f"{name}.weight" in tensors for name in ("embed_tokens", "lm_head")}
    ids = draft_ids_in(config, where, tensors)
    if not config.reduced:  # a head of the whole vocabulary gets the target's order
        if not own["lm_head"] and not torch.equal(ids, ids.sort().values):
            raise FormatError(f"{where}: d2t changes the order of the whole vocabulary: the target's head has its own")
        if own["lm_head"]:
            tensors["lm_head.weight"] = tensors["lm_head.weight"][ids.argsort()]
        if config.markov_rank:
            tensors[_MARKOV[1]] = tensors[_MARKOV[1]][ids.argsort()]
        ids, _ = ids.sort()
    draft = DFlashDraft(config, ids, own["embed_tokens"], own["lm_head"])
    check_marks(where, draft.t2d, tensors)

    # 3) Load; buffers that the file lacks keep what the ids gave.
    draft.load_state_dict({**tensors, "d2t": draft.d2t, "t2d": draft.t2d})
    return draft.to(tensors["fc.weight"].dtype)


def engine_config(config: DFlashConfig, dtype: str) -> dict[str, Any]:
    """config.json of a DFlash draft as engines expect it. Some look for block_size at the top, some beside the mask."""
    # target_layer_ids count from 0 and mean outputs: one less than in hidden_states.
    read = {"mask_token_id": config.mask_token_id, "target_layer_ids": [layer - 1 for layer in config.aux_layers]}
    dspark = dspark_entries(config)
    return {
        "architectures": [DSPARK if dspark else ARCHITECTURE],
        **layer_entries(config),
        "model_type": QWEN3,
        "num_hidden_layers": config.num_hidden_layers,
        **rope_entries(config),
        "target_hidden_size": config.target_hidden_size,
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": config.block_size,
        **(read | dspark if dspark else {}),
        _NESTED: {"block_size": config.block_size, **read, **dspark, "causal": False},
        **dtype_entries(dtype),
    }


def dspark_entries(config: DFlashConfig) -> dict[str, Any]:
    """config.json entries of a DSpark draft, none for a DFlash one. All are written: readers differ in defaults."""
    if not config.markov_rank:
        return {}
    return {
        "sample_from_anchor": config.sample_from_anchor,
        "markov_rank": config.markov_rank,
        "markov_head_type": _VANILLA,
        "enable_confidence_head": config.confidence_head,
        "confidence_head_with_markov": config.confidence_head,
    }


def dspark_fields(path: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """DFlashConfig fields of a DSpark draft. Raises FormatError for another kind of Markov head."""
    kind = raw.get("markov_head_type") or _VANILLA
    if kind != _VANILLA:
        raise FormatError(f"{path}: markov_head_type {kind}: must be {_VANILLA}; SGLang computes gated and rnn")
    if not raw.get("markov_rank"):
        raise FormatError(f"{path}: markov_rank {raw.get('markov_rank')}: must be above 0 in a DSpark draft")
    return {"markov_rank": raw["markov_rank"], "sample_from_anchor": raw.get("sample_from_anchor")}


def read_config(path: Path, raw: Mapping[str, Any]) -> DFlashConfig:
    """DFlash config from an engine's config.json. Raises FormatError naming the field."""
    # A DSpark config may say all at the top level, and all readers take an absent sample_from_anchor for true.
    nested, dspark = raw.get(_NESTED), family_of(raw) == "dspark"
    if dspark:
        nested = {"sample_from_anchor": True, **raw, **(nested if isinstance(nested, Mapping) else {})}
    if not isinstance(nested, Mapping):
        raise FormatError(f"{path}: {_NESTED} {nested}: must be an object")

    # Fields that would change the computation must have our value.
    check_fixed(path, "", raw, _FIXED)
    check_fixed(path, f"{_NESTED}.", nested, _FIXED_NESTED | ({} if dspark else {"sample_from_anchor": False}))

    # block_size may stand in two places, which must agree.
    block_size = raw.get("block_size", nested.get("block_size"))
    if nested.get("block_size", block_size) != block_size:
        raise FormatError(f"{path}: {_NESTED}.block_size {nested['block_size']}: must equal block_size {block_size}")

    # Engines add one to target_layer_ids, and so do we.
    layers = nested.get("target_layer_ids")
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise FormatError(f"{path}: {_NESTED}.target_layer_ids {layers}: must be a list of layers")
    own = {"mask_token_id": nested.get("mask_token_id"), "aux_layers": [layer + 1 for layer in layers]}
    own |= dspark_fields(path, nested) if dspark else {}
    swa = _swa_fields(path, raw, nested)
    layer = {name: value for name, value in raw.items() if not swa or name not in ("sliding_window", "layer_types")}
    config = dimensions(path, layer, {**own, "block_size": block_size, **swa})

    # Layers with a window are causal unless the config says otherwise for all of them.
    causal = raw.get("is_causal", nested.get("causal"))
    sliding = "none" if config.sliding_window is None else "sliding"
    return config.model_copy(update={"causal": sliding if causal is None else "all" if causal else "none"})


def _swa_fields(path: Path, raw: Mapping[str, Any], nested: Mapping[str, Any]) -> dict[str, Any]:
    """Sliding window of all layers by `dflash_config`, where no layer is of that type by itself."""
    if not nested.get("use_swa") or SLIDES in (raw.get("layer_types") or []):
        return {}
    window = nested.get("swa_window_size", raw.get("sliding_window"))
    if window is None:
        raise FormatError(f"{path}: {_NESTED}.use_swa true: needs swa_window_size")
    return {"sliding_window": window, "full_attention_layers": ()}


def dimensions(path: Path, raw: Mapping[str, Any], own: Mapping[str, Any]) -> DFlashConfig:
    """DFlash config from a Qwen 3 layer config (`raw`) and the fields that only DFlash has (`own`).

    Raises FormatError naming the field.
    """
    # Only what engines compute the same way: a Qwen 3 layer, a named rope base.
    if raw.get("model_type") != QWEN3:
        raise FormatError(f"{path}: model_type {raw.get('model_type')}: must be {QWEN3}")
    if raw.get("rope_theta") is None and "rope_theta" not in (raw.get("rope_parameters") or {}):
        raise FormatError(f"{path}: rope_theta: must be named: readers differ in what they take for an absent one")

    # The Llama reader checks for one Llama layer, so these two fields stay out of it.
    layer = {name: value for name, value in raw.items() if name not in ("model_type", "num_hidden_layers")}
    fields = layer_fields(path, {**QWEN3_DEFAULTS, **layer})

    # target_hidden_size is hidden_size, and draft_vocab_size is vocab_size, where they are absent.
    fields["num_hidden_layers"] = layers = raw.get("num_hidden_layers")
    if type(layers) is int:
        fields |= window_fields(path, raw, layers)
    fields["target_hidden_size"] = raw.get("target_hidden_size") or raw.get("hidden_size")
    fields["draft_vocab_size"] = raw.get("draft_vocab_size") or raw.get("vocab_size")
    return validated(DFlashConfig, path, {**fields, **own})


def check_fixed(path: Path, prefix: str, raw: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    """Raise FormatError for a config that asks for another value than the `fixed` one that we compute."""
    for name, value in fixed.items():
        if raw.get(name) not in (None, value):
            raise FormatError(f"{path}: {prefix}{name} {raw[name]}: must be {value}")
    if raw.get("attention_value_scale") not in (None, 1):
        raise FormatError(f"{path}: {prefix}attention_value_scale {raw['attention_value_scale']}: must be 1")


def tensor_specs(config: DFlashConfig) -> dict[str, Spec]:
    """Specs of every weight that the layout must hold."""
    hidden = Spec((config.hidden_size,))
    specs = {
        "fc.weight": Spec((config.hidden_size, len(config.aux_layers) * config.target_hidden_size)),
        "hidden_norm.weight": hidden,
        "norm.weight": hidden,
    }
    # DSpark's heads.
    rank = config.markov_rank
    if rank:
        specs |= dict(zip(_MARKOV, (Spec((config.vocab_size, rank)), Spec((config.draft_vocab_size, rank)))))
    if config.confidence_head:
        specs |= {f"{_CONFIDENCE}weight": Spec((1, config.hidden_size + rank)), f"{_CONFIDENCE}bias": Spec((1,))}

    for layer in range(config.num_hidden_layers):
        prefix = f"layers.{layer}."
        specs |= {f"{prefix}input_layernorm.weight": hidden, **layer_specs(config, prefix, config.hidden_size)}
        specs |= {f"{prefix}self_attn.{name}_norm.weight": Spec((config.head_dim,)) for name in "qk"}
    return specs


def optional_specs(config: DFlashConfig) -> dict[str, Spec]:
    """Specs of the weights that the draft may have or borrow from the target: embeddings and head."""
    return {**embedding_specs(config), "lm_head.weight": Spec((config.draft_vocab_size, config.hidden_size))}
