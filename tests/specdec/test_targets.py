"""Loading targets: fingerprints see every change, bad names are refused in words."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from draftforge.errors import MissingFileError
from draftforge.specdec.requests import TargetSettings
from draftforge.specdec.targets import Target, target_fingerprint


def test_fingerprint_sees_weights_tokenizer_template_adapter_and_context(
    tiny_target_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "target"
    shutil.copytree(tiny_target_folder, folder)
    seen = {target_fingerprint(TargetSettings(model=str(folder)))}
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder, moved)
    assert target_fingerprint(TargetSettings(model=str(moved))) in seen  # content counts, the path does not

    def must_be_new(settings: TargetSettings) -> None:
        found = target_fingerprint(settings)
        assert found not in seen
        seen.add(found)

    model = AutoModelForCausalLM.from_pretrained(folder)
    lora = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    lora.save_pretrained(tmp_path / "adapter")
    must_be_new(TargetSettings(model=str(folder), adapter=str(tmp_path / "adapter")))
    must_be_new(TargetSettings(model=str(folder), context=64))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    must_be_new(TargetSettings(model=str(folder)))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    must_be_new(TargetSettings(model=str(folder)))
    (folder / "config.json").write_text(json.dumps(config | {"transformers_version": "9"}))
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    must_be_new(TargetSettings(model=str(folder)))


def test_adapter_is_merged(tiny_target_folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_target_folder)
    lora = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).eval()
    lora.save_pretrained(tmp_path / "adapter")
    ids = torch.tensor([[5, 6, 7]])
    loaded = Target.load(TargetSettings(model=str(tiny_target_folder), adapter=str(tmp_path / "adapter")))
    with torch.no_grad():
        expected = lora(ids).logits
        torch.testing.assert_close(loaded.logits(loaded.states(ids).hidden_BTH), expected, atol=1e-4, rtol=1e-4)


def test_context_of_the_server_limits_the_target(tiny_target_folder: Path) -> None:
    assert Target.load(TargetSettings(model=str(tiny_target_folder), context=64)).max_positions == 64


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "/no/such/folder"}, "no such folder, and not a hub id"),
        ({"model": "missing.gguf"}, "no such GGUF file"),
        ({"model": "owner/name"}, "not a local folder, and the hub said"),
    ],
)
def test_missing_targets_are_refused_in_words(settings: dict[str, str], message: str) -> None:
    with pytest.raises(MissingFileError, match=message):
        Target.load(TargetSettings(**settings))  # type: ignore[arg-type]


def test_pickled_weights_are_refused(tiny_target_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    shutil.copytree(tiny_target_folder, folder)
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(MissingFileError, match="pickled weights are not loaded"):
        target_fingerprint(TargetSettings(model=str(folder)))
