"""A capture stopped anywhere goes on: only shards in flight are lost, none is done twice, and the result is the same.

The stand-in for the decoder answers shard by shard, so in flight are one that is written and one that is answered.
"""

import json
import os
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest
import torch
from forked import as_command

import draftforge.data.capture.capture as capturing
import draftforge.data.capture.scheduler as answering
from draftforge import storage
from draftforge.data.conversation import Conversation, Message
from draftforge.data.settings import CaptureSettings
from draftforge.data.store import Capture
from draftforge.data.template_process import TemplateProcess, _Reply
from draftforge.errors import CorruptDataError, DiskFullError
from draftforge.specdec.continuous_batching import DecodedAnswer, QueuedRequest
from draftforge.specdec.requests import Request
from draftforge.specdec.sampling_settings import SamplingSettings

VOCAB = 50
SETTINGS = CaptureSettings(max_new_tokens=6, batch_size=4, top_k=4, tail_samples=2, shard_samples=5)
SCORED = [SamplingSettings(), SamplingSettings(temperature=0.8)]


class StubTokenizer:
    """One id a letter."""

    chat_template, name_or_path, all_special_ids = "stub", "stub", [0]

    def get_chat_template(self, chat_template: None, tools: None) -> str:
        return self.chat_template

    def apply_chat_template(self, messages: list[dict[str, Any]], **arguments: Any) -> str:
        return "".join(message["role"][0] + message["content"] for message in messages) + "a"

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % VOCAB for letter in text]}

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(97 + token % 26) for token in ids)


TARGET: Any = SimpleNamespace(
    tokenizer=StubTokenizer(),
    collective=False,
    prompts_in_doubt=None,
    sampling_defaults={},
    fingerprint="a" * 64,
    tokenizer_digest="b" * 64,
    stop_ids=frozenset([1]),
    vocab_size=VOCAB,
    check_ids=lambda ids: None,
    max_positions=64,
    dtype=torch.float32,
)


def make_mix() -> list[Conversation]:
    """12 conversations, every third a dialogue of two turns, in all splits."""
    return [
        Conversation(
            id=f"c{i}",
            domain=f"d{i % 2}",
            messages=[Message(role="user", content="hello" * (1 + i % 4))] * (2 if i % 3 == 0 else 1),
            turn_by_turn=True,
            cluster=f"c{i}",
            split=("train", "train", "selection", "holdout")[i % 4],
        )
        for i in range(12)
    ]


def unread(*_: Any, **__: Any) -> _Reply:
    """In the place of a process that reads the stub's template: each that captures would start one."""
    return _Reply(0.0, [])


def fake_decoder(heard: Callable[[int], Any]) -> Any:
    """A stand-in for the decoder whose answers follow from each request's seed, one a step; `heard(seed)` is told of
    each."""

    class Decoder:
        def __init__(
            self, target: Any, slots: int, capacity: int, budget: int, listen: Any, advance: Any, wanted: int
        ) -> None:
            self.waiting: list[QueuedRequest] = []
            self.listen, self.advance = listen, advance

        @property
        def idle(self) -> bool:
            return not self.waiting

        wants_more = idle

        def fits(self, request: Request) -> bool:
            return True

        def submit(self, requests: Sequence[QueuedRequest]) -> None:
            self.waiting += requests

        def step(self) -> list[DecodedAnswer]:
            name, request, listener_seed, _ = self.waiting.pop(0)
            rng = torch.Generator().manual_seed(request.seed % 2**40)
            tokens: list[int] = []
            kept: list[dict[str, torch.Tensor]] = []
            for emitted in range(1 + request.seed % request.max_new_tokens):
                logits = torch.randn(1, VOCAB, generator=rng) * 3
                tokens.append(int(logits.argmax()))
                kept.append(
                    self.listen(
                        logits, torch.tensor(tokens[-1:]), torch.tensor([listener_seed]), torch.tensor([emitted])
                    )
                )
                self.advance(1)
            heard(request.seed)
            columns = {key: torch.cat([one[key] for one in kept]) for key in kept[0]}
            return [DecodedAnswer(name, tokens, "length", columns)]

    return Decoder


def run(folder: Path) -> None:
    capturing.capture(TARGET, Path("mix"), SETTINGS, SCORED, folder)


def files(folder: Path) -> dict[str, bytes]:
    """The shards and all that the manifest says of them except times."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for record in [manifest, *manifest["shards"]]:
        record.pop("seconds")
    manifest.pop("tokens_per_second")
    shards = {path.name: path.read_bytes() for path in (folder / "shards").glob("*.safetensors")}
    return {**shards, "manifest": json.dumps(manifest).encode()}


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Seeds of the answers drawn, in order; the stubs are in place."""
    seeds: list[int] = []
    monkeypatch.setattr(capturing, "load_mix", lambda folder: make_mix())
    monkeypatch.setattr(answering, "PlainDecoder", fake_decoder(seeds.append))
    return seeds


class Killed(BaseException):
    """Nothing may catch it."""


