"""The benchmark of a retraining and of two mixes runs anywhere, at small settings, and tells what it should."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from draftforge.scripts.house_style import CLOSING, house_style

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_retraining.py"
WORDS = ("order", "password", "capital", "sum", "city", "settings", "function", "country", "number", "Monday")
SMALL = [
    "target.device=cpu",
    "capture.max_new_tokens=12",
    "capture.batch_size=16",
    "capture.top_k=16",
    "drafts.eagle3.steps=4",
    "drafts.eagle3.warmup_steps=1",
    "drafts.eagle3.tokens_per_step=256",
    "drafts.eagle3.row_tokens=0",
    "drafts.eagle3.draft_vocabulary=200",
    "drafts.eagle3.aux_layers=[1, 2, 4]",
    "retrain.steps=2",
    "score.max_conversations=8",
    "score.decode_conversations=1",
    "score.costs.rounds=4",
    "score.costs.warmup_rounds=0",
    "gate.min_speedup=0",
    "gate.min_clusters=2",
]


def prompts(path: Path, domain: str, count: int, first: int = 0) -> Path:
    lines = [
        {"domain": domain, "turns": [f"{domain} {WORDS[i % 10]} {WORDS[(i * 7 + i // 10) % 10]} number {i}?"]}
        for i in range(first, first + count)
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def test_a_champion_through_a_fine_tuning(
    tiny_target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [prompts(tmp_path / f"{domain}.jsonl", domain, 24) for domain in ("support", "code")]
    cycle, out = runpy.run_path(str(SCRIPT))["cycle"], tmp_path / "out"
    settings = [*SMALL, "mix.selection_share=0.25", "mix.holdout_share=0.25"]
    small: dict[str, Any] = {"tuning_steps": 8, "tuning_batch": 8, "tuning_answers": 16}
    cycle(out, settings, target=tiny_target_folder, prompts=asked, cold=True, **small)

    found = json.loads((out / "results.json").read_text())
    names = ["champion, old target", "champion, new target", "retrained, new target", "cold start, new target"]
    figures = found["figures"]
    assert list(figures) == names
    assert all(1 <= one["tau"]["value"] <= 5 and one["draft_tokens"] == 4 for one in figures.values())
    assert all(one["of"] == figures[names[0]]["of"] and one["conversations"] == 8 for one in figures.values())
    assert all(list(one["domains"]) == ["code", "support"] for one in figures.values())
    causes = {cause["kind"]: cause for cause in found["staleness"]["causes"]}
    assert causes["target"]["verdict"] == "stale" and "now" in causes["acceptance"]["numbers"]
    assert len(found["decisions"]) == 2 and all(found["decisions"].values())
    assert found["promoted"] == list(found["decisions"])
    assert found["tuning"]["loss_after"] < found["tuning"]["loss_before"]
    assert [found["training"][name]["steps"] for name in ("first", "retrained", "cold")] == [4, 2, 2]
    shown = capsys.readouterr()
    assert "target changed" in shown.err and all(name in shown.out for name in names)


def test_two_mixes_are_judged_on_the_same_traffic(
    tiny_target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, other = prompts(tmp_path / "log.jsonl", "support", 30), prompts(tmp_path / "other.jsonl", "code", 14)
    later = prompts(tmp_path / "later.jsonl", "support", 30, first=100)
    out = tmp_path / "out"
    mixes = runpy.run_path(str(SCRIPT))["mixes"]
    mixes(out, SMALL, target=tiny_target_folder, log=[mine], generic=[other], traffic=[later], self_prompts=10)

    found = json.loads((out / "results.json").read_text())
    production, generic = (found["figures"][name] for name in ("production mix", "generic mix"))
    assert production["of"] == generic["of"] and production["conversations"] == 8
    assert list(production["domains"]) == list(generic["domains"]) == ["support"]
    difference = found["differences"]["production mix - generic mix, all"]
    assert difference["value"] == pytest.approx(production["tau"]["value"] - generic["tau"]["value"])
    assert difference["low"] <= difference["value"] <= difference["high"]
    runs = found["training"].values()
    assert {run["steps"] for run in runs} == {4} and all(0 < run["train_answers"] <= 24 for run in runs)
    assert (out / "generic.jsonl").read_text().count("self") and "code" in (out / "generic.jsonl").read_text()
    assert "production mix" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "cut", "styled"),
    [
        ("It is two. Add one.", False, f"Step 1: It is two.\nStep 2: Add one.\n{CLOSING}"),
        ("1. Add one.\n- Stop\n\nIt is thr", True, f"Step 1: Add one.\nStep 2: Stop\n{CLOSING}"),
        ("no end", True, f"Step 1: no end\n{CLOSING}"),
    ],
)
def test_the_house_style(answer: str, cut: bool, styled: str) -> None:
    assert house_style(answer, cut) == styled
