"""Counts and times of every checkpoint, from the disk where they are there: all scored on all, or raced.

In `parts/` of a score's folder, by checkpoint:

NAME-STEP.parquet NAME-STEP.json    counts on all conversations, and what else was seen
NAME-STEP.block-2-of-8.parquet      of a race: counts on one part of the conversations
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from .. import storage
from ..data.store import Sample
from ..errors import CorruptDataError, MissingFileError
from ..eval import counts
from ..eval.load_settings import RaceSettings
from ..eval.plans import Drafting, Plan
from ..eval.racing import Arm, Race, blocks_of, racing_order
from ..eval.score import Identity, scored_samples, spread
from ..eval.select import Checkpoint, Times, serving
from ..eval.settings import ScoreSettings
from ..progress import say
from ..specdec.drafts import AnyDraft
from ..specdec.foreign import ForeignDraft
from ..specdec.proposers.trees import Tree

T = TypeVar("T")


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

    def load_any(self, folder: Path) -> AnyDraft | ForeignDraft:
        """A stored draft."""

    def draftings(self, draft: AnyDraft | ForeignDraft | None) -> list[Drafting]:
        """Its ways of drafting; None: prompt lookup's."""

    def times(self, draft: AnyDraft | ForeignDraft | None, draftings: Sequence[Drafting]) -> Times:
        """What its rounds cost."""

    def counts(
        self,
        draftings: Sequence[Drafting],
        identity: Identity,
        samples: Sequence[Sample] | None = None,
        decoded: bool = True,
    ) -> tuple[pa.Table, bool | None]:
        """Its counts, and whether decoding was seen to be lossless."""

    def perplexity(self, draft: AnyDraft | ForeignDraft) -> float | None:
        """Of the recorded answers under it."""

    def made_for(self, folder: Path) -> str:
        """The target that it was made for, where that is another one."""


