"""A draft through its target's fine-tuning, and a generic beside a production mix, with figures.

    python3 scripts/fetch_target.py TARGET        # SmolLM2-135M-Instruct as a safetensors folder
    python3 scripts/bench_retraining.py cycle OUT --target TARGET --prompts train.jsonl --cold
    python3 scripts/bench_retraining.py mixes OUT2 --target TARGET --log math.jsonl --generic chat.jsonl \
        --self-prompts 1500 --traffic gsm8k_test.jsonl drafts.eagle3.steps=150

`cycle`: the prompts become a log; distil; the served target learns a house style (LoRA, merged); then what `draftforge
retrain` does. The style is made by code from the target's own answers. `mixes`: the same number of prompts and the same
training on a log and on generic prompts; both drafts are judged on later traffic.

Prompts are JSON lines with `domain` and `turns` or `messages`, or a log of the kind `openai`. Settings are those of
configs/smollm2-retraining.yaml; any of them is section.key=value. What is on disk is not done again, and seconds are
those of this call. Figures go to OUT/results.json and to the screen.
"""

import gc
import json
import math
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from draftforge import storage
from draftforge.data.conversation import Split
from draftforge.data.files import first_line
from draftforge.data.prompts import last_turn, source_of
from draftforge.data.records import Record
from draftforge.data.settings import FileSource
from draftforge.data.sources import read
from draftforge.data.store import Capture, Sample
from draftforge.errors import InputError
from draftforge.eval.acceptance import Estimate, tau_difference
from draftforge.eval.counts import values, where
from draftforge.eval.draft_configs import DraftConfig
from draftforge.eval.leaderboard import DomainRow, Row, at_config, domain_rows, leaderboard
from draftforge.eval.score import Identity, stratified_conversations
from draftforge.eval.settings import HOLDOUT_SPLIT
from draftforge.pipeline import cli_exit
from draftforge.pipeline.distill import distill
from draftforge.pipeline.draft_scorer import Scorer
from draftforge.pipeline.retrain import retrain_champion
from draftforge.pipeline.scoring import Scored
from draftforge.pipeline.stages import (
    Stage,
    Stages,
    capture_stage,
    captured_stages,
    checkpoints_of,
    prepare_drafts,
    train_stage,
)
from draftforge.pipeline.workspace import Workspace
from draftforge.progress import say
from draftforge.recipe import load_recipe
from draftforge.registry.champion_alias import last_decision
from draftforge.registry.lineage import Version
from draftforge.registry.versions import champion, resolve_models_uri
from draftforge.scripts.bench_training import sample_prompts
from draftforge.scripts.house_style import in_style, tune
from draftforge.train.loop import METRICS_FILE
from draftforge.train.throughput import MetricLog, NoSink

RECIPE = Path(__file__).parents[1] / "configs/smollm2-retraining.yaml"
FIRST_REQUEST, WEEK = 1_750_000_000, 7 * 86400  # of the log, in seconds
_JUDGED, _SELECTION = 200, 8  # later conversations; those that fill a split that nothing here reads
app = typer.Typer(add_completion=False)

Out = Annotated[Path, typer.Argument(help="Work folder; results.json is written there.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value of the recipe.")]
TargetFolder = Annotated[Path, typer.Option(help="The served model: a safetensors folder.")]


