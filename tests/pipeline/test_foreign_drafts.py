"""`score --draft FOLDER`: a draft of anybody's making, in any layout, without our lineage beside it."""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import heads
import pytest
import torch
from distilled import cached_stages
from safetensors.torch import load_file, save_file

from draftforge.errors import FormatError, InputError
from draftforge.pipeline import distill as flow
from draftforge.pipeline.scoring import Scored
from draftforge.pipeline.workspace import Workspace
from draftforge.recipe import Recipe, load_recipe
from draftforge.specdec.drafts import DraftModule
from draftforge.specdec.drafts.eagle import EagleConfig, EagleDraft
from draftforge.specdec.drafts.eagle3 import Eagle3Config, Eagle3Draft
from draftforge.specdec.drafts.medusa import MedusaConfig, MedusaDraft
from draftforge.specdec.formats import META_FILE, Format, Verifier, convert_draft, write_draft
from draftforge.specdec.stored_draft import StoredDraft

TREES = {"wide": {"kind": "static", "widths": [3, 2]}, "best": {"kind": "measured", "nodes": 5, "levels": 2}}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, recipe_in: Callable[..., Path], finished_stages: Path) -> Recipe:
    folder = tmp_path_factory.mktemp("foreign")
    recipe = load_recipe(recipe_in(folder))
    with cached_stages(finished_stages):
        flow.train(recipe, "eagle3")
    return recipe


def last_checkpoint(recipe: Recipe) -> Path:
    (folder,) = Workspace(recipe).root.glob("train-eagle3-*/checkpoints/step-000004")
    return folder


