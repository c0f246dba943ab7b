"""Whether a draft, ours or a stranger's, can draft for a target: sizes only, before anything is run."""

from pathlib import Path

from ...errors import InputError
from ..drafts import AnyDraft
from ..drafts.dflash import DFlashDraft
from ..drafts.eagle3 import Eagle3Draft
from ..drafts.layer_skip import SkippedDraft
from ..drafts.medusa import MedusaDraft
from ..drafts.small import SmallDraft
from ..models import CausalModel


def check_fits(draft: AnyDraft, target: CausalModel, where: str | Path) -> None:
    """Raise InputError, its line beginning with `where`, for the first field in which draft and target differ."""
    _equal(where, "vocab_size", draft.vocab_size, target.vocab_size)
    if isinstance(draft, SmallDraft | SkippedDraft):
        return
    if not isinstance(draft, Eagle3Draft | DFlashDraft):
        _equal(where, "hidden_size", draft.config.hidden_size, target.hidden_size)
        return
    config = draft.config
    _equal(where, "target_hidden_size", config.target_hidden_size, target.hidden_size)
    # It reads the target's embeddings, or is read by its head.
    if draft.embed_tokens is None or draft.lm_head is None:
        _equal(where, "hidden_size", config.hidden_size, target.hidden_size)
    if config.aux_layers[-1] > target.num_layers:
        layers = list(config.aux_layers)
        raise InputError(f"{where}: captured layers {layers}: the target has {target.num_layers} layers")


def check_context(draft: AnyDraft, longest: int, where: str | Path) -> None:
    """Refuse a draft that was made for shorter texts than the `longest` of these, in tokens. Medusa heads never are."""
    known = None
    if isinstance(draft, SmallDraft | SkippedDraft):
        known = draft.lm.max_positions
    elif not isinstance(draft, MedusaDraft):
        known = draft.config.max_position_embeddings
    if known is not None and known < longest:
        raise InputError(f"{where}: max_position_embeddings {known}: must hold the longest text here, {longest} tokens")


def _equal(where: str | Path, field: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise InputError(f"{where}: {field} {found}: must be {wanted}, the target's")
