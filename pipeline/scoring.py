"""Scoring: replay and decode recorded answers with every checkpoint, time the rounds, and choose the best draft.

Two measurements are kept apart: acceptance counts (which drafted tokens the target accepts, by replay of recorded
answers) and times of rounds on one machine. Expected speed-up is made of both: other hardware needs new times only.

`score_stage` and `score_foreign` are the entry points, `_score` is the flow. `CheckpointCounter` counts one checkpoint
on one rank, `Scorer` holds the samples and target passes that all checkpoints share, and `parallel_scoring` divides the
counting among ranks and runs the race.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from .. import fingerprint, storage
from ..data.store import Capture, Sample
from ..errors import CorruptDataError, InputError, MissingFileError
from ..eval import counts
from ..eval.cost_measurement import Grid, costs_file, measure_costs, most_context
from ..eval.cost_table import CostTable, cached_costs, cost_key, table_for, write_tables
from ..eval.draft_configs import ProposerSpec
from ..eval.leaderboard import (
    PLAIN,
    Checkpoint,
    ConfigRows,
    DomainRow,
    Row,
    Times,
    at_config,
    best_config,
    by_config,
    config_rows,
    domain_rows,
    leaderboard,
    plain_row,
    serving,
)
from ..eval.report.page import score_record
from ..eval.score import Identity, measured_tree, perplexity, score_draft, scored_samples, stratified_conversations
from ..eval.serving_load import LoadTimes
from ..eval.settings import SELECTION_SPLIT, LoadSettings, ScoreSettings
from ..eval.successive_elimination import cut_into_blocks, elimination_order
from ..eval.summary import serving_advice
from ..eval.table import show_domains, show_leaderboard, show_load
from ..eval.target_pass_cache import TargetPassCache
from ..progress import say
from ..specdec.formats import meta_file
from ..specdec.formats.checkpoint import OWN_TARGET
from ..specdec.formats.layer_skip import is_skip_file
from ..specdec.proposers.training_free import LOOKUP
from ..specdec.proposers.tree_settings import MeasuredTree, StaticTree, Tree, TreeSettings
from ..specdec.serving_plan import ServingPlan
from ..specdec.stored_draft import TOKENIZER_FILE, StoredDraft, trained_for
from ..specdec.targets import context_length
from ..train.families import family_of
from .parallel_scoring import ScoringJob, count_shared, race
from .stages import Stage, Stages, Start, checkpoints_of
from .workspace import Workspace, require_whole

COUNTS_FILE, SCORES_FILE, TIMES_FILE = "counts.parquet", "scores.json", "times.json"
PARTS = "parts"
_MEASURED_CONVERSATIONS = 64  # whose answers shape a measured tree


@dataclass(frozen=True)
class Scored:
    """Result of scoring: counts, times, leaderboard rows and the chosen checkpoint."""

    stage: Stage
    target: str
    """Fingerprint of the target that the drafts were scored on."""
    counts: pa.Table
    times: dict[Checkpoint, Times]
    rows: list[Row]
    domains: list[DomainRow]
    """Figures of each row's draft, by domain and sampling setting."""
    advice: list[str]
    """Advice for serving, in sentences."""
    configs: ConfigRows
    """Rows of each checkpoint at every K and tree."""
    folders: dict[Checkpoint, Path]
    trees: dict[Checkpoint, dict[str, Tree]]
    """Draft trees that each checkpoint was scored with, by name; measured trees in their final shape."""
    start: Start | None = None
    """What a retraining started from; it is among the rows."""

    @property
    def chosen(self) -> Row:
        """Row of the checkpoint, and its K or tree, with the best expected speed-up. Raises InputError without one."""
        found = next((row for row in self.rows if row.chosen), None)
        if found is None:
            raise InputError("score: no checkpoint has a known speed-up; score more conversations")
        return found

    @property
    def chosen_folder(self) -> Path:
        return self.folders[self.chosen.draft, self.chosen.step]

    @property
    def start_row(self) -> Row | None:
        """Row of what a retraining started from."""
        return next((row for row in self.rows if row.start), None)

    def plan(self, row: Row, settings: ScoreSettings) -> ServingPlan:
        """Serving plan of a checkpoint: its K or tree, its best chain, and the rule that judged them."""
        # The best chain is for engines that draft no trees.
        chains = [one for one in self.configs[row.draft, row.step] if not one.config.tree]
        best = best_config(chains, settings.tie_share) if row.config.tree else row
        # One rule decides above temperature 0; at 0 it is the greedy one.
        judged = at_config(serving(counts.where(self.counts, draft=row.draft, step=row.step), settings), row.config)
        rules = [rule for rule in counts.values(judged, "rule") if rule != "greedy"]
        return ServingPlan(
            draft_tokens=row.config.levels,
            tree_name=row.config.tree,
            tree=self.trees[row.draft, row.step].get(row.config.tree),
            chain_tokens=best.config.levels,
            rule=rules[0] if rules else "greedy",
        )

    @property
    def counts_file(self) -> Path:
        return self.stage.folder / COUNTS_FILE

    @property
    def times_file(self) -> Path:
        """Fitted times, where the recipe states a load."""
        return self.stage.folder / TIMES_FILE


