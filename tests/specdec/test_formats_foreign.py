"""Drafts of other projects are read as they are published: names, configs and files differ, the draft does not."""

import json
from pathlib import Path
from typing import Any

import heads
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from draftforge.errors import FormatError
from draftforge.specdec.drafts.dflash import DFlashDraft
from draftforge.specdec.drafts.eagle import EagleDraft
from draftforge.specdec.formats import Verifier, detect, known_format, read_draft, write_draft

VERIFIER = Verifier("owner/model", ["LlamaForCausalLM"])
IDS = "eagle_aux_hidden_state_layer_ids"
ORIGINAL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 24,
    "initializer_range": 0.02,
    "intermediate_size": 40,
    "max_position_embeddings": 256,
    "model_type": "llama",
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
    "use_cache": True,
    "vocab_size": 61,
}
"""As the EAGLE project's own configs are."""


def same(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def put(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], name: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / name)
    return folder


def test_dflash_as_its_project_publishes_it(tmp_path: Path) -> None:
    draft = heads.dflash()
    published = {
        **{name: value for name, value in ORIGINAL.items() if name != "torch_dtype"},
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dflash_config": {"block_size": 6, "mask_token_id": 60, "target_layer_ids": [0, 1, 3]},
        "dtype": "bfloat16",
        "layer_types": ["full_attention", "full_attention"],
        "max_window_layers": 2,
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "num_target_layers": 4,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "use_sliding_window": False,
    }
    own = {name: tensor for name, tensor in draft.state_dict().items() if name not in ("d2t", "t2d")}
    nested = put(tmp_path / "nested", published, own)
    older = {**published, "block_size": 6, "dflash_config": {"mask_token_id": 60, "target_layer_ids": [0, 1, 3]}}
    for folder in (nested, put(tmp_path / "older", older, own)):
        again = read_draft(folder)
        assert detect(folder) == "dflash" and same(again, draft)
        assert isinstance(again, DFlashDraft) and again.config == draft.config


@pytest.mark.parametrize("architecture", ["Qwen3DSparkModel", "DSparkDraftModel"])
def test_dspark_as_others_publish_it(architecture: str, tmp_path: Path) -> None:
    """All at the top level, as DeepSpec has it; or beside the mask token, as SpecForge has it."""
    draft = heads.dspark()
    write_draft(draft, tmp_path / ".", "vllm")
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": [architecture]}
    nested = {name: value for name, value in config.pop("dflash_config").items() if name != "causal"}
    tensors = load_file(tmp_path / "model.safetensors")
    without = {name: value for name, value in config.items() if name not in nested and "confidence" not in name}
    for entries in (config, {**without, "dflash_config": nested}):
        entries.pop("sample_from_anchor", None)  # which all readers take for true
        again = read_draft(put(tmp_path / "theirs", entries, tensors))
        assert isinstance(again, DFlashDraft) and again.config == draft.config and same(again, draft)


KINDS = ["sliding_attention", "full_attention"]
SEES: list[tuple[dict[str, Any], dict[str, Any], list[tuple[int | None, bool]]]] = [
    ({}, {"layer_types": KINDS, "sliding_window": 8}, [(8, True), (None, False)]),
    ({}, {"layer_types": KINDS, "sliding_window": 8, "is_causal": False}, [(8, False), (None, False)]),
    ({"causal": True}, {}, [(None, True), (None, True)]),
    ({"causal": False}, {"layer_types": KINDS, "sliding_window": 8}, [(8, False), (None, False)]),
    ({"use_swa": True, "swa_window_size": 4, "causal": False}, {}, [(4, False), (4, False)]),
    ({"use_swa": True}, {"sliding_window": 4}, [(4, True), (4, True)]),
    ({}, {"architectures": ["QwenDFlashDraftModel"]}, [(None, False), (None, False)]),  # AngelSlim's
]


@pytest.mark.parametrize(("nested", "entries", "sees"), SEES)
def test_what_the_layers_of_a_dflash_draft_see(
    nested: dict[str, Any], entries: dict[str, Any], sees: list[tuple[int | None, bool]], tmp_path: Path
) -> None:
    """As vLLM resolves it: a causal key decides for all layers, without one layers with a window are causal."""
    draft = heads.dflash(40)
    write_draft(draft, tmp_path, "vllm")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dflash_config"]["causal"]
    config["dflash_config"] |= nested
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {"d2t": tensors["d2t"].int(), "t2d": tensors["t2d"].to(torch.uint8)}
    again = read_draft(put(tmp_path, {**config, **entries}, tensors))
    assert isinstance(again, DFlashDraft) and [tuple(again.config.sight(layer)) for layer in range(2)] == sees
    assert same(again, draft)
    if again.config != draft.config:
        for name in ("vllm", "speculators"):
            with pytest.raises(FormatError, match="with a sliding window or causal layers are read and scored, not"):
                write_draft(again, tmp_path, known_format(name), 4, VERIFIER)


