"""What skipping layers is worth: counts as scoring has them, times by their definition, and planted optima found."""

from functools import partial
from pathlib import Path
from typing import Any, cast

import loads
import pytest
import stand_ins
import torch

from draftforge.data.store import Sample
from draftforge.eval import layer_skip
from draftforge.eval.costs import CostTable, cost_key
from draftforge.eval.draft_configs import DraftConfig, ProposerSpec
from draftforge.eval.figures import Bootstrap, tau
from draftforge.eval.layer_skip import RoundTimes, SkipScorer, SkipTrial, search, sublayers
from draftforge.eval.leaderboard import at_config, serving
from draftforge.eval.score import Identity, score_draft
from draftforge.eval.settings import ScoreSettings
from draftforge.specdec.decoder import Request, generate
from draftforge.specdec.drafts.layer_skip import SkippedDraft, SkippedLayers
from draftforge.specdec.models import CausalModel
from draftforge.specdec.proposers import make_proposer
from draftforge.specdec.proposers.lookup import PromptLookup
from draftforge.specdec.sampling import SamplingSettings
from draftforge.specdec.targets import Target

GREEDY, WARM = SamplingSettings(), SamplingSettings(temperature=1.0, top_k=12)
SETTINGS = ScoreSettings(sampling=[GREEDY, WARM], rules=["token"], draft_tokens=[1, 3], decode_conversations=0)
TIMES = {1: RoundTimes(1.1, 0.04, 0.08), 3: RoundTimes(1.2, 0.12, 0.24)}
"""Four layers, all kept: 0.48 of a plain token for each that is drafted."""
FREE_ATTENTION, FREE_MLP = 2, 0
"""Layers of the target whose sublayers add nothing."""


@pytest.fixture(scope="module")
def target() -> Target:
    model = cast(Any, stand_ins.target())
    with torch.no_grad():
        model.stack.layers[FREE_ATTENTION].self_attn.o_proj.weight.zero_()
        model.stack.layers[FREE_MLP].mlp.down_proj.weight.zero_()
    model.stop_ids = frozenset({5, 17})
    return cast(Target, model)


@pytest.fixture(scope="module")
def samples(target: Target) -> dict[str, list[Sample]]:
    made: dict[str, list[Sample]] = {"chat": [], "code": []}
    for number, prompt in enumerate(stand_ins.prompts(8)):
        sampling = WARM if number > 5 else GREEDY
        ((_, answer),) = generate(target, None, [Request(prompt, sampling, number, 24, target.stop_ids)])
        domain = ("chat", "code")[number % 2]
        place = {"conversation": f"c{number}", "turn": 0, "cluster": f"k{number}", "domain": domain}
        made[domain].append(
            Sample(
                id=f"c{number}/0",
                **place,  # type: ignore[arg-type]
                split="selection",
                sampling=sampling,
                max_new_tokens=24,
                finish=answer.finish,
                prompt_ids=prompt,
                answer_ids=answer.tokens,
            )
        )
    return made


@pytest.fixture
def scorer(target: Target, samples: dict[str, list[Sample]], tmp_path: Path) -> SkipScorer:
    return SkipScorer(target, samples, TIMES, SETTINGS, SkipTrial(tmp_path / "tries.json"))


def table(target: CausalModel, plain: float, draft: float, verify: float, rest: float) -> CostTable:
    key = cost_key(target, "lookup", [ProposerSpec(PromptLookup, (3,))], SETTINGS)
    return loads.batch_one_table(key, plain, {"3": (draft, verify, rest)})


def test_times_are_fixed_ones_and_a_part_for_each_sublayer(target: CausalModel) -> None:
    """On machines of unlike speed: 0.3 a round by itself, 0.05 for an attention, 0.1 for an MLP, in plain tokens."""
    drafts = {"whole": 0.3 + 4 * 0.15, "no_attention": 0.3 + 4 * 0.1, "no_mlp": 0.3 + 4 * 0.05}
    tables = {
        name: table(target, plain, plain * draft, plain * 1.1, plain * 0.2)
        for plain, (name, draft) in zip((0.02, 0.03, 0.05), drafts.items())
    }
    times = RoundTimes.fit(3, 4, **tables)
    assert times == pytest.approx((1.6, 0.05, 0.1))
    assert times.of(4, SkippedLayers(attention=(0, 1, 3), mlp=(2,))) == pytest.approx(1.6 + 0.05 + 3 * 0.1)


