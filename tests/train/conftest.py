"""A capture of the tiny target, small enough to train on in a second."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import draftforge.data.capture.capture as capturing
from draftforge.data.capture.capture import capture
from draftforge.data.conversation import Conversation, Message
from draftforge.data.settings import CaptureSettings
from draftforge.data.store import Capture
from draftforge.specdec.sampling_settings import SamplingSettings
from draftforge.specdec.target_settings import TargetSettings
from draftforge.specdec.targets import Target

QUESTIONS = [
    "How do I reset my password?",
    "Write a function.",
    "What is the capital?",
    "The order",
    "Open the settings and choose reset, then what is the sum of two numbers in the country?",
    "Where is it?",
    "Is the capital a large city?",
    "When will my order arrive?",
    "Return the sum.",
    "Choose a city.",
    "What numbers?",
    "Monday?",
]


def tiny_mix() -> list[Conversation]:
    return [
        Conversation(
            id=f"c{index}",
            domain="d",
            messages=[Message(role="user", content=text)],
            cluster=f"c{index}",
            split="train" if index < 10 else "selection",
            max_new_tokens=4 + 3 * (index % 4),
            sampling=SamplingSettings(temperature=1.0),
        )
        for index, text in enumerate(QUESTIONS)
    ]


@pytest.fixture(scope="session")
def load_tiny_target(tiny_target_folder: Path) -> Callable[[], Target]:
    return lambda: Target.load(TargetSettings(model=str(tiny_target_folder), device="cpu"))


@pytest.fixture(scope="session")
def tiny_capture_folder(load_tiny_target: Callable[[], Target], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train") / "capture"
    settings = CaptureSettings(batch_size=4, top_k=16, tail_samples=4, store_dtype="float32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capturing, "load_mix", lambda mix: tiny_mix())
        capture(load_tiny_target(), Path("mix"), settings, [SamplingSettings()], folder)
    return folder


@pytest.fixture(scope="session")
def tiny_capture(tiny_capture_folder: Path) -> Capture:
    torch.set_num_threads(1)
    return Capture.open(tiny_capture_folder)


class Recorder:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log(self, step: int, values: dict[str, float]) -> None:
        self.rows.append((step, dict(values)))

    @property
    def losses(self) -> dict[int, float]:
        return {step: values["loss"] for step, values in self.rows if "loss" in values}


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def make_recorder() -> Callable[[], Recorder]:
    return Recorder
