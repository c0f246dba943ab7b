"""A capture by several machines, joined, is the one that a single machine makes."""

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from captures import MIX, SCORED, assert_same_answers
from captures import SMALL as SETTINGS

from draftforge import storage
from draftforge.data.capture.capture import capture_conversations
from draftforge.data.capture.manifest import Part, check_part, join, parse_part
from draftforge.data.capture.plan import plan_shards
from draftforge.data.settings import BudgetSettings, CaptureSettings
from draftforge.data.store import Capture
from draftforge.errors import CorruptDataError, DraftforgeError, InputError, MissingFileError, StaleInputError
from draftforge.specdec.targets import Target


@pytest.fixture(scope="module")
def made(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a whole capture and three parts of it."""
    root = tmp_path_factory.mktemp("made")
    capture_conversations(target, MIX, SETTINGS, SCORED, root / "whole")
    for number in (1, 2, 3):
        capture_conversations(target, MIX, SETTINGS, SCORED, root / f"part-{number}", Part(number, 3))
    return root


@pytest.fixture
def parts(made: Path, tmp_path: Path) -> list[Path]:
    """Copies of the parts, free to be broken."""
    for number in (1, 2, 3):
        shutil.copytree(made / f"part-{number}", tmp_path / f"part-{number}")
    return [tmp_path / f"part-{number}" for number in (1, 2, 3)]


def joined(target: Target, parts: list[Path], settings: CaptureSettings = SETTINGS) -> Capture:
    folder = parts[0].parent / "joined"
    join(parts, target.fingerprint, str(target.dtype), MIX, settings, SCORED, folder)
    return Capture.open(folder)


@pytest.mark.slow
def test_three_parts_joined_equal_one_machines_capture(target: Target, made: Path, parts: list[Path]) -> None:
    whole, found = Capture.open(made / "whole"), joined(target, parts[::-1])
    assert_same_answers(found, whole, logp=1e-5, signals=1e-2)
    for name in ("target", "mix", "settings", "versions", "splits", "tokens", "skipped", "stop_ids"):
        assert found.manifest[name] == whole.manifest[name]
    assert "part" not in found.manifest and "budget" not in found.manifest
    names = [shard["name"] for shard in found.manifest["shards"]]
    assert names == [shard["name"] for shard in whole.manifest["shards"]]
    before = (found.folder / "manifest.json").stat().st_mtime_ns
    capture_conversations(target, MIX, SETTINGS, SCORED, found.folder)  # as if made here: nothing is left to do
    assert (found.folder / "manifest.json").stat().st_mtime_ns == before


def test_parts_are_disjoint_and_all_together() -> None:
    shards = plan_shards(MIX, SETTINGS, SCORED)
    for count in (1, 2, 5, 40):
        dealt = [shard.name for number in range(count) for shard in Part(number + 1, count).shards(shards)]
        assert sorted(dealt) == sorted(shard.name for shard in shards)


@pytest.mark.parametrize("text", ["0/3", "4/3", "2", "a/b", "1/0", "-1/3", "2/3/4"])
def test_a_part_that_is_none_is_refused(text: str) -> None:
    assert parse_part("2/3") == Part(2, 3)
    with pytest.raises(InputError, match="must be NUMBER/COUNT"):
        parse_part(text)


def test_more_parts_than_shards_are_refused() -> None:
    count = len(plan_shards(MIX, SETTINGS, SCORED))
    check_part(Part(1, count), MIX, SETTINGS, SCORED)
    with pytest.raises(InputError, match=rf"^--part 1/1000: there are {count} shards .*at most so many parts"):
        check_part(Part(1, 1000), MIX, SETTINGS, SCORED)


def test_what_cannot_be_joined_is_named(target: Target, made: Path, parts: list[Path]) -> None:
    one, two, three = parts
    with pytest.raises(MissingFileError, match="--join: 2/3 missing"):
        joined(target, [one, three])
    with pytest.raises(InputError, match=r"part-1 and .*part-1 are both part 1/3"):
        joined(target, [one, one, three])
    with pytest.raises(InputError, match="a whole capture, not a part"):
        joined(target, [made / "whole"])
    with pytest.raises(StaleInputError, match=r"part-1: captured with another setting max_new_tokens \(8, now 9\)"):
        joined(target, parts, SETTINGS.model_copy(update={"max_new_tokens": 9}))
    with pytest.raises(StaleInputError, match=r"part-1: captured with another target"):
        join(parts, "f" * 64, str(target.dtype), MIX, SETTINGS, SCORED, one.parent / "joined")
    with pytest.raises(MissingFileError, match="not the folder of a part"):
        joined(target, [one.parent / "nothing"])
    manifest = storage.read_object(two / "manifest.json")
    storage.write_json(two / "manifest.json", manifest | {"versions": manifest["versions"] | {"torch": "1.0"}})
    with pytest.raises(StaleInputError, match=r"part-2: made with torch 1\.0, .*part-1 with 2"):
        joined(target, parts)
    (two / "manifest.json").unlink()
    with pytest.raises(MissingFileError, match="part 2/3 is not finished; run it again with --part 2/3"):
        joined(target, parts)
    assert not (one.parent / "joined").exists()


ODD: list[Any] = [None, -1.5, "x", "\ud800", float("nan"), [], {}, [[]], {"a": {"b": "9"}}]


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_odd_records_of_a_part_are_one_line(target: Target, parts: list[Path], odd: Any) -> None:
    """Another machine wrote them."""
    shard = next((parts[1] / "shards").glob("*.json"))
    read = {
        shard: ("domains", "samples", "skipped"),
        parts[1] / "manifest.json": ("settings", "shards", "versions", "vocab_size"),
        parts[1] / "header.json": ("settings", "vocab_size"),
    }
    for path, names in read.items():
        whole = path.read_text()
        known = json.loads(whole)
        for name in names:
            path.write_text(json.dumps(known | {name: odd}))
            with pytest.raises(DraftforgeError) if odd not in ([], {}) else suppress(DraftforgeError):
                joined(target, parts)
            shutil.rmtree(parts[0].parent / "joined", ignore_errors=True)
        path.write_text(whole)


def test_a_damaged_part_is_named_and_may_be_made_again(target: Target, made: Path, parts: list[Path]) -> None:
    shard = next((parts[1] / "shards").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with pytest.raises(CorruptDataError, match=shard.name):
        joined(target, parts)
    shutil.rmtree(parts[1])
    capture_conversations(target, MIX, SETTINGS, SCORED, parts[1], Part(2, 3))
    assert joined(target, parts).samples("train") == Capture.open(made / "whole").samples("train")


def test_a_stopped_join_goes_on(target: Target, parts: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[str] = []
    copyfile = shutil.copyfile

    def stop(source: Path, place: Path) -> None:
        copied.append(source.name)
        if len(copied) == 3:
            raise KeyboardInterrupt
        copyfile(source, place)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "copyfile", stop)
        joined(target, parts)
    folder = parts[0].parent / "joined"
    assert len(list((folder / "shards").glob("*.json"))) == 2
    assert not (folder / "manifest.json").exists()
    assert joined(target, parts).manifest["complete"]


def test_parts_that_a_budget_ended_join_and_go_on(target: Target, made: Path, tmp_path: Path) -> None:
    """Each machine has its share; later, one machine may go on where all of them ended."""
    whole = Capture.open(made / "whole")
    limit = whole.manifest["tokens"] - whole.manifest["splits"]["train"]["tokens"] // 2
    settings = SETTINGS.model_copy(update={"budget": BudgetSettings(tokens=limit)})
    parts = [tmp_path / f"part-{number}" for number in (1, 2)]
    for number, folder in enumerate(parts, 1):
        capture_conversations(target, MIX, settings, SCORED, folder, Part(number, 2))
    found = joined(target, parts, settings)
    assert found.manifest["budget"]["limits"] == {"tokens": limit}
    assert limit - 50 < found.manifest["tokens"] < limit + 50 < whole.manifest["tokens"]
    capture_conversations(target, MIX, SETTINGS, SCORED, found.folder)
    assert Capture.open(found.folder).samples("train") == whole.samples("train")
    assert "budget" not in json.loads((found.folder / "manifest.json").read_text())
