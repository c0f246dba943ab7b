"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840) and 3.1: few decoder layers, mostly one, on the target's own features.

Shapes: B rows, T tokens, N new tokens, H hidden size, Ht target hidden size, A = captured layers x Ht, Vd draft
vocabulary.

The state of a true position is fc(features of captured target layers); `layers.py` says how the head goes on from it.
EAGLE-3.1 and trainers of 2026 add norms around fc and the residual, each by a flag of the config.
Parameters bear the names of the checkpoint layout that vLLM and SGLang read, but for `fc.norms` and `fc.input_norm`
(there: `fc_norm`, `input_norm`) and `later_layers` (there: `layers`, counted from 1).
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from ..kernels.document_mask import QueryMask
from .layers import (
    Attention,
    DecoderLayer,
    FeatureDraft,
    LayerConfig,
    NormedAttention,
    Parts,
    RMSNorm,
    ids_of,
    vocabulary_maps,
)

Body = Literal["llama", "qwen3"]


class Eagle3Config(LayerConfig):
    """Dimensions of an EAGLE-3 head: everything that its speed and its checkpoint depend on."""

    target_hidden_size: int = Field(ge=1)
    draft_vocab_size: int = Field(ge=1)
    aux_layers: tuple[int, ...]
    """Target layers, numbered as transformers' hidden_states (2 = output of layer 1). Empty: the head has no fc and
    reads the target's last state, after its final norm."""
    num_hidden_layers: int = Field(default=1, ge=1)
    body: Body = "llama"
    """qwen3: attention norms the queries and keys of each head."""
    attention_bias: bool = False
    """Query, key, value and output layers have a bias."""
    fc_bias: bool = False
    """fc has a bias."""
    fc_norm: bool = False
    """EAGLE-3.1: the features of each captured layer pass a norm of their own before fc."""
    norm_before_fc: bool = False
    """One norm over the features of all captured layers together before fc."""
    norm_output: bool = False
    """EAGLE-3.1: the head's next step reads the normed output state, not the un-normed one."""
    norm_before_residual: bool = False
    """The first layer's output is added to the normed state, not to the un-normed one."""
    sliding_window: int | None = Field(default=None, ge=1)
    """Tokens that attention sees, the query's own included; None: all of them."""
    full_attention_layers: tuple[int, ...] = ()
    """Layers of the head, from 0, without the sliding window."""

    @model_validator(mode="after")
    def _consistent(self) -> "Eagle3Config":
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size}: must not exceed vocab_size {self.vocab_size}")
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("norm_before_fc true: must be false where fc_norm is true")

        # Without fc the target's state is the head's own, and nothing stands around fc.
        if not self.aux_layers and self.target_hidden_size != self.hidden_size:
            size = self.target_hidden_size
            raise ValueError(f"target_hidden_size {size}: must be hidden_size {self.hidden_size} without aux_layers")
        if not self.aux_layers and (self.fc_norm or self.norm_before_fc or self.fc_bias):
            raise ValueError("aux_layers []: has no fc, so fc_norm, norm_before_fc and fc_bias must be false")
        return self

    @property
    def windows(self) -> list[int | None]:
        """Sliding window of each layer; None: full attention."""
        full = self.full_attention_layers
        return [None if layer in full else self.sliding_window for layer in range(self.num_hidden_layers)]


class Fusion(nn.Linear):
    """fc: linear fusion of the captured layers' features, side by side, to the head's hidden size."""

    def __init__(self, config: Eagle3Config) -> None:
        size, count, eps = config.target_hidden_size, len(config.aux_layers), config.rms_norm_eps
        super().__init__(count * size, config.hidden_size, bias=config.fc_bias)
        self.norms = nn.ModuleList(RMSNorm(size, eps) for _ in range(count)) if config.fc_norm else None
        self.input_norm = RMSNorm(count * size, eps) if config.norm_before_fc else None

    def forward(self, aux_BNA: Tensor) -> Tensor:
        """[B, N, A] -> [B, N, H]."""
        if self.norms is not None:
            parts = aux_BNA.chunk(len(self.norms), dim=-1)
            aux_BNA = torch.cat([norm(part) for norm, part in zip(self.norms, parts)], dim=-1)
        if self.input_norm is not None:
            aux_BNA = self.input_norm(aux_BNA)
        return super().forward(aux_BNA)


