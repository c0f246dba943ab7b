"""Scores of every checkpoint, the times of every shape, and the draft that they choose."""

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
import torch

from .. import fingerprint, storage
from ..data.store import Capture, Sample
from ..errors import CorruptDataError, InputError, MissingFileError
from ..eval import counts
from ..eval.costs import CostTable, cached_costs, cost_key, measure_costs
from ..eval.measured import measured_tree
from ..eval.perplexity import perplexity
from ..eval.plans import Drafting
from ..eval.report.record import score_record
from ..eval.score import Identity, score_draft, spread
from ..eval.select import PLAIN, Checkpoint, Row, by_plan, domain_rows, leaderboard, plain_row
from ..eval.settings import SELECTION_SPLIT, ScoreSettings
from ..eval.table import show_domains, show_leaderboard
from ..eval.traces import TraceCache
from ..progress import say
from ..recipe import Recipe
from ..specdec.drafts import AnyDraft
from ..specdec.drafts.small import SmallDraft
from ..specdec.foreign import ForeignDraft
from ..specdec.formats import check_context, check_fits, detect, load_draft, meta_file, read_draft, read_meta
from ..specdec.formats.checkpoint import ORIGINAL_TARGET, OWN_TARGET
from ..specdec.formats.skipped import is_skip_file, read_skipped
from ..specdec.fused import can_fuse, fuse
from ..specdec.loading import load_tokenizer
from ..specdec.proposers import Proposer, make_proposer
from ..specdec.proposers.elsewhere import Place, place_of
from ..specdec.proposers.free import LOOKUP
from ..specdec.proposers.lookup import PromptLookup
from ..specdec.proposers.trees import MeasuredTree, StaticTree, Tree, TreeSettings
from ..specdec.targets import Target, tokenizer_digest
from ..specdec.targets import place as target_place
from ..train.families import family_of
from .stages import Stage, checkpoints_of
from .workspace import Workspace

COUNTS_FILE, SCORES_FILE = "counts.parquet", "scores.json"
TOKENIZER_FILE = "tokenizer.json"
_MEASURED_CONVERSATIONS = 64  # whose answers shape a measured tree


@dataclass(frozen=True)
class Scored:
    """What the leaderboard is made of."""

    stage: Stage
    counts: pa.Table
    costs: dict[Checkpoint, CostTable]
    rows: list[Row]
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


