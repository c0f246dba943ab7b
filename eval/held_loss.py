"""Loss of a target on held answers, before and after a training that changed it (Medusa-2).

The answers are recorded ones of a split that trained nothing. Every token counts but the first of an answer, at
temperature 1 without any processor.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..data.store import Sample
from ..specdec.models import CausalModel
from ..specdec.replay.target_trace import trace_target
from ..specdec.sampling_settings import SamplingSettings
from .acceptance import Estimate, ratio
from .table import interval
from .target_pass_cache import TargetPassCache

_UNPROCESSED = SamplingSettings(temperature=1.0)


class Loss(NamedTuple):
    """Loss summed over the tokens of some answers."""

    nats: float = 0.0
    tokens: int = 0


class LossChange(NamedTuple):
    """Mean loss of a target before and after a change, in nats a token, with intervals by conversation cluster."""

    before: Estimate
    after: Estimate
    difference: Estimate
    """After minus before, on the same tokens."""
    tokens: int

    def record(self) -> dict[str, Any]:
        """JSON-able form, which `loss_words` reads."""
        return {"tokens": self.tokens} | {
            name: getattr(self, name).record() for name in ("before", "after", "difference")
        }


def held_loss(target: CausalModel, samples: Sequence[Sample], pass_tokens: int = 0) -> dict[str, Loss]:
    """Loss of a target on recorded answers, by conversation cluster. `pass_tokens`: of one pass; 0: the device's."""
    found: dict[str, Loss] = {}
    for pack in TargetPassCache(target, 0, pass_tokens).packs(samples):
        some = [samples[index] for index in pack]
        traced = trace_target(target, some, _UNPROCESSED)
        assert traced.p_R is not None  # nothing is greedy
        nats_R = -traced.p_R.double().clamp(min=torch.finfo(torch.float32).tiny).log()
        nats_B = nats_R.new_zeros(len(some)).index_add(0, traced.pack.text_R, nats_R)
        for sample, nats, text in zip(some, nats_B.tolist(), traced.pack.texts):
            known = found.get(sample.cluster, Loss())
            found[sample.cluster] = Loss(known.nats + nats, known.tokens + text.rounds)
    return found


def loss_change(before: Mapping[str, Loss], after: Mapping[str, Loss], confidence: float) -> LossChange:
    """Change of a target's loss, from `held_loss` of the old one and of the new one on the same answers."""
    old_C, new_C = (np.array([losses[name].nats for name in before]) for losses in (before, after))
    tokens_C = np.array([float(loss.tokens) for loss in before.values()])
    old, new, more = (ratio(nats_C, tokens_C, confidence, "held answers") for nats_C in (old_C, new_C, new_C - old_C))
    return LossChange(old, new, more, int(tokens_C.sum()))


def loss_words(record: Mapping[str, Any]) -> str:
    """A recorded change in words."""
    after, before, difference = (record[name] for name in ("after", "before", "difference"))
    return (
        f"loss on {record['tokens']:,} tokens of held answers {interval(after, digits=3)} nats a token, "
        f"{interval(before, digits=3)} before its training with the draft: {interval(difference, digits=3, sign='+')}"
    )
