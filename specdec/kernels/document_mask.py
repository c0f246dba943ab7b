"""Packed rows: several documents in one, and which tokens see which.

Shapes: B rows, T tokens a row, M queries a row.

A token sees the tokens of its own document up to itself. Off CUDA that is a dense mask. On CUDA the mask is never made:
whole rows run torch's attention over runs of many lengths, chosen queries FlexAttention, which skips the blocks of
other documents.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

PADDING = -1
"""Document number of padding tokens. They see only each other, and their outputs are never used."""
_BLOCK = 128


class PackedSpans(NamedTuple):
    """Boundaries of documents and of the padding between them, through all rows laid end to end."""

    starts_D: Tensor
    """int32 [D + 1]: index of each span's first token in the flattened rows, then the end of the last."""
    longest: int
    """Tokens of the longest span."""


class QueryRuns(NamedTuple):
    """Chosen queries that stand side by side in their documents, and the keys up to the last of them, document by
    document: L queries and P keys in all. The last query of a document is the last of its keys."""

    queries_L: Tensor
    """int64: index of each query in the flattened [B, M]."""
    keys_P: Tensor
    """int64: index of each key in the flattened [B, T]."""
    query_starts_D: Tensor
    """int32 [D + 1]: index of each document's first query among the L, then L."""
    key_starts_D: Tensor
    """int32 [D + 1]: index of each document's first key among the P, then P."""
    most_queries: int
    """Queries of the document that has most of them."""
    most_keys: int
    """Keys of the document that has most of them."""


class Documents:
    """Document number and position of each token of a packed batch, with the masks made from them."""

    def __init__(
        self, document_BT: Tensor, positions_BT: Tensor, packed: bool = True, runs: "PackedSpans | None" = None
    ) -> None:
        """`document` numbers ascend along a row, padding comes last; `positions` count from 0 in each document.

        `packed` false: one document a row, so that plain causal attention is all that its tokens need. `runs`: spans
        of the documents and of the padding; None where the kernel for runs is not to be used.
        """
        self.document_BT, self.positions_BT, self.packed, self.runs = document_BT, positions_BT, packed, runs
        self._everyone: QueryMask | None = None

    @classmethod
    def rows(cls, ids_BT: Tensor) -> "Documents":
        """One document in each row, right-padded or not: causality hides the padding."""
        at_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
        return cls(torch.zeros_like(at_BT), at_BT, packed=False)

    def everyone(self) -> "QueryMask":
        """All tokens as queries. Its masks are made once for all layers."""
        if self._everyone is None:
            at_T = torch.arange(self.document_BT.shape[1], device=self.document_BT.device)
            self._everyone = QueryMask(self, at_T.expand_as(self.document_BT))
        return self._everyone


