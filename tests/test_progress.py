"""What a person sees while work runs, without a terminal."""

import pytest

from draftforge import progress


@pytest.mark.parametrize("remaining", [True, False])
def test_a_bar_tells_the_time_left_unless_its_notes_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], remaining: bool
) -> None:
    now = [100.0]
    said: list[str] = []
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "say", said.append)
    with progress.bar("Capturing", 10, "answers", remaining=remaining) as tick:
        tick(3, "early")  # at most a line every ten seconds
        now[0] += 20.0
        tick(2, "7 s by our own count")
    left = ", 20 s left" if remaining else ""
    assert said == [f"Capturing: 5/10 answers in 20 s{left} 7 s by our own count"]
