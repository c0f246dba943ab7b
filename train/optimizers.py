"""Optimizers over a family's parameters, and their state by parameter name, free of how it is spread.

AdamW takes everything, or Muon takes the matrices inside the network and AdamW the rest: embeddings and heads, whose
rows are looked up one by one, tensors that hold several matrices (experts) or filters, norms and biases.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .distributed import Ranks
from .families.base import Family
from .muon import MOMENTUM, Muon
from .settings import Settings
from .shards import Shard

Moments = dict[str, dict[str, Tensor]]
"""Parameter name -> its moments (exp_avg and exp_avg_sq of AdamW, momentum_buffer of Muon), float32, unsharded."""
COUNTER = "step"
"""AdamW counts its steps beside the moments; the loop knows their number."""
_SHARE, _MUON = "rate_share", "muon"


class MuonAdamW(torch.optim.Optimizer):
    """Muon and AdamW as one optimizer, with common groups and state."""

    def __init__(self, muon: Muon, adamw: torch.optim.AdamW) -> None:
        super().__init__([*muon.param_groups, *adamw.param_groups], {})  # the same dicts: a rate set here holds there
        self._muon, self._adamw = muon, adamw
        for part in (muon, adamw):
            part.state = self.state

    def spread(self, shards: Iterable[Shard], ranks: Ranks) -> None:
        """Tell Muon which parts of matrices it steps from now on."""
        self._muon.spread(shards, ranks)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of both, on the groups that are there: DeepSpeed takes all but one away and steps each by itself."""
        for part, is_muon in ((self._muon, True), (self._adamw, False)):
            part.param_groups = [group for group in self.param_groups if (_MUON in group) == is_muon]
            part.step()


def make_optimizer(family: Family, settings: Settings) -> torch.optim.Optimizer:
    """The recipe's optimizer; decay on matrices only. The rate is set at every step."""
    hidden, tables, rest = family.parameter_groups()
    if settings.optimizer == "adamw":
        return _adamw(family, settings, [*hidden, *tables], rest)
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
    """Parameters as groups with their shares of AdamW's rate: the family's slow ones apart. None is empty."""
    slow = {id(p) for p in family.slow()}
    groups: list[Any] = [
        {"params": [p for p in parameters if id(p) not in slow], _SHARE: share, **options},
        {"params": [p for p in parameters if id(p) in slow], _SHARE: share * family.slow_share, **options},
    ]
    return [group for group in groups if group["params"]]


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate`, AdamW's, in all groups from now on; Muon's follows in proportion."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get(_SHARE, 1.0)


def forget(optimizer: torch.optim.Optimizer) -> None:
    """As before the first step; the memory stays."""
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
    """One tensor's state after `step` steps, on its device (AdamW's fused kernel wants its counter there too)."""
    state = {key: moment.to(p.device, torch.float32, copy=True) for key, moment in moments.items()}
    if MOMENTUM not in state:
        state[COUNTER] = torch.tensor(float(step), dtype=torch.float32, device=p.device)
    return state
