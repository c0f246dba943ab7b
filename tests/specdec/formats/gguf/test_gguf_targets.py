"""Targets as GGUF files: their tokenizers read what the files' own engine reads, or are refused."""

from pathlib import Path
from typing import Any

import gguf
import pytest
from byte_level import byte_level_tokenizer
from stand_ins import llama
from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from draftforge.errors import FormatError
from draftforge.specdec.formats.gguf.layouts import write_llama
from draftforge.specdec.loading import as_the_file_says
from draftforge.specdec.target_settings import TargetSettings
from draftforge.specdec.targets import Target

TEXTS = ["the order of the day: the lamp and the other lamp were sold for seven coins"] * 2


def file_of(path: Path, kind: str, adds_bos: bool) -> Path:
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_tokenizer_model(kind)
    writer.add_add_bos_token(adds_bos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def pieces() -> PreTrainedTokenizerFast:
    """As transformers 5.17 makes one of Gemma's vocabulary."""
    model: Any = models.Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -2.0)], unk_id=0)
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), bos_token="<bos>")


def test_merges_by_score_read_as_likeliest_pieces_are_refused(tmp_path: Path) -> None:
    message = r"^target\.model: m: transformers \S+ reads its tokenizer \(llama\) as Unigram, must be BPE: its tokens"
    with pytest.raises(FormatError, match=message) as refused:
        as_the_file_says(pieces(), file_of(tmp_path / "m.gguf", "llama", True), "target.model: m")
    assert "\n" not in str(refused.value)
    as_the_file_says(pieces(), file_of(tmp_path / "t5.gguf", "t5", False), "target.model: m")


@pytest.mark.parametrize("adds_bos", [False, True])
def test_the_first_token_is_as_the_file_says(adds_bos: bool, tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(TEXTS, 280)
    plain = tokenizer("the lamp").input_ids
    path = file_of(tmp_path / "m.gguf", "gpt2", adds_bos)
    for _ in range(2):  # once is enough, and again changes nothing
        tokenizer = as_the_file_says(tokenizer, path, "target.model: m")
        assert tokenizer("the lamp").input_ids == ([1, *plain] if adds_bos else plain)
        assert tokenizer("the lamp", add_special_tokens=False).input_ids == plain


@pytest.mark.parametrize("adds_bos", [False, True])
def test_a_target_reads_what_was_written(adds_bos: bool, tmp_path: Path) -> None:
    tokenizer, path = byte_level_tokenizer(TEXTS, 280), tmp_path / "target.gguf"
    if adds_bos:
        first = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
        tokenizer.backend_tokenizer.post_processor = first
    write_llama(llama(vocab=283), tokenizer, path)
    target = Target.load(TargetSettings(model=str(path), device="cpu", dtype="float32"))
    for text in ("the lamp", "seven<|im_end|> coins", ""):
        assert target.tokenizer(text).input_ids == tokenizer(text).input_ids
    assert (target.tokenizer("the lamp").input_ids[0] == 1) == adds_bos
