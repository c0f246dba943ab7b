"""Our counts against vLLM's, on the folders that we write: greedy, float32, round by round. `make test-vllm`.

vLLM lives in an environment of its own (scripts/make_vllm_venv.sh), so each engine start is a process.
"""

import itertools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from trained import PROMPTS, Trained

from draftforge.specdec.counting import EngineRound, engine_rounds, matched_runs
from draftforge.specdec.decoder import Request, generate
from draftforge.specdec.proposers import make_proposer
from draftforge.specdec.sampling import SamplingSettings

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
VLLM = Path(os.environ.get("VLLM_VENV", ROOT / ".cache" / "vllm")) / "bin" / "python"
METHODS = {
    "small": "draft_model",
    "medusa": "medusa",
    "eagle": "eagle",
    "eagle3": "eagle3",
    "eagle3-reduced": "eagle3",
}
"""Draft of the trained fixture -> vLLM's name of the method."""
LENGTHS = (1, 2, 5, 40)
STOPS = (".", ",")


def vllm_answers(job: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    if not VLLM.is_file():
        pytest.skip(f"no vLLM at {VLLM}: `make test-vllm` builds it")
    (folder / "job.json").write_text(json.dumps(job))
    files = [ROOT / "tests" / "engines" / "vllm_driver.py", folder / "job.json", folder / "result.json"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [VLLM, *files], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    assert done.returncode == 0, done.stdout.decode()[-4000:]
    return json.loads((folder / "result.json").read_text())["answers"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("K", [1, 3, 5])
@pytest.mark.parametrize("name", METHODS)
def test_rounds_and_tokens_equal_vllms(trained_drafts: Trained, tmp_path: Path, name: str, K: int) -> None:
    target = trained_drafts.target()
    proposer = make_proposer(trained_drafts.draft(name), target)
    stop_ids = [target.tokenizer.convert_tokens_to_ids(stop) for stop in STOPS]
    ends = [*((length, []) for length in LENGTHS), *((60, [stop]) for stop in stop_ids)]
    cases = [(target.tokenizer(text).input_ids, *end) for text, end in itertools.product(PROMPTS, ends)]
    speculative = {
        "method": METHODS[name],
        "model": str(trained_drafts.draft_folders[name]),
        "num_speculative_tokens": K,
    }
    requests = [{"prompt": ids, "max_tokens": length, "stop": stop} for ids, length, stop in cases]
    job = {"target": str(trained_drafts.target_folder), "speculative": speculative, "requests": requests}
    surplus = 0
    for (ids, length, stop), found in zip(cases, vllm_answers(job, tmp_path)):
        request = Request(ids, SamplingSettings(), 0, length, frozenset(stop))
        ((_, ours),) = generate(target, proposer, [request], draft_tokens=K)
        ((_, beyond),) = generate(target, None, [Request(ids, SamplingSettings(), 0, length + K)])
        runs = matched_runs(target, proposer, ids, beyond.tokens, K)
        stopped = len(ours.tokens) if ours.finish == "stop" else None
        assert (found["tokens"], found["finish"]) == (ours.tokens, ours.finish)
        rounds = [EngineRound(*round_) for round_ in zip(found["drafted"], found["accepted"], strict=True)]
        assert rounds == engine_rounds("vllm", runs, K, length, stopped)
        assert [r[:2] for r in ours.rounds] == engine_rounds("draftforge", runs, K, length, stopped)
        surplus += sum(found["accepted"]) - sum(r.accepted for r in ours.rounds)
    assert surplus > 0  # what vLLM accepts beyond the end of an answer, we do not
