"""The same losses and weights however a step is spread: over micro-batches, over ranks, over ZeRO stages."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftforge.data.store import Capture
from draftforge.specdec.settings import TargetSettings
from draftforge.specdec.targets import Target
from draftforge.train import loop
from draftforge.train.settings import DFlashSettings, Eagle3Settings, LoraSettings, Settings, SmallSettings
from draftforge.train.stopping import TrainingStoppedError

STEPS = 6
COMMON: dict[str, Any] = {
    "steps": STEPS,
    "warmup_steps": 2,
    "tokens_per_step": 240,
    "learning_rate": 1e-3,
    "precision": "float32",
    "clip_norm": 0.5,
}
SETTINGS: dict[str, Settings] = {
    "small": SmallSettings(layers=2, **COMMON),
    "lora": SmallSettings(layers=2, lora=LoraSettings(rank=2), **COMMON),
    "eagle3": Eagle3Settings(draft_vocabulary=200, draft_tokens=3, **COMMON),
    "dflash": DFlashSettings(layers=2, draft_tokens=3, **COMMON),
    "muon": Eagle3Settings(draft_vocabulary=200, draft_tokens=3, optimizer="muon", **COMMON),
}
MATRIX = [(name, stage) for name in SETTINGS for stage in range(4) if name != "muon" or stage == 0]


class Figures:
    """A sink that keeps losses and gradient norms."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    def log(self, step: int, values: dict[str, float]) -> None:
        self.losses.append(values["loss"])
        self.norms.append(values["gradient_norm"])


def run_all(capture: str, target: str, jobs: list[dict[str, Any]]) -> list[dict[str, list[float]]]:
    """Trainings, one after the other; what one rank of several does (see run_rank.py).

    A job with `stop` gets a SIGTERM's worth of a request after that step, on its last rank.
    """
    torch.set_num_threads(1)
    opened = Capture.open(Path(capture), verify=False)
    original = loop.Run.anyone_asked
    found = []
    for job in jobs:
        stop = job.get("stop", STEPS)

        def asked(self: loop.Run, stop: int = stop) -> bool:
            self.stop.asked = self.state.step == stop < STEPS and self.ranks.rank == self.ranks.world_size - 1
            return original(self)

        loop.Run.anyone_asked = asked  # type: ignore[method-assign]
        sink, settings = Figures(), SETTINGS[job["name"]].model_copy(update=job["update"])
        try:
            loop.train(settings, 0, opened, Path(job["folder"]), lambda: load(target), sink)
            assert stop == STEPS
        except TrainingStoppedError:
            assert stop < STEPS
        found.append({"losses": sink.losses, "norms": sink.norms})
    loop.Run.anyone_asked = original  # type: ignore[method-assign]
    return found


def load(target: str) -> Target:
    return Target.load(TargetSettings(model=target, device="cpu"))


def job(name: str, folder: Path, stop: int = STEPS, **update: Any) -> dict[str, Any]:
    return {"name": name, "folder": str(folder), "stop": stop, "update": update}


@pytest.fixture(scope="module")
def places(tiny_capture_folder: Path, tiny_target_folder: Path) -> tuple[str, str]:
    return str(tiny_capture_folder), str(tiny_target_folder)


@pytest.fixture(scope="module")
def reference(places: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Plain torch, one process, one micro-batch."""
    folder = tmp_path_factory.mktemp("reference")
    found = run_all(*places, [job(name, folder / name, engine="torch") for name in SETTINGS])
    return {name: (figures, weights(folder / name)) for name, figures in zip(SETTINGS, found)}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"step-{STEPS:06d}" / "model.safetensors")


def assert_same_training(losses: list[float], norms: list[float], folder: Path, reference: Any) -> None:
    figures, final = reference
    exact = "muon" not in folder.name  # its orthogonalisation runs in bfloat16, which lifts rounding to a thousandth
    assert losses == pytest.approx(figures["losses"], rel=1e-4 if exact else 2e-3, abs=1e-5)
    assert norms == pytest.approx(figures["norms"], rel=1e-3 if exact else 2e-2)
    for name, tensor in weights(folder).items():
        torch.testing.assert_close(tensor, final[name], atol=1e-4 if exact else 4e-3, rtol=1e-3)


@pytest.mark.parametrize("accumulation", [4, 16])
@pytest.mark.parametrize("name", list(SETTINGS))
def test_accumulation_changes_nothing(
    name: str, accumulation: int, reference: Any, places: tuple[str, str], tmp_path: Path
) -> None:
    """(batch 8 x 1) = (batch 2 x 4); cut into 16, some micro-batches hold nothing at all."""
    (found,) = run_all(*places, [job(name, tmp_path / name, engine="torch", accumulation=accumulation)])
    assert_same_training(found["losses"], found["norms"], tmp_path / name, reference[name])


@pytest.fixture(scope="module")
def spread_out(places: tuple[str, str], run_distributed: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Every distributed training of this file, in three launches, because a launch takes long.

    Returns, by a name of its own: losses and norms in order, and the folder.
    """
    folder = tmp_path_factory.mktemp("spread")
    launches = [
        (
            2,
            [
                *(job(n, folder / f"{n}-{s}", zero_stage=s, accumulation=2, engine="auto") for n, s in MATRIX),
                job("small", folder / "2x1 to 1x0", stop=3, zero_stage=1),
                job("small", folder / "2x3 to 2x2", stop=3, zero_stage=3),
            ],
        ),
        (
            1,
            [
                job("small", folder / "2x1 to 1x0", engine="deepspeed"),
                job("small", folder / "1x0 to 2x3", stop=3, engine="deepspeed"),
            ],
        ),
        (
            2,
            [
                job("small", folder / "1x0 to 2x3", zero_stage=3),
                job("small", folder / "2x3 to 2x2", zero_stage=2),
            ],
        ),
    ]
    found: dict[str, Any] = {}
    for world_size, jobs in launches:
        answers = run_distributed(__file__, "run_all", world_size, [*places, jobs], timeout_seconds=250)
        for one, figures in zip(jobs, answers[0]):
            losses, norms, _ = found.get(Path(one["folder"]).name, ([], [], None))
            found[Path(one["folder"]).name] = (losses + figures["losses"], norms + figures["norms"], one["folder"])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stage"), MATRIX)
def test_two_ranks_equal_one(name: str, stage: int, reference: Any, spread_out: Any) -> None:
    losses, norms, folder = spread_out[f"{name}-{stage}"]
    assert_same_training(losses, norms, Path(folder), reference[name])


@pytest.mark.slow
@pytest.mark.parametrize("change", ["2x1 to 1x0", "1x0 to 2x3", "2x3 to 2x2"])
def test_a_run_goes_on_with_other_ranks_and_another_zero_stage(change: str, reference: Any, spread_out: Any) -> None:
    """ "RANKSxSTAGE": stopped after step 3 with the first, gone on with the second."""
    losses, norms, folder = spread_out[change]
    assert_same_training(losses, norms, Path(folder), reference["small"])
