"""Train every draft of a recipe on prompts of your own, and say what came of it: speed, memory, tau over time, picks.

    python3 scripts/bench_training.py OUT --prompts train.jsonl --eval mt_bench.jsonl --self-prompts 36000 --record
    python3 scripts/bench_training.py OUT2 --prompts train.jsonl --prompts OUT/self.jsonl.gz --eval mt_bench.jsonl \
        --answers OUT/answers drafts.eagle3.steps=900

Prompts are JSON lines with `domain` and `turns`. Those of --prompts, and those that the target makes up itself
(--self-prompts), train; those of --eval only judge, each as a domain. Figures go to OUT/results.json and to the screen,
tau by context length among them. With --eval-turns 30 the prompts that judge are joined into dialogues, which the
target answers turn by turn until its context is full, so that the same prompts judge all lengths; --train-turns joins
those that train.
"""

import gzip
import json
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import torch
import typer
from rich.console import Console
from rich.table import Table

from draftforge.data.capture.reuse import save_answers
from draftforge.data.prompts import prompts_of
from draftforge.data.store import Capture
from draftforge.eval import counts
from draftforge.eval.acceptance import tau
from draftforge.eval.leaderboard import Row, serving
from draftforge.pipeline import cli_exit
from draftforge.pipeline.scoring import Scored, score_stage
from draftforge.pipeline.stages import Stage, captured_stages, prepare_drafts, train_stage
from draftforge.pipeline.workspace import Workspace
from draftforge.recipe import load_recipe
from draftforge.specdec.target_settings import TargetSettings
from draftforge.specdec.targets import Target
from draftforge.train.loop import METRICS_FILE
from draftforge.train.throughput import MetricLog, NoSink

RECIPE = Path(__file__).parents[1] / "configs/smollm2-bench.yaml"
_HELD = 200  # conversations of a holdout file
UNTIMED_STEPS = 3  # allocation, compilation
app = typer.Typer(add_completion=False)


@app.command()
def main(
    out: Annotated[Path, typer.Argument(help="Work folder; results.json is written there.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value of the recipe.")] = None,
    prompts: Annotated[list[Path] | None, typer.Option(help="Prompts to train on; may be given again.")] = None,
    judged: Annotated[
        list[Path] | None, typer.Option("--eval", help="Prompts to judge on; may be given again.")
    ] = None,
    held: Annotated[list[Path] | None, typer.Option("--holdout", help="Prompts to keep out of everything.")] = None,
    answers: Annotated[Path | None, typer.Option(help="Recorded answers to start from.")] = None,
    self_prompts: Annotated[int, typer.Option(help="Prompts to sample from the target into OUT/self.jsonl.gz.")] = 0,
    train_turns: Annotated[int, typer.Option(help="Join what trains into dialogues of so many turns; 0: do not.")] = 0,
    eval_turns: Annotated[int, typer.Option(help="The same of what judges.")] = 0,
    record: Annotated[bool, typer.Option(help="Only capture, and keep the answers in OUT/answers.")] = False,
    draft: Annotated[list[str] | None, typer.Option(help="Only this draft of the recipe; may be given again.")] = None,
    recipe: Annotated[Path, typer.Option(help="What is trained, and how.")] = RECIPE,
) -> None:
    """Mix, capture (or recorded answers), train, score."""
    out.mkdir(parents=True, exist_ok=True)
    settings = load_recipe(recipe, [f"workdir={out / 'work'}", *(overrides or [])])
    training = list(prompts or [])
    if self_prompts:
        training.append(sample_prompts(settings.target, self_prompts, out / "self.jsonl.gz"))
    if train_turns:
        training = [join_prompts(training, train_turns, out / "dialogues-train.jsonl")]
    judging = list(judged or [])
    if eval_turns:
        judging = [join_prompts(judging, eval_turns, out / "dialogues.jsonl")]
    sources = [source(path, "train") for path in training] + [source(path, "selection") for path in judging]
    sources += [source(path, "holdout") | {"limit": _HELD} for path in held or []]
    chosen = [f"mix.sources={json.dumps(sources)}", f"workdir={out / 'work'}"]
    if answers is not None:
        chosen.append(f"capture.answers={answers.resolve()}")
    (out / "overrides.json").write_text(json.dumps([*chosen, *(overrides or [])]))  # the same again, by hand
    space = Workspace(load_recipe(recipe, [*chosen, *(overrides or [])]))
    stages = captured_stages(space)
    if record:
        tokens = save_answers(Capture.open(stages.captured.folder, verify=False), out / "answers")
        print(f"{tokens:,} answer tokens kept in {out / 'answers'}")
        return
    prepare_drafts(stages)
    trained: dict[str, Stage] = {}
    runs: dict[str, dict[str, float]] = {}
    for name in draft or space.recipe.drafts:
        trained[name] = train_stage(stages, name, NoSink())
        runs[name] = _speed(trained[name].folder)
    scored = score_stage(stages, trained)
    assert scored is not None
    curves = {name: _curve(scored, name, trained[name].folder, space) for name in trained}
    rules, contexts = _by_rule(scored, trained, space), _by_context(scored, trained, space)
    _show(runs, curves, scored)
    for found_by in (rules, contexts):
        for name, taus in found_by.items():
            print(f"{name:28} {'  '.join(f'{which} {value:.3f}' for which, value in taus.items())}")
    found: dict[str, Any] = {"hardware": _hardware(), "runs": runs, "curves": curves, "tau_by_rule": rules}
    found["tau_by_context"] = contexts
    found["rows"] = [row.record() for row in scored.rows]
    (out / "results.json").write_text(json.dumps(found, indent=1))


