"""Which engine runs: plain torch for one CPU process, DeepSpeed with CUDA or more than one."""

import torch

from ..errors import RecipeError
from . import distributed
from .distributed import Ranks
from .engine import Engine, TorchEngine
from .families.base import Family
from .settings import Settings


def wants_deepspeed(settings: Settings) -> bool:
    """Resolve `engine`. Raises RecipeError where the ranks launched do not fit it."""
    world = distributed.world_size()
    if settings.engine == "torch" and world > 1:
        raise RecipeError(
            f"draft.engine torch: runs in one process, but {world} were launched; set draft.engine=deepspeed"
        )
    if settings.engine == "auto":
        return world > 1 or torch.cuda.is_available()
    return settings.engine == "deepspeed"


def make_engine(
    settings: Settings, family: Family, optimizer: torch.optim.Optimizer, ranks: Ranks, use_deepspeed: bool
) -> Engine:
    """The engine that fits this machine."""
    if not use_deepspeed:
        return TorchEngine(family, optimizer, settings.clip_norm)
    from .engine_deepspeed import DeepSpeedEngine

    return DeepSpeedEngine(settings, family, optimizer, ranks)