def test_noise_makes_no_negative_times(target: CausalModel) -> None:
    tables = [table(target, 0.02, draft, 0.02, 0.0) for draft in (0.01, 0.012, 0.001)]
    times = RoundTimes.fit(3, 4, *tables)
    assert times.attention == 0.0 and times.mlp > 0.0 and times.fixed >= 1.0


@pytest.mark.parametrize("skipped", [SkippedLayers(mlp=(2,)), SkippedLayers(attention=(1,), mlp=(1, 3))], ids=str)
def test_tau_is_the_scores(
    skipped: SkippedLayers, target: Target, samples: dict[str, list[Sample]], scorer: SkipScorer
) -> None:
    make = partial(make_proposer, SkippedDraft(target, skipped), target)
    for domains in (["chat"], ["code"], ["chat", "code"]):
        mine = [sample for domain in domains for sample in samples[domain]]
        counts = score_draft(target, [ProposerSpec(make, (1, 3))], mine, SETTINGS, Identity("skipped", 0)).counts
        taus = {K: tau(at_config(serving(counts, SETTINGS), DraftConfig(K)), Bootstrap(10)).value for K in (1, 3)}
        speedups = {K: taus[K] / TIMES[K].of(4, skipped) for K in taus}
        worth = scorer.worth(skipped, domains)
        assert max(speedups, key=lambda K: speedups[K]) == worth.K
        assert (worth.tau, worth.speedup) == pytest.approx((taus[worth.K], speedups[worth.K]))
        assert 1.0 < worth.tau < 1 + worth.K


def test_what_costs_nothing_is_skipped_first(scorer: SkipScorer) -> None:
    """Of all sublayers alone the two that add nothing are worth most, and the best set of all has both."""
    both = ["chat", "code"]
    alone = {part: scorer.worth(layer_skip.skipping(frozenset([part])), both) for part in sublayers(4)}
    best = sorted(alone, key=lambda part: -alone[part].speedup)[:2]
    assert set(best) == {("attention", FREE_ATTENTION), ("mlp", FREE_MLP)}
    assert alone["attention", FREE_ATTENTION].tau == scorer.worth(SkippedLayers(), both).tau
    found = search(sublayers(4), lambda parts: scorer.worth(layer_skip.skipping(parts), both).speedup, 40, seed=0)
    assert set(best) <= found.parts and found.value >= alone[best[0]].speedup


def test_sets_become_settings() -> None:
    parts = frozenset([("mlp", 3), ("attention", 0), ("mlp", 1)])
    assert layer_skip.skipping(parts) == SkippedLayers(attention=(0,), mlp=(1, 3))
    assert len(set(sublayers(4))) == 8
    assert layer_skip.skipping(frozenset(sublayers(2))) == SkippedLayers(attention=(0, 1), mlp=(0, 1))


def test_tries_are_kept_by_domain(
    target: Target, samples: dict[str, list[Sample]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, skipped = tmp_path / "tries.json", SkippedLayers(mlp=(3,))
    replayed: list[int] = []
    inner = SkipScorer._replay

    def spy(self: SkipScorer, given: SkippedLayers, mine: list[Sample]) -> Any:
        replayed.append(len(mine))
        return inner(self, given, mine)

    monkeypatch.setattr(SkipScorer, "_replay", spy)

    def fresh() -> SkipScorer:
        return SkipScorer(target, samples, TIMES, SETTINGS, SkipTrial(path))

    first = fresh().worth(skipped, ["chat"])
    both = fresh().worth(skipped, ["chat", "code"])
    assert replayed == [4, 4]  # of the second call only what the first one lacked
    assert fresh().worth(skipped, ["chat"]) == first and fresh().worth(skipped, ["code", "chat"]) == both
    assert replayed == [4, 4]
    path.write_text('{"half": ')
    assert fresh().worth(skipped, ["chat"]) == first and len(replayed) == 3