def stop_at_write(monkeypatch: pytest.MonkeyPatch, number: int, after: bool) -> None:
    """Stop just before or just after the file write of this number."""
    count = iter(range(1000))
    write = storage.write_bytes

    def fail(path: Path, data: bytes) -> None:
        now = next(count) == number
        if now and not after:
            raise Killed
        write(path, data)
        if now:
            raise Killed

    monkeypatch.setattr(storage, "write_bytes", fail)


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
def test_stopped_at_any_write_it_resumes_to_the_same_files(
    tmp_path: Path, heard: list[int], monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    run(tmp_path / "whole")
    expected, all_seeds = files(tmp_path / "whole"), set(heard)
    assert len(heard) == len(all_seeds)
    writes = 2 * len(list((tmp_path / "whole" / "shards").glob("*.safetensors"))) + 2
    largest = max(record["samples"] for record in Capture.open(tmp_path / "whole").manifest["shards"])
    for number in range(writes):
        folder = tmp_path / f"stopped-{number}-{after}"
        heard.clear()
        with monkeypatch.context() as patch, pytest.raises(Killed):
            stop_at_write(patch, number, after)
            run(folder)
        complete = (folder / "manifest.json").exists()
        assert complete == (after and number == writes - 1)
        run(folder)
        assert files(folder) == expected
        assert set(heard) == all_seeds
        assert len(heard) - len(all_seeds) <= 2 * largest


def test_stopped_inside_a_shard_nothing_of_it_counts(
    tmp_path: Path, heard: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "whole")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        seen: list[int] = []

        def stop(seed: int) -> None:
            seen.append(seed)
            if len(seen) == 8:
                raise Killed

        patch.setattr(answering, "PlainDecoder", fake_decoder(stop))
        run(tmp_path / "stopped")
    assert len(list((tmp_path / "stopped" / "shards").glob("*.safetensors"))) == 1
    run(tmp_path / "stopped")
    assert files(tmp_path / "stopped") == files(tmp_path / "whole")


def test_a_finished_capture_is_left_alone(tmp_path: Path, heard: list[int]) -> None:
    run(tmp_path / "capture")
    heard.clear()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")}
    run(tmp_path / "capture")
    assert not heard
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")} == before


def test_a_damaged_shard_is_named_and_made_anew_once_deleted(tmp_path: Path, heard: list[int]) -> None:
    run(tmp_path / "capture")
    expected = files(tmp_path / "capture")
    shard = next((tmp_path / "capture" / "shards").glob("00001*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    (tmp_path / "capture" / "manifest.json").unlink()
    with pytest.raises(CorruptDataError, match=shard.name):
        run(tmp_path / "capture")
    shard.unlink()
    heard.clear()
    run(tmp_path / "capture")
    assert len(heard) <= SETTINGS.shard_samples
    assert files(tmp_path / "capture") == expected


def test_a_full_disk_leaves_no_part_and_resumes(
    tmp_path: Path, heard: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "whole")
    with monkeypatch.context() as patch, pytest.raises(DiskFullError, match="shards"):
        calls = iter(range(1000))

        def fsync(descriptor: int) -> None:
            if next(calls) == 3:
                raise OSError(28, "No space left on device")

        patch.setattr(os, "fsync", fsync)
        run(tmp_path / "full")
    assert not list((tmp_path / "full").rglob("*.tmp"))
    run(tmp_path / "full")
    assert files(tmp_path / "full") == files(tmp_path / "whole")


def test_too_little_space_is_said_before_anything_is_written(
    tmp_path: Path, heard: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(DiskFullError, match="needed"):
        run(tmp_path / "capture")
    assert not heard
    assert not (tmp_path / "capture").exists()


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path, heard: list[int]) -> None:
    run(tmp_path / "whole")
    begun = time.process_time()
    run(tmp_path / "timed")
    whole, draw, kills = time.process_time() - begun, random.Random(0), 0
    while True:
        seconds = draw.uniform(0, whole * (1 + kills / 4) / 8)  # a shard may take longer: patience grows
        call = [__file__, "_mortal", str(tmp_path / "killed"), str(tmp_path / "log"), seconds]
        ended = forked.run(as_command, call, tmp_path / "said")
        if ended.code == 0:
            break
        assert ended.code == -signal.SIGPROF, ended.said
        kills += 1
    assert kills >= 3
    assert files(tmp_path / "killed") == files(tmp_path / "whole")
    assert not list((tmp_path / "killed").rglob("*.tmp"))
    owners = {
        planned.seed: shard.name
        for shard in capturing.plan_shards(make_mix(), SETTINGS, SCORED)
        for planned in shard.answers
    }
    drawn: dict[str, Counter[str]] = defaultdict(Counter)  # process -> shard -> answers
    for line in (tmp_path / "log").read_text().splitlines():
        process, answer_seed = line.split()
        drawn[process][owners[int(answer_seed)]] += 1
    sizes = Counter(owners.values())
    finishers: Counter[str] = Counter()
    for process, shards in drawn.items():
        for shard in list(shards)[:-2]:  # only the last two shards of a process may have been lost
            assert shards[shard] == sizes[shard], (process, shard)
            finishers[shard] += 1
    assert all(count == 1 for count in finishers.values())


def _mortal(folder: str, log: str, seconds: float) -> None:
    """Capture, and be killed by the system after so much processor time."""
    torch.set_num_threads(1)
    capturing.load_mix = lambda folder: make_mix()
    TemplateProcess.ask = unread  # type: ignore[method-assign]
    with Path(log).open("ab", buffering=0) as stream:
        heard: Callable[[int], Any] = lambda answer: stream.write(f"{os.getpid()} {answer}\n".encode())  # noqa: E731
        answering.PlainDecoder = fake_decoder(heard)  # type: ignore[misc]
        signal.setitimer(signal.ITIMER_PROF, seconds)
        run(Path(folder))