def test_a_dflash_head_in_another_order(tmp_path: Path) -> None:
    draft, order = heads.dflash(own_head=True), torch.randperm(61, generator=torch.Generator().manual_seed(0))
    write_draft(draft, tmp_path, "vllm")
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    tensors |= {"d2t": order - torch.arange(61), "lm_head.weight": tensors["lm_head.weight"][order]}
    assert same(read_draft(put(tmp_path, config, tensors)), draft)
    del tensors["lm_head.weight"]
    with pytest.raises(
        FormatError, match="d2t changes the order of the whole vocabulary: the target's head has its own"
    ):
        read_draft(put(tmp_path, config, tensors))


def test_the_eagle_projects_own_heads(tmp_path: Path) -> None:
    draft = heads.eagle(own_embeddings=True)
    folder = put(tmp_path / "eagle", {**ORIGINAL, "bias": False}, dict(draft.state_dict()))
    assert detect(folder) == "eagle" and same(read_draft(folder), draft)
    head = heads.eagle3(40, own_embeddings=True)
    folder = put(tmp_path / "eagle3", {**ORIGINAL, "draft_vocab_size": 40}, dict(head.state_dict()))
    assert detect(folder) == "eagle3"
    with pytest.raises(FormatError, match=f"{IDS}: is absent, and the target's number of layers is not known"):
        read_draft(folder)
    again = read_draft(folder, target_layers=32)
    assert same(again, head) and again.config == head.config.model_copy(update={"aux_layers": (2, 16, 29)})
    with pytest.raises(FormatError, match=r"\[2, 2, 1\]: must be different layers in ascending order"):
        read_draft(folder, target_layers=4)


def test_eagle3_variants_of_names_and_numbering(tmp_path: Path) -> None:
    draft = heads.eagle3(40)
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in draft.state_dict().items()}
    del tensors["t2d"]
    config = {**ORIGINAL, "architectures": ["Eagle3LlamaForCausalLM"], "draft_vocab_size": 40, IDS: [1, 2, 4]}
    assert same(read_draft(put(tmp_path / "layers.0", config, tensors)), draft)
    del config[IDS]
    config["eagle_config"] = {IDS: [0, 1, 3]}  # SGLang's numbering
    again = read_draft(put(tmp_path / "sglang", config, tensors))
    assert same(again, draft) and again.config == draft.config


def test_eagle3_of_the_whole_vocabulary_with_and_without_its_identity(tmp_path: Path) -> None:
    draft = heads.eagle3()
    config = {**ORIGINAL, "architectures": ["LlamaForCausalLMEagle3"], IDS: [1, 2, 4]}  # no draft_vocab_size
    tensors = dict(draft.state_dict())
    assert same(read_draft(put(tmp_path / "with", config, tensors)), draft)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    assert same(read_draft(put(tmp_path / "without", config, tensors)), draft)


def test_defaults_of_llama_where_a_config_is_silent(tmp_path: Path) -> None:
    silent = {
        name: ORIGINAL[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    }
    draft = heads.eagle()
    fields = {**heads.LAYER, "num_key_value_heads": 6, "head_dim": 4}
    wanted = type(draft)(type(draft.config)(**fields))
    again = read_draft(put(tmp_path, silent, dict(wanted.state_dict())))
    update = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048}
    assert same(again, wanted) and again.config == wanted.config.model_copy(update=update)
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    again = read_draft(put(tmp_path, {**silent, **rope}, dict(wanted.state_dict())))
    assert isinstance(again, EagleDraft) and again.config.rope_theta == 500000.0


def test_medusa_as_published(tmp_path: Path) -> None:
    """The config names no sizes, and fewer heads than the file holds."""
    draft = heads.medusa(fc_bias=True, num_layers=2)
    write_draft(draft, tmp_path, "medusa", 1, VERIFIER)
    tensors = load_file(tmp_path / "medusa_lm_head.safetensors")
    config = {"base_model_name_or_path": "owner/model", "medusa_num_heads": 2, "medusa_num_layers": 2}
    again = read_draft(put(tmp_path / "published", config, tensors, "medusa_lm_head.safetensors"))
    assert same(again, draft) and again.config == draft.config
    again = read_draft(put(tmp_path / "converted", {}, tensors))
    assert same(again, draft)


def test_weights_in_several_files(tmp_path: Path) -> None:
    draft = heads.eagle(own_embeddings=True)
    tensors = dict(draft.state_dict())
    table = {"embed_tokens.weight": tensors.pop("embed_tokens.weight")}
    put(tmp_path, {**ORIGINAL, "bias": False}, tensors, "model-00001-of-00002.safetensors")
    save_file(table, tmp_path / "model-00002-of-00002.safetensors")
    assert same(read_draft(tmp_path), draft)
    save_file(table, tmp_path / "consolidated.safetensors")
    with pytest.raises(
        FormatError, match=r"embed_tokens\.weight is in model-00002-of-00002\.safetensors and in another"
    ):
        read_draft(tmp_path)
