"""Checkpoints: a draft that can be served, and beside it what training needs to go on exactly.

    checkpoints/step-000060/            a draft folder (specdec.formats)
    checkpoints/step-000060/trainer/    the newest step only: state.safetensors, trainer.json

Free of rank count and ZeRO stage: weights and moments are stored whole, in float32.
"""

import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .. import fingerprint
from ..data.store import Capture
from ..distributed import Ranks
from ..errors import CorruptDataError, OwnershipError, StaleInputError, one_line
from ..specdec.drafts.base import DraftModule
from ..specdec.formats.checkpoint import DraftMeta, save_draft
from ..storage import clear_leftover, disk_errors, new_folder, read_object, write_json
from .optimizers import MOMENT_KINDS, Moments
from .settings import Settings
from .stopping import CheckpointScore

FOLDER, TRAINER = "checkpoints", "trainer"
STATE_FILE, RECORD_FILE = "state.safetensors", "trainer.json"


@dataclass
class LoopState:
    """Loop state that passes from one step to the next, and that every checkpoint stores."""

    step: int = 0
    """Optimizer steps done."""
    position: int = 0
    """Position in the stream of batches where it goes on (see `BatchPlan`)."""
    smoothed_loss: float = 0.0
    """Exponential average of the loss, for the progress line."""
    loss_digest: str = ""
    """Digest of all losses so far (see `extend_digest`)."""
    supervised_tokens: int = 0
    """Supervised tokens of all steps so far, over all ranks."""
    scored: list[int] = field(default_factory=list)
    """Steps whose drafts are kept."""
    written: list[int] = field(default_factory=list)
    """Steps that were saved and not yet dropped."""
    standings: list[CheckpointScore] = field(default_factory=list)
    """Acceptance of each step that was scored while training."""
    stopped: bool = False
    """Whether training ended before its last step, for want of progress."""


_STATE, _MOST_STEPS = TypeAdapter(LoopState), 1 << 53


class Restored(NamedTuple):
    """State of a training, read back from a checkpoint."""

    state: LoopState
    weights: dict[str, Tensor]
    moments: Moments
    rng: list[dict[str, Any]]
    """Random states, one entry a rank (see `rng_state`)."""


def step_folder(folder: Path, step: int) -> Path:
    """Folder of the draft of a step."""
    return folder / FOLDER / f"step-{step:06d}"


def list_steps(folder: Path) -> list[int]:
    """Steps with a complete draft folder, ascending."""
    found = [re.fullmatch(r"step-(\d{6,})", path.name) for path in (folder / FOLDER).glob("step-*")]
    return sorted(int(match.group(1)) for match in found if match)


def newest(folder: Path) -> int | None:
    """Newest step with a trainer's record, from which training resumes; None where there is none."""
    steps = [step for step in list_steps(folder) if (step_folder(folder, step) / TRAINER / RECORD_FILE).is_file()]
    return steps[-1] if steps else None


def is_finished(folder: Path, steps: int) -> bool:
    """Whether a training of `steps` steps is done: at its last step, or stopped early."""
    last = newest(folder)
    return steps in list_steps(folder) or (last is not None and _read_record(folder, last)[0].stopped)


def save(
    folder: Path,
    draft: DraftModule,
    meta: DraftMeta,
    tokenizer_folder: Path | None,
    state: LoopState,
    weights: Mapping[str, Tensor],
    moments: Moments,
    rng: list[dict[str, Any]],
    write_extra_files: Callable[[Path], None],
) -> Path:
    """Write one checkpoint, whole or not at all; then delete what it makes superfluous. Returns its folder.

    `write_extra_files` adds to the draft's folder what is no part of its weights.
    """
    checkpoint = step_folder(folder, state.step)
    state.written = sorted({*state.written, state.step})
    with new_folder(checkpoint) as staging:
        # 1) the draft, as it is served
        save_draft(draft, staging, meta, tokenizer_folder)
        write_extra_files(staging)

        # 2) what training needs to go on: tensors in one file, the rest as JSON
        trainer = staging / TRAINER
        trainer.mkdir()
        tensors = {f"weights/{name}": tensor for name, tensor in weights.items()}
        tensors |= {f"{key}/{name}": x for name, moment in moments.items() for key, x in moment.items()}
        tensors |= {
            f"rng/{rank}/{key}": x for rank, parts in enumerate(rng) for key, x in parts.items() if _is_tensor(x)
        }

        # safetensors writes contiguous tensors only; random states other than tensors go into the JSON record.
        with disk_errors(trainer):
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, trainer / STATE_FILE)
        plain = [{key: value for key, value in parts.items() if not _is_tensor(value)} for parts in rng]
        write_json(trainer / RECORD_FILE, {"state": asdict(state), "rng": plain})

    # Only when the new folder has its final name do older ones go.
    _delete_superseded(folder, state)
    return checkpoint


