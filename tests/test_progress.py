"""What a person sees while work runs, without a terminal."""

import io

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


def test_printed_texts_control_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Title changes, colours and 8-bit controls are spelt out; newlines, tabs and our own colours stay."""
    hostile = "a\x1b]0;pwned\x07\x9b31m\x7f\u202e\n\tb"
    progress.Console(stderr=True).print(hostile, markup=False)
    progress.Console(stderr=True, force_terminal=True, color_system="standard", highlight=False).print(
        hostile, style="red"
    )
    progress.say(hostile)
    shown = capsys.readouterr().err.replace("\x1b[31m", "").replace("\x1b[0m", "")
    assert not {"\x1b", "\x07", "\x9b", "\x7f", "\u202e"} & set(shown) and shown.count(r"a\x1b]0;pwned") == 3
    assert shown.count("\n") == 6


def test_brackets_and_braces_in_names_are_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = progress.Console(file=io.StringIO(), force_terminal=True, width=120, legacy_windows=False)
    monkeypatch.setattr(progress, "console", shown)
    with progress.bar("logs/[/old] [link=x]a[/]", 2, "{rows}") as advance:
        advance(2, "[/note]")
    assert isinstance(shown.file, io.StringIO)
    assert all(text in shown.file.getvalue() for text in ("logs/[/old] [link=x]a[/]", "{rows}", "[/note]"))
