"""The same losses and weights however a step is spread: over micro-batches, over ranks, over ZeRO stages."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftforge.data.store import Capture
from draftforge.errors import TrainingDivergedError
from draftforge.specdec.requests import TargetSettings
from draftforge.specdec.targets import Target
from draftforge.train import loop
from draftforge.train.settings import (
    BackboneSettings,
    DFlashSettings,
    Eagle3Settings,
    EagleSettings,
    LoraSettings,
    MedusaSettings,
    OnPolicySettings,
    Settings,
    SmallSettings,
)
from draftforge.train.stopping import TrainingStoppedError

pytestmark = pytest.mark.timeout(1200)  # what sets a module's launches up counts with its first test

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
    "onpolicy": SmallSettings(layers=2, on_policy=OnPolicySettings(), row_tokens=120, **COMMON),
    "eagle3": Eagle3Settings(draft_vocabulary=200, draft_tokens=3, **COMMON),
    "eagle": EagleSettings(draft_tokens=2, **COMMON),
    "medusa": MedusaSettings(draft_tokens=3, **COMMON),
    "medusa2": MedusaSettings(draft_tokens=2, backbone=BackboneSettings(start_step=2), **COMMON),
    "dflash": DFlashSettings(layers=2, draft_tokens=3, **COMMON),
    "muon": Eagle3Settings(draft_vocabulary=200, draft_tokens=3, optimizer="muon", **COMMON),
}
STAGES = {"onpolicy": [0, 2], "eagle": [2, 3], "medusa": [2, 3], "medusa2": [0, 2]}
MATRIX = [(name, stage) for name in SETTINGS for stage in STAGES.get(name, range(4))]
UNCUT = [("small", 2), ("muon", 1), ("muon", 3)]
"""Also in one micro-batch a rank."""
OFFLOADED = [("small", 1), ("small", 2), ("small", 3), ("muon", 2), ("muon", 3)]
CHAINS = {name: ({"zero_stage": 2}, {"engine": "torch"}, {"zero_stage": 3}) for name in ("small", "eagle3")}
CHAINS["muon"] = ({"zero_stage": 3}, {"engine": "torch"}, {"zero_stage": 2})
CHAINS["lora"] = ({"zero_stage": 1}, {"engine": "deepspeed"}, {"zero_stage": 2, "offload_optimizer": True})
"""Two steps each: on two ranks, on one, on three, which divide no parameter evenly."""
FOUR = [("small", 2), ("eagle3", 3), ("muon", 1)]
"""On four ranks to the end."""
SHRINKING: dict[str, Any] = {
    name: ({"zero_stage": 3}, {"zero_stage": 1}, {"zero_stage": 2}) for name in ("small", "muon")
}
SHRINKING["eagle3"] = ({"zero_stage": 1}, {"zero_stage": 2}, {"engine": "torch"})
"""Two steps each: on four ranks, on two, on one."""


class Figures:
    """A sink that keeps losses and gradient norms."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    def log(self, step: int, values: dict[str, float]) -> None:
        if "tau" in values:
            return
        self.losses.append(values["loss"])
        self.norms.append(values["gradient_norm"])


def run_all(capture: str, target: str, jobs: list[dict[str, Any]]) -> list[dict[str, list[float]]]:
    """Trainings, one after the other; what one rank of several does (see run_rank.py).

    A job with `stop` gets a SIGTERM's worth of a request after that step, on its last rank.
    """
    torch.set_num_threads(1)
    opened = Capture.open(Path(capture), verify=False)
    original = loop.Trainer.anyone_asked
    found = []
    for job in jobs:
        stop = job.get("stop", STEPS)

        def asked(self: loop.Trainer, stop: int = stop) -> bool:
            self.stop.asked = self.state.step == stop < STEPS and self.ranks.rank == self.ranks.world_size - 1
            return original(self)

        loop.Trainer.anyone_asked = asked  # type: ignore[method-assign]
        sink, settings = Figures(), SETTINGS[job["name"]].model_copy(update=job["update"])
        try:
            scorer = None if "taus" not in job else taught(job["taus"])
            loop.train(settings, 0, opened, Path(job["folder"]), lambda: load(target), sink, scorer)
            assert stop == STEPS
        except TrainingStoppedError:
            assert stop < STEPS
        found.append({"losses": sink.losses, "norms": sink.norms})
    loop.Trainer.anyone_asked = original  # type: ignore[method-assign]
    return found


