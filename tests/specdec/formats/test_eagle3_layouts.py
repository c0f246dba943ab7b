"""EAGLE-3 heads as trainers and published repositories write them: names, numbers and types say what is computed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import heads
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftforge.errors import FormatError
from draftforge.specdec.drafts.eagle3 import Eagle3Draft
from draftforge.specdec.drafts.peagle import PEagleDraft
from draftforge.specdec.formats import read_draft, write_draft

IDS = "eagle_aux_hidden_state_layer_ids"
Tensors = dict[str, Tensor]
Change = Callable[[Tensors], Any]
LATER = "layers.1.input_layernorm.weight"
SECOND = "layers.1.hidden_norm.weight"


def nothing(tensors: Tensors) -> None:
    pass


def renamed(old: str, new: str) -> Change:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(old)]:
            tensors[name.replace(old, new, 1)] = tensors.pop(name)

    return change


def retyped(**dtypes: torch.dtype) -> Change:
    return lambda tensors: tensors.update({name: tensors[name].to(dtype) for name, dtype in dtypes.items()})


def written(folder: Path, draft: Eagle3Draft, config: dict[str, Any], change: Change = nothing) -> Path:
    """The head in our layout, after the changes; None removes an entry of the config."""
    write_draft(draft, folder, "vllm")
    path, weights = folder / "config.json", folder / "model.safetensors"
    entries = {**json.loads(path.read_text()), **config}
    path.write_text(json.dumps({name: value for name, value in entries.items() if value is not None}))
    tensors = load_file(weights)
    change(tensors)
    save_file(tensors, weights)
    return folder


def test_published_config(tmp_path: Path) -> None:
    """No list of layers, an empty one, and the number of layers of the target from outside."""
    draft = heads.eagle3(40, aux_layers=(2, 4, 5))
    configs: list[dict[str, Any]] = [{IDS: None, "eagle_config": None}, {IDS: [], "eagle_config": {IDS: []}}]
    for number, config in enumerate(configs):
        folder = tmp_path / str(number)
        folder.mkdir()
        again = read_draft(written(folder, draft, config), target_layers=8)
        assert isinstance(again, Eagle3Draft) and again.config == draft.config


WINDOWS: list[tuple[int, dict[str, Any], list[int | None]]] = [
    (1, {"layer_types": ["sliding_attention"], "sliding_window": 32}, [32]),
    (1, {"layer_types": ["full_attention"], "sliding_window": 32}, [None]),
    (2, {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 7}, [None, 7]),
    (2, {"layer_types": ["sliding_attention", "full_attention"] * 18, "sliding_window": 7}, [7, None]),  # the target's
    (1, {"use_sliding_window": True, "sliding_window": 32}, [32]),
    (1, {"use_sliding_window": False, "sliding_window": 32}, [None]),
    (2, {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}, [None, 32]),
    (1, {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 28}, [None]),
    (1, {"use_sliding_window": True, "sliding_window": None}, [None]),
]


@pytest.mark.parametrize(("layers", "config", "windows"), WINDOWS)
def test_windows(layers: int, config: dict[str, Any], windows: list[int | None], tmp_path: Path) -> None:
    again = read_draft(written(tmp_path, heads.eagle3(40, num_hidden_layers=layers), config))
    assert isinstance(again, Eagle3Draft) and again.config.windows == windows


def table(tensors: Tensors) -> None:
    frequency_F = 10000.0 ** (-torch.arange(4) / 4)
    tensors["midlayer.self_attn.rotary_emb.inv_freq"] = frequency_F.bfloat16()


MEANS_THE_SAME: dict[str, tuple[dict[str, Any], dict[str, Any], Change]] = {
    "int32-d2t": ({}, {}, retyped(d2t=torch.int32)),
    "uint8-t2d": ({}, {}, retyped(t2d=torch.uint8)),
    "inv-freq": ({}, {}, table),
    "layers.0": ({}, {}, renamed("midlayer.", "layers.0.")),
    "trt-llm": ({"num_hidden_layers": 3}, {}, renamed("layers.", "midlayer.")),
    "speculators-layers": ({"num_hidden_layers": 2}, {}, lambda t: t.pop(SECOND)),
    "sglang-layers": ({"num_hidden_layers": 2}, {}, lambda t: t.pop(LATER)),
    "model-type-qwen2": ({}, {"model_type": "qwen2"}, nothing),
    "model-type-phi3": ({}, {"model_type": "phi3", "partial_rotary_factor": 1.0}, nothing),
    "model-type-qwen3": ({}, {"model_type": "qwen3"}, nothing),
    "angelslim": ({}, {"architectures": ["Eagle3LlamaForCausalLM"], "modal_type": "LLM"}, nothing),
    "qwen3-body": ({"body": "qwen3"}, {"architectures": ["LlamaForCausalLMEagle3"]}, nothing),
    "vl": ({}, {"architectures": ["Eagle3Qwen3vlForCausalLM"]}, nothing),
    "mrope": ({}, {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}, nothing),
    "mrope-default": (
        {},
        {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
        nothing,
    ),
    "dynamic": ({}, {"rope_scaling": {"rope_type": "dynamic", "factor": 8.0}}, nothing),
    "yarn-mrope": (
        {"rope_scaling": heads.SCALINGS["yarn"]},
        {"rope_scaling": {**heads.SCALINGS["yarn"], "mrope_interleaved": True}},
        nothing,
    ),
    "modelopt": (
        {"aux_layers": (), "num_hidden_layers": 4},
        {
            "eagle_config": {
                IDS: [],
                "use_aux_hidden_state": False,
                "use_input_layernorm_in_first_layer": True,
                "use_last_layernorm": True,
                "use_mtp_layernorm": False,
            },
            IDS: None,
        },
        nothing,
    ),
    "modelopt-flags": (
        {"norm_before_fc": True},
        {"norm_before_fc": None, "eagle_config": {IDS: [0, 1, 3], "norm_before_fc": True}},
        nothing,
    ),
    "nothing-of-fc": ({"target_hidden_size": 20}, {"target_hidden_size": None}, nothing),
    "q-k-v-biases": (
        {"attention_bias": True},
        {"attention_bias": False, "model_type": "qwen2"},
        lambda t: t.pop("midlayer.self_attn.o_proj.bias"),
    ),
    "more-layers-read": ({"aux_layers": (1, 2, 4, 5, 7)}, {"num_aux_hidden_states": None}, nothing),
}


@pytest.mark.parametrize("kind", MEANS_THE_SAME)
def test_names_and_types_that_mean_the_same(kind: str, tmp_path: Path) -> None:
    fields, config, change = MEANS_THE_SAME[kind]
    draft = heads.eagle3(40, **fields)
    if kind == "q-k-v-biases":
        torch.nn.init.zeros_(draft.midlayer.self_attn.o_proj.bias)
    again = read_draft(written(tmp_path, draft, config, change))
    assert isinstance(again, Eagle3Draft) and again.config == draft.config
    ours, theirs = draft.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_bias_of_fc_and_of_attention_from_the_file_alone(tmp_path: Path) -> None:
    """vLLM has no bias of fc, so the file is SGLang's."""
    draft = heads.eagle3(40, fc_bias=True)
    write_draft(draft, tmp_path, "sglang")
    assert json.loads((tmp_path / "config.json").read_text())["bias"] is True
    again = read_draft(tmp_path)
    assert isinstance(again, Eagle3Draft) and again.config == draft.config
    assert torch.equal(again.fc.bias, draft.fc.bias)


