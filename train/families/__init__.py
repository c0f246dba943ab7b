"""The families that the loop can train."""

from collections.abc import Callable
from pathlib import Path

import torch

from ...data.store import Capture
from ...errors import InputError
from ...specdec.drafts.eagle3 import Eagle3Draft
from ...specdec.drafts.small import SmallDraft
from ...specdec.formats.checkpoint import load_draft
from ...specdec.targets import Target
from ..head import LossSettings
from ..precision import matrix_dtype
from ..settings import Eagle3Settings, Settings, SmallSettings
from .base import Family, Inputs
from .eagle3 import Eagle3Family
from .small import SmallFamily


def build(
    settings: Settings,
    init: Path,
    load_target: Callable[[], Target],
    capture: Capture,
    device: torch.device,
) -> Family:
    """A family around the draft that lies in `init`, float32. Only a family that needs the target loads it."""
    draft = load_draft(init, torch.device("cpu"), torch.float32).draft.to(device)
    loss = LossSettings(
        {str(name): weight for name, weight in settings.objective.items()},
        settings.lk_eta,
        matrix_dtype(settings.precision, device),
        settings.logits_bytes,
    )
    if isinstance(settings, SmallSettings) and isinstance(draft, SmallDraft):
        return SmallFamily(draft, settings, loss)
    if isinstance(settings, Eagle3Settings) and isinstance(draft, Eagle3Draft):
        target = load_target()
        capture.check_target(target)
        return Eagle3Family(draft, target, settings, loss)
    raise InputError(f"{init}: holds a draft of another family than draft.family {settings.family}")
