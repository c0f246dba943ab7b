"""Whether the start of a training fits recipe, target and capture; one line about the field where it does not.

The training knows one draft and calls its section `draft`; who knows the draft's name puts that in.
"""

from collections.abc import Callable
from typing import get_args

from ...data.conversation import Split
from ...data.store import Capture
from ...errors import InputError
from ...specdec.drafts import AnyDraft
from ...specdec.drafts.eagle3 import Eagle3Draft
from ...specdec.drafts.small import SmallDraft
from ...specdec.targets import Target
from ..settings import Eagle3Settings, Settings, SmallSettings
from .prune import check_layers, spread


def misfit(settings: Settings, draft: AnyDraft, source: str) -> str | None:
    """The first field by which the recipe asks for another shape than the draft from `source` has; None: it fits."""
    if isinstance(settings, SmallSettings) and isinstance(draft, SmallDraft):
        wanted, found = settings.layers, draft.lm.num_layers
        if wanted is not None and (wanted if isinstance(wanted, int) else len(wanted)) != found:
            return f"layers = {wanted}: {source} has {found} layers"
    if isinstance(settings, Eagle3Settings) and isinstance(draft, Eagle3Draft):
        config = draft.config
        if settings.draft_vocabulary not in (None, config.draft_vocab_size):
            return f"draft_vocabulary = {settings.draft_vocabulary}: {source} drafts {config.draft_vocab_size} tokens"
        if settings.aux_layers not in (None, config.aux_layers):
            return f"aux_layers = {list(settings.aux_layers)}: {source} reads {list(config.aux_layers)}"
        if settings.intermediate_size not in (None, config.intermediate_size):
            return f"intermediate_size = {settings.intermediate_size}: {source} has {config.intermediate_size}"
        if settings.train_embeddings and draft.embed_tokens is None:
            return f"train_embeddings = true: {source} has no embeddings of its own"
    return None


def check_layers_exist(settings: Settings, load_target: Callable[[], Target]) -> None:
    """Raise InputError where a draft that is made of the target names layers that it does not have."""
    if settings.init_from is not None:
        return
    if isinstance(settings, Eagle3Settings):
        aux_layers_of(settings, load_target().num_layers)
    elif settings.from_model is None:
        layers_of(settings, load_target().num_layers)


def layers_of(settings: SmallSettings, total: int) -> list[int]:
    """The target layers that are kept."""
    if isinstance(settings.layers, int):
        return spread(settings.layers, total)
    assert settings.layers is not None
    check_layers(settings.layers, total)
    return settings.layers


def aux_layers_of(settings: Eagle3Settings, total: int) -> tuple[int, int, int]:
    """The target layers that are read."""
    if settings.aux_layers is None:
        return default_aux_layers(total)
    if not 1 <= settings.aux_layers[0] <= settings.aux_layers[-1] <= total:
        raise InputError(
            f"draft.aux_layers = {list(settings.aux_layers)}: must be between 1 and {total}, the target's last layer"
        )
    return settings.aux_layers


def default_aux_layers(total: int) -> tuple[int, int, int]:
    """A low, a middle and a high layer; shallow targets give what they have."""
    if total < 3:
        raise InputError(f"draft.family eagle3: the target has {total} layers, must have at least 3")
    usual = (2, total // 2, total - 3)
    return usual if usual[0] < usual[1] < usual[2] else (1, (total + 1) // 2, total)


def check_context(draft: SmallDraft, capture: Capture, where: str) -> None:
    """Raise InputError where the draft is too short for an answer that it is trained or scored on."""
    samples = [sample for split in get_args(Split) for sample in capture.samples(split)]
    longest = max((len(sample.prompt_ids) + len(sample.answer_ids) for sample in samples), default=0)
    if draft.lm.max_positions < longest:
        raise InputError(
            f"{where}: its context of {draft.lm.max_positions} tokens (max_position_embeddings) must hold the "
            f"longest captured prompt and answer, {longest} tokens"
        )
