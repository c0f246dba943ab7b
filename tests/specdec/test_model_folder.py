"""Hostile model folders: what no fingerprint covers, weights that no file has, and lengths that no file can have."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from forked import run
from limited import under_limits
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPTJConfig, LlamaConfig

from draftforge.errors import DraftforgeError, FormatError
from draftforge.specdec import model_folder
from draftforge.specdec.formats.gguf.file import read_gguf
from draftforge.specdec.gguf_header import MOST_ELEMENTS, read_header
from draftforge.specdec.loading import checked_config, load_tokenizer
from draftforge.specdec.model_folder import INDEX_FILE, check_size
from draftforge.specdec.target_settings import TargetSettings
from draftforge.specdec.targets import Target, locate, target_files, target_fingerprint


@pytest.fixture
def folder(tiny_target_folder: Path, tmp_path: Path) -> Path:
    """A copy of the tiny target whose weights lie in two files that an index names."""
    folder = tmp_path / "target"
    shutil.copytree(tiny_target_folder, folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = {"one.safetensors": sorted(weights)[::2], "two.safetensors": sorted(weights)[1::2]}
    for name, tensors in parts.items():
        save_file({tensor: weights[tensor] for tensor in tensors}, folder / name, {"format": "pt"})
    index(folder, {tensor: name for name, tensors in parts.items() for tensor in tensors})
    return folder


def index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def weight_map(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    return found


def configured(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_an_adapter_beside_a_target_is_refused(folder: Path, tmp_path: Path) -> None:
    settings = TargetSettings(model=str(folder))
    before = target_fingerprint(settings)
    lora = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder),
        LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False),
    )
    lora.save_pretrained(folder)
    for use in (target_fingerprint, Target.load):
        with pytest.raises(FormatError, match=r"adapter_config\.json lies beside the model"):
            use(settings)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).replace(tmp_path / name)
    assert target_fingerprint(settings) == before
    (tmp_path / "link").symlink_to(tmp_path / "adapter_config.json")
    (tmp_path / "link").replace(folder / "adapter_config.json")
    with pytest.raises(FormatError, match=r"adapter_config\.json lies beside the model"):
        locate(settings)


@pytest.mark.parametrize("name", ["one.safetensors", "model.safetensors", "notes.json"])
def test_a_pipe_or_a_device_in_the_place_of_a_file_is_refused(folder: Path, name: str) -> None:
    """A library that opens a pipe waits for ever, and no signal ends it."""
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        (folder / name).unlink(missing_ok=True)
        make(folder / name)
        for use in (target_fingerprint, Target.load):
            with pytest.raises(FormatError, match=rf"{name}: must be a regular file"):
                use(TargetSettings(model=str(folder)))


@pytest.mark.parametrize("name", ["../one.safetensors", "{tmp}/one.safetensors", "linked/one.safetensors", "one.st"])
def test_weights_outside_the_folder_are_refused(folder: Path, tmp_path: Path, name: str) -> None:
    name = name.format(tmp=tmp_path)
    (folder / "linked").symlink_to(tmp_path)
    (folder / "one.safetensors").replace(tmp_path / "one.safetensors")
    index(folder, {tensor: name if file == "one.safetensors" else file for tensor, file in weight_map(folder).items()})
    for use in (target_fingerprint, Target.load):
        with pytest.raises(FormatError, match=f"{name}: weights must be"):
            use(TargetSettings(model=str(folder)))
    index(folder, {})
    configured(folder, transformers_weights=name)
    with pytest.raises(FormatError, match=f"{name}: weights must be"):
        locate(TargetSettings(model=str(folder)))


def test_weights_behind_a_link_are_hashed_by_their_content(folder: Path, tmp_path: Path) -> None:
    settings = TargetSettings(model=str(folder))
    before = target_fingerprint(settings)
    (folder / "one.safetensors").replace(tmp_path / "blob")
    (folder / "one.safetensors").symlink_to(tmp_path / "blob")
    assert target_fingerprint(settings) == before  # as in the hub's own cache
    content = bytearray((tmp_path / "blob").read_bytes())
    content[-1] ^= 1
    (tmp_path / "blob").write_bytes(content)
    assert target_fingerprint(settings) != before


def test_an_index_that_picks_some_of_the_files_counts(folder: Path) -> None:
    settings = TargetSettings(model=str(folder))
    assert INDEX_FILE not in target_files(settings)
    shutil.copy(folder / "two.safetensors", folder / "three.safetensors")
    before = target_files(settings)
    assert INDEX_FILE in before
    index(folder, {k: "three.safetensors" if v == "two.safetensors" else v for k, v in weight_map(folder).items()})
    after = target_files(settings)
    assert after["weights"] == before["weights"] and after[INDEX_FILE] != before[INDEX_FILE]


@pytest.mark.parametrize("names", [["tokenizer.json", "tokenizer.4.0.json"], ["../tokenizer.1.json"], "x"])
def test_a_tokenizer_that_no_fingerprint_covers_is_refused(folder: Path, names: Any) -> None:
    """transformers reads the newest of these files, wherever it lies."""
    path = folder / "tokenizer_config.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | {"fast_tokenizer_files": names}))
    for read in (lambda: locate(TargetSettings(model=str(folder))), lambda: load_tokenizer(folder, "here")):
        with pytest.raises(
            FormatError, match=r"tokenizer_config\.json: fast_tokenizer_files .*: must be tokenizer\.json"
        ):
            read()


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("inside", [lambda place: {"tokenizer_file": place}, lambda place: {"init_inputs": [place]}])
def test_a_tokenizer_that_names_a_file_elsewhere_is_refused(
    folder: Path, tmp_path: Path, name: str, inside: Callable[[str], Any]
) -> None:
    """transformers gives what stands there to the tokenizer's class, which opens it."""
    other, path = tmp_path / "other.json", folder / name
    other.write_text("{}")
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | inside(str(other))))
    for read in (lambda: locate(TargetSettings(model=str(folder))), lambda: load_tokenizer(folder, "here")):
        with pytest.raises(FormatError, match=rf"{name}: \w+ .*other\.json: names a file; leave it out$"):
            read()


