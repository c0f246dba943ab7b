"""Tiny trainings of every family, for tests of the loop."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from draftforge.train import loop
from draftforge.train.settings import (
    BackboneSettings,
    DFlashSettings,
    Eagle3Settings,
    EagleSettings,
    LoraSettings,
    MedusaSettings,
    OnPolicySettings,
    SmallSettings,
)

COMMON: dict[str, Any] = {
    "steps": 6,
    "warmup_steps": 2,
    "tokens_per_step": 120,
    "learning_rate": 3e-3,
    "precision": "float32",
    "engine": "torch",
}
SMALL = SmallSettings(layers=2, **COMMON)
LORA = SmallSettings(layers=2, lora=LoraSettings(rank=2, alpha=4.0), **COMMON)
ON_POLICY = SmallSettings(layers=2, on_policy=OnPolicySettings(), **COMMON)
EAGLE3 = Eagle3Settings(draft_vocabulary=200, draft_tokens=3, **COMMON)
EAGLE = EagleSettings(draft_tokens=2, **COMMON)
MEDUSA = MedusaSettings(draft_tokens=3, **COMMON)
MEDUSA_2 = MedusaSettings(draft_tokens=2, backbone=BackboneSettings(start_step=2), **COMMON)
MUON = Eagle3Settings(draft_vocabulary=200, draft_tokens=3, optimizer="muon", **COMMON)
DFLASH = DFlashSettings(layers=2, draft_tokens=3, **COMMON)
DSPARK = DFlashSettings(layers=2, draft_tokens=3, markov_rank=8, confidence_weight=0.5, **COMMON)
FAMILIES = [
    pytest.param(SMALL, id="small"),
    pytest.param(LORA, id="lora"),
    pytest.param(ON_POLICY, id="on-policy"),
    pytest.param(EAGLE3, id="eagle3"),
    pytest.param(DFLASH, id="dflash"),
    pytest.param(DSPARK, id="dspark"),
    pytest.param(MUON, id="muon"),
    pytest.param(EAGLE, id="eagle"),
    pytest.param(MEDUSA, id="medusa"),
    pytest.param(MEDUSA_2, id="medusa-2"),
]
CPU = torch.device("cpu")
FIGURES = {"tau": 1.5, "tau_low": 1.4, "tau_high": 1.6}


class KilledError(Exception):
    """Stands for a process that dies."""


def scoring(taus: dict[int, float]) -> loop.Scorer:
    """A scorer that finds these, each with an interval of 0.1 to either side."""

    def score(place: Path, step: int) -> dict[str, float]:
        return {"tau": taus[step], "tau_low": taus[step] - 0.1, "tau_high": taus[step] + 0.1}

    return score


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
