"""A tiny recipe that runs the whole pipeline in seconds: a random target, two domains, two families."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftforge.pipeline import distill as flow
from draftforge.pipeline.scoring import Scored

WORDS = ("order", "password", "capital", "sum", "city", "settings", "function", "country", "number", "Monday")


@pytest.fixture
def write_recipe(tmp_path: Path, recipe_in: Callable[..., Path]) -> Callable[..., Path]:
    """`write_recipe(**sections)`: `recipe_in` the test's own folder."""
    return partial(recipe_in, tmp_path)


@pytest.fixture(scope="session")
def recipe_in(tiny_target_folder: Path) -> Callable[..., Path]:
    """`recipe_in(folder, **sections)`: a recipe with its sources beside it; sections replace the default ones."""

    def write(folder: Path, **sections: Any) -> Path:
        for domain in ("support", "code"):
            lines = [
                json.dumps(
                    {
                        "id": f"{domain}/{i}",
                        "domain": domain,
                        "group": f"{domain}-{i}",
                        "turns": [f"{domain} {WORDS[i % 10]} {WORDS[(i * 7 + i // 10) % 10]} number {i}?"],
                    }
                )
                for i in range(24)
            ]
            (folder / f"{domain}.jsonl").write_text("\n".join(lines) + "\n")
        recipe: dict[str, Any] = {
            "name": "tiny",
            "workdir": str(folder / "work"),
            "target": {"model": str(tiny_target_folder), "device": "cpu"},
            "mix": {
                "sources": [{"kind": "turns", "path": "support.jsonl"}, {"kind": "turns", "path": "code.jsonl"}],
                "selection_share": 0.25,
                "holdout_share": 0.25,
            },
            "capture": {"max_new_tokens": 12, "batch_size": 8, "top_k": 16, "tail_samples": 4, "shard_samples": 16},
            "drafts": {
                "small": {
                    "family": "small",
                    "layers": 2,
                    "steps": 4,
                    "warmup_steps": 1,
                    "tokens_per_step": 256,
                    "score_every": 2,
                },
                "eagle3": {
                    "family": "eagle3",
                    "draft_vocabulary": 200,
                    "steps": 4,
                    "warmup_steps": 1,
                    "tokens_per_step": 256,
                    "aux_layers": [1, 2, 4],
                    "draft_tokens": 2,
                },
            },
            "score": {
                "draft_tokens": [1, 2],
                "decode_conversations": 2,
                "bootstrap_samples": 50,
                "costs": {"prompts": 2, "rounds": 6, "warmup_rounds": 0},
            },
            "gate": {"min_conversations": 2},
        }
        recipe.update(sections)
        path = folder / "tiny.yaml"
        path.write_text(yaml.safe_dump(recipe, sort_keys=False))
        return path

    return write


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[Scored]:
    """What the score verb has come to."""
    seen: list[Scored] = []
    inner = flow.score_foreign

    def spy(*args: object) -> Scored:
        seen.append(inner(*args))  # type: ignore[arg-type]
        return seen[-1]

    monkeypatch.setattr(flow, "score_foreign", spy)
    return seen
