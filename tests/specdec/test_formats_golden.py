"""Every format in full: the config and the tensors that are written, and that they are read back as they were.

Sizes: hidden 24, MLP 40, 6 query and 2 key-value heads of 8, 61 tokens, of which a reduced draft knows 40.
"""

import json
from pathlib import Path
from typing import Any

import heads
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from draftforge.specdec.drafts import DraftModule
from draftforge.specdec.drafts.dflash import DFlashDraft
from draftforge.specdec.drafts.eagle import EagleDraft
from draftforge.specdec.drafts.eagle3 import Eagle3Draft
from draftforge.specdec.drafts.medusa import MedusaDraft
from draftforge.specdec.formats import Format, Verifier, detect, read_draft, write_draft

VERIFIER = Verifier("owner/model", ["LlamaForCausalLM"])
Tensors = dict[str, tuple[str, tuple[int, ...]]]


EAGLE_CONFIG: dict[str, Any] = {
    "architectures": ["EagleLlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": 1e-05,
    "max_position_embeddings": 256,
    "vocab_size": 61,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "bias": False,
    "dtype": "float32",
    "torch_dtype": "float32",
}
EAGLE_TENSORS: Tensors = {
    "fc.weight": ("float32", (24, 48)),
    "layers.0.self_attn.q_proj.weight": ("float32", (48, 24)),
    "layers.0.self_attn.k_proj.weight": ("float32", (16, 24)),
    "layers.0.self_attn.v_proj.weight": ("float32", (16, 24)),
    "layers.0.self_attn.o_proj.weight": ("float32", (24, 48)),
    "layers.0.mlp.gate_proj.weight": ("float32", (40, 24)),
    "layers.0.mlp.up_proj.weight": ("float32", (40, 24)),
    "layers.0.mlp.down_proj.weight": ("float32", (24, 40)),
    "layers.0.post_attention_layernorm.weight": ("float32", (24,)),
}
EAGLE3_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 24,
    "target_hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 256,
    "vocab_size": 61,
    "draft_vocab_size": 40,
    "tie_word_embeddings": False,
    "fc_norm": False,
    "norm_before_fc": False,
    "norm_output": False,
    "norm_before_residual": False,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
    "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 3]},
    "dtype": "float32",
    "torch_dtype": "float32",
}
EAGLE3_TENSORS: Tensors = {
    "fc.weight": ("float32", (24, 72)),
    "midlayer.self_attn.q_proj.weight": ("float32", (48, 48)),
    "midlayer.self_attn.k_proj.weight": ("float32", (16, 48)),
    "midlayer.self_attn.v_proj.weight": ("float32", (16, 48)),
    "midlayer.self_attn.o_proj.weight": ("float32", (24, 48)),
    "midlayer.mlp.gate_proj.weight": ("float32", (40, 24)),
    "midlayer.mlp.up_proj.weight": ("float32", (40, 24)),
    "midlayer.mlp.down_proj.weight": ("float32", (24, 40)),
    "midlayer.input_layernorm.weight": ("float32", (24,)),
    "midlayer.hidden_norm.weight": ("float32", (24,)),
    "midlayer.post_attention_layernorm.weight": ("float32", (24,)),
    "norm.weight": ("float32", (24,)),
    "lm_head.weight": ("float32", (40, 24)),
    "d2t": ("int64", (40,)),
    "t2d": ("bool", (61,)),
}
WHOLE_EAGLE3_TENSORS: Tensors = {
    **{name: entry for name, entry in EAGLE3_TENSORS.items() if name not in ("d2t", "t2d")},
    "lm_head.weight": ("float32", (61, 24)),
}
SPECULATORS_CONFIG: dict[str, Any] = {
    "architectures": ["Eagle3DraftModel"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.9.0",
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "proposal_type": "greedy",
                "speculative_tokens": 4,
                "verifier_accept_k": 1,
                "accept_tolerance": 0.0,
            }
        ],
        "verifier": {"name_or_path": "owner/model", "architectures": ["LlamaForCausalLM"]},
    },
    "draft_vocab_size": 40,
    "target_hidden_size": None,
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
    "tie_word_embeddings": False,
    "dtype": "float32",
    "transformer_layer_config": {
        "model_type": "llama",
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": 1e-05,
        "max_position_embeddings": 256,
        "vocab_size": 61,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
SPECULATORS_TENSORS: Tensors = {
    "fc.weight": ("float32", (24, 72)),
    "fc_norm.0.weight": ("float32", (24,)),
    "fc_norm.1.weight": ("float32", (24,)),
    "fc_norm.2.weight": ("float32", (24,)),
    "layers.0.self_attn.q_proj.weight": ("float32", (48, 48)),
    "layers.0.self_attn.k_proj.weight": ("float32", (16, 48)),
    "layers.0.self_attn.v_proj.weight": ("float32", (16, 48)),
    "layers.0.self_attn.o_proj.weight": ("float32", (24, 48)),
    "layers.0.mlp.gate_proj.weight": ("float32", (40, 24)),
    "layers.0.mlp.up_proj.weight": ("float32", (40, 24)),
    "layers.0.mlp.down_proj.weight": ("float32", (24, 40)),
    "layers.0.input_layernorm.weight": ("float32", (24,)),
    "layers.0.hidden_norm.weight": ("float32", (24,)),
    "layers.0.post_attention_layernorm.weight": ("float32", (24,)),
    "norm.weight": ("float32", (24,)),
    "lm_head.weight": ("float32", (40, 24)),
    "embed_tokens.weight": ("float32", (61, 24)),
    "d2t": ("int64", (40,)),
    "t2d": ("bool", (61,)),
}
MEDUSA_CONFIG: dict[str, Any] = {
    "architectures": ["MedusaModel"],
    "model_type": "medusa",
    "hidden_size": 24,
    "vocab_size": 61,
    "num_heads": 3,
    "num_hidden_layers": 2,
    "medusa_fc_bias": True,
    "dtype": "float32",
    "torch_dtype": "float32",
}
MEDUSA_TENSORS: Tensors = {
    "blocks.0.layers.0.weight": ("float32", (24, 24)),
    "blocks.0.layers.0.bias": ("float32", (24,)),
    "blocks.0.layers.1.weight": ("float32", (24, 24)),
    "blocks.0.layers.1.bias": ("float32", (24,)),
    "blocks.1.layers.0.weight": ("float32", (24, 24)),
    "blocks.1.layers.0.bias": ("float32", (24,)),
    "blocks.1.layers.1.weight": ("float32", (24, 24)),
    "blocks.1.layers.1.bias": ("float32", (24,)),
    "blocks.2.layers.0.weight": ("float32", (24, 24)),
    "blocks.2.layers.0.bias": ("float32", (24,)),
    "blocks.2.layers.1.weight": ("float32", (24, 24)),
    "blocks.2.layers.1.bias": ("float32", (24,)),
    "lm_heads.0.weight": ("float32", (61, 24)),
    "lm_heads.1.weight": ("float32", (61, 24)),
    "lm_heads.2.weight": ("float32", (61, 24)),
}
ORIGINAL_MEDUSA_CONFIG: dict[str, Any] = {
    "base_model_name_or_path": "owner/model",
    "medusa_num_heads": 3,
    "medusa_num_layers": 2,
    "medusa_fc_bias": True,
    "hidden_size": 24,
    "vocab_size": 61,
    "dtype": "float32",
    "torch_dtype": "float32",
}
ORIGINAL_MEDUSA_TENSORS: Tensors = {
    "0.0.linear.weight": ("float32", (24, 24)),
    "0.0.linear.bias": ("float32", (24,)),
    "0.1.linear.weight": ("float32", (24, 24)),
    "0.1.linear.bias": ("float32", (24,)),
    "0.2.weight": ("float32", (61, 24)),
    "1.0.linear.weight": ("float32", (24, 24)),
    "1.0.linear.bias": ("float32", (24,)),
    "1.1.linear.weight": ("float32", (24, 24)),
    "1.1.linear.bias": ("float32", (24,)),
    "1.2.weight": ("float32", (61, 24)),
    "2.0.linear.weight": ("float32", (24, 24)),
    "2.0.linear.bias": ("float32", (24,)),
    "2.1.linear.weight": ("float32", (24, 24)),
    "2.1.linear.bias": ("float32", (24,)),
    "2.2.weight": ("float32", (61, 24)),
}
DFLASH_CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 24,
    "target_hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 256,
    "vocab_size": 61,
    "draft_vocab_size": 61,
    "tie_word_embeddings": False,
    "block_size": 6,
    "dflash_config": {"block_size": 6, "mask_token_id": 60, "target_layer_ids": [0, 1, 3], "causal": False},
    "dtype": "float32",
    "torch_dtype": "float32",
}
DFLASH_TENSORS: Tensors = {
    "fc.weight": ("float32", (24, 72)),
    "hidden_norm.weight": ("float32", (24,)),
    "norm.weight": ("float32", (24,)),
    "layers.0.input_layernorm.weight": ("float32", (24,)),
    "layers.0.self_attn.q_proj.weight": ("float32", (48, 24)),
    "layers.0.self_attn.k_proj.weight": ("float32", (16, 24)),
    "layers.0.self_attn.v_proj.weight": ("float32", (16, 24)),
    "layers.0.self_attn.o_proj.weight": ("float32", (24, 48)),
    "layers.0.self_attn.q_norm.weight": ("float32", (8,)),
    "layers.0.self_attn.k_norm.weight": ("float32", (8,)),
    "layers.0.post_attention_layernorm.weight": ("float32", (24,)),
    "layers.0.mlp.gate_proj.weight": ("float32", (40, 24)),
    "layers.0.mlp.up_proj.weight": ("float32", (40, 24)),
    "layers.0.mlp.down_proj.weight": ("float32", (24, 40)),
}
DFLASH_TENSORS |= {name.replace("layers.0", "layers.1"): entry for name, entry in DFLASH_TENSORS.items()}
REDUCED_TENSORS: Tensors = {
    **DFLASH_TENSORS,
    "lm_head.weight": ("float32", (40, 24)),
    "d2t": ("int64", (40,)),
    "t2d": ("bool", (61,)),
}
DSPARK_ENTRIES: dict[str, Any] = {
    "sample_from_anchor": True,
    "markov_rank": 7,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
DSPARK_CONFIG: dict[str, Any] = {
    **DFLASH_CONFIG,
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 5,
    "mask_token_id": 60,
    "target_layer_ids": [0, 1, 3],
    **DSPARK_ENTRIES,
    "dflash_config": {**DFLASH_CONFIG["dflash_config"], "block_size": 5, **DSPARK_ENTRIES},
}
MARKOV_TENSORS: Tensors = {
    "markov_head.markov_w1.weight": ("float32", (61, 7)),
    "markov_head.markov_w2.weight": ("float32", (61, 7)),
}
DSPARK_TENSORS: Tensors = {
    **DFLASH_TENSORS,
    **MARKOV_TENSORS,
    "confidence_head.proj.weight": ("float32", (1, 31)),
    "confidence_head.proj.bias": ("float32", (1,)),
}
SPECULATORS_DFLASH_CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "speculators_model_type": "dflash",
    "speculators_version": "0.9.0",
    "speculators_config": {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "proposal_type": "greedy",
                "speculative_tokens": 4,
                "verifier_accept_k": 1,
                "accept_tolerance": 0.0,
            }
        ],
        "verifier": {"name_or_path": "owner/model", "architectures": ["LlamaForCausalLM"]},
    },
    "draft_vocab_size": 40,
    "target_hidden_size": None,
    "block_size": 6,
    "mask_token_id": 60,
    "aux_hidden_state_layer_ids": [1, 2, 4],
    "sliding_window_non_causal": True,
    "sample_from_anchor": False,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "transformer_layer_config": {
        "model_type": "qwen3",
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": 1e-05,
        "max_position_embeddings": 256,
        "vocab_size": 61,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
SCALED: list[Any] = [
    pytest.param(
        heads.eagle3(40, rope_scaling=scaling),
        "sglang",
        "eagle3",
        {**EAGLE3_CONFIG, "rope_scaling": scaling},
        EAGLE3_TENSORS,
        id=f"eagle3-{kind}",
    )
    for kind, scaling in heads.SCALINGS.items()
]
EAGLE_31 = {"fc_norm": True, "norm_output": True}
GOLDEN: list[Any] = [
    pytest.param(heads.eagle(), "vllm", "eagle", EAGLE_CONFIG, EAGLE_TENSORS, id="eagle-vllm"),
    pytest.param(
        heads.eagle(own_embeddings=True),
        "vllm",
        "eagle",
        EAGLE_CONFIG,
        {**EAGLE_TENSORS, "embed_tokens.weight": ("float32", (61, 24))},
        id="eagle-vllm-embeddings",
    ),
    pytest.param(
        heads.eagle(),
        "sglang",
        "eagle",
        {**EAGLE_CONFIG, "architectures": ["LlamaForCausalLMEagle"], "bias": True},
        {**EAGLE_TENSORS, "fc.bias": ("float32", (24,))},
        id="eagle-sglang",
    ),
    pytest.param(
        heads.eagle().bfloat16(),
        "sglang",
        "eagle",
        {
            **EAGLE_CONFIG,
            "architectures": ["LlamaForCausalLMEagle"],
            "bias": True,
            "dtype": "bfloat16",
            "torch_dtype": "bfloat16",
        },
        {name: ("bfloat16", shape) for name, (_, shape) in {**EAGLE_TENSORS, "fc.bias": ("", (24,))}.items()},
        id="eagle-sglang-bfloat16",
    ),
    pytest.param(heads.eagle3(40), "vllm", "eagle3", EAGLE3_CONFIG, EAGLE3_TENSORS, id="eagle3-vllm"),
    pytest.param(heads.eagle3(40), "sglang", "eagle3", EAGLE3_CONFIG, EAGLE3_TENSORS, id="eagle3-sglang"),
    pytest.param(
        heads.eagle3(),
        "vllm",
        "eagle3",
        {**EAGLE3_CONFIG, "draft_vocab_size": 61},
        WHOLE_EAGLE3_TENSORS,
        id="eagle3-whole",
    ),
    pytest.param(
        heads.eagle3(own_embeddings=True, target_hidden_size=20, norm_before_residual=True),
        "vllm",
        "eagle3",
        {**EAGLE3_CONFIG, "draft_vocab_size": 61, "target_hidden_size": 20, "norm_before_residual": True},
        {**WHOLE_EAGLE3_TENSORS, "fc.weight": ("float32", (24, 60)), "embed_tokens.weight": ("float32", (61, 24))},
        id="eagle3-other-width",
    ),
    pytest.param(
        heads.eagle3(40, **EAGLE_31),
        "sglang",
        "eagle3",
        {**EAGLE3_CONFIG, **EAGLE_31},
        {**EAGLE3_TENSORS, **{f"fc_norm.{index}.weight": ("float32", (24,)) for index in range(3)}},
        id="eagle3.1",
    ),
    pytest.param(
        heads.eagle3(40, own_embeddings=True, **EAGLE_31),
        "speculators",
        "speculators",
        {**SPECULATORS_CONFIG, **EAGLE_31},
        SPECULATORS_TENSORS,
        id="speculators",
    ),
    pytest.param(
        heads.eagle3(target_hidden_size=20),
        "speculators",
        "speculators",
        {**SPECULATORS_CONFIG, "draft_vocab_size": 61, "target_hidden_size": 20},
        {
            **{
                name: entry
                for name, entry in SPECULATORS_TENSORS.items()
                if not name.startswith(("fc_norm", "embed")) and name not in ("d2t", "t2d")
            },
            "fc.weight": ("float32", (24, 60)),
            "lm_head.weight": ("float32", (61, 24)),
        },
        id="speculators-whole",
    ),
    *SCALED,
    pytest.param(
        heads.eagle(rope_scaling=heads.SCALINGS["yarn"]),
        "vllm",
        "eagle",
        {**EAGLE_CONFIG, "rope_scaling": heads.SCALINGS["yarn"]},
        EAGLE_TENSORS,
        id="eagle-yarn",
    ),
    pytest.param(
        heads.eagle3(40, own_embeddings=True, rope_scaling=heads.SCALINGS["llama3"], **EAGLE_31),
        "speculators",
        "speculators",
        {
            **SPECULATORS_CONFIG,
            **EAGLE_31,
            "transformer_layer_config": {
                **SPECULATORS_CONFIG["transformer_layer_config"],
                "rope_parameters": {"rope_theta": 10000.0, **heads.SCALINGS["llama3"]},
            },
        },
        SPECULATORS_TENSORS,
        id="speculators-llama3",
    ),
    pytest.param(heads.dflash(), "vllm", "dflash", DFLASH_CONFIG, DFLASH_TENSORS, id="dflash-vllm"),
    pytest.param(heads.dflash(), "sglang", "dflash", DFLASH_CONFIG, DFLASH_TENSORS, id="dflash-sglang"),
    pytest.param(
        heads.dflash(40, own_embeddings=True, target_hidden_size=20, rope_scaling=heads.SCALINGS["yarn"]),
        "vllm",
        "dflash",
        {
            **DFLASH_CONFIG,
            "draft_vocab_size": 40,
            "target_hidden_size": 20,
            "rope_scaling": heads.SCALINGS["yarn"],
        },
        {**REDUCED_TENSORS, "fc.weight": ("float32", (24, 60)), "embed_tokens.weight": ("float32", (61, 24))},
        id="dflash-reduced",
    ),
    pytest.param(
        heads.dflash(own_head=True).bfloat16(),
        "vllm",
        "dflash",
        {**DFLASH_CONFIG, "dtype": "bfloat16", "torch_dtype": "bfloat16"},
        {
            name: ("bfloat16", shape)
            for name, (_, shape) in {**DFLASH_TENSORS, "lm_head.weight": ("", (61, 24))}.items()
        },
        id="dflash-own-head-bfloat16",
    ),
    pytest.param(
        heads.dflash(40),
        "speculators",
        "speculators",
        SPECULATORS_DFLASH_CONFIG,
        REDUCED_TENSORS,
        id="speculators-dflash",
    ),
    pytest.param(
        heads.dflash(),
        "speculators",
        "speculators",
        {**SPECULATORS_DFLASH_CONFIG, "draft_vocab_size": 61},
        DFLASH_TENSORS,
        id="speculators-dflash-whole",
    ),
    *(
        pytest.param(heads.dspark(), name, "dflash", DSPARK_CONFIG, DSPARK_TENSORS, id=f"dspark-{name}")
        for name in ("vllm", "sglang")
    ),
    pytest.param(
        heads.dspark(40, confidence_head=False),
        "speculators",
        "speculators",
        {
            **SPECULATORS_DFLASH_CONFIG,
            "architectures": ["DSparkDraftModel"],
            "speculators_model_type": "dspark",
            "speculators_config": {**SPECULATORS_DFLASH_CONFIG["speculators_config"], "algorithm": "dspark"},
            "block_size": 5,
            **DSPARK_ENTRIES,
            "enable_confidence_head": False,
            "confidence_head_with_markov": False,
        },
        {**REDUCED_TENSORS, **MARKOV_TENSORS, "markov_head.markov_w2.weight": ("float32", (40, 7))},
        id="speculators-dspark",
    ),
    pytest.param(heads.medusa(True, 2), "vllm", "medusa", MEDUSA_CONFIG, MEDUSA_TENSORS, id="medusa-vllm"),
    pytest.param(
        heads.medusa(),
        "vllm",
        "medusa",
        {**MEDUSA_CONFIG, "num_hidden_layers": 1, "medusa_fc_bias": False},
        {name: entry for name, entry in MEDUSA_TENSORS.items() if "bias" not in name and "layers.1" not in name},
        id="medusa-vllm-no-bias",
    ),
    pytest.param(
        heads.medusa(True, 2), "medusa", "medusa", ORIGINAL_MEDUSA_CONFIG, ORIGINAL_MEDUSA_TENSORS, id="medusa-original"
    ),
    pytest.param(
        heads.medusa(False, 2),
        "medusa",
        "medusa",
        ORIGINAL_MEDUSA_CONFIG,
        ORIGINAL_MEDUSA_TENSORS,
        id="medusa-original-no-bias",
    ),
]


@pytest.mark.parametrize(("draft", "name", "layout", "config", "tensors"), GOLDEN)
def test_what_is_written_and_read_back(
    draft: DraftModule, name: Format, layout: str, config: dict[str, Any], tensors: Tensors, tmp_path: Path
) -> None:
    write_draft(draft, tmp_path, name, 4, VERIFIER)
    assert json.loads((tmp_path / "config.json").read_text()) == config
    weights = "medusa_lm_head.safetensors" if name == "medusa" else "model.safetensors"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["config.json", weights])
    stored = load_file(tmp_path / weights)
    assert {n: (str(x.dtype).removeprefix("torch."), tuple(x.shape)) for n, x in stored.items()} == tensors

    again = read_draft(tmp_path)
    assert detect(tmp_path) == layout and type(again) is type(draft)
    assert isinstance(again, EagleDraft | Eagle3Draft | MedusaDraft | DFlashDraft) and isinstance(draft, nn.Module)
    assert again.config == draft.config
    ours, theirs = draft.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


def test_zeros_are_written_where_a_format_wants_a_bias(tmp_path: Path) -> None:
    write_draft(heads.eagle(), tmp_path, "sglang")
    assert not load_file(tmp_path / "model.safetensors")["fc.bias"].any()
    write_draft(heads.medusa(), tmp_path, "medusa", 1, VERIFIER)
    assert not load_file(tmp_path / "medusa_lm_head.safetensors")["2.0.linear.bias"].any()


def test_d2t_is_what_to_add_to_a_draft_id(tmp_path: Path) -> None:
    draft = heads.eagle3(40)
    write_draft(draft, tmp_path, "vllm")
    stored = load_file(tmp_path / "model.safetensors")
    ids = [draft_id + offset for draft_id, offset in enumerate(stored["d2t"].tolist())]
    assert ids == draft.draft_ids.tolist() == [token for token, inside in enumerate(stored["t2d"].tolist()) if inside]
