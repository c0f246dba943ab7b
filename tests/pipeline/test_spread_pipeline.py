"""Recipes whose target is spread over the ranks: what trains, from which answers, and what is refused."""

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftforge.data.store import Capture
from draftforge.errors import InputError, MissingFileError, RecipeError, RegistryError
from draftforge.pipeline import distill as flow
from draftforge.pipeline import export, retrain
from draftforge.pipeline.cli_options import GenerateOptions, SkipLayersOptions
from draftforge.pipeline.generate import generate
from draftforge.pipeline.layer_skip import skip_layers
from draftforge.pipeline.workspace import open_workspace
from draftforge.recipe import load_recipe
from draftforge.specdec.targets import Target

RunDistributed = Callable[..., list[Any]]
Write = Callable[..., Path]
EAGLE3 = {
    "family": "eagle3",
    "draft_vocabulary": 200,
    "steps": 3,
    "warmup_steps": 1,
    "tokens_per_step": 256,
    "aux_layers": [1, 2, 4],
    "draft_tokens": 2,
    "precision": "float32",
}
SHARD = "target.shard=true"


def train(recipe: str, overrides: list[str]) -> None:
    """What one rank of several does."""
    flow.train(load_recipe(Path(recipe), overrides), None)


def losses(work: Path) -> dict[str, list[float]]:
    """Of each draft."""
    logs = {log.parent.name: log.read_text().splitlines() for log in work.glob("train-*/metrics.jsonl")}
    return {name: [json.loads(line)["loss"] for line in lines] for name, lines in logs.items()}


@pytest.mark.slow
def test_recorded_answers_train_a_draft_of_a_spread_target(
    write_recipe: Write, tmp_path: Path, run_distributed: RunDistributed
) -> None:
    """Nobody decodes and no signals are kept; two ranks' losses are those of one that has the whole target."""
    medusa = {"family": "medusa", "steps": 3, "warmup_steps": 1, "tokens_per_step": 256, "precision": "float32"}
    path = write_recipe(drafts={"eagle3": EAGLE3, "medusa": medusa})
    flow.capture(load_recipe(path), answers_to=tmp_path / "answers")
    kept = [tmp_path / "answers", *(tmp_path / "answers").iterdir()]
    assert [stat.S_IMODE(place.stat().st_mode) for place in kept] == [0o700, *[0o600] * (len(kept) - 1)]
    given = [f"capture.answers={tmp_path / 'answers'}", "capture.top_k=0"]
    train(str(path), [*given, f"workdir={tmp_path / 'whole'}"])
    run_distributed(__file__, "train", 2, [str(path), [*given, SHARD, f"workdir={tmp_path / 'spread'}"]])
    whole, spread = losses(tmp_path / "whole"), losses(tmp_path / "spread")
    assert whole.keys() == spread.keys() and len(whole) == 2
    assert all(spread[name] == pytest.approx(whole[name], rel=1e-4) for name in whole)
    (folder,) = (tmp_path / "spread").glob("capture-*")
    captured = Capture.open(folder)
    assert captured.bare and captured.logp(captured.samples("train")[0]).isnan().all()
    with pytest.raises(InputError, match=r"keeps no signals \(capture\.top_k 0\)"):
        captured.signals(captured.samples("train")[0])
    assert [one.name for one in (tmp_path / "whole").glob("capture-*")] == [folder.name]  # shard changes no content


def test_answers_must_come_from_elsewhere(write_recipe: Write, tmp_path: Path) -> None:
    """Said before anything is asked."""
    path = write_recipe(drafts={"eagle3": EAGLE3})
    flow.capture(load_recipe(path, ["capture.max_new_tokens=4"]), answers_to=tmp_path / "answers")
    given = f"capture.answers={tmp_path / 'answers'}"
    for overrides, match in (
        ([], r"capture\.backend = transformers: needs passes of the target, which target\.shard = true spreads"),
        (["capture.backend={kind: vllm}"], r"capture\.backend\.signals = target: .*; set engine"),
        ([given], r"capture\.top_k = 16: .*; set 0"),
        ([given, "capture.top_k=0"], r"capture\.answers: no answer to .*, and target\.shard = true"),
    ):
        with pytest.raises(InputError, match=match) as raised:
            flow.capture(load_recipe(path, [SHARD, *overrides]))
        assert "\n" not in str(raised.value)


