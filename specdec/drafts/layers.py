"""Layers, rotary embeddings and the training-time test shared by drafts that read the target's states.

Shapes: B rows, T tokens, M trained positions a row, N new tokens, H hidden size, Z what attention reads,
Q query heads, G key-value heads (R = Q / G), D head size.

Position i pairs the target's state of x_i with the embedding of x_{i+1} and drafts x_{i+2}. Step k feeds the draft's
own state instead, at rotary position i + k, and drafts x_{i+2+k}. It sees the true states' keys of positions <= i and
its own keys of steps 1..k; that is what serving sees, so training, replay and decoding agree.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..kernels.attention import attend
from ..kernels.column_attention import attend_columns
from ..kernels.document_mask import QueryMask
from ..kv_cache import CacheStep, runs_triton
from .base import DraftModule


class _Scaling(BaseModel):
    """Rope scaling settings: fields of config.json's `rope_scaling`, from which transformers computes frequencies.
    Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @property
    def stretch(self) -> float:
        """Attention scaling: factor on rotated queries and on rotated keys."""
        return 1.0


class LinearRope(_Scaling):
    """Position interpolation (Chen et al. 2023, arXiv 2306.15595): all frequencies are divided by `factor`."""

    rope_type: Literal["linear"] = "linear"
    factor: float = Field(ge=1)


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


class YarnRope(_Scaling):
    """YaRN (Peng et al. 2023, arXiv 2309.00071): interpolation by pair, on a ramp from pairs that turn `beta_fast`
    times within the original context (kept) to pairs that turn `beta_slow` times (interpolated); and an attention
    scaling, `stretch`."""

    rope_type: Literal["yarn"] = "yarn"
    factor: float = Field(ge=1)
    original_max_position_embeddings: int = Field(ge=1)
    beta_fast: float = Field(default=32.0, gt=0)
    beta_slow: float = Field(default=1.0, gt=0)
    mscale: float | None = None
    """With `mscale_all_dim`: the stretch is the ratio of both, each at its share of the usual growth."""
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    """The stretch itself, before all others."""
    truncate: bool | None = None
    """Whether the ramp begins and ends at whole pairs; None: it does."""

    @model_validator(mode="after")
    def _one_stretch(self) -> "YarnRope":
        if self.attention_factor is None and self.mscale not in (None, 1.0) and not self.mscale_all_dim:
            raise ValueError(f"mscale {self.mscale}: needs mscale_all_dim: readers differ in what they do without it")
        return self

    @property
    def stretch(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        growth = 0.1 * math.log(self.factor)
        if self.mscale and self.mscale_all_dim:
            return (self.mscale * growth + 1.0) / (self.mscale_all_dim * growth + 1.0)
        return growth + 1.0

    @property
    def plain(self) -> bool:
        """Whether stretch and ramp are those that every reader of this scaling computes."""
        usual = 0.1 * math.log(self.factor) + 1.0
        return math.isclose(self.stretch, usual) and self.truncate is not False


class LongRope(_Scaling):
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753): each pair's frequency is divided by a factor of its own.

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

    @property
    def stretch(self) -> float:
        return self.attention_factor


RopeScaling = Annotated[LinearRope | Llama3Rope | YarnRope | LongRope, Field(discriminator="rope_type")]
ROPE_TYPES: Sequence[str] = ("linear", "llama3", "yarn", "longrope")


def frequencies(theta: float, head_dim: int, scaling: RopeScaling | None) -> Tensor:
    """Rotary frequencies [F]: radians by which each pair turns from one token to the next; F = head_dim / 2."""
    # Plain rope: theta^(-2i / D) for pair i.
    if scaling is None:
        pairs = head_dim // 2
        return theta ** (-torch.arange(pairs, dtype=torch.float32) / pairs)

    # transformers computes the scaled ones; it only needs a config of one head of this size.
    sizes = {"head_dim": head_dim, "hidden_size": head_dim, "num_attention_heads": 1, "max_position_embeddings": 1}
    config = PretrainedConfig(**sizes)
    config.rope_parameters = {"rope_theta": theta, **scaling.model_dump(exclude_none=True)}
    frequency_F, _ = ROPE_INIT_FUNCTIONS[scaling.rope_type](config, torch.device("cpu"))
    return frequency_F  # type: ignore[no-any-return]


