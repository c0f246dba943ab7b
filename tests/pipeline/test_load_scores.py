"""Scores at a load, from the recipe to the leaderboard: engines' rules, fits of other machines, races."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import loads
import pytest
import yaml
from simulated_engine import SimulatedServers

from draftforge.errors import InputError
from draftforge.eval import counts, engine_costs
from draftforge.eval.cost_table import CostKey, CostTable, read_tables, write_tables
from draftforge.eval.draft_configs import DraftConfig, ProposerSpec
from draftforge.eval.score import Identity
from draftforge.eval.serving_load import LoadTimes
from draftforge.eval.settings import ScoreSettings
from draftforge.pipeline import distill as flow
from draftforge.pipeline import draft_scorer, export, holdout_evaluation, parallel_scoring, scoring
from draftforge.pipeline.scoring import Scored
from draftforge.pipeline.workspace import Workspace
from draftforge.recipe import load_recipe
from draftforge.specdec.proposers.prompt_lookup import PromptLookup
from draftforge.specdec.proposers.tree_settings import StaticTree
from draftforge.specdec.serving_plan import ServingPlan, find_plan

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("stage_cache")]
WriteRecipe = Callable[..., Path]
SMALL = {"family": "small", "layers": 2, "steps": 2, "warmup_steps": 1, "tokens_per_step": 256}
LOAD = {"engine": "vllm", "batch_sizes": {1: 0.75, 8: 0.25}, "context_tokens": 300, "answer_tokens": 16}


@pytest.fixture
def boards(monkeypatch: pytest.MonkeyPatch) -> list[Scored]:
    """What the score verb has come to, of the recipe's own drafts."""
    seen: list[Scored] = []
    inner = flow.score_stage

    def spy(*args: Any) -> Scored:
        scored = inner(*args)
        assert scored is not None
        seen.append(scored)
        return scored

    monkeypatch.setattr(flow, "score_stage", spy)
    return seen


@pytest.fixture
def made_up_times(monkeypatch: pytest.MonkeyPatch) -> list[CostKey]:
    """Measuring takes no time, and gives what a made-up card would."""
    keys: list[CostKey] = []

    def measure(key: CostKey, *args: Any) -> CostTable:
        keys.append(key)
        depths = [plan["levels"] for label, plan in key.plans.items() if label.isdigit()]
        trees = {label: (plan["levels"], 2) for label, plan in key.plans.items() if not label.isdigit()}
        table = loads.grid_table(lambda B, L, N, C: 1e-4 * L, depths, trees=trees)
        return table.model_copy(update={"key": key})

    monkeypatch.setattr(draft_scorer, "measure_costs", measure)
    return keys


def score_section(**changes: Any) -> dict[str, Any]:
    return {
        "draft_tokens": [1, 2],
        "decode_conversations": 2,
        "sampling": [{}, {"temperature": 1.0}],
        "load": LOAD,
        **changes,
    }


def test_a_score_at_a_load_end_to_end(
    write_recipe: WriteRecipe, boards: list[Scored], capsys: pytest.CaptureFixture[str]
) -> None:
    """With times measured for real, at batch 1 and 2; then again with the fit as if it were of another machine."""
    load = {**LOAD, "batch_sizes": {1: 0.75, 2: 0.25}, "context_tokens": 40}
    costs = {"prompts": 1, "rounds": 5, "warmup_rounds": 1}
    path = write_recipe(score=score_section(load=load, costs=costs), drafts={"small": SMALL})
    flow.score(load_recipe(path), None)
    (scored,) = boards
    assert set(scored.counts["rule"].to_pylist()) == {"greedy", "onehot", "token", "block", "match"}
    assert {row.rule for row in scored.domains} == {"greedy", "onehot"}  # the engine's decides
    row = scored.chosen
    assert row.load is not None and [one.batch_size for one in row.load.batches] == [1, 2]
    assert {one.draft for one in scored.rows} == {"lookup", "small"} and len(scored.domains) == 2 * 4
    said = capsys.readouterr()
    for text in ("goodput", "at each batch size", "load: vllm, batch 1 (75%), 2 (25%), context 40, answers of 16"):
        assert text in said.out
    assert "By batch size: " in said.err and "Goodput" in said.err

    times = scored.stage.folder / scoring.TIMES_FILE
    tables = read_tables(times)
    assert len(tables) == 2  # lookup, small
    other = path.parent / "theirs.json"
    theirs = [one.model_copy(update={"key": one.key.model_copy(update={"hardware": "card"})}) for one in tables]
    write_tables(other, theirs)
    flow.score(load_recipe(path, [f"score.costs.fit={other}"]), None)
    assert boards[1].stage == scored.stage and boards[1].rows[0].load is not None
    assert boards[1].rows[0].load.hardware == "card, float32" and "times of card, float32" in capsys.readouterr().out
    with pytest.raises(
        InputError, match=r"score\.costs\.fit .*theirs\.json: holds no times of this target and draft: "
    ):
        flow.score(load_recipe(path, [f"score.costs.fit={other}", "score.draft_tokens=[1,4]"]), None)


