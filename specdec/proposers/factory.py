"""Factories of drafters and proposers, by the family of a draft."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ...errors import InputError
from ..drafts.base import DraftModule
from ..models import CausalModel
from ..tokenizer_bridge import ForeignDraft
from .base import Drafter, Proposer
from .cross_tokenizer import ForeignProposer
from .dflash import DFlashDrafter
from .dynamic_tree import DynamicProposer
from .eagle import Eagle3Drafter, EagleDrafter
from .medusa import MedusaDrafter
from .other_device import OtherDeviceDrafter, device_of, remote_copy
from .peagle import PEagleDrafter
from .small import SmallDrafter
from .static_tree import StaticProposer
from .tree_settings import ConfidentChain, DynamicTree, OwnTree

MakeDrafter = Callable[[Any, CausalModel], Drafter]
DRAFTERS: Mapping[str, MakeDrafter] = {
    "small": lambda draft, target: SmallDrafter(draft),
    "skipped": lambda draft, target: SmallDrafter(draft),
    "medusa": lambda draft, target: MedusaDrafter(draft),
    "eagle": EagleDrafter,
    "eagle3": Eagle3Drafter,
    "peagle": PEagleDrafter,
    "dflash": DFlashDrafter,
    "dspark": DFlashDrafter,
}
"""Drafter factory by family: (draft, target) -> Drafter, for a draft on the target's device."""


def make_drafter(draft: DraftModule, target: CausalModel, make: MakeDrafter | None = None) -> Drafter:
    """The drafter of a trained draft, on whatever device and in whatever dtype the draft is. `make`: instead of its
    family's."""
    make, here, there = make or DRAFTERS[draft.family], device_of(target), device_of(draft)
    if here == there:
        return make(draft, target)
    return OtherDeviceDrafter(make(draft, remote_copy(target, there)), here.device, there.device)


def make_proposer(draft: DraftModule, target: CausalModel, tree: OwnTree | None = None) -> Proposer:
    """The proposer of a trained draft: chains where `tree` is None, else trees. Raises InputError for a tree that the
    draft cannot make."""
    # Another tokenizer: drafts go by way of text, which only chains can.
    if isinstance(draft, ForeignDraft):
        if tree is not None:
            raise InputError("tree: a draft with another tokenizer than the target's drafts chains only")
        return ForeignProposer(draft)

    # A chain that confidence ends.
    if isinstance(tree, ConfidentChain):
        if not draft.has_confidence:
            raise InputError(f"tree: kind {tree.kind}: the draft has no confidence head")
        make = partial(DFlashDrafter, confidence_threshold=tree.confidence_threshold)
        return StaticProposer(make_drafter(draft, target, make), drawn="deterministic")

    # The target's tokenizer: one drafter per family, one proposer per kind of tree.
    drafter = make_drafter(draft, target)
    if tree is None:
        return StaticProposer(drafter)
    if isinstance(tree, DynamicTree):
        return DynamicProposer(drafter, tree.top_k, tree.nodes)
    return StaticProposer(drafter, tree.shape, tree.drawn)
