"""What is scored of a draft: chains of each K, and trees; and the accept rules for each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ..errors import InputError
from ..specdec.proposers.base import Proposer
from ..specdec.proposers.trees import Tree
from ..specdec.requests import check_proposer
from ..specdec.rules import RULES
from ..specdec.sampling import SamplingSettings
from .settings import ScoreSettings


class Plan(NamedTuple):
    """How a round drafts: a chain of `draft_tokens`, or the tree of that name, so many levels deep."""

    draft_tokens: int
    tree: str = ""

    @property
    def label(self) -> str:
        """As tables show it: K, or the tree's name."""
        return self.tree or str(self.draft_tokens)

    def __str__(self) -> str:
        """As messages show it."""
        return f"tree {self.tree}" if self.tree else f"K={self.draft_tokens}"


@dataclass(frozen=True)
class Drafting:
    """One way of drafting: chains of some lengths, or one tree."""

    make: Callable[[], Proposer]
    """Makes a proposer of its own for each decoding run."""
    depths: tuple[int, ...]
    """K of each chain, or the tree's levels."""
    tree: str = ""
    """Its name; empty: chains."""
    fixed: Tree | None = None
    """The tree as this draft drafts it."""
    shape: dict[str, Any] | None = None
    """The tree as the recipe asks for it, on which times depend: two drafts of one shape share them."""

    @cached_property
    def proposer(self) -> Proposer:
        return self.make()

    @property
    def plans(self) -> list[Plan]:
        return [Plan(depth, self.tree) for depth in self.depths]


def all_plans(draftings: Sequence[Drafting]) -> list[Plan]:
    """Every plan of these, in order."""
    return [plan for drafting in draftings for plan in drafting.plans]


def rules_for(sampling: SamplingSettings, proposer: Proposer, settings: ScoreSettings) -> list[str]:
    """The accept rules under which a sample is scored: at temperature 0 every lossless rule is the greedy one.

    Above it, those of the settings that take what the proposer drafts; where none does, the plainest one that does.
    """
    if sampling.greedy:
        return ["greedy"]
    suited: list[str] = [rule for rule in settings.sampled_rules if _takes(rule, proposer, sampling)]
    return suited or [_plainest(proposer)]


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