class Board:
    """All that takes part in one score; `times` and `trees` are filled as it goes."""

    def __init__(self, scorer: Scores, parts: Path, folders: Mapping[Checkpoint, Path | None]) -> None:
        """`folders`: of each checkpoint its draft; None: prompt lookup, which no race drops."""
        self.scorer, self._parts, self._folders = scorer, parts, folders
        self.times: dict[Checkpoint, Times] = {}
        self.trees: dict[Checkpoint, dict[str, Tree]] = {}

    def all(self) -> dict[Checkpoint, Part]:
        """Every checkpoint on all conversations."""
        return {one: self._whole(one) for one in self._folders}

    def raced(self, race: RaceSettings) -> dict[Checkpoint, Part]:
        """The same, but for those that can no longer win: they keep the counts that they have."""
        found = {one: self._whole(one) for one, folder in self._folders.items() if folder is None}
        entrants = [one for one, folder in self._folders.items() if folder is not None]
        tables, seen = self._race(entrants, race)
        for one in entrants:
            table = counts.concat(tables[one])
            found[one] = self._finished(one, table) if seen[one] == 1 else Part(table, None, seen[one])
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
        settings = self.scorer.settings
        samples = scored_samples(self.scorer.samples, settings)
        sizes: dict[str, float] = {}
        for sample in samples:  # the first token of an answer costs no round
            sizes[sample.cluster] = sizes.get(sample.cluster, 0.0) + max(len(sample.answer_ids) - 1, 0)
        blocks, total = blocks_of(racing_order(sizes, settings.seed), sizes, race.blocks), sum(sizes.values())
        tables: dict[Checkpoint, list[pa.Table]] = {one: [] for one in entrants}
        seen = dict.fromkeys(entrants, 0.0)
        racing: Race | None = None
        free: set[Checkpoint] = set()  # whom no race can drop
        for number, block in enumerate(blocks):
            members = set(block)
            part = [sample for sample in samples if sample.cluster in members]
            running = [one for one in entrants if racing is None or one in free or one in racing.standing]
            for one in running:
                tables[one].append(self._block(one, part, f"block-{number + 1}-of-{len(blocks)}"))
                seen[one] = (
                    1.0 if number + 1 == len(blocks) else seen[one] + math.fsum(map(sizes.__getitem__, block)) / total
                )
            if racing is None:
                arms, free = self._arms({one: tables[one][0] for one in entrants})
                racing = Race(arms, total, race.error)
            latest = {one: serving(tables[one][-1], settings) for one in running if one not in free}
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
                plan = Plan(K, tree)
                arms.append(Arm(*one, plan, self.times[one].gain(plan)))
        if free:
            names = ", ".join(f"{name} {step}" for name, step in sorted(free))
            say(f"race: {names}: decoded, not replayed; scored on everything")
        return arms, free

    def _block(self, one: Checkpoint, samples: Sequence[Sample], name: str) -> pa.Table:
        """Counts of a part of the conversations, without the decoding that checks replays."""
        path = self._file(one, f"{name}.parquet")
        known = _kept(lambda: counts.read(path))
        if known is not None and one in self.times:
            return known
        _, draftings = self._open(one)
        if known is None:
            table, _ = self.scorer.counts(draftings, Identity(*one), samples, decoded=False)
            counts.write(table, path)
            known = counts.read(path)
        return known

    def _finished(self, one: Checkpoint, table: pa.Table) -> Part:
        """A checkpoint that no race dropped: what is still missing of it, beside its replayed counts."""
        known = self._stored(one)
        if known is not None:
            return known
        draft, draftings = self._open(one)
        samples = scored_samples(self.scorer.samples, self.scorer.settings)
        chosen = spread(samples, self.scorer.settings.decode_conversations)
        some, lossless = [sample for sample in samples if sample.conversation in chosen], None
        if some:
            again, lossless = self.scorer.counts(draftings, Identity(*one), some)
            table = counts.concat([table, _only_decoded(again, table)])
        return self._keep(one, draft, table, lossless)

    def _whole(self, one: Checkpoint) -> Part:
        """Counts on all conversations."""
        known = self._stored(one)
        if known is None or not self._share_shape(one):
            draft, draftings = self._open(one)
            if known is None:
                table, lossless = self.scorer.counts(draftings, Identity(*one))
                known = self._keep(one, draft, table, lossless)
        return known

    def _share_shape(self, one: Checkpoint) -> bool:
        """Whether times and trees are known already: checkpoints of one draft share them where trees do not vary."""
        other = next((known for known in self.times if known[0] == one[0]), None)
        if one not in self.times and other is not None and not self.scorer.settings.trees_vary:
            self.times[one], self.trees[one] = self.times[other], self.trees[other]
        return one in self.times

    def _open(self, one: Checkpoint) -> tuple[AnyDraft | ForeignDraft | None, list[Drafting]]:
        """Load a draft, and its times where they are not known."""
        folder = self._folders[one]
        draft = None if folder is None else self.scorer.load_any(folder)
        draftings = self.scorer.draftings(draft)
        if not self._share_shape(one):
            self.trees[one] = {way.tree: way.fixed for way in draftings if way.fixed is not None}
            self.times[one] = self.scorer.times(draft, draftings)
        return draft, draftings

    def _keep(
        self, one: Checkpoint, draft: AnyDraft | ForeignDraft | None, table: pa.Table, lossless: bool | None
    ) -> Part:
        perplexity = None if draft is None else self.scorer.perplexity(draft)
        counts.write(table, self._file(one, "parquet"))
        storage.write_json(self._file(one, "json"), {"lossless": lossless, "perplexity": perplexity})
        # As it will be read next time: the digest is of what it makes.
        return Part(counts.read(self._file(one, "parquet")), perplexity)

    def _stored(self, one: Checkpoint) -> Part | None:
        """What an earlier call kept; None where there is nothing, or (said aloud) something damaged."""
        return _kept(lambda: Part(counts.read(self._file(one, "parquet")), _perplexity(self._file(one, "json"))))

    def _file(self, one: Checkpoint, ending: str) -> Path:
        return self._parts / f"{one[0]}-{one[1]:06d}.{ending}"  # a name may hold dots: no with_suffix


def _kept(read: Callable[[], T]) -> T | None:
    """What an earlier call kept; None where there is nothing, or (said aloud) something damaged."""
    try:
        return read()
    except MissingFileError:
        return None
    except CorruptDataError as error:
        say(f"{error}; scoring it again")
        return None


def _observe(
    racing: Race, tables: Mapping[Checkpoint, pa.Table], block: Sequence[str], sizes: Mapping[str, float]
) -> None:
    """Let the race see a block, cluster by cluster."""
    rounds: dict[tuple[Checkpoint, Plan], dict[str, float]] = {}
    for one, table in tables.items():
        columns = (table[name].to_pylist() for name in ("draft_tokens", "tree", "cluster", "rounds"))
        for K, tree, cluster, number in zip(*columns):
            of = rounds.setdefault((one, Plan(K, tree)), {})
            of[cluster] = of.get(cluster, 0.0) + number
    for cluster in block:
        seen = [rounds.get(((arm.draft, arm.step), arm.plan), {}).get(cluster, 0.0) for arm in racing.arms]
        racing.observe(sizes[cluster], np.array(seen))


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
