"""`draftforge bench`: wall-clock benchmark of drafts and training-free methods beside plain decoding, on given prompts.

Unlike a score, which replays recorded answers, it decodes every answer. Files in the folder of a benchmark:

benchmark.json        the fingerprint of everything that its figures depend on
runs/<12 hex>.json    one finished run, with the clock readings of all answers
bench.json            the report
bench.html, bench.txt its page with charts, and its conclusions in sentences
"""

import shutil
import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import transformers

from .. import __version__, fingerprint, storage
from ..data.chat_template import turn_ids
from ..data.prompts import last_turn, read_prompts
from ..errors import DraftforgeError, InputError, OwnershipError, named, one_line
from ..eval.bench.run import (
    PLAIN,
    BenchEntry,
    BenchPrompt,
    BenchRun,
    Environment,
    Failure,
    Report,
    RunFolder,
    Setting,
    run_all,
)
from ..eval.bench.table import bench_rows, show_bench
from ..eval.cost_table import hardware_name
from ..eval.draft_configs import DraftConfig, ProposerSpec
from ..eval.report.page import bench_page
from ..eval.settings import SELECTION_SPLIT, ScoreSettings
from ..eval.summary import bench_summary
from ..masking import masked_value
from ..progress import say, track
from ..recipe import Recipe
from ..registry.lineage import git_commit
from ..specdec.accept_rules import choose_rule, known_rule
from ..specdec.proposers.base import Proposer
from ..specdec.proposers.training_free import LOOKUP, TRAINING_FREE
from ..specdec.proposers.tree_settings import MOST_LEVELS, TreeSettings, is_fixed, is_tree_of
from ..specdec.sampling_settings import SamplingSettings
from ..specdec.stored_draft import StoredDraft
from ..specdec.targets import Target
from .cli_options import BenchOptions
from .draft_scorer import Scorer
from .generate import NO_DRAFT, check_smaller, check_tree, find_draft, helper_of
from .stages import captured_stages
from .workspace import Workspace, require_whole

CHAMPION = "champion"
OWNER_FILE, RUNS = "benchmark.json", "runs"
REPORT_FILE, PAGE_FILE, WORDS_FILE = "bench.json", "bench.html", "bench.txt"
USUAL_TOKENS = (2, 4, 8)
"""K of chains of drafts without a plan, where none is asked for."""
_MOST_SLOTS = 65_536  # more than any GPU holds caches for; a slip of the keyboard should not be tried
T = TypeVar("T")
TreeOf = Callable[[StoredDraft, str, TreeSettings], ProposerSpec]
"""Maker of a tree's spec from a draft, the tree's name and its settings."""


@dataclass(frozen=True)
class BenchMethod:
    """Method to benchmark: a draft or a training-free method, with one entry for each K and each tree."""

    name: str
    place: str
    """Path of the draft; "" for a method without one."""
    digest: str
    """Digest of the draft's files, and of the device it runs on."""
    entries: list[BenchEntry]


def bench(recipe: Recipe, options: BenchOptions) -> None:
    """Measure every way of drafting on the user's own prompts, and where it loses."""
    require_whole(recipe, "a benchmark")
    run_bench(Workspace(recipe), options)


def run_bench(space: Workspace, options: BenchOptions) -> Report:
    """Run what is not on disk yet, write the report, and show it. Raises InputError where no method can run.

    A stopped benchmark goes on from its finished runs.
    """
    check_options(options)
    target, confidence = space.target, space.recipe.score.confidence

    # 1) The prompts, and the methods that answer them. Plain decoding is always one: alone, it compares nothing.
    prompts, left_out = bench_prompts(target, options)
    finder = find_methods(space, options, longest_text(prompts, options))
    if len(finder.methods) == 1:
        raise _nothing_runs(finder.failures)

    # 2) The folder, by everything that the figures depend on.
    about = environment(target, options, prompts, left_out, finder.methods, confidence)
    found = bench_fingerprint(about, options, prompts, finder.methods)
    folder = space.folder("bench", found) if options.out is None else options.out
    resolved = folder.resolve()  # the lock of "." belongs beside it, not in it

    # 3) The runs that it lacks, and the report.
    with storage.lock(resolved.parent / f".{resolved.name}.lock", what="another benchmark"):
        claim_folder(folder, found, options.fresh)
        report = run_and_report(target, options, prompts, finder, about, folder, confidence)
    show_bench(report.rows, report.failures, about)
    print("\n".join(["", *report.words]))
    say(f"{folder / REPORT_FILE}, {PAGE_FILE} beside it")
    return report


