"""Base of the families that read the frozen target's features, with its head as the teacher (medusa, eagle, eagle3,
dflash).

Shapes: V vocabulary, H hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from typing_extensions import TypeVar

from ... import fingerprint
from ...data.batches import Batch
from ...data.store import Capture
from ...specdec.drafts.dflash import DFlashDraft
from ...specdec.drafts.eagle3 import Eagle3Draft
from ...specdec.models import CausalModel
from ...specdec.targets import Target
from ..losses.linear_head import LossSettings, head_of
from ..settings import DFlashSettings, Eagle3Settings, EagleSettings, MedusaSettings
from ..vocabulary import AUTO, check_size, reduced
from .base import DraftT, Family, Start
from .target_features import Features, FeatureSource, LiveTeacher, check_live

FeatureSettingsT = TypeVar("FeatureSettingsT", bound=MedusaSettings | EagleSettings | Eagle3Settings | DFlashSettings)
HeadSettings = Eagle3Settings | DFlashSettings


class FeatureFamily(Family[FeatureSettingsT, DraftT]):
    """A draft that the target's hidden states teach; all of it is trained unless the family freezes a part."""

    def __init__(
        self,
        draft: DraftT,
        settings: FeatureSettingsT,
        loss: LossSettings,
        target: Target | None,
        aux_layers: Sequence[int] = (),
        draft_ids: Tensor | None = None,
    ) -> None:
        """`aux_layers`: target layers that are read; empty: its last state. `draft_ids`: of a reduced vocabulary."""
        super().__init__(draft, settings, loss, target)
        assert target is not None
        self._target = target

        self.step_weights = settings.weight_of_steps()
        self.freeze(draft, settings)

        # Under a reduced vocabulary the teacher has its rows alone; the source gives it log sum exp over all tokens.
        self._draft_ids = None if draft_ids is None else draft_ids.to(target.device)
        self._target_head = head_of(target)
        self._teacher_head = self._target_head if self._draft_ids is None else self._target_head.only(self._draft_ids)
        self._features = FeatureSource(
            target, aux_layers, settings.features_bytes, settings.logits_bytes, loss.dtype, self._draft_ids is not None
        )

    @classmethod
    def needs_target(cls, settings: FeatureSettingsT) -> bool:
        """Always True: the draft reads the target's features."""
        return True

    def teacher(self, features: Features) -> LiveTeacher:
        """The target's distribution at the supervised positions of a batch."""
        return LiveTeacher(self._teacher_head, features, self._draft_ids, self._target_head)

    def check_teacher(self, batch: Batch) -> None:
        """Compare the live head with the stored top-k. Raises StaleInputError where they differ."""
        check_live(self._target, batch)


@contextmanager
def seeded_init(family: str, seed: int) -> Iterator[None]:
    """Seed random initial weights by the family and the recipe's seed; torch's generator is restored afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(fingerprint.of_json([family, seed])[:15], 16))
        yield


@torch.no_grad()
def copy_tables(draft: Eagle3Draft | DFlashDraft, target: CausalModel) -> None:
    """Copy the target's head rows and embeddings into those that the draft has of its own."""
    if draft.lm_head is not None:
        rows_VH = target.model.get_output_embeddings().weight.float().cpu()
        draft.lm_head.weight.copy_(rows_VH[draft.draft_ids])
    if draft.embed_tokens is not None:
        draft.embed_tokens.weight.copy_(target.model.get_input_embeddings().weight.float().cpu())


def fresh_draft(
    family: str,
    settings: HeadSettings,
    seed: int,
    capture: Capture,
    target: CausalModel,
    make: Callable[[Tensor | None], Eagle3Draft | DFlashDraft],
) -> Start:
    """Fresh draft of the recipe's vocabulary: random by the seed, the target's tables in place of its own.

    `make`: a draft of these token ids, None: of the target's whole vocabulary.
    """

    def seeded(draft_ids: Tensor | None) -> Eagle3Draft | DFlashDraft:
        with seeded_init(family, seed):
            return make(draft_ids)

    draft_ids, extra = reduced(settings.draft_vocabulary, capture, settings.draft_tokens, seeded, target)
    draft = seeded(draft_ids)
    copy_tables(draft, target)
    return Start(draft, extra)


def check_vocabulary(settings: HeadSettings, target: Target) -> None:
    """Raise InputError for a draft vocabulary that is no part of the target's, or lacks its special and stop tokens."""
    if isinstance(settings.draft_vocabulary, int):
        always = {*target.tokenizer.all_special_ids, *target.stop_ids}
        check_size(settings.draft_vocabulary, target.vocab_size, always)


def largest_vocabulary(settings: HeadSettings, vocabulary: int) -> int:
    """Tokens of a draft vocabulary, the target's whole `vocabulary` where they are not known yet."""
    return settings.draft_vocabulary if isinstance(settings.draft_vocabulary, int) else vocabulary


def head_incompatibility(settings: HeadSettings, draft: Eagle3Draft | DFlashDraft, source: str) -> str | None:
    """The first of read layers, vocabulary, width and embeddings that the recipe wants otherwise; None: all fit."""
    # A field that the recipe leaves out takes the draft as it is.
    config = draft.config
    if settings.aux_layers not in (None, config.aux_layers):
        return f"aux_layers = {list(settings.aux_layers or ())}: {source} reads {list(config.aux_layers)}"
    if settings.draft_vocabulary not in (None, AUTO, config.draft_vocab_size):
        return f"draft_vocabulary = {settings.draft_vocabulary}: {source} drafts {config.draft_vocab_size} tokens"
    if settings.intermediate_size not in (None, config.intermediate_size):
        return f"intermediate_size = {settings.intermediate_size}: {source} has {config.intermediate_size}"
    if settings.train_embeddings and draft.embed_tokens is None:
        return f"train_embeddings = true: {source} has no embeddings of its own"
    return None
