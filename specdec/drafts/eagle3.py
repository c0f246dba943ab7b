"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): one decoder layer that drafts from the target's own features.

Shapes: B rows, T tokens, M trained positions a row, N new tokens, H hidden size, A = 3 x target hidden size,
Vd draft vocabulary, Q query heads, G key-value heads (R = Q / G), D head size.

Position i pairs the target's feature h_i with the embedding of x_{i+1} and drafts x_{i+2}. Step k feeds the draft's
own un-normed state instead of h, at rotary position i + k, and drafts x_{i+2+k}. It sees the true features' keys of
positions <= i and its own keys of steps 1..k; that is what serving sees, so training, replay and decoding agree.
Names of parameters are those of the checkpoint layout that vLLM and SGLang read.
"""

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from ..attention import attend
from ..cache import Step


class Eagle3Config(BaseModel):
    """Dimensions of the head; everything that its speed and its checkpoint depend on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hidden_size: int = Field(ge=1)
    target_hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2)
    vocab_size: int = Field(ge=1)
    draft_vocab_size: int = Field(ge=1)
    aux_layers: tuple[int, int, int]
    """Target layers, numbered as transformers' hidden_states (2 = output of layer 1)."""
    max_position_embeddings: int = Field(ge=1)
    rms_norm_eps: float = Field(gt=0)
    rope_theta: float = Field(gt=0)

    @model_validator(mode="after")
    def _consistent(self) -> "Eagle3Config":
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size}: must not exceed vocab_size {self.vocab_size}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads}: must be a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        return self


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class Attention(nn.Module):
    """Self-attention that reads [embedding, state] side by side."""

    layer_idx = 0  # its only layer in the draft's own cache

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.heads, self.groups, self.head_dim, self.rope_theta = heads, groups, size, config.rope_theta
        self.q_proj = nn.Linear(2 * config.hidden_size, heads * size, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, groups * size, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, groups * size, bias=False)
        self.o_proj = nn.Linear(heads * size, config.hidden_size, bias=False)

    def query(self, z_BNZ: Tensor, positions_BN: Tensor) -> Tensor:
        """[B, Q, N, D], rotated."""
        return rotate(self._split(self.q_proj(z_BNZ), self.heads), positions_BN, self.rope_theta)

    def key(self, z_BNZ: Tensor, positions_BN: Tensor) -> Tensor:
        """[B, G, N, D], rotated."""
        return rotate(self._split(self.k_proj(z_BNZ), self.groups), positions_BN, self.rope_theta)

    def value(self, z_BNZ: Tensor) -> Tensor:
        """[B, G, N, D]."""
        return self._split(self.v_proj(z_BNZ), self.groups)

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:-1], heads, self.head_dim).transpose(1, 2)


class MLP(nn.Module):
    """Gated SiLU."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Midlayer(nn.Module):
    """The head's one decoder layer."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def mix(self, embeds_BNH: Tensor, state_BNH: Tensor) -> Tensor:
        """What attention reads, [B, N, 2H]."""
        return torch.cat([self.input_layernorm(embeds_BNH), self.hidden_norm(state_BNH)], dim=-1)

    def finish(self, state_BNH: Tensor, attended_BNQD: Tensor) -> Tensor:
        """Residuals (on the un-normed state) and MLP: the next un-normed state."""
        state_BNH = state_BNH + self.self_attn.o_proj(attended_BNQD.flatten(-2))
        return state_BNH + self.mlp(self.post_attention_layernorm(state_BNH))  # type: ignore[no-any-return]


