"""Objectives that the fused loss is tested on: each alone, all together, at other temperatures."""

from draftforge.train.losses.fused_torch import FUSED
from draftforge.train.losses.objectives import OBJECTIVES
from draftforge.train.losses.schedule import Objective, Weighted

ETA = 2.0
MIXES: dict[str, Objective] = {
    **{name: {name: 0.7} for name in sorted(FUSED)},
    "all": {name: 0.1 * n for n, name in enumerate(sorted(FUSED), start=1)},
    "warm": {"kl": Weighted(weight=2.0, temperature=3.0)},
    "mixed": {
        "kl": 1.0,
        "tv": Weighted(weight=0.5, temperature=2.0),
        "lk_hybrid": Weighted(weight=0.5, temperature=0.5),
    },
}
OTHERS: dict[str, Objective] = {
    **{name: {name: 0.7} for name in sorted(OBJECTIVES.keys() - FUSED)},
    "every": {name: 0.1 * n for n, name in enumerate(OBJECTIVES, start=1)},
    "cold": {"kl": 1.0, "jsd": Weighted(weight=0.5, temperature=0.5)},
}
"""What the pass in torch does not know."""
