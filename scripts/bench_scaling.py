"""Train, capture and score on one GPU and on several of one host: how much faster, by draft and ZeRO stage.

    python3 scripts/bench_scaling.py OUT --prompts train.jsonl --answers ANSWERS --gpus 1 --gpus 2 --stage 1 --stage 2 \
        --stage 3 --draft eagle3 --draft small --steps 40 --equal --profile
    python3 scripts/bench_scaling.py OUT2 --prompts train.jsonl --gpus 1 --gpus 2 --no-train --capture --score \
        mix.selection_share=0.3 score.max_conversations=0

Prompts are JSON lines with `domain` and `turns`; with recorded answers to them (`draftforge capture --answers-to`) only
the signals are made. They are captured once, and shared by all trainings. The batch per GPU is the recipe's, so a step
on N GPUs has N times its tokens; one launch of N processes trains every draft at every stage, one after another, and
another launch goes on behind one that fails. Positions a second are of a step's tokens without padding, first steps
left out; "with checkpoints" counts what the one in the middle took (scoring included, where an override such as
drafts.small.score_conversations=64 asks for it) as often as the recipe has one.

--equal trains ten steps of one global batch on one GPU and on the most; --resume stops such a training of the first
draft on the most GPUs, and goes on with it on the fewest; --capture answers the prompts on each number of GPUs
(selection and holdout at twelve temperatures, so that it lasts about a minute); --score scores checkpoints of each
draft on each; --profile traces five steps on the most GPUs (profile_training.py). Captures and scores are timed
without what comes before their work (loading, and the costs of rounds, which one rank measures), and as a whole.
Figures go to OUT/results.json as they come, logs of all launches to OUT, tables to the screen. An OUT that exists is
gone on with.
"""

import gzip
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import pyarrow.parquet as pq
import torch
import typer
import yaml
from rich.console import Console
from rich.table import Table

from draftforge.data.conversation import SPLITS
from draftforge.data.store import Capture
from draftforge.distributed import free_port
from draftforge.pipeline import cli_exit
from draftforge.recipe import Recipe, load_recipe
from draftforge.train.loop import METRICS_FILE
from draftforge.train.throughput import MetricLog

