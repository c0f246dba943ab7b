"""Scores of every checkpoint, the times of every shape, and the draft that they choose."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pyarrow as pa

from .. import fingerprint, storage
from ..data.store import Capture, Sample
from ..errors import InputError, MissingFileError
from ..eval import counts
from ..eval.cost_measurement import Grid, cached_fit, measure_fit, most_context
from ..eval.cost_model import CostFit, fit_for, write_fits
from ..eval.costs import CostTable, cached_costs, cost_key, measure_costs
from ..eval.draft_configs import ProposerSpec
from ..eval.leaderboard import (
    PLAIN,
    Checkpoint,
    DomainRow,
    Row,
    Times,
    by_config,
    config_rows,
    domain_rows,
    leaderboard,
    plain_row,
)
from ..eval.report.page import score_record
from ..eval.score import Identity, measured_tree, perplexity, score_draft, stratified_conversations
from ..eval.serving_load import LoadTimes
from ..eval.settings import SELECTION_SPLIT, LoadSettings, ScoreSettings
from ..eval.summary import serving_advice
from ..eval.table import show_domains, show_leaderboard, show_load
from ..eval.target_pass_cache import TargetPassCache
from ..progress import say
from ..specdec.formats import meta_file
from ..specdec.formats.checkpoint import OWN_TARGET
from ..specdec.formats.layer_skip import is_skip_file
from ..specdec.proposers.training_free import LOOKUP
from ..specdec.proposers.trees import MeasuredTree, StaticTree, Tree, TreeSettings
from ..specdec.stored_draft import TOKENIZER_FILE, StoredDraft, file_digests, trained_for
from ..specdec.targets import context_length
from ..train.families import family_of
from .parallel_scoring import Board, Counting, help_count
from .stages import Stage, Stages, checkpoints_of
from .workspace import Workspace, require_whole

COUNTS_FILE, SCORES_FILE, TIMES_FILE = "counts.parquet", "scores.json", "times.json"
PARTS = "parts"
_MEASURED_CONVERSATIONS = 64  # whose answers shape a measured tree


@dataclass(frozen=True)
class Scored:
    """What the leaderboard is made of."""

    stage: Stage
    target: str
    """Fingerprint of the target that it was scored on."""
    counts: pa.Table
    times: dict[Checkpoint, Times]
    rows: list[Row]
    domains: list[DomainRow]
    """Every row's draft by domain and sampling setting."""
    advice: list[str]
    """What follows for serving, in sentences."""
    folders: dict[Checkpoint, Path]
    trees: dict[Checkpoint, dict[str, Tree]]
    """The trees that each checkpoint was scored with, by name, as it drafts them."""

    @property
    def chosen(self) -> Row:
        """The checkpoint and K or tree with the best expected speed-up."""
        found = next((row for row in self.rows if row.chosen), None)
        if found is None:
            raise InputError("score: no checkpoint has a known speed-up; score more conversations")
        return found

    @property
    def chosen_folder(self) -> Path:
        return self.folders[self.chosen.draft, self.chosen.step]

    @property
    def counts_file(self) -> Path:
        return self.stage.folder / COUNTS_FILE

    @property
    def times_file(self) -> Path:
        """Fitted times, where the recipe states a load."""
        return self.stage.folder / TIMES_FILE


