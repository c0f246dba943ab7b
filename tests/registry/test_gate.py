"""The gate's rules one by one."""

import json
import math
from datetime import UTC, datetime
from typing import Any

import pytest

from draftforge.eval.acceptance import student
from draftforge.registry.gate import Evidence, Interval, StoredDecision, decide
from draftforge.registry.settings import GateSettings

GOOD: dict[str, Any] = {
    "conversations": 60,
    "clusters": 40,
    "confidence": 0.95,
    "lossless": True,
    "export_reads_back": True,
    "holdout_overlap": 0,
    "compared": "m/3",
}


def interval(value: float, low: float, high: float, clusters: int = 40) -> dict[str, Any]:
    """An interval that is as long to both sides, as Student's t makes it of clusters that are alike."""
    error = (high - low) / 2 / student(0.975, clusters - 1) if clusters > 1 else math.nan
    ends = {"value": value, "low": low, "high": high}
    return {**ends, "clusters": clusters, "error": error, "freedom": clusters - 1}


def drafted(value: float, low: float, high: float, clusters: int = 40) -> dict[str, Any]:
    """A draft on the holdout, by its expected speed-up."""
    return {"tau": 2.0, "speedup": interval(value, low, high, clusters)}


def looked_up(value: float, ahead: float, low: float, high: float) -> dict[str, Any]:
    """Prompt lookup at K = 3: its speed-up, give or take 0.02, and how far the candidate is ahead of it."""
    ends = interval(value, value - 0.02, value + 0.02)
    return {"name": "prompt lookup", "draft_tokens": 3, "speedup": ends, "difference": interval(ahead, low, high)}


GOOD["candidate"], GOOD["champion"] = drafted(1.32, 1.25, 1.39), drafted(1.2, 1.13, 1.27)
GOOD["difference"], GOOD["lookup"] = interval(0.12, 0.06, 0.18), looked_up(1.1, 0.22, 0.15, 0.29)


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
    ({"difference": interval(1.5e-8, 4e-9, 2.6e-8)}, "not faster"),  # by a rounding error
    ({"difference": interval(math.nan, math.nan, math.nan)}, "not faster"),
    ({"candidate": drafted(math.nan, math.nan, math.nan)}, "expected speed-up over plain decoding is not known"),
    ({"candidate": drafted(0.9, 0.85, 0.95)}, "not shown to beat plain decoding: expected speed-up 0.90x [0.85, 0.95]"),
    ({"lookup": None}, "prompt lookup was not measured"),
    ({"difference": interval(0.2, -0.5, 0.9)}, "may be slower than champion m/3"),
    ({"difference": interval(0.2, math.nan, 0.9)}, "may be slower"),
    ({"difference": None}, "m/3 was not measured"),
    ({"champion": None}, "m/3 was not measured"),
    ({"domains": {"code": domain(-0.6, -0.2)}}, "code gets worse: -40.0 % [-60.0 %, -20.0 %] on 40 clusters"),
    ({"domains": {"code": domain(-0.06, 0.1)}}, "code may get worse: +2.0 % [-6.0 %, +10.0 %] on 40 clusters"),
    ({"domains": {"code": domain(math.nan, math.nan)}}, "code may get worse: no interval"),
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
    assert len(decision.reasons) == 3, decision.reasons


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
    decision = decide(wide, GateSettings(non_inferiority_margin=0.02))
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
    refused = decide(uncertain, GateSettings())  # without one it must be shown to be faster
    assert not refused.promote and "interval reaches -1.7 %, allowed is +0.0 % (gate." in refused.reasons[0]


def test_first_champion() -> None:
    decision = decide(first(), GateSettings())
    assert decision.promote and decision.worth_serving and decision.by_choice == ""
    assert decision.reasons == [
        "worth serving: expected speed-up over plain decoding 1.32x [1.25, 1.39], prompt lookup at K = 3 1.10x "
        "[1.08, 1.12], a difference of +0.22 [+0.15, +0.29]",
        "first champion for this target: there is none to compare with",
    ]
    assert not decide(first(confidence=0.5), GateSettings()).promote
    assert decide(first(confidence=0.5), GateSettings(min_speedup=0)).promote  # no interval decides


@pytest.mark.parametrize(
    ("low", "least", "error", "promoted"),
    [
        (1.0, 1.0, 0.0, False),  # beat means beat: at 1 it does not
        (1.001, 1.0, 0.0, True),
        (1.04, 1.0, 0.05, False),  # fitted times may be off by more than it gains
        (1.06, 1.0, 0.05, True),
        (1.19, 1.2, 0.0, False),
        (1.21, 1.2, 0.0, True),
        (math.nan, 1.0, 0.0, False),
    ],
)
def test_the_lower_end_must_lie_above_plain_decoding(low: float, least: float, error: float, promoted: bool) -> None:
    one = first(candidate=drafted(1.3, low, 1.5), fit_error=error)
    decision = decide(one, GateSettings(min_speedup=least))
    assert decision.promote is promoted
    if not promoted:
        (said,) = decision.reasons
        assert ("be 1.2 times as fast as plain" if least > 1 else "not shown to beat plain decoding") in said
        assert (", less 5% for the error of fitted times must lie above 1 (gate.min_speedup)" in said) is bool(error)


