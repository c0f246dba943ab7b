"""The tokenizer that transformers makes of a GGUF file must read what the file's own engine reads.

Some releases turn a vocabulary whose tokens are merged by score (`llama`, as Gemma's and Llama 2's) into one of the
likeliest pieces, which cuts words otherwise and forgets the control tokens; some leave out a first token that the file
asks for.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import transformers
from transformers import PreTrainedTokenizerBase

from ..errors import FormatError

_KINDS = {"llama": "BPE", "gpt2": "BPE", "t5": "Unigram", "bert": "WordPiece"}
_RIGHT_FOR_GEMMA = "5.24"
_START = "tokenizer.ggml."
_NUMBERS = dict(enumerate(("B", "b", "H", "h", "I", "i", "f", "?"))) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


def as_the_file_says(tokenizer: PreTrainedTokenizerBase, path: Path, where: str) -> PreTrainedTokenizerBase:
    """The tokenizer, with the file's first token. Raises FormatError where it is of another kind than the file's."""
    with path.open("rb") as file:
        keys = {name.removeprefix(_START): value for name, value in _keys(file) if name.startswith(_START)}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    kind, found = keys.get("model"), None if backend is None else type(backend.model).__name__
    if kind in _KINDS and found not in (None, _KINDS[kind]):
        raise FormatError(
            f"{where}: transformers {transformers.__version__} reads its tokenizer ({kind}) as {found}, must be "
            f"{_KINDS[kind]}: its tokens would be wrong; give the model's folder, or transformers "
            f"{_RIGHT_FOR_GEMMA} or later"
        )
    if keys.get("add_bos_token") and not adds_bos(tokenizer):
        tokenizer.add_bos_token = True
    return tokenizer


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a text's tokens begin with one that says so."""
    return tokenizer.bos_token_id is not None and tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]


def _keys(file: BinaryIO) -> Iterator[tuple[str, Any]]:
    """All keys, lists as None: the `gguf` package takes many seconds to keep every token of a large vocabulary."""
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
