"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): one decoder layer that drafts from the target's own features.

Shapes: B rows, T tokens, N new tokens, H hidden size, Ht target hidden size, A = 3 x Ht, Vd draft vocabulary.

The state of a true position is fc(features of three target layers); `layers.py` says how the head goes on from it.
Parameters bear the names of the checkpoint layout that vLLM and SGLang read, but for `fc.norms` (there: `fc_norm`).
"""

from collections.abc import Mapping

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from ..kernels.document_mask import QueryMask
from .layers import DecoderLayer, FeatureDraft, LayerConfig, RMSNorm, ids_of, vocabulary_maps


class Eagle3Config(LayerConfig):
    """Dimensions of an EAGLE-3 head: everything that its speed and its checkpoint depend on."""

    target_hidden_size: int = Field(ge=1)
    draft_vocab_size: int = Field(ge=1)
    aux_layers: tuple[int, int, int]
    """Target layers, numbered as transformers' hidden_states (2 = output of layer 1)."""
    fc_norm: bool = False
    """EAGLE-3.1: the features of each captured layer pass a norm of their own before fc."""
    norm_output: bool = False
    """EAGLE-3.1: the head's next step reads the normed output state, not the un-normed one."""
    norm_before_residual: bool = False
    """The layer's output is added to the normed state, not to the un-normed one."""

    @model_validator(mode="after")
    def _consistent(self) -> "Eagle3Config":
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size}: must not exceed vocab_size {self.vocab_size}")
        return self


class Fusion(nn.Linear):
    """fc: linear fusion of the captured layers' features, side by side, to the head's hidden size."""

    def __init__(self, config: Eagle3Config) -> None:
        size = config.target_hidden_size
        super().__init__(3 * size, config.hidden_size, bias=False)
        norms = [RMSNorm(size, config.rms_norm_eps) for _ in config.aux_layers]
        self.norms = nn.ModuleList(norms) if config.fc_norm else None

    def forward(self, aux_BNA: Tensor) -> Tensor:
        """[B, N, A] -> [B, N, H]."""
        if self.norms is not None:
            parts = aux_BNA.chunk(len(self.norms), dim=-1)
            aux_BNA = torch.cat([norm(part) for norm, part in zip(self.norms, parts)], dim=-1)
        return super().forward(aux_BNA)


class Midlayer(DecoderLayer):
    """The head's one decoder layer: attention reads the embedding and the state side by side, each normed."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config, width=2 * config.hidden_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Eagle3Draft(FeatureDraft):
    """An EAGLE-3 head. Embeddings come from the target unless the checkpoint brought its own (`embed_tokens`)."""

    family = "eagle3"
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config, draft_ids: Tensor | None = None, own_embeddings: bool = False) -> None:
        """`draft_ids` [Vd]: target ids of the draft vocabulary; None where it is the whole vocabulary."""
        super().__init__()
        # Fusion of the captured features, one decoder layer, the final norm and a head of its own.
        self.config = config
        self.fc = Fusion(config)
        self.midlayer = Midlayer(config)
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
    def layer(self) -> DecoderLayer:
        return self.midlayer

    def project_in(self, embeds_BNH: Tensor, state_BNH: Tensor) -> tuple[Tensor, Tensor]:
        """The residual, [B, N, H], and what attention reads, [B, N, 2H]."""
        # Embedding and state are normed apart; which state the residual takes is the checkpoint's choice.
        normed_BNH = self.midlayer.hidden_norm(state_BNH)
        z_BNZ = torch.cat([self.midlayer.input_layernorm(embeds_BNH), normed_BNH], dim=-1)
        return normed_BNH if self.config.norm_before_residual else state_BNH, z_BNZ

    def project_out(self, residual_BNH: Tensor, attended_BNQD: Tensor) -> Tensor:
        """The head's next state [B, N, H]: un-normed, unless `norm_output`."""
        state_BNH = super().project_out(residual_BNH, attended_BNQD)
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
