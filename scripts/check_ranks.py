"""Kill, change or hold back one of two ranks, in every stage: what the others say, and after how many seconds.

    python3 scripts/check_ranks.py OUT --prompts train.jsonl target.model=TARGET

Two processes are started as by a launcher that leaves them alone (RANK, WORLD_SIZE and so on; NCCL where there are two
GPUs, gloo otherwise), so that no agent ends a rank in the place of draftforge. A first launch mixes, captures and
trains a little; then every case goes on from a copy of its stages, all at the same time. A case holds if every rank
that was not killed ends with the expected exit code, in one line where that is an error, within a minute of what
happened to the other one. Logs of all ranks and results.json go to OUT. The exit code is 1 where a case does not hold.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table

from draftforge.errors import InputError, LostRankError
from draftforge.pipeline import cli_exit
from draftforge.recipe import load_recipe

RECIPE = Path(__file__).resolve().parents[1] / "configs/smollm2-bench.yaml"
_RANKS = 2
_LIMIT_SECONDS = 60.0  # from what happens to a rank to the end of the others
_BEGIN_SECONDS = 240.0  # until a case has come to its moment
_LATE_SECONDS, _ABSENT_SECONDS = 20.0, 30.0  # a late rank starts after so many; an absent one is waited for so long
_POLL_SECONDS = 0.05
_PROMPTS, _SLOTS = 1200, 64  # so few answers at once that some shards are written while others are answered
_TRAINED_STEPS, _ENDLESS_STEPS = 4, 100_000
Json = dict[str, Any]
app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Case:
    """What happens to one of the ranks, in one stage."""

    verb: str
    stages: tuple[str, ...] = ()
    """Stages that it goes on from."""
    killed: int | None = None
    """Rank that SIGKILL ends, as soon as `seen` is there."""
    seen: str = ""
    """Path in the work folder that shows that the stage is under way."""
    steps: int = _TRAINED_STEPS
    changed: tuple[str, ...] = ()
    """Overrides of the second rank's recipe."""
    late: bool = False
    """The second rank starts after a while."""
    absent: bool = False
    """The second rank does not start."""
    code: int = LostRankError.exit_code
    """Exit code of the ranks that were not killed."""


_SHARED = ("mix-*", "capture-*")
CASES = {
    "capture: a rank killed": Case("capture", ("mix-*",), 1, "capture-*/shards/*.json"),
    "training: a rank killed": Case("train", _SHARED, 1, "train-*/metrics.jsonl", _ENDLESS_STEPS),
    "training: the first rank killed": Case("train", _SHARED, 0, "train-*/metrics.jsonl", _ENDLESS_STEPS),
    "scoring: a rank killed": Case("score", (*_SHARED, "train-*"), 1, "score-*/parts/*shares"),
    "another recipe": Case("train", _SHARED, changed=("seed=1",), code=InputError.exit_code),
    "a late rank": Case("train", _SHARED, late=True, code=0),
    "an absent rank": Case("train", _SHARED, absent=True),
}


@app.command()
def main(
    out: Annotated[Path, typer.Argument(help="Folder of logs, work folders and results.json; must not exist.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value of the recipe.")] = None,
    prompts: Annotated[list[Path] | None, typer.Option(exists=True, help="Prompts; may be given again.")] = None,
    draft: Annotated[str, typer.Option(help="Draft of the recipe that is trained.")] = "small",
    case: Annotated[list[str] | None, typer.Option(help="Only this case; may be given again.")] = None,
    recipe: Annotated[Path, typer.Option(help="What is captured, trained and scored.")] = RECIPE,
) -> None:
    """Prepare, let every case happen, and show what came of it."""
    chosen = {name: CASES[name] for name in case or CASES if name in CASES}
    if unknown := set(case or []) - set(chosen):
        raise typer.BadParameter(f"--case {unknown.pop()}: must be one of {', '.join(CASES)}")
    sources = [{"kind": "turns", "path": str(path.resolve()), "limit": _PROMPTS} for path in prompts or []]
    given = [f"mix.sources={json.dumps(sources)}"] if sources else []
    loaded = load_recipe(recipe, [*given, *(overrides or [])])
    if draft not in loaded.drafts:
        raise typer.BadParameter(f"--draft {draft}: must be one of {', '.join(loaded.drafts)}")
    out = out.resolve()
    out.mkdir(parents=True)
    check = Check(out, loaded.resolved(), draft)
    began = time.monotonic()
    prepared = check.prepare()
    print(f"prepared in {time.monotonic() - began:.0f} s", flush=True)
    with ThreadPoolExecutor(len(chosen)) as pool:
        found = dict(zip(chosen, pool.map(lambda one: check.happen(one[0], one[1], prepared), chosen.items())))
    (out / "results.json").write_text(json.dumps(found, indent=1))
    show(found)
    raise typer.Exit(0 if all(one["holds"] for one in found.values()) else 1)