def check_options(options: BenchOptions) -> None:
    """Raise InputError for options out of range, before the target is loaded."""
    if options.draft_tokens is not None:
        _check_numbers("--draft-tokens", options.draft_tokens, MOST_LEVELS)
    _check_numbers("--batch-size", options.batch_sizes, _MOST_SLOTS)
    if not options.prompts:
        raise InputError("--prompts: give at least one file")
    if options.max_new_tokens < 2:
        raise InputError(f"--max-new-tokens {options.max_new_tokens}: must be >= 2: the first token needs no round")
    for option, value in (("--repeats", options.repeats), ("--max-prompts", options.max_prompts)):
        if value is not None and value < 1:
            raise InputError(f"{option} {value}: must be >= 1")
    if options.rule is not None:
        known_rule(options.rule)


def _check_numbers(option: str, values: Sequence[int], most: int) -> None:
    """Raise InputError unless there are values and all lie in 1..most."""
    wrong = next((value for value in values if not 1 <= value <= most), None)
    if wrong is not None or not values:
        asked = option if wrong is None else f"{option} {wrong}"
        raise InputError(f"{asked}: every one must be >= 1 and <= {most}, and there must be one")


def sampling_of(options: BenchOptions) -> SamplingSettings:
    """Sampling setting of every answer."""
    return SamplingSettings(temperature=options.temperature)


def bench_prompts(target: Target, options: BenchOptions) -> tuple[list[BenchPrompt], int]:
    """Prompts rendered by the target's chat template, and how many were left out as too long for its context.

    Raises InputError where none is left.
    """
    prompts: list[BenchPrompt] = []
    records = read_prompts(options.prompts, options.max_prompts)
    # A prompt must leave room for the longest answer: all answers of a prompt must be cut at the same length.
    for record in track(records, "render prompts", unit="prompts"):
        with named(record.where):
            ids = turn_ids(target.tokenizer, *last_turn(record))
            target.check_ids(ids)
        if len(ids) + options.max_new_tokens <= target.max_positions:
            prompts.append(BenchPrompt(record.id, record.domain, ids))
    # What was left out is said, and kept in the report: the figures are of the rest.
    left_out = len(records) - len(prompts)
    rule = f"with {options.max_new_tokens} new tokens they do not fit the context of {target.max_positions}"
    if not prompts:
        raise InputError(f"--prompts: all {left_out} are too long: {rule}")
    if left_out:
        say(f"{left_out} of {len(records)} prompts are left out: {rule}")
    return prompts, left_out


def longest_text(prompts: Sequence[BenchPrompt], options: BenchOptions) -> int:
    """Tokens of the longest prompt and its answer."""
    return max(len(prompt.ids) for prompt in prompts) + options.max_new_tokens


def environment(
    target: Target,
    options: BenchOptions,
    prompts: Sequence[BenchPrompt],
    left_out: int,
    methods: Sequence[BenchMethod],
    confidence: float,
) -> Environment:
    """Environment of a benchmark, for its report: machine, versions, target, drafts, prompts and options."""
    # Versions and hardware belong to any wall-clock figure; the commit and command say how to repeat it.
    return Environment(
        hardware=hardware_name(target.device),
        dtype=str(target.dtype).removeprefix("torch."),
        torch=torch.__version__,
        transformers=transformers.__version__,
        draftforge=__version__,
        commit=git_commit(),
        command=masked_value(sys.argv),
        target=target.settings.model,
        target_fingerprint=target.fingerprint,
        drafts={method.name: method.place for method in methods},
        prompts=dict(sorted(Counter(prompt.domain for prompt in prompts).items())),
        prompts_left_out=left_out,
        max_new_tokens=options.max_new_tokens,
        sampling=sampling_of(options).key,
        repeats=options.repeats,
        confidence=confidence,
    )


