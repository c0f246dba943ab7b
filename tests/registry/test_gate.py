"""The gate's rules one by one, and promotion with its races."""

import json
import math
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftforge import storage
from draftforge.errors import LockedError, RegistryError
from draftforge.registry.champions import ROLLED_BACK_TAG, history, rollback
from draftforge.registry.connect import Tracking
from draftforge.registry.gate import Decision, Evidence, Figures, Interval, decide, promote, relative_gain
from draftforge.registry.lineage import Version
from draftforge.registry.models import CANDIDATE, CHAMPION, PREVIOUS, aliases
from draftforge.registry.settings import GateSettings

Register = Callable[..., Version]
TARGET = "a" * 64
GOOD: dict[str, Any] = {
    "candidate": {"tau": 2.2, "speedup": 1.32},
    "conversations": 40,
    "confidence": 0.95,
    "lossless": True,
    "export_reads_back": True,
    "holdout_overlap": 0,
    "compared": "m/3",
    "champion": {"tau": 2.0, "speedup": 1.2},
    "difference": {"value": 0.12, "low": 0.06, "high": 0.18},
}


def evidence(**changes: Any) -> Evidence:
    return Evidence.model_validate(GOOD | changes)


def first(**changes: Any) -> Evidence:
    return evidence(compared=None, champion=None, difference=None, **changes)


def domain(low: float, high: float, conversations: int = 10) -> dict[str, Any]:
    difference = {"value": (low + high) / 2, "low": low, "high": high}
    return {"conversations": conversations, "champion_tau": 2.0, "difference": difference}


def test_better_candidate_is_promoted_with_numbers() -> None:
    decision = decide(evidence(domains={"code": domain(-0.05, 0.2)}), GateSettings())
    assert decision.promote and decision.compared == "m/3"
    assert decision.reasons[-1] == "faster than champion m/3 (1.20) by +10.0 % [+5.0 %, +15.0 %]"
    assert decision.numbers["gain"]["low"] == pytest.approx(0.05)
    assert decision.numbers["evidence"]["conversations"] == 40


def test_gain_is_a_share_of_the_champions_speed() -> None:
    champion = Figures(tau=2.0, speedup=1.2)
    gain = relative_gain(champion, Interval(value=0.12, low=-0.06, high=0.3))
    assert [gain.value, gain.low, gain.high] == pytest.approx([0.1, -0.05, 0.25])
    assert math.isnan(relative_gain(Figures(tau=1, speedup=math.nan), Interval(value=0, low=0, high=0)).value)


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"lossless": False}, "not lossless"),
    ({"export_reads_back": False}, "export was not read back"),
    ({"holdout_overlap": 3}, "3 holdout clusters were trained on"),
    ({"conversations": 19}, "19 holdout conversations, at least 20"),
    ({"confidence": 0.9}, "intervals cover 0.9"),
    ({"confidence": math.nan}, "intervals cover nan"),
    ({"difference": {"value": 0.0, "low": -0.01, "high": 0.01}}, "not faster"),
    ({"difference": {"value": math.nan, "low": math.nan, "high": math.nan}}, "not faster"),
    ({"candidate": {"tau": 2.2, "speedup": math.nan}}, "is below 0"),
    ({"difference": {"value": 0.2, "low": -0.5, "high": 0.9}}, "may be slower than champion m/3"),
    ({"difference": {"value": 0.2, "low": math.nan, "high": 0.9}}, "may be slower"),
    ({"difference": None}, "m/3 was not measured"),
    ({"champion": None}, "m/3 was not measured"),
    ({"domains": {"code": domain(-0.6, -0.2)}}, "code gets worse: tau -0.40"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSALS)
def test_refusals_say_why(changes: dict[str, Any], words: str) -> None:
    decision = decide(evidence(**changes), GateSettings())
    assert not decision.promote
    assert any(words in reason for reason in decision.reasons)
    json.dumps(decision.model_dump(), allow_nan=False)


