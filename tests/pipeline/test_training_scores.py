"""Scores while training: what they leave for the later stages, on one rank and on two."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftforge.data.store import Sample
from draftforge.errors import InputError
from draftforge.eval import acceptance, counts
from draftforge.eval.leaderboard import serving
from draftforge.eval.settings import ScoreSettings
from draftforge.eval.training_eval import SampledScore
from draftforge.pipeline import stages
from draftforge.pipeline.distill import distill
from draftforge.pipeline.workspace import Workspace
from draftforge.recipe import load_recipe
from draftforge.specdec.sampling_settings import SamplingSettings

EAGLE3 = {
    "family": "eagle3",
    "draft_vocabulary": 200,
    "steps": 6,
    "warmup_steps": 1,
    "tokens_per_step": 256,
    "aux_layers": [1, 2, 4],
    "draft_tokens": 2,
    "precision": "float32",
    "score_every": 1,
    "score_conversations": 1000,
    "keep_best": 1,
    "patience": 2,
}


def trained_in(space: Workspace) -> Path:
    (folder,) = space.root.glob("train-*")
    return folder


def scores_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_stage_that_stopped_early_is_done_and_its_kept_drafts_are_scored(
    write_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a tiny random target tau does not move beyond its interval: two scores after the first end the training.

    The figures, of all conversations of the selection split at the trained K, are those of the score stage.
    """
    path = write_recipe(drafts={"eagle3": EAGLE3})
    space = Workspace(load_recipe(path))
    outcome = distill(space)
    assert outcome is not None
    scores = scores_of(trained_in(space))
    assert [one["step"] for one in scores] == [1, 2, 3]
    assert all(1 <= one["tau_low"] <= one["tau"] <= one["tau_high"] <= 3 for one in scores)
    best = max(scores, key=lambda one: one["tau"])["step"]
    assert set(stages.list_steps(trained_in(space))) == {best, 3}
    assert {row.step for row in outcome.scored.rows if row.draft == "eagle3"} == {best, 3}
    history = space.tracking.client.get_metric_history(outcome.version.run_id, "train/eagle3/tau")
    assert [(point.step, point.value) for point in history] == [(one["step"], one["tau"]) for one in scores]

    settings, while_training = space.recipe.score, {one["step"]: one["tau"] for one in scores}
    for step in (best, 3):
        mine = counts.where(outcome.scored.counts, draft="eagle3", step=step, draft_tokens=2, tree="")
        tau = acceptance.tau(serving(mine, settings), settings.confidence).value
        assert while_training[step] == pytest.approx(tau)

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a finished stage ran again")

    monkeypatch.setattr(stages, "train", refuse)
    again = distill(Workspace(load_recipe(path)))
    assert again is not None and again.version.reference == outcome.version.reference


@pytest.mark.parametrize("answer", [1, 2, 3])
def test_too_few_conversations_for_an_interval_are_refused_by_name(answer: int) -> None:
    """Answers so short that nothing is drafted in them do not count."""
    same = [sample(turn, answer) for turn in range(3)]
    three = [*same, sample(4, answer, "b"), sample(5, answer, "c")]
    for samples, clusters in ((same, int(answer > 2)), (three, 3 * int(answer > 2))):
        if clusters < 3:
            with pytest.raises(InputError, match=rf"draft\.score_conversations 3: .* {clusters} cluster"):
                SampledScore(lambda: pytest.fail("loaded"), samples, ScoreSettings(), 2, 3)
        else:
            SampledScore(lambda: pytest.fail("loaded"), samples, ScoreSettings(), 2, 3)


def sample(turn: int, answer: int, name: str = "a") -> Sample:
    ids = [3] * answer
    return Sample(
        [1, 2],
        ids,
        4,
        id=f"{name}/{turn}/t0",
        conversation=name,
        turn=turn,
        cluster=name,
        domain="d",
        split="selection",
        sampling=SamplingSettings(),
        finish="stop",
    )
