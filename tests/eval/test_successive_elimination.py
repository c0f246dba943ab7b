"""Races: the stated error holds, and a slower draft is found out early."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from draftforge.eval.draft_configs import DraftConfig
from draftforge.eval.speedup import Gain
from draftforge.eval.successive_elimination import Arm, Race, cut_into_blocks, elimination_order

Floats = NDArray[np.float64]
COST = 1.3


def arms(count: int) -> list[Arm]:
    return [Arm("draft", step, DraftConfig(4), Gain(0.0, COST)) for step in range(count)]


def population(rng: np.random.Generator, count: int, clusters: int, slower: float = 0.0) -> tuple[Floats, Floats]:
    """Tokens of each cluster, and rounds of every draft; all drafts need as many in total, the first one more."""
    tokens_C = rng.lognormal(3.5, 0.7, clusters).round() + 2
    rounds_AC = rng.uniform(0.35, 0.75, clusters) + 0.12 * rng.standard_normal((count, clusters))
    for _ in range(60):  # move every total to the same place, within what a round can do
        rounds_AC += (0.55 - rounds_AC @ tokens_C / tokens_C.sum())[:, None]
        rounds_AC = rounds_AC.clip(0.2, 1.0)
    rounds_AC[0] = (rounds_AC[0] + slower).clip(0.2, 1.0)
    return tokens_C, rounds_AC * tokens_C


def run(rng: np.random.Generator, tokens_C: Floats, rounds_AC: Floats, error: float) -> float:
    """The share of the tokens after which the first draft is dropped; infinite where it never is."""
    race = Race(arms(len(rounds_AC)), tokens_C.sum(), error)
    seen = 0.0
    for cluster in np.argsort(rng.exponential(size=len(tokens_C)) / tokens_C):
        race.observe(tokens_C[cluster], rounds_AC[:, cluster])
        seen += tokens_C[cluster]
        if ("draft", 0) not in race.survivors:
            return float(seen / tokens_C.sum())
    return math.inf


@pytest.mark.slow
@pytest.mark.parametrize(("count", "clusters"), [(2, 40), (2, 200), (5, 80)])
def test_a_draft_as_good_as_any_is_seldom_dropped(count: int, clusters: int) -> None:
    """300 races of equal drafts at an error of 0.2, looked at after every cluster: the bound holds with room for chance
    (0.2 + three standard deviations)."""
    rng, error, races = np.random.default_rng(count * clusters), 0.2, 300
    dropped = sum(run(rng, *population(rng, count, clusters), error) < math.inf for _ in range(races))
    assert dropped / races <= error + 3 * math.sqrt(error * (1 - error) / races)
    assert dropped  # neither is the test blind


def test_a_slower_draft_is_dropped_early() -> None:
    rng = np.random.default_rng(7)
    ends = [run(rng, *population(rng, 3, 200, slower=0.1), 0.05) for _ in range(20)]
    assert max(ends) < 0.6 and np.median(ends) < 0.4
    few = [run(rng, *population(rng, 3, 200, slower=0.02), 0.05) for _ in range(20)]
    assert np.median(few) > np.median(ends)  # the closer, the longer


def test_prompts_count_in_a_race_too() -> None:
    """Equal rounds, but one draft pays more that no round shows."""
    race = Race([Arm("a", 1, DraftConfig(4), Gain(0.0, 1.0)), Arm("b", 1, DraftConfig(4), Gain(0.3, 1.0))], 100.0, 0.05)
    for _ in range(60):
        race.observe(1.0, np.array([0.5, 0.5]))
    assert race.survivors == {("a", 1)}


def test_what_can_no_longer_be_made_up_for_ends_it() -> None:
    """90 of 100 tokens seen, each a round of its own for one draft and a fifth of one for the other."""
    race = Race(arms(2), 100.0, 1e-9)
    race.observe(90.0, np.array([90.0, 18.0]))
    race.observe(1.0, np.array([0.2, 0.2]))
    assert race.survivors == {("draft", 1)}


def test_a_draft_stands_while_one_of_its_plans_does() -> None:
    some = [
        Arm("a", 1, DraftConfig(1), Gain(0.0, 2.0)),
        Arm("a", 1, DraftConfig(4), Gain(0.0, 1.0)),
        Arm("b", 1, DraftConfig(4), Gain(0.0, 1.0)),
    ]
    race = Race(some, 200.0, 0.05)
    for _ in range(100):
        race.observe(1.0, np.array([0.9, 0.5, 0.5]))
    assert race.survivors == {("a", 1), ("b", 1)} and race.alive_A.tolist() == [False, True, True]


def test_copies_and_answers_of_one_token_decide_nothing() -> None:
    race = Race(arms(2), 50.0, 0.05)
    for _ in range(50):
        race.observe(1.0, np.array([0.4, 0.4]))
        race.observe(0.0, np.array([0.0, 0.0]))
    race.observe(1.0, np.array([1.0, 0.2]))  # more than there were
    assert len(race.survivors) == 2


def test_the_order_prefers_long_clusters_and_stays() -> None:
    sizes = {f"c{n}": 1.0 + 9.0 * (n % 2) for n in range(400)} | {"empty": 0.0}
    order = elimination_order(sizes, 0)
    assert order == elimination_order(dict(reversed(sizes.items())), 0) != elimination_order(sizes, 1)
    assert sorted(order) == sorted(sizes) and order[-1] == "empty"
    firsts = [elimination_order(sizes, seed)[0] for seed in range(200)]
    assert 0.8 < sum(sizes[first] == 10.0 for first in firsts) / 200 <= 1.0  # 10 of 11 tokens are theirs


def test_blocks_hold_about_as_many_tokens() -> None:
    sizes = {f"c{n}": float(n % 7 + 1) for n in range(200)}
    blocks = cut_into_blocks(elimination_order(sizes, 0), sizes, 8)
    assert [cluster for block in blocks for cluster in block] == elimination_order(sizes, 0) and len(blocks) == 8
    totals = [sum(sizes[cluster] for cluster in block) for block in blocks]
    assert max(totals) - min(totals) <= 14
    assert cut_into_blocks(["a", "b"], {"a": 1.0, "b": 1.0}, 8) == [["a"], ["b"]]
    assert cut_into_blocks(["a"], {"a": 0.0}, 4) == [["a"]]
