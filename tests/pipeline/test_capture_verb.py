"""The verb `capture` under a budget, and by several machines."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from draftforge.data.conversation import SPLITS
from draftforge.data.store import Capture
from draftforge.errors import InputError, MissingFileError
from draftforge.pipeline import distill as flow
from draftforge.pipeline import workspace
from draftforge.pipeline.stages import Stages, captured_stages
from draftforge.pipeline.workspace import Workspace
from draftforge.recipe import Recipe, load_recipe

Write = Callable[..., Path]


def captured(work: Path) -> list[Path]:
    return sorted(work.glob("capture-*"))


def places(recipe: Recipe) -> tuple[Path, Path]:
    """Folders of the capture and of the training."""
    stages = captured_stages(Workspace(recipe))
    return stages.captured.folder, stages.training("small").folder


def test_a_capture_of_before_prompts_in_doubt_were_left_out_is_another_one(
    write_recipe: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(write_recipe())
    every = load_recipe(write_recipe(), ["capture.ask_unproven=true"])
    plain, asked = (Stages(Workspace(one)).capture.fingerprint for one in (recipe, every))
    monkeypatch.setattr(workspace, "prompts_in_doubt", lambda settings: "by code of its own")
    assert Stages(Workspace(recipe)).capture.fingerprint not in (plain, asked)
    assert Stages(Workspace(every)).capture.fingerprint == asked


@pytest.mark.slow
def test_a_larger_budget_goes_on_in_the_same_folder_and_trains_anew(write_recipe: Write, tmp_path: Path) -> None:
    path = write_recipe()
    smaller = ["capture.shard_samples=4", "capture.batch_size=2"]
    budgets = [["capture.budget.tokens=300"], ["capture.budget.tokens=380"], []]
    sizes, found = [], []
    for overrides in budgets:
        recipe = load_recipe(path, [*smaller, *overrides])
        flow.capture(recipe)
        found.append(places(recipe))
        sizes.append(len(Capture.open(found[-1][0]).samples("train")))
    assert sizes == sorted(set(sizes))
    assert len({folder for folder, _ in found}) == len(captured(tmp_path / "work")) == 1
    assert len({training for _, training in found}) == 3


@pytest.mark.slow
def test_a_limit_that_was_passed_already_changes_nothing(write_recipe: Write, tmp_path: Path) -> None:
    """The last shard went beyond the budget, and beyond a slightly larger one: the training goes on where it was."""
    path = write_recipe()
    smaller = [
        "capture.shard_samples=4",
        "capture.batch_size=2",
        "drafts={small: {family: small, layers: 2, steps: 2, warmup_steps: 1, tokens_per_step: 256}}",
    ]
    for limit in (300, 301):
        recipe = load_recipe(path, [*smaller, f"capture.budget.tokens={limit}"])
        flow.train(recipe, None)
        capture, _ = places(recipe)
        assert json.loads((capture / "manifest.json").read_text())["budget"]["limits"] == {"tokens": limit}
    assert len(list((tmp_path / "work").glob("train-small-*"))) == 1


@pytest.mark.slow
def test_parts_of_three_work_folders_are_the_capture_of_one(write_recipe: Write, tmp_path: Path) -> None:
    path = write_recipe()
    flow.capture(load_recipe(path))
    (whole,) = captured(tmp_path / "work")
    parts = []
    for number in (1, 2, 3):
        recipe = load_recipe(path, [f"workdir={tmp_path / f'machine-{number}'}"])
        flow.capture(recipe, part=f"{number}/3")
        parts += captured(tmp_path / f"machine-{number}")
    assert [part.name for part in parts] == [f"{whole.name}.part-{number}-of-3" for number in (1, 2, 3)]
    home = load_recipe(path, [f"workdir={tmp_path / 'home'}"])
    with pytest.raises(MissingFileError, match="--join: 1/3 missing"):
        flow.capture(home, parts=parts[1:])
    flow.capture(home, parts=parts)
    joined, one = Capture.open(tmp_path / "home" / whole.name), Capture.open(whole)
    assert all(joined.samples(split) == one.samples(split) for split in SPLITS)
    assert json.loads((joined.folder / "header.json").read_text()) == json.loads((whole / "header.json").read_text())
    with pytest.raises(InputError, match="--part 1/3: answers a part alone"):
        flow.capture(home, part="1/3", parts=parts)


def test_more_parts_than_shards_are_refused_before_any_answer(write_recipe: Write, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^--part 1/1000: there are \d+ shards"):
        flow.capture(load_recipe(write_recipe()), part="1/1000")
    assert not list((tmp_path / "work").glob("capture-*"))
