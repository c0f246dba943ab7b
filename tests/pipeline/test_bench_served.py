"""The benchmark of served against promised figures, with a stand-in for vLLM that serves what our target answers."""

import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from engine_counts import CountedRounds, EngineRound, engine_rounds, matched_runs
from trained import PROMPTS, Trained
from typer.testing import CliRunner

from draftforge.errors import EngineError, InputError
from draftforge.eval import vllm_server
from draftforge.eval.cost_table import CostTable
from draftforge.eval.draft_configs import DraftConfig
from draftforge.eval.engine_costs import answer_lengths
from draftforge.eval.serving_load import LoadTimes
from draftforge.eval.settings import LoadSettings
from draftforge.eval.speedup import Gain
from draftforge.scripts import bench_served, served_results, vllm_servers
from draftforge.scripts.served_judge import promises
from draftforge.scripts.served_results import Bench
from draftforge.scripts.vllm_servers import Draft, EngineTimes, Setup
from draftforge.specdec.decoder import Request, generate
from draftforge.specdec.proposers.factory import make_proposer
from draftforge.specdec.sampling_settings import SamplingSettings
from draftforge.specdec.serve_commands import plain_command
from draftforge.specdec.target_settings import TargetSettings

STAND_IN = Path(__file__).parents[1] / "support" / "vllm_stand_in.py"
DEPTHS, LENGTH = (1, 2), 24
LENGTHS = answer_lengths(3, LENGTH, 2 * LENGTH)


