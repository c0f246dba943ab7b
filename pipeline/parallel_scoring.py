"""Counts and times of every checkpoint, from the disk where they are there: all scored on all, or raced.

With several ranks, times are measured by the first one before anything is counted, while the others wait; then all
count, whole checkpoints or, of a race, whole blocks of one, so that counts are those of one rank.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import pyarrow as pa
from pydantic import TypeAdapter

from .. import storage
from ..data.store import Sample
from ..distributed.shared_work import ALONE, Crew, Work
from ..errors import CorruptDataError, MissingFileError
from ..eval import counts
from ..eval.draft_configs import DraftConfig, ProposerSpec
from ..eval.leaderboard import Checkpoint, Times, serving
from ..eval.score import Identity, scored_samples, stratified_conversations
from ..eval.settings import RaceSettings, ScoreSettings
from ..eval.successive_elimination import Arm, Race, cut_into_blocks, elimination_order
from ..progress import say
from ..specdec.proposers.trees import Tree
from ..specdec.stored_draft import StoredDraft

T = TypeVar("T")
_TREES: TypeAdapter[dict[str, Tree]] = TypeAdapter(dict[str, Tree])


class Part(NamedTuple):
    """What is known of one checkpoint."""

    table: pa.Table
    perplexity: float | None
    share: float = 1.0
    """Of the answers' tokens that its counts are of."""


class Scores(Protocol):
    """What scores drafts of one target on one split."""

    settings: ScoreSettings
    samples: list[Sample]

    def load(self, folder: Path | None, other_tokenizer: bool = False) -> StoredDraft:
        """A stored draft; None: prompt lookup."""

    def draftings(self, draft: StoredDraft, fixed: Mapping[str, Tree] | None = None) -> list[ProposerSpec]:
        """Its ways of drafting. `fixed`: its trees, where they were measured before."""

    def times(self, draft: StoredDraft, draftings: Sequence[ProposerSpec]) -> Times:
        """What its rounds cost."""

    def counts(
        self,
        draftings: Sequence[ProposerSpec],
        identity: Identity,
        samples: Sequence[Sample] | None = None,
        decoded: bool = True,
    ) -> tuple[pa.Table, bool | None]:
        """Its counts, and whether decoding was seen to be lossless."""

    def perplexity(self, draft: StoredDraft) -> float | None:
        """Of the recorded answers under it; None where it has none."""


class Job(NamedTuple):
    """Counts to be made of one checkpoint."""

    one: Checkpoint
    folder: Path | None
    """Of its draft; None: prompt lookup."""
    trees: Mapping[str, Tree]
    """Those that it drafts, as they were timed."""
    block: int | None = None
    """Of a race: only this part of the conversations, from 0."""
    rest: bool = False
    """Of a race: what the blocks lack."""

    def record(self) -> dict[str, Any]:
        """JSON-able."""
        trees = _TREES.dump_python(dict(self.trees), mode="json")
        return self._asdict() | {"folder": self.folder and str(self.folder), "trees": trees}

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> "Job":
        """What `record` gave."""
        (name, step), folder = record["one"], record["folder"]
        trees = _TREES.validate_python(record["trees"])
        return cls((name, step), folder and Path(folder), trees, record["block"], record["rest"])


