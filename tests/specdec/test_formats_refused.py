"""What does not belong in a draft folder is refused by name: tensors, config fields, formats."""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import heads
import pytest
import stand_ins
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftforge.errors import FormatError, InputError, MissingFileError
from draftforge.specdec.drafts import DraftModule
from draftforge.specdec.formats import (
    Format,
    Verifier,
    check_family,
    known_format,
    read_draft,
    write_draft,
)

VERIFIER = Verifier("owner/model", ["LlamaForCausalLM"])
IDS = "eagle_aux_hidden_state_layer_ids"
LLAMA3, YARN, LONG = (heads.SCALINGS[kind] for kind in ("llama3", "yarn", "longrope"))
DRAFTS: dict[str, tuple[Callable[[], DraftModule], Format, set[str]]] = {
    "eagle-vllm": (lambda: heads.eagle(own_embeddings=True), "vllm", {"embed_tokens.weight"}),
    "eagle-sglang": (heads.eagle, "sglang", {"fc.bias"}),
    "eagle3": (lambda: heads.eagle3(40, fc_norm=True), "vllm", {"t2d"}),
    "eagle3-whole": (heads.eagle3, "vllm", set()),
    "speculators": (lambda: heads.eagle3(40, fc_norm=True), "speculators", {"t2d"}),
    "dflash": (lambda: heads.dflash(40), "vllm", {"t2d"}),
    "dflash-own": (
        lambda: heads.dflash(own_embeddings=True, own_head=True),
        "vllm",
        {"embed_tokens.weight", "lm_head.weight"},
    ),
    "speculators-dflash": (lambda: heads.dflash(40), "speculators", {"t2d"}),
    "dspark": (heads.dspark, "vllm", set()),
    "speculators-dspark": (lambda: heads.dspark(40), "speculators", {"t2d"}),
    "medusa-vllm": (lambda: heads.medusa(True, 2), "vllm", set()),
    "medusa-original": (lambda: heads.medusa(True, 2), "medusa", set()),
}
"""How a folder is made, and the tensors that may be absent."""


def stored(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    (path,) = folder.glob("*.safetensors")
    return path, load_file(path)


def change_config(folder: Path, **entries: Any) -> None:
    """Entries replace; None removes."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **entries}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


@pytest.fixture(params=DRAFTS)
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder of each kind, in tmp_path."""
    make, name, _ = DRAFTS[request.param]
    write_draft(make(), tmp_path, name, 4, VERIFIER)
    return str(request.param)


def test_every_missing_tensor_is_named(kind: str, tmp_path: Path) -> None:
    path, tensors = stored(tmp_path)
    for name in tensors:
        save_file({other: tensor for other, tensor in tensors.items() if other != name}, path)
        if name in DRAFTS[kind][2]:
            read_draft(tmp_path)
            continue
        with pytest.raises(FormatError, match="missing") as refused:
            read_draft(tmp_path)
        assert str(refused.value) == f"{path}: tensor {name} is missing"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: torch.cat([x, x]), "has shape"),
        (lambda x: x.to(torch.int32), "is int32, must be"),
        (lambda x: x.to(torch.float64), "is float64, must be"),
    ],
    ids=["shape", "int32", "float64"],
)
def test_every_tensor_of_another_shape_or_type_is_named(
    kind: str, change: Callable[[Tensor], Tensor], message: str, tmp_path: Path
) -> None:
    path, tensors = stored(tmp_path)
    for name, tensor in tensors.items():
        if kind == "medusa-original" and name == "0.2.weight" and message == "has shape":
            continue  # the vocabulary is read off this one: the others are then what is wrong
        if (
            kind in ("eagle3", "speculators", "dflash", "speculators-dflash", "speculators-dspark")
            and name in ("d2t", "t2d")
            and "int32" in message
        ):
            continue  # other projects store the maps so
        save_file({**tensors, name: change(tensor)}, path)
        with pytest.raises(FormatError, match=message) as refused:
            read_draft(tmp_path)
        assert f"{path}: tensor {name} " in str(refused.value)


def test_values_that_are_not_finite_and_strangers_are_named(kind: str, tmp_path: Path) -> None:
    path, tensors = stored(tmp_path)
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            spoilt = tensor.clone()
            spoilt.view(-1)[-1] = float("nan")
            save_file({**tensors, name: spoilt}, path)
            with pytest.raises(FormatError, match="has values that are not finite"):
                read_draft(tmp_path)
    save_file({**tensors, "stranger.weight": torch.zeros(1)}, path)
    with pytest.raises(FormatError, match=r"tensor stranger\.weight is not part of this format"):
        read_draft(tmp_path)


