"""The scaling benchmark and its profile run anywhere; what they measure is for GPUs."""

import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from forked import python, run_ranks
from typer.testing import CliRunner

from draftforge.recipe import load_recipe

SCRIPTS = Path(__file__).parents[2] / "scripts"
TRAINING: dict[str, Any] = {
    "steps": 40,
    "warmup_steps": 1,
    "tokens_per_step": 256,
    "accumulation": 2,
    "precision": "float32",
}
SMALL = {"family": "small", "layers": 2, **TRAINING}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.parametrize(
    "wrong", [["--draft", "nobody"], ["--gpus", "0"], ["--stage", "4"], ["--prompts", "gone.jsonl"]]
)
def test_what_it_cannot_run_is_refused_before_any_work(
    script: Callable[[str], ModuleType], tmp_path: Path, wrong: list[str]
) -> None:
    found = CliRunner().invoke(script("bench_scaling").app, [str(tmp_path / "out"), *wrong])
    assert found.exit_code == 2 and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_trainings_on_one_and_two_ranks_are_compared_and_profiled(
    script: Callable[[str], ModuleType],
    recipe_in: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module, logs = script("bench_scaling"), iter(range(100))

    def launch(self: Any, name: str, gpus: int, command: list[str], heard: Callable[[str], None] = print) -> Any:
        """Ranks that are forked, in the place of a torchrun whose ranks import everything."""
        began, folder = time.time(), tmp_path / f"ranks-{next(logs)}"
        folder.mkdir()
        ended = run_ranks(python, command, folder, gpus, 200.0)
        assert [rank.code for rank in ended] == [0] * gpus, ended
        lines = ended[0].said.splitlines()
        for line in lines:
            heard(line)
        return module.Said(0, began, time.time(), [(time.time(), line) for line in lines])

    monkeypatch.setattr(module.Bench, "launch", launch)
    monkeypatch.setattr(module, "_EQUAL_STEPS", 5)
    score = {"draft_tokens": [1], "replay_tokens": 60, "costs": {"prompts": 1, "rounds": 4, "warmup_rounds": 0}}
    recipe, out = recipe_in(tmp_path, drafts={"small": SMALL}, score=score), tmp_path / "out"
    asked = [str(out), "--recipe", str(recipe), "--draft", "small", "--stage", "2", "--steps", "6"]
    module.app([*asked, "--equal", "--profile", "--capture", "--score"], standalone_mode=False)
    found = json.loads((out / "results.json").read_text())
    one, two = (found["runs"][f"speed-small-{gpus}gpu-zero2"] for gpus in (1, 2))
    for run in (one, two):
        assert run["positions_per_second"] > run["with_checkpoints"] > 0 and len(run["losses"]) == 6
        assert run["checkpoint_seconds"] > 0 and run["since_launch"] > 0
    assert found["equal"]["equal-small-2gpu-zero2"]["largest_relative_difference"] < 1e-4
    host = found["profile"]["profile-small-2gpu-zero2"]["host_ms"]
    assert set(host) >= {"draft forward", "loss and its gradient", "backward", "clip and optimizer"}
    alone, shared = (found["capture"][gpus] for gpus in ("1", "2"))
    assert alone["tokens"] == shared["tokens"] > 0 and alone["seconds"] > 0 and "whole_seconds" in shared
    alone, shared = (found["score"][gpus] for gpus in ("1", "2"))
    assert shared["equal_counts"] and shared["rows"] == alone["rows"] > 0 and shared["seconds"] > 0
    said = capsys.readouterr().out
    assert "positions/s" in said and "counts as on the fewest" in said
    assert len(list((out / "work").glob("capture-*"))) == 1


@pytest.mark.slow
def test_a_launch_is_heard_line_by_line(
    script: Callable[[str], ModuleType], recipe_in: Callable[..., Path], tmp_path: Path
) -> None:
    module, heard = script("bench_scaling"), list[str]()
    bench = module.Bench(tmp_path, load_recipe(recipe_in(tmp_path, drafts={"small": SMALL})), [1])
    (tmp_path / "one.py").write_text("print('training small'); print('error: made up'); raise SystemExit(3)")
    said = bench.launch("one", 1, [str(tmp_path / "one.py")], heard.append)
    assert said.code != 0 and heard[0] == "training small\n" and said.error == "error: made up"
    assert said.began <= said.when("training") <= said.ended


def test_a_failing_training_is_noted_and_the_others_go_on(
    script: Callable[[str], ModuleType],
    recipe_in: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = script("bench_scaling")
    bench = module.Bench(tmp_path, load_recipe(recipe_in(tmp_path, drafts={"small": SMALL})), [1, 2])
    runs = [module.Run("small", 1, stage, 6) for stage in (1, 2, 3)]
    launched: list[list[str]] = []

    def launch(name: str, gpus: int, command: list[str], heard: Any) -> Any:
        drafts = yaml.safe_load(Path(command[-1]).read_text())["drafts"]
        launched.append(list(drafts))
        for draft in drafts:
            if draft == runs[1].name:
                return module.Said(3, 0.0, 1.0, [(0.5, "error: step 2, rank 0: the loss is not finite")])
            folder = tmp_path / "work" / f"train-{draft}-{'0' * 12}"
            (folder / "checkpoints/step-000006").mkdir(parents=True)
            step = {"seconds": 0.5, "positions_per_second": 100.0, "loss": 1.0}
            lines = [{"step": number, "time": number + (number > 3), **step} for number in range(1, 7)]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            heard("training small: …")
        return module.Said(0, 0.0, 1.0, [])

    monkeypatch.setattr(bench, "launch", launch)
    module.train_all(bench, 1, runs)
    assert launched == [[run.name for run in runs], [runs[2].name]]
    assert [("failed" in bench.found(run)) for run in runs] == [False, True, False]
    assert bench.found(runs[0])["positions_per_second"] == pytest.approx(100.0)
    assert bench.found(runs[0])["checkpoint_seconds"] == pytest.approx(1.5)
    assert bench.found(runs[0])["with_checkpoints"] == pytest.approx(150 / (1.5 + 1.5 * 3 / 40))
    module.show(bench, runs)
    assert "the loss is not finite" in capsys.readouterr().out
    module.train_all(bench, 1, [runs[0]])  # known already
    assert len(launched) == 2


@pytest.mark.parametrize("too_late", [False, True])
def test_a_training_that_is_stopped_goes_on_on_fewer(
    script: Callable[[str], ModuleType], recipe_in: Callable[..., Path], tmp_path: Path, too_late: bool
) -> None:
    module = script("bench_scaling")
    bench = module.Bench(tmp_path, load_recipe(recipe_in(tmp_path, drafts={"small": SMALL})), [1, 2])
    run, launched = module.Run("small", 2, 1, 4, "resumed"), list[Any]()

    def launch(name: str, gpus: int, command: list[str], until: str | None = None) -> Any:
        (said,) = yaml.safe_load(Path(command[-1]).read_text())["drafts"].items()
        launched.append((gpus, until, said[0], said[1]["tokens_per_step"], said[1]["accumulation"]))
        folder = tmp_path / f"work/train-{run.name}-{'0' * 12}"
        if until is None or too_late:
            (folder / "checkpoints/step-000004").mkdir(parents=True)
        step = {"seconds": 0.5, "positions_per_second": 100.0, "loss": 1.0}
        if folder.is_dir():
            lines = [{"step": number, "time": float(number), **step} for number in range(1, 5)]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return module.Said(143, 0.0, 1.0, [(0.5, "going on after step 3")])

    bench.launch = launch
    module.resume_on_fewer(bench, run)
    found = bench.found(run)
    assert launched[0] == (2, "step 3/", run.name, 512, 2)
    assert ("failed" in found) == too_late and len(launched) == (1 if too_late else 2)
    if not too_late:
        assert launched[1] == (1, None, run.name, 512, 4)  # the same global batch
        assert found["went_on"] == "going on after step 3" and found["losses"] == [1.0] * 4


def test_a_trace_is_split_by_the_part_of_the_step_that_launched_each_kernel(
    script: Callable[[str], ModuleType],
) -> None:
    def event(cat: str, name: str, start: float, length: float, correlation: int | None = None) -> dict[str, Any]:
        found = {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": length}
        return found if correlation is None else found | {"args": {"correlation": correlation}}

    module = script("profile_training")
    events = [
        event("user_annotation", "part: backward", 0, 100),
        event("user_annotation", "part: draft forward", 10, 20),
        event("user_annotation", "part: clip and optimizer", 100, 50),
        event("cuda_runtime", "cudaLaunchKernel", 12, 1, 1),
        event("cuda_runtime", "cudaLaunchKernel", 40, 1, 2),
        event("cuda_runtime", "cudaLaunchKernel", 60, 1, 3),
        event("cuda_runtime", "cudaLaunchKernel", 110, 1, 4),
        event("kernel", "gemm", 50, 20, 1),
        event("kernel", "gemm", 70, 30, 2),
        event("kernel", "ncclDevKernel_AllReduce", 90, 40, 3),
        event("kernel", "multi_tensor", 150, 10, 4),
        event("gpu_memcpy", "Memcpy HtoD", 165, 5, 5),
    ]
    found = module.shares(events, 1)
    assert found["step_ms"] == pytest.approx(0.17)
    assert found["host_ms"] == pytest.approx({"backward": 0.08, "draft forward": 0.02, "clip and optimizer": 0.05})
    assert {part: round(share * 170) for part, share in found["device_share"].items()} == {
        "draft forward": 20,
        "backward": 30,
        "collectives": 40,
        "exposed collectives": 30,
        "clip and optimizer": 10,
        "copies": 5,
        "idle": 75,
    }
