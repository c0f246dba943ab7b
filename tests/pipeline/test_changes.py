"""Where a changed target is noticed: a hub revision and an alias of MLflow. No network."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import OfflineModeIsEnabled
from transformers import AutoModelForCausalLM

from draftforge.cli import main
from draftforge.errors import HubError, MissingFileError
from draftforge.pipeline import retrain, staleness
from draftforge.pipeline.staleness import is_hub_id, pin_revision
from draftforge.pipeline.workspace import Workspace
from draftforge.recipe import Recipe, load_recipe
from draftforge.registry.versions import resolve_models_uri

WriteRecipe = Callable[..., Path]
FIRST, SECOND = "1" * 40, "2" * 40


def hub_recipe(write_recipe: WriteRecipe, **target: Any) -> Recipe:
    return load_recipe(write_recipe(target={"model": "owner/name", "device": "cpu", **target}))


def hub_at(monkeypatch: pytest.MonkeyPatch, answer: str | Exception | None) -> list[tuple[str, str | None]]:
    """A hub that names this commit, or fails so; what it was asked."""
    asked: list[tuple[str, str | None]] = []

    def model_info(self: HfApi, repo_id: str, *, revision: str | None = None, timeout: float) -> Any:
        asked.append((repo_id, revision))
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(sha=answer)

    monkeypatch.setattr(HfApi, "model_info", model_info)
    return asked


def test_a_branch_is_pinned_to_its_commit_now(
    write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = hub_recipe(write_recipe, revision="main")
    asked = hub_at(monkeypatch, FIRST)
    assert pin_revision(recipe).target.revision == FIRST and asked == [("owner/name", "main")]
    assert pin_revision(recipe).base_dir == recipe.base_dir
    hub_at(monkeypatch, SECOND)
    assert pin_revision(hub_recipe(write_recipe)).target.revision == SECOND
    assert "target.model owner/name: its default branch is at 222222222222" in capsys.readouterr().err


def test_a_commit_and_a_folder_need_no_hub(
    write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch, tiny_target_folder: Path
) -> None:
    asked = hub_at(monkeypatch, FIRST)
    for recipe in (hub_recipe(write_recipe, revision=SECOND), load_recipe(write_recipe())):
        assert pin_revision(recipe) is recipe
    assert not asked
    for model in (str(tiny_target_folder), "models:/name@alias", "./a/b", "~/a", "a/b/c", "name", "a/b.gguf"):
        assert not is_hub_id(model), model
    assert is_hub_id("owner/name")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OfflineModeIsEnabled("no"), "switched off by HF_HUB_OFFLINE"),
        (ConnectionError("no route to host"), "no route to host"),
        (ValueError("whatever a transport raises"), "whatever a transport raises"),
        (None, "names no commit"),
    ],
)
def test_a_hub_that_cannot_be_asked_ends_in_one_line(
    error: Exception | None, said: str, write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = hub_recipe(write_recipe)
    if not isinstance(error, OfflineModeIsEnabled):
        monkeypatch.delenv("HF_HUB_OFFLINE")
    hub_at(monkeypatch, error)
    with pytest.raises(HubError, match=said) as raised:
        pin_revision(recipe)
    assert raised.value.exit_code == 3 and "pin target.revision" in str(raised.value)


def test_the_command_leaves_everything_alone_when_the_hub_is_away(
    write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = write_recipe(target={"model": "owner/name", "device": "cpu"})
    hub_at(monkeypatch, ConnectionError("no route to host"))
    with pytest.raises(SystemExit) as ended:
        main(["retrain", str(path)])
    assert ended.value.code == 3 and not (tmp_path / "work").exists()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: target.model owner/name: the hub cannot be asked")


def test_unknown_names_are_the_users_mistake(write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    class MissingError(Exception):
        pass

    monkeypatch.setattr(staleness, "RepositoryNotFoundError", MissingError)
    monkeypatch.setattr(staleness, "RevisionNotFoundError", KeyError)
    hub_at(monkeypatch, MissingError())
    with pytest.raises(MissingFileError, match="no such repository on the hub"):
        pin_revision(hub_recipe(write_recipe))
    hub_at(monkeypatch, KeyError())
    with pytest.raises(MissingFileError, match=r"target\.revision: v9: owner/name has no such branch"):
        pin_revision(hub_recipe(write_recipe, revision="v9"))


def test_an_alias_that_moves_in_mlflow_is_another_target(
    write_recipe: WriteRecipe, tiny_target_folder: Path, tmp_path: Path
) -> None:
    """The served model is registered in the same store: version 1, then a fine-tuned version 2 under the same alias."""
    here = Workspace(load_recipe(write_recipe()))
    client = here.tracking.client
    client.create_registered_model("assistant")
    moved = tmp_path / "moved"
    shutil.copytree(tiny_target_folder, moved)
    model = AutoModelForCausalLM.from_pretrained(moved)
    with torch.no_grad():
        next(model.parameters()).mul_(1.01)
    model.save_pretrained(moved)
    found = []
    for folder in (tiny_target_folder, moved):
        run = client.create_run(here.tracking.experiment_id)
        client.log_artifacts(run.info.run_id, str(folder), "model")
        version = client.create_model_version("assistant", f"{run.info.artifact_uri}/model", run.info.run_id)
        client.set_registered_model_alias("assistant", "production", version.version)
        target = {"model": "models:/assistant@production", "device": "cpu"}
        found.append(Workspace(load_recipe(write_recipe(target=target))).target_fingerprint)
    assert found[0] == here.target_fingerprint != found[1]
    local = resolve_models_uri(here.tracking, "models:/assistant/2", here.root / "models")
    assert (local / "config.json").is_file()


def test_the_verb_retrains_what_the_hub_names_now(write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_at(monkeypatch, SECOND)
    seen: list[str | None] = []
    monkeypatch.setattr(retrain, "retrain_champion", lambda space: seen.append(space.recipe.target.revision))
    with pytest.raises(AttributeError):
        retrain.retrain(hub_recipe(write_recipe))
    assert seen == [SECOND]
