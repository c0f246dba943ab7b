"""Whole tiny trainings: what they leave behind, and that they go on exactly where they were left."""

import itertools
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trainings import (
    COMMON,
    CPU,
    DFLASH,
    DSPARK,
    EAGLE,
    EAGLE3,
    FAMILIES,
    MEDUSA,
    MEDUSA_2,
    MUON,
    SMALL,
    KilledError,
    metrics,
    scoring,
)

from draftforge import progress
from draftforge.data.batches import Batch, OptimizerStep, collate
from draftforge.data.store import Capture
from draftforge.errors import (
    MissingFileError,
    OwnershipError,
    StaleInputError,
    TrainingDivergedError,
)
from draftforge.specdec.formats.checkpoint import ORIGINAL_TARGET, load_draft
from draftforge.specdec.targets import Target
from draftforge.train import loop
from draftforge.train.families import build
from draftforge.train.families.initial_draft import store_initial_draft
from draftforge.train.loop import prefetch, train
from draftforge.train.optimizers import learning_rate, make_optimizer
from draftforge.train.settings import (
    BackboneSettings,
    SmallSettings,
)
from draftforge.train.stopping import TrainingStoppedError


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "killed_in"),
    [*(pytest.param(*family.values, 3, id=f"{family.id}-3") for family in FAMILIES), (SMALL, 1), (MUON, 5)],
)
def test_training_lowers_the_loss_and_a_killed_run_goes_on_with_the_same_losses(
    settings: Any,
    killed_in: int,
    tiny_capture: Capture,
    load_tiny_target: Any,
    tmp_path: Path,
    make_recorder: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = settings.model_copy(update={"save_every": 2, "score_every": 3})
    whole, first, second = make_recorder(), make_recorder(), make_recorder()
    # Of a whole run scored drafts stay, and what goes on from the last one.
    folders = train(settings, 0, tiny_capture, tmp_path / "whole", load_tiny_target, whole)
    assert [folder.name for folder in folders] == ["step-000003", "step-000006"]
    assert sorted(path.name for path in (tmp_path / "whole" / "checkpoints").iterdir()) == [f.name for f in folders]
    assert [(folder / "trainer").is_dir() for folder in folders] == [False, True]
    for folder, step in zip(folders, (3, 6)):
        loaded = load_draft(folder, CPU, torch.float32)
        assert (loaded.meta.step, loaded.meta.family) == (step, settings.draft_family)
        made_of = loaded.meta.extra.get(ORIGINAL_TARGET, loaded.meta.target_fingerprint)
        assert made_of == tiny_capture.target_fingerprint
    losses = list(whole.losses.values())
    assert sum(losses[-3:]) < sum(losses[:3])
    # Another run dies in a step, and goes on from the last checkpoint, whatever random numbers were drawn since.
    with monkeypatch.context() as patch:
        original = loop.Trainer.reduce

        def dying(self: loop.Trainer, *args: Any) -> Any:
            if self.state.step == killed_in:
                raise KilledError
            return original(self, *args)

        patch.setattr(loop.Trainer, "reduce", dying)
        with pytest.raises(KilledError):
            train(settings, 0, tiny_capture, tmp_path / "cut", load_tiny_target, first)
    torch.manual_seed(99)
    train(settings, 0, tiny_capture, tmp_path / "cut", load_tiny_target, second)
    resumed = max(step for step in (0, 2, 3, 4, 6) if step <= killed_in)
    assert min(second.losses) == resumed + 1
    assert first.losses | second.losses == whole.losses  # bit for bit
    for name in ("whole", "cut"):
        assert [row["step"] for row in metrics(tmp_path / name)] == [1, 2, 3, 4, 5, 6]
    records = [
        json.loads((tmp_path / name / "checkpoints/step-000006/trainer/trainer.json").read_text())
        for name in ("whole", "cut")
    ]
    assert records[0]["state"] == records[1]["state"]
    whole_files, cut_files = (
        {path.relative_to(place): path.read_bytes() for path in place.rglob("model.safetensors")}
        for place in (tmp_path / name / "checkpoints" / "step-000006" for name in ("whole", "cut"))
    )
    assert whole_files and whole_files == cut_files  # of the draft, and of a target that was trained with it


def test_a_run_killed_while_saving_loses_only_that_checkpoint(
    tiny_capture: Capture, load_tiny_target: Any, tmp_path: Path, recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SMALL.model_copy(update={"save_every": 2})
    with monkeypatch.context() as patch:
        original = loop.checkpoints.write_json

        def dying(path: Path, value: Any) -> None:
            if "step-000004" in str(path):
                raise KilledError
            original(path, value)

        patch.setattr(loop.checkpoints, "write_json", dying)
        with pytest.raises(KilledError):
            train(settings, 0, tiny_capture, tmp_path / "t", load_tiny_target, recorder)
    assert [path.name for path in (tmp_path / "t" / "checkpoints").iterdir()] == ["step-000002"]
    train(settings, 0, tiny_capture, tmp_path / "t", load_tiny_target, recorder)
    assert [path.name for path in (tmp_path / "t" / "checkpoints").iterdir()] == ["step-000006"]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [SMALL, EAGLE3, DFLASH, DSPARK, EAGLE, MEDUSA, MEDUSA_2])
def test_loss_and_gradient_are_means_over_supervised_tokens(
    settings: Any, tiny_capture: Capture, load_tiny_target: Any, tmp_path: Path, recorder: Any
) -> None:
    update: dict[str, Any] = {"steps": 1, "warmup_steps": 0, "tokens_per_step": 10_000, "accumulation": 3}
    if settings is MEDUSA_2:
        update["backbone"] = BackboneSettings(start_step=0)
    settings = settings.model_copy(update=update)
    train(settings, 0, tiny_capture, tmp_path / "t", load_tiny_target, recorder)
    samples = tiny_capture.samples("train")  # one step holds them all
    torch.manual_seed(loop.seed_from("family", 0))  # of fresh adapters
    family = build(settings, tmp_path / "t" / "init", load_tiny_target, tiny_capture, CPU)
    batch = collate(samples, [tiny_capture.signals(sample) for sample in samples])
    total, _ = family(family.inputs(batch, range(len(samples))))
    mean = total / sum(len(sample.answer_ids) for sample in samples)
    norm = torch.nn.utils.get_total_norm(torch.autograd.grad(mean, list(family.trainable().values())))
    assert recorder.losses[1] == pytest.approx(float(mean.detach()), rel=1e-5)
    assert recorder.rows[0][1]["gradient_norm"] == pytest.approx(float(norm), rel=1e-4)
    extra = family.extra_loss  # its mean is logged too
    assert extra is None or extra.name in recorder.rows[0][1]


def test_the_rate_of_each_step_is_the_schedules(
    tiny_capture: Capture, load_tiny_target: Any, tmp_path: Path, recorder: Any
) -> None:
    train(SMALL, 0, tiny_capture, tmp_path / "t", load_tiny_target, recorder)
    rates = [row["learning_rate"] for row in metrics(tmp_path / "t")]
    assert rates == [learning_rate(step, 6, 2, 3e-3, 0.1) for step in range(6)]


@pytest.mark.slow
def test_settings_of_the_optimizer_reach_it(
    tiny_capture: Capture, load_tiny_target: Any, tmp_path: Path, make_recorder: Any
) -> None:
    updates: list[dict[str, float]] = [{}, {"beta1": 0.5}, {"beta2": 0.5}, {"weight_decay": 1.0}, {"clip_norm": 1e-3}]
    sums = []
    for number, update in enumerate(updates):
        settings = SMALL.model_copy(update={"steps": 3, **update})
        (last,) = train(settings, 0, tiny_capture, tmp_path / str(number), load_tiny_target, make_recorder())
        weights = load_draft(last, CPU, torch.float32).draft.state_dict()
        sums.append(float(torch.stack([tensor.double().abs().sum() for tensor in weights.values()]).sum()))
    assert all(other != pytest.approx(sums[0], rel=1e-8) for other in sums[1:])


@pytest.mark.parametrize("settings", FAMILIES)
def test_norms_do_not_decay(settings: Any, tiny_capture: Capture, load_tiny_target: Any, tmp_path: Path) -> None:
    settings = settings.model_copy(update={"weight_decay": 0.3})
    store_initial_draft(settings, 0, tiny_capture, tmp_path / "t", load_tiny_target)
    family = build(settings, tmp_path / "t" / "init", load_tiny_target, tiny_capture, CPU)
    groups = make_optimizer(family, settings).param_groups
    decay = {parameter: group["weight_decay"] for group in groups for parameter in group["params"]}
    trained = family.trainable().values()
    assert set(decay) == set(trained)
    assert {decay[p] for p in trained if p.ndim >= 2} == {0.3}
    assert {decay[p] for p in trained if p.ndim < 2} <= {0.0}


def test_scores_of_steps_that_come_again_are_forgotten(
    tiny_capture: Capture, load_tiny_target: Any, tmp_path: Path, make_recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SMALL.model_copy(update={"score_every": 3})
    with monkeypatch.context() as patch:

        def dying(*args: Any) -> None:
            raise KilledError

        patch.setattr(loop.checkpoints, "save", dying)
        with pytest.raises(KilledError):  # scored, and killed before the checkpoint was there
            train(
                settings, 0, tiny_capture, tmp_path / "t", load_tiny_target, make_recorder(), scoring({3: 1.0, 6: 1.0})
            )
    train(settings, 0, tiny_capture, tmp_path / "t", load_tiny_target, make_recorder(), scoring({3: 2.0, 6: 2.0}))
    scores = [json.loads(line) for line in (tmp_path / "t" / "scores.jsonl").read_text().splitlines()]
    assert [(one["step"], one["tau"]) for one in scores] == [(3, 2.0), (6, 2.0)]


def test_a_finished_run_does_nothing_more(
    tiny_capture: Capture, load_tiny_target: Any, tmp_path: Path, make_recorder: Any
) -> None:
    again = make_recorder()
    first = train(SMALL, 0, tiny_capture, tmp_path / "t", load_tiny_target, make_recorder())
    assert train(SMALL, 0, tiny_capture, tmp_path / "t", load_tiny_target, again) == first
    assert again.rows == []


def test_small_trains_after_the_target_is_gone(
    tiny_capture: Capture, load_tiny_target: Any, tmp_path: Path, recorder: Any
) -> None:
    def gone() -> Target:
        raise MissingFileError("the target was deleted")

    with pytest.raises(MissingFileError):
        train(SMALL, 0, tiny_capture, tmp_path / "never", gone, recorder)
    loop.claim(tmp_path / "t", SMALL, 0, tiny_capture)
    store_initial_draft(SMALL, 0, tiny_capture, tmp_path / "t", load_tiny_target)
    assert len(train(SMALL, 0, tiny_capture, tmp_path / "t", gone, recorder)) == 1


@pytest.mark.slow
def test_sigterm_saves_the_step_and_the_run_goes_on_later(
    tiny_capture: Capture, load_tiny_target: Any, tmp_path: Path, make_recorder: Any
) -> None:
    class Stopping:
        losses: dict[int, float] = {}  # noqa: RUF012

        def log(self, step: int, values: dict[str, float]) -> None:
            self.losses[step] = values["loss"]
            if step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    whole, second = make_recorder(), make_recorder()
    train(SMALL, 0, tiny_capture, tmp_path / "whole", load_tiny_target, whole)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(TrainingStoppedError, match="after step 2") as stopped:
        train(SMALL, 0, tiny_capture, tmp_path / "t", load_tiny_target, Stopping())
    assert stopped.value.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) is before
    train(SMALL, 0, tiny_capture, tmp_path / "t", load_tiny_target, second)
    assert Stopping.losses | second.losses == whole.losses
    assert [path.name for path in (tmp_path / "t" / "checkpoints").iterdir()] == ["step-000006"]


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_numbers_that_are_not_finite_stop_before_the_update(
    what: str,
    tiny_capture: Capture,
    load_tiny_target: Any,
    tmp_path: Path,
    recorder: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = SMALL.model_copy(update={"save_every": 2})
    original = loop.Trainer.accumulate
    weights: list[torch.Tensor] = []

    def poisoned(self: loop.Trainer, step: OptimizerStep, batches: list[Batch]) -> Any:
        if self.state.step == 3:
            weight = next(iter(self.family.trainable().values()))
            weights.extend([weight, weight.detach().clone()])
            if what == "loss":
                assert batches[0].signals is not None
                batches[0].signals.topk_logp_nk.fill_(float("nan"))
            else:
                weight.register_hook(lambda grad: grad * float("inf"))  # type: ignore[no-untyped-call]
        return original(self, step, batches)

    monkeypatch.setattr(loop.Trainer, "accumulate", poisoned)
    with pytest.raises(TrainingDivergedError, match=r"step 4, rank 0: .*samples c\d/0/t1") as error:
        train(settings, 0, tiny_capture, tmp_path / "t", load_tiny_target, recorder)
    assert what in str(error.value)
    assert error.value.exit_code == 3
    assert torch.equal(weights[0], weights[1])
    assert [path.name for path in (tmp_path / "t" / "checkpoints").iterdir()] == ["step-000002"]


def test_a_folder_of_another_run_is_refused(
    tiny_capture: Capture, load_tiny_target: Any, tmp_path: Path, recorder: Any
) -> None:
    train(SMALL.model_copy(update={"steps": 2}), 0, tiny_capture, tmp_path / "t", load_tiny_target, recorder)
    with pytest.raises(OwnershipError, match=r"whose draft\.steps is 2, not 6"):
        train(SMALL, 0, tiny_capture, tmp_path / "t", load_tiny_target, recorder)
    with pytest.raises(OwnershipError, match="whose seed is 0, not 1"):
        train(SMALL.model_copy(update={"steps": 2}), 1, tiny_capture, tmp_path / "t", load_tiny_target, recorder)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(OwnershipError, match="not made by training"):
        train(SMALL, 0, tiny_capture, tmp_path / "mine", load_tiny_target, recorder)


def test_eagle3_refuses_a_target_whose_logits_are_not_the_captured_ones(
    tiny_capture: Capture, load_tiny_target: Callable[[], Target], tmp_path: Path, recorder: Any
) -> None:
    def changed() -> Target:
        target = load_tiny_target()
        with torch.no_grad():
            target.model.lm_head.weight.mul_(1.05)
        return target

    with pytest.raises(StaleInputError, match=r"differ from the loaded target's by up to .*, must be within 0\.02"):
        train(EAGLE3, 0, tiny_capture, tmp_path / "t", changed, recorder)


def test_warm_start_begins_where_the_other_draft_ended(
    tiny_capture: Capture, load_tiny_target: Any, tmp_path: Path, make_recorder: Any
) -> None:
    cold, warm = make_recorder(), make_recorder()
    (champion,) = train(SMALL.model_copy(update={"steps": 12}), 0, tiny_capture, tmp_path / "a", load_tiny_target, cold)
    kept = tmp_path / "champion"
    shutil.copytree(champion, kept)
    shutil.rmtree(kept / "trainer")
    settings = SMALL.model_copy(update={"init_from": kept, "learning_rate": 1e-6})
    train(settings, 0, tiny_capture, tmp_path / "b", load_tiny_target, warm)
    assert max(warm.losses.values()) < cold.losses[1]
    again = load_draft(tmp_path / "b" / "init", CPU, torch.float32).draft.state_dict()
    for name, tensor in load_draft(champion, CPU, torch.float32).draft.state_dict().items():
        assert torch.equal(tensor, again[name]), name


def test_progress_line_of_each_step(
    tiny_capture: Capture, load_tiny_target: Any, tmp_path: Path, recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr("draftforge.train.loop.say", lines.append)
    assert progress.say is not None
    train(SMALL, 0, tiny_capture, tmp_path / "t", load_tiny_target, recorder)
    assert lines[-1].startswith("step 6/6  100%  loss ") and lines[-1].endswith("supervised tok/s  0:00 left")
    assert "tok/s" not in next(line for line in lines if line.startswith("step 1/6"))


PHASES: Any = [
    {"until": 2, "objective": {"kl": 1.0}},
    {"until": 4, "objective": {"tv": 1.0}},
    {"objective": {"ce": 1.0}},
]


@pytest.mark.slow
def test_phases_take_turns_and_a_resumed_run_is_in_the_right_one(
    tiny_capture: Capture, load_tiny_target: Any, tmp_path: Path, make_recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SmallSettings(layers=2, objective=PHASES, save_every=1, **COMMON)
    whole, resumed = make_recorder(), make_recorder()
    train(settings, 0, tiny_capture, tmp_path / "whole", load_tiny_target, whole)
    assert [row["phase"] for _, row in whole.rows] == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    said: list[str] = []
    monkeypatch.setattr(loop, "say", said.append)
    original = loop.Trainer.reduce

    def dying(self: loop.Trainer, *args: Any) -> Any:
        if self.state.step == 3:
            raise KilledError
        return original(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "reduce", dying)
        with pytest.raises(KilledError):
            train(settings, 0, tiny_capture, tmp_path / "cut", load_tiny_target, make_recorder())
    train(settings, 0, tiny_capture, tmp_path / "cut", load_tiny_target, resumed)
    assert {step: whole.losses[step] for step in (4, 5, 6)} == resumed.losses
    assert [line for line in said if line.startswith("from step")] == [
        "from step 1 on: objective kl",
        "from step 3 on: objective tv",
        "from step 4 on: objective tv",
        "from step 5 on: objective ce",
    ]
    alone = make_recorder()
    train(SmallSettings(layers=2, **COMMON), 0, tiny_capture, tmp_path / "alone", load_tiny_target, alone)
    assert alone.losses[2] == whole.losses[2] and alone.losses[3] != whole.losses[3]


@pytest.mark.slow
@pytest.mark.parametrize("objective", [{"lk_hybrid": 1.0}, {"expected_length": 1.0}, {"kl": {"temperature": 2.0}}])
def test_small_is_taught_by_the_target_itself_where_signals_say_too_little(
    objective: Any, tiny_capture: Capture, load_tiny_target: Any, tmp_path: Path, recorder: Any
) -> None:
    settings = SmallSettings(layers=2, objective=objective, **{**COMMON, "steps": 12})
    train(settings, 0, tiny_capture, tmp_path / "t", load_tiny_target, recorder)
    losses = list(recorder.losses.values())
    assert sum(losses[-4:]) < sum(losses[:4])


def test_batches_come_in_order_and_one_item_early() -> None:
    begun: list[int] = []

    def items() -> Iterator[int]:
        for number in itertools.count():
            begun.append(number)
            yield number

    found = list(itertools.islice(prefetch(items(), lambda number: number * number), 5))
    assert found == [(0, 0), (1, 1), (2, 4), (3, 9), (4, 16)]
    assert begun[:5] == [0, 1, 2, 3, 4] and len(begun) <= 6


def test_an_error_of_a_batch_comes_with_its_item() -> None:
    stream = prefetch(iter(range(9)), lambda number: 10 // (2 - number))
    assert [next(stream), next(stream)] == [(0, 5), (1, 10)]
    with pytest.raises(ZeroDivisionError):
        next(stream)
