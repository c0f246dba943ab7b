"""`draftforge plan`: its figures beside rows of docs/experiments.md, and its shapes beside models that are made."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3TextConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from draftforge.cli import main
from draftforge.data.settings import CaptureSettings
from draftforge.pipeline import plan
from draftforge.recipe import Recipe, load_recipe
from draftforge.scripts.profile_rounds import SMOLLM2
from draftforge.specdec.memory_fit import probe_pass
from draftforge.specdec.target_settings import TargetSettings
from draftforge.specdec.targets import Target
from draftforge.train.families import family_of
from draftforge.train.settings import Eagle3Settings, SmallSettings

CONFIGS = Path(__file__).parents[2] / "configs"
H200 = plan.GPUS["h200"]
QWEN3_600M = Qwen3Config(
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
)
MODELS: dict[str, tuple[PretrainedConfig, dict[str, Any], float]] = {
    "qwen3-8b": (
        Qwen3Config(
            vocab_size=151936,
            hidden_size=4096,
            intermediate_size=12288,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=40960,
            tie_word_embeddings=False,
        ),
        {},
        8.19e9,
    ),
    "llama-3.1-8b": (
        LlamaConfig(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=131072,
            tie_word_embeddings=False,
        ),
        {},
        8.03e9,
    ),
    "gemma-3-12b": (
        Gemma3TextConfig(
            vocab_size=262208,
            hidden_size=3840,
            intermediate_size=15360,
            num_hidden_layers=48,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=256,
            max_position_embeddings=131072,
            tie_word_embeddings=True,
        ),
        {"sliding_window": 16, "query_pre_attn_scalar": 8, "pad_token_id": 0},
        11.77e9,
    ),
    "qwen3-30b-a3b": (
        Qwen3MoeConfig(
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            max_position_embeddings=40960,
            tie_word_embeddings=False,
        ),
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        30.53e9,
    ),
}
"""By recipe: the model's sizes, what a tiny one of its class needs beside those of `TINY`, and its parameters."""
MODELS["qwen3-8b-thinking"] = MODELS["qwen3-8b"]
TINY = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
TINY_EYES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2} | {
    "image_size": 28,
    "patch_size": 14,
}


def step(shapes: plan.TargetShapes, accumulation: int = 1, **settings: Any) -> plan.Cost:
    """Cost of one step of EAGLE-3 on 65,536 positions."""
    fields = {"steps": 1, "tokens_per_step": 65536, "logits_bytes": 1 << 29, "warmup_steps": 0, **settings}
    made = Eagle3Settings(accumulation=accumulation, **fields)
    return plan.training_cost(made, shapes, H200, 1)