def bench_fingerprint(
    about: Environment, options: BenchOptions, prompts: Sequence[BenchPrompt], methods: Sequence[BenchMethod]
) -> str:
    """Fingerprint (64 hex digits) of all that the figures depend on; paths and the intervals' coverage are left out."""
    shown = about.model_dump(mode="json", exclude={"command", "target", "drafts", "confidence"})
    entries = [[entry.setting.model_dump(mode="json"), method.digest] for method in methods for entry in method.entries]
    asked = fingerprint.of_json([list(prompt) for prompt in prompts])
    return fingerprint.of_json(["bench", shown, entries, asked, sorted(set(options.batch_sizes)), options.seed])


def claim_folder(folder: Path, found: str, fresh: bool) -> None:
    """Claim the folder for this benchmark. `fresh`: drop the runs that it holds.

    Raises OwnershipError where it holds another benchmark or something else.
    """
    owner = folder / OWNER_FILE
    if folder.exists() and not folder.is_dir():
        raise OwnershipError(f"--out {folder}: is a file; must be a folder or not exist")
    # A benchmark is there: it must be this one, unless it is to be replaced.
    if owner.is_file():
        if not fresh and storage.read_object(owner).get("fingerprint") != found:
            raise OwnershipError(
                f"--out {folder}: holds a benchmark of other arguments, drafts, prompts or another machine; give "
                "another folder, or --fresh to replace it"
            )
    elif folder.is_dir() and any(folder.iterdir()):
        raise OwnershipError(f"--out {folder}: is not empty and holds no benchmark")
    # Runs are dropped before the claim is written: they must never count for another benchmark.
    if fresh:
        shutil.rmtree(folder / RUNS, ignore_errors=True)
    storage.write_json(owner, {"fingerprint": found})


def run_and_report(
    target: Target,
    options: BenchOptions,
    prompts: Sequence[BenchPrompt],
    finder: "MethodFinder",
    about: Environment,
    folder: Path,
    confidence: float,
) -> Report:
    """Run what the folder lacks, and write the report to it. Raises InputError where only plain decoding can run."""
    # 1) Decode: every entry at every batch size, `repeats` times.
    work = BenchRun(target, prompts, options.max_new_tokens, sampling_of(options), target.stop_ids, options.seed)
    entries = [entry for method in finder.methods for entry in method.entries]
    sizes = sorted(set(options.batch_sizes))
    records, failed = run_all(work, entries, sizes, options.repeats, RunFolder(folder / RUNS))
    failures = [*finder.failures, *failed]
    if all(record.setting.plain for record in records):
        raise _nothing_runs(failures)
    # 2) Figures with intervals, and what follows from them in sentences.
    rows = bench_rows(records, prompts, confidence, sampling_of(options).greedy)
    summary = bench_summary(rows, options.repeats, target.dtype != torch.float32)
    report = Report(surroundings=about, rows=rows, failures=failures, words=summary)
    # 3) Report, page and sentences.
    storage.write_json(folder / REPORT_FILE, report.model_dump(mode="json"))
    storage.write_bytes(folder / PAGE_FILE, bench_page(report, datetime.now(UTC)).encode())
    storage.write_bytes(folder / WORDS_FILE, "".join(f"{line}\n" for line in summary).encode())
    return report


def _nothing_runs(failures: Sequence[Failure]) -> InputError:
    why = "; ".join(f"{one.method}: {one.reason}" for one in failures)
    return InputError(f"bench: no method can run: {why}")


