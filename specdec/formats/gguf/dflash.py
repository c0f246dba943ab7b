"""DFlash and DSpark drafts as GGUF in float32; `d2t` holds target ids, not offsets. q and k keep transformers' order of
rows. llama.cpp knows a DSpark draft by the tensors of its Markov head.

llama.cpp refuses no missing key or tensor that it can do without, so the whole set is checked.
"""

from collections.abc import Collection, Mapping
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ....errors import FormatError
from ...drafts.dflash import DFlashConfig, DFlashDraft
from ...drafts.layers import Llama3Rope
from .. import dflash
from ..eagle3 import check_draft_ids, mapping_specs
from ..llama import validated
from ..tensors import Spec, check_count, check_tensors
from .file import Field, GgufFile, write_gguf
from .llama import (
    LAYER,
    dimensions,
    open_gguf,
    plain_weights,
    read_dimensions,
    scaling_fields,
    take_scaling,
    vocabulary_fields,
)

_NAMES = {"fc.weight": "fc.weight", "enc.output_norm.weight": "hidden_norm.weight", "output_norm.weight": "norm.weight"}
_OWN = {"token_embd.weight": "embed_tokens.weight", "output.weight": "lm_head.weight"}
_LAYER = {**LAYER, "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_DSPARK = {
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    "conf_proj.weight": "confidence_head.proj.weight",
    "conf_proj.bias": "confidence_head.proj.bias",
}
_MARKOV = tuple(_DSPARK)[:2]
_MASK = "tokenizer.ggml.mask_token_id"
_ANCHOR = "dflash.sample_from_anchor"
_FIXED = {"attention.causal": False, "attention.sliding_window": 0, "logit_scale": 0.0}


def is_dspark(names: Collection[str]) -> bool:
    """Whether a file with these tensors holds a DSpark draft."""
    return any(name in names for name in _MARKOV)


def write_dflash(
    draft: DFlashDraft, tokenizer: PreTrainedTokenizerBase, path: Path, hints: Mapping[str, Field] | None = None
) -> None:
    """Write a DFlash draft. `tokenizer`: the target's, whose keys llama.cpp wants in both files. Raises FormatError for
    a draft that llama.cpp cannot run as it was trained."""
    # What llama.cpp would compute differently is refused.
    config, weights = draft.config, draft.state_dict()
    dflash.check_writable(config)
    if config.target_hidden_size != config.hidden_size:
        sizes = f"{config.hidden_size} and {config.target_hidden_size}"
        raise FormatError(f"format gguf: llama.cpp takes a dflash draft to be as wide as its target; {sizes} differ")
    if isinstance(config.rope_scaling, Llama3Rope):
        raise FormatError("format gguf: rope_scaling llama3: llama.cpp does not read its factors in a dflash draft")

    # Tensors under GGUF's names; a reduced vocabulary adds d2t.
    names, expected = _names(config, weights)
    tensors = {name: weights[source] for name, source in names.items()}
    if config.reduced:
        tensors["d2t"] = draft.draft_ids

    # Keys: dimensions, rope scaling, DFlash's own, and the tokenizer.
    fields = dimensions("dflash", config, config.num_hidden_layers, config.rope_theta)
    fields |= scaling_fields("dflash", config.rope_scaling)
    fields |= {
        "dflash.block_size": config.block_size,
        "dflash.target_layers": list(config.aux_layers),
        "dflash.attention.causal": False,
        _ANCHOR: config.sample_from_anchor,
        **({"dflash.has_confidence_head": config.confidence_head} if config.markov_rank else {}),
        **vocabulary_fields(tokenizer, config.vocab_size),
        _MASK: config.mask_token_id,
        **(hints or {}),
    }
    write_gguf(path, GgufFile("dflash", fields, plain_weights(path, tensors, expected)))


def read_dflash(path: Path) -> DFlashDraft:
    """Load a DFlash draft, in float32. Raises FormatError naming the key or tensor that is wrong."""
    # Keys that would change the computation must have our value.
    content = open_gguf(path, "dflash")
    for key, value in _FIXED.items():
        if content.fields.get(f"dflash.{key}", value) != value:
            raise FormatError(f"{path}: dflash.{key} {content.fields[f'dflash.{key}']}: must be {value}")

    # Other drafts than DSpark's never sample from the anchor; those do where no key says otherwise.
    markov = next((content.tensors[name] for name in _MARKOV if name in content.tensors), None)
    anchored = content.get(path, _ANCHOR, bool, markov is not None)
    if anchored and markov is None:
        raise FormatError(f"{path}: {_ANCHOR} True: must be False without a Markov head")

    # The config, part of it from the tensors: d2t's length is the draft vocabulary.
    fields, tensors = read_dimensions(content, path), dict(content.tensors)
    layers, draft_ids = content.get(path, "dflash.block_count", int), tensors.get("d2t")
    check_count(path, "dflash.block_count", layers, tensors)
    fields |= {
        "rope_scaling": take_scaling(content, tensors, path, fields["rope_theta"], fields["head_dim"]),
        "num_hidden_layers": layers,
        "target_hidden_size": fields["hidden_size"],
        "draft_vocab_size": fields["vocab_size"] if draft_ids is None else len(draft_ids),
        "aux_layers": content.get(path, "dflash.target_layers", list),
        "block_size": content.get(path, "dflash.block_size", int),
        "mask_token_id": content.get(path, _MASK, int),
        "sample_from_anchor": anchored,
        "markov_rank": 0 if markov is None else markov.shape[-1],
        "confidence_head": markov is not None and any(name.startswith("conf_proj.") for name in content.tensors),
    }

    # The exact set of tensors, with embeddings and head where the file has them.
    config = validated(DFlashConfig, path, fields)
    names, expected = _names(config, {_OWN[name]: tensor for name, tensor in tensors.items() if name in _OWN})
    check_tensors(path, tensors, expected)
    if draft_ids is not None:
        check_draft_ids(path, draft_ids, config.vocab_size)

    # The module's buffers stay; every weight is replaced.
    draft = DFlashDraft(config, draft_ids, "token_embd.weight" in tensors, "output.weight" in tensors)
    stored = {names[name]: tensor for name, tensor in tensors.items() if name in names}
    draft.load_state_dict(draft.state_dict() | stored)
    return draft.eval()


def _names(config: DFlashConfig, own: dict[str, object]) -> tuple[dict[str, str], dict[str, Spec]]:
    """Names of every weight, GGUF's -> the checkpoint's; and specs of all tensors, by GGUF's name."""
    # Optional weights only where the draft has them; a reduced vocabulary always has a head.
    names = {**_NAMES, **{name: source for name, source in _OWN.items() if source in own}}
    for layer in range(config.num_hidden_layers):
        names |= {f"blk.{layer}.{ours}.weight": f"layers.{layer}.{name}.weight" for ours, name in _LAYER.items()}
    if config.reduced:
        names["output.weight"] = "lm_head.weight"
    heads = list(_DSPARK.items())[: 4 if config.confidence_head else 2 if config.markov_rank else 0]
    names |= dict(heads)

    # Shapes as in the checkpoint's layout.
    specs = {**dflash.tensor_specs(config), **dflash.optional_specs(config)}
    expected = {name: specs[source] for name, source in names.items()}
    return names, expected | ({"d2t": mapping_specs(config)["d2t"]} if config.reduced else {})
