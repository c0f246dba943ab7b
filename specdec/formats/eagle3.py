"""EAGLE-3 heads in the layout that vLLM and SGLang both read, the original project's as safetensors, and what other
trainers write: tensors and their names. The config is `eagle3_config.py`'s."""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ...errors import FormatError
from ...storage import read_object, write_json
from ..drafts.dflash import DFlashConfig
from ..drafts.eagle3 import Eagle3Config, Eagle3Draft
from ..drafts.peagle import PEagleDraft
from .eagle3_config import MASK, engine_config, mask_token, read_config
from .llama import embedding_specs, layer_specs, without_frequencies
from .tensors import WEIGHTS_FILE, Spec, Stored, check_count, check_tensors, present, read_tensors, write_tensors

# Prefixes of the first decoder layer, in our module as in the original layout, and in others.
LAYER, OTHER_LAYER = "midlayer.", "layers.0."
_NUMBERED = re.compile(r"midlayer\.(?=\d)")  # TensorRT-LLM's several layers
_OURS, _THEIRS = "later_layers.", "layers."  # of the others, ours counted from 0, theirs from 1
_NORMS = {"fc.norms.": "fc_norm.", "fc.input_norm.": "input_norm."}


def write(draft: Eagle3Draft, folder: Path) -> None:
    """Write config.json and model.safetensors."""
    # SGLang norms the input of later layers by hidden_norm, vLLM by input_layernorm: both are there.
    one = draft.config.num_hidden_layers == 1
    dtype = write_weights(draft, folder, LAYER if one else OTHER_LAYER, both_norms=True)
    write_json(folder / "config.json", engine_config(draft.config, dtype))


def write_weights(draft: Eagle3Draft, folder: Path, layer: str, both_norms: bool = False) -> str:
    """Write model.safetensors, the first decoder layer's tensors under the prefix `layer`. Returns the weights' dtype.

    A draft of the whole vocabulary has no d2t and t2d: vLLM and `speculators` have no place for them there.
    `both_norms`: later layers have their first norm under two names.
    """
    # Our names to the file's.
    config = draft.config
    tensors = {file_name(name, layer): tensor for name, tensor in draft.state_dict().items()}
    specs = {**tensor_specs(config, layer), **(mapping_specs(config) if reduced(config) else {})}
    if both_norms:
        again = _second_norms(config)
        tensors |= {second: tensors[first] for second, first in again.items()}
        specs |= {second: specs[first] for second, first in again.items()}

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
    stored = read_tensors(folder)
    raw = read_object(path)
    return load(read_config(path, raw, stored.tensors, target_layers), stored, mask_token(path, raw, stored.tensors))


def load(config: Eagle3Config, stored: Stored, mask_token_id: int | None = None) -> Eagle3Draft:
    """EAGLE-3 head from its config and tensors; with a mask token a P-EAGLE head.

    Raises FormatError naming the tensor that is wrong.
    """
    # 1) Check the tensors; either prefix of the first decoder layer is read. The number of layers first: specs are made
    # for each.
    where = stored.where
    tensors = {_NUMBERED.sub(_THEIRS, name): tensor for name, tensor in stored.tensors.items()}
    if len(tensors) < len(stored.tensors):
        raise FormatError(f"{where}: holds a layer twice, as midlayer.0 and as layers.0")
    check_count(where, "num_hidden_layers", config.num_hidden_layers, tensors)
    layer = LAYER if any(name.startswith(LAYER) for name in tensors) else OTHER_LAYER
    tensors = _plain(config, layer, where, tensors)
    mapping = mapping_specs(config)
    specs = {**tensor_specs(config, layer), **present({**embedding_specs(config), **mapping}, tensors)}
    if mask_token_id is not None:
        specs[MASK] = Spec((1, 1, len(config.aux_layers) * config.target_hidden_size))
    if reduced(config):
        specs["d2t"] = mapping["d2t"]  # t2d says nothing that d2t does not, and engines do not read it
    check_tensors(where, tensors, specs)

    # 2) Build the module. A head of the whole vocabulary gets the target's order.
    ids = draft_ids_in(config, where, tensors)
    if not reduced(config):
        tensors["lm_head.weight"] = tensors["lm_head.weight"][ids.argsort()]
        ids, _ = ids.sort()
    own = "embed_tokens.weight" in tensors
    draft = Eagle3Draft(config, ids, own) if mask_token_id is None else PEagleDraft(config, mask_token_id, ids, own)
    check_marks(where, draft.t2d, tensors)

    # 3) The file's names to ours; buffers follow from the ids.
    kept = {name: tensor for name, tensor in draft.state_dict().items() if name in mapping}
    names = {file_name(name, layer): name for name in draft.state_dict()}
    ours = {names[name]: tensor for name, tensor in tensors.items() if name not in mapping}
    draft.load_state_dict({**ours, **kept})
    return draft.to(tensors["lm_head.weight"].dtype)


