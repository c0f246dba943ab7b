"""How many more conversations a comparison needs before its interval is narrow enough to pass.

The standard error of a paired difference falls with the square root of the number of independent clusters. With n
clusters behind a lower half-width w = z_c * se, a lower end above `floor` is expected with probability `POWER` from

    n' = n * (se * (z_c + z_power) / (value - floor))^2,   z_c the normal quantile of the interval's confidence,

if the difference stays what it is now. (Sample size of a one-sided non-inferiority test: Chow, Shao, Wang & Lokhnygina,
Sample Size Calculations in Clinical Research, 3rd ed. 2018, section 3.2, with the variance taken from the clusters.)
"""

import math
from statistics import NormalDist

POWER = 0.8
"""Probability that the comparison passes with the number that is named, were the gain truly what it seems."""


def more_conversations(value: float, low: float, floor: float, conversations: int, confidence: float) -> int | None:
    """How many conversations beyond the present ones; None where no number helps, or nothing is known.

    `value`, `low`: a difference and the lower end of its interval of `confidence`, on so many conversations; clusters
    are taken to hold as many conversations as now.
    """
    room, width = value - floor, value - low
    if not (room > 0 and width > 0 and math.isfinite(width) and 0 < confidence < 1) or conversations < 1:
        return None
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    stretched = width / z * (z + NormalDist().inv_cdf(POWER)) / room
    return max(math.ceil(conversations * stretched**2) - conversations, 0)
