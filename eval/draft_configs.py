"""What is scored of a draft: chains of each K, and trees; and the accept rules for each."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ..errors import InputError
from ..specdec.proposers.base import Proposer
from ..specdec.proposers.trees import StaticTree, Tree
from ..specdec.replay.replay import replayable
from ..specdec.requests import check_proposer
from ..specdec.rules import RULES
from ..specdec.sampling import SamplingSettings
from .settings import ScoreSettings

PLAINEST = ("multiround", "recursive", "token", "onehot")
"""Rules by which a way of drafting is judged where none is asked for that takes it: drawn trees by the first two, drawn
chains by the third, chosen tokens by the last."""


class DraftConfig(NamedTuple):
    """How a round drafts: a chain, or the tree of that name."""

    levels: int
    """K of a chain, or how deep the tree is."""
    tree: str = ""

    @property
    def label(self) -> str:
        """As tables show it: K, or the tree's name."""
        return self.tree or str(self.levels)

    def __str__(self) -> str:
        """As messages show it."""
        return f"tree {self.tree}" if self.tree else f"K={self.levels}"


@dataclass(frozen=True)
class ProposerSpec:
    """One way of drafting: chains of some lengths, or one tree."""

    make: Callable[[], Proposer]
    """Makes a proposer of its own for each decoding run."""
    depths: tuple[int, ...]
    """K of each chain, or the tree's levels."""
    tree: str = ""
    """Its name; empty: chains."""
    fixed: Tree | None = None
    """The tree as this draft drafts it; None: chains."""

    @cached_property
    def proposer(self) -> Proposer:
        return self.make()

    @property
    def configs(self) -> list[DraftConfig]:
        return [DraftConfig(depth, self.tree) for depth in self.depths]

    @property
    def work(self) -> dict[str, Any] | None:
        """What the tree's times depend on: of a static one, how many nodes of each level there are and are read."""
        if not isinstance(self.fixed, StaticTree):
            return None if self.fixed is None else self.fixed.model_dump(mode="json")
        shape = self.fixed.shape
        read = set(shape.inner)
        return {"nodes_and_read": [[len(level), len(read.intersection(level))] for level in shape.levels]}


def rules_for(sampling: SamplingSettings, proposer: Proposer, settings: ScoreSettings) -> list[str]:
    """The accept rules under which a sample is scored: at temperature 0 every lossless rule is the greedy one.

    Above it, those of the settings that take what the proposer drafts; where no lossless one does, the plainest that
    does before them: drafts are picked by the first.
    """
    if sampling.greedy:
        return ["greedy"]
    suited: list[str] = [rule for rule in settings.sampled_rules if _takes(rule, proposer, sampling)]
    lossless = [rule for rule in suited if RULES[rule].lossless]
    return [*(lossless or [_plainest(proposer)]), *(rule for rule in suited if not RULES[rule].lossless)]


def exact_rules(sampling: SamplingSettings, proposer: Proposer, settings: ScoreSettings) -> list[str]:
    """The accept rules whose counts a replay tells: of those that are asked for, and where there are any, of every
    other one that takes what the proposer drafts, since one pass over the answers tells them all."""
    exact = [rule for rule in rules_for(sampling, proposer, settings) if replayable(proposer, rule, sampling)]
    if sampling.greedy or not exact:
        return exact
    others = [rule for rule in RULES if rule not in exact and _takes(rule, proposer, sampling)]
    return [*exact, *(rule for rule in others if replayable(proposer, rule, sampling))]


def _takes(rule: str, proposer: Proposer, sampling: SamplingSettings) -> bool:
    known = RULES[rule]
    if proposer.chain and known.trees and known.needs_q:
        return False  # a rule of sampled trees is another rule's equal on a chain
    try:
        check_proposer(known, proposer, sampling)
    except InputError:
        return False
    return True


def _plainest(proposer: Proposer) -> str:
    if proposer.drawn == "deterministic":
        return "onehot"
    if proposer.chain:
        return "token"
    return "multiround" if proposer.drawn == "iid" else "recursive"
