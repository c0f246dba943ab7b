"""Attention of the training-time test (EAGLE-3, arXiv 2503.01840): a position's query at step k sees the true states'
keys of its document up to itself, and of the draft's own keys of steps 1..k only those of its own column.

Shapes: B rows, T tokens, M trained positions a row, Q query heads, G key-value heads (R = Q / G), D head size.
"""

import torch
from torch import Tensor

from .document_mask import QueryMask, flex, takes_runs


def attend_columns(
    query_BQMD: Tensor, keys: list[Tensor], values: list[Tensor], trained: QueryMask, window: int | None = None
) -> Tensor:
    """Attention of the training-time test. Returns [B, M, Q, D].

    keys[0] [B, G, T, D] are the true states', of which a position sees its document's up to itself; keys[j]
    [B, G, M, D], j >= 1, are earlier steps' own, of which each position sees only its own column. `window`: only the
    last so many keys of both, the query's own included.
    """
    # The query of step k stands k positions after its place in the text, so k fewer true states lie in its window.
    if window is not None:
        first = max(1, len(keys) - window)
        keys, values = [keys[0], *keys[first:]], [values[0], *values[first:]]
        window = max(0, window - len(keys) + 1) if first == 1 else 0

    # On a GPU no dense score matrix of packed rows, and in half precision none at all.
    if query_BQMD.is_cuda:
        query_BQMD, keys = query_BQMD.to(values[0].dtype), [key.to(values[0].dtype) for key in keys]
        if trained.runs is not None and takes_runs(query_BQMD, None):
            from .flash_columns import flash_columns

            return flash_columns(query_BQMD, keys, values, trained.runs, window)
        if trained.documents.packed:
            return _merged_columns(query_BQMD, keys, values, trained, window)
    return _dense_columns(query_BQMD, keys, values, trained, window)


def _dense_columns(
    query_BQMD: Tensor, keys: list[Tensor], values: list[Tensor], trained: QueryMask, window: int | None
) -> Tensor:
    """`attend_columns` with a score for each pair. `window`: true states that are seen; None: all."""
    # Scores against the true states, masked to the document up to the position; heads grouped by key-value head.
    groups, size = keys[0].shape[1], query_BQMD.shape[-1]
    query = query_BQMD.reshape(query_BQMD.shape[0], groups, -1, *query_BQMD.shape[2:]) * size**-0.5  # [B, G, R, M, D]
    hidden_BMT = ~trained.dense(window)
    scores = torch.einsum("bgrmd,bgtd->bgrmt", query, keys[0]).masked_fill(hidden_BMT[:, None, None], float("-inf"))

    # One score for each earlier step of the same column; then a softmax over both kinds together.
    own = [torch.einsum("bgrmd,bgmd->bgrm", query, key)[..., None] for key in keys[1:]]
    weights = torch.cat([scores, *own], dim=-1).softmax(-1, dtype=torch.float32).to(query.dtype)

    # Weighted sum of values, the own columns one by one.
    past = keys[0].shape[2]
    output = torch.einsum("bgrmt,bgtd->bgrmd", weights[..., :past], values[0])
    for j, value in enumerate(values[1:]):
        output = output + weights[..., past + j, None] * value[:, :, None]
    return output.flatten(1, 2).transpose(1, 2)


def _merged_columns(
    query_BQMD: Tensor, keys: list[Tensor], values: list[Tensor], trained: QueryMask, window: int | None
) -> Tensor:
    """`_dense_columns` without a score matrix of all pairs: FlexAttention over the true states, then a softmax merge
    with the own columns by log-sum-exp."""
    # True states by FlexAttention, with the log-sum-exp of their scores.
    query, dtype = query_BQMD, values[0].dtype
    if window == 0:  # the window holds own columns only
        past = torch.zeros_like(query)
        lse_BQM: Tensor | None = torch.full(query.shape[:-1], float("-inf"), device=query.device)
    else:
        past, lse_BQM = flex(query, keys[0], values[0], trained.blocks(window), with_lse=True)
    assert lse_BQM is not None
    if len(keys) == 1:
        return past.transpose(1, 2)

    # Scores of the own columns, in float32.
    batch, groups, _, size = keys[0].shape
    grouped = query.reshape(batch, groups, -1, *query.shape[2:]).float() * size**-0.5  # [B, G, R, M, D]
    own = [(grouped * key[:, :, None]).sum(-1).flatten(1, 2) for key in keys[1:]]

    # The log-sum-exp acts as one more score: its softmax weight is the true states' share of the whole.
    scores = torch.stack([lse_BQM, *own], dim=-1).softmax(-1)  # [B, Q, M, 1 + own]
    output = scores[..., :1] * past
    for j, value in enumerate(values[1:], start=1):
        output = output + scores[..., j, None] * value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return output.to(dtype).transpose(1, 2)
