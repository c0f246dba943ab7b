"""EAGLE-3 heads in the layout that vLLM and SGLang both read, and the original project's as safetensors.

vLLM and llama.cpp number captured layers as transformers' hidden_states (2 = output of layer 1) at the top level;
SGLang reads `eagle_config` and adds one. Both are written.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import FormatError
from ...storage import read_object, write_json
from ..drafts.dflash import DFlashConfig
from ..drafts.eagle3 import Eagle3Config, Eagle3Draft
from .llama import dtype_entries, embedding_specs, layer_entries, layer_fields, layer_specs, rope_entries, validated
from .tensors import WEIGHTS_FILE, Spec, Stored, check_tensors, present, read_tensors, write_tensors

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
FLAGS = ("fc_norm", "norm_output", "norm_before_residual")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Prefixes: of the decoder layer, in our module as in the first layout; and of the norms of captured layers.
LAYER, OTHER_LAYER = "midlayer.", "layers.0."
OUR_NORMS, FILE_NORMS = "fc.norms.", "fc_norm."


def write(draft: Eagle3Draft, folder: Path) -> None:
    """Write config.json and model.safetensors."""
    dtype = write_weights(draft, folder, LAYER)
    write_json(folder / "config.json", engine_config(draft.config, dtype))


def write_weights(draft: Eagle3Draft, folder: Path, layer: str) -> str:
    """Write model.safetensors, the decoder layer's tensors under the prefix `layer`. Returns the weights' dtype.

    A draft of the whole vocabulary has no d2t and t2d: vLLM and `speculators` have no place for them there.
    """
    # Our names to the file's.
    config, names = draft.config, {LAYER: layer, OUR_NORMS: FILE_NORMS}
    tensors = {_renamed(name, names): tensor for name, tensor in draft.state_dict().items()}
    specs = {**tensor_specs(config, layer), **(mapping_specs(config) if reduced(config) else {})}

    # Embeddings only if the draft has its own; maps only for a reduced vocabulary.
    if draft.embed_tokens is not None:
        specs |= embedding_specs(config)
    if not reduced(config):
        tensors = {name: tensor for name, tensor in tensors.items() if name not in mapping_specs(config)}
    return write_tensors(folder / WEIGHTS_FILE, tensors, specs)


def read(folder: Path, target_layers: int | None = None) -> Eagle3Draft:
    """Load an EAGLE-3 head from a folder. `target_layers`: the target's number of layers, from which the captured
    layers follow where the config names none. Raises MissingFileError or FormatError."""
    path = folder / "config.json"
    return load(read_config(path, read_object(path), target_layers), read_tensors(folder))


def load(config: Eagle3Config, stored: Stored) -> Eagle3Draft:
    """EAGLE-3 head from its config and tensors. Raises FormatError naming the tensor that is wrong."""
    # 1) Check the tensors; either prefix of the decoder layer is read.
    where, tensors = stored
    layer = OTHER_LAYER if any(name.startswith(OTHER_LAYER) for name in tensors) else LAYER
    mapping = mapping_specs(config)
    specs = {**tensor_specs(config, layer), **present({**embedding_specs(config), **mapping}, tensors)}
    if reduced(config):
        specs["d2t"] = mapping["d2t"]  # t2d says nothing that d2t does not, and engines do not read it
    check_tensors(where, tensors, specs)

    # 2) Build the module.
    draft = Eagle3Draft(config, draft_ids_in(config, where, tensors), own_embeddings="embed_tokens.weight" in tensors)
    check_marks(where, draft.t2d, tensors)

    # 3) The file's names to ours; buffers that the file lacks keep what the ids gave.
    back = {layer: LAYER, FILE_NORMS: OUR_NORMS}
    ours = {_renamed(name, back): tensor for name, tensor in tensors.items()}
    draft.load_state_dict({"d2t": draft.d2t, "t2d": draft.t2d, **ours})
    return draft.to(tensors["lm_head.weight"].dtype)


def check_marks(where: Path, t2d: Tensor, tensors: Mapping[str, Tensor]) -> None:
    """Raise FormatError unless a file's t2d, if it has one, is the one that its d2t makes."""
    if "t2d" in tensors and not torch.equal(t2d, tensors["t2d"]):
        raise FormatError(f"{where}: t2d does not mark the ids that d2t names")


def _renamed(name: str, prefixes: Mapping[str, str]) -> str:
    for old, new in prefixes.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def draft_ids_in(config: Eagle3Config | DFlashConfig, where: Path, tensors: Mapping[str, Tensor]) -> Tensor:
    """Target ids [Vd] of the draft vocabulary: from d2t, or without it 0, 1, ... Raises FormatError."""
    ids = torch.arange(config.draft_vocab_size) + tensors.get("d2t", torch.zeros((), dtype=torch.long))
    check_draft_ids(where, ids, config.vocab_size)
    return ids


def check_draft_ids(where: Path, ids: Tensor, vocabulary: int) -> None:
    """Raise FormatError unless the target ids [Vd] of a draft vocabulary are distinct and within the target's."""
    if bool((ids < 0).any()) or bool((ids >= vocabulary).any()):
        raise FormatError(f"{where}: d2t points outside the vocabulary of {vocabulary}")
    # Each id at most once: a token must have one logit.
    times = ids.bincount()
    if bool((times > 1).any()):
        raise FormatError(f"{where}: d2t names token {int(times.argmax())} more than once")


