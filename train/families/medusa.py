"""`medusa`: heads that each draft one token further from the target's state (Cai et al. 2024, 2401.10774).

Shapes: B rows, T tokens, M trained positions a row, K heads, N supervised positions, H hidden size, V vocabulary.

Head k at position i reads the target's post-norm state of x_i and drafts x_{i+2+k}. Each head has a matrix to the
whole vocabulary: K x V x H weights, and with `train_heads` three times that in gradients and moments, all float32 (8
heads of an 8-billion-parameter target with 128,256 tokens: 17 GB, 67 GB in all). Without it they stay equal to the
target's head, and one copy is held; the checkpoint stores K of them, as engines want.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ...data.batches import Batch
from ...data.store import Capture
from ...specdec.drafts.layers import take
from ...specdec.drafts.medusa import MedusaConfig, MedusaDraft
from ...specdec.models import CausalModel, head_arithmetic
from ...specdec.targets import Target
from ..head import Head, LossSettings, Rows, head_of
from ..settings import MedusaSettings
from .alignment import Alignment
from .base import Family, Inputs, LoadTarget, Start
from .features import FeatureSource
from .teacher import LiveTeacher, check_live


class MedusaFamily(Family[MedusaSettings, MedusaDraft]):
    """Heads on a frozen target: Medusa-1."""

    name = "medusa"
    draft_class = MedusaDraft

    def __init__(self, draft: MedusaDraft, settings: MedusaSettings, loss: LossSettings, target: Target | None) -> None:
        super().__init__(draft, settings, loss, target)
        assert target is not None
        self._target, self._teacher_head = target, head_of(target)
        self.step_weights = tuple(settings.step_decay**k for k in range(settings.draft_tokens))
        draft.requires_grad_(True)
        if not settings.train_heads:
            draft.lm_heads.requires_grad_(False)
            _share_equal(draft)
        self._features = FeatureSource(target, (), settings.features_bytes, settings.logits_bytes, loss.dtype)

    @classmethod
    def start(cls, settings: MedusaSettings, seed: int, capture: Capture, load_target: LoadTarget) -> Start:
        """Blocks that do nothing yet, under the target's head: nothing is random."""
        target = load_target()
        capture.check_target(target)
        config = MedusaConfig(
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            num_heads=settings.draft_tokens,
            num_layers=settings.blocks,
            fc_bias=False,
        )
        draft = MedusaDraft(config)
        copy_heads(draft, target)
        return Start(draft)

    @classmethod
    def needs_target(cls, settings: MedusaSettings) -> bool:
        """Always: for its states."""
        return True

    @classmethod
    def misfit(cls, settings: MedusaSettings, draft: MedusaDraft, source: str) -> str | None:
        """Heads and their blocks."""
        config = draft.config
        if settings.draft_tokens != config.num_heads:
            return f"draft_tokens = {settings.draft_tokens}: {source} has {config.num_heads} heads"
        if settings.blocks != config.num_layers:
            return f"blocks = {settings.blocks}: {source} has {config.num_layers} a head"
        return None

    @classmethod
    def check(cls, settings: MedusaSettings, load_target: LoadTarget) -> None:
        """Any target will do."""

    @torch.no_grad()
    def inputs(self, batch: Batch, samples: Sequence[int]) -> Inputs:
        """Run the target, or remember it: states of every position."""
        return Inputs(batch, features=self._features(batch, samples))

    def rows(self, inputs: Inputs) -> Rows:
        """What each head's matrix reads, lined up with the positions that teach it."""
        assert inputs.features is not None
        return self._rows(inputs, inputs.features.aux_BTA)

    def _rows(self, inputs: Inputs, hidden_BTH: Tensor) -> Rows:
        assert inputs.features is not None
        heads, place = len(self.step_weights), Alignment(inputs.batch)
        read_LH = take(hidden_BTH, place.trained.at_BM).flatten(0, 1).float()  # L = B x M
        at_KN, valid_KN = place.rows(heads)
        states_KNH = torch.stack([self.draft.state(read_LH[at], head) for head, at in enumerate(at_KN)])
        teacher = LiveTeacher(self._teacher_head, inputs.features, None)
        return Rows(states_KNH, valid_KN, teacher, self.step_weights)

    def head(self) -> list[Head]:
        """Each head's own matrix. Engines add no scale or soft-cap of the target's."""
        return [Head(linear.weight) for linear in self.draft.lm_heads]  # type: ignore[arg-type]

    def check_teacher(self, batch: Batch) -> None:
        """Compare the live head with the stored top-k. Raises StaleInputError where they part."""
        check_live(self._target, batch)


@torch.no_grad()
def copy_heads(draft: MedusaDraft, target: CausalModel) -> None:
    """Start every head from the target's, its scale included; a soft-cap has to be learned."""
    scale, _ = head_arithmetic(target.config)
    rows_VH = target.model.get_output_embeddings().weight.float().cpu() * scale
    for linear in draft.lm_heads:
        linear.weight.copy_(rows_VH)  # type: ignore[operator]


def _share_equal(draft: MedusaDraft) -> None:
    """Hold equal matrices once."""
    first: nn.Parameter = draft.lm_heads[0].weight  # type: ignore[assignment]
    for linear in draft.lm_heads:
        if torch.equal(linear.weight, first):  # type: ignore[arg-type]
            linear.weight = first
