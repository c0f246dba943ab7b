r"""Our decoder beside transformers' own, on prompts of your own: plain, with drafts, in batches, and by replay.

    python scripts/bench_decoder.py TARGET OUT.json --draft small=FOLDER --draft eagle3=FOLDER --draft lookup \
        --prompts gsm8k.jsonl --prompts mt_bench.jsonl --max-prompts 64

Five tables: milliseconds of a plain token and of a round at one context length; tau by domain and what it comes to;
tokens a second at each batch size; replay of recorded answers; transformers' `generate` and its assisted generation
with the `small` drafts on a few of the prompts, and ours on the same. Temperature 0. What was decoded is kept beside
OUT, and the same command goes on from there.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from draftforge import storage
from draftforge.data.batches import buckets
from draftforge.errors import DraftforgeError, InputError, MissingFileError
from draftforge.eval.bench.latency import Timeline, mean, median
from draftforge.eval.bench.run import (
    EVERY,
    PLAIN,
    BenchEntry,
    BenchPrompt,
    BenchRow,
    BenchRun,
    Report,
    RoundParts,
    run_once,
)
from draftforge.eval.settings import ScoreSettings
from draftforge.eval.table import show_cells
from draftforge.pipeline.bench import (
    MethodFinder,
    bench_fingerprint,
    bench_prompts,
    check_options,
    claim_folder,
    environment,
    longest_text,
    run_and_report,
)
from draftforge.pipeline.cli_options import BenchOptions
from draftforge.progress import track
from draftforge.specdec.decoder import generate
from draftforge.specdec.proposers.training_free import TRAINING_FREE
from draftforge.specdec.replay.replay import replay
from draftforge.specdec.replay.target_trace import RecordedAnswer, trace_target
from draftforge.specdec.sampling_settings import SamplingSettings
from draftforge.specdec.stored_draft import StoredDraft
from draftforge.specdec.target_settings import TargetSettings
from draftforge.specdec.targets import Target, locate, resolve_device

GREEDY = SamplingSettings()
_PASS_TOKENS = 16384  # of recorded answers that are replayed together
_UNKNOWN = RoundParts(draft_seconds=float("nan"), verify_seconds=float("nan"), rest_seconds=float("nan"))


def at_context(
    target: Target, ways: Sequence[BenchEntry], prompts: Sequence[BenchPrompt], context: int, rounds: int, repeats: int
) -> dict[str, Any]:
    """Milliseconds of a plain token and of each way's round, by turns, after a prompt of `context` tokens."""
    text = [token for prompt in prompts for token in prompt.ids]
    text *= -(-context // len(text))
    seconds: dict[str, list[float]] = {way.setting.label: [] for way in ways}  # means, one a repeat
    counts: Counter[str] = Counter()
    for repeat in range(repeats + 1):
        for way in ways:
            tokens = 1 + rounds * (way.setting.levels + 1)
            prompt = BenchPrompt("context", "context", text[:context])
            found = run_once(BenchRun(target, [prompt], tokens, GREEDY, frozenset()), way, 1, repeat, _UNKNOWN)
            if repeat:  # the first turn warms up
                timed = Timeline(found.answers, found.seconds).round_seconds()
                seconds[way.setting.label].append(mean(timed))
                counts[way.setting.label] += len(timed)
    plain = seconds[ways[0].setting.label]
    return {
        name: {
            "milliseconds": 1e3 * median(found),
            "over_plain": median(one / beside for one, beside in zip(found, plain)),
            "rounds": counts[name],
        }
        for name, found in seconds.items()
    }


def by_domain(rows: Sequence[BenchRow], steps: dict[str, Any]) -> list[dict[str, Any]]:
    """tau at batch 1, and the speed-up that it makes of the times at one context length; beside it the measured one."""
    return [
        {
            "draft": row.setting.label,
            "domain": row.domain,
            "tau": row.tau.value,
            "tau_over_cost": row.tau.value / steps[row.setting.label]["over_plain"],
            "speedup": row.speedup.value,
            "decoding_speedup": row.decoding_speedup.value,
        }
        for row in rows
        if row.setting.batch_size == 1 and not row.setting.plain and row.rounds
    ]


class Library:
    """transformers' own copy of the target and its `generate`, greedy, one prompt at a time."""

    def __init__(self, target: Target, folder: Path) -> None:
        self._target = target
        self._model = self.load(folder)

    def load(self, folder: Path) -> Any:
        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=self._target.dtype)
        return model.to(self._target.device).eval()

    def assistant(self, folder: Path, K: int) -> Any:
        """A draft that drafts K tokens a round whatever its confidence: settings are read from the assistant's own."""
        model = self.load(folder)
        settings = model.generation_config
        settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = K, "constant"
        settings.assistant_confidence_threshold = 0.0
        return model

    def time(
        self, name: str, prompts: Sequence[BenchPrompt], max_new_tokens: int, repeats: int, assistant: Any = None
    ) -> dict[str, Any]:
        """Tokens a second, prompts read within it: the median of the repeats."""
        rates, tokens = [], 0
        self._answer(prompts[0], min(max_new_tokens, 8), assistant)
        for _ in range(repeats):
            start, tokens = time.perf_counter(), 0
            for prompt in track(prompts, f"transformers {name}", unit="prompts"):
                tokens += self._answer(prompt, max_new_tokens, assistant)
            rates.append(tokens / (time.perf_counter() - start))
        return {"tokens": tokens, "tokens_per_second": median(rates), "low": min(rates), "high": max(rates)}

    @torch.inference_mode()
    def _answer(self, prompt: BenchPrompt, max_new_tokens: int, assistant: Any) -> int:
        ids = torch.tensor([prompt.ids], device=self._target.device)
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=sorted(self._target.stop_ids) or None,
            assistant_model=assistant,
        )
        return len(output[0].tolist()) - len(prompt.ids)  # `tolist` waits for the device


