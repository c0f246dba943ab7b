"""EAGLE-1 and EAGLE-2 heads in the layouts of vLLM and of SGLang: each engine refuses the other's architecture name.

SGLang's fc has a bias and keeps random numbers where the file brings none, so zeros are written for it. vLLM drops a
bias and refuses an `lm_head`.
"""

from pathlib import Path
from typing import Literal

import torch

from ...errors import FormatError
from ...storage import read_object, write_json
from ..drafts.eagle import EagleConfig, EagleDraft
from .llama import (
    dtype_entries,
    embedding_specs,
    layer_entries,
    layer_fields,
    layer_specs,
    rope_entries,
    validated,
    without_frequencies,
)
from .tensors import WEIGHTS_FILE, Spec, check_tensors, present, read_tensors, write_tensors

ARCHITECTURES = {"vllm": "EagleLlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}
_BIAS = "fc.bias"


def write(draft: EagleDraft, folder: Path, engine: Literal["vllm", "sglang"]) -> None:
    """Write config.json and model.safetensors for one engine."""
    # Embeddings only if the draft has its own; SGLang's zero bias.
    tensors, specs = dict(draft.state_dict()), tensor_specs(draft.config)
    if draft.embed_tokens is not None:
        specs |= embedding_specs(draft.config)
    if engine == "sglang":
        tensors[_BIAS] = torch.zeros_like(draft.fc.weight[:, 0])
        specs |= _bias_specs(draft.config)
    dtype = write_tensors(folder / WEIGHTS_FILE, tensors, specs)

    # The architecture's name decides which engine takes the folder.
    config = {
        "architectures": [ARCHITECTURES[engine]],
        **layer_entries(draft.config),
        **rope_entries(draft.config),
        "bias": engine == "sglang",
        **dtype_entries(dtype),
    }
    write_json(folder / "config.json", config)


def read(folder: Path) -> EagleDraft:
    """Load an EAGLE head from a folder of either layout, or of the original project's as safetensors."""
    # Embeddings and bias may be there.
    path = folder / "config.json"
    config = validated(EagleConfig, path, layer_fields(path, read_object(path)))
    where, tensors = read_tensors(folder)
    tensors = without_frequencies(config, where, tensors)
    optional = present({**embedding_specs(config), **_bias_specs(config)}, tensors)
    check_tensors(where, tensors, {**tensor_specs(config), **optional})

    # A bias of zeros is the same as none.
    bias = tensors.pop(_BIAS, None)
    if bias is not None and bool(bias.any()):
        raise FormatError(f"{where}: tensor {_BIAS} has values other than 0: heads with a bias are not supported")

    # Weights decide the dtype.
    draft = EagleDraft(config, own_embeddings="embed_tokens.weight" in tensors)
    draft.load_state_dict(tensors)
    return draft.to(tensors["fc.weight"].dtype)


def tensor_specs(config: EagleConfig) -> dict[str, Spec]:
    """Specs of every tensor that both layouts must hold."""
    fc = {"fc.weight": Spec((config.hidden_size, 2 * config.hidden_size))}
    return {**fc, **layer_specs(config, "layers.0.", width=config.hidden_size)}


def _bias_specs(config: EagleConfig) -> dict[str, Spec]:
    return {_BIAS: Spec((config.hidden_size,))}
