"""Checks of a model's folder before transformers reads it: all that it would load, and sizes against the tensors.

transformers loads an adapter that lies in the folder without a word, follows the names in an index wherever they lead,
and makes memory for every weight that config.json asks for, whether a file has it or not.
"""

import itertools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from transformers import AutoConfig, AutoModelForCausalLM

from ..errors import FormatError
from ..storage import lies_inside, read_object, size_text
from .gguf_header import read_header

INDEX_FILE, ADAPTER_FILE, ADAPTER_WEIGHTS = (
    "model.safetensors.index.json",
    "adapter_config.json",
    "adapter_model.safetensors",
)
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tekken.json"),
    *("vocab.*", "merges.*", "*.model", "*.tiktoken", "chat_template.*", "additional_chat_templates/*"),
)
"""Patterns of the files that decide which ids a text has, and which text a conversation."""
_ARGUMENTS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
"""Files of which transformers gives every value to the tokenizer's class, which opens some as files."""
_MOST_TOKENIZER_BYTES, _MOST_ARGUMENTS = 128 << 20, 1 << 20
"""Of a file of a tokenizer, and values of one of arguments: transformers takes a second for 10,000 added tokens."""
_ONE_FILE, _LORA = "model.safetensors", "LORA"
_SLACK_TENSORS, _SLACK_ELEMENTS, _MOST_BUFFERS = 1024, 1 << 20, 1 << 26
_TIED, _PACKED = 2, 16  # a tied head is counted twice while it is made; up to 16 weights share a number
_MOST_LOOPS, _MOST_TENSORS, _MOST_ELEMENTS = 1024, 1 << 18, 1 << 43
"""Layers, experts and heads, tensors and elements that no model has: limits where no files are beside a config."""
_ONE_NUMBER = ("block_count", "embedding_length", "vocab_size")  # of a GGUF file; others may have one for each layer
_RANKS = re.compile(r"r$|rank_pattern\.")
_MOST_ITEMS = 1 << 16  # of the lists that a config's own class makes, for each layer say
_LOOPS = re.compile(
    r"(stage_)?(num|n)_\w*(layer|block|expert|stage|head|codebook|label)s?|\w*_layers?|depth|attention_types"
    r"|first_k_dense_replace"
)


def check_folder(folder: Path, where: str, runs_code: bool = False) -> None:
    """Refuse a folder of which something would be loaded that is no file of it: that no fingerprint covers.

    `where` begins the error's line; `runs_code`: code that came with the model may run. Raises FormatError.
    """
    # 1) Pipes and devices, from which a read may never end. A GGUF file's folder may hold anything else.
    for path in itertools.chain.from_iterable(folder.glob(pattern) for pattern in ("*.safetensors", "*.json")):
        if path.exists() and not path.is_file():
            raise FormatError(f"{where}: {path.name}: must be a regular file")
    # 2) An adapter beside a model, which would be merged into it silently.
    config = folder / "config.json"
    if (folder / ADAPTER_FILE).exists() and (config.exists() or any(folder.glob("*.gguf"))):
        raise FormatError(
            f"{where}: {ADAPTER_FILE} lies beside the model, and would be loaded with it; give each a folder of its "
            "own, and name the adapter in target.adapter"
        )
    # 3) Files that index and configs name.
    check_tokenizer_names(folder, where)
    if not config.is_file():
        return
    raw = read_object(config)
    other = raw.get("transformers_weights")
    for name in [*(indexed_files(folder, where) or []), *([] if other is None else [str(other)])]:
        if Path(name).name != name or Path(name).suffix != ".safetensors":
            raise FormatError(f"{where}: {name}: weights must be *.safetensors files of the folder itself")
    # 4) Code from elsewhere.
    for key, value in _flat(raw):
        if runs_code and "auto_map" in key and "--" in str(value):
            raise FormatError(f"{where}: config.json: {key} {value}: names code of another repository")
        if key.endswith("attn_implementation") and "/" in str(value):
            raise FormatError(f"{where}: config.json: {key} {value}: names code of another repository")