def restore(folder: Path, step: int) -> Restored:
    """Read the training state of a step's checkpoint. Raises CorruptDataError naming the file, StaleInputError where
    its position is one of a version whose steps ended with the epoch."""
    trainer = step_folder(folder, step) / TRAINER
    state, rng = _read_record(folder, step)
    if not isinstance(state.position, int):
        raise StaleInputError(
            f"{trainer / RECORD_FILE}: position {state.position} must be a whole number: a version whose steps ended "
            f"with the epoch wrote it, and other batches would follow; delete {folder} to train anew"
        )
    try:
        tensors = load_file(trainer / STATE_FILE)
    except (SafetensorError, OSError) as error:
        raise CorruptDataError(f"{trainer / STATE_FILE}: unreadable ({error}); delete {trainer.parent}") from None

    # Names are "weights/PARAMETER", "rng/RANK/PART" or "MOMENT/PARAMETER".
    weights: dict[str, Tensor] = {}
    moments: Moments = {}
    for key, tensor in tensors.items():
        kind, _, name = key.partition("/")
        if kind == "weights":
            weights[name] = tensor
        elif kind == "rng":
            rank, _, part = name.partition("/")
            if rank.isdecimal() and int(rank) < len(rng):
                rng[int(rank)][part] = tensor
        else:
            moments.setdefault(name, {})[kind] = tensor
    try:
        _check_rng(rng)
    except (KeyError, IndexError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise CorruptDataError(
            f"{trainer}: not the random numbers of a training ({one_line(error)}); delete {trainer.parent}"
        ) from None
    return Restored(state, weights, moments, rng)


def _check_rng(parts: list[dict[str, Any]]) -> None:
    """Raise where random states cannot be set."""
    version, numbers, gauss = parts[0]["python"]
    random.Random().setstate((version, tuple(numbers), gauss))
    for part in parts:
        torch.Generator().set_state(part["torch"])


def check_fits(folder: Path, restored: Restored, shapes: Mapping[str, torch.Size]) -> None:
    """Raise CorruptDataError, naming the file, where saved tensors are not the weights and moments of trainable
    parameters of these shapes."""
    place = step_folder(folder, restored.state.step)
    for name in sorted({*shapes, *restored.weights, *restored.moments}):
        # A parameter without a gradient so far has no moments.
        moments = restored.moments.get(name, {})
        found = [None if one is None else one.shape for one in (restored.weights.get(name), *moments.values())]
        if name not in shapes or {*found} != {shapes[name]} or {*moments} not in (set(), *MOMENT_KINDS):
            raise CorruptDataError(
                f"{place / TRAINER / STATE_FILE}: {name}: not the weight and moments of this draft; delete {place}"
            )


def _read_record(folder: Path, step: int) -> tuple[LoopState, list[dict[str, Any]]]:
    trainer = step_folder(folder, step) / TRAINER
    record = read_object(trainer / RECORD_FILE)
    try:
        # JSON knows no tuples: the scores are made again from lists.
        state = LoopState(**record["state"])
        state.standings = [CheckpointScore(*score) for score in state.standings]
        rng = [dict(parts) for parts in record["rng"]]
        if isinstance(state.position, int):  # else it is refused as another version's
            _STATE.validate_python(asdict(state))
            if state.step != step or not 0 <= state.position < _MOST_STEPS:
                raise ValueError(f"step {state.step}, position {state.position}")
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptDataError(
            f"{trainer / RECORD_FILE}: not a trainer's record ({type(error).__name__} {error}); delete {trainer.parent}"
        ) from None

    # A draft that was deleted since the record was written is not listed.
    state.written = [step for step in state.written if step_folder(folder, step).is_dir()]
    return state, rng


def rng_state(ranks: Ranks) -> list[dict[str, Any]]:
    """Every rank's random state: torch as tensors, Python's as JSON. All ranks must call it."""
    # torch: gathered from all ranks, for CUDA the state of each rank's own device too.
    torch_states = ranks.gather_bytes(torch.get_rng_state())
    cuda = ranks.device.type == "cuda"
    cuda_states = ranks.gather_bytes(torch.cuda.get_rng_state(ranks.device)) if cuda else []

    # Python: every rank is given rank 0's.
    version, numbers, gauss = random.getstate()
    parts: list[dict[str, Any]] = [{"torch": state} for state in torch_states]
    for part, state in zip(parts, cuda_states):
        part["cuda"] = state
    parts[0]["python"] = [version, list(numbers), gauss]
    return parts


def restore_rng(parts: list[dict[str, Any]], ranks: Ranks) -> None:
    """Restore this rank's random states; a rank that did not exist at the save keeps its own seed."""
    if ranks.rank < len(parts):
        mine = parts[ranks.rank]
        torch.set_rng_state(mine["torch"])
        if ranks.device.type == "cuda" and "cuda" in mine:
            torch.cuda.set_rng_state(mine["cuda"], ranks.device)
    # Python's generator is stored once and restored on every rank.
    version, numbers, gauss = parts[0]["python"]
    random.setstate((version, tuple(numbers), gauss))


@contextmanager
def temporary_draft_folder(folder: Path) -> Iterator[Path]:
    """Temporary folder beside the checkpoints for a draft that is scored; deleted afterwards."""
    temporary = folder / FOLDER / ".scored"
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def delete_leftovers(folder: Path) -> None:
    """Delete hidden folders beside the checkpoints, which a killed run left half-written or half-deleted."""
    for leftover in (folder / FOLDER).glob(".*"):
        clear_leftover(leftover)
        shutil.rmtree(leftover, ignore_errors=True)


def _delete_superseded(folder: Path, state: LoopState) -> None:
    """Delete older trainers, and older drafts that no score needs; renamed first, so that none is ever seen in part."""
    for step in state.written:
        if step == state.step:
            continue
        # A scored step keeps its draft and loses its trainer's state; any other goes altogether.
        old = step_folder(folder, step)
        superseded = old / TRAINER if step in state.scored else old
        if superseded.exists():
            # A hidden name is not found as a checkpoint, and `delete_leftovers` removes it after a kill.
            gone = old.parent / f".{old.name}.old"
            shutil.rmtree(gone, ignore_errors=True)
            superseded.rename(gone)
            shutil.rmtree(gone)
    state.written = sorted({*state.scored, state.step})


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


OWNER_FILE = "train.json"


def claim(folder: Path, settings: Settings, seed: int, capture: Capture) -> None:
    """Claim the folder for this run by a record of its settings, seed and capture.

    Raises OwnershipError where the record is another run's, or the folder holds files but no record.
    """
    # A warm start is identified by its content: paths may change.
    start = None if settings.init_from is None else draft_digest(settings.init_from)
    ours = {
        "draft": settings.identity(),
        "seed": seed,
        "capture": capture.digest,
        "init_from": start,
    }

    # A folder without a record is claimed, if it is empty.
    if not (folder / OWNER_FILE).is_file():
        if folder.is_dir() and any(folder.iterdir()):
            raise OwnershipError(f"{folder}: is not empty and was not made by training; choose another folder")
        write_json(folder / OWNER_FILE, ours)
        return

    # Otherwise every value must be the same; the first that differs is named.
    theirs = flatten(read_object(folder / OWNER_FILE))
    for name, value in flatten(ours).items():
        if theirs.get(name) != value:
            raise OwnershipError(f"{folder}: belongs to another run, whose {name} is {theirs.get(name)}, not {value}")


def draft_digest(folder: Path) -> str:
    """Digest of the files of a draft folder."""
    return fingerprint.of_files(folder, [path.name for path in folder.iterdir() if path.is_file()])


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flat dict of nested dicts, keys joined by dots."""
    if not isinstance(value, dict):
        return {prefix: value}
    parts = [flatten(inner, f"{prefix}.{key}" if prefix else key) for key, inner in value.items()]
    return {name: inner for part in parts for name, inner in part.items()}