class Scorer:
    """Scores drafts of one target on one split of one capture; target passes are shared by all of them."""

    def __init__(self, space: Workspace, captured: Stage, split: str) -> None:
        require_whole(space.recipe, "a score")
        self._space = space
        self._data = Capture.open(captured.folder, verify=False)
        self.settings: ScoreSettings = space.recipe.score
        self.samples: list[Sample] = self._data.samples(split)  # type: ignore[arg-type]
        self.traces = TargetPassCache(space.target, self.settings.trace_bytes, self.settings.replay_tokens)

    def load(self, folder: Path | None, other_tokenizer: bool = False) -> StoredDraft:
        """A stored draft, once it is seen to fit the target and what is scored; None: prompt lookup.

        `other_tokenizer`: accept a draft with another one than the target's.
        """
        if folder is None:
            return StoredDraft.of_method(LOOKUP, self._space.target)
        draft = StoredDraft.load(folder, self._space.target, self.settings.draft_device, other_tokenizer)
        draft.check_context(max((len(one.prompt_ids) + len(one.answer_ids) for one in self.samples), default=0))
        return draft

    def draftings(self, draft: StoredDraft, fixed: Mapping[str, Tree] | None = None) -> list[ProposerSpec]:
        """The ways of drafting that the recipe scores. `fixed`: trees of this draft that were measured before."""
        if not draft.drafts_trees:
            return [self.chains(draft)]
        known: Mapping[str, TreeSettings] = self.settings.trees if fixed is None else fixed
        return [self.chains(draft), *(self.tree_of(draft, name, tree) for name, tree in known.items())]

    def chains(self, draft: StoredDraft) -> ProposerSpec:
        """Chains of every K of the recipe."""
        return ProposerSpec(draft.proposer, tuple(self.settings.draft_tokens))

    def tree_of(self, draft: StoredDraft, name: str, tree: TreeSettings) -> ProposerSpec:
        """One tree of a draft; a measured one is measured here, on answers of the train split."""
        fixed = self._measured(draft, tree) if isinstance(tree, MeasuredTree) else tree
        return ProposerSpec(partial(draft.proposer, fixed), (fixed.levels,), name, fixed)

    def _measured(self, draft: StoredDraft, tree: MeasuredTree) -> StaticTree:
        samples = self._data.samples("train")
        kept = stratified_conversations(samples, _MEASURED_CONVERSATIONS)
        return measured_tree(
            self._space.target, draft.proposer(), [one for one in samples if one.conversation in kept], tree
        )

    def counts(
        self,
        draftings: Sequence[ProposerSpec],
        identity: Identity,
        samples: Sequence[Sample] | None = None,
        decoded: bool = True,
    ) -> tuple[pa.Table, bool | None]:
        """Counts of one draft, and whether decoding was seen to be lossless (None: nothing was decoded at T = 0).

        `samples`: a part of what is scored. `decoded` False: what replay tells is not decoded too.
        """
        settings, some = self.settings, self.samples if samples is None else samples
        if samples is not None:
            settings = settings.model_copy(update={"max_conversations": 0})
        if not decoded:
            settings = settings.model_copy(update={"decode_conversations": 0})
        score = score_draft(self._space.target, draftings, some, settings, identity, self.traces)
        return score.counts, score.consistency.lossless

    def perplexity(self, draft: StoredDraft) -> float | None:
        """Of the recorded answers under the draft; shown to people, used for nothing. None: prompt lookup has none, nor
        has a draft with another tokenizer."""
        if draft.module is None or not draft.same_tokenizer:
            return None
        chosen = stratified_conversations(self.samples, self.settings.decode_conversations or 1)
        samples = [sample for sample in self.samples if sample.conversation in chosen]
        return perplexity(draft.proposer(), samples, self.traces)

    def times(self, draft: StoredDraft, draftings: Sequence[ProposerSpec]) -> Times:
        """Times of this shape at the recipe's load, or at batch 1 where it states none."""
        if self.settings.load is None:
            return self.costs(draft, draftings)
        return LoadTimes(self._fit(draft, draftings), self.settings.load)

    def _fit(self, draft: StoredDraft, draftings: Sequence[ProposerSpec]) -> CostFit:
        """Fitted times of this shape: another machine's where the recipe gives some, else measured here, once."""
        settings, target = self.settings, self._space.target
        assert settings.load is not None
        key = cost_key(target, draft.module or draft.family, draftings, settings)
        if settings.costs.fit is not None:
            return fit_for(key, self._space.given_times, settings.costs.fit)
        deepest = max(depth for drafting in draftings for depth in drafting.depths)
        grid = Grid.of(settings.load, most_context(target.max_positions, deepest, settings.costs.rounds))
        prompts = [sample.prompt_ids for sample in self.samples]

        def measure() -> CostFit:
            return measure_fit(key, target, draftings, prompts, settings, grid)

        return cached_fit(self._space.root / "costs", key, grid, measure, settings.costs.wait_seconds)

    def costs(self, draft: StoredDraft, draftings: Sequence[ProposerSpec]) -> CostTable:
        """Times of this shape at batch 1 on this machine, measured once."""
        settings, target = self.settings, self._space.target
        key = cost_key(target, draft.module or draft.family, draftings, settings)
        prompts = [sample.prompt_ids for sample in self.samples]

        def measure() -> CostTable:
            return measure_costs(key, target, draftings, prompts, settings)

        return cached_costs(self._space.root / "costs", key, measure, settings.costs.wait_seconds)


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
    """Raise an error that names score.load or score.costs.fit where the load does not fit the target's context or the
    given times, or these cannot be read."""
    score = space.recipe.score
    if score.load is None or not space.first_rank:
        return
    if score.costs.fit is not None:
        _check_given_times(space, score.load)
        return
    try:
        longest = context_length(space.target_settings)
    except MissingFileError:  # the stages say what they cannot do without it
        return
    if longest is not None:
        # What a measured tree will be is not known yet.
        known = [tree for tree in score.trees.values() if not isinstance(tree, MeasuredTree)] if trees else []
        deepest = max([*score.draft_tokens, *(tree.levels for tree in known)])
        Grid.of(score.load, most_context(longest, deepest, score.costs.rounds))


def _check_given_times(space: Workspace, load: LoadSettings) -> None:
    """Raise InputError where no shape's times hold at the load."""
    failed: list[InputError] = []
    for fit in space.given_times:
        try:
            LoadTimes(fit, load)
        except InputError as error:
            failed.append(error)
    if len(failed) == len(space.given_times):
        raise failed[0]


def score_stage(stages: Stages, drafts: Collection[str]) -> Scored:
    """Score every checkpoint of these drafts on the selection split, prompt lookup beside them; choose, and show it."""
    trained = {name: stages.training(name) for name in drafts}
    folders = {(name, step): path for name, done in trained.items() for step, path in checkpoints_of(done).items()}
    return _score(stages, folders, _fingerprints(stages, drafts))


