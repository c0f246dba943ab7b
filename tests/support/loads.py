"""Fitted times of made-up machines."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from draftforge.eval.cost_model import CHAIN_WAY, PLAIN_WAY, CostFit, Point, PromptPoint
from draftforge.eval.costs import CostKey

Cost = Callable[[int, int, int, int], float]
"""Seconds by batch size, levels, tokens of a sequence and context."""

SIZES, CONTEXTS, PROMPTS = (1, 2, 4, 8, 16, 32, 64), (256, 512, 1024), (128, 448, 900)


def verify_seconds(batch: int, levels: int, tokens: int, context: int) -> float:
    """Bound by memory up to 64 tokens of a pass, then by arithmetic."""
    return 5e-3 + 2e-8 * batch * context + 5e-5 * max(batch * tokens - 64, 0)


def fit_of(
    draft_seconds: Cost,
    depths: Sequence[int] = (1, 2, 3, 4),
    prompt_seconds: Callable[[int], float] = lambda tokens: 2e-5 * tokens,
    verify: Cost = verify_seconds,
    trees: Mapping[str, tuple[int, int]] | None = None,
    draft: Any = None,
    hardware: str = "card",
) -> CostFit:
    """A fit of exact times. `trees`: levels and nodes by name."""
    ways = {(PLAIN_WAY, 0): 1, **{(CHAIN_WAY, K): K + 1 for K in depths}}
    ways |= {(f"tree {name}", levels): nodes + 1 for name, (levels, nodes) in (trees or {}).items()}
    points = [
        Point(
            way=way,
            batch_size=batch,
            levels=levels,
            tokens=tokens,
            context_tokens=context,
            draft_seconds=0.0 if way == PLAIN_WAY else draft_seconds(batch, levels, tokens, context),
            verify_seconds=verify(batch, levels, tokens, context),
            rest_seconds=0.0,
            rounds=9,
        )
        for ((way, levels), tokens), batch, context in itertools.product(ways.items(), SIZES, CONTEXTS)
    ]
    prompts = [
        PromptPoint(tokens=n, plain_seconds=prompt_seconds(n), draft_seconds=prompt_seconds(n) / 10) for n in PROMPTS
    ]
    plans: dict[str, dict[str, Any]] = {str(K): {"rule": "greedy", "levels": K, "tree": None} for K in depths}
    plans |= {name: {"rule": "greedy", "levels": levels, "tree": {}} for name, (levels, _) in (trees or {}).items()}
    key = CostKey(
        hardware=hardware, software="s", dtype="bfloat16", target={"class": "T"}, draft=draft or {"class": "D"},
        sampling="greedy", plans=plans,
    )  # fmt: skip
    return CostFit.of(key, points, prompts, 12_000_000, 512.0)
