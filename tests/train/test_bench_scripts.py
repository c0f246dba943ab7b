"""The benchmark scripts run anywhere; what they measure is for GPUs."""

import argparse
import gzip
import importlib.util
import itertools
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from datasets import load_from_disk
from forked import python, run_ranks
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from draftforge.specdec.formats import convert_draft
from draftforge.specdec.formats.speculators import Verifier

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
def test_profile_rounds_counts_the_operations_of_each_part_on_a_cpu(tiny_target_folder: Path) -> None:
    given = ["--target", str(tiny_target_folder), "--batch", "2", "--context", "32", "--rounds", "2", "--host"]
    found = CliRunner().invoke(script("profile_rounds").app, [*given, "--way", "measured", "--way", "lookup"])
    assert found.exit_code == 0, found.output
    shown = [line.split() for line in found.output.splitlines()]
    assert [line[2:5] for line in shown if line[0] == "batch"] == [
        ["measured,", "24", "nodes:"],
        ["lookup,", "4", "nodes:"],
    ]
    counted = [line[0] for line in shown if line[2:3] == ["operations"] and float(line[1]) > 1]
    assert sorted(counted) == ["judge"] * 2 + ["observe"] * 2 + ["outside"] * 2 + ["target"] * 2
    assert sum(line[0] == "host" for line in shown) == 24


def test_profile_rounds_gives_kernels_to_the_part_whose_graph_launched_them(capsys: pytest.CaptureFixture[str]) -> None:
    def event(cat: str, name: str, ts: float, dur: float, launch: int | None = None) -> dict[str, Any]:
        args = {} if launch is None else {"args": {"correlation": launch}}
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, **args}

    events = [event("user_annotation", "part: draft", 0, 10), event("user_annotation", "part: target", 10, 10)]
    events += [event("gpu_user_annotation", "part: target", 0, 99), event("cpu_op", "aten::mm", 1, 3)]
    events += [event("cuda_runtime", "cudaGraphLaunch", 2, 1, 1), event("cuda_runtime", "cudaGraphLaunch", 12, 1, 2)]
    events += [event("cuda_runtime", "cudaMemcpyAsync", 15, 1, 3), event("cuda_runtime", "cudaEventSynchronize", 21, 9)]
    events += [event("kernel", "gemm", 11, 6, 1), event("kernel", "norm", 18, 3, 1), event("kernel", "gemm", 22, 12, 1)]
    events += [event("kernel", "gemm", 40, 24, 2), event("gpu_memcpy", "Memcpy DtoH", 64, 1.2, 3)]
    script("profile_rounds").show_trace(events, 1)  # of six rounds
    assert [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()] == [
        "draft 0.5 kernels 3.5 us",
        "0.3 x 9.00 us gemm",
        "target 0.2 kernels 4.0 us",
        "0.2 x 24.00 us gemm",
        "outside 0.2 kernels 0.2 us",
        "0.2 x 1.20 us Memcpy DtoH",
        "launched or waited for: graphs 0.3, single kernels 0.0, copies 0.2, waits 0.2",
    ]


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


