"""The two tests behind "stale": closed forms, and how often they cry wolf where nothing or only the margin changed."""

import math

import numpy as np
import pyarrow as pa
import pytest
from scipy import stats

from draftforge.data.conversation import Conversation, Message
from draftforge.eval.counts import CountRow, to_table
from draftforge.pipeline.staleness import Cause, Change, Staleness, mix_drift, tau_change
from draftforge.pipeline.staleness_evidence import what_changed
from draftforge.registry.lineage import Lineage
from draftforge.specdec.replay.expected_rounds import RoundCounts
from draftforge.specdec.sampling_settings import SamplingSettings
from draftforge.specdec.targets import fingerprint_of

GREEDY = SamplingSettings()
MARGIN, CONFIDENCE = 0.1, 0.95
TRIALS = 200
K = 8


def table(tokens: list[float], rounds: list[float], start: int = 0, setting: str = "t0", size: int = 1) -> pa.Table:
    """One conversation a pair of numbers; `size` of them make a cluster."""
    rows = []
    for i, (made, took) in enumerate(zip(tokens, rounds), start=start):
        kept = float(made - took)
        by_position = [(count, *[0.0] * (K - 1)) for count in (float(took), kept)]
        counts = RoundCounts(float(took), float(made), float(took), kept, *by_position)
        rows.append(
            CountRow(
                "d", 1, f"c{i}", 0, f"k{i // size}", "a", "holdout", "00128", setting, "greedy", K, "", "replay", counts
            )
        )
    return to_table(rows)


def drawn(rng: np.random.Generator, tau: float, conversations: int, start: int = 0) -> pa.Table:
    """Conversations of unlike length and unlike ease, around a pooled tau."""
    rounds = rng.integers(5, 40, conversations).astype(float)
    ease = rng.gamma(20, tau / 20, conversations)
    return table(list(rounds * ease), list(rounds), start)


def test_two_samples_by_the_closed_form() -> None:
    before, now = table([30, 50, 40], [10, 20, 10]), table([20, 30, 10, 25], [10, 20, 10, 10], start=10)
    change = tau_change(before, now, CONFIDENCE)
    assert (change.before, change.now) == pytest.approx((3.0, 1.7)) and not change.paired
    assert change.ratio == pytest.approx(1.7 / 3)
    # Each conversation left out once; degrees of freedom of sizes 1, 2, 1 and 1, 2, 1, 1, then of both together.
    variances = []
    for made, took in (([30, 50, 40], [10, 20, 10]), ([20, 30, 10, 25], [10, 20, 10, 10])):
        without = [math.log((sum(made) - m) / (sum(took) - t)) for m, t in zip(made, took)]
        variances.append(sum((one - math.log(sum(made) / sum(took))) ** 2 for one in without))
    freedom = sum(variances) ** 2 / (variances[0] ** 2 / (1681 / 1153) + variances[1] ** 2 / (103058 / 51833))
    reach = stats.t.ppf(CONFIDENCE, freedom) * math.sqrt(sum(variances))
    assert math.log(change.upper / change.ratio) == pytest.approx(reach)
    assert math.log(change.ratio / change.lower) == pytest.approx(reach)


def test_the_same_answers_are_compared_in_pairs() -> None:
    rng = np.random.default_rng(0)
    rounds = rng.integers(5, 40, 30).astype(float)
    ease = rng.uniform(1, 4, 30)
    before, now = table(list(rounds * ease), list(rounds)), table(list(rounds * ease * 0.8), list(rounds))
    change = tau_change(before, now, CONFIDENCE)
    assert change.paired and change.ratio == pytest.approx(0.8)
    assert change.upper - change.lower < 1e-9  # every conversation fell alike: nothing is left to chance
    apart = tau_change(before, table(list(rounds * ease * 0.8), list(rounds), start=100), CONFIDENCE)
    assert not apart.paired and apart.upper - apart.lower > 0.1