@app.command()
def cycle(
    out: Out,
    overrides: Overrides = None,
    *,
    target: TargetFolder,
    prompts: Annotated[list[Path], typer.Option(help="What the log asks; may be given again.")],
    cold: Annotated[bool, typer.Option(help="Also train as many steps from the recipe's start.")] = False,
    tuning_steps: Annotated[int, typer.Option(help="Steps of the fine-tuning.")] = 120,
    tuning_batch: Annotated[int, typer.Option(help="Answers a step.")] = 64,
    tuning_answers: Annotated[int, typer.Option(help="Answers to make examples of.")] = 2000,
) -> None:
    """Log, distil, fine-tune the target, retrain, and what each draft accepts."""
    out.mkdir(parents=True, exist_ok=True)
    seconds: dict[str, float] = {}
    served, log = out.resolve() / "served", out / "log.jsonl"
    with timed(seconds, "log"):
        write_log(distinct(prompts), log)
    source = {"kind": "openai", "path": str(log.resolve())}
    given = [f"target.model={served}", *settings_of(out / "work", [source]), *(overrides or [])]

    serve(target, served)
    old = Workspace(load_recipe(RECIPE, given))
    with timed(seconds, "distill"):
        first = distill(old)
    assert first is not None  # one process
    if not first.decision.promote:
        raise InputError(f"{first.version.reference}: the first draft was not promoted: {first.decision.reasons[0]}")
    captured = stages_of(old, first.version).captured
    judged = stratified_conversations(samples_of(captured), old.recipe.score.max_conversations or sys.maxsize)
    with timed(seconds, "measure"):
        before = measure(old, captured, fetched(old, first.version), "champion, old target", judged)
    trainings = {"first": training_record(first.scored.chosen_folder, captured)}
    with timed(seconds, "tune"):
        tuning = tune(
            old.target, samples_of(captured, "train"), target, out / "tuned", tuning_steps, tuning_batch, tuning_answers
        )
    style = [in_style(samples_of(captured), old.target)]
    del old
    free()

    serve(out / "tuned", served)
    new = Workspace(load_recipe(RECIPE, given))
    with timed(seconds, "retrain"):
        done = retrain_champion(new)
    heir = champion(new.tracking, new.target_fingerprint) if done.outcome is None else done.outcome.version
    assert heir is not None  # up to date: there is one
    stages = stages_of(new, heir)
    captured = stages.captured
    if done.outcome is not None:
        trainings["retrained"] = training_record(best_heir(done.outcome.scored), captured)
    with timed(seconds, "measure again"):
        stale = measure(new, captured, fetched(new, first.version), "champion, new target", judged)
        fresh = measure(new, captured, fetched(new, heir), "retrained, new target", judged)
    found = [before, stale, fresh]
    if cold:
        with timed(seconds, "cold start"):
            folder = cold_start(stages, given)
        trainings["cold"] = training_record(folder, captured)
        found.append(measure(new, captured, folder, "cold start, new target", judged))
    style.append(in_style(samples_of(captured), new.target))

    confidence = new.recipe.score.confidence
    gains = {f"{one.name} - {stale.name}": tau_difference(one.table, stale.table, confidence) for one in found[2:]}
    if cold:
        gains[f"{fresh.name} - {found[3].name}"] = tau_difference(fresh.table, found[3].table, confidence)
    tuning |= {"share_in_style": dict(zip(("before", "after"), style, strict=True))}
    known = history(new, first.version, heir, done.refused)
    write_results(out, given, found, gains, seconds, {**known, "tuning": tuning, "training": trainings})
    show(found, gains, seconds, trainings)
    say(f"fine-tuned: {json.dumps(tuning, ensure_ascii=False)}")
    show_history(known)


@app.command()
def mixes(
    out: Out,
    overrides: Overrides = None,
    *,
    target: TargetFolder,
    log: Annotated[list[Path], typer.Option(help="Production's prompts; may be given again.")],
    generic: Annotated[list[Path], typer.Option(help="Other prompts; may be given again.")],
    traffic: Annotated[list[Path], typer.Option(help="Later production prompts, to judge on; may be given again.")],
    self_prompts: Annotated[int, typer.Option(help="Generic prompts to sample from the target beside those.")] = 0,
) -> None:
    """The same training on a generic and on a production mix, judged on production traffic."""
    out.mkdir(parents=True, exist_ok=True)
    served = f"target.model={target.resolve()}"
    if self_prompts:
        settings = load_recipe(RECIPE, [served, *(overrides or [])]).target
        generic = [*generic, sample_prompts(settings, self_prompts, out / "self.jsonl.gz")]
    asked = {"production": distinct(log), "generic": distinct(generic)}
    count, later = min(map(len, asked.values())), distinct(traffic)
    held = [write_prompts(later[:_SELECTION], out / "selection.jsonl", "selection")]
    held.append(write_prompts(later[_SELECTION:][:_JUDGED], out / "traffic.jsonl", HOLDOUT_SPLIT))
    seconds: dict[str, float] = {}
    spaces: dict[str, Workspace] = {}
    captures: dict[str, Stage] = {}
    drafts: dict[str, Path] = {}
    trainings: dict[str, Any] = {}
    for name, records in asked.items():
        sources = [write_prompts(records[:count], out / f"{name}.jsonl", "train"), *held]
        given = [served, *settings_of(out / name, sources), *(overrides or [])]
        recipe = load_recipe(RECIPE, given)
        space = spaces[name] = spaces["production"].with_recipe(recipe) if spaces else Workspace(recipe)
        with timed(seconds, f"{name}: capture"):
            made = captured_stages(space)
            captures[name] = made.captured
        with timed(seconds, f"{name}: train"):
            drafts[name] = trained_draft(made)
        trainings[name] = training_record(drafts[name], captures[name])
    both = set.intersection(*({one.conversation for one in samples_of(stage)} for stage in captures.values()))
    space, captured = spaces["production"], captures["production"]
    most = space.recipe.score.max_conversations or sys.maxsize
    judged = stratified_conversations((one for one in samples_of(captured) if one.conversation in both), most)
    with timed(seconds, "measure"):
        found = [measure(space, captured, drafts[name], f"{name} mix", judged) for name in asked]
    by_domain = differences(found[0], found[1], space)
    gains = {f"production mix - generic mix, {domain}": gain for domain, gain in by_domain.items()}
    write_results(out, given, found, gains, seconds, {"training": trainings})
    show(found, gains, seconds, trainings)


