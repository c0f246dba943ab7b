"""What the leaderboard and the gate are given, with counts made up: no model runs here."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import loads
import pyarrow as pa
import pytest
import torch

from draftforge.errors import CorruptDataError, LostFilesError, TrackingError
from draftforge.eval.cost_table import CostKey, CostTable
from draftforge.eval.counts import CountRow, to_table
from draftforge.eval.draft_configs import DraftConfig, ProposerSpec
from draftforge.eval.leaderboard import Row, leaderboard
from draftforge.eval.score import Identity
from draftforge.pipeline import holdout_evaluation, parallel_scoring, promotion, scoring
from draftforge.pipeline.distill import Outcome, exit_code
from draftforge.pipeline.holdout_evaluation import HoldoutScore
from draftforge.pipeline.promotion import REFUSED
from draftforge.pipeline.stages import Stage, Stages, Start
from draftforge.pipeline.workspace import Workspace
from draftforge.recipe import load_recipe
from draftforge.registry.gate import Decision, decide
from draftforge.registry.settings import GateSettings
from draftforge.specdec.replay.expected_rounds import RoundCounts
from draftforge.specdec.sampling_settings import SamplingSettings
from draftforge.specdec.serving_plan import ServingPlan
from draftforge.storage import write_json

WriteRecipe = Callable[..., Path]


def counts_of(name: str, step: int, accepted: float, conversations: int = 4, K: int = 1) -> pa.Table:
    counts = RoundCounts(100.0, 100.0 + accepted, 100.0 * K, accepted, (100.0,) * K, (accepted / K,) * K)
    names = [f"c{number}" for number in range(conversations)]
    return to_table(
        CountRow(name, step, one, 0, one, "d", "selection", "128", "t0", "greedy", K, "", "replay", counts)
        for one in names
    )


def costs_of() -> CostTable:
    key = CostKey(
        hardware="h", software="s", dtype="float32", target={}, draft={}, sampling="greedy",
        plans={"1": {"levels": 1}},
    )  # fmt: skip
    return loads.batch_one_table(key, 0.03, {"1": (0.01, 0.03, 0.0)})


class MadeUpScorer:
    """Scores a checkpoint by its step alone."""

    def __init__(self, *args: Any) -> None:
        self.device = torch.device("cpu")
        self.settings = args[0].recipe.score
        text: dict[str, Any] = {"domain": "d", "split": "selection", "prompt_ids": [1], "answer_ids": [2]}
        text |= {"sampling": SamplingSettings()}
        self.samples = [SimpleNamespace(cluster=f"c{n}", conversation=f"c{n}", **text) for n in range(40)]
        self.traces = SimpleNamespace(packs=lambda samples: [list(range(len(samples)))])

    def load(self, folder: Path | None, other_tokenizer: bool = False) -> Any:
        return folder

    def specs(self, draft: Any, name: str = "", fixed: Any = None) -> list[Any]:
        return [SimpleNamespace(fixed=None, tree="")]

    def times(self, *args: Any) -> CostTable:
        return costs_of()

    def counts(self, specs: Any, identity: Identity, *args: Any) -> tuple[pa.Table, bool]:
        return counts_of(identity.name, identity.step, 10.0 * identity.step + len(identity.name)), True

    def perplexity(self, draft: Any) -> float | None:
        return None if draft is None else 2.0


def test_names_with_dots_keep_their_counts_apart(write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    space = Workspace(load_recipe(write_recipe()))
    monkeypatch.setattr(scoring, "Scorer", MadeUpScorer)
    monkeypatch.setattr(scoring, "checkpoints_of", lambda stage: {2: stage.folder / "2", 4: stage.folder / "4"})
    monkeypatch.setattr(Stages, "training", lambda self, name: Stage(space.root / name, name))
    stages = Stages(space)
    stages._captured = Stage(space.root / "capture", "c" * 64)
    for _ in range(2):  # the second time from the parts on disk
        scored = scoring.score_stage(stages, ["v1.5", "v1.25"])
        assert scored is not None
        found = {(row.draft, row.step): row.tau.value for row in scored.rows if not row.baseline}
        assert found == {
            ("v1.25", 2): pytest.approx(1.25),
            ("v1.25", 4): pytest.approx(1.45),
            ("v1.5", 2): pytest.approx(1.24),
            ("v1.5", 4): pytest.approx(1.44),
        }


LOOKUP_ROW = SimpleNamespace(draft="lookup", config=DraftConfig(1), baseline=True)
SCORED: Any = SimpleNamespace(
    rows=[LOOKUP_ROW], chosen=LOOKUP_ROW, start=None, start_row=None, stage=Stage(Path("none"), "s")
)
"""What the selection split says, of prompt lookup alone."""


def test_the_gate_hears_of_the_conversations_that_were_scored(
    write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not of those that the holdout has: `score.max_conversations` may leave most of them out."""
    space = Workspace(load_recipe(write_recipe()))
    table = counts_of("candidate", 4, 50.0, conversations=3)
    (row,) = leaderboard([table], {("candidate", 4): costs_of()}, space.recipe.score)
    monkeypatch.setattr(holdout_evaluation, "measure_version", lambda *args: HoldoutScore(row, table, costs_of(), True))
    monkeypatch.setattr(holdout_evaluation, "holdout_overlap", lambda *args: 0)
    scorer: Any = MadeUpScorer(space)
    version: Any = None
    measured = holdout_evaluation.measure_holdout(space, scorer, SCORED, version, None)
    assert holdout_evaluation.evidence(space, scorer, measured, version, None, None).conversations == 3
    seen = holdout_evaluation.show_holdout(scorer, measured)
    assert [one["draft"] for one in seen["rows"]] == ["lookup", "candidate"]
    said = capsys.readouterr().out
    assert "On the holdout" in said and "lookup" in said  # what the decision rests on is shown beside the baseline


