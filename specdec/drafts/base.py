"""The base class of draft modules: what callers ask of a draft of any family."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from ...errors import InputError
from ..models import CausalModel


class DraftModule(nn.Module, ABC):
    """The weights of a draft; `proposers.make_proposer` lets it draft for a target."""

    family: ClassVar[str]
    same_tokenizer: ClassVar[bool] = True
    """Whether it reads and drafts ids of the target's tokenizer."""
    drafts_trees: ClassVar[bool] = True
    """False: it drafts chains only."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Tokens that it reads."""

    @property
    def max_positions(self) -> int | None:
        """Tokens of the longest text that it was made for; None: texts of any length."""
        return None

    @property
    def target_widths(self) -> Mapping[str, int]:
        """Sizes that must equal the target's hidden size, by their names in its config."""
        return {}

    @property
    def target_layers(self) -> tuple[int, ...]:
        """Target layers whose hidden states it reads, ascending, numbered as transformers' hidden_states."""
        return ()

    @property
    def device(self) -> torch.device:
        """The device of its weights."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The precision of its weights."""
        return next(self.parameters()).dtype

    def check_fits(self, target: CausalModel, where: str | Path) -> None:
        """Raise InputError, its line beginning with `where`, for the first size in which draft and target differ."""
        sizes = [("vocab_size", self.vocab_size, target.vocab_size)]
        sizes += [(name, size, target.hidden_size) for name, size in self.target_widths.items()]
        for name, found, wanted in sizes:
            if found != wanted:
                raise InputError(f"{where}: {name} {found}: must be {wanted}, the target's")
        if max(self.target_layers, default=0) > target.num_layers:
            layers = list(self.target_layers)
            raise InputError(f"{where}: captured layers {layers}: the target has {target.num_layers} layers")

    def check_context(self, longest: int, where: str | Path) -> None:
        """Raise InputError for a draft that was made for shorter texts than the `longest` of these, in tokens."""
        known = self.max_positions
        if known is not None and known < longest:
            raise InputError(
                f"{where}: max_position_embeddings {known}: must hold the longest text here, {longest} tokens"
            )
