"""Layer-skip search: counts as scoring has them, times by their definition, planted optima, and the search itself."""

import itertools
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import loads
import pytest
import stand_ins
import torch

from draftforge.data.store import Sample
from draftforge.eval import layer_skip_search
from draftforge.eval.acceptance import tau
from draftforge.eval.cost_table import CostTable, cost_key
from draftforge.eval.draft_configs import DraftConfig, ProposerSpec
from draftforge.eval.layer_skip_search import RoundTimes, SkipCounts, SkipScorer, search, sublayers
from draftforge.eval.leaderboard import at_config, serving
from draftforge.eval.score import Identity, score_draft
from draftforge.eval.settings import ScoreSettings
from draftforge.specdec.decoder import Request, generate
from draftforge.specdec.drafts.layer_skip import SkippedDraft, SkippedLayers
from draftforge.specdec.models import CausalModel
from draftforge.specdec.proposers.factory import make_proposer
from draftforge.specdec.proposers.prompt_lookup import PromptLookup
from draftforge.specdec.sampling_settings import SamplingSettings
from draftforge.specdec.targets import Target

GREEDY, WARM = SamplingSettings(), SamplingSettings(temperature=1.0, top_k=12)
SETTINGS = ScoreSettings(sampling=[GREEDY, WARM], rules=["token"], draft_tokens=[1, 3], decode_conversations=0)
TIMES = {1: RoundTimes(1.1, 0.04, 0.08), 3: RoundTimes(1.2, 0.12, 0.24)}
"""Four layers, all kept: 0.48 of a plain token for each that is drafted."""
FREE_ATTENTION, FREE_MLP = 2, 0
"""Layers of the target whose sublayers add nothing."""


@pytest.fixture(scope="module")
def target() -> Target:
    model = cast(Any, stand_ins.target(4))
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
    return SkipScorer(target, samples, TIMES, SETTINGS, SkipCounts(tmp_path / "tries.json"))


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
        taus = {K: tau(at_config(serving(counts, SETTINGS), DraftConfig(K)), 0.95).value for K in (1, 3)}
        speedups = {K: taus[K] / TIMES[K].of(4, skipped) for K in taus}
        worth = scorer.score(skipped, domains)
        assert max(speedups, key=lambda K: speedups[K]) == worth.K
        assert (worth.tau, worth.speedup) == pytest.approx((taus[worth.K], speedups[worth.K]))
        assert 1.0 < worth.tau < 1 + worth.K


def test_what_costs_nothing_is_skipped_first(scorer: SkipScorer) -> None:
    """Of all sublayers alone the two that add nothing are worth most, and the best set of all has both."""
    both = ["chat", "code"]
    alone = {part: scorer.score(layer_skip_search.skipped_layers(frozenset([part])), both) for part in sublayers(4)}
    best = sorted(alone, key=lambda part: -alone[part].speedup)[:2]
    assert set(best) == {("attention", FREE_ATTENTION), ("mlp", FREE_MLP)}
    assert alone["attention", FREE_ATTENTION].tau == scorer.score(SkippedLayers(), both).tau
    found = search(
        sublayers(4), lambda parts: scorer.score(layer_skip_search.skipped_layers(parts), both).speedup, 40, seed=0
    )
    assert set(best) <= found.parts and found.value >= alone[best[0]].speedup


def test_sets_become_settings() -> None:
    parts = frozenset([("mlp", 3), ("attention", 0), ("mlp", 1)])
    assert layer_skip_search.skipped_layers(parts) == SkippedLayers(attention=(0,), mlp=(1, 3))
    assert len(set(sublayers(4))) == 8
    assert layer_skip_search.skipped_layers(frozenset(sublayers(2))) == SkippedLayers(attention=(0, 1), mlp=(0, 1))


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
        return SkipScorer(target, samples, TIMES, SETTINGS, SkipCounts(path))

    first = fresh().score(skipped, ["chat"])
    both = fresh().score(skipped, ["chat", "code"])
    assert replayed == [4, 4]  # of the second call only what the first one lacked
    assert fresh().score(skipped, ["chat"]) == first and fresh().score(skipped, ["code", "chat"]) == both
    assert replayed == [4, 4]
    path.write_text('{"half": ')
    assert fresh().score(skipped, ["chat"]) == first and len(replayed) == 3


Value = Callable[[frozenset[int]], float]


def bumpy(seed: int, parts: int) -> Value:
    """Each part is worth something, and so is each pair of parts together."""
    chance = random.Random(seed)
    alone = [chance.gauss(0, 1) for _ in range(parts)]
    pairs = {pair: chance.gauss(0, 0.7) for pair in itertools.combinations(range(parts), 2)}
    return lambda chosen: (
        sum(alone[one] for one in chosen) + sum(worth for pair, worth in pairs.items() if chosen.issuperset(pair))
    )


def every_set(parts: int) -> list[frozenset[int]]:
    return [frozenset(one) for m in range(parts + 1) for one in itertools.combinations(range(parts), m)]


def test_it_ends_where_no_neighbour_is_better() -> None:
    best = 0
    for seed in range(20):
        value = bumpy(seed, 8)
        found = search(range(8), value, 256, seed=1)
        inside, outside = sorted(found.parts), sorted(set(range(8)) - found.parts)
        near = [found.parts ^ {one} for one in range(8)]
        near += [found.parts ^ {one, other} for one in inside for other in outside]
        assert found.value == value(found.parts) == max(map(value, [found.parts, *near]))
        best += found.value == max(map(value, every_set(8)))
    assert best >= 15  # a local optimum is mostly the global one here


def test_parts_that_do_not_interact_are_found_in_few_tries() -> None:
    """60 parts, 23 of which are worth leaving out: 2^60 sets."""
    chance = random.Random(5)
    good = set(chance.sample(range(60), 23))
    found = search(range(60), lambda chosen: len(chosen & good) - 1.5 * len(chosen - good), 90, seed=3)
    assert found.parts == good and found.tries <= 90


def smaller_is_better(asked: list[frozenset[int]], chosen: frozenset[int]) -> float:
    asked.append(chosen)
    return -float(len(chosen))


def test_never_more_tries_than_allowed_and_none_twice() -> None:
    for tries in (1, 2, 5, 9, 24, 1000):
        asked: list[frozenset[int]] = []
        found = search(range(12), partial(smaller_is_better, asked), tries, seed=0)
        assert len(asked) == len(set(asked)) == found.tries == min(tries, 24)  # the 24th ends a way down
        assert found.value == -min(map(len, asked)) and found.parts in asked


def test_the_same_seed_asks_the_same_sets() -> None:
    def asked(seed: int) -> list[frozenset[int]]:
        seen: list[frozenset[int]] = []
        value = bumpy(3, 10)
        search(range(10), lambda chosen: (seen.append(chosen), value(chosen))[1], 60, seed)  # type: ignore[func-returns-value]
        return seen

    assert asked(4) == asked(4) != asked(5)


def test_sets_to_start_from_come_first() -> None:
    seen: list[frozenset[int]] = []
    given = [frozenset({1, 2}), frozenset({7})]

    def value(chosen: frozenset[int]) -> float:
        seen.append(chosen)
        return float(chosen == given[0])

    found = search(range(9), value, 5, 0, given)
    assert seen[:2] == given and found.parts == given[0] and found.tries == 5


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_few_parts(parts: int) -> None:
    found = search(range(parts), lambda chosen: float(len(chosen)), 100, 0)
    assert found.parts == frozenset(range(parts)) and found.tries <= 2**parts