@pytest.mark.parametrize("layout", ["vllm", "speculators"])
@pytest.mark.slow
def test_the_same_weights_score_the_same_in_every_layout(
    layout: Format, recipe: Recipe, scored: list[Scored], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = tmp_path / "their-head"
    theirs.mkdir()
    convert_draft(last_checkpoint(recipe), theirs, layout, Verifier("them/target", ["LlamaForCausalLM"]))
    flow.score(recipe, str(theirs))
    (theirs / META_FILE).unlink()
    flow.score(recipe, str(theirs))
    ours, other = (
        [(row["config"], row["tau"]) for row in ({**vars(one)} for one in result.rows) if row["draft"] == "their-head"]
        for result in scored
    )
    assert ours == other and ours[0][1].value >= 1.0
    told = capsys.readouterr()
    assert "nothing says which tokenizer" in told.err.replace("\n", " ") and "their-head" in told.out
    assert not list(Workspace(recipe).root.glob("train-small-*/checkpoints"))  # nothing of the recipe is trained for it


@pytest.mark.slow
def test_heads_of_every_family_are_scored_with_trees(recipe: Recipe, scored: list[Scored], tmp_path: Path) -> None:
    target = Workspace(recipe).target
    sizes = {**heads.LAYER, "hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    medusa = MedusaConfig(
        hidden_size=target.hidden_size, vocab_size=target.vocab_size, num_heads=2, num_layers=1, fc_bias=False
    )
    width: dict[str, Any] = {"target_hidden_size": target.hidden_size, "draft_vocab_size": target.vocab_size}
    drafts: dict[str, DraftModule] = {
        "eagle": EagleDraft(EagleConfig(**sizes), False),
        "medusa": MedusaDraft(medusa),
        "dflash": heads.dflash(target.vocab_size, **sizes, **width),
    }
    trees = type(recipe.score).model_validate({"trees": TREES}).trees
    settings = recipe.score.model_copy(update={"trees": trees, "max_conversations": 4, "draft_tokens": [2]})
    for name, draft in drafts.items():
        folder = tmp_path / name
        folder.mkdir()
        write_draft(draft, folder, "vllm")
        flow.score(recipe.model_copy(update={"score": settings}), str(folder))
        table = scored[-1].counts
        assert set(table["tree"].to_pylist()) == {"", "wide", "best"}
        assert {"replay", "decode"} == set(table["method"].to_pylist())
        assert (scored[-1].stage.folder / "counts.parquet").is_file()


def test_what_does_not_fit_is_named(recipe: Recipe, tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    write_draft(heads.eagle(), folder, "vllm")
    with pytest.raises(InputError, match=re.escape(f"{folder}: vocab_size 61: must be ")):
        flow.score(recipe, str(folder))
    with pytest.raises(FileNotFoundError, match=r"--draft nowhere: is neither a draft of the recipe .* nor a folder"):
        flow.score(recipe, "nowhere")
    shutil.copytree(last_checkpoint(recipe), tmp_path / "other")
    meta = json.loads((tmp_path / "other" / META_FILE).read_text())
    (tmp_path / "other" / META_FILE).write_text(json.dumps(meta | {"tokenizer_digest": "0" * 64}))
    with pytest.raises(InputError, match="drafts with another tokenizer"):
        flow.score(recipe, str(tmp_path / "other"))


def rewrite(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_numbers_that_no_tensors_stand_behind_are_refused_at_once(recipe: Recipe, tmp_path: Path) -> None:
    """And not after a module of a billion heads was tried."""
    target = Workspace(recipe).target
    sizes: dict[str, int] = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    write_draft(MedusaDraft(MedusaConfig(num_heads=2, num_layers=1, fc_bias=False, **sizes)), tmp_path, "vllm")
    for field in ("num_heads", "num_hidden_layers"):
        before = (tmp_path / "config.json").read_text()
        rewrite(tmp_path / "config.json", **{field: 10**9})
        with pytest.raises(FormatError, match=f"{field} 1000000000: there are only 4 tensors"):
            flow.score(recipe, str(tmp_path))
        (tmp_path / "config.json").write_text(before)
    rewrite(tmp_path / "config.json", architectures=5)
    with pytest.raises(FormatError, match="architectures 5: must be a list of names"):
        flow.score(recipe, str(tmp_path))


def test_a_tokenizer_beside_a_draft_is_compared(recipe: Recipe, tmp_path: Path) -> None:
    space = Workspace(recipe)
    theirs = tmp_path / "theirs"
    shutil.copytree(space.target_settings.model, theirs)  # the target itself is a draft of its own
    StoredDraft.load(theirs, space.target)
    raw = json.loads((theirs / "tokenizer.json").read_text())
    vocabulary = raw["model"]["vocab"]
    one, other = list(vocabulary)[40:42]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (theirs / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(InputError, match=r"its tokenizer\.json is not the target's"):
        StoredDraft.load(theirs, space.target)


def test_a_draft_made_for_shorter_texts_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    target = Workspace(recipe).target
    sizes = {**heads.LAYER, "hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    write_draft(EagleDraft(EagleConfig(**sizes | {"max_position_embeddings": 8}), False), tmp_path, "vllm")
    with pytest.raises(InputError, match="max_position_embeddings 8: must hold the longest text here"):
        flow.score(recipe, str(tmp_path))


def test_a_tree_beyond_the_drafts_vocabulary_is_refused(recipe: Recipe) -> None:
    trees = {"far": {"kind": "static", "choices": [[250]]}}
    settings = type(recipe.score).model_validate({**recipe.score.model_dump(), "trees": trees})
    with pytest.raises(InputError, match="tree: no first choice is below 200, the tokens that the draft can say"):
        flow.score(recipe.model_copy(update={"score": settings}), str(last_checkpoint(recipe)))


def test_answers_that_a_draft_cannot_say_have_no_perplexity(
    recipe: Recipe, scored: list[Scored], tmp_path: Path
) -> None:
    """A vocabulary of three tokens: the score is kept, and says so."""
    target = Workspace(recipe).target
    layer = {**heads.LAYER, "hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    config = Eagle3Config(**layer, target_hidden_size=target.hidden_size, draft_vocab_size=3, aux_layers=(1, 2, 4))
    write_draft(Eagle3Draft(config, torch.tensor([1, 2, 3]), False), tmp_path, "vllm")
    flow.score(recipe, str(tmp_path))
    (row,) = [row for row in scored[-1].rows if not row.baseline]
    assert row.tau.value >= 1.0 and math.isnan(row.perplexity)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [False, True])
def test_heads_of_speculators_own_defaults_are_scored(
    recipe: Recipe, scored: list[Scored], tmp_path: Path, parallel: bool
) -> None:
    """EAGLE-3 with all norms and a window, and P-EAGLE, whose masks are drafted in one pass."""
    target = Workspace(recipe).target
    layer = {**heads.LAYER, "hidden_size": target.hidden_size, "vocab_size": target.vocab_size, "sliding_window": 9}
    stock = {"norm_before_fc": True, "norm_output": True, "norm_before_residual": True}
    sizes = {"target_hidden_size": target.hidden_size, "draft_vocab_size": target.vocab_size, "aux_layers": (1, 2, 4)}
    verifier = Verifier("owner/model", ["LlamaForCausalLM"])
    write_draft(
        Eagle3Draft(Eagle3Config.model_validate({**layer, **sizes, **stock})), tmp_path, "speculators", 4, verifier
    )
    if parallel:
        path, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
        config = json.loads(path.read_text()) | {"speculators_model_type": "peagle", "mask_token_id": 3}
        path.write_text(json.dumps(config))
        save_file({**load_file(weights), "mask_hidden": torch.randn(1, 1, 3 * target.hidden_size)}, weights)
    flow.score(recipe, str(tmp_path))
    (row,) = [row for row in scored[-1].rows if not row.baseline]
    assert row.tau.value >= 1.0 and math.isfinite(row.perplexity)


def test_a_draft_of_another_form_of_the_target_is_labelled(
    recipe: Recipe, scored: list[Scored], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Made for a quantised target, say: scored on this one's own answers, and never silently."""
    theirs = tmp_path / "theirs"
    shutil.copytree(last_checkpoint(recipe), theirs)
    meta = json.loads((theirs / META_FILE).read_text())
    (theirs / META_FILE).write_text(json.dumps(meta | {"target_fingerprint": "0123456789ab" + "c" * 52}))
    flow.score(recipe, str(theirs))
    (row,) = [row for row in scored[-1].rows if row.draft == "theirs"]
    assert row.trained_for == "0123456789ab" and row.record()["trained_for"] == "0123456789ab"
    told = capsys.readouterr()
    assert "<- chosen, made for target 0123456789ab" in told.out
    assert f"is scored on {Workspace(recipe).target_fingerprint[:12]}" in told.err.replace("\n", " ")
    flow.score(recipe, str(last_checkpoint(recipe)))
    assert not any(row.trained_for for row in scored[-1].rows)