def test_turns_of_one_cluster_count_as_one() -> None:
    rng = np.random.default_rng(1)
    ease = np.repeat(rng.uniform(1, 3, 10), 8)
    rounds = np.full(80, 10.0)
    before = drawn(rng, 2, 50, start=1000)
    alone, together = (tau_change(before, table(list(rounds * ease), list(rounds), size=n), CONFIDENCE) for n in (1, 8))
    assert together.clusters_now == 10 and alone.clusters_now == 80
    assert math.log(together.upper / together.lower) > 1.5 * math.log(alone.upper / alone.lower)


def test_only_sampling_settings_that_both_have_are_compared() -> None:
    before = pa.concat_tables([table([20, 20], [10, 10]), table([90, 90], [10, 10], setting="t1")])
    assert tau_change(before, table([20, 20], [10, 10], start=5), CONFIDENCE).ratio == pytest.approx(1)
    nothing = tau_change(before, table([20, 20], [10, 10], start=5, setting="t0.7"), CONFIDENCE)
    assert math.isnan(nothing.ratio) and nothing.verdict(MARGIN) == "unknown"


def test_one_conversation_tells_nothing() -> None:
    change = tau_change(drawn(np.random.default_rng(0), 3, 50), table([10], [10], start=100), CONFIDENCE)
    assert math.isnan(change.upper) and change.verdict(MARGIN) == "unknown"


@pytest.mark.parametrize(
    ("ratio", "conversations", "lowest", "highest"),
    [(1.0, 12, 0, 0.01), (1 - MARGIN, 12, 0.004, 0.096), (1 - MARGIN, 60, 0.004, 0.096), (0.7, 60, 0.95, 1)],
)
@pytest.mark.slow
def test_false_alarms_of_acceptance(ratio: float, conversations: int, lowest: float, highest: float) -> None:
    """Nothing fell; exactly the margin fell (an alarm in 5 %, give or take 3 standard errors); much more fell."""
    rng = np.random.default_rng(7)
    alarms = 0
    for _ in range(TRIALS):
        before, now = drawn(rng, 2.5, 80), drawn(rng, 2.5 * ratio, conversations, start=1000)
        alarms += tau_change(before, now, CONFIDENCE).verdict(MARGIN) == "stale"
    assert lowest <= alarms / TRIALS <= highest


@pytest.mark.parametrize(
    ("upper", "lower", "verdict"),
    [(0.89, 0.5, "stale"), (0.91, 0.5, "unknown"), (1.2, 0.9, "held"), (0.95, 0.92, "held")],
)
def test_verdict_of_an_interval(upper: float, lower: float, verdict: str) -> None:
    assert Change(2, 2, 1, lower, upper, 9, 9, False).verdict(MARGIN) == verdict


def mix(shares: dict[tuple[str, float], int], start: int = 0, cluster: int = 1) -> list[Conversation]:
    """So many conversations of each (domain, temperature); `cluster` of one kind make a cluster."""
    found: list[Conversation] = []
    for (domain, temperature), count in shares.items():
        for i in range(count):
            name = f"{domain}-{temperature}-{start}-{i // cluster}"
            found.append(
                Conversation(
                    id=f"{name}-{i}",
                    domain=domain,
                    messages=[Message(role="user", content="x")],
                    sampling=None if temperature == 0 else SamplingSettings(temperature=temperature),
                    cluster=name,
                    split="train",
                )
            )
    return found


def test_distance_is_the_share_that_moved() -> None:
    before, now = mix({("a", 0): 50, ("b", 0): 50}), mix({("a", 0): 20, ("b", 0): 60, ("c", 0): 20}, start=1)
    drift = mix_drift(before, now, GREEDY, 0.05)
    assert drift.distance == pytest.approx(0.3) and drift.moved == "a t0 from 50% to 20%"
    assert (drift.conversations_before, drift.conversations_now) == (100, 100)
    assert drift.verdict(0.05, CONFIDENCE) == "stale"


def test_sampling_settings_drift_too_and_the_usual_one_may_be_named() -> None:
    greedy, warm = mix({("a", 0): 80}), mix({("a", 1.0): 80}, start=1)
    assert mix_drift(greedy, warm, GREEDY, 0.1).distance == 1
    assert mix_drift(greedy, warm, SamplingSettings(temperature=1.0), 0.1).distance == 0


