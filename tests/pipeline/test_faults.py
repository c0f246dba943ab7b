"""A retraining that is killed, starved, cut off or doubled: the champion stays, and the next one gets there all the
same, to the very same draft; to all but the last digits where answers were given in other batches."""

import errno
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import requests
from mlflow.tracking import MlflowClient
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from draftforge.cli import main
from draftforge.pipeline import distill as distilling
from draftforge.pipeline.workspace import STAGE_TAG, Workspace
from draftforge.recipe import load_recipe
from draftforge.registry.lineage import Version
from draftforge.registry.tracking import FAILURE_TAG
from draftforge.registry.versions import champion

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
KILLED = Path(__file__).resolve().parents[1] / "support" / "killed.py"
HALF_WRITTEN = re.compile(r"\..+\.[0-9a-f]{8}\.(tmp|old)")


@dataclass
class Scene:
    """A work folder whose champion is stale: its target was fine-tuned, and the log grew."""

    root: Path
    recipe: Path
    old: str
    """Fingerprint of the target that the champion drafts for."""
    heir: str = ""
    """Content of the draft that an undisturbed retraining promotes."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """The same draft's."""

    @property
    def work(self) -> Path:
        return self.root / "work"

    def champions(self) -> tuple[Version | None, Version | None]:
        """Of the old target, and of the new one."""
        space = Workspace(load_recipe(self.recipe))
        return champion(space.tracking, self.old), champion(space.tracking, space.target_fingerprint)

    def runs(self) -> list[Any]:
        tracking = Workspace(load_recipe(self.recipe)).tracking
        return list(tracking.client.search_runs([tracking.experiment_id]))

    def untouched(self) -> None:
        """The old champion is what it was, and no other has come up."""
        before, after = self.champions()
        assert before is not None and before.number == 1 and after is None

    def recovers(self, exactly: bool = True) -> None:
        """The next retraining promotes what an undisturbed one does, and leaves nothing half-written.

        Not `exactly`: answers were given in other batches, whose last digits differ.
        """
        assert draftforge("retrain", str(self.recipe)) == 0
        before, after = self.champions()
        assert before is not None and before.number == 1
        assert after is not None and after.lineage.parent == before.reference
        assert after.lineage.content == self.heir or not exactly
        for name, weight in weights_of(after).items():
            expected = self.weights[name]  # signals are kept in half precision: a last digit of theirs is 5e-4
            assert float((weight - expected).norm()) <= 1e-2 * float(expected.norm()), name
        assert [path for path in self.work.rglob(".*") if HALF_WRITTEN.fullmatch(path.name)] == []
        (last,) = [run for run in self.runs() if run.info.run_id == after.run_id]
        assert last.info.status == "FINISHED" and not last.data.tags.get(STAGE_TAG)


def weights_of(version: Version) -> dict[str, Tensor]:
    return load_file(Path(version.source.removeprefix("file://")) / "model.safetensors")


