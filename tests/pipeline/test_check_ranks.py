"""The check of ranks runs anywhere: its cases happen, and hold."""

import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from forked import as_command, start
from typer.testing import CliRunner

from draftforge import distributed
from draftforge.cli import main

SCRIPT = Path(__file__).parents[2] / "scripts/check_ranks.py"
SMALL = {"family": "small", "layers": 2, "tokens_per_step": 256, "precision": "float32"}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_ranks", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "check_ranks", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class Forked:
    """A forked rank, as a process of `subprocess`."""

    def __init__(self, process: BaseProcess) -> None:
        self.pid, self.kill, self.wait = process.pid, process.kill, process.join
        self._process = process

    def poll(self) -> int | None:
        return self._process.exitcode


def start_forked(
    arguments: Sequence[str], place: Mapping[str, str], log: Path, start_limit: float | None = None
) -> Forked:
    return Forked(start(as_command, [__file__, "ranked", start_limit, *arguments], log, place))


def ranked(start_limit: float | None, *arguments: str) -> None:
    if start_limit is not None:
        distributed.START_LIMIT = timedelta(seconds=start_limit)
    main(list(arguments))


@pytest.mark.slow
def test_its_cases_happen_and_hold(
    script: ModuleType,
    recipe_in: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(script, "start", start_forked)
    monkeypatch.setattr(script, "_LATE_SECONDS", 1.0)
    monkeypatch.setattr(script, "_ABSENT_SECONDS", 3.0)
    monkeypatch.setattr(script, "_SLOTS", 2)
    capture = {"max_new_tokens": 12, "top_k": 16, "tail_samples": 4}
    score = {"draft_tokens": [1], "costs": {"prompts": 1, "rounds": 4, "warmup_rounds": 0}}
    recipe, out = recipe_in(tmp_path, drafts={"small": SMALL}, capture=capture, score=score), tmp_path / "out"
    wanted = ["capture: a rank killed", "training: the first rank killed", "scoring: a rank killed", "an absent rank"]
    asked = [str(out), "--recipe", str(recipe), *(word for case in wanted for word in ("--case", case))]
    with pytest.raises(SystemExit) as ended:
        script.app(asked)
    found = json.loads((out / "results.json").read_text())
    assert ended.value.code == 0 and list(found) == wanted, found
    assert [list(case["ranks"]) for case in found.values()] == [["0"], ["1"], ["0"], ["0"]]
    (absent,) = found["an absent rank"]["ranks"]["0"]["errors"]
    assert absent == "error: rank 1 did not start within 3 s"
    assert "is gone or hangs" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [["--case", "nobody"], ["--draft", "nobody"], ["--prompts", "gone.jsonl"]])
def test_what_it_cannot_run_is_refused_before_any_work(script: ModuleType, tmp_path: Path, wrong: list[str]) -> None:
    found = CliRunner().invoke(script.app, [str(tmp_path / "out"), *wrong])
    assert found.exit_code == 2 and not (tmp_path / "out").exists()


def test_a_case_does_not_hold_where_a_rank_says_nothing_or_too_much(script: ModuleType, tmp_path: Path) -> None:
    def one(code: int, said: str) -> Any:
        (tmp_path / "0.log").write_text(said)
        process: Any = type("Ended", (), {"poll": lambda self: code})()
        return script.holds(script.CASES["an absent rank"], script.ended({0: process}, 5.0, tmp_path)[0])

    assert one(3, "waiting for rank 1\nerror: rank 1 did not start within 3 s\n")
    assert not one(0, "") and not one(3, "") and not one(-6, "error: rank 1 did not start\n")
    assert not one(3, "error: a\nerror: b\n") and not one(3, "Traceback (most recent call last)\nerror: a\n")
