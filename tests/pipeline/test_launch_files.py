"""The launch files for clusters: each is what its own tool takes, and starts the ranks of two nodes, which do the work.

The nodes are two launches on this machine, with two ranks each instead of eight. torchrun is the real one, and starts
`launched.py` in the place of draftforge; forked ranks run with the arguments and environment that it was given.
"""

import json
import os
import re
import runpy
import socket
import subprocess
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import launched
import pytest
import yaml
from forked import command_line, start
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob
from torch.distributed.launcher.api import LaunchConfig

from draftforge import cli
from draftforge.distributed import free_port

LAUNCH = Path(__file__).resolve().parents[2] / "scripts" / "launch"
SBATCH, TRAINJOB, RAY = LAUNCH / "draftforge.sbatch", LAUNCH / "trainjob.yaml", LAUNCH / "ray_train.py"
NODES, RANKS = 2, 2
SECONDS = 200.0
WAIT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
SMALL = {"family": "small", "layers": 2, "steps": 2, "warmup_steps": 1, "tokens_per_step": 256, "precision": "float32"}
Told = Mapping[int, tuple[list[str], Mapping[str, str]]]
"""Arguments and environment of each rank."""


def directives() -> dict[str, str]:
    """The options of the batch script, by name."""
    found = re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", SBATCH.read_text(), re.MULTILINE)
    return dict(found)


def trainjob() -> Any:
    return yaml.safe_load(TRAINJOB.read_text())


def test_slurm_script_is_sound(tmp_path: Path) -> None:
    asked = directives()
    assert (asked["nodes"], asked["ntasks-per-node"], asked["gpus-per-node"]) == ("2", "1", "8")
    assert asked["signal"] == "TERM@300" and len(asked) == SBATCH.read_text().count("#SBATCH --")
    check = [str(Path(sys.executable).with_name("shellcheck"))]
    assert subprocess.run([*check, str(SBATCH)], capture_output=True).returncode == 0
    broken = tmp_path / "broken.sbatch"
    broken.write_text(SBATCH.read_text().replace('"$SLURM_JOB_NODELIST"', "$SLURM_JOB_NODELIST"))
    assert subprocess.run([*check, str(broken)], capture_output=True).returncode == 1


