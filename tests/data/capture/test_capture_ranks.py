"""A capture that ranks share is the one that a single process makes, shard by shard, wherever it was stopped."""

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from captures import assert_same_answers, orders

import draftforge.data.capture.capture as capturing
import draftforge.data.capture.scheduler as answering
from draftforge import storage
from draftforge.data.capture.capture import capture_conversations
from draftforge.data.settings import BudgetSettings, CaptureSettings
from draftforge.data.store import Capture
from draftforge.distributed import shared_work
from draftforge.distributed import shared_work as crews
from draftforge.distributed.shared_work import ALONE
from draftforge.errors import LostRankError
from draftforge.specdec.requests import TargetSettings
from draftforge.specdec.sampling import SamplingSettings
from draftforge.specdec.targets import Target


def _stubs() -> Any:
    """The stand-ins of test_capture_resume.py, whose answers follow from each request's seed."""
    spec = importlib.util.spec_from_file_location("resume", Path(__file__).with_name("test_capture_resume.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


STUBS = _stubs()
SETTINGS = CaptureSettings(max_new_tokens=8, batch_size=3, top_k=4, tail_samples=2, shard_samples=3)
SCORED = [SamplingSettings(), SamplingSettings(temperature=0.8)]
MIX = orders(24, lambda i: SamplingSettings(temperature=0.9) if i % 3 else None, lambda i: f"d{i % 2}")


class Killed(BaseException):
    """Nothing may catch it."""


def limited(tokens: int) -> CaptureSettings:
    return STUBS.SETTINGS.model_copy(update={"budget": BudgetSettings(tokens=tokens)})  # type: ignore[no-any-return]


def attempt(number: int) -> Any:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
    crews.crew.cache_clear()
    return crews.crew()


def stubbed(folder: Path, crew: Any, settings: CaptureSettings = STUBS.SETTINGS, all_begin: bool = False) -> list[int]:
    """Capture with the stand-ins; the seeds of this process's answers. `all_begin`: none has a second answer before
    every one has its first."""
    heard: list[int] = []

    def hear(seed: int) -> None:
        heard.append(seed)
        if all_begin:
            crew.put(f"begun/{crew.rank}", "")
            crew.wait(lambda: all(crew.has(f"begun/{rank}") for rank in range(crew.size)), "an answer of every rank")

    whole = answering.PlainDecoder
    answering.PlainDecoder = STUBS.fake_decoder(seconds=0.01, heard=hear)  # type: ignore[misc]
    try:
        capture_conversations(STUBS.TARGET, STUBS.make_mix(), settings, STUBS.SCORED, folder, crew=crew)
    finally:
        answering.PlainDecoder = whole  # type: ignore[misc]
    return heard


def stopped(folder: Path, crew: Any, rank: int, writes: int) -> str:
    """The same, where a rank stops just before it has written so many files; what this one's end was."""
    whole, count = storage.write_bytes, iter(range(1000))

    def write(path: Path, data: bytes) -> None:
        if crew.rank == rank and next(count) == writes:
            raise Killed
        whole(path, data)

    storage.write_bytes = write
    shared_work.PULSE_SECONDS = 0.5
    try:
        stubbed(folder, crew)
    except Killed:
        return "killed"
    except LostRankError as error:
        return str(error)
    finally:
        storage.write_bytes = whole
    return "done"


def assert_same(folder: Path, alone: Path) -> None:
    """The same shards, sample by sample. Log-probs of held-out answers are the same to rounding: beside train answers
    they come from the pass that takes these ones' signals."""
    found, expected = Capture.open(folder), Capture.open(alone)
    assert_same_answers(found, expected, logp=1e-5, signals=0.0)
    timed = {"seconds", "tokens_per_second", "sha256", "shards", "budget"}
    for mine, theirs in zip(
        [found.manifest, *found.manifest["shards"]], [expected.manifest, *expected.manifest["shards"]]
    ):
        assert {key: mine[key] for key in mine.keys() - timed} == {key: theirs[key] for key in theirs.keys() - timed}
    assert len(found.manifest["shards"]) == len(expected.manifest["shards"])


def by_two(root: str, target: str, limit: int) -> dict[str, Any]:
    """All that two ranks do in one launch."""
    crew, found = attempt(0), dict[str, Any]()
    found["seeds"] = stubbed(Path(root, "whole"), crew, all_begin=True)
    found["again"] = stubbed(Path(root, "whole"), crew)
    found["limited"] = stubbed(Path(root, "limited"), crew, limited(limit))
    loaded = Target.load(TargetSettings(model=target))
    capture_conversations(loaded, MIX, SETTINGS, SCORED, Path(root, "real"), crew=crew)
    found["ends"] = [
        stopped(Path(root, f"stopped-{number}"), attempt(number + 1), *where)
        for number, where in enumerate([(1, 1), (1, 2), (0, 4), (0, 3)])
    ]
    return found


def by_three(root: str) -> list[int]:
    crew = attempt(0)
    seeds = [stubbed(Path(root, f"stopped-{number}"), crew) for number in (0, 2)]
    return [*seeds[0], *seeds[1]]


@pytest.mark.slow
def test_ranks_share_a_capture_and_others_go_on_with_it(
    run_distributed: Callable[..., list[Any]], tiny_target_folder: Path, tmp_path: Path
) -> None:
    all_seeds = stubbed(tmp_path / "alone", ALONE)
    whole = Capture.open(tmp_path / "alone").manifest
    limit = whole["tokens"] - whole["splits"]["train"]["tokens"] // 2
    first, second = run_distributed(__file__, "by_two", 2, [tmp_path, tiny_target_folder, limit])
    assert_same(tmp_path / "whole", tmp_path / "alone")
    assert sorted(first["seeds"] + second["seeds"]) == sorted(all_seeds)  # none twice
    assert first["seeds"] and second["seeds"]  # how many more each takes is a matter of time
    assert first["again"] == second["again"] == []

    manifest = json.loads((tmp_path / "limited" / "manifest.json").read_text())
    assert manifest["budget"]["ended_by"] == "tokens" and manifest["budget"]["limits"] == {"tokens": limit}
    assert limit - 25 < manifest["tokens"] < whole["tokens"]
    stubbed(tmp_path / "limited", ALONE)
    assert_same(tmp_path / "limited", tmp_path / "alone")

    for one, other in zip(first["ends"], second["ends"]):
        assert "killed" in (one, other)
        (said,) = {one, other} - {"killed"}
        assert "ended: Killed" in said or said == "done", (one, other)  # one that had its share done is not needed
    assert len(run_distributed(__file__, "by_three", 3, [tmp_path])) == 3
    for number in range(4):
        folder = tmp_path / f"stopped-{number}"
        if number % 2:
            stubbed(folder, ALONE)
        assert_same(folder, tmp_path / "alone")
        assert not [path for path in folder.rglob(".*") if path.name != ".lock"]

    target = Target.load(TargetSettings(model=str(tiny_target_folder)))
    capture_conversations(target, MIX, SETTINGS, SCORED, tmp_path / "real-alone")
    together, alone = Capture.open(tmp_path / "real"), Capture.open(tmp_path / "real-alone")
    assert_same_answers(together, alone, logp=1e-5, signals=1e-2)
    for name in ("target", "mix", "settings", "versions", "splits", "tokens", "skipped", "stop_ids"):
        assert together.manifest[name] == alone.manifest[name]


def test_ranks_share_what_is_left_of_a_budget() -> None:
    budget = BudgetSettings(tokens=100, hours=2.0, gigabytes=3.0)
    assert budget.share(2, tokens=20, size=10**9).limits == {"tokens": 60, "hours": 2.0, "gigabytes": 2.0}
    assert budget.share(2, tokens=120, size=4 * 10**9).limits == {"tokens": 100, "hours": 2.0, "gigabytes": 3.0}
    assert capturing._own(SETTINGS, 4, {"tokens": 0, "bytes": 0}, 2).batch_size == 2