class Eagle3Draft(nn.Module):
    """The head. Embeddings come from the target unless the checkpoint brought its own (`embed_tokens`)."""

    family = "eagle3"
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config, draft_ids: Tensor | None = None, own_embeddings: bool = False) -> None:
        """`draft_ids` [Vd]: target ids of the draft vocabulary, ascending; None where it is the whole vocabulary."""
        super().__init__()
        self.config = config
        self.fc = nn.Linear(3 * config.target_hidden_size, config.hidden_size, bias=False)
        self.midlayer = Midlayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if own_embeddings else None
        ids = torch.arange(config.draft_vocab_size) if draft_ids is None else draft_ids.long().cpu()
        mask = torch.zeros(config.vocab_size, dtype=torch.bool)
        mask[ids] = True
        self.register_buffer("d2t", ids - torch.arange(config.draft_vocab_size))
        self.register_buffer("t2d", mask)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def draft_ids(self) -> Tensor:
        """[Vd] target id of each draft id."""
        offsets: Tensor = self.d2t
        return offsets + torch.arange(self.config.draft_vocab_size, device=offsets.device)

    def logits(self, state: Tensor) -> Tensor:
        """Un-normed states [..., H] -> logits over the draft vocabulary [..., Vd]."""
        return self.lm_head(self.norm(state))  # type: ignore[no-any-return]

    def decode(self, embeds_BNH: Tensor, state_BNH: Tensor, step: Step) -> Tensor:
        """One pass over the draft's own cache. `state` is fc(features) for true positions, else the last output."""
        layer, positions_BN = self.midlayer, step.positions_BN
        if positions_BN is None:
            positions_BN = torch.arange(embeds_BNH.shape[1], device=embeds_BNH.device).expand(embeds_BNH.shape[:2])
        z = layer.mix(embeds_BNH, state_BNH)
        attn = layer.self_attn
        query, key, value = attn.query(z, positions_BN), attn.key(z, positions_BN), attn.value(z)
        attended, _ = attend(attn, query, key, value, None, kv_step=step)
        return layer.finish(state_BNH, attended)

    def forward(self, embeds_BTH: Tensor, aux_BTA: Tensor, first_B: Tensor, width: int, steps: int) -> list[Tensor]:
        """Training-time test: the un-normed states of steps 0..steps-1 at positions first_b .. first_b + width - 1.

        `embeds` are of x_0 .. x_{T-1}. Returns `steps` tensors [B, M, H], M = width; state k at position i drafts
        x_{i+2+k}. Positions past the row's end repeat its last one and mean nothing. Only these positions run the
        query, the MLP and later steps; all positions give the step-0 keys.
        """
        layer, attn, device = self.midlayer, self.midlayer.self_attn, embeds_BTH.device
        tokens = embeds_BTH.shape[1]
        at_BM = (first_B[:, None] + torch.arange(width, device=device)).clamp(max=tokens - 1)
        everywhere_BT = torch.arange(tokens, device=device).expand(embeds_BTH.shape[:2])
        fused_BTH = self.fc(aux_BTA)
        z_BTZ = layer.mix(_take(embeds_BTH, everywhere_BT + 1), fused_BTH)
        keys, values = [attn.key(z_BTZ, everywhere_BT)], [attn.value(z_BTZ)]
        past_BMT = everywhere_BT[:, None] <= at_BM[..., None]
        state_BMH, z_BMZ = _take(fused_BTH, at_BM), _take(z_BTZ, at_BM)
        states: list[Tensor] = []
        for k in range(steps):
            if k:
                z_BMZ = layer.mix(_take(embeds_BTH, at_BM + 1 + k), state_BMH)
                keys.append(attn.key(z_BMZ, at_BM + k))
                values.append(attn.value(z_BMZ))
            attended = attend_columns(attn.query(z_BMZ, at_BM + k), keys, values, past_BMT)
            state_BMH = layer.finish(state_BMH, attended)
            states.append(state_BMH)
        return states


def attend_columns(query_BQMD: Tensor, keys: list[Tensor], values: list[Tensor], past_BMT: Tensor) -> Tensor:
    """Attention of the training-time test. Returns [B, M, Q, D].

    keys[0] [B, G, T, D] are the true features' (seen where `past`); keys[j] [B, G, M, D], j >= 1, are earlier steps'
    own, of which each position sees only its own column.
    """
    groups, size = keys[0].shape[1], query_BQMD.shape[-1]
    query = query_BQMD.reshape(query_BQMD.shape[0], groups, -1, *query_BQMD.shape[2:]) * size**-0.5  # [B, G, R, M, D]
    scores = torch.einsum("bgrmd,bgtd->bgrmt", query, keys[0]).masked_fill(~past_BMT[:, None, None], float("-inf"))
    own = [torch.einsum("bgrmd,bgmd->bgrm", query, key)[..., None] for key in keys[1:]]
    weights = torch.cat([scores, *own], dim=-1).softmax(-1, dtype=torch.float32).to(query.dtype)
    past = keys[0].shape[2]
    output = torch.einsum("bgrmt,bgtd->bgrmd", weights[..., :past], values[0])
    for j, value in enumerate(values[1:]):
        output = output + weights[..., past + j, None] * value[:, :, None]
    return output.flatten(1, 2).transpose(1, 2)


def rotate(x_BHND: Tensor, positions_BN: Tensor, theta: float) -> Tensor:
    """Rotary embedding (Su et al. 2021), halves layout as in transformers' Llama."""
    half = x_BHND.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x_BHND.device, dtype=torch.float32) / half)
    angle = (positions_BN[..., None].float() * frequency)[:, None]
    cos, sin = angle.cos().to(x_BHND.dtype), angle.sin().to(x_BHND.dtype)
    low, high = x_BHND[..., :half], x_BHND[..., half:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def _take(x_BTH: Tensor, at_BM: Tensor) -> Tensor:
    """Rows of x at given positions, clamped to the last."""
    at = at_BM.clamp(max=x_BTH.shape[1] - 1)[..., None].expand(-1, -1, x_BTH.shape[-1])
    return x_BTH.gather(1, at)
