"""DFlash (Chen, Liang, Liu 2026, arXiv 2602.06036): a few decoder layers that fill in a block of masks in one pass.

Shapes: B rows, T context tokens, M blocks of a row, W tokens of a block, N = M x W, L keys, H hidden size,
A features of all captured layers, V vocabulary, Q query heads, G key-value heads, D head size.

The context: features of every token that the target has read go through fc and a norm, and give each layer one key and
one value at that token's own position. They do not change any more.

The block: the last emitted token (the anchor, which the target has not read yet) and masks, at the positions that
follow the context. Each of its tokens sees the whole context and the whole block, in both directions. The normed
state of mask j drafts the j-th token after the anchor. So what a mask says depends on how many masks there are, and
not on what the others come to say.

A DSpark draft (`dspark.py`) reads its first token from the anchor's own state and each later one from the mask before
that token's place, so that K tokens take a block of K; and its heads tell the tokens of a block of each other.

Layers of other projects' drafts may have a sliding window, counted from each token, and see the block causally.

Parameters bear the names of the checkpoint layout that vLLM and SGLang read.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from ..kernels.attention import attend, attention
from ..kernels.block_attention import BlockMask, Sight, merged_blocks
from ..kernels.document_mask import QueryMask
from ..kv_cache import CacheStep
from .base import DraftModule
from .dspark import ConfidenceHead, MarkovHead
from .layers import Attention, DecoderLayer, LayerConfig, NormedAttention, RMSNorm, Waves, ids_of, vocabulary_maps

_TOGETHER = 1024
"""Block tokens of a row that are run at once where there are many blocks: attention's mask grows with its square."""

KeyValue = tuple[Tensor, Tensor]
Attend = Callable[[int, Attention, Tensor, Tensor, Tensor], Tensor]
"""(layer number, its Attention, query, key, value of block tokens [B, Q or G, N, D]) -> attended [B, N, Q, D]."""


class DFlashConfig(LayerConfig):
    """Dimensions of a DFlash draft: everything that its speed and its checkpoint depend on."""

    num_hidden_layers: int = Field(ge=1)
    target_hidden_size: int = Field(ge=1)
    draft_vocab_size: int = Field(ge=1)
    aux_layers: tuple[int, ...] = Field(min_length=1)
    """Target layers, numbered as transformers' hidden_states (2 = output of layer 1)."""
    block_size: int = Field(ge=1)
    """Tokens of a block in training, with the anchor."""
    sample_from_anchor: bool = False
    """Whether the anchor's own state drafts the first token; else the first mask's does."""
    markov_rank: int = Field(default=0, ge=0)
    """Rank of the Markov head, which makes it a DSpark draft; 0: no such head."""
    confidence_head: bool = False
    """Whether a confidence head says how likely each token is accepted."""
    mask_token_id: int = Field(ge=0)
    """Mask token: its embedding stands at every position that is to be drafted."""
    sliding_window: int | None = Field(default=None, ge=1)
    """Tokens that attention sees, the query's own included; None: all of them."""
    full_attention_layers: tuple[int, ...] = ()
    """Layers of the draft, from 0, without the sliding window."""
    causal: Literal["none", "sliding", "all"] = "none"
    """Layers whose tokens see no later token of their block: none, those with the window, or all."""

    @model_validator(mode="after")
    def _consistent(self) -> "DFlashConfig":
        # Token ids must lie within the vocabulary that they index.
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size}: must not exceed vocab_size {self.vocab_size}")
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id}: must be below vocab_size {self.vocab_size}")

        # A block drafts something; anchors draft, and confidence is told, only beside a Markov head.
        if self.draft_tokens < 1:
            raise ValueError(f"block_size {self.block_size}: must be at least 2")
        if not self.markov_rank and (self.sample_from_anchor or self.confidence_head):
            name = "sample_from_anchor" if self.sample_from_anchor else "confidence_head"
            raise ValueError(f"{name} true: needs markov_rank above 0")

        # hidden_states 0 is the embedding, which is no layer's output.
        if list(self.aux_layers) != sorted(set(self.aux_layers)) or self.aux_layers[0] < 1:
            raise ValueError(f"aux_layers {list(self.aux_layers)}: must be different layers in ascending order, from 1")
        return self

    @property
    def reduced(self) -> bool:
        """Whether the draft vocabulary is smaller than the target's."""
        return self.draft_vocab_size < self.vocab_size

    @property
    def draft_tokens(self) -> int:
        """Most tokens of a draft."""
        return self.block_size - (not self.sample_from_anchor)

    def sight(self, layer: int) -> Sight:
        """What the tokens of a block see in a layer."""
        window = None if layer in self.full_attention_layers else self.sliding_window
        return Sight(window, self.causal == "all" or (self.causal == "sliding" and window is not None))