def uneven(name: str, gain: float, noise: float) -> pa.Table:
    """Forty conversations in two domains; `gain`: in tokens a round, unevenly by `noise`, which is 0 on the whole."""
    rows = []
    for n in range(40):
        accepted = 50.0 + 100 * gain + 100 * noise * (1 if n % 4 < 2 else -1) + n % 5
        counts = RoundCounts(100.0, 100.0 + accepted, 100.0, accepted, (100.0,), (accepted,))
        at = ("code" if n % 2 else "chat", "holdout", "128", "t0", "greedy", 1, "", "replay")
        rows.append(CountRow(name, 4, f"c{n}", 0, f"c{n}", *at, counts))  # type: ignore[arg-type]
    return to_table(rows)


@pytest.mark.parametrize(
    ("gain", "noise", "promoted", "words"),
    [
        (0.0, 0.0, False, "not faster: expected speed-up"),  # the champion's own counts
        (0.0, 0.05, False, "not faster"),
        (-0.15, 0.05, False, "chat gets worse: -9.9 %"),
        (0.15, 0.05, True, "faster than champion m/1"),
        (0.01, 0.5, False, "more clusters of holdout conversations would tell"),
    ],
)
def test_the_gate_knows_an_equal_a_worse_and_a_better_draft(
    write_recipe: WriteRecipe,
    monkeypatch: pytest.MonkeyPatch,
    gain: float,
    noise: float,
    promoted: bool,
    words: str,
) -> None:
    """From counts to the decision, the way a promotion goes."""
    space = Workspace(load_recipe(write_recipe()))
    tables = {"candidate": uneven("candidate", gain, noise), "champion": uneven("champion", 0.0, 0.0)}

    def measured(space: Any, scorer: Any, version: Any, name: str, *_: Any) -> HoldoutScore:
        (row,) = leaderboard([tables[name]], {(name, 4): costs_of()}, space.recipe.score)
        return HoldoutScore(row, tables[name], costs_of(), True)

    monkeypatch.setattr(holdout_evaluation, "measure_version", measured)
    monkeypatch.setattr(holdout_evaluation, "holdout_overlap", lambda *args: 0)
    monkeypatch.setattr(Workspace, "tracking", None)
    scorer: Any = MadeUpScorer(space)
    version: Any = None
    champion: Any = SimpleNamespace(reference="m/1")
    found = holdout_evaluation.measure_holdout(space, scorer, SCORED, version, champion)
    evidence = holdout_evaluation.evidence(space, scorer, found, version, champion, None)
    assert evidence.domains.keys() == {"chat", "code"} and evidence.domains["chat"].conversations == 20
    decision = decide(evidence, GateSettings())
    assert decision.promote is promoted and any(words in reason for reason in decision.reasons), decision.reasons


class Promotion(NamedTuple):
    """What a promotion came to."""

    registered: list[str]
    outcome: tuple[Any, Decision]
    record: dict[str, Any]


