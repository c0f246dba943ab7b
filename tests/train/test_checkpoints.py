"""What lies beside the weights: complete, free of pickles, and refused when damaged."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftforge.data.store import Capture
from draftforge.distributed import Ranks
from draftforge.errors import CorruptDataError, DiskFullError, StaleInputError
from draftforge.train import checkpoints
from draftforge.train.loop import train
from draftforge.train.settings import SmallSettings
from draftforge.train.throughput import MetricLog, extend_digest

SETTINGS = SmallSettings(
    layers=2, steps=3, warmup_steps=1, tokens_per_step=120, precision="float32", engine="torch", save_every=1
)
ALONE = Ranks(0, 1, torch.device("cpu"))


@pytest.fixture
def trained(tiny_capture: Capture, load_tiny_target: Any, tmp_path: Path, recorder: Any) -> Path:
    train(SETTINGS, 0, tiny_capture, tmp_path / "t", load_tiny_target, recorder)
    return tmp_path / "t"


def test_a_checkpoint_holds_all_that_training_needs(trained: Path) -> None:
    place = checkpoints.step_folder(trained, 3)
    assert {path.suffix for path in place.rglob("*") if path.is_file()} <= {".safetensors", ".json", ".jinja"}
    restored = checkpoints.restore(trained, 3)
    assert restored.state.step == 3 and restored.state.scored == [3]
    assert set(restored.moments) == set(restored.weights)
    for name, moment in restored.moments.items():
        assert {key: tensor.dtype for key, tensor in moment.items()} == {
            "exp_avg": torch.float32,
            "exp_avg_sq": torch.float32,
        }
        assert moment["exp_avg"].shape == restored.weights[name].shape


def test_random_numbers_go_on(trained: Path) -> None:
    torch.manual_seed(5)
    random.seed(5)
    state = checkpoints.rng_state(ALONE)
    expected = torch.rand(3), random.random()
    checkpoints.restore_rng(state, ALONE)
    assert torch.equal(torch.rand(3), expected[0]) and random.random() == expected[1]
    checkpoints.restore_rng(checkpoints.restore(trained, 3).rng, ALONE)  # as it comes from disk


def test_each_rank_gets_its_own_random_numbers_back() -> None:
    torch.manual_seed(1)
    first = torch.get_rng_state()
    torch.manual_seed(2)
    parts = [{**checkpoints.rng_state(ALONE)[0], "torch": first}, {"torch": torch.get_rng_state()}]
    expected = torch.rand(3)
    checkpoints.restore_rng(parts, Ranks(1, 2, torch.device("cpu")))
    assert torch.equal(torch.rand(3), expected)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    checkpoints.restore_rng(parts, Ranks(2, 3, torch.device("cpu")))  # it was not there: its own seed stays
    assert torch.equal(torch.rand(3), expected)


def test_a_damaged_trainer_is_named(trained: Path, tiny_capture: Capture, load_tiny_target: Any, recorder: Any) -> None:
    state = checkpoints.step_folder(trained, 3) / "trainer" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:1000])
    with pytest.raises(CorruptDataError, match=r"state\.safetensors: unreadable"):
        train(SETTINGS, 0, tiny_capture, trained, load_tiny_target, recorder)


@pytest.mark.parametrize(
    ("field", "value"),
    [("step", 2), ("step", None), ("position", -1), ("position", 2**80), ("scored", [None]), ("smoothed_loss", "x")],
)
def test_an_odd_record_is_named(trained: Path, field: str, value: Any) -> None:
    record = checkpoints.step_folder(trained, 3) / "trainer" / "trainer.json"
    found = json.loads(record.read_text())
    record.write_text(json.dumps(found | {"state": found["state"] | {field: value}}))
    with pytest.raises(CorruptDataError, match=r"trainer\.json: not a trainer's record"):
        checkpoints.restore(trained, 3)


@pytest.mark.parametrize("python", [None, [], [3, [1, 2], None], [3, ["x"] * 625, None], [3, [2**80] * 625, None]])
def test_odd_random_numbers_are_named(trained: Path, python: Any) -> None:
    record = checkpoints.step_folder(trained, 3) / "trainer" / "trainer.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"rng": [{"python": python}]}))
    with pytest.raises(CorruptDataError, match=r"trainer: not the random numbers of a training"):
        checkpoints.restore(trained, 3)


@pytest.mark.parametrize("kind", ["weights", "exp_avg"])
@pytest.mark.parametrize("broken", [lambda tensor: None, lambda tensor: tensor.flatten()[:1].clone()])
def test_tensors_of_another_draft_are_named(
    trained: Path, tiny_capture: Capture, load_tiny_target: Any, recorder: Any, kind: str, broken: Any
) -> None:
    """A single number would have filled a whole weight."""
    state = checkpoints.step_folder(trained, 3) / "trainer" / "state.safetensors"
    tensors = load_file(state)
    name = min(key for key in tensors if key.startswith(f"{kind}/"))
    changed = {**tensors, name: broken(tensors[name])}
    save_file({key: tensor for key, tensor in changed.items() if tensor is not None}, state)
    with pytest.raises(CorruptDataError, match=r"state\.safetensors: .*: not the weight and moments of this draft"):
        train(SETTINGS, 0, tiny_capture, trained, load_tiny_target, recorder)


@pytest.mark.parametrize(
    "line", [b"\xff\n", b"[" * 9999 + b"\n", b'{"step": 1, "loss": {}}\n', b"[1]\n", b'{"step": 1e999}\n']
)
def test_a_log_of_something_else_is_named(line: bytes, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(line)
    with pytest.raises(CorruptDataError, match=r"metrics\.jsonl: not JSON lines with a step .*; delete it"):
        MetricLog(tmp_path / "metrics.jsonl").read()


def test_a_position_of_steps_that_ended_with_the_epoch_is_refused(
    trained: Path, tiny_capture: Capture, load_tiny_target: Any, recorder: Any
) -> None:
    record = checkpoints.step_folder(trained, 3) / "trainer" / "trainer.json"
    found = json.loads(record.read_text())
    assert found["state"]["position"] == 3
    record.write_text(json.dumps(found | {"state": found["state"] | {"position": [0, 3]}}))
    with pytest.raises(StaleInputError, match=rf"{record}: position \[0, 3\] must .*; delete {trained} to train anew"):
        train(SETTINGS, 0, tiny_capture, trained, load_tiny_target, recorder)


def test_a_full_disk_leaves_the_last_checkpoint(
    tiny_capture: Capture, load_tiny_target: Any, tmp_path: Path, recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = checkpoints.save_file

    def full(tensors: Any, path: Path) -> None:
        if "step-000002" in str(path):
            raise OSError(28, "No space left on device")
        original(tensors, path)

    monkeypatch.setattr(checkpoints, "save_file", full)
    with pytest.raises(DiskFullError):
        train(SETTINGS, 0, tiny_capture, tmp_path / "t", load_tiny_target, recorder)
    assert [path.name for path in (tmp_path / "t" / "checkpoints").iterdir()] == ["step-000001"]


def test_what_a_killed_save_left_is_removed(
    trained: Path, tiny_capture: Capture, load_tiny_target: Any, recorder: Any
) -> None:
    for name in (".step-000004.0c2e9893.tmp", "..step-000004.0c2e9893.tmp.41c9c3c1.tmp", ".step-000002.old"):
        (trained / "checkpoints" / name / "trainer").mkdir(parents=True)
    train(SETTINGS, 0, tiny_capture, trained, load_tiny_target, recorder)
    assert [path.name for path in (trained / "checkpoints").iterdir()] == ["step-000003"]


def test_the_log_forgets_what_will_be_done_again(tmp_path: Path) -> None:
    log = MetricLog(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        log.log(step, {"loss": 1.0 / step})
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 4, "lo')  # killed in the middle of a line
    log.truncate(2)
    log.log(3, {"loss": 0.5})
    assert [(row["step"], row["loss"]) for row in log.read()] == [(1, 1.0), (2, 0.5), (3, 0.5)]


def test_the_digest_is_of_the_whole_sequence() -> None:
    a = extend_digest(extend_digest("", 1, 0.5), 2, 0.25)
    assert a == extend_digest(extend_digest("", 1, 0.5), 2, 0.25)
    assert a != extend_digest(extend_digest("", 1, 0.5), 2, 0.25000000000000006)
    assert a != extend_digest(extend_digest("", 1, 0.25), 2, 0.5)