def source(path: Path, split: str | None) -> dict[str, Any]:
    """Source of the mix: prompts of a file, for one split or all. What only judges is a domain named as the file."""
    judged = {"domain": domain_of(path)} if split not in ("train", None) else {}
    return {"kind": "turns", "path": str(path.resolve()), "only": split, "limit": None, **judged}


def domain_of(path: Path) -> str:
    """Domain of the prompts that judge: the name of their file."""
    return path.name.split(".")[0]


def sample_prompts(settings: TargetSettings, count: int, path: Path) -> Path:
    """Prompts that the target makes up, in a packed file of the shape `turns`; those that are there already stay."""
    if not path.is_file():
        texts = prompts_of(Target.load(settings), batch_size=2048)(count, 0, 128)
        with gzip.open(path, "wt") as stream:
            stream.writelines(json.dumps({"domain": "self", "turns": [text]}) + "\n" for text in texts)
    return path


def join_prompts(paths: Sequence[Path], turns: int, path: Path) -> Path:
    """Join the prompts of some files, shuffled, into dialogues of so many user turns; the remainder is left out."""
    texts = list[str]()
    for one in paths:
        with gzip.open(one, "rt") if one.suffix == ".gz" else one.open() as lines:
            texts += [text for line in lines for text in json.loads(line)["turns"]]
    random.Random(0).shuffle(texts)
    dialogues = [texts[start : start + turns] for start in range(0, len(texts) - turns + 1, turns)]
    path.write_text("".join(json.dumps({"domain": domain_of(path), "turns": one}) + "\n" for one in dialogues))
    return path


def _speed(folder: Path) -> dict[str, float]:
    """Of one training: the figures of its log, and this process's peak."""
    lines = MetricLog(folder / METRICS_FILE).read()
    timed = lines[UNTIMED_STEPS:] or lines
    positions = sum(line["positions_per_second"] * line["seconds"] for line in timed)
    return {
        "steps": len(lines),
        "seconds": sum(line["seconds"] for line in lines),
        "first_step_seconds": lines[0]["seconds"],
        "positions_per_second": positions / sum(line["seconds"] for line in timed),
        "median_positions_per_second": statistics.median(line["positions_per_second"] for line in timed),
        "peak_gib": max(line.get("peak_gib", float("nan")) for line in lines),
    }


