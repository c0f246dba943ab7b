"""A retraining that is killed, starved, cut off or doubled, again and again: the champion stays, and the next one gets
there all the same, to the very same draft; to all but the last digits where answers were given in other batches."""

import errno
import json
import os
import re
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import requests
from distilled import Snapshot, restore
from forked import command_line, killed_at, run, start
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
HALF_WRITTEN = re.compile(r"\..+\.[0-9a-f]{8}\.(tmp|old)")


@dataclass
class Scene:
    """A work folder whose champion is stale: its target was fine-tuned, and the log grew."""

    stale: Snapshot
    old: str
    """Fingerprint of the target that the champion drafts for."""
    heir: str = ""
    """Content of what an undisturbed retraining promotes: its draft, or the start that this is no better than."""
    training: str = ""
    """Folder of that retraining's training."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Weights that it ends with."""

    @property
    def root(self) -> Path:
        return self.stale.root

    @property
    def recipe(self) -> Path:
        return self.stale.recipe

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

    def killed(self, where: str) -> None:
        """A retraining is killed there (see `killed_at`), and leaves the champion alone."""
        done = run(killed_at, [where, "retrain", str(self.recipe)], self.root / "killed.log")
        assert done.code == -9, (where, done.said[-2000:])
        self.untouched()

    def trained(self) -> dict[str, Tensor]:
        """Weights that the training of the heir ended with."""
        return load_file(self.work / self.training / "checkpoints" / "step-000004" / "model.safetensors")

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
        for name, weight in self.trained().items():
            expected = self.weights[name]  # signals are kept in half precision: a last digit of theirs is 5e-4
            assert float((weight - expected).norm()) <= 1e-2 * float(expected.norm()), name
        assert [path for path in self.work.rglob(".*") if HALF_WRITTEN.fullmatch(path.name)] == []
        (last,) = [run for run in self.runs() if run.info.run_id == after.run_id]
        assert last.info.status == "FINISHED" and not last.data.tags.get(STAGE_TAG)


def draftforge(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def made(crowned_once: Snapshot) -> Scene:
    crowned_once.put_back()
    root, recipe = crowned_once.root, crowned_once.recipe
    old = Workspace(load_recipe(recipe)).target_fingerprint
    model = AutoModelForCausalLM.from_pretrained(root / "target")
    for weight in model.parameters():
        weight.data.mul_(1.02)
    model.save_pretrained(root / "target")
    with (root / "code.jsonl").open("a") as log:
        for i in range(6):
            log.write(json.dumps({"domain": "code", "turns": [f"a later question {i} about loops {i * 3}?"]}) + "\n")
    scene = Scene(Snapshot(root, "stale"), old)
    assert draftforge("retrain", str(recipe)) == 0
    heir = scene.champions()[1]
    assert heir is not None
    before = {path.name for path in scene.stale.saved.glob("work/train-*")}
    (scene.training,) = {path.name for path in scene.work.glob("train-*")} - before
    scene.heir, scene.weights = heir.lineage.content, scene.trained()
    return scene


@pytest.fixture
def scene(made: Scene) -> Scene:
    """The scene as it was before any retraining."""
    made.stale.put_back()
    return made


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


def test_sigkill_at_each_stage(scene: Scene) -> None:
    """Each retraining goes on where the one before was killed, and is killed a stage later."""
    scene.killed(r"/mix-[0-9a-f]+$")
    scene.killed(r"/train-small-[0-9a-f]+/checkpoints/step-000002$")
    scene.killed(r"/score-[0-9a-f]+/parts/small-000004\.parquet$")
    scene.killed(r"/exports/[^/]+$")
    scene.killed("draftforge.pipeline.promotion:promote")
    scene.recovers()


def test_sigkill_between_shards_and_a_corrupted_one(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    """The second time before the training; then a byte of the answers changes on disk, and its shard is made again."""
    before = set(scene.work.glob("capture-*"))
    scene.killed(r"/capture-[0-9a-f]+/shards/00001-\w+\.json$")
    scene.killed(r"/train-small-[0-9a-f]+/init$")
    (fresh,) = set(scene.work.glob("capture-*")) - before
    shard = min(fresh.glob("shards/*-train.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    scene.untouched()
    scene.recovers(exactly=False)
    assert f"answering again: {shard.stem}" in capsys.readouterr().err


def test_a_full_disk(scene: Scene, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The device says so when data is forced out to it; test_bad_input has the stages between these. Then what is
    exported for the registry goes to a file system of 64 kB, where one may be mounted."""
    whole = os.fsync
    for stage in ("probe", "score"):

        def full(descriptor: int, stage: str = stage) -> None:
            if f"/{stage}-" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            whole(descriptor)

        known = {run.info.run_id for run in scene.runs()}
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            assert draftforge("retrain", str(scene.recipe)) == 3
        assert "no space left on the device" in capsys.readouterr().err.splitlines()[-1]
        (failed,) = [run for run in scene.runs() if run.info.status == "FAILED" and run.info.run_id not in known]
        assert failed.data.tags[STAGE_TAG] == stage and "no space left" in failed.data.tags[FAILURE_TAG]
        scene.untouched()
    with small_disk(scene.work / "exports") as mounted:
        if mounted:
            assert draftforge("retrain", str(scene.recipe)) == 3
            assert "no space left on the device" in capsys.readouterr().err.splitlines()[-1]
            assert not any((scene.work / "exports").iterdir())
    scene.untouched()
    scene.recovers()
    if not mounted:
        pytest.skip("may not mount a file system here: no disk was really full")


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Whether a small file system is mounted over a folder; it is taken away in the end."""
    folder.mkdir(exist_ok=True)
    size = ["-t", "tmpfs", "-o", "size=64k", "tmpfs"]
    mounted = not subprocess.run(["mount", *size, str(folder)], capture_output=True).returncode
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def test_mlflow_down_from_the_start_and_in_the_middle_and_a_clock_that_jumps_back(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The clock by a year, in the middle of the last retraining: what is newer than now is used all the same."""
    assert draftforge("retrain", str(scene.recipe), "registry.tracking_uri=http://127.0.0.1:9") == 3
    assert "MLflow cannot be reached" in capsys.readouterr().err.splitlines()[-1]
    scene.untouched()

    # Once the drafts are trained, the store no longer answers, to anything.
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
    honest, shift, capture = time.time, [0.0], distilling.capture_stage

    def jump(*args: Any) -> Any:
        shift[0] = -365 * 86400.0
        return capture(*args)

    monkeypatch.setattr(time, "time", lambda: honest() + shift[0])
    monkeypatch.setattr(distilling, "capture_stage", jump)
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


def test_two_retrainings_at_once(scene: Scene) -> None:
    logs = [scene.root / f"{number}.log" for number in range(2)]
    both = [start(command_line, ["retrain", str(scene.recipe)], log) for log in logs]
    for process in both:
        process.join(300)
    said, codes = [log.read_text() for log in logs], sorted(process.exitcode or 0 for process in both)
    assert codes in ([0, 4], [0, 0]), said
    if codes == [0, 4]:
        assert any("locked by another retraining" in text.splitlines()[-1] for text in said)
    else:
        assert any("up to date" in text for text in said)
    after = scene.champions()[1]
    assert after is not None and after.lineage.content == scene.heir
    assert draftforge("retrain", str(scene.recipe)) == 0 and scene.champions()[1] == after  # nothing is left to do
    assert all(run.info.status == "FINISHED" for run in scene.runs())  # to be kept out is no failure
