"""The gate's rules one by one."""

import json
import math
from datetime import UTC, datetime
from typing import Any

import pytest

from draftforge.eval.acceptance import student
from draftforge.registry.gate import Evidence, GateSettings, Interval, StoredDecision, decide

GOOD: dict[str, Any] = {
    "candidate": {"tau": 2.2, "speedup": 1.32},
    "conversations": 60,
    "clusters": 40,
    "confidence": 0.95,
    "lossless": True,
    "export_reads_back": True,
    "holdout_overlap": 0,
    "compared": "m/3",
    "champion": {"tau": 2.0, "speedup": 1.2},
}


def interval(value: float, low: float, high: float, clusters: int = 40) -> dict[str, Any]:
    """An interval that is as long to both sides, as Student's t makes it of clusters that are alike."""
    error = (high - low) / 2 / student(0.975, clusters - 1) if clusters > 1 else math.nan
    ends = {"value": value, "low": low, "high": high}
    return {**ends, "clusters": clusters, "error": error, "freedom": clusters - 1}


GOOD["difference"] = interval(0.12, 0.06, 0.18)


def evidence(**changes: Any) -> Evidence:
    return Evidence.model_validate(GOOD | changes)


def first(**changes: Any) -> Evidence:
    return evidence(compared=None, champion=None, difference=None, **changes)


def domain(low: float, high: float, clusters: int = 40) -> dict[str, Any]:
    """A domain whose gain, as a share, lies between these; the champion's speed-up on it is 1.5."""
    difference = interval(1.5 * (low + high) / 2, 1.5 * low, 1.5 * high, clusters)
    return {"conversations": 2 * clusters, "champion_speedup": 1.5, "difference": difference}


def test_better_candidate_is_promoted_with_numbers() -> None:
    decision = decide(evidence(domains={"code": domain(-0.04, 0.2)}), GateSettings())
    assert decision.promote and decision.compared == "m/3"
    assert decision.reasons[-1] == "faster than champion m/3 (1.20) by +10.0 % [+5.0 %, +15.0 %]"
    numbers = decision.numbers
    assert numbers.gain is not None and numbers.gain.low == pytest.approx(0.05)
    assert numbers.evidence is not None and numbers.evidence.clusters == 40
    assert numbers.domains["code"].judged and numbers.domains["code"].passes
    assert numbers.domains["code"].gain.high == pytest.approx(0.2) and numbers.more_clusters is None


def test_gain_is_a_share_of_the_champions_speed() -> None:
    gain = Interval(value=0.12, low=-0.06, high=0.3, clusters=9, error=0.06, freedom=8).over(1.2)
    assert [gain.value, gain.low, gain.high, gain.error] == pytest.approx([0.1, -0.05, 0.25, 0.05])
    assert (gain.clusters, gain.freedom) == (9, 8)
    assert all(math.isnan(gain.over(speed).value) for speed in (math.nan, 0.0))


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"lossless": False}, "not lossless"),
    ({"export_reads_back": False}, "export was not read back"),
    ({"holdout_overlap": 3}, "3 holdout clusters were trained on"),
    (
        {"clusters": 16},
        "too few clusters to tell: 4 more needed (60 holdout conversations are 16 clusters of",
    ),
    ({"confidence": 0.9}, "intervals cover 0.9"),
    ({"confidence": math.nan}, "intervals cover nan"),
    ({"difference": interval(0.0, -0.01, 0.01)}, "not faster"),
    ({"difference": interval(math.nan, math.nan, math.nan)}, "not faster"),
    ({"candidate": {"tau": 2.2, "speedup": math.nan}}, "is below 0"),
    ({"difference": interval(0.2, -0.5, 0.9)}, "may be slower than champion m/3"),
    ({"difference": interval(0.2, math.nan, 0.9)}, "may be slower"),
    ({"difference": None}, "m/3 was not measured"),
    ({"champion": None}, "m/3 was not measured"),
    ({"domains": {"code": domain(-0.6, -0.2)}}, "code gets worse: -40.0 % [-60.0 %, -20.0 %] on 40 clusters"),
    ({"domains": {"code": domain(-0.06, 0.1)}}, "code may get worse: +2.0 % [-6.0 %, +10.0 %] on 40 clusters"),
    ({"domains": {"code": domain(math.nan, math.nan)}}, "code may get worse: its gain has no interval"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSALS)
def test_refusals_say_why(changes: dict[str, Any], words: str) -> None:
    decision = decide(evidence(**changes), GateSettings())
    assert not decision.promote
    assert any(words in reason for reason in decision.reasons)
    stored = StoredDecision(version="m/4", at=datetime.now(UTC), **vars(decision))
    json.dumps(json.loads(stored.dump()), allow_nan=False)
    assert StoredDecision.model_validate_json(stored.dump()).dump() == stored.dump()