def replays(
    target: Target, ways: Sequence[BenchEntry], prompts: Sequence[BenchPrompt], max_new_tokens: int, batch_size: int
) -> dict[str, float]:
    """Recorded answer tokens that replay scores a second, the target's own pass over them included."""
    requests = BenchRun(target, prompts, max_new_tokens, GREEDY, target.stop_ids).requests()
    found = dict(generate(target, None, requests, batch_size=batch_size))
    answers = [RecordedAnswer(prompt.ids, found[index].tokens, max_new_tokens) for index, prompt in enumerate(prompts)]
    packs = buckets([len(one.prompt_ids) + len(one.answer_ids) for one in answers], _PASS_TOKENS)
    rates: dict[str, float] = {}
    for way in ways:
        proposer = None if way.make is None else way.make()
        if proposer is None or not proposer.replayable:
            continue
        start = 0.0
        # All passes twice: the first time, kernels are compiled for their shapes.
        for turn, pack in enumerate(track([*packs, *packs], f"replay {way.setting.label}", unit="passes")):
            start = time.perf_counter() if turn == len(packs) else start
            some = [answers[index] for index in pack]
            traced = trace_target(target, some, GREEDY, proposer.aux_layers, proposer.needs_hidden_states)
            replay(proposer, traced, ["greedy"], [way.setting.levels])
        rates[way.setting.label] = sum(len(one.answer_ids) for one in answers) / (time.perf_counter() - start)
    return rates


