"""What our attention and cache cannot do is refused in one line when the model is loaded."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from families import REFUSED, SUPPORTED, tiny
from stand_ins import llama

from draftforge.errors import FormatError
from draftforge.specdec.models import Call, CausalModel, check_layers
from draftforge.specdec.target_settings import TargetSettings
from draftforge.specdec.targets import Target

RULES = {
    "sinks": "layer 0 uses attention sinks; not supported",
    "chunked": "layer 0 is chunked_attention: must be full_attention or sliding_attention",
    "recurrent": "layer 0 is linear_attention: must be",
    "convolution": "layer 0 is conv: must be",
    "untold-window": "has a sliding window of 5 that it does not tell its attention",
    "bidirectional": "layer 0 attends to later tokens; must be causal",
    "growing-rope": "rope type dynamic of full_attention layers; not supported",
    "no-cache": "layer 0 takes our key-value cache 0 times, must be once",
    "no-layers": "has no decoder with 4 `layers`",
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_features_are_refused(name: str) -> None:
    model = tiny(*REFUSED[name])
    with pytest.raises(FormatError, match=RULES[name]) as caught:
        CausalModel(model)
    assert str(caught.value).startswith(type(model).__name__)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("extra", "rule"),
    [
        ("attention_mask", "uses an attention mask of its own"),
        ("position_bias", "uses position biases"),
        ("something_new", "uses the attention input something_new"),
    ],
)
def test_an_attention_input_that_we_would_drop_is_refused(extra: str, rule: str) -> None:
    model = llama()
    calls = [Call(layer, True, None, (extra,) if layer == 2 else ()) for layer in range(4)]
    with pytest.raises(FormatError, match=f"layer 2 {rule}; not supported"):
        check_layers(model, model.config, calls)


def test_a_layer_that_runs_twice_is_refused() -> None:
    model = llama()
    calls = [Call(layer, True, None, ()) for layer in (0, 1, 1, 2, 3)]
    with pytest.raises(FormatError, match="layer 1 takes our key-value cache 2 times"):
        check_layers(model, model.config, calls)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_ignores_positions_is_refused(dtype: torch.dtype) -> None:
    """It runs every layer through our cache, so only the numbers tell."""
    model = llama().to(dtype)
    rotary = model.model.rotary_emb
    turn = rotary.forward
    rotary.forward = lambda x, position_ids: turn(x, position_ids - position_ids[:, :1])
    with pytest.raises(FormatError, match="with our key-value cache its logits are off by"):
        CausalModel(model)


@pytest.mark.parametrize("name", SUPPORTED)
def test_half_precision_is_not_mistaken_for_a_difference(name: str) -> None:
    for seed in range(2):
        CausalModel(tiny(*SUPPORTED[name], seed=seed).to(torch.bfloat16))


def test_damaged_weights_are_refused() -> None:
    model = llama()
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(FormatError, match="its logits are not finite"):
        CausalModel(model)


def test_head_that_does_more_than_a_projection_is_refused() -> None:
    model = llama()
    head = model.forward
    model.forward = lambda *args, **kwargs: _twice(head(*args, **kwargs))
    with pytest.raises(FormatError, match="its logits are not head"):
        CausalModel(model)


def _twice(output: object) -> object:
    output.logits = output.logits * 2  # type: ignore[attr-defined]
    return output


def test_embeddings_of_another_size_are_none_for_a_head() -> None:
    model = CausalModel(tiny("opt", {"ffn_dim": 96, "word_embed_proj_dim": 24, "init_std": 0.3}))
    with pytest.raises(FormatError, match="OPTForCausalLM: its embeddings have size 24, must be 48"):
        model.embed(torch.tensor([1]))


def test_loading_a_target_names_its_folder(tiny_target_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    tiny(*REFUSED["sinks"]).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny_target_folder / name).read_bytes())
    with pytest.raises(FormatError, match=f"^{folder} GptOssForCausalLM: layer 0 uses attention sinks"):
        Target.load(TargetSettings(model=str(folder)))


def test_a_model_that_breaks_while_it_is_compared_is_refused(tiny_target_folder: Path) -> None:
    with (
        patch("draftforge.specdec.models.probe", side_effect=TypeError("unexpected argument\nand more")),
        pytest.raises(FormatError, match=r"^target.model: .* cannot be loaded: TypeError: unexpected argument$"),
    ):
        Target.load(TargetSettings(model=str(tiny_target_folder)))
