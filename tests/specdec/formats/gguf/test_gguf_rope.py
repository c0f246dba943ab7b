"""EAGLE-3 heads with scaled rotary embeddings as GGUF: the keys that llama.cpp reads, or a refusal in one line."""

from pathlib import Path
from typing import Any

import heads
import pytest
import torch
from byte_level import byte_level_tokenizer
from transformers import PreTrainedTokenizerFast

from draftforge.errors import FormatError
from draftforge.specdec.drafts.layers import frequencies
from draftforge.specdec.formats.gguf.eagle3 import read_eagle3, write_eagle3
from draftforge.specdec.formats.gguf.file import GgufFile, read_gguf, write_gguf
from draftforge.specdec.formats.gguf.llama import ROPE_FACTORS, take_scaling

VOCAB = 280
USUAL_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
KEYS: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "plain": (None, {}),
    "linear": (heads.SCALINGS["linear"], {"type": "linear", "factor": 4.0}),
    "yarn": (USUAL_YARN, {"type": "yarn", "factor": 4.0, "original_context_length": 64}),
    "llama3": (heads.SCALINGS["llama3"], {}),
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_level_tokenizer(["seven coins for a lamp"], VOCAB)


@pytest.mark.parametrize("kind", KEYS)
def test_keys_of_a_scaling_read_back(kind: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    scaling, keys = KEYS[kind]
    draft, path = heads.eagle3(280, vocab_size=VOCAB, rope_scaling=scaling), tmp_path / "draft.gguf"
    write_eagle3(draft, tokenizer, path)
    content, start = read_gguf(path), "eagle3.rope.scaling."
    assert {k.removeprefix(start): v for k, v in content.fields.items() if k.startswith(start)} == keys
    assert ("rope_freqs.weight" in content.tensors) == (kind == "llama3")
    assert read_eagle3(path).config == draft.config
    if kind == "llama3":
        divided = frequencies(10000.0, 8, None) / content.tensors["rope_freqs.weight"]
        torch.testing.assert_close(divided, frequencies(10000.0, 8, draft.config.rope_scaling))


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (heads.SCALINGS["longrope"], "format gguf: rope_scaling longrope: cannot be written"),
        (
            {**USUAL_YARN, "beta_fast": 16.0},
            "format gguf: rope_scaling yarn: beta_fast 16 and beta_slow 1: llama.cpp computes 32",
        ),
    ],
)
def test_what_llamacpp_would_compute_otherwise_is_refused(
    scaling: dict[str, Any], message: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    with pytest.raises(FormatError, match=message):
        write_eagle3(heads.eagle3(280, vocab_size=VOCAB, rope_scaling=scaling), tokenizer, tmp_path / "draft.gguf")
    assert not list(tmp_path.iterdir())


def test_a_scaling_of_another_kind_is_refused(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = tmp_path / "draft.gguf"
    write_eagle3(heads.eagle3(280, vocab_size=VOCAB), tokenizer, path)
    content = read_gguf(path)
    write_gguf(path, GgufFile("eagle3", content.fields | {"eagle3.rope.scaling.type": "longrope"}, content.tensors))
    with pytest.raises(FormatError, match=r"eagle3\.rope\.scaling\.type longrope: must be none, linear or yarn"):
        read_eagle3(path)


@pytest.mark.parametrize("factors", [[1.0, 0.5, 1.0, 0.25], [0.0] * 4, [-8.0, 1.0, 8.0, 8.0]])
def test_factors_of_nobodys_scaling_are_refused(factors: list[float]) -> None:
    content = GgufFile("llama", {}, {})
    with pytest.raises(FormatError, match=r"x\.gguf: tensor rope_freqs\.weight: is not a rope scaling"):
        take_scaling(content, {ROPE_FACTORS: torch.tensor(factors)}, Path("x.gguf"), 10000.0, 8)