def _plain(config: Eagle3Config, layer: str, where: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A file's tensors without what says nothing: tables of rotary frequencies, second norms, biases of zeros; maps in
    our dtypes.

    Raises FormatError where such a tensor says something else than the head computes.
    """
    found = without_frequencies(config, where, our_maps(where, tensors))
    if MASK in found:
        found[MASK] = found[MASK].reshape(1, 1, -1)

    # Later layers' first norm has two names; where both are there, engines must take the same.
    for second, first in _second_norms(config).items():
        norm = found.pop(second, None)
        if norm is not None and not torch.equal(found.setdefault(first, norm), norm):
            raise FormatError(f"{where}: tensor {second} is not {first}: vLLM reads the one, SGLang the other")

    # Qwen 2's attention has no bias after it, ours all or none.
    for prefix in _prefixes(config, layer) if config.attention_bias else ():
        weight = found.get(f"{prefix}self_attn.o_proj.weight")
        if weight is not None and weight.dim() == 2:
            found.setdefault(f"{prefix}self_attn.o_proj.bias", weight.new_zeros(weight.shape[0]))
    return found


def file_name(name: str, layer: str) -> str:
    """Name in a file of one of our tensors; `layer`: the file's prefix of the first decoder layer."""
    if name.startswith(_OURS):
        number, _, rest = name.removeprefix(_OURS).partition(".")
        return f"{_THEIRS}{int(number) + 1}.{rest}"
    for ours, theirs in {LAYER: layer, **_NORMS}.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def _prefixes(config: Eagle3Config, layer: str) -> list[str]:
    """The file's prefixes of all decoder layers."""
    return [layer, *(f"{_THEIRS}{number}." for number in range(1, config.num_hidden_layers))]


def _second_norms(config: Eagle3Config) -> dict[str, str]:
    """Second names of later layers' first norms -> their first names."""
    return {f"{layer}hidden_norm.weight": f"{layer}input_layernorm.weight" for layer in _prefixes(config, LAYER)[1:]}


def our_maps(where: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A file's tensors with d2t and t2d in our dtypes: other projects store them as int32 or uint8."""
    found = dict(tensors)
    for name, dtype in (("d2t", torch.int64), ("t2d", torch.bool)):
        values = found.get(name)
        if values is None or values.is_floating_point() or values.is_complex():
            continue
        if dtype is torch.bool and bool(((values != 0) & (values != 1)).any()):
            raise FormatError(f"{where}: tensor t2d has values other than 0 and 1")
        found[name] = values.to(dtype)
    return found


def check_marks(where: Path, t2d: Tensor, tensors: Mapping[str, Tensor]) -> None:
    """Raise FormatError unless a file's t2d, if it has one, is the one that its d2t makes."""
    if "t2d" in tensors and not torch.equal(t2d, tensors["t2d"]):
        raise FormatError(f"{where}: t2d does not mark the ids that d2t names")


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


def reduced(config: Eagle3Config) -> bool:
    """Whether the draft vocabulary is smaller than the target's."""
    return config.draft_vocab_size < config.vocab_size


def mapping_specs(config: Eagle3Config | DFlashConfig) -> dict[str, Spec]:
    """Specs of a reduced vocabulary's maps: d2t, target id minus draft id; t2d, which target ids are in it."""
    return {"d2t": Spec((config.draft_vocab_size,), torch.int64), "t2d": Spec((config.vocab_size,), torch.bool)}


def tensor_specs(config: Eagle3Config, layer: str) -> dict[str, Spec]:
    """Specs of every weight that the layout must hold, the first decoder layer's under the prefix `layer`."""
    hidden = Spec((config.hidden_size,))
    specs = {f"{layer}hidden_norm.weight": hidden, "norm.weight": hidden}
    for number, prefix in enumerate(_prefixes(config, layer)):
        specs[f"{prefix}input_layernorm.weight"] = hidden
        specs |= layer_specs(config, prefix, (1 if number else 2) * config.hidden_size, config.attention_bias)
        if config.body == "qwen3":
            specs |= {f"{prefix}self_attn.{name}_norm.weight": Spec((config.head_dim,)) for name in "qk"}
    return specs | _fusion_specs(config) | {"lm_head.weight": Spec((config.draft_vocab_size, config.hidden_size))}


def _fusion_specs(config: Eagle3Config) -> dict[str, Spec]:
    """Specs of fc and the norms before it."""
    count, size = len(config.aux_layers), config.target_hidden_size
    specs = {"fc.weight": Spec((config.hidden_size, count * size))} if count else {}
    if config.fc_bias:
        specs["fc.bias"] = Spec((config.hidden_size,))
    if config.norm_before_fc:
        specs["input_norm.weight"] = Spec((count * size,))
    return specs | ({f"fc_norm.{at}.weight": Spec((size,)) for at in range(count)} if config.fc_norm else {})
