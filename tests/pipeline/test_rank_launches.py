"""Ranks under torchrun share capture and scoring, from a retraining's first look to the promotion; one that dies or
fails on the way ends the others."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launches import END_SECONDS, MORTAL, SMALL, launch, wait_for
from ports import free_port

from draftforge.pipeline import distill as flow
from draftforge.recipe import load_recipe
from draftforge.storage import read_object

pytestmark = pytest.mark.slow


def torchrun(arguments: list[str], log: Path, seconds: float = 3 * END_SECONDS) -> tuple[int, str]:
    """Two ranks; the exit code and all that was said."""
    options: dict[str, Any] = {"nproc_per_node": 2, "master_port": free_port()}
    (code,) = wait_for([launch(arguments, log, **options)], seconds)
    return code, log.read_text()


def test_two_ranks_retrain_from_nothing_and_count_like_one(recipe_in: Callable[..., Path], tmp_path: Path) -> None:
    tree = {"measured": {"kind": "measured", "nodes": 4, "levels": 2}}
    score = {"draft_tokens": [1, 2], "decode_conversations": 2, "bootstrap_samples": 50, "trees": tree}
    costs = {"costs": {"prompts": 1, "rounds": 4, "warmup_rounds": 0}}
    recipe = recipe_in(tmp_path, drafts={"small": SMALL | {"score_every": 2}}, score=score | costs)
    command = ["-m", "draftforge.cli", "retrain", str(recipe)]
    code, said = torchrun(command, tmp_path / "first.log")
    assert code == 0 and "promoted to champion" in said, said
    (folder,) = (tmp_path / "work").glob("score-*")
    parts = {path.name: path.read_bytes() for path in (folder / "parts").glob("*.parquet")}
    assert len(parts) == 4  # lookup and three steps
    ranks = (folder / "counts.parquet").read_bytes()
    shutil.rmtree(folder)
    flow.score(load_recipe(recipe), None)
    assert {path.name: path.read_bytes() for path in (folder / "parts").glob("*.parquet")} == parts
    assert (folder / "counts.parquet").read_bytes() == ranks

    code, said = torchrun(command, tmp_path / "second.log")
    assert code == 0 and "up to date" in said and "distilled" not in said, said


def test_another_launcher_leaves_no_rank_waiting(recipe_in: Callable[..., Path], tmp_path: Path) -> None:
    """Nothing ends the others when one fails, and the store goes with the first rank: each says why it ends."""
    recipe, port = recipe_in(tmp_path), free_port()
    (tmp_path / "code.jsonl").write_text('{"broken\n')
    logs, ranks = [tmp_path / f"{rank}.log" for rank in range(3)], []
    for rank, log in enumerate(logs):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env = os.environ | {name: str(value) for name, value in place.items()} | {"DRAFTFORGE_DEBUG": ""}
        with log.open("wb") as stream:
            command = [sys.executable, "-m", "draftforge.cli", "train", str(recipe)]
            ranks.append(subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=env))
    codes = wait_for(ranks, 2 * END_SECONDS)
    said = [log.read_text() for log in logs]
    assert codes == [2, 3, 3], "\n".join(said)
    reason = said[0].splitlines()[-1].removeprefix("error: ")
    assert "code.jsonl:1: not valid JSON" in reason
    for rank in (1, 2):
        (line,) = said[rank].splitlines()
        waited = line.removeprefix(f"error (rank {rank}): ").removesuffix(
            f" was waited for, but rank 0 ended: {reason}"
        )
        assert waited.startswith(("mix-", "owner.json")) and " " not in waited, line


def test_a_rank_that_dies_or_fails_ends_the_job_and_the_next_start_goes_on(
    recipe_in: Callable[..., Path], tmp_path: Path
) -> None:
    capture = {"max_new_tokens": 12, "batch_size": 4, "top_k": 16, "tail_samples": 4, "shard_samples": 4}
    small = {**SMALL, "engine": "torch", "zero_stage": 0, "score_every": 1}  # as many counts leave some for each rank
    recipe = recipe_in(tmp_path, drafts={"small": small}, capture=capture)
    code, said = torchrun([str(MORTAL), "1", "0", "answer", "capture", str(recipe)], tmp_path / "killed.log")
    assert code != 0, said
    (folder,) = (tmp_path / "work").glob("capture-*")
    assert list((folder / "shards").glob("*.json")) and not (folder / "manifest.json").exists()
    flow.train(load_recipe(recipe), None)
    assert read_object(folder / "manifest.json")["complete"]
    code, said = torchrun([str(MORTAL), "1", "0", "fail", "score", str(recipe)], tmp_path / "failed.log")
    assert code != 0 and "error (rank 1): domain 'code': made up by a test" in said, said
