"""What a look at a champion answers, and what it leaves alone: the same target under the same, more or other logs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from draftforge import fingerprint, storage
from draftforge.cli import main
from draftforge.data.conversation import Message
from draftforge.pipeline import retrain as retraining
from draftforge.pipeline import staleness_evidence
from draftforge.pipeline.distill import distill
from draftforge.pipeline.retrain import dry_run, retrain_champion
from draftforge.pipeline.workspace import STAGE_TAG, Workspace, in_stage, recorded, stage_of
from draftforge.recipe import load_recipe
from draftforge.registry.tracking import FAILURE_TAG
from draftforge.registry.versions import champion

WriteRecipe = Callable[..., Path]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("stage_cache")]


def contents(root: Path) -> dict[str, str]:
    files = (path for path in root.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {str(path.relative_to(root)): fingerprint.of_file(path) for path in files}


def later(folder: Path, domain: str, count: int, start: int = 0) -> None:
    """More lines in the log."""
    with (folder / "support.jsonl").open("a") as log:
        for i in range(start, start + count):
            log.write(
                json.dumps({"domain": domain, "turns": [f"{domain} later {i} about city {i * 3} and {i * 5}?"]}) + "\n"
            )


def never(*args: object, **kwargs: object) -> None:
    raise AssertionError("was called")


def test_while_nothing_changed_nothing_is_answered(crowned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staleness_evidence, "answer_probe", never)
    monkeypatch.setattr(staleness_evidence, "mix_stage", never)
    done = retrain_champion(Workspace(load_recipe(crowned)))
    assert done.outcome is None and done.staleness.causes == () and not done.refused


def test_a_little_more_of_the_same_is_measured_and_left(
    crowned: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    later(crowned.parent, "support", 6)
    monkeypatch.setattr(retraining, "distill", never)
    space = Workspace(load_recipe(crowned))
    for _ in range(2):  # and again: the same probe
        found = retrain_champion(Workspace(space.recipe)).staleness
        causes = {cause.kind: cause for cause in found.causes}
        assert causes["drift"].verdict == "held" and causes["acceptance"].verdict != "stale"
        assert 0 < int(causes["acceptance"].numbers["conversations"]) <= 6 and not found.stale
        (probe,) = space.root.glob("probe-*")
    said = capsys.readouterr().err
    assert "up to date" in said and "on recent traffic" in said and "6 conversations" in said
    later(crowned.parent, "support", 2, start=50)
    retrain_champion(Workspace(space.recipe))
    (other,) = space.root.glob("probe-*")
    assert other != probe  # the one before is not kept


def test_a_probe_holds_nothing_that_was_trained_on(crowned: Path) -> None:
    space = Workspace(load_recipe(crowned))
    version = champion(space.tracking, space.target_fingerprint)
    assert version is not None
    mix = staleness_evidence.load_mix(staleness_evidence.mix_stage(staleness_evidence.Stages(space)).folder)
    unseen = staleness_evidence.new_conversations(space, version, mix, known=())
    assert {one.split for one in unseen} == {"selection", "holdout"} and len(unseen) < len(mix)
    assert staleness_evidence.new_conversations(space, version, mix, known={one.id for one in mix}) == []
    (taught, *_) = (one for one in mix if one.split == "train")
    reply = [Message(role="assistant", content="Done."), Message(role="user", content="And now?")]
    grown = taught.model_copy(update={"id": "grown", "cluster": "grown", "messages": [taught.messages[0], *reply]})
    (probed,) = staleness_evidence.new_conversations(space, version, [grown], known=())
    assert probed.asked_elsewhere == [0]  # the champion was trained on how the thread begins
    few = load_recipe(crowned).retrain.model_copy(update={"probe_conversations": 3})
    three = Workspace(space.recipe.model_copy(update={"retrain": few}))
    chosen = staleness_evidence.sample(three, unseen, first={unseen[-1].id})
    assert (
        len(chosen) == 3
        and unseen[-1] in chosen
        and chosen == staleness_evidence.sample(three, unseen[::-1], {unseen[-1].id})
    )


def test_a_drifted_mix_is_stale_whatever_acceptance_says(crowned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later(crowned.parent, "billing", 60)
    starts: list[tuple[str, object]] = []
    monkeypatch.setattr(
        retraining, "distill", lambda space, start, mix, notes: starts.append((start.version.reference, notes))
    )
    found = retrain_champion(Workspace(load_recipe(crowned))).staleness
    drift = next(cause for cause in found.causes if cause.kind == "drift")
    assert drift.verdict == "stale" and "billing" in str(drift.numbers["moved"]) and "the mix drifted" in drift.text
    assert starts == [(found.champion.reference if found.champion else "", found.record())]


def test_a_dry_run_changes_nothing(
    crowned: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    later(crowned.parent, "billing", 60)
    work = crowned.parent / "work"
    before = contents(work)
    version = champion(Workspace(load_recipe(crowned)).tracking, Workspace(load_recipe(crowned)).target_fingerprint)
    assert version is not None
    found = dry_run(load_recipe(crowned))
    said = capsys.readouterr().err
    assert found.stale and contents(work) == before
    assert f"would train small: 4 steps, warm, from {version.reference}: to do" in said
    assert f"would score {version.reference} as it is beside them, as step 0" in said
    assert f"would score, register, and meet the gate against champion {version.reference}" in said
    aside = work.rename(crowned.parent / "aside")
    assert not dry_run(load_recipe(crowned)).champion and not work.exists()
    aside.rename(work)  # the store is put back from there
    assert "no champion of any target yet" in capsys.readouterr().err


def test_what_fails_outside_a_run_leaves_one_that_says_so(
    crowned: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    later(crowned.parent, "support", 6)
    (crowned.parent / "support.jsonl").write_text("{\n")
    with pytest.raises(SystemExit) as ended:
        main(["retrain", str(crowned)])
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    tracking = Workspace(load_recipe(crowned)).tracking
    (failed,) = [one for one in tracking.client.search_runs([tracking.experiment_id]) if one.info.status == "FAILED"]
    assert failed.info.run_name == "tiny: retrain" and failed.data.tags[STAGE_TAG] == "mix"
    assert last.removeprefix("error: ") in failed.data.tags[FAILURE_TAG]


def test_the_first_stage_that_an_error_passes_is_its_stage(write_recipe: WriteRecipe) -> None:
    tracking = Workspace(load_recipe(write_recipe())).tracking
    runs = len(tracking.client.search_runs([tracking.experiment_id]))
    with pytest.raises(ValueError, match="why") as error, recorded(tracking, "x"), in_stage("outer"), in_stage("inner"):
        raise ValueError("why")
    assert stage_of(error.value) == "inner" and stage_of(ValueError()) == ""
    assert len(tracking.client.search_runs([tracking.experiment_id])) == runs + 1


def test_another_hidden_size_means_a_cold_start_said_aloud(
    write_recipe: WriteRecipe,
    tiny_target_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = load_recipe(write_recipe())
    recipe = recipe.model_copy(update={"drafts": {"eagle3": recipe.drafts["eagle3"]}})
    first = distill(Workspace(recipe))
    assert first is not None
    wide = tmp_path / "wide"
    shutil.copytree(tiny_target_folder, wide)
    config = LlamaForCausalLM.from_pretrained(wide).config
    config.hidden_size = 160
    LlamaForCausalLM(config).save_pretrained(wide)
    changed = recipe.model_copy(update={"target": recipe.target.model_copy(update={"model": str(wide)})})
    capsys.readouterr()
    starts: list[tuple[object, Path | None]] = []
    monkeypatch.setattr(
        retraining,
        "distill",
        lambda space, start, *_: starts.append((start, space.recipe.drafts["eagle3"].init_from)),
    )
    retrain_champion(Workspace(changed))
    said = capsys.readouterr().err
    assert f"cold start, not from {first.version.reference}: " in said and "cannot draft for the new target" in said
    assert starts == [(None, None)]
    assert storage.read_object(wide / "config.json")["hidden_size"] == 160
