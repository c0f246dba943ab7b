"""`eagle3`: one decoder layer on the target's features. The frozen target runs beside the engine and teaches.

Shapes: B rows, T tokens, S steps ahead, N supervised positions, H hidden size, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ... import fingerprint
from ...data.batches import Batch
from ...data.store import Capture
from ...specdec.drafts.eagle3 import Eagle3Config, Eagle3Draft
from ...specdec.models import CausalModel
from ...specdec.targets import Target
from .. import vocabulary
from ..head import head_of
from ..rows import Head, LossSettings, Rows
from ..settings import Eagle3Settings
from .alignment import Alignment
from .base import Family, Inputs, LoadTarget, Start
from .features import FeatureSource
from .fit import aux_layers_of
from .shape import layer_fields
from .teacher import LiveTeacher, check_live


class Eagle3Family(Family[Eagle3Settings, Eagle3Draft]):
    """Training-time test: step k reads what the draft itself made at step k - 1."""

    name = "eagle3"
    draft_class = Eagle3Draft

    def __init__(self, draft: Eagle3Draft, settings: Eagle3Settings, loss: LossSettings, target: Target | None) -> None:
        super().__init__(draft, settings, loss, target)
        assert target is not None
        self._target = target
        self.step_weights = settings.weight_of_steps()
        draft.requires_grad_(True)
        draft.lm_head.requires_grad_(settings.train_head)
        self._draft_ids: Tensor | None = None
        self._target_head = self._teacher_head = head_of(target)
        if draft.config.draft_vocab_size < draft.config.vocab_size:
            self._draft_ids = draft.draft_ids.to(target.device)
            self._teacher_head = self._target_head.only(self._draft_ids)
        self._features = FeatureSource(
            target, draft.config.aux_layers, settings.features_bytes, settings.logits_bytes, loss.dtype
        )

    @classmethod
    def start(cls, settings: Eagle3Settings, seed: int, capture: Capture, load_target: LoadTarget) -> Start:
        """A random layer under the target's head, cut to the draft's vocabulary."""
        target = load_target()
        capture.check_target(target)
        draft_ids, extra = vocabulary.reduced(settings.draft_vocabulary, capture)
        config = eagle3_config(settings, target, target.vocab_size if draft_ids is None else len(draft_ids))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(fingerprint.of_json(["eagle3", seed])[:15], 16))
            draft = Eagle3Draft(config, draft_ids, own_embeddings=settings.train_embeddings)
        copy_from_target(draft, target)
        return Start(draft, extra)

    @classmethod
    def needs_target(cls, settings: Eagle3Settings) -> bool:
        """Always: for its features."""
        return True

    @classmethod
    def misfit(cls, settings: Eagle3Settings, draft: Eagle3Draft, source: str) -> str | None:
        """Vocabulary, layers, width, embeddings."""
        config = draft.config
        if settings.draft_vocabulary not in (None, config.draft_vocab_size):
            return f"draft_vocabulary = {settings.draft_vocabulary}: {source} drafts {config.draft_vocab_size} tokens"
        if settings.aux_layers not in (None, config.aux_layers):
            return f"aux_layers = {list(settings.aux_layers)}: {source} reads {list(config.aux_layers)}"
        if settings.intermediate_size not in (None, config.intermediate_size):
            return f"intermediate_size = {settings.intermediate_size}: {source} has {config.intermediate_size}"
        if settings.fc_norm not in (None, config.fc_norm):
            return f"fc_norm = {settings.fc_norm}: {source} has {config.fc_norm}"
        if settings.train_embeddings and draft.embed_tokens is None:
            return f"train_embeddings = true: {source} has no embeddings of its own"
        return None

    @classmethod
    def check(cls, settings: Eagle3Settings, load_target: LoadTarget) -> None:
        """The target has the layers that are read."""
        aux_layers_of(settings.aux_layers, load_target().num_layers)

    @torch.no_grad()
    def inputs(self, batch: Batch, samples: Sequence[int]) -> Inputs:
        """Run the target, or remember it: features of every position, hidden states of the supervised ones."""
        features = self._features(batch, samples)
        embeds = self._target.embed(batch.ids_BT) if self.draft.embed_tokens is None else None
        return Inputs(batch, embeds, features)

    def rows(self, inputs: Inputs) -> Rows:
        """States of all steps, lined up with the positions that teach them."""
        batch = inputs.batch
        assert inputs.features is not None
        embeds = inputs.embeds_BTH
        if self.draft.embed_tokens is not None:
            embeds = self.draft.embed_tokens(batch.ids_BT)
        place = Alignment(batch)
        states = self.draft(embeds, inputs.features.aux_BTA, place.trained, len(self.step_weights))
        at_SN, valid_SN = place.rows(len(self.step_weights))
        states_SNH = torch.stack([state.flatten(0, 1)[at] for state, at in zip(states, at_SN, strict=True)])
        teacher = LiveTeacher(self._teacher_head, inputs.features, self._draft_ids, self._target_head)
        return Rows(self.draft.normed(states_SNH), valid_SN, teacher, self.step_weights)

    def head(self) -> Head:
        """The draft's own head; its norm is part of `rows`."""
        return Head(self.draft.lm_head.weight)

    def check_teacher(self, batch: Batch) -> None:
        """Compare the live head with the stored top-k. Raises StaleInputError where they part."""
        check_live(self._target, batch)


@torch.no_grad()
def copy_from_target(draft: Eagle3Draft, target: CausalModel) -> None:
    """Start the head (and embeddings of the draft's own) from the target's."""
    rows = target.model.get_output_embeddings().weight.float().cpu()
    draft.lm_head.weight.copy_(rows[draft.draft_ids])
    if draft.embed_tokens is not None:
        draft.embed_tokens.weight.copy_(target.model.get_input_embeddings().weight.float().cpu())


def eagle3_config(settings: Eagle3Settings, target: CausalModel, draft_vocabulary: int) -> Eagle3Config:
    """The head's dimensions: the target's own, but one layer."""
    return Eagle3Config(
        **layer_fields(target, settings.intermediate_size),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=draft_vocabulary,
        aux_layers=aux_layers_of(settings.aux_layers, target.num_layers),
        fc_norm=bool(settings.fc_norm),
    )
