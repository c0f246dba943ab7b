"""The modules of drafts, a file a family."""

from .dflash import DFlashDraft
from .eagle import EagleDraft
from .eagle3 import Eagle3Draft
from .layer_skip import SkippedDraft
from .medusa import MedusaDraft
from .small import SmallDraft

AnyDraft = SmallDraft | MedusaDraft | EagleDraft | Eagle3Draft | DFlashDraft | SkippedDraft