def _curve(scored: Scored, name: str, folder: Path, space: Workspace) -> list[dict[str, Any]]:
    """tau by checkpoint at the first sampling setting and the longest chain, in all and by domain, against the seconds
    that training took so far."""
    lines = MetricLog(folder / METRICS_FILE).read()
    settings = space.recipe.score
    longest, first = max(settings.draft_tokens), settings.sampling[0].key
    table = serving(counts.where(scored.counts, draft=name, draft_tokens=longest, tree="", setting=first), settings)
    found = []
    for step in sorted({row.step for row in scored.rows if row.draft == name}):
        mine = counts.where(table, step=step)
        domains = {
            domain: tau(part, space.recipe.score.confidence).value for (domain,), part in counts.groups(mine, "domain")
        }
        seconds = sum(line["seconds"] for line in lines[:step])
        found.append(
            {"step": step, "seconds": seconds, "tau": tau(mine, space.recipe.score.confidence).record(), **domains}
        )
    return found


def _by_rule(scored: Scored, trained: dict[str, Stage], space: Workspace) -> dict[str, dict[str, float]]:
    """tau of each draft's last checkpoint at the longest chain, by sampling setting and accept rule."""
    return {
        name: {
            f"{setting} {rule}": tau(part, space.recipe.score.confidence).value
            for (setting, rule), part in counts.groups(_last_counts(scored, name, space), "setting", "rule")
        }
        for name in trained
    }


def _by_context(scored: Scored, trained: dict[str, Stage], space: Workspace) -> dict[str, dict[str, float]]:
    """tau of each draft's last checkpoint at the longest chain and the first sampling setting, by context length."""
    settings = space.recipe.score
    return {
        name: {
            counts.bucket_label(bucket): tau(part, settings.confidence).value
            for (bucket,), part in counts.groups(
                counts.where(serving(_last_counts(scored, name, space), settings), setting=settings.sampling[0].key),
                "context_bucket",
            )
        }
        for name in trained
    }


def _last_counts(scored: Scored, name: str, space: Workspace) -> pa.Table:
    """Replayed counts of a draft's last checkpoint at the longest chain."""
    step, longest = max(row.step for row in scored.rows if row.draft == name), max(space.recipe.score.draft_tokens)
    return counts.where(scored.counts, draft=name, step=step, draft_tokens=longest, tree="", method="replay")


def _show(runs: dict[str, dict[str, float]], curves: dict[str, list[dict[str, Any]]], scored: Scored) -> None:
    console = Console(width=160)
    speed = Table("draft", "steps", "seconds", "first step", "positions/s", "median", "peak GiB", title="Training")
    for name, run in runs.items():
        speed.add_row(
            name,
            f"{run['steps']:.0f}",
            f"{run['seconds']:.1f}",
            f"{run['first_step_seconds']:.1f}",
            f"{run['positions_per_second']:,.0f}",
            f"{run['median_positions_per_second']:,.0f}",
            f"{run['peak_gib']:.1f}",
        )
    console.print(speed)
    for name, curve in curves.items():
        for point in curve:
            domains = "  ".join(
                f"{key} {value:.2f}" for key, value in point.items() if key not in ("step", "seconds", "tau")
            )
            found = f"step {point['step']:5}  {point['seconds']:6.1f} s  tau {point['tau']['value']:.3f}"
            print(f"{name:24} {found}  {domains}")
    drafts = [row for row in scored.rows if not row.baseline]
    by_perplexity, by_speed = min(drafts, key=_perplexity), max(drafts, key=lambda row: row.speedup.value)
    for how, row in (("perplexity", by_perplexity), ("expected speed", by_speed)):
        rate = row.tau.value / (row.draft_seconds + row.verify_seconds)
        print(
            f"{how} picks {row.draft} step {row.step} at {row.config}: {rate:,.0f} tokens/s, {row.speedup.value:.2f}x"
        )


def _perplexity(row: Row) -> float:
    return row.perplexity if row.perplexity == row.perplexity else float("inf")


def _hardware() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    cli_exit.run(app, None, Path(__file__).name)
