"""Counts and times of every checkpoint, from the disk where they are there: all scored on all, or raced.

With several ranks, times are measured by the first one before anything is counted, while the others wait; then all
count, whole checkpoints or, of a race, whole blocks of one, so that counts are those of one rank.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa

from ..data.crew import ALONE, Crew
from ..eval import counts
from ..eval.load_settings import RaceSettings
from ..eval.plans import Plan
from ..eval.racing import Arm, Race
from ..eval.select import Checkpoint, Times, serving
from ..progress import say
from ..specdec.proposers.trees import Tree
from .counting import Counting, Job, Part, Scores, count_together


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
            running = [one for one in entrants if racing is None or one in free or one in racing.standing]
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
                plan = Plan(K, tree)
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
    rounds: dict[tuple[Checkpoint, Plan], dict[str, float]] = {}
    for one, table in tables.items():
        columns = (table[name].to_pylist() for name in ("draft_tokens", "tree", "cluster", "rounds"))
        for K, tree, cluster, number in zip(*columns):
            of = rounds.setdefault((one, Plan(K, tree)), {})
            of[cluster] = of.get(cluster, 0.0) + number
    for cluster in block:
        seen = [rounds.get(((arm.draft, arm.step), arm.plan), {}).get(cluster, 0.0) for arm in racing.arms]
        racing.observe(sizes[cluster], np.array(seen))
