"""The whole flow on a tiny target: what ends up on disk and in the registry, and what a second run skips."""

from collections.abc import Callable
from pathlib import Path

import pytest

from draftforge.cli import main
from draftforge.errors import InputError
from draftforge.pipeline import stages
from draftforge.pipeline.distill import distill
from draftforge.pipeline.export import verifier_of
from draftforge.pipeline.retrain import retrain_champion
from draftforge.pipeline.workspace import Workspace
from draftforge.recipe import load_recipe
from draftforge.registry.versions import champion
from draftforge.storage import read_object
from draftforge.train.throughput import NoSink

WriteRecipe = Callable[..., Path]


def test_distill_promotes_and_a_second_run_does_no_work(
    write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = write_recipe()
    space = Workspace(load_recipe(path))
    outcome = distill(space)
    assert outcome is not None and outcome.decision.promote
    now = champion(space.tracking, space.target_fingerprint)
    assert now is not None and now.reference == outcome.version.reference
    assert now.lineage.step == outcome.scored.chosen.step
    assert now.lineage.draft_tokens == outcome.scored.chosen.config.levels
    run = space.tracking.client.get_run(now.run_id)
    assert run.info.status == "FINISHED" and run.inputs is not None
    assert {one.dataset.name.split("-")[0] for one in run.inputs.dataset_inputs} == {"mix", "capture"}
    tau = space.tracking.client.get_metric_history(now.run_id, "small.score/tau")
    assert [point.step for point in tau] == [2, 4]
    assert space.tracking.client.get_metric_history(now.run_id, "small/loss")
    table = capsys.readouterr().out
    assert "lookup" in table and "plain" in table and "chosen" in table

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a finished stage ran again")

    monkeypatch.setattr(stages, "build_mix", refuse)
    monkeypatch.setattr(stages, "capture", refuse)
    monkeypatch.setattr(stages, "train", refuse)
    monkeypatch.setattr("draftforge.pipeline.scoring.score_draft", refuse)
    again = distill(Workspace(load_recipe(path)))
    assert again is not None and again.version.reference == outcome.version.reference
    assert again.decision.reasons == ["is the champion already"]

    main_without_exit(
        ["fetch", str(tmp_path / "out"), "--target", str(space.recipe.target.model), "--workdir", str(space.root)]
    )
    assert (tmp_path / "out" / "draftforge.json").is_file()
    main_without_exit(["export", str(path), str(tmp_path / "exported"), "--draft", "small"])
    assert (tmp_path / "exported" / "model.safetensors").is_file()
    assert not (tmp_path / "exported" / "trainer").exists()
    with pytest.raises(InputError, match=r"--target-id /.*: must be the target's hub id"):
        verifier_of(space, None)
    named = ["--format", "speculators", "--target-id", "owner/model"]
    main_without_exit(["export", str(path), str(tmp_path / "speculators"), "--draft", "eagle3", *named])
    config = read_object(tmp_path / "speculators" / "config.json")["speculators_config"]
    assert config["verifier"] == {"name_or_path": "owner/model", "architectures": ["LlamaForCausalLM"]}
    assert config["proposal_methods"][0]["speculative_tokens"] == 2
    main_without_exit(["export", str(path), str(tmp_path / "hf"), "--draft", "small", "--format", "hf"])
    assert (tmp_path / "hf" / "tokenizer.json").is_file()
    for name in ("small", "eagle3"):
        main_without_exit(["export", str(path), str(tmp_path / f"{name}-gguf"), "--draft", name, "--format", "gguf"])
        names = sorted(file.name for file in (tmp_path / f"{name}-gguf").iterdir())
        assert names == ["draft.gguf", "draftforge.json"]
    main_without_exit(["generate", str(path), "Where is my order?", "-n", "8"])
    assert "tau" in capsys.readouterr().out
    assert retrain_champion(Workspace(load_recipe(path))).outcome is None

    start = f"models:/{now.name}@champion"
    heir = Workspace(load_recipe(path, [f"drafts.{outcome.scored.chosen.draft}.init_from={start}"]))
    settings = heir.drafts[outcome.scored.chosen.draft]
    assert settings.init_from is not None and (settings.init_from / "draftforge.json").is_file()
    known = stages.captured_stages(heir)
    monkeypatch.undo()
    done = stages.train_stage(known, outcome.scored.chosen.draft, NoSink())
    assert read_object(done.folder / "init" / "draftforge.json")["extra"] == {"warm_start_step": now.lineage.step}


def main_without_exit(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code in (0, None)
