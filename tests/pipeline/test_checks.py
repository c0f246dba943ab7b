"""What would fail only after the training is found out before any work, in one line that names the field."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import loads
import pytest
from byte_level import byte_level_tokenizer
from stand_ins import llama

from draftforge.errors import CorruptDataError, InputError, MissingFileError
from draftforge.eval.cost_table import read_tables, write_tables
from draftforge.pipeline import distill as flow
from draftforge.pipeline import retrain, workspace
from draftforge.pipeline.mix_report import _known_context
from draftforge.pipeline.scoring import check_load
from draftforge.pipeline.workspace import Workspace
from draftforge.recipe import Recipe, load_recipe
from draftforge.specdec.formats.gguf.layouts import write_llama
from draftforge.specdec.requests import TargetSettings
from draftforge.specdec.targets import context_length

WriteRecipe = Callable[..., Path]
LOAD = {"engine": "vllm", "batch_sizes": {1: 1.0}, "context_tokens": 300, "answer_tokens": 16}
VERBS: dict[str, Callable[[Recipe], object]] = {
    "distill": lambda recipe: flow.distill(workspace.open_workspace(recipe)),
    "score": lambda recipe: flow.score(recipe, None),
    "promote": flow.promote,
    "retrain": lambda recipe: retrain.retrain(recipe),
}


def score(**changes: Any) -> dict[str, Any]:
    return {"draft_tokens": [1, 2], "costs": {"rounds": 6, "warmup_rounds": 0}, "load": LOAD, **changes}


@pytest.mark.parametrize("verb", VERBS)
def test_a_load_beyond_the_targets_context_is_refused_before_any_work(verb: str, write_recipe: WriteRecipe) -> None:
    recipe = load_recipe(write_recipe(score=score(load={**LOAD, "context_tokens": 5000})))
    with pytest.raises(InputError, match=r"^score\.load\.context_tokens 5000: .* fit the target's context"):
        VERBS[verb](recipe)
    assert not list(recipe.workdir.glob("mix-*"))


def test_a_draft_of_anybodys_is_not_refused_for_the_recipes_trees(write_recipe: WriteRecipe) -> None:
    """A foreign draft drafts chains only; a deep tree leaves rounds less room."""
    path = write_recipe(score=score(trees={"deep": {"kind": "static", "widths": [1] * 60}}))
    longest = context_length(load_recipe(path).target)
    assert longest is not None
    space = Workspace(load_recipe(path, [f"score.load.context_tokens={longest - 100}"]))
    check_load(space, trees=False)
    with pytest.raises(InputError, match=r"score\.load\.context_tokens"):
        check_load(space)


def test_given_times_that_do_not_hold_at_the_load_are_refused_and_read_once(
    write_recipe: WriteRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Path] = []

    def spy(path: Path) -> Any:
        reads.append(path)
        return read_tables(path)

    monkeypatch.setattr(workspace, "read_tables", spy)
    path = write_recipe(score=score())
    write_tables(tmp_path / "theirs.json", [loads.grid_table(lambda B, L, N, C: 1e-4 * L, [1, 2])])
    given = f"score.costs.fit={tmp_path / 'theirs.json'}"
    space = Workspace(load_recipe(path, [given]))
    check_load(space)
    assert space.given_times and reads == [tmp_path / "theirs.json"]
    assert space.with_recipe(load_recipe(path, [given])).given_times and len(reads) == 2
    with pytest.raises(InputError, match=r"^score\.load: batch 4096 is not within the measured range"):
        VERBS["distill"](load_recipe(path, [given, "score.load.batch_sizes={4096: 1}"]))
    (tmp_path / "theirs.json").write_text("{}")
    with pytest.raises(CorruptDataError, match=r"^score\.costs\.fit: .*theirs\.json: fits: must be a list"):
        flow.score(load_recipe(path, [given]), None)
    with pytest.raises(MissingFileError, match=r"^score\.costs\.fit: "):
        flow.promote(load_recipe(path, [f"score.costs.fit={tmp_path / 'none.json'}"]))
    assert not list((tmp_path / "work").glob("mix-*"))


def test_the_context_is_the_configs_or_the_servers(tiny_target_folder: Path, tmp_path: Path) -> None:
    settings = TargetSettings(model=str(tiny_target_folder))
    longest = context_length(settings)
    assert longest is not None and longest > 128
    assert context_length(settings.model_copy(update={"context": 128})) == 128
    assert _known_context(settings) == longest and _known_context(TargetSettings(model="owner/name")) is None
    (tmp_path / "config.json").write_text('{"model_type": "nobody knows"}')
    assert _known_context(TargetSettings(model=str(tmp_path))) is None
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')  # the architecture's default
    assert context_length(TargetSettings(model=str(tmp_path))) == 2048
    tokenizer, model = byte_level_tokenizer(["the order of the day"] * 2, 280), llama(vocab=283)
    write_llama(model, tokenizer, tmp_path / "target.gguf")
    assert context_length(TargetSettings(model=str(tmp_path / "target.gguf"))) == model.config.max_position_embeddings