def check_score(space: Workspace, names: Collection[str], what: str = "a score", trees: bool = True) -> None:
    """Refuse what keeps these drafts of the recipe from being scored, before any work.

    `what` asks for the score; `trees`: whether the recipe's trees are scored too.
    """
    require_whole(space.recipe, what)
    for name, settings in space.recipe.drafts.items():
        if name in names and family_of(settings).changes_target(settings):
            raise InputError(
                f"drafts.{name}: its training makes a new target, which this recipe neither scores nor registers; "
                f"`draftforge train` it, then distill a recipe with target.model=<checkpoint>/{OWN_TARGET}, "
                f"drafts.{name}.init_from=<checkpoint> and no backbone"
            )
    check_load(space, trees)


def check_load(space: Workspace, trees: bool = True) -> None:
    """Check the serving load (`score.load`) before any work.

    Raises an error that names score.load or score.costs.fit where the load does not fit the target's context or the
    given times, or where these cannot be read.
    """
    score = space.recipe.score
    if score.load is None or not space.first_rank:
        return
    # Times of another machine: the load must lie inside what they cover.
    if score.costs.fit is not None:
        _check_given_times(space, score.load)
        return
    # Times of this machine: its grid of contexts must fit the target, with the deepest draft on top.
    try:
        longest = context_length(space.target_settings)
    except MissingFileError:  # the stages say what they cannot do without it
        return
    if longest is not None:
        # What a measured tree will be is not known yet.
        known = [tree for tree in score.trees.values() if not isinstance(tree, MeasuredTree)] if trees else []
        deepest = max([*score.draft_tokens, *(tree.levels for tree in known)])
        Grid.around(score.load, most_context(longest, deepest, score.costs.rounds))


def _check_given_times(space: Workspace, load: LoadSettings) -> None:
    """Raise InputError where the given times hold at the load for no draft shape."""
    failed: list[InputError] = []
    for table in space.given_times:
        try:
            LoadTimes(table, load)
        except InputError as error:
            failed.append(error)
    if len(failed) == len(space.given_times):
        raise failed[0]


def score_stage(stages: Stages, drafts: Collection[str], start: Start | None = None) -> Scored | None:
    """Score every checkpoint of these drafts on the selection split, prompt lookup beside them; choose, and show it.

    `start`: what a retraining started from, scored as step 0; the first rank's is enough. All ranks count; None on
    those that are not the first.
    """
    trained = {name: stages.training(name) for name in drafts}
    folders = {} if start is None else {start.checkpoint: start.folder}
    folders |= {(name, step): path for name, done in trained.items() for step, path in checkpoints_of(done).items()}
    return _score(stages, folders, {name: done.fingerprint for name, done in trained.items()}, start)