def promoted_after_a_retraining(
    monkeypatch: pytest.MonkeyPatch, space: Workspace, heir: pa.Table, start: pa.Table, chosen: str, current: Any
) -> Promotion:
    """The promotion of an heir, or of its start, where these are their counts on the holdout."""
    tables = {"candidate": heir, "start": start, "champion": start}
    (row,) = leaderboard([heir], {("candidate", 4): costs_of()}, space.recipe.score)
    rows = {
        "heir": replace(row, draft="small", step=4, chosen=chosen == "heir"),
        "start": replace(row, draft="small", step=0, chosen=chosen == "start", start="old/1"),
    }
    old: Any = SimpleNamespace(reference="old/1", lineage=SimpleNamespace(step=4))
    scored: Any = SimpleNamespace(
        rows=[*SCORED.rows, *rows.values()],
        chosen=rows[chosen],
        start=Start(old, Path("old"), ("small",)),
        start_row=rows["start"],
        stage=Stage(space.root, "s"),
        plan=lambda row, settings: ServingPlan.chain(1),
    )
    registered, records = [], []

    def register(stages: Any, run: str, scored: Any, scorer: Any, row: Row) -> Any:
        registered.append("start" if row.start else "heir")
        same = row.start and current is not None and current.reference == "old/1"
        return old if same else SimpleNamespace(reference=f"new/{len(registered)}", lineage=SimpleNamespace(step=4))

    def measured(scorer: Any, draft: Any, plan: Any, identity: Identity, *_: Any) -> HoldoutScore:
        table = tables[identity.name]
        (row,) = leaderboard([table], {(identity.name, 4): costs_of()}, space.recipe.score)
        return HoldoutScore(replace(row, chosen=False), table, costs_of(), True)

    monkeypatch.setattr(Workspace, "tracking", None)
    monkeypatch.setattr(promotion, "Scorer", lambda *args: MadeUpScorer(space))
    monkeypatch.setattr(promotion, "_register", register)
    monkeypatch.setattr(promotion, "champion", lambda *args: current)
    monkeypatch.setattr(promotion, "promote", lambda tracking, decision, version: decision)
    monkeypatch.setattr(promotion, "keep_counts", lambda *args: None)
    monkeypatch.setattr(promotion, "_write_record", lambda *args: records.append(args[-1]))
    monkeypatch.setattr(holdout_evaluation, "_measure", measured)
    monkeypatch.setattr(
        holdout_evaluation, "measure_version", lambda *args: measured(None, None, None, Identity(args[3], 4))
    )
    monkeypatch.setattr(holdout_evaluation, "holdout_overlap", lambda *args: 0)
    stages: Any = SimpleNamespace(space=space, captured=None)
    outcome = promotion.promote_stage(stages, "run", scored)
    return Promotion(registered, outcome, records[0])


@pytest.mark.parametrize(
    ("gain", "least", "same_target", "registered", "promoted", "words"),
    [
        (0.15, 1.0, False, ["heir"], True, "better than its start, old/1 as it is (1.14x"),
        (0.0, 1.0, False, ["heir", "start"], True, "old/1 as it is: no heir is shown to be better"),
        (-0.15, 1.0, False, ["heir", "start"], True, "worth serving: expected speed-up over plain decoding 1.14x"),
        (0.0, 1.3, False, ["heir"], False, "not shown to be better than its start, old/1 as it is: 1.14x"),
        (0.0, 1.0, True, ["heir"], False, "not shown to be better than its start, old/1 as it is: 1.14x"),
        (0.15, 1.0, True, ["heir"], True, "faster than champion old/1"),
    ],
)
def test_an_heir_that_is_no_better_gives_way_to_its_start(
    write_recipe: WriteRecipe,
    monkeypatch: pytest.MonkeyPatch,
    gain: float,
    least: float,
    same_target: bool,
    registered: list[str],
    promoted: bool,
    words: str,
) -> None:
    """On a new target the start is promoted in its place, if it is worth serving; a champion simply stays."""
    space = Workspace(load_recipe(write_recipe(gate={"min_speedup": least})))
    current = SimpleNamespace(reference="old/1", lineage=SimpleNamespace(step=4)) if same_target else None
    heir, start = uneven("candidate", gain, 0.02), uneven("champion" if same_target else "start", 0.0, 0.0)
    found = promoted_after_a_retraining(monkeypatch, space, heir, start, "heir", current)
    version, decision = found.outcome
    assert found.registered == registered and decision.promote is promoted
    assert version.reference == f"new/{len(registered)}" and any(words in one for one in decision.reasons)
    names = [row["draft"] for row in found.record["rows"]]
    assert names[:2] == ["lookup", "candidate"] and names[2:] == (
        ["heir"] if len(registered) == 2 else ["champion"] if same_target else ["start"]
    )