def help_score(stages: Stages, drafts: Collection[str]) -> None:
    """`score_stage` of a rank that is not the first: it counts checkpoints as long as there are any to count."""
    _help(stages, _fingerprints(stages, drafts))


def _fingerprints(stages: Stages, drafts: Collection[str]) -> dict[str, str]:
    return {name: stages.training(name).fingerprint for name in drafts}


def score_foreign(stages: Stages, place: Path) -> Scored:
    """Score a draft of anybody's making, as it is, on the selection split, and show it. Nothing is registered.

    `place`: a folder in any layout, a .gguf file, or a .json file of skipped layers.
    """
    if not (meta_file(place).is_file() or (place / TOKENIZER_FILE).is_file() or is_skip_file(place)):
        say(f"{place}: nothing says which tokenizer it was trained with; only sizes are checked")
    return _score(stages, {(_name_of(place), 0): place}, file_digests(place))


def help_score_foreign(stages: Stages, place: Path) -> None:
    """`score_foreign` of a rank that is not the first."""
    _help(stages, file_digests(place))


def _name_of(place: Path) -> str:
    """Its name, as a table and a file name take it."""
    name = "".join(one if one.isprintable() else "?" for one in place.resolve().name)[:64]
    return f"{name} (given)" if name in (LOOKUP, PLAIN) else name


def _score(stages: Stages, folders: dict[Checkpoint, Path], drafts: dict[str, str]) -> Scored:
    """Score each draft folder, prompt lookup beside them, and show it. `drafts`: digests of what is scored."""
    space, settings, captured = stages.space, stages.recipe.score, stages.captured
    stage = stages.score(drafts)
    scorer, everything = Scorer(space, captured, SELECTION_SPLIT), {(LOOKUP, 0): None, **folders}
    board = Board(scorer, stage.folder / PARTS, everything, space.crew, stage.folder.name)
    with board.helped():
        parts = board.raced(settings.race) if settings.race is not None and len(folders) > 1 else board.all()
    tables = [part.table for part in parts.values()]
    table = counts.concat(tables)
    counts.write(table, stage.folder / COUNTS_FILE)
    perplexities = {one: part.perplexity for one, part in parts.items() if part.perplexity is not None}
    shares = {one: part.share for one, part in parts.items()}
    made_for = {one: trained_for(folder, space.target_fingerprint) for one, folder in folders.items()}
    plans = config_rows(tables, board.times, settings, [LOOKUP])
    rows = [
        replace(row, trained_for=made_for.get((row.draft, row.step), ""))
        for row in leaderboard(tables, board.times, settings, [LOOKUP], perplexities, shares, plans)
    ]
    domains = domain_rows(tables, rows, settings, board.times)
    said = serving_advice(rows, domains, settings)
    target = space.target_fingerprint
    scored = Scored(stage, target, table, board.times, rows, domains, said, folders, board.trees)
    fits = {times.fit.key.digest: times.fit for times in board.times.values() if isinstance(times, LoadTimes)}
    if fits:
        write_fits(scored.times_file, fits.values())
    origin = {"at": time.time(), "target": target, "capture": captured.fingerprint, "advice": said}
    record = score_record(table, board.times, rows, settings, plans, domains)
    storage.write_json(stage.folder / SCORES_FILE, origin | record)
    _show(scored, settings, by_config(plans, scored.chosen))
    return scored


def _help(stages: Stages, drafts: dict[str, str]) -> None:
    space, captured, folder = stages.space, stages.captured, stages.score(drafts).folder
    help_count(space.crew, folder.name, lambda: Counting(Scorer(space, captured, SELECTION_SPLIT), folder / PARTS))


def _show(scored: Scored, settings: ScoreSettings, plans: Sequence[Row]) -> None:
    """The final tables: all checkpoints, then the chosen one (at each of its `plans`) by domain beside prompt lookup;
    and what follows."""
    chosen = scored.chosen
    times = scored.times[chosen.draft, chosen.step]
    rows = [plain_row(times), *scored.rows]
    show_leaderboard(rows, settings.confidence, "Drafts by expected serving speed", times.description)
    if len(plans) > 1:
        every = "K and tree" if settings.trees else "K"
        show_leaderboard(
            plans, settings.confidence, f"{chosen.draft} step {chosen.step} at every {every}", times.description
        )
    show_load(chosen, f"{chosen.draft} step {chosen.step} at each batch size")
    compared = {(row.draft, row.step) for row in scored.rows if row.baseline or row is chosen}
    shown = [row for row in scored.domains if (row.draft, row.step) in compared]
    show_domains(shown, settings.confidence, "By domain")
    here = fingerprint.short(scored.target)
    for row in scored.rows:
        if row.trained_for:
            say(
                f"{row.draft} step {row.step}: was made for target {row.trained_for} and is scored on {here}, another "
                "model or another form of it (quantised, an adapter): its figures are of this one"
            )
    for line in scored.advice:
        say(line)
