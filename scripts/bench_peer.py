"""EAGLE-3 heads of speculators 0.9.0 and of draftforge, trained on the same captured rows and judged alike.

    python3 -m venv PEER && PEER/bin/pip install speculators==0.9.0
    python3 scripts/bench_peer.py OUT --peer-python PEER/bin/python --prompts train.jsonl --self-prompts 36000 \
        --eval mt_bench.jsonl --eval humaneval.jsonl --eval gsm8k_test.jsonl --seconds 240 --peer-device cuda:1

One capture serves both. speculators runs in its own environment (train_speculators.py), by default on the target's
device once ours is done; on another device (--peer-device) both train at once, and its kernels are compiled while the
target still answers, in seconds that are noted and not counted. Its settings are its own; --peer-flags win. Ours is a
draft of the recipe, trained for --seconds of steps (their number follows from the speed of a short trial) or for
--steps; either may be given again.

Every head is replayed by draftforge on the answers to the prompts of --eval, at K = 4 and temperature 0; each file is
a domain. The last checkpoint of each training makes the table, the others its curve. Positions are tokens of the rows
that were read, prompts included. Seconds: `training` is of the steps alone, `all in` is capture, preparation, the whole
training with its start, and scoring of the last checkpoint.

Results are written as they come: OUT/results.json, table.txt, counts.parquet, and a log of each part of the peer. The
work folder (OUT/work, or --work on a faster disk: hidden states take 24 GB for 5 million tokens of a 135M target) is
gone on with: what is finished there is not done again.
"""

import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import torch
import typer
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from transformers.utils.logging import disable_progress_bar

from draftforge import storage
from draftforge.data.store import Capture
from draftforge.errors import DraftforgeError, InputError
from draftforge.eval import counts
from draftforge.eval.acceptance import tau, tau_difference
from draftforge.eval.score import Identity
from draftforge.eval.settings import SELECTION_SPLIT
from draftforge.pipeline import cli_exit
from draftforge.pipeline.draft_scorer import Scorer
from draftforge.pipeline.stages import Stages, captured_stages, checkpoints_of, train_stage
from draftforge.pipeline.workspace import Workspace
from draftforge.progress import say
from draftforge.recipe import Recipe, load_recipe
from draftforge.scripts.bench_training import RECIPE, UNTIMED_STEPS, domain_of, sample_prompts, source
from draftforge.specdec.targets import resolve_device
from draftforge.train.loop import METRICS_FILE
from draftforge.train.settings import Settings
from draftforge.train.throughput import MetricLog, NoSink

PEER_SCRIPT = Path(__file__).with_name("train_speculators.py")
PEER, TRIAL, ALL = "speculators", "trial", "all"
_TRIAL_STEPS = 16
_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SAVING_SECONDS = 60  # that a stopped training has to save its head
Json = dict[str, Any]
app = typer.Typer(add_completion=False)