def test_few_conversations_are_no_drift() -> None:
    drift = mix_drift(mix({("a", 0): 40, ("b", 0): 40}), mix({("a", 0): 3, ("b", 0): 1}, start=1), GREEDY, 0.1)
    assert drift.distance == pytest.approx(0.25) and drift.verdict(0.1, CONFIDENCE) == "unknown"


def test_one_large_cluster_is_no_drift() -> None:
    before = mix({("a", 0): 60, ("b", 0): 40})
    now = [*mix({("a", 0): 60, ("b", 0): 40}, start=1), *mix({("b", 0): 40}, start=2, cluster=40)]
    assert mix_drift(before, now, GREEDY, 0.05).verdict(0.05, CONFIDENCE) == "unknown"
    apart = [*mix({("a", 0): 60, ("b", 0): 40}, start=1), *mix({("b", 0): 40}, start=2)]
    assert mix_drift(before, apart, GREEDY, 0.0).p_value < mix_drift(before, now, GREEDY, 0.0).p_value


@pytest.mark.parametrize(("margin", "cells"), [(0.0, 2), (0.1, 2), (0.1, 12)])
@pytest.mark.slow
def test_false_alarms_of_drift(margin: float, cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At exactly the margin: at most 5 %, give or take 3 standard errors. Twelve cells bias the distance upwards."""
    monkeypatch.setattr("draftforge.pipeline.staleness._SIMULATIONS", 300)
    rng = np.random.default_rng(3)
    first = np.full(cells, 1 / cells)
    second = first + np.r_[margin, -margin, np.zeros(cells - 2)] * (1 if cells == 2 else 1 / (cells * margin or 1) / 2)
    if cells > 2:
        half = cells // 2
        second = first + np.r_[np.full(half, margin / half), np.full(half, -margin / half)]
    assert np.abs(first - second).sum() / 2 == pytest.approx(margin)
    alarms, trials = 0, 100
    for _ in range(trials):
        sides = []
        for start, shares in enumerate((first, second)):
            numbers = rng.multinomial(150, shares)
            sides.append(mix({(f"d{i}", 0): int(n) for i, n in enumerate(numbers)}, start=start))
        alarms += mix_drift(sides[0], sides[1], GREEDY, margin).verdict(margin, CONFIDENCE) == "stale"
    assert alarms / trials <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / trials)


def test_a_record_can_be_written_as_json() -> None:
    held = Cause("drift", "held", "the mix is as it was", {"distance": 0.1})
    fell = Cause("acceptance", "stale", "tau fell", {"ratio": math.nan})
    both = Staleness(None, (held, fell))
    assert both.stale and not Staleness(None, (held,)).stale
    assert both.record()["causes"][1]["numbers"] == {"ratio": None}


def test_what_changed_of_a_target_is_named_by_file() -> None:
    before = {"weights": "a" * 64, "config.json": "b" * 64, "merges.txt": "c" * 64, "tokenizer.json": "d" * 64}

    def promoted(files: dict[str, str], found: str = "e" * 64) -> Lineage:
        names = ("tokenizer_digest", "mix_fingerprint", "capture_fingerprint", "counts_digest", "recipe_fingerprint")
        known = {"target_fingerprint": found, "target_name": "t", "target_files": files, "family": "small", "step": 1}
        return Lineage.model_validate(known | dict.fromkeys(names, "0" * 64))

    recorded = promoted({name: digest[:12] for name, digest in before.items()})
    assert what_changed(recorded, before | {"merges.txt": "f" * 64}, None) == "merges.txt changed"
    after = {name: digest for name, digest in before.items() if name != "merges.txt"} | {"vocab.txt": "f" * 64}
    assert what_changed(recorded, after, None) == "merges.txt, vocab.txt changed"
    assert what_changed(recorded, before, 64) == "its stated context changed"
    assert what_changed(recorded, {}, None) == "its files are gone"
    # Versions that an older draftforge promoted have no record of files.
    same = promoted({}, fingerprint_of(before, None, earlier=True))
    assert what_changed(same, before, None) == "an older version did not look at merges.txt; all else is as it was"
    assert what_changed(promoted({}), before, None).startswith("which file changed is unknown")
