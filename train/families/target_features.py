"""Target features and distributions at a batch, from the frozen target: recomputed each time, or cached by sample.

Shapes: B rows, T tokens, A features of all captured layers, H hidden size, N supervised tokens (n of one sample).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from ...data.batches import Batch
from ...errors import StaleInputError
from ...specdec.kernels.document_mask import Documents
from ...specdec.targets import Target
from ..losses.linear_head import Head
from ..losses.objectives import FullDistribution, draft_index

_CPU_BUDGET_BYTES = 1 << 31  # a CPU has more memory to spare than time


class Features(NamedTuple):
    """Hidden features of every token, with the states that give the target's distribution at supervised positions."""

    aux_BTA: Tensor
    """Features of the layers that are read; the post-norm states where none is named."""
    hidden_NH: Tensor
    """Post-norm states of supervised positions, which the head reads."""
    lse_N: Tensor | None
    """log sum exp of the logits over the whole vocabulary. None: computed later from the teacher's logits."""
    best_N: Tensor | None
    """Id of the likeliest token; None where `lse_N` is."""


def summary(logits_CV: Tensor) -> tuple[Tensor, Tensor]:
    """log sum exp, float32, and index of the largest logit of each row; on CUDA in one sweep without a float32 copy."""
    if logits_CV.is_cuda and find_spec("triton") is not None:
        from ..losses.fused_triton import summarize

        return summarize(logits_CV)
    logits_CV = logits_CV.float()
    return logits_CV.logsumexp(-1), logits_CV.argmax(-1)


