"""Recorded answers: kept alone, given back where the same is asked, their signals made again by one pass."""

from pathlib import Path

import pytest
from captures import assert_same_answers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import draftforge.data.capture.capture as capturing
import draftforge.data.capture.scheduler as answering
from draftforge import fingerprint, storage
from draftforge.data.capture.reuse import INDEX, ReusableAnswers, answers_digest, save_answers
from draftforge.data.conversation import SPLITS, Conversation, Message
from draftforge.data.settings import CaptureSettings
from draftforge.data.store import Capture
from draftforge.errors import CorruptDataError, StaleInputError
from draftforge.specdec.sampling_settings import SamplingSettings
from draftforge.specdec.targets import Target

SETTINGS = CaptureSettings(max_new_tokens=12, batch_size=4, top_k=8, tail_samples=4, store_dtype="float32")
SCORED = [SamplingSettings(), SamplingSettings(temperature=0.7, top_p=0.9)]
MIX = [
    Conversation(
        id=name,
        domain="d",
        messages=[Message(role="user", content=text) for text in texts],
        turn_by_turn=True,
        cluster=name,
        split=SPLITS[number % 3],
        sampling=SamplingSettings(temperature=1.0) if number % 2 else None,
        asked_elsewhere=[0] if name in ("held", "talk") else [],
    )
    for number, (name, texts) in enumerate(
        {
            "plain": ["How do I reset my password?"],
            "seen": ["The order has shipped.", "When?"],
            "held": ["What is a city?", "Is it large?"],
            "warm": ["Write a function."],
            "other": ["Hello"],
            "last": ["Where is my order?"],
            "talk": ["What is the capital?", "And of the other country?", "Thanks"],
        }.items()
    )
]


@pytest.fixture
def drawn(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Capture:
    monkeypatch.setattr(capturing, "load_mix", lambda folder: MIX)
    capturing.capture(target, Path("mix"), SETTINGS, SCORED, tmp_path / "drawn")
    return Capture.open(tmp_path / "drawn")


def test_a_capture_from_recorded_answers_is_the_same(
    drawn: Capture, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns that wait for others included, and those only waited for. Signals to rounding, tail draws to the id.

    Nothing is decoded."""
    tokens = save_answers(drawn, tmp_path / "answers")
    assert tokens == drawn.manifest["tokens"]
    monkeypatch.setattr(answering.PlainDecoder, "submit", None)
    settings = SETTINGS.model_copy(update={"answers": tmp_path / "answers"})
    capturing.capture(target, Path("mix"), settings, SCORED, tmp_path / "again")
    again = Capture.open(tmp_path / "again")
    assert_same_answers(again, drawn, logp=1e-4, signals=1e-4)


@pytest.mark.slow
def test_what_is_not_recorded_is_drawn(drawn: Capture, target: Target, tmp_path: Path) -> None:
    """A smaller limit cuts an answer; a larger one needs those drawn anew that the old limit had cut."""
    save_answers(drawn, tmp_path / "answers")
    for limit in (5, 20):
        settings = SETTINGS.model_copy(update={"answers": tmp_path / "answers", "max_new_tokens": limit})
        plain = settings.model_copy(update={"answers": None})
        capturing.capture(target, Path("mix"), settings, SCORED, tmp_path / f"recorded-{limit}")
        capturing.capture(target, Path("mix"), plain, SCORED, tmp_path / f"plain-{limit}")
        ours, theirs = Capture.open(tmp_path / f"recorded-{limit}"), Capture.open(tmp_path / f"plain-{limit}")
        for split in SPLITS:
            assert ours.samples(split) == theirs.samples(split)


def test_refusals(drawn: Capture, target: Target, tmp_path: Path) -> None:
    folder = tmp_path / "answers"
    save_answers(drawn, folder)
    with pytest.raises(StaleInputError, match=r"capture\.answers: .*: of target"):
        ReusableAnswers(folder, "0" * 64, target.vocab_size)
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(CorruptDataError, match=r"sha256 is not the one in answers\.json"):
        ReusableAnswers(folder, target.fingerprint, target.vocab_size)
    storage.write_json(folder / INDEX, {"format": 7})
    with pytest.raises(CorruptDataError, match="not an index of recorded answers"):
        ReusableAnswers(folder, target.fingerprint, target.vocab_size)


def test_ids_that_are_none_of_the_targets_are_refused(drawn: Capture, target: Target, tmp_path: Path) -> None:
    """The folder may be another's: an id without an embedding would end the pass over the answers by a traceback."""
    folder = tmp_path / "answers"
    save_answers(drawn, folder)
    (file,), index = folder.glob("*.safetensors"), storage.read_object(folder / INDEX)
    with safe_open(file, "pt") as stored:
        records = stored.metadata()["records"]
    ids, offsets = (load_file(file)[name].long() for name in ("ids", "offsets"))
    odd: list[tuple[dict[str, Tensor], str]] = [
        ({"ids": ids + target.vocab_size}, records),
        *(({"ids": changed}, records) for changed in (-ids - 1, ids[:, None], ids.float(), ids > 0, ids[0], ids[:-1])),
        *(({"offsets": changed}, records) for changed in (offsets.flip(0), -offsets, offsets + 1, offsets[1:])),
        *(({}, text) for text in ("[" * 200, "5", records.replace("stop", "x").replace("length", "x"))),
    ]
    for changes, text in odd:
        tensors = {"ids": ids, "offsets": offsets} | changes
        save_file({name: one.contiguous() for name, one in tensors.items()}, file, {"records": text})
        storage.write_json(folder / INDEX, index | {"files": {file.name: fingerprint.of_file(file)}})
        with pytest.raises(CorruptDataError, match=rf"{file.name}: unreadable"):
            ReusableAnswers(folder, target.fingerprint, target.vocab_size)
    (folder / INDEX).write_text('{"target": NaN}')
    with pytest.raises(CorruptDataError, match="has no JSON"):
        answers_digest(folder)
