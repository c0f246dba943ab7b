"""The same engine on DeepSpeed: several ranks, and ZeRO 0 to 3.

What DeepSpeed calls "averaging" divides by the number of ranks; the scale is multiplied by it, so gradients are sums.
Its learning-rate scheduler, loss scaling and checkpoints (pickles) are not used.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..errors import RecipeError
from .distributed import Ranks
from .engine import NonFiniteGradientError, clip
from .families.base import Family, Inputs
from .head import each_head
from .optimizers import ADAMW_MOMENTS, Moments, read_moments, set_rate, state_after, write_moments


def deepspeed_config(accumulation: int, zero_stage: int, clip_norm: float) -> dict[str, Any]:
    """The whole configuration. At stage 0 clipping is ours: DeepSpeed would step before the norm is known."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip_norm if zero_stage else 0.0,
        "zero_optimization": {"stage": zero_stage, "contiguous_gradients": True, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 40,
    }


class DeepSpeedEngine:
    """One rank's part of the job."""

    def __init__(
        self,
        family: Family,
        optimizer: torch.optim.Optimizer,
        clip_norm: float,
        ranks: Ranks,
        accumulation: int,
        zero_stage: int,
    ) -> None:
        deepspeed = import_deepspeed()
        self.name = f"DeepSpeed ZeRO-{zero_stage}"
        self._family, self._clip_norm, self._ranks, self._stage = family, clip_norm, ranks, zero_stage
        self._zero = deepspeed.zero
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
        if zero_stage == 3:
            # The loss reads the heads' weights directly, so ZeRO-3 must be told to gather them there; not the target's.
            mine = {id(parameter) for parameter in family.parameters()}
            for tensor in (tensor for head in each_head(family.head()) for tensor in (head.weight_VH, head.bias_V)):
                if id(tensor) in mine:
                    self._zero.register_external_parameter(family, tensor)
        config = deepspeed_config(accumulation, zero_stage, clip_norm)
        self._engine, *_ = deepspeed.initialize(model=family, optimizer=optimizer, config=config)
        self._base: torch.optim.Optimizer = optimizer
        self._sharded: Any = self._engine.optimizer if zero_stage else None

    def accumulate(self, inputs: Inputs, scale: float, last: bool) -> Tensor:
        self._engine.set_gradient_accumulation_boundary(last)
        loss, sums = self._engine(inputs)
        self._engine.backward(loss * (scale * self._ranks.world_size), scale_wrt_gas=False)
        return sums  # type: ignore[no-any-return]

    def step(self, rate: float) -> float:
        norm = clip(self._family, self._clip_norm) if self._stage == 0 else 0.0
        set_rate(self._base, rate)
        self._engine.step()
        if self._sharded is not None:
            norm = float(self._engine.get_global_grad_norm())
            if self._sharded.overflow or not norm < float("inf"):
                raise NonFiniteGradientError(f"gradient norm {norm}")
        return norm

    def weights(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        found = {}
        for name, p in self._family.trainable().items():
            full = p if self._stage == 0 else safe_get_full_fp32_param(p)
            found[name] = full.detach().float().cpu()
        return found

    def moments(self) -> Moments:
        from deepspeed.utils import safe_get_full_optimizer_state

        if self._stage == 0:
            return read_moments(self._family, self._base)
        self._link()
        return {
            name: {key: safe_get_full_optimizer_state(p, key).detach().float().cpu() for key in ADAMW_MOMENTS}
            for name, p in self._family.trainable().items()
        }

    def load_moments(self, moments: Mapping[str, Mapping[str, Tensor]], step: int) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        if self._stage == 0:
            write_moments(self._family, self._base, moments, step)
            return
        for flat in self._flat_tensors():
            self._base.state[flat] = state_after(flat, {key: torch.zeros_like(flat) for key in ADAMW_MOMENTS}, step)
        self._link()
        for name, p in self._family.trainable().items():
            for key in ADAMW_MOMENTS:
                safe_set_full_optimizer_state(p, moments[name][key].to(self._ranks.device), key)

    def _link(self) -> None:
        """Let parameters find their moments in ZeRO 1 and 2.

        DeepSpeed does it after the first parameter group's first step, when later groups have no moments yet.
        """
        if self._stage < 3:
            self._sharded._hp_optimizer_states_linked = False
            self._sharded._lazy_init_hp_params_optimizer_state()

    def _flat_tensors(self) -> list[Tensor]:
        """This rank's float32 partitions, which the optimizer steps."""
        name = "fp32_partitioned_groups_flat" if self._stage == 3 else "single_partition_of_fp32_groups"
        return list(getattr(self._sharded, name))

    @contextmanager
    def whole(self) -> Iterator[None]:
        parameters = list(self._family.parameters()) if self._stage == 3 else []
        with self._zero.GatheredParameters(parameters, enabled=self._stage == 3):
            yield


def import_deepspeed() -> Any:
    """DeepSpeed, silenced below warnings. Raises RecipeError where it is not installed.

    Its shared-memory collective for CPUs is left out: it would be compiled now, for minutes, and a build that is killed
    leaves a lock that hangs every later run. Gloo does the same work.
    """
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    try:
        import deepspeed
    except ImportError:
        raise RecipeError(
            "draft.engine deepspeed: the package is not installed; pip install 'draftforge[deepspeed]', "
            "or set draft.engine=torch for one process"
        ) from None
    from deepspeed.utils import logger

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logger.setLevel(logging.WARNING)
    return deepspeed
