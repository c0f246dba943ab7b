"""Parallel scoring: counting shared among ranks, and the race that drops checkpoints that cannot win.

The unit of work is a checkpoint or, in a race, a block of one; each rank counts its share of the passes over answers.
"""

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pydantic import TypeAdapter

from .. import storage
from ..data.store import Sample
from ..distributed import Ranks
from ..errors import CorruptDataError, MissingFileError
from ..eval import counts
from ..eval.counts import Method
from ..eval.draft_configs import DraftConfig, ProposerSpec
from ..eval.leaderboard import Checkpoint, Times, serving
from ..eval.score import Identity, is_checked, scored_samples, stratified_conversations
from ..eval.settings import ScoreSettings
from ..eval.successive_elimination import Arm, Race, cut_into_blocks, elimination_order
from ..progress import say
from ..specdec.proposers.tree_settings import Tree
from ..specdec.stored_draft import StoredDraft
from .draft_scorer import Scorer

_ROW_ORDER = ("method", "tree", "draft_tokens", "rule", "setting", "conversation", "turn")
_DECODED_COST = 20  # a token that is decoded takes about as long as so many that are replayed
_GRAPHS_COST = {"cuda": 60_000}  # likewise, what comes before it: under a second on an H200
_TREES: TypeAdapter[dict[str, Tree]] = TypeAdapter(dict[str, Tree])


class ScoringJob(NamedTuple):
    """Job of counting one checkpoint, whole or in part."""

    checkpoint: Checkpoint
    folder: Path | None
    """Folder of the draft; None: prompt lookup."""
    trees: Mapping[str, Tree]
    """Draft trees by name, in the shape that was timed."""
    block: int | None = None
    """Number of a race's block, from 0: only its conversations are counted; None: all."""
    rest: bool = False
    """Whether to count only what the blocks of a race lack: the decoding that checks a finalist."""

    def record(self) -> dict[str, Any]:
        """JSON-able form, for the broadcast to other ranks."""
        trees = _TREES.dump_python(dict(self.trees), mode="json")
        return self._asdict() | {"folder": self.folder and str(self.folder), "trees": trees}

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> "ScoringJob":
        """Inverse of `record`."""
        (name, step), folder = record["checkpoint"], record["folder"]
        trees = _TREES.validate_python(record["trees"])
        return cls((name, step), folder and Path(folder), trees, record["block"], record["rest"])


class ScoringResult(NamedTuple):
    """Acceptance counts and perplexity of one checkpoint."""

    table: pa.Table
    perplexity: float | None
    share: float = 1.0
    """Share of the answers' tokens that were counted; below 1: dropped from a race."""


class _Share(NamedTuple):
    """One rank's share of a job, and the files that it leaves."""

    passes: list[int]
    """Which passes over the samples it replays; the number behind the last one: all that is decoded."""
    table: Path
    notes: Path
    """The passes, whether decoding was lossless, and the perplexity."""

    def is_counted(self) -> bool:
        """Whether both files are there, undamaged, and of these passes."""
        try:
            counts.read(self.table)
            return bool(storage.read_object(self.notes).get("passes") == self.passes)
        except (MissingFileError, CorruptDataError):
            return False


