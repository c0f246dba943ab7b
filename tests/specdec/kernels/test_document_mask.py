"""Packed rows: a token sees its own document up to itself, on every path that computes it."""

import pytest
import torch
from families import SUPPORTED, tiny
from torch import Tensor

from draftforge.specdec.kernels import column_attention
from draftforge.specdec.kernels.attention import attention_within
from draftforge.specdec.kernels.column_attention import attend_columns
from draftforge.specdec.kernels.document_mask import PADDING, Documents, QueryMask, flex
from draftforge.specdec.models import CausalModel

LENGTHS = [[70, 1, 150, 40], [200, 33]]


def packed(lengths: list[list[int]] = LENGTHS, padding: int = 5) -> Documents:
    tokens = max(map(sum, lengths)) + padding
    document_BT = torch.full((len(lengths), tokens), PADDING)
    position_BT = torch.zeros(len(lengths), tokens, dtype=torch.int64)
    for row, parts in enumerate(lengths):
        start = 0
        for number, length in enumerate(parts):
            document_BT[row, start : start + length] = number
            position_BT[row, start : start + length] = torch.arange(length)
            start += length
    return Documents(document_BT, position_BT)


def some_queries(documents: Documents, count: int = 131) -> QueryMask:
    tokens = documents.document_BT.shape[1]
    torch.manual_seed(3)
    at_BM = torch.stack([torch.randperm(tokens)[:count].sort().values for _ in documents.document_BT])
    return QueryMask(documents, at_BM)


def test_what_is_seen_by_enumeration() -> None:
    documents = packed([[3, 2], [4]], padding=1)
    sight = documents.everyone()
    for window in (None, 2):
        seen = sight.dense(window)
        for row, document in enumerate(documents.document_BT.tolist()):
            for query in range(6):
                for key in range(6):
                    near = key <= query and (window is None or query - key < window)
                    assert bool(seen[row, query, key]) == (near and document[query] == document[key])


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("chosen", [False, True])
def test_blocks_hold_every_pair_that_is_seen(chosen: bool, window: int | None) -> None:
    documents = packed()
    sight = some_queries(documents) if chosen else documents.everyone()
    blocks = sight.blocks(window)
    dense = sight.dense(window)
    rows, queries, keys = dense.shape
    kept = torch.zeros(rows, -(-queries // 128), -(-keys // 128), dtype=torch.bool)
    for row in range(rows):
        for block in range(kept.shape[1]):
            count = int(blocks.kv_num_blocks[row, 0, block])
            kept[row, block, blocks.kv_indices[row, 0, block, :count].long()] = True
    wide = kept.repeat_interleave(128, 1)[:, :queries].repeat_interleave(128, 2)[..., :keys]
    assert not (dense & ~wide).any()
    assert not kept.all()  # and others are left out


@pytest.mark.slow
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (30, None), (None, 5.0)])
def test_flex_attention_equals_the_dense_mask(window: int | None, softcap: float | None) -> None:
    """Uncompiled here: the same mask, blocks and arguments that CUDA compiles."""
    documents = packed()
    sight = some_queries(documents)
    batch, tokens = documents.document_BT.shape
    query = torch.randn(batch, 6, sight.at_BM.shape[1], 16)
    key, value = torch.randn(2, batch, 2, tokens, 16)
    plain = attention_within(query, key, value, sight, None, softcap, window)
    flexed, _ = flex(query, key, value, sight.blocks(window), None, softcap)
    torch.testing.assert_close(flexed, plain, atol=1e-5, rtol=1e-5)


def with_normaliser(
    query: Tensor, key: Tensor, value: Tensor, sight: QueryMask, window: int | None = None
) -> tuple[Tensor, Tensor]:
    repeats = query.shape[1] // key.shape[1]
    scores, seen = (
        query @ key.repeat_interleave(repeats, 1).transpose(-1, -2) * query.shape[-1] ** -0.5,
        sight.dense(window),
    )
    lse = scores.masked_fill(~seen[:, None], float("-inf")).logsumexp(-1)
    weights = torch.where(seen[:, None], (scores - lse[..., None]).exp(), 0)
    return weights @ value.repeat_interleave(repeats, 1), lse


@pytest.mark.parametrize(("steps", "window"), [(1, None), (3, None), (1, 30), (3, 30), (3, 3), (4, 2)])
def test_joined_columns_equal_one_softmax(steps: int, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training-time test: values and gradients. FlexAttention has no gradient on a CPU, so a plain one stands in."""
    documents = packed()
    trained = some_queries(documents)
    batch, tokens = documents.document_BT.shape
    torch.manual_seed(0)
    inputs = [torch.randn(batch, 6, trained.at_BM.shape[1], 16)]
    inputs += [torch.randn(batch, 2, tokens, 16) for _ in range(2)]
    inputs += [torch.randn(batch, 2, trained.at_BM.shape[1], 16) for _ in range(2 * (steps - 1))]
    for tensor in inputs:
        tensor.requires_grad_()
    keys, values = [inputs[1], *inputs[3::2]], [inputs[2], *inputs[4::2]]
    true_window = None if window is None else window - steps + 1
    plain = attend_columns(inputs[0], keys, values, trained, window)
    with torch.no_grad():
        query, key, value = (tensor.detach() for tensor in inputs[:3])
        _, lse = flex(query, key, value, trained.blocks(), with_lse=True)
        assert lse is not None
        torch.testing.assert_close(lse, with_normaliser(query, key, value, trained)[1], atol=1e-5, rtol=1e-5)
    monkeypatch.setattr(
        column_attention, "flex", lambda q, k, v, blocks, with_lse: with_normaliser(q, k, v, trained, true_window)
    )
    monkeypatch.setattr(column_attention, "_dense_columns", column_attention._merged_columns)
    joined = attend_columns(inputs[0], keys, values, trained, window)
    torch.testing.assert_close(joined, plain, atol=1e-5, rtol=1e-5)
    weight = torch.randn_like(plain)
    for ours, theirs in zip(
        *(torch.autograd.grad((one * weight).sum(), inputs, materialize_grads=True) for one in (joined, plain)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", SUPPORTED)
def test_packed_documents_are_as_they_are_alone(name: str) -> None:
    """Every supported family: rotary positions and windows count within the document."""
    model = CausalModel(tiny(*SUPPORTED[name]))
    documents = packed([[7, 3, 12], [20]], padding=2)
    ids_BT = torch.randint(model.vocab_size, documents.document_BT.shape)
    captured = (1, model.num_layers)
    with torch.no_grad():
        together = model.states(ids_BT, aux_layers=captured, documents=documents)
        for row, parts in enumerate([[7, 3, 12], [20]]):
            start = 0
            for length in parts:
                at = slice(start, start + length)
                alone = model.states(ids_BT[row : row + 1, at], aux_layers=captured)
                torch.testing.assert_close(together.hidden_BTH[row, at], alone.hidden_BTH[0], atol=2e-4, rtol=2e-4)
                assert together.aux_BTA is not None and alone.aux_BTA is not None
                torch.testing.assert_close(together.aux_BTA[row, at], alone.aux_BTA[0], atol=2e-4, rtol=2e-4)
                start += length