def test_a_draft_that_prompt_lookup_equals_is_refused_with_both_figures() -> None:
    decision = decide(first(lookup=looked_up(1.3, 0.02, -0.01, 0.05)), GateSettings())
    assert not decision.promote and decision.worth_serving is False
    assert decision.reasons == [
        "not shown to beat prompt lookup: 1.32x [1.25, 1.39], prompt lookup at K = 3 1.30x [1.28, 1.32], a difference "
        "of +0.02 [-0.01, +0.05], whose lower end must lie above 0; serve prompt lookup at K = 3 instead, which takes "
        "no training"
    ]
    # Where prompt lookup does not pay either there is nothing to serve instead.
    neither = decide(first(lookup=looked_up(1.01, 0.31, -0.1, 0.7)), GateSettings())
    assert (
        "instead" not in neither.reasons[0]
        and "more clusters of holdout conversations would tell" in neither.reasons[0]
    )
    # Fitted times may be off by more than the lead.
    fitted = decide(first(lookup=looked_up(1.25, 0.07, 0.05, 0.09), fit_error=0.05), GateSettings())
    assert not fitted.promote and "must lie above 0.07, the error of fitted times" in fitted.reasons[0]


@pytest.mark.parametrize(("low", "promoted"), [(-0.01, False), (0.0, False), (1e-8, False), (0.001, True)])
def test_an_heir_must_be_shown_to_beat_its_start(low: float, promoted: bool) -> None:
    start = {
        "name": "old/7",
        "draft_tokens": 3,
        "speedup": interval(1.25, 1.2, 1.3),
        "difference": interval(0.07, low, 0.2),
    }
    decision = decide(first(start=start), GateSettings())
    assert decision.promote is promoted and decision.beats_start is promoted and decision.worth_serving
    said = "not shown to be better than its start, old/7 as it is: 1.32x [1.25, 1.39] against 1.25x [1.20, 1.30], a"
    better = "better than its start, old/7 as it is (1.25x [1.20, 1.30]), by +0.07 [+0.00, +0.20]"
    assert better in decision.reasons if promoted else decision.reasons[0].startswith(said)
    assert decide(first(), GateSettings()).beats_start is None


def test_a_lower_min_speedup_is_a_choice_that_is_said() -> None:
    slow = first(candidate=drafted(0.8, 0.75, 0.85), lookup=looked_up(0.9, -0.1, -0.2, 0.0))
    decision = decide(slow, GateSettings(min_speedup=0))
    said = "gate.min_speedup = 0: is not shown to beat plain decoding and prompt lookup"
    assert decision.promote and decision.worth_serving is False and decision.by_choice == said
    assert decision.reasons[0] == said and decision.reasons[1].startswith("not shown to beat plain decoding: expected")
    assert decision.reasons[2].startswith("not shown to beat prompt lookup: 0.80x") and len(decision.reasons) == 4
    assert (
        not decide(slow, GateSettings(min_speedup=0.78)).promote and decide(slow, GateSettings(min_speedup=0.7)).promote
    )
    fast = decide(first(), GateSettings(min_speedup=0.5))
    assert (
        fast.promote and fast.by_choice == "gate.min_speedup = 0.5: is shown to beat plain decoding and prompt lookup"
    )
    # Asking for nothing needs no interval, but a figure.
    assert decide(first(candidate=drafted(0.8, math.nan, math.nan, 2)), GateSettings(min_speedup=0)).promote
    assert not decide(first(candidate=drafted(math.nan, math.nan, math.nan)), GateSettings(min_speedup=0)).promote


LOST = {"champion": None, "difference": None, "champion_lost": "file:///x/config.json: is missing"}


def test_a_champion_whose_files_are_gone_blocks_nobody() -> None:
    decision = decide(evidence(**LOST), GateSettings())
    said = "champion m/3: its files are gone or damaged (file:///x/config.json: is missing): nothing to compare with"
    assert decision.promote and decision.champion_lost and decision.reasons[-1] == said, decision.reasons
    assert decision.compared == "m/3"
    refused = decide(evidence(**LOST), GateSettings(min_speedup=2))
    assert not refused.promote and "gate.min_speedup" in refused.reasons[0] and refused.reasons[-1] == said


FEW = {"clusters": 12}
UNPROVEN: dict[str, Any] = {"candidate": drafted(1.1, 0.9, 1.3)}


@pytest.mark.parametrize(
    ("changes", "choice"),
    [
        ({}, ""),
        (FEW, "gate.min_clusters=12"),
        (UNPROVEN, "gate.min_speedup=0"),
        (FEW | UNPROVEN, "gate.min_speedup=0 gate.min_clusters=12"),
        (FEW | {"holdout_overlap": 1}, ""),
        (UNPROVEN | {"lossless": False}, ""),
    ],
)
def test_a_refusal_names_the_settings_that_would_promote(changes: dict[str, Any], choice: str) -> None:
    decision = decide(first(**changes), GateSettings())
    assert decision.choice == choice
    if choice:
        named = {key.removeprefix("gate."): int(value) for key, value in (one.split("=") for one in choice.split())}
        chosen = decide(first(**changes), GateSettings(**named))
        assert chosen.promote and chosen.outcome.startswith("promoted")
        assert ("by choice: gate.min_speedup = 0" in chosen.outcome) == ("min_speedup" in choice)
        assert decision.outcome == f"refused: {'; '.join(decision.reasons)}"