def score_foreign(stages: Stages, path: Path) -> Scored | None:
    """Score a draft of anybody's making, as it is, on the selection split, and show it. Nothing is registered.

    `path`: a folder in any layout, a .gguf file, or a .json file of skipped layers. All ranks count; None on those that
    are not the first.
    """
    if not (meta_file(path).is_file() or (path / TOKENIZER_FILE).is_file() or is_skip_file(path)):
        say(f"{path}: nothing says which tokenizer it was trained with; only sizes are checked")
    # The name goes to tables and file names: printable, short, and none of the baselines.
    name = "".join(character if character.isprintable() else "?" for character in path.resolve().name)[:64]
    shown = f"{name} (given)" if name in (LOOKUP, PLAIN) else name
    return _score(stages, {(shown, 0): path}, fingerprint.file_digests(path))


def _score(
    stages: Stages, folders: Mapping[Checkpoint, Path], digests: Mapping[str, str], start: Start | None = None
) -> Scored | None:
    """Score drafts, prompt lookup beside them, and choose the one with the best expected speed-up.

    `folders`: the folder of each checkpoint. `digests`: by name, digests of what is scored, which name the stage. None
    on ranks other than the first, which only help to count.
    """
    space, settings, stage = stages.space, stages.recipe.score, stages.score(digests)
    entries: dict[Checkpoint, Path | None] = {(LOOKUP, 0): None, **folders}

    # 1) The recorded answers. Drafts are loaded one at a time.
    scorer = Scorer(space, stages.captured, SELECTION_SPLIT)
    counter = CheckpointCounter(scorer, stage.folder / PARTS)
    if not space.first_rank:  # takes its share of what the first one finds to be counted, as long as there is any
        while count_shared([], counter.count, counter.is_done, space.ranks):
            pass
        return None

    # 2) What rounds of each shape cost: measured before anything is counted, by this rank.
    times: dict[Checkpoint, Times] = {}
    trees: dict[Checkpoint, dict[str, Tree]] = {}
    for checkpoint, folder in entries.items():
        same = next((known for known in times if known[0] == checkpoint[0]), None)
        if same is not None and not settings.trees_vary:  # checkpoints of one draft have one shape
            times[checkpoint], trees[checkpoint] = times[same], trees[same]
            continue
        draft, specs = counter.load(checkpoint, folder)
        trees[checkpoint] = {spec.tree: spec.fixed for spec in specs if spec.fixed is not None}
        times[checkpoint] = scorer.times(draft, specs)

    # 3) Replay and decode: what is not on disk, shared by all ranks; everything, or as a race.
    def count(checkpoints: Iterable[Checkpoint], block: int | None = None, rest: bool = False) -> None:
        jobs = [ScoringJob(one, entries[one], trees[one], block, rest) for one in checkpoints]
        missing = [job for job in jobs if not counter.is_done(job)]
        if missing:
            count_shared(missing, counter.count, counter.is_done, space.ranks)

    if settings.race is not None and len(folders) > 1:
        results = _race(counter, list(folders), count, times)
    else:
        count(entries)
        results = {one: counter.result(one) for one in entries}
    count_shared([], counter.count, counter.is_done, space.ranks)  # the other ranks go on

    # 4) Choose by expected speed-up, counts times costs.
    tables = [result.table for result in results.values()]
    configs = config_rows(tables, times, settings, [LOOKUP])
    # Columns for people that decide nothing: perplexity, share of the answers counted, trained-for target, start.
    perplexities = {one: result.perplexity for one, result in results.items() if result.perplexity is not None}
    shares = {one: result.share for one, result in results.items()}
    others = {one: trained_for(folder, space.target_fingerprint) for one, folder in folders.items()}
    starts = {} if start is None else {start.checkpoint: start.version.reference}
    rows = [
        replace(row, trained_for=others.get((row.draft, row.step), ""), start=starts.get((row.draft, row.step), ""))
        for row in leaderboard(tables, times, settings, [LOOKUP], perplexities, shares, configs)
    ]
    # The same by domain, and what follows from both.
    domains = domain_rows(tables, rows, settings, times)
    sentences = serving_advice(rows, domains, settings)
    table = counts.concat(tables)
    scored = Scored(
        stage, space.target_fingerprint, table, times, rows, domains, sentences, configs, dict(folders), trees, start
    )

    # 5) Keep and show it.
    counts.write(table, scored.counts_file)
    # Times under a load are kept whole, as the report draws them over batch sizes.
    cost_tables = {one.key.digest: one.table for one in times.values() if isinstance(one, LoadTimes)}
    if cost_tables:
        write_tables(scored.times_file, cost_tables.values())
    origin = {"at": time.time(), "target": scored.target, "capture": stages.captured.fingerprint, "advice": sentences}
    record = score_record(table, times, rows, settings, configs, domains)
    storage.write_json(stage.folder / SCORES_FILE, origin | record)
    _show(scored, settings, by_config(configs, scored.chosen))
    return scored


