"""Training settings: what is refused, in which words, and what decides a run's identity."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from draftforge.train.optimizers import learning_rate
from draftforge.train.settings import (
    DraftSettings,
    Eagle3Settings,
    EagleSettings,
    MedusaSettings,
    Settings,
    SmallSettings,
)


def phased(*ends: int) -> Any:
    """kl until each of these steps, then tv."""
    return [*({"until": end, "objective": {"kl": 1.0}} for end in ends), {"objective": {"tv": 1.0}}]


READ: TypeAdapter[Settings] = TypeAdapter(DraftSettings)


def test_the_family_decides_the_fields() -> None:
    assert isinstance(READ.validate_python({"family": "small", "layers": 4}), SmallSettings)
    assert isinstance(READ.validate_python({"family": "eagle3", "draft_vocabulary": 100}), Eagle3Settings)
    assert isinstance(READ.validate_python({"family": "eagle", "feature_noise": 0}), EagleSettings)
    assert isinstance(READ.validate_python({"family": "medusa", "blocks": 2}), MedusaSettings)
    for family, field in (("eagle3", "blocks"), ("eagle", "draft_vocabulary"), ("medusa", "draft_vocabulary")):
        with pytest.raises(ValidationError, match=field):
            READ.validate_python({"family": family, field: 4})


PORTABLE = {"fc_norm": False, "norm_before_fc": True, "norm_output": False, "norm_before_residual": False}


@pytest.mark.parametrize(
    ("fields", "differs"),
    [
        ({}, {}),
        ({"serving_engines": ["llama.cpp", "sglang", "vllm"]}, {}),
        ({"serving_engines": ["llama.cpp"]}, {"norm_before_residual": True}),
        ({"serving_engines": ["vllm", "llama.cpp"]}, {"norm_before_residual": True}),
        ({"serving_engines": ["vllm", "sglang"]}, {"fc_norm": True, "norm_before_fc": False, "norm_output": True}),
        (
            {"serving_engines": ["vllm"]},
            {"fc_norm": True, "norm_before_fc": False, "norm_output": True, "norm_before_residual": True},
        ),
        (
            {"serving_engines": ["vllm"], "norm_before_fc": True, "norm_before_residual": False},
            {"norm_output": True},
        ),
        ({"serving_engines": ["sglang"], "fc_norm": False}, {"norm_output": True}),
        ({"fc_norm": True}, {"fc_norm": True, "norm_before_fc": False}),
        ({"norm_before_fc": False, "norm_output": True}, {"norm_before_fc": False, "norm_output": True}),
    ],
)
def test_a_fresh_head_has_the_norms_that_its_engines_compute(fields: dict[str, Any], differs: dict[str, bool]) -> None:
    assert Eagle3Settings(**fields).flags() == {**PORTABLE, **differs}


@pytest.mark.parametrize(
    ("engine", "fields", "message"),
    [
        ("sglang", {"norm_before_residual": True}, "norm_before_residual True: SGLang, of serving_engines, does not"),
        ("llama.cpp", {"fc_norm": True}, r"fc_norm True: llama\.cpp, of serving_engines"),
        ("llama.cpp", {"norm_output": True}, r"norm_output True: llama\.cpp"),
        ("llama.cpp", {"layers": 2}, r"layers 2: llama\.cpp"),
        ("llama.cpp", {"aux_layers": [1, 2]}, r"aux_layers \[1, 2\]: llama\.cpp"),
        ("sglang", {"body": "qwen3"}, "body qwen3: SGLang"),
        ("sglang", {"sliding_window": 512}, "sliding_window 512: SGLang"),
        ("vllm", {"fc_norm": True, "norm_before_fc": True}, "norm_before_fc true: must be false where fc_norm is true"),
    ],
)
def test_what_an_engine_does_not_compute_is_refused_by_its_name(engine: str, fields: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Eagle3Settings.model_validate({"serving_engines": ["vllm", engine], **fields})
    assert engine == "vllm" or Eagle3Settings(**fields)


def test_a_head_is_known_by_its_norms_and_not_by_the_engines_that_they_follow_from() -> None:
    plain, named = Eagle3Settings(), Eagle3Settings(serving_engines=["sglang", "llama.cpp"])
    assert plain.identity() == named.identity() and plain.fingerprint != Eagle3Settings(norm_output=True).fingerprint
    warm = Eagle3Settings(init_from=Path("draft"))
    assert warm.identity()["fc_norm"] is None and "norm_output" not in warm.identity()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"warmup_steps": 30, "steps": 20}, "warmup_steps 30: must not exceed steps 20"),
        ({"score_every": 30, "steps": 20}, "score_every 30: must not exceed steps 20"),
        ({"objective": {}}, "needs at least one entry"),
        ({"objective": {"kl": 1.0, "tv": -0.5}}, "weights above 0"),
        ({"objective": {"kl": {"weight": 0}}}, "weights above 0"),
        ({"objective": {"kl": {"temperature": 0}}}, "greater than 0"),
        ({"objective": {"kll": 1.0}}, "'kl', 'ce'"),
        ({"objective": []}, r"objective \[\]: needs at least one phase"),
        ({"objective": [{"until": 9, "objective": {}}, {"objective": {"kl": 1}}]}, "needs at least one entry"),
        ({"objective": [{"until": 9, "objective": {"kl": 1}}]}, r"until \[9\]: all phases but the last must say"),
        ({"objective": [{"objective": {"kl": 1}}] * 2}, r"until \[None, None\]: all phases but the last must say"),
        ({"objective": phased(9, 9)}, r"until \[9, 9\]: must be ascending and below steps 200"),
        ({"objective": phased(9, 200)}, r"until \[9, 200\]: must be ascending and below steps 200"),
        ({"zero_stage": 2, "engine": "torch"}, "zero_stage 2: needs engine deepspeed, got engine torch"),
        ({"offload_optimizer": True}, "offload_optimizer true: needs zero_stage 1, 2 or 3, got 0"),
        ({"layers": None}, "layers None, from_model None: give exactly one of them"),
        ({"from_model": "a/b"}, "layers 4, from_model a/b: give exactly one of them"),
        ({"layers": 1}, "layers 1: must be at least 2"),
        ({"layers": [0, 5, 3]}, r"layers \[0, 5, 3\]: must be at least 2 different layers in ascending order"),
        ({"lora": {"targets": ["q_proj", "lm_head"]}}, "not the head or the embeddings"),
    ],
)
def test_what_does_not_fit_together_is_said_with_both_values(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SmallSettings(**{"layers": 4, **fields})


def test_captured_layers_are_in_order() -> None:
    with pytest.raises(ValidationError, match=r"aux_layers \[2, 9, 5\]"):
        Eagle3Settings(aux_layers=(2, 9, 5))


def test_a_backbone_starts_before_the_end_and_is_never_split() -> None:
    with pytest.raises(ValidationError, match=r"backbone\.start_step 100: must be less than steps 100"):
        MedusaSettings.model_validate({"steps": 100, "backbone": {}})
    with pytest.raises(ValidationError, match="zero_stage 3: splits weights, which backbone needs whole; set 2"):
        MedusaSettings.model_validate({"backbone": {}, "zero_stage": 3})


def test_a_backbone_is_not_scored_on_the_target_that_it_leaves() -> None:
    scored = {"score_conversations": 8, "score_every": 50, "patience": 1}
    assert MedusaSettings.model_validate(scored).patience == 1
    with pytest.raises(ValidationError, match="score_conversations 8: are replayed on the target as it was"):
        MedusaSettings.model_validate({"backbone": {}, **scored})


def test_identity_is_what_decides_the_result() -> None:
    base = SmallSettings(layers=4)
    elsewhere = {
        "accumulation": 4,
        "zero_stage": 1,
        "offload_optimizer": True,
        "save_every": 5,
        "logits_bytes": 1,
        "init_from": Path("x"),
    }
    assert base.model_copy(update=elsewhere).fingerprint == base.fingerprint
    for update in ({"layers": 5}, {"steps": 7}, {"learning_rate": 1e-4}, {"objective": {"ce": 1.0}}):
        assert base.model_copy(update=update).fingerprint != base.fingerprint


def test_a_setting_that_no_objective_reads_trains_nothing_again() -> None:
    plain, hybrid = Eagle3Settings(), Eagle3Settings(objective={"lk_hybrid": 1.0})
    assert plain.model_copy(update={"lk_eta": 9.0}).fingerprint == plain.fingerprint
    assert hybrid.model_copy(update={"lk_eta": 9.0}).fingerprint != hybrid.fingerprint


def test_the_rate_of_muon_counts_only_where_muon_trains() -> None:
    adamw, muon = Eagle3Settings(), Eagle3Settings(optimizer="muon")
    assert adamw.model_copy(update={"muon_rate": 1e-3}).fingerprint == adamw.fingerprint
    assert muon.model_copy(update={"muon_rate": 1e-3}).fingerprint != muon.fingerprint
    assert adamw.identity()["muon_rate"] == 8e-3  # as drafts that were trained before are recorded


def test_a_weight_a_token_ahead() -> None:
    assert Eagle3Settings(draft_tokens=3).weight_of_steps() == pytest.approx((1.0, 0.8, 0.64))
    assert Eagle3Settings(draft_tokens=2, step_weights=[0.5, 2.0]).weight_of_steps() == (0.5, 2.0)
    with pytest.raises(ValidationError, match=r"step_weights \[1.0\]: must be as many as draft_tokens 4"):
        Eagle3Settings(step_weights=[1.0])
    for wrong in (0.0, [1.0, 1.0, 0.0, 1.0]):
        with pytest.raises(ValidationError, match="greater than 0"):
            Eagle3Settings(step_weights=wrong)
    with pytest.raises(ValidationError, match=r"step_weights 1e\+200: its powers are too large"):
        Eagle3Settings(step_weights=1e200)
    for small in (1e-4, [1.0] * 15 + [1e-40]):
        with pytest.raises(
            ValidationError, match=r"step_weights .*: gives a token weight 1e-(60|40), must be at least"
        ):
            Eagle3Settings(draft_tokens=16, step_weights=small)


def test_phases_follow_each_other() -> None:
    settings = Eagle3Settings(objective=phased(3, 5), steps=8, warmup_steps=1)
    assert [list(settings.objective_at(step)) for step in range(8)] == [["kl"]] * 5 + [["tv"]] * 3
    assert Eagle3Settings().objective_at(7) == {"kl": 1.0}


def test_small_asks_for_a_target_where_stored_signals_say_too_little() -> None:
    stored: list[Any] = [{"kl": 1.0}, {"ce": 0.1, "tv": {"weight": 0.9}}, phased(4)]
    live: list[Any] = [
        {"kl": 1.0, "lk_hybrid": 1.0},
        {"kl": {"temperature": 2.0}},
        {"expected_length": 1.0},
        [{"until": 4, "objective": {"kl": 1.0}}, {"objective": {"jsd": 1.0}}],
    ]
    assert not any(SmallSettings(layers=4, objective=objective).needs_whole_distribution for objective in stored)
    assert all(SmallSettings(layers=4, objective=objective).needs_whole_distribution for objective in live)


def test_the_same_objective_said_in_another_way_is_the_same() -> None:
    said: Any = [{"objective": {"kl": {"weight": 1.0, "temperature": 1.0}}}]
    long = Eagle3Settings(objective=said)
    assert long.fingerprint == Eagle3Settings().fingerprint
    others: list[Any] = [{"kl": {"temperature": 2.0}}, {"kl": 2.0}, phased(5), phased(6), phased(5, 6)]
    for other in others:
        assert Eagle3Settings(objective=other).fingerprint != long.fingerprint
    assert Eagle3Settings(step_weights=0.9).fingerprint != Eagle3Settings().fingerprint
    assert Eagle3Settings(step_weights=[1.0, 0.5, 0.5, 0.5]).fingerprint != Eagle3Settings().fingerprint


def test_what_was_trained_when_step_weights_were_a_decay_keeps_its_identity() -> None:
    said = Eagle3Settings().identity()
    assert said["step_decay"] == 0.8 and "step_weights" not in said and said["objective"] == {"kl": 1.0}


def test_learning_rate_warms_up_and_follows_a_cosine() -> None:
    rates = [learning_rate(step, 20, 4, 1.0, 0.1) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0 and rates[-1] == pytest.approx(0.1)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert learning_rate(0, 1, 0, 1.0, 0.1) == 1.0
    assert learning_rate(0, 1, 1, 1.0, 0.1) == 1.0
