"""What a stage will take: by the last one of its kind, or by its own beginning; and what it took."""

from pathlib import Path

import pytest

from draftforge.pipeline import estimates
from draftforge.pipeline.estimates import ESTIMATES_FILE, Needs, StageEstimate, Work, duration_text
from draftforge.storage import read_object, write_json

SECOND = Work(200, "answers", "cpu")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(estimates, "say", lines.append)
    monkeypatch.setattr(estimates.storage, "free_bytes", lambda folder: 84e9)
    return lines


def run(root: Path, work: Work, clock: Clock, seconds: float, size: int, number: int = 1) -> StageEstimate:
    """A capture that takes so long, and writes so much."""
    folder = root / f"capture-{number}"
    estimate = StageEstimate(root, "capture", work, folder, clock)
    estimate.begin()
    folder.mkdir(exist_ok=True)
    (folder / f"{clock.now:.0f}").write_bytes(bytes(size))
    clock.now += seconds
    estimate.end()
    return estimate


def test_the_last_of_its_kind_tells_in_proportion(tmp_path: Path, clock: Clock, said: list[str]) -> None:
    run(tmp_path, Work(100, "answers", "cpu"), clock, seconds=50, size=3000)
    assert said == []  # nothing to go by, and over before its own beginning could tell
    second = run(tmp_path, SECOND, clock, seconds=150, size=5000, number=2)
    assert second.needs == Needs(100, 6000)
    assert said == [
        "capture: 200 answers, estimated 1 min 40 s and 6.00 kB on disk (84.0 GB free), "
        "by capture-1: 2 answers a second",
        "capture: estimated 1 min 40 s and 6.00 kB on disk; took 2 min 30 s and 5.00 kB on disk",
    ]
    # A resumed one finds what is there already: only what it adds counts.
    resumed = run(tmp_path, Work(20, "answers", "cpu"), clock, seconds=15, size=500, number=2)
    assert resumed.needs == Needs(15, 500)


def test_another_stage_tells_the_pace_where_none_of_the_kind_has(tmp_path: Path, clock: Clock, said: list[str]) -> None:
    """What writes nothing says nothing of the disk."""
    run(tmp_path, Work(100, "answers", "cpu"), clock, seconds=50, size=3000)
    for seconds, needs in ((10, Needs(100, 0)), (20, Needs(10, 0))):
        probe = StageEstimate(tmp_path, "holdout", SECOND, tmp_path / "none", clock, like="capture")
        probe.begin()
        assert probe.needs == needs
        clock.now += seconds
        probe.end()
    assert said[:2] == [
        "holdout: 200 answers, estimated 1 min 40 s, by capture-1: 2 answers a second",
        "holdout: estimated 1 min 40 s; took 10 s",
    ]


@pytest.mark.parametrize(
    "record",
    [
        None,
        {"conditions": "gpu", "unit": "answers", "amount": 1, "seconds": 1, "bytes": 1},
        {"conditions": "cpu", "unit": "tokens", "amount": 1, "seconds": 1, "bytes": 1},
        {"conditions": "cpu", "unit": "answers", "amount": 0, "seconds": 1, "bytes": 1},
        {"conditions": "cpu", "unit": "answers", "amount": 1, "seconds": "1", "bytes": 1},
        {"conditions": "cpu", "unit": "answers", "amount": 1, "seconds": 1},
    ],
)
def test_what_was_made_otherwise_tells_nothing(record: object, tmp_path: Path, clock: Clock, said: list[str]) -> None:
    write_json(tmp_path / ESTIMATES_FILE, {"capture": record, "score": "kept as it is not"})
    estimate = StageEstimate(tmp_path, "capture", SECOND, tmp_path / "new", clock)
    estimate.begin()
    assert estimate.needs is None and said == []


@pytest.mark.parametrize("damaged", ["{", '{"capture": {"seconds": 1' + "0" * 400 + "}}"], ids=["cut", "400 zeros"])
def test_a_damaged_file_is_said_and_written_anew(damaged: str, tmp_path: Path, clock: Clock, said: list[str]) -> None:
    (tmp_path / ESTIMATES_FILE).write_text(damaged)
    run(tmp_path, SECOND, clock, seconds=1, size=1)
    assert "estimates begin anew" in said[0]
    assert read_object(tmp_path / ESTIMATES_FILE)["capture"]["amount"] == 200


def own_pace(root: Path, clock: Clock, reports: list[tuple[float, float]], size: float = 0.0) -> StageEstimate:
    """A capture that is at these shares at these seconds, and ends after 100 s."""
    estimate, start = StageEstimate(root, "capture", SECOND, root / "capture-1", clock), clock.now
    for seconds, share in reports:
        clock.now = start + seconds
        estimate.reached(share, size)
    clock.now = start + 100
    estimate.end()
    return estimate


def test_without_one_its_own_pace_tells_and_its_start_counts_once(
    tmp_path: Path, clock: Clock, said: list[str]
) -> None:
    """Ten seconds of loading, then 1 % a second; nothing done, and all of it, tell nothing."""
    own_pace(tmp_path, clock, [(5, 0.0), (10, 0.01), (12, 0.03), (25, 0.0), (25, 1.0), (30, 0.21), (50, 0.41)], 4000)
    assert said == [
        "capture: 200 answers, estimated 1 min 49 s and 4.00 kB on disk (84.0 GB free), by its own pace, 20.0% in 20 s",
        "capture: estimated 1 min 49 s and 4.00 kB on disk; took 1 min 40 s",
    ]


def test_another_pace_is_said_and_both_are_compared(tmp_path: Path, clock: Clock, said: list[str]) -> None:
    """Slow at first: a tenth in 40 s, the rest in 60 s."""
    own_pace(tmp_path, clock, [(0, 0.001), (20, 0.05), (30, 0.075), (40, 0.1), (80, 0.7)])
    assert [line.partition("estimated ")[2] for line in said] == [
        "6 min 48 s, by its own pace, 4.9% in 20 s",
        "now 1 min 40 s, by its own pace, 60.0% in 40 s",
        "6 min 48 s, then 1 min 40 s; took 1 min 40 s",
    ]


def test_a_stage_that_reports_late_is_at_its_first_report_as_far_as_that_says(tmp_path: Path, clock: Clock) -> None:
    assert own_pace(tmp_path, clock, [(30, 0.25)]).needs == Needs(120, 0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (310, "5 min 10 s"),
        (3599.6, "1 h 0 min"),
        (12000, "3 h 20 min"),
        (3.6e6, "1,000 h 0 min"),
    ],
)
def test_a_duration_has_two_units(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