class Scorer:
    """Scores drafts of one target on one split of one capture; target passes are shared by all of them."""

    def __init__(self, space: Workspace, captured: Stage, split: str) -> None:
        self._space = space
        self._data = Capture.open(captured.folder, verify=False)
        self.settings: ScoreSettings = space.recipe.score
        self.samples: list[Sample] = self._data.samples(split)  # type: ignore[arg-type]
        self.traces = TraceCache(space.target, self.settings.trace_bytes, self.settings.replay_tokens)

    def load(self, folder: Path) -> AnyDraft:
        """A stored draft, once it is seen to fit the target and what is scored."""
        draft = draft_for(self._space.target, folder, self.settings.draft_device)
        self._check_context(draft, folder)
        return draft

    def load_any(self, folder: Path) -> AnyDraft | ForeignDraft:
        """The same, of whatever tokenizer it is. A foreign one reads the ends of texts that are too long for it."""
        draft = any_draft_for(self._space.target, folder, self.settings.draft_device)
        if not isinstance(draft, ForeignDraft):
            self._check_context(draft, folder)
        return draft

    def _check_context(self, draft: AnyDraft, folder: Path) -> None:
        longest = max((len(one.prompt_ids) + len(one.answer_ids) for one in self.samples), default=0)
        check_context(draft, longest, folder)

    def proposer(self, draft: AnyDraft) -> Proposer:
        """The proposer of its chains."""
        return make_proposer(draft, self._space.target)

    def draftings(self, draft: AnyDraft | ForeignDraft | None) -> list[Drafting]:
        """The ways of drafting that the recipe scores (None: prompt lookup, which drafts chains only, as foreign drafts
        do)."""
        if draft is None or isinstance(draft, ForeignDraft):
            return [self.chains(draft)]
        trees = (self.tree_of(draft, name, tree) for name, tree in self.settings.trees.items())
        return [self.chains(draft), *trees]

    def chains(self, draft: AnyDraft | ForeignDraft | None) -> Drafting:
        """Chains of every K of the recipe (None: prompt lookup's)."""
        make = PromptLookup if draft is None else partial(make_proposer, draft, self._space.target)
        return Drafting(make, tuple(self.settings.draft_tokens))

    def tree_of(self, draft: AnyDraft, name: str, tree: TreeSettings) -> Drafting:
        """One tree of a draft; a measured one is measured here, on answers of the train split."""
        fixed = self._measured(draft, tree) if isinstance(tree, MeasuredTree) else tree
        make = partial(make_proposer, draft, self._space.target, fixed)
        return Drafting(make, (fixed.levels,), name, fixed)

    def _measured(self, draft: AnyDraft, tree: MeasuredTree) -> StaticTree:
        samples = self._data.samples("train")
        kept = spread(samples, _MEASURED_CONVERSATIONS)
        return measured_tree(
            self._space.target, self.proposer(draft), [one for one in samples if one.conversation in kept], tree
        )

    def counts(self, draftings: Sequence[Drafting], identity: Identity) -> tuple[pa.Table, bool | None]:
        """Counts of one draft, and whether decoding was seen to be lossless (None: nothing was decoded at T = 0)."""
        score = score_draft(self._space.target, draftings, self.samples, self.settings, identity, self.traces)
        return score.counts, score.consistency.lossless

    def perplexity(self, draft: AnyDraft | ForeignDraft) -> float | None:
        """Of the recorded answers under the draft; shown to people, used for nothing. A foreign one has none."""
        if isinstance(draft, ForeignDraft):
            return None
        chosen = spread(self.samples, self.settings.decode_conversations or 1)
        samples = [sample for sample in self.samples if sample.conversation in chosen]
        return perplexity(self.proposer(draft), samples, self.traces)

    def costs(self, draft: AnyDraft | ForeignDraft | None, draftings: Sequence[Drafting]) -> CostTable:
        """Times of this shape (None: prompt lookup) on this machine, measured once."""
        settings, target = self.settings, self._space.target
        key = cost_key(target, LOOKUP if draft is None else draft, draftings, settings)
        prompts = [sample.prompt_ids for sample in self.samples]

        def measure() -> CostTable:
            return measure_costs(key, target, draftings, prompts, settings)

        return cached_costs(self._space.root / "costs", key, measure, settings.costs.wait_seconds)


def check_targets(recipe: Recipe, names: Collection[str]) -> None:
    """Refuse drafts whose training changes the target: their verifier, its answers and its registered model are not
    this recipe's."""
    for name, settings in recipe.drafts.items():
        if name in names and family_of(settings).changes_target(settings):
            raise InputError(
                f"drafts.{name}: its training makes a new target, which this recipe neither scores nor registers; "
                f"`draftforge train` it, then distill a recipe with target.model=<checkpoint>/{OWN_TARGET}, "
                f"drafts.{name}.init_from=<checkpoint> and no backbone"
            )


def draft_for(target: Target, place: Path, device: str | None = None) -> AnyDraft:
    """A draft in any layout, on its device (None: the target's, in its precision), once it is seen to fit the target.

    Raises InputError, FormatError or StaleInputError where it does not.
    """
    there = _draft_place(target, device)
    if is_skip_file(place):
        if there != place_of(target):
            raise InputError(
                f"score.draft_device {device}: {place} drafts with the target's own layers, which stay there"
            )
        return read_skipped(place, target)
    if meta_file(place).is_file():
        draft, meta = load_draft(place, *there)
        if meta.tokenizer_digest != target.tokenizer_digest:
            raise InputError(f"{place}: drafts with another tokenizer than the target's")
        if ORIGINAL_TARGET in meta.extra and meta.target_fingerprint != target.fingerprint:
            raise InputError(
                f"{place}: was trained together with target {fingerprint.short(meta.target_fingerprint)} and drafts "
                f"for no other; set target.model={place / OWN_TARGET}"
            )
    else:
        draft = read_draft(place, target.num_layers).to(*there).eval()
        if (place / TOKENIZER_FILE).is_file():
            digest = tokenizer_digest(load_tokenizer(place, str(place), trust_remote_code=False))
            if digest != target.tokenizer_digest:
                raise InputError(f"{place}: its {TOKENIZER_FILE} is not the target's: drafts with another tokenizer")
    check_fits(draft, target, place)
    if can_fuse(there.device):
        fuse(draft)
    return draft