def check_tokenizer_names(folder: Path, where: str) -> None:
    """Refuse a tokenizer_config.json or special_tokens_map.json that names a file of this disk, or another one than
    tokenizer.json: no fingerprint covers what transformers would read there; and links out of the folder, as a draft
    gets a copy of its target's tokenizer; and files that are larger than those of any tokenizer.
    Refuse, too, a config.json whose own class, which the tokenizer's loader makes, would take all memory.

    Raises FormatError."""
    for path in itertools.chain.from_iterable(folder.glob(pattern) for pattern in TOKENIZER_FILES):
        name = path.relative_to(folder)
        if not lies_inside(folder, path):
            raise FormatError(f"{where}: {name}: is a link out of the folder, or no file; put a copy there")
        if (size := path.stat().st_size) > _MOST_TOKENIZER_BYTES:
            raise FormatError(
                f"{where}: {name}: has {size_text(size)}; must be {size_text(_MOST_TOKENIZER_BYTES)} at most"
            )
    path = folder / "tokenizer_config.json"
    named = read_object(path).get("fast_tokenizer_files") if path.is_file() else None
    for name in named if isinstance(named, list) else () if named is None else (named,):
        if name != "tokenizer.json":
            raise FormatError(f"{where}: tokenizer_config.json: fast_tokenizer_files {name}: must be tokenizer.json")
    for path in (folder / name for name in _ARGUMENTS if (folder / name).is_file()):
        for number, (key, value) in enumerate(_flat(read_object(path)), 1):
            if number > _MOST_ARGUMENTS:
                raise FormatError(f"{where}: {path.name}: has more than {_MOST_ARGUMENTS:,} values")
            # pathlib raises for a text that is too long for a name.
            if isinstance(value, str) and os.path.exists(value) and not os.path.isdir(value):  # noqa: PTH110, PTH112
                raise FormatError(f"{where}: {path.name}: {key} {value}: names a file; leave it out")
    if (config := folder / "config.json").is_file():
        _check_loops(read_object(config), _MOST_ITEMS, where, f"must be {_MOST_ITEMS:,} at most")


def _check_loops(config: Any, most: int, where: str, why: str) -> None:
    """Refuse a number of layers, experts or heads above `most`. Raises FormatError."""
    for key, value in _flat(config):
        if type(value) in (int, float) and value > most and _LOOPS.fullmatch(key.rpartition(".")[2]):
            raise FormatError(f"{where}: config.json: {key} {value}: {why}")


def indexed_files(folder: Path, where: str) -> list[str] | None:
    """Names of the weight files that an index names, sorted; None: there is no index, or one file holds all."""
    if (folder / _ONE_FILE).is_file() or not (folder / INDEX_FILE).is_file():
        return None
    named = read_object(folder / INDEX_FILE).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
        raise FormatError(f"{where}: {INDEX_FILE}: weight_map must name a file for each tensor")
    return sorted(set(named.values()))


def weight_paths(folder: Path, where: str) -> list[Path]:
    """Weight files that transformers reads: the only one, those of the index, or all."""
    if (folder / _ONE_FILE).is_file():
        return [folder / _ONE_FILE]
    names = indexed_files(folder, where)
    return sorted(folder.glob("*.safetensors")) if names is None else [folder / name for name in names]


def check_size(folder: Path, where: str, gguf_file: str | None = None, **options: Any) -> None:
    """Refuse a model that asks for far more weights than its files have, before memory is made for them.

    A safetensors model is made on the meta device; of a GGUF file the products of its keys are compared, as
    transformers takes many seconds to make a config of one. Raises FormatError.
    """
    if gguf_file is not None:
        _check_gguf_size(folder / gguf_file, where)
        return
    paths = weight_paths(folder, where)
    if not paths:
        return  # transformers says what is there instead
    # 1) What makes loops, even in a config's own class: no file has more layers than tensors.
    tensors, elements = _stored(paths)
    most = 8 * tensors + _SLACK_TENSORS
    _check_loops(read_object(folder / "config.json"), most, where, f"its files have only {tensors} tensors")
    # 2) The model without memory, ended as soon as it has grown too large.
    config = AutoConfig.from_pretrained(folder, **options)
    packed = getattr(config, "quantization_config", None) is not None
    largest = (_PACKED if packed else _TIED) * elements + _SLACK_ELEMENTS
    with _growing_at_most(most, largest, where, f"its files hold {elements:,}"), torch.device("meta"):
        AutoModelForCausalLM.from_config(config, **options)


@contextmanager
def of_known_size(config: Any, where: str) -> Iterator[None]:
    """Inside, a model without memory may be made of a config alone. Raises FormatError where that asks for more layers
    or weights than any model has."""
    _check_loops(config.to_dict(), _MOST_LOOPS, where, f"must be {_MOST_LOOPS} at most")
    with _growing_at_most(_MOST_TENSORS, _MOST_ELEMENTS, where, "no model has so many"):
        yield


