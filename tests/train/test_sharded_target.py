"""Drafts of a target that is spread over the ranks learn what those of the whole target do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftforge.data.store import Capture
from draftforge.errors import InputError
from draftforge.specdec.target_settings import TargetSettings
from draftforge.specdec.targets import Target
from draftforge.train import loop
from draftforge.train.families.medusa import check_trainable
from draftforge.train.families.target_features import FeatureSource
from draftforge.train.settings import (
    DFlashSettings,
    Eagle3Settings,
    EagleSettings,
    MedusaSettings,
    OnPolicySettings,
    Settings,
    SmallSettings,
)

RunDistributed = Callable[..., list[Any]]
COMMON: dict[str, Any] = {
    "steps": 3,
    "warmup_steps": 1,
    "tokens_per_step": 240,
    "learning_rate": 1e-3,
    "precision": "float32",
    "accumulation": 2,
}
SETTINGS: dict[str, Settings] = {
    "eagle3": Eagle3Settings(draft_vocabulary=200, draft_tokens=3, **COMMON),
    "eagle": EagleSettings(draft_tokens=2, **COMMON),
    "medusa": MedusaSettings(draft_tokens=2, **COMMON),
    "dflash": DFlashSettings(layers=2, draft_tokens=3, **COMMON),
    "small": SmallSettings(layers=2, on_policy=OnPolicySettings(), **COMMON),
    "sparse": Eagle3Settings(draft_tokens=2, **COMMON | {"tokens_per_step": 30, "accumulation": 4}),
}
"""`sparse`: more micro-batches than samples, so that some of a rank's are empty."""


class Losses:
    def __init__(self) -> None:
        self.found: list[float] = []

    def log(self, step: int, values: dict[str, float]) -> None:
        self.found.append(values["loss"])


def losses(capture: str, target: str, folder: str) -> dict[str, Any]:
    """What one rank logs, of the whole target and of the spread one; passes that it ran of the latter."""
    torch.set_num_threads(1)
    opened, found = Capture.open(Path(capture), verify=False), dict[str, Any]()
    passes: list[int] = []
    for name, settings in SETTINGS.items():
        for shard in (False, True):
            kept = Target.load(TargetSettings(model=target, device="cpu", shard=shard))
            inside = kept.model.get_decoder().register_forward_hook(lambda *call: passes.append(1))
            passes.clear()
            sink = Losses()
            place = Path(folder) / f"{name}-{shard}"
            loop.train(settings, 0, opened, place, lambda kept=kept: kept, sink)  # type: ignore[misc]
            found[f"{name}-{shard}"] = sink.found
            found[f"{name}-passes"] = len(passes)
            inside.remove()
    return found


@pytest.mark.slow
def test_losses_are_those_of_the_whole_target(
    tiny_capture_folder: Path, tiny_target_folder: Path, tmp_path: Path, run_distributed: RunDistributed
) -> None:
    """Every family. All ranks run the target equally often, also where some of their micro-batches are empty."""
    arguments = [str(tiny_capture_folder), str(tiny_target_folder), str(tmp_path)]
    first, second = run_distributed(__file__, "losses", 2, arguments, timeout_seconds=400)
    for name in SETTINGS:
        assert len(first[f"{name}-True"]) == 3
        assert first[f"{name}-True"] == pytest.approx(first[f"{name}-False"], rel=1e-4), name  # float32
        assert first[f"{name}-passes"] == second[f"{name}-passes"] > 0, name


def test_one_process_trains_with_whole_layers(
    tiny_capture: Capture, tiny_target_folder: Path, tmp_path: Path, recorder: Any
) -> None:
    """And the pruned start of `small` is read from the files; afterwards a pass is refused."""
    kept = Target.load(TargetSettings(model=str(tiny_target_folder), device="cpu", shard=True))
    loop.train(SETTINGS["small"], 0, tiny_capture, tmp_path / "small", lambda: kept, recorder)
    assert len(recorder.losses) == 3
    with pytest.raises(InputError, match=r"target\.shard = true"):
        kept.states(torch.tensor([[1, 2]]))


def test_nothing_is_remembered_of_a_spread_target_and_it_is_not_trained(tiny_target_folder: Path) -> None:
    """A rank that remembers a sample would run fewer passes than the others, which would wait for it."""
    target = Target.load(TargetSettings(model=str(tiny_target_folder), device="cpu", shard=True))
    assert not FeatureSource(target, (), 1 << 20, 1 << 20)._caches
    with pytest.raises(InputError, match=r"draft\.backbone: target\.shard is true"):
        check_trainable(target)
