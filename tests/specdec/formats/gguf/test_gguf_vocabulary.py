"""llama.cpp cuts text into the same ids as the tokenizer whose keys we wrote; a rule it does not have is refused."""

from pathlib import Path
from typing import Any

import pytest
from byte_level import byte_level_tokenizer
from llamacpp import LlamaServer
from stand_ins import llama
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from draftforge.errors import FormatError
from draftforge.specdec.formats.gguf.llama import vocabulary_fields, write_llama

VOCAB = 420
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEXTS = [
    "It's 12345 o'clock; WE'LL see 7 or 42 or 2024-11-28, won't we?\n\n",
    "  two spaces,\ttabs\t\tand   trailing blanks   \n   indented\n\n\n",
    "f(x) == {'a': [1, 22, 333]}; // naïve café Übermut, 東京 и Москва 🙂🙂",
    "columns:  1  22   333\n  4    5\n",
    "don'T SHOUT'S 100000 1000 100 10 1 x86_64 v2.0.1",
]


def digits() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level()])


def split(numbers: str) -> Any:
    pattern = Regex(CONTRACTIONS + numbers + REST)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), byte_level(use_regex=False)])


def byte_level(**options: Any) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, **options)


KINDS = {"gpt-2": byte_level(), "smollm": digits(), "llama-bpe": split(r"\p{N}{1,3}"), "qwen2": split(r"\p{N}")}


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    tokenizer = byte_level_tokenizer(TEXTS * 2, VOCAB, KINDS[name])
    tokenizer.backend_tokenizer.model.ignore_merges = name == "llama-bpe"
    return tokenizer


@pytest.mark.parametrize("name", sorted(KINDS))
def test_llamacpp_reads_the_same_ids(name: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(name)
    assert vocabulary_fields(tokenizer, VOCAB)["tokenizer.ggml.pre"] == name
    write_llama(llama(layers=1, vocab=VOCAB), tokenizer, tmp_path / "model.gguf")
    server = LlamaServer(tmp_path / "model.gguf")
    for text in [*TEXTS, *(line[::-1] for line in TEXTS)]:
        found = server.post("/tokenize", {"content": text, "add_special": True})["tokens"]
        assert found == tokenizer(text).input_ids
    chat = "<|im_start|>user\nhi<|im_end|>"
    assert server.post("/tokenize", {"content": chat, "parse_special": True})["tokens"] == tokenizer(chat).input_ids


def test_the_rules_differ_on_these_texts() -> None:
    ids = {name: [tuple(tokenizer_of(name)(text).input_ids) for text in TEXTS] for name in KINDS}
    assert len({tuple(found) for found in ids.values()}) == len(KINDS)


def test_bos_is_added_where_the_tokenizer_adds_it(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("llama-bpe")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    assert tokenizer("a").input_ids[0] == 1
    write_llama(llama(layers=1, vocab=VOCAB), tokenizer, tmp_path / "model.gguf")
    found = LlamaServer(tmp_path / "model.gguf").post("/tokenize", {"content": TEXTS[0], "add_special": True})
    assert found["tokens"] == tokenizer(TEXTS[0]).input_ids


@pytest.mark.parametrize(
    ("rule", "kinds"),
    [
        (split(r"\p{N}{1,2}"), r"\['Split', 'ByteLevel'\]"),
        (pre_tokenizers.Whitespace(), r"\['Whitespace'\]"),
        (pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), byte_level()]), r"\['Punctuation', 'ByteLevel'\]"),
        (byte_level(use_regex=False), r"\['ByteLevel'\]"),
    ],
)
def test_other_rules_are_refused_by_name(rule: Any, kinds: str) -> None:
    tokenizer = byte_level_tokenizer(TEXTS, 300, rule)
    with pytest.raises(FormatError, match=f"its pre-tokenizer {kinds} is none of GPT-2's"):
        vocabulary_fields(tokenizer, 300)


def test_a_prefix_space_and_other_models_are_refused() -> None:
    with pytest.raises(FormatError, match="adds a space before the text"):
        vocabulary_fields(byte_level_tokenizer(TEXTS, 300, pre_tokenizers.ByteLevel(add_prefix_space=True)), 300)
    for model, name in ((models.WordLevel({"a": 0}), "WordLevel"), (models.BPE(byte_fallback=True), "BPE with byte")):
        with pytest.raises(FormatError, match=f"tokenizer: {name}.*: only byte-level BPE"):
            vocabulary_fields(PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model)), 300)
