"""A tree may be what a draft is chosen and promoted with; the next recipe meets it at that tree."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import heads
import loads
import pytest

from draftforge.errors import InputError, RecipeError
from draftforge.eval.costs import CostKey, CostTable
from draftforge.eval.draft_configs import DraftConfig
from draftforge.eval.score import Identity
from draftforge.eval.settings import SELECTION_SPLIT
from draftforge.pipeline import generate, scoring
from draftforge.pipeline.distill import distill
from draftforge.pipeline.generate import GeneratedAnswer
from draftforge.pipeline.options import GenerateOptions
from draftforge.pipeline.stages import captured_stages
from draftforge.pipeline.workspace import Workspace
from draftforge.recipe import load_recipe
from draftforge.specdec.drafts.eagle import EagleConfig, EagleDraft
from draftforge.specdec.formats import write_draft
from draftforge.specdec.proposers.tree_settings import StaticTree

TREES = {
    "grown": {"kind": "dynamic", "levels": 2, "top_k": 2, "nodes": 4},
    "best": {"kind": "measured", "nodes": 5, "levels": 2, "ranks": 4},
}


def tmp_draft(space: Workspace) -> str:
    """A random head of the target's size, as anybody might bring one."""
    target, folder = space.target, space.root / "head"
    folder.mkdir()
    sizes = {**heads.LAYER, "hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    write_draft(EagleDraft(EagleConfig(**sizes), False), folder, "vllm")
    return str(folder)


@pytest.fixture
def quick_trees(monkeypatch: pytest.MonkeyPatch) -> list[CostKey]:
    """Times under which the measured tree costs less than anything else."""
    keys: list[CostKey] = []

    def measure(key: CostKey, *args: Any) -> CostTable:
        keys.append(key)
        parts = {label: (0.001 if label == "best" else 1.0, 0.01, 0.0) for label in key.plans}
        return loads.batch_one_table(key, 0.02, parts)

    monkeypatch.setattr(scoring, "measure_costs", measure)
    return keys


def test_a_measured_tree_is_promoted_and_met_again(
    write_recipe: Callable[..., Path],
    stage_cache: None,
    quick_trees: list[CostKey],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_recipe()
    recipe = load_recipe(path, [f"score.trees={json.dumps(TREES)}"])
    outcome = distill(Workspace(recipe))
    assert outcome is not None and outcome.decision.promote
    assert outcome.scored.chosen.config.label == "best"
    lineage = outcome.version.lineage
    assert lineage.tree_name == "best" and lineage.draft_tokens == outcome.scored.chosen.config.levels
    assert isinstance(lineage.tree, StaticTree) and lineage.tree.choices and 1 <= len(lineage.tree.choices) <= 5
    assert set(outcome.scored.counts["tree"].to_pylist()) == {"", "grown", "best"}

    small = "drafts={small: {family: small, layers: 2, steps: 1, warmup_steps: 0, tokens_per_step: 256}}"
    other = distill(Workspace(load_recipe(path, [small])))  # knows no trees
    assert other is not None and other.decision.compared == outcome.version.reference
    holdout = capsys.readouterr().out.split("On the holdout")
    assert any(line.startswith("champion") and "best" in line for line in holdout[-2].splitlines())
    assert ["best"] in [list(key.plans) for key in quick_trees]


def test_generate_drafts_a_tree_of_the_recipe(write_recipe: Callable[..., Path], stage_cache: None) -> None:
    path = write_recipe(score={"draft_tokens": [2], "trees": TREES})
    space = Workspace(load_recipe(path))
    captured_stages(space)
    folder = tmp_draft(space)

    def said(
        tree: str | None, temperature: float = 0.0, draft: str = folder, rule: str | None = None
    ) -> GeneratedAnswer:
        options = GenerateOptions(draft=draft, rule=rule, tree=tree, max_new_tokens=12, temperature=temperature, seed=7)
        return generate.answer_prompt(space, "hi there", options)

    plain = said(None, draft="none").generation.tokens
    for tree in TREES:
        assert said(tree).generation.tokens == plain and said(tree).config == DraftConfig(2, tree)
    assert said("best", 0.9).rule == "onehot" and said(None, 0.9).rule == "token"
    assert len(said("grown", 0.9, rule="typical").generation.tokens) > 0

    # The same draft twice is as good as two: the second chain is drawn with numbers of its own.
    merged = {"both": {"kind": "merged", "levels": 2, "drafts": [folder]}}
    space = Workspace(load_recipe(path, [f"score.trees={json.dumps(merged)}"]))
    assert said("both").generation.tokens == plain and said("both").config == DraftConfig(2, "both")
    assert said("both", 0.9).rule == "multiround"
    scorer = scoring.Scorer(space, captured_stages(space).captured, SELECTION_SPLIT)
    trees = scorer.specs(scorer.load(Path(folder)))[1:]
    rows = scorer.counts(trees, Identity("head", 0))[0].to_pylist()
    assert rows and {row["tree"] for row in rows} == {"both"} and {row["method"] for row in rows} == {"decode"}
    with pytest.raises(RecipeError, match=r"score\.trees\.both.*nowhere: no such draft folder or file"):
        load_recipe(path, ["score.trees={both: {kind: merged, drafts: [nowhere]}}"])


def test_a_tree_that_cannot_be_is_refused(write_recipe: Callable[..., Path]) -> None:
    space = Workspace(load_recipe(write_recipe(score={"draft_tokens": [2], "trees": TREES})))
    folder = tmp_draft(space)

    def said(tree: str | None, draft: str = folder) -> GeneratedAnswer:
        options = GenerateOptions(draft=draft, tree=tree, max_new_tokens=12)
        return generate.answer_prompt(space, "hi there", options)

    with pytest.raises(InputError, match=r"--tree wide: must be one of the recipe's score.trees \(grown, best\)"):
        said("wide")
    with pytest.raises(InputError, match="--tree grown: --draft lookup drafts no trees"):
        said("grown", draft="lookup")
