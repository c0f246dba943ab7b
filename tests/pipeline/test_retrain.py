"""A changed target: the old champion is measured, training starts from it, and each target keeps its own draft."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftforge import storage
from draftforge.cli import main
from draftforge.errors import CorruptDataError, LockedError
from draftforge.pipeline import retrain as retraining
from draftforge.pipeline.distill import distill
from draftforge.pipeline.retrain import retrain_champion
from draftforge.pipeline.staleness import STALENESS_FILE
from draftforge.pipeline.workspace import Workspace
from draftforge.recipe import Recipe, load_recipe
from draftforge.registry.lineage import Version
from draftforge.registry.versions import champion
from draftforge.specdec.formats import load_draft, read_meta

WriteRecipe = Callable[..., Path]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("stage_cache")]


def fine_tuned(folder: Path, out: Path) -> Path:
    """The target with slightly moved weights."""
    shutil.copytree(folder, out)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.02 * weight.std() * torch.randn_like(weight)) if weight.dim() > 1 else None
    model.save_pretrained(out)
    return out


def on_target(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe for another target."""
    return recipe.model_copy(update={"target": recipe.target.model_copy(update={"model": str(folder)})})


def champion_of(space: Workspace) -> Version:
    found = champion(space.tracking, space.target_fingerprint)
    assert found is not None
    return found


