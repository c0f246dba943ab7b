"""Rolling back: one step at a time, never forward, and repaired after a cut."""

from collections.abc import Callable

import pytest

from draftforge.errors import RegistryError
from draftforge.registry import promotion
from draftforge.registry.connect import Tracking
from draftforge.registry.lineage import Version
from draftforge.registry.promotion import HISTORY_TAG, history, move_champion, rollback, set_previous
from draftforge.registry.versions import CHAMPION, PREVIOUS, aliases

Register = Callable[..., Version]
TARGET = "a" * 64


def crown(tracking: Tracking, version: Version) -> None:
    number = aliases(tracking, version.name).get(CHAMPION)
    if number is not None:
        set_previous(tracking, version.name, number)
    move_champion(tracking, version.name, number, version.number, "promote", "test")


@pytest.fixture
def three(tracking: Tracking, register: Register) -> list[Version]:
    """Three versions that became champion one after the other."""
    versions = [register(word) for word in ("one", "two", "three")]
    for version in versions:
        crown(tracking, version)
    return versions


def now(tracking: Tracking, name: str) -> tuple[int | None, int | None]:
    known = aliases(tracking, name)
    return known.get(CHAMPION), known.get(PREVIOUS)


def test_rollback_twice_goes_further_back(tracking: Tracking, three: list[Version]) -> None:
    name = three[0].name
    assert rollback(tracking, TARGET, "slow for users").number == 2
    assert now(tracking, name) == (2, 1)
    assert rollback(tracking, TARGET).number == 1
    assert now(tracking, name) == (1, None)
    with pytest.raises(RegistryError, match="version 1 is the champion and there is no earlier one"):
        rollback(tracking, TARGET)
    last = history(tracking, name)[-2:]
    assert [(event["event"], event["from"], event["to"]) for event in last] == [("rollback", 3, 2), ("rollback", 2, 1)]
    assert last[0]["why"] == "slow for users" and last[0]["at"]


def test_line_continues_after_a_rollback(tracking: Tracking, three: list[Version], register: Register) -> None:
    rollback(tracking, TARGET)
    crown(tracking, register("four"))
    assert now(tracking, three[0].name) == (4, 2)
    rollback(tracking, TARGET)
    assert now(tracking, three[0].name) == (2, 1)


def test_deleted_versions_are_skipped(tracking: Tracking, three: list[Version]) -> None:
    tracking.client.delete_model_version(three[0].name, "1")
    rollback(tracking, TARGET)
    assert now(tracking, three[0].name) == (2, None)


def test_alias_moved_by_hand_is_followed(tracking: Tracking, three: list[Version]) -> None:
    tracking.client.set_registered_model_alias(three[0].name, CHAMPION, "1")
    tracking.client.set_registered_model_alias(three[0].name, PREVIOUS, "3")
    assert rollback(tracking, TARGET).number == 3


@pytest.mark.parametrize("text", ["not JSON", "{}", "[1, 2]"])
def test_spoiled_history_does_not_stop_a_rollback(tracking: Tracking, three: list[Version], text: str) -> None:
    tracking.client.set_registered_model_tag(three[0].name, HISTORY_TAG, text)
    rollback(tracking, TARGET)
    assert now(tracking, three[0].name) == (2, None)


def test_move_that_was_cut_off_is_repaired_and_said(tracking: Tracking, three: list[Version]) -> None:
    set_previous(tracking, three[0].name, 3)
    with pytest.raises(RegistryError, match="an earlier move was cut off; previous is now 2"):
        rollback(tracking, TARGET)
    assert now(tracking, three[0].name) == (3, 2)
    assert rollback(tracking, TARGET).number == 2


def test_nothing_to_roll_back(tracking: Tracking, register: Register) -> None:
    with pytest.raises(RegistryError, match="has no champion"):
        rollback(tracking, TARGET)
    register("one")
    with pytest.raises(RegistryError, match="has no champion"):
        rollback(tracking, TARGET)


def test_history_stays_within_the_tag(
    tracking: Tracking, three: list[Version], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promotion, "_MAX_TAG", 1000)
    name = three[0].name
    for number in (1, 2) * 3:
        move_champion(tracking, name, aliases(tracking, name)[CHAMPION], number, "promote", "w" * 500)
    events = history(tracking, name)
    assert 3 < len(events) < 8 and events[-1]["to"] == 2 and len(events[-1]["why"]) == 100
