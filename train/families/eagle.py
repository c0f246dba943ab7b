"""`eagle`: one layer on the target's last state, under the target's own head (EAGLE-1; Li et al. 2024, 2401.15077).

Shapes: B rows, T tokens, S steps ahead, N supervised positions, H hidden size.

The state of step k at position i drafts x_{i+2+k} through the target's head, so it stands for the target's post-norm
state of x_{i+1+k}: a regression on that state is added to the objective. Head and embeddings stay the target's,
frozen, and are not stored.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...data.batches import Batch, moved
from ...data.split import seed_of
from ...data.store import Capture
from ...specdec.drafts.eagle import EagleConfig, EagleDraft
from ...specdec.sampling import Purpose, uniforms
from ...specdec.targets import Target
from ..losses.linear_head import Head, LossSettings, Rows, on_device
from ..settings import EagleSettings
from .base import ExtraLoss, Inputs, LoadTarget, Start
from .feature_family import FeatureFamily, seeded_init
from .initial_weights import layer_fields
from .ttt_alignment import Alignment

_NOISE_LENGTH = 512
"""The original project multiplies its noise by 512 over the text's length in tokens."""


class EagleFamily(FeatureFamily[EagleSettings, EagleDraft]):
    """EAGLE-1 family: training-time test over `draft_tokens` steps, of which one step is EAGLE-1 as published."""

    name = "eagle"
    draft_class = EagleDraft

    def __init__(self, draft: EagleDraft, settings: EagleSettings, loss: LossSettings, target: Target | None) -> None:
        super().__init__(draft, settings, loss, target)
        self._noise = settings.feature_noise
        self.extra_loss = ExtraLoss("feature_loss", settings.feature_weight) if settings.feature_weight else None

    @classmethod
    def start(cls, settings: EagleSettings, seed: int, capture: Capture, load_target: LoadTarget) -> Start:
        """Fresh draft: one random layer of the target's dimensions."""
        target = load_target()
        capture.check_target(target)
        config = EagleConfig(**layer_fields(target, settings.intermediate_size))
        with seeded_init(cls.name, seed):
            return Start(EagleDraft(config))

    @classmethod
    def incompatibility(cls, settings: EagleSettings, draft: EagleDraft, source: str) -> str | None:
        """Compare the width of the MLP; the draft must have no embeddings."""
        if settings.intermediate_size not in (None, draft.config.intermediate_size):
            return f"intermediate_size = {settings.intermediate_size}: {source} has {draft.config.intermediate_size}"
        if draft.embed_tokens is not None:
            return f"family = eagle: {source} has embeddings of its own, must read the target's"
        return None

    @classmethod
    def check(cls, settings: EagleSettings, load_target: LoadTarget) -> EagleDraft:
        """Check that the target's embeddings are as wide as its states (else `embed` raises FormatError)."""
        target = load_target()
        target.embed(torch.zeros(1, dtype=torch.long, device=target.device))
        with torch.device("meta"):
            return EagleDraft(EagleConfig(**layer_fields(target, settings.intermediate_size)))

    @torch.no_grad()
    def inputs(self, batch: Batch, samples: Sequence[int]) -> Inputs:
        """Run the target, or take its cached features; states that the draft reads get noise, its teacher's do not."""
        features = self._features(batch, samples)
        states_BTH = features.aux_BTA.float()
        if self._noise:
            states_BTH = states_BTH + self._noise_of(batch, samples, states_BTH.shape[-1])
        return Inputs(batch, self._target.embed(batch.ids_BT).float(), features._replace(aux_BTA=states_BTH))

    def _noise_of(self, batch: Batch, samples: Sequence[int], size: int) -> Tensor:
        """Uniform noise around 0, [B, T, H].

        A token's noise follows from its sample, its place there and the epoch alone, so that neither ranks nor
        micro-batches nor packing change what is trained.
        """
        # Seed and width of each token. The shorter a text, the wider its noise, as in the original project.
        seed_BT = torch.zeros(batch.ids_BT.shape, dtype=torch.int64)
        width_BT = torch.zeros(batch.ids_BT.shape)
        for sample, (row, start, length, _) in zip(samples, batch.spans):
            at = slice(start, start + length)
            seed_BT[row, at] = seed_of(sample, f"noise/{self.epoch}")
            width_BT[row, at] = self._noise * _NOISE_LENGTH / length

        # Counter-based random numbers at (seed, place in the sample): padding has width 0.
        seed_BT, width_BT = moved(seed_BT, batch.ids_BT.device), moved(width_BT, batch.ids_BT.device)
        rows = zip(seed_BT, batch.documents.positions_BT, width_BT)
        noise = [
            (uniforms(seed, place, Purpose.FINAL, size).float() - 0.5) * width[:, None] for seed, place, width in rows
        ]
        return torch.stack(noise)

    def rows(self, inputs: Inputs) -> Rows:
        """Rows: the states of all steps, aligned with the positions that teach them."""
        assert inputs.features is not None
        steps, alignment = len(self.step_weights), Alignment(inputs.batch)
        # Unroll all steps, then pick, for each supervised token, the state that drafts it at each step.
        states = self.draft(inputs.embeds_BTH, inputs.features.aux_BTA, alignment.trained, steps)
        at_SN, valid_SN = alignment.rows(steps)
        states_SNH = torch.stack([state.flatten(0, 1)[at] for state, at in zip(states, at_SN, strict=True)])

        # The teacher judges the tokens; the regression, where it has weight, the states themselves.
        hidden_NH, teacher = inputs.features.hidden_NH, self.teacher(inputs.features)
        return Rows(
            states_SNH,
            valid_SN,
            teacher,
            self.step_weights,
            extra_loss=lambda _: self._regression(states_SNH, hidden_NH, valid_SN),
        )

    def _regression(self, states_SNH: Tensor, hidden_NH: Tensor, valid_SN: Tensor) -> Tensor:
        """Feature regression: smooth L1 between each state and the target's, mean over H, summed over positions and
        weighted steps."""
        wanted_SNH = hidden_NH.float().expand_as(states_SNH)
        loss_SN = F.smooth_l1_loss(states_SNH.float(), wanted_SNH, reduction="none").mean(-1)
        weight_S1 = on_device(self.step_weights, loss_SN.device)[:, None]
        return (torch.where(valid_SN, loss_SN, 0.0) * weight_S1).sum()

    def head(self) -> Head:
        """Head of the target, frozen, with its scale and soft-cap."""
        return self._target_head