def test_a_changed_target_gets_a_draft_that_starts_from_the_old_one(
    crowned: Path, tiny_target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space = Workspace(load_recipe(crowned))
    first = champion_of(space)
    after = Workspace(on_target(space.recipe, fine_tuned(tiny_target_folder, tmp_path / "tuned")))
    done = retrain_champion(after)
    stale = done.staleness.champion
    assert done.outcome is not None and stale is not None and stale.reference == first.reference
    causes = {cause.kind: cause for cause in done.staleness.causes}
    assert causes["target"].verdict == "stale" and float(causes["acceptance"].numbers["now"]) >= 1
    assert causes["acceptance"].numbers["paired"] is True  # the same holdout, answered by both targets
    runs = space.tracking.client.search_runs([space.tracking.experiment_id])
    assert {run.info.status for run in runs} == {"FINISHED"}
    # Its start, the old champion as it is, was scored beside its heirs.
    (start,) = (row for row in done.outcome.scored.rows if row.start)
    assert (start.step, start.start) == (0, first.reference) and start.tau.value >= 1
    assert done.outcome.version.lineage.parent == first.reference
    assert champion_of(space) == first  # the old target keeps its draft
    now = champion_of(after)
    assert now.reference == done.outcome.version.reference
    checked = storage.read_json(after.root / STALENESS_FILE)
    assert checked["stale"] is False and checked["causes"] == []  # it has a champion again
    assert checked["champion"] == now.reference
    assert retrain_champion(Workspace(after.recipe)).outcome is None
    again = storage.read_json(after.root / STALENESS_FILE)
    assert again["stale"] is False and again["checked_at"] > checked["checked_at"]
    said = capsys.readouterr().err
    assert re.search(r"target changed: .*: weights changed\n", said) and "up to date" in said


def test_another_tokenizer_means_a_cold_start_said_aloud(
    crowned: Path, tiny_target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_target_folder, other)
    tokenizer = storage.read_json(other / "tokenizer.json")
    names = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    first, second = names[40], names[41]
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    storage.write_json(other / "tokenizer.json", tokenizer)
    done = retrain_champion(Workspace(on_target(load_recipe(crowned), other)))
    assert done.outcome is not None and [cause.verdict for cause in done.staleness.causes] == ["stale", "unknown"]
    assert done.outcome.version.lineage.parent is None
    assert "another tokenizer" in capsys.readouterr().err


def test_a_recipe_of_another_shape_starts_cold_and_says_so(
    crowned: Path, tiny_target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = load_recipe(crowned)
    small, champion_name = recipe.drafts["small"], champion_of(Workspace(recipe)).reference
    changed = on_target(recipe, fine_tuned(tiny_target_folder, tmp_path / "tuned"))
    three = small.model_copy(update={"layers": 3})
    done = retrain_champion(Workspace(changed.model_copy(update={"drafts": {"small": three}})))
    said = capsys.readouterr().err
    assert f"cold start, not from {champion_name}: drafts.small.layers = 3: {champion_name} has 2 layers" in said
    assert done.outcome is not None and done.outcome.version.lineage.parent is None
    assert load_draft(done.outcome.scored.chosen_folder, torch.device("cpu"), torch.float32).draft.lm.num_layers == 3  # type: ignore[union-attr]

    again = on_target(recipe, fine_tuned(tmp_path / "tuned", tmp_path / "twice"))
    both = again.model_copy(update={"drafts": {"two": small, "three": three}})
    kept: list[Recipe] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retraining, "distill", lambda space, *rest: kept.append(space.recipe))
        retrain_champion(Workspace(both))
    starts = {name: settings.init_from for name, settings in kept[0].drafts.items()}
    assert starts["two"] is None and starts["three"] is not None  # the one that has the new champion's shape
    assert "drafts.two starts cold: drafts.two.layers = 2" in capsys.readouterr().err


def test_a_champion_whose_files_are_gone_is_replaced(
    crowned: Path, tiny_target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = load_recipe(crowned)

    def vanish(version: Version) -> Version:
        shutil.rmtree(version.source.removeprefix("file://"))
        capsys.readouterr()
        return version

    lost = vanish(champion_of(Workspace(recipe)))
    other = distill(Workspace(recipe.model_copy(update={"seed": 1})))  # another draft: nothing to compare it with
    assert other is not None and other.decision.promote and other.version.number == 2
    assert f"champion {lost.reference}: its files are gone" in other.decision.reasons[-1]

    lost = vanish(other.version)
    again = retrain_champion(Workspace(recipe.model_copy(update={"seed": 1}))).outcome  # the very same draft
    said = capsys.readouterr().err
    assert again is not None and again.decision.promote and again.version.number == 3
    assert f"champion {lost.reference}: its files are gone (" in said
    assert f"cold start, not from {lost.reference}" in said and "target changed" not in said
    assert retrain_champion(Workspace(recipe.model_copy(update={"seed": 1}))).outcome is None

    lost = vanish(again.version)
    done = retrain_champion(Workspace(on_target(recipe, fine_tuned(tiny_target_folder, tmp_path / "tuned"))))
    said = capsys.readouterr().err
    assert done.outcome is not None and done.outcome.version.lineage.parent is None
    assert "target changed" in said and f"cold start, not from {lost.reference}: its files are gone" in said


def test_a_second_retraining_is_kept_out(write_recipe: WriteRecipe) -> None:
    space = Workspace(load_recipe(write_recipe()))
    with (
        storage.lock(space.root / ".retrain.lock"),
        pytest.raises(LockedError, match="locked by another retraining"),
    ):
        retrain_champion(space)


def test_small_trains_after_its_target_is_deleted(
    write_recipe: WriteRecipe, tiny_target_folder: Path, tmp_path: Path
) -> None:
    target = tmp_path / "mortal"
    shutil.copytree(tiny_target_folder, target)
    path = write_recipe(target={"model": str(target), "device": "cpu"})
    run(["capture", str(path)])
    shutil.rmtree(target)
    run(["train", str(path), "--draft", "small"])
    (last,) = (tmp_path / "work").glob("train-small-*/checkpoints/step-000004")
    assert read_meta(last).family == "small"


def run(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code in (0, None)


def test_a_dry_run_copies_no_note_of_any_size(
    write_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(write_recipe())
    recipe.workdir.mkdir()
    (recipe.workdir / "owner.json").write_text(json.dumps({"recipe": recipe.name}))
    with retraining.scratch_workspace(recipe) as space:
        assert (space.root / "owner.json").is_file()
    monkeypatch.setattr(storage, "MOST_JSON_BYTES", 7)
    too_large = pytest.raises(CorruptDataError, match=r"owner\.json: has \d+ B; notes of up to 7 B are read")
    with too_large, retraining.scratch_workspace(recipe):
        pass
