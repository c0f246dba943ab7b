"""Checkpoints read back equal, and incomplete or foreign ones are refused by tensor name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stand_ins import near_copy, random_eagle3, target

from draftforge.errors import FormatError, MissingFileError
from draftforge.specdec.drafts.eagle3 import Eagle3Draft
from draftforge.specdec.formats import DraftMeta, load_draft, read_meta, save_draft

CPU = torch.device("cpu")


def meta(family: Any) -> DraftMeta:
    return DraftMeta(
        family=family,
        target_fingerprint="f" * 64,
        tokenizer_digest="d" * 64,
        step=3,
        draft_tokens=4,
        draftforge_version="0",
    )


@pytest.fixture
def eagle3_folder(tmp_path: Path) -> Path:
    save_draft(random_eagle3(target(), draft_vocab=40), tmp_path / "draft", meta("eagle3"))
    return tmp_path / "draft"


def test_small_reads_back_equal(tmp_path: Path) -> None:
    draft = near_copy(target())
    save_draft(draft, tmp_path / "draft", meta("small"))
    again, found = load_draft(tmp_path / "draft", CPU, torch.float32)
    ids = torch.tensor([[1, 2, 3]])
    assert found == meta("small")
    assert torch.equal(again.logits(again(ids)), draft.logits(draft(ids)))
    assert (tmp_path / "draft" / "model.safetensors").is_file()


def test_eagle3_reads_back_equal(eagle3_folder: Path) -> None:
    again, found = load_draft(eagle3_folder, CPU, torch.float32)
    original = random_eagle3(target(), draft_vocab=40)
    assert found.family == "eagle3"
    assert isinstance(again, Eagle3Draft) and again.config == original.config
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in original.state_dict().items())


def test_eagle3_layout_is_what_engines_read(eagle3_folder: Path) -> None:
    config = json.loads((eagle3_folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["num_hidden_layers"] == 1
    assert config["vocab_size"] == 61 and config["draft_vocab_size"] == 40
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]  # vLLM, llama.cpp
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 3]  # SGLang adds one
    assert config["norm_before_residual"] is False and config["tie_word_embeddings"] is False
    tensors = load_file(eagle3_folder / "model.safetensors")
    assert sorted(tensors) == sorted(
        ["d2t", "fc.weight", "lm_head.weight", "norm.weight", "t2d"]
        + [f"midlayer.{name}.weight" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")]
        + [f"midlayer.mlp.{name}_proj.weight" for name in ("down", "gate", "up")]
        + [f"midlayer.self_attn.{name}_proj.weight" for name in "kovq"]
    )
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    ids = tensors["d2t"] + torch.arange(40)
    assert tensors["t2d"].nonzero()[:, 0].tolist() == ids.tolist()
    assert tuple(tensors["midlayer.self_attn.q_proj.weight"].shape) == (48, 96)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("midlayer.hidden_norm.weight"), "tensor midlayer.hidden_norm.weight is missing"),
        (lambda t: t.update(extra=torch.zeros(1)), "tensor extra is not part of this format"),
        (lambda t: t["norm.weight"].fill_(float("nan")), "tensor norm.weight has values that are not finite"),
        (lambda t: t.update({"norm.weight": torch.ones(7)}), r"norm.weight has shape \(7,\), must be \(48,\)"),
        (lambda t: t["d2t"].add_(1000), "d2t points outside the vocabulary of 61"),
        (lambda t: t["t2d"].fill_(True), "t2d does not mark the ids that d2t names"),
    ],
)
def test_eagle3_refuses_broken_tensor_sets(eagle3_folder: Path, change: Any, message: str) -> None:
    tensors = load_file(eagle3_folder / "model.safetensors")
    change(tensors)
    save_file(tensors, eagle3_folder / "model.safetensors")
    with pytest.raises(FormatError, match=message):
        load_draft(eagle3_folder, CPU, torch.float32)


def test_small_refuses_missing_tensors(tmp_path: Path) -> None:
    save_draft(near_copy(target()), tmp_path / "draft", meta("small"))
    tensors = load_file(tmp_path / "draft" / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, tmp_path / "draft" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FormatError, match=r"missing keys: model.layers.1.mlp.up_proj.weight"):
        load_draft(tmp_path / "draft", CPU, torch.float32)


def test_writer_refuses_values_that_are_not_finite_and_leaves_nothing(tmp_path: Path) -> None:
    draft = random_eagle3(target())
    with torch.no_grad():
        draft.fc.weight[0, 0] = float("inf")
    with pytest.raises(FormatError, match=r"fc\.weight has values that are not finite"):
        save_draft(draft, tmp_path / "draft", meta("eagle3"))
    assert list(tmp_path.iterdir()) == []


def test_refuses_truncated_weights_pickles_and_strangers(tmp_path: Path, eagle3_folder: Path) -> None:
    weights = eagle3_folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(FormatError, match="not a readable safetensors file"):
        load_draft(eagle3_folder, CPU, torch.float32)
    weights.unlink()
    torch.save({}, eagle3_folder / "pytorch_model.bin")
    with pytest.raises(MissingFileError, match=r"model\.safetensors: no such file"):
        load_draft(eagle3_folder, CPU, torch.float32)
    with pytest.raises(MissingFileError, match="no such draft folder"):
        read_meta(tmp_path / "nowhere")