@dataclass(frozen=True)
class Check:
    """The folder of all cases, and the recipe that they share."""

    out: Path
    recipe: Json
    draft: str

    def write(self, folder: Path, steps: int) -> Path:
        """The recipe with one short draft, and a work folder of its own."""
        trained = self.recipe["drafts"][self.draft] | {"steps": steps, "warmup_steps": 1, "save_every": 2}
        trained |= {"score_every": 0, "keep_best": None, "patience": None, "zero_stage": 1}
        path = folder / "recipe.yaml"
        captured = self.recipe["capture"] | {"batch_size": _SLOTS, "shard_samples": _SLOTS}
        said = self.recipe | {"workdir": str(folder / "work"), "capture": captured, "drafts": {self.draft: trained}}
        path.write_text(yaml.safe_dump(said, sort_keys=False))
        return path

    def prepare(self) -> Path:
        """A work folder with a mix, a capture and a training. Raises RuntimeError where its launch fails."""
        folder = self.out / "prepared"
        folder.mkdir()
        path, place = self.write(folder, _TRAINED_STEPS), environment()
        ranks = [start(["train", str(path)], place | identity(rank), folder / f"{rank}.log") for rank in range(_RANKS)]
        if any(found["code"] for found in ended(dict(enumerate(ranks)), _BEGIN_SECONDS, folder).values()):
            raise RuntimeError((folder / "0.log").read_text()[-2000:])
        return folder / "work"

    def happen(self, name: str, case: Case, prepared: Path) -> Json:
        """Let a case happen. Returns, of each rank that was not killed, how and when it ended, and whether all hold."""
        # 1) A copy of the stages that it goes on from.
        folder = self.out / name.replace(": ", "-").replace(" ", "-")
        (folder / "work").mkdir(parents=True)
        shutil.copy(prepared / "owner.json", folder / "work")
        for stage in (stage for pattern in case.stages for stage in prepared.glob(pattern)):
            shutil.copytree(stage, folder / "work" / stage.name, copy_function=os.link)
        # 2) Start the ranks, the second one late; then wait for the moment, and kill one.
        path, place, ranks = self.write(folder, case.steps), environment(), dict[int, Any]()
        limit = _ABSENT_SECONDS if case.absent else None
        command = [case.verb, str(path)]
        ranks[0] = start(command, place | identity(0), folder / "0.log", limit)
        if not case.absent:
            time.sleep(_LATE_SECONDS * case.late)
            ranks[1] = start([*command, *case.changed], place | identity(1), folder / "1.log", limit)
        if case.killed is not None:
            until = time.monotonic() + _BEGIN_SECONDS
            while not any((folder / "work").glob(case.seen)) and time.monotonic() < until:
                time.sleep(_POLL_SECONDS)
            os.kill(ranks[case.killed].pid, signal.SIGKILL)
        # 3) How the others end.
        found = ended(ranks, _BEGIN_SECONDS if case.killed is None else 2 * _LIMIT_SECONDS, folder)
        found = {rank: one for rank, one in found.items() if rank != case.killed}
        for one in found.values():
            one["holds"] = holds(case, one)
        return {"ranks": found, "holds": all(one["holds"] for one in found.values())}


def holds(case: Case, one: Json) -> bool:
    """Whether a rank ended as it should: with this code, in one line, and in time."""
    as_said = one["code"] == case.code and len(one["errors"]) == bool(case.code) and not one["traceback"]
    return as_said and (case.killed is None or one["seconds"] <= _LIMIT_SECONDS)


def ended(ranks: Mapping[int, Any], patience: float, folder: Path) -> dict[int, Json]:
    """Exit code (None: it went on, and was killed), seconds from now on, and errors of each rank."""
    begun, seconds = time.monotonic(), dict[int, float]()
    while len(seconds) < len(ranks) and time.monotonic() < begun + patience:
        time.sleep(_POLL_SECONDS)
        for rank, process in ranks.items():
            if process.poll() is not None:
                seconds.setdefault(rank, round(time.monotonic() - begun, 1))
    found = {}
    for rank, process in ranks.items():
        code = process.poll()
        if code is None:
            process.kill()
            process.wait()
        said = (folder / f"{rank}.log").read_text()
        errors = [line for line in said.splitlines() if line.startswith("error")]
        known = {"code": code, "seconds": seconds.get(rank, patience), "errors": errors}
        found[rank] = known | {"traceback": "Traceback" in said}
    return found


def environment() -> dict[str, str]:
    """What the ranks of one launch are told."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    return {"WORLD_SIZE": str(_RANKS), "LOCAL_WORLD_SIZE": str(_RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def identity(rank: int) -> dict[str, str]:
    """What one rank is told."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)}


def start(arguments: Sequence[str], place: Mapping[str, str], log: Path, start_limit: float | None = None) -> Any:
    """Start one rank, `draftforge ARGUMENTS`. `start_limit`: seconds that it waits for others to start."""
    program = ["-m", "draftforge.cli"]
    if start_limit is not None:
        lines = ["import sys", "from datetime import timedelta", "from draftforge import cli, distributed"]
        lines += [f"distributed.START_LIMIT = timedelta(seconds={start_limit})", "cli.main(sys.argv[1:])"]
        program = ["-c", "\n".join(lines)]
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with log.open("w") as stream:
        return subprocess.Popen(
            [sys.executable, *program, *arguments],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **threads, **place},
        )


def show(found: Mapping[str, Json]) -> None:
    """A line for each rank that was not killed."""
    table = Table("case", "rank", "exit code", "seconds", "what it said", "holds")
    for name, case in found.items():
        for rank, one in case["ranks"].items():
            said = " | ".join(one["errors"]) or "no error"
            table.add_row(name, str(rank), str(one["code"]), f"{one['seconds']:.1f}", said, str(one["holds"]))
    Console(width=200).print(table)


if __name__ == "__main__":
    cli_exit.run(app, None, Path(__file__).name)