@dataclass(frozen=True)
class Measured:
    """One draft on some conversations, at the longest chain."""

    name: str
    row: Row
    table: pa.Table
    domains: list[DomainRow]

    def record(self) -> dict[str, Any]:
        """JSON-able."""
        conversations = values(self.table, "conversation")
        known = self.row.record() | {"conversations": len(conversations), "of": conversations}
        return known | {"domains": {row.domain: row.record() for row in self.domains}}


def best_heir(scored: Scored) -> Path:
    """Folder of the trained checkpoint with the best expected speed-up: the start may do better yet."""
    best = max((row for row in scored.rows if not (row.baseline or row.start)), key=lambda row: row.speedup.value)
    return scored.folders[best.draft, best.step]


def measure(space: Workspace, captured: Stage, folder: Path, name: str, among: Collection[str]) -> Measured:
    """A draft folder on those conversations of the holdout that are named, by replay."""
    scorer = Scorer(space, captured, HOLDOUT_SPLIT)
    draft, settings = scorer.load(folder), scorer.settings
    samples = [one for one in scorer.samples if one.conversation in among]
    table, _ = scorer.counts([scorer.chain_spec(draft)], Identity(name, 0), samples, checked=())
    times = {(name, 0): scorer.times(draft, scorer.specs(draft))}
    table = at_config(table, DraftConfig(max(settings.draft_tokens)))
    rows = leaderboard([table], times, settings)
    return Measured(name, rows[0], table, domain_rows([table], rows, settings, times))


def differences(first: Measured, second: Measured, space: Workspace) -> dict[str, Estimate]:
    """tau of the first minus the second's, over all conversations and by domain."""
    confidence, found = space.recipe.score.confidence, {}
    found["all"] = tau_difference(first.table, second.table, confidence)
    for domain in values(first.table, "domain"):
        one, two = (where(which.table, domain=domain) for which in (first, second))
        found[str(domain)] = tau_difference(one, two, confidence)
    return found


def distinct(paths: Sequence[Path]) -> list[Record]:
    """The conversations of some files, in an order that follows from what they say."""
    found: dict[str, Record] = {}
    for path in paths:
        line = first_line(path)
        if isinstance(line, dict) and "request" in line:
            domain = None if "domain" in line else "production"
            source = FileSource(kind="openai", path=str(path), domain=domain, limit=None, weight=None)
        else:
            source = source_of(path)
        for record in read(source, Path(), 0)[0]:
            found.setdefault(record.id, record)
    return [found[name] for name in sorted(found)]


def write_log(records: Sequence[Record], path: Path) -> None:
    """A week of chat-completions requests. Their answers are left out: the target gives them in the capture."""
    lines = []
    for number, record in enumerate(records):
        messages = [message.record() for message in last_turn(record)[1].messages]
        request = {"model": "served", "messages": messages}
        started = FIRST_REQUEST + WEEK * number // len(records)
        lines.append({"started": started, "domain": record.domain, "request": request})
    storage.write_bytes(path, "".join(json.dumps(line) + "\n" for line in lines).encode())


def write_prompts(records: Sequence[Record], path: Path, split: str) -> dict[str, Any]:
    """The records as a source of that split."""
    lines = [
        {"domain": record.domain, "messages": [message.record() for message in last_turn(record)[1].messages]}
        for record in records
    ]
    storage.write_bytes(path, "".join(json.dumps(line) + "\n" for line in lines).encode())
    return {"kind": "messages", "path": str(path.resolve()), "only": split}


def settings_of(workdir: Path, sources: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"workdir={workdir.resolve()}", f"mix.sources={json.dumps(sources)}"]


def serve(folder: Path, served: Path) -> None:
    """Put a model where the recipe looks for it, as a roll-out does."""
    beside = served.with_name(".served")
    beside.unlink(missing_ok=True)
    beside.symlink_to(folder.resolve(), target_is_directory=True)
    beside.replace(served)


def fetched(space: Workspace, version: Version) -> Path:
    return resolve_models_uri(space.tracking, version.uri, space.root / "models")


def stages_of(space: Workspace, version: Version) -> Stages:
    """The stages that a version was made by, its capture on disk."""
    mix = version.lineage.mix_fingerprint
    stages = Stages(space, Stage(space.folder("mix", mix), mix))
    capture_stage(stages)
    return stages


def samples_of(captured: Stage, split: Split = HOLDOUT_SPLIT) -> list[Sample]:
    return Capture.open(captured.folder, verify=False).samples(split)