def engine_config(config: Eagle3Config, dtype: str) -> dict[str, Any]:
    """config.json of an EAGLE-3 head as engines expect it."""
    return {
        "architectures": [ARCHITECTURES[0]],
        **layer_entries(config),
        **rope_entries(config),
        "target_hidden_size": config.target_hidden_size,
        "draft_vocab_size": config.draft_vocab_size,
        **{flag: getattr(config, flag) for flag in FLAGS},
        LAYER_IDS: list(config.aux_layers),
        "eagle_config": {"use_aux_hidden_state": True, LAYER_IDS: [layer - 1 for layer in config.aux_layers]},
        **dtype_entries(dtype),
    }


def read_config(path: Path, raw: Mapping[str, Any], target_layers: int | None) -> Eagle3Config:
    """EAGLE-3 config from an engine's config.json. Raises FormatError naming the field."""
    # Variants that we do not compute.
    nested = raw.get("eagle_config") or {}
    if not isinstance(nested, Mapping):
        raise FormatError(f"{path}: eagle_config {nested}: must be an object")
    if raw.get("norm_before_fc") or nested.get("norm_before_fc"):
        raise FormatError(f"{path}: norm_before_fc true: only false is supported")
    if nested.get("use_aux_hidden_state") is False:
        raise FormatError(f"{path}: eagle_config.use_aux_hidden_state false: only true is supported")

    # target_hidden_size is hidden_size, and draft_vocab_size is vocab_size, where they are absent.
    fields = layer_fields(path, raw)
    fields |= {flag: raw[flag] for flag in FLAGS if raw.get(flag) is not None}
    fields["target_hidden_size"] = raw.get("target_hidden_size") or raw.get("hidden_size")
    fields["draft_vocab_size"] = raw.get("draft_vocab_size") or raw.get("vocab_size")
    fields["aux_layers"] = _aux_layers(path, raw.get(LAYER_IDS), nested.get(LAYER_IDS), target_layers)
    return validated(Eagle3Config, path, fields)


def _aux_layers(path: Path, named: Any, nested: Any, target_layers: int | None) -> list[int]:
    """Captured target layers, numbered as transformers' hidden_states. Raises FormatError.

    `named`: of the top level, counted so; `nested`: of eagle_config, one less each.
    """
    # Neither is there: low, middle and high layers of the target.
    if named is None and nested is None:
        if target_layers is None:
            raise FormatError(f"{path}: {LAYER_IDS}: is absent, and the target's number of layers is not known")
        named = [2, target_layers // 2, target_layers - 3]  # what every engine takes then

    # Both are there: they must agree.
    if nested is not None:
        _check_layer_ids(path, f"eagle_config.{LAYER_IDS}", nested, lowest=0)
        shifted = [layer + 1 for layer in nested]
        if named not in (None, shifted):
            raise FormatError(f"{path}: {LAYER_IDS} {named}: must be one more than those of eagle_config, {nested}")
        return shifted

    # Only the top level.
    _check_layer_ids(path, LAYER_IDS, named, lowest=1)
    return list(named)


def _check_layer_ids(path: Path, field: str, found: Any, lowest: int) -> None:
    """Raise FormatError unless `found` is three ascending layers: vLLM sorts them silently, SGLang does not."""
    if not isinstance(found, list) or len(found) != 3 or not all(type(layer) is int for layer in found):
        raise FormatError(f"{path}: {field} {found}: must be three layers")
    if found != sorted(set(found)) or found[0] < lowest:
        raise FormatError(f"{path}: {field} {found}: must be different layers in ascending order, from {lowest} on")


def reduced(config: Eagle3Config) -> bool:
    """Whether the draft vocabulary is smaller than the target's."""
    return config.draft_vocab_size < config.vocab_size


def mapping_specs(config: Eagle3Config | DFlashConfig) -> dict[str, Spec]:
    """Specs of a reduced vocabulary's maps: d2t, target id minus draft id; t2d, which target ids are in it."""
    return {"d2t": Spec((config.draft_vocab_size,), torch.int64), "t2d": Spec((config.vocab_size,), torch.bool)}


def tensor_specs(config: Eagle3Config, layer: str) -> dict[str, Spec]:
    """Specs of every weight that the layout must hold, the decoder layer's under the prefix `layer`."""
    hidden, size = config.hidden_size, config.target_hidden_size
    norms = {f"fc_norm.{index}.weight": Spec((size,)) for index in range(3)} if config.fc_norm else {}
    return {
        "fc.weight": Spec((hidden, 3 * size)),
        **norms,
        f"{layer}input_layernorm.weight": Spec((hidden,)),
        f"{layer}hidden_norm.weight": Spec((hidden,)),
        **layer_specs(config, layer, width=2 * hidden),
        "norm.weight": Spec((hidden,)),
        "lm_head.weight": Spec((config.draft_vocab_size, hidden)),
    }