@pytest.mark.parametrize("name", ["vllm", "speculators"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["d2t"].add_(1000), "d2t points outside the vocabulary of 61"),
        (lambda t: t["d2t"].sub_(1000), "d2t points outside the vocabulary of 61"),
        (lambda t: t["d2t"][1].sub_(1), "d2t names token 0 more than once"),
        (lambda t: t["t2d"].logical_not_(), "t2d does not mark the ids that d2t names"),
    ],
)
def test_vocabularies_that_do_not_fit(name: Format, change: Any, message: str, tmp_path: Path) -> None:
    draft = heads.eagle3(40)
    write_draft(draft, tmp_path, name, 4, VERIFIER)
    path, tensors = stored(tmp_path)
    if "more than once" in message:
        tensors["d2t"].zero_()
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(FormatError, match=message):
        read_draft(tmp_path)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({IDS: [1, 2, "4"]}, "must be a list of layers"),
        ({IDS: [2, 1, 4]}, rf"{IDS} \[2, 1, 4\]: must be different layers in ascending order, from 1 on"),
        ({IDS: [1, 1, 4]}, "must be different layers in ascending order"),
        ({IDS: [0, 1, 4]}, "in ascending order, from 1 on"),
        ({IDS: None}, f"{IDS}: is absent, and the target's number of layers is not known"),
        ({"eagle_config": {IDS: [0, 1, 2]}}, r"must be one more than those of eagle_config, \[0, 1, 2\]"),
        ({"eagle_config": {IDS: "0, 1"}}, rf"eagle_config\.{IDS} 0, 1: must be a list of layers"),
        ({"eagle_config": [1]}, r"eagle_config \[1\]: must be an object"),
        ({"eagle_config": {"norm_output": True}}, "eagle_config.norm_output True: must equal norm_output False"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "eagle_config.use_mtp_layernorm True: must be False"),
        ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc true: must be false where fc_norm is true"),
        ({"layer_types": ["sliding_attention"]}, "layer_types .*: needs sliding_window"),
        ({"layer_types": [["full_attention"]]}, "must be full_attention or sliding_attention for each of 1 layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: Input should be greater than or equal to 1"),
        ({"num_hidden_layers": [1]}, "num_hidden_layers: Input should be a valid integer"),
        (
            {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": "2"},
            "max_window_layers 2: must be a num",
        ),
        ({"layer_types": ["chunked_attention"]}, "must be full_attention or sliding_attention for each of 1 layers"),
        ({"layer_types": ["full_attention"], "num_hidden_layers": 2}, "for each of 2 layers"),
        ({"sliding_window": 32}, "sliding_window 32: layer_types must say which layers slide"),
        ({"sliding_window": 0, "use_sliding_window": True}, "sliding_window: Input should be greater than or equal to"),
        ({"hidden_act": "gelu"}, "hidden_act gelu: must be silu"),
        ({"mlp_bias": True}, "mlp_bias True: must be False"),
        (
            {"rope_scaling": {"rope_type": "ntk", "factor": 8.0}},
            "rope_type ntk: must be default, mrope, dynamic, linear",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3: low_freq_factor: Field required"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor 1.0: must exceed low_freq_factor"),
        ({"rope_scaling": YARN | {"mscale": 0.7}}, "yarn: .*mscale 0.7: needs mscale_all_dim"),
        ({"rope_scaling": LONG | {"long_factor": [1.0] * 4}}, "long_factor: must equal short_factor"),
        ({"rope_scaling": LONG | {"long_mscale": 2.0}}, "attention_factor, short_mscale and long_mscale: must"),
        ({"rope_scaling": LONG, "head_dim": 10}, "long_factor: 4 numbers, must be half of head_dim 10"),
        ({"rope_parameters": {"type": "linear"}}, "rope_scaling: linear: factor: Field required"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5: must be 1"),
        ({"num_key_value_heads": 4}, "num_attention_heads 6: must be a multiple of num_key_value_heads 4"),
        ({"draft_vocab_size": 62}, "draft_vocab_size 62: must not exceed vocab_size 61"),
        ({"hidden_size": None}, "hidden_size: Field required"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: Input should be greater than 0"),
        ({"rope_theta": float("inf")}, "rope_theta: Input should be a finite number"),
    ],
)
def test_configs_that_ask_for_something_else(entries: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_draft(heads.eagle3(40), tmp_path, "vllm")
    change_config(tmp_path, **({"eagle_config": None} if IDS in entries else {}) | entries)
    with pytest.raises(FormatError, match=message) as refused:
        read_draft(tmp_path)
    assert str(refused.value).startswith(f"{tmp_path / 'config.json'}: ") and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"speculators_model_type": "mtp"}, "mtp: only eagle3, peagle, dflash and dspark can be read"),
        ({"transformer_layer_config": {"model_type": "gemma3"}}, "model_type gemma3: must be llama or qwen3"),
        ({"transformer_layer_config": None}, r"transformer_layer_config\.model_type None: must be llama or qwen3"),
        ({"norm_before_residual": None}, "norm_before_residual: must be named"),
        ({IDS: None}, f"{IDS}: is absent, and the target's number of layers is not known"),
        ({IDS: [4, 2, 1]}, "in ascending order"),
    ],
)
def test_speculators_configs_that_ask_for_something_else(entries: Any, message: str, tmp_path: Path) -> None:
    write_draft(heads.eagle3(40), tmp_path, "speculators", 4, VERIFIER)
    change_config(tmp_path, **entries)
    with pytest.raises(FormatError, match=message):
        read_draft(tmp_path)