def test_scores_and_a_policy_by_times_of_the_operators_engine(
    write_recipe: WriteRecipe,
    boards: list[Scored],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Both drafts have their times in the engine, measured once; tables, page and policy say whose they are."""
    servers = SimulatedServers(
        lambda B, K, C: 5e-3 + 1e-3 * max(B * (K + 1) - 8, 0), lambda tokens, K: 1e-6 * tokens, ks=(1, 2)
    )  # fmt: skip
    for module in (draft_scorer, scoring):
        monkeypatch.setattr(module, "EngineServers", lambda *given: servers)
    monkeypatch.setattr(engine_costs, "_LOOK_SECONDS", 0)
    load = {**LOAD, "context_tokens": 60, "costs": {"engine": "vllm", "start": True}}
    costs = {"prompts": 1, "rounds": 5, "warmup_rounds": 1}
    recipe = load_recipe(
        write_recipe(score=score_section(load=load, costs=costs, tie_share=0), drafts={"small": SMALL})
    )
    flow.score(recipe, None)
    started = ["plain", "lookup 1 greedy", "lookup 2 greedy", "small 1 greedy", "small 2 greedy"]
    assert servers.started == ["check lookup small", *started]
    (scored,) = boards
    whose = "times of vLLM 0.99 on 1 card, float32, measured 20"
    said = " ".join(capsys.readouterr().out.split())
    assert said.count(whose) >= 3 and "n/a" in said  # draft ms
    row, tables = scored.chosen, read_tables(scored.times_file)
    assert row.load is not None and row.load.hardware.startswith("vLLM 0.99 on 1 card, float32, measured ")
    assert {(table.key.engine, table.key.software, table.key.hardware) for table in tables} == {
        ("vLLM 0.99", "vLLM 0.99 --flag", "1 card")
    }
    assert max(table.draft_bytes for table in tables) > 0 and max(table.cache_bytes_per_token for table in tables) > 0
    times = json.loads((scored.stage.folder / scoring.SCORES_FILE).read_text())["times"]
    assert whose in times["said"] and times["software"] == "vLLM 0.99 --flag"
    # A round of the batch's first eight tokens costs a plain one here.
    found = scored.times[row.draft, row.step]
    assert isinstance(found, LoadTimes) and found.fit.round(DraftConfig(2), 1, 60).seconds == pytest.approx(5e-3)
    # The same times serve the policy, and are not measured again.
    export.export(recipe, tmp_path / "out", "small", None, None, "vllm")
    said = " ".join(capsys.readouterr().err.split())
    assert "policy: K=" in said and whose in said and servers.started[1:] == started
    # A draft of anybody's making is asked for its servers before any work.
    scoring.check_drafts(Workspace(recipe), tmp_path / "out")
    assert servers.started[-1] == "check small"


@pytest.mark.parametrize(("engine", "copied_from"), [("vllm", 2), ("sglang", 5), (None, 5)])
def test_prompt_lookup_copies_as_the_loads_engine_does(engine: str | None, copied_from: int) -> None:
    load = None if engine is None else LOAD | {"engine": engine}
    scorer: Any = SimpleNamespace(settings=ScoreSettings.model_validate({"load": load}))
    draft: Any = SimpleNamespace(family="lookup", proposer=PromptLookup)
    lookup: Any = draft_scorer.Scorer.chain_spec(scorer, draft).make()
    assert lookup._sources([1, 2, 3, 1, 2, 4, 1, 2, 9], 8) == [copied_from]


@pytest.mark.parametrize("engine", [True, False])
def test_a_champion_of_a_tree_is_measured_as_an_engine_without_trees_serves_it(engine: bool) -> None:
    tree = StaticTree(kind="static", widths=[3, 2])
    plan = ServingPlan(draft_tokens=2, tree_name="wide", tree=tree, chain_tokens=4)
    costs = {"engine": "vllm", "start": True} if engine else None
    seen: list[ProposerSpec] = []

    def count(specs: list[ProposerSpec], identity: Any) -> Any:
        seen.extend(specs)
        raise InputError("counted")

    found: Any = SimpleNamespace(
        settings=ScoreSettings.model_validate({"load": LOAD | {"costs": costs}}), counts=count,
        tree_spec=lambda draft, name, shape: ProposerSpec(draft.proposer, (shape.levels,), name, shape),
    )  # fmt: skip
    draft: Any = SimpleNamespace(proposer=lambda: None)
    with pytest.raises(InputError, match="counted"):
        holdout_evaluation._measure(found, draft, plan, Identity("champion", 1))
    assert seen[0].configs == ([DraftConfig(4)] if engine else [DraftConfig(2, "wide")])


def test_a_race_drops_what_cannot_win_and_goes_on_after_a_kill(
    write_recipe: WriteRecipe,
    boards: list[Scored],
    made_up_times: list[CostKey],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_recipe(score=score_section(sampling=[{}], race={"error": 0.4, "blocks": 4}))
    recipe, calls, dropped = load_recipe(path), list[Any](), ("small", 2)
    inner = draft_scorer.Scorer.counts

    def spy(self: Any, specs: Any, identity: Any, *args: Any, **options: Any) -> Any:
        if len(calls) == 5:
            calls.append("killed")
            raise KeyboardInterrupt
        calls.append(tuple(identity))
        return inner(self, specs, identity, *args, **options)

    class Steward(parallel_scoring.Race):
        """Drops one checkpoint as soon as anything was seen."""

        def observe(self, *args: Any) -> None:
            self.alive_A &= [(arm.draft, arm.step) != dropped for arm in self.arms]

    monkeypatch.setattr(draft_scorer.Scorer, "counts", spy)
    monkeypatch.setattr(parallel_scoring, "Race", Steward)
    with pytest.raises(KeyboardInterrupt):
        flow.score(recipe, None)
    flow.score(recipe, None)
    (scored,) = boards
    assert calls.count(dropped) == 1 and calls.count(("small", 4)) == 4 + 1  # its blocks, and the decoding that checks
    assert calls.count(("lookup", 0)) == 1 and len(calls) == 1 + 1 + 1 + 2 * 5
    shares = {(row.draft, row.step): row.scored_share for row in scored.rows}
    assert shares.pop(dropped) == pytest.approx(0.25, abs=0.15) and set(shares.values()) == {1.0}
    assert not any(row.chosen for row in scored.rows if row.dropped)
    said = capsys.readouterr()
    assert "race: 1 of 3 checkpoints could no longer win and were dropped; 2" in said.err and "dropped at" in said.out

    # Those that were not dropped have the counts that they have without a race.
    flow.score(load_recipe(path, ["score.race=null"]), None)
    names = ("conversation", "setting", "rule", "draft_tokens", "method", "rounds", "tokens", "accepted")
    for name in ("small", "eagle3"):
        raced, whole = (counts.where(one.counts, draft=name, step=4).select(names) for one in boards)
        assert sorted(map(str, raced.to_pylist())) == sorted(map(str, whole.to_pylist()))
    before = len(calls)
    flow.score(recipe, None)  # all from the disk
    assert len(calls) == before
    assert json.dumps([row.record() for row in boards[2].rows]) == json.dumps([row.record() for row in scored.rows])


def test_what_is_decoded_is_not_raced(
    write_recipe: WriteRecipe, boards: list[Scored], made_up_times: list[CostKey], capsys: pytest.CaptureFixture[str]
) -> None:
    """A tree that is drawn above temperature 0 has no replay."""
    tree = {"kind": "static", "widths": [2], "drawn": "without_replacement"}
    load = {**LOAD, "engine": "draftforge"}
    section = score_section(sampling=[{"temperature": 1.0}], rules=["recursive", "token"], race={}, load=load)
    section |= {"trees": {"drawn": tree}, "draft_tokens": [1], "max_conversations": 6}
    path = write_recipe(score=section, drafts={"small": SMALL | {"score_every": 1}})
    recipe = load_recipe(path, ["score.load=null"])
    flow.score(recipe, None)
    assert "decoded, not replayed; scored on everything" in capsys.readouterr().err
    assert not any(row.dropped for row in boards[0].rows)


def test_a_policy_leaves_with_the_draft(
    write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """K by batch size from counts and times, here of a card on which drafting is free up to eight tokens a pass."""

    def measure(key: CostKey, *args: Any) -> CostTable:
        table = loads.grid_table(
            lambda B, L, N, C: 0.0,
            (1, 2),
            lambda tokens: 1e-9 * tokens,
            lambda B, L, N, C: 5e-3 + 1e-3 * max(B * N - 8, 0),
        )
        return table.model_copy(update={"key": key})

    monkeypatch.setattr(draft_scorer, "measure_costs", measure)
    recipe = load_recipe(write_recipe(score=score_section(tie_share=0), drafts={"small": SMALL}))
    flow.train(recipe, None)
    capsys.readouterr()
    export.export(recipe, tmp_path / "out", "small", None, None, "vllm")
    said = capsys.readouterr()
    plan, text = find_plan(tmp_path / "out").plan, (tmp_path / "out" / "policy-vllm.yaml").read_text()
    assert plan.policy == "policy-vllm.yaml" and f"--config {tmp_path / 'out' / plan.policy}" in said.out
    found = yaml.safe_load(text)["speculative-config"]
    ranges = found["num_speculative_tokens_per_batch_size"]
    assert found["model"] == str(tmp_path / "out") and found["num_speculative_tokens"] == ranges[0][2] in (1, 2)
    assert (ranges[0][0], ranges[-1][1:]) == (1, [64, 0])
    assert f"policy: K={ranges[0][2]} at batch 1" in " ".join(said.err.split()) and "vLLM does not draft" in said.err

    # A copy of that folder has no policy unless one is asked for.
    export.export(recipe, tmp_path / "again", str(tmp_path / "out"), None, None)
    assert not (tmp_path / "again" / plan.policy).exists() and not find_plan(tmp_path / "again").plan.policy
    assert "a policy is not carried over" in capsys.readouterr().err
    export.export(recipe, tmp_path / "other", str(tmp_path / "out"), None, None, "tensorrt-llm")
    assert {path.name for path in (tmp_path / "other").glob("policy*")} == {"policy-tensorrt-llm.yaml"}
    assert "score.load.engine vllm, by its rule onehot" in " ".join(capsys.readouterr().err.split())

    for options, says in (
        ((None, "sglang"), "--policy sglang: its scheduler does not change the draft length of a small draft"),
        (("hf", "vllm"), "--policy vllm: goes with --format vllm, not hf"),
        ((None, "llama.cpp"), "--policy llama.cpp: must be one of"),
    ):
        with pytest.raises(InputError, match=says):
            export.export(recipe, tmp_path / "no", "small", options[0], None, options[1])
    without = load_recipe(write_recipe(score=score_section(load=None), drafts={"small": SMALL}))
    with pytest.raises(InputError, match=r"--policy vllm: needs score\.load"):
        export.export(without, tmp_path / "no", "small", None, None, "vllm")
    assert not (tmp_path / "no").exists()
