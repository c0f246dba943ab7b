"""`--draft FOLDER` of a model whose tokenizer is not the target's: it drafts by way of text."""

from collections.abc import Callable
from pathlib import Path

import pytest
from byte_level import byte_level_tokenizer
from other_ids import under_other_ids
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftforge.errors import InputError
from draftforge.eval.settings import ScoreSettings
from draftforge.pipeline import distill as flow
from draftforge.pipeline import export, generate
from draftforge.pipeline.cli_options import GenerateOptions
from draftforge.pipeline.generate import GeneratedAnswer
from draftforge.pipeline.scoring import Scored
from draftforge.pipeline.workspace import Workspace
from draftforge.recipe import Recipe, load_recipe
from draftforge.specdec.stored_draft import StoredDraft

pytestmark = pytest.mark.usefixtures("stage_cache")
TREES = {"grown": {"kind": "static", "widths": [2, 1]}}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, recipe_in: Callable[..., Path]) -> Recipe:
    recipe = load_recipe(recipe_in(tmp_path_factory.mktemp("other")))
    score = ScoreSettings.model_validate({**recipe.score.model_dump(), "trees": TREES})
    return recipe.model_copy(update={"score": score})


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory, tiny_target_folder: Path) -> Path:
    """The target under other ids."""
    folder = tmp_path_factory.mktemp("theirs")
    model, tokenizer = under_other_ids(
        AutoModelForCausalLM.from_pretrained(tiny_target_folder), AutoTokenizer.from_pretrained(tiny_target_folder)
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_it_is_generated_with(recipe: Recipe, theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    space = Workspace(recipe)

    def said(
        draft: object, tree: str | None = None, temperature: float = 0.0, cascade: str | None = None
    ) -> GeneratedAnswer:
        options = GenerateOptions(
            draft=str(draft),
            draft_tokens=3,
            tree=tree,
            cascade=cascade,
            max_new_tokens=20,
            temperature=temperature,
            seed=7,
        )
        return generate.answer_prompt(space, "How do I reset it?", options)

    assert said(theirs).generation.tokens == said("none").generation.tokens
    assert "has another tokenizer than the target's" in capsys.readouterr().err.replace("\n", " ")
    assert said(theirs, temperature=0.9).rule == "onehot"
    with pytest.raises(InputError, match=r"--tree grown: a draft with another tokenizer .* drafts chains only"):
        said(theirs, "grown")
    with pytest.raises(InputError, match=r"tokenizer\.json is not the target's"):  # it drafts for the target alone
        said(theirs, cascade="lookup")


@pytest.mark.slow
def test_it_is_scored_with(recipe: Recipe, theirs: Path, scored: list[Scored]) -> None:
    """Replayed and decoded, which must agree; and no trees."""
    flow.score(recipe, str(theirs))
    rows = [row for row in scored[-1].counts.to_pylist() if row["draft"] == theirs.name]
    assert {row["tree"] for row in rows} == {""} and {row["method"] for row in rows} == {"replay", "decode"}
    assert sum(row["accepted"] for row in rows) > 0
    (row,) = [row for row in scored[-1].rows if not row.baseline]
    assert row.tau.value > 1.0 and row.speedup.value > 0


def test_what_is_no_whole_model_is_refused_as_before(recipe: Recipe, theirs: Path, tmp_path: Path) -> None:
    target = Workspace(recipe).target
    assert StoredDraft.load(theirs, target, other_tokenizer=True).family == "foreign"
    with pytest.raises(InputError, match=r"tokenizer\.json is not the target's"):
        export.export(recipe, tmp_path / "out", str(theirs), None, None)
    assert not (tmp_path / "out").exists()
    same = tmp_path / "same"
    AutoModelForCausalLM.from_pretrained(theirs).save_pretrained(same)
    assert (
        StoredDraft.load(same, target, other_tokenizer=True).family == "small"
    )  # nothing says that it has another one
    byte_level_tokenizer(["other words"], 280).save_pretrained(same)
    assert StoredDraft.load(same, target, other_tokenizer=True).family == "foreign"