@pytest.mark.parametrize(
    ("layout", "entries"),
    [
        ("speculators", {"speculators_model_type": {}}),
        ("speculators", {"transformer_layer_config": {"model_type": "qwen3", "rope_parameters": 2}}),
        ("vllm", {"rope_parameters": 2, "rope_theta": None}),
        ("vllm", {"architectures": ["DFlashDraftModel"], "dflash_config": {"mask_token_id": {}}}),
    ],
)
def test_values_of_another_type_than_any_reader_knows_are_one_line(
    layout: Format, entries: dict[str, Any], tmp_path: Path
) -> None:
    write_draft(heads.dflash(40), tmp_path, layout, 4, VERIFIER)
    change_config(tmp_path, **entries)
    with pytest.raises(FormatError) as refused:
        read_draft(tmp_path)
    assert str(refused.value).startswith(str(tmp_path)) and "\n" not in str(refused.value)


BLOCK = {"mask_token_id": 60, "target_layer_ids": [0, 1, 3]}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"dflash_config": None}, "dflash_config None: must be an object"),
        ({"dflash_config": {**BLOCK, "block_size": 8}}, "dflash_config.block_size 8: must equal block_size 6"),
        ({"dflash_config": {**BLOCK, "use_swa": True}}, "dflash_config.use_swa true: needs swa_window_size"),
        ({"dflash_config": {**BLOCK, "sample_from_anchor": True}}, "sample_from_anchor True: must be False"),
        ({"dflash_config": {**BLOCK, "use_aux_hidden_state": False}}, "use_aux_hidden_state False: must be True"),
        ({"dflash_config": {**BLOCK, "attention_value_scale": 0.5}}, "attention_value_scale 0.5: must be 1"),
        ({"dflash_config": {"target_layer_ids": [0, 1, 3]}}, "mask_token_id: Input should be a valid integer"),
        ({"dflash_config": {**BLOCK, "mask_token_id": 61}}, "mask_token_id 61: must be below vocab_size 61"),
        ({"dflash_config": {"mask_token_id": 60}}, "target_layer_ids None: must be a list of layers"),
        ({"dflash_config": {**BLOCK, "target_layer_ids": [1, "2"]}}, "must be a list of layers"),
        ({"dflash_config": {**BLOCK, "target_layer_ids": [3, 1, 0]}}, "must be different layers in ascending order"),
        ({"dflash_config": BLOCK, "block_size": None}, "block_size: Input should be a valid integer"),
        ({"block_size": 1, "dflash_config": BLOCK}, "block_size 1: must be at least 2"),
        ({"model_type": "llama"}, "model_type llama: must be qwen3"),
        ({"logit_scale": 0.5}, "logit_scale 0.5: must be 1.0"),
        ({"sliding_window": 32}, "sliding_window 32: layer_types must say which layers slide"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types .*: needs sliding_window"),
        ({"rope_theta": None}, "rope_theta: must be named"),
        ({"attention_bias": True}, "attention_bias True: must be False"),
        ({"num_hidden_layers": None}, "num_hidden_layers: Input should be a valid integer"),
        ({"num_hidden_layers": 99}, "num_hidden_layers 99: there are only 28 tensors"),
        (
            {"num_hidden_layers": 10**12, "dflash_config": {**BLOCK, "use_swa": True, "swa_window_size": 9}},
            "num_hidden_layers 1000000000000: there are only 28 tensors",
        ),
    ],
)
def test_dflash_configs_that_ask_for_something_else(entries: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_draft(heads.dflash(40), tmp_path, "vllm")
    change_config(tmp_path, **entries)
    with pytest.raises(FormatError, match=message) as refused:
        read_draft(tmp_path)
    assert str(refused.value).startswith(f"{tmp_path}/") and "\n" not in str(refused.value)


def test_a_mask_with_an_embedding_in_a_file_of_its_own(tmp_path: Path) -> None:
    write_draft(heads.dflash(), tmp_path, "vllm")
    (tmp_path / "mask_embedding.pt").touch()
    with pytest.raises(FormatError, match=r"mask_embedding\.pt: a mask with an embedding of its own is not supported"):
        read_draft(tmp_path)


SLIDING = {
    **heads.LAYER,
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention"] * 2,
    "sliding_window": 8,
}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"sample_from_anchor": True}, "sample_from_anchor True: must be False"),
        (
            {"transformer_layer_config": SLIDING, "sliding_window_non_causal": None},
            "sliding_window_non_causal: must be named: vLLM takes none for true, speculators for false",
        ),
        ({"aux_hidden_state_layer_ids": None}, "aux_layers: Input should be a valid tuple"),
        ({"transformer_layer_config": {"model_type": "llama"}}, "model_type llama: must be qwen3"),
    ],
)
def test_speculators_dflash_configs_that_ask_for_something_else(entries: Any, message: str, tmp_path: Path) -> None:
    write_draft(heads.dflash(40), tmp_path, "speculators", 4, VERIFIER)
    change_config(tmp_path, **entries)
    with pytest.raises(FormatError, match=message):
        read_draft(tmp_path)


