"""Objectives that the closed form is tested on: each alone, all together, at other temperatures."""

from draftforge.train.losses.objectives import OBJECTIVES
from draftforge.train.losses.schedule import Objective, Weighted

ETA = 2.0
MIXES: dict[str, Objective] = {
    **{name: {name: 0.7} for name in OBJECTIVES},
    "all": {name: 0.1 * n for n, name in enumerate(OBJECTIVES, start=1)},
    "warm": {"kl": Weighted(weight=2.0, temperature=3.0)},
    "mixed": {"kl": 1.0, "tv": Weighted(weight=0.5, temperature=2.0), "jsd": Weighted(weight=0.5, temperature=0.5)},
}
