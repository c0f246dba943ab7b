"""GGUF files: keys, tensors and order of rows as llama.cpp reads them; what does not fit is refused."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from byte_level import byte_level_tokenizer
from stand_ins import llama, random_eagle3
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from draftforge.errors import FormatError, MissingFileError
from draftforge.specdec.drafts.eagle3 import Eagle3Draft
from draftforge.specdec.formats.gguf.eagle3 import read_eagle3, write_eagle3
from draftforge.specdec.formats.gguf.file import GgufFile, read_gguf, write_gguf
from draftforge.specdec.formats.gguf.llama import read_llama, write_llama
from draftforge.specdec.models import CausalModel

VOCAB = 280
LAYER = ["attn_k", "attn_norm", "attn_output", "attn_q", "attn_v", "ffn_down", "ffn_gate", "ffn_norm", "ffn_up"]
VOCABULARY_KEYS = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.add_bos_token": False,
}


def dimensions(arch: str, layers: int) -> dict[str, Any]:
    return {
        f"{arch}.block_count": layers,
        f"{arch}.context_length": 256,
        f"{arch}.embedding_length": 48,
        f"{arch}.feed_forward_length": 96,
        f"{arch}.attention.head_count": 6,
        f"{arch}.attention.head_count_kv": 2,
        f"{arch}.attention.key_length": 8,
        f"{arch}.attention.value_length": 8,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{arch}.rope.dimension_count": 8,
        f"{arch}.rope.freq_base": 10000.0,
        f"{arch}.vocab_size": VOCAB + 3,
        "general.name": arch,
        "general.file_type": 0,
    }


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_level_tokenizer(
        ["the order of the day: the lamp and the other lamp were sold for seven coins"] * 2, VOCAB
    )


def small(layers: int = 2) -> Any:
    return llama(layers=layers, vocab=VOCAB + 3)  # three rows more than the tokenizer has


def head(draft_vocab: int | None = 40) -> Any:
    draft = random_eagle3(CausalModel(small(4)), draft_vocab)
    for name, weight in draft.named_parameters():
        if "norm" in name:  # new ones are all alike
            torch.nn.init.uniform_(weight, 0.5, 2.0)
    return draft


def without_lists(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if not key.endswith(("tokens", "token_type", "merges"))}


def test_keys_and_tensors_of_an_independent_draft(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    write_llama(small(), tokenizer, tmp_path / "draft.gguf")
    content = read_gguf(tmp_path / "draft.gguf")
    assert content.architecture == "llama"
    assert without_lists(content.fields) == dimensions("llama", 2) | VOCABULARY_KEYS
    layers = [f"blk.{layer}.{name}.weight" for layer in range(2) for name in LAYER]
    assert sorted(content.tensors) == sorted(["token_embd.weight", "output_norm.weight", "output.weight", *layers])
    assert {tensor.dtype for tensor in content.tensors.values()} == {torch.float32}


def test_keys_and_tensors_of_an_eagle3_head(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    draft = head()
    write_eagle3(draft, tokenizer, tmp_path / "draft.gguf")
    content = read_gguf(tmp_path / "draft.gguf")
    assert content.architecture == "eagle3"
    assert without_lists(content.fields) == dimensions("eagle3", 1) | VOCABULARY_KEYS | {
        "eagle3.target_layers": [1, 2, 4],
        "eagle3.target_hidden_size": 48,
        "eagle3.norm_before_residual": False,
        "eagle3.norm_before_fc": False,
    }
    names = [f"blk.0.{name}.weight" for name in [*LAYER, "attn_norm_2"]]
    assert sorted(content.tensors) == sorted(["d2t", "fc.weight", "output_norm.weight", "output.weight", *names])
    assert content.tensors["d2t"].dtype == torch.int64
    assert content.tensors["d2t"].tolist() == draft.draft_ids.tolist()  # absolute, where the folder holds offsets
    assert torch.equal(content.tensors["blk.0.attn_norm.weight"], draft.midlayer.input_layernorm.weight)
    assert torch.equal(content.tensors["blk.0.attn_norm_2.weight"], draft.midlayer.hidden_norm.weight)


def test_a_full_vocabulary_needs_no_d2t(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    write_eagle3(head(None), tokenizer, tmp_path / "draft.gguf")
    assert "d2t" not in read_gguf(tmp_path / "draft.gguf").tensors


def test_tokens_by_id_with_their_kinds_and_unused_rows(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens(["<tool>"])  # id 280
    write_llama(small(), tokenizer, tmp_path / "draft.gguf")
    fields = read_gguf(tmp_path / "draft.gguf").fields
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list) and isinstance(kinds, list)
    assert tokens[:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] and kinds[:3] == [3, 3, 3]
    assert tokens[3:280] == tokenizer.convert_ids_to_tokens(list(range(3, 280))) and set(kinds[3:280]) == {1}
    assert tokens[280:] == ["<tool>", "[PAD281]", "[PAD282]"] and kinds[280:] == [4, 5, 5]
    assert fields["tokenizer.ggml.merges"][0] == "h e"  # type: ignore[index]


def test_each_heads_rows_go_from_halves_to_pairs(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    model = small()
    write_llama(model, tokenizer, tmp_path / "draft.gguf")
    tensors = read_gguf(tmp_path / "draft.gguf").tensors
    attention = model.model.layers[1].self_attn
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    for name, weight, heads in (("q", attention.q_proj.weight, 6), ("k", attention.k_proj.weight, 2)):
        rows = [8 * number + row for number in range(heads) for row in order]
        assert torch.equal(tensors[f"blk.1.attn_{name}.weight"], weight[rows])
    assert torch.equal(tensors["blk.1.attn_v.weight"], attention.v_proj.weight)


@pytest.mark.parametrize("tied", [False, True])
def test_an_independent_draft_reads_back_equal(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, tied: bool) -> None:
    model = small()
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    write_llama(model, tokenizer, tmp_path / "draft.gguf")
    again = read_llama(tmp_path / "draft.gguf")
    ids = torch.tensor([[1, 2, 3, 250]])
    assert ("output.weight" in read_gguf(tmp_path / "draft.gguf").tensors) != tied
    assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize("draft_vocab", [40, None])
@pytest.mark.parametrize("own", [False, True])
def test_an_eagle3_head_reads_back_equal(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, draft_vocab: int | None, own: bool
) -> None:
    draft = head(draft_vocab)
    if own:
        draft.embed_tokens = torch.nn.Embedding(VOCAB + 3, 48)
    write_eagle3(draft, tokenizer, tmp_path / "draft.gguf")
    again = read_eagle3(tmp_path / "draft.gguf")
    assert again.config == draft.config
    assert again.state_dict().keys() == draft.state_dict().keys()
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in draft.state_dict().items())


def test_bfloat16_is_widened_without_loss(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    draft = head().bfloat16()
    write_eagle3(draft, tokenizer, tmp_path / "draft.gguf")
    assert torch.equal(read_eagle3(tmp_path / "draft.gguf").fc.weight, draft.fc.weight.float())


def qwen() -> Any:
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCAB, num_hidden_layers=1, head_dim=8, **sizes))


def configured(**changes: Any) -> Any:
    model = small()
    for name, value in changes.items():
        setattr(model.config, name, value)
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (qwen, "format gguf: Qwen3ForCausalLM: only LlamaForCausalLM can be written"),
        (lambda: configured(attention_bias=True), "format gguf: attention_bias true: only models without biases"),
        (lambda: configured(rope_parameters={"rope_type": "yarn"}), "format gguf: rope_type yarn: only default and"),
        (lambda: llama(layers=1, vocab=VOCAB - 1), "tokenizer: has id 279: the model has 279 rows"),
    ],
)
def test_models_of_another_kind_are_refused_by_name(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, model: Callable[[], Any], message: str
) -> None:
    with pytest.raises(FormatError, match=message):
        write_llama(model(), tokenizer, tmp_path / "draft.gguf")
    assert list(tmp_path.iterdir()) == []


def test_values_that_are_not_finite_are_refused_and_nothing_stays(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    draft = head()
    with torch.no_grad():
        draft.midlayer.mlp.up_proj.weight[1, 1] = float("nan")
    with pytest.raises(FormatError, match=r"blk\.0\.ffn_up\.weight has values that are not finite"):
        write_eagle3(draft, tokenizer, tmp_path / "draft.gguf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("fields", "odd"),
    [
        ({"fc_norm": True}, "fc_norm True"),
        ({"norm_output": True}, "norm_output True"),
        ({"body": "qwen3"}, "body qwen3"),
        ({"num_hidden_layers": 2}, "layers 2"),
        ({"sliding_window": 9}, "sliding_window 9"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"fc_bias": True}, "fc_bias True"),
        ({"aux_layers": (1, 2)}, r"aux_layers \[1, 2\]"),
    ],
)
def test_a_head_that_llamacpp_cannot_run_is_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, fields: dict[str, Any], odd: str
) -> None:
    draft = Eagle3Draft(head().config.model_copy(update=fields), head().draft_ids)
    with pytest.raises(FormatError, match=rf"format gguf: llama\.cpp does not compute {odd}, with which the draft was"):
        write_eagle3(draft, tokenizer, tmp_path / "draft.gguf")


def test_a_tokenizer_that_llamacpp_would_read_otherwise_is_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    lower = copy.deepcopy(tokenizer)
    lower.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(FormatError, match=r"normalizer Lowercase: llama\.cpp has none"):
        write_eagle3(head(), lower, tmp_path / "draft.gguf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.tensors.pop("blk.0.attn_norm_2.weight"), "tensor blk.0.attn_norm_2.weight is missing"),
        (lambda c: c.tensors.update(extra=torch.zeros(2)), "tensor extra is not part of this format"),
        (lambda c: c.tensors.update({"fc.weight": torch.zeros(2, 2)}), r"fc.weight has shape \(2, 2\), must be"),
        (lambda c: c.tensors["d2t"].add_(1000), "d2t points outside the vocabulary of 283"),
        (lambda c: c.fields.pop("eagle3.target_layers"), "key eagle3.target_layers is missing"),
        (lambda c: c.fields.update({"eagle3.target_layers": [1, 2]}), "fc.weight has shape"),
        (lambda c: c.fields.update({"eagle3.norm_before_fc": True}), "tensor enc.output_norm.weight is missing"),
        (lambda c: c.fields.update({"eagle3.block_count": "1", "eagle3.context_length": "9"}), "must be of type int"),
    ],
)
def test_a_reader_refuses_what_does_not_fit(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, change: Callable[[GgufFile], Any], message: str
) -> None:
    write_eagle3(head(), tokenizer, tmp_path / "draft.gguf")
    content = read_gguf(tmp_path / "draft.gguf")
    change(content)
    write_gguf(tmp_path / "draft.gguf", content)
    with pytest.raises(FormatError, match=message):
        read_eagle3(tmp_path / "draft.gguf")


def test_strangers_and_truncated_files_are_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = tmp_path / "draft.gguf"
    with pytest.raises(MissingFileError, match="no such file"):
        read_llama(path)
    write_llama(small(), tokenizer, path)
    with pytest.raises(FormatError, match=r"general\.architecture 'llama': must be 'eagle3'"):
        read_eagle3(path)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(FormatError, match=r"takes 8 bytes, the file has 4 more"):
        read_llama(path)


def test_what_reads_back_different_is_refused_and_the_old_file_stays(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "draft.gguf"
    write_eagle3(head(), tokenizer, path)
    before = path.read_bytes()
    add_tensor = gguf.GGUFWriter.add_tensor
    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", lambda self, name, data: add_tensor(self, name, data + 1))
    with pytest.raises(FormatError, match="reads back different from what was written"):
        write_eagle3(head(), tokenizer, path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
