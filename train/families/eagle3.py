"""`eagle3`: one decoder layer on the target's features. The frozen target runs beside the engine and teaches.

Shapes: B rows, T tokens, W trained positions a row, S steps ahead, N supervised positions, H hidden size, V vocabulary.

Position i holds feature h_i and token x_{i+1}; step k there drafts x_{i+2+k}. So the token x_{j+1}, supervised by the
target's distribution at j, is drafted at step k from position j - 1 - k, and the loss mask is that of x_{j+1}.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...data.batches import Batch
from ...errors import StaleInputError
from ...specdec.drafts.eagle3 import Eagle3Draft
from ...specdec.targets import Target
from ..head import Head, LossSettings, Rows, head_of
from ..objectives import Entries, live_entries
from ..settings import Eagle3Settings
from .base import Family, Inputs
from .features import Features, FeatureSource

_TOLERANCE = {torch.float32: 0.02, torch.float16: 0.5, torch.bfloat16: 1.0}
_CPU_FEATURES_BYTES = 1 << 31  # a CPU has more memory to spare than time
_CHECKED_LOGP = -8.0  # rarer tokens are not compared: rounding alone moves them far


@dataclass(frozen=True)
class LiveTeacher:
    """The target's head on its own hidden states, a few positions at a time: only the rows that the draft has."""

    head: Head
    features: Features
    draft_ids: Tensor | None

    @torch.no_grad()
    def entries(self, rows: slice) -> tuple[Entries, Tensor | None]:
        """The whole draft vocabulary."""
        logits_CJ = self.head.logits(self.features.hidden_NH[rows])
        return live_entries(logits_CJ, self.features.lse_N[rows], self.features.best_N[rows], self.draft_ids), None


class Eagle3Family(Family):
    """Training-time test: step k reads what the draft itself made at step k - 1."""

    name = "eagle3"
    needs_signals = False
    draft: Eagle3Draft

    def __init__(self, draft: Eagle3Draft, target: Target, settings: Eagle3Settings, loss: LossSettings) -> None:
        super().__init__(draft, loss)
        self._target = target
        self.step_weights = tuple(settings.step_decay**k for k in range(settings.draft_tokens))
        draft.requires_grad_(True)
        draft.lm_head.requires_grad_(settings.train_head)
        self._draft_ids: Tensor | None = None
        self._teacher_head = head_of(target)
        if draft.config.draft_vocab_size < draft.config.vocab_size:
            self._draft_ids = draft.draft_ids.to(target.device)
            self._teacher_head = self._teacher_head.only(self._draft_ids)
        budget = settings.features_bytes
        if budget is None:
            budget = _CPU_FEATURES_BYTES if target.device.type == "cpu" else 0
        self._features = FeatureSource(target, draft.config.aux_layers, budget, settings.logits_bytes, loss.dtype)

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
        states = self.draft(embeds, inputs.features.aux_BTA, place.first_B, place.width, len(self.step_weights))
        at_SN, valid_SN = place.rows(len(self.step_weights))
        states_SNH = torch.stack([state.flatten(0, 1)[at] for state, at in zip(states, at_SN, strict=True)])
        teacher = LiveTeacher(self._teacher_head, inputs.features, self._draft_ids)
        return Rows(self.draft.normed(states_SNH), valid_SN, teacher, self.step_weights)

    def head(self) -> Head:
        """The draft's own head; its norm is part of `rows`."""
        return Head(self.draft.lm_head.weight)

    @torch.no_grad()
    def check_teacher(self, batch: Batch) -> None:
        """Compare the live head with the stored top-k. Raises StaleInputError where they part."""
        assert batch.signals is not None
        hidden_NH = self._target.states(batch.ids_BT).hidden_BTH.flatten(0, 1)[batch.positions_N]
        logp_NV = self._target.logits(hidden_NH).float().log_softmax(-1)
        stored_NK = batch.signals.topk_logp_nk
        difference_NK = (logp_NV.gather(-1, batch.signals.topk_ids_nk.long()) - stored_NK).abs()
        largest = float(difference_NK.masked_fill(stored_NK < _CHECKED_LOGP, 0.0).max())
        limit = _TOLERANCE[self._target.dtype]
        if not largest <= limit:
            raise StaleInputError(
                f"capture: stored log-probs differ from the loaded target's by up to {largest:.3g}, "
                f"must be within {limit:g} for {self._target.dtype}; capture again"
            )


class Alignment:
    """Where the draft's states stand, and which supervised token each of them drafts."""

    def __init__(self, batch: Batch) -> None:
        offsets = torch.tensor(batch.offsets, device=batch.ids_BT.device)
        self._counts_B = offsets.diff()
        self._start_B = offsets[:-1]
        self._supervised = batch.supervised
        tokens = batch.ids_BT.shape[1]
        first_row = torch.arange(len(self._counts_B), device=offsets.device) * tokens
        # The first supervised position j of a row; a row with none trains nothing, wherever it starts.
        known = torch.cat([batch.positions_N, batch.positions_N.new_zeros(1)])
        j_B = torch.where(self._counts_B > 0, known[self._start_B] - first_row, 1)
        self.first_B = (j_B - 1).clamp_min(0)
        """[B] first trained position: the one that drafts the first supervised token at step 0, if there is one."""
        self._late_B = self.first_B - (j_B - 1)
        self.width = max(1, max(b - a for a, b in zip(batch.offsets, batch.offsets[1:])))
        """Trained positions a row."""

    def rows(self, steps: int) -> tuple[Tensor, Tensor]:
        """[S, N] where each supervised token is drafted, in the flattened [B, W] states, and whether it is."""
        row_N = torch.repeat_interleave(self._counts_B, output_size=self._supervised)
        local_N = torch.arange(len(row_N), device=row_N.device) - self._start_B[row_N]
        step_S1 = torch.arange(steps, device=row_N.device)[:, None]
        column_SN = local_N - self._late_B[row_N] - step_S1
        return row_N * self.width + column_SN.clamp_min(0), column_SN >= 0
