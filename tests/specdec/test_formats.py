"""Draft folders of our own: every family is saved and loaded with its lineage, and written again in other formats."""

import json
from pathlib import Path
from typing import Any

import heads
import pytest
import torch
from safetensors.torch import load_file, save_file
from stand_ins import DEEP, near_copy, random_eagle3, target

from draftforge.errors import FormatError, MissingFileError
from draftforge.specdec.drafts import DraftModule
from draftforge.specdec.drafts.small import SmallDraft
from draftforge.specdec.formats import (
    DraftMeta,
    Format,
    Verifier,
    convert_draft,
    detect,
    load_draft,
    read_meta,
    save_draft,
)

CPU = torch.device("cpu")
VERIFIER = Verifier("owner/model", ["LlamaForCausalLM"])


def meta(family: Any) -> DraftMeta:
    return DraftMeta(
        family=family,
        target_fingerprint="f" * 64,
        tokenizer_digest="d" * 64,
        step=3,
        draft_tokens=4,
        draftforge_version="0",
    )


def same(one: DraftModule, other: DraftModule) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture
def eagle3_folder(tmp_path: Path) -> Path:
    save_draft(heads.eagle3(40), tmp_path / "draft", meta("eagle3"))
    return tmp_path / "draft"


@pytest.mark.parametrize(
    "draft",
    [
        near_copy(target(4)),
        heads.eagle(True),
        heads.eagle3(),
        heads.eagle3(40, fc_norm=True),
        heads.eagle3(40, **DEEP),
        heads.eagle3(aux_layers=(), num_hidden_layers=4),
        heads.eagle3(own_embeddings=True, target_hidden_size=20, aux_layers=(1, 2, 3, 5), attention_bias=True),
        heads.medusa(True, 2),
        heads.dflash(40),
        heads.dspark(40),
        heads.dspark(sample_from_anchor=False, confidence_head=False),
    ],
    ids=lambda draft: draft.family,
)
def test_every_family_reads_back_equal(draft: DraftModule, tmp_path: Path) -> None:
    save_draft(draft, tmp_path / "draft", meta(draft.family))
    again, found = load_draft(tmp_path / "draft", CPU, torch.float32)
    assert found == meta(draft.family)
    assert type(again) is type(draft) and same(again, draft)
    assert getattr(again, "config", None) == getattr(draft, "config", None)


def test_a_small_draft_is_a_plain_model_folder(tmp_path: Path) -> None:
    draft = near_copy(target(4))
    save_draft(draft, tmp_path / "draft", meta("small"))
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["model_type"] == "llama"
    assert config["vocab_size"] == 61 and config["num_hidden_layers"] == 4 and config["dtype"] == "float32"
    layer = {
        "input_layernorm.weight": (48,),
        "mlp.down_proj.weight": (48, 96),
        "mlp.gate_proj.weight": (96, 48),
        "mlp.up_proj.weight": (96, 48),
        "post_attention_layernorm.weight": (48,),
        "self_attn.k_proj.weight": (16, 48),
        "self_attn.o_proj.weight": (48, 48),
        "self_attn.q_proj.weight": (48, 48),
        "self_attn.v_proj.weight": (16, 48),
    }
    whole = {"lm_head.weight": (61, 48), "model.embed_tokens.weight": (61, 48), "model.norm.weight": (48,)}
    whole |= {f"model.layers.{index}.{name}": shape for index in range(4) for name, shape in layer.items()}
    stored = load_file(tmp_path / "draft" / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == whole
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    again = load_draft(tmp_path / "draft", CPU, torch.float32).draft
    ids = torch.tensor([[1, 2, 3]])
    assert isinstance(again, SmallDraft) and torch.equal(again.logits(again(ids)), draft.logits(draft(ids)))


@pytest.mark.parametrize(
    ("draft", "name", "layout"),
    [
        (near_copy(target(4)), "hf", "hf"),
        (heads.eagle(), "sglang", "eagle"),
        (heads.eagle3(40), "speculators", "speculators"),
        (heads.medusa(True), "medusa", "medusa"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_draft_is_written_again_in_another_format(
    draft: DraftModule, name: Format, layout: str, tmp_path: Path
) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    small = isinstance(draft, SmallDraft)
    save_draft(draft, tmp_path / "draft", meta(draft.family), tokenizer if small else None)
    (tmp_path / "out").mkdir()
    convert_draft(tmp_path / "draft", tmp_path / "out", name, VERIFIER)
    assert detect(tmp_path / "out") == layout
    again, found = load_draft(tmp_path / "out", CPU, torch.float32)
    assert found == meta(draft.family) and same(again, draft)
    assert (tmp_path / "out" / "tokenizer.json").is_file() == small


def test_weights_keep_their_type_when_written_again(tmp_path: Path) -> None:
    save_draft(heads.eagle3(40).bfloat16(), tmp_path / "draft", meta("eagle3"))
    (tmp_path / "out").mkdir()
    convert_draft(tmp_path / "draft", tmp_path / "out", "speculators", VERIFIER)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16, torch.int64, torch.bool}


def test_small_refuses_missing_tensors(tmp_path: Path) -> None:
    save_draft(near_copy(target(4)), tmp_path / "draft", meta("small"))
    tensors = load_file(tmp_path / "draft" / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, tmp_path / "draft" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FormatError, match=r"missing keys: model.layers.1.mlp.up_proj.weight"):
        load_draft(tmp_path / "draft", CPU, torch.float32)


def test_writer_refuses_values_that_are_not_finite_and_leaves_nothing(tmp_path: Path) -> None:
    draft = random_eagle3(target(4))
    with torch.no_grad():
        draft.fc.weight[0, 0] = float("inf")
    with pytest.raises(FormatError, match=r"fc\.weight has values that are not finite"):
        save_draft(draft, tmp_path / "draft", meta("eagle3"))
    assert list(tmp_path.iterdir()) == []


def test_refuses_truncated_weights_pickles_and_strangers(tmp_path: Path, eagle3_folder: Path) -> None:
    weights = eagle3_folder / "model.safetensors"
    whole = weights.read_bytes()
    for length in (100, len(whole) - 100):
        weights.write_bytes(whole[:length])
        with pytest.raises(FormatError, match="not a readable safetensors file"):
            load_draft(eagle3_folder, CPU, torch.float32)
    weights.unlink()
    with pytest.raises(MissingFileError, match=r"model\.safetensors: no such file"):
        load_draft(eagle3_folder, CPU, torch.float32)
    torch.save({}, eagle3_folder / "pytorch_model.bin")
    with pytest.raises(FormatError, match=r"pytorch_model\.bin: pickled weights are not loaded"):
        load_draft(eagle3_folder, CPU, torch.float32)
    with pytest.raises(MissingFileError, match="no such draft folder"):
        read_meta(tmp_path / "nowhere")


def test_lineage_and_weights_must_be_of_one_family(eagle3_folder: Path) -> None:
    (eagle3_folder / "draftforge.json").write_text(meta("medusa").model_dump_json())
    with pytest.raises(FormatError, match=r"holds a draft of family eagle3, draftforge\.json says medusa"):
        load_draft(eagle3_folder, CPU, torch.float32)
    (eagle3_folder / "draftforge.json").write_text("{}")
    with pytest.raises(FormatError, match=r"draftforge\.json: family: Field required"):
        load_draft(eagle3_folder, CPU, torch.float32)
