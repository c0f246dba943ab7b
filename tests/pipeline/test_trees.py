"""A tree may be what a draft is chosen and promoted with; the next recipe meets it at that tree."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import heads
import loads
import pytest

from draftforge.errors import InputError, RecipeError
from draftforge.eval.cost_table import CostKey, CostTable
from draftforge.eval.draft_configs import DraftConfig
from draftforge.eval.score import Identity
from draftforge.eval.settings import SELECTION_SPLIT
from draftforge.pipeline import bench, draft_scorer, generate
from draftforge.pipeline import distill as flow
from draftforge.pipeline.cli_options import BenchOptions, GenerateOptions
from draftforge.pipeline.distill import distill
from draftforge.pipeline.generate import GeneratedAnswer
from draftforge.pipeline.stages import Stages, captured_stages, check_training
from draftforge.pipeline.workspace import Workspace
from draftforge.recipe import load_recipe
from draftforge.registry.versions import CANDIDATE, CHAMPION, fetch
from draftforge.specdec.drafts.eagle import EagleConfig, EagleDraft
from draftforge.specdec.formats import write_draft
from draftforge.specdec.proposers.merged import MergedProposer
from draftforge.specdec.proposers.tree_settings import MergedTree, StaticTree
from draftforge.specdec.serving_plan import ServingPlan, write_plan
from draftforge.specdec.stored_draft import StoredDraft

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
    """Times under which the measured tree, or the merged one, costs less than anything else."""
    keys: list[CostKey] = []

    def measure(key: CostKey, *args: Any) -> CostTable:
        keys.append(key)
        parts = {label: (0.001 if label in ("best", "both") else 1.0, 0.01, 0.0) for label in key.plans}
        return loads.batch_one_table(key, 0.02, parts)

    monkeypatch.setattr(draft_scorer, "measure_costs", measure)
    return keys


@pytest.mark.slow
def test_a_measured_tree_is_promoted_and_met_again(
    write_recipe: Callable[..., Path],
    stage_cache: None,
    quick_trees: list[CostKey],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_recipe()
    recipe = load_recipe(path, [f"score.trees={json.dumps(TREES)}"])
    space = Workspace(recipe)
    outcome = distill(space)
    assert outcome is not None and outcome.decision.promote
    assert outcome.scored.chosen.config.label == "best"
    plan = outcome.version.lineage.plan
    assert plan is not None and plan.tree_name == "best" and plan.draft_tokens == outcome.scored.chosen.config.levels
    assert isinstance(plan.tree, StaticTree) and plan.tree.choices and 1 <= len(plan.tree.choices) <= 5
    assert plan.chain_tokens in recipe.score.draft_tokens and plan.rule == "greedy"
    assert set(outcome.scored.counts["tree"].to_pylist()) == {"", "grown", "best"}

    # Another recipe does not know that tree, and has one of two drafts.
    small = "drafts={small: {family: small, layers: 2, steps: 1, warmup_steps: 0, tokens_per_step: 256}}"
    merged = {"both": {"kind": "merged", "levels": 2, "drafts": [str(outcome.scored.chosen_folder)]}}
    other = distill(Workspace(load_recipe(path, [small, f"score.trees={json.dumps(merged)}"])))
    assert other is not None and other.decision.compared == outcome.version.reference
    holdout = capsys.readouterr().out.split("On the holdout")
    assert any(line.startswith("champion") and "best" in line for line in holdout[-2].splitlines())
    assert any(line.startswith("candidate") and "both" in line for line in holdout[-2].splitlines())
    assert ["best"] in [list(key.plans) for key in quick_trees]

    # What the second one's version drafts with is in the version, wherever its recipe had it.
    plan = other.version.lineage.plan
    assert plan is not None and isinstance(plan.tree, MergedTree) and plan.tree.drafts == [Path("parts/0")]
    alias = CHAMPION if other.decision.promote else CANDIDATE
    fetch(space.tracking, space.target_fingerprint, tmp_path / "fetched", alias)
    shutil.rmtree(outcome.scored.chosen_folder)
    found = StoredDraft.load(tmp_path / "fetched", space.target)
    assert isinstance(found.proposer(found.plan.tree), MergedProposer)


@pytest.mark.slow
def test_generate_drafts_a_tree_of_the_recipe_or_of_the_plan(
    write_recipe: Callable[..., Path], stage_cache: None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_recipe(score={"draft_tokens": [2], "trees": TREES})
    space = Workspace(load_recipe(path))
    captured_stages(space)
    folder = tmp_draft(space)

    def said(
        tree: str | None, temperature: float = 0.0, draft: str | None = None, rule: str | None = None
    ) -> GeneratedAnswer:
        draft = draft or folder
        options = GenerateOptions(draft=draft, rule=rule, tree=tree, max_new_tokens=12, temperature=temperature, seed=7)
        return generate.answer_prompt(space, "hi there", options)

    plain = said(None, draft="none").generation.tokens
    for tree in TREES:
        assert said(tree).generation.tokens == plain and said(tree).config == DraftConfig(2, tree)
    assert said("best", 0.9).rule == "onehot" and said(None, 0.9).rule == "token"
    assert len(said("grown", 0.9, rule="typical").generation.tokens) > 0

    # A plan in the draft's folder says what is drafted; K that is asked for wins, and is said.
    planned = Path(folder).rename(space.root / "planned")
    wide = StaticTree(kind="static", widths=[2, 1])
    write_plan(planned, ServingPlan(draft_tokens=2, tree_name="wide", tree=wide, chain_tokens=3, rule="multiround"))
    capsys.readouterr()
    assert said(None, draft=str(planned)).config == DraftConfig(2, "wide") and not capsys.readouterr().err
    assert said(None, 0.9, draft=str(planned)).rule == "onehot"  # the first that takes the tree as it is drawn
    options = GenerateOptions(draft=str(planned), draft_tokens=4, max_new_tokens=12)
    answer = generate.answer_prompt(space, "hi there", options)
    assert answer.config == DraftConfig(4) and answer.generation.tokens == plain
    assert f"{planned}: drafts K=4, as asked, not the tree wide of its plan" in capsys.readouterr().err
    (planned / "serve.json").unlink()
    folder = str(planned)
    assert said(None).config == DraftConfig(4)
    assert f"{planned}: the draft has no serve.json: K=4 is assumed" in capsys.readouterr().err

    # The same draft twice is as good as two: the second chain is drawn with numbers of its own.
    merged = {"both": {"kind": "merged", "levels": 2, "drafts": [folder]}}
    space = Workspace(load_recipe(path, [f"score.trees={json.dumps(merged)}"]))
    assert said("both").generation.tokens == plain and said("both").config == DraftConfig(2, "both")
    assert said("both", 0.9).rule == "multiround"
    scorer = draft_scorer.Scorer(space, captured_stages(space).captured, SELECTION_SPLIT)
    trees = scorer.specs(scorer.load(Path(folder)))[1:]
    rows = scorer.counts(trees, Identity("head", 0))[0].to_pylist()
    assert (
        rows and {row["tree"] for row in rows} == {"both"} and {row["method"] for row in rows} == {"replay", "decode"}
    )


@pytest.mark.slow
def test_merged_drafts_of_the_recipe_are_trained_scored_promoted_and_benched(
    write_recipe: Callable[..., Path],
    stage_cache: None,
    quick_trees: list[CostKey],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each with the last checkpoint of the other; what is registered holds both."""
    trees = {"both": {"kind": "merged", "drafts": ["eagle3", "small"], "levels": 2}}
    space = Workspace(load_recipe(write_recipe(), [f"score.trees={json.dumps(trees)}"]))
    flow.score(space.recipe, "small")  # trains the other one for it
    outcome = distill(space)
    assert outcome is not None and outcome.decision.promote and outcome.scored.chosen.config.label == "both"
    rows = [row for row in outcome.scored.counts.to_pylist() if row["tree"] == "both"]
    assert {row["draft"] for row in rows} == {"small", "eagle3"}
    assert {row["method"] for row in rows} == {"replay", "decode"}  # compared in float32, or refused
    # The plan names where the other one lies, and the version has it.
    chosen, folders = outcome.scored.chosen.draft, outcome.scored.folders
    other = next(name for name in ("small", "eagle3") if name != chosen)
    last = folders[other, max(step for name, step in folders if name == other)]
    tree = outcome.scored.trees[chosen, outcome.scored.chosen.step]["both"]
    assert isinstance(tree, MergedTree) and tree.drafts == [last]
    plan = outcome.version.lineage.plan
    assert plan is not None and isinstance(plan.tree, MergedTree) and plan.tree.digests == tree.digests
    fetch(space.tracking, space.target_fingerprint, tmp_path / "fetched", CHAMPION)
    found = StoredDraft.load(tmp_path / "fetched", space.target)
    assert isinstance(found.proposer(found.plan.tree), MergedProposer)
    assert f"vLLM drafts no such tree: K={plan.chain_tokens}" in capsys.readouterr().err

    # Generate and bench draft with it too: by the plan, and by name.
    asked = [GenerateOptions(draft="none"), GenerateOptions(), GenerateOptions(draft="small", tree="both")]
    said = [generate.answer_prompt(space, "hi there", replace(options, max_new_tokens=12)) for options in asked]
    assert {tuple(one.generation.tokens) for one in said} == {tuple(said[0].generation.tokens)}
    assert [one.config for one in said[1:]] == [DraftConfig(2, "both")] * 2
    with pytest.raises(InputError, match="--tree both: merges eagle3, small: name one of them with --draft"):
        generate.answer_prompt(space, "hi there", GenerateOptions(tree="both"))
    finder = bench.find_methods(space, BenchOptions(prompts=[tmp_path / "log"], draft_tokens=[2]), longest=40)
    drafted = {method.name: [entry.setting.tree for entry in method.entries] for method in finder.methods}
    assert drafted == {"plain": [""], "small": ["", "both"], "eagle3": ["", "both"], "lookup": [""]}
    assert not finder.failures


