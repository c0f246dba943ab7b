"""Medusa (Cai et al. 2024, arXiv 2401.10774): heads that draft several tokens ahead from one state of the target.

Shapes: H hidden size, V vocabulary.

Head h (from 0) predicts token t+2+h from the target's post-norm state of x_t; token t+1 is the target's own. Heads do
not see each other's tokens. Parameters bear the names of the checkpoint layout that vLLM reads.
"""

from collections.abc import Mapping

import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from .base import DraftModule


class MedusaConfig(BaseModel):
    """Dimensions of Medusa heads."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    hidden_size: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    num_heads: int = Field(ge=1)
    num_layers: int = Field(ge=1)
    """Residual blocks of each head."""
    fc_bias: bool
    """Whether the blocks' linear layers have a bias."""


class ResidualBlocks(nn.Module):
    """Residual blocks x + silu(W x + b), one after another. Initialised to zero, so that they start as the identity."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.layers = nn.ModuleList(nn.Linear(size, size, bias=config.fc_bias) for _ in range(config.num_layers))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaDraft(DraftModule):
    """Medusa heads, each with its own linear layer to the whole vocabulary."""

    family = "medusa"

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(ResidualBlocks(config) for _ in range(config.num_heads))
        self.lm_heads = nn.ModuleList(
            nn.Linear(config.hidden_size, config.vocab_size, bias=False) for _ in range(config.num_heads)
        )

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def target_widths(self) -> Mapping[str, int]:
        return {"hidden_size": self.config.hidden_size}

    def state(self, hidden: Tensor, head: int) -> Tensor:
        """Output of a head's residual blocks [..., H], which its linear layer reads."""
        return self.blocks[head](hidden)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor, head: int) -> Tensor:
        """The target's states [..., H] -> logits [..., V] of the token that this head predicts."""
        return self.lm_heads[head](self.state(hidden, head))  # type: ignore[no-any-return]