def _race(
    counter: "CheckpointCounter",
    entrants: Sequence[Checkpoint],
    count: Callable[..., None],
    times: Mapping[Checkpoint, Times],
) -> dict[Checkpoint, "ScoringResult"]:
    """Race: prompt lookup is counted on all conversations, checkpoints block by block until they can no longer win.

    `count` makes the counts, shared by all ranks. Dropped checkpoints keep the counts they have. Results are by
    checkpoint: the baseline first, then the entrants in their order.
    """
    # 1) The baseline never races: every table shows it on everything.
    baseline = (LOOKUP, 0)
    count([baseline])

    # 2) The race itself, and then the decoding checks that its finalists lack.
    def count_block(checkpoints: Sequence[Checkpoint], number: int) -> dict[Checkpoint, pa.Table]:
        count(checkpoints, block=number)
        return {one: counter.block(one, number) for one in checkpoints}

    found = race(entrants, counter.blocks, counter.sizes, times, counter.settings, count_block)
    finalists = [one for one in entrants if found.shares[one] == 1]
    count(finalists, rest=True)
    # 3) Whole results of those that finished; what there is of the others.
    results = {one: counter.result(one) for one in (baseline, *finalists)}
    dropped = {
        one: ScoringResult(counts.concat(found.tables[one]), None, found.shares[one])
        for one in entrants
        if one not in results
    }
    return {one: (results | dropped)[one] for one in (baseline, *entrants)}


class ScoringResult(NamedTuple):
    """Acceptance counts and perplexity of one checkpoint."""

    table: pa.Table
    perplexity: float | None
    share: float = 1.0
    """Share of the answers' tokens that were counted; below 1: dropped from a race."""


