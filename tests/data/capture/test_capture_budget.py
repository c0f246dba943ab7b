"""A budget ends a capture cleanly, cuts train answers only, and a larger one goes on from what is there."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

import draftforge.data.capture.capture as capturing
import draftforge.data.capture.manifest as capture_folder
from draftforge import storage
from draftforge.data.capture.budget import CaptureBudget
from draftforge.data.capture.capture import capture_conversations
from draftforge.data.capture.manifest import content_digest, is_captured
from draftforge.data.capture.plan import Prompts, plan_shards
from draftforge.data.conversation import SPLITS, Conversation, Message
from draftforge.data.settings import BudgetSettings, CaptureSettings
from draftforge.data.store import Capture
from draftforge.errors import DiskFullError, InputError
from draftforge.specdec.sampling_settings import SamplingSettings
from draftforge.specdec.target_settings import TargetSettings
from draftforge.specdec.targets import Target

SETTINGS = CaptureSettings(max_new_tokens=8, batch_size=2, top_k=4, tail_samples=2, shard_samples=3)
SCORED = [SamplingSettings(), SamplingSettings(temperature=0.8)]
MIX = [
    Conversation(
        id=f"c{i}",
        domain="ab"[i >= 20],
        messages=[Message(role="user", content=f"Where is order {i}?")],
        cluster=f"c{i}",
        split=("train", "train", "train", "selection", "holdout")[i % 5],
    )
    for i in range(40)
]


@pytest.fixture(scope="module")
def target(tiny_target_folder: Path) -> Target:
    return Target.load(TargetSettings(model=str(tiny_target_folder)))


@pytest.fixture(scope="module")
def whole(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Capture:
    return run(target, tmp_path_factory.mktemp("whole") / "capture")


def run(target: Target, folder: Path, **budget: float) -> Capture:
    capture_conversations(target, MIX, limited(**budget), SCORED, folder)
    return Capture.open(folder)


def limited(**budget: float) -> CaptureSettings:
    return SETTINGS.model_copy(update={"budget": BudgetSettings.model_validate(budget) if budget else None})


def tokens_of(capture: Capture, *splits: str) -> int:
    return sum(capture.manifest["splits"][split]["tokens"] for split in splits)


@pytest.mark.slow
def test_a_token_budget_cuts_the_train_split_evenly_and_says_so(target: Target, whole: Capture, tmp_path: Path) -> None:
    scored, all_tokens = tokens_of(whole, "selection", "holdout"), whole.manifest["tokens"]
    budget = scored + (all_tokens - scored) // 2
    cut = run(target, tmp_path / "capture", tokens=budget)
    for split in ("selection", "holdout"):
        assert cut.samples(split) == whole.samples(split)
    train = cut.samples("train")
    assert train == whole.samples("train")[: len(train)]
    assert budget - 3 * 8 <= cut.manifest["tokens"] <= budget + 3 * 8  # within the shard that was running
    assert {sample.domain for sample in train} == {"a", "b"}
    ended = cut.manifest["budget"]
    assert (ended["ended_by"], ended["limits"]) == ("tokens", {"tokens": budget})
    assert sum(ended["unanswered"]["train"].values()) == len(whole.samples("train")) - len(train)
    assert ended["unanswered"].keys() == {"train"}


@pytest.mark.slow
def test_the_same_budget_asks_nothing_a_larger_one_goes_on_and_none_makes_it_whole(
    target: Target, whole: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "capture"
    budget = tokens_of(whole, "selection", "holdout") + 40
    cut = run(target, folder, tokens=budget)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.*") if path.suffix != ".lock"}
    with monkeypatch.context() as patch:
        patch.setattr(capturing, "answer_shards", None)
        for same in ({"tokens": budget}, {"tokens": budget - 1}, {"tokens": budget, "hours": 5.0}):
            run(target, folder, **same)
            assert is_captured(folder, limited(**same).budget)
    for other in ({"tokens": budget + 1}, {"hours": 5.0}, {}):
        assert not is_captured(folder, limited(**other).budget)
    shards = {path: stamp for path, stamp in before.items() if path.parent.name == "shards"}
    more = run(target, folder, tokens=budget + 60)
    assert len(cut.samples("train")) < len(more.samples("train")) < len(whole.samples("train"))
    assert {path: path.stat().st_mtime_ns for path in shards} == shards
    digests = [content_digest(found.manifest) for found in (cut, more, whole)]
    assert digests[2] is None and None not in digests[:2] and digests[0] != digests[1]
    last = run(target, folder)
    assert content_digest(last.manifest) is None
    assert all(last.samples(split) == whole.samples(split) for split in SPLITS)


def test_gigabytes_bound_what_lies_on_disk(target: Target, whole: Capture, tmp_path: Path) -> None:
    size = sum(shard["bytes"] for shard in whole.manifest["shards"])
    cut = run(target, tmp_path / "capture", gigabytes=0.7 * size / 1e9)
    assert cut.manifest["budget"]["ended_by"] == "gigabytes"
    assert 0.4 * size < sum(shard["bytes"] for shard in cut.manifest["shards"]) < 0.8 * size


def test_hours_count_those_of_earlier_runs(target: Target, whole: Capture, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"capture\.budget\.hours: 1e-09: reached before a train conversation"):
        run(target, tmp_path / "capture", hours=1e-9)
    assert not (tmp_path / "capture" / "manifest.json").exists()
    shards = plan_shards(MIX, SETTINGS, SCORED)
    train = next(shard for shard in shards if shard.split == "train")
    earlier = [{"samples": 9, "tokens": 40, "bytes": 900, "seconds": 3000.0}]
    now = iter(range(0, 100_000, 300))
    settings = limited(hours=1.0)
    meter = CaptureBudget(
        tmp_path, shards, earlier, Prompts(target, shards, settings), settings, settings.budget, clock=now.__next__
    )
    assert meter.may_open(train)  # 3300 s of 3600
    assert not meter.may_open(train)  # 3600 s
    assert meter.ended_by is None  # what was begun is still being answered
    assert meter.may_open(shards[0])  # selection is always answered


@pytest.mark.parametrize(
    ("earlier", "opened"),
    [
        ([{"samples": 2, "tokens": 8, "bytes": 100, "seconds": 1.0}], 2),  # 8, 8 + 3 * 4, then 8 + 6 * 4 of 30
        ([], 2),  # 0, 3 * 8, then 6 * 8 of 30: nothing is known, so limits count
        ([{"samples": 20, "tokens": 20, "bytes": 100, "seconds": 1.0}], 4),  # 20, 23, 26, 29, then 32 of 30
    ],
)
def test_open_answers_count_with_the_mean_length_so_far(
    target: Target, tmp_path: Path, earlier: list[dict[str, float]], opened: int
) -> None:
    settings = limited(tokens=30)
    train = [shard for shard in plan_shards(MIX, settings, SCORED) if shard.split == "train"]
    meter = CaptureBudget(tmp_path, train, earlier, Prompts(target, train, settings), settings, settings.budget)
    assert [meter.may_open(shard) for shard in train[:5]] == [i < opened for i in range(5)]


def test_a_budget_is_no_part_of_what_a_capture_is_made_from() -> None:
    assert limited(tokens=5).identity() == SETTINGS.identity()
    with pytest.raises(ValidationError, match="must name tokens, hours or gigabytes"):
        BudgetSettings()
    assert BudgetSettings(tokens=10, hours=2.0, gigabytes=3.0).share(3).limits == {
        "tokens": 4,
        "hours": 2.0,
        "gigabytes": 1.0,
    }


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A file system whose free bytes the test sets."""
    state = SimpleNamespace(free=10**12)
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda path: state)
    yield state