def test_figures_beside_measured_rows() -> None:
    """The errors that the module's docstring and the comments of the constants name. Rows: docs/experiments.md."""
    smol = plan.TargetShapes.of_config(SMOLLM2)
    base = step(smol)

    def capture(tokens: int, answers: int, longest: int) -> float:
        asked = plan.Answers(answers, 0, 0, 0, tokens / answers, 64)
        settings = CaptureSettings(max_new_tokens=longest, batch_size=2048)
        return plan.capture_cost(settings, smol, asked, H200, 1).seconds

    small = SmallSettings(
        layers=6, steps=1, tokens_per_step=65536, accumulation=2, logits_bytes=1 << 30, warmup_steps=0
    )
    of_small = plan.training_cost(small, smol, H200, 1)
    qwen = plan.TargetShapes.of_config(QWEN3_600M)
    bench = load_recipe(CONFIGS / "smollm2-bench.yaml", ["drafts.eagle3.steps=360", "drafts.eagle3.objective={kl: 1}"])
    whole = plan.costs(bench, smol, plan.Answers(40_046, 0, 0, 0, 7_937_254 / 40_046, 64), H200, 1)
    rows = {
        # fitted
        "capture, 256": (capture(7_608_849, 39_164, 256), 59.9, 4),
        "capture, 512": (capture(12_711_089, 40_000, 512), 126, -12),
        "step": (base.seconds, 0.226, -3),
        "small, step": (of_small.seconds, 65536 / 366_386, -1),
        "small, GiB": (of_small.memory / 2**30, 10.3, 0),
        "step, GiB": (base.memory / 2**30, 10.8, -4),
        # not fitted
        "pass of 2,560": (plan.decoding_seconds(smol, H200, 2560, 192), 16.1e-3, -15),
        "plain, 64": (64 / plan.decoding_seconds(smol, H200, 64, 200), 27_010, -16),
        "32,768": (step(smol, 2, draft_vocabulary=32768).seconds / base.seconds, 244 / 270, -6),
        "16,384": (step(smol, 2, draft_vocabulary=16384).seconds / base.seconds, 214 / 270, -11),
        "two layers": (step(smol, 2, layers=2).seconds / base.seconds, 368 / 270, -7),
        "half, GiB": (step(smol, 2).memory / 2**30, 6.6, -7),
        "quarter, GiB": (step(smol, 4).memory / 2**30, 4.3, -7),
        "two layers, GiB": (step(smol, 2, layers=2).memory / 2**30, 9.5, 1),
        "capture, whole": (whole["capture"].seconds, 108, -14),
        "eagle3, whole": (whole["train eagle3"].seconds, 97, -8),
        "small, whole": (whole["train small"].seconds, 122, -5),
        "Qwen3-0.6B, GiB": (step(qwen, tokens_per_step=8192, logits_bytes=1 << 28).memory / 2**30, 3.59 + 3.77, -7),
    }
    errors = {name: round(100 * (found / measured - 1)) for name, (found, measured, _) in rows.items()}
    assert errors == {name: error for name, (_, _, error) in rows.items()}
    told = str(plan.__doc__).partition("nothing was fitted to:")[2].partition("Nothing larger")[0]
    assert {int(word) for word in re.findall(r"[+-]\d+(?= %)", told)} == {-15, -16, -6, -11, -7, 1, -14, -8, -5}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_recipes_for_real_models(name: str, tmp_path: Path, tiny_target_folder: Path) -> None:
    """It loads, fits its GPU by the model's own sizes, and its draft fits a tiny model of the same class."""
    recipe = load_recipe(CONFIGS / f"{name}.yaml", [f"workdir={tmp_path / 'work'}"])
    config, further, parameters = MODELS[name]
    shapes = plan.TargetShapes.of_config(config)
    assert shapes.parameters == pytest.approx(parameters, rel=0.01)
    answers, _ = plan.answers_of(recipe)
    gpu = plan.GPUS["h200" if name == "qwen3-30b-a3b" else "h100"]
    for stage, cost in plan.costs(recipe, shapes, answers, gpu, 1).items():
        assert cost.memory < gpu.memory, f"{stage}: {cost}"
        assert 0 < cost.seconds < 3 * 86400

    tiny = type(config)(**TINY | further)
    if isinstance(tiny, Gemma3TextConfig):  # the model reads pictures too
        tiny = Gemma3Config(text_config=tiny.to_dict(), vision_config=TINY_EYES, mm_tokens_per_image=4)
        model = AutoModelForImageTextToText.from_config(tiny)
    else:
        model = AutoModelForCausalLM.from_config(tiny)
    model.save_pretrained(tmp_path / "target")
    for pattern in ("*token*", "chat_template*"):
        for file in tiny_target_folder.glob(pattern):
            (tmp_path / "target" / file.name).write_bytes(file.read_bytes())
    target = Target.load(TargetSettings(model=str(tmp_path / "target"), device="cpu"))
    (settings,) = recipe.drafts.values()
    asked = settings.model_copy(update={"draft_vocabulary": 200})
    assert family_of(asked).check(asked, lambda: target) is not None
    small = plan.load_shapes(recipe.changed(f"target.model={tmp_path / 'target'}"))
    speaks = [
        one for name, one in target.model.named_parameters() if "vision" not in name and "multi_modal" not in name
    ]
    assert small.parameters == sum(one.numel() for one in speaks)
    assert 2 * small.cache_bytes == probe_pass(target).token_bytes  # float32 here


def test_of_experts_those_that_are_chosen_count() -> None:
    moe = plan.TargetShapes.of_config(MODELS["qwen3-30b-a3b"][0])
    assert moe.active + 2 * moe.head == pytest.approx(3.35e9, rel=0.02)
    dense = plan.TargetShapes.of_config(SMOLLM2)
    assert dense.active == dense.parameters - dense.head - sum(one.numel() for one in norms(dense))