SCRIPTS = Path(__file__).resolve().parent
RECIPE = SCRIPTS.parent / "configs/smollm2-bench.yaml"
_UNTIMED_STEPS = 3  # allocation, compilation
_EQUAL_STEPS, _STOPPED_STEP, _PROFILED_STEPS = 10, 3, 12
_SHARDS_A_RANK = 6  # of the capture's timing
_CAPTURED: dict[str, dict[str, Any]] = {  # more answers a prompt than the recipe wants, so that a capture lasts
    "mix": {"selection_share": 0.45, "holdout_share": 0.45},
    "score": {"sampling": [{"temperature": number / 10} for number in range(12)]},
}
Json = dict[str, Any]
app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Run:
    """One training."""

    draft: str
    gpus: int
    stage: int
    steps: int
    kind: str = "speed"
    """Or equal: one global batch however many GPUs there are; resumed: the same, stopped and gone on with on fewer; or
    profile."""

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.draft}-{self.gpus}gpu-zero{self.stage}"

    def settings(self, base: Json, most_gpus: int) -> Json:
        """The recipe's draft as it is trained here."""
        equal = self.kind in ("equal", "resumed")
        objective = base["objective"]
        return base | {
            "steps": self.steps,
            "zero_stage": self.stage,
            "tokens_per_step": base["tokens_per_step"] * (most_gpus if equal else self.gpus),
            "accumulation": base["accumulation"] * (most_gpus // self.gpus if equal else 1),
            "objective": objective[0]["objective"] if isinstance(objective, list) else objective,
            "warmup_steps": min(base["warmup_steps"], self.steps),
            "score_every": max(1, self.steps // 2) if self.kind == "speed" else 0,
            "save_every": 0,
            "keep_best": None,
            "patience": None,
        }


class Bench:
    """A work folder, the recipe, and the figures so far."""

    def __init__(self, out: Path, recipe: Recipe, gpus: list[int]) -> None:
        self.out, self.recipe, self.gpus, self.most = out, recipe.resolved(), gpus, max(gpus)
        self.file = out / "results.json"
        self.results: Json = json.loads(self.file.read_text()) if self.file.is_file() else {}
        self.results |= {"hardware": _hardware()}

    def keep(self, part: str, key: str, figures: Any) -> None:
        """Write a figure down at once: the machine may be gone before the next."""
        self.results.setdefault(part, {})[key] = figures
        self.file.write_text(json.dumps(self.results, indent=1))
        print(f"{part} {key}: {json.dumps(figures)[:300]}", flush=True)

    def found(self, run: Run) -> Json:
        """What is known of a training."""
        known: Json = self.results.get("runs", {}).get(run.name, {})
        return known

    def write(self, name: str, drafts: Json, workdir: Path, **changes: Json) -> Path:
        """The recipe with these drafts, as a file."""
        said = self.recipe | {"drafts": drafts, "workdir": str(workdir)}
        said |= {section: self.recipe[section] | changed for section, changed in changes.items()}
        path = self.out / f"{name}.yaml"
        path.write_text(yaml.safe_dump(said, sort_keys=False))
        return path

    def drafts(self, runs: Iterable[Run]) -> Json:
        """Their settings by name."""
        return {run.name: run.settings(self.recipe["drafts"][run.draft], self.most) for run in runs}

    def launch(
        self,
        name: str,
        gpus: int,
        command: list[str],
        heard: Callable[[str], None] = lambda _: None,
        until: str | None = None,
    ) -> "Said":
        """One torchrun; all that it says goes to OUT/name.log and, line by line, to `heard`.

        `until`: it is stopped by SIGTERM at the first line that begins so.
        """
        place = [f"--nproc-per-node={gpus}", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}  # as torchrun has it for several
        began, lines = time.time(), []
        with (self.out / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *place, *command],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=os.environ | threads,
                text=True,
            )
            assert process.stdout is not None
            for line in process.stdout:
                lines.append((time.time(), line.rstrip()))
                log.write(f"{time.time() - began:7.1f}  {line}")
                log.flush()
                heard(line)
                if until is not None and line.startswith(until):
                    process.terminate()
                    until = None
            code = process.wait()
        said = Said(code, began, time.time(), lines)
        print(f"{name}: {said.ended - began:.1f} s, exit code {code}", flush=True)
        return said


@dataclass(frozen=True)
class Said:
    """What a launch said, and when (seconds since 1970)."""

    code: int
    began: float
    ended: float
    lines: list[tuple[float, str]]

    def when(self, start: str) -> float | None:
        """When the last line came that begins so."""
        return next((at for at, line in reversed(self.lines) if line.startswith(start)), None)

    def line(self, start: str) -> str | None:
        """The last line that begins so."""
        return next((line for _, line in reversed(self.lines) if line.startswith(start)), None)

    def seconds(self, start: str) -> float | None:
        """The seconds that the last line states that begins so."""
        found = re.search(r"in ([0-9.]+) s$", self.line(start) or "")
        return None if found is None else float(found[1])

    @property
    def error(self) -> str:
        """The line that says why it failed."""
        named = [line for _, line in self.lines if line.startswith("error")] or [line for _, line in self.lines if line]
        return named[0] if named and named[0].startswith("error") else (named or ["nothing was said"])[-1]


@app.command()
def main(
    out: Annotated[Path, typer.Argument(help="Work folder; results.json is written there.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value of the recipe.")] = None,
    prompts: Annotated[
        list[Path] | None, typer.Option(exists=True, help="Prompts to train on; may be given again.")
    ] = None,
    answers: Annotated[Path | None, typer.Option(exists=True, help="Recorded answers to them.")] = None,
    gpus: Annotated[list[int] | None, typer.Option(min=1, help="Processes of a launch; may be given again.")] = None,
    stage: Annotated[list[int] | None, typer.Option(min=0, max=3, help="ZeRO stage; may be given again.")] = None,
    draft: Annotated[list[str] | None, typer.Option(help="Draft of the recipe; may be given again.")] = None,
    steps: Annotated[int, typer.Option(min=6, help="Of a training that is timed.")] = 40,
    train: Annotated[bool, typer.Option(help="Time trainings.")] = True,
    equal: Annotated[bool, typer.Option(help="Compare losses of one global batch.")] = False,
    resume: Annotated[bool, typer.Option(help="Stop a training, and go on on fewer GPUs.")] = False,
    capture: Annotated[bool, typer.Option(help="Time the capture.")] = False,
    score: Annotated[bool, typer.Option(help="Time the scoring.")] = False,
    profile: Annotated[bool, typer.Option(help="Trace five steps.")] = False,
    recipe: Annotated[Path, typer.Option(help="What is trained, and how.")] = RECIPE,
) -> None:
    """Launch, read what came of it, and show it."""
    counts, stages, names = sorted(gpus or [1, 2]), sorted(stage or [1, 2, 3]), draft or ["eagle3", "small"]
    sources = [{"kind": "turns", "path": str(path.resolve()), "limit": None} for path in prompts or []]
    given = [f"mix.sources={json.dumps(sources)}"] if sources else []
    loaded = load_recipe(recipe, [*given, *(overrides or [])])
    unknown = [name for name in names if name not in loaded.drafts]
    if unknown:
        raise typer.BadParameter(f"--draft {unknown[0]}: must be one of {', '.join(loaded.drafts)}")
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    bench = Bench(out, loaded, counts)
    bench.results["steps"] = steps
    if capture:
        time_capture(bench)
    runs = [Run(name, count, at, steps) for count in counts for name in names for at in stages] if train else []
    scored = [Run(name, counts[0], stages[0], steps) for name in names] if score else []
    compared = [Run(name, counts[0], stages[0], _EQUAL_STEPS, "equal") for name in names] if equal or resume else []
    compared += [Run(name, bench.most, at, _EQUAL_STEPS, "equal") for name in names for at in stages] if equal else []
    resumed = [Run(names[0], bench.most, stages[0], _EQUAL_STEPS, "resumed")] if resume else []
    profiled = [Run(name, bench.most, stages[0], _PROFILED_STEPS, "profile") for name in names] if profile else []
    wanted = list(dict.fromkeys([*runs, *scored, *compared]))
    if not wanted + profiled:
        show_work(bench)
        return
    if answers is not None:
        bench.recipe["capture"] |= {"answers": str(answers.resolve())}
    first = bench.write("data", bench.drafts([*wanted, *resumed, *profiled]), out / "work")
    said = bench.launch("data", bench.most, ["-m", "draftforge.cli", "capture", str(first)])
    if said.code:
        raise typer.Exit(_fail(said.error))
    for count in counts:
        train_all(bench, count, [run for run in wanted if run.gpus == count])
    for run in resumed:
        resume_on_fewer(bench, run)
    compare_losses(bench, compared + resumed)
    if profile:
        profile_steps(bench, profiled)
    if score:
        time_score(bench, scored)
    if runs:
        show(bench, runs)
    show_work(bench)


def train_all(bench: Bench, gpus: int, runs: list[Run]) -> None:
    """Trainings by one launch; where one fails, by another for those behind it."""
    left = [run for run in runs if "losses" not in bench.found(run)]
    number = 0
    while left:
        number += 1
        path, began = bench.write(f"train-{gpus}gpu-{number}", bench.drafts(left), bench.out / "work"), time.time()

        def read(line: str = "training", left: list[Run] = left, began: float = began) -> None:
            if line.startswith("training"):  # the next one begins
                for run in [run for run in left if finished(bench, run)]:
                    left.remove(run)
                    bench.keep("runs", run.name, asdict(run) | figures_of(bench, run, began))

        said = bench.launch(path.stem, gpus, ["-m", "draftforge.cli", "train", str(path)], read)
        read()
        if left:
            bench.keep("runs", left[0].name, asdict(left[0]) | {"failed": said.error})
            left = left[1:]


def folder_of(bench: Bench, run: Run) -> Path | None:
    """Where a training lies, if it has begun."""
    return next((bench.out / "work").glob(f"train-{run.name}-????????????"), None)


def finished(bench: Bench, run: Run) -> bool:
    folder = folder_of(bench, run)
    return folder is not None and (folder / f"checkpoints/step-{run.steps:06d}").is_dir()


def figures_of(bench: Bench, run: Run, began: float) -> Json:
    """Of one training: rates in positions a second, without and with its checkpoints."""
    folder = folder_of(bench, run)
    assert folder is not None
    lines = MetricLog(folder / METRICS_FILE).read()
    timed = lines[_UNTIMED_STEPS:]
    seconds = sum(line["seconds"] for line in timed)
    positions = sum(line["positions_per_second"] * line["seconds"] for line in timed)
    between = [later["time"] - line["time"] - later["seconds"] for line, later in pairwise(lines)]
    every = bench.recipe["drafts"][run.draft]["score_every"] or bench.recipe["drafts"][run.draft]["steps"]
    save = max(between)  # where the checkpoint in the middle was written, and scored if the recipe scores
    return {
        "positions_per_second": positions / seconds,
        "median_positions_per_second": statistics.median(line["positions_per_second"] for line in timed),
        "with_checkpoints": positions / (seconds + save * len(timed) / every),
        "checkpoint_seconds": save,
        "checkpoint_every": every,
        "wall_positions_per_second": positions / (lines[-1]["time"] - lines[_UNTIMED_STEPS - 1]["time"]),
        "step_seconds": seconds / len(timed),
        "seconds": sum(line["seconds"] for line in lines),
        "since_launch": lines[0]["time"] - lines[0]["seconds"] - began,
        "peak_gib": max((line["peak_gib"] for line in lines if "peak_gib" in line), default=None),
        "losses": [line["loss"] for line in lines],
    }


def compare_losses(bench: Bench, runs: list[Run]) -> None:
    """The largest relative difference from the first number of GPUs."""
    for run in runs:
        alone = next(other for other in runs if other.draft == run.draft)
        pair = [bench.found(one).get("losses") for one in (alone, run)]
        if run != alone and all(pair):
            largest = max(abs(a - b) / abs(a) for a, b in zip(*pair, strict=True))
            bench.keep("equal", run.name, {"than": alone.name, "largest_relative_difference": largest})


def resume_on_fewer(bench: Bench, run: Run) -> None:
    """Stop a training on the most GPUs after some steps, and go on with it on the fewest."""
    began = time.time()
    for gpus, until in ((run.gpus, f"step {_STOPPED_STEP}/"), (bench.gpus[0], None)):
        name, drafts = f"resumed-{gpus}gpu", {run.name: bench.drafts([replace(run, gpus=gpus)]).popitem()[1]}
        path = bench.write(name, drafts, bench.out / "work")
        said = bench.launch(name, gpus, ["-m", "draftforge.cli", "train", str(path)], until=until)
        # The first launch must have been stopped in time, the second one end.
        if finished(bench, run) != (until is None):
            bench.keep("runs", run.name, asdict(run) | {"failed": f"on {gpus} GPUs: {said.error}"})
            return
    went_on = said.line("going on after step ")
    bench.keep("runs", run.name, asdict(run) | figures_of(bench, run, began) | {"went_on": went_on})


def profile_steps(bench: Bench, runs: list[Run]) -> None:
    """Where time goes on the most GPUs."""
    path, traced = bench.write("profile", bench.drafts(runs), bench.out / "work"), bench.out / "profile.json"
    said = bench.launch("profile", bench.most, [str(SCRIPTS / "profile_training.py"), str(traced), "train", str(path)])
    parts: Json = json.loads(traced.read_text()) if traced.is_file() else {}
    for run in runs:
        found = (shares for name, shares in parts.items() if name.startswith(f"train-{run.name}-"))
        bench.keep("profile", run.name, next(found, {"failed": said.error}))


def time_capture(bench: Bench) -> None:
    """The same prompts answered on each number of GPUs, from the mix to the last shard: loading the target included."""
    paths = [Path(source["path"]) for source in bench.recipe["mix"]["sources"] if "path" in source]
    asked = sum(_lines(path) for path in paths)
    settings = {"shard_samples": max(1, 4 * asked // (_SHARDS_A_RANK * bench.most))}
    for gpus in bench.gpus:
        name, drafts = f"capture-{gpus}gpu", self_contained(bench)
        path = bench.write(name, drafts, bench.out / name, capture=settings, **_CAPTURED)
        said = bench.launch(name, gpus, ["-m", "draftforge.cli", "capture", str(path)])
        folder = next((bench.out / name).glob("capture-????????????"), None)
        start, end, seconds = said.when("mix: "), said.when("capture: "), said.seconds("answered: ")
        if said.code or folder is None or start is None or end is None or seconds is None:
            bench.keep("capture", str(gpus), {"failed": said.error})
            continue
        opened = Capture.open(folder, verify=False)
        tokens = sum(len(sample.answer_ids) for split in SPLITS for sample in opened.samples(split))
        found = {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}
        whole = {"whole_seconds": end - start, "launch_seconds": said.ended - said.began}
        bench.keep("capture", str(gpus), found | whole)
        shutil.rmtree(bench.out / name)


def self_contained(bench: Bench) -> Json:
    """A draft that asks nothing of a capture: a recipe must have one."""
    return dict(list(bench.recipe["drafts"].items())[:1])


def time_score(bench: Bench, runs: list[Run]) -> None:
    """Checkpoints scored on each number of GPUs, in folders of their own, from the last training to the end."""
    first: list[str] = []
    for gpus in bench.gpus:
        name = f"score-{gpus}gpu"
        work = bench.out / name
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        stages = ["mix-*", "capture-*", *(f"train-{run.name}-*" for run in runs)]
        for folder in (folder for pattern in stages for folder in (bench.out / "work").glob(pattern)):
            shutil.copytree(folder, work / folder.name, copy_function=os.link)
        shutil.copy(bench.out / "work/owner.json", work)
        path = bench.write(name, bench.drafts(runs), work)
        said = bench.launch(name, gpus, ["-m", "draftforge.cli", "score", str(path)])
        start, counts = said.when("train "), next(work.glob("score-*/counts.parquet"), None)
        seconds = said.seconds("counted: ")
        if said.code or start is None or counts is None or seconds is None:
            bench.keep("score", str(gpus), {"failed": said.error})
            continue
        rows = sorted(map(json.dumps, pq.read_table(counts).to_pylist()))
        first = first or rows
        found = {"rows": len(rows), "seconds": seconds, "whole_seconds": said.ended - start}
        bench.keep("score", str(gpus), found | {"equal_counts": rows == first})


def show(bench: Bench, runs: list[Run]) -> None:
    """The trainings, each beside the one on the fewest GPUs."""
    table = Table("draft", "ZeRO", "GPUs", "positions/s", "ratio", "median", "ratio", "with checkpoints", "ratio")
    for column in ("step ms", "peak GiB", "seconds"):
        table.add_column(column)
    for run in sorted(runs, key=lambda run: (run.draft, run.stage, run.gpus)):
        mine, alone = (bench.found(one) for one in (run, replace(run, gpus=bench.gpus[0])))
        if "failed" in mine or not mine:
            table.add_row(run.draft, str(run.stage), str(run.gpus), mine.get("failed", "not run"))
            continue
        rates = []
        for key in ("positions_per_second", "median_positions_per_second", "with_checkpoints"):
            rates += [f"{mine[key]:,.0f}", f"{mine[key] / alone[key]:.2f}" if key in alone else ""]
        peak = "-" if mine["peak_gib"] is None else f"{mine['peak_gib']:.1f}"
        last = (f"{1000 * mine['step_seconds']:.0f}", peak, f"{mine['seconds']:.1f}")
        table.add_row(run.draft, str(run.stage), str(run.gpus), *rates, *last)
    Console(width=160).print(table)


def show_work(bench: Bench) -> None:
    """Captures and scores, each beside the one on the fewest GPUs."""
    table = Table("", "GPUs", "seconds", "ratio", "as a whole", "ratio", "tokens", "counts as on the fewest")
    for part in ("capture", "score"):
        found: dict[str, Json] = bench.results.get(part, {})
        alone = found.get(str(bench.gpus[0]), {})
        for gpus, mine in found.items():
            cells = [part, gpus]
            for key in ("seconds", "whole_seconds"):
                known = key in mine and key in alone
                cells += (
                    [f"{mine[key]:.1f}", f"{alone[key] / mine[key]:.2f}"] if known else [mine.get("failed", ""), ""]
                )
            table.add_row(*cells, f"{mine['tokens']:,}" if "tokens" in mine else "", str(mine.get("equal_counts", "")))
    if table.row_count:
        Console(width=160).print(table)


def _lines(path: Path) -> int:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
        return sum(1 for _ in stream)


def _fail(message: str) -> int:
    print(message, file=sys.stderr)
    return 1


def _hardware() -> str:
    if not torch.cuda.is_available():
        return "cpu"
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"


if __name__ == "__main__":
    cli_exit.run(app, None, Path(__file__).name)