class _Layer(DecoderLayer):
    """A decoder layer of the head, number `layer`, whose attention reads vectors of `width`."""

    def __init__(self, config: Eagle3Config, width: int, layer: int) -> None:
        kind = NormedAttention if config.body == "qwen3" else Attention
        super().__init__(config, kind(config, width, layer, config.attention_bias))
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Midlayer(_Layer):
    """The head's first decoder layer: attention reads the embedding and the state side by side, each normed."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config, 2 * config.hidden_size, 0)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Eagle3Draft(FeatureDraft):
    """An EAGLE-3 head. Embeddings come from the target unless the checkpoint brought its own (`embed_tokens`)."""

    family = "eagle3"
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config, draft_ids: Tensor | None = None, own_embeddings: bool = False) -> None:
        """`draft_ids` [Vd]: target ids of the draft vocabulary; None where it is the whole vocabulary."""
        super().__init__()
        # Fusion of the captured features, the decoder layers, the final norm and a head of its own.
        self.config = config
        later = range(1, config.num_hidden_layers)
        self.fc: Fusion = Fusion(config) if config.aux_layers else nn.Identity()  # type: ignore[assignment]
        self.midlayer = Midlayer(config)
        self.later_layers = nn.ModuleList(_Layer(config, config.hidden_size, layer) for layer in later)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if own_embeddings else None

        # Maps between draft ids and target ids.
        d2t, t2d = vocabulary_maps(draft_ids, config.draft_vocab_size, config.vocab_size)
        self.register_buffer("d2t", d2t)
        self.register_buffer("t2d", t2d)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_positions(self) -> int:
        return self.config.max_position_embeddings

    @property
    def target_widths(self) -> Mapping[str, int]:
        config = self.config
        borrows = {"hidden_size": config.hidden_size} if self.embed_tokens is None else {}
        return {"target_hidden_size": config.target_hidden_size, **borrows}

    @property
    def target_layers(self) -> tuple[int, ...]:
        return self.config.aux_layers

    @property
    def draft_ids(self) -> Tensor:
        """[Vd] target id of each draft id."""
        return ids_of(self.d2t)

    @property
    def blocks(self) -> Sequence[_Layer]:
        return [self.midlayer, *self.later_layers]

    @property
    def windows(self) -> Sequence[int | None]:
        return self.config.windows

    def parts_in(self, embeds_BNH: Tensor, state_BNH: Tensor) -> tuple[Tensor, Parts]:
        """The residual, [B, N, H], and embedding and state, which attention reads side by side."""
        # Embedding and state are normed apart; which state the residual takes is the checkpoint's choice.
        embedded = (embeds_BNH, self.midlayer.input_layernorm)
        if not self.config.norm_before_residual:
            return state_BNH, [embedded, (state_BNH, self.midlayer.hidden_norm)]
        normed_BNH = self.midlayer.hidden_norm(state_BNH)
        return normed_BNH, [embedded, (normed_BNH, None)]

    def parts_on(self, number: int, state_BNH: Tensor) -> tuple[Tensor, Parts]:
        """A later layer reads the state before it, normed; its residual is un-normed."""
        return state_BNH, [(state_BNH, self.blocks[number].input_layernorm)]

    def project_out(self, state_BNH: Tensor) -> Tensor:
        """The head's next state [B, N, H]: un-normed, unless `norm_output`."""
        return self.norm(state_BNH) if self.config.norm_output else state_BNH

    def normed(self, state: Tensor) -> Tensor:
        """The normed state [..., H] that lm_head reads; with `norm_output` states are normed already."""
        return state if self.config.norm_output else self.norm(state)

    def logits(self, state: Tensor) -> Tensor:
        """States [..., H] -> logits over the draft vocabulary [..., Vd]."""
        return self.lm_head(self.normed(state))  # type: ignore[no-any-return]

    def forward(self, embeds_BTH: Tensor, aux_BTA: Tensor, trained: QueryMask, steps: int) -> list[Tensor]:
        """Training-time test from the target's features; see `FeatureDraft.unroll`."""
        return self.unroll(embeds_BTH, self.fc(aux_BTA), trained, steps)