class Counting:
    """Makes counts with one scorer and keeps them in the folder `parts`."""

    def __init__(self, scorer: Scores, parts: Path) -> None:
        self.scorer, self._parts = scorer, parts
        self._opened: tuple[Checkpoint, StoredDraft, list[ProposerSpec]] | None = None

    @cached_property
    def sizes(self) -> dict[str, float]:
        """Of the scored conversations, by cluster: their tokens but for the first of each answer, which costs no
        round."""
        sizes: dict[str, float] = {}
        for sample in self._samples:
            sizes[sample.cluster] = sizes.get(sample.cluster, 0.0) + max(len(sample.answer_ids) - 1, 0)
        return sizes

    @cached_property
    def blocks(self) -> list[list[str]]:
        """Clusters of each block of a race."""
        race = self.scorer.settings.race
        assert race is not None
        order = elimination_order(self.sizes, self.scorer.settings.seed)
        return [list(block) for block in cut_into_blocks(order, self.sizes, race.blocks)]

    @cached_property
    def _samples(self) -> list[Sample]:
        return scored_samples(self.scorer.samples, self.scorer.settings)

    def open(
        self, one: Checkpoint, folder: Path | None, trees: Mapping[str, Tree] | None = None
    ) -> tuple[StoredDraft, list[ProposerSpec]]:
        """A draft and its ways of drafting; the last one is remembered. `trees`: measured before."""
        if self._opened is None or self._opened[0] != one:
            self._opened = None  # before the next one takes room
            draft = self.scorer.load(folder, other_tokenizer=True)
            self._opened = one, draft, self.scorer.draftings(draft, trees)
        return self._opened[1:]

    def do(self, job: Job) -> None:
        """Make what a job asks for."""
        if job.block is not None:
            self._count_block(job, job.block)
        elif job.rest:
            self._count_rest(job)
        else:
            draft, draftings = self.open(job.one, job.folder, job.trees)
            self._keep(job.one, draft, *self.scorer.counts(draftings, Identity(*job.one)))

    def is_done(self, job: Job) -> bool:
        """Whether what it asks for is on disk."""
        return (self.whole(job.one) if job.block is None else self.block(job.one, job.block)) is not None

    def whole(self, one: Checkpoint) -> Part | None:
        """Counts on all conversations; None where there are none, or (said aloud) something damaged."""
        return _kept(lambda: Part(counts.read(self._file(one, "parquet")), _perplexity(self._file(one, "json"))))

    def block(self, one: Checkpoint, number: int) -> pa.Table | None:
        """The same on one block, without the decoding that checks replays."""
        return _kept(lambda: counts.read(self._block_file(one, number)))

    def _count_block(self, job: Job, number: int) -> None:
        members = set(self.blocks[number])
        samples = [sample for sample in self._samples if sample.cluster in members]
        _, draftings = self.open(job.one, job.folder, job.trees)
        table, _ = self.scorer.counts(draftings, Identity(*job.one), samples, decoded=False)
        counts.write(table, self._block_file(job.one, number))

    def _count_rest(self, job: Job) -> None:
        """What is missing of a checkpoint beside its replayed counts."""
        draft, draftings = self.open(job.one, job.folder, job.trees)
        table = counts.concat([counts.read(self._block_file(job.one, place)) for place in range(len(self.blocks))])
        chosen = stratified_conversations(self._samples, self.scorer.settings.decode_conversations)
        some, lossless = [sample for sample in self._samples if sample.conversation in chosen], None
        if some:
            again, lossless = self.scorer.counts(draftings, Identity(*job.one), some)
            table = counts.concat([table, _only_decoded(again, table)])
        self._keep(job.one, draft, table, lossless)

    def _keep(self, one: Checkpoint, draft: StoredDraft, table: pa.Table, lossless: bool | None) -> None:
        counts.write(table, self._file(one, "parquet"))
        known = {"lossless": lossless, "perplexity": self.scorer.perplexity(draft)}
        storage.write_json(self._file(one, "json"), known)

    def _block_file(self, one: Checkpoint, number: int) -> Path:
        return self._file(one, f"block-{number + 1}-of-{len(self.blocks)}.parquet")

    def _file(self, one: Checkpoint, ending: str) -> Path:
        return self._parts / f"{one[0]}-{one[1]:06d}.{ending}"  # a name may hold dots: no with_suffix


def count_together(crew: Crew, name: str, jobs: Sequence[Job], counting: Counting) -> None:
    """The first process's part of some jobs; on return all of them are done, and the others wait for more."""
    with crew.share(name, {"jobs": [job.record() for job in jobs]}) as work:
        assert work is not None
        for job in _taken(crew, work, jobs):
            counting.do(job)
        work.finish({})
        # A file of another machine may take a moment to be seen here.
        work.wait(lambda: all(map(counting.is_done, jobs)), name)


