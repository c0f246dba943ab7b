"""The learning rate of each step: a pure function, so that a resumed run needs no scheduler state."""

import math


def learning_rate(step: int, steps: int, warmup_steps: int, peak: float, final_share: float) -> float:
    """Rate of step `step` (0-based): linear warm-up to `peak`, then a cosine down to `peak * final_share`."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, steps - warmup_steps - 1)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return peak * (final_share + (1.0 - final_share) * cosine)