@pytest.mark.parametrize(
    ("name", "entries", "message"),
    [
        ("vllm", {"markov_rank": 0, "dflash_config": {**BLOCK, "markov_rank": 0}}, "markov_rank 0: must be above 0"),
        ("vllm", {"dflash_config": {**BLOCK, "markov_rank": 8}}, r"shape \(61, 7\), must be \(61, 8\)"),
        ("vllm", {"dflash_config": {**BLOCK, "markov_head_type": "rnn"}}, "rnn: must be vanilla; SGLang computes"),
        ("speculators", {"markov_head_type": "gated"}, "markov_head_type gated: must be vanilla; SGLang computes"),
        ("speculators", {"sample_from_anchor": None}, "sample_from_anchor: must be named: vLLM takes none for false"),
        ("speculators", {"speculators_model_type": "dflash"}, "sample_from_anchor True: must be False"),
    ],
)
def test_dspark_configs_that_ask_for_something_else(name: Format, entries: Any, message: str, tmp_path: Path) -> None:
    write_draft(heads.dspark(), tmp_path, name, 4, VERIFIER)
    change_config(tmp_path, **entries)
    with pytest.raises(FormatError, match=message):
        read_draft(tmp_path)


@pytest.mark.parametrize("name", ["sglang", "speculators"])
def test_what_these_formats_take_from_the_target(name: Format, tmp_path: Path) -> None:
    for draft in (heads.dflash(own_embeddings=True), heads.dflash(own_head=True)):
        with pytest.raises(InputError, match=rf"format {name}: .* the target's embeddings and head; the draft has"):
            write_draft(draft, tmp_path, name, 4, VERIFIER)
    with pytest.raises(InputError, match=rf"format {name}: .*as wide as its target; 24 and 20 differ"):
        write_draft(heads.dflash(target_hidden_size=20), tmp_path, name, 4, VERIFIER)
    with pytest.raises(
        InputError, match="format medusa: takes no dflash draft; dflash drafts go as vllm, sglang, spec"
    ):
        write_draft(heads.dflash(), tmp_path, "medusa", 4, VERIFIER)
    assert not list(tmp_path.iterdir())


def test_a_bias_that_was_trained_is_refused(tmp_path: Path) -> None:
    write_draft(heads.eagle(), tmp_path, "sglang")
    path, tensors = stored(tmp_path)
    save_file({**tensors, "fc.bias": tensors["fc.bias"] + 0.1}, path)
    with pytest.raises(FormatError, match=r"fc\.bias has values other than 0: heads with a bias are not supported"):
        read_draft(tmp_path)