def help_count(crew: Crew, name: str, make: Callable[[], Counting]) -> None:
    """Another process's part: jobs as long as there are any. What counts is made for the first of them."""
    counting: Counting | None = None
    while True:
        with crew.share(name, None) as work:
            assert work is not None
            jobs = [Job.read(record) for record in work.plan["jobs"]]
            for job in _taken(crew, work, jobs):
                counting = counting or make()
                counting.do(job)
            work.finish({})
        if not jobs:
            return


def _taken(crew: Crew, work: Work, jobs: Sequence[Job]) -> Iterator[Job]:
    """Jobs that this process gets, from its own place in the list on: neighbours are of one draft, and the target's
    passes are remembered from one of them to the next."""
    start = len(jobs) * crew.rank // crew.size
    for number in (*range(start, len(jobs)), *range(start)):
        if work.claim(str(number)):
            yield jobs[number]


def _kept(read: Callable[[], T]) -> T | None:
    """What an earlier call kept; None where there is nothing, or (said aloud) something damaged."""
    try:
        return read()
    except MissingFileError:
        return None
    except CorruptDataError as error:
        say(f"{error}; scoring it again")
        return None


def _only_decoded(table: pa.Table, replayed: pa.Table) -> pa.Table:
    """The decoded rows of what was replayed too; what can only be decoded is in the blocks."""
    names = ("setting", "rule", "draft_tokens", "tree")
    told = set(zip(*(counts.where(replayed, method="replay")[name].to_pylist() for name in names)))
    decoded = counts.where(table, method="decode")
    return decoded.filter(
        pa.array([key in told for key in zip(*(decoded[name].to_pylist() for name in names))], pa.bool_())
    )


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