def test_files_that_are_larger_than_those_of_any_tokenizer_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (folder / "vocab.txt").open("wb") as file:
        file.truncate(2**27 + 1)
    with pytest.raises(FormatError, match=r"^here: vocab\.txt: has 134 MB; must be 134 MB at most"):
        load_tokenizer(folder, "here")
    (folder / "vocab.txt").unlink()
    (folder / "added_tokens.json").write_text('{"a": 1, "b": 2}')
    monkeypatch.setattr(model_folder, "_MOST_ARGUMENTS", 1)
    with pytest.raises(FormatError, match=r"^here: (added_tokens|tokenizer_config)\.json: has more than 1 values"):
        load_tokenizer(folder, "here")


def test_code_of_another_repository_is_refused(folder: Path) -> None:
    configured(folder, attn_implementation="someone/kernel")
    with pytest.raises(FormatError, match=r"attn_implementation someone/kernel: names code of another repository"):
        locate(TargetSettings(model=str(folder)))
    configured(folder, attn_implementation="sdpa", auto_map={"AutoConfig": "some/one--code.Config"})
    locate(TargetSettings(model=str(folder)))  # nothing of it runs
    with pytest.raises(FormatError, match=r"auto_map\.AutoConfig some/one--code\.Config: names code of another"):
        locate(TargetSettings(model=str(folder), trust_remote_code=True))


def test_a_config_that_asks_for_terabytes_is_refused_within_little_memory(folder: Path, tmp_path: Path) -> None:
    ended = run(under_limits, [600, 60, __file__, "_terabytes", str(folder)], tmp_path / "log")
    assert ended.code == 0, ended.said


def _terabytes(folder: str) -> None:
    plain = json.loads(Path(folder, "config.json").read_text())
    check_size(Path(folder), "target")
    for change, said in (
        ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000: must be 65,536 at most"),
        ({"num_hidden_layers": 60_000}, "num_hidden_layers 60000: its files have only"),
        ({"num_hidden_layers": 300, "layer_types": None}, "config.json asks for"),
        ({"hidden_size": 10**6}, "config.json asks for"),
        ({"intermediate_size": 10**9}, "config.json asks for"),
        ({"vocab_size": 10**10}, "config.json asks for"),
        ({"vocab_size": 10**18}, "cannot be loaded"),
    ):
        Path(folder, "config.json").write_text(json.dumps(plain | change))
        with pytest.raises(FormatError, match=said) as caught:
            Target.load(TargetSettings(model=folder, device="cpu"))
        assert "\n" not in str(caught.value)


