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

    family: str
    """Kind of draft, by the name that checkpoints record."""
    same_tokenizer: ClassVar[bool] = True
    """Whether the draft reads and drafts token ids of the target's tokenizer."""
    drafts_trees: ClassVar[bool] = True
    """Whether the draft can draft token trees; False: it drafts chains only."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Vocabulary size of the draft's input: token ids that it can read."""

    @property
    def max_positions(self) -> int | None:
        """Context length, in tokens, that the draft was made for; None: texts of any length."""
        return None

    @property
    def has_confidence(self) -> bool:
        """Whether the draft has a head that says how likely each drafted token is accepted."""
        return False

    @property
    def target_widths(self) -> Mapping[str, int]:
        """Sizes of the draft that must equal the target's hidden size, by their names in the draft's config."""
        return {}

    @property
    def target_layers(self) -> tuple[int, ...]:
        """Target layers whose hidden states the draft reads, ascending, numbered as transformers' hidden_states."""
        return ()

    @property
    def device(self) -> torch.device:
        """The device of the draft's weights."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the draft's weights."""
        return next(self.parameters()).dtype

    def check_fits(self, target: CausalModel, where: str | Path) -> None:
        """Raise InputError, its line beginning with `where`, for the first size in which draft and target differ."""
        # The vocabulary and every borrowed width must match exactly.
        sizes = [("vocab_size", self.vocab_size, target.vocab_size)]
        sizes += [(name, size, target.hidden_size) for name, size in self.target_widths.items()]
        for name, found, wanted in sizes:
            if found != wanted:
                raise InputError(f"{where}: {name} {found}: must be {wanted}, the target's")

        # hidden_states has num_layers + 1 entries (0 is the embedding), so layer num_layers is still there.
        if max(self.target_layers, default=0) > target.num_layers:
            layers = list(self.target_layers)
            raise InputError(f"{where}: captured layers {layers}: the target has {target.num_layers} layers")

    def check_context(self, longest: int, where: str | Path) -> None:
        """Raise InputError if the draft's context length is below `longest`, the tokens of the longest text."""
        known = self.max_positions
        if known is not None and known < longest:
            raise InputError(
                f"{where}: max_position_embeddings {known}: must hold the longest text here, {longest} tokens"
            )