def test_a_stretch_of_its_own(tmp_path: Path) -> None:
    """mscale and mscale_all_dim as DeepSeek's, an attention factor, and a ramp that is not truncated."""
    yarn = heads.SCALINGS["yarn"]
    for number, (entries, stretch) in enumerate(
        [
            ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
            ({"mscale": 0.7, "mscale_all_dim": 1.0}, (0.07 * 1.3862944 + 1) / (0.1 * 1.3862944 + 1)),
            ({"mscale": 1.0}, 0.1 * 1.3862944 + 1),
            ({"attention_factor": 1.25}, 1.25),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        again = read_draft(written(folder, heads.eagle3(40), {"rope_scaling": {**yarn, **entries}}))
        assert isinstance(again, Eagle3Draft) and again.config.rope_scaling is not None
        assert again.config.rope_scaling.stretch == pytest.approx(stretch)


def test_a_whole_vocabulary_in_another_order(tmp_path: Path) -> None:
    """Engines compute draft id + d2t, here a permutation of all tokens; so the head's rows change places."""
    draft, order = heads.eagle3(), torch.randperm(61, generator=torch.Generator().manual_seed(0))

    def permute(tensors: Tensors) -> None:
        tensors["d2t"] = order - torch.arange(61)
        tensors["t2d"] = torch.ones(61, dtype=torch.bool)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order]

    again = read_draft(written(tmp_path, draft, {}, permute))
    assert isinstance(again, Eagle3Draft)
    assert torch.equal(again.lm_head.weight, draft.lm_head.weight) and not again.d2t.any()


def test_a_reduced_vocabulary_that_is_not_sorted(tmp_path: Path) -> None:
    draft, order = heads.eagle3(40), torch.randperm(40, generator=torch.Generator().manual_seed(0))

    def permute(tensors: Tensors) -> None:
        tensors["d2t"] = draft.draft_ids[order] - torch.arange(40)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order]

    again = read_draft(written(tmp_path, draft, {}, permute))
    assert isinstance(again, Eagle3Draft)
    both = [torch.zeros(61, 24).index_copy(0, one.draft_ids, one.lm_head.weight.data) for one in (draft, again)]
    assert torch.equal(*both)