def test_a_config_is_checked_before_its_own_class_makes_lists(folder: Path) -> None:
    """Which the tokenizer's loader makes, too; a billion layers were a list of 8 GB."""
    original = (folder / "config.json").read_text()
    for name, value in (("num_hidden_layers", 1e9), ("num_labels", 10**9), ("stage_num_blocks", [10**9])):
        (folder / "config.json").write_text(original)
        configured(folder, **{name: value})
        for load in (load_tokenizer, checked_config):
            with pytest.raises(FormatError, match=rf"^here: config\.json: {name} .*: must be 65,536 at most$"):
                load(folder, "here")


def test_a_model_answers_by_names_whatever_its_config_says(folder: Path) -> None:
    configured(folder, return_dict=False)
    Target.load(TargetSettings(model=str(folder), device="cpu"))


def test_tables_of_positions_that_no_file_holds_are_bounded(tmp_path: Path) -> None:
    sizes = {"vocab_size": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, "rotary_dim": 8, "bos_token_id": 0}
    config = GPTJConfig(**sizes, eos_token_id=1, n_positions=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    check_size(tmp_path, "here")
    configured(tmp_path, n_positions=10**9)
    with pytest.raises(FormatError, match=r"^here: config\.json asks for embed_positions of 8,000,000,000 numbers"):
        check_size(tmp_path, "here")


def test_tied_embeddings_count_once_however_often_they_are_registered(tmp_path: Path) -> None:
    config = LlamaConfig(  # embeddings are nearly all of it, as in a small draft of a small target
        vocab_size=2**15,
        hidden_size=64,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    check_size(tmp_path, "draft")


def test_an_adapter_of_a_rank_that_no_tensor_has_is_refused(tiny_target_folder: Path, tmp_path: Path) -> None:
    lora = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_target_folder), LoraConfig(r=2, target_modules=["q_proj"])
    )
    lora.save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"r": 10**9}))
    with pytest.raises(FormatError, match=r"adapter_config\.json: r 1000000000: its largest tensor has"):
        Target.load(TargetSettings(model=str(tiny_target_folder), adapter=str(tmp_path)))