class Waves:
    """Rotary angles of tokens at given positions; cosines and sines are computed when first read."""

    def __init__(self, positions_BN: Tensor, frequency_F: Tensor, stretch: float, dtype: torch.dtype) -> None:
        self.positions_BN, self.frequency_F, self.stretch, self._dtype = positions_BN, frequency_F, stretch, dtype

    @cached_property
    def cos_sin(self) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the rotary angles, each [B, 1, N, F], times the attention scaling."""
        # Angles in float32: bfloat16 cannot tell far positions apart.
        angle_B1NF = (self.positions_BN[..., None].float() * self.frequency_F)[:, None]
        cos, sin = angle_B1NF.cos(), angle_B1NF.sin()
        if self.stretch != 1.0:
            cos, sin = cos * self.stretch, sin * self.stretch
        return cos.to(self._dtype), sin.to(self._dtype)

    @cached_property
    def whole_heads(self) -> tuple[Tensor, Tensor]:
        """Cosine and sine in float32, each [B, N, D], by one GPU kernel: the same for both halves of a head."""
        from ..kernels.pointwise import angles

        return angles(self.positions_BN, self.frequency_F, self.stretch, torch.float32)


class Rope:
    """Rotary embedding. Frequencies stay in float32 whatever the weights are: a plain object, no module, so no cast
    reaches them."""

    def __init__(self, theta: float, head_dim: int, scaling: RopeScaling | None) -> None:
        self._stretch = 1.0 if scaling is None else scaling.stretch
        self._frequency_F = {torch.device("cpu"): frequencies(theta, head_dim, scaling)}

    def waves(self, positions_BN: Tensor, dtype: torch.dtype) -> Waves:
        """Rotary angles at these positions, shared by queries and keys."""
        return Waves(positions_BN, self._on(positions_BN.device), self._stretch, dtype)

    def __call__(self, x_BHND: Tensor, waves: Waves) -> Tensor:
        """Rotated x [B, heads, N, D]; a pair is (i, i + D / 2), as in transformers' Llama."""
        (cos, sin), (low, high) = waves.cos_sin, x_BHND.chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

    def both(self, query_BQND: Tensor, key_BGND: Tensor, waves: Waves) -> tuple[Tensor, Tensor]:
        """Rotated queries and keys of the same tokens; without gradients, one GPU kernel rotates both in place."""
        # The kernel writes in place, which autograd cannot follow.
        learns = query_BQND.requires_grad or key_BGND.requires_grad
        if learns or not runs_triton(query_BQND.device):
            return self(query_BQND, waves), self(key_BGND, waves)
        from ..kernels.pointwise import rotate_at

        rotate_at(query_BQND, key_BGND, waves.positions_BN, waves.frequency_F, waves.stretch)
        return query_BQND, key_BGND

    def _on(self, device: torch.device) -> Tensor:
        if device not in self._frequency_F:
            with torch.inference_mode(False):  # training may be the next to read it
                self._frequency_F[device] = self._frequency_F[torch.device("cpu")].to(device)
        return self._frequency_F[device]