@pytest.mark.parametrize("name", ["pard_token", "ptd_token_id", "mask_token_id"])
def test_parallel_heads_are_known_by_their_learned_state(name: str, tmp_path: Path) -> None:
    hidden = torch.randn(72)
    again = read_draft(written(tmp_path, heads.eagle3(40), {name: 9}, lambda t: t.update(mask_hidden=hidden)))
    assert isinstance(again, PEagleDraft) and again.mask_token_id == 9
    assert torch.equal(again.mask_hidden.flatten(), hidden)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], Change, str]] = {
    "marks": ({}, {}, lambda t: t.update(t2d=2 * t["t2d"].to(torch.uint8)), "t2d has values other than 0 and 1"),
    "table": ({}, {"rope_theta": 20000.0}, table, "rotary_emb.inv_freq has other rotary frequencies than the config"),
    "norms": (
        {"num_hidden_layers": 2},
        {},
        lambda t: t.update({SECOND: t[SECOND] + 1}),
        f"{SECOND} is not {LATER}: vLLM reads the one, SGLang the other",
    ),
    "biases": ({}, {"attention_bias": True}, nothing, r"self_attn\.q_proj\.bias is missing"),
    "read-layers": ({}, {IDS: [1, 2, 3, 4], "eagle_config": None}, nothing, r"fc\.weight has shape"),
    "layers": ({}, {"num_hidden_layers": 2}, nothing, r"layers\.1\.input_layernorm\.weight is missing"),
    "many-layers": ({}, {"num_hidden_layers": 99}, nothing, "num_hidden_layers 99: there are only 15 tensors"),
    "mask": ({}, {}, lambda t: t.update(mask_hidden=torch.zeros(72)), "mask_token_id None: must be a token id below"),
    "twice": (
        {"num_hidden_layers": 2},
        {},
        lambda t: t.update({name.replace("layers", "midlayer"): t[name] + 1 for name in [*t] if "layers.1" in name}),
        "holds a layer twice, as midlayer.0 and as layers.0",
    ),
    "flat-fc": ({}, {"target_hidden_size": None}, lambda t: t.update({"fc.weight": t["fc.weight"].flatten()}), "shape"),
    "endless": (
        {},
        {"num_hidden_layers": 10**12, "sliding_window": 9, "use_sliding_window": True},
        nothing,
        "max_window_layers 0: must be a number, of at most 1024 layers; there are 1000000000000",
    ),
    "phi3": ({}, {"model_type": "phi3", "rms_norm_eps": None}, nothing, "rms_norm_eps: must be named for model_type"),
    "alpha": ({}, {"rope_scaling": {"type": "dynamic", "alpha": 9.0}}, nothing, r"alpha 9\.0: vLLM reads it"),
    "grows": (
        {},
        {"rope_scaling": {"type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 64}},
        nothing,
        "must be max_position_embeddings, 256",
    ),
    "mscale": (
        {},
        {"rope_scaling": {**heads.SCALINGS["yarn"], "mscale": 0.7}},
        nothing,
        "mscale 0.7: needs mscale_all_dim",
    ),
    "scale": ({}, {"logit_scale": 0.5}, nothing, "logit_scale 0.5: must be 1.0; vLLM computes it"),
    "mlp": ({}, {"mlp_bias": True}, nothing, "mlp_bias True: must be False; vLLM and TensorRT-LLM compute it"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_readers_do_not_agree_on_is_refused(kind: str, tmp_path: Path) -> None:
    fields, config, change, message = REFUSED[kind]
    with pytest.raises(FormatError, match=message) as refused:
        read_draft(written(tmp_path, heads.eagle3(40, **fields), config, change))
    assert str(refused.value).startswith(f"{tmp_path}/")