def tiny_gguf(path: Path) -> bytes:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(8)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_tensor("output.weight", np.zeros((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_a_sound_header_is_read(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "x.gguf")
    header = read_header(tmp_path / "x.gguf")
    assert header.keys["llama.block_count"] == 1 and header.keys["general.architecture"] == "llama"
    assert header.keys["tokenizer.ggml.tokens"] is None
    assert (header.tensors, header.elements) == (1, 32)


def replaced(data: bytes, old: bytes, new: bytes) -> bytes:
    assert data.count(old) == 1
    return data.replace(old, new)


LENGTHS: dict[str, Callable[[bytes], bytes]] = {
    "tensors and": lambda data: data[:8] + struct.pack("<Q", 1 << 60) + data[16:],
    "keys takes": lambda data: data[:16] + struct.pack("<Q", 1 << 60) + data[24:],
    "general.architecture takes": lambda data: replaced(
        data, struct.pack("<IQ", 8, 5) + b"llama", struct.pack("<IQ", 8, 1 << 40) + b"llama"
    ),
    "general.architecture .* must be text": lambda data: replaced(
        data, struct.pack("<IQ", 8, 5) + b"llama", struct.pack("<IIQQ", 9, 8, 1, 5) + b"llama"
    ),
    "tokens has": lambda data: replaced(
        data, struct.pack("<IIQ", 9, 8, 2), struct.pack("<IIQ", 9, 8, MOST_ELEMENTS + 1)
    ),
    "tokens takes": lambda data: replaced(data, struct.pack("<IIQ", 9, 8, 2), struct.pack("<IIQ", 9, 8, 1 << 20)),
    "of kind 9 at depth 3": lambda data: replaced(
        data, struct.pack("<IIQ", 9, 8, 2), struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000
    ),
    "output.weight ends at byte": lambda data: replaced(
        data, struct.pack("<IQQ", 2, 8, 4), struct.pack("<IQQ", 2, 1 << 40, 1 << 40)
    ),
    "has 1000000 dimensions": lambda data: replaced(
        data, struct.pack("<IQQ", 2, 8, 4), struct.pack("<IQQ", 1_000_000, 8, 4)
    ),
    "version 2 or 3": lambda data: b"GGUF" + struct.pack("<I", 1 << 24) + data[8:],
}


def test_lengths_that_a_gguf_file_cannot_have_are_refused_within_little_memory(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "sound.gguf")
    ended = run(under_limits, [200, 30, __file__, "_lengths", str(tmp_path)], tmp_path / "log")
    assert ended.code == 0, ended.said


def _lengths(folder: str) -> None:
    sound = Path(folder, "sound.gguf").read_bytes()
    for said, change in LENGTHS.items():
        path = Path(folder, "odd.gguf")
        path.write_bytes(change(sound))
        for use in (read_gguf, lambda path: locate(TargetSettings(model=str(path)))):
            with pytest.raises(DraftforgeError, match=said):
                use(path)
    # A list of small numbers is as long as it says, and would become an object of hundreds of bytes for each.
    long = bytes(MOST_ELEMENTS + 1)
    header = struct.pack("<IQ", 0, len(long))
    Path(folder, "odd.gguf").write_bytes(
        replaced(sound, struct.pack("<IIQ", 9, 8, 2), struct.pack("<I", 9) + header + long)
    )
    with pytest.raises(DraftforgeError, match="elements"):
        read_gguf(Path(folder, "odd.gguf"))


def test_gguf_keys_that_ask_for_more_than_the_file_holds_are_refused(tmp_path: Path) -> None:
    data = tiny_gguf(tmp_path / "x.gguf")
    for key, value in (("block_count", 1), ("embedding_length", 8)):
        name = f"llama.{key}".encode()
        start = name + struct.pack("<I", 4)
        (tmp_path / "odd.gguf").write_bytes(replaced(data, start + struct.pack("<I", value), start + b"\xff" * 4))
        with pytest.raises(FormatError, match=r"weights or more, the file holds 32"):
            check_size(tmp_path, "target", "odd.gguf")
        # By the other name that transformers knows an architecture by, and as a number of another kind.
        odd = (tmp_path / "odd.gguf").read_bytes()
        (tmp_path / "odd.gguf").write_bytes(replaced(odd, name, name.replace(b"llama", b"other")))
        with pytest.raises(FormatError, match=r"weights or more, the file holds 32"):
            check_size(tmp_path, "target", "odd.gguf")
        (tmp_path / "odd.gguf").write_bytes(replaced(data, start, name + struct.pack("<I", 6)))
        with pytest.raises(FormatError, match=rf"llama\.{key} .*: must be a whole number"):
            check_size(tmp_path, "target", "odd.gguf")


@pytest.mark.parametrize("value", ["NaN", "Infinity", '"\\ud800"'])
def test_a_config_with_a_value_that_has_no_json_is_refused(folder: Path, value: str) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text().replace("{", f'{{"odd": {value},', 1))
    with pytest.raises(FormatError, match=r"config\.json: holds a number or text that has no JSON"):
        target_fingerprint(TargetSettings(model=str(folder)))


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/tool.jinja", "merges.txt"])
def test_a_tokenizer_that_links_lead_out_of_the_folder_to_is_refused(name: str, folder: Path, tmp_path: Path) -> None:
    """Drafts get a copy of it, and go to a registry or a hub."""
    (tmp_path / "key").write_text("private")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "key")
    for load in (lambda: locate(TargetSettings(model=str(folder))), lambda: load_tokenizer(folder, str(folder))):
        with pytest.raises(FormatError, match=f"{name}: is a link out of the folder"):
            load()
    # A whole folder may be a link, and a file may be one inside of it.
    (folder / name).unlink()
    (folder / "kept.txt").write_text("{{ messages }}")
    (folder / name).symlink_to(folder / "kept.txt")
    (tmp_path / "linked").symlink_to(folder)
    assert locate(TargetSettings(model=str(tmp_path / "linked")))