class BlockLayer(DecoderLayer):
    """One decoder layer: pre-norm attention and MLP."""

    def __init__(self, config: LayerConfig, layer: int) -> None:
        super().__init__(config, NormedAttention(config, config.hidden_size, layer))
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class DFlashDraft(DraftModule):
    """A DFlash draft, or with a Markov head a DSpark one. Embeddings and head come from the target unless the
    checkpoint brought its own."""

    d2t: Tensor
    t2d: Tensor

    def __init__(
        self,
        config: DFlashConfig,
        draft_ids: Tensor | None = None,
        own_embeddings: bool = False,
        own_head: bool = False,
    ) -> None:
        """`draft_ids` [Vd]: target ids of the draft vocabulary, which needs a head of its own; None: all of them."""
        super().__init__()
        self.config = config
        self.family = "dspark" if config.markov_rank else "dflash"
        # Context: the captured layers' features, fused to the draft's width.
        self.fc = nn.Linear(len(config.aux_layers) * config.target_hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

        # Block: decoder layers and the final norm.
        self.layers = nn.ModuleList(BlockLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

        # A reduced vocabulary needs a head of its own: the target's has other rows.
        has_head = own_head or config.reduced
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False) if has_head else None
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if own_embeddings else None

        # DSpark's heads.
        sizes, rank = (config.vocab_size, config.draft_vocab_size), config.markov_rank
        self.markov_head = MarkovHead(*sizes, rank) if rank else None
        self.confidence_head = ConfidenceHead(config.hidden_size, rank) if config.confidence_head else None

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
    def has_confidence(self) -> bool:
        return self.confidence_head is not None

    @property
    def target_widths(self) -> Mapping[str, int]:
        config = self.config
        borrows = {"hidden_size": config.hidden_size} if self.embed_tokens is None or self.lm_head is None else {}
        return {"target_hidden_size": config.target_hidden_size, **borrows}

    @property
    def target_layers(self) -> tuple[int, ...]:
        return self.config.aux_layers

    @property
    def draft_ids(self) -> Tensor:
        """[Vd] target id of each draft id."""
        return ids_of(self.d2t)

    def context(self, aux_BTA: Tensor, positions_BT: Tensor) -> list[KeyValue]:
        """Keys and values [B, G, T, D] of the context (tokens that the target has read), one pair a layer."""
        # The same fused features feed every layer: the context passes through no layer itself.
        z_BTH = self.hidden_norm(self.fc(aux_BTA))
        attns = [layer.self_attn for layer in self._blocks()]
        values = [attn.value(z_BTH) for attn in attns]

        # One set of rotary angles serves the keys of all layers.
        waves = attns[0].rope.waves(positions_BT, values[0].dtype)
        return [(attn.key(z_BTH, waves), value) for attn, value in zip(attns, values)]

    def append_context(self, aux_BTA: Tensor, step: CacheStep) -> None:
        """Write keys and values of the step's context tokens into the draft's KV cache."""
        # A prefill step names no positions: it begins at 0.
        positions_BT = step.positions_BN
        if positions_BT is None:
            positions_BT = torch.arange(aux_BTA.shape[1], device=aux_BTA.device).expand(aux_BTA.shape[:2])

        # Each layer has a row of its own in the cache.
        for layer, (key, value) in enumerate(self.context(aux_BTA, positions_BT)):
            step.cache.write(layer, step, key, value)

    def decode(self, embeds_BWH: Tensor, step: CacheStep, causal: CacheStep | None = None) -> Tensor:
        """Normed states [B, W, H] of one block a row, attending to the context in the draft's own cache.

        `causal`: the same step for layers whose tokens see no later one of the block; None: no layer is such.
        """

        def on_cache(layer: int, attn: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            window, causally = self.config.sight(layer)
            assert causal is not None or not causally
            mine = causal if causally else step
            return attend(attn, query, key, value, None, sliding_window=window, kv_step=mine)[0]

        assert step.positions_BN is not None
        return self._run(embeds_BWH, step.positions_BN, on_cache)

    def forward(self, embeds_BMWH: Tensor, aux_BTA: Tensor, anchors: QueryMask) -> Tensor:
        """Normed states [B, M, W, H] of many blocks: as each is drafted where its anchor is the last known token.

        `anchors`: places [B, M] of the blocks' first tokens. A block sees its document before its anchor, and no other
        block.
        """
        # The context's keys are computed once, for all blocks.
        context = self.context(aux_BTA, anchors.documents.positions_BT)
        mask = BlockMask(anchors, embeds_BMWH.shape[2])
        sights = {*map(self.config.sight, range(len(context)))}
        if embeds_BMWH.is_cuda and anchors.documents.packed and sights == {Sight(None, False)}:
            return self._together(context, embeds_BMWH, mask, merged=True)

        # A few blocks at a time bound the dense mask.
        few = max(1, _TOGETHER // embeds_BMWH.shape[2])
        some = [slice(start, start + few) for start in range(0, embeds_BMWH.shape[1], few)]
        return torch.cat([self._together(context, embeds_BMWH[:, at], mask.some(at)) for at in some], 1)

    def drafting(self, states_XWH: Tensor) -> Tensor:
        """The states [..., K, H] of blocks [..., W, H] that draft a token each, in the order of the tokens."""
        return states_XWH if self.config.sample_from_anchor else states_XWH[..., 1:, :]

    def _together(
        self, context: Sequence[KeyValue], embeds_BMWH: Tensor, mask: BlockMask, merged: bool = False
    ) -> Tensor:
        """`forward` of blocks with the context's keys and values; `merged`: without a dense mask."""

        def beside_context(layer: int, _: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if merged:
                return merged_blocks(query, context[layer], key, value, mask)
            # Context keys and values go before the block's own along the key axis.
            keys, values = (torch.cat(pair, 2) for pair in zip(context[layer], (key, value)))
            return attention(query, keys, values, mask.dense(self.config.sight(layer)), None).transpose(1, 2)

        # Block tokens stand at the anchor's position and those that follow it.
        places_W = torch.arange(mask.width, device=embeds_BMWH.device)
        positions_BN = (mask.anchors.positions_BM[..., None] + places_W).flatten(1)
        return self._run(embeds_BMWH.flatten(1, 2), positions_BN, beside_context).view(embeds_BMWH.shape)

    def _run(self, state_BNH: Tensor, positions_BN: Tensor, attended: Attend) -> Tensor:
        """All decoder layers and the final norm over block tokens; `attended` computes each layer's attention."""
        # Rotary angles depend on positions only, so the first layer's serve all.
        waves: Waves | None = None
        for number, layer in enumerate(self._blocks()):
            z_BNH, attn = layer.input_layernorm(state_BNH), layer.self_attn
            value = attn.value(z_BNH)
            waves = waves or attn.rope.waves(positions_BN, value.dtype)

            # Attention and MLP with their residuals.
            query, key = attn.query_and_key(z_BNH, waves)
            state_BNH = layer.finish(state_BNH, attended(number, attn, query, key, value))
        return self.norm(state_BNH)  # type: ignore[no-any-return]

    def _blocks(self) -> Sequence[BlockLayer]:
        return list(self.layers)  # type: ignore[arg-type]
