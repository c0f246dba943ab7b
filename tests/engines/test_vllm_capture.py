"""A capture from a real vLLM, served and in its own process, against ours: float32, on a CPU. `make test-vllm`."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from captures import orders
from vllm_served import VLLM, environment, served

from draftforge.data.capture.capture import capture_conversations
from draftforge.data.conversation import SPLITS
from draftforge.data.settings import CaptureSettings, VllmBackend
from draftforge.data.store import Capture, Sample
from draftforge.specdec.sampling_settings import SamplingSettings
from draftforge.specdec.targets import Target

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]
SETTINGS = CaptureSettings(
    max_new_tokens=24, batch_size=4, top_k=16, tail_samples=4, store_dtype="float32", shard_samples=6
)
SCORED = [SamplingSettings(), SamplingSettings(temperature=0.8, top_p=0.9)]
WARM = SamplingSettings(temperature=0.9, top_k=40, repetition_penalty=1.2)
MIX = orders(16, lambda i: WARM if i % 3 == 1 else None)


@pytest.fixture(scope="module")
def ours(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Capture:
    folder = tmp_path_factory.mktemp("ours") / "capture"
    capture_conversations(target, MIX, SETTINGS, SCORED, folder)
    return Capture.open(folder)


@pytest.fixture(scope="module")
def url(tiny_target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of the tiny target."""
    log = tmp_path_factory.mktemp("server") / "log"
    about = {"served_model_name": "tiny", "api_key": "a-key", "max_model_len": 256, "max_logprobs": SETTINGS.top_k}
    with served(tiny_target_folder, log, **about) as address:
        yield address


def check(found: Capture, ours: Capture) -> None:
    """Greedy answers are equal, the others end as they must; every log-prob is the target's."""
    for split in SPLITS:
        mine: dict[str, Sample] = {sample.id: sample for sample in ours.samples(split)}
        theirs = found.samples(split)
        assert [sample.id for sample in theirs] == list(mine)
        for sample in theirs:
            if sample.sampling.greedy and sample.turn == 0:
                assert sample == mine[sample.id]
                torch.testing.assert_close(found.logp(sample), ours.logp(sample), atol=1e-3, rtol=1e-3)


def test_a_servers_answers_with_the_targets_signals(
    url: str, target: Target, ours: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_KEY", "a-key")
    backend = VllmBackend(kind="vllm", url=url, api_key_env="SERVER_KEY")
    settings = SETTINGS.model_copy(update={"backend": backend})
    capture_conversations(target, MIX, settings, SCORED, tmp_path / "capture")
    found = Capture.open(tmp_path / "capture")
    check(found, ours)
    assert all(shard["logp_difference"] < 1e-3 for shard in found.manifest["shards"])  # at temperatures too: raw ones
    (engine,) = found.manifest["engines"]
    assert engine["name"] == "vllm" and engine["version"][0].isdigit() and engine["tokenizer_compared"] is True
    again = settings.model_copy(update={"seed": 0})
    capture_conversations(target, MIX, again, SCORED, tmp_path / "again")
    for split in SPLITS:  # seeds are the requests' own
        assert Capture.open(tmp_path / "again").samples(split) == found.samples(split)


def test_a_servers_own_signals(
    url: str, target: Target, ours: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_KEY", "a-key")
    backend = VllmBackend(kind="vllm", url=url, api_key_env="SERVER_KEY", signals="engine")
    settings = SETTINGS.model_copy(update={"backend": backend})
    capture_conversations(target, MIX, settings, SCORED, tmp_path / "capture")
    found = Capture.open(tmp_path / "capture")
    check(found, ours)
    for sample in found.samples("train"):
        with torch.no_grad():
            states = target.states(torch.tensor([sample.prompt_ids + sample.answer_ids]))
            logp_nV = target.logits(states.hidden_BTH)[0, len(sample.prompt_ids) - 1 : -1].log_softmax(-1)
        signals = found.signals(sample)
        ids_nk = signals.topk_ids_nk.long()
        torch.testing.assert_close(signals.topk_logp_nk, logp_nV.gather(-1, ids_nk), atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(signals.topk_logp_nk, logp_nV.topk(16).values, atol=1e-3, rtol=1e-3)
        total = signals.topk_logp_nk.exp().sum(-1) + signals.tail_logmass_n.exp()
        torch.testing.assert_close(total, torch.ones_like(total), atol=1e-4, rtol=0)


def test_vllm_in_the_same_process(tiny_target_folder: Path, ours: Capture, tmp_path: Path) -> None:
    """In vLLM's own environment, which holds what answering needs of this package."""
    mix = [conversation.model_dump() for conversation in MIX]
    backend = {"kind": "vllm", "signals": "target"}
    settings = SETTINGS.model_dump(mode="json") | {"backend": backend}
    job = {
        "target": str(tiny_target_folder),
        "mix": mix,
        "settings": settings,
        "scored": [s.model_dump() for s in SCORED],
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    files = [ROOT / "tests" / "engines" / "vllm_capture_driver.py", tmp_path / "job.json", tmp_path / "result.json"]
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "draftforge").symlink_to(ROOT)
    done = subprocess.run(
        [VLLM, *files],
        env=environment() | {"PYTHONPATH": str(tmp_path / "path"), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout.decode()[-4000:]
    result: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
    mine = {sample.id: sample for split in SPLITS for sample in ours.samples(split)}
    assert result["answers"].keys() == mine.keys()
    for name, tokens in result["answers"].items():
        if mine[name].sampling.greedy and mine[name].turn == 0:
            assert tokens == mine[name].answer_ids
    assert result["about"]["name"] == "vllm"
    assert all(difference < 1e-3 for difference in result["differences"])