class Stage:
    """A folder with prompts, the stand-in's file, and the wrapper that is vLLM's Python."""

    def __init__(self, folder: Path, drafts: Trained) -> None:
        self.folder, self.drafts = folder, drafts
        self.runs: dict[int, list[CountedRounds]] = {}
        self.state: dict[str, Any] = {"answers": {}, "rounds": {}, "broken": ["medusa"]}
        lines = [json.dumps({"turns": [text], "domain": "orders"}) for text in PROMPTS[:3]]
        (folder / "prompts.jsonl").write_text("\n".join(lines))
        (folder / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{STAND_IN}" "{self.file}" "$@"\n')
        (folder / "python").chmod(0o755)

    @property
    def file(self) -> Path:
        return self.folder / "state.json"

    @property
    def draft(self) -> Path:
        return self.drafts.draft_folders["eagle3"].resolve()

    def answer(self) -> None:
        """Our greedy answers to the prompts, and the rounds that vLLM counts for them."""
        target = self.drafts.target()
        draft = make_proposer(self.drafts.draft("eagle3"), target)
        for ids, length in zip((target.tokenizer(text).input_ids for text in PROMPTS), LENGTHS):
            request = Request(ids, SamplingSettings(), 0, LENGTH + max(DEPTHS), frozenset())
            ((_, own),) = generate(target, None, [request], draft_tokens=0)
            self.state["answers"][json.dumps(ids)] = own.tokens[:length]
            for K in DEPTHS:
                runs = matched_runs(target, draft, ids, own.tokens, K)
                self.runs.setdefault(K, []).append(runs)
                rounds = self.state["rounds"].setdefault(f"{self.draft} {K}", {})
                rounds[json.dumps(ids)] = [one.accepted for one in engine_rounds("vllm", runs, K, length)]
        self.write()

    def write(self) -> None:
        self.file.write_text(json.dumps(self.state))

    @property
    def starts(self) -> list[str]:
        return (self.folder / "starts.txt").read_text().split("\n")[:-1]

    def run(self, *more: str, out: str = "out") -> Any:
        given = [str(self.folder / out), "--target", str(self.drafts.target_folder), "--dtype", "float32"]
        given += ["--vllm-python", str(self.folder / "python"), "--prompts", str(self.folder / "prompts.jsonl")]
        given += ["--draft", str(self.draft), "--draft", str(self.drafts.draft_folders["medusa"]), "--no-lookup"]
        given += [word for K in DEPTHS for word in ("--draft-tokens", str(K))]
        given += ["--concurrency", "1", "--concurrency", "2", "--seconds", "0", "--new-tokens", str(LENGTH)]
        given += ["--cost-prompts", "1", "--cost-rounds", "4"]
        return CliRunner().invoke(bench_served.app, [*given, *more])

    def counted(self, *more: str) -> dict[str, Any]:
        """Results of counts alone, in a folder of their own."""
        self.run("--counts", *more, out="counted")
        return json.loads((self.folder / "counted/results.json").read_text())  # type: ignore[no-any-return]

    def promised_alone(self) -> Any:
        """Promises for what the first draft's servers counted, without a replay."""
        found, settings = self.results, TargetSettings.model_validate({"model": str(self.drafts.target_folder)})
        bench, draft = Bench(self.folder / "out", found["settings"]), Draft("eagle3", 0, "eagle3", self.draft, "")
        draft = draft._replace(step=int(next(iter(found["ours"])).rpartition("-")[2]))
        prompts = bench_served.read_prompts([self.folder / "prompts.jsonl"], 0, settings)
        asked = found["settings"] | {"concurrency": [1, 2], "draft_tokens": DEPTHS, "cost_prompts": 1, "cost_rounds": 4}
        times = EngineTimes(bench.out / "costs", settings, prompts, asked)
        return promises(bench, prompts, times, [Setup(draft, K) for K in DEPTHS], draft, asked)

    @property
    def results(self) -> dict[str, Any]:
        return json.loads((self.folder / "out/results.json").read_text())  # type: ignore[no-any-return]


@pytest.fixture
def stage(trained_drafts: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(vllm_servers, "_SETTLE_SECONDS", 0.01)
    return Stage(tmp_path, trained_drafts)


def reached_and_accepted(runs: Sequence[CountedRounds], K: int) -> list[float]:
    """Shares of full drafts that accept 1, 2, ... tokens: alphas of the positions reached within the answer."""
    rounds = list[EngineRound]()
    for run, length in zip(runs, LENGTHS, strict=True):
        known = 1
        while known < length:
            drafted = min(K, length - known, run.offered_T[known])
            rounds.append(EngineRound(drafted, min(run.right_T[known], drafted)))
            known += rounds[-1].accepted + 1
    alphas = [
        sum(one.accepted >= k for one in rounds) / sum(one.drafted >= k and one.accepted >= k - 1 for one in rounds)
        for k in range(1, K + 1)
    ]
    return [math.prod(alphas[:k]) for k in range(1, K + 1)]


@pytest.mark.slow
def test_served_figures_stand_beside_ours_and_a_second_run_goes_on(stage: Stage) -> None:
    stage.answer()
    first = stage.run("--together", "3")
    assert first.exit_code == 3, first.output  # Medusa's servers failed
    found = stage.results
    rows = {(row["draft"], row["draft_tokens"], row["concurrency"]): row for row in found["rows"]}
    assert len(rows) == len(found["rows"]) == 2 * (1 + 2 * len(DEPTHS))
    gains = dict[tuple[int, int], Gain]()
    for K in DEPTHS:
        # Counters of the whole list of prompts, and our own by a plain count of the rounds along the same answers.
        counted = [one for each in stage.state["rounds"][f"{stage.draft} {K}"].values() for one in each]
        ours = reached_and_accepted(stage.runs[K], K)
        for size in (1, 2):
            row = rows["eagle3", K, size]
            assert row["engine"] == "vLLM 0.99"
            assert row["tau_served"] == pytest.approx(1 + sum(counted) / len(counted))
            served = [sum(one >= k for one in counted) / len(counted) for k in range(1, K + 1)]
            assert row["accepted_served"] == pytest.approx(served)
            assert row["accepted_ours"] == pytest.approx(ours) and row["tau_ours"] == pytest.approx(1 + sum(ours))
            assert row["tau_percent"] == pytest.approx(100 * (row["tau_ours"] / row["tau_served"] - 1))
            assert row["equal_answers"] == 1
            speeds = [rows[key]["tokens_per_second"] for key in (("eagle3", K, size), ("plain", 0, size))]
            assert row["speedup_served"] == pytest.approx(speeds[0] / speeds[1])
            # The promise is by the server's times, on the counts of the plain server's answers, which are the same.
            ((key, own),) = found["ours"].items()
            table = CostTable.model_validate_json((stage.folder / f"out/costs/engine-{key}.json").read_bytes())
            loop = next(one for one in table.closed_loops if (one.levels, one.batch_size) == (K, size))
            load = LoadSettings(
                engine="vllm", batch_sizes={size: 1.0}, context_tokens=loop.prompt_tokens + LENGTH // 2,
                answer_tokens=LENGTH,
            )  # fmt: skip
            tau = own["measurements"][f"{key}-K{K}-c{size}"]["promised_tau"]
            gains[K, size] = LoadTimes(table, load).gain_at(size, DraftConfig(K))
            assert (
                row["speedup_promised"] == pytest.approx(gains[K, size].speedup(tau))
                and row["speedup_by_own_rounds"] > 0
            )
            assert rows["medusa", K, size]["failed"].endswith("ValueError: no medusa here")
    # Whole passes over three prompts, for four times as many requests as run at once.
    assert [found["served"][f"plain-c{size}"]["requests"] for size in (1, 2)] == [6, 9]
    assert "no medusa here" in (stage.folder / "out/table.txt").read_text()
    # The figure has a dot for each speed-up that was promised, and one for each of the two lines in its legend.
    figure = ElementTree.parse(stage.folder / "out/promised-and-served.svg").getroot()
    assert len(figure.findall(".//{*}circle")) == len(gains) + 2 and len(figure.findall(".//{*}polyline")) == 2
    assert sorted(stage.starts[:3]) == ["eagle3 1", "eagle3 2", "plain 0"]  # side by side, in any order
    assert sorted(stage.starts[3:]) == ["medusa 1", "medusa 2"]
    assert [one["together"] for one in found["servers"].values()] == [3, 3, 3, 2, 2]
    # The plain server of a group is measured again at its end.
    assert all(rows["plain", 0, size]["tokens_per_second_again"] > 0 for size in (1, 2))
    ((key, _),) = found["ours"].items()
    # Without a replay, a promise is that of the rounds that the server counted, by the same times.
    alone = stage.promised_alone()
    for K in DEPTHS:
        counted = [one for each in stage.state["rounds"][f"{stage.draft} {K}"].values() for one in each]
        mine = alone[f"{key}-K{K}-c1"]
        assert mine["promised_tau"] == pytest.approx((sum(LENGTHS) - len(LENGTHS)) / len(counted))
        assert mine["promised_by_engine"] == pytest.approx(gains[K, 1].speedup(mine["promised_tau"]))
    # The second run starts what failed, and nothing else; it replays nothing again.
    stage.state["broken"] = ["plain", "eagle3", "medusa"]
    stage.write()
    assert stage.run().exit_code == 3
    assert stage.starts[5:] == ["medusa 1", "medusa 2"]
    assert stage.results["rows"] == found["rows"] and stage.results["ours"] == found["ours"]
    # Times of rounds that are missing are measured again, by servers that are started for them alone.
    ((key, _),) = found["ours"].items()
    (stage.folder / f"out/costs/engine-{key}.json").unlink()
    stage.run()
    assert stage.starts[7:] == ["eagle3 1", "eagle3 2", "medusa 1", "medusa 2"]
    assert stage.results["served"] == found["served"]
    # Counts alone are the same, and nothing is timed or promised.
    stage.state["broken"] = ["medusa"]
    stage.write()
    counted_rows = stage.counted("--together", "2")["rows"]
    assert [row["draft"] for row in counted_rows] == ["eagle3"] * 4 + ["medusa"] * 4
    for row in counted_rows[:4]:
        beside = rows["eagle3", row["draft_tokens"], row["concurrency"]]
        same = ("tau_served", "tau_ours", "accepted_served", "accepted_ours", "tau_low")
        assert {name: row[name] for name in same} == {name: beside[name] for name in same}
        assert row["tokens_per_second"] is row["speedup_promised"] is row["speedup_by_own_rounds"] is None
    assert not (stage.folder / "counted/costs").exists()
    # Figures of another number of tokens do not mix in.
    other = stage.run("--new-tokens", "8")
    assert isinstance(other.exception, InputError) and "new_tokens" in str(other.exception)


def test_a_dry_run_prints_commands_and_starts_nothing(stage: Stage) -> None:
    found = stage.run("--dry-run", "--vllm-flags", "--gpu-memory-utilization 0.5")
    lines = found.stdout.splitlines()
    assert found.exit_code == 0 and len(lines) == 5
    assert all(line.endswith("--no-enable-prefix-caching --gpu-memory-utilization 0.5") for line in lines)
    assert [("speculative-config" in line) for line in lines] == [False, True, True, True, True]
    accepting = stage.run("--dry-run", "--accept", "0.5").stdout.splitlines()
    assert ["rates" in line for line in accepting] == [False, True, True, True, True]
    assert all(one in accepting[2] for one in ("synthetic", "[0.5, 0.25]"))
    assert not (stage.folder / "out").exists() and not (stage.folder / "starts.txt").exists()


def test_a_draft_that_no_server_could_read_is_refused(stage: Stage, tmp_path: Path) -> None:
    found = stage.run("--draft", "nobody")
    assert isinstance(found.exception, InputError) and "--draft nobody" in str(found.exception)
    assert not (tmp_path / "out").exists()


def test_a_server_that_does_not_answer_is_stopped_with_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ignores the request to end, and so does a process that it started."""
    monkeypatch.setattr(vllm_server, "_STOP_SECONDS", 0.1)
    monkeypatch.setattr(vllm_server, "_ENDING_SECONDS", 0.1)
    stubborn = tmp_path / "python"
    stubborn.write_text("#!/bin/sh\ntrap '' TERM\nsleep 61 &\necho $! $$ >&2\nwait\nsleep 62\n")
    stubborn.chmod(0o755)
    vllm, log = vllm_server.VllmLauncher(stubborn, [], start_seconds=0.3), tmp_path / "log"
    command = plain_command("vllm", TargetSettings(model="TARGET"))
    with pytest.raises(EngineError, match=r"not answer within 0\.3 s"), vllm.serving(command, "float32", log):
        raise AssertionError
    pids = log.read_text().split()
    assert len(pids) == 2
    time.sleep(0.05)
    states = subprocess.run(["ps", "-o", "stat=", "-p", ",".join(pids)], capture_output=True, text=True, check=False)
    assert all(state.startswith("Z") for state in states.stdout.split())


def test_checkpoints_are_ranked_by_what_is_served_and_by_ours() -> None:
    def row(step: int, tau: float, ours: float | None, speedup: float, promised: float, draft: str = "a") -> Any:
        about = {"draft": draft, "step": step, "draft_tokens": 2, "concurrency": 8}
        figures = {"tau_served": tau, "tau_ours": ours, "speedup_served": speedup, "speedup_promised": promised}
        return about | figures

    failed = {"draft": "a", "step": 9, "draft_tokens": 2, "concurrency": 8, "failed": "no server"}
    rows = [row(1, 1.5, 1.4, 1.1, 1.2), row(2, 1.7, 1.6, 1.3, 1.1), failed, row(3, 1.9, 1.8, 1.2, 1.3, "alone")]
    (found,) = served_results.rankings(rows)
    assert (found["tau_served"], found["tau_ours"], found["tau_equal"]) == ([2, 1], [2, 1], True)
    assert (found["speedup_served"], found["speedup_promised"]) == ([2, 1], [1, 2])
    assert found["speedup_equal"] is False
    (unknown,) = served_results.rankings([row(1, 1.5, None, 1.1, 1.2), row(2, 1.7, 1.6, 1.3, 1.1)])
    assert unknown["tau_ours"] is None and unknown["tau_equal"] is None and unknown["tau_ties"] == []
    intervals = [(1, 1.4, 1.3, 1.5), (2, 1.6, 1.5, 1.7), (3, 1.9, 1.8, 2.0)]
    sure = [row(step, 1.0, ours, 1, 1) | {"tau_low": low, "tau_high": high} for step, ours, low, high in intervals]
    assert served_results.rankings(sure)[0]["tau_ties"] == [[2, 1]]
