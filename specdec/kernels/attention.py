"""The one attention function that every target and draft runs, registered with transformers under its own name.

Shapes: B rows, N queries a row, H query heads, G key-value heads (R = H / G queries share one), L keys, D head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from ...errors import FormatError
from ..kv_cache import CacheStep
from .document_mask import Documents, QueryMask, attend_runs, flex, takes_runs

NAME = "draftforge"


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    kv_step: CacheStep | None = None,
    documents: Documents | None = None,
    **unused: object,
) -> tuple[Tensor, None]:
    """Attention of a transformers module, over its own tokens or over our cache.

    query [B, H, N, D]; key, value [B, G, N, D]. Without `kv_step`, or at prefill, each row attends causally to
    itself (rows are padded on the right, so causality is all the mask they need), or each of its packed `documents`
    does. Otherwise the new keys are written to the cache and the whole visible past is read: both by the kernel of
    flash_decoding.py where the step gives lengths instead of a mask. Returns [B, N, H, D]. The transformers mask is
    always None here: no mask is made for an attention of this name.
    """
    if unused.get("s_aux") is not None:
        raise FormatError(f"{type(module).__name__}: attention sinks are not supported")
    # 1) Packed rows, as in training: each document attends to itself.
    if documents is not None and documents.packed:
        query, key = query.to(value.dtype), key.to(value.dtype)  # under autocast a rotary embedding leaves float32
        if documents.runs is not None and takes_runs(query, softcap):
            # On CUDA in half precision: torch's variable-length kernel. Otherwise FlexAttention or a dense mask.
            output = attend_runs(query, key, value, documents.runs, scaling, sliding_window)
        else:
            output = attention_within(query, key, value, documents.everyone(), scaling, softcap, sliding_window)
        return output.transpose(1, 2).contiguous(), None
    # 2) Rows of a cache: the new keys are written there and the visible past is read, by the kernel or under a mask.
    visible: Tensor | None = None
    if kv_step is not None:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        # Triton path: one kernel stores the new keys and reads the past up to each slot's length on the device.
        if kv_step.past_B is not None:
            from .flash_decoding import attend_cached

            past, tree = kv_step.cache.layer(layer, key, value), kv_step.tree or (None, None)
            output = attend_cached(query, key, value, *past, kv_step.past_B, scaling, sliding_window, softcap, *tree)
            return output.transpose(1, 2), None
        # Masked path: the new keys are stored here, then SDPA reads views of the cache. Prefill needs no mask.
        kv_step.cache.write(layer, kv_step, key, value)
        if kv_step.visible_BNL is not None:
            visible = kv_step.visible_BNL[:, None]
            key, value = kv_step.cache.read(layer, query.shape[0], visible.shape[-1])
    # 3) Causal or masked attention, inside the sliding window where rows are longer than it.
    # A row shorter than the window needs no mask: plain causality hides the same keys.
    if visible is None and sliding_window is not None and query.shape[2] > sliding_window:
        visible = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]
    if visible is not None and sliding_window is not None:
        visible = visible & _inside_window(visible.shape[-1], query.shape[2], kv_step, sliding_window, query.device)
    output = attention(query, key, value, visible, scaling, softcap)
    return output.transpose(1, 2).contiguous(), None


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    scaling: float | None,
    softcap: float | None = None,
) -> Tensor:
    """Grouped-query attention softmax(q k scaling) v, returned as [B, H, N, D].

    `visible` [B or 1, 1, N, L] is true where a query sees a key; None: causal. `scaling` None: 1 / sqrt(D).
    """
    # Soft-capped scores have no fused kernel.
    if softcap is not None:
        return _softcapped(query, key, value, visible, scaling, softcap)
    # Without a mask SDPA itself takes the grouped heads and causality.
    if visible is None:
        shared = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=shared)
    # With a mask the query heads of a group are stacked as rows, so that keys and values are not repeated.
    return _ungroup(
        F.scaled_dot_product_attention(
            _group(query, key.shape[1]), key, value, attn_mask=_group_mask(visible, query, key), scale=scaling
        ),
        query,
    )


def attention_within(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: QueryMask,
    scaling: float | None,
    softcap: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Attention inside the documents of packed rows: query [B, H, M, D] at the places of `queries` -> [B, H, M, D]."""
    if query.is_cuda:
        return flex(query, key, value, queries.blocks(window), scaling, softcap)[0]
    return attention(query, key, value, queries.dense(window)[:, None], scaling, softcap)


def _group(query: Tensor, groups: int) -> Tensor:
    """Group query heads, [B, H, N, D] -> [B, G, R*N, D]: the queries that share keys stand side by side."""
    return query.reshape(query.shape[0], groups, -1, query.shape[-1])


def _group_mask(visible: Tensor, query: Tensor, key: Tensor) -> Tensor:
    # Row r * N + n of a group is query n of head r: the mask's N rows repeat once for each of R heads.
    return visible.repeat(1, 1, query.shape[1] // key.shape[1], 1)


def _ungroup(output: Tensor, query: Tensor) -> Tensor:
    return output.reshape(*query.shape[:-1], output.shape[-1])


def _softcapped(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scaling: float | None, softcap: float
) -> Tensor:
    """Soft-capped attention (Gemma 2, arXiv 2408.00118): scores pass through cap * tanh(score / cap).

    No fused kernel of SDPA does that, so the product is written out. Returns [B, H, N, D].
    """
    if visible is None:
        visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]
    # The cap comes before the mask, and softmax runs in float32.
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    scores = _group(query, key.shape[1]) @ key.transpose(-1, -2) * scale
    scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~_group_mask(visible, query, key), float("-inf"))
    return _ungroup(scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value, query)


def _inside_window(keys: int, queries: int, step: CacheStep | None, window: int, device: torch.device) -> Tensor:
    """Sliding-window mask [B or 1, 1, N, L]: true where the key lies less than `window` tokens before the query."""
    # Positions in the text, which differ from places in the cache for tree entries; without a step both count from 0.
    query_BN, key_BL = (None, None) if step is None else (step.positions_BN, step.key_positions_BL)
    if query_BN is None:
        query_BN = torch.arange(queries, device=device)[None]
    if key_BL is None:
        key_BL = torch.arange(keys, device=device)[None]
    return (query_BN[..., None] - key_BL[:, None] < window)[:, None]


AttentionInterface.register(NAME, attend)
