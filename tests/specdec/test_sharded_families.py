"""Every supported family as a spread target: made without memory, filled from its files, the same as transformers'."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from families import SUPPORTED, tiny
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from draftforge.errors import FormatError
from draftforge.specdec.target_settings import TargetSettings
from draftforge.specdec.targets import Target

REWRITTEN = {"mixtral", "qwen3-moe"}
"""Families whose experts lie one by one in files, and joined in the model."""


def load(folder: str | Path, **options: Any) -> Target:
    return Target.load(TargetSettings(model=str(folder), device="cpu", **options))


@pytest.mark.parametrize("name", sorted(SUPPORTED))
def test_every_family_is_loaded_as_transformers_loads_it(name: str, tmp_path: Path, tiny_target_folder: Path) -> None:
    """With buffers that no file holds: rotary frequencies, the scale of embeddings. One process holds whole layers."""
    model = tiny(*SUPPORTED[name])
    model.save_pretrained(tmp_path)
    for file in tiny_target_folder.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    if name in REWRITTEN:
        with (
            pytest.raises(FormatError, match=r"target\.shard = true: its files have no tensor"),
            load(tmp_path, shard=True).running(),
        ):
            pass
        return
    whole, target = load(tmp_path), load(tmp_path, shard=True)
    assert (target.fingerprint, target.stop_ids) == (whole.fingerprint, whole.stop_ids)
    same = {key: getattr(whole.model.generation_config, key) for key in ("eos_token_id", "bos_token_id")}
    assert {key: getattr(target.model.generation_config, key) for key in same} == same
    with torch.no_grad(), target.running():
        ours, theirs = dict(target.model.named_buffers()), dict(whole.model.named_buffers())
        assert ours.keys() == theirs.keys()
        for key, buffer in theirs.items():
            assert ours[key].dtype == buffer.dtype and torch.equal(ours[key], buffer), key
        ids_BT = torch.arange(40)[None]
        assert torch.equal(target.states(ids_BT).hidden_BTH, whole.states(ids_BT).hidden_BTH)
    for layer in range(whole.num_layers):
        ours, theirs = dict(target.layer_weights(layer)), dict(whole.layer_weights(layer))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_a_tied_head_is_its_embeddings(tmp_path: Path, tiny_target_folder: Path) -> None:
    config = LlamaConfig.from_pretrained(tiny_target_folder, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    shutil.copy(tiny_target_folder / "tokenizer.json", tmp_path)
    target = load(tmp_path, shard=True)
    tables: list[nn.Module] = [target.model.get_input_embeddings(), target.model.get_output_embeddings()]
    assert tables[0].weight is tables[1].weight
    with torch.no_grad(), target.running():
        ids_BT = torch.arange(20)[None]
        assert torch.equal(target.states(ids_BT).hidden_BTH, load(tmp_path).states(ids_BT).hidden_BTH)
