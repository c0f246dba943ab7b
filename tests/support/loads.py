"""Cost tables of made-up machines."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from draftforge.eval.cost_table import CHAIN_WAY, PLAIN_WAY, CostKey, CostTable, MeasuredPrompt, MeasuredRound, way_of
from draftforge.eval.draft_configs import DraftConfig

Cost = Callable[[int, int, int, int], float]
"""Seconds by batch size, levels, tokens of a sequence and context."""

SIZES, CONTEXTS, PROMPTS = (1, 2, 4, 8, 16, 32, 64), (256, 512, 1024), (128, 448, 900)


def verify_seconds(batch: int, levels: int, tokens: int, context: int) -> float:
    """Bound by memory up to 64 tokens of a pass, then by arithmetic."""
    return 5e-3 + 2e-8 * batch * context + 5e-5 * max(batch * tokens - 64, 0)


def grid_table(
    draft_seconds: Cost,
    depths: Sequence[int] = (1, 2, 3, 4),
    prompt_seconds: Callable[[int], float] = lambda tokens: 2e-5 * tokens,
    verify: Cost = verify_seconds,
    trees: Mapping[str, tuple[int, int]] | None = None,
    draft: Any = None,
    hardware: str = "card",
) -> CostTable:
    """A table of exact times over a grid. `trees`: levels and nodes by name."""
    ways = {(PLAIN_WAY, 0): 1, **{(CHAIN_WAY, K): K + 1 for K in depths}}
    ways |= {(f"tree {name}", levels): nodes + 1 for name, (levels, nodes) in (trees or {}).items()}
    points = [
        MeasuredRound(
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
        MeasuredPrompt(tokens=n, plain_seconds=prompt_seconds(n), draft_seconds=prompt_seconds(n) / 10) for n in PROMPTS
    ]
    plans: dict[str, dict[str, Any]] = {str(K): {"rule": "greedy", "levels": K, "tree": None} for K in depths}
    plans |= {name: {"rule": "greedy", "levels": levels, "tree": {}} for name, (levels, _) in (trees or {}).items()}
    key = CostKey(
        hardware=hardware, software="s", dtype="bfloat16", target={"class": "T"}, draft=draft or {"class": "D"},
        sampling="greedy", plans=plans,
    )  # fmt: skip
    return CostTable(key=key, points=points, prompt_points=prompts, draft_bytes=12_000_000, cache_bytes_per_token=512.0)


def batch_one_table(key: CostKey, plain: float, parts: Mapping[str, tuple[float, float, float]]) -> CostTable:
    """A table at batch 1. `parts`: seconds of draft, verification and rest by the key's labels."""
    rounds = {DraftConfig(0): (0.0, plain, 0.0)}
    for label, seconds in parts.items():
        rounds[DraftConfig(key.plans[label]["levels"], "" if label.isdigit() else label)] = seconds
    points = [
        MeasuredRound(
            way=way_of(config),
            batch_size=1,
            levels=config.levels,
            tokens=config.levels + 1,
            context_tokens=30.0,
            draft_seconds=draft,
            verify_seconds=verify,
            rest_seconds=rest,
            rounds=9,
        )
        for config, (draft, verify, rest) in rounds.items()
    ]
    return CostTable(key=key, points=points)