class CheckpointCounter:
    """Counter of acceptance for checkpoints on one rank. Its folder keeps the counts: nothing is counted twice."""

    def __init__(self, scorer: "Scorer", folder: Path) -> None:
        self.settings = scorer.settings
        self._scorer, self._folder = scorer, folder
        self._loaded: tuple[Checkpoint, StoredDraft, list[ProposerSpec]] | None = None

    @cached_property
    def sizes(self) -> dict[str, float]:
        """Tokens of the scored answers by cluster, without the first of each answer, which costs no round."""
        sizes: dict[str, float] = {}
        for sample in self._samples:
            sizes[sample.cluster] = sizes.get(sample.cluster, 0.0) + max(len(sample.answer_ids) - 1, 0)
        return sizes

    @cached_property
    def blocks(self) -> list[list[str]]:
        """Conversation clusters of each block of a race, the same on every rank."""
        assert self.settings.race is not None
        order = elimination_order(self.sizes, self.settings.seed)
        return [list(block) for block in cut_into_blocks(order, self.sizes, self.settings.race.blocks)]

    @cached_property
    def _samples(self) -> list[Sample]:
        return scored_samples(self._scorer.samples, self.settings)

    def load(
        self, checkpoint: Checkpoint, folder: Path | None, trees: Mapping[str, Tree] | None = None
    ) -> tuple[StoredDraft, list[ProposerSpec]]:
        """Load a draft, with the chains and trees that it is scored with; the last one loaded is kept.

        `folder` None: prompt lookup. `trees`: draft trees that were measured before.
        """
        if self._loaded is None or self._loaded[0] != checkpoint:
            self._loaded = None  # before the next one takes room
            draft = self._scorer.load(folder, other_tokenizer=True)
            self._loaded = checkpoint, draft, self._scorer.specs(draft, trees)
        return self._loaded[1:]

    def count(self, job: ScoringJob) -> None:
        """Make the counts of a job, and write them to the folder."""
        checkpoint, identity = job.checkpoint, Identity(*job.checkpoint)
        draft, specs = self.load(checkpoint, job.folder, job.trees)

        # 1) A block of a race: replays alone, unless only decoding tells.
        if job.block is not None:
            members = set(self.blocks[job.block])
            samples = [sample for sample in self._samples if sample.cluster in members]
            table, _ = self._scorer.counts(specs, identity, samples, decoded=False)
            counts.write(table, self._block_file(checkpoint, job.block))
            return

        # 2) The rest of a finalist: the decoding that checks its replays. Or everything.
        if job.rest:
            replayed = [counts.read(self._block_file(checkpoint, number)) for number in range(len(self.blocks))]
            table, lossless = counts.concat(replayed), None
            chosen = stratified_conversations(self._samples, self.settings.decode_conversations)
            if chosen:
                samples = [sample for sample in self._samples if sample.conversation in chosen]
                again, lossless = self._scorer.counts(specs, identity, samples)
                table = counts.concat([table, _only_decoded(again, table)])
        else:
            # Without a race: replays and decoding together.
            table, lossless = self._scorer.counts(specs, identity)
        # 3) The notes come last: a result counts as done only with both files.
        counts.write(table, self._file(checkpoint, "parquet"))
        known = {"lossless": lossless, "perplexity": self._scorer.perplexity(draft)}
        storage.write_json(self._file(checkpoint, "json"), known)

    def is_done(self, job: ScoringJob) -> bool:
        """Whether the counts of a job are on disk; damaged ones are not, and a line says so."""
        try:
            if job.block is None:
                self.result(job.checkpoint)
            else:
                self.block(job.checkpoint, job.block)
        except MissingFileError:
            return False
        except CorruptDataError as error:
            say(f"{error}; scoring it again")
            return False
        return True

    def result(self, checkpoint: Checkpoint) -> ScoringResult:
        """Counts on all conversations. Raises MissingFileError, CorruptDataError."""
        table = counts.read(self._file(checkpoint, "parquet"))
        return ScoringResult(table, _read_perplexity(self._file(checkpoint, "json")))

    def block(self, checkpoint: Checkpoint, number: int) -> pa.Table:
        """Counts on one block, without the decoding that checks replays. Raises MissingFileError, CorruptDataError."""
        return counts.read(self._block_file(checkpoint, number))

    def _block_file(self, checkpoint: Checkpoint, number: int) -> Path:
        return self._file(checkpoint, f"block-{number + 1}-of-{len(self.blocks)}.parquet")

    def _file(self, checkpoint: Checkpoint, ending: str) -> Path:
        name, step = checkpoint
        return self._folder / f"{name}-{step:06d}.{ending}"  # a name may hold dots: no with_suffix


