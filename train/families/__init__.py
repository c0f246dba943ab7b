"""Registry of the draft families that the loop can train, a file each."""

from collections.abc import Mapping
from pathlib import Path

import torch

from ...data.store import Capture
from ...errors import InputError
from ...specdec.formats.checkpoint import load_draft
from ..losses.linear_head import LossSettings
from ..precision import matrix_dtype
from ..settings import Settings
from .base import Family, LoadTarget
from .dflash import DFlashFamily
from .eagle import EagleFamily
from .eagle3 import Eagle3Family
from .medusa import MedusaFamily
from .small import SmallFamily

FAMILIES: Mapping[str, type[Family]] = {
    family.name: family for family in (SmallFamily, MedusaFamily, EagleFamily, Eagle3Family, DFlashFamily)
}


def family_of(settings: Settings) -> type[Family]:
    """Family class that the recipe names."""
    return FAMILIES[settings.family]


def check_teacher_signals(settings: Settings, bare: bool) -> None:
    """Raise InputError where stored signals are the only teacher and the capture is `bare` of them."""
    if bare and not family_of(settings).needs_target(settings):
        raise InputError(
            f"draft.family = {settings.family}: is taught by stored signals, of which capture.top_k 0 keeps none"
        )


def build(
    settings: Settings,
    init: Path,
    load_target: LoadTarget,
    capture: Capture,
    device: torch.device,
) -> Family:
    """A family around the draft that lies in `init`, float32. Only a family that needs the target loads it."""
    family = family_of(settings)
    # The draft, always in float32: matrix products alone may run in bfloat16.
    draft = load_draft(init, torch.device("cpu"), torch.float32).draft.to(device)
    if not isinstance(draft, family.draft_class):
        raise InputError(f"{init}: holds a draft of another family than draft.family {settings.family}")

    # The loss begins with the first phase's objective; the loop sets it anew before every step.
    loss = LossSettings(
        settings.objective_at(0),
        settings.lk_eta,
        matrix_dtype(settings.precision, device),
        settings.logits_bytes,
    )

    # The target is checked against the capture that it is to teach, and against the draft.
    target = load_target() if family.needs_target(settings) else None
    if target is not None:
        capture.check_target(target)
        draft.check_fits(target, f"draft.init_from: {settings.init_from}")
    return family(draft, settings, loss, target)