def history(space: Workspace, first: Version, heir: Version, refused: bool) -> dict[str, Any]:
    """Why the heir was trained, and what was decided about both, as their runs tell. `refused`: by the gate."""
    why = Path(space.tracking.client.download_artifacts(heir.run_id, "staleness.json"))
    decisions = {one.reference: last_decision(space.tracking, one) for one in (first, heir)}
    return {
        "staleness": storage.read_object(why),
        "decisions": {name: [] if one is None else one.reasons for name, one in decisions.items()},
        "promoted": [first.reference] if refused else [first.reference, heir.reference],
    }


def show_history(known: Mapping[str, Any]) -> None:
    for cause in known["staleness"]["causes"]:
        say(f"found: {cause['text']}")
    for version, reasons in known["decisions"].items():
        verdict = "promoted" if version in known["promoted"] else "not promoted"
        say(f"{version}: {verdict}: {'; '.join(reasons)}")


def trained_draft(stages: Stages) -> Path:
    """The last checkpoint of the recipe's draft, trained if it is not there."""
    prepare_drafts(stages)
    name = next(iter(stages.recipe.drafts))
    checkpoints = checkpoints_of(train_stage(stages, name, NoSink()))
    return checkpoints[max(checkpoints)]


def cold_start(stages: Stages, given: Sequence[str]) -> Path:
    """A draft from the recipe's start on the same capture, with the steps of a retraining."""
    space = stages.space
    name, draft = next(iter(space.recipe.drafts.items()))
    steps = space.recipe.retrain.steps or draft.steps
    change = {"steps": steps, "warmup_steps": min(draft.warmup_steps, steps), "score_every": 0}
    changed = [f"drafts.{name}.{key}={value}" for key, value in change.items()]
    changed_space = space.with_recipe(load_recipe(RECIPE, [*given, *changed]))
    return trained_draft(Stages(changed_space, stages.mix))


def training_record(checkpoint: Path, captured: Stage) -> dict[str, float]:
    """What a training read and took. `checkpoint`: its draft folder."""
    lines = MetricLog(checkpoint.parents[1] / METRICS_FILE).read()
    manifest = Capture.open(captured.folder, verify=False).manifest
    return {
        "steps": len(lines),
        "positions": sum(line["positions_per_second"] * line["seconds"] for line in lines),
        "seconds": sum(line["seconds"] for line in lines),
        "train_answers": manifest["splits"]["train"]["samples"],
        "train_answer_tokens": manifest["splits"]["train"]["tokens"],
        "capture_seconds": manifest["seconds"],
    }


@contextmanager
def timed(seconds: dict[str, float], what: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    seconds[what] = time.monotonic() - start


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def write_results(
    out: Path,
    given: Sequence[str],
    found: Sequence[Measured],
    gains: Mapping[str, Estimate],
    seconds: Mapping[str, float],
    more: Mapping[str, Any],
) -> None:
    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    known = {"hardware": hardware, "settings": list(given), "seconds": dict(seconds), **more}
    known["figures"] = {one.name: one.record() for one in found}
    known["differences"] = {name: gain.record() for name, gain in gains.items()}
    storage.write_json(out / "results.json", known)


def show(
    found: Sequence[Measured],
    gains: Mapping[str, Estimate],
    seconds: Mapping[str, float],
    trainings: Mapping[str, Mapping[str, float]],
) -> None:
    """Every draft, in all and by domain; paired differences; what it took."""
    table = Table("draft", "domain", "conversations", "K", "tau", "alpha", "expected speed-up")
    for one in found:
        parts: list[tuple[str, Row | DomainRow]] = [("all", one.row)]
        parts += [(row.domain, row) for row in one.domains if len(one.domains) > 1]
        for name, row in parts:
            many = len(values(one.table if row is one.row else where(one.table, domain=name), "conversation"))
            alphas = " ".join(format_estimate(alpha, bounds=False) for alpha in row.alphas)
            cells = (
                str(many),
                str(row.config.levels),
                format_estimate(row.tau),
                alphas,
                format_estimate(row.speedup, "x"),
            )
            table.add_row(one.name, name, *cells)
    Console(width=160).print(table)
    for name, gain in gains.items():
        say(f"tau, {name}: {format_estimate(gain)} ({gain.clusters} clusters, paired)")
    for name, run in trainings.items():
        say(f"{name}: {', '.join(f'{key} {value:,.0f}' for key, value in run.items())}")
    say(", ".join(f"{what} {took:.0f} s" for what, took in seconds.items()))


def format_estimate(estimate: Estimate, unit: str = "", bounds: bool = True) -> str:
    """A figure and its interval, as far as they are known."""
    if math.isnan(estimate.value):
        return "n/a"
    known = bounds and not math.isnan(estimate.low)
    return f"{estimate.value:.2f}{unit}" + (f" [{estimate.low:.2f}, {estimate.high:.2f}]" if known else "")


if __name__ == "__main__":
    disable_progress_bar()  # of weights that are loaded
    cli_exit.run(app, None, Path(__file__).name)
