"""Perplexity of recorded answers under a draft. People like to see it; nothing here decides by it.

Shapes: T round starts, one drafted token each.
"""

import math
from collections.abc import Sequence

import torch

from ..data.store import Sample
from ..specdec.proposers.base import Proposer
from ..specdec.sampling import SamplingSettings
from .score import TraceCache

_MOST = 700.0  # mean -log q whose exp is still a number
_AS_TRAINED = SamplingSettings(temperature=1.0)


@torch.inference_mode()
def perplexity(proposer: Proposer, samples: Sequence[Sample], traces: TraceCache) -> float | None:
    """exp of the mean -log q of the answers' tokens at depth 1, temperature 1; None where that is no number.

    Tokens outside a reduced draft vocabulary have q = 0 and are left out, which flatters such a draft.
    """
    total, count = 0.0, 0
    for sample in samples:
        if len(sample.answer_ids) < 2:
            continue
        states = traces.of(sample, proposer).states
        ids = sample.prompt_ids + sample.answer_ids
        q_T = proposer.trace(ids, len(sample.prompt_ids) + 1, 1, _AS_TRAINED, states).q_TK[:, 0]
        inside_T = q_T > 0
        total -= float(q_T[inside_T].double().log().sum())
        count += int(inside_T.sum())
    known = count > 0 and total / count < _MOST
    return math.exp(total / count) if known else None
