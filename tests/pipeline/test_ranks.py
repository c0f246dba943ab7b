"""Several ranks run the verbs: what they make is what one process makes, however they were started; one that dies,
hangs, fails or differs ends all of them in one line each, and the next start goes on, on any number of ranks."""

import itertools
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import launched
import pytest
from forked import Ended, as_command, command_line, python, run, run_ranks, start

from draftforge import distributed as meeting
from draftforge.data.capture import capture as capturing
from draftforge.distributed import free_port, ranks
from draftforge.errors import InputError
from draftforge.pipeline import distill as flow
from draftforge.pipeline import draft_scorer
from draftforge.pipeline.retrain import retrain
from draftforge.recipe import load_recipe
from draftforge.train.loop import Trainer

pytestmark = pytest.mark.slow
SECONDS = 200.0
SMALL = {
    "family": "small",
    "layers": 2,
    "steps": 6,
    "warmup_steps": 1,
    "tokens_per_step": 256,
    "save_every": 2,
    "score_every": 3,
    "zero_stage": 2,
    "precision": "float32",
}
ALONE = {"zero_stage": 0, "engine": "torch"}
TREE = {"measured": {"kind": "measured", "nodes": 4, "levels": 2}}
SCORE = {
    "draft_tokens": [1, 2],
    "decode_conversations": 2,
    "trees": TREE,
    "costs": {"prompts": 1, "rounds": 4, "warmup_rounds": 0},
    "race": {"error": 0.4, "blocks": 3},
}
GONE = "is gone or hangs; the same command goes on from what is finished\n"
LOST_STEP = re.compile(f"a step of the training was waited for, but (another rank|rank 1) {GONE}$")
Write = Callable[..., Path]


def losses(folder: Path) -> dict[int, float]:
    (log,) = folder.glob("work/train-*/metrics.jsonl")
    return {line["step"]: line["loss"] for line in map(json.loads, log.read_text().splitlines())}


