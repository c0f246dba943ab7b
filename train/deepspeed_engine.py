"""DeepSpeed engine, the counterpart of `TorchEngine` for several ranks and ZeRO stages 0 to 3.

What DeepSpeed calls "averaging" divides by the number of ranks; the scale is multiplied by it, so gradients are sums.
Its learning-rate scheduler, loss scaling and checkpoints (pickles) are not used.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..distributed import Ranks
from ..errors import RecipeError
from .families.base import Family, Inputs
from .losses.linear_head import each_head
from .optimizers import COUNTER, Moments, Muon, MuonAdamW, read_moments, set_rate, shards_of, state_after, write_moments
from .settings import Settings
from .training_engine import NO_DEEPSPEED, NonFiniteGradientError, clip

_MOST_REDUCED = 500_000_000  # numbers; DeepSpeed's own default


def deepspeed_config(settings: Settings, trained: int) -> dict[str, Any]:
    """DeepSpeed's configuration, all of it, for `trained` parameters (a count of numbers).

    At stage 0 this engine clips: DeepSpeed would step before the norm is known.
    """
    # ZeRO: sharding, communication and offload.
    zero: dict[str, Any] = {"stage": settings.zero_stage, "contiguous_gradients": True, "overlap_comm": False}
    zero["reduce_bucket_size"] = min(trained, _MOST_REDUCED)  # it makes a buffer of so many, however few there are
    if settings.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}

    # The rest. One "micro-batch" is one forward pass, whatever it holds; nothing is printed by DeepSpeed.
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": settings.accumulation,
        "gradient_clipping": settings.clip_norm if settings.zero_stage else 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # DeepSpeed's own CPU Adam would have to be compiled
        "steps_per_print": 1 << 40,
    }


class DeepSpeedEngine:
    """Engine on DeepSpeed, one rank's part of it; its methods are described in `Engine`."""

    def __init__(self, settings: Settings, family: Family, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
        # 1) DeepSpeed itself, and what ZeRO-3 must know of the family
        deepspeed = import_deepspeed()
        self._stage = stage = settings.zero_stage
        self.name = f"DeepSpeed ZeRO-{stage}" + ", optimizer offloaded" * settings.offload_optimizer
        self._family, self._clip_norm, self._ranks = family, settings.clip_norm, ranks
        self._zero = deepspeed.zero
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
        if stage == 3:
            # The loss reads the heads' weights directly, so ZeRO-3 must be told to gather them there. A head of the
            # frozen target's is no part of the family: it is whole as it is.
            mine = {id(p) for p in family.parameters()}
            for tensor in (tensor for head in each_head(family.head()) for tensor in head.tensors):
                if tensor is not None and id(tensor) in mine:
                    self._zero.register_external_parameter(family, tensor)

        # 2) the engine around the family
        names = {id(parameter): name for name, parameter in family.trainable().items()}
        config = deepspeed_config(settings, sum(parameter.numel() for parameter in family.trainable().values()))
        self._engine, *_ = deepspeed.initialize(model=family, optimizer=optimizer, config=config)

        # 3) which part of each parameter this rank holds
        self._base = optimizer
        self._sharded: Any = self._engine.optimizer if stage else None
        shards = shards_of(self._sharded, stage, ranks.rank) if stage else []
        self._shards = {names[id(shard.parameter)]: shard for shard in shards}
        if isinstance(optimizer, Muon | MuonAdamW):
            optimizer.use_shards(shards, ranks)

    def accumulate(self, inputs: Inputs, scale: float, last: bool) -> Tensor:
        # The loss times the world size undoes DeepSpeed's mean over ranks; `scale_wrt_gas=False` its mean over
        # micro-batches. What remains is a sum.
        self._engine.set_gradient_accumulation_boundary(last)
        loss, sums = self._engine(inputs)
        self._engine.backward(loss * (scale * self._ranks.world_size), scale_wrt_gas=False)
        return sums  # type: ignore[no-any-return]

    def step(self, rate: float) -> float:
        # Stage 0: gradients are whole on every rank, so the norm is checked before the step.
        norm = clip(self._family, self._clip_norm) if self._stage == 0 else 0.0
        set_rate(self._base, rate)
        self._engine.step()
        # Stages 1 to 3: DeepSpeed computes the norm across shards, as a part of its step.
        if self._sharded is not None:
            norm = float(self._engine.get_global_grad_norm())
            if self._sharded.overflow or not norm < float("inf"):
                raise NonFiniteGradientError(f"gradient norm {norm}")
        return norm

    def weights(self) -> dict[str, Tensor]:
        if self._stage == 0:
            return {name: p.detach().float().cpu() for name, p in self._family.trainable().items()}
        return {name: shard.gather(shard.flat.detach(), self._ranks).cpu() for name, shard in self._shards.items()}

    def moments(self) -> Moments:
        if self._stage == 0:
            return read_moments(self._family, self._base)
        # Each rank holds moments of its parts only: they are gathered by name. The step counter is no moment.
        found: Moments = {}
        for name, shard in self._shards.items():
            state = self._base.state.get(shard.flat, {})  # of one kind on all ranks
            found |= {name: {k: shard.gather(x, self._ranks).cpu() for k, x in state.items() if k != COUNTER}}
        return found

    def load_moments(self, moments: Mapping[str, Mapping[str, Tensor]], step: int) -> None:
        if self._stage == 0:
            write_moments(self._family, self._base, moments, step)
            return
        # Several parameters may lie in one flat tensor, whose state is made once; then each part is filled in from the
        # whole moment.
        fresh: dict[int, dict[str, Tensor]] = {}
        for name, shard in self._shards.items():
            flat = shard.flat
            if id(flat) not in fresh:
                zeros = {key: torch.zeros_like(flat) for key in moments[name]}
                fresh[id(flat)] = self._base.state[flat] = state_after(flat, zeros, step)
            for key, moment in moments[name].items():
                shard.in_flat(fresh[id(flat)][key]).copy_(shard.in_whole(moment))

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        # Below stage 3 every rank has whole weights: there is nothing to gather.
        parameters = list(self._family.parameters()) if self._stage == 3 else []
        with self._zero.GatheredParameters(parameters, enabled=self._stage == 3):
            yield


def import_deepspeed() -> Any:
    """DeepSpeed, silenced below warnings. Raises RecipeError where it is not installed.

    Its shared-memory collective for CPUs is left out: it would be compiled now, for minutes, and a build that is killed
    leaves a lock that hangs every later run. Gloo does the same work.
    """
    # Its logger is silenced before the import, which logs already, and again once the package made its own.
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    try:
        import deepspeed
    except ImportError:
        raise RecipeError(NO_DEEPSPEED) from None
    from deepspeed.utils import logger

    # The shared-memory collective counts as not compatible, so that it is never built.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logger.setLevel(logging.WARNING)
    return deepspeed
