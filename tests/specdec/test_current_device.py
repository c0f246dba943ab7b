"""Whatever runs models makes their device torch's current one: Triton launches there, wherever tensors lie."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from stand_ins import near_copy, target

from draftforge.specdec import models
from draftforge.specdec.models import CausalModel
from draftforge.specdec.proposers.factory import make_proposer
from draftforge.specdec.proposers.tree_settings import DynamicTree
from draftforge.specdec.replay import dynamic, replay, target_trace
from draftforge.specdec.sampling_settings import SamplingSettings

GREEDY = SamplingSettings()
ANSWER = target_trace.RecordedAnswer([5, 9, 2], [7, 1, 30, 4], 4)


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modules that made a device current."""
    found: list[str] = []

    def spy_on(module: object, name: str) -> None:
        inner = getattr(module, name)

        @contextmanager
        def spy(device: torch.device) -> Iterator[None]:
            found.append(module.__name__.rpartition(".")[2])  # type: ignore[attr-defined]
            with inner(device):
                yield

        monkeypatch.setattr(module, name, spy)

    for module in (dynamic, target_trace, replay):
        spy_on(module, "running")
    spy_on(models, "current")
    return found


@pytest.fixture
def model() -> CausalModel:
    return target()


def test_a_pass_and_a_check_of_a_model(model: CausalModel, entered: list[str]) -> None:
    model.states(torch.tensor([[5, 9]]))
    assert entered == ["models"]
    CausalModel(model.model)
    assert entered[1] == "models"


def test_replays(model: CausalModel, entered: list[str]) -> None:
    draft = near_copy(model)
    traced = target_trace.trace_target(model, [ANSWER], SamplingSettings(temperature=1.0))
    assert "target_trace" in entered
    replay.replay(make_proposer(draft, model), target_trace.trace_target(model, [ANSWER], GREEDY), ["greedy"], [2])
    assert "replay" in entered and traced.p_R is not None
    grown = make_proposer(draft, model, DynamicTree(kind="dynamic", nodes=3, levels=2, top_k=2))
    dynamic.replay_dynamic(grown, target_trace.trace_target(model, [ANSWER], GREEDY), 2)
    assert "dynamic" in entered