def any_draft_for(target: Target, place: Path, device: str | None = None) -> AnyDraft | ForeignDraft:
    """As `draft_for`; but a model folder whose own tokenizer is not the target's is taken as a foreign draft."""
    ours = meta_file(place).is_file() and read_meta(place).tokenizer_digest == target.tokenizer_digest
    if ours or not (place / TOKENIZER_FILE).is_file() or detect(place) != "hf":
        return draft_for(target, place, device)
    theirs = load_tokenizer(place, str(place), trust_remote_code=False)
    if tokenizer_digest(theirs) == target.tokenizer_digest:
        return draft_for(target, place, device)
    small = read_draft(place).to(*_draft_place(target, device)).eval()
    assert isinstance(small, SmallDraft)
    say(f"{place}: has another tokenizer than the target's; what it drafts goes over as text")
    return ForeignDraft.of(small, theirs, target.tokenizer, target.vocab_size)


def _draft_place(target: Target, device: str | None) -> Place:
    """A device that the recipe names, and the precision there: between a GPU and a CPU, the usual one of each."""
    here = place_of(target)
    if device is None:
        return here
    found, usual = target_place(device, "auto", "score.draft_device")
    found = torch.empty(0, device=found).device  # with its number: cuda alone is the current one
    if found == here.device:
        return here
    return Place(found, usual if "cpu" in (found.type, here.device.type) else here.dtype)


def score_stage(space: Workspace, captured: Stage, trained: dict[str, Stage]) -> Scored:
    """Score every checkpoint of every draft on the selection split, prompt lookup beside them; choose, and show it."""
    check_targets(space.recipe, trained)
    folders = {(name, step): path for name, done in trained.items() for step, path in checkpoints_of(done).items()}
    return _score(space, captured, folders, {name: stage.fingerprint for name, stage in trained.items()})


def score_foreign(space: Workspace, captured: Stage, place: Path) -> Scored:
    """Score a draft of anybody's making, as it is, on the selection split, and show it. Nothing is registered.

    `place`: a folder in any layout, a .gguf file, or a .json file of skipped layers.
    """
    if not (meta_file(place).is_file() or (place / TOKENIZER_FILE).is_file() or is_skip_file(place)):
        say(f"{place}: nothing says which tokenizer it was trained with; only sizes are checked")
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    digests = {path.name: fingerprint.of_file(path) for path in files if path.is_file()}
    return _score(space, captured, {(_name_of(place), 0): place}, digests)


def score_place(space: Workspace, captured: Stage, drafts: dict[str, str]) -> Stage:
    """Where the score of these drafts lies, or will. `drafts`: digests of what is scored."""
    neutral = {"costs", "batch_size", "replay_tokens"}
    inputs = [captured.fingerprint, drafts, space.recipe.score.model_dump(mode="json", exclude=neutral)]
    found = fingerprint.of_json(["score", inputs])
    return Stage(space.folder("score", found), found)


def _name_of(place: Path) -> str:
    """Its name, as a table and a file name take it."""
    name = "".join(one if one.isprintable() else "?" for one in place.resolve().name)[:64]
    return f"{name} (given)" if name in (LOOKUP, PLAIN) else name


