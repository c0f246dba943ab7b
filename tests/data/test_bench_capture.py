"""The capture benchmark runs anywhere, at small settings."""

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_it_measures_both_and_profiles_a_step(
    tiny_target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [{"id": str(i), "domain": "d", "turns": [f"Where is order {i}?", "And then?"]} for i in range(8)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    main = runpy.run_path(str(ROOT / "scripts" / "bench_capture.py"))["main"]
    main.__globals__["PROFILED"] = range(6, 10)
    main(
        [
            *("--target", str(tiny_target_folder), "--prompts", str(tmp_path / "prompts.jsonl")),
            *("--out", str(tmp_path / "out.json"), "--max-new-tokens", "8", "--batch-size", "4"),
            *("--generate-batch", "4", "--limit", "6", "--profile"),
        ]
    )
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["answers"] == 12
    assert 12 < result["capture"]["tokens"] <= 12 * 8
    assert 0 < result["transformers generate"]["tokens"] <= 8 * 8
    parts = [result["profile"][f"{name}_ms"] for name in ("forward", "sampling", "signals")]
    assert all(part > 0 for part in parts)
    assert "tokens/s" in capsys.readouterr().out
