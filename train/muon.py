"""Muon (K. Jordan, 2024): a step along each matrix's momentum, made orthogonal.

The step is as large as one of AdamW's (0.2 sqrt(longer side); J. Liu et al., arXiv 2502.16982), so that both live with
similar rates. Momentum and decay work number by number, so a rank needs no more than its own part of a matrix for them;
only to be made orthogonal must a matrix be whole.

Shapes: M rows, N columns, M <= N; F numbers of a flat part.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .distributed import Ranks
from .shards import Shard

MOMENTUM = "momentum_buffer"
_BETA = 0.95
_QUINTIC = (3.4445, -4.7750, 2.0315)  # pushes small singular values up fastest; ends between 0.7 and 1.2
_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; decay decoupled. Parameters are matrices, or flat parts told by `spread`."""

    def __init__(self, groups: Iterable[Mapping[str, Any]], weight_decay: float, dtype: torch.dtype) -> None:
        """`dtype`: of the matrix products."""
        super().__init__([dict(group) for group in groups], {"lr": 0.0, "weight_decay": weight_decay})
        self._dtype = dtype
        self._matrices = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        self._parts: dict[int, list[tuple[Shard, int]]] = {}
        self._ranks: Ranks | None = None

    def spread(self, shards: Iterable[Shard], ranks: Ranks) -> None:
        """From now on the parameters are flat, and hold these parts of the matrices. All ranks must call it."""
        self._ranks, shards = ranks, [shard for shard in shards if id(shard.parameter) in self._matrices]
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
        state = self.state[parameter]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(parameter)
        state[MOMENTUM].lerp_(parameter.grad, 1 - _BETA)
        ahead = parameter.grad.lerp(state[MOMENTUM], _BETA)  # type: ignore[union-attr]
        parameter.mul_(1 - rate * weight_decay)
        if parameter.ndim == 2:
            parameter.add_(orthogonal(ahead, self._dtype), alpha=-rate * _size(parameter.shape))
            return
        assert self._ranks is not None
        for shard, holders in self._parts[id(parameter)]:
            if holders > 1 or shard.size:  # a matrix that lies whole on one rank is that rank's alone
                whole = shard.gather(ahead, self._ranks) if holders > 1 else shard.alone(ahead, self._ranks)
                if shard.size:
                    mine = shard.cut(orthogonal(whole, self._dtype)).to(parameter)
                    shard.of(parameter).add_(mine, alpha=-rate * _size(shard.shape))


def orthogonal(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """About U V^T of a matrix U S V^T: Newton-Schulz iterations X <- a X + (b X X^T + c (X X^T)^2) X."""
    tall = matrix.shape[0] > matrix.shape[1]
    X_MN = (matrix.T if tall else matrix).to(dtype)
    X_MN = X_MN / X_MN.norm().clamp_min(1e-7)  # the iteration needs singular values of at most 1
    a, b, c = _QUINTIC
    for _ in range(_ITERATIONS):
        gram_MM = X_MN @ X_MN.T
        X_MN = torch.addmm(X_MN, torch.addmm(gram_MM, gram_MM, gram_MM, beta=b, alpha=c), X_MN, beta=a)
    return X_MN.T if tall else X_MN


def _size(shape: torch.Size) -> float:
    return 0.2 * math.sqrt(max(shape))
