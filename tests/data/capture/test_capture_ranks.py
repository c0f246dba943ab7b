"""A capture that ranks share is the one that a single process makes, shard by shard, wherever it was stopped."""

import importlib.util
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from captures import MIX, SCORED, assert_same_answers
from captures import SMALL as SETTINGS
from forked import as_command, run_ranks

import draftforge.data.capture.capture as capturing
import draftforge.data.capture.scheduler as answering
from draftforge import storage
from draftforge.data.capture.capture import capture_conversations
from draftforge.data.settings import BudgetSettings, CaptureSettings
from draftforge.data.store import Capture
from draftforge.data.template_process import TemplateProcess
from draftforge.distributed import ALONE, Ranks, ranks
from draftforge.specdec.target_settings import TargetSettings
from draftforge.specdec.targets import Target


def _stubs() -> Any:
    """The stand-ins of test_capture_resume.py, whose answers follow from each request's seed."""
    spec = importlib.util.spec_from_file_location("resume", Path(__file__).with_name("test_capture_resume.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


STUBS = _stubs()
STUBBED: CaptureSettings = STUBS.SETTINGS.model_copy(update={"shard_samples": 2})  # so that each rank has several


def limited(tokens: int) -> CaptureSettings:
    return STUBBED.model_copy(update={"budget": BudgetSettings(tokens=tokens)})


def stubbed(folder: Path, mine: Ranks, settings: CaptureSettings = STUBBED) -> list[int]:
    """Capture with the stand-ins; the seeds of this process's answers."""
    heard: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answering, "PlainDecoder", STUBS.fake_decoder(heard.append))
        patch.setattr(TemplateProcess, "ask", STUBS.unread)
        capture_conversations(STUBS.TARGET, STUBS.make_mix(), settings, STUBS.SCORED, folder, ranks=mine)
    return heard


def stopped(folder: str, rank: int, writes: int) -> None:
    """Capture, where a rank is killed just before it has written so many files."""
    whole, count, mine = storage.write_bytes, iter(range(1000)), ranks()

    def write(path: Path, data: bytes) -> None:
        if mine.rank == rank and next(count) == writes:
            os.kill(os.getpid(), signal.SIGKILL)
        whole(path, data)

    storage.write_bytes = write
    stubbed(Path(folder), mine)


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
    mine, found = ranks(), dict[str, Any]()
    found["seeds"] = stubbed(Path(root, "whole"), mine)
    found["again"] = stubbed(Path(root, "whole"), mine)
    found["limited"] = stubbed(Path(root, "limited"), mine, limited(limit))
    loaded = Target.load(TargetSettings(model=target))
    capture_conversations(loaded, MIX, SETTINGS, SCORED, Path(root, "real"), ranks=mine)
    return found


def by_three(root: str) -> list[int]:
    """Go on with what two ranks left, one of them killed."""
    mine = ranks()
    return [seed for number in (0, 1) for seed in stubbed(Path(root, f"stopped-{number}"), mine)]


@pytest.mark.slow
def test_ranks_share_a_capture_and_others_go_on_with_it(
    run_distributed: Callable[..., list[Any]], tiny_target_folder: Path, tmp_path: Path
) -> None:
    all_seeds = stubbed(tmp_path / "alone", ALONE)
    whole = Capture.open(tmp_path / "alone").manifest
    limit = whole["tokens"] - 3 * whole["splits"]["train"]["tokens"] // 4
    first, second = run_distributed(__file__, "by_two", 2, [tmp_path, tiny_target_folder, limit])
    # 1) Two ranks make what one makes, and do nothing twice.
    assert_same(tmp_path / "whole", tmp_path / "alone")
    assert sorted(first["seeds"] + second["seeds"]) == sorted(all_seeds)
    assert first["seeds"] and second["seeds"]
    assert first["again"] == second["again"] == []
    target = Target.load(TargetSettings(model=str(tiny_target_folder)))
    capture_conversations(target, MIX, SETTINGS, SCORED, tmp_path / "real-alone")
    together, alone = Capture.open(tmp_path / "real"), Capture.open(tmp_path / "real-alone")
    assert_same_answers(together, alone, logp=1e-5, signals=1e-2)
    for name in ("target", "mix", "settings", "versions", "splits", "tokens", "skipped", "stop_ids"):
        assert together.manifest[name] == alone.manifest[name]
    # 2) A budget ends both, and one goes on with what they left.
    manifest = json.loads((tmp_path / "limited" / "manifest.json").read_text())
    assert manifest["budget"]["ended_by"] == "tokens" and manifest["budget"]["limits"] == {"tokens": limit}
    assert limit - 25 < manifest["tokens"] < whole["tokens"]
    stubbed(tmp_path / "limited", ALONE)
    assert_same(tmp_path / "limited", tmp_path / "alone")
    # 3) Where one rank is killed, the other one ends; three, or one, go on, and repeat nothing that is finished.
    for number, rank in enumerate([1, 0, 1]):
        folder = tmp_path / f"stopped-{number}"
        ended = run_ranks(as_command, [__file__, "stopped", str(folder), rank, 3 - rank], tmp_path, 2, 60.0)
        assert ended[rank].code == -9 and ended[1 - rank].code == 3, ended
        assert f"rank {rank} is gone or hangs" in ended[1 - rank].said.replace("the first rank", "rank 0"), ended
    kept = [{path.name for path in (tmp_path / f"stopped-{n}" / "shards").glob("*.json")} for n in range(3)]
    assert all(kept)
    seeds = [seed for one in run_distributed(__file__, "by_three", 3, [tmp_path]) for seed in one]
    again = stubbed(tmp_path / "stopped-2", ALONE)
    assert 0 < len(again) < len(all_seeds) and 0 < len(seeds) < 2 * len(all_seeds)
    for number in range(3):
        folder = tmp_path / f"stopped-{number}"
        assert_same(folder, tmp_path / "alone")
        assert not [path for path in folder.rglob(".*") if path.name != ".lock"]


def test_ranks_share_what_is_left_of_a_budget() -> None:
    budget = BudgetSettings(tokens=100, hours=2.0, gigabytes=3.0)
    assert budget.share(2, tokens=20, size=10**9).limits == {"tokens": 60, "hours": 2.0, "gigabytes": 2.0}
    assert budget.share(2, tokens=120, size=4 * 10**9).limits == {"tokens": 100, "hours": 2.0, "gigabytes": 3.0}
    served = CaptureSettings.model_validate({"backend": {"kind": "vllm", "url": "http://here"}, "batch_size": 3})
    assert capturing._share_of_settings(SETTINGS, {"tokens": 0, "bytes": 0}, 2).batch_size == 3
    assert capturing._share_of_settings(served, {"tokens": 0, "bytes": 0}, 2).batch_size == 2
