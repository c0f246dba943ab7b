"""The same losses and weights however a step is spread: over micro-batches, over ranks, over ZeRO stages."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftforge.data.store import Capture
from draftforge.errors import TrainingDivergedError
from draftforge.specdec.target_settings import TargetSettings
from draftforge.specdec.targets import Target
from draftforge.train import loop, throughput
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

# What sets a module's launches up counts with its first test.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

STEPS = 4
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
    "dspark": DFlashSettings(layers=2, draft_tokens=3, markov_rank=6, confidence_weight=1.0, **COMMON),
    "muon": Eagle3Settings(draft_vocabulary=200, draft_tokens=3, optimizer="muon", **COMMON),
}
MATRIX = [
    ("small", 0),
    ("small", 1),
    ("small", 3),
    ("muon", 0),
    ("muon", 2),
    ("lora", 2),
    ("onpolicy", 2),
    ("eagle3", 3),
    ("eagle", 2),
    ("medusa", 3),
    ("medusa2", 2),
    ("dflash", 1),
    ("dspark", 3),
]
"""On two ranks: every family at a ZeRO stage. What either optimizer lacks here follows: offloaded, or on four ranks."""
OFFLOADED = [("small", 2), ("muon", 3)]
POISONED = [("muon", 0), ("muon", 2), ("small", 3)]
GROWING: dict[str, Any] = {
    "muon": ({"zero_stage": 3}, {"engine": "torch"}, {"zero_stage": 2}),
    "lora": ({"zero_stage": 1}, {"engine": "torch"}, {"zero_stage": 2, "offload_optimizer": True}),
}
"""Begun on two ranks, gone on with on one, ended on three, which divide no parameter evenly."""
SHRINKING: dict[str, Any] = {"muon": ({"zero_stage": 3}, {"zero_stage": 1}, {"engine": "torch"})}
"""Begun on four ranks, gone on with on two, ended on one."""
FOUR = [("small", 2), ("muon", 1)]
"""On four ranks to the end."""
LEGS = (1, 2, STEPS)
"""After which step each part of a training on other ranks ends."""


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


def run_all(capture: str, target: str, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Trainings, one after the other; what one rank of several does.

    A job with `stop` gets a SIGTERM's worth of a request after that step, on its last rank.
    """
    torch.set_num_threads(1)
    opened = Capture.open(Path(capture), verify=False)
    return [run_poisoned(opened, target, one) if one["poisoned"] else run(opened, target, one) for one in jobs]


