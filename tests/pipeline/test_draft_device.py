"""`score.draft_device` and `--draft-device`: drafts of every verb run there. Double precision stands in for a GPU."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import heads
import pytest
import torch

from draftforge.cli import main
from draftforge.errors import InputError
from draftforge.pipeline import scoring
from draftforge.pipeline.workspace import Workspace
from draftforge.recipe import load_recipe
from draftforge.specdec import stored_draft, targets
from draftforge.specdec.drafts.eagle import EagleConfig, EagleDraft
from draftforge.specdec.drafts.layer_skip import SkippedLayers
from draftforge.specdec.formats import write_draft
from draftforge.specdec.formats.layer_skip import SkipFile, write_skipped
from draftforge.specdec.proposers.other_device import DraftDevice, OtherDeviceDrafter, device_of
from draftforge.specdec.stored_draft import StoredDraft

pytestmark = pytest.mark.usefixtures("stage_cache")
THERE = DraftDevice(torch.device("cpu"), torch.float64)


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory: pytest.TempPathFactory, recipe_in: Callable[..., Path]) -> Path:
    return recipe_in(tmp_path_factory.mktemp("device"))


@pytest.fixture(scope="module")
def space(recipe_file: Path) -> Workspace:
    return Workspace(load_recipe(recipe_file))


@pytest.fixture(scope="module")
def head(space: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An EAGLE head that borrows the target's embeddings and head."""
    target, folder = space.target, tmp_path_factory.mktemp("head")
    sizes = {**heads.LAYER, "hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    write_draft(EagleDraft(EagleConfig(**sizes), False), folder, "vllm")
    return folder


@pytest.mark.slow
def test_drafts_lie_where_they_are_told_to(
    recipe_file: Path, head: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str | None] = []
    seen: list[OtherDeviceDrafter] = []
    inner, init = stored_draft.draft_device, OtherDeviceDrafter.__init__

    def elsewhere(target: Any, device: str | None) -> DraftDevice:
        asked.append(device)
        return inner(target, device) if device is None else THERE

    def spy(self: OtherDeviceDrafter, *args: Any) -> None:
        seen.append(self)
        init(self, *args)

    monkeypatch.setattr(stored_draft, "draft_device", elsewhere)
    monkeypatch.setattr(OtherDeviceDrafter, "__init__", spy)
    monkeypatch.setattr(scoring, "resolve_device", lambda *args: THERE.device)  # the check before any work

    def said(*args: str) -> list[str]:
        with pytest.raises(SystemExit) as ended:
            main([args[0], str(recipe_file), *args[1:], "--draft", str(head)])
        assert not ended.value.code
        return capsys.readouterr().out.splitlines()

    asks = ("generate", "order number?", "-n", "12")
    beside = said(*asks)
    assert asked == [None] and not seen
    assert said(*asks, "--draft-device", "cuda:0")[0] == beside[0]
    assert asked[1:] == ["cuda:0"] and len(seen) == 1
    said("score", "score.draft_device=cuda:0")
    assert set(asked[2:]) == {"cuda:0"} and len(seen) > 3  # replayed, decoded and timed


@pytest.mark.parametrize("device", ["meta", "mps", "xpu", "hpu"])
def test_devices_without_numbers_are_refused(space: Workspace, head: Path, device: str) -> None:
    with pytest.raises(InputError, match=rf"score\.draft_device: {device}: torch computes nothing there"):
        StoredDraft.load(head, space.target, device)


def test_what_cannot_be_is_refused(
    space: Workspace, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = space.target
    for device in ("cpu", None):
        module = StoredDraft.load(head, target, device).module
        assert module is not None and device_of(module) == device_of(target)
    with pytest.raises(InputError, match=r"score\.draft_device: gpu9: must be auto, cpu or a device of torch"):
        StoredDraft.load(head, target, "gpu9")
    with pytest.raises(InputError, match=r"score\.draft_device: cuda:3: there are 0 CUDA devices here"):
        StoredDraft.load(head, target, "cuda:3")
    skips = tmp_path / "skips.json"
    write_skipped(skips, SkipFile(target_fingerprint=target.fingerprint, skipped=SkippedLayers(mlp=(1,))))
    StoredDraft.load(skips, target, "cpu")
    monkeypatch.setattr(targets, "_computes", lambda device: True)
    with pytest.raises(
        InputError, match=r"score\.draft_device meta: .*skips\.json drafts with the target's own layers"
    ):
        StoredDraft.load(skips, target, "meta")
    assert json.loads(skips.read_text())["skipped"] == {"attention": [], "mlp": [1]}


@pytest.mark.parametrize(
    ("here", "device", "there"),
    [
        (("cpu", torch.float32), "cpu", ("cpu", torch.float32)),
        (("cpu", torch.bfloat16), "cpu", ("cpu", torch.bfloat16)),
        (("meta", torch.bfloat16), "cpu", ("cpu", torch.float32)),
        (("meta", torch.float16), "meta", ("meta", torch.float16)),
    ],
)
def test_the_precision_there(
    here: tuple[str, torch.dtype], device: str, there: tuple[str, torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meta stands for a GPU."""
    monkeypatch.setattr(targets, "_computes", lambda device: True)
    monkeypatch.setattr(stored_draft, "device_of", lambda target: DraftDevice(torch.device(here[0]), here[1]))
    assert stored_draft.draft_device(None, device) == DraftDevice(torch.device(there[0]), there[1])  # type: ignore[arg-type]
