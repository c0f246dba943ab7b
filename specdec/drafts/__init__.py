"""Draft modules (weights and forward passes), one file a family; `base.py` holds their common interface."""

from .base import DraftModule
from .dflash import DFlashDraft
from .eagle import EagleDraft
from .eagle3 import Eagle3Draft
from .layer_skip import SkippedDraft
from .medusa import MedusaDraft
from .peagle import PEagleDraft
from .small import SmallDraft

__all__ = [
    "DFlashDraft",
    "DraftModule",
    "Eagle3Draft",
    "EagleDraft",
    "MedusaDraft",
    "PEagleDraft",
    "SkippedDraft",
    "SmallDraft",
]
