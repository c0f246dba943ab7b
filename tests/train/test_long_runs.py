"""Long trainings: scores on the way, what is kept, when they stop, and what is found out before the first step."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trainings import (
    CPU,
    DFLASH,
    EAGLE3,
    FAMILIES,
    FIGURES,
    LORA,
    MEDUSA,
    MEDUSA_2,
    MUON,
    ON_POLICY,
    SMALL,
    KilledError,
    metrics,
    scoring,
)

from draftforge.data.batches import Batch, OptimizerStep
from draftforge.data.store import Capture
from draftforge.errors import (
    DeviceMemoryError,
)
from draftforge.specdec.drafts.small import SmallDraft
from draftforge.specdec.formats.checkpoint import load_draft
from draftforge.train import checkpoints, loop
from draftforge.train.families import build, family_of
from draftforge.train.families.initial_draft import store_initial_draft
from draftforge.train.families.medusa import Backbone
from draftforge.train.families.small import SmallFamily
from draftforge.train.loop import train
from draftforge.train.memory_estimate import DiskFootprint, reset_peak_memory
from draftforge.train.stopping import TrainingStoppedError


def test_the_scorer_sees_the_draft_of_each_scored_step_once(
    tiny_capture: Capture, load_tiny_target: Any, tmp_path: Path, recorder: Any
) -> None:
    seen: list[int] = []

    def scorer(place: Path, step: int) -> dict[str, float]:
        loaded = load_draft(place, CPU, torch.float32)
        assert isinstance(loaded.draft, SmallDraft) and loaded.meta.step == step
        assert not any("lora" in name for name, _ in loaded.draft.named_parameters())
        seen.append(step)
        return FIGURES

    train(
        LORA.model_copy(update={"score_every": 4}), 0, tiny_capture, tmp_path / "t", load_tiny_target, recorder, scorer
    )
    assert seen == [4, 6]
    assert [row for row in recorder.rows if "tau" in row[1]] == [(4, FIGURES), (6, FIGURES)]
    scores = [json.loads(line) for line in (tmp_path / "t" / "scores.jsonl").read_text().splitlines()]
    assert scores == [{"step": 4, **FIGURES}, {"step": 6, **FIGURES}]
    assert sorted(path.name for path in (tmp_path / "t" / "checkpoints").iterdir()) == ["step-000004", "step-000006"]


def kept(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in sorted((folder / "checkpoints").iterdir())]


@pytest.mark.slow
def test_the_best_drafts_and_the_last_are_kept_and_nothing_of_others_goes(
    tiny_capture: Capture, load_tiny_target: Any, tmp_path: Path, make_recorder: Any
) -> None:
    settings = SMALL.model_copy(update={"score_every": 1, "keep_best": 2})
    taus = {1: 1.3, 2: 1.9, 3: 1.2, 4: 1.7, 5: 1.4, 6: 1.1}
    theirs = tmp_path / "t" / "checkpoints" / "step-000000"

    def score(place: Path, step: int) -> dict[str, float]:
        if step == 1:
            theirs.mkdir(parents=True)
        return scoring(taus)(place, step)

    folders = train(settings, 0, tiny_capture, tmp_path / "t", load_tiny_target, make_recorder(), score)
    assert kept(tmp_path / "t") == [0, 2, 4, 6]
    assert [folder.name for folder in folders] == ["step-000002", "step-000004", "step-000006"]
    assert [(folder / "trainer").is_dir() for folder in folders] == [False, False, True]
    with pytest.raises(KeyError):  # the figures decide: without one, nothing is kept or dropped
        train(settings, 0, tiny_capture, tmp_path / "u", load_tiny_target, make_recorder(), scoring({}))


@pytest.mark.slow
@pytest.mark.parametrize("killed_in", [None, 3, 4])
def test_training_stops_when_tau_has_stopped_rising_whenever_it_was_killed(
    killed_in: int | None,
    tiny_capture: Capture,
    load_tiny_target: Any,
    tmp_path: Path,
    make_recorder: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1.65 lies inside the interval of 1.6; 1.3 and it are two scores in a row without a rise."""
    settings = SMALL.model_copy(update={"steps": 8, "score_every": 1, "keep_best": 1, "patience": 2})
    score = scoring({1: 1.0, 2: 1.6, 3: 1.3, 4: 1.65, 5: 9.0})
    if killed_in is not None:
        with monkeypatch.context() as patch:
            original = loop.Trainer.save

            def dying(self: loop.Trainer) -> None:  # scored, and decided, but not saved
                if self.state.step == killed_in:
                    raise KilledError
                original(self)

            patch.setattr(loop.Trainer, "save", dying)
            with pytest.raises(KilledError):
                train(settings, 0, tiny_capture, tmp_path / "t", load_tiny_target, make_recorder(), score)
    train(settings, 0, tiny_capture, tmp_path / "t", load_tiny_target, make_recorder(), score)
    assert [row["step"] for row in metrics(tmp_path / "t")] == [1, 2, 3, 4]
    assert kept(tmp_path / "t") == [4]
    assert checkpoints.is_finished(tmp_path / "t", 8) and not checkpoints.is_finished(tmp_path / "u", 8)
    again = make_recorder()
    assert len(train(settings, 0, tiny_capture, tmp_path / "t", load_tiny_target, again, score)) == 1
    assert again.rows == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "start"),
    [(ON_POLICY, 0), (MUON, 0), (DFLASH, 0), (LORA, 3), (MEDUSA_2, 3)],
)
def test_the_memory_dry_run_changes_nothing(
    settings: Any,
    start: int,
    tiny_capture: Capture,
    load_tiny_target: Any,
    tmp_path: Path,
    make_recorder: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = settings.model_copy(update={"save_every": 3, "steps": 5})
    seen = make_recorder(), make_recorder()
    dry_runs: list[OptimizerStep] = []
    original = loop.Trainer.memory_dry_run
    for name, recorder in zip(("with", "without"), seen, strict=True):

        def dry_run(self: loop.Trainer, name: str = name) -> None:
            if name == "with":
                original(self)
                dry_runs.append(loop.longest_step(self.plan, self.samples, 0))

        def stop_after_start(self: loop.Trainer) -> bool:
            return self.state.step == start > 0 and not (tmp_path / f"{self.folder.name}.on").exists()

        monkeypatch.setattr(loop.Trainer, "memory_dry_run", dry_run)
        monkeypatch.setattr(loop.Trainer, "stop_requested", stop_after_start)
        if start:
            with pytest.raises(TrainingStoppedError):
                train(settings, 0, tiny_capture, tmp_path / name, load_tiny_target, recorder)
            (tmp_path / f"{name}.on").touch()
        train(settings, 0, tiny_capture, tmp_path / name, load_tiny_target, recorder)
    assert len(seen[0].losses) == 5 and seen[0].losses == seen[1].losses  # bit for bit
    samples = tiny_capture.samples("train")
    most = max(len(one.prompt_ids) + len(one.answer_ids) for one in samples)
    assert len(dry_runs) == (2 if start else 1)
    assert any(len(samples[at].prompt_ids) + len(samples[at].answer_ids) == most for at in dry_runs[0].samples)


def test_a_training_that_goes_on_resets_the_peak_of_a_gpu_that_nothing_has_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA refuses the reset before it is initialised."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "init", lambda: calls.append("init"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append(str(device)))
    reset_peak_memory(torch.device("cuda", 0))
    reset_peak_memory(torch.device("cpu"))
    assert calls == ["init", "cuda:0"]


def test_what_does_not_fit_into_memory_fails_before_the_first_step(
    tiny_capture: Capture, load_tiny_target: Any, tmp_path: Path, recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = tiny_capture.samples("train")
    most = max(len(one.prompt_ids) + len(one.answer_ids) for one in samples)
    original = SmallFamily.inputs

    def full(self: SmallFamily, batch: Batch, indexes: list[int]) -> Any:
        if batch.ids_BT.shape[1] >= most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return original(self, batch, indexes)

    monkeypatch.setattr(SmallFamily, "inputs", full)
    expected = (
        r"draft.tokens_per_step 120: .* rank 0's memory \(CUDA out of memory.*accumulation.*activation_checkpointing"
    )
    with pytest.raises(DeviceMemoryError, match=expected) as error:
        train(SMALL, 0, tiny_capture, tmp_path / "t", load_tiny_target, recorder)
    assert recorder.rows == [] and error.value.exit_code == 3 and "\n" not in str(error.value)


def test_what_fits_only_until_the_backbone_trains_fails_before_the_first_step_too(
    tiny_capture: Capture, load_tiny_target: Any, tmp_path: Path, recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Backbone, batch: Batch) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(Backbone, "states", full)
    with pytest.raises(DeviceMemoryError):
        train(MEDUSA_2, 0, tiny_capture, tmp_path / "t", load_tiny_target, recorder)
    assert recorder.rows == []


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(MEDUSA_2, id="medusa-2"),
        pytest.param(MEDUSA.model_copy(update={"train_heads": False}), id="frozen-heads"),
    ],
)
def test_space_is_asked_for_all_heads_and_for_the_changed_target(
    settings: Any,
    tiny_capture: Capture,
    load_tiny_target: Any,
    tmp_path: Path,
    recorder: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needed: list[int] = []
    monkeypatch.setattr(loop, "require_free_space", lambda folder, need: needed.append(need))
    train(settings, 0, tiny_capture, tmp_path / "t", load_tiny_target, recorder)
    written = sum(file.stat().st_size for file in (tmp_path / "t" / "checkpoints").rglob("*.safetensors"))
    assert needed[-1] == pytest.approx(written, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        *FAMILIES,
        pytest.param(MEDUSA.model_copy(update={"train_heads": False}), id="frozen-heads"),
        pytest.param(EAGLE3.model_copy(update={"train_head": True, "train_embeddings": True}), id="own-tables"),
        pytest.param(DFLASH.model_copy(update={"draft_vocabulary": 200}), id="reduced"),
    ],
)
def test_space_is_known_before_there_are_answers(
    settings: Any, tiny_capture: Capture, load_tiny_target: Any, tmp_path: Path
) -> None:
    family = family_of(settings)
    draft, beside = family.check(settings, load_tiny_target), family.beside(settings, load_tiny_target)
    family.freeze(draft, settings)
    before = DiskFootprint.expected(draft, beside)
    init = store_initial_draft(settings, 0, tiny_capture, tmp_path, load_tiny_target)
    begun = DiskFootprint.from_family(build(settings, init, load_tiny_target, tiny_capture, CPU))
    assert before.parameters == begun.parameters and before.draft == pytest.approx(begun.draft, rel=0.02)