class LayerConfig(BaseModel):
    """Dimensions of a decoder layer and of the vocabulary that it reads."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2)
    vocab_size: int = Field(ge=1, le=1 << 24)  # masks of it are made before any tensor shows its size
    max_position_embeddings: int = Field(ge=1)
    rms_norm_eps: float = Field(gt=0)
    rope_theta: float = Field(gt=0)
    rope_scaling: RopeScaling | None = None

    @model_validator(mode="after")
    def _whole_groups(self) -> "LayerConfig":
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads}: must be a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        return self

    @model_validator(mode="after")
    def _a_factor_a_pair(self) -> "LayerConfig":
        if isinstance(self.rope_scaling, LongRope) and len(self.rope_scaling.long_factor) != self.head_dim // 2:
            raise ValueError(
                f"rope_scaling: long_factor: {len(self.rope_scaling.long_factor)} numbers, must be half of head_dim "
                f"{self.head_dim}"
            )
        return self


class RMSNorm(nn.Module):
    """RMSNorm: x / rms(x) * weight, computed in fp32, returned in x's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and x.dtype == self.weight.dtype:  # one kernel, in fp32 inside
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class Attention(nn.Module):
    """Self-attention whose queries, keys and values read vectors of any width Z."""

    def __init__(self, config: LayerConfig, width: int, layer: int = 0, bias: bool = False) -> None:
        """`layer`: its number in the draft's own cache."""
        super().__init__()
        self.layer_idx = layer
        # Grouped-query attention: Q query heads share G key-value heads; rope has no weights.
        heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.heads, self.groups, self.head_dim = heads, groups, size
        self.rope = Rope(config.rope_theta, size, config.rope_scaling)
        self.q_proj = nn.Linear(width, heads * size, bias=bias)
        self.k_proj = nn.Linear(width, groups * size, bias=bias)
        self.v_proj = nn.Linear(width, groups * size, bias=bias)
        self.o_proj = nn.Linear(heads * size, config.hidden_size, bias=bias)

    def query_and_key(self, z_BNZ: Tensor, waves: Waves) -> tuple[Tensor, Tensor]:
        """Rotated queries [B, Q, N, D] and keys [B, G, N, D] of the same tokens."""
        return self.rope.both(self._queries(z_BNZ), self._keys(z_BNZ), waves)

    def query(self, z_BNZ: Tensor, waves: Waves) -> Tensor:
        """Rotated queries [B, Q, N, D]."""
        return self.rope(self._queries(z_BNZ), waves)

    def key(self, z_BNZ: Tensor, waves: Waves) -> Tensor:
        """Rotated keys [B, G, N, D]."""
        return self.rope(self._keys(z_BNZ), waves)

    def value(self, z_BNZ: Tensor) -> Tensor:
        """Values [B, G, N, D]."""
        return self._split(self.v_proj(z_BNZ), self.groups)

    def _queries(self, z_BNZ: Tensor) -> Tensor:
        return self._split(self.q_proj(z_BNZ), self.heads)

    def _keys(self, z_BNZ: Tensor) -> Tensor:
        return self._split(self.k_proj(z_BNZ), self.groups)

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:-1], heads, self.head_dim).transpose(1, 2)


