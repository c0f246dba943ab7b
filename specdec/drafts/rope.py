"""Rotary embeddings of drafts (Su et al. 2021), plain or scaled, as transformers and the engines compute them.

Shapes: B rows, N tokens, H heads, D head size, F = D / 2 rotated pairs.

A scaling turns the plain frequencies theta^(-i/F), i = 0..F-1, into slower ones, so that a long text turns no pair
further than training did; some also stretch queries and keys.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from ..cache import runs_triton


class _Scaling(BaseModel):
    """Fields bear the names of config.json's `rope_scaling`. One that is not here is not what we compute."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def frequencies(self, plain_F: Tensor, theta: float) -> Tensor:
        """[F], of the plain ones."""
        raise NotImplementedError

    @property
    def stretch(self) -> float:
        """What rotated queries and keys are multiplied by."""
        return 1.0


class LinearRope(_Scaling):
    """Position interpolation (Chen et al. 2023, arXiv 2306.15595): every pair turns slower."""

    rope_type: Literal["linear"] = "linear"
    factor: float = Field(ge=1)

    def frequencies(self, plain_F: Tensor, theta: float) -> Tensor:
        return plain_F / self.factor


class Llama3Rope(_Scaling):
    """Llama 3.1: pairs that turn often within the original context keep their frequency, slow ones are interpolated."""

    rope_type: Literal["llama3"] = "llama3"
    factor: float = Field(ge=1)
    low_freq_factor: float = Field(gt=0)
    high_freq_factor: float = Field(gt=0)
    original_max_position_embeddings: int = Field(ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> "Llama3Rope":
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(f"high_freq_factor {self.high_freq_factor}: must exceed low_freq_factor")
        return self

    def frequencies(self, plain_F: Tensor, theta: float) -> Tensor:
        turns_F = self.original_max_position_embeddings * plain_F / (2 * math.pi)
        kept_F = ((turns_F - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return plain_F * (kept_F + (1 - kept_F) / self.factor)


class YarnRope(_Scaling):
    """YaRN (Peng et al. 2023, arXiv 2309.00071): between `beta_fast` and `beta_slow` turns a ramp by pair; and
    sharper attention."""

    rope_type: Literal["yarn"] = "yarn"
    factor: float = Field(ge=1)
    original_max_position_embeddings: int = Field(ge=1)
    beta_fast: float = Field(default=32.0, gt=0)
    beta_slow: float = Field(default=1.0, gt=0)

    def frequencies(self, plain_F: Tensor, theta: float) -> Tensor:
        pairs = len(plain_F)

        def pair_of(turns: float) -> float:
            """The pair, as a fraction, that turns so often within the original context."""
            return pairs * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / math.log(theta)

        first = max(math.floor(pair_of(self.beta_fast)), 0)
        last: float = min(math.ceil(pair_of(self.beta_slow)), 2 * pairs - 1)
        last += 1e-3 if first == last else 0.0
        slowed_F = ((torch.arange(pairs, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
        return plain_F * (1 - slowed_F + slowed_F / self.factor)

    @property
    def stretch(self) -> float:
        return 0.1 * math.log(self.factor) + 1.0


class LongRope(_Scaling):
    """Long rope (Ding et al. 2024, arXiv 2402.13753): a factor a pair.

    Which of its two lists an engine takes depends on the context that it serves, so both must be the same one; and
    readers differ in the name under which they look for the stretch.
    """

    rope_type: Literal["longrope"] = "longrope"
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int = Field(ge=1)
    attention_factor: float = Field(gt=0)
    short_mscale: float
    long_mscale: float

    @model_validator(mode="after")
    def _one_choice(self) -> "LongRope":
        if self.short_factor != self.long_factor:
            raise ValueError("long_factor: must equal short_factor, or the rotation depends on the server's context")
        if not self.attention_factor == self.short_mscale == self.long_mscale:
            raise ValueError("attention_factor, short_mscale and long_mscale: must be equal: readers take any of them")
        return self

    def frequencies(self, plain_F: Tensor, theta: float) -> Tensor:
        return plain_F / torch.tensor(self.long_factor)

    @property
    def stretch(self) -> float:
        return self.attention_factor


RopeScaling = Annotated[LinearRope | Llama3Rope | YarnRope | LongRope, Field(discriminator="rope_type")]
ROPE_TYPES: Sequence[str] = ("linear", "llama3", "yarn", "longrope")


def frequencies(theta: float, head_dim: int, scaling: RopeScaling | None) -> Tensor:
    """[F] what each pair turns by from one token to the next, in radians."""
    pairs = head_dim // 2
    plain_F = theta ** (-torch.arange(pairs, dtype=torch.float32) / pairs)
    return plain_F if scaling is None else scaling.frequencies(plain_F, theta)


class Waves:
    """How far the tokens at some positions turn each pair."""

    def __init__(self, positions_BN: Tensor, frequency_F: Tensor, stretch: float, dtype: torch.dtype) -> None:
        self.positions_BN, self.frequency_F, self.stretch, self._dtype = positions_BN, frequency_F, stretch, dtype

    @cached_property
    def cos_sin(self) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the angles, [B, 1, N, F], stretched."""
        angle_B1NF = (self.positions_BN[..., None].float() * self.frequency_F)[:, None]
        cos, sin = angle_B1NF.cos(), angle_B1NF.sin()
        if self.stretch != 1.0:
            cos, sin = cos * self.stretch, sin * self.stretch
        return cos.to(self._dtype), sin.to(self._dtype)


class Rope:
    """Rotates queries and keys. In float32 whatever the weights are: it is no module, so no cast reaches it."""

    def __init__(self, theta: float, head_dim: int, scaling: RopeScaling | None) -> None:
        self._stretch = 1.0 if scaling is None else scaling.stretch
        self._frequency_F = {torch.device("cpu"): frequencies(theta, head_dim, scaling)}

    def waves(self, positions_BN: Tensor, dtype: torch.dtype) -> Waves:
        """What `__call__` and `both` read, once for queries and keys."""
        return Waves(positions_BN, self._on(positions_BN.device), self._stretch, dtype)

    def __call__(self, x_BHND: Tensor, waves: Waves) -> Tensor:
        """Halves layout, as in transformers' Llama."""
        (cos, sin), (low, high) = waves.cos_sin, x_BHND.chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

    def both(self, query_BQND: Tensor, key_BGND: Tensor, waves: Waves) -> tuple[Tensor, Tensor]:
        """Queries and keys of the same tokens; where nothing learns, one kernel on a GPU turns them where they lie."""
        learns = query_BQND.requires_grad or key_BGND.requires_grad
        if learns or not runs_triton(query_BQND.device):
            return self(query_BQND, waves), self(key_BGND, waves)
        from ..pointwise import rotate_at  # needs Triton

        rotate_at(query_BQND, key_BGND, waves.positions_BN, waves.frequency_F, waves.stretch)
        return query_BQND, key_BGND

    def _on(self, device: torch.device) -> Tensor:
        if device not in self._frequency_F:
            with torch.inference_mode(False):  # training may be the next to read it
                self._frequency_F[device] = self._frequency_F[torch.device("cpu")].to(device)
        return self._frequency_F[device]