class QueryMask:
    """Attention mask of the tokens at chosen places of each row: `at_BM` [B, M] are indexes into the row.

    Dense and block masks are made when first asked for, one for each window. `runs`: the same places as runs of
    tokens, where they are such; places that no run holds mean nothing then.
    """

    def __init__(self, documents: Documents, at_BM: Tensor, runs: QueryRuns | None = None) -> None:
        self.documents, self.at_BM, self.runs = documents, at_BM, runs
        self.positions_BM = documents.positions_BT.gather(1, at_BM)
        self._mine_BM = documents.document_BT.gather(1, at_BM)
        self._dense: dict[int | None, Tensor] = {}
        self._blocks: dict[int | None, BlockMask] = {}

    def dense(self, window: int | None = None) -> Tensor:
        """Dense mask [B, M, T] bool; `window`: only the last so many tokens, the query's own included."""
        if window not in self._dense:
            # A query sees keys that are not later than itself and are of its own document.
            key_T = torch.arange(self.documents.document_BT.shape[1], device=self.at_BM.device)
            behind_BMT = self.at_BM[..., None] - key_T
            seen_BMT = (behind_BMT >= 0) & (self._mine_BM[..., None] == self.documents.document_BT[:, None])
            self._dense[window] = seen_BMT if window is None else seen_BMT & (behind_BMT < window)
        return self._dense[window]

    def blocks(self, window: int | None = None) -> BlockMask:
        """Block mask of FlexAttention: pairs of blocks are skipped by the documents and positions that they span."""
        if window not in self._blocks:
            self._blocks[window] = self._make_blocks(window)
        return self._blocks[window]

    def _make_blocks(self, window: int | None) -> BlockMask:
        # What each block of queries and of keys spans: documents, and positions in the row.
        documents_BT = self.documents.document_BT
        queries, keys = self.at_BM.shape[1], documents_BT.shape[1]
        key_BT = torch.arange(keys, device=self.at_BM.device).expand_as(documents_BT)
        query_low, query_high = _spans(self._mine_BM)
        key_low, key_high = _spans(documents_BT)
        at_low, at_high = _spans(self.at_BM)
        first, last = _spans(key_BT)
        # A pair of blocks is computed where documents overlap, some key is not later, and some is inside the window.
        wanted = (key_low[:, None] <= query_high[..., None]) & (key_high[:, None] >= query_low[..., None])
        wanted &= first[:, None] <= at_high[..., None]
        if window is not None:
            wanted &= last[:, None] > at_low[..., None] - window
        # FlexAttention reads, for each query block, how many key blocks to visit, and their indexes in order.
        counts = wanted.sum(-1, dtype=torch.int32)[:, None]
        order = torch.argsort(wanted.int(), dim=-1, descending=True, stable=True).to(torch.int32)[:, None]
        return BlockMask.from_kv_blocks(
            counts, order.contiguous(), BLOCK_SIZE=_BLOCK, mask_mod=self._mask(window), seq_lengths=(queries, keys)
        )

    def _mask(self, window: int | None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        mine_BM, at_BM, documents_BT = self._mine_BM, self.at_BM, self.documents.document_BT
        # The width is a tensor: FlexAttention would compile anew for each number.
        width = None if window is None else torch.tensor(window, device=at_BM.device)

        # FlexAttention compiles this predicate and calls it inside the blocks that are computed.
        def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            at = at_BM[b, query]
            inside = (key <= at) & (mine_BM[b, query] == documents_BT[b, key])
            return inside if width is None else inside & (at - key < width)

        return seen


def _spans(values_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Least and largest value in each block, [B, blocks]; the last block is filled up with its row's last value."""
    batch, length = values_BT.shape
    # Repeating the last value changes neither the least nor the largest of the block.
    lacking = -length % _BLOCK
    if lacking:
        values_BT = torch.cat([values_BT, values_BT[:, -1:].expand(-1, lacking)], dim=1)
    blocks = values_BT.reshape(batch, -1, _BLOCK)
    return blocks.amin(-1), blocks.amax(-1)


_HALVES = (torch.bfloat16, torch.float16)
_WIDEST = 256  # head that the kernel for runs takes


def takes_runs(query: Tensor, softcap: float | None) -> bool:
    """Whether `attend_runs` takes such queries: on CUDA, in half precision, without soft-cap, heads not too large."""
    return query.is_cuda and softcap is None and query.dtype in _HALVES and query.shape[-1] <= _WIDEST


def attend_runs(
    query: Tensor, key: Tensor, value: Tensor, runs: PackedSpans, scaling: float | None, window: int | None
) -> Tensor:
    """Variable-length causal attention inside each run: query [B, H, T, D] over [B, G, T, D] -> [B, H, T, D].

    `window`: tokens that a query sees, its own included; None: the whole run before it.
    """
    from torch.nn.attention.varlen import varlen_attn

    # varlen_attn counts the keys before the query, so its left window is one less.
    options: dict[str, Any] = {"scale": scaling, "window_size": (-1 if window is None else window - 1, 0)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # before, it was always on
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    # Rows are laid end to end [B * T, heads, D], with run boundaries in place of a mask.
    query_NHD, key_NGD, value_NGD = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    starts_D, longest = runs
    found = varlen_attn(query_NHD, key_NGD, value_NGD, starts_D, starts_D, longest, longest, **options)
    # Some versions of torch return the normaliser too.
    output: Tensor = found if isinstance(found, Tensor) else found[0]
    return output.view(query.shape[0], query.shape[2], *output.shape[1:]).transpose(1, 2)


_compiled: dict[str, Any] = {}


def flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: BlockMask,
    scaling: float | None = None,
    softcap: float | None = None,
    with_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """FlexAttention of query [B, H, M, D] over [B, G, T, D] -> [B, H, M, D].

    `with_lse`: also returns the log of each query's softmax normaliser, [B, H, M]; else None.
    """
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    # Compiled once for all shapes; off CUDA the eager form runs.
    if "flex" not in _compiled:
        _compiled["flex"] = torch.compile(flex_attention, dynamic=True) if query.is_cuda else flex_attention
    # Soft-cap of the scores, as Gemma 2 has it.
    capped: Callable[..., Tensor] | None = None
    if softcap is not None:

        def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return softcap * torch.tanh(score / softcap)

    found = _compiled["flex"](
        query,
        key,
        value,
        capped,
        blocks,
        scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True) if with_lse else None,
    )
    return (found[0], found[1].lse) if with_lse else (found, None)