def run(capture: Capture, target: str, job: dict[str, Any]) -> dict[str, Any]:
    stop, sink, original, said = job["stop"], Figures(), loop.Trainer.stop_requested, list[str]()

    def asked(self: loop.Trainer) -> bool:
        self.stop.requested = self.state.step == stop < STEPS and self.ranks.rank == self.ranks.world_size - 1
        return original(self)

    scorer = None if job["taus"] is None else scorer_of(job["taus"])
    settings = SETTINGS[job["name"]].model_copy(update=job["update"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Trainer, "stop_requested", asked)
        patch.setattr(throughput, "say", said.append)
        try:
            loop.train(settings, 0, capture, Path(job["folder"]), lambda: load(target), sink, scorer)
            assert stop == STEPS
        except TrainingStoppedError:
            assert stop < STEPS
    return {"losses": sink.losses, "norms": sink.norms, "trained": said[0].split(" parameters")[0]}


def scorer_of(taus: list[float]) -> loop.Scorer:
    """A scorer of the first rank's that finds these, one a step."""

    def score(place: Path, step: int) -> dict[str, float]:
        assert os.environ["RANK"] == "0" and (place / "model.safetensors").is_file()
        return {"tau": taus[step - 1], "tau_low": taus[step - 1] - 0.1, "tau_high": taus[step - 1] + 0.1}

    return score


def run_poisoned(capture: Capture, target: str, job: dict[str, Any]) -> dict[str, Any]:
    """A training whose last rank's gradient is infinite in step 3: what is raised, and whether that step moved it."""
    original, found = loop.Trainer.one_step, dict[str, Any]()

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
            found.update(same=same, moments=sum(map(len, moments.values())))

    settings = SETTINGS[job["name"]].model_copy(update=job["update"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Trainer, "one_step", poisoned)
        with pytest.raises(TrainingDivergedError) as error:
            loop.train(settings, 0, capture, Path(job["folder"]), lambda: load(target), Figures())
    return found | {"error": str(error.value)}


def load(target: str) -> Target:
    return Target.load(TargetSettings(model=target, device="cpu"))


def job(
    name: str, folder: Path, stop: int = STEPS, poisoned: bool = False, taus: list[float] | None = None, **update: Any
) -> dict[str, Any]:
    return {
        "name": name, "folder": str(folder), "stop": stop, "poisoned": poisoned, "taus": taus, "update": update,
    }  # fmt: skip


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


@pytest.mark.parametrize("name", list(SETTINGS))
def test_accumulation_changes_nothing(name: str, reference: Any, places: tuple[str, str], tmp_path: Path) -> None:
    """(batch 8 x 1) = (batch 2 x 4); cut into 16, some micro-batches hold nothing at all."""
    (found,) = run_all(*places, [job(name, tmp_path / name, engine="torch", accumulation=16)])
    assert_same_training(found["losses"], found["norms"], tmp_path / name, reference[name])


@pytest.fixture(scope="module")
def on_ranks(places: tuple[str, str], run_distributed: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """All trainings on several ranks, and those that went on on another number of them, in three launches.

    Returns, by the name of its folder: what each rank found in the last launch, losses and norms in order, the folder.
    """
    folder = tmp_path_factory.mktemp("ranks")
    two = [job(n, folder / f"{n} {s}", zero_stage=s, accumulation=2, engine="auto") for n, s in MATRIX]
    two += [job(n, folder / f"{n} {s} offloaded", zero_stage=s, offload_optimizer=True) for n, s in OFFLOADED]
    two += [job(n, folder / f"{n} {s} poisoned", poisoned=True, zero_stage=s) for n, s in POISONED]
    early: dict[str, Any] = {"zero_stage": 3, "score_every": 1, "patience": 2, "keep_best": 1}
    two.append(job("small", folder / "stopped", taus=[1.5, 1.2, 1.55, 9.0], **early))
    four = [job(n, folder / f"{n} {s} four", zero_stage=s) for n, s in FOUR]
    growing = [
        [job(n, folder / f"{n} growing", stop, **parts[leg]) for n, parts in GROWING.items()]
        for leg, stop in enumerate(LEGS)
    ]
    shrinking = [
        [job(n, folder / f"{n} shrinking", stop, **parts[leg]) for n, parts in SHRINKING.items()]
        for leg, stop in enumerate(LEGS)
    ]
    found: dict[str, Any] = {}
    for world_size, jobs in (
        (4, four + shrinking[0]),
        (2, two + shrinking[1] + growing[0]),
        (1, shrinking[2] + growing[1]),
        (3, growing[2]),
    ):
        if world_size == 1:
            answers = [run_all(*places, jobs)]
        else:
            answers = run_distributed(__file__, "run_all", world_size, [*places, jobs], timeout_seconds=900)
        for one, figures in zip(jobs, zip(*answers)):
            _, losses, norms, _ = found.get(Path(one["folder"]).name, (None, [], [], None))
            losses, norms = losses + figures[0].get("losses", []), norms + figures[0].get("norms", [])
            found[Path(one["folder"]).name] = (figures, losses, norms, Path(one["folder"]))
    return found


@pytest.mark.parametrize(
    "run",
    [
        *(f"{name} {stage}" for name, stage in MATRIX),
        *(f"{name} {stage} offloaded" for name, stage in OFFLOADED),
        *(f"{name} {stage} four" for name, stage in FOUR),
        *(f"{name} growing" for name in GROWING),
        *(f"{name} shrinking" for name in SHRINKING),
    ],
)
def test_several_ranks_equal_one(run: str, reference: Any, on_ranks: Any) -> None:
    """At every ZeRO stage, with the optimizer offloaded, and where another number of ranks went on after a stop."""
    figures, losses, norms, folder = on_ranks[run]
    assert len(losses) == STEPS
    assert_same_training(losses, norms, folder, reference[run.split()[0]])
    assert figures[0]["trained"] == reference[run.split()[0]][0]["trained"]  # what is said of its size


def test_all_ranks_stop_early_together(reference: Any, on_ranks: Any) -> None:
    _, losses, _, folder = on_ranks["stopped"]
    assert losses == pytest.approx(reference["small"][0]["losses"][:3], rel=1e-4)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-000003"]


@pytest.mark.parametrize(("name", "stage"), POISONED)
def test_infinity_on_one_rank_stops_all_before_the_step(name: str, stage: int, on_ranks: Any) -> None:
    for one in on_ranks[f"{name} {stage} poisoned"][0]:
        assert one["same"] and one["moments"] > 10
        assert "step 3, all ranks: gradient norm" in one["error"] and "samples c" in one["error"]
