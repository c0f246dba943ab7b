"""Optimizers over a family's parameters, and their state by parameter name, free of how ranks shard it.

AdamW takes everything, or Muon takes the matrices inside the network and AdamW the rest: embeddings and heads, whose
rows are looked up one by one, tensors that hold several matrices (experts) or filters, norms and biases.

`Muon` makes the steps of `torch.optim.Muon` (`match_rms_adamw`), which cannot take its place: it refuses the flat parts
of matrices that ZeRO 1 to 3 leave on a rank, and its products are bfloat16 always, so that a float32 training would
depend on how it is sharded.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed import Ranks
from .families.base import Family
from .settings import Settings


def learning_rate(step: int, steps: int, warmup_steps: int, peak: float, final_share: float) -> float:
    """Learning rate of step `step` (0-based): linear warm-up to `peak`, then a cosine down to `peak * final_share`."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, steps - warmup_steps - 1)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return peak * (final_share + (1.0 - final_share) * cosine)


@dataclass(frozen=True)
class Shard:
    """Shard: this rank's part of one parameter, `size` numbers, which may be 0.

    Every rank lists all parameters in the same order.
    """

    parameter: nn.Parameter
    shape: torch.Size
    """Shape of the whole parameter, which at stage 3 does not know it itself."""
    flat: Tensor
    """DeepSpeed's flat float32 tensor, which holds this rank's parts of many parameters."""
    at: int
    """Where the part begins in `flat`."""
    start: int
    """Where the part begins in the flattened parameter."""
    size: int

    def in_flat(self, flat: Tensor) -> Tensor:
        """View of the part in a tensor laid out like `flat`."""
        return flat.narrow(0, self.at, self.size)

    def in_whole(self, whole: Tensor) -> Tensor:
        """View of the part in the whole parameter, or in a tensor of its shape."""
        return whole.flatten().narrow(0, self.start, self.size)

    def gather(self, flat: Tensor, ranks: Ranks) -> Tensor:
        """All-gather: the whole tensor, float32, on this rank's device. All ranks must call it.

        `flat`: laid out like the shard's own, e.g. a moment. Parts do not overlap, so their sum is the whole.
        """
        return ranks.sum(self.zero_filled(flat, ranks))

    def zero_filled(self, flat: Tensor, ranks: Ranks) -> Tensor:
        """Tensor of the whole's shape, with this rank's part in place and zeros where other ranks hold theirs."""
        whole = torch.zeros(self.shape, dtype=torch.float32, device=ranks.device)
        self.in_whole(whole).copy_(self.in_flat(flat))
        return whole


def shards_of(sharded: Any, stage: int, rank: int) -> list[Shard]:
    """This rank's parts of all trainable parameters under DeepSpeed's optimizer of ZeRO stage 1, 2 or 3."""
    # The two optimizers name their groups differently; each group has one flat tensor of float32 weights.
    if stage == 3:
        return [
            _stage3_shard(sharded, parameter, flat, rank)
            for group, flat in zip(sharded.fp16_groups, sharded.fp32_partitioned_groups_flat, strict=True)
            for parameter in group
        ]
    return [
        _flat_shard(parameter, flat)
        for group, flat in zip(sharded.bit16_groups, sharded.single_partition_of_fp32_groups, strict=True)
        for parameter in group
    ]


def _flat_shard(parameter: Any, flat: Tensor) -> Shard:
    """Shard at ZeRO stage 1 or 2, which cut a flat tensor of all parameters: a rank holds many whole parameters, and
    parts of the first and the last."""
    # DeepSpeed notes on each parameter which fragment of it this rank holds, if any.
    held = parameter._hp_mapping
    if held is None:
        return Shard(parameter, parameter.shape, flat, 0, 0, 0)
    inside, whole = held.hp_fragment_address, held.lp_fragment_address
    return Shard(parameter, parameter.shape, flat, inside.start, whole.start, whole.numel)


def _stage3_shard(sharded: Any, parameter: Any, flat: Tensor, rank: int) -> Shard:
    """Shard at ZeRO stage 3, which cuts every parameter into equal parts, the last ones padded."""
    _, at, size = sharded.grad_position[sharded.get_param_id(parameter)]
    # Small parameters end before the last ranks' parts: there the size is 0.
    start = min(size * rank, parameter.ds_numel)
    return Shard(parameter, parameter.ds_shape, flat, at, start, min(size, parameter.ds_numel - start))


