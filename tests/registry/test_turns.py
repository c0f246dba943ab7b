"""Turns among hosts: one at a time, taken over from the dead, given up in the end."""

import threading
import time

import pytest

from draftforge.errors import LockedError
from draftforge.registry import promotion
from draftforge.registry.connect import Tracking
from draftforge.registry.promotion import TURN_TAG, moving, turn


@pytest.fixture
def model(tracking: Tracking, monkeypatch: pytest.MonkeyPatch) -> str:
    """A registered model, and turns that settle fast."""
    name = f"{tracking.settings.model}-turns"
    tracking.client.create_registered_model(name)
    monkeypatch.setattr(promotion, "_SETTLE_SECONDS", 0.2)
    monkeypatch.setattr(promotion, "_LOOK_SECONDS", 0.02)
    return name


def claim(tracking: Tracking, name: str) -> str | None:
    tag: str | None = tracking.client.get_registered_model(name).tags.get(TURN_TAG)
    return tag


def test_many_hosts_move_one_after_the_other(tracking: Tracking, model: str) -> None:
    inside, most, done = 0, 0, []
    guard = threading.Lock()

    def move(number: int) -> None:
        nonlocal inside, most
        with turn(tracking, model):
            with guard:
                inside += 1
                most = max(most, inside)
            time.sleep(0.1)
            with guard:
                inside -= 1
            done.append(number)

    threads = [threading.Thread(target=move, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1 and sorted(done) == [0, 1, 2] and claim(tracking, model) is None


def test_a_turn_that_was_overwritten_is_taken_again(
    tracking: Tracking, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.sleep
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        if not slept:  # another host claims while this one waits for its own claim to settle
            tracking.client.set_registered_model_tag(model, TURN_TAG, "theirs")
            threading.Timer(0.3, tracking.client.delete_registered_model_tag, (model, TURN_TAG)).start()
        slept.append(seconds)
        real(seconds)

    monkeypatch.setattr(promotion.time, "sleep", sleep)
    with turn(tracking, model):
        assert claim(tracking, model) not in (None, "theirs")
    assert len(slept) >= 2


def test_a_dead_process_holds_nobody_up_for_long(
    tracking: Tracking, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(promotion, "_ABANDONED_SECONDS", 0.3)
    tracking.client.set_registered_model_tag(model, TURN_TAG, "dead")
    with turn(tracking, model):
        assert claim(tracking, model) != "dead"
    assert "was cut off; going on without it" in capsys.readouterr().err


def test_who_waits_for_too_long_gives_up(tracking: Tracking, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion, "_GIVE_UP_SECONDS", 0.3)
    tracking.client.set_registered_model_tag(model, TURN_TAG, "busy")
    with pytest.raises(LockedError, match="held by other promotions"), turn(tracking, model):
        pytest.fail("two at once")
    assert claim(tracking, model) == "busy"


def test_one_file_needs_no_turns(tracking: Tracking, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion, "turn", lambda *_: pytest.fail("took a turn"))
    with moving(tracking, model):
        pass
