"""Loading of models and tokenizers by transformers: whole, or refused in one line that names their source.

transformers itself raises whatever its readers raise, prints a report of many lines, and leaves missing weights random.
"""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..errors import DraftforgeError, FormatError, one_line
from ..progress import say
from .expressions import check_tokenizer_expressions

_OURS = (DraftforgeError, MemoryError, torch.OutOfMemoryError)


def load_model(source: str | Path, where: str, only_known: bool = False, **options: Any) -> PreTrainedModel:
    """Load a causal LM with every weight from the files.

    `where` begins the error's line; `only_known`: also refuse files with tensors that the model does not read. Raises
    FormatError.
    """
    # Mismatched shapes are let through here, to be refused below in one line.
    with refused(where):
        model, info = AutoModelForCausalLM.from_pretrained(
            source, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    _check_weights(where, info, ("missing", "mismatched", "unexpected") if only_known else ("missing", "mismatched"))
    if info["unexpected_keys"] and not only_known:
        unread = sorted(info["unexpected_keys"])
        say(f"{where}: {len(unread)} tensors of its files are not part of the model, {unread[0]} for one")
    return model


def load_tokenizer(source: str | Path, where: str, **options: Any) -> PreTrainedTokenizerBase:
    """Load a tokenizer. Raises FormatError, its line beginning with `where`."""
    with refused(where):
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        fast = getattr(tokenizer, "backend_tokenizer", None)
        if fast is not None:
            check_tokenizer_expressions((fast.normalizer, fast.pre_tokenizer, fast.decoder), where)
        return tokenizer


@contextmanager
def refused(where: str) -> Iterator[None]:
    """Turn whatever a reader raises inside into one FormatError, its line beginning with `where`."""
    try:
        yield
    except _OURS:
        raise
    except Exception as error:
        raise FormatError(f"{where}: cannot be loaded: {type(error).__name__}: {one_line(error)}") from error


def _check_weights(where: str, info: dict[str, Any], kinds: tuple[str, ...]) -> None:
    for kind in kinds:
        if info[f"{kind}_keys"]:
            # The first key stands for all; a mismatched one comes with both shapes.
            first = sorted(info[f"{kind}_keys"], key=str)[0]
            name, *shapes = first if isinstance(first, tuple) else (first,)
            sizes = f" (shape {tuple(shapes[0])}, must be {tuple(shapes[1])})" if len(shapes) == 2 else ""
            raise FormatError(f"{where}: the weights do not fit config.json: {kind} keys: {name}{sizes}")


_KINDS = {"llama": "BPE", "gpt2": "BPE", "t5": "Unigram", "bert": "WordPiece"}
_RIGHT_FOR_GEMMA = "5.24"
_START = "tokenizer.ggml."
_NUMBERS = dict(enumerate(("B", "b", "H", "h", "I", "i", "f", "?"))) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


def as_the_file_says(tokenizer: PreTrainedTokenizerBase, path: Path, where: str) -> PreTrainedTokenizerBase:
    """Correct a tokenizer by its GGUF file: begin-of-text is added where the file says so.

    Raises FormatError where transformers made a tokenizer of another kind than the file's.
    """
    # 1) The tokenizer's keys of the file.
    with path.open("rb") as file:
        keys = {name.removeprefix(_START): value for name, value in _keys(file) if name.startswith(_START)}
    # 2) A tokenizer of another kind would give wrong tokens without an error.
    backend = getattr(tokenizer, "backend_tokenizer", None)
    kind, found = keys.get("model"), None if backend is None else type(backend.model).__name__
    if kind in _KINDS and found not in (None, _KINDS[kind]):
        raise FormatError(
            f"{where}: transformers {transformers.__version__} reads its tokenizer ({kind}) as {found}, must be "
            f"{_KINDS[kind]}: its tokens would be wrong; give the model's folder, or transformers "
            f"{_RIGHT_FOR_GEMMA} or later"
        )
    # 3) The begin-of-text token, which transformers may leave out.
    if keys.get("add_bos_token") and not adds_bos(tokenizer):
        tokenizer.add_bos_token = True
    return tokenizer


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer puts its begin-of-text token before a text."""
    return tokenizer.bos_token_id is not None and tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]


def _keys(file: BinaryIO) -> Iterator[tuple[str, Any]]:
    """Read all keys of a GGUF file, lists as None.

    The `gguf` package takes many seconds to keep every token of a large vocabulary.
    """
    _, _, _, count = _read(file, "4sIQQ")
    for _ in range(count):
        name = _string(file)
        (kind,) = _read(file, "I")
        yield name, _value(file, kind)


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(file)
    if kind != _ARRAY:
        return _read(file, _NUMBERS[kind])[0]
    inner, length = _read(file, "IQ")
    # A list is skipped: numbers at once, strings one by one, as each has a length of its own.
    if inner in _NUMBERS:
        file.seek(length * struct.calcsize(_NUMBERS[inner]), 1)
    else:
        for _ in range(length):
            _value(file, inner)
    return None


def _string(file: BinaryIO) -> str:
    (length,) = _read(file, "Q")
    return file.read(length).decode("utf-8", "replace")


def _read(file: BinaryIO, layout: str) -> tuple[Any, ...]:
    return struct.unpack(f"<{layout}", file.read(struct.calcsize(f"<{layout}")))