def _only_decoded(table: pa.Table, replayed: pa.Table) -> pa.Table:
    """Decoded rows of the settings that were replayed too; settings that can only be decoded are in the blocks."""
    names = ("setting", "rule", "draft_tokens", "tree")
    known = set(zip(*(counts.where(replayed, method="replay")[name].to_pylist() for name in names)))
    decoded = counts.where(table, method="decode")
    keys = zip(*(decoded[name].to_pylist() for name in names))
    return decoded.filter(pa.array([key in known for key in keys], pa.bool_()))


def _read_perplexity(path: Path) -> float | None:
    """Perplexity from a checkpoint's notes; None where they say null. Raises CorruptDataError."""
    notes = storage.read_object(path)
    if "perplexity" not in notes:
        raise CorruptDataError(f"{path}: perplexity: is missing")
    value = notes["perplexity"]
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CorruptDataError(f"{path}: perplexity: {value!r}: must be a number above 0, or null")
    return float(value)


class Scorer:
    """Scorer of drafts of one target, on one split of one capture; all drafts share the target's passes."""

    def __init__(self, space: Workspace, captured: Stage, split: str) -> None:
        require_whole(space.recipe, "a score")
        self._space = space
        self._data = Capture.open(captured.folder, verify=False)
        self.settings: ScoreSettings = space.recipe.score
        self.samples: list[Sample] = self._data.samples(split)  # type: ignore[arg-type]
        self.traces = TargetPassCache(space.target, self.settings.trace_bytes, self.settings.replay_tokens)

    def load(self, folder: Path | None, other_tokenizer: bool = False) -> StoredDraft:
        """Load a stored draft, checked against the target and the longest scored text; `folder` None: prompt lookup.

        `other_tokenizer`: accept a draft with another one than the target's.
        """
        if folder is None:
            return StoredDraft.of_method(LOOKUP, self._space.target)
        draft = StoredDraft.load(folder, self._space.target, self.settings.draft_device, other_tokenizer)
        draft.check_context(max((len(one.prompt_ids) + len(one.answer_ids) for one in self.samples), default=0))
        return draft

    def specs(self, draft: StoredDraft, fixed: Mapping[str, Tree] | None = None) -> list[ProposerSpec]:
        """Chains and trees that the recipe scores a draft with. `fixed`: trees of it that were measured before."""
        if not draft.drafts_trees:
            return [self.chain_spec(draft)]
        known: Mapping[str, TreeSettings] = self.settings.trees if fixed is None else fixed
        return [self.chain_spec(draft), *(self.tree_spec(draft, name, tree) for name, tree in known.items())]

    def chain_spec(self, draft: StoredDraft) -> ProposerSpec:
        """Draft chains of every K of the recipe."""
        return ProposerSpec(draft.proposer, tuple(self.settings.draft_tokens))

    def tree_spec(self, draft: StoredDraft, name: str, tree: TreeSettings) -> ProposerSpec:
        """Draft tree of a draft; a measured one is shaped here, by acceptance on answers of the train split."""
        fixed = self._measured(draft, tree) if isinstance(tree, MeasuredTree) else tree
        return ProposerSpec(partial(draft.proposer, fixed), (fixed.levels,), name, fixed)

    def _measured(self, draft: StoredDraft, tree: MeasuredTree) -> StaticTree:
        """Static tree shaped by acceptance on some train answers; the scored splits must not choose it."""
        samples = self._data.samples("train")
        kept = stratified_conversations(samples, _MEASURED_CONVERSATIONS)
        return measured_tree(
            self._space.target, draft.proposer(), [one for one in samples if one.conversation in kept], tree
        )

    def counts(
        self,
        specs: Sequence[ProposerSpec],
        identity: Identity,
        samples: Sequence[Sample] | None = None,
        decoded: bool = True,
    ) -> tuple[pa.Table, bool | None]:
        """Acceptance counts of one draft, and whether its decoding was lossless (None: nothing was decoded at T = 0).

        `samples`: count these instead of all that the recipe scores. `decoded` False: skip the decoding that only
        checks what a replay counts.
        """
        settings, some = self.settings, self.samples if samples is None else samples
        # Given samples are taken whole: the limit of conversations has chosen them already.
        if samples is not None:
            settings = settings.model_copy(update={"max_conversations": 0})
        if not decoded:
            settings = settings.model_copy(update={"decode_conversations": 0})
        score = score_draft(self._space.target, specs, some, settings, identity, self.traces)
        return score.counts, score.consistency.lossless

    def perplexity(self, draft: StoredDraft) -> float | None:
        """Perplexity of recorded answers under the draft, for people only: nothing is decided by it.

        None for prompt lookup, and for a draft with another tokenizer than the target's.
        """
        if draft.module is None or not draft.same_tokenizer:
            return None
        chosen = stratified_conversations(self.samples, self.settings.decode_conversations or 1)
        samples = [sample for sample in self.samples if sample.conversation in chosen]
        return perplexity(draft.proposer(), samples, self.traces)

    def times(self, draft: StoredDraft, specs: Sequence[ProposerSpec]) -> Times:
        """Round times of this draft shape at the recipe's load, or at batch 1 where the recipe states none."""
        load = self.settings.load
        table = self.costs(draft, specs, load)
        return table if load is None else LoadTimes(table, load)

    def costs(self, draft: StoredDraft, specs: Sequence[ProposerSpec], load: LoadSettings | None = None) -> CostTable:
        """Cost table of this draft shape: seconds of a round at batch 1, or over the grid of a load.

        Measured on this machine, once for each shape, or taken from the table of another machine that the recipe gives.
        """
        settings, target = self.settings, self._space.target
        key = cost_key(target, draft.module or draft.family, specs, settings)
        # 1) The points to measure at: batch sizes and contexts around the load, or batch 1 alone.
        grid = None
        if load is not None:
            if settings.costs.fit is not None:
                return table_for(key, self._space.given_times, settings.costs.fit)
            deepest = max(depth for spec in specs for depth in spec.depths)
            grid = Grid.around(load, most_context(target.max_positions, deepest, settings.costs.rounds))

        # 2) Measure, or read what another checkpoint or process of the same shape has measured.
        def measure() -> CostTable:
            prompts = [sample.prompt_ids for sample in self.samples]
            return measure_costs(key, target, specs, prompts, settings, grid)

        path = self._space.root / "costs" / costs_file(key, grid)
        return cached_costs(path, key, measure, settings.costs.wait_seconds)


