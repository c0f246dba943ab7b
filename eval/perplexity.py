"""Perplexity of recorded answers under a draft. People like to see it; nothing here decides by it.

Shapes: R round starts, one drafted token each.
"""

import math
from collections.abc import Sequence

from ..data.store import Sample
from ..specdec.passes import running
from ..specdec.proposers.base import Proposer
from ..specdec.sampling import SamplingSettings
from .traces import TraceCache

_MOST = 700.0  # mean -log q whose exp is still a number
_AS_TRAINED = SamplingSettings(temperature=1.0)


def perplexity(proposer: Proposer, samples: Sequence[Sample], traces: TraceCache) -> float | None:
    """exp of the mean -log q of the answers' tokens at depth 1, temperature 1; None where that is no number.

    Tokens outside a reduced draft vocabulary have q = 0 and are left out, which flatters such a draft.
    """
    total, count = 0.0, 0
    for traced in traces.along(samples, proposer):
        with running(traced.pack.ids_BT.device):
            q_R = proposer.trace(traced.pack, 1, _AS_TRAINED, traced.states).q_RK[:, 0].double().cpu()
        inside_R = q_R > 0
        total -= float(q_R[inside_R].log().sum())
        count += int(inside_R.sum())
    known = count > 0 and total / count < _MOST
    return math.exp(total / count) if known else None
