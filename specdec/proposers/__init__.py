"""Ways of drafting behind one protocol (`base.Proposer`)."""

from ...errors import InputError
from ..cross_tokenizer import ForeignDraft
from ..drafts import AnyDraft
from ..drafts.dflash import DFlashDraft
from ..drafts.eagle import EagleDraft
from ..drafts.layer_skip import SkippedDraft
from ..drafts.medusa import MedusaDraft
from ..drafts.small import SmallDraft
from ..models import CausalModel
from .base import Ask, Draft, Drafter, Proposer, Trace
from .cascade import CascadeProposer, SmallHelper
from .cross_tokenizer import ForeignProposer
from .dflash import DFlashDrafter
from .dynamic_tree import DynamicProposer
from .eagle import Eagle3Drafter, EagleDrafter
from .medusa import MedusaDrafter
from .merged import MergedProposer
from .other_device import ElsewhereDrafter, place_of, remote_copy
from .shape import TreeShape
from .small import SmallDrafter
from .static_tree import StaticProposer
from .trees import DynamicTree, Tree

__all__ = [
    "Ask",
    "CascadeProposer",
    "Draft",
    "Drafter",
    "DynamicProposer",
    "ForeignProposer",
    "MergedProposer",
    "Proposer",
    "SmallHelper",
    "StaticProposer",
    "Trace",
    "TreeShape",
    "make_drafter",
    "make_proposer",
]


def make_drafter(draft: AnyDraft, target: CausalModel) -> Drafter:
    """What reads a trained draft, wherever it lies."""
    here, there = place_of(target), place_of(draft)
    if here == there:
        return _drafter(draft, target)
    return ElsewhereDrafter(_drafter(draft, remote_copy(target, there)), here.device, there.device)


def _drafter(draft: AnyDraft, target: CausalModel) -> Drafter:
    if isinstance(draft, SmallDraft | SkippedDraft):
        return SmallDrafter(draft)
    if isinstance(draft, MedusaDraft):
        return MedusaDrafter(draft)
    if isinstance(draft, DFlashDraft):
        return DFlashDrafter(draft, target)
    if isinstance(draft, EagleDraft):
        return EagleDrafter(draft, target)
    return Eagle3Drafter(draft, target)


def make_proposer(draft: AnyDraft | ForeignDraft, target: CausalModel, tree: Tree | None = None) -> Proposer:
    """The proposer of a trained draft: of chains, or of trees."""
    if isinstance(draft, ForeignDraft):
        if tree is not None:
            raise InputError("tree: a draft with another tokenizer than the target's drafts chains only")
        return ForeignProposer(draft)
    drafter = make_drafter(draft, target)
    if tree is None:
        return StaticProposer(drafter)
    if isinstance(tree, DynamicTree):
        return DynamicProposer(drafter, tree.top_k, tree.nodes)
    return StaticProposer(drafter, tree.shape, tree.drawn)