def draftforge(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def made(recipe_in: Callable[..., Path], tiny_target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    root = tmp_path_factory.mktemp("faults") / "scene"
    root.mkdir()
    target = root / "target"
    shutil.copytree(tiny_target_folder, target)
    small = {"family": "small", "layers": 2, "steps": 4, "warmup_steps": 1, "tokens_per_step": 256, "score_every": 2}
    recipe = recipe_in(root, target={"model": str(target), "device": "cpu"}, drafts={"small": small})
    assert draftforge("distill", str(recipe)) == 0
    scene = Scene(root, recipe, Workspace(load_recipe(recipe)).target_fingerprint)
    model = AutoModelForCausalLM.from_pretrained(target)
    for weight in model.parameters():
        weight.data.mul_(1.02)
    model.save_pretrained(target)
    with (root / "code.jsonl").open("a") as log:
        for i in range(6):
            log.write(json.dumps({"domain": "code", "turns": [f"a later question {i} about loops {i * 3}?"]}) + "\n")
    shutil.copytree(root, root.with_name("saved"))
    assert draftforge("retrain", str(recipe)) == 0
    heir = scene.champions()[1]
    assert heir is not None
    scene.heir, scene.weights = heir.lineage.content, weights_of(heir)
    return scene


@pytest.fixture
def scene(made: Scene) -> Scene:
    """The scene as it was before any retraining, in its one place: the store names absolute paths."""
    saved, database = made.root.with_name("saved"), Path("work") / "mlflow.db"
    aside = made.root.with_name("mlflow.db")
    (made.root / database).rename(aside)
    shutil.rmtree(made.root)
    shutil.copytree(saved, made.root)
    aside.replace(made.root / database)
    restore(saved / database, made.root / database)
    return made


def restore(saved: Path, database: Path) -> None:
    """Give a database that connections are open to (MLflow keeps its own) what is in a saved one, by SQLite itself.

    A connection keeps pages until the file's count of changes differs from the one that it saw. A plain copy sets that
    back: as many changes as after the copy before, and the connection answers from before the copy.
    """
    with closing(sqlite3.connect(saved)) as source, closing(sqlite3.connect(database)) as target:
        source.backup(target)


def test_a_restored_database_has_no_older_pages(tmp_path: Path) -> None:
    saved, database = tmp_path / "saved.db", tmp_path / "mlflow.db"
    with closing(sqlite3.connect(saved)) as connection, connection:
        connection.execute("create table runs (id text)")
    shutil.copyfile(saved, database)
    with closing(sqlite3.connect(database)) as kept:
        for run in ("first", "other"):  # as many changes each time, by somebody else
            restore(saved, database)
            with closing(sqlite3.connect(database)) as connection, connection:
                connection.execute("insert into runs values (?)", [run])
            assert kept.execute("select id from runs").fetchall() == [(run,)]


@pytest.mark.parametrize(
    "where",
    [
        r"/mix-[0-9a-f]+$",
        r"/capture-[0-9a-f]+/shards/00001-\w+\.json$",
        r"/train-small-[0-9a-f]+/checkpoints/step-000002$",
        r"/score-[0-9a-f]+/parts/small-000004\.parquet$",
        r"/exports/[^/]+$",
        "draftforge.pipeline.promotion:promote",
    ],
)
def test_sigkill_at_each_stage(where: str, scene: Scene) -> None:
    command = [sys.executable, str(KILLED), where, "retrain", str(scene.recipe)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == -9, done.stderr[-2000:]
    scene.untouched()
    scene.recovers(exactly="shards" not in where)


@pytest.mark.parametrize(
    ("where", "stage"),
    [(r"/probe-", "probe"), (r"/score-", "score")],  # test_bad_input has those between
)
def test_a_full_disk(
    where: str, stage: str, scene: Scene, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The device says so when data is forced out to it."""
    whole = os.fsync

    def full(descriptor: int) -> None:
        if re.search(where, str(Path(f"/proc/self/fd/{descriptor}").readlink())):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        whole(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert draftforge("retrain", str(scene.recipe)) == 3
    assert "no space left on the device" in capsys.readouterr().err.splitlines()[-1]
    failed = next(run for run in scene.runs() if run.info.status == "FAILED")
    assert failed.data.tags[STAGE_TAG] == stage and "no space left" in failed.data.tags[FAILURE_TAG]
    scene.untouched()
    scene.recovers()


@pytest.fixture
def small_disk(scene: Scene) -> Iterator[None]:
    """What is exported for the registry goes to a file system of 64 kB; the test empties it by unmounting it."""
    place = str(scene.work / "exports")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("may not mount a file system here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", place], capture_output=True)


def test_a_disk_that_is_really_full(scene: Scene, small_disk: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert draftforge("retrain", str(scene.recipe)) == 3
    assert "no space left on the device" in capsys.readouterr().err.splitlines()[-1]
    assert not any((scene.work / "exports").iterdir())
    subprocess.run(["umount", "-l", str(scene.work / "exports")], check=True)
    scene.untouched()
    scene.recovers()


def test_mlflow_down_in_the_middle(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once the drafts are trained, the store no longer answers, to anything."""
    whole = distilling.score_stage

    def gone(*args: object, **kwargs: object) -> None:
        raise requests.ConnectionError("connection refused")

    def cut(*args: Any) -> Any:
        for name in ("log_batch", "log_artifact", "log_text", "set_terminated", "get_run", "search_model_versions"):
            monkeypatch.setattr(MlflowClient, name, gone)
        return whole(*args)

    monkeypatch.setattr(distilling, "score_stage", cut)
    assert draftforge("retrain", str(scene.recipe)) == 3
    assert "connection refused" in capsys.readouterr().err.splitlines()[-1]
    monkeypatch.undo()
    scene.untouched()
    monkeypatch.setattr(distilling, "train_stage", _unless_finished(distilling.train_stage))
    scene.recovers()


def _unless_finished(whole: Callable[..., Any]) -> Callable[..., Any]:
    """Nothing that was trained before the cut is trained again."""

    def train(*arguments: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("draftforge.pipeline.stages.train", _never)
            return whole(*arguments)

    return train


def _never(*args: object, **kwargs: object) -> None:
    raise AssertionError("trained again")


def test_mlflow_down_from_the_start(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    away = "registry.tracking_uri=http://127.0.0.1:9"
    assert draftforge("retrain", str(scene.recipe), away) == 3
    assert "MLflow cannot be reached" in capsys.readouterr().err.splitlines()[-1]
    scene.untouched()
    scene.recovers()


def test_two_retrainings_at_once(scene: Scene) -> None:
    command = [sys.executable, "-m", "draftforge.cli", "retrain", str(scene.recipe)]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=300)[1] for process in both]
    codes = sorted(process.returncode for process in both)
    assert codes in ([0, 4], [0, 0]), said
    if codes == [0, 4]:
        assert any("locked by another retraining" in text.splitlines()[-1] for text in said)
    else:
        assert any("up to date" in text for text in said)
    after = scene.champions()[1]
    assert after is not None and after.number == 1 and after.lineage.content == scene.heir
    assert draftforge("retrain", str(scene.recipe)) == 0 and scene.champions()[1] == after  # nothing is left to do
    assert all(run.info.status == "FINISHED" for run in scene.runs())  # to be kept out is no failure


def test_a_corrupted_shard_is_answered_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed before the training; meanwhile a byte of the answers changes on disk."""
    where = r"/train-small-[0-9a-f]+/init$"
    command = [sys.executable, str(KILLED), where, "retrain", str(scene.recipe)]
    assert subprocess.run(command, capture_output=True, timeout=300).returncode == -9
    before, _ = scene.champions()
    assert before is not None
    fresh = [
        path for path in scene.work.glob("capture-*") if not path.name.endswith(before.lineage.capture_fingerprint[:12])
    ]
    shard = sorted(fresh[0].glob("shards/*-train.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    scene.untouched()
    scene.recovers(exactly=False)
    assert f"answering again: {shard.stem}" in capsys.readouterr().err


def test_a_clock_that_jumps_back(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a year, in the middle: what is newer than now is used all the same."""
    import time

    honest, shift = time.time, [0.0]
    whole = distilling.capture_stage

    def jump(*args: Any) -> Any:
        shift[0] = -365 * 86400.0
        return whole(*args)

    monkeypatch.setattr(time, "time", lambda: honest() + shift[0])
    monkeypatch.setattr(distilling, "capture_stage", jump)
    scene.recovers()
