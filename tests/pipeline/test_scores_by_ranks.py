"""Ranks that share a race count what one rank counts, each block of a checkpoint once; only the first takes times."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftforge.pipeline import distill as flow
from draftforge.pipeline import scoring
from draftforge.recipe import load_recipe


def score(recipe: str) -> dict[str, Any]:
    """On one of the ranks: what it counted, and how often it asked for times."""
    counted, times = list[list[Any]](), list[int]()
    whole, whole_times = scoring.Scorer.counts, scoring.Scorer.times

    def counts(self: Any, specs: Any, identity: Any, samples: Any = None, **options: Any) -> Any:
        counted.append([*identity, samples and samples[0].id, options.get("decoded", True)])
        return whole(self, specs, identity, samples, **options)

    def timed(self: Any, *args: Any) -> Any:
        times.append(len(counted))
        return whole_times(self, *args)

    scoring.Scorer.counts = counts  # type: ignore[assignment, method-assign]
    scoring.Scorer.times = timed  # type: ignore[assignment, method-assign]
    flow.score(load_recipe(Path(recipe)), None)
    return {"counted": counted, "times": times}


@pytest.mark.slow
def test_two_ranks_share_a_race(
    recipe_in: Callable[..., Path], run_distributed: Callable[..., list[Any]], tmp_path: Path
) -> None:
    score = {"draft_tokens": [1, 2], "decode_conversations": 2, "bootstrap_samples": 50}
    costs = {"costs": {"prompts": 1, "rounds": 4, "warmup_rounds": 0}, "race": {"error": 0.4, "blocks": 3}}
    recipe = recipe_in(tmp_path, score=score | costs)
    flow.score(load_recipe(recipe), None)
    (folder,) = (tmp_path / "work").glob("score-*")
    alone = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.parquet")}
    shutil.rmtree(folder)
    first, second = run_distributed(__file__, "score", 2, [recipe])
    assert {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.parquet")} == alone
    both = [tuple(one) for one in first["counted"] + second["counted"]]
    assert len(both) == len(set(both)) == len(alone) - 1 and second["counted"]
    assert first["times"] and not second["times"]
