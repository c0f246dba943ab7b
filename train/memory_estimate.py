"""Resources of a training, found out early: bytes on disk, the step that takes most of the device's memory, and the
settings to turn down where memory runs out."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from ..data.batches import BatchPlan, OptimizerStep
from ..data.store import Sample
from ..errors import DeviceMemoryError, one_line
from .families.base import Family, bytes_of
from .settings import Settings


@dataclass(frozen=True)
class DiskFootprint:
    """Bytes on disk of one checkpoint, and what they are of."""

    draft: int
    """Draft folder as it is served."""
    parameters: int
    """Trainable parameters."""

    @classmethod
    def from_family(cls, family: Family) -> "DiskFootprint":
        """Of a training as it begins, before an engine shards it."""
        return cls(family.saved_bytes(), sum(parameter.numel() for parameter in family.trainable().values()))

    @classmethod
    def expected(cls, draft: nn.Module, beside: nn.Module | None) -> "DiskFootprint":
        """Of a training that is still to begin: of a draft that is frozen as it will be, and what stands beside it."""
        own, others = list(draft.parameters()), [] if beside is None else list(beside.parameters())
        trained = [one for one in [*own, *others] if one.requires_grad]
        # Adapters beside the draft are merged into what is saved.
        saved = [*own, *(one for one in others if not one.requires_grad)]
        return cls(bytes_of(saved), sum(one.numel() for one in trained))

    @property
    def trainer(self) -> int:
        """Bytes of trainable weights and two moments, float32: 12 a parameter."""
        return 12 * self.parameters

    @property
    def checkpoint(self) -> int:
        """Bytes of one save: the draft and the trainer's state."""
        return self.draft + self.trainer

    def bytes_to_write(self, settings: Settings, step: int) -> int:
        """Bytes that training on from `step` writes and keeps. An older checkpoint goes when the next one is there."""
        # Scored steps that are still to come, of which `keep_best` and the last one stay.
        every = settings.score_every or settings.steps
        scored = -(-settings.steps // every) - step // every
        kept = scored if settings.keep_best is None else min(scored, settings.keep_best + 1)

        # Beside the kept drafts: one whole checkpoint while it is written, and the trainer's state of the one before.
        return kept * self.draft + self.checkpoint + self.trainer if step < settings.steps else 0


def longest_step(plan: BatchPlan, samples: list[Sample], position: int) -> OptimizerStep:
    """The step of a position's epoch that holds its longest sample: the one that needs most memory, or nearly."""

    def size(step: OptimizerStep) -> tuple[int, int]:
        lengths = (len(samples[at].prompt_ids) + len(samples[at].answer_ids) for at in step.samples)
        return max(lengths), step.tokens

    return max(plan.steps_of_epoch(position), key=size)


@contextmanager
def explain_out_of_memory(settings: Settings, rank: int) -> Iterator[None]:
    """Turn "out of memory", which torch says in several ways, into DeviceMemoryError naming what to turn down."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        # A CPU allocation that fails is a plain RuntimeError: only its text tells.
        known = isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
        if not known or isinstance(error, DeviceMemoryError):
            raise

        # Only settings that this family has are named.
        recompute = "activation_checkpointing" in type(settings).model_fields
        raise DeviceMemoryError(
            f"draft.tokens_per_step {settings.tokens_per_step}: a step does not fit into rank {rank}'s memory "
            f"({one_line(error, 160)}); raise accumulation (now {settings.accumulation}), lower logits_bytes or "
            f"tokens_per_step, {'set activation_checkpointing, ' * recompute}or a higher zero_stage on several GPUs"
        ) from error


def reset_peak_memory(device: torch.device) -> None:
    """Reset the GPU's peak memory: what this process did before does not count."""
    if device.type == "cuda":
        # A training that goes on may have used no GPU before, which the reset would refuse.
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> dict[str, float]:
    """Peak memory, `peak_gib`: the most that tensors took on a GPU since the reset, target included; empty on a CPU."""
    return {"peak_gib": torch.cuda.max_memory_allocated(device) / 2**30} if device.type == "cuda" else {}
