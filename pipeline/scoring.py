"""Scores of every checkpoint, the times of every shape, and the draft that they choose."""

import math
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from .. import fingerprint, storage
from ..data.store import Capture, Sample
from ..errors import CorruptDataError, InputError, MissingFileError
from ..eval import counts
from ..eval.costs import CostTable, cached_costs, cost_key, measure_costs
from ..eval.perplexity import perplexity
from ..eval.score import Identity, TraceCache, score_draft, spread
from ..eval.select import Row, domain_rows, leaderboard, plain_row
from ..eval.settings import SELECTION_SPLIT, ScoreSettings
from ..eval.table import show_domains, show_leaderboard
from ..progress import say
from ..specdec.drafts import AnyDraft
from ..specdec.formats import load_draft
from ..specdec.proposers import Proposer, make_proposer
from ..specdec.proposers.lookup import PromptLookup
from .stages import Stage, checkpoints_of
from .workspace import Workspace

LOOKUP = "lookup"
COUNTS_FILE = "counts.parquet"


@dataclass(frozen=True)
class Scored:
    """What the leaderboard is made of."""

    stage: Stage
    counts: pa.Table
    costs: dict[str, CostTable]
    rows: list[Row]
    folders: dict[tuple[str, int], Path]

    @property
    def chosen(self) -> Row:
        """The checkpoint and K with the best expected speed-up."""
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
        self.settings: ScoreSettings = space.recipe.score
        self.samples: list[Sample] = Capture.open(captured.folder, verify=False).samples(split)  # type: ignore[arg-type]
        self.traces = TraceCache(space.target, self.settings.trace_bytes)

    def proposer(self, folder: Path) -> tuple[Proposer, AnyDraft]:
        """A stored draft, ready to draft for the target."""
        target = self._space.target
        draft, meta = load_draft(folder, target.device, target.dtype)
        if meta.tokenizer_digest != target.tokenizer_digest:
            raise InputError(f"{folder}: drafts with another tokenizer than the target's")
        return make_proposer(draft, target), draft

    def counts(self, proposer: Proposer, identity: Identity) -> tuple[pa.Table, bool | None]:
        """Counts of one draft, and whether decoding was seen to be lossless (None: nothing was decoded at T = 0)."""
        score = score_draft(self._space.target, proposer, self.samples, self.settings, identity, self.traces)
        return score.counts, score.consistency.lossless

    def perplexity(self, proposer: Proposer) -> float:
        """Of the recorded answers under the draft; shown to people, used for nothing."""
        chosen = spread(self.samples, self.settings.decode_conversations or 1)
        samples = [sample for sample in self.samples if sample.conversation in chosen]
        return perplexity(proposer, samples, self.traces)

    def costs(self, draft: AnyDraft | None) -> CostTable:
        """Times of this shape (None: prompt lookup) on this machine, measured once."""
        settings, target = self.settings, self._space.target
        sampling = settings.sampling[0]
        rule = "greedy" if sampling.greedy else settings.serving_rule
        if draft is None and not sampling.greedy:
            rule = "onehot"
        key = cost_key(target, LOOKUP if draft is None else draft, settings.draft_tokens, sampling, rule)
        prompts = [sample.prompt_ids for sample in self.samples]

        def proposer() -> Proposer:
            return PromptLookup() if draft is None else make_proposer(draft, target)

        def measure() -> CostTable:
            return measure_costs(key, target, proposer, prompts, sampling, settings.costs)

        return cached_costs(self._space.root / "costs", key, measure, settings.costs.wait_seconds)


def score_stage(space: Workspace, captured: Stage, trained: dict[str, Stage]) -> Scored:
    """Score every checkpoint of every draft on the selection split, prompt lookup beside them; choose, and show it."""
    inputs = [
        captured.fingerprint,
        {name: stage.fingerprint for name, stage in trained.items()},
        space.recipe.score.model_dump(mode="json", exclude={"costs", "batch_size"}),
    ]
    found = fingerprint.of_json(["score", inputs])
    stage = Stage(space.folder("score", found), found)
    folders = {(name, step): path for name, done in trained.items() for step, path in checkpoints_of(done).items()}
    scorer = Scorer(space, captured, SELECTION_SPLIT)
    tables: list[pa.Table] = []
    costs: dict[str, CostTable] = {}
    perplexities: dict[tuple[str, int], float] = {}
    for (name, step), folder in {(LOOKUP, 0): None, **folders}.items():
        part = stage.folder / "parts" / f"{name}-{step:06d}"  # a name may hold dots: no with_suffix
        notes_file, counts_file = (part.with_name(f"{part.name}.{kind}") for kind in ("json", "parquet"))
        known = _stored(counts_file, notes_file)
        if known is None or name not in costs:
            proposer, draft = (PromptLookup(), None) if folder is None else scorer.proposer(folder)
            if name not in costs:
                costs[name] = scorer.costs(draft)
            if known is None:
                table, lossless = scorer.counts(proposer, Identity(name, step))
                seen = None if folder is None else scorer.perplexity(proposer)
                counts.write(table, counts_file)
                storage.write_json(notes_file, {"lossless": lossless, "perplexity": seen})
                known = counts.read(counts_file), seen  # as it will be read next time: the digest is of what it makes
        tables.append(known[0])
        if known[1] is not None:
            perplexities[name, step] = known[1]
    table = counts.concat(tables)
    counts.write(table, stage.folder / COUNTS_FILE)
    rows = leaderboard(tables, costs, space.recipe.score, [LOOKUP], perplexities)
    scored = Scored(stage, table, costs, rows, folders)
    _show(scored, space.recipe.score)
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
        [plain_row(scored.costs[chosen.draft]), *scored.rows], settings.confidence, "Drafts by expected serving speed"
    )
    compared = [row for row in scored.rows if row.baseline or row is chosen]
    show_domains(domain_rows([scored.counts], compared, settings), settings.confidence, "By domain")
    if chosen.speedup.value < 1:
        say(
            f"speculation loses here: {chosen.draft} needs tau {chosen.break_even_tau:.2f} at K={chosen.draft_tokens} "
            f"to break even on this machine and reaches {chosen.tau.value:.2f}"
        )
