"""Where ZeRO keeps a parameter's numbers: a run of them on each rank, inside a flat float32 tensor that is stepped.

Read from DeepSpeed's own tables. Its setters for optimizer state are not used: at stage 3 they fail where the ranks do
not divide a parameter evenly.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .distributed import Ranks


@dataclass(frozen=True)
class Shard:
    """This rank's part of one parameter; `size` may be 0. Every rank lists all parameters in the same order."""

    parameter: nn.Parameter
    shape: torch.Size
    """Of the whole parameter, which at stage 3 does not know it itself."""
    flat: Tensor
    at: int
    """Where the part begins in `flat`."""
    start: int
    """Where it begins in the flattened parameter."""
    size: int

    def of(self, flat: Tensor) -> Tensor:
        """The part, inside a tensor laid out like `flat`."""
        return flat.narrow(0, self.at, self.size)

    def cut(self, whole: Tensor) -> Tensor:
        """The part, of the whole parameter or something of its shape."""
        return whole.flatten().narrow(0, self.start, self.size)

    def gather(self, flat: Tensor, ranks: Ranks) -> Tensor:
        """The whole, float32, on this rank's device. All ranks must call it."""
        return ranks.sum(self.alone(flat, ranks))

    def alone(self, flat: Tensor, ranks: Ranks) -> Tensor:
        """The whole with zeros where other ranks have it."""
        whole = torch.zeros(self.shape, dtype=torch.float32, device=ranks.device)
        self.cut(whole).copy_(self.of(flat))
        return whole


def shards_of(sharded: Any, stage: int, rank: int) -> list[Shard]:
    """All trainable parameters under DeepSpeed's optimizer of stage 1, 2 or 3."""
    if stage == 3:
        return [
            _third(sharded, parameter, flat, rank)
            for group, flat in zip(sharded.fp16_groups, sharded.fp32_partitioned_groups_flat, strict=True)
            for parameter in group
        ]
    return [
        _second(parameter, flat)
        for group, flat in zip(sharded.bit16_groups, sharded.single_partition_of_fp32_groups, strict=True)
        for parameter in group
    ]


def _second(parameter: Any, flat: Tensor) -> Shard:
    """Stages 1 and 2 cut a flat tensor of all parameters: a rank has many whole ones, and a part of the outer two."""
    held = parameter._hp_mapping
    if held is None:
        return Shard(parameter, parameter.shape, flat, 0, 0, 0)
    inside, whole = held.hp_fragment_address, held.lp_fragment_address
    return Shard(parameter, parameter.shape, flat, inside.start, whole.start, whole.numel)


def _third(sharded: Any, parameter: Any, flat: Tensor, rank: int) -> Shard:
    """Stage 3 cuts every parameter into equal parts, the last ones padded."""
    _, at, size = sharded.grad_position[sharded.get_param_id(parameter)]
    start = min(size * rank, parameter.ds_numel)
    return Shard(parameter, parameter.ds_shape, flat, at, start, min(size, parameter.ds_numel - start))