def beside_the_library(
    target: Target, ways: Sequence[BenchEntry], prompts: Sequence[BenchPrompt], asked: argparse.Namespace
) -> dict[str, Any]:
    """transformers' `generate` and assisted generation beside ours, on a few prompts that spread over all."""
    some = prompts[:: -(-len(prompts) // asked.library_prompts)]
    library = Library(target, Path(asked.target))
    folders = {name: folder for name, folder in asked.draft if folder is not None}
    found: dict[str, Any] = {}
    for way in ways:
        folder = folders.get(way.setting.method)
        if not way.setting.plain and (folder is None or StoredDraft.load(folder, target).family != "small"):
            continue
        name = "generate" if folder is None else f"assisted by {way.setting.method}"
        assistant = None if folder is None else library.assistant(folder, asked.draft_tokens)
        theirs = library.time(name, some, asked.max_new_tokens, asked.repeats, assistant)
        ours = _rate(BenchRun(target, some, asked.max_new_tokens, GREEDY, target.stop_ids), way, asked.repeats)
        ratio = ours / theirs["tokens_per_second"]
        found[name] = {"prompts": len(some), **theirs, "ours_per_second": ours, "ours_over_theirs": ratio}
    return found


def _rate(work: BenchRun, way: BenchEntry, repeats: int) -> float:
    """Tokens a second at batch 1, prompts read within it: the median of the repeats after one that warms up."""
    runs = [run_once(work, way, 1, repeat, _UNKNOWN) for repeat in range(repeats + 1)]
    return median(sum(answer.tokens for answer in run.answers) / run.seconds for run in runs[1:])


def check(asked: argparse.Namespace) -> BenchOptions:
    """What a benchmark is asked to do. Raises a DraftforgeError for what cannot be, before any work."""
    settings = BenchOptions(
        prompts=asked.prompts,
        draft_tokens=[asked.draft_tokens],
        batch_sizes=[1, asked.batch_size],
        max_new_tokens=asked.max_new_tokens,
        max_prompts=asked.max_prompts,
        repeats=asked.repeats,
    )
    check_options(settings)
    for name in ("library_prompts", "context", "rounds"):
        value = getattr(asked, name)
        if value < 1:
            raise InputError(f"--{name.replace('_', '-')} {value}: must be >= 1")
    _check_drafts(asked.draft)
    storage.require_file_place(asked.out, "OUT")
    if not Path(asked.target).is_dir():
        raise MissingFileError(f"TARGET {asked.target}: no such folder")
    resolve_device(asked.device, asked.dtype, "--device")
    locate(TargetSettings(model=asked.target))
    most = _positions(Path(asked.target))
    longest = asked.context + 1 + asked.rounds * (asked.draft_tokens + 1)
    if longest > most:
        raise InputError(
            f"--context {asked.context}: with {asked.rounds} rounds of {asked.draft_tokens} drafted tokens it makes "
            f"{longest} tokens, beyond the target's {most}"
        )
    return settings


def _check_drafts(drafts: Sequence[tuple[str, Path | None]]) -> None:
    if not drafts:
        raise InputError("--draft: give at least one")
    taken = {PLAIN}
    for name, folder in drafts:
        if not name or name in taken or (folder is not None and name in TRAINING_FREE):
            raise InputError(f"--draft {name}{'' if folder is None else f'={folder}'}: must have a name of its own")
        if folder is not None and not folder.exists():
            raise MissingFileError(f"--draft {name}={folder}: no such folder")
        taken.add(name)


def _positions(folder: Path) -> int:
    """Tokens that a model folder's context holds."""
    config = storage.read_object(folder / "config.json")
    found = config.get("text_config", config).get("max_position_embeddings", 1 << 30)
    return int(found)


def benchmark(asked: argparse.Namespace) -> dict[str, Any]:
    """All figures. What is known before the library's part, which takes longest, is on disk by then."""
    settings = check(asked)
    target = Target.load(TargetSettings(model=asked.target, device=asked.device, dtype=asked.dtype))
    prompts, left_out = bench_prompts(target, settings)
    finder = MethodFinder(target, settings, ScoreSettings(), longest_text(prompts, settings))
    for name, folder in asked.draft:
        if folder is None:
            finder.add_free(name)
        else:
            finder.add_draft(name, lambda folder=folder: folder, {})  # type: ignore[misc]
    about = environment(target, settings, prompts, left_out, finder.methods, 0.95)
    kept = asked.out.with_suffix(".runs")
    claim_folder(kept, bench_fingerprint(about, settings, prompts, finder.methods), asked.fresh)
    report = run_and_report(target, settings, prompts, finder, about, kept, 0.95)
    ran = {row.setting.label for row in report.rows}
    ways = [way for method in finder.methods for way in method.entries if way.setting.label in ran]
    steps = at_context(target, ways, prompts, asked.context, asked.rounds, asked.repeats)
    found = {
        "surroundings": about.model_dump(mode="json"),
        "context_tokens": asked.context,
        "steps": steps,
        "domains": by_domain(report.rows, steps),
        "transformers": {},
        "replay_tokens_per_second": replays(target, ways, prompts, asked.max_new_tokens, asked.batch_size),
        "bench": report.model_dump(mode="json", exclude={"surroundings"}),
    }
    storage.write_json(asked.out, found)
    return {**found, "transformers": beside_the_library(target, ways, prompts, asked)}


def show(found: dict[str, Any]) -> None:
    """The tables."""
    report = Report.model_validate({"surroundings": found["surroundings"], **found["bench"]})
    steps = [[name, f"{one['milliseconds']:.2f}", f"{one['over_plain']:.2f}"] for name, one in found["steps"].items()]
    _show(f"Step or round, after {found['context_tokens']} tokens, batch 1", ["", "ms", "over plain"], steps)
    names = ("tau", "tau_over_cost", "speedup", "decoding_speedup")
    domains = [[one["draft"], one["domain"], *(f"{one[name]:.2f}" for name in names)] for one in found["domains"]]
    _show("By domain, batch 1", ["draft", "domain", "tau", "tau x plain / round", "speed-up", "decoding"], domains)
    whole = [row for row in report.rows if row.domain == EVERY]
    rates = [
        [row.setting.label, str(row.setting.batch_size), f"{row.tokens_per_second.value:,.1f}", _token_ms(row)]
        for row in whole
    ]
    _show("Ours", ["draft", "batch", "tokens/s", "ms a token"], rates)
    theirs = [
        [name, f"{one['tokens_per_second']:,.1f}", f"{one['ours_per_second']:,.1f}", f"{one['ours_over_theirs']:.1f}x"]
        for name, one in found["transformers"].items()
    ]
    _show("Beside transformers, batch 1", ["", "theirs, tokens/s", "ours", ""], theirs)
    decoded = {(row.setting.label, row.setting.batch_size): row.tokens_per_second.value for row in whole}
    sizes = sorted({row.setting.batch_size for row in whole})
    replayed = [
        [name, f"{rate:,.0f}", *(f"{rate / decoded[name, size]:.1f}x" for size in sizes)]
        for name, rate in found["replay_tokens_per_second"].items()
    ]
    _show("Replay", ["draft", "tokens/s", *(f"over decoding at batch {size}" for size in sizes)], replayed)
    print("\n".join(report.words))


def _token_ms(row: BenchRow) -> str:
    return f"{1e3 / row.tokens_per_second.value:.3f}"


def _show(title: str, header: list[str], rows: list[list[str]]) -> None:
    show_cells(title, [header, *rows], [""] * len(rows), "")


def _draft(text: str) -> tuple[str, Path | None]:
    name, equals, folder = text.partition("=")
    if not equals and name not in TRAINING_FREE:
        raise argparse.ArgumentTypeError(f"{text}: must be NAME=FOLDER or one of {', '.join(TRAINING_FREE)}")
    return name, Path(folder) if equals else None


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line; 0, or the exit code of the error that was printed."""
    asked = _parser().parse_args(args)
    try:
        found = benchmark(asked)
        storage.write_json(asked.out, found)
    except DraftforgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    show(found)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="model folder")
    parser.add_argument("out", type=Path, help="JSON file to write")
    parser.add_argument("--draft", type=_draft, action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--prompts", type=Path, action="append", required=True)
    parser.add_argument("--max-prompts", type=int)
    parser.add_argument("--library-prompts", type=int, default=4, help="of them, for transformers' own decoding")
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64, help="of the batched runs")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--context", type=int, default=256, help="prompt tokens before the timed rounds")
    parser.add_argument("--rounds", type=int, default=32, help="timed rounds a repeat")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--fresh", action="store_true", help="run again what a call before this one left")
    return parser


if __name__ == "__main__":
    sys.exit(main())