def test_what_needs_the_whole_target_is_refused_first(write_recipe: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "load", None)
    recipe = load_recipe(write_recipe(drafts={"eagle3": EAGLE3}), [SHARD])
    for verb in (
        lambda recipe: flow.distill(open_workspace(recipe)),
        flow.promote,
        lambda recipe: flow.score(recipe, None),
        lambda recipe: retrain.retrain(recipe),
        lambda recipe: retrain.dry_run(recipe),
    ):
        with pytest.raises(InputError, match=r"target\.shard = true: a \w+ needs the target whole"):
            verb(recipe)


def test_a_spread_target_that_cannot_be_is_refused_before_the_mix(write_recipe: Write, tmp_path: Path) -> None:
    path = write_recipe(drafts={"eagle3": EAGLE3})
    recorded = ["capture.answers=./none", "capture.top_k=0"]
    for overrides, error, match in (
        ([f"target.model={tmp_path / 'none'}", *recorded], MissingFileError, r"target\.model: .*: no such folder"),
        ([], InputError, r"capture\.backend = transformers: needs passes of the target"),
    ):
        recipe = load_recipe(path, [SHARD, *overrides])
        for verb in (flow.capture, lambda recipe: flow.capture(recipe, part="1/2"), lambda r: flow.train(r, None)):
            with pytest.raises(error, match=match):
                verb(recipe)
    assert not list((tmp_path / "work").glob("*mix*"))


@pytest.mark.parametrize("shard", [False, True])
def test_what_cannot_answer_makes_no_folder(write_recipe: Write, tmp_path: Path, shard: bool) -> None:
    recipe = load_recipe(write_recipe(drafts={"eagle3": EAGLE3}), [f"target.shard={str(shard).lower()}"])
    match = r"target\.shard = true: an \w+ needs the target whole" if shard else "has no champion yet"
    with pytest.raises(InputError if shard else RegistryError, match=match):
        generate(recipe, "hello", GenerateOptions())
    with pytest.raises(InputError if shard else RegistryError, match=match):
        export.export(recipe, tmp_path / "out", None, None, None)
    if shard:
        with pytest.raises(InputError, match="a search of layers needs the target whole"):
            skip_layers(recipe, SkipLayersOptions())
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("field", "draft"),
    [
        ("score_conversations", EAGLE3 | {"score_every": 1, "score_conversations": 4}),
        ("features_bytes", EAGLE3 | {"features_bytes": 1}),
        ("backbone", {"family": "medusa", "backbone": {}}),
    ],
)
def test_what_runs_the_target_on_one_rank_or_trains_it_is_refused_by_the_recipe(
    write_recipe: Write, field: str, draft: dict[str, Any]
) -> None:
    path = write_recipe(drafts={"mine": draft})
    load_recipe(path)
    with pytest.raises(RecipeError, match=rf"drafts\.mine\.{field} = .*: must be absent where target\.shard is true"):
        load_recipe(path, [SHARD])


def test_a_draft_that_stored_signals_teach_needs_some(write_recipe: Write, tmp_path: Path) -> None:
    """Said before the capture, which may take hours."""
    small = {"family": "small", "layers": 2, "steps": 2, "warmup_steps": 1, "tokens_per_step": 256}
    path = write_recipe(drafts={"mine": small})
    with pytest.raises(InputError, match=r"drafts\.mine\.family = small: is taught by stored signals"):
        flow.train(load_recipe(path, ["capture.top_k=0"]), None)
    assert not list((tmp_path / "work").glob("capture-*"))
