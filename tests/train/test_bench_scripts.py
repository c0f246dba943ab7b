"""The benchmark scripts run anywhere; what they measure is for GPUs."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

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
    assert capsys.readouterr().out.count("pairs/s") == 4