@pytest.mark.parametrize("value", [0.2, -0.2])
def test_one_conversation_gives_no_interval_and_no_percentage_of_nothing(value: float) -> None:
    alone = evidence(conversations=1, difference={"value": value, "low": math.nan, "high": math.nan})
    decision = decide(alone, GateSettings(min_conversations=1))
    assert not decision.promote and any("too few conversations for an interval" in one for one in decision.reasons)
    assert not any("nan" in reason for reason in decision.reasons)


def test_a_self_test_that_compared_nothing_is_said() -> None:
    decision = decide(evidence(lossless=None), GateSettings())
    assert decision.promote and any("no self-test" in reason for reason in decision.reasons)


def test_every_fault_is_listed() -> None:
    decision = decide(evidence(lossless=False, conversations=1, domains={"code": domain(-1, -0.5)}), GateSettings())
    assert len(decision.reasons) == 3


@pytest.mark.parametrize(("low", "high", "conversations"), [(-0.6, -0.05, 10), (-0.6, 0.1, 10), (-0.9, -0.6, 4)])
def test_domains_that_are_not_shown_to_lose_pass(low: float, high: float, conversations: int) -> None:
    assert decide(evidence(domains={"code": domain(low, high, conversations)}), GateSettings()).promote


def test_slightly_uncertain_gain_passes_within_the_margin() -> None:
    uncertain = evidence(difference={"value": 0.2, "low": -0.02, "high": 0.4})
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


def test_no_rollback_returns_to_a_champion_whose_files_are_gone(tracking: Tracking, register: Register) -> None:
    one, two, three = register("one"), register("two"), register("three")
    crown(tracking, one)
    crown(tracking, two)
    lost = Decision(promote=True, reasons=["x"], numbers={}, compared=two.reference, champion_lost=True)
    assert promote(tracking, lost, three).promote
    assert aliases(tracking, one.name) == {CHAMPION: 3, PREVIOUS: 1}
    assert rollback(tracking, TARGET).number == 1


def verdict(compared: str | None, yes: bool = True) -> Decision:
    return Decision(promote=yes, reasons=["because"], numbers={"gain": 0.1}, compared=compared)


def crown(tracking: Tracking, version: Version) -> None:
    number = aliases(tracking, version.name).get(CHAMPION)
    assert promote(tracking, verdict(f"{version.name}/{number}" if number else None), version).promote


def test_promotion_moves_aliases_and_leaves_a_record(tracking: Tracking, register: Register, tmp_path: Path) -> None:
    one = register("one")
    crown(tracking, one)
    two = register("two")
    assert aliases(tracking, one.name) == {CHAMPION: 1, CANDIDATE: 2}
    crown(tracking, two)
    assert aliases(tracking, one.name) == {CHAMPION: 2, PREVIOUS: 1}
    tags = tracking.client.get_model_version(two.name, "2").tags
    assert tags["draftforge.decision"] == "promote" and tags["draftforge.compared"] == one.reference
    path = tracking.client.download_artifacts(two.run_id, tags["draftforge.decision_record"], str(tmp_path))
    record = json.loads(Path(path).read_text())
    assert record["version"] == two.reference and record["compared"] == one.reference and record["numbers"]
    assert [(event["event"], event["from"], event["to"]) for event in history(tracking, one.name)] == [
        ("promote", None, 1),
        ("promote", 1, 2),
    ]


def test_promoting_twice_changes_nothing(tracking: Tracking, register: Register) -> None:
    one = register("one")
    crown(tracking, one)
    before = history(tracking, one.name)
    assert promote(tracking, verdict("someone/9"), one).reasons == ["is the champion already"]
    assert history(tracking, one.name) == before and aliases(tracking, one.name) == {CHAMPION: 1}


