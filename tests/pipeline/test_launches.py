"""The command line under torchrun: on two machines, and where a rank dies in the midst of a step."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launches import END_SECONDS, MORTAL, SMALL, launch, wait_for
from ports import free_port

from draftforge.pipeline import distill as flow
from draftforge.recipe import load_recipe


def losses(folder: Path) -> dict[int, float]:
    (log,) = folder.glob("work/train-*/metrics.jsonl")
    return {line["step"]: line["loss"] for line in map(json.loads, log.read_text().splitlines())}


def started(folder: Path) -> bool:
    """Whether a training has saved its first checkpoint."""
    return any(folder.glob("work/train-*/checkpoints/step-000002"))


@pytest.mark.slow
def test_a_rank_that_dies_or_hangs_ends_the_others_and_the_next_start_goes_on(
    recipe_in: Callable[..., Path], tmp_path: Path
) -> None:
    recipe = recipe_in(tmp_path, drafts={"small": SMALL})
    flow.capture(load_recipe(recipe))
    options: dict[str, Any] = {"nproc_per_node": 2, "master_port": free_port()}
    killed = launch([str(MORTAL), "1", "3", "kill", "train", str(recipe)], tmp_path / "killed.log", **options)
    while killed.poll() is None and not started(tmp_path):
        time.sleep(0.05)
    (code,) = wait_for([killed], END_SECONDS)
    log = (tmp_path / "killed.log").read_text()
    assert code != 0 and "error: another rank is gone or hangs (" in log, log

    hung = launch([str(MORTAL), "1", "5", "hang", "train", str(recipe)], tmp_path / "hung.log", **options)
    (code,) = wait_for([hung], 2 * END_SECONDS)  # starting included
    log = (tmp_path / "hung.log").read_text()
    assert "going on after step 2" in log
    assert code != 0 and "error: another rank is gone or hangs (" in log, log
    assert sorted(losses(tmp_path)) == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_two_machines_distil_like_one_process(recipe_in: Callable[..., Path], tmp_path: Path) -> None:
    """Two launches of two processes each, on one file system."""
    spread, alone = tmp_path / "spread", tmp_path / "alone"
    for folder in (spread, alone):
        folder.mkdir()
    recipe = recipe_in(spread, drafts={"small": SMALL})
    options: dict[str, Any] = {"nnodes": 2, "nproc_per_node": 2, "master_addr": "127.0.0.1", "master_port": free_port()}
    logs = [tmp_path / f"{node}.log" for node in range(2)]
    command = ["-m", "draftforge.cli", "distill", str(recipe)]
    nodes = [launch(command, log, node_rank=node, **options) for node, log in enumerate(logs)]
    assert wait_for(nodes, 200) == [0, 0], "\n".join(log.read_text() for log in logs)
    assert "champion" in logs[0].read_text()
    one = {**SMALL, "zero_stage": 0, "engine": "torch"}
    flow.train(load_recipe(recipe_in(alone, drafts={"small": one})), None)
    assert losses(spread) == pytest.approx(losses(alone), rel=1e-4)


@pytest.mark.slow
def test_another_machine_does_not_wait_for_a_first_rank_that_died(
    recipe_in: Callable[..., Path], tmp_path: Path
) -> None:
    """There no launcher ends it: the first machine's is gone, and its own sees nothing wrong."""
    recipe = recipe_in(tmp_path, drafts={"small": SMALL})
    options: dict[str, Any] = {"nnodes": 2, "nproc_per_node": 1, "master_addr": "127.0.0.1", "master_port": free_port()}
    logs = [tmp_path / f"{node}.log" for node in range(2)]
    command = [str(MORTAL), "0", "0", "capture", "train", str(recipe)]
    nodes = [launch(command, log, node_rank=node, **options) for node, log in enumerate(logs)]
    codes = wait_for(nodes, 2 * END_SECONDS)
    log = logs[1].read_text()
    assert 0 not in codes and "error (rank 1): capture-" in log, log
    assert " was waited for, but torchrun at 127.0.0.1:" in log, log
