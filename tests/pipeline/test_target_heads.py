"""Heads on the target's own states through the whole flow; and a target that is trained with its heads."""

import html
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftforge.cli import main
from draftforge.errors import InputError
from draftforge.eval.held_loss import loss_words
from draftforge.pipeline import distill as flow
from draftforge.pipeline.distill import distill
from draftforge.pipeline.workspace import Workspace
from draftforge.recipe import load_recipe
from draftforge.registry.versions import champion
from draftforge.specdec.formats import read_meta
from draftforge.specdec.formats.checkpoint import HELD_LOSS
from draftforge.specdec.stored_draft import StoredDraft
from draftforge.storage import read_object

COMMON: dict[str, Any] = {"steps": 4, "warmup_steps": 1, "tokens_per_step": 256, "draft_tokens": 2}
MEDUSA = {"family": "medusa", **COMMON}


def run(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert not ended.value.code


@pytest.mark.slow
@pytest.mark.usefixtures("stage_cache")
def test_eagle_and_medusa_are_scored_and_exported(write_recipe: Callable[..., Path], tmp_path: Path) -> None:
    """What is written in each format is loaded again and scores as the checkpoint does, or `export` fails."""
    one = {"first": {"family": "eagle", **COMMON}, "heads": MEDUSA}
    path = write_recipe(drafts={name: {**draft, "steps": 2} for name, draft in one.items()})
    run("score", str(path))
    (scores,) = tmp_path.glob("work/score-*/scores.json")
    assert {row["draft"] for row in read_object(scores)["rows"]} == {"plain", "lookup", "first", "heads"}
    for name, layout in (("first", "vllm"), ("first", "sglang"), ("heads", "vllm"), ("heads", "medusa")):
        out = tmp_path / f"{name}-{layout}"
        run("export", str(path), str(out), "--draft", name, "--format", layout, "--target-id", "owner/model")
        assert read_meta(out).family == {"first": "eagle", "heads": "medusa"}[name]
    run("generate", str(path), "How do I reset my password?", "--draft", "heads", "--max-new-tokens", "4")


@pytest.mark.slow
@pytest.mark.usefixtures("stage_cache")
def test_a_trained_target_is_another_target(
    write_recipe: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The old target's recipe trains it and says so, and neither scores nor registers it; its own recipe does."""
    path = write_recipe(drafts={"heads": {**MEDUSA, "backbone": {"start_step": 2}}})
    recipe = load_recipe(path)
    refused = r"drafts\.heads: its training makes a new target, which this recipe neither scores nor registers; "
    with pytest.raises(InputError, match=refused):
        distill(Workspace(recipe))
    flow.train(recipe, None)
    (checkpoint,) = tmp_path.glob("work/train-heads-*/checkpoints/step-000004")
    said = f"drafts.heads: its training changed the target: serve {checkpoint}/target with the draft {checkpoint}"
    loss = loss_words(read_meta(checkpoint).extra[HELD_LOSS])
    told = capsys.readouterr().err
    assert said in told and f"drafts.heads: the new target: {loss}\n" in told
    with pytest.raises(InputError, match=refused):
        flow.score(recipe, "heads")
    old = Workspace(recipe).target
    with pytest.raises(InputError, match=r"was trained together with target .* drafts for no other; set target\.model"):
        StoredDraft.load(checkpoint, old)

    own = {"target": {"model": f"{checkpoint}/target", "device": "cpu"}, "workdir": str(tmp_path / "own")}
    path = write_recipe(**own, drafts={"heads": {**MEDUSA, "init_from": str(checkpoint)}})
    space = Workspace(load_recipe(path))
    assert space.target_fingerprint == read_meta(checkpoint).target_fingerprint != old.fingerprint
    assert StoredDraft.load(checkpoint, space.target).family == "medusa"
    outcome = distill(space)
    assert outcome is not None and outcome.decision.promote
    now = champion(space.tracking, space.target_fingerprint)
    assert now is not None and now.lineage.target_fingerprint == space.target_fingerprint
    assert champion(space.tracking, old.fingerprint) is None
    assert loss in html.unescape((outcome.scored.stage.folder / "report.html").read_text())
