"""Scoring: replay and decode recorded answers with every checkpoint, time the rounds, and choose the best draft.

Two measurements are kept apart: acceptance counts (which drafted tokens the target accepts, by replay of recorded
answers) and times of rounds on one machine. Expected speed-up is made of both: other hardware needs new times only.

`score_stage` and `score_foreign` are the entry points, `_score` is the flow. `Scorer` holds the samples and target
passes that all checkpoints share, and `parallel_scoring` divides the counting among ranks and runs the race.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from .. import fingerprint, storage
from ..errors import InputError, MissingFileError, named
from ..eval import counts
from ..eval.cost_measurement import Grid, most_context, room_for_rounds
from ..eval.cost_table import write_tables
from ..eval.engine_costs import EngineServers
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
from ..eval.serving_load import LoadTimes
from ..eval.settings import SELECTION_SPLIT, LoadSettings, ScoreSettings
from ..eval.summary import serving_advice
from ..eval.table import show_contexts, show_domains, show_leaderboard, show_load
from ..progress import say
from ..specdec.formats import meta_file
from ..specdec.formats.checkpoint import OWN_TARGET
from ..specdec.formats.layer_skip import is_skip_file
from ..specdec.proposers.training_free import LOOKUP
from ..specdec.proposers.tree_settings import MeasuredTree, MergedTree, Tree
from ..specdec.serving_plan import ServingPlan
from ..specdec.stored_draft import TOKENIZER_FILE, StoredDraft, trained_for
from ..specdec.targets import context_length, resolve_device
from ..train.families import family_of
from .draft_scorer import Scorer
from .estimates import Work, conditions_of, estimated
from .parallel_scoring import CheckpointCounter, ScoringJob, ScoringResult, race
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
    if space.recipe.score.draft_device is not None:
        resolve_device(space.recipe.score.draft_device, "auto", "score.draft_device")
    for name, settings in space.recipe.drafts.items():
        if name in names and family_of(settings).changes_target(settings):
            raise InputError(
                f"drafts.{name}: its training makes a new target, which this recipe neither scores nor registers; "
                f"`draftforge train` it, then distill a recipe with target.model=<checkpoint>/{OWN_TARGET}, "
                f"drafts.{name}.init_from=<checkpoint> and no backbone"
            )
    check_load(space, trees)
    if space.first_rank:
        _check_servers(space, [LOOKUP, *(space.recipe.drafts[name].draft_family for name in names)])


def _check_servers(space: Workspace, families: Collection[str]) -> None:
    """Raise InputError or EngineError where the engine of `score.load.costs` cannot time drafts of these families."""
    load = space.recipe.score.load
    if load is not None and load.costs is not None:
        EngineServers(load.costs, space.target_settings, "auto", "", False, space.root).check(families)


def check_load(space: Workspace, trees: bool = True) -> None:
    """Check the serving load (`score.load`), or the rounds that are timed, before any work.

    Raises an error that names score.load, score.costs.fit or score.costs.rounds where these do not fit the target's
    context or the given times, or where times cannot be read.
    """
    score = space.recipe.score
    if not space.first_rank:
        return
    # Times of another machine: the load must lie inside what they cover.
    if score.load is not None and score.costs.fit is not None:
        _check_given_times(space, score.load)
        return
    # Times of this machine: rounds and contexts must fit the target, with the deepest draft on top.
    try:
        longest = context_length(space.target_settings)
    except MissingFileError:  # the stages say what they cannot do without it
        return
    if longest is not None:
        # What a measured tree will be is not known yet.
        known = [tree for tree in score.trees.values() if not isinstance(tree, MeasuredTree)] if trees else []
        deepest = max([*score.draft_tokens, *(tree.levels for tree in known)])
        if score.load is None:
            room_for_rounds(longest, deepest, score.costs.rounds)
        else:
            Grid.around(score.load, most_context(longest, deepest, score.costs.rounds))


def check_drafts(space: Workspace, foreign: Path | None = None) -> None:
    """Check before any work that drafts which exist already fit the target: those of merged trees, and a given one.

    The target is loaded for it, as scoring would load it.
    """
    score = space.recipe.score
    for name, tree in score.trees.items():
        for path in tree.places if isinstance(tree, MergedTree) else ():
            with named(f"score.trees.{name}"):
                StoredDraft.load(path, space.target, score.draft_device)
    if foreign is not None:
        draft = StoredDraft.load(foreign, space.target, score.draft_device, other_tokenizer=True)
        _check_servers(space, [draft.family])


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
    # The name goes to tables and file names: printable, short, and none of a baseline or of the recipe's drafts.
    name = "".join(character if character.isprintable() else "?" for character in path.resolve().name)[:64]
    shown = f"{name} (given)" if name in (LOOKUP, PLAIN, *stages.recipe.drafts) else name
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
    counter = CheckpointCounter(scorer, stage.folder / PARTS, space.ranks)
    if not space.first_rank:  # takes its share of what the first one finds to be counted, as long as there is any
        while counter.count([]):
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

    def answers_to_count() -> Work:
        missing = [one for one in entries if not counter.is_done(ScoringJob(one, entries[one], trees[one]))]
        return score_work(space, len(missing) * counter.answers)

    # 3) Replay and decode: what is not on disk, shared by all ranks; everything, or as a race.
    def count(checkpoints: Iterable[Checkpoint], block: int | None = None, rest: bool = False) -> None:
        jobs = [ScoringJob(one, entries[one], trees[one], block, rest) for one in checkpoints]
        missing = [job for job in jobs if not counter.is_done(job)]
        started = time.monotonic()
        if missing:
            counter.count(missing, (lambda share: None) if racing else reached)
        if missing and block is None:
            say(f"counted: {len(missing)} checkpoints in {time.monotonic() - started:.1f} s")

    racing = settings.race is not None and len(folders) > 1
    with estimated(space, "score", answers_to_count, stage.folder) as reached:
        if racing:
            results = _race(counter, list(folders), count, times)
        else:
            count(entries)
            results = {one: counter.result(one) for one in entries}
    counter.count([])  # the other ranks go on

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
    _show(scored, settings, by_config(configs, scored.chosen), record["contexts"])
    return scored


def score_work(space: Workspace, answers: int) -> Work:
    """Work of counting so many answers, summed over drafts."""
    kept = space.recipe.score.model_dump(mode="json", exclude={"costs", "load", "sampling"})
    how = conditions_of(space, space.target.device, space.recipe.target.model, kept)
    return Work(answers, "answers of drafts", how)


def _race(
    counter: CheckpointCounter,
    entrants: Sequence[Checkpoint],
    count: Callable[..., None],
    times: Mapping[Checkpoint, Times],
) -> dict[Checkpoint, ScoringResult]:
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


def _show(
    scored: Scored, settings: ScoreSettings, configs: Sequence[Row], contexts: Sequence[Mapping[str, Any]]
) -> None:
    """Show the final tables: all checkpoints, then the chosen one at each of its `configs`, at each batch size, and by
    domain and context length beside prompt lookup; last the advice."""
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
    show_contexts(contexts, "By context length")
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
