"""Sizes as people read them, and the error of a disk that is too small."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from draftforge.errors import DiskFullError
from draftforge.storage import require_free_space, size_text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_000, "1.00 kB"),
        (9_994, "9.99 kB"),
        (9_995, "10.0 kB"),
        (99_949, "99.9 kB"),
        (99_950, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (84e9, "84.0 GB"),
        (2.5e16, "25,000 TB"),
    ],
)
def test_a_size_has_three_digits_and_the_unit_that_suits_it(count: float, text: str) -> None:
    assert size_text(count) == text


def test_a_disk_that_is_too_small_says_by_how_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1_050_000))
    require_free_space(tmp_path, 1_050_000)
    with pytest.raises(DiskFullError) as caught:
        require_free_space(tmp_path, 1_051_500, "free some")
    assert str(caught.value) == f"{tmp_path}: 1.05 MB free, 1.05 MB needed: 1.50 kB too little; free some"
