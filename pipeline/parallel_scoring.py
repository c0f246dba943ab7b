"""Parallel scoring: counting shared among ranks, and the race that drops checkpoints that cannot win.

The unit of work is a whole checkpoint or, in a race, a whole block of one: each file of counts comes from one rank.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pydantic import TypeAdapter

from ..distributed import Ranks
from ..eval import counts
from ..eval.draft_configs import DraftConfig
from ..eval.leaderboard import Checkpoint, Times, serving
from ..eval.settings import ScoreSettings
from ..eval.successive_elimination import Arm, Race
from ..progress import say
from ..specdec.proposers.tree_settings import Tree

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


def count_shared(
    jobs: Sequence[ScoringJob],
    count: Callable[[ScoringJob], None],
    is_done: Callable[[ScoringJob], bool],
    ranks: Ranks,
) -> bool:
    """Count the first rank's `jobs`, each rank a contiguous share of them; whether there were any.

    All ranks call this together. Neighbouring jobs are of one draft, and a rank keeps the draft and the target's passes
    from one job to the next.
    """
    # Only the first rank knows what is missing; no jobs at all tells the others that scoring is over.
    records = ranks.broadcast("checkpoints to count", [job.record() for job in jobs])
    jobs = [ScoringJob.read(record) for record in records]
    for job in ranks.share(jobs):
        count(job)
    # Every rank sees every file before anyone goes on: the next step reads all of them.
    if jobs:
        ranks.barrier("counts of checkpoints")
        ranks.wait_for_file(lambda: all(map(is_done, jobs)), "counts of checkpoints")
    return bool(jobs)


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
