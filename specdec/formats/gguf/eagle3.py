"""EAGLE-3 heads as GGUF in float32. The layer's tensors are in `blk.0`; `d2t` holds target ids, not offsets."""

from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ....errors import FormatError
from ...drafts.eagle3 import Eagle3Config, Eagle3Draft
from ...engine_features import not_honoured
from .. import eagle3
from ..llama import embedding_specs, validated
from ..tensors import Spec
from .file import Field, GgufFile, write_gguf
from .llama import (
    LAYER,
    dimensions,
    factor_tensors,
    from_ggml,
    open_gguf,
    read_dimensions,
    scaling_fields,
    shapes_of,
    take_scaling,
    to_ggml,
    vocabulary_fields,
)

_NAMES = {
    "fc.weight": "fc.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
    "blk.0.attn_norm_2.weight": "midlayer.hidden_norm.weight",
    **{f"blk.0.{ours}.weight": f"midlayer.{name}.weight" for ours, name in LAYER.items()},
}


_INPUT_NORM = "enc.output_norm.weight"


def write_eagle3(
    draft: Eagle3Draft, tokenizer: PreTrainedTokenizerBase, path: Path, hints: Mapping[str, Field] | None = None
) -> None:
    """Write an EAGLE-3 head. `tokenizer`: the target's, whose keys llama.cpp wants in both files. Raises FormatError
    for a head that llama.cpp cannot run as it was trained."""
    odd = not_honoured("llama.cpp", draft.config)
    if odd is not None:
        raise FormatError(f"format gguf: llama.cpp does not compute {odd}, with which the draft was made")
    config, weights = draft.config, draft.state_dict()

    # Tensors under GGUF's names; a reduced vocabulary adds d2t, Llama 3's scaling its factors.
    names, expected = _names(config, draft.embed_tokens is not None)
    weights = {eagle3.file_name(name, eagle3.LAYER): tensor for name, tensor in weights.items()}
    tensors = {name: weights[source] for name, source in names.items()}
    if eagle3.reduced(config):
        tensors["d2t"] = draft.draft_ids
    factors = factor_tensors(config.rope_theta, config.head_dim, config.rope_scaling)
    tensors |= factors
    expected |= shapes_of(factors)

    # Keys: dimensions, rope scaling, EAGLE-3's own, and the tokenizer.
    fields = dimensions("eagle3", config, 1, config.rope_theta) | scaling_fields("eagle3", config.rope_scaling)
    fields |= {
        "eagle3.target_layers": list(config.aux_layers),
        "eagle3.target_hidden_size": config.target_hidden_size,
        "eagle3.norm_before_residual": config.norm_before_residual,
        "eagle3.norm_before_fc": config.norm_before_fc,
        **vocabulary_fields(tokenizer, config.vocab_size),
        **(hints or {}),
    }
    write_gguf(path, GgufFile("eagle3", fields, to_ggml(path, tensors, expected, config)))


def read_eagle3(path: Path) -> Eagle3Draft:
    """Load an EAGLE-3 head, in float32. Raises FormatError naming the key or tensor that is wrong."""
    # The config, part of it from the tensors: d2t's length is the draft vocabulary.
    content = open_gguf(path, "eagle3")
    fields, tensors = read_dimensions(content, path), dict(content.tensors)
    vocabulary, draft_ids = fields["vocab_size"], tensors.get("d2t")
    fields |= {
        "rope_scaling": take_scaling(content, tensors, path, fields["rope_theta"], fields["head_dim"]),
        "target_hidden_size": content.get(path, "eagle3.target_hidden_size", int),
        "draft_vocab_size": vocabulary if draft_ids is None else len(draft_ids),
        "aux_layers": content.get(path, "eagle3.target_layers", list),
        "norm_before_residual": content.get(path, "eagle3.norm_before_residual", bool, False),
        "norm_before_fc": content.get(path, "eagle3.norm_before_fc", bool, False),
    }

    # The exact set of tensors, q and k back in transformers' order of rows.
    config = validated(Eagle3Config, path, fields)
    own = "token_embd.weight" in content.tensors
    names, expected = _names(config, own)
    tensors = from_ggml(path, tensors, expected, config)

    # d2t holds ids here, from which the module makes its offsets.
    ids = tensors.pop("d2t", None)
    if ids is not None:
        eagle3.check_draft_ids(path, ids, vocabulary)
    draft = Eagle3Draft(config, ids, own_embeddings=own)
    ours = {eagle3.file_name(name, eagle3.LAYER): name for name in draft.state_dict()}
    draft.load_state_dict(draft.state_dict() | {ours[names[name]]: tensor for name, tensor in tensors.items()})
    return draft.eval()


def _names(config: Eagle3Config, own_embeddings: bool) -> tuple[dict[str, str], dict[str, Spec]]:
    """Names of every weight, GGUF's -> the checkpoint's; and specs of all tensors, by GGUF's name."""
    names = _NAMES | ({_INPUT_NORM: "input_norm.weight"} if config.norm_before_fc else {})
    specs = {**eagle3.tensor_specs(config, eagle3.LAYER), **embedding_specs(config)}
    if own_embeddings:
        names["token_embd.weight"] = "embed_tokens.weight"
    expected = {name: specs[source] for name, source in names.items()}
    return names, expected | ({"d2t": eagle3.mapping_specs(config)["d2t"]} if eagle3.reduced(config) else {})
