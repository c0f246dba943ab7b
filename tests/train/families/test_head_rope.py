"""A head's rotary embedding is that of its target, whatever scales it."""

from typing import Any

import heads
import pytest
import torch
from families import GEMMA, HALVES, LONG_ROPE, SUPPORTED, tiny

from draftforge.specdec.drafts.eagle3 import Eagle3Config
from draftforge.specdec.drafts.layers import frequencies
from draftforge.specdec.models import CausalModel
from draftforge.train.families.eagle3 import eagle3_config
from draftforge.train.settings import Eagle3Settings

THETA = 5e5


def scaled(kind: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "llama", {"rope_parameters": {"rope_theta": THETA, "rope_type": kind, **fields}}


BY_LAYER = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}
PHI = {"original_max_position_embeddings": 16, "rope_parameters": LONG_ROPE}
TARGETS: dict[str, tuple[tuple[str, dict[str, Any]], int | None, str | None]] = {  # config, context, scaling
    "plain": (SUPPORTED["llama"], None, None),
    **{kind: (scaled(kind, **heads.SCALINGS[kind]), None, kind) for kind in ("linear", "llama3", "yarn")},
    "yarn-defaults": (scaled("yarn", factor=2.0, original_max_position_embeddings=64), None, "yarn"),
    "dynamic": (scaled("dynamic", factor=4.0), None, None),
    "longrope, short": (("phi3", PHI), 16, "longrope"),
    "longrope, long": (("phi3", PHI), 17, "longrope"),
    "by layer": (("gemma3_text", {**GEMMA, **HALVES, "rope_parameters": BY_LAYER}), None, "linear"),
}


def config_of(model: CausalModel) -> Eagle3Config:
    return eagle3_config(Eagle3Settings(), model, model.vocab_size)


@pytest.mark.parametrize("name", TARGETS)
def test_a_head_rotates_as_its_target_does(name: str) -> None:
    spec, context, kind = TARGETS[name]
    model = CausalModel(tiny(*spec), context)
    config = config_of(model)
    scaling = config.rope_scaling
    assert (scaling.rope_type if scaling is not None else None) == kind
    rotary = model.model.get_decoder().rotary_emb
    layer = "full_attention_" if name == "by layer" else ""
    ours = frequencies(config.rope_theta, 8, scaling)
    torch.testing.assert_close(ours, getattr(rotary, f"{layer}inv_freq"), atol=0, rtol=2e-6)
    assert (1.0 if scaling is None else scaling.stretch) == getattr(rotary, f"{layer}attention_scaling")


def test_the_lists_of_a_long_rope_differ() -> None:
    short, long = (config_of(CausalModel(tiny("phi3", PHI), context)).rope_scaling for context in (16, 17))
    assert short is not None and long is not None and short != long
    assert short.model_dump(mode="json")["short_factor"] == LONG_ROPE["short_factor"]


def test_factors_of_a_part_of_each_head_are_left_out() -> None:
    rope = {**LONG_ROPE, "short_factor": [1.0, 1.1], "long_factor": [2.0, 3.0], "partial_rotary_factor": 0.5}
    model = CausalModel(tiny("phi3", {**PHI, "rope_parameters": rope, "partial_rotary_factor": 0.5}))
    assert config_of(model).rope_scaling is None and config_of(model).rope_theta == 10000.0