def test_prompts_are_joined_into_dialogues(tmp_path: Path) -> None:
    """Every prompt once, turns of a conversation too; what fills no dialogue is left out."""
    files = [tmp_path / "one.jsonl", tmp_path / "two.jsonl.gz"]
    files[0].write_text("".join(json.dumps({"turns": [f"a{n}", f"b{n}"]}) + "\n" for n in range(4)))
    with gzip.open(files[1], "wt") as stream:
        stream.write(json.dumps({"turns": ["c"]}) + "\n")
    path = script("bench_training").join_prompts(files, 3, tmp_path / "long.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["domain"], len(line["turns"])) for line in lines] == [("long", 3)] * 3
    joined = [text for line in lines for text in line["turns"]]
    assert sorted(joined) == [f"{kind}{n}" for kind in "ab" for n in range(4)] + ["c"]


@pytest.mark.slow
def test_bench_peer_prepares_the_captured_rows_and_judges_both_heads_alike(
    tiny_target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench, trainer = script("bench_peer"), script("train_speculators")
    out = tmp_path / "out"

    def call(self: Any, log: str, verb: str, *given: str, until: float = 0) -> bool:
        """The preparation in this process; a training that leaves our own head in speculators' format."""
        if verb == "prepare":
            monkeypatch.setattr(sys, "argv", ["train_speculators", verb, "--target", str(self.target), *given])
            trainer.main()
            return False
        head = sorted((out / "work/ours").glob("train-draftforge-4-*/checkpoints/*4"))[-1]
        run = Path(given[given.index("--out") + 1])
        (run / "checkpoints/0").mkdir(parents=True)
        verifier = Verifier(str(self.target), ["LlamaForCausalLM"])
        convert_draft(head, run / "checkpoints/0", "speculators", verifier)
        line = {"epoch": 0, "steps": int(given[given.index("--steps") + 1]), "positions": 1000}
        (run / "progress.jsonl").write_text(json.dumps({**line, "seconds": 2.0, "first_step_seconds": 1.0}) + "\n")
        return False

    monkeypatch.setattr(bench.Peer, "call", call)
    files = {name: tmp_path / f"{name}.jsonl" for name in ("train", "math", "code")}
    for name, path in files.items():
        lines = [{"domain": "chat", "turns": [f"{name}: what is the sum of {n} and {n * n}?"]} for n in range(24)]
        path.write_text("\n".join(map(json.dumps, lines)))
    small = {"tokens_per_step": 256, "row_tokens": 0, "accumulation": 1, "optimizer": "adamw"}
    given = [f"target.model={tiny_target_folder}", "target.device=cpu", "target.dtype=float32"]
    given += ["mix.selection_share=0.2", "mix.holdout_share=0.2", "mix.near_threshold=1", "capture.top_k=0"]
    given += ["capture.max_new_tokens=12", *(f"drafts.eagle3.{name}={value}" for name, value in small.items())]
    options: dict[str, Any] = {"prompts": [files["train"]], "judged": [files["math"], files["code"]], "eval_limit": 8}
    options |= {"steps": [4], "points": 2, "peer_steps": 3, "peer_processes": 1}
    bench.main(out, given, **options)

    # What the peer is given: every row with its answer marked, and the target's own hidden states.
    stored = load_file(out / "work/rows.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tiny_target_folder)
    data = load_from_disk(str(out / "work/peer-data"))
    rows = list(zip(itertools.pairwise(stored["offsets"].tolist()), stored["prompt_tokens"].tolist(), strict=True))
    assert len(data) == len(rows) + min(16, len(rows))
    for row, ((start, end), prompt) in enumerate(rows):
        ids = stored["ids"][start:end].long()
        assert data[row]["input_ids"].tolist() == ids.tolist()
        assert data[row]["loss_mask"].tolist() == [0] * prompt + [1] * (end - start - prompt)
        file = load_file(out / f"work/peer-data/hidden_states/hs_{row}.safetensors")
        with torch.no_grad():
            states = model(ids[None], output_hidden_states=True)
            last = model.lm_head(model.model.norm(file["hidden_states"][:, -1].float()))
        wanted = torch.stack([states.hidden_states[layer][0] for layer in (2, 2, 1)], 1)
        torch.testing.assert_close(file["hidden_states"][:, :-1].float(), wanted, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(last, states.logits[0], rtol=5e-2, atol=5e-2)
        assert file["token_ids"].tolist() == ids.tolist()
    assert data[len(rows)]["input_ids"].tolist() == data[0]["input_ids"].tolist()

    # One head, scored from either format, has one tau; the earlier checkpoint has its own.
    found = json.loads((out / "results.json").read_text())
    ours, theirs = found["trainings"]
    assert not found["failed"] and [point["steps"] for point in ours["curve"]] == [2, 4]
    assert list(ours["curve"][-1]["tau"]) == ["code", "math", "all"]
    assert theirs["curve"][0]["tau"] == ours["curve"][-1]["tau"] and theirs["curve"][0]["steps"] == 3
    assert found["differences"]["draftforge-4, last"]["all"]["value"] == 0
    assert found["capture"]["positions"] == stored["offsets"][-1]
    assert "speculators" in capsys.readouterr().out