def test_a_start_that_no_heir_comes_up_to_stays_champion_or_becomes_one(
    write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = Workspace(load_recipe(write_recipe(gate={"min_speedup": 1})))
    table = uneven("candidate", 0.0, 0.0)
    old = SimpleNamespace(reference="old/1", lineage=SimpleNamespace(step=4))
    stays = promoted_after_a_retraining(monkeypatch, space, table, table, "start", old)
    assert stays.outcome[0].reference == "old/1" and exit_code(Outcome(SCORED, *stays.outcome)) == REFUSED
    (reason,) = stays.outcome[1].reasons
    assert reason.startswith(
        "no heir is better than its start, old/1, which stays champion: on the selection split 1.1"
    )
    assert ", at best 1.14x [" in reason and reason.endswith("by small step 4 at K=1") and stays.record == {"rows": []}
    new = promoted_after_a_retraining(monkeypatch, space, table, table, "start", None)
    assert new.registered == ["start"] and new.outcome[1].promote and new.outcome[1].beats_start is None


def test_a_champion_is_measured_as_the_registry_has_it(
    write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not from the copy in the work folder; only files that are gone or damaged leave nothing to compare with."""
    space = Workspace(load_recipe(write_recipe()))
    monkeypatch.setattr(Workspace, "tracking", None)
    asked: list[dict[str, Any]] = []

    def resolve(*args: Any, **options: Any) -> Path:
        asked.append(options)
        raise error

    monkeypatch.setattr(holdout_evaluation, "resolve_models_uri", resolve)
    version: Any = SimpleNamespace(uri="models:/m/1")
    scorer: Any = MadeUpScorer(space)
    table = counts_of("candidate", 4, 50.0)
    (row,) = leaderboard([table], {("candidate", 4): costs_of()}, space.recipe.score)
    measure = holdout_evaluation.measure_version

    def candidate_or_champion(space: Workspace, scorer: Any, version: Any, name: str, *_: Any) -> HoldoutScore:
        known = HoldoutScore(row, table, costs_of(), True)
        return known if name == "candidate" else measure(space, scorer, version, name)

    monkeypatch.setattr(holdout_evaluation, "measure_version", candidate_or_champion)
    error: Exception = LostFilesError("file:///x/config.json: is missing")
    measured = holdout_evaluation.measure_holdout(space, scorer, SCORED, version, version)
    assert (measured.champion, measured.champion_lost) == (None, str(error))
    error = TrackingError("no answer")
    with pytest.raises(TrackingError):
        holdout_evaluation.measure_holdout(space, scorer, SCORED, version, version)
    assert asked == [{"afresh": True}] * 2


def test_a_champion_is_measured_at_its_own_k_though_the_recipe_scores_others(
    write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = Workspace(load_recipe(write_recipe(score={"draft_tokens": [1, 2]})))
    monkeypatch.setattr(Workspace, "tracking", None)
    monkeypatch.setattr(holdout_evaluation, "resolve_models_uri", lambda *args, **options: Path("draft"))
    version: Any = SimpleNamespace(uri="models:/m/1", lineage=SimpleNamespace(step=4))
    timed: list[tuple[int, ...]] = []

    class Loaded(MadeUpScorer):
        def load(self, folder: Path | None, other_tokenizer: bool = False) -> Any:
            return SimpleNamespace(plan=ServingPlan.chain(K), proposer=lambda: pytest.fail("drafted"))

        def specs(self, draft: Any, name: str = "", fixed: Any = None) -> list[Any]:
            return [ProposerSpec(draft.proposer, (1, 2))]

        def counts(self, specs: Any, identity: Identity, *args: Any) -> tuple[pa.Table, bool]:
            return counts_of(identity.name, identity.step, 50.0, K=specs[0].depths[0]), True

        def times(self, draft: Any, specs: Any) -> CostTable:
            timed.append(specs[0].depths)
            key = costs_of().key.model_copy(update={"plans": {str(K): {"levels": K} for K in (1, 2, 7)}})
            return loads.batch_one_table(key, 0.03, {str(K): (0.01, 0.03, 0.0) for K in (1, 2, 7)})

    for K, shape in ((2, (1, 2)), (7, (7,))):  # the times of all that the recipe scores, or of its own alone
        found = holdout_evaluation.measure_version(space, Loaded(space), version, "champion")  # type: ignore[arg-type]
        assert found.row.config == DraftConfig(K) and set(found.table["draft_tokens"].to_pylist()) == {K}
        assert timed[-1] == shape


@pytest.mark.parametrize("notes", [{}, {"perplexity": "much"}, {"perplexity": [2.0]}, {"perplexity": True}])
def test_notes_without_a_usable_perplexity_are_damaged(notes: dict[str, Any], tmp_path: Path) -> None:
    write_json(tmp_path / "notes.json", notes)
    with pytest.raises(CorruptDataError, match=r"notes\.json: perplexity: "):
        parallel_scoring._read_perplexity(tmp_path / "notes.json")