MOMENTUM = "momentum_buffer"
_BETA = 0.95
_QUINTIC = (3.4445, -4.7750, 2.0315)  # pushes small singular values up fastest; ends between 0.7 and 1.2
_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024; scaled to AdamW's steps as in arXiv 2502.16982): Nesterov momentum, orthogonalised;
    decoupled weight decay. Parameters are matrices, or flat parts of matrices after `use_shards`."""

    def __init__(self, groups: Iterable[Mapping[str, Any]], weight_decay: float, dtype: torch.dtype) -> None:
        """`dtype`: that of the matrix products in Newton-Schulz."""
        super().__init__([dict(group) for group in groups], {"lr": 0.0, "weight_decay": weight_decay})
        self._dtype = dtype
        self._matrices = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        self._parts: dict[int, list[tuple[Shard, int]]] = {}
        self._ranks: Ranks | None = None

    def use_shards(self, shards: Iterable[Shard], ranks: Ranks) -> None:
        """Switch to flat parameters, which hold these parts of the matrices. All ranks must call it."""
        self._ranks, shards = ranks, [shard for shard in shards if id(shard.parameter) in self._matrices]
        # How many ranks hold a part of each matrix: one collective for all of them.
        holders = ranks.sum(torch.tensor([float(shard.size > 0) for shard in shards], device=ranks.device))
        for shard, count in zip(shards, holders.tolist(), strict=True):
            self._parts.setdefault(id(shard.flat), []).append((shard, int(count)))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step. All ranks must call it."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group["lr"], group["weight_decay"])

    def _step(self, parameter: Tensor, rate: float, weight_decay: float) -> None:
        # 1) momentum, looked ahead as Nesterov does; decay
        state = self.state[parameter]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(parameter)
        state[MOMENTUM].lerp_(parameter.grad, 1 - _BETA)
        ahead = parameter.grad.lerp(state[MOMENTUM], _BETA)  # type: ignore[union-attr]
        parameter.mul_(1 - rate * weight_decay)

        # 2) a whole matrix moves along its orthogonalised momentum
        if parameter.ndim == 2:
            parameter.add_(orthogonal(ahead, self._dtype), alpha=-rate * _size(parameter.shape))
            return

        # 3) of one that is cut, every holder orthogonalises the whole and moves its own part
        assert self._ranks is not None
        for shard, holders in self._parts[id(parameter)]:
            if holders > 1 or shard.size:  # a matrix that lies whole on one rank is that rank's alone
                whole = shard.gather(ahead, self._ranks) if holders > 1 else shard.zero_filled(ahead, self._ranks)
                if shard.size:
                    mine = shard.in_whole(orthogonal(whole, self._dtype)).to(parameter)
                    shard.in_flat(parameter).add_(mine, alpha=-rate * _size(shard.shape))


def orthogonal(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Orthogonalisation: about U V^T of a matrix U S V^T, by Newton-Schulz iterations

    X <- a X + (b X X^T + c (X X^T)^2) X
    """
    # Wide is cheaper: the Gram matrix has the size of the shorter side.
    tall = matrix.shape[0] > matrix.shape[1]
    X_MN = (matrix.T if tall else matrix).to(dtype)
    X_MN = X_MN / X_MN.norm().clamp_min(1e-7)  # the iteration needs singular values of at most 1

    # Two products an iteration beside the Gram matrix, with the additions fused into them.
    a, b, c = _QUINTIC
    for _ in range(_ITERATIONS):
        gram_MM = X_MN @ X_MN.T
        X_MN = torch.addmm(X_MN, torch.addmm(gram_MM, gram_MM, gram_MM, beta=b, alpha=c), X_MN, beta=a)
    return X_MN.T if tall else X_MN


def _size(shape: torch.Size) -> float:
    """Scale of Muon's update, at which the RMS of its entries is about AdamW's, 0.2 (arXiv 2502.16982)."""
    return 0.2 * math.sqrt(max(shape))


Moments = dict[str, dict[str, Tensor]]
"""Parameter name -> its moments (exp_avg and exp_avg_sq of AdamW, momentum_buffer of Muon), float32, unsharded."""
MOMENT_KINDS = ({"exp_avg", "exp_avg_sq"}, {MOMENTUM})
COUNTER = "step"
"""AdamW counts its steps beside the moments; the loop knows their number."""
_SHARE, _MUON = "rate_share", "muon"