def test_medusa_configs_that_say_something_else(tmp_path: Path) -> None:
    write_draft(heads.medusa(), tmp_path, "vllm")
    change_config(tmp_path, num_heads=None)
    with pytest.raises(FormatError, match=r"config\.json: num_heads: must be named"):
        read_draft(tmp_path)
    change_config(tmp_path, num_heads=4)
    with pytest.raises(FormatError, match=r"tensor blocks\.3\.layers\.0\.weight is missing"):
        read_draft(tmp_path)
    change_config(tmp_path, num_heads=2)
    with pytest.raises(FormatError, match=r"tensor blocks\.2\.layers\.0\.weight is not part of this format"):
        read_draft(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    write_draft(heads.medusa(), tmp_path, "medusa", 1, VERIFIER)
    change_config(tmp_path, medusa_num_heads=4)
    with pytest.raises(FormatError, match="medusa_num_heads 4: the weights have 3 heads"):
        read_draft(tmp_path)


def test_folders_that_hold_something_else_are_described(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="no such draft folder"):
        read_draft(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(MissingFileError, match=r"config\.json: no such file; the folder holds notes\.txt"):
        read_draft(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["DFlash2DraftModel"], "model_type": "qwen3"}))
    with pytest.raises(MissingFileError, match=r"model\.safetensors: no such file"):
        read_draft(tmp_path)
    names = ["fc.weight", "hidden_norm.weight", *(f"layers.{index}.mlp.up_proj.weight" for index in range(5))]
    save_file({name: torch.zeros(2, 2) for name in names}, tmp_path / "model.safetensors")
    with pytest.raises(FormatError) as refused:
        read_draft(tmp_path)
    assert str(refused.value) == (
        f"{tmp_path}: not a draft that can be read: architectures ['DFlash2DraftModel'], model_type qwen3, tensors "
        "fc.weight, hidden_norm.weight, layers.0.mlp.up_proj.weight, layers.1.mlp.up_proj.weight, "
        "layers.2.mlp.up_proj.weight and 2 more; vLLM reads it"
    )


@pytest.mark.slow
def test_a_pickle_is_refused_with_the_command_that_converts_it(tmp_path: Path) -> None:
    folder = tmp_path / "it's here"
    folder.mkdir()
    draft = heads.eagle()
    write_draft(draft, folder, "vllm")
    shared = dict(draft.state_dict())
    (folder / "model.safetensors").unlink()
    torch.save(shared, folder / "pytorch_model.bin")
    torch.save({}, folder / "optimizer.pt")
    with pytest.raises(
        FormatError, match=r"pytorch_model\.bin: pickled weights are not loaded; .* convert it"
    ) as refused:
        read_draft(folder)
    assert "\n" not in str(refused.value)
    python, *rest = shlex.split(str(refused.value).partition("convert it: ")[2])
    assert python == "python"
    subprocess.run([sys.executable, *rest], check=True)
    again = read_draft(folder)
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in draft.state_dict().items())


@pytest.mark.slow
def test_a_pickled_medusa_file_is_refused_with_the_way_to_convert_it(tmp_path: Path) -> None:
    """As they were published: the file beside a config that names no sizes."""
    draft = heads.medusa(True, 2)
    write_draft(draft, tmp_path, "medusa", 1, VERIFIER)
    path, tensors = stored(tmp_path)
    path.unlink()
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 3, "medusa_num_layers": 2}))
    for place in (tmp_path, tmp_path / "medusa_lm_head.pt"):
        with pytest.raises(FormatError, match=r"medusa_lm_head\.pt: pickled weights are not loaded; if you trust"):
            read_draft(place)
    with pytest.raises(FormatError) as refused:
        read_draft(tmp_path / "medusa_lm_head.pt")
    _, *rest = shlex.split(str(refused.value).partition("convert it: ")[2])
    subprocess.run([sys.executable, *rest], check=True)
    again = read_draft(tmp_path)
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in draft.state_dict().items())


def test_files_that_are_no_draft_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(FormatError, match=r"model\.safetensors: is a file; a draft is a folder or a \.gguf file"):
        read_draft(tmp_path / "model.safetensors")