@pytest.mark.slow
def test_too_little_space_is_found_out_after_the_first_shard(
    target: Target, whole: Capture, tmp_path: Path, disk: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = capture_folder.write_shard

    def fill(*arguments: Any) -> Path:
        disk.free = (1 << 20) + 2000
        return write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(capture_folder, "write_shard", fill)
        with pytest.raises(
            DiskFullError, match=r"1\.05 MB free, \d\.\d\d MB needed: .* kB too little; free some.*goes on from it"
        ):
            run(target, tmp_path / "capture")
    assert 1 <= len(list((tmp_path / "capture" / "shards").glob("*.json"))) <= 2
    disk.free = 10**12
    assert run(target, tmp_path / "capture").samples("train") == whole.samples("train")


@pytest.mark.slow
def test_a_budget_in_gigabytes_asks_for_no_more_space(
    target: Target, whole: Capture, tmp_path: Path, disk: SimpleNamespace
) -> None:
    size = sum(shard["bytes"] for shard in whole.manifest["shards"])
    disk.free = (1 << 20) + int(0.72 * size)
    cut = run(target, tmp_path / "capture", gigabytes=0.7 * size / 1e9)
    assert cut.manifest["budget"]["ended_by"] == "gigabytes"
    with pytest.raises(DiskFullError):
        run(target, tmp_path / "unlimited")


def test_the_progress_line_tells_speed_time_and_disk(target: Target, tmp_path: Path, disk: SimpleNamespace) -> None:
    """3 of 6 answers ended after 5 tokens each, at 2 tokens a second; one open one has 3 tokens already."""
    disk.free = 84 * 10**9
    settings = SETTINGS.model_copy(update={"shard_samples": 6})
    mix = [c.model_copy(update={"split": "train"}) for c in MIX[:6]]
    (shard,) = plan_shards(mix, settings, [])
    prompts = Prompts(target, [shard], settings)
    now = [0.0]
    lines: list[str] = []
    meter = CaptureBudget(
        tmp_path, [shard], [], prompts, settings, None, lambda amount, note="": lines.append(note), lambda: now[0]
    )
    assert meter.seconds_left() is None
    meter.may_open(shard)
    now[0] = 9.0
    meter.emitted(18)
    for answer in shard.answers[:3]:
        meter.ended(answer, sample_of(target, answer, tokens=5))
    assert meter.seconds_left() == pytest.approx((3 * 5 - 3) / 2)
    meter.wrote(shard, 250_000_000)
    assert meter.note() == "18 tokens, 2 tok/s, 6 s left, 250 MB written, 84.0 GB free"
    assert "18 tokens" in lines[0]


def sample_of(target: Target, answer: Any, tokens: int) -> Any:
    return SimpleNamespace(split=answer.conversation.split, prompt_ids=[1] * 20, answer_ids=[2] * tokens)
