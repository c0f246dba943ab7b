"""Fingerprints: same content, same digest; nothing else counts."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftforge import fingerprint
from draftforge.errors import MissingFileError

KEYS = st.text(max_size=4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(KEYS, VALUES, max_size=5), st.randoms(use_true_random=False))
def test_the_order_of_keys_does_not_count(settings: dict[str, object], random: object) -> None:
    keys = list(settings)
    random.shuffle(keys)  # type: ignore[attr-defined]
    assert fingerprint.of_json({key: settings[key] for key in keys}) == fingerprint.of_json(settings)


def test_one_changed_value_is_another_fingerprint() -> None:
    values = [{"a": 1}, {"a": 2}, {"b": 1}, {"a": "1"}, {"a": 1, "b": None}, ["a", 1], {"a": [1]}, {"a": 1.5}]
    assert len({fingerprint.of_json(value) for value in values}) == len(values)


def test_files_count_by_name_and_content(tmp_path: Path) -> None:
    for name, text in {"a": "1", "b": "2"}.items():
        (tmp_path / name).write_text(text)
    before = fingerprint.of_files(tmp_path, ["b", "a"])
    assert before == fingerprint.of_files(tmp_path, ["a", "b"])
    (tmp_path / "a").write_text("2")
    (tmp_path / "b").write_text("1")
    assert fingerprint.of_files(tmp_path, ["a", "b"]) != before


def test_a_remembered_digest_is_the_files(tmp_path: Path) -> None:
    """It is forgotten where the file was written again, even to the same size; a damaged memory only costs time."""
    file, memory = tmp_path / "weights", tmp_path / "digests.json"
    file.write_text("one")
    assert fingerprint.FileDigests(memory).of_file(file) == fingerprint.of_file(file)
    stat = file.stat()
    file.write_text("two")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert fingerprint.FileDigests(memory).of_file(file) == fingerprint.of_file(file)
    memory.write_text("no JSON")
    assert fingerprint.FileDigests(memory).of_file(file) == fingerprint.of_file(file)
    with pytest.raises(MissingFileError, match="nowhere"):
        fingerprint.FileDigests(None).of_file(tmp_path / "nowhere")


def test_only_64_hex_digits_are_a_fingerprint() -> None:
    assert fingerprint.is_fingerprint(fingerprint.of_bytes(b""))
    assert not any(map(fingerprint.is_fingerprint, ["", "0" * 63, "g" * 64, None, 1]))
