"""The report of a real (tiny) run: where it lies, what it says, and that drawing it again loads nothing."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from distilled import Distilled

from draftforge.cli import main
from draftforge.errors import CorruptDataError
from draftforge.pipeline.promotion import PROMOTION_FILE, decision_record, kept_counts
from draftforge.pipeline.report import REPORT_FILE, find_scored, log_report, write_report
from draftforge.pipeline.scoring import SCORES_FILE
from draftforge.pipeline.workspace import Workspace
from draftforge.recipe import load_recipe
from draftforge.specdec.targets import Target
from draftforge.storage import read_object

WriteRecipe = Callable[..., Path]


def test_looking_makes_no_work_folder(
    write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    recipe = write_recipe()
    before = sorted(recipe.parent.iterdir())
    with pytest.raises(SystemExit) as ended:
        main(["report", str(recipe), f"workdir={recipe.parent / 'nowork'}"])
    assert ended.value.code == 2 and "nowork: holds no score to report on" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["metrics", str(recipe)])
    assert not ended.value.code and re.search(r"draftforge_champion_exists\{.*\} 0", capsys.readouterr().out)
    assert sorted(recipe.parent.iterdir()) == before
    space = Workspace(load_recipe(recipe), read_only=True)
    empty = space.tracking
    assert space.reopened() is space
    made = Workspace(load_recipe(recipe)).tracking
    assert space.reopened().tracking.uri == made.uri != empty.uri  # a look after the first run sees it


def test_a_run_leaves_a_report_that_is_drawn_again_without_a_model(
    distilled_once: Distilled, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, outcome, _ = distilled_once
    space, folder = Workspace(load_recipe(path)), outcome.scored.stage.folder
    page = (folder / REPORT_FILE).read_text()
    run = space.tracking.client.list_artifacts(outcome.version.run_id)
    assert REPORT_FILE in [artifact.path for artifact in run]
    assert f"{outcome.version.reference} is the champion" in page and "first champion for this target" in page
    assert f"{outcome.scored.chosen.tau.value:.2f}" in page
    kept = read_object(folder / PROMOTION_FILE)
    assert kept["version"] == outcome.version.reference and kept["decision"]["promote"]
    assert {row["draft"] for row in kept["holdout"]["rows"]} == {"lookup", "candidate"}
    counts = kept_counts(space.tracking, outcome.version)
    assert counts is not None and set(counts["draft"].to_pylist()) == {"candidate"}

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(Target, "load", refuse)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(path), "--out", str(tmp_path / "again.html")])
    assert not ended.value.code
    assert (tmp_path / "again.html").read_text() == page

    changed = Workspace(load_recipe(path, ["score.draft_tokens=[1]"]))
    assert find_scored(changed) == folder  # the newest, as there is none of its own
    scores = read_object(folder / SCORES_FILE)
    records: list[dict[str, Any]] = [{"rows": []}, scores | {"times": "x"}, scores | {"capture": "\ud800"}]
    for odd in records:
        (tmp_path / SCORES_FILE).write_text(json.dumps(odd))
        with pytest.raises(CorruptDataError, match=r"scores\.json: not the record of a score of .*run `draftforge"):
            write_report(space, tmp_path)
    log_report(space, tmp_path, None)  # type: ignore[arg-type]
    assert "no report: " in capsys.readouterr().err

    # A damaged decision counts as none: the next one takes its place.
    (tmp_path / SCORES_FILE).write_text(json.dumps(scores))
    (tmp_path / PROMOTION_FILE).write_text(json.dumps(kept))
    assert decision_record(tmp_path) == kept and decision_record(tmp_path.parent) is None
    for name, value in [("holdout", {"rows": [1]}), ("holdout", []), ("decision", []), ("lineage", []), ("at", 1e300)]:
        (tmp_path / PROMOTION_FILE).write_text(json.dumps(kept | {name: value}))
        assert decision_record(tmp_path) is None
    assert capsys.readouterr().err.count("promotion.json: not the record of a decision (") == 5
