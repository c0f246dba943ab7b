"""A capture from a vLLM server: the answers are the target's, whatever the server does wrong now and then."""

import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from captures import orders
from served import Served, serving

import draftforge.data.backends.http_json as http_json
from draftforge.data.backends.vllm import LogprobRequest, checked_answer
from draftforge.data.capture.capture import capture_conversations
from draftforge.data.conversation import SPLITS, Conversation
from draftforge.data.settings import CaptureSettings, VllmBackend
from draftforge.data.store import Capture
from draftforge.errors import EngineError, InputError, StaleInputError
from draftforge.http_replies import UnusableError
from draftforge.specdec.continuous_batching import QueuedRequest
from draftforge.specdec.requests import Request
from draftforge.specdec.sampling_settings import SamplingSettings
from draftforge.specdec.targets import Target

SETTINGS = CaptureSettings(
    max_new_tokens=10, batch_size=3, top_k=8, tail_samples=4, store_dtype="float32", shard_samples=4
)
SCORED = [SamplingSettings(), SamplingSettings(temperature=0.7, top_p=0.9)]
WARM = SamplingSettings(temperature=0.9, top_k=30, repetition_penalty=1.2)
MIX = orders(12, lambda i: WARM if i % 3 else None)
Capturing = Callable[..., Capture]