@app.command()
def main(
    out: Annotated[Path, typer.Argument(help="Results are written there.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value of the recipe.")] = None,
    *,
    prompts: Annotated[list[Path], typer.Option(help="Prompts to train on; may be given again.")],
    judged: Annotated[list[Path], typer.Option("--eval", help="Prompts to judge on; may be given again.")],
    self_prompts: Annotated[int, typer.Option(help="Prompts to sample from the target beside those.")] = 0,
    eval_limit: Annotated[int, typer.Option(help="Conversations of each file to judge on.")] = 200,
    recipe: Annotated[Path, typer.Option(help="What is captured, and how ours is trained.")] = RECIPE,
    draft: Annotated[str, typer.Option(help="The recipe's draft that is trained.")] = "eagle3",
    seconds: Annotated[list[float] | None, typer.Option(help="Seconds of our steps; may be given again.")] = None,
    steps: Annotated[list[int] | None, typer.Option(help="Our steps; may be given again.")] = None,
    points: Annotated[int, typer.Option(help="Checkpoints of each of our trainings.")] = 4,
    peer_python: Annotated[Path, typer.Option(help="Python with speculators installed.")] = Path(sys.executable),
    peer_site: Annotated[Path | None, typer.Option(help="PYTHONPATH of that Python.")] = None,
    peer_device: Annotated[str, typer.Option(help="Where speculators trains; default: the target's device.")] = "",
    peer_steps: Annotated[int, typer.Option(help="Its steps, of 8,192 tokens.")] = 3800,
    peer_flags: Annotated[str, typer.Option(help="Flags of its training, in one word.")] = "",
    peer_until: Annotated[
        float, typer.Option(help="Stop it so many seconds after this program's start, and judge its head; 0: never.")
    ] = 0,
    peer_processes: Annotated[int, typer.Option(help="Processes that prepare its hidden states.")] = 4,
    work: Annotated[Path | None, typer.Option(help="Work folder; default: OUT/work.")] = None,
) -> None:
    """Capture, train both, score both."""
    environment = dict(os.environ)  # before an engine adds to it
    work = (work or out / "work").resolve()
    work.mkdir(parents=True, exist_ok=True)
    files = [source(path, None) for path in prompts]  # few go to the other splits, which may not be empty
    files += [source(path, SELECTION_SPLIT) | {"limit": eval_limit} for path in judged]
    given = [f"workdir={work / 'ours'}", "mix.selection_share=0.005", "mix.holdout_share=0.005"]
    given += ["score.sampling=[{temperature: 0}]", "score.draft_tokens=[4]"]
    given += ["score.max_conversations=0", *(overrides or [])]
    base = load_recipe(recipe, given)
    settings = trained_settings(base, draft)
    peer = Peer(
        python=peer_python,
        site=peer_site,
        device=peer_device,
        work=work,
        out=out.resolve(),
        environment=environment,
        steps=peer_steps,
        until=peer_until,
        flags=shlex.split(peer_flags),
        processes=peer_processes,
    )
    peer.take_target(base)

    bench = Bench(out, overrides or [])
    with ThreadPoolExecutor(2, PEER) as pool:
        # 1) Capture, while the peer's kernels are compiled on a device of its own.
        compiled = pool.submit(peer.compile) if peer.beside else None
        start = time.monotonic()
        if self_prompts:
            path = sample_prompts(base.target, self_prompts, work / "self.jsonl.gz")
            files.insert(0, source(path, None))
        given += [f"mix.sources={json.dumps(files)}"]
        chosen = {TRIAL: variant(settings, _TRIAL_STEPS, 1)}
        stages = captured_stages(Workspace(load_recipe(recipe, [*given, f"drafts={json.dumps(chosen)}"])))
        bench.captured(work / "capture.json", stages, time.monotonic() - start)
        write_rows(stages, work / "rows.safetensors")

        # 2) Both trainings, at once or one after the other; each is scored when it is done. What fails stops no other.
        trained = pool.submit(peer.run, compiled) if peer.beside else None
        judge = Judge(stages, [domain_of(path) for path in judged])
        with bench.going_on("draftforge"):
            for name, count in planned(stages, settings, seconds or [], steps or []).items():
                chosen = {name: variant(settings, count, points)}
                space = stages.space.with_recipe(load_recipe(recipe, [*given, f"drafts={json.dumps(chosen)}"]))
                bench.add(train_ours(Stages(space), name), judge)
        with bench.going_on(PEER):
            bench.add(peer.run(None) if trained is None else trained.result(), judge)
    bench.show()
    if bench.found["failed"]:
        raise typer.Exit(1)


def trained_settings(recipe: Recipe, draft: str) -> Settings:
    """Settings of the recipe's draft. Raises InputError where there is none of that name, or of another family."""
    settings = recipe.drafts.get(draft)
    if settings is None or settings.family != "eagle3":
        raise InputError(f"--draft {draft}: must be a draft of the recipe, of family eagle3")
    return settings