def new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_two_ranks_retrain_and_count_like_one(recipe_in: Write, tmp_path: Path) -> None:
    """From nothing to the promotion; of a race each block of a checkpoint is counted once, and the first rank alone
    takes times."""
    together, alone = new(tmp_path / "together"), new(tmp_path / "alone")
    recipe = recipe_in(together, drafts={"small": SMALL}, score=SCORE)
    first, second = run_ranks(as_command, [__file__, "noted_retrain", str(recipe)], tmp_path, 2, SECONDS)
    assert (first.code, second) == (0, Ended(0, "")) and "promoted to champion" in first.said, (first, second)
    notes = [json.loads((together / f"noted-{rank}.json").read_text()) for rank in range(2)]
    counted = [json.dumps(one) for note in notes for one in note["counted"]]
    assert len(counted) == len(set(counted)) and all(note["counted"] for note in notes)
    assert notes[0]["times"] and not notes[1]["times"]
    # One process counts the same, to the byte, and trains the same, to rounding.
    (folder,) = (together / "work").glob("score-*")
    made = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.parquet")}
    shutil.rmtree(folder)
    flow.score(load_recipe(recipe))
    assert {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.parquet")} == made
    flow.train(load_recipe(recipe_in(alone, drafts={"small": SMALL | ALONE}, score=SCORE)))
    assert losses(together) == pytest.approx(losses(alone), rel=1e-4)
    # A champion that is fresh is left alone by all.
    first, second = run_ranks(command_line, ["retrain", str(recipe)], tmp_path, 2, SECONDS)
    assert (first.code, second) == (0, Ended(0, "")) and "up to date" in first.said and "distilled" not in first.said


def noted_retrain(recipe: str) -> None:
    """On one rank: what it counted, and whether it took times."""
    counted, times = list[list[Any]](), list[int]()
    whole, whole_times = draft_scorer.Scorer.counts, draft_scorer.Scorer.times

    def counts(self: Any, draftings: Any, identity: Any, samples: Any = None, *how: Any) -> Any:
        counted.append([*identity, samples and [one.id for one in samples], *map(bool, how[:1]), *how[1:]])
        return whole(self, draftings, identity, samples, *how)

    def timed(self: Any, *args: Any) -> Any:
        times.append(len(counted))
        return whole_times(self, *args)

    draft_scorer.Scorer.counts, draft_scorer.Scorer.times = counts, timed  # type: ignore[assignment, method-assign]
    whole_stage = flow.score_stage

    def staged(*args: Any) -> Any:
        found = whole_stage(*args)
        note = Path(recipe).with_name(f"noted-{ranks().rank}.json")
        note.write_text(json.dumps({"counted": counted, "times": times}))  # before the holdout, which one rank counts
        return found

    flow.score_stage = staged  # type: ignore[assignment]
    assert retrain(load_recipe(Path(recipe))) == 0


def test_whoever_starts_the_ranks_they_train_like_one_process(recipe_in: Write, tmp_path: Path) -> None:
    """torchrun, and DeepSpeed's launcher with a hostfile, each started on two machines: two addresses of one.

    They start `launched.py`, which needs no imports; forked ranks run with the arguments and environment it was given.
    """
    small = SMALL | {"steps": 2, "score_every": 0}
    alone = new(tmp_path / "alone")
    flow.train(load_recipe(recipe_in(alone, drafts={"small": small | ALONE})))
    hosts = tmp_path / "hostfile"
    hosts.write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
    place = ["--master_addr", "127.0.0.1", "--master_port"]
    launchers = {
        "torchrun": ["torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *place, str(free_port())],
        "deepspeed": ["deepspeed.launcher.runner", "--hostfile", str(hosts), "--no_ssh", *place, str(free_port())],
    }
    nodes: dict[Path, BaseProcess] = {}
    path = {"PYTHONPATH": os.pathsep.join([str(Path(launched.__file__).parent), *filter(None, sys.path)])}
    for name, launcher in launchers.items():
        folder = new(tmp_path / name)
        shutil.copytree(alone / "work", folder / "work", ignore=shutil.ignore_patterns("train-*"))
        recipe = recipe_in(folder, drafts={"small": small})
        for node in range(2):
            command = ["-m", *launcher, "--node_rank", str(node)]
            command += ["--no_local_rank"] if name == "deepspeed" else []
            command += ["--module", "launched", str(folder), "train", str(recipe)]
            nodes[folder / str(node)] = start(python, command, folder / f"node-{node}.log", path)
    try:
        told = {rank: launched.read(rank.with_suffix(".told")) for rank in nodes}
        trainings = {
            rank: start(command_line, arguments, rank.with_suffix(".log"), environment)
            for rank, (arguments, environment) in told.items()
        }
        for rank, training in trainings.items():
            training.join(SECONDS)
            launched.write(rank.with_suffix(".code"), training.exitcode)
        for process in nodes.values():
            process.join(SECONDS)
        codes = [process.exitcode for process in nodes.values()]
    finally:
        logs = "\n".join(f"{log}: {log.read_text()}" for log in tmp_path.glob("*/*.log"))
        for process in nodes.values():
            process.kill()
    assert codes == [0] * 4, logs
    for name in launchers:
        assert "DeepSpeed ZeRO-2, 2 x cpu" in (tmp_path / name / "0.log").read_text()
        assert losses(tmp_path / name) == pytest.approx(losses(alone), rel=1e-4)


def test_what_launchers_make_of_a_refusal(tmp_path: Path) -> None:
    """DeepSpeed's passes the exit code on; torchrun names it among its failures, and ends with 1."""
    (tmp_path / "hostfile").write_text("127.0.0.1 slots=1\n")
    launched.write(tmp_path / "0.code", 5)
    path = {"PYTHONPATH": os.pathsep.join([str(Path(launched.__file__).parent), *filter(None, sys.path)])}
    place = ["--node_rank", "0", "--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    for launcher, code in (
        (["torch.distributed.run", "--nproc-per-node", "1", *place], 1),
        (["deepspeed.launcher.runner", "--hostfile", f"{tmp_path}/hostfile", "--no_ssh", *place, "--no_local_rank"], 5),
    ):
        ended = run(python, ["-m", *launcher, "--module", "launched", str(tmp_path)], tmp_path / "log", 200, path)
        assert ended.code == code, ended.said
        assert code == 5 or re.search(r"exitcode +: 5 ", ended.said)


def test_ranks_that_cannot_work_together_say_why_at_the_start(recipe_in: Write, tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path)
    different = run_ranks(as_command, [__file__, "train_with_seed_of_rank", str(recipe)], tmp_path, 3, SECONDS)
    why = "seed = 1 on rank 1: the first rank has 0; all ranks of a launch need the same recipe and options"
    assert [one.code for one in different] == [2, 2, 2] and all(why in one.said for one in different), different
    (tmp_path / "code.jsonl").write_text('{"broken\n')
    broken = run_ranks(command_line, ["train", str(recipe)], tmp_path, 3, SECONDS)
    assert [one.code for one in broken] == [2, 3, 3], broken
    reason = broken[0].said.splitlines()[-1].removeprefix("error: ")
    assert "code.jsonl:1: not valid JSON" in reason
    for rank in (1, 2):
        (line,) = broken[rank].said.splitlines()
        assert line.startswith(f"error (rank {rank}): mix-")
        assert line.endswith(f" was waited for, but rank 0 ended: {reason}")


def train_with_seed_of_rank(recipe: str) -> None:
    flow.train(load_recipe(Path(recipe), [f"seed={int(os.environ['RANK']) % 2}"]))


def test_a_rank_that_ends_ends_the_job_and_the_next_start_goes_on(recipe_in: Write, tmp_path: Path) -> None:
    capture = {"max_new_tokens": 12, "batch_size": 4, "top_k": 16, "tail_samples": 4, "shard_samples": 4}
    recipe = recipe_in(tmp_path, drafts={"small": SMALL}, capture=capture, score=SCORE)

    def end(verb: str, *how: str | int) -> list[Ended]:
        leaving = 1 if "hang" in how else 0
        call = [__file__, "mortal", verb, str(recipe), *how]
        return run_ranks(as_command, call, tmp_path, 2, SECONDS, leaving=leaving)

    # 1) Killed after its first shard: the other one ends, and one process goes on.
    first, _ = end("capture", "answer", 1)
    assert first.code == 3 and first.said.splitlines()[-1].endswith(f" rank 1 {GONE}".rstrip()), first
    (folder,) = (tmp_path / "work").glob("capture-*")
    kept = {path: path.stat().st_mtime_ns for path in (folder / "shards").glob("*.json")}
    assert kept and not (folder / "manifest.json").exists()
    flow.capture(load_recipe(recipe))
    assert (folder / "manifest.json").exists() and {path: path.stat().st_mtime_ns for path in kept} == kept
    # 2) Killed in the fourth step; two go on after the third, until one hangs.
    first, _ = end("train", "kill", 3)
    assert first.code == 3 and LOST_STEP.search(first.said)
    first, _ = end("train", "hang", 5)
    assert "going on after step 3" in first.said
    assert first.code == 3 and LOST_STEP.search(first.said)
    # 3) One process goes on, and its losses are those of an uninterrupted training.
    alone = new(tmp_path / "alone")
    flow.train(load_recipe(recipe, [f"drafts.small.{name}={value}" for name, value in ALONE.items()]))
    flow.train(load_recipe(recipe_in(alone, drafts={"small": SMALL | ALONE}, capture=capture, score=SCORE)))
    assert losses(tmp_path) == pytest.approx(losses(alone), rel=1e-4)
    # 4) One that fails while it counts says why on every rank.
    first, second = end("score", "fail", 0)
    assert second.code == 2 and second.said == "error (rank 1): domain 'code': made up by a test\n"
    assert first.code == 3 and first.said.endswith("but rank 1 ended: domain 'code': made up by a test\n"), first


def mortal(verb: str, recipe: str, how: str, survived: int) -> None:
    """A verb in which the second rank ends badly, after so many steps or calls that it survives.

    `answer`: killed after it wrote a shard; `kill`, `hang`: in a step of the training; `fail`: an error in counting.
    """
    whole_reduce, calls = Trainer.reduce, itertools.count()

    def ending(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            found = function(*args, **options)
            if ranks().rank == 1 and next(calls) >= survived:
                if how == "fail":
                    raise InputError("domain 'code': made up by a test")
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        return call

    def reduce(self: Trainer, *args: Any) -> Any:
        """Between the backward pass and the collective that sums the losses."""
        if self.state.step == survived and self.ranks.rank == 1:
            if how == "hang":
                time.sleep(SECONDS)
            os.kill(os.getpid(), signal.SIGKILL)
        return whole_reduce(self, *args)

    if how == "answer":
        capturing.write_answers = ending(capturing.write_answers)
    elif how == "fail":
        draft_scorer.Scorer.counts = ending(draft_scorer.Scorer.counts)  # type: ignore[method-assign]
    else:
        Trainer.reduce = reduce  # type: ignore[method-assign, assignment]
        if how == "hang":
            meeting.COLLECTIVE_LIMIT = timedelta(seconds=12)
    meeting._HEARD_LIMIT = timedelta(seconds=1)
    getattr(flow, verb)(load_recipe(Path(recipe)))
