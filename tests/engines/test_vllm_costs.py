"""Costs from a real vLLM: a score by the times of servers that the measurement starts itself. `make test-vllm`.

With real drafts, and with synthetic acceptance, as on a GPU: vLLM's kernels for CPUs lack it, and get it by a plugin.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from vllm_served import VARIABLES, VLLM, environment

from draftforge.eval import vllm_server
from draftforge.eval.cost_table import read_tables
from draftforge.eval.draft_configs import DraftConfig
from draftforge.eval.engine_costs import EngineServers
from draftforge.eval.engine_metrics import samples_by_name, total
from draftforge.eval.serving_load import LoadTimes
from draftforge.eval.vllm_server import VllmLauncher
from draftforge.pipeline import distill as flow
from draftforge.pipeline.scoring import Scored
from draftforge.recipe import load_recipe

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]
K, SIZES, CONTEXT = 2, {1: 0.5, 3: 0.5}, 100
FLAGS = ["--enforce-eager", "--max-num-seqs", "4"]
PLUGIN = """from vllm.utils import cpu_triton_utils

plain = cpu_triton_utils._rejection_greedy_sample_kernel_impl


def greedy(output, ends, drafted, best, bonus, is_greedy, longest, uniform=None, rates=None, SYNTHETIC_MODE=False):
    assert SYNTHETIC_MODE and is_greedy is None
    start = 0
    for row, end in enumerate(ends.tolist()):
        for place in range(end - start):
            accepted = uniform[start + place] < rates[place] and drafted[start + place] >= 0
            output[row, place] = drafted[start + place] if accepted else best[start + place]
            if not accepted:
                break
        else:
            output[row, end - start] = bonus.flatten()[row]
        start = end


def load():
    cpu_triton_utils._rejection_greedy_sample_kernel_impl = greedy
"""
"""The greedy kernel of vLLM 0.32 in its synthetic mode, in Python."""


def recipe_at(folder: Path, target: Path) -> Path:
    lines = [json.dumps({"id": str(i), "domain": "orders", "turns": [f"Order {i}: what of it?"]}) for i in range(24)]
    (folder / "orders.jsonl").write_text("\n".join(lines))
    costs = {"engine": "vllm", "start": True, "venv": str(VLLM.parents[1]), "flags": FLAGS, "start_seconds": 300}
    load = {"engine": "vllm", "batch_sizes": SIZES, "context_tokens": CONTEXT, "answer_tokens": 16, "costs": costs}
    score = {"draft_tokens": [K], "decode_conversations": 1, "load": load}
    recipe: dict[str, Any] = {
        "name": "tiny",
        "workdir": str(folder / "work"),
        "target": {"model": str(target), "device": "cpu"},
        "mix": {"sources": [{"kind": "turns", "path": "orders.jsonl"}], "selection_share": 0.3, "holdout_share": 0.2},
        "capture": {"max_new_tokens": 12, "top_k": 16, "tail_samples": 4},
        "drafts": {"small": {"family": "small", "layers": 2, "steps": 2, "warmup_steps": 1, "tokens_per_step": 256}},
        "score": score | {"costs": {"prompts": 1, "rounds": 8, "warmup_rounds": 1}},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "recipe.yaml"


def plugin_at(folder: Path) -> Path:
    """A PYTHONPATH on which vLLM finds the plugin."""
    about = folder / "synthetic_cpu-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: synthetic-cpu\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nsynthetic_cpu = synthetic_cpu:load\n")
    (folder / "synthetic_cpu.py").write_text(PLUGIN)
    return folder


@pytest.mark.parametrize("synthetic", [False, True], ids=["real drafts", "synthetic acceptance"])
def test_a_score_by_times_of_a_real_engine(
    synthetic: bool,
    tiny_target_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    environment()
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    seen, inner = list[Scored](), flow.score_stage

    def spy(*given: Any) -> Scored:
        found = inner(*given)
        assert found is not None
        seen.append(found)
        return found

    monkeypatch.setattr(flow, "score_stage", spy)
    read, inner_read = list[str](), vllm_server.read_engine

    def reading(text: str, source: str) -> vllm_server.EngineReading:
        read.append(text)
        return inner_read(text, source)

    monkeypatch.setattr(vllm_server, "read_engine", reading)
    if synthetic:
        launcher = VllmLauncher(VLLM, FLAGS, 300, plugin_at(tmp_path / "site"))
        monkeypatch.setattr(EngineServers, "_launcher", launcher)
        monkeypatch.setattr(EngineServers, "_synthetic", True)
    recipe = load_recipe(recipe_at(tmp_path, tiny_target_folder))
    flow.score(recipe, None)
    # 1) One server without a draft, and one for each way of drafting.
    logs = tmp_path / "work" / "costs" / "logs"
    assert {path.name for path in logs.iterdir()} == {"plain.log", f"lookup-K{K}.log", f"small-K{K}.log"}
    (scored,) = seen
    tables = read_tables(scored.times_file)
    assert len(tables) == 2
    options = [*FLAGS, *(["with synthetic acceptance"] if synthetic else [])]
    for table in tables:
        assert table.key.engine.startswith("vLLM 0.")
        assert table.key.software == " ".join([table.key.engine, *options])
        assert {(row.levels, row.batch_size) for row in table.points} == {
            (k, size) for k in (0, K) for size in (1, 2, 3)
        }
        assert all(0 < row.verify_seconds < 60 and row.rounds >= 1 for row in table.points)
        loops = {(loop.levels, loop.batch_size): loop for loop in table.closed_loops}
        assert set(loops) == {(row.levels, row.batch_size) for row in table.points}
        assert all(0 < loop.seconds < 600 and 0 < loop.rounds < 40 for loop in loops.values())
    # What is accepted is what was asked for, half of a full draft.
    if synthetic:
        drafting = [samples_by_name(text, "metrics") for text in read if "spec_decode_num_drafts_total{" in text]
        names = (f"vllm:spec_decode_num_{name}_total" for name in ("drafts", "accepted_tokens"))
        drafts, accepted = (total(drafting[-1], name) for name in names)
        assert drafts > 50 and accepted / drafts == pytest.approx(K / 2, abs=0.3)
    # 2) Scores are by these, and say so.
    times = scored.times["small", 2]
    assert isinstance(times, LoadTimes) and times.table in tables
    assert f"times of {tables[0].key.engine} on " in " ".join(capsys.readouterr().out.split())
    row = next(row for row in scored.rows if row.draft == "small")
    assert row.speedup.value == pytest.approx(times.gain(DraftConfig(K)).speedup(row.tau.value))
    # 3) They are kept: no server is started again.
    before = {path: path.stat().st_mtime_ns for path in logs.iterdir()}
    flow.score(recipe, None)
    assert {path: path.stat().st_mtime_ns for path in logs.iterdir()} == before and seen[1].times == scored.times