class MethodFinder:
    """Finder of the methods to benchmark for one target; it notes those that cannot be run, and why."""

    def __init__(self, target: Target, options: BenchOptions, score: ScoreSettings, longest: int) -> None:
        self._target, self._options, self._score, self._longest = target, options, score, longest
        self.methods = [BenchMethod(PLAIN, "", "", [BenchEntry(Setting(method=PLAIN, levels=0, batch_size=1), None)])]
        self.failures: list[Failure] = []
        self.helped = 0
        """Number of small drafts that the helper of a cascade is smaller than."""

    def add_free(self, name: str) -> None:
        """Add a training-free method, with chains of every K."""
        self._add(name, "", lambda: (name, self._chain_entries(name, partial(TRAINING_FREE[name], self._target))))

    def add_draft(
        self,
        name: str,
        find: Callable[[], Path],
        trees: dict[str, TreeSettings],
        tree_of: TreeOf | None = None,
        helper: StoredDraft | None = None,
    ) -> None:
        """Add a trained draft with its chains and trees; a small one also as a cascade with `helper`.

        `find` gives its folder or file. What cannot be run is noted in `failures`.
        """
        # 1) Where the draft lies.
        name = f"{name} (given)" if name in (PLAIN, *TRAINING_FREE) else name
        place = self._or_failure(name, None, find)
        if place is None:
            return
        loaded: list[StoredDraft] = []

        # 2) Its chains, then each tree that it can draft: a tree that fails leaves the rest.
        def entries() -> tuple[str, list[BenchEntry]]:
            draft = StoredDraft.load(place, self._target, self._score.draft_device, other_tokenizer=True)
            loaded.append(draft)
            planned = self._planned_entries(name, draft)
            found = planned or self._chain_entries(name, draft.proposer)
            draft.check_context(self._longest)
            wanted = trees if not planned or self._options.trees else {}
            for tree, asked in {name: one for name, one in wanted.items() if draft.can_draft(one)}.items():
                drafting = self._or_failure(name, tree, partial(tree_of, draft, tree, asked)) if tree_of else None
                if drafting is not None:
                    found += self._entry(name, DraftConfig(drafting.depths[0], tree), drafting.make)
            return draft.digest, found

        # 3) The draft, and the same one helped.
        self._add(name, str(place), entries)
        if helper is not None and loaded and loaded[0].family == "small":
            self._add_cascade(name, place, loaded[0], helper)

    def _add_cascade(self, alone: str, place: Path, draft: StoredDraft, helper: StoredDraft) -> None:
        """Add a cascade: the small draft called `alone`, with `helper` drafting for it."""
        option = str(self._options.cascade)
        shown = option if helper.path is None else Path(option).resolve().name
        name = f"{alone} helped by {shown}"

        def entries() -> tuple[str, list[BenchEntry]]:
            check_smaller(helper, draft, option, alone)
            self.helped += 1
            digest = fingerprint.of_json([draft.digest, option if helper.path is None else helper.digest])
            return digest, self._chain_entries(name, lambda: draft.proposer(helper=helper.new_helper()))

        self._add(name, str(place), entries)

    def _add(self, name: str, place: str, make: Callable[[], tuple[str, list[BenchEntry]]]) -> None:
        """Add a method once, where `make` gives any entries: its digest and these."""
        known = any(method.name == name for method in self.methods)
        found = None if known else self._or_failure(name, None, make)
        if found is not None and found[1]:
            self.methods.append(BenchMethod(name, place, found[0], found[1]))

    def _planned_entries(self, name: str, draft: StoredDraft) -> list[BenchEntry]:
        """Entry of the K or tree of a draft's plan, where the options name no K; none for a draft without a plan."""
        found = draft.found_plan
        if self._options.draft_tokens is not None:
            if not found.assumed:
                say(f"{name}: K as asked (--draft-tokens), not the {found.plan} of its plan alone")
            return []
        if found.assumed:
            return []
        plan = found.plan if draft.drafts_trees else found.plan.as_chain
        say(f"{name}: {plan}, as its plan says")
        config = DraftConfig(plan.draft_tokens, plan.tree_name)
        return self._entry(name, config, partial(draft.proposer, plan.tree), plan.prefer(self._score.sampled_rules))

    def _chain_entries(self, name: str, make: Callable[[], Proposer]) -> list[BenchEntry]:
        """Entries of chains of every K; a K above what the method can draft is lowered to that."""
        proposer, wanted = make(), sorted(set(self._options.draft_tokens or USUAL_TOKENS))
        depths = [min(K, proposer.most_nodes(K)) if proposer.chain else K for K in wanted]
        return [entry for K in dict.fromkeys(depths) for entry in self._entry(name, DraftConfig(K), make)]

    def _entry(
        self, name: str, plan: DraftConfig, make: Callable[[], Proposer], preferred: Sequence[str] | None = None
    ) -> list[BenchEntry]:
        """Entry of one K or tree; none, and a failure noted, where no accept rule takes this proposer.

        `preferred`: rules above temperature 0 in order of preference; None: the recipe's.
        """
        sampling, proposer = sampling_of(self._options), make()
        try:
            rule = choose_rule(sampling, proposer, preferred or self._score.sampled_rules, self._options.rule)
        except InputError as error:
            self.failures.append(Failure(method=name, plan=plan.label, batch_size=None, reason=str(error)))
            return []
        setting = Setting(method=name, levels=plan.levels, tree=plan.tree, rule=rule, batch_size=1)
        return [BenchEntry(setting, make)]

    def _or_failure(self, name: str, tree: str | None, find: Callable[[], T]) -> T | None:
        """Result of a call; None, and a failure noted, where it raises a DraftforgeError."""
        try:
            return find()
        except DraftforgeError as error:
            self.failures.append(Failure(method=name, plan=tree or "-", batch_size=None, reason=one_line(error)))
            return None


