"""The whole flow on a tiny target: what ends up on disk and in the registry, and what a second run skips."""

import shlex
from pathlib import Path
from typing import Any

import pytest
from distilled import Distilled
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from draftforge.cli import main
from draftforge.data.mix import load_manifest
from draftforge.errors import InputError
from draftforge.pipeline import export, stages
from draftforge.pipeline.distill import distill
from draftforge.pipeline.estimates import ESTIMATES_FILE
from draftforge.pipeline.export import verifier_of
from draftforge.pipeline.retrain import retrain_champion
from draftforge.pipeline.workspace import Workspace
from draftforge.recipe import load_recipe
from draftforge.registry.champion_alias import judged_figures
from draftforge.registry.versions import champion
from draftforge.specdec.serving_plan import FoundPlan, find_plan
from draftforge.storage import read_object
from draftforge.train.throughput import NoSink


@pytest.mark.slow
def test_distill_promotes_and_a_second_run_does_no_work(
    distilled_once: Distilled, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, outcome, table = distilled_once
    assert outcome.decision.promote
    space = Workspace(load_recipe(recipe))
    now = champion(space.tracking, space.target_fingerprint)
    assert now is not None and now.reference == outcome.version.reference
    assert now.lineage.step == outcome.scored.chosen.step
    assert now.lineage.plan is not None
    assert now.lineage.plan.draft_tokens == outcome.scored.chosen.config.levels
    run = space.tracking.client.get_run(now.run_id)
    assert run.info.status == "FINISHED" and run.inputs is not None
    assert {one.dataset.name for one in run.inputs.dataset_inputs} == {"mix of tiny", "capture of tiny"}
    tau = space.tracking.client.get_metric_history(now.run_id, "score/small/tau")
    assert [point.step for point in tau] == [2, 4]
    assert [point.step for point in space.tracking.client.get_metric_history(now.run_id, "train/small/loss")]
    shown = EventAccumulator(str(next((space.root / "tensorboard").iterdir())))
    shown.Reload()
    assert [(point.step, point.value) for point in shown.Scalars("score/small/tau")] == [
        (point.step, pytest.approx(point.value)) for point in tau
    ]
    assert "lookup" in table and "plain" in table and "chosen" in table
    took = read_object(space.root / ESTIMATES_FILE)  # for the estimates of the next ones
    writing = {"capture", "train small", "train eagle3", "score"}
    assert took.keys() == writing | {"times", "holdout"}
    assert all(one["amount"] > 0 and (one["bytes"] > 0) == (name in writing) for name, one in took.items())
    serve = next(line for line in table.splitlines() if line.startswith(f"vllm serve {recipe_target(recipe)} "))
    assert f'"num_speculative_tokens": {now.lineage.plan.chain_tokens}' in serve and str(space.root / "models") in serve

    # What a reader sees first: the figures of the decision, and what it is about, in words.
    results = {key: space.tracking.client.get_metric_history(now.run_id, f"result/{key}") for key in ("tau", "K")}
    assert [(point.step, point.value) for point in results["tau"]][::2] == [
        (0, 1.0),
        (2, pytest.approx(judged_figures(space.tracking, now)[0], abs=1e-4)),
    ]
    assert [point.value for point in results["K"]] == [0, *[outcome.scored.chosen.config.levels] * 2]
    assert list(run.data.metrics)[:3] == ["result/tau", "result/speedup", "result/K"]
    lines = run.data.tags["mlflow.note.content"].splitlines()
    assert lines[0] == f"Drafts for **{space.target_name}**, by recipe tiny."
    sizes = load_manifest(space.folder("mix", now.lineage.mix_fingerprint))["conversations"]
    told = ", ".join(f"{sum(counts.values())} {split}" for split, counts in sizes.items())
    assert lines[2:4] == [
        "- Drafts: small (small, 4 steps), eagle3 (eagle3, 4 steps)",
        f"- Data: conversations of code and support: {told}",
    ]
    assert lines[4].startswith(f"- Result: **{now.reference} is the champion")
    assert [line.removeprefix("    - ") for line in lines[5:]] == outcome.decision.reasons
    assert run.data.tags["draftforge.target_name"] == space.target_name

    monkeypatch.setattr(stages, "build_mix", refuse)
    monkeypatch.setattr(stages, "capture", refuse)
    monkeypatch.setattr(stages, "train", refuse)
    monkeypatch.setattr("draftforge.pipeline.draft_scorer.score_draft", refuse)
    again = distill(Workspace(load_recipe(recipe)))
    assert again is not None and again.version.reference == outcome.version.reference
    assert again.decision.promote and again.decision.reasons[0] == "is the champion already"
    assert retrain_champion(Workspace(load_recipe(recipe))).outcome is None
    assert not [path for path in (space.root, *space.root.rglob("*")) if path.stat().st_mode & 0o077]


def recipe_target(recipe: Path) -> str:
    return load_recipe(recipe).target.model


@pytest.mark.parametrize(("low", "says"), [(1.01, '"method": "ngram", "num_speculative_tokens": 2'), (0.99, "")])
def test_without_a_champion_what_pays_is_served(
    distilled_once: Distilled,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    low: float,
    says: str,
) -> None:
    """Prompt lookup where the holdout shows that it beats plain decoding, else nothing."""
    space, evidence = Workspace(load_recipe(distilled_once.recipe)), distilled_once.outcome.decision.numbers.evidence
    assert evidence is not None and evidence.lookup is not None
    speedup = evidence.lookup.speedup.model_copy(update={"value": 1.2, "low": low, "high": 1.4})
    lookup = evidence.lookup.model_copy(update={"draft_tokens": 2, "speedup": speedup})
    monkeypatch.setattr(export, "champion", lambda *arguments: None)
    export.show_serving(space, evidence.model_copy(update={"lookup": lookup}))
    shown = capsys.readouterr()
    assert (f"prompt lookup beats plain decoding, 1.20x [{low:.2f}, 1.40] at K = 2 on" in shown.err) == bool(says)
    (command,) = shown.out.splitlines()
    assert command.startswith(f"vllm serve {space.recipe.target.model}") and says in command
    assert ("--speculative-config" in command) == bool(says)


def test_the_printed_command_fetches_the_champion(
    distilled_once: Distilled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target of more than a model's files is named by its fingerprint, a registry by all that names it."""
    space = Workspace(load_recipe(distilled_once.recipe))
    command = export.fetch_command(space, str(tmp_path / "my draft"), space.target_fingerprint)
    main_without_exit(shlex.split(command)[1:])
    assert (tmp_path / "my draft" / "serve.json").is_file()
    changes = ["target.context=200", "registry.model=mine", "registry.tracking_uri=sqlite:////data/my store.db"]
    changed = Workspace(load_recipe(distilled_once.recipe, changes), read_only=True)
    expected = f"fetch OUT --target {'ab' * 32} --tracking-uri 'sqlite:////data/my store.db' --model mine --format gguf"
    assert export.fetch_command(changed, "OUT", "ab" * 32, ["--format", "gguf"]) == f"draftforge {expected}"
    # A target by a path from the folder of now is named from any.
    monkeypatch.chdir(Path(space.recipe.target.model).parent)
    near = Workspace(load_recipe(distilled_once.recipe, [f"target.model={Path(space.recipe.target.model).name}"]))
    assert near.target_settings.model == str(Path.cwd() / near.recipe.target.model)
    assert shlex.split(export.fetch_command(near, "OUT", ""))[4] == near.target_settings.model


def refuse(*args: object, **kwargs: object) -> None:
    raise AssertionError("a finished stage ran again")


@pytest.mark.slow
def test_a_draft_leaves_in_every_format(
    distilled_once: Distilled, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, space = distilled_once.recipe, Workspace(load_recipe(distilled_once.recipe))
    target = ["--target", str(space.recipe.target.model), "--workdir", str(space.root)]
    main_without_exit(["fetch", str(tmp_path / "out"), *target])
    assert (tmp_path / "out" / "draftforge.json").is_file()
    scored = distilled_once.outcome.scored
    unregistered = next(name for name in space.recipe.drafts if name != scored.chosen.draft)
    main_without_exit(["export", str(path), str(tmp_path / "exported"), "--draft", unregistered])
    assert (tmp_path / "exported" / "model.safetensors").is_file()
    assert not (tmp_path / "exported" / "trainer").exists()
    assert "has no serve.json: K=4 is assumed, what it was trained for" in capsys.readouterr().err
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
        assert names == ["README.md", "draft.gguf", "draftforge.json", "serve.json"]

    # What was promoted is what is handed out and what answers here: its K, without -k.
    version, plan = distilled_once.outcome.version, distilled_once.outcome.version.lineage.plan
    assert plan is not None
    capsys.readouterr()
    main_without_exit(["export", str(path), str(tmp_path / "champion")])
    assert capsys.readouterr().out.startswith(f"vllm serve {space.recipe.target.model} ")
    assert find_plan(tmp_path / "champion") == FoundPlan(plan) == find_plan(tmp_path / "out")
    assert read_object(tmp_path / "champion" / "serve.json")["version"] == version.reference
    # The checkpoint that was registered leaves with the same plan and figures; a copy of it again.
    known = without_place(tmp_path / "champion")
    assert known["speedup_interval"] and known["decision"]
    source = scored.folders[scored.chosen.draft, scored.chosen.step]
    for number in range(2):
        main_without_exit(["export", str(path), str(tmp_path / f"copy-{number}"), "--draft", str(source)])
        source = tmp_path / f"copy-{number}"
        assert without_place(source) == known and version.reference in capsys.readouterr().err
    main_without_exit(["generate", str(path), "Where is my order?", "-n", "8"])
    assert f"K={plan.draft_tokens}: tau" in capsys.readouterr().out


def without_place(folder: Path) -> dict[str, Any]:
    """What a draft's serve.json says but for where the draft lies."""
    return {key: value for key, value in read_object(folder / "serve.json").items() if key != "command"}


def test_a_training_starts_from_the_registrys_champion(distilled_once: Distilled, tmp_path: Path) -> None:
    name, version = distilled_once.outcome.scored.chosen.draft, distilled_once.outcome.version
    start = f"drafts.{name}.init_from=models:/{version.name}@champion"
    shorter = [f"drafts.{name}.{setting}" for setting in ("steps=1", "score_every=1", "warmup_steps=0")]
    heir = Workspace(load_recipe(distilled_once.recipe, [start, *shorter]))
    settings = heir.drafts[name]
    assert settings.init_from is not None and (settings.init_from / "draftforge.json").is_file()
    done = stages.train_stage(stages.captured_stages(heir), name, NoSink())
    assert read_object(done.folder / "init" / "draftforge.json")["extra"] == {"warm_start_step": version.lineage.step}


def main_without_exit(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code in (0, None)