class Board:
    """All that takes part in one score; `times` and `trees` are filled as it goes."""

    def __init__(
        self, scorer: Scores, parts: Path, folders: Mapping[Checkpoint, Path | None], crew: Crew = ALONE, name: str = ""
    ) -> None:
        """`folders`: of each checkpoint its draft; None: prompt lookup, which no race drops. `crew`: who counts, and
        calls it by that `name`."""
        self.scorer, self._folders = scorer, folders
        self._counting, self._crew, self._name = Counting(scorer, parts), crew, name
        self.times: dict[Checkpoint, Times] = {}
        self.trees: dict[Checkpoint, dict[str, Tree]] = {}

    @contextmanager
    def helped(self) -> Iterator[None]:
        """As long as the others are to help; they go on with what comes next afterwards."""
        yield
        if self._crew.size > 1:
            count_together(self._crew, self._name, [], self._counting)

    def all(self) -> dict[Checkpoint, Part]:
        """Every checkpoint on all conversations."""
        return self._wholes(list(self._folders))

    def raced(self, race: RaceSettings) -> dict[Checkpoint, Part]:
        """The same, but for those that can no longer win: they keep the counts that they have."""
        found = self._wholes([one for one, folder in self._folders.items() if folder is None])
        entrants = [one for one, folder in self._folders.items() if folder is not None]
        tables, seen = self._race(entrants, race)
        finalists = [one for one in entrants if seen[one] == 1]
        self._count(finalists, rest=True)
        for one in entrants:
            found[one] = self._whole(one) if seen[one] == 1 else Part(counts.concat(tables[one]), None, seen[one])
        dropped = [one for one in entrants if seen[one] < 1]
        saved = 1 - math.fsum(seen.values()) / len(entrants)
        say(
            f"race: {len(dropped)} of {len(entrants)} checkpoints could no longer win and were dropped; {saved:.0%} of "
            f"the passes over answers were saved (the best one is among them with a probability of {race.error:g} at "
            "most)"
        )
        return found

    def _race(
        self, entrants: Sequence[Checkpoint], race: RaceSettings
    ) -> tuple[dict[Checkpoint, list[pa.Table]], dict[Checkpoint, float]]:
        """Counts by block of each entrant, and the share of the answers' tokens that they are of."""
        blocks, sizes = self._counting.blocks, self._counting.sizes
        total = sum(sizes.values())
        tables: dict[Checkpoint, list[pa.Table]] = {one: [] for one in entrants}
        seen = dict.fromkeys(entrants, 0.0)
        racing: Race | None = None
        free: set[Checkpoint] = set()  # whom no race can drop
        for number, block in enumerate(blocks):
            running = [one for one in entrants if racing is None or one in free or one in racing.survivors]
            self._count(running, block=number)
            for one in running:
                tables[one].append(self._block(one, number))
                seen[one] = (
                    1.0 if number + 1 == len(blocks) else seen[one] + math.fsum(map(sizes.__getitem__, block)) / total
                )
            if racing is None:
                arms, free = self._arms({one: tables[one][0] for one in entrants})
                racing = Race(arms, total, race.error)
            latest = {one: serving(tables[one][-1], self.scorer.settings) for one in running if one not in free}
            _observe(racing, latest, block, sizes)
        return tables, seen

    def _arms(self, tables: Mapping[Checkpoint, pa.Table]) -> tuple[list[Arm], set[Checkpoint]]:
        """The arms of a race, and whom it cannot judge: those of whose rounds a replay does not tell."""
        arms: list[Arm] = []
        free: set[Checkpoint] = set()
        for one, table in tables.items():
            deciding = serving(table, self.scorer.settings)
            if counts.values(deciding, "method") != ["replay"]:
                free.add(one)
                continue
            for (K, tree), _ in counts.groups(deciding, "draft_tokens", "tree"):
                plan = DraftConfig(K, tree)
                arms.append(Arm(*one, plan, self.times[one].gain(plan)))
        if free:
            names = ", ".join(f"{name} {step}" for name, step in sorted(free))
            say(f"race: {names}: decoded, not replayed; scored on everything")
        return arms, free

    def _wholes(self, ones: Sequence[Checkpoint]) -> dict[Checkpoint, Part]:
        self._count(ones)
        return {one: self._whole(one) for one in ones}

    def _count(self, ones: Sequence[Checkpoint], block: int | None = None, rest: bool = False) -> None:
        """Have what is not on disk counted, by all ranks: of each checkpoint everything, a block, or the rest."""
        for together in [ones] if self._crew.size > 1 else ([one] for one in ones):
            self._time(together)
            jobs = [Job(one, self._folders[one], self.trees[one], block, rest) for one in together]
            missing = [job for job in jobs if not self._counting.is_done(job)]
            if missing:
                count_together(self._crew, self._name, missing, self._counting)

    def _time(self, ones: Iterable[Checkpoint]) -> None:
        """Learn times and trees where they are not known: checkpoints of one draft share them where trees do not
        vary."""
        for one in ones:
            other = next((known for known in self.times if known[0] == one[0]), None)
            if one in self.times:
                continue
            if other is not None and not self.scorer.settings.trees_vary:
                self.times[one], self.trees[one] = self.times[other], self.trees[other]
                continue
            draft, draftings = self._counting.open(one, self._folders[one])
            self.trees[one] = {way.tree: way.fixed for way in draftings if way.fixed is not None}
            self.times[one] = self.scorer.times(draft, draftings)

    def _whole(self, one: Checkpoint) -> Part:
        # As it will be read next time: the digest is of what it makes.
        found = self._counting.whole(one)
        assert found is not None, one
        return found

    def _block(self, one: Checkpoint, number: int) -> pa.Table:
        found = self._counting.block(one, number)
        assert found is not None, (one, number)
        return found


def _observe(
    racing: Race, tables: Mapping[Checkpoint, pa.Table], block: Sequence[str], sizes: Mapping[str, float]
) -> None:
    """Let the race see a block, cluster by cluster."""
    rounds: dict[tuple[Checkpoint, DraftConfig], dict[str, float]] = {}
    for one, table in tables.items():
        columns = (table[name].to_pylist() for name in ("draft_tokens", "tree", "cluster", "rounds"))
        for K, tree, cluster, number in zip(*columns):
            of = rounds.setdefault((one, DraftConfig(K, tree)), {})
            of[cluster] = of.get(cluster, 0.0) + number
    for cluster in block:
        seen = [rounds.get(((arm.draft, arm.step), arm.config), {}).get(cluster, 0.0) for arm in racing.arms]
        racing.observe(sizes[cluster], np.array(seen))