def test_merged_drafts_that_are_none_are_refused_with_the_recipe(write_recipe: Callable[..., Path]) -> None:
    path = write_recipe()
    for drafts, said in (
        (
            "[smal, eagle3]",
            r"score\.trees\.both\.drafts\.0 = smal: must be one of the recipe's drafts \(small, eagle3\)",
        ),
        ("[small]", r"score\.trees\.both\.drafts = \['small'\]: must be two drafts or more"),
        ("[./nowhere]", r"score\.trees\.both.*nowhere: no such draft folder or file"),
        ("[runs/nowhere]", r"score\.trees\.both.*runs/nowhere: no such draft folder or file"),
    ):
        with pytest.raises(RecipeError, match=said):
            load_recipe(path, [f"score.trees={{both: {{kind: merged, drafts: {drafts}}}}}"])


def test_merged_drafts_that_read_unlike_layers_are_refused_first(write_recipe: Callable[..., Path]) -> None:
    head = {"family": "eagle3", "aux_layers": [1, 2, 3], "steps": 4, "warmup_steps": 1, "tokens_per_step": 256}
    trees = {"both": {"kind": "merged", "drafts": ["eagle3", "head"]}}
    changes = [f"drafts.head={json.dumps(head)}", f"score.trees={json.dumps(trees)}"]
    space = Workspace(load_recipe(write_recipe(), changes))
    with pytest.raises(
        InputError, match=r"score\.trees\.both: .* \(eagle3 \[1, 2, 4\], head \[1, 2, 3\]\): must read the"
    ):
        check_training(Stages(space), ["head"])


def test_parts_of_a_merged_tree_that_no_version_may_hold_are_refused_first(
    write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "pytorch_model.bin").write_bytes(b"x")
    trees = {"both": {"kind": "merged", "drafts": [str(tmp_path / "part")]}}
    space = Workspace(load_recipe(write_recipe(score={"trees": trees})))
    with pytest.raises(
        InputError, match=r"score\.trees\.both: .*pytorch_model\.bin: is a pickle; a version holds none"
    ):
        distill(space)
    assert not list(space.root.glob("mix-*"))


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