@pytest.fixture(scope="module")
def ours(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Capture:
    """The same by our own decoder."""
    folder = tmp_path_factory.mktemp("ours") / "capture"
    capture_conversations(target, MIX, SETTINGS, SCORED, folder)
    return Capture.open(folder)


@pytest.fixture
def served(target: Target, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(http_json, "FIRST_WAIT_SECONDS", 0.01)
    with serving(target) as server:
        yield server


@pytest.fixture
def run(target: Target, served: Served, tmp_path: Path) -> Capturing:
    """`run(name, mix, **backend)`: a capture from the server."""

    def start(name: str = "capture", mix: list[Conversation] = MIX, **backend: Any) -> Capture:
        settings = SETTINGS.model_copy(update={"backend": VllmBackend(kind="vllm", url=served.url, **backend)})
        capture_conversations(target, mix, settings, SCORED, tmp_path / name)
        return Capture.open(tmp_path / name)

    return start


def check_samples(found: Capture, ours: Capture) -> None:
    for split in SPLITS:
        assert found.samples(split) == ours.samples(split)
        for sample in ours.samples(split):
            torch.testing.assert_close(found.logp(sample), ours.logp(sample), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_answers_and_signals_are_those_of_our_own_capture(run: Capturing, served: Served, ours: Capture) -> None:
    """Dialogues, temperatures and penalties included: the stand-in draws with the seeds that it is given."""
    found = run()
    check_samples(found, ours)
    for sample in ours.samples("train"):
        theirs, own = found.signals(sample), ours.signals(sample)
        assert torch.equal(theirs.tail_ids_nM, own.tail_ids_nM)
        torch.testing.assert_close(theirs.topk_logp_nk, own.topk_logp_nk, atol=1e-4, rtol=1e-4)
    (engine,) = found.manifest["engines"]
    assert engine == {
        "name": "vllm",
        "version": "0.32.0",
        "model": "tiny",
        "signals": "target",
        "tokenizer_compared": True,
    }
    assert all(shard["logp_difference"] < 1e-3 for shard in found.manifest["shards"])
    assert 1 < served.most_at_once <= SETTINGS.batch_size
    assert served.url.removeprefix("http://") not in str(found.manifest)
    assert {body["logprobs"] for body in served.asked} == {0}


@pytest.mark.slow
def test_the_engines_own_signals_are_kept_without_a_tail(run: Capturing, ours: Capture, target: Target) -> None:
    states = target.states
    found = run(signals="engine")
    check_samples(found, ours)
    for sample in ours.samples("train"):
        theirs, own = found.signals(sample), ours.signals(sample)
        assert torch.equal(theirs.topk_ids_nk, own.topk_ids_nk)
        torch.testing.assert_close(theirs.topk_logp_nk, own.topk_logp_nk, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(theirs.tail_logmass_n.exp(), own.tail_logmass_n.exp(), atol=1e-4, rtol=1e-4)
        assert theirs.tail_ids_nM.shape == theirs.tail_logp_nM.shape == (len(sample.answer_ids), 0)
    assert found.manifest["tail"] == "truncated"
    assert states == target.states


@pytest.mark.slow
def test_what_a_retry_mends_is_mended(run: Capturing, served: Served, ours: Capture) -> None:
    faults = ["429", "500", "503", "408", "cut", "lost", "empty", "short", "other", "abort", "long"]
    served.faults.extend([entry for fault in faults for entry in (fault, "")])
    check_samples(run(), ours)
    assert len(served.asked) == sum(len(ours.samples(split)) for split in SPLITS) + len(faults)


@pytest.mark.slow
def test_a_reply_that_does_not_come_is_asked_for_again(run: Capturing, served: Served, ours: Capture) -> None:
    served.faults.append("hang")
    check_samples(run(timeout_seconds=3.0), ours)
    assert len(served.asked) == sum(len(ours.samples(split)) for split in SPLITS) + 1


@pytest.mark.slow
def test_a_server_that_stays_broken_ends_it_and_the_same_command_goes_on(
    run: Capturing, served: Served, ours: Capture, tmp_path: Path
) -> None:
    served.faults.extend([""] * 12 + ["500"] * 50)
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:\d+: status 500 \(no luck\) \(3 tries\); the same command"):
        run(retries=2)
    kept = len(list((tmp_path / "capture" / "shards").glob("*.json")))
    assert kept >= 1
    served.faults.clear()
    served.asked.clear()
    check_samples(run(), ours)
    assert len(served.asked) <= sum(len(ours.samples(split)) for split in SPLITS) - kept


def test_a_server_that_is_gone_is_said(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_json, "FIRST_WAIT_SECONDS", 0.01)
    settings = SETTINGS.model_copy(update={"backend": VllmBackend(kind="vllm", url="http://127.0.0.1:9", retries=1)})
    with pytest.raises(
        EngineError, match=r"capture\.backend\.url: 127\.0\.0\.1:9: no reply \(connection refused\) \(2 tries\)"
    ):
        capture_conversations(target, MIX, settings, SCORED, tmp_path / "capture")


def test_a_hanging_server_does_not_keep_an_interrupted_capture(run: Capturing, served: Served) -> None:
    served.hang_seconds = 1000.0  # beyond this test's time limit
    served.faults.extend(["404"] + ["hang"] * 3)
    with pytest.raises(InputError, match="status 404"):
        run()


@pytest.mark.parametrize(
    ("change", "backend", "said"),
    [
        ({"model": "other"}, {"model": "tiny"}, "serves other, not 'tiny'"),
        (
            {"context": 20},
            {},
            r"its context is 20 tokens, the longest conversation may take \d+; start it with --max-m",
        ),
        ({"wrong_tokens": True}, {}, "tiny has another tokenizer than the target"),
        ({"mode": "processed_logprobs"}, {}, "not raw ones; set --logprobs-mode raw_logprobs"),
        ({"mode": "raw_logits"}, {}, "not raw ones; set --logprobs-mode raw_logprobs"),
        (
            {"max_logprobs": 5},
            {"signals": "engine"},
            r"greater than max allowed.*it must take 8 log-probs \(--max-logp",
        ),
        ({"key": "secret"}, {}, r"wants a key \(status 401\); see api_key_env"),
        ({}, {"api_key_env": "NOT_SET_ANYWHERE"}, "variable NOT_SET_ANYWHERE is not set"),
    ],
)
def test_a_server_that_does_not_fit_is_refused_before_anything_is_asked(
    run: Capturing, served: Served, tmp_path: Path, change: dict[str, Any], backend: dict[str, Any], said: str
) -> None:
    for name, value in change.items():
        setattr(served, name, value)
    with pytest.raises(InputError, match=said):
        run(**backend)
    assert not served.asked


@pytest.mark.slow
def test_the_key_is_sent_and_kept_nowhere(
    run: Capturing, served: Served, ours: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.key, served.tokenizes = "s3cret-key", False
    monkeypatch.setenv("SOME_KEY", "s3cret-key")
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login mallory password other")
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    found = run(api_key_env="SOME_KEY")
    check_samples(found, ours)
    assert found.manifest["engines"][0]["tokenizer_compared"] is False
    assert not any(b"s3cret-key" in path.read_bytes() for path in (tmp_path / "capture").rglob("*") if path.is_file())


def test_another_model_behind_the_name_is_found_out(
    run: Capturing, served: Served, tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Target.load(target.settings)
    with torch.no_grad():
        for weight in other.model.parameters():
            weight.mul_(1.3)
    served.target = other
    with pytest.raises(StaleInputError, match=r"are \S+ away from the target's on average, must be within 0\.25"):
        run()
    assert not list((tmp_path / "capture" / "shards").glob("*.json"))


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        (SamplingSettings(temperature=0.005), "t0.005: vLLM takes no temperature between 0 and 0.01"),
        (SamplingSettings(temperature=0.5, min_p=0.1, top_p=0.9), "t0.5-p0.9-m0.1: vLLM applies min_p before top_p"),
    ],
)
def test_sampling_that_vllm_does_otherwise_is_refused_by_name(
    run: Capturing, served: Served, sampling: SamplingSettings, said: str
) -> None:
    with pytest.raises(InputError, match=said):
        run(mix=[MIX[0].model_copy(update={"sampling": sampling}), *MIX[1:]])
    assert not served.asked


@pytest.mark.parametrize("top_k", [0, 2])
@pytest.mark.parametrize(
    ("tokens", "other", "said"),
    [
        ([5, 6], {9: math.nan}, "not finite"),
        ([5, 6], {5: math.nan}, "not finite"),
        ([5, 6], {5: -1e300}, "not finite"),
        ([5, 6], {9: 0.5}, "not raw ones"),
        ([5, 6], {2**31: -1.5}, "token id 2147483648, the vocabulary has 100"),
        ([5, 6], {-1: -1.5}, "token id -1"),
        ([5, 6], {100: -1.5}, "token id 100"),
        ([5.0, 6], {9: -2.0}, "token id 5.0"),
        ([5, 100], {9: -2.0}, "token id 100"),
    ],
)
def test_a_reply_with_other_ids_or_log_probs_than_a_model_has_is_refused(
    top_k: int, tokens: list[int], other: dict[int, float], said: str
) -> None:
    queued = QueuedRequest("turn", Request([1, 2], SamplingSettings(), 0, 2))
    wanted = LogprobRequest(top_k, vocab_size=100, dtype=torch.float16)
    good = [{token: -1.0, 9: -2.0, 10: -3.0} for token in tokens]
    with pytest.raises((UnusableError, InputError), match=said):
        checked_answer(queued, tokens, "length", [good[0] | other, good[1]], wanted)
    logp = [{token: -1.0, 9: -2.0, 10: -math.inf} for token in (5, 6)]
    assert checked_answer(queued, [5, 6], "length", logp, wanted).tokens == [5, 6]


_CHILD = """
import json, sys
from pathlib import Path
from draftforge.data.capture.capture import capture_conversations
from draftforge.data.settings import CaptureSettings
from draftforge.data.conversation import Conversation
from draftforge.specdec.sampling_settings import SamplingSettings
from draftforge.specdec.target_settings import TargetSettings
from draftforge.specdec.targets import Target

job = json.load(sys.stdin)
capture_conversations(
    Target.load(TargetSettings(model=job["target"])),
    [Conversation.model_validate(one) for one in job["mix"]],
    CaptureSettings.model_validate(job["settings"]),
    [SamplingSettings.model_validate(one) for one in job["scored"]],
    Path(job["folder"]),
)
"""


@pytest.mark.slow
def test_an_interrupted_process_ends_and_the_capture_goes_on(
    run: Capturing, served: Served, ours: Capture, target: Target, tmp_path: Path
) -> None:
    """While requests are in flight: what hangs at the server must not keep the process."""
    folder = tmp_path / "capture"
    settings = SETTINGS.model_copy(update={"backend": VllmBackend(kind="vllm", url=served.url)})
    job = {
        "target": target.settings.model,
        "mix": [one.model_dump() for one in MIX],
        "settings": settings.model_dump(mode="json"),
        "scored": [one.model_dump() for one in SCORED],
        "folder": str(folder),
    }
    served.hang_seconds = 120.0
    served.faults.extend([""] * 8 + ["hang"] * 100)
    child = subprocess.Popen([sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert child.stdin is not None
    child.stdin.write(json.dumps(job).encode())
    child.stdin.close()
    for _ in range(1200):
        if list((folder / "shards").glob("*.json")) and served.now:
            break
        time.sleep(0.05)
    assert child.poll() is None
    child.send_signal(signal.SIGINT)
    assert child.wait(timeout=60) != 0  # long before the server lets go
    kept = len(list((folder / "shards").glob("*.json")))
    served.faults.clear()
    served.asked.clear()
    check_samples(run(), ours)
    assert kept >= 1 and len(served.asked) < sum(len(ours.samples(split)) for split in SPLITS)
