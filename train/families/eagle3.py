"""`eagle3`: few decoder layers on the target's features (EAGLE-3; Li et al. 2025, arXiv 2503.01840), mostly one.

The frozen target runs outside the engine; its head is the teacher. Step k reads what the draft itself made at step
k - 1, as it will when it drafts (training-time test).

Shapes: B rows, T tokens, S steps ahead, N supervised positions, H hidden size, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...data.batches import Batch
from ...data.store import Capture
from ...specdec.drafts.eagle3 import Eagle3Config, Eagle3Draft
from ...specdec.engine_features import FLAGS, NAMES, not_honoured
from ...specdec.models import CausalModel
from ...specdec.targets import Target
from ..losses.linear_head import Head, LossSettings, Rows
from ..settings import Eagle3Settings
from .base import Inputs, LoadTarget, Start, resolve_aux_layers
from .feature_family import (
    FeatureFamily,
    check_vocabulary,
    fresh_draft,
    head_incompatibility,
    largest_vocabulary,
)
from .initial_weights import layer_fields
from .ttt_alignment import Alignment


class Eagle3Family(FeatureFamily[Eagle3Settings, Eagle3Draft]):
    """EAGLE-3 family: training-time test, in which step k reads the state that the draft itself made at step k - 1."""

    name = "eagle3"
    draft_class = Eagle3Draft

    def __init__(self, draft: Eagle3Draft, settings: Eagle3Settings, loss: LossSettings, target: Target | None) -> None:
        reduced = draft.config.draft_vocab_size < draft.config.vocab_size
        ids = draft.draft_ids if reduced else None
        super().__init__(draft, settings, loss, target, draft.config.aux_layers, ids)

    @classmethod
    def start(cls, settings: Eagle3Settings, seed: int, capture: Capture, load_target: LoadTarget) -> Start:
        """Fresh draft: random layers under the target's head, which is cut to the draft's vocabulary."""
        # The vocabulary and the dimensions, then random weights by the seed; the target's tables take their place.
        target = load_target()
        capture.check_target(target)

        def make(draft_ids: Tensor | None) -> Eagle3Draft:
            config = eagle3_config(settings, target, target.vocab_size if draft_ids is None else len(draft_ids))
            return Eagle3Draft(config, draft_ids, own_embeddings=settings.train_embeddings)

        return fresh_draft(cls.name, settings, seed, capture, target, make)

    @classmethod
    def incompatibility(cls, settings: Eagle3Settings, draft: Eagle3Draft, source: str) -> str | None:
        """Compare norms, layers, read layers, vocabulary, width and embeddings; its engines must compute the draft."""
        config = draft.config
        has: dict[str, Any] = {flag: getattr(config, flag) for flag in FLAGS}
        has |= {"layers": config.num_hidden_layers, "body": config.body, "sliding_window": config.sliding_window}
        for name, value in has.items():
            if (wanted := getattr(settings, name)) not in (None, value):
                return f"{name} = {wanted}: {source} has {value}"
        for engine in settings.serving_engines or ():
            if (odd := not_honoured(engine, config)) is not None:
                return f"serving_engines: {NAMES[engine]} does not compute {odd}, which {source} has"
        return head_incompatibility(settings, draft, source)

    @classmethod
    def check(cls, settings: Eagle3Settings, load_target: LoadTarget) -> Eagle3Draft:
        """Check that the target has the layers that are read, and the tokens that are drafted."""
        target = load_target()
        check_vocabulary(settings, target)
        config = eagle3_config(settings, target, largest_vocabulary(settings, target.vocab_size))
        with torch.device("meta"):
            return Eagle3Draft(config, own_embeddings=settings.train_embeddings)

    @classmethod
    def freeze(cls, draft: Eagle3Draft, settings: Eagle3Settings) -> None:
        """Train all but, where the recipe says so, the head."""
        super().freeze(draft, settings)
        draft.lm_head.requires_grad_(settings.train_head)

    @torch.no_grad()
    def inputs(self, batch: Batch, samples: Sequence[int]) -> Inputs:
        """Run the target, or take its cached features; embed the tokens where the draft has no embeddings."""
        features = self._features(batch, samples)
        embeds = self._target.embed(batch.ids_BT) if self.draft.embed_tokens is None else None
        return Inputs(batch, embeds, features)

    def rows(self, inputs: Inputs) -> Rows:
        """Rows: the states of all steps, aligned with the positions that teach them."""
        batch = inputs.batch
        assert inputs.features is not None
        # Embeddings of the draft's own are a part of the forward pass, because they are trained.
        embeds = inputs.embeds_BTH
        if self.draft.embed_tokens is not None:
            embeds = self.draft.embed_tokens(batch.ids_BT)

        # Unroll all steps, then pick, for each supervised token, the state that drafts it at each step.
        alignment = Alignment(batch)
        states = self.draft(embeds, inputs.features.aux_BTA, alignment.trained, len(self.step_weights))
        at_SN, valid_SN = alignment.rows(len(self.step_weights))
        states_SNH = torch.stack([state.flatten(0, 1)[at] for state, at in zip(states, at_SN, strict=True)])
        teacher = self.teacher(inputs.features)
        return Rows(self.draft.normed(states_SNH), valid_SN, teacher, self.step_weights)

    def head(self) -> Head:
        """The draft's own head; its norm is part of `rows`."""
        return Head(self.draft.lm_head.weight)


def eagle3_config(settings: Eagle3Settings, target: CausalModel, draft_vocabulary: int) -> Eagle3Config:
    """Configuration of a fresh draft: the target's dimensions, with the recipe's layers and norms."""
    flags: dict[str, Any] = {**settings.flags()}
    return Eagle3Config(
        **layer_fields(target, settings.intermediate_size),
        **flags,
        target_hidden_size=target.hidden_size,
        draft_vocab_size=draft_vocabulary,
        aux_layers=resolve_aux_layers(settings.aux_layers, target.num_layers),
        num_hidden_layers=settings.layers or 1,
        body=settings.body or "llama",
        sliding_window=settings.sliding_window,
    )
