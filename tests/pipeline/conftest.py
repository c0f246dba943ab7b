"""A tiny recipe that runs the whole pipeline in seconds: a random target, two domains, two families."""

import io
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from distilled import SMALL, Distilled, Snapshot, cached_stages
from mlflow.tracking import MlflowClient

from draftforge.pipeline import distill as flow
from draftforge.pipeline.distill import distill
from draftforge.pipeline.scoring import Scored
from draftforge.pipeline.workspace import Workspace
from draftforge.recipe import load_recipe
from draftforge.registry import connect

WORDS = ("order", "password", "capital", "sum", "city", "settings", "function", "country", "number", "Monday")


@pytest.fixture
def write_recipe(tmp_path: Path, recipe_in: Callable[..., Path]) -> Callable[..., Path]:
    """`write_recipe(**sections)`: `recipe_in` the test's own folder."""
    return partial(recipe_in, tmp_path)


@pytest.fixture(scope="session")
def recipe_in(tiny_target_folder: Path) -> Callable[..., Path]:
    """`recipe_in(folder, **sections)`: a recipe with its sources beside it; sections replace the default ones."""

    def write(folder: Path, **sections: Any) -> Path:
        for domain in ("support", "code"):
            lines = [
                json.dumps(
                    {
                        "id": f"{domain}/{i}",
                        "domain": domain,
                        "group": f"{domain}-{i}",
                        "turns": [f"{domain} {WORDS[i % 10]} {WORDS[(i * 7 + i // 10) % 10]} number {i}?"],
                    }
                )
                for i in range(24)
            ]
            (folder / f"{domain}.jsonl").write_text("\n".join(lines) + "\n")
        recipe: dict[str, Any] = {
            "name": "tiny",
            "workdir": str(folder / "work"),
            "target": {"model": str(tiny_target_folder), "device": "cpu"},
            "mix": {
                "sources": [{"kind": "turns", "path": "support.jsonl"}, {"kind": "turns", "path": "code.jsonl"}],
                "selection_share": 0.25,
                "holdout_share": 0.25,
            },
            "capture": {"max_new_tokens": 12, "batch_size": 8, "top_k": 16, "tail_samples": 4, "shard_samples": 16},
            "drafts": {
                "small": SMALL,
                "eagle3": {
                    "family": "eagle3",
                    "draft_vocabulary": 200,
                    "steps": 4,
                    "warmup_steps": 1,
                    "tokens_per_step": 256,
                    "aux_layers": [1, 2, 4],
                    "draft_tokens": 2,
                },
            },
            "score": {
                "draft_tokens": [1, 2],
                "decode_conversations": 2,
                "costs": {"prompts": 2, "rounds": 6, "warmup_rounds": 0},
            },
            "gate": {"min_speedup": 0, "min_clusters": 2},
        }
        recipe.update(sections)
        path = folder / "tiny.yaml"
        path.write_text(yaml.safe_dump(recipe, sort_keys=False))
        return path

    return write


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[Scored]:
    """What the score verb has come to."""
    seen: list[Scored] = []
    inner = flow.score_foreign

    def spy(*args: object) -> Scored:
        seen.append(inner(*args))  # type: ignore[arg-type]
        return seen[-1]

    monkeypatch.setattr(flow, "score_foreign", spy)
    return seen


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The MLflow database that `quick_databases` copies; the first one that is needed makes it."""
    return tmp_path_factory.mktemp("mlflow") / "empty.db"


@pytest.fixture(scope="module", autouse=True)
def quick_databases(empty_database: Path) -> Iterator[None]:
    """New MLflow databases are copies, in this folder's tests alone: others test how one is made."""
    with copied_databases(empty_database):
        yield


@contextmanager
def copied_databases(empty: Path) -> Iterator[None]:
    """A new MLflow database is a copy of an empty one: making the tables takes seconds."""
    whole = connect._connect

    def copied(settings: Any, uri: str, database: Path | None) -> Any:
        if database is not None and not database.exists():
            if not empty.exists():
                MlflowClient(tracking_uri=f"sqlite:///{empty}").get_experiment_by_name("none")
            database.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(empty, database)
        return whole(settings, uri, database)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connect, "_connect", copied)
        yield


@pytest.fixture(scope="session")
def finished_stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of mixes, captures and trainings that `stage_cache` keeps."""
    return tmp_path_factory.mktemp("finished-stages")


@pytest.fixture
def stage_cache(finished_stages: Path) -> Iterator[None]:
    """Stages that another test of this session made are copied (see `cached_stages`)."""
    with cached_stages(finished_stages):
        yield


@pytest.fixture(scope="session")
def crowned_once(
    tmp_path_factory: pytest.TempPathFactory,
    recipe_in: Callable[..., Path],
    tiny_target_folder: Path,
    finished_stages: Path,
    empty_database: Path,
) -> Snapshot:
    """A folder with a recipe of one small draft after `distill`, its champion, and its target. For `crowned`."""
    root = tmp_path_factory.mktemp("crowned") / "scene"
    shutil.copytree(tiny_target_folder, root / "target")
    score = {"draft_tokens": [2], "decode_conversations": 2, "costs": {"prompts": 2, "rounds": 6, "warmup_rounds": 0}}
    target = {"model": str(root / "target"), "device": "cpu"}
    recipe = recipe_in(root, target=target, drafts={"small": SMALL}, score=score)
    with cached_stages(finished_stages), copied_databases(empty_database):
        outcome = distill(Workspace(load_recipe(recipe)))
    assert outcome is not None and outcome.decision.promote
    return Snapshot(root, "saved")


@pytest.fixture
def crowned(crowned_once: Snapshot) -> Path:
    """A recipe that has a champion, in a folder that is new for each test: change what you like."""
    crowned_once.put_back()
    return crowned_once.recipe


@pytest.fixture(scope="session")
def distilled_once(
    tmp_path_factory: pytest.TempPathFactory,
    recipe_in: Callable[..., Path],
    finished_stages: Path,
    empty_database: Path,
) -> Distilled:
    """The default recipe after `distill`, with a champion."""
    recipe = recipe_in(tmp_path_factory.mktemp("distilled"), registry={"log_with": ["tensorboard"]})
    printed = io.StringIO()
    with redirect_stdout(printed), cached_stages(finished_stages, reads=False), copied_databases(empty_database):
        outcome = distill(Workspace(load_recipe(recipe)))
    assert outcome is not None
    return Distilled(recipe, outcome, printed.getvalue())