def test_space_for_all_that_will_be_kept_is_asked_for_first_and_for_each_checkpoint_again(
    tiny_capture: Capture, load_tiny_target: Any, tmp_path: Path, recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SMALL.model_copy(update={"score_every": 2})
    needed: list[int] = []
    monkeypatch.setattr(loop, "require_free_space", lambda folder, need: needed.append(need))
    train(settings, 0, tiny_capture, tmp_path / "t", load_tiny_target, recorder)
    place = tmp_path / "t" / "checkpoints"
    drafts = [(place / f"step-{step:06d}" / "model.safetensors").stat().st_size for step in (2, 4, 6)]
    trainer = (place / "step-000006" / "trainer" / "state.safetensors").stat().st_size
    assert needed[1:] == pytest.approx([drafts[0] + trainer] * 3, rel=0.02)
    assert needed[0] == pytest.approx(sum(drafts) + drafts[0] + 2 * trainer, rel=0.02)
    footprint = DiskFootprint(draft=100, parameters=100)
    assert footprint.bytes_to_write(settings, 0) == 3 * 100 + 100 + 2 * 1200
    assert footprint.bytes_to_write(settings, 4) == 1 * 100 + 100 + 2 * 1200
    assert footprint.bytes_to_write(settings.model_copy(update={"keep_best": 1}), 0) == 2 * 100 + 100 + 2 * 1200
    assert footprint.bytes_to_write(settings, 6) == 0