@contextmanager
def of_gguf_size(path: Path, where: str) -> Iterator[None]:
    """Inside, transformers may make the model of a GGUF file. Raises FormatError where that asks for far more weights
    than the file has, whatever keys of it say so."""
    header = read_header(path)
    tensors, elements = 64 * header.tensors + _SLACK_TENSORS, 2 * _TIED * header.elements + _SLACK_ELEMENTS
    with _growing_at_most(tensors, elements, where, f"the file holds {header.elements:,}", path.name):
        yield


def _check_gguf_size(path: Path, where: str) -> None:
    header = read_header(path)

    # Of any prefix: transformers knows some architectures by two names.
    def read(name: str) -> int:
        found = {key: value for key, value in header.keys.items() if key.partition(".")[2] == name}
        for key, value in found.items():
            if type(value) is not int and name in _ONE_NUMBER:
                raise FormatError(f"{where}: {key} {str(value)[:40]}: must be a whole number")
        return max((value for value in found.values() if type(value) is int), default=1)

    # Each product is a part of the model's weights, so it can't be more than all of them.
    layers, width = read("block_count"), read("embedding_length")
    parts = {
        "block_count": layers * width,
        "feed_forward_length": layers * width * read("feed_forward_length"),
        "attention.head_count": width * read("attention.head_count") * read("attention.key_length"),
        "vocab_size": width * read("vocab_size"),
    }
    for name, elements in parts.items():
        if elements > _TIED * header.elements + _SLACK_ELEMENTS:
            raise FormatError(
                f"{where}: {name} {read(name)}: asks for {elements:,} weights or more, the file holds "
                f"{header.elements:,}"
            )


def check_adapter(folder: Path, where: str) -> None:
    """Refuse an adapter of another kind than LoRA, of which some load models from wherever their config says or make
    memory that no file fills; a module of Python that it names; and a rank that none of its tensors has.

    Raises FormatError."""
    known = read_object(folder / ADAPTER_FILE)
    if known.get("peft_type") != _LORA:
        raise FormatError(f"{where}: {ADAPTER_FILE}: peft_type {str(known.get('peft_type'))[:80]}: must be {_LORA}")
    if known.get("megatron_config"):
        raise FormatError(f"{where}: {ADAPTER_FILE}: megatron_config: names a module of Python; must be absent")
    with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as file:
        largest = max((size for name in file.keys() for size in file.get_slice(name).get_shape()), default=0)  # noqa: SIM118
    for key, value in _flat(known):
        if type(value) is int and value > largest and _RANKS.match(key):
            raise FormatError(f"{where}: {ADAPTER_FILE}: {key} {value}: its largest tensor has {largest} rows")


def _stored(paths: list[Path]) -> tuple[int, int]:
    """Number of tensors in some files, and of their elements."""
    tensors = elements = 0
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensors += 1
                elements += torch.Size(file.get_slice(name).get_shape()).numel()
    return tensors, elements


@contextmanager
def _growing_at_most(tensors: int, elements: int, where: str, why: str, what: str = "config.json") -> Iterator[None]:
    """Inside, raise FormatError as soon as the modules that are made have more parameters than these."""
    made, kept = [0, 0], [0]
    seen: dict[int, nn.Parameter] = {}  # a tied parameter is registered once more, and takes no room again

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is None or not parameter.is_meta or id(parameter) in seen:
            return
        seen[id(parameter)] = parameter
        made[0], made[1] = made[0] + 1, made[1] + parameter.numel()
        if made[0] > tensors or made[1] > elements:
            size = size_text(4 * made[1])
            raise FormatError(f"{where}: {what} asks for {made[1]:,} weights or more ({size} in float32), {why}")

    def count_buffer(module: nn.Module, name: str, buffer: torch.Tensor | None) -> None:
        # Tables of positions and masks, which no file holds.
        if buffer is None or not buffer.is_meta:
            return
        kept[0] += buffer.numel()
        if kept[0] > elements + _MOST_BUFFERS:
            raise FormatError(f"{where}: {what} asks for {name} of {buffer.numel():,} numbers or more, {why}")

    handles = [
        register_module_parameter_registration_hook(count),
        register_module_buffer_registration_hook(count_buffer),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Plain values of a config, with dotted keys."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for inner in value:
            yield from _flat(inner, key)
    else:
        yield key, value
