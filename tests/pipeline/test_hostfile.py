"""The command line under DeepSpeed's launcher, on two machines of a hostfile."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launches import SMALL, wait_for
from ports import free_port

from draftforge.pipeline import distill as flow
from draftforge.recipe import load_recipe


def losses(folder: Path) -> dict[int, float]:
    (log,) = folder.glob("work/train-*/metrics.jsonl")
    return {line["step"]: line["loss"] for line in map(json.loads, log.read_text().splitlines())}


@pytest.mark.slow
def test_two_machines_of_a_hostfile_train_like_one_process(recipe_in: Callable[..., Path], tmp_path: Path) -> None:
    """The launcher is started by hand on each of them, two processes each: two addresses of one machine."""
    spread, alone = tmp_path / "spread", tmp_path / "alone"
    for folder in (spread, alone):
        folder.mkdir()
    recipe = recipe_in(spread, drafts={"small": SMALL})
    hosts = tmp_path / "hostfile"
    hosts.write_text("127.0.0.1 slots=2\n127.0.0.2 slots=2\n")
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", str(hosts), "--no_ssh"]
    launcher += ["--master_addr", "127.0.0.1", "--master_port", str(free_port()), "--no_local_rank"]
    command = ["--module", "draftforge.cli", "train", str(recipe)]
    logs, nodes = [tmp_path / f"{node}.log" for node in range(2)], []
    for node, log in enumerate(logs):
        with log.open("wb") as stream:
            started = [*launcher, "--node_rank", str(node), *command]
            environment = os.environ | {"DRAFTFORGE_DEBUG": ""}
            nodes.append(subprocess.Popen(started, stdout=stream, stderr=subprocess.STDOUT, env=environment))
    assert wait_for(nodes, 200) == [0, 0], "\n".join(log.read_text() for log in logs)
    assert "DeepSpeed ZeRO-2, 4 x cpu" in logs[0].read_text()
    one = {**SMALL, "zero_stage": 0, "engine": "torch"}
    flow.train(load_recipe(recipe_in(alone, drafts={"small": one})), None)
    assert losses(spread) == pytest.approx(losses(alone), rel=1e-4)
