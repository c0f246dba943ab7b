"""A byte-level BPE tokenizer as the keys that llama.cpp reads.

llama.cpp cuts text into words by rules of its own, chosen by the name in `tokenizer.ggml.pre`: a tokenizer whose rule
has no name here is refused, because the file would load and read other ids.
"""

import json
from typing import Any

import gguf
from transformers import PreTrainedTokenizerBase

from ...errors import FormatError
from ..gguf_tokenizer import adds_bos
from .gguf_file import Field

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"
_REST = "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
_SPLITS = {f"{_CONTRACTIONS}\\p{{N}}{{1,3}}{_REST}": "llama-bpe", f"{_CONTRACTIONS}\\p{{N}}{_REST}": "qwen2"}
_KNOWN = "GPT-2's, SmolLM's, Llama 3's and Qwen 2's"


def vocabulary_fields(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> dict[str, Field]:
    """Every `tokenizer.*` key of a model with `vocab_size` rows. Raises FormatError for another kind of tokenizer."""
    rules = _rules(tokenizer)
    tokens, kinds = _tokens(tokenizer, vocab_size)
    fields: dict[str, Field] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre_tokenizer_name(rules),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in rules["model"]["merges"]],
        "tokenizer.ggml.add_bos_token": adds_bos(tokenizer),
    }
    for name, token in (("bos", tokenizer.bos_token_id), ("eos", tokenizer.eos_token_id)):
        if token is not None:
            fields[f"tokenizer.ggml.{name}_token_id"] = token
    if isinstance(tokenizer.chat_template, str):
        fields["tokenizer.chat_template"] = tokenizer.chat_template
    return fields


def pre_tokenizer_name(rules: dict[str, Any]) -> str:
    """llama.cpp's name for the way in which a tokenizer (as in its tokenizer.json) cuts text into words."""
    steps = rules["pre_tokenizer"] or {}
    steps = steps.get("pretokenizers", [steps])
    kinds = [step.get("type") for step in steps]
    last_splits = steps[-1].get("use_regex", True)
    if steps[-1].get("add_prefix_space"):
        raise FormatError("tokenizer: its pre-tokenizer adds a space before the text: llama.cpp would not")
    if kinds == ["ByteLevel"] and last_splits:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and last_splits and steps[0].get("individual_digits"):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not last_splits and steps[0].get("behavior") == "Isolated":
        name = _SPLITS.get(steps[0]["pattern"].get("Regex", ""))
        # llama.cpp looks whole words up before it merges for the first of them, and never for the other.
        if name is not None and bool(rules["model"].get("ignore_merges")) == (name == "llama-bpe"):
            return name
    raise FormatError(f"tokenizer: its pre-tokenizer {kinds} is none of {_KNOWN}: llama.cpp would read other tokens")


def _rules(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules: dict[str, Any] = json.loads(backend.to_str()) if backend is not None else {}
    model = rules.get("model") or {}
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        kind = f"{model['type']} with byte fallback" if model.get("byte_fallback") else model.get("type", "slow")
        raise FormatError(f"tokenizer: {kind}: only byte-level BPE can be written as GGUF")
    normalizer = (rules.get("normalizer") or {}).get("type")
    if normalizer not in (None, "NFC"):  # llama.cpp has no NFC; Qwen's converted files live with that
        raise FormatError(f"tokenizer: normalizer {normalizer}: llama.cpp has none")
    return rules


def _tokens(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> tuple[list[str], list[int]]:
    """Texts by id and their kinds; rows of the model beyond the tokenizer's are unused."""
    texts = {index: text for text, index in tokenizer.get_vocab().items()}
    if max(texts) >= vocab_size:
        raise FormatError(f"tokenizer: has id {max(texts)}: the model has {vocab_size} rows")
    kinds = [gguf.TokenType.NORMAL if index in texts else gguf.TokenType.UNUSED for index in range(vocab_size)]
    for index, token in tokenizer.added_tokens_decoder.items():
        kinds[index] = gguf.TokenType.CONTROL if token.special else gguf.TokenType.USER_DEFINED
    return [texts.get(index, f"[PAD{index}]") for index in range(vocab_size)], [int(kind) for kind in kinds]
