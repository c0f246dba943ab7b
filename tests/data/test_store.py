"""The store gives back what was written, and names the file that is damaged."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftforge import fingerprint
from draftforge.data.capture.manifest import is_captured
from draftforge.data.store import Capture, Sample, read_manifest, read_record, write_shard
from draftforge.data.teacher_logprobs import Signals, teacher_signals
from draftforge.errors import CorruptDataError, InputError, MissingFileError, StaleInputError
from draftforge.specdec.sampling_settings import SamplingSettings

VOCAB = 40


def make_sample(number: int, split: Any, answer: int) -> Sample:
    return Sample(
        id=f"c{number}/0/t0.5",
        conversation=f"c{number}",
        turn=0,
        cluster="k",
        domain="d",
        split=split,
        sampling=SamplingSettings(temperature=0.5),
        max_new_tokens=30,
        finish="stop",
        prompt_ids=[number, 2, 3],
        answer_ids=list(range(answer)),
    )


def make_signals(tokens: int, seed: int = 0) -> Signals:
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, VOCAB, generator=rng)
    return teacher_signals(logits, torch.zeros(tokens), torch.rand(tokens, 3, dtype=torch.float64, generator=rng), 5)


def record(folder: Path, name: str, samples: list[Sample], columns: dict[str, torch.Tensor]) -> dict[str, Any]:
    path = write_shard(folder, name, samples, columns)
    digest = fingerprint.of_file(path)
    return {"name": name, "split": samples[0].split, "bytes": path.stat().st_size, "sha256": digest}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A capture of two train shards and one holdout shard."""
    first = [make_sample(0, "train", 4), make_sample(1, "train", 7)]
    second = [make_sample(2, "train", 3)]
    held = [make_sample(3, "holdout", 5)]
    shards = [
        record(tmp_path, "00000-train", first, make_signals(11)._asdict()),
        record(tmp_path, "00001-train", second, make_signals(3, seed=1)._asdict()),
        record(tmp_path, "00002-holdout", held, {"logp_n": torch.arange(5.0)}),
    ]
    manifest = {"format": 1, "target": "a" * 64, "tokenizer": "b" * 64, "vocab_size": VOCAB, "stop_ids": [1]}
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "special_ids": [0, 1], "shards": shards}))
    return tmp_path


def test_reads_back_samples_in_order(folder: Path) -> None:
    capture = Capture.open(folder)
    expected = [make_sample(0, "train", 4), make_sample(1, "train", 7), make_sample(2, "train", 3)]
    assert capture.samples("train") == expected
    assert capture.samples("holdout") == [make_sample(3, "holdout", 5)]
    assert capture.samples("selection") == []


def test_reads_back_each_samples_own_signals(folder: Path) -> None:
    capture = Capture.open(folder)
    whole = make_signals(11)
    samples = capture.samples("train")
    for sample, start, end in zip(samples, (0, 4), (4, 11)):
        assert all(torch.equal(part, all_[start:end]) for part, all_ in zip(capture.signals(sample), whole))
    assert all(torch.equal(a, b) for a, b in zip(capture.signals(samples[2]), make_signals(3, seed=1), strict=True))
    (held,) = Capture.open(folder).samples("holdout")
    assert Capture.open(folder).logp(held).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(InputError, match="no signals"):
        capture.signals(held)


def test_half_precision_comes_back_as_fp32(tmp_path: Path) -> None:
    columns = {
        name: value.half() if value.is_floating_point() else value for name, value in make_signals(4)._asdict().items()
    }
    shard = record(tmp_path, "00000-train", [make_sample(0, "train", 4)], columns)
    (tmp_path / "manifest.json").write_text(json.dumps({"format": 1, "shards": [shard]}))
    capture = Capture.open(tmp_path)
    signals = capture.signals(capture.samples("train")[0])
    assert signals.topk_logp_nk.dtype == torch.float32
    torch.testing.assert_close(signals.topk_logp_nk, make_signals(4).topk_logp_nk, atol=5e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["00000-train", "00002-holdout"])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "emptied", "missing"])