def norms(shapes: plan.TargetShapes) -> list[Any]:
    return [one for one in shapes.shapes.model.parameters() if one.ndim == 1]


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    SMOLLM2.save_pretrained(tmp_path / "target")
    asked = [str(CONFIGS / "eagle3.yaml"), f"target.model={tmp_path / 'target'}"]
    with pytest.raises(SystemExit) as ended:
        main(["plan", *asked, "--gpu", "h200", "--gpus", "1", "--gpus", "2", "--gpus", "1"])
    said = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    assert "1 GPU: time" in said and "2 GPUs: memory" in said and "33.4 M trained parameters" in said
    assert (
        said.count("1 GPU: time") == 1 and plan.FIT_ERRORS in said and "turns in the sources, copies included" in said
    )
    with pytest.raises(SystemExit) as ended:
        main(["plan", *asked, "drafts.heads={family: medusa}"])
    shown = capsys.readouterr().out
    (row,) = (line for line in shown.splitlines() if "train heads " in line)
    assert ended.value.code == 0 and row.count(" - ") == 5  # time and memory of two counts of GPUs, and disk
    assert "train heads: no estimate: family medusa (eagle3 and small have one)" in shown
    for wrong, words in (
        (["--gpu", "b300"], "'b300' is not one of 'a100', 'h100', 'h200'"),
        (["--gpus", "0"], "--gpus"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["plan", *asked, *wrong])
        assert ended.value.code == 2 and words in capsys.readouterr().err


def test_code_of_a_model_runs_where_the_recipe_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SMOLLM2.save_pretrained(tmp_path)
    given, inner = [], AutoModelForCausalLM.from_config

    def spy(*args: Any, **options: Any) -> Any:
        given.append(options.get("trust_remote_code"))
        return inner(*args, **options)

    monkeypatch.setattr(plan.AutoModelForCausalLM, "from_config", spy)
    recipe = load_recipe(CONFIGS / "eagle3.yaml", [f"target.model={tmp_path}"])
    for says in ("false", "true"):
        plan.load_shapes(recipe.changed(f"target.trust_remote_code={says}"))
    assert given == [False, True]


def test_more_gpus_and_less_of_a_recipe_cost_less(tmp_path: Path) -> None:
    recipe: Recipe = load_recipe(CONFIGS / "eagle3.yaml")
    shapes = plan.TargetShapes.of_config(SMOLLM2)
    answers, _ = plan.answers_of(recipe)
    one, eight = (plan.costs(recipe, shapes, answers, H200, count) for count in (1, 8))
    rendered = plan._START_SECONDS + answers.all * plan._RENDER_SECONDS
    for stage, before in (("capture", rendered), ("train eagle3", plan._START_SECONDS)):
        assert eight[stage].seconds - before < (one[stage].seconds - before) / 3
        assert eight[stage].memory <= one[stage].memory
    less, _ = plan.answers_of(recipe.changed("capture.budget.tokens=50000"))
    assert less.all * less.tokens <= max(50000, less.scored * less.tokens) < answers.all * answers.tokens
    assert plan.mfu(5120) == pytest.approx(0.50, abs=0.01)
    assert plan.mfu(576) == pytest.approx(0.28, abs=0.01)


def test_a_hub_that_cannot_be_asked_ends_with_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.jsonl").write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    recipe = "name: r\ntarget: {model: owner/name}\nmix: {sources: [{kind: messages, path: log.jsonl}]}\n"
    (tmp_path / "recipe.yaml").write_text(recipe + "drafts: {small: {family: small, layers: 2}}\n")
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(tmp_path / "recipe.yaml"), "--gpu", "h100"])
    assert ended.value.code == 3 and "the hub cannot be asked" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 60_000}, "num_hidden_layers 60000: must be 1024 at most"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers 1000000: must be 65,536 at most"),
        ({"vocab_size": 10**13}, "no model has so many"),
        ({"vocab_size": 20_000_000}, "drafts.eagle3: vocab_size = 20000000"),
    ],
)
def test_a_config_that_no_model_has_is_one_line(
    changes: dict[str, int], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    SMOLLM2.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(CONFIGS / "demo.yaml"), f"target.model={tmp_path}", "--gpu", "h100"])
    assert ended.value.code == 2 and said in capsys.readouterr().err
