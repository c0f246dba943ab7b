"""Loading targets: our forward equals transformers', fingerprints see every change, bad names are refused in words."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from stand_ins import llama
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from draftforge.errors import FormatError, MissingFileError
from draftforge.specdec.cache import KVCache
from draftforge.specdec.models import CausalModel
from draftforge.specdec.settings import TargetSettings
from draftforge.specdec.targets import Target, target_fingerprint

SIZES = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}


def mistral() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**SIZES, head_dim=8, sliding_window=5)).eval()


def qwen2() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**SIZES)).eval()


def gemma2() -> PreTrainedModel:
    config = Gemma2Config(**SIZES, head_dim=8, sliding_window=5, query_pre_attn_scalar=8, attn_implementation="eager")
    return Gemma2ForCausalLM(config).eval()


@pytest.mark.parametrize("make", [llama, qwen2, mistral, gemma2])
@torch.no_grad()
def test_cached_forward_equals_transformers(make: object) -> None:
    """Prefill two rows of unlike length, extend both, compare every logit with transformers' own full pass."""
    torch.manual_seed(0)
    reference = make()  # type: ignore[operator]
    ids = torch.randint(0, 61, (1, 17))
    expected = reference(ids, use_cache=False, output_hidden_states=True)
    model = CausalModel(reference)
    full = model.states(ids, aux_layers=(1, 2, 4))
    torch.testing.assert_close(model.logits(full.hidden_BTH), expected.logits, atol=1e-4, rtol=1e-4)
    aux = torch.cat([expected.hidden_states[1], expected.hidden_states[2]], -1)
    assert full.aux_BTA is not None
    torch.testing.assert_close(full.aux_BTA[..., :96], aux, atol=1e-4, rtol=1e-4)

    cache = KVCache(2, 32, torch.device("cpu"))
    rows = torch.zeros(2, 11, dtype=torch.long)
    rows[0], rows[1, :8] = ids[0, :11], ids[0, :8]
    model.states(rows, cache.prefill([0, 1], [11, 8]))
    step = cache.extend(2, 4)
    states = model.states(torch.stack([ids[0, 11:15], ids[0, 8:12]]), step)
    logits = model.logits(states.hidden_BTH)
    torch.testing.assert_close(logits[0], expected.logits[0, 11:15], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits[1], expected.logits[0, 8:12], atol=1e-4, rtol=1e-4)
    cache.keep([2, 1])  # two of four accepted in row 0, one in row 1; then go on from there
    logits = model.logits(model.states(ids[:, 13:15].expand(2, 2).clone(), cache.extend(2, 2)).hidden_BTH)
    torch.testing.assert_close(logits[0], expected.logits[0, 13:15], atol=1e-4, rtol=1e-4)


def test_head_that_does_more_than_a_projection_is_refused() -> None:
    model = llama()
    head = model.forward
    model.forward = lambda *args, **kwargs: _twice(head(*args, **kwargs))
    with pytest.raises(FormatError, match="not supported"):
        CausalModel(model)


def _twice(output: object) -> object:
    output.logits = output.logits * 2  # type: ignore[attr-defined]
    return output


def test_captured_layer_out_of_range_is_refused() -> None:
    with pytest.raises(FormatError, match="captured layer 5: must be between 1 and 4"):
        CausalModel(llama()).states(torch.tensor([[1]]), aux_layers=(5,))


def test_fingerprint_sees_weights_tokenizer_template_and_adapter(tiny_target_folder: Path, tmp_path: Path) -> None:
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