class CheckpointCounter:
    """Counter of acceptance for checkpoints, shared among ranks. Its folder keeps the counts: nothing is counted twice.

    Ranks share the passes over the recorded answers that one rank would make, and what is decoded of a checkpoint is
    decoded by one of them. So counts are the same to the bit on any number of ranks, and hardly a pass of the target is
    made by two. A rank leaves the counts of its share in a file, and the first one joins them.
    """

    def __init__(self, scorer: Scorer, folder: Path, ranks: Ranks) -> None:
        self.settings = scorer.settings
        self._scorer, self._folder, self._ranks = scorer, folder, ranks
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

    @property
    def answers(self) -> int:
        """Answers that each checkpoint is counted on."""
        return len(self._samples)

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
            self._loaded = checkpoint, draft, self._scorer.specs(draft, checkpoint[0], trees)
        return self._loaded[1:]

    def count(self, jobs: Sequence[ScoringJob], reached: Callable[[float], None] = lambda share: None) -> bool:
        """Count the first rank's `jobs`, all of one block or all of none; whether there were any.

        All ranks call this together. `reached` is told which share of this rank's part is done.
        """
        # 1) Only the first rank knows what is missing; no jobs at all tells the others that scoring is over.
        records = self._ranks.broadcast("checkpoints to count", [job.record() for job in jobs])
        if not records:
            return False
        jobs = [ScoringJob.read(record) for record in records]
        # 2) What each rank counts of each job, and this rank's part of it.
        samples, checked = self._samples_of(jobs[0])
        packs = [] if jobs[0].rest else self._scorer.traces.packs(samples)
        costs = [sum(map(_tokens, (samples[index] for index in pack))) for pack in packs]
        decoding = sum(_DECODED_COST * _tokens(sample) for sample in samples if is_checked(sample, checked))
        decoding += _GRAPHS_COST.get(self._scorer.device.type, 0) if decoding else 0
        shares = self._shares(jobs, [*costs, max(1, decoding)])
        for done, (job, parts) in enumerate(zip(jobs, shares, strict=True), start=1):
            mine = parts[self._ranks.rank]
            if not mine.is_counted():  # a stopped run's are taken over
                self._count_share(job, mine, samples, packs, checked)
            reached(done / len(jobs))
        # 3) The first rank joins what it sees of all ranks; the others need none of it.
        self._ranks.barrier("counts of checkpoints")
        if self._ranks.first:
            every = [share for parts in shares for share in parts]
            self._ranks.wait_for_file(lambda: all(share.is_counted() for share in every), "counts of checkpoints")
            for job, parts in zip(jobs, shares, strict=True):
                self._join(job, parts)
        return True

    def _samples_of(self, job: ScoringJob) -> tuple[list[Sample], set[str]]:
        """Samples that a job counts, and the conversations whose decoding checks their replays."""
        # A block of a race: replays alone, unless only decoding tells. The rest of a finalist: the decoding.
        if job.block is not None:
            members = set(self.blocks[job.block])
            return [sample for sample in self._samples if sample.cluster in members], set()
        checked = stratified_conversations(self._samples, self.settings.decode_conversations)
        return [sample for sample in self._samples if not job.rest or sample.conversation in checked], checked

    def _shares(self, jobs: Sequence[ScoringJob], costs: Sequence[int]) -> list[list[_Share]]:
        """Shares of each job, by rank, of about equal cost over all jobs. `costs`: of each pass."""
        # 1) Cut all passes of all jobs, pass by pass: a rank has a pass for all jobs, but for those at the cuts.
        world, total, reached = self._ranks.world_size, 2 * sum(costs) * len(jobs), 0
        passes: list[list[list[int]]] = [[[] for _ in range(world)] for _ in jobs]
        for number, cost in enumerate(costs):
            for job in passes:
                job[(2 * reached + cost) * world // total].append(number)
                reached += cost
        # 2) Where each is left.
        shares = []
        for one, ranks in zip(jobs, passes, strict=True):
            block = "" if one.block is None else f"block-{one.block + 1}-of-{len(self.blocks)}."
            folder = self._file(one.checkpoint, f"{block}shares")
            names = [f"{rank + 1}-of-{world}" for rank in range(world)]
            shares.append(
                [_Share(mine, folder / f"{name}.parquet", folder / f"{name}.json") for mine, name in zip(ranks, names)]
            )
        return shares

    def _count_share(
        self, job: ScoringJob, share: _Share, samples: list[Sample], packs: list[list[int]], checked: set[str]
    ) -> None:
        """Count this rank's passes of a job, and leave a table and notes."""
        # 1) Everything; or replays of whole packs, packed alike whichever others there are, and the decoding.
        replayed = sorted(index for number in share.passes if number < len(packs) for index in packs[number])
        parts: list[tuple[list[Sample], set[str], Method | None]] = [(samples, checked, None)]
        if len(share.passes) <= len(packs):
            parts = [([samples[index] for index in replayed], set(), "replay")]
            parts += [(samples, checked, "decode")] if len(packs) in share.passes else []
        # 2) Count them. The first rank takes the perplexity too, which is for people only.
        tables, notes = list[pa.Table](), dict[str, Any](passes=share.passes, lossless=None, perplexity=None)
        if share.passes or self._ranks.first:
            draft, specs = self.load(job.checkpoint, job.folder, job.trees)
            for some, checks, only in parts:
                if some:
                    table, lossless = self._scorer.counts(specs, Identity(*job.checkpoint), some, checks, only)
                    tables.append(table)
                    notes |= {} if only == "replay" else {"lossless": lossless}
            if self._ranks.first and job.block is None:
                notes |= {"perplexity": self._scorer.perplexity(draft)}
        # 3) The notes come last: a share counts as whole only with both files.
        counts.write(counts.concat(tables), share.table)
        storage.write_json(share.notes, notes)

    def _join(self, job: ScoringJob, shares: Sequence[_Share]) -> None:
        """Join the ranks' shares of a job, and delete them. The order of rows is the same on any number of ranks."""
        table = counts.concat([counts.read(share.table) for share in shares])
        notes = [storage.read_object(share.notes) for share in shares]
        # A finalist's rest: the blocks hold its replays already.
        if job.rest:
            replayed = counts.concat([self.block(job.checkpoint, number) for number in range(len(self.blocks))])
            table = counts.concat([replayed, _only_decoded(table, replayed)])
        table = table.sort_by([(column, "ascending") for column in _ROW_ORDER])
        # The notes come last: a whole result counts as done only with both files.
        if job.block is not None:
            counts.write(table, self._block_file(job.checkpoint, job.block))
        else:
            counts.write(table, self._file(job.checkpoint, "parquet"))
            lossless = next((one["lossless"] for one in notes if one["lossless"] is not None), None)
            known = {"lossless": lossless, "perplexity": notes[0]["perplexity"]}
            storage.write_json(self._file(job.checkpoint, "json"), known)
        shutil.rmtree(shares[0].table.parent)  # those that a stopped run left on another number of ranks too

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


def _tokens(sample: Sample) -> int:
    return len(sample.prompt_ids) + len(sample.answer_ids)


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


class RaceResult(NamedTuple):
    """Counts of a race, and how far each entrant came."""

    tables: dict[Checkpoint, list[pa.Table]]
    """Replayed counts of each entrant, block by block."""
    shares: dict[Checkpoint, float]
    """Share of the answers' tokens that each entrant was counted on; exactly 1: a finalist."""


def race(
    entrants: Sequence[Checkpoint],
    blocks: Sequence[Sequence[str]],
    sizes: Mapping[str, float],
    times: Mapping[Checkpoint, Times],
    settings: ScoreSettings,
    count_block: Callable[[Sequence[Checkpoint], int], Mapping[Checkpoint, pa.Table]],
) -> RaceResult:
    """Count checkpoints block by block, and drop those that can no longer win (successive elimination).

    `blocks`: clusters of conversations; `sizes`: tokens of each cluster that cost rounds. `count_block` gives the
    counts of the checkpoints still in the race on one block. Checkpoints that were decoded instead of replayed are
    exempt: they are never dropped.
    """
    assert settings.race is not None
    total = sum(sizes.values())
    found = RaceResult({one: [] for one in entrants}, dict.fromkeys(entrants, 0.0))
    elimination: Race | None = None
    exempt: set[Checkpoint] = set()
    for number, block in enumerate(blocks):
        # 1) Count those that are left.
        left = [one for one in entrants if elimination is None or one in exempt or one in elimination.survivors]
        latest = count_block(left, number)
        for one in left:
            found.tables[one].append(latest[one])
            share = found.shares[one] + math.fsum(sizes[cluster] for cluster in block) / total
            found.shares[one] = 1.0 if number + 1 == len(blocks) else share
        # 2) After the first block it is known which K and trees each drafts, and which of them a replay tells.
        if elimination is None:
            arms, exempt = _arms(latest, times, settings)
            elimination = Race(arms, total, settings.race.error)
        # 3) Let the elimination see the block.
        _observe(elimination, {one: serving(latest[one], settings) for one in left if one not in exempt}, block, sizes)
    _say_saved(found.shares, settings.race.error)
    return found


def _say_saved(shares: Mapping[Checkpoint, float], error: float) -> None:
    """Say how many checkpoints a race dropped, and which part of the replays it saved."""
    dropped = sum(share < 1 for share in shares.values())
    saved = 1 - math.fsum(shares.values()) / len(shares)
    say(
        f"race: {dropped} of {len(shares)} checkpoints could no longer win and were dropped; {saved:.0%} of the passes "
        f"over answers were saved (the best one is among them with a probability of {error:g} at most)"
    )


def _arms(
    tables: Mapping[Checkpoint, pa.Table], times: Mapping[Checkpoint, Times], settings: ScoreSettings
) -> tuple[list[Arm], set[Checkpoint]]:
    """Arms of the race (a checkpoint at one K or tree), and the exempt checkpoints: decoded instead of replayed."""
    arms: list[Arm] = []
    exempt: set[Checkpoint] = set()
    for one, table in tables.items():
        deciding = serving(table, settings)
        # Only replayed rounds enter the bound of the race.
        if counts.values(deciding, "method") != ["replay"]:
            exempt.add(one)
            continue
        # Each K and tree is an arm of its own: a checkpoint stays while any of them can win.
        for (K, tree), _ in counts.groups(deciding, "draft_tokens", "tree"):
            config = DraftConfig(K, tree)
            arms.append(Arm(*one, config, times[one].gain(config)))
    if exempt:
        names = ", ".join(f"{name} {step}" for name, step in sorted(exempt))
        say(f"race: {names}: decoded, not replayed; scored on everything")
    return arms, exempt


def _observe(
    elimination: Race, tables: Mapping[Checkpoint, pa.Table], block: Sequence[str], sizes: Mapping[str, float]
) -> None:
    """Show the elimination the rounds that each arm needed for a block, cluster by cluster."""
    rounds: dict[tuple[Checkpoint, DraftConfig], dict[str, float]] = {}
    # 1) Add up rounds by arm and cluster, over conversations and turns.
    for one, table in tables.items():
        columns = (table[name].to_pylist() for name in ("draft_tokens", "tree", "cluster", "rounds"))
        for K, tree, cluster, number in zip(*columns):
            by_cluster = rounds.setdefault((one, DraftConfig(K, tree)), {})
            by_cluster[cluster] = by_cluster.get(cluster, 0.0) + number
    # 2) One observation a cluster, for all arms together: clusters are the independent units.
    for cluster in block:
        seen = [rounds.get(((arm.draft, arm.step), arm.config), {}).get(cluster, 0.0) for arm in elimination.arms]
        elimination.observe(sizes[cluster], np.array(seen))