def taught(taus: list[float]) -> loop.Scorer:
    """A scorer of the first rank's that finds these, one a step."""

    def score(place: Path, step: int) -> dict[str, float]:
        assert os.environ["RANK"] == "0" and (place / "model.safetensors").is_file()
        return {"tau": taus[step - 1], "tau_low": taus[step - 1] - 0.1, "tau_high": taus[step - 1] + 0.1}

    return score


def run_into_infinity(capture: str, target: str, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Trainings whose last rank's gradient is infinite in step 3: what is raised, and how far that step moved them."""
    torch.set_num_threads(1)
    opened = Capture.open(Path(capture), verify=False)
    original = loop.Trainer.one_step
    found: list[dict[str, Any]] = []

    def poisoned(self: loop.Trainer, step: Any, batches: Any) -> dict[str, float]:
        if self.state.step != 2:
            return original(self, step, batches)
        weights, moments = self.engine.weights(), self.engine.moments()
        if self.ranks.rank == self.ranks.world_size - 1:
            for parameter in self.family.trainable().values():
                parameter.register_hook(lambda grad: grad * float("inf"))  # type: ignore[no-untyped-call]
        try:
            return original(self, step, batches)
        finally:
            same = all(torch.equal(x, weights[name]) for name, x in self.engine.weights().items())
            after = self.engine.moments()
            same &= all(torch.equal(after[n][key], x) for n, parts in moments.items() for key, x in parts.items())
            found.append({"same": same, "moments": sum(map(len, moments.values()))})

    loop.Trainer.one_step = poisoned  # type: ignore[method-assign]
    for job in jobs:
        settings = SETTINGS[job["name"]].model_copy(update=job["update"])
        try:
            loop.train(settings, 0, opened, Path(job["folder"]), lambda: load(target), Figures())
        except TrainingDivergedError as error:
            found[-1]["error"] = str(error)
    loop.Trainer.one_step = original  # type: ignore[method-assign]
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
    """Of the draft, and of a target that was trained with it."""
    place = folder / "checkpoints" / f"step-{STEPS:06d}"
    files = place.rglob("model.safetensors")
    return {f"{path.parent.name}/{name}": x for path in files for name, x in load_file(path).items()}


def assert_same_training(losses: list[float], norms: list[float], folder: Path, reference: Any) -> None:
    figures, final = reference
    assert losses == pytest.approx(figures["losses"], rel=1e-4, abs=1e-5)
    assert norms == pytest.approx(figures["norms"], rel=1e-3)
    for name, tensor in weights(folder).items():
        torch.testing.assert_close(tensor, final[name], atol=1e-4, rtol=1e-3)


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
    """The trainings on two ranks, and those that went on on one and on three, in few launches: a launch takes long.

    Returns, by a name of its own: losses and norms in order, and the folder.
    """
    folder = tmp_path_factory.mktemp("spread")
    matrix = [job(n, folder / f"{n}-{s}", zero_stage=s, accumulation=2, engine="auto") for n, s in MATRIX]
    matrix += [job(n, folder / f"{n}-{s} uncut", zero_stage=s) for n, s in UNCUT]
    matrix += [job(n, folder / f"{n}-{s} offloaded", zero_stage=s, offload_optimizer=True) for n, s in OFFLOADED]
    update = {"zero_stage": 3, "score_every": 1, "patience": 2, "keep_best": 1}
    matrix.append(job("small", folder / "stopped", **update) | {"taus": [1.0, 1.5, 1.2, 1.55, 9.0, 9.0]})
    first, second, third = legs_of(CHAINS, folder, "chain")
    return launched(places, run_distributed, [(2, matrix + first), (1, second), (3, third)])


@pytest.fixture(scope="module")
def on_four(places: tuple[str, str], run_distributed: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same of the trainings on four ranks, and of those that went on on two and on one."""
    folder = tmp_path_factory.mktemp("four")
    whole = [job(n, folder / f"{n}-{s} four", zero_stage=s) for n, s in FOUR]
    first, second, third = legs_of(SHRINKING, folder, "shrinking")
    return launched(places, run_distributed, [(4, whole + first), (2, second), (1, third)])


def launched(places: tuple[str, str], run_distributed: Any, launches: list[tuple[int, Any]]) -> dict[str, Any]:
    """Trainings by so many ranks, one launch after another."""
    found: dict[str, Any] = {}
    for world_size, jobs in launches:
        answers = run_distributed(__file__, "run_all", world_size, [*places, jobs], timeout_seconds=400)
        for one, figures in zip(jobs, answers[0]):
            losses, norms, _ = found.get(Path(one["folder"]).name, ([], [], None))
            found[Path(one["folder"]).name] = (losses + figures["losses"], norms + figures["norms"], one["folder"])
    return found


def legs_of(chains: dict[str, Any], folder: Path, word: str) -> list[list[dict[str, Any]]]:
    """Trainings in three parts, each to be done by another number of ranks."""
    return [
        [job(n, folder / f"{n} {word}", stop, **parts[leg]) for n, parts in chains.items()]
        for leg, stop in enumerate((2, 4, STEPS))
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "run",
    [
        *(f"{name}-{stage}" for name, stage in MATRIX),
        *(f"{name}-{stage} uncut" for name, stage in UNCUT),
        *(f"{name}-{stage} offloaded" for name, stage in OFFLOADED),
        *(f"{name} chain" for name in CHAINS),
    ],
)
def test_two_ranks_equal_one(run: str, reference: Any, spread_out: Any) -> None:
    """At every ZeRO stage, with the optimizer offloaded, and where another number of ranks went on after a stop."""
    losses, norms, folder = spread_out[run]
    assert len(losses) == STEPS
    assert_same_training(losses, norms, Path(folder), reference[run.replace("-", " ").split()[0]])


@pytest.mark.slow
@pytest.mark.parametrize(
    "run", [*(f"{name}-{stage} four" for name, stage in FOUR), *(f"{name} shrinking" for name in SHRINKING)]
)
def test_four_ranks_equal_one(run: str, reference: Any, on_four: Any) -> None:
    """To the end, and where two and then one went on after a stop."""
    losses, norms, folder = on_four[run]
    assert len(losses) == STEPS
    assert_same_training(losses, norms, Path(folder), reference[run.replace("-", " ").split()[0]])


@pytest.mark.slow
def test_all_ranks_stop_early_together(reference: Any, spread_out: Any) -> None:
    losses, _, folder = spread_out["stopped"]
    assert losses == pytest.approx(reference["small"][0]["losses"][:4], rel=1e-4)
    assert sorted(path.name for path in Path(folder, "checkpoints").iterdir()) == ["step-000004"]


@pytest.mark.slow
def test_infinity_on_one_rank_stops_all_before_the_step(
    places: tuple[str, str], run_distributed: Any, tmp_path: Path
) -> None:
    jobs = [job("muon", tmp_path / f"{stage}", zero_stage=stage) for stage in range(4)]
    jobs.append(job("muon", tmp_path / "offloaded", zero_stage=2, offload_optimizer=True))
    for found in run_distributed(__file__, "run_into_infinity", 2, [*places, jobs]):
        for one in found:
            assert one["same"] and one["moments"] > 10
            assert "step 3, all ranks: gradient norm" in one["error"] and "samples c" in one["error"]
