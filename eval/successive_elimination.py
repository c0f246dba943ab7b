"""Successive elimination of drafts that can no longer win, tested after every conversation at a bounded error rate.

Scoring everything would rank drafts by their total time over a fixed set of conversation clusters. Clusters are taken
without replacement, each next one with a probability proportional to its tokens. Let R_i = (time of draft c - time of
draft l) / tokens of the i-th cluster, S its sum so far (by tokens), T the tokens of all clusters, t of those seen. If c
is no slower than l over all of them, the mean of R_i given the past is at most m_i = -S / (T - t): what is left must
make up for what was seen. R_i is at least a known `least`, since a round emits between one token and levels + 1 of
them. So for any share k in [0, 1] the capital of a bet against c,

    product of 1 + k (R_i - m_i) / (m_i - least),

is a non-negative supermartingale, and so is the average over several k. By Ville's inequality it ever exceeds 1 / e
with probability at most e: one may look after every conversation (betting: Waudby-Smith and Ramdas 2023, arXiv
2010.09686; time-uniform bounds: Howard et al. 2021, arXiv 1810.08240). A draft at one K or tree is an arm; a bet is
made against every arm for every other one, each at error / (arms - 1), so the arm that is best over all conversations
is ever dropped with probability at most `error`.

Shapes: A arms, G shares k of the capital that are bet.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import fingerprint
from .draft_configs import DraftConfig
from .speedup import Gain

Floats = NDArray[np.float64]
_BETS_G = np.array([0.05, 0.1, 0.2, 0.4, 0.7, 0.95])
_ROUNDING = 1e-9


class Arm(NamedTuple):
    """Arm of the race: a draft at one K or tree, with its map from tau to speed-up."""

    draft: str
    step: int
    config: DraftConfig
    gain: Gain


class Race:
    """Race of arms: for each pair, a bet that one arm is slower than the other over all clusters."""

    def __init__(self, arms: Sequence[Arm], tokens: float, error: float) -> None:
        """`tokens`: of all clusters together. `error`: probability, at most, that the best arm is dropped."""
        self.arms, self._total, self._seen = list(arms), tokens, 0.0
        self._fixed_A = np.array([arm.gain.fixed for arm in arms])
        self._rounds_A = np.array([arm.gain.rounds for arm in arms])
        # A round emits between 1 and levels + 1 tokens, which bounds each arm's time per token, and so every difference
        # R.
        most_A = self._fixed_A + self._rounds_A
        least_A = self._fixed_A + self._rounds_A / np.array([arm.config.levels + 1.0 for arm in arms])
        self._least_AA = least_A[:, None] - most_A
        self._sum_AA = np.zeros_like(self._least_AA)
        self._capital_AAG = np.zeros((*self._least_AA.shape, len(_BETS_G)))  # logarithms
        self._enough = math.log(max(len(arms) - 1, 1) / error)
        self.alive_A = np.ones(len(arms), dtype=bool)

    def observe(self, tokens: float, rounds_A: Floats) -> None:
        """Observe one more cluster. `tokens`: its tokens without first ones; `rounds_A`: each arm's rounds for them.

        Values of arms that were dropped before do not matter.
        """
        # 1) R of this cluster for every pair: row arm minus column arm, in plain decoding's time per token.
        left = self._total - self._seen
        if tokens <= 0 or left <= 0:
            return
        time_A = self._fixed_A + self._rounds_A * rounds_A / tokens
        ratio_AA = time_A[:, None] - time_A
        # 2) What the bet wins: R above its greatest expected value m, in units of m - least.
        room_AA = -self._sum_AA / left - self._least_AA  # from the least that may come to the most that is expected
        with np.errstate(divide="ignore", invalid="ignore"):
            edge_AA = (ratio_AA - self._least_AA) / room_AA - 1
        # 3) Pairs without room: what is left cannot make up for the past, so the row arm has lost for certain.
        certain_AA = room_AA < -_ROUNDING  # no rest can make up for what was seen
        edge_AA = np.where(certain_AA, np.inf, np.where(room_AA > _ROUNDING, edge_AA, 0.0))
        # 4) Update the capital of each share; only pairs of arms that are both still in the race bet.
        both_AA = self.alive_A[:, None] & self.alive_A
        np.fill_diagonal(both_AA, False)
        gained_AAG = np.log1p(_BETS_G * np.maximum(np.where(both_AA, edge_AA, 0.0), -1.0)[..., None])
        self._capital_AAG += gained_AAG
        self._sum_AA += np.where(both_AA, tokens * ratio_AA, 0.0)
        self._seen += tokens
        # 5) Average over the shares. An arm falls when any bet against it has won enough.
        mean_AA = np.logaddexp.reduce(self._capital_AAG, axis=-1) - math.log(len(_BETS_G))
        self.alive_A &= ~((mean_AA >= self._enough) & both_AA).any(axis=1)

    @property
    def survivors(self) -> set[tuple[str, int]]:
        """Drafts that can still win, at some K or tree."""
        return {(arm.draft, arm.step) for arm, alive in zip(self.arms, self.alive_A) if alive}


def elimination_order(sizes: Mapping[str, float], seed: int) -> list[str]:
    """Random order of clusters, drawn without replacement with probabilities proportional to size among those left.

    It is the order of exponential waiting times at rates of their sizes (Efraimidis and Spirakis 2006). Clusters of
    size 0 come last. The same seed gives the same order.
    """

    def wait(cluster: str) -> float:
        # A hash in place of a random number, so that a cluster's time does not depend on the others.
        share = (int(fingerprint.of_json([seed, "race", cluster])[:13], 16) + 0.5) / 16**13
        return -math.log(share) / sizes[cluster] if sizes[cluster] > 0 else math.inf

    return sorted(sizes, key=lambda cluster: (wait(cluster), cluster))


def cut_into_blocks(order: Iterable[str], sizes: Mapping[str, float], blocks: int) -> list[list[str]]:
    """Blocks of the order with about equally many tokens each; fewer blocks where there are too few clusters."""
    total, seen = sum(sizes.values()), 0.0
    found: list[list[str]] = [[] for _ in range(blocks)]
    for cluster in order:
        found[min(int(seen / total * blocks), blocks - 1) if total else 0].append(cluster)
        seen += sizes[cluster]
    return [block for block in found if block]
