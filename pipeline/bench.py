"""`draftforge bench`: every way of drafting on prompts of one's own, decoded for real beside plain decoding.

In the folder of a benchmark:

benchmark.json        the fingerprint of everything that its figures depend on
runs/<12 hex>.json    a finished run each, with the clock readings of all answers
bench.json            the report; bench.svg: its picture; bench.txt: its sentences
"""

import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from .. import __version__, fingerprint, storage
from ..data.conversation import render
from ..data.prompt_files import asked_of, read_prompts
from ..errors import InputError, OwnershipError
from ..eval.bench_picture import picture
from ..eval.bench_records import BenchPrompt, Failure, Report, Surroundings
from ..eval.bench_rows import bench_rows
from ..eval.bench_runs import RunFolder, Work, run_all
from ..eval.bench_table import show_bench
from ..eval.bench_words import words
from ..eval.costs import hardware_name
from ..eval.figures import Bootstrap
from ..progress import say, track
from ..registry.lineage import git_commit
from ..specdec.targets import Target
from .bench_settings import BenchSettings
from .methods import Method, MethodFinder, find_methods
from .workspace import Workspace

OWNER_FILE, RUNS = "benchmark.json", "runs"
REPORT_FILE, PICTURE_FILE, WORDS_FILE = "bench.json", "bench.svg", "bench.txt"


def bench(space: Workspace, settings: BenchSettings, out: Path | None = None, fresh: bool = False) -> Report:
    """Run what is not on disk yet, write the report, and show it. Raises InputError where no method can run."""
    prompts, left_out = bench_prompts(space.target, settings)
    finder = find_methods(space, settings, longest_text(prompts, settings))
    if len(finder.methods) == 1:
        raise _nothing_runs(finder.failures)
    about = surroundings(space.target, settings, prompts, left_out, finder.methods, space.recipe.score.bootstrap)
    found = bench_fingerprint(about, settings, prompts, finder.methods)
    folder = space.folder("bench", found) if out is None else out
    place = folder.resolve()  # the lock of "." belongs beside it, not in it
    with storage.lock(place.parent / f".{place.name}.lock", what="another benchmark"):
        claim(folder, found, fresh)
        report = measure(space.target, settings, prompts, finder, about, folder, space.recipe.score.bootstrap)
    show_bench(report.rows, report.failures, about)
    print("\n".join(["", *report.words]))
    say(f"{folder / REPORT_FILE}, {PICTURE_FILE} beside it")
    return report


def bench_prompts(target: Target, settings: BenchSettings) -> tuple[list[BenchPrompt], int]:
    """The prompts as the target reads them, and how many are too long for it."""
    prompts: list[BenchPrompt] = []
    records = read_prompts(settings.prompts, settings.max_prompts)
    for record in track(records, "render prompts", unit="prompts"):
        ids = render(target.tokenizer, asked_of(record), record.tools, dict(record.template_args or {}))
        if len(ids) + settings.max_new_tokens <= target.max_positions:
            prompts.append(BenchPrompt(record.id, record.domain, ids))
    left_out = len(records) - len(prompts)
    rule = f"with {settings.max_new_tokens} new tokens they do not fit the context of {target.max_positions}"
    if not prompts:
        raise InputError(f"--prompts: all {left_out} are too long: {rule}")
    if left_out:
        say(f"{left_out} of {len(records)} prompts are left out: {rule}")
    return prompts, left_out


def longest_text(prompts: Sequence[BenchPrompt], settings: BenchSettings) -> int:
    """Tokens of the longest prompt and its answer."""
    return max(len(prompt.ids) for prompt in prompts) + settings.max_new_tokens


def surroundings(
    target: Target,
    settings: BenchSettings,
    prompts: Sequence[BenchPrompt],
    left_out: int,
    methods: Sequence[Method],
    bootstrap: Bootstrap,
) -> Surroundings:
    """Where the figures come from."""
    return Surroundings(
        hardware=hardware_name(target.device),
        dtype=str(target.dtype).removeprefix("torch."),
        torch=torch.__version__,
        transformers=transformers.__version__,
        draftforge=__version__,
        commit=git_commit(),
        command=sys.argv,
        target=target.settings.model,
        target_fingerprint=target.fingerprint,
        drafts={method.name: method.place for method in methods},
        prompts=dict(sorted(Counter(prompt.domain for prompt in prompts).items())),
        prompts_left_out=left_out,
        max_new_tokens=settings.max_new_tokens,
        sampling=settings.sampling.key,
        repeats=settings.repeats,
        confidence=bootstrap.confidence,
    )


def bench_fingerprint(
    about: Surroundings, settings: BenchSettings, prompts: Sequence[BenchPrompt], methods: Sequence[Method]
) -> str:
    """64 hex digits of what the figures depend on: not of where files lie, nor of the bootstrap."""
    shown = about.model_dump(mode="json", exclude={"command", "target", "drafts", "confidence"})
    ways = [[way.setting.model_dump(mode="json"), method.digest] for method in methods for way in method.ways]
    asked = fingerprint.of_json([list(prompt) for prompt in prompts])
    return fingerprint.of_json(["bench", shown, ways, asked, sorted(set(settings.batch_sizes)), settings.seed])


def claim(folder: Path, found: str, fresh: bool) -> None:
    """Make the folder this benchmark's. Raises OwnershipError where it is another's, or something else."""
    owner = folder / OWNER_FILE
    if folder.exists() and not folder.is_dir():
        raise OwnershipError(f"--out {folder}: is a file; must be a folder or not exist")
    if owner.is_file():
        if not fresh and storage.read_object(owner).get("fingerprint") != found:
            raise OwnershipError(
                f"--out {folder}: holds a benchmark of other arguments, drafts, prompts or another machine; give "
                "another folder, or --fresh to replace it"
            )
    elif folder.is_dir() and any(folder.iterdir()):
        raise OwnershipError(f"--out {folder}: is not empty and holds no benchmark")
    if fresh:
        shutil.rmtree(folder / RUNS, ignore_errors=True)
    storage.write_json(owner, {"fingerprint": found})


def measure(
    target: Target,
    settings: BenchSettings,
    prompts: Sequence[BenchPrompt],
    finder: MethodFinder,
    about: Surroundings,
    folder: Path,
    bootstrap: Bootstrap,
) -> Report:
    """The report, written to the folder. Raises InputError where nothing but plain decoding can run."""
    work = Work(target, prompts, settings.max_new_tokens, settings.sampling, target.stop_ids, settings.seed)
    ways = [way for method in finder.methods for way in method.ways]
    sizes = sorted(set(settings.batch_sizes))
    records, failed = run_all(work, ways, sizes, settings.repeats, RunFolder(folder / RUNS))
    failures = [*finder.failures, *failed]
    if all(record.setting.plain for record in records):
        raise _nothing_runs(failures)
    rows = bench_rows(records, prompts, bootstrap, settings.sampling.greedy)
    said = words(rows, settings.repeats, target.dtype != torch.float32)
    report = Report(surroundings=about, rows=rows, failures=failures, words=said)
    storage.write_json(folder / REPORT_FILE, report.model_dump(mode="json"))
    storage.write_bytes(folder / PICTURE_FILE, picture(rows).encode())
    storage.write_bytes(folder / WORDS_FILE, "".join(f"{line}\n" for line in said).encode())
    return report


def _nothing_runs(failures: Sequence[Failure]) -> InputError:
    why = "; ".join(f"{one.method}: {one.reason}" for one in failures)
    return InputError(f"bench: no method can run: {why}")