def find_methods(space: Workspace, options: BenchOptions, longest: int) -> MethodFinder:
    """Find the methods: plain decoding, and those that the options name, else the recipe's drafts and prompt lookup.

    `longest`: tokens of the longest prompt and answer. Raises InputError for a name that means nothing.
    """
    recipe, finder = space.recipe, MethodFinder(space.target, options, space.recipe.score, longest)
    # 1) Names, each once. A folder is shown by its last part where that is unambiguous.
    names = list(options.drafts) or [*recipe.drafts, LOOKUP]
    for name in names:
        _check_name(name, recipe.drafts)
    names = _distinct(names, recipe.drafts)
    trees = _trees(recipe.score.trees, options.trees)
    shorts = [Path(name).resolve().name for name in names if _is_path(name, recipe.drafts)]

    # 2) Trees: where one needs recorded answers or trainings, the recipe's capture is made for it.
    def tree_of(name: str, draft: StoredDraft, label: str, tree: TreeSettings) -> ProposerSpec:
        if is_fixed(tree):
            return ProposerSpec(partial(draft.proposer, tree), (tree.levels,), label, tree)
        return Scorer(space, captured_stages(space).captured, SELECTION_SPLIT).tree_spec(draft, label, tree, name)

    # 3) The helper of cascades, then every method with it.
    helper = None
    if options.cascade is not None:
        helper = helper_of(space, options.cascade, longest)
    for name in names:
        if name in TRAINING_FREE and name not in recipe.drafts:
            finder.add_free(name)
            continue
        # The shown name must be that of no other draft here; None asks for the champion.
        short = Path(name).resolve().name if _is_path(name, recipe.drafts) else name
        shown = short if shorts.count(short) <= 1 and (short == name or short not in recipe.drafts) else name
        asked = None if name == CHAMPION and name not in recipe.drafts else name
        own = {label: tree for label, tree in trees.items() if is_tree_of(tree, name)}
        finder.add_draft(shown, partial(find_draft, space, asked), own, partial(tree_of, name), helper)
    # A cascade that was asked for and fits no draft is an error, not a silent gap in the table.
    if helper is not None and not finder.helped:
        raise _helps_none(str(options.cascade), finder.failures)
    return finder


def _helps_none(cascade: str, failures: Sequence[Failure]) -> InputError:
    why = "; ".join(f"{one.method}: {one.reason}" for one in failures)
    return InputError(f"--cascade {cascade}: no small draft here that it could help{why and f' ({why})'}")


def _distinct(names: Sequence[str], drafts: Collection[str]) -> list[str]:
    """Names with each draft once, as it is named first; paths are the same draft where they resolve to one folder."""
    found: dict[str | Path, str] = {}
    for name in names:
        found.setdefault(Path(name).resolve() if _is_path(name, drafts) else name, name)
    return list(found.values())


def _is_path(name: str, drafts: Collection[str]) -> bool:
    """Whether a name is a path: no draft of the recipe, no training-free method and not the champion."""
    return name not in drafts and name not in TRAINING_FREE and name != CHAMPION


def _check_name(name: str, drafts: Collection[str]) -> None:
    """Raise InputError for plain decoding, and for a name that is neither a known method nor an existing path."""
    if name in (NO_DRAFT, PLAIN):
        raise InputError(f"--draft {name}: plain decoding is always measured; name what is compared with it")
    if _is_path(name, drafts) and not (name and Path(name).exists()):
        known = ", ".join([*drafts, *TRAINING_FREE, CHAMPION])
        raise InputError(f"--draft {name}: must be a draft folder or one of {known}")


def _trees(known: dict[str, TreeSettings], wanted: Sequence[str]) -> dict[str, TreeSettings]:
    """Trees of the recipe that are wanted; all where none is named. Raises InputError for an unknown one."""
    for name in wanted:
        check_tree(name, known)
    return {name: tree for name, tree in known.items() if name in wanted or not wanted}
