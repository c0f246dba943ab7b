"""The benchmark scripts run anywhere; what they measure is for GPUs."""

import argparse
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
from forked import python, run_ranks

SCRIPTS = Path(__file__).parents[2] / "scripts"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_bench_memory_runs_a_training_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = {"hidden": 32, "layers": 4, "heads": 2, "head-dim": 16, "vocabulary": 300, "tokens": 96, "steps": 2}
    given = [word for name, value in shape.items() for word in (f"--{name}", str(value))]
    script("bench_memory").main([*given, "--out", str(tmp_path / "memory.json")])
    assert "nothing measured" in capsys.readouterr().out
    found = json.loads((tmp_path / "memory.json").read_text())["bytes"]
    assert found["one_fp32_logits"] == 4 * 300 * (96 - 48)


def test_bench_loss_runs_every_objective(capsys: pytest.CaptureFixture[str]) -> None:
    shape = {"vocabulary": 60, "hidden": 8, "positions": 12, "steps": 2, "chunk-mib": 1}
    script("bench_loss").main([word for name, value in shape.items() for word in (f"--{name}", str(value))])
    assert capsys.readouterr().out.count("pairs/s") == 8


@pytest.mark.slow
def test_bench_large_target_trains_on_two_ranks_that_hold_half_of_the_layers_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = script("bench_large_target")

    def launch(given: argparse.Namespace, arguments: list[str], work: Path) -> int:
        """Ranks that are forked, in the place of a torchrun whose ranks import everything."""
        command = [module.__file__, *arguments, "--work", str(tmp_path / "work")]
        ended = run_ranks(python, command, tmp_path, given.ranks, 200.0)
        assert [rank.code for rank in ended] == [0, 0], ended
        return 0

    monkeypatch.setattr(module, "launch", launch)
    shape = {"hidden": 64, "vocabulary": 320, "tokens": 256, "document": 64, "steps": 2, "draft-tokens": 2}
    given = [word for name, value in shape.items() for word in (f"--{name}", str(value))]
    out = tmp_path / "large.json"
    assert module.main(["--ranks", "2", "--bytes", "4000000", *given, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    ends = 4 * (2 * 320 * 64 + 64)  # embeddings, head and norm, float32
    assert found["target_bytes"] >= 4_000_000
    assert found["held_bytes"] == [ends + (found["target_bytes"] - ends) // 2] * 2
    assert len(found["losses"]) == len(found["seconds"]) == 2