def _score(space: Workspace, captured: Stage, folders: dict[Checkpoint, Path], drafts: dict[str, str]) -> Scored:
    """Score each draft folder, prompt lookup beside them, and show it. `drafts`: digests of what is scored."""
    settings = space.recipe.score
    stage = score_place(space, captured, drafts)
    scorer = Scorer(space, captured, SELECTION_SPLIT)
    tables: list[pa.Table] = []
    costs: dict[Checkpoint, CostTable] = {}
    trees: dict[Checkpoint, dict[str, Tree]] = {}
    shapes: dict[str, tuple[CostTable, dict[str, Tree]]] = {}  # times and trees that a draft's checkpoints share
    perplexities: dict[Checkpoint, float] = {}
    for (name, step), folder in {(LOOKUP, 0): None, **folders}.items():
        part = stage.folder / "parts" / f"{name}-{step:06d}"  # a name may hold dots: no with_suffix
        notes_file, counts_file = (part.with_name(f"{part.name}.{kind}") for kind in ("json", "parquet"))
        known = _stored(counts_file, notes_file)
        if known is None or name not in shapes or settings.trees_vary:
            draft = None if folder is None else scorer.load_any(folder)
            draftings = scorer.draftings(draft)
            fixed = {one.tree: one.fixed for one in draftings if one.fixed is not None}
            shapes[name] = scorer.costs(draft, draftings), fixed
            if known is None:
                table, lossless = scorer.counts(draftings, Identity(name, step))
                seen = None if draft is None else scorer.perplexity(draft)
                counts.write(table, counts_file)
                storage.write_json(notes_file, {"lossless": lossless, "perplexity": seen})
                known = counts.read(counts_file), seen  # as it will be read next time: the digest is of what it makes
        costs[name, step], trees[name, step] = shapes[name]
        tables.append(known[0])
        if known[1] is not None:
            perplexities[name, step] = known[1]
    table = counts.concat(tables)
    counts.write(table, stage.folder / COUNTS_FILE)
    rows = leaderboard(tables, costs, settings, [LOOKUP], perplexities)
    origin = {"at": time.time(), "target": space.target_fingerprint, "capture": captured.fingerprint}
    storage.write_json(stage.folder / SCORES_FILE, origin | score_record(table, costs, rows, settings))
    scored = Scored(stage, table, costs, rows, folders, trees)
    _show(scored, settings)
    return scored


def _stored(counts_file: Path, notes_file: Path) -> tuple[pa.Table, float | None] | None:
    """Counts and perplexity of an earlier call; None where there are none, or (said aloud) damaged ones."""
    try:
        return counts.read(counts_file), _perplexity(notes_file)
    except MissingFileError:
        return None
    except CorruptDataError as error:
        say(f"{error}; scoring it again")
        return None


def _perplexity(notes_file: Path) -> float | None:
    notes = storage.read_object(notes_file)
    if "perplexity" not in notes:
        raise CorruptDataError(f"{notes_file}: perplexity: is missing")
    value = notes["perplexity"]
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CorruptDataError(f"{notes_file}: perplexity: {value!r}: must be a number above 0, or null")
    return float(value)


def _show(scored: Scored, settings: ScoreSettings) -> None:
    """The final tables: all checkpoints, then the chosen one by domain beside prompt lookup."""
    chosen = scored.chosen
    show_leaderboard(
        [plain_row(scored.costs[chosen.draft, chosen.step]), *scored.rows],
        settings.confidence,
        "Drafts by expected serving speed",
    )
    plans = by_plan([scored.counts], scored.costs[chosen.draft, chosen.step], chosen, settings)
    if len(plans) > 1:
        every = "K and tree" if settings.trees else "K"
        show_leaderboard(plans, settings.confidence, f"{chosen.draft} step {chosen.step} at every {every}")
    compared = [row for row in scored.rows if row.baseline or row is chosen]
    show_domains(domain_rows([scored.counts], compared, settings), settings.confidence, "By domain")
    if chosen.speedup.value < 1:
        say(
            f"speculation loses here: {chosen.draft} needs tau {chosen.break_even_tau:.2f} at {chosen.plan} to break "
            f"even on this machine and reaches {chosen.tau.value:.2f}"
        )
