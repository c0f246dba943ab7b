"""From a log to a nightly retraining on a tiny pair: distil, fine-tune the target, notice, measure, recover, refuse,
promote, roll back."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tuned
import yaml

from draftforge.cli import main
from draftforge.eval.acceptance import tau
from draftforge.eval.counts import where
from draftforge.pipeline.promotion import kept_counts
from draftforge.pipeline.workspace import Workspace
from draftforge.recipe import load_recipe
from draftforge.registry.lineage import Version
from draftforge.registry.versions import champion

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class House:
    """A served model, its log and its recipe."""

    def __init__(self, root: Path, tokenizer_folder: Path) -> None:
        self.root = root
        self.target = root / "served"
        tuned.teach(tuned.fresh_target(tokenizer_folder, root / "fresh"), root / "first", tuned.SAID, steps=80)
        self.serve("first")
        self.log("support", 80, day=0)
        self.recipe = root / "recipe.yaml"
        self.recipe.write_text(yaml.safe_dump(self._recipe(), sort_keys=False))

    def _recipe(self) -> dict[str, Any]:
        small = {"family": "small", "layers": 2, "steps": 60, "warmup_steps": 5, "tokens_per_step": 512}
        return {
            "name": "night",
            "workdir": str(self.root / "work"),
            "target": {"model": str(self.target), "device": "cpu"},
            "mix": {
                "sources": [{"kind": "messages", "path": "log.jsonl"}],
                "selection_share": 0.2,
                "holdout_share": 0.3,
            },
            "capture": {"max_new_tokens": 32, "batch_size": 16, "top_k": 16, "tail_samples": 4},
            "drafts": {"small": small | {"score_every": 60, "learning_rate": 3e-3}},
            "score": {
                "draft_tokens": [3],
                "decode_conversations": 2,
                "costs": {"prompts": 2, "rounds": 6, "warmup_rounds": 0},
            },
            "gate": {"min_speedup": 0, "min_clusters": 5, "min_domain_clusters": 3},
            "retrain": {"steps": 50, "probe_conversations": 24},
        }

    def serve(self, name: str) -> None:
        """Put a model where the server, and the recipe, look for it."""
        self.target.unlink(missing_ok=True)
        self.target.symlink_to(self.root / name)

    def log(self, domain: str, count: int, day: int) -> None:
        with (self.root / "log.jsonl").open("a") as stream:
            stream.write(tuned.log_lines(domain, count, seed=day, day=day))

    def draftforge(self, *arguments: str) -> int:
        with pytest.raises(SystemExit) as ended:
            main([arguments[0], str(self.recipe), *arguments[1:]])
        return int(ended.value.code or 0)

    @property
    def space(self) -> Workspace:
        return Workspace(load_recipe(self.recipe))

    @property
    def champion(self) -> Version:
        space = self.space
        now = champion(space.tracking, space.target_fingerprint)
        assert now is not None
        return now

    def tau(self, version: Version) -> float:
        table = kept_counts(self.space.tracking, version)
        assert table is not None
        return tau(where(table, method="replay"), 0.95).value


def staleness(space: Workspace, version: Version) -> dict[str, Any]:
    """Why a version was trained, as its run tells."""
    path = space.tracking.client.download_artifacts(version.run_id, "staleness.json")
    return {cause["kind"]: cause for cause in json.loads(Path(path).read_text())["causes"]}


def test_from_a_log_to_a_nightly_retraining(
    tiny_target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    house = House(tmp_path, tiny_target_folder)
    said: Callable[[], str] = lambda: capsys.readouterr().err  # noqa: E731

    # the first draft; the night after, nothing is to do
    assert house.draftforge("distill") == 0
    first = house.champion
    assert house.tau(first) > 2 and first.number == 1
    said()
    assert house.draftforge("retrain") == 0 and "up to date" in said()

    # the target is fine-tuned: noticed, measured, recovered, promoted
    tuned.teach(tmp_path / "first", tmp_path / "second", tuned.SAID_LATER, steps=80, lora=True)
    house.serve("second")
    assert house.draftforge("retrain") == 0
    told, second = said(), house.champion
    assert f"target changed: {first.reference} drafts for another one" in told
    assert f"{first.reference}: tau fell on the new target" in told
    found = staleness(house.space, second)
    numbers = found["acceptance"]["numbers"]
    assert found["target"]["verdict"] == found["acceptance"]["verdict"] == "stale" and numbers["paired"] is True
    assert numbers["before"] == pytest.approx(house.tau(first)) and numbers["upper"] < 0.95

    assert house.tau(second) > 1.3 * numbers["now"]  # recovered
    assert second.lineage.parent == first.reference and second.name != first.name
    assert house.draftforge("retrain") == 0 and "up to date" in said()

    # new traffic, and a draft that its learning rate has spoilt: refused with its reason, the champion stays
    house.log("code", 80, day=1)
    bad = (
        "retrain.warm_start=false",
        "drafts.small.steps=1",
        "drafts.small.warmup_steps=0",
        "drafts.small.learning_rate=0.3",
        "drafts.small.score_every=1",
    )
    assert house.draftforge("retrain", *bad) == 5
    told = said()
    forgotten = re.search(r"not promoted(\n  .*)*support", told)  # the old domain
    assert "the mix drifted" in told and forgotten, told
    assert house.champion.reference == second.reference

    # the same night, trained as it should be: the drift is noticed again, and the heir is promoted
    assert house.draftforge("retrain") == 0
    told, third = said(), house.champion
    assert "the mix drifted" in told and "tau fell on recent traffic" in told
    assert third.name == second.name and third.lineage.parent == second.reference

    # rolled back: it is not promoted again by the next night
    assert house.draftforge("rollback") == 0 and house.champion.reference == second.reference
    assert house.draftforge("retrain") == 5
    assert "was rolled back" in said() and house.champion.reference == second.reference