class MuonAdamW(torch.optim.Optimizer):
    """Muon and AdamW as one optimizer, with common parameter groups and one state."""

    def __init__(self, muon: Muon, adamw: torch.optim.AdamW) -> None:
        super().__init__([*muon.param_groups, *adamw.param_groups], {})  # the same dicts: a rate set here holds there
        self._muon, self._adamw = muon, adamw
        for part in (muon, adamw):
            part.state = self.state

    def use_shards(self, shards: Iterable[Shard], ranks: Ranks) -> None:
        """Switch Muon to flat parameters, which hold these parts of the matrices. All ranks must call it."""
        self._muon.use_shards(shards, ranks)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step both on the groups that are present: DeepSpeed removes all groups but one, and steps each by itself."""
        for part, is_muon in ((self._muon, True), (self._adamw, False)):
            part.param_groups = [group for group in self.param_groups if (_MUON in group) == is_muon]
            part.step()


def make_optimizer(family: Family, settings: Settings) -> torch.optim.Optimizer:
    """Optimizer of the recipe, AdamW or Muon with AdamW; decay on matrices only. The loop sets the rate."""
    hidden, tables, rest = family.parameter_groups()
    # AdamW alone: matrices and tables decay, the rest does not.
    if settings.optimizer == "adamw":
        return _adamw(family, settings, [*hidden, *tables], rest)

    # Muon for the matrices inside the network; its rate is given as a share of AdamW's, which alone has a schedule.
    share = settings.muon_rate / settings.learning_rate
    muon = Muon(_groups(family, hidden, share, **{_MUON: 1.0}), settings.weight_decay, family.loss_settings.dtype)
    if not (tables or rest):
        return muon  # adapters: matrices only
    return MuonAdamW(muon, _adamw(family, settings, tables, rest))


def _adamw(
    family: Family, settings: Settings, decayed: list[torch.nn.Parameter], rest: list[torch.nn.Parameter]
) -> torch.optim.AdamW:
    groups = [
        *_groups(family, decayed, 1.0, weight_decay=settings.weight_decay),
        *_groups(family, rest, 1.0, weight_decay=0.0),
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(settings.beta1, settings.beta2), fused=True)


def _groups(family: Family, parameters: list[torch.nn.Parameter], share: float, **options: float) -> list[Any]:
    """Parameter groups with their shares of AdamW's rate: the family's slow parameters apart. No group is empty."""
    slow = {id(p) for p in family.slow_parameters()}
    groups: list[Any] = [
        {"params": [p for p in parameters if id(p) not in slow], _SHARE: share, **options},
        {"params": [p for p in parameters if id(p) in slow], _SHARE: share * family.slow_rate_share, **options},
    ]
    return [group for group in groups if group["params"]]


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all groups: `rate` for AdamW, and Muon's in proportion."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get(_SHARE, 1.0)


def reset_state(optimizer: torch.optim.Optimizer) -> None:
    """Set all moments to zero, as before the first step; their memory stays allocated."""
    for state in optimizer.state.values():
        for tensor in state.values():
            tensor.zero_()


def read_moments(family: Family, optimizer: torch.optim.Optimizer) -> Moments:
    """State of an unsharded optimizer by parameter name; empty before the first step."""
    state = optimizer.state
    return {
        name: {key: moment.detach().float().cpu() for key, moment in state[p].items() if key != COUNTER}
        for name, p in family.trainable().items()
        if p in state
    }


def write_moments(
    family: Family, optimizer: torch.optim.Optimizer, moments: Mapping[str, Mapping[str, Tensor]], step: int
) -> None:
    """Put saved state into an unsharded optimizer."""
    for name, p in family.trainable().items():
        if name in moments:
            optimizer.state[p] = state_after(p, moments[name], step)


def state_after(p: Tensor, moments: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
    """Optimizer state of a tensor after `step` steps, on its device, where fused AdamW wants its counter too."""
    state = {key: moment.to(p.device, torch.float32, copy=True) for key, moment in moments.items()}
    # Muon has no step counter, AdamW needs one for its bias correction.
    if MOMENTUM not in state:
        state[COUNTER] = torch.tensor(float(step), dtype=torch.float32, device=p.device)
    return state