def variant(settings: Settings, steps: int, points: int) -> Json:
    """Settings for another number of steps, with so many checkpoints; phases of the objective keep their shares."""
    values = settings.model_dump(mode="json", exclude_unset=True)
    if isinstance(values.get("objective"), list):
        for phase in values["objective"][:-1]:
            phase["until"] = max(1, round(phase["until"] * steps / settings.steps))
    warmup = min(settings.warmup_steps, max(1, steps // 10))
    return values | {"steps": steps, "warmup_steps": warmup, "score_every": -(-steps // points)}


def planned(stages: Stages, settings: Settings, seconds: Sequence[float], steps: Sequence[int]) -> dict[str, int]:
    """Steps of each of our trainings, by its name. Seconds become steps by the speed of a short trial."""
    found: dict[str, int] = {}
    if seconds:
        lines = MetricLog(train_stage(stages, TRIAL, NoSink()).folder / METRICS_FILE).read()
        step = statistics.median(line["seconds"] for line in lines[UNTIMED_STEPS:])
        say(f"a step takes {step:.3f} s")
        found = {f"draftforge-{limit:g}s".replace(".", "-"): max(2, int(limit / step)) for limit in seconds}
    chosen = steps or ([] if seconds else [settings.steps])
    return found | {f"draftforge-{count}": count for count in chosen}


def write_rows(stages: Stages, path: Path) -> None:
    """Write the train split as rows for the peer: ids end to end, offsets, and each row's length of prompt."""
    if path.is_file():
        return
    samples = Capture.open(stages.captured.folder, verify=False).samples("train")
    lengths = [len(one.prompt_ids) + len(one.answer_ids) for one in samples]
    tensors = {
        "ids": torch.tensor([token for one in samples for token in (*one.prompt_ids, *one.answer_ids)]).int(),
        "offsets": torch.tensor([0, *lengths]).cumsum(0),
        "prompt_tokens": torch.tensor([len(one.prompt_ids) for one in samples]),
    }
    partial = path.with_name(f".{path.name}")
    save_file(tensors, partial)
    partial.replace(path)


@dataclass
class Checkpoint:
    """A head, and what its training took so far."""

    folder: Path
    steps: int
    positions: int
    seconds: float
    """Of the steps alone."""


@dataclass
class Trained:
    """A training that is done: its checkpoints, and what it took."""

    trainer: str
    checkpoints: list[Checkpoint]
    preparation_seconds: float
    whole_seconds: float
    """From its start to its end, loading, checkpoints and validation included."""
    notes: Json = field(default_factory=dict)


def train_ours(stages: Stages, name: str) -> Trained:
    """Train a draft of ours."""
    record, start = stages.training(name).folder / "bench.json", time.monotonic()
    stage = train_stage(stages, name, NoSink())
    whole = noted(record, {"whole_seconds": time.monotonic() - start})["whole_seconds"]
    lines = MetricLog(stage.folder / METRICS_FILE).read()
    checkpoints = []
    for step, folder in sorted(checkpoints_of(stage).items()):
        done = lines[:step]
        positions = round(sum(line["positions_per_second"] * line["seconds"] for line in done))
        checkpoints.append(Checkpoint(folder, step, positions, sum(line["seconds"] for line in done)))
    notes = {"first_step_seconds": lines[0]["seconds"], "peak_gib": max(line.get("peak_gib", 0.0) for line in lines)}
    return Trained(name, checkpoints, 0.0, whole, notes)


def noted(path: Path, figures: Json) -> Json:
    """Figures of a part that was done just now; those of a call before where they are on disk."""
    if not path.is_file():
        storage.write_json(path, figures)
    return storage.read_object(path)


@dataclass
class Peer:
    """speculators in its environment: each part is a process of its own, with a log in `out`."""

    python: Path
    site: Path | None
    device: str
    """Device of the training; empty: the target's."""
    work: Path
    out: Path
    environment: Mapping[str, str]
    steps: int
    until: float
    """Seconds after which the training is stopped, counted from the object's making; 0: never."""
    flags: list[str]
    processes: int
    """Processes of the preparation."""
    target: Path = Path()
    dtype: str = "bfloat16"
    beside: bool = False
    """Whether it trains on another device than ours, at the same time."""
    start: float = field(default_factory=time.monotonic)

    def take_target(self, recipe: Recipe) -> None:
        """Take target and device from the recipe. Raises InputError where speculators could not load the target."""
        settings = recipe.target
        self.target = Path(settings.model).resolve()
        if not (self.target / "config.json").is_file() or settings.adapter is not None:
            raise InputError(f"target.model {settings.model}: must be a safetensors folder: speculators reads it too")
        ours, dtype = resolve_device(settings.device, settings.dtype)
        self.dtype = str(dtype).removeprefix("torch.")
        mine = torch.device(self.device or ours)
        self.beside = (mine.type, mine.index or 0) != (ours.type, ours.index or 0)
        # The process sees its own device alone, as its first one.
        seen = self.environment.get("CUDA_VISIBLE_DEVICES")
        shown = "" if mine.type == "cpu" else (seen.split(",")[mine.index or 0] if seen else str(mine.index or 0))
        own = {"PYTHONPATH": str(self.site.resolve())} if self.site else {}
        own |= dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
        own |= {"CUDA_VISIBLE_DEVICES": shown, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
        kept = {name: value for name, value in self.environment.items() if name not in (*_LAUNCHED, "PYTHONPATH")}
        self.environment = kept | own

    def compile(self) -> None:
        """Train two steps on random rows, so that the training finds its kernels compiled. A failure is only told."""
        record, folder = self.work / "peer-compiled.json", self.work / "peer-compile"
        if record.is_file() or folder.exists():
            return
        start = time.monotonic()
        try:
            self.call("compile", "compile", "--out", str(folder), "--", *self.flags)
        except DraftforgeError as error:
            say(f"{PEER}: kernels were not compiled ahead: {error}")
            return
        noted(record, {"seconds": time.monotonic() - start})

    def run(self, compiled: Any) -> Trained:
        """Prepare the rows and train on them; what is done already is taken from the work folder."""
        data, folder = self.work / "peer-data", self.work / "peer-run"
        prepared, done = self.work / "peer-prepared.json", self.work / "peer-trained.json"
        # 1) Hidden states, by several processes that each write their share.
        if not prepared.is_file():
            start, rows = time.monotonic(), self.work / "rows.safetensors"
            shutil.rmtree(data, ignore_errors=True)  # of a call that was stopped
            given = ["prepare", "--rows", str(rows), "--data", str(data), "--dtype", self.dtype]
            parts = [[*given, "--part", f"{part}/{self.processes}"] for part in range(self.processes)]
            with ThreadPoolExecutor(self.processes) as pool:
                list(pool.map(lambda part: self.call("prepare", *part), parts))
            size = sum(path.stat().st_size for path in (data / "hidden_states").iterdir())
            noted(prepared, {"seconds": time.monotonic() - start, "bytes": size})
            say(f"{PEER}: prepared {size / 1e9:.1f} GB in {time.monotonic() - start:.0f} s")
        if compiled is not None:
            compiled.result()
        # 2) The training, to its last step or until its time is up.
        if not done.is_file():
            start = time.monotonic()
            given = ["train", "--data", str(data), "--out", str(folder), "--steps", str(self.steps)]
            stopped = self.call("train", *given, "--", *self.flags, until=self.until)
            noted(done, {"seconds": time.monotonic() - start, "stopped": stopped})
        return self.trained(folder, storage.read_object(prepared), storage.read_object(done))

    def trained(self, folder: Path, prepared: Json, done: Json) -> Trained:
        """The training in a folder, as its progress and its checkpoints tell it."""
        lines = [json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines()]
        places = [folder / "checkpoints" / str(line["epoch"]) for line in lines]
        last = folder / "checkpoints" / "interrupted"
        if done["stopped"] and last.is_dir():
            places[-1] = last
        checkpoints = [
            Checkpoint(place, line["steps"], line["positions"], line["seconds"])
            for place, line in zip(places, lines, strict=True)
            if place.is_dir()
        ]
        if not checkpoints:
            raise InputError(f"{folder / 'checkpoints'}: the training left no head")
        compiled = self.work / "peer-compiled.json"
        notes: Json = {"first_step_seconds": lines[0]["first_step_seconds"], "stopped": done["stopped"]}
        notes |= {"prepared_bytes": prepared["bytes"], "flags": self.flags}
        notes["compiled_ahead_seconds"] = storage.read_object(compiled)["seconds"] if compiled.is_file() else 0.0
        return Trained(PEER, checkpoints, prepared["seconds"], done["seconds"], notes)

    def call(self, log: str, verb: str, *given: str, until: float = 0) -> bool:
        """Run a part to its end; True: it was stopped when its time was up. Raises InputError where it fails."""
        path = self.out / f"peer-{log}.log"
        command = [str(self.python), str(PEER_SCRIPT), verb, "--target", str(self.target), *given]
        with path.open("a") as stream:
            running = subprocess.Popen(
                command, env=dict(self.environment), stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT
            )
            stopped = False
            try:
                code = running.wait(max(1.0, self.start + until - time.monotonic()) if until else None)
            except subprocess.TimeoutExpired:
                say(f"{PEER}: stopped, its time is up")
                running.send_signal(signal.SIGTERM)  # it saves its head, and ends
                code, stopped = running.wait(_SAVING_SECONDS), True
            finally:
                running.kill()
        if code and not stopped:
            lines = path.read_text(errors="replace").strip().splitlines()
            raise InputError(f"{path}: {verb} ended with {code}: {lines[-1] if lines else 'no output'}")
        return stopped


class Judge:
    """Replay of heads on the same recorded answers, at the longest K of the recipe."""

    def __init__(self, stages: Stages, domains: Sequence[str]) -> None:
        """`domains`: those that are judged on; the mix holds more."""
        self._scorer = Scorer(stages.space, stages.captured, SELECTION_SPLIT)
        self._samples = [one for one in self._scorer.samples if one.domain in domains]
        self.confidence = stages.space.recipe.score.confidence

    def counts(self, name: str, step: int, folder: Path) -> pa.Table:
        """Acceptance counts of a head at temperature 0."""
        spec = self._scorer.chain_spec(self._scorer.load(folder))
        table, _ = self._scorer.counts([spec], Identity(name, step), self._samples, checked=())
        return table

    def taus(self, table: pa.Table) -> Json:
        """tau with its interval, by domain and of all."""
        return by_domain(table, lambda part: tau(part, self.confidence).record())

    def differences(self, one: pa.Table, other: pa.Table) -> Json:
        """tau of one head less that of another, paired by conversation, by domain and of all."""
        domains = dict(counts.groups(other, "domain"))

        def less(part: pa.Table) -> Json:
            named = counts.values(part, "domain")
            pair = domains[(named[0],)] if len(named) == 1 else other
            return tau_difference(part, pair, self.confidence).record()

        return by_domain(one, less)


def by_domain(table: pa.Table, figure: Callable[[pa.Table], Json]) -> Json:
    """A figure of each domain's counts, and of all of them."""
    return {str(domain): figure(part) for (domain,), part in counts.groups(table, "domain")} | {ALL: figure(table)}


class Bench:
    """The results so far, which are written after each part."""

    def __init__(self, out: Path, overrides: Sequence[str]) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out = out
        self.tables: dict[tuple[str, int], pa.Table] = {}
        versions = {"torch": torch.__version__, "hardware": hardware()}
        self.found: Json = {**versions, "overrides": list(overrides), "capture": {}}
        self.found |= {"trainings": [], "differences": {}, "failed": {}}

    def captured(self, record: Path, stages: Stages, seconds: float) -> None:
        """Note what the capture took, or took when it was made."""
        data = Capture.open(stages.captured.folder, verify=False)
        train, judged = data.samples("train"), data.samples(SELECTION_SPLIT)
        figures: Json = {"seconds": seconds, "rows": len(train)}
        figures["answers"] = dict(Counter(one.domain for one in judged))
        figures["answer_tokens"] = sum(len(one.answer_ids) for one in (*train, *judged))
        figures["positions"] = sum(len(one.prompt_ids) + len(one.answer_ids) for one in train)
        self.found["capture"] = noted(record, figures)
        say(f"captured: {json.dumps(self.found['capture'])}")
        self.write()

    @contextmanager
    def going_on(self, part: str) -> Iterator[None]:
        """Note an error of a part, and let the others go on."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.found["failed"][part] = f"{type(error).__name__}: {error}"
            self.write()

    def add(self, training: Trained, judge: Judge) -> None:
        """Score the checkpoints of a training, the last one first."""
        entry: Json = {"trainer": training.trainer, "curve": [], **training.notes}
        entry |= {"preparation_seconds": training.preparation_seconds, "whole_seconds": training.whole_seconds}
        self.found["trainings"].append(entry)
        for checkpoint in reversed(training.checkpoints):
            start = time.monotonic()
            table = judge.counts(training.trainer, checkpoint.steps, checkpoint.folder)
            self.tables[training.trainer, checkpoint.steps] = table
            point = {name: value for name, value in asdict(checkpoint).items() if name != "folder"}
            point |= {"score_seconds": time.monotonic() - start, "tau": judge.taus(table)}
            entry["curve"].insert(0, point)
            self.compare(judge)
            self.write()

    def compare(self, judge: Judge) -> None:
        """Compare our heads with the peer's last one: the last of each training, and the one at its positions."""
        curves = {one["trainer"]: one["curve"] for one in self.found["trainings"] if one["curve"]}
        if PEER not in curves:
            return
        last = curves.pop(PEER)[-1]
        for trainer, curve in curves.items():
            earlier = [point for point in curve if point["positions"] <= last["positions"]]
            for label, point in (("last", curve[-1]), *([("at its positions", earlier[-1])] if earlier else [])):
                pair = self.tables[trainer, point["steps"]], self.tables[PEER, last["steps"]]
                at = {"steps": point["steps"], "positions": point["positions"]}
                self.found["differences"][f"{trainer}, {label}"] = at | judge.differences(*pair)

    def write(self) -> None:
        """Write all results so far."""
        storage.write_json(self.out / "results.json", self.found)
        if self.tables:
            counts.write(counts.concat(list(self.tables.values())), self.out / "counts.parquet")
            with (self.out / "table.txt").open("w") as stream:
                self.show(Console(width=200, file=stream))

    def show(self, console: Console | None = None) -> None:
        """Print the table, the curves and the differences."""
        console = console or Console(width=200)
        trainings = [one for one in self.found["trainings"] if one["curve"]]
        domains = list(trainings[0]["curve"][-1]["tau"]) if trainings else []
        times = ("capture s", "preparation s", "training s", "scoring s", "all in s")
        table = Table("trainer", "steps", "positions", *times, *domains, title="tau at K = 4, T = 0")
        for one in trainings:
            point, capture = one["curve"][-1], self.found["capture"]["seconds"]
            parts = capture, one["preparation_seconds"], point["seconds"], point["score_seconds"]
            whole = capture + one["preparation_seconds"] + one["whole_seconds"] + point["score_seconds"]
            shown = [f"{seconds:.0f}" for seconds in (*parts, whole)]
            taus = [interval(point["tau"][domain]) for domain in domains]
            table.add_row(one["trainer"], f"{point['steps']:,}", f"{point['positions']:,}", *shown, *taus)
        console.print(table)
        for one in trainings:
            if one.get("compiled_ahead_seconds"):
                console.print(f"{one['trainer']}: kernels compiled ahead in {one['compiled_ahead_seconds']:.0f} s")
            if one.get("stopped"):
                console.print(f"{one['trainer']}: stopped before its last step, when its time was up")
        curve = Table("trainer", "steps", "positions", "training s", *domains, title="every checkpoint")
        for one in trainings:
            for point in one["curve"]:
                taus = [interval(point["tau"][domain]) for domain in domains]
                at = f"{point['steps']:,}", f"{point['positions']:,}", f"{point['seconds']:.0f}"
                curve.add_row(one["trainer"], *at, *taus)
        console.print(curve)
        for label, found in self.found["differences"].items():
            gains = "  ".join(f"{domain} {interval(found[domain])}" for domain in domains)
            console.print(f"{label} ({found['positions']:,} positions), less {PEER}'s last: {gains}")
        for part, reason in self.found["failed"].items():
            console.print(f"{part} failed: {reason}", markup=False)


def interval(figure: Json) -> str:
    """A figure with its interval."""
    low, high = figure["low"], figure["high"]
    bounds = "" if low is None or high is None else rf" \[{low:.2f}, {high:.2f}]"
    return "-" if figure["value"] is None else f"{figure['value']:.2f}{bounds}"


def hardware() -> list[str]:
    """Names of the devices."""
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] or ["cpu"]


if __name__ == "__main__":
    disable_progress_bar()  # of weights that are loaded
    cli_exit.run(app, None, Path(__file__).name)
