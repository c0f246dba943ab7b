"""Sizes as people read them, the error of a disk that is too small, and folders that a kill leaves whole."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftforge import storage
from draftforge.errors import CorruptDataError, DiskFullError, FormatError, InputError
from draftforge.eval import counts
from draftforge.fingerprint import FileDigests
from draftforge.specdec.formats.tensors import read_tensors, read_types
from draftforge.storage import (
    Access,
    clear_leftover,
    new_file,
    new_folder,
    parse_json,
    read_json,
    require_file_place,
    require_free_space,
    restrict,
    size_text,
    write_bytes,
)


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


def test_numpy_says_a_full_disk_in_words_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(DiskFullError, match=r"draft\.gguf: no space left"), new_file(tmp_path / "draft.gguf"):
        raise OSError("38400 requested and 8320 written")


@pytest.mark.parametrize("renames", [1, 2, 3])
def test_a_folder_that_is_being_replaced_survives_a_kill(tmp_path: Path, renames: int) -> None:
    """Killed after so many renames: one has put the old folder aside, two have put the new one in its place."""
    path = tmp_path / "draft"
    path.mkdir()
    (path / "old").touch()
    code = (
        "import os, sys, pathlib; from draftforge.storage import new_folder\n"
        "done, rename = [], pathlib.Path.rename\n"
        "def renamed(self, target):\n"
        f"    done.append(rename(self, target)); len(done) == {renames} and os._exit(9); return done[-1]\n"
        "pathlib.Path.rename = renamed\n"
        "with new_folder(pathlib.Path(sys.argv[1])) as folder: (folder / 'new').touch()\n"
    )
    assert subprocess.run([sys.executable, "-c", code, path], check=False).returncode == 9
    assert path.exists() == (renames > 1)
    # The next run clears what is left; even a write that fails gives the old folder back.
    copy = shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name}-copy")) / "draft"
    for one in tmp_path.glob(".*"):
        clear_leftover(one)
    with pytest.raises(InterruptedError), new_folder(copy):
        raise InterruptedError
    assert [[one.name for one in place.iterdir()] for place in (path, copy)] == [["old" if renames == 1 else "new"]] * 2
    assert [one.name for one in tmp_path.iterdir()] == ["draft"]


@pytest.mark.parametrize(
    ("access", "folder_mode", "file_mode"), [("owner", 0o700, 0o600), ("group", 0o770, 0o660), ("umask", 0o755, 0o644)]
)
def test_a_folder_is_for_those_who_have_access(
    tmp_path: Path, access: Access, folder_mode: int, file_mode: int
) -> None:
    root, outside = tmp_path / "work", tmp_path / "outside.txt"
    (root / "mix" / ".inner").mkdir(parents=True)
    files = [root / "a.json", root / "mix" / ".inner" / "b", outside]
    for path in files:
        path.write_text("x")
        path.chmod(0o644)
    for folder in (root, root / "mix", root / "mix" / ".inner"):
        folder.chmod(0o755)
    (root / "link").symlink_to(outside)
    assert restrict(root, access) == []
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (root, root / "mix", root / "mix/.inner")} == {
        folder_mode
    }
    assert {stat.S_IMODE(path.stat().st_mode) for path in files[:2]} == {file_mode}
    assert stat.S_IMODE(outside.stat().st_mode) == 0o644  # what a link leads to is not of this folder
    assert os.access(root, os.R_OK)


def test_pipes_and_devices_are_not_read(tmp_path: Path) -> None:
    """Both would hold the reader for ever."""
    os.mkfifo(tmp_path / "config.json")
    (tmp_path / "model.safetensors").symlink_to("/dev/zero")
    with pytest.raises(CorruptDataError, match=r"config\.json: must be a regular file"):
        read_json(tmp_path / "config.json")
    with pytest.raises(CorruptDataError, match=r"config\.json: must be a regular file"):
        counts.read(tmp_path / "config.json")
    assert FileDigests(tmp_path / "config.json")._known == {}
    with pytest.raises(FormatError, match=r"model\.safetensors: must be a regular file"):
        read_tensors(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to("model.safetensors")
    with pytest.raises(FormatError, match=r"model\.safetensors: must be a regular file, is a link to none"):
        read_types(tmp_path)


def test_a_text_that_an_option_names_is_read_up_to_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text").write_text("é" * 4)
    monkeypatch.setattr(storage, "MOST_TEXT_BYTES", 8)
    assert storage.read_text(tmp_path / "text", "--x") == "é" * 4
    for path in (Path("/dev/zero"), tmp_path / "text"):
        monkeypatch.setattr(storage, "MOST_TEXT_BYTES", 7)
        with pytest.raises(InputError, match=f"--x {path}: has more than 7 B"):
            storage.read_text(path, "--x")


def test_json_is_read_up_to_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"a": 1}')
    monkeypatch.setattr(storage, "MOST_JSON_BYTES", 8)
    assert read_json(tmp_path / "config.json") == {"a": 1}
    monkeypatch.setattr(storage, "MOST_JSON_BYTES", 7)
    with pytest.raises(CorruptDataError, match=r"config\.json: not valid JSON \(more than 7 B\)"):
        read_json(tmp_path / "config.json")


def test_no_file_takes_the_place_of_a_pipe_or_device(tmp_path: Path) -> None:
    """A file is written by a rename: as root it replaced /dev/null."""
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to("elsewhere")
    with pytest.raises(InputError, match=r"pipe: must be a regular file, or not exist"):
        write_bytes(pipe, b"")
    with pytest.raises(InputError, match=r"pipe: must be a regular file, or not exist"), new_file(pipe):
        pass
    for place in (pipe, link):
        with pytest.raises(InputError, match=rf"--out {place}: is a link, a device or a pipe"):
            require_file_place(place, "--out")
    assert pipe.is_fifo() and link.is_symlink() and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("text", ["{}", "-{}", '[{{"a": {}}}]'])
def test_a_number_that_is_larger_than_any_float_is_no_json(text: str) -> None:
    assert parse_json(text.format("1" * 308)) and parse_json(json.dumps("1" * 400)) == "1" * 400
    for whole in (text.format("1" * 309), text.format("1" * 309).encode()):
        with pytest.raises(ValueError, match=r"a number of 3\d\d digits, must have 308 at most"):
            parse_json(whole)


@pytest.mark.parametrize("name", ["a\0b", "\ud800/weights"])
def test_a_name_that_no_file_can_have_is_refused(name: str, tmp_path: Path) -> None:
    """A server may list one among its artifacts."""
    with pytest.raises(InputError, match="is no name that a file can have"):
        storage.inside(tmp_path, name)