@pytest.mark.parametrize("value", [0.2, -0.2])
def test_two_clusters_give_no_interval_and_no_percentage_of_nothing(value: float) -> None:
    few = evidence(clusters=2, difference=interval(value, math.nan, math.nan, 2), domains={"a": domain(-1, 1, 2)})
    decision = decide(few, GateSettings(min_clusters=1))
    assert not decision.promote
    assert any("slower than champion m/3: too few clusters to tell: 1 more needed" in one for one in decision.reasons)
    assert decision.numbers.domains["a"].more_clusters == 18
    assert not any("nan" in reason for reason in decision.reasons)


def test_a_self_test_that_compared_nothing_is_said() -> None:
    decision = decide(evidence(lossless=None), GateSettings())
    assert decision.promote and any("no self-test" in reason for reason in decision.reasons)


def test_every_fault_is_listed() -> None:
    decision = decide(evidence(lossless=False, clusters=1, domains={"code": domain(-1, -0.5)}), GateSettings())
    assert len(decision.reasons) == 3


@pytest.mark.parametrize(("low", "high", "promoted"), [(-0.9, -0.06, False), (-0.9, -0.04, True), (-0.9, 0.3, True)])
def test_a_small_domain_refuses_only_where_it_is_shown_to_lose(low: float, high: float, promoted: bool) -> None:
    decision = decide(evidence(domains={"code": domain(low, high, 19)}), GateSettings())
    assert decision.promote is promoted and not decision.numbers.domains["code"].judged
    said = "domains with too few clusters to tell alone: code (19, 1 more needed) (gate.min_domain_clusters)"
    assert (said in decision.reasons) is promoted
    assert decide(evidence(domains={"code": domain(-0.04, 0.3, 19)}), GateSettings()).promote


@pytest.mark.parametrize(("low", "promoted"), [(-0.051, False), (-0.05 + 1e-9, True), (0.01, True)])
def test_every_judged_domain_must_be_non_inferior(low: float, promoted: bool) -> None:
    both = {"chat": domain(0.0, 0.2), "code": domain(low, 0.2)}
    assert decide(evidence(domains=both), GateSettings()).promote is promoted


def test_a_refusal_says_how_many_clusters_are_missing() -> None:
    wide = evidence(
        difference=interval(0.012, -0.036, 0.06),  # +1 % and 4 % to either side of it
        domains={"code": domain(-0.07, 0.07, 30), "chat": domain(-0.16, 0.02), "tiny": domain(-0.01, 0.05, 5)},
    )
    decision = decide(wide, GateSettings())
    numbers = decision.numbers
    assert numbers.more_clusters == 99  # 40 * (0.04 / 2.023 * (1.977 + 0.844) / 0.03)^2 = 138.3
    assert numbers.domains["code"].more_clusters == 83  # 30 * (0.07 / 2.045 * (1.982 + 0.845) / 0.05)^2 = 112.4
    assert numbers.domains["chat"].more_clusters is None  # it seems to lose: no number of them would help
    assert numbers.domains["tiny"].more_clusters == 15
    assert any("code may get worse" in one and "about 83 more" in one for one in decision.reasons)
    assert any("chat may get worse" in one and "would not change that" in one for one in decision.reasons)
    assert any("may be slower" in one and "about 99 more clusters of holdout" in one for one in decision.reasons)


def test_slightly_uncertain_gain_passes_within_the_margin() -> None:
    uncertain = evidence(difference=interval(0.2, -0.02, 0.4))
    assert decide(uncertain, GateSettings(non_inferiority_margin=0.02)).promote
    assert not decide(uncertain, GateSettings(non_inferiority_margin=0.0)).promote


def test_first_champion() -> None:
    slow = first(candidate={"tau": 1.5, "speedup": 0.8})
    decision = decide(slow, GateSettings())
    assert decision.promote and "first champion" in decision.reasons[-1] and "0.80" in decision.reasons[0]
    refused = decide(slow, GateSettings(min_speedup=1.1))
    assert refused.reasons == ["expected speed-up 0.80 is below 1.1 (gate.min_speedup)"]
    assert not decide(first(candidate={"tau": 1.5, "speedup": math.nan}), GateSettings()).promote
    assert decide(first(confidence=0.5), GateSettings()).promote


LOST = {"champion": None, "difference": None, "champion_lost": "file:///x/config.json: is missing"}


def test_a_champion_whose_files_are_gone_blocks_nobody() -> None:
    decision = decide(evidence(**LOST, confidence=0.5), GateSettings())
    said = "champion m/3: its files are gone or damaged (file:///x/config.json: is missing): nothing to compare with"
    assert decision.promote and decision.champion_lost and decision.reasons[-1] == said
    assert decision.compared == "m/3"
    refused = decide(evidence(**LOST), GateSettings(min_speedup=2))
    assert not refused.promote and "gate.min_speedup" in refused.reasons[0] and refused.reasons[-1] == said