def test_refusal_is_recorded_and_moves_nothing(tracking: Tracking, register: Register) -> None:
    one = register("one")
    assert not promote(tracking, verdict(None, yes=False), one).promote
    assert aliases(tracking, one.name) == {CANDIDATE: 1}
    assert tracking.client.get_model_version(one.name, "1").tags["draftforge.decision"] == "refuse"


def test_champion_that_changed_since_the_comparison(tracking: Tracking, register: Register) -> None:
    one, two, three = register("one"), register("two"), register("three")
    crown(tracking, one)
    crown(tracking, two)
    with pytest.raises(RegistryError, match=f"lost a race: the decision compared {one.reference}, .* {two.reference}"):
        promote(tracking, verdict(one.reference), three)
    with pytest.raises(RegistryError, match="compared no champion"):
        promote(tracking, verdict(None), three)
    assert aliases(tracking, one.name)[CHAMPION] == 2


class OtherHost:
    """A client beside which another host moves `champion` at the worst moment."""

    def __init__(self, tracking: Tracking, steals: Version, when: str) -> None:
        self._client, self._steals, self._when = tracking.client, steals, when

    def set_registered_model_alias(self, name: str, alias: str, version: str) -> None:
        self._client.set_registered_model_alias(name, alias, version)
        if alias == self._when:
            self._client.set_registered_model_alias(name, CHAMPION, str(self._steals.number))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


@pytest.mark.parametrize("when", [PREVIOUS, CHAMPION])
def test_race_with_another_host_is_reported(tracking: Tracking, register: Register, when: str) -> None:
    one, two, three = register("one"), register("two"), register("three")
    crown(tracking, one)
    raced = Tracking(**{**vars(tracking), "client": OtherHost(tracking, three, when)})
    with pytest.raises(RegistryError, match=r"lost a race: champion was version \d and is now version 3"):
        promote(raced, verdict(one.reference), two)
    assert aliases(tracking, one.name)[CHAMPION] == 3


def test_race_on_this_host_has_one_winner(tracking: Tracking, register: Register) -> None:
    one, two, three = register("one"), register("two"), register("three")
    crown(tracking, one)
    outcomes: list[str] = []

    def attempt(version: Version) -> None:
        try:
            promote(tracking, verdict(one.reference), version)
            outcomes.append("won")
        except RegistryError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=attempt, args=(version,)) for version in (two, three)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("won") == 1 and sum("lost a race" in outcome for outcome in outcomes) == 1
    assert aliases(tracking, one.name)[PREVIOUS] == 1


def test_held_lock_is_named(tracking: Tracking, register: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    one = register("one")
    real = storage.lock
    monkeypatch.setattr(storage, "lock", lambda path, timeout_seconds, what: real(path, 0.1, what))
    with real(tracking.lock_folder / f"{one.name}.lock"), pytest.raises(LockedError, match="another promotion"):
        promote(tracking, verdict(None), one)


def test_what_was_rolled_back_stays_so(tracking: Tracking, register: Register) -> None:
    one, two = register("one"), register("two")
    crown(tracking, one)
    crown(tracking, two)
    rollback(tracking, TARGET, "users complained")
    outcome = promote(tracking, verdict(one.reference), two)
    assert not outcome.promote and outcome.reasons[0].startswith("version 2 was rolled back (users complained)")
    tracking.client.delete_model_version_tag(two.name, "2", ROLLED_BACK_TAG)
    assert promote(tracking, verdict(one.reference), two).promote


def test_what_was_rolled_back_stays_so_when_it_is_registered_again(tracking: Tracking, register: Register) -> None:
    one, two = register("one"), register("two")
    crown(tracking, one)
    crown(tracking, two)
    rollback(tracking, TARGET, "users complained")
    shutil.rmtree(two.source.removeprefix("file://"))
    again = register("two")
    outcome = promote(tracking, verdict(one.reference), again)
    assert again.number == 3 and not outcome.promote and outcome.reasons[0].startswith("version 2 was rolled back")