class FeatureSource:
    """Feature source: runs the target on a batch. With a memory budget, features are cached and a sample is run once.

    With a cache each sample is run on its own, so that its features do not depend on the batch in which it first came:
    a resumed run, which begins with an empty cache, sees the same numbers bit for bit.
    """

    def __init__(
        self,
        target: Target,
        aux_layers: Sequence[int] | None,
        budget_bytes: int | None,
        logits_bytes: int,
        matrix_dtype: torch.dtype = torch.float32,
        summarised: bool = True,
    ) -> None:
        """`aux_layers` empty: the post-norm states are the features; None: there are none.

        `budget_bytes` None: 2 GiB where the target is on the CPU, 0 elsewhere; always 0 for a sharded target, which all
        ranks must run equally often. `summarised`: `lse` and `best` are wanted even of what is not cached.
        """
        # The budget: none for a sharded target, whose ranks would get out of step where one finds a sample cached.
        if target.collective:
            budget_bytes = 0
        if budget_bytes is None:
            budget_bytes = _CPU_BUDGET_BYTES if target.device.type == "cpu" else 0
        self._target, self._aux_layers = target, aux_layers
        # A float32 target's layers run in the precision that the draft trains in; its head stays in float32.
        self._half = target.dtype == torch.float32 and matrix_dtype == torch.bfloat16
        self._free_bytes = budget_bytes
        self._chunk = max(1, logits_bytes // (4 * target.vocab_size))
        self._caches = budget_bytes > 0
        self._summarises = summarised or self._caches
        self._cache: dict[int, Features] = {}

    @torch.no_grad()
    def __call__(self, batch: Batch, samples: Sequence[int]) -> Features:
        """Features of a batch of the samples of these indexes."""
        # Without a cache: the whole batch in one pass.
        if not self._caches or batch.empty:
            return self._run(batch.ids_BT, batch.positions_N, batch.documents)

        # With one: sample by sample, then laid out as the batch is; padding has zeros.
        known = [self._of_sample(batch, number, index) for number, index in enumerate(samples)]
        aux_BTA = known[0].aux_BTA.new_zeros(*batch.ids_BT.shape, known[0].aux_BTA.shape[-1])
        for place, features in zip(batch.spans, known, strict=True):
            aux_BTA[place.row, place.start : place.start + place.length] = features.aux_BTA[0]
        return Features(aux_BTA, *(torch.cat(parts) for parts in list(zip(*known))[1:]))

    def _of_sample(self, batch: Batch, number: int, index: int) -> Features:
        if index in self._cache:
            return self._cache[index]
        # The sample's tokens, and its supervised positions counted from its own start.
        row, start, length, _ = batch.spans[number]
        mine = slice(batch.offsets[number], batch.offsets[number + 1])
        positions_n = batch.positions_N[mine] - (row * batch.ids_BT.shape[1] + start)
        features = self._run(batch.ids_BT[row : row + 1, start : start + length], positions_n)

        # Cached as long as it fits; none is thrown out, because every sample comes once an epoch.
        size = sum(tensor.numel() * tensor.element_size() for tensor in features if tensor is not None)
        if size <= self._free_bytes:
            self._cache[index] = features
            self._free_bytes -= size
        return features

    def _run(self, ids_BT: Tensor, positions_N: Tensor, documents: Documents | None = None) -> Features:
        # States of the layers that are read, and of the supervised positions what the head reads.
        with torch.autocast(ids_BT.device.type, torch.bfloat16, enabled=self._half):
            states = self._target.states(ids_BT, aux_layers=self._aux_layers or (), documents=documents)
        if self._aux_layers is None:
            aux_BTA = states.hidden_BTH[..., :0]
        else:
            aux_BTA = states.hidden_BTH if states.aux_BTA is None else states.aux_BTA
        hidden_NH = states.hidden_BTH.flatten(0, 1)[positions_N].to(self._target.dtype)
        aux_BTA = aux_BTA.to(self._target.dtype)

        # log sum exp and likeliest token, from few positions' logits at a time. Empty first parts serve an empty batch.
        if not self._summarises:
            return Features(aux_BTA, hidden_NH, None, None)
        lse, best = [hidden_NH.new_zeros(0, dtype=torch.float32)], [positions_N[:0]]
        for part_CH in torch.split(hidden_NH, self._chunk):
            lse_C, best_C = summary(self._target.logits(part_CH))
            lse.append(lse_C)
            best.append(best_C)
        return Features(aux_BTA, hidden_NH, torch.cat(lse), torch.cat(best))


_TOLERANCE = {torch.float32: 0.02, torch.float16: 0.5, torch.bfloat16: 1.0}
_CHECKED_LOGP = -8.0  # rarer tokens are not compared: rounding alone moves them far


@dataclass(frozen=True)
class LiveTeacher:
    """Live teacher: computes the target's logits from its hidden states, a few positions at a time, for the tokens that
    the draft has."""

    head: Head
    """Target's head for the draft's tokens: for all tokens where `draft_ids` is None."""
    features: Features
    """Features of the batch. A reduced vocabulary needs their `lse_N` and `best_N`: its logits do not tell them."""
    draft_ids: Tensor | None
    """Target ids of a reduced vocabulary, ascending; None: all tokens."""
    whole_head: Head | None = None
    """Target's head for all tokens, which a reduced vocabulary needs at temperatures other than 1."""
    live = True

    @torch.no_grad()
    def at(self, rows: slice, temperatures: Sequence[float]) -> FullDistribution:
        """Target's distribution over the whole draft vocabulary, in its dtype, at the positions `rows`."""
        # Logits of the draft's tokens; the likeliest token over all of the target's.
        hidden_CH = self.features.hidden_NH[rows]
        logits_CV = self.head.logits(hidden_CH)
        if self.features.lse_N is None or self.features.best_N is None:
            lse_C, best_C = summary(logits_CV)
        else:
            lse_C, best_C = self.features.lse_N[rows], self.features.best_N[rows]

        # log sum exp at each temperature, always over the target's whole vocabulary.
        if self.draft_ids is None:
            lse = [lse_C if t == 1.0 else _lse(logits_CV, t) for t in temperatures]
        else:
            lse = [lse_C if t == 1.0 else self._whole_lse(hidden_CH, t) for t in temperatures]
        return FullDistribution(logits_CV, torch.stack(lse), draft_index(best_C, self.draft_ids))

    def _whole_lse(self, hidden_CH: Tensor, temperature: float) -> Tensor:
        """log sum exp over the whole vocabulary, with no more logits at a time than the draft's tokens have."""
        assert self.whole_head is not None
        size = max(1, len(hidden_CH) * self.head.weight_VH.shape[0] // self.whole_head.weight_VH.shape[0])
        return torch.cat([_lse(self.whole_head.logits(part), temperature) for part in torch.split(hidden_CH, size)])


def _lse(logits_CV: Tensor, temperature: float) -> Tensor:
    return (logits_CV.float() / temperature).logsumexp(-1)


@torch.no_grad()
def check_live(target: Target, batch: Batch) -> None:
    """Compare the live head with the stored top-k of a batch. Raises StaleInputError where they differ."""
    assert batch.signals is not None
    # Log-probs of the loaded target at the stored top-k tokens of the supervised positions.
    hidden_NH = target.states(batch.ids_BT).hidden_BTH.flatten(0, 1)[batch.positions_N]
    logp_NV = target.logits(hidden_NH).float().log_softmax(-1)
    stored_NK = batch.signals.topk_logp_nk
    difference_NK = (logp_NV.gather(-1, batch.signals.topk_ids_nk.long()) - stored_NK).abs()

    # `not <=` catches NaN too. The tolerance is that of rounding in the target's dtype.
    largest = float(difference_NK.masked_fill(stored_NK < _CHECKED_LOGP, 0.0).max())
    limit = _TOLERANCE[target.dtype]
    if not largest <= limit:
        raise StaleInputError(
            f"capture: stored log-probs differ from the loaded target's by up to {largest:.3g}, "
            f"must be within {limit:g} for {target.dtype}; capture again"
        )
