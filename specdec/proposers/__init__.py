"""Ways of drafting behind one protocol (`base.Proposer`)."""

from ..drafts.eagle3 import Eagle3Draft
from ..drafts.small import SmallDraft
from ..models import CausalModel
from .base import Ask, Draft, Drafter, Proposer, Trace
from .dynamic import DynamicProposer
from .eagle import Eagle3Drafter
from .merged import MergedProposer
from .shape import TreeShape
from .small import SmallDrafter
from .static import StaticProposer

__all__ = [
    "Ask",
    "Draft",
    "Drafter",
    "DynamicProposer",
    "MergedProposer",
    "Proposer",
    "StaticProposer",
    "Trace",
    "TreeShape",
    "make_drafter",
    "make_proposer",
]


def make_drafter(draft: SmallDraft | Eagle3Draft, target: CausalModel) -> Drafter:
    """What reads a trained draft."""
    return SmallDrafter(draft) if isinstance(draft, SmallDraft) else Eagle3Drafter(draft, target)


def make_proposer(draft: SmallDraft | Eagle3Draft, target: CausalModel) -> Proposer:
    """The chain proposer of a trained draft."""
    return StaticProposer(make_drafter(draft, target))
