"""A new mix for a new target: what the old champion was trained on stays out of the holdout that judges its heir."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftforge.data.mix import load_mix
from draftforge.pipeline import stages
from draftforge.pipeline.stages import Stages, mix_stage
from draftforge.pipeline.staleness_evidence import inherit_mix
from draftforge.pipeline.workspace import Workspace
from draftforge.recipe import Recipe, load_recipe
from draftforge.registry import lineage

WriteRecipe = Callable[..., Path]


def champion_of(mix_fingerprint: str, parent: str | None = None) -> Any:
    known = SimpleNamespace(mix_fingerprint=mix_fingerprint, parent=parent)
    return SimpleNamespace(reference="tiny/2", lineage=known)


def dealt_anew(recipe: Recipe) -> Recipe:
    changed = recipe.model_copy(update={"mix": recipe.mix.model_copy(update={"salt": "another"})})
    changed._base_dir = recipe.base_dir
    return changed


def test_a_new_holdout_holds_nothing_that_the_champion_was_trained_on(write_recipe: WriteRecipe) -> None:
    recipe = load_recipe(write_recipe())
    before = mix_stage(Stages(Workspace(recipe)))
    seen = {one.id for one in load_mix(before.folder) if one.split != "holdout"}
    space = Workspace(dealt_anew(recipe))
    for _ in range(2):  # a killed retraining that comes again changes nothing
        inherit_mix(space, champion_of(before.fingerprint))
        after = mix_stage(Stages(space))
    held_out = {one.id for one in load_mix(after.folder) if one.split == "holdout"}
    assert held_out and not held_out & seen
    assert mix_stage(Stages(Workspace(space.recipe))) == after  # later verbs find the same mix
    assert mix_stage(Stages(Workspace(recipe))).fingerprint != after.fingerprint


def test_the_same_mix_is_used_as_it_is(write_recipe: WriteRecipe, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = load_recipe(write_recipe())
    space = Workspace(recipe)
    before = mix_stage(Stages(space))
    inherit_mix(space, champion_of(before.fingerprint))
    assert mix_stage(Stages(Workspace(recipe))) == before
    inherit_mix(space, champion_of("0" * 64))
    assert "is not in" in capsys.readouterr().err and space.ancestors == []


def test_a_mix_that_was_read_otherwise_is_made_again_and_stays_an_ancestor(
    write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(write_recipe())
    before = mix_stage(Stages(Workspace(recipe)))
    seen = {one.id for one in load_mix(before.folder) if one.split != "holdout"}
    monkeypatch.setattr(stages, "READING", stages.READING + 1)
    assert mix_stage(Stages(Workspace(recipe))).folder != before.folder
    space = Workspace(recipe)
    inherit_mix(space, champion_of(before.fingerprint))
    held_out = {one.id for one in load_mix(mix_stage(Stages(space)).folder) if one.split == "holdout"}
    assert space.ancestors == [before.fingerprint] and held_out and not held_out & seen


def test_where_the_champions_mix_is_gone_its_parents_is_inherited(
    write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which carries on what the mixes before it held."""
    space = Workspace(load_recipe(write_recipe()))
    parents = mix_stage(Stages(space)).fingerprint
    monkeypatch.setattr(lineage, "get_version", lambda tracking, reference: champion_of(parents))
    inherit_mix(space, champion_of("0" * 64, "tiny/1"))
    assert space.ancestors == [parents]
