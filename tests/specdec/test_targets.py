"""Loading targets: fingerprints see every change, bad names are refused in words."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_level import byte_level_tokenizer
from huggingface_hub.utils import filter_repo_objects
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from draftforge.errors import FormatError, HubError, MissingFileError
from draftforge.fingerprint import of_files, of_json
from draftforge.specdec.loading import load_tokenizer, processor_template
from draftforge.specdec.target_settings import TargetSettings
from draftforge.specdec.targets import (
    Target,
    copy_tokenizer_of,
    covered_since,
    fingerprint_of,
    locate,
    prompts_in_doubt,
    resolve_device,
    target_files,
    target_fingerprint,
)
from draftforge.train.precision import matrix_dtype


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


def test_targets_whose_prompts_vllm_makes_otherwise_are_told(tiny_target_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_target_folder, folder)
    settings = TargetSettings(model=str(folder))
    assert prompts_in_doubt(settings) is None
    (folder / "tekken.json").write_text("{}")
    assert "Mistral" in str(prompts_in_doubt(settings))
    (folder / "tekken.json").unlink()
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    for named, doubted in (("LlamaTokenizerFast", True), ("GPT2Tokenizer", False), ("TokenizersBackend", False)):
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"tokenizer_class": named}))
        assert ("makes other ids" in str(prompts_in_doubt(settings))) is doubted
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["GptOssForCausalLM"]}))
    assert "prompts of GptOssForCausalLM" in str(prompts_in_doubt(settings))


COUNTS = [
    *("vocab.json", "merges.txt", "vocab.txt", "added_tokens.json", "special_tokens_map.json", "tokenizer.json"),
    *("tokenizer_config.json", "tokenizer.model", "spiece.model", "qwen.tiktoken", "tekken.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/tool_use.jinja"),
]


@pytest.mark.parametrize("name", COUNTS)
def test_every_file_that_changes_ids_or_text_makes_another_target(
    name: str, tiny_target_folder: Path, tmp_path: Path
) -> None:
    folder, settings = tmp_path / "target", TargetSettings(model=str(tmp_path / "target"))
    shutil.copytree(tiny_target_folder, folder)
    (folder / name).parent.mkdir(exist_ok=True)
    seen = {target_fingerprint(settings)}
    for content in ('{"one": 1}', '{"two": 2}', None):
        before = target_files(settings)
        (folder / name).write_text(content) if content else (folder / name).unlink()
        after = target_files(settings)
        assert {known for known in before.keys() | after.keys() if before.get(known) != after.get(known)} == {name}
        seen.add(target_fingerprint(settings))
    assert len(seen) == 4 - (not (tiny_target_folder / name).is_file())  # without the file it is as it was


def test_a_processors_own_chat_template_is_part_of_the_target(tiny_target_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    shutil.copytree(tiny_target_folder, folder)
    shared = folder / "chat_template.jinja"
    own, settings = shared.read_text(), TargetSettings(model=str(folder))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "P"}))
    assert processor_template(folder) is None  # without a processor
    (folder / "preprocessor_config.json").write_text("{}")
    assert processor_template(folder) == "P" and "processor's chat template" in target_files(settings)
    tokenizer: Any = load_tokenizer(folder, "target")
    assert (tokenizer.chat_template, tokenizer.processor_template) == (own, "P")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("R")
    assert processor_template(folder) is None
    shutil.rmtree(folder / "additional_chat_templates")
    (folder / "processor_config.json").write_text(json.dumps({"chat_template": "C"}))
    assert processor_template(folder) == "C"
    (folder / "processor_config.json").unlink()
    shared.unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    for template, other in ((own, "P"), ("P", None)):
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
        tokenizer = load_tokenizer(folder, "target")
        assert (tokenizer.chat_template, tokenizer.processor_template) == (template, other)
    assert "processor's chat template" in target_files(settings)


def test_what_changes_nothing_makes_no_other_target(tiny_target_folder: Path, tmp_path: Path) -> None:
    folder, settings = tmp_path / "target", TargetSettings(model=str(tmp_path / "target"))
    shutil.copytree(tiny_target_folder, folder)
    before = target_fingerprint(settings)
    for name in ("README.md", "preprocessor_config.json", "model.safetensors.index.json", "modeling_own.py"):
        (folder / name).write_text("{}")
    assert target_fingerprint(settings) == before
    with_code = settings.model_copy(update={"trust_remote_code": True})
    assert "modeling_own.py" in target_files(with_code) and target_fingerprint(with_code) != before


def test_a_target_without_further_files_keeps_the_fingerprint_of_earlier_versions(tiny_target_folder: Path) -> None:
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    config = json.loads((tiny_target_folder / "config.json").read_text())
    generation = json.loads((tiny_target_folder / "generation_config.json").read_text())
    noise = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache")
    expected = {
        "weights": of_files(tiny_target_folder, ["model.safetensors"]),
        "config": of_json({name: value for name, value in config.items() if name not in noise}),
        "tokenizer": of_files(tiny_target_folder, names),
        "generation": of_json({name: value for name, value in generation.items() if name not in noise}),
        "adapter": None,
    }
    settings = TargetSettings(model=str(tiny_target_folder))
    assert target_fingerprint(settings) == of_json(expected)
    files = target_files(settings)
    assert covered_since(files) == [] and covered_since(files | {"merges.txt": "0" * 64}) == ["merges.txt"]
    assert fingerprint_of(files | {"merges.txt": "0" * 64}, None, earlier=True) == of_json(expected)


def test_downloads_hold_every_file_that_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def snapshot(name: str, **options: Any) -> str:
        asked.update(options)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    locate(TargetSettings(model="owner/name"))
    wanted = [*COUNTS, "config.json", "generation_config.json", "model-00001-of-00002.safetensors", "a.gguf"]
    assert list(filter_repo_objects(wanted, allow_patterns=asked["allow_patterns"])) == wanted
    assert not list(filter_repo_objects(["pytorch_model.bin", "a.pt"], allow_patterns=asked["allow_patterns"]))


def test_an_adapters_own_tokenizer_and_template_hold(
    tiny_target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = tmp_path / "adapter"
    settings = TargetSettings(model=str(tiny_target_folder), adapter=str(adapter))
    model = AutoModelForCausalLM.from_pretrained(tiny_target_folder)
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(adapter)
    own = Target.load(settings).tokenizer.chat_template
    seen = {target_fingerprint(settings)}

    # A copy of the model's is no news; a template of its own holds, and makes another target.
    shutil.copyfile(tiny_target_folder / "chat_template.jinja", adapter / "chat_template.jinja")
    assert Target.load(settings).tokenizer.chat_template == own and "its own" not in capsys.readouterr().err
    seen.add(target_fingerprint(settings))
    (adapter / "chat_template.jinja").write_text("{{ messages }}")
    assert Target.load(settings).tokenizer.chat_template == "{{ messages }}"
    assert "its own chat_template.jinja used" in capsys.readouterr().err
    seen.add(target_fingerprint(settings))

    # A part of a tokenizer would not be used.
    for name in ("tokenizer_config.json", "added_tokens.json", "additional_chat_templates/rag.jinja"):
        (adapter / name).parent.mkdir(exist_ok=True)
        (adapter / name).write_text("{}")
        with pytest.raises(FormatError, match=f"adapter: {name}: must stand beside the rest of its tokenizer"):
            Target.load(settings)
        (adapter / name).unlink()

    # So does a whole tokenizer, which goes along where one is copied.
    byte_level_tokenizer(["another one"], 270).save_pretrained(adapter)
    assert len(Target.load(settings).tokenizer) == 268
    seen.add(target_fingerprint(settings))
    assert len(seen) == 4
    (tmp_path / "copy").mkdir()
    copy_tokenizer_of(settings, tmp_path / "copy")
    assert (tmp_path / "copy" / "tokenizer.json").read_bytes() == (adapter / "tokenizer.json").read_bytes()


def test_adapter_is_merged(tiny_target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_target_folder)
    lora = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).eval()
    lora.save_pretrained(tmp_path / "adapter")
    ids = torch.tensor([[5, 6, 7]])
    loaded = Target.load(TargetSettings(model=str(tiny_target_folder), adapter=str(tmp_path / "adapter")))
    with torch.no_grad():
        expected = lora(ids).logits
        torch.testing.assert_close(loaded.logits(loaded.states(ids).hidden_BTH), expected, atol=1e-4, rtol=1e-4)
    # What is not merged is said.
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    assert "for none" not in capsys.readouterr().err
    save_file(load_file(weights) | {"base_model.model.lm_head.lora_A.weight": torch.ones(2, 8)}, weights)
    Target.load(TargetSettings(model=str(tiny_target_folder), adapter=str(tmp_path / "adapter")))
    said = capsys.readouterr().err
    assert "1 of its tensors are for none of its target_modules, base_model.model.lm_head.lora_A.weight for" in said


def test_context_of_the_server_limits_the_target(tiny_target_folder: Path) -> None:
    assert Target.load(TargetSettings(model=str(tiny_target_folder), context=64)).max_positions == 64


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "/no/such/folder"}, "no such folder, and not a hub id"),
        ({"model": "missing.gguf"}, "no such GGUF file"),
    ],
)
def test_missing_targets_are_refused_in_words(settings: dict[str, str], message: str) -> None:
    with pytest.raises(MissingFileError, match=message):
        Target.load(TargetSettings(**settings))  # type: ignore[arg-type]


def test_a_hub_that_cannot_be_asked_is_no_mistake_of_the_recipe() -> None:
    with pytest.raises(
        HubError, match=r"target\.model: owner/name: not a local folder, and the hub cannot be asked"
    ) as it:
        Target.load(TargetSettings(model="owner/name"))
    assert it.value.exit_code == 3


def test_pickled_weights_are_refused(tiny_target_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    shutil.copytree(tiny_target_folder, folder)
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(MissingFileError, match="pickled weights are not loaded"):
        target_fingerprint(TargetSettings(model=str(folder)))


@pytest.mark.parametrize(
    ("found", "dtype"),
    [({"avx512_bf16": True}, torch.bfloat16), ({"amx_bf16": True}, torch.bfloat16), ({"avx2": True}, torch.float32)],
)
def test_native_is_bfloat16_where_the_processor_multiplies_it(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, bool], dtype: torch.dtype
) -> None:
    """And so are the products of a training; `auto` stays float32, whose answers are those of plain decoding."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    assert resolve_device("cpu", "native") == (torch.device("cpu"), dtype)
    assert resolve_device("cpu", "auto") == (torch.device("cpu"), torch.float32)
    assert matrix_dtype("auto", torch.device("cpu")) == dtype