class NormedAttention(Attention):
    """Attention with QK-norm, as in Qwen 3: RMSNorm of each head's queries and keys before the rotary embedding."""

    def __init__(self, config: LayerConfig, width: int, layer: int = 0, bias: bool = False) -> None:
        super().__init__(config, width, layer, bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def _queries(self, z_BNZ: Tensor) -> Tensor:
        normed: Tensor = self.q_norm(super()._queries(z_BNZ))
        return normed

    def _keys(self, z_BNZ: Tensor) -> Tensor:
        normed: Tensor = self.k_norm(super()._keys(z_BNZ))
        return normed


class MLP(nn.Module):
    """Gated MLP with SiLU (SwiGLU)."""

    act_fn = staticmethod(F.silu)

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Decoder layer: attention and MLP. Norms before attention belong to subclasses: they differ by draft family."""

    def __init__(self, config: LayerConfig, attention: Attention) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = MLP(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def read(self, parts: "Parts", waves: Waves) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [B, Q, N, D] and keys [B, G, N, D], and values, of the layer's input."""
        z_BNZ = joined(parts)
        value = self.self_attn.value(z_BNZ)
        return *self.self_attn.query_and_key(z_BNZ, waves), value

    def finish(self, residual_BNH: Tensor, attended_BNQD: Tensor) -> Tensor:
        """Output projection, MLP and both residual additions: the next un-normed state [B, N, H]."""
        state_BNH = residual_BNH + self.self_attn.o_proj(attended_BNQD.flatten(-2))
        return state_BNH + self.mlp(self.post_attention_layernorm(state_BNH))  # type: ignore[no-any-return]


Parts = Sequence[tuple[Tensor, RMSNorm | None]]
"""Parts [B, N, H] of what attention reads, side by side, each with the norm that it has yet to pass."""


def joined(parts: Parts) -> Tensor:
    """The input [B, N, Z] of attention."""
    normed = [x if norm is None else norm(x) for x, norm in parts]
    return normed[0] if len(normed) == 1 else torch.cat(normed, dim=-1)


class FeatureDraft(DraftModule):
    """A draft of few decoder layers, mostly one, that reads hidden states (EAGLE family). Its output state at a
    position is the input of its next step there."""

    @property
    @abstractmethod
    def blocks(self) -> Sequence[DecoderLayer]:
        """The draft's decoder layers; the first reads what `parts_in` gives."""

    @property
    def windows(self) -> Sequence[int | None]:
        """Tokens that each layer's attention sees, the query's own included; None: all of them."""
        return [None] * len(self.blocks)

    @abstractmethod
    def parts_in(self, embeds_BNH: Tensor, state_BNH: Tensor) -> tuple[Tensor, Parts]:
        """The residual [B, N, H] that the first layer's output is added to, and the parts that its attention reads."""

    def parts_on(self, number: int, state_BNH: Tensor) -> tuple[Tensor, Parts]:
        """`parts_in` of a later layer, from the state of the layer before it."""
        raise NotImplementedError

    def project_in(self, embeds_BNH: Tensor, state_BNH: Tensor) -> tuple[Tensor, Tensor]:
        """The first layer's residual [B, N, H] and its attention's input [B, N, Z]."""
        residual_BNH, parts = self.parts_in(embeds_BNH, state_BNH)
        return residual_BNH, joined(parts)

    def project_on(self, number: int, state_BNH: Tensor) -> tuple[Tensor, Tensor]:
        """`project_in` of a later layer."""
        residual_BNH, parts = self.parts_on(number, state_BNH)
        return residual_BNH, joined(parts)

    def project_out(self, state_BNH: Tensor) -> Tensor:
        """The draft's state [B, N, H], from that of its last layer."""
        return state_BNH

    def decode(self, embeds_BNH: Tensor, state_BNH: Tensor, step: CacheStep) -> Tensor:
        """States [B, N, H] of one decoding pass over the draft's own KV cache. `state`: the target's at true positions,
        else the draft's last output."""
        # A prefill step names no positions: it begins at 0.
        positions_BN = step.positions_BN
        if positions_BN is None:
            positions_BN = torch.arange(embeds_BNH.shape[1], device=embeds_BNH.device).expand(embeds_BNH.shape[:2])

        # Attention writes the new keys and values into the cache and reads all that the step may see.
        waves = self.blocks[0].self_attn.rope.waves(positions_BN, self.dtype)
        for number, (layer, window) in enumerate(zip(self.blocks, self.windows)):
            entered = self.parts_on(number, state_BNH) if number else self.parts_in(embeds_BNH, state_BNH)
            residual_BNH, parts = entered
            attn = layer.self_attn
            query, key, value = layer.read(parts, waves)
            attended, _ = attend(attn, query, key, value, None, sliding_window=window, kv_step=step)
            state_BNH = layer.finish(residual_BNH, attended)
        return self.project_out(state_BNH)

    def unroll(
        self,
        embeds_BTH: Tensor,
        state_BTH: Tensor,
        trained: QueryMask,
        steps: int,
        masked: tuple[Tensor, Tensor] | None = None,
    ) -> list[Tensor]:
        """Training-time test: the states of steps 0..steps-1 at the positions that `trained` names.

        `embeds` and `state` are of x_0 .. x_{T-1}, of one document a row or of several. Returns `steps` tensors
        [B, M, H]; state k at position i drafts x_{i+2+k}, and means nothing where the document has no such token. Only
        these positions run the last layer's query and MLP, and later steps; all positions give the step-0 keys.
        `masked`: embedding and state, each [H], that later steps read in place of the next token's and their own last.
        """
        # 1) True states, all positions: each is paired with the embedding of the token after it, and gives the keys of
        # step 0. Rotary positions count within a document, `at` within the packed row.
        documents, at_BM, last = trained.documents, trained.at_BM, len(self.blocks) - 1
        place_BT = documents.positions_BT
        next_BT = torch.arange(1, embeds_BTH.shape[1] + 1, device=embeds_BTH.device).expand_as(place_BT)
        residual_BTH, z_BTZ = self.project_in(take(embeds_BTH, next_BT), state_BTH)
        pasts: list[tuple[list[Tensor], list[Tensor]]] = []
        for number, (layer, window) in enumerate(zip(self.blocks, self.windows)):
            attn = layer.self_attn
            value = attn.value(z_BTZ)
            waves = attn.rope.waves(place_BT, value.dtype)
            key = attn.key(z_BTZ, waves)
            pasts.append(([key], [value]))
            if number < last:  # later layers' keys read this layer's output
                query = attn.query(z_BTZ, waves)
                attended, _ = attend(attn, query, key, value, None, sliding_window=window, documents=documents)
                residual_BTH, z_BTZ = self.project_on(number + 1, layer.finish(residual_BTH, attended))

        # 2) Trained positions only: the rest of the last layer, then step by step.
        residual_BMH, z_BMZ = take(residual_BTH, at_BM), take(z_BTZ, at_BM)
        states: list[Tensor] = []
        for k in range(steps):
            # Later steps read the draft's own last state and the next true token.
            if masked is not None and k:
                residual_BMH, z_BMZ = self.project_in(*(one.expand_as(states[0]) for one in masked))
            elif k:
                residual_BMH, z_BMZ = self.project_in(take(embeds_BTH, at_BM + 1 + k), states[-1])
            for number in range(0 if k else last, last + 1):
                state_BMH = self._column(number, k, residual_BMH, z_BMZ, pasts[number], trained)
                if number < last:
                    residual_BMH, z_BMZ = self.project_on(number + 1, state_BMH)
            states.append(self.project_out(state_BMH))
        return states

    def _column(
        self,
        number: int,
        k: int,
        residual_BMH: Tensor,
        z_BMZ: Tensor,
        past: tuple[list[Tensor], list[Tensor]],
        trained: QueryMask,
    ) -> Tensor:
        """State [B, M, H] of one layer at step k, whose key and value join the layer's `past` where k > 0."""
        # Step k stands k rotary positions further on.
        layer, (keys, values) = self.blocks[number], past
        attn = layer.self_attn
        waves = attn.rope.waves(trained.positions_BM + k, values[0].dtype)
        if k:
            keys.append(attn.key(z_BMZ, waves))
            values.append(attn.value(z_BMZ))

        # Queries see the true states' keys up to their position and their own column of later keys.
        attended = attend_columns(attn.query(z_BMZ, waves), keys, values, trained, self.windows[number])
        return layer.finish(residual_BMH, attended)


def take(x_BTH: Tensor, at_BM: Tensor) -> Tensor:
    """Rows [B, M, H] of x at given positions, clamped to the last."""
    at = at_BM.clamp(max=x_BTH.shape[1] - 1)[..., None].expand(-1, -1, x_BTH.shape[-1])
    return x_BTH.gather(1, at)


def vocabulary_maps(draft_ids: Tensor | None, draft_size: int, size: int) -> tuple[Tensor, Tensor]:
    """Vocabulary maps: d2t [Vd], target id minus draft id; t2d [V], which target ids the draft knows.

    `draft_ids` [Vd]: target ids of the draft vocabulary; None: the first `draft_size`.
    """
    # Offsets rather than ids are stored: the layout that vLLM and SGLang read.
    ids = torch.arange(draft_size) if draft_ids is None else draft_ids.long().cpu()
    known = torch.zeros(size, dtype=torch.bool)
    known[ids] = True
    return ids - torch.arange(draft_size), known


def ids_of(d2t: Tensor) -> Tensor:
    """Target ids [Vd] of a draft vocabulary, from its offsets d2t."""
    return d2t + torch.arange(len(d2t), device=d2t.device)