def test_original_medusa_heads_without_their_last_layers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"0.0.linear.weight": torch.zeros(4, 4)}, tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(FormatError, match=r"tensor 0\.1\.weight is missing"):
        read_draft(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.to(torch.float64), "is F64, must be F32 or BF16 or F16"),
        (lambda x: x.to(torch.int32), "is I32, must be"),
        (lambda x: x.index_fill(0, torch.tensor(0), float("nan")), "has values that are not finite"),
        (lambda x: torch.cat([x, x]), "the weights do not fit config.json"),
    ],
    ids=["float64", "int32", "nan", "shape"],
)
def test_small_drafts_name_the_tensor(change: Callable[[Tensor], Tensor], message: str, tmp_path: Path) -> None:
    write_draft(stand_ins.near_copy(stand_ins.target(4)), tmp_path, "hf")
    path, tensors = stored(tmp_path)
    for name in ("model.norm.weight", "model.layers.2.self_attn.k_proj.weight", "lm_head.weight"):
        save_file({**tensors, name: change(tensors[name])}, path, metadata={"format": "pt"})
        with pytest.raises(FormatError, match=message) as refused:
            read_draft(tmp_path)
        assert name in str(refused.value)


NOT_SGLANG: list[tuple[dict[str, Any], str]] = [
    ({"norm_before_residual": True}, "norm_before_residual True"),
    ({"body": "qwen3"}, "body qwen3"),
    ({"sliding_window": 7, "num_hidden_layers": 2, "full_attention_layers": (0,)}, "sliding_window 7"),
    ({"attention_bias": True}, "attention_bias True"),
]


def test_formats_take_the_families_that_they_are_for(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="format onnx: must be one of hf, vllm, sglang, speculators, medusa, gguf"):
        known_format("onnx")
    with pytest.raises(InputError, match="format sglang: takes no medusa draft; medusa drafts go as vllm, medusa"):
        write_draft(heads.medusa(), tmp_path, "sglang")
    with pytest.raises(InputError, match="format speculators: takes no eagle draft; eagle drafts go as vllm, sglang"):
        check_family("speculators", "eagle")
    with pytest.raises(InputError, match=r"format hf: takes no eagle3 draft; eagle3 .* vllm, sglang, speculators"):
        check_family("hf", "eagle3")
    with pytest.raises(InputError, match="format speculators: names the target; give its hub id"):
        write_draft(heads.eagle3(), tmp_path, "speculators")
    with pytest.raises(InputError, match="format vllm: vLLM does not compute fc_bias True, with which the draft was"):
        write_draft(heads.eagle3(fc_bias=True), tmp_path, "vllm")
    with pytest.raises(InputError, match="format speculators: its heads read features of layers; the draft reads the"):
        write_draft(heads.eagle3(aux_layers=()), tmp_path, "speculators", 4, VERIFIER)
    stretched = heads.eagle3(rope_scaling={**YARN, "attention_factor": 1.5})
    with pytest.raises(InputError, match=r"SGLang does not compute rope_scaling yarn with attention scaled by 1\.5"):
        write_draft(stretched, tmp_path, "sglang")
    for fields, odd in NOT_SGLANG:
        with pytest.raises(InputError, match=f"format sglang: SGLang does not compute {odd}, with which the draft was"):
            write_draft(heads.eagle3(**fields), tmp_path, "sglang")
    for draft in (heads.eagle(own_embeddings=True), heads.eagle3(own_embeddings=True)):
        with pytest.raises(InputError, match="SGLang drafts with the target's embeddings; the draft has its own"):
            write_draft(draft, tmp_path, "sglang")
    assert not list(tmp_path.iterdir())
    (tmp_path / "wide").mkdir()
    write_draft(heads.eagle3(own_embeddings=True, target_hidden_size=20), tmp_path / "wide", "sglang")  # it keeps these
    for name in ("hf", "vllm", "sglang"):
        write_draft(stand_ins.near_copy(stand_ins.target(4)), tmp_path / name, known_format(name))
        assert read_draft(tmp_path / name).family == "small"


def test_the_writer_refuses_weights_of_several_types_and_odd_values(tmp_path: Path) -> None:
    mixed = heads.medusa()
    mixed.lm_heads[2].bfloat16()
    with pytest.raises(FormatError, match=r"is float32 and lm_heads\.2\.weight is bfloat16, must be the same"):
        write_draft(mixed, tmp_path, "vllm")
    for draft, name in ((heads.medusa(), "medusa"), (heads.eagle(), "sglang"), (heads.eagle3(), "speculators")):
        with torch.no_grad():
            next(draft.parameters()).view(-1)[0] = float("inf")
        with pytest.raises(FormatError, match="has values that are not finite"):
            write_draft(draft, tmp_path, known_format(name), 4, VERIFIER)
    assert not list(tmp_path.iterdir())
