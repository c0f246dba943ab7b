"""Ways of drafting behind one protocol (`base.Proposer`)."""

from ..drafts import AnyDraft
from ..drafts.eagle import EagleDraft
from ..drafts.medusa import MedusaDraft
from ..drafts.small import SmallDraft
from ..models import CausalModel
from .base import Ask, Draft, Drafter, Proposer, Trace
from .dynamic import DynamicProposer
from .eagle import Eagle3Drafter, EagleDrafter
from .medusa import MedusaDrafter
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


def make_drafter(draft: AnyDraft, target: CausalModel) -> Drafter:
    """What reads a trained draft."""
    if isinstance(draft, SmallDraft):
        return SmallDrafter(draft)
    if isinstance(draft, MedusaDraft):
        return MedusaDrafter(draft)
    if isinstance(draft, EagleDraft):
        return EagleDrafter(draft, target)
    return Eagle3Drafter(draft, target)


def make_proposer(draft: AnyDraft, target: CausalModel) -> Proposer:
    """The chain proposer of a trained draft."""
    return StaticProposer(make_drafter(draft, target))
