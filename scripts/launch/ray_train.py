"""Ray Train: a rank for each of sixteen GPUs, of two nodes of eight.

    ray job submit --working-dir scripts/launch -- python ray_train.py --storage /shared/ray distill /shared/recipe.yaml

What follows the options is for draftforge: distill, capture, train, score, promote or retrain. The recipe's `workdir`
lies on a file system that the nodes share, and draftforge is installed on all of them. Ray places the workers, each
starts its rank as a process of its own, and one that fails ends the job. Submitted again, a stopped job goes on. Needs
Ray 2.51 or later.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.collective import broadcast_from_rank_zero
from ray.train.torch import TorchConfig, TorchTrainer

from draftforge.distributed import free_port

app = typer.Typer(add_completion=False)


@app.command(context_settings={"ignore_unknown_options": True})
def main(
    arguments: Annotated[list[str], typer.Argument(help="Verb, recipe, and what else draftforge takes.")],
    storage: Annotated[Path, typer.Option(help="Folder of Ray's own notes, on a file system that all nodes share.")],
    workers: Annotated[int, typer.Option(min=1, help="Ranks, one a GPU.")] = 16,
    gpu: Annotated[bool, typer.Option(help="Give each rank a GPU.")] = True,
    cpus: Annotated[int, typer.Option(min=1, help="Cores of a rank.")] = 8,
) -> None:
    """Run draftforge on the ranks, and end as it ends."""
    own = {"CPU": cpus, **({"GPU": 1} if gpu else {})}
    TorchTrainer(
        rank,
        train_loop_config={"arguments": arguments},
        torch_config=TorchConfig(backend="gloo"),  # Ray's own; the ranks open groups of theirs
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=gpu, resources_per_worker=own),
        run_config=RunConfig(storage_path=str(storage.resolve()), failure_config=FailureConfig(max_failures=0)),
    ).fit()


def rank(config: dict[str, list[str]]) -> None:
    """One rank, in a Ray worker. Raises RuntimeError where draftforge fails, which has said why."""
    # Ray has set RANK, LOCAL_RANK, WORLD_SIZE and MASTER_ADDR. MASTER_PORT is its own group's: the ranks take another.
    place = {**os.environ, "MASTER_PORT": str(broadcast_from_rank_zero(free_port()))}
    done = subprocess.run([sys.executable, "-m", "draftforge.cli", *config["arguments"]], env=place)
    if done.returncode:
        raise RuntimeError(f"rank {os.environ['RANK']}: draftforge ended with exit code {done.returncode}")


if __name__ == "__main__":
    app()