def test_kubeflow_takes_the_train_job() -> None:
    job = trainjob()
    assert TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job  # a field that it does not know would be gone
    trainer, (patch,) = job["spec"]["trainer"], job["spec"]["runtimePatches"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == "8"
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert node["name"] == pod["containers"][0]["name"] == "node"  # the runtime's names
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    job["spec"]["trainer"]["numNode"] = job["spec"]["trainer"].pop("numNodes")
    assert TrainerV1alpha1TrainJob.from_dict(job).to_dict() != job


def test_torchrun_waits_for_ranks_that_save_and_ends_before_it_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    (patch,) = trainjob()["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    grace = node["template"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    (in_pod,) = (one["value"] for one in trainjob()["spec"]["trainer"]["env"] if one["name"] == WAIT)
    (in_job,) = re.findall(rf"^export {WAIT}=(\d+)$", SBATCH.read_text(), re.MULTILINE)
    for wait, until in ((in_pod, grace), (in_job, int(directives()["signal"].removeprefix("TERM@")))):
        assert 30 < int(wait) < until
        monkeypatch.setenv(WAIT, wait)
        known = getattr(LaunchConfig(1, 1, 1), "shutdown_timeout", None)  # None: a torch that waits 30 s
        assert known in (int(wait), None)


@pytest.mark.parametrize("file", [SBATCH, TRAINJOB, RAY], ids=lambda file: file.name)
def test_the_verbs_that_it_names_exist(file: Path) -> None:
    (named,) = re.findall(r"(distill, [\w, #\n]+ or \w+)", file.read_text())
    verbs = re.findall(r"\w+", named.replace(" or ", " "))
    known = cli.typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    assert {"capture", "train", "score"} < set(verbs) <= set(known)


@pytest.fixture
def programs(tmp_path: Path) -> dict[str, str]:
    """An environment whose torchrun starts `launched`, with SLURM's programs: two nodes, both here."""
    folder = tmp_path / "bin"
    folder.mkdir()
    scripts = {
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "${{@/#draftforge.cli/launched}}"',
        "scontrol": "echo 127.0.0.1; echo 127.0.0.2",
        "srun": """while [[ $1 == --* ]]; do shift; done
for node in 0 1; do SLURM_NODEID=$node "$@" & done
wait -n && wait -n""",
    }
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
    support = os.pathsep.join([str(Path(launched.__file__).parent), *filter(None, sys.path)])
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": support}


def by_slurm(folder: Path, programs: Mapping[str, str], arguments: list[str], run: Callable[[Told], None]) -> None:
    """Run the batch script, as it is."""
    with socket.socket() as probe:  # the script's ports are these
        port = next(port for port in range(29500, 30500) if probe.connect_ex(("127.0.0.1", port)))
    job = {"SLURM_JOB_ID": str(port - 29500), "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_CPUS_PER_TASK": "1"}
    job |= {"SLURM_NNODES": str(NODES), "SLURM_GPUS_ON_NODE": str(RANKS)}
    finish([subprocess.Popen(["bash", str(SBATCH), str(folder), *arguments], env={**programs, **job})], folder, run)


def by_kubeflow(folder: Path, programs: Mapping[str, str], arguments: list[str], run: Callable[[Told], None]) -> None:
    """Run the container's command on each node, with the variables that the Trainer sets."""
    trainer, port = trainjob()["spec"]["trainer"], free_port()
    assert trainer["args"][:2] == ["distill", "/etc/draftforge/recipe.yaml"]
    nodes = []
    for node in range(NODES):
        place: dict[str, Any] = {"PET_NNODES": NODES, "PET_NPROC_PER_NODE": RANKS, "PET_NODE_RANK": node}
        place |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
        command = [*trainer["command"], str(folder), *arguments]
        nodes.append(subprocess.Popen(command, env={**programs, **{name: str(x) for name, x in place.items()}}))
    finish(nodes, folder, run)


def finish(nodes: list["subprocess.Popen[bytes]"], folder: Path, run: Callable[[Told], None]) -> None:
    """Let forked ranks do what the nodes started, and the nodes end with them."""
    try:
        run({rank: tuple(launched.read(folder / f"{rank}.told")) for rank in range(NODES * RANKS)})
        for rank in range(NODES * RANKS):
            launched.write(folder / f"{rank}.code", 0)
        assert [node.wait(SECONDS) for node in nodes] == [0] * len(nodes)
    finally:
        for node in nodes:
            node.kill()


class Trainer:
    """Ray's trainer, with ranks one after the other."""

    def __init__(self, rank: Callable[[Any], None], **options: Any) -> None:
        self.rank, self.options = rank, options

    def fit(self) -> None:
        world = self.options["scaling_config"]["num_workers"]
        place = {
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1",
        }
        with pytest.MonkeyPatch.context() as patch:
            for rank in range(world):
                for name, value in {**place, "RANK": str(rank), "LOCAL_RANK": str(rank % RANKS)}.items():
                    patch.setenv(name, value)
                self.rank(self.options["train_loop_config"])


def by_ray(
    folder: Path, programs: Mapping[str, str], arguments: list[str], run: Callable[[Told], None], options: Any = ()
) -> list[Any]:
    """Run the script with a stand-in for Ray, which would be 79 MB. Returns the options of the trainer."""
    seen, told, ports = list[Any](), dict[int, Any](), list[int]()

    def trainer(rank: Any, **options: Any) -> Trainer:
        seen.append(options)
        return Trainer(rank, **options)

    def broadcast(port: int) -> int:
        ports.append(port)
        return ports[0]

    def process(command: list[str], env: Mapping[str, str]) -> Any:
        assert command[:3] == [sys.executable, "-m", "draftforge.cli"]
        told[int(env["RANK"])] = command[3:], env
        return types.SimpleNamespace(returncode=0)

    made: dict[str, dict[str, Any]] = {
        "ray": {},
        "ray.train": {"ScalingConfig": dict, "RunConfig": dict, "FailureConfig": dict},
        "ray.train.collective": {"broadcast_from_rank_zero": broadcast},
        "ray.train.torch": {"TorchTrainer": trainer, "TorchConfig": dict},
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, content in made.items():
            module = types.ModuleType(name)
            vars(module).update(content)
            patch.setitem(sys.modules, name, module)
        patch.setattr(subprocess, "run", process)
        app = runpy.run_path(str(RAY))["app"]
        app(["--storage", str(folder), *options, *arguments], standalone_mode=False)
    run(told)
    return seen


def test_ray_is_asked_for_sixteen_gpus(tmp_path: Path) -> None:
    found: list[Told] = []
    (asked,) = by_ray(tmp_path, {}, ["train", "recipe.yaml", "--draft", "small"], found.append)
    assert asked["scaling_config"] == {
        "num_workers": 16,
        "use_gpu": True,
        "resources_per_worker": {"CPU": 8, "GPU": 1},
    }
    assert asked["torch_config"] == {"backend": "gloo"} and asked["run_config"]["failure_config"] == {"max_failures": 0}
    assert sorted(found[0]) == list(range(16)) and found[0][3][0] == ["train", "recipe.yaml", "--draft", "small"]


def test_a_rank_of_ray_that_fails_ends_its_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = types.ModuleType("ray.train.collective")
    made.broadcast_from_rank_zero = int
    for name in ("ray", "ray.train", "ray.train.torch"):
        stub: Any = types.ModuleType(name)
        stub.ScalingConfig = stub.RunConfig = stub.FailureConfig = stub.TorchTrainer = stub.TorchConfig = dict
        monkeypatch.setitem(sys.modules, name, stub)
    monkeypatch.setitem(sys.modules, "ray.train.collective", made)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: types.SimpleNamespace(returncode=5))
    with pytest.raises(RuntimeError, match="rank 3: draftforge ended with exit code 5"):
        runpy.run_path(str(RAY))["rank"]({"arguments": ["promote", "recipe.yaml"]})


@pytest.mark.slow
def test_the_ranks_of_each_launch_do_the_work(
    recipe_in: Callable[..., Path], programs: dict[str, str], tmp_path: Path
) -> None:
    """SLURM captures, Kubeflow trains on that, and Ray scores what was trained."""
    recipe = recipe_in(tmp_path, drafts={"small": SMALL}, score={"draft_tokens": [1], "costs": {"rounds": 4}})

    def launch(by: Callable[..., Any], verb: str, *more: Any) -> str:
        """What the first rank says."""
        folder = tmp_path / verb
        folder.mkdir()

        def run(told: Told) -> None:
            assert [arguments for arguments, _ in told.values()] == [[verb, str(recipe)]] * NODES * RANKS
            ranks = [
                start(command_line, arguments, folder / f"{rank}.log", environment)
                for rank, (arguments, environment) in told.items()
            ]
            for rank in ranks:
                rank.join(SECONDS)
            logs = "\n".join((folder / f"{rank}.log").read_text() for rank in told)
            assert [rank.exitcode for rank in ranks] == [0] * len(told), logs

        by(folder, programs, [verb, str(recipe)], run, *more)
        return (folder / "0.log").read_text()

    assert "answered: " in launch(by_slurm, "capture")
    said = launch(by_kubeflow, "train")
    assert "capture: done" in said and "4 x cpu" in said
    said = launch(by_ray, "score", ["--workers", str(NODES * RANKS), "--no-gpu"])
    assert "train small: done" in said and "counted: " in said
    (scores,) = (tmp_path / "work").glob("score-*/scores.json")
    assert json.loads(scores.read_text())["rows"]
