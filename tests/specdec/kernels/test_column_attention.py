"""Attention of the training-time test on CUDA: values and gradients are those of one softmax over all keys."""

from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from draftforge.data.batches import collate
from draftforge.specdec.kernels import column_attention, flash_columns
from draftforge.specdec.kernels.column_attention import attend_columns
from draftforge.specdec.kernels.document_mask import QueryRuns
from draftforge.train.families.ttt_alignment import Alignment


class Talk(NamedTuple):
    prompt_ids: list[int]
    answer_ids: list[int]


TALKS = [Talk([1] * prompt, [2] * answer) for prompt, answer in ((1, 3), (2, 1), (7, 40), (5, 9), (3, 0), (30, 12))]


def attend_plainly(*given: Any) -> tuple[Tensor, ...]:
    """What torch's kernel returns, document by document."""
    query = given[0]
    output, lse = torch.zeros_like(query), torch.full(query.shape[1::-1], -torch.inf)
    for at, _, scores, _, values in documents(*given):
        lse[:, at] = scores.logsumexp(-1)
        output[at] = torch.einsum("hlp,phd->lhd", scores.softmax(-1), values)
    return output, lse


def gradients_plainly(grad: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """What torch's backward kernel returns: it reads output and log-sum-exp as they are given."""
    query, key, value, output, lse, _, runs, window = given
    grads = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    mean = (grad * output).sum(-1).T
    for at, to, scores, keys, values in documents(query, key, value, runs, window):
        share = (scores - lse[:, at, None]).exp()
        slope = share * (torch.einsum("lhd,phd->hlp", grad[at], values) - mean[:, at, None]) * query.shape[-1] ** -0.5
        grads[0][at] = torch.einsum("hlp,phd->lhd", slope, keys)
        # Sums over the heads that share a key.
        for into, weights, read in ((grads[1], slope, query), (grads[2], share, grad)):
            every = torch.einsum("hlp,lhd->phd", weights, read[at])
            heads = (key.shape[1], query.shape[1] // key.shape[1])
            into[to] = every.view(len(every), *heads, every.shape[2]).sum(2)
    return grads


def documents(query: Tensor, key: Tensor, value: Tensor, runs: QueryRuns, window: int | None) -> Any:
    """Of each document: its queries, its keys, masked scores [Q, l, p], keys and values of every head [p, Q, D]."""
    shared = query.shape[1] // key.shape[1]
    bounds = [starts.tolist() for starts in (runs.query_starts_D, runs.key_starts_D)]
    for (low, high), (first, last) in zip(pairwise(bounds[0]), pairwise(bounds[1])):
        keys, values = (one[first:last].repeat_interleave(shared, 1) for one in (key, value))
        scores = torch.einsum("lhd,phd->hlp", query[low:high], keys) * query.shape[-1] ** -0.5
        behind = torch.arange(last - first - high + low, last - first)[:, None] - torch.arange(last - first)
        hidden = (behind < 0) | (behind >= (last - first if window is None else window))
        yield slice(low, high), slice(first, last), scores.masked_fill(hidden, -torch.inf), keys, values


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "window"), [(1, None), (2, None), (4, None), (1, 6), (3, 6), (3, 3), (4, 2)])
@pytest.mark.parametrize("row_tokens", [0, 1000])
def test_runs_equal_one_softmax(
    steps: int, window: int | None, row_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's kernels are interpreted; torch's, which CUDA alone has, are stood in for."""
    trained = Alignment(collate(TALKS, row_tokens=row_tokens)).trained
    assert trained.runs is not None
    (batch, count), tokens = trained.at_BM.shape, trained.documents.document_BT.shape[1]
    assert batch == (1 if row_tokens else 2)
    torch.manual_seed(0)
    shapes = [(6, count)] + [(2, tokens), (2, tokens)] + [(2, count)] * (2 * (steps - 1))
    inputs = [torch.randn(batch, heads, places, 12, requires_grad=True) for heads, places in shapes]
    keys, values = [inputs[1], *inputs[3::2]], [inputs[2], *inputs[4::2]]
    meant = torch.zeros(batch * count, dtype=torch.bool)
    meant[trained.runs.queries_L] = True
    meant = meant.view(batch, count, 1, 1)
    plain = torch.where(meant, attend_columns(inputs[0], keys, values, trained, window), 0)

    monkeypatch.setattr(flash_columns, "_attend_true", on_true(attend_plainly))
    monkeypatch.setattr(flash_columns, "_true_gradients", on_true(gradients_plainly))
    monkeypatch.setattr(
        column_attention, "_dense_columns", lambda q, k, v, at, w: flash_columns.flash_columns(q, k, v, at.runs, w)
    )
    joined = attend_columns(inputs[0], keys, values, trained, window)
    torch.testing.assert_close(joined, plain, atol=1e-5, rtol=1e-5)
    weight = torch.randn_like(plain)
    for ours, theirs in zip(
        *(torch.autograd.grad((one * weight).sum(), inputs, materialize_grads=True) for one in (joined, plain)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def on_true(stand_in: Any) -> Any:
    """The stand-in where the window holds true states, else what the module itself does."""
    own: Any = flash_columns._attend_true if stand_in is attend_plainly else flash_columns._true_gradients
    return lambda *given: own(*given) if given[-1] == 0 else stand_in(*given)