def _show(scored: Scored, settings: ScoreSettings, configs: Sequence[Row]) -> None:
    """Show the final tables: all checkpoints, then the chosen one at each of its `configs`, at each batch size, and by
    domain beside prompt lookup; last the advice."""
    chosen = scored.chosen
    # All checkpoints, each at its best K or tree.
    times = scored.times[chosen.draft, chosen.step]
    rows = [plain_row(times), *scored.rows]
    show_leaderboard(rows, settings.confidence, "Drafts by expected serving speed", times.description)
    # The chosen checkpoint: its other settings, its batch sizes, its domains.
    if len(configs) > 1:
        every = "K and tree" if settings.trees else "K"
        show_leaderboard(
            configs, settings.confidence, f"{chosen.draft} step {chosen.step} at every {every}", times.description
        )
    show_load(chosen, f"{chosen.draft} step {chosen.step} at each batch size")
    compared = {(row.draft, row.step) for row in scored.rows if row.baseline or row is chosen}
    shown = [row for row in scored.domains if (row.draft, row.step) in compared]
    show_domains(shown, settings.confidence, "By domain")
    # Figures hold for this target only, even of a draft that was trained for another.
    here = fingerprint.short(scored.target)
    for row in scored.rows:
        if row.trained_for:
            say(
                f"{row.draft} step {row.step}: was made for target {row.trained_for} and is scored on {here}, another "
                "model or another form of it (quantised, an adapter): its figures are of this one"
            )
    for line in scored.advice:
        say(line)