def test_a_damaged_shard_is_named(folder: Path, name: str, damage: str) -> None:
    path = folder / "shards" / f"{name}.safetensors"
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
        with pytest.raises(MissingFileError, match=name):
            Capture.open(folder)
        return
    flipped = content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]
    path.write_bytes({"truncated": content[:-10], "flipped": flipped, "emptied": b""}[damage])
    with pytest.raises(CorruptDataError, match=name):
        Capture.open(folder)


def test_without_verification_an_unreadable_shard_is_named_when_it_is_read(folder: Path) -> None:
    path = folder / "shards" / "00001-train.safetensors"
    path.write_bytes(bytes(len(path.read_bytes())))
    with pytest.raises(CorruptDataError, match="00001-train"):
        Capture.open(folder, verify=False).samples("train")


def test_an_unfinished_or_foreign_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="not a capture"):
        Capture.open(tmp_path / "nothing")
    shutil.copytree(folder, tmp_path / "part")
    (tmp_path / "part" / "manifest.json").unlink()
    (tmp_path / "part" / "header.json").write_text("{}")
    with pytest.raises(MissingFileError, match="not finished"):
        Capture.open(tmp_path / "part")
    (folder / "manifest.json").write_text('{"format": 99}')
    with pytest.raises(CorruptDataError, match=r"manifest\.json"):
        Capture.open(folder)


def test_a_manifest_cannot_point_outside_its_folder(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["shards"][0]["name"] = "../../elsewhere"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="must stay inside"):
        Capture.open(folder)


def test_another_target_is_refused(folder: Path) -> None:
    capture = Capture.open(folder)
    same: Any = SimpleNamespace(fingerprint="a" * 64)
    other: Any = SimpleNamespace(fingerprint="c" * 64)
    capture.check_target(same)
    with pytest.raises(StaleInputError, match=r"aaaaaaaaaaaa.*cccccccccccc"):
        capture.check_target(other)


def test_signals_of_another_number_of_tokens_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="00000-train"):
        write_shard(tmp_path, "00000-train", [make_sample(0, "train", 4)], make_signals(3)._asdict())
    assert not (tmp_path / "shards").exists()


@pytest.mark.parametrize(
    "odd",
    [
        *(
            {"vocab_size": "x"},
            {"stop_ids": None},
            {"special_ids": 3},
            {"settings": []},
            {"target": None},
            {"shards": {}},
        ),
        *(
            {"budget": []},
            {"budget": {"ended_by": "tokens", "limits": {}}},
            {"format": 1, "shards": [{"sha256": None}]},
        ),
    ],
)
def test_an_odd_manifest_is_named(folder: Path, odd: dict[str, Any]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | odd))
    for read in (Capture.open, read_manifest, lambda place: is_captured(place, None)):
        with pytest.raises(CorruptDataError, match=r"manifest\.json: not a capture manifest of format 1 .*; delete it"):
            read(folder)


@pytest.mark.parametrize(
    "odd",
    [
        *({"tokens": None}, {"seconds": float("nan")}, {"split": [1]}, {"sha256": None}, {"skipped": [1]}),
        *({"domains": {"support": {"tokens": 1}}}, {"domains": {"support": {"samples": [[]]}}}, {"name": "another"}),
    ],
)
def test_an_odd_record_of_a_shard_is_named(folder: Path, odd: dict[str, Any]) -> None:
    counted = {"samples": 1, "tokens": 4, "seconds": 0.5, "skipped": []}
    whole = {"name": "s", "split": "train", "bytes": 1, "sha256": "a" * 64, "domains": {}} | counted
    (folder / "shards" / "s.json").write_text(json.dumps(whole))
    assert read_record(folder, "s") == whole
    (folder / "shards" / "s.json").write_text(json.dumps(whole | odd))
    with pytest.raises(CorruptDataError, match=r"s\.json: not the record of shard s.*; delete it"):
        read_record(folder, "s")
